"""The server's side of queries and lookup tables, with a list in Spark's place and a clock that the test moves."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, cast

import pyarrow as pa
import pytest

from mldserver.engine_jobs import FunctionView
from mldserver.errors import DriverLost, MldserverError, QueryFailed
from mldserver.handler.queries import LookupSpec, Query, QueryResult, discard, query_of
from mldserver.jobs.published import PublishedWindows
from mldserver.jobs.query_service import LOOKUP_BYTES, RESULT_BYTES, QueryService

Answer = QueryResult | MldserverError
BOUNDED = query_of("SELECT * FROM flights", {}, seconds=5, max_rows=10)
STREAM = query_of("SELECT 1", {"t": "flights"}, seconds=5)


def result() -> QueryResult:
    file = os.memfd_create("mldserver-query")
    table = pa.table({"n": [1]})
    with pa.OSFile(f"/proc/self/fd/{file}", "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return QueryResult(file, (0,))


@dataclass
class Clock:
    """Sleeps until the test moves it."""

    ms: int = 0
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    slept: list[float] = field(default_factory=list)

    def now_ms(self) -> int:
        return self.ms

    steady_ms = now_ms

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        due = self.ms + seconds * 1000
        while self.ms < due:
            await self.wake.wait()

    async def move(self, seconds: float) -> None:
        self.ms += round(seconds * 1000)
        self.wake.set()
        self.wake = asyncio.Event()
        await turns()


async def turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@dataclass
class Published:
    """Two revisions of a view."""

    reads: list[bool] = field(default_factory=list)

    async def view(self, *, fresh: bool = False) -> FunctionView | None:
        self.reads.append(fresh)
        return FunctionView("flights", (f"revision-{1 + fresh}",))


@dataclass
class Filled:
    """A runtime that is given tables."""

    refuses: bool = False
    names: list[str] = field(default_factory=list)

    async def fill_lookup(self, name: str, result: QueryResult) -> None:
        discard(result)
        if self.refuses:
            raise QueryFailed("1 rows of the lookup repeat a value of its key.")
        self.names.append(name)


class World:
    """QueryService whose Spark does what ``spark`` says."""

    def __init__(self, spark: Callable[..., Any], *lookups: LookupSpec) -> None:
        self.clock, self.published, self.runtime = Clock(), Published(), Filled()
        functions = {"flights": cast("PublishedWindows", self.published)}
        self.queries = QueryService(functions, spill_bytes=77, clock=self.clock)
        self.asked: list[tuple[Query, tuple[FunctionView, ...], int]] = []
        self.answers: list[Answer] = []
        self.lookups = lookups
        self.spark = spark

        async def ask(query: Query, views: tuple[FunctionView, ...], max_bytes: int) -> QueryResult:
            self.asked.append((query, views, max_bytes))
            return await self.spark(len(self.asked))  # type: ignore[no-any-return]  # each test's own

        self.queries.ask = ask

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.queries.run(self.lookups, self.runtime.fill_lookup))
        await turns()
        yield
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for answer in self.answers:
            if isinstance(answer, QueryResult):
                discard(answer)

    async def ask(self, query: Query) -> Answer:
        self.queries.begin(query, self.answers.append)
        await turns()
        return self.answers[-1]


async def works(_: int) -> QueryResult:
    return result()


async def test_a_query_gets_the_views_that_its_text_or_its_values_name_and_a_limit_by_its_kind() -> None:
    world = World(works)
    async with world.running():
        for query in (BOUNDED, STREAM, query_of("SELECT 1", {}, seconds=5)):
            assert isinstance(await world.ask(query), QueryResult)
    views = (FunctionView("flights", ("revision-1",)),)
    assert [each[1:] for each in world.asked] == [(views, RESULT_BYTES), (views, 77), ((), 77)]
    assert (world.queries.done, world.queries.failed) == (3, 0)


async def test_a_query_that_meets_a_file_that_a_later_revision_has_replaced_runs_once_more() -> None:
    async def gone(number: int) -> QueryResult:
        if number == 1:
            raise QueryFailed("SparkException: [FAILED_READ_FILE.FILE_NOT_EXIST] …")
        return result()

    world = World(gone)
    async with world.running():
        assert isinstance(await world.ask(BOUNDED), QueryResult)
    assert [views[0].paths for _, views, _ in world.asked] == [("revision-1",), ("revision-2",)]
    assert world.published.reads == [False, True]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (QueryFailed("AnalysisException: nowhere"), "AnalysisException: nowhere"),
        (
            DriverLost("The Spark driver is gone.", did="A fresh one starts."),
            "The Spark driver is gone. A fresh one starts.",
        ),
        (OSError("no disk"), "no disk"),
        (ValueError("a manifest of format 9"), "a manifest of format 9"),
    ],
)
async def test_whatever_fails_the_handler_is_told_that_its_query_failed(error: Exception, said: str) -> None:
    async def fails(_: int) -> QueryResult:
        raise error

    world = World(fails)
    async with world.running():
        answer = await world.ask(BOUNDED)
    assert isinstance(answer, QueryFailed)
    assert str(answer) == said
    assert (world.queries.done, world.queries.failed) == (0, 1)


async def test_a_query_that_takes_too_long_is_cancelled() -> None:
    cancelled: list[bool] = []

    async def hangs(_: int) -> QueryResult:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append(True)
        raise AssertionError

    world = World(hangs)
    async with world.running():
        world.queries.begin(query_of("SELECT 1", {}, seconds=0.01, max_rows=1), world.answers.append)
        async with asyncio.timeout(30):
            while not world.answers:  # noqa: ASYNC110  # the loop's own time
                await asyncio.sleep(0.01)
    assert cancelled == [True]
    assert "no result after 0.01 seconds" in str(world.answers[0])


async def test_a_query_that_is_given_up_ends_without_an_answer() -> None:
    async def hangs(_: int) -> QueryResult:
        return await asyncio.Event().wait()  # type: ignore[return-value]  # it never returns

    world = World(hangs)
    async with world.running():
        cancel = world.queries.begin(BOUNDED, world.answers.append)
        await turns()
        cancel()
        await turns()
        assert world.asked
        assert not world.answers


async def test_without_a_spark_and_outside_the_run_a_query_fails_at_once() -> None:
    world = World(works)
    assert "starting or stopping" in str(await world.ask(BOUNDED))
    world.queries.ask = None
    async with world.running():
        assert "no Spark session" in str(await world.ask(BOUNDED))


TIERS = LookupSpec("tiers", query_of("SELECT 2", {}, seconds=600), 60_000, required=True)


async def test_a_lookup_is_computed_at_each_interval(logged: list[dict[str, Any]]) -> None:
    world = World(works, TIERS)
    async with world.running():
        for minute in range(3):
            assert (len(world.asked), world.runtime.names) == (minute + 1, ["tiers"] * (minute + 1))
            await world.clock.move(59)
            assert len(world.asked) == minute + 1
            await world.clock.move(1)
    assert world.asked[0][2] == LOOKUP_BYTES
    assert [event["event"] for event in logged] == ["lookup.done"] * 4


@pytest.mark.parametrize("refused", [False, True], ids=["by Spark", "by the handler's process"])
async def test_a_lookup_that_fails_is_tried_sooner_and_reddens_readiness_after_three_intervals(
    logged: list[dict[str, Any]], *, refused: bool
) -> None:
    broken = True

    async def fails(_: int) -> QueryResult:
        if broken and not refused:
            raise QueryFailed("AnalysisException: nowhere", advice="Look.")
        return result()

    world = World(fails, TIERS)
    world.runtime.refuses = refused
    async with world.running():
        assert world.clock.slept[0] < 2
        for _ in range(30):
            await world.clock.move(6.1)
        assert world.queries.trouble is not None
        assert world.queries.trouble.startswith("the lookup tiers has not been computed for too long")
        assert max(world.clock.slept) <= 60
        broken = world.runtime.refuses = False
        await world.clock.move(60)
        assert (world.queries.trouble, world.runtime.names) == (None, ["tiers"])
    first = next(event for event in logged if event["event"] == "lookup.failed")
    assert (first["lookup"], first["level"]) == ("tiers", "warning")


@pytest.mark.parametrize(
    ("queries", "records", "advised"),
    [(59, 0, False), (60, 600, False), (60, 599, True), (601, 100_000, True)],
)
async def test_a_query_for_each_record_is_noticed_once(
    logged: list[dict[str, Any]], queries: int, records: int, *, advised: bool
) -> None:
    world = World(works)
    world.queries.records = lambda: records * (world.clock.ms // 60_000)
    async with world.running():
        for number in range(2 * queries):
            if number % queries == queries - 1:
                await world.clock.move(60)
            await world.ask(BOUNDED)
    told = [event for event in logged if event["event"] == "query.per_record"]
    assert [(event["queries"], event["records"]) for event in told] == (
        [(queries, records)] if advised else []
    )
