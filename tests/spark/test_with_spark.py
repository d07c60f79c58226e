"""The engine on a real Spark. One session serves the module; each start costs many seconds."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import pytest_asyncio
from support.spark_classes import spark_cache

from mldserver.engine_jobs import PublishJob, WindowJob
from mldserver.errors import DriverLost, WindowFailed
from mldserver.sinks.sink import SinkSpec
from mldserver.spark.client import SparkEngine, make_engine
from mldserver.windows import Window

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

HERE = Path(__file__).parent
SCHEMA = "carrier STRING, delay DOUBLE"
START = datetime(2013, 1, 1, 10, tzinfo=UTC)
ROWS = 200
SECRET = "hush-hush"


def processes() -> dict[int, tuple[int, str]]:
    """Every living process: pid -> (session, command line)."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # it ended while we looked
        if fields[0] != "Z":
            found[int(entry.name)] = (int(fields[3]), command)
    return found


async def until_gone(session: int) -> None:
    async with asyncio.timeout(800):
        while any(owner == session for owner, _ in processes().values()):  # noqa: ASYNC110  # no event tells it
            await asyncio.sleep(0.05)


class World:
    """Segments, staging directories and an engine."""

    def __init__(self, root: Path, **settings: Any) -> None:
        self.root = root
        self.segments = tuple(self._segment(number) for number in range(3))
        self.settings: dict[str, Any] = {
            "conf": {
                "spark.sql.shuffle.partitions": "3",
                "spark.hadoop.fs.s3a.secret.key": SECRET,
                "spark.ui.enabled": "true",
                "spark.ui.port": "0",
                "spark.eventLog.enabled": "true",
                "spark.eventLog.dir": str(root),
                "spark.eventLog.rolling.enabled": "false",
                "spark.eventLog.compress": "false",
            },
            "app_name": "mldserver: windows",
            "work_dir": root / "work [1]",
            "cache_dir": spark_cache(root),
            "python_path": (str(HERE), str(HERE.parent / "sinks" / "packages")),
            "sink": SinkSpec("toy", str(root / "toys"), "", {"indent": "1"}),
            "side_sinks": {"late_rows": SinkSpec("delta", str(root / "late"))},
            "quick": True,
            "archive_after": None,
            **settings,
        }
        self.engine = self.make()

    def make(self) -> SparkEngine:
        return make_engine("window_handlers:Windows", SCHEMA, **self.settings)

    def _segment(self, number: int) -> str:
        path = self.root / "segments [1]" / f"{number}.parquet"
        path.parent.mkdir(exist_ok=True)
        ids = range(number * ROWS, (number + 1) * ROWS)
        columns = {
            "carrier": pa.array(["AA" if i % 4 else "UA" for i in ids]),
            "delay": pa.array([float(i) for i in ids]),
            "_time": pa.array(list(ids), pa.int64()),
            "_clock": pa.array(list(ids), pa.int64()),
            "_shard": pa.array(["shardId-000000000000"] * ROWS),
            "_sequence": pa.array([str(2**80 + i) for i in ids]),
            "_sub_sequence": pa.array([0] * ROWS, pa.int64()),
            "_arrival": pa.array([START + timedelta(seconds=i) for i in ids], pa.timestamp("ms", tz="UTC")),
        }
        pq.write_table(pa.table(columns), path)
        return str(path)

    def job(self, name: str, attempt: int = 1) -> WindowJob:
        size = sum(Path(segment).stat().st_size for segment in self.segments)
        window = Window(name, START, START + timedelta(hours=1), pipeline="test")
        return WindowJob(window, attempt, self.segments, str(self.staging(name, attempt)), 3 * ROWS, size)

    def staging(self, name: str, attempt: int = 1) -> Path:
        return self.root / "staging" / name / str(attempt)

    def input(self) -> pa.Table:
        return pa.concat_tables([pq.read_table(segment) for segment in self.segments]).sort_by("_clock")

    def output(self, name: str, files: tuple[str, ...]) -> pa.Table:
        return pa.concat_tables([pq.ParquetFile(self.staging(name) / file).read() for file in files])


@asynccontextmanager
async def living(world: World) -> AsyncIterator[World]:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(world.engine.run())
        try:
            async with asyncio.timeout(800):
                await world.engine.ready()
            yield world
        finally:
            await world.engine.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    hosts = tmp_path_factory.mktemp("conf")
    (hosts / "spark-defaults.conf").write_text(
        "spark.of.the.host  yes\nspark.sql.shuffle.partitions 7\nspark.sql.session.timeZone Europe/Berlin\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARK_CONF_DIR", str(hosts))
        async with living(World(tmp_path_factory.mktemp("spark"))) as it:
            # Drivers that come later may start from archived classes, which go with no folder of settings.
            patch.undo()
            yield it
    # In order, so nothing of the driver is left: no process of its session, no scratch space.
    assert not list(it.settings["work_dir"].iterdir())


async def test_rows_as_they_are_come_out_with_every_column_and_value(world: World) -> None:
    result = await world.engine.compute(world.job("identity"))
    output = world.output("identity", result.files).sort_by("_clock")
    bounds = {"window_start": START, "window_end": START + timedelta(hours=1)}
    # The world has a table, whose rows name their window and revision.
    added = bounds | {"_window": "identity", "_revision": 1}
    assert output.column_names == [*world.input().column_names, *added]
    assert output.to_pylist() == [row | added for row in world.input().to_pylist()]
    assert result.rows == 3 * ROWS


async def test_a_small_window_is_one_file_and_nothing_else(world: World) -> None:
    result = await world.engine.compute(world.job("grouped"))
    assert [path.name for path in world.staging("grouped").iterdir()] == list(result.files)
    assert result.work.jobs
    assert result.work.stages
    assert 0 <= sum(seconds for _, seconds in result.work.stages) < 60
    assert world.engine.facts().application is not None
    assert len(result.files) == 1


async def test_a_group_by_equals_what_is_computed_without_spark(world: World) -> None:
    result = await world.engine.compute(world.job("grouped", attempt=2))
    table = pq.ParquetFile(world.staging("grouped", 2) / result.files[0]).read()
    rows = world.input().to_pylist()
    flights = Counter(row["carrier"] for row in rows)
    expected = {
        carrier: (count, sum(row["delay"] for row in rows if row["carrier"] == carrier) / count, START)
        for carrier, count in flights.items()
    }
    got = {row["carrier"]: (row["flights"], row["mean_delay"], row["start"]) for row in table.to_pylist()}
    assert got == expected


async def test_the_driver_publishes_what_it_computed_into_a_package_s_sink_and_says_why_it_cannot(
    world: World,
) -> None:
    job = world.job("grouped", attempt=3)
    done = await world.engine.compute(job)
    assert done.rows == 2
    await world.engine.publish(PublishJob(job.window, job.staging, done.files, done.rows))
    assert json.loads((world.root / "toys" / "grouped.json").read_text()) == ["AA", "UA"]
    gone = PublishJob(Window("gone", None, None, 1, "test"), job.staging, ("gone.parquet",), 1)
    with pytest.raises(WindowFailed, match=r"PATH_NOT_FOUND.*gone\.parquet"):
        await world.engine.publish(gone)


async def test_late_rows_go_into_a_table_of_their_own_once(world: World) -> None:
    from deltalake import DeltaTable

    rows = world.input()
    stamps = {
        "_window": pa.repeat("late-w-1", len(rows)),
        "_revision": pa.repeat(pa.scalar(1, pa.int32()), len(rows)),
    }
    folder = world.root / "late staged [1]"
    folder.mkdir()
    pq.write_table(
        pa.table({**{name: rows[name] for name in rows.column_names}, **stamps}), folder / "late.parquet"
    )
    window = Window("late-w-1", START, START + timedelta(hours=1), 1, "test")
    for _ in range(2):
        job = PublishJob(window, str(folder), ("late.parquet",), len(rows), content="late_rows")
        await world.engine.publish(job)
    table = DeltaTable(str(world.root / "late")).to_pyarrow_table()
    assert table.sort_by("_clock").select(rows.column_names).to_pylist() == rows.to_pylist()
    assert set(table["_day"].to_pylist()) == {START.date()}
    assert not (world.root / "toys" / "late-w-1.json").exists()


async def test_functions_and_columns_at_module_level_are_the_sessions(world: World) -> None:
    result = await world.engine.compute(world.job("functions"))
    output = world.output("functions", result.files)
    late = [delay for delay in world.input()["delay"].to_pylist() if delay > 15]
    assert sorted(output["delay"].to_pylist()) == late
    assert sorted(output["twice"].to_pylist()) == [2 * delay for delay in late]
    assert sorted(output["half"].to_pylist()) == [delay / 2 for delay in late]


async def test_an_async_hook_and_one_instance_for_all_windows(world: World) -> None:
    result = await world.engine.compute(world.job("awaited"))
    first = world.output("awaited", result.files).to_pylist()[0]["calls"]
    again = await world.engine.compute(world.job("awaited", attempt=2))
    table = pq.ParquetFile(world.staging("awaited", 2) / again.files[0]).read()
    assert table.to_pylist()[0]["calls"] == first + 1


async def test_the_users_settings_win_and_the_defaults_hold(world: World) -> None:
    """The host's own defaults count where neither names a property; a secret is in no command line, UI or event log.

    The driver's process is named after the application too.
    """
    result = await world.engine.compute(world.job("settings"))
    told = {row["name"]: row["value"] for row in world.output("settings", result.files).to_pylist()}
    ui = told.pop("ui")
    assert told == {
        "sql.shuffle.partitions": "3",
        "sql.session.timeZone": "UTC",
        "app.name": "mldserver: windows",
        "of.the.host": "yes",
        "secret": SECRET,
    }
    page = await asyncio.to_thread(lambda: urlopen(f"{ui}/api/v1/applications").read())
    (application,) = json.loads(page)
    assert application["name"] == "mldserver: windows"
    (event_log,) = world.root.glob(f"{application['id']}*")
    shown = event_log.read_text() + "".join(command for _, command in processes().values())
    assert all(word in shown for word in ("mldserver: windows", "spark.eventLog.dir", "--properties-file"))
    assert SECRET not in shown
    assert "mldserver: windows Spark driver" in shown


@pytest.mark.parametrize(
    ("name", "said", "traced"),
    [
        ("broken", "LookupError: no table for broken", "in broken"),
        ("unknown_column", "with name `carier` cannot be resolved", "in unknown_column"),
        ("broken_function", "ZeroDivisionError: division by zero", "in one_over_zero"),
        ("number", "on_window returned an int, not a Spark DataFrame", ""),
        ("nothing", "on_window returned nothing, not a Spark DataFrame", ""),
        ("leaves", "SystemExit: 3", "in leaves"),
    ],
)
async def test_the_users_errors_come_back_readable(world: World, name: str, said: str, traced: str) -> None:
    with pytest.raises(WindowFailed) as caught:
        await world.engine.compute(world.job(name))
    assert said in caught.value.what
    told = caught.value.where["traceback"]
    assert traced in told
    assert not {"py4j", "\tat "} & set(told.split("/"))
    assert len(told.splitlines()) < 30


async def test_an_attempt_never_writes_into_a_directory_that_is_there(world: World) -> None:
    world.staging("identity", 7).mkdir(parents=True)
    with pytest.raises(WindowFailed, match="already exists"):
        await world.engine.compute(world.job("identity", attempt=7))


async def test_a_cancelled_job_ends_and_the_session_goes_on(world: World) -> None:
    life = world.engine.driver.life
    call = asyncio.ensure_future(world.engine.compute(world.job("endless")))
    await asyncio.wait({call}, timeout=2)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert (await world.engine.compute(world.job("identity", attempt=8))).rows == 3 * ROWS
    assert world.engine.driver.life is life


def java_of(driver: int) -> int:
    """Return the pid of a driver's JVM."""
    (jvm,) = (
        pid
        for pid, (session, command) in processes().items()
        if session == driver and "SparkSubmit" in command
    )
    return jvm


@pytest.mark.long
async def test_a_hook_that_sleeps_past_the_deadline_costs_the_driver_its_life_and_nothing_else(
    world: World, logged: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    life = world.engine.driver.life
    assert life is not None
    driver = life.child.pid
    # The one session of the module: a driver of its own would cost this test another start.
    with monkeypatch.context() as short:
        short.setattr(world.engine, "job_deadline", 5.0)
        short.setattr(life, "_cancel_grace", 0.2)
        with pytest.raises(WindowFailed, match=r"longer than its deadline of 5 seconds") as caught:
            await world.engine.compute(world.job("sleeping"))
        assert caught.value.where["window"] == "sleeping"
        await until_gone(driver)
    async with asyncio.timeout(800):
        while world.engine.driver.life is life:  # noqa: ASYNC110  # no event tells it
            await asyncio.sleep(0.05)
        assert (await world.engine.compute(world.job("identity", attempt=10))).rows == 3 * ROWS
    after = world.engine.driver.life
    assert after is not None
    assert after.child.pid != driver
    told = [event for event in logged if event["event"] in {"spark.lost", "spark.ready"}]
    assert [event["event"] for event in told] == ["spark.lost", "spark.ready"]
    assert told[0]["reason"] == "A cancelled job did not end within 0.2 seconds."


async def test_a_session_that_a_hook_stops_costs_the_driver_its_life_and_nothing_else(
    world: World, logged: list[dict[str, Any]]
) -> None:
    life = world.engine.driver.life
    assert life is not None
    with pytest.raises(WindowFailed) as caught:
        await world.engine.compute(world.job("stopping"))
    assert caught.value.where["window"] == "stopping"
    async with asyncio.timeout(800):
        while world.engine.driver.life is life:  # noqa: ASYNC110  # no event tells it
            await asyncio.sleep(0.05)
        assert (await world.engine.compute(world.job("identity", attempt=11))).rows == 3 * ROWS
    (lost,) = [event for event in logged if event["event"] == "spark.lost"]
    assert lost["reason"].endswith("The Spark session is stopped, and no job can run on it any more.")


async def test_a_killed_jvm_fails_its_job_and_costs_its_driver_its_life(
    world: World, logged: list[dict[str, Any]], long: bool
) -> None:
    life = world.engine.driver.life
    assert life is not None
    driver = life.child.pid
    call = asyncio.ensure_future(world.engine.compute(world.job("endless", attempt=2)))
    await asyncio.wait({call}, timeout=1)
    os.kill(java_of(driver), signal.SIGKILL)
    with pytest.raises(DriverLost):
        await call
    await until_gone(driver)
    async with asyncio.timeout(800):
        while not (lost := [event for event in logged if event["event"] == "spark.lost"]):  # noqa: ASYNC110  # no event tells it
            await asyncio.sleep(0.05)
    assert [(event["who"], event["exit_code"]) for event in lost] == [("jvm", -9)]
    if long:  # of what comes after a driver's end, every day's run has one
        async with asyncio.timeout(800):
            assert (await world.engine.compute(world.job("identity", attempt=9))).rows == 3 * ROWS
