"""Queries of handlers on a real Spark. One session serves the module."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import pytest_asyncio
from support.spark_classes import spark_cache

from mldserver.engine_jobs import FunctionView, WindowJob
from mldserver.errors import QueryFailed, QueryTooLarge
from mldserver.handler.queries import QueryResult, Rows, RowStream, batches_of, query_of
from mldserver.spark.client import SparkEngine, make_engine
from mldserver.windows import Window, time_window_id

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

START = datetime(2013, 1, 1, 10, tzinfo=UTC)
MB = 1 << 20
SLOW = "SELECT sum(id) FROM range(0, 10000000, 1, 1000000)"
"""A million tasks: Spark ends a cancelled query between two tasks, or when a task reads its next rows."""


class World:
    """An engine, and published windows of a minute each."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.engine = make_engine(
            "",
            "n BIGINT",
            conf={"spark.ui.enabled": "true", "spark.ui.port": "0", "spark.ui.retainedJobs": "1000"},
            work_dir=root / "work",
            cache_dir=spark_cache(root),
            quick=True,
            archive_after=None,
        )

    def publish(self, number: int, **columns: Any) -> str:
        start = START + timedelta(minutes=number)
        folder = self.root / "out" / f"window={time_window_id(round(start.timestamp() * 1000))}"
        folder.mkdir(parents=True)
        rows = {
            "n": [number],
            "window_start": [start],
            "window_end": [start + timedelta(minutes=1)],
            **columns,
        }
        pq.write_table(pa.table(rows), folder / "part-0.parquet")
        return str(folder)

    def view(self, *paths: str) -> FunctionView:
        return FunctionView("flights", paths, ("window_start", "window_end"), 60_000)

    async def ask(
        self, text: str, *views: FunctionView, max_rows: int | None = 1000, max_bytes: int = MB, **values: Any
    ) -> Rows:
        query = query_of(text, values, seconds=60, max_rows=max_rows)
        result = await self.engine.query(query, views, max_bytes)
        return Rows(pa.Table.from_batches(list(batches_of(result))))

    async def running(self) -> list[str]:
        """Return the names of the jobs that Spark runs."""
        ui = self.engine.facts().ui

        def read(path: str) -> Any:
            with urlopen(f"{ui}/api/v1/applications{path}") as page:
                return json.load(page)

        (application,) = await asyncio.to_thread(read, "")
        jobs = await asyncio.to_thread(read, f"/{application['id']}/jobs?status=running")
        return [job["name"] for job in jobs]


@asynccontextmanager
async def running(engine: SparkEngine) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(engine.run())
        await engine.ready()
        yield
        await engine.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    world = World(tmp_path_factory.mktemp("queries"))
    async with running(world.engine):
        yield world


async def test_values_are_values_whatever_they_hold(world: World) -> None:
    at = datetime(2024, 2, 29, 12, tzinfo=UTC)
    (row,) = await world.ask(
        "SELECT :said AS said, :at AS at, :price AS price, :none IS NULL AS none, :raw AS raw, :yes AS yes, :n AS n",
        said="'; DROP TABLE flights; --",
        at=at,
        price=Decimal("1.50"),
        none=None,
        raw=b"\x00\xff",
        yes=True,
        n=2**40,
    )
    assert row == ("'; DROP TABLE flights; --", at, Decimal("1.50"), True, b"\x00\xff", True, 2**40)


async def test_a_table_is_named_by_a_value_through_identifier_alone(world: World) -> None:
    view = world.view(world.publish(1000))
    assert (await world.ask("SELECT n FROM IDENTIFIER(:t)", view, t="flights")).one().n == 1000
    with pytest.raises(QueryFailed, match="PARSE_SYNTAX_ERROR"):
        await world.ask("SELECT n FROM :t", view, t="flights")


async def test_rows_of_many_partitions_come_in_the_order_of_the_query(world: World) -> None:
    rows = await world.ask("SELECT id FROM range(0, 5000, 1, 7) ORDER BY id DESC", max_rows=5000)
    assert [row.id for row in rows] == list(range(4999, -1, -1))


async def test_a_result_without_rows_has_its_columns(world: World) -> None:
    rows = await world.ask("SELECT id, 'x' AS name FROM range(10) WHERE id > 10")
    assert (len(rows), rows.arrow().column_names, rows.one()) == (0, ["id", "name"], None)


@pytest.mark.parametrize(
    ("limits", "what"),
    [({"max_rows": 99}, "more than 99 rows"), ({"max_bytes": 1000}, "more than 1,000 bytes")],
)
async def test_a_result_beyond_a_limit_is_given_up(world: World, limits: dict[str, int], what: str) -> None:
    with pytest.raises(QueryTooLarge, match=what):
        await world.ask("SELECT id FROM range(100)", **limits)


async def test_the_error_of_spark_is_told_in_its_first_sentences(world: World) -> None:
    with pytest.raises(QueryFailed, match="TABLE_OR_VIEW_NOT_FOUND") as caught:
        await world.ask("SELECT * FROM nowhere")
    assert "\tat " not in str(caught.value)


async def test_a_condition_on_the_start_of_a_window_leaves_other_files_unread(world: World) -> None:
    folders = [world.publish(number) for number in range(50)]
    for folder in folders[:40]:
        (Path(folder) / "part-0.parquet").write_bytes(b"PAR1 this is no such file PAR1")
    late = START + timedelta(minutes=40)
    text = "SELECT n, window_start, window_end FROM flights WHERE window_start >= :late ORDER BY n"
    rows = list(await world.ask(text, world.view(*folders), late=late))
    assert [row.n for row in rows] == list(range(40, 50))
    assert rows[0][1:] == (late, late + timedelta(minutes=1))


async def test_windows_of_earlier_code_lack_a_column_that_was_added(world: World) -> None:
    view = world.view(world.publish(2000), world.publish(2001, added=["new"]))
    rows = await world.ask("SELECT n, added FROM flights ORDER BY n", view)
    assert [tuple(row) for row in rows] == [(2000, None), (2001, "new")]


async def test_a_view_of_a_function_without_windows_yet_is_empty_and_has_its_columns(world: World) -> None:
    view = FunctionView("flights", (), ("window_start", "window_end"), 60_000, "n BIGINT, carrier STRING")
    rows = await world.ask("SELECT * FROM flights WHERE window_end > :now", view, now=START)
    assert (len(rows), rows.arrow().column_names) == (0, ["n", "carrier", "window_start", "window_end"])


async def test_a_view_shows_the_windows_that_the_latest_query_was_given(world: World) -> None:
    folders = [world.publish(3000 + number) for number in range(3)]
    for count in (1, 3, 2):
        rows = await world.ask("SELECT count(*) AS n FROM flights", world.view(*folders[:count]))
        assert rows.one().n == count


def open_results() -> list[str]:
    """Return the results that this process has open, or mapped."""
    links = Path("/proc/self/fd").iterdir()
    files = [str(link.readlink()) for link in links if link.is_symlink()]
    maps = Path("/proc/self/maps").read_text().splitlines()
    return [each for each in (*files, *maps) if "mldserver-query" in each or "/spark-" in each]


async def test_a_stream_of_any_number_of_rows_is_read_batch_by_batch_and_leaves_nothing(world: World) -> None:
    query = query_of("SELECT id, repeat('x', 100) AS text FROM range(0, 300000, 1, 4)", {}, seconds=60)
    result = await world.engine.query(query, (), 100 * MB)
    assert os.fstat(result.file).st_size > 30 * MB
    assert os.fstat(result.file).st_nlink == 0
    stream = RowStream(batches_of(result))
    seen = 0
    for row in stream:
        seen += 1
        if row.id == 150_000:
            break
    assert seen == 150_001
    assert open_results() == []
    assert list(stream) == []


async def test_a_stream_beyond_its_share_of_the_disk_is_given_up(world: World) -> None:
    with pytest.raises(QueryTooLarge, match="more than 5,000,000 bytes"):
        await world.ask(
            "SELECT id, uuid() AS text FROM range(0, 10000000, 1, 50)", max_rows=None, max_bytes=5_000_000
        )
    assert open_results() == []
    async with asyncio.timeout(60):
        while await world.running():  # noqa: ASYNC110  # no event tells it
            await asyncio.sleep(0.05)


async def test_a_cancelled_query_leaves_no_job_in_spark(world: World) -> None:
    slow = query_of(SLOW, {}, seconds=60, max_rows=1)
    async with asyncio.timeout(60):
        task = asyncio.create_task(world.engine.query(slow, (), MB))
        while not await world.running():  # noqa: ASYNC110  # see above
            await asyncio.sleep(0.05)
        task.cancel()
        assert isinstance((await asyncio.gather(task, return_exceptions=True))[0], asyncio.CancelledError)
        while await world.running():  # noqa: ASYNC110  # no event tells it
            await asyncio.sleep(0.05)
    assert (await world.ask("SELECT 1 AS one")).one().one == 1


async def test_a_window_is_computed_while_as_many_queries_run_as_may_and_nobody_reads_their_results(
    world: World,
) -> None:
    results: list[QueryResult] = []
    stream = query_of("SELECT id FROM range(0, 1000000, 1, 8)", {}, seconds=60)
    results += await asyncio.gather(*(world.engine.query(stream, (), 100 * MB) for _ in range(2)))
    slow = query_of(SLOW, {}, seconds=60, max_rows=1)
    tasks = [asyncio.create_task(world.engine.query(slow, (), MB)) for _ in range(4)]
    columns = {
        "n": pa.array([1, 2], pa.int64()),
        "_time": pa.array([0, 0], pa.int64()),
        "_clock": pa.array([0, 1], pa.int64()),
        "_shard": pa.array(["s"] * 2),
        "_sequence": pa.array(["1", "2"]),
        "_sub_sequence": pa.array([0, 0], pa.int64()),
        "_arrival": pa.array([START] * 2, pa.timestamp("ms", tz="UTC")),
    }
    segment = world.root / "segment.parquet"
    pq.write_table(pa.table(columns), segment)
    window = Window("w", START, START + timedelta(hours=1), pipeline="test")
    job = WindowJob(window, 1, (str(segment),), str(world.root / "staging"), 2, segment.stat().st_size)
    async with asyncio.timeout(120):
        assert (await world.engine.compute(job)).rows == 2
    for task in tasks:
        assert not task.done()
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert sum(batch.num_rows for result in results for batch in batches_of(result)) == 2_000_000
