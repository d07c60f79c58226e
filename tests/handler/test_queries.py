"""Results of queries, lookup tables, and ``ctx.sql`` in a test of a handler. Spark is played by a list."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from support.serving import until

from mldserver import Context, Lookup, Rows, RowStream
from mldserver.errors import QueryFailed
from mldserver.handler.queries import (
    MOST_ROWS,
    Queries,
    Query,
    QueryResult,
    batches_of,
    lookups_of,
    query_of,
    values_of,
)

OPTIONS: dict[str, Any] = {"max_rows": 1000, "cache": None, "stream": False, "timeout": None}


def result_of(*tables: pa.Table, order: tuple[int, ...] | None = None) -> QueryResult:
    """Return tables as a result of one batch each."""
    file = os.memfd_create("mldserver-query")
    with pa.OSFile(f"/proc/self/fd/{file}", "wb") as sink, pa.ipc.new_file(sink, tables[0].schema) as writer:
        for table in tables:
            writer.write_table(table)
    return QueryResult(file, tuple(range(len(tables))) if order is None else order)


def numbers(*values: int) -> pa.Table:
    return pa.table({"n": pa.array(values, pa.int64())})


class Runner:
    """Answers queries with what it was given, when it is told to."""

    def __init__(self, *, at_once: bool = True, here: bool = False) -> None:
        self.at_once, self.here = at_once, here
        self.asked: list[Query] = []
        self.futures: list[Future[QueryResult]] = []

    def is_needed_here(self) -> bool:
        return self.here

    def submit(self, query: Query) -> Future[QueryResult]:
        self.asked.append(query)
        future: Future[QueryResult] = Future()
        self.futures.append(future)
        if self.at_once:
            future.set_result(result_of(numbers(len(self.asked))))
        return future


class Steady:
    """A clock that stands still."""

    ms = 0

    def __call__(self) -> int:
        return self.ms


def queries(runner: Runner, *, seconds: float = 30, deadline: float | None = 60) -> tuple[Queries, Steady]:
    clock = Steady()
    return Queries(runner, seconds=seconds, deadline=deadline, steady_ms=clock), clock


def open_results() -> list[str]:
    gc.collect()
    files = [str(each.readlink()) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    return [
        each
        for each in (*files, *Path("/proc/self/maps").read_text().split("\n"))
        if "mldserver-query" in each
    ]


def test_rows_are_named_tuples_and_a_table() -> None:
    rows = Rows(pa.table({"carrier": ["AA", "UA"], "class": [1, 2]}))
    assert [row.carrier for row in rows] == ["AA", "UA"]
    assert [row._1 for row in rows] == [1, 2]  # the column is called as a word of Python
    assert (len(rows), rows.arrow().column_names) == (2, ["carrier", "class"])


def test_one_is_the_only_row_or_none() -> None:
    assert Rows(numbers(7)).one().n == 7
    assert Rows(numbers()).one() is None
    with pytest.raises(QueryFailed, match="has 2 rows where one was expected"):
        Rows(numbers(1, 2)).one()


def test_batches_come_in_the_order_of_the_result_and_one_comes_without_rows() -> None:
    assert [
        row["n"]
        for batch in batches_of(result_of(numbers(1), numbers(2), order=(1, 0)))
        for row in batch.to_pylist()
    ] == [2, 1]
    (empty,) = batches_of(result_of(numbers(), order=()))
    assert (empty.num_rows, empty.schema.names) == (0, ["n"])
    assert open_results() == []


def leave(loop: Callable[[RowStream], None]) -> RowStream:
    stream = RowStream(batches_of(result_of(numbers(1, 2), numbers(3))))
    assert len(open_results()) == 1  # the file itself; its batches are mapped when the first is read
    loop(stream)
    return stream


def test_leaving_the_loop_over_a_stream_lets_its_file_go() -> None:
    def by_break(stream: RowStream) -> None:
        for row in stream:
            assert row.n == 1
            break

    def by_return(stream: RowStream) -> None:
        for _ in stream:
            return

    def by_error(stream: RowStream) -> None:
        with contextlib.suppress(ZeroDivisionError):
            for row in stream:
                row.n // 0

    for loop in (by_break, by_return, by_error):
        stream = leave(loop)
        assert open_results() == []
        assert list(stream) == []


def test_values_cross_as_they_are_and_others_are_refused() -> None:
    values = {"text": "'; DROP", "none": None, "n": 2**62, "raw": b"\0"}
    assert values_of(query_of("SELECT 1", values, seconds=1)) == values
    assert values_of(query_of("SELECT 1", {}, seconds=1)) == {}
    for wrong in (object(), 2**70):
        with pytest.raises(TypeError, match="values of a query cannot be sent"):
            query_of("SELECT :x", {"x": wrong}, seconds=1)
    for rows in (0, MOST_ROWS + 1):
        with pytest.raises(ValueError, match="use stream=True for more rows"):
            query_of("SELECT 1", {}, seconds=1, max_rows=rows)


def test_a_query_ends_before_the_deadline_of_its_hook() -> None:
    for seconds, deadline, timeout, limit in (
        (30, 60, None, 30),
        (30, 10, None, 8),
        (30, None, None, 30),
        (30, 60, "5 seconds", 5),
        (30, 60, 300, 30),
        (30, 1, None, 0.5),
    ):
        runner = Runner()
        asking, _ = queries(runner, seconds=seconds, deadline=deadline)
        asking.sql("SELECT 1", {}, **OPTIONS | {"timeout": timeout})
        assert runner.asked[0].seconds == limit


def test_a_result_is_cached_by_text_values_and_limit_for_as_long_as_the_call_says() -> None:
    runner = Runner()
    asking, clock = queries(runner)

    def ask(text: str = "SELECT", **other: Any) -> int:
        rows = asking.sql(text, {"x": other.pop("x", 1)}, **OPTIONS | {"cache": "1 minute"} | other)
        assert isinstance(rows, Rows)
        return int(rows.one().n)

    assert [ask(), ask(), ask(x=2), ask(max_rows=5), ask("OTHER"), ask()] == [1, 1, 2, 3, 4, 1]
    assert ask(cache=None) == 5
    clock.ms = 60_000
    assert ask() == 6


def test_the_cache_holds_a_thousand_results_and_drops_the_one_used_longest_ago() -> None:
    runner = Runner()
    asking, _ = queries(runner)
    for number in (*range(1000), 0, 1000):
        asking.sql("SELECT", {"x": number}, **OPTIONS | {"cache": 60})
    asked = len(runner.asked)
    for number in (0, 1):
        asking.sql("SELECT", {"x": number}, **OPTIONS | {"cache": 60})
    assert (asked, len(runner.asked)) == (1001, 1002)


def test_a_thread_that_queries_need_does_not_wait_for_one() -> None:
    asking, _ = queries(Runner(here=True))
    with pytest.raises(QueryFailed, match=r"await ctx\.asql"):
        asking.sql("SELECT 1", {}, **OPTIONS)


async def test_a_cancelled_call_cancels_its_query() -> None:
    runner = Runner(at_once=False)
    asking, _ = queries(runner)
    task = asyncio.create_task(asking.asql("SELECT 1", {}, **OPTIONS))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert runner.futures[0].cancelled()


async def test_a_query_that_the_runner_cancels_has_failed() -> None:
    runner = Runner(at_once=False)
    asking, _ = queries(runner)
    waiting = asyncio.create_task(asyncio.to_thread(asking.sql, "SELECT 1", {}, **OPTIONS))
    await until(lambda: bool(runner.futures))
    runner.futures[0].cancel()
    with pytest.raises(QueryFailed, match="was cancelled"):
        await waiting


def test_without_spark_a_query_fails_with_advice() -> None:
    with pytest.raises(QueryFailed, match="Give the handler a schema"):
        Context("key").sql("SELECT 1")


async def test_a_test_of_a_handler_answers_its_queries() -> None:
    asked: list[Any] = []

    def answer(text: str, **values: Any) -> list[dict[str, Any]]:
        asked.append((text, values))
        return [{"tier": "gold"}]

    ctx = Context("key", sql=answer)
    assert ctx.sql("SELECT tier FROM customers WHERE id = :id", id=7).one().tier == "gold"
    assert (await ctx.asql("SELECT")).one().tier == "gold"
    stream = ctx.sql("SELECT", stream=True)
    assert [row.tier for row in stream] == ["gold"]
    assert asked[0] == ("SELECT tier FROM customers WHERE id = :id", {"id": 7})


def test_the_end_of_a_call_closes_its_streams_the_latest_first() -> None:
    closed: list[int] = []

    class Noted(RowStream):
        def __init__(self, number: int) -> None:
            super().__init__(iter(()))
            self.number = number

        def close(self) -> None:
            closed.append(self.number)

    ctx = Context("key")
    ctx.streams += [Noted(1), Noted(2)]
    ctx.close_streams()
    assert (closed, ctx.streams) == ([2, 1], [])


def test_a_lookup_gets_rows_by_key() -> None:
    tiers = Lookup("SELECT customer, tier FROM customers", key="customer")
    assert (len(tiers), tiers.get("a"), "a" in tiers) == (0, None, False)
    tiers.fill([{"customer": "a", "tier": 1}, {"customer": None, "tier": 2}])
    row = tiers.get("a")
    assert (len(tiers), row.tier, tiers.get(None).tier, "b" in tiers, tiers.get("b", 0)) == (
        2,
        1,
        2,
        False,
        0,
    )


def test_a_table_without_a_unique_key_leaves_the_one_before() -> None:
    tiers = Lookup("SELECT", key="customer")
    tiers.fill([{"customer": "a"}])
    with pytest.raises(QueryFailed, match="1 rows of the lookup repeat"):
        tiers.fill([{"customer": "b"}, {"customer": "b"}])
    with pytest.raises(QueryFailed, match="its key is customer"):
        tiers.fill([{"client": "b"}])
    assert tiers.get("a").customer == "a"


def test_a_lookup_that_cannot_be_is_refused_where_it_is_written() -> None:
    with pytest.raises(ValueError, match="must be above zero"):
        Lookup("SELECT", key="k", every=0)
    with pytest.raises(TypeError, match="cannot be sent"):
        Lookup("SELECT", key="k", x=object())


carriers = Lookup("SELECT 1", key="carrier")


class Base:
    delays = Lookup("SELECT 2", key="carrier")


class Handler(Base):
    tiers = Lookup("SELECT 3", key="customer")


def test_the_lookups_of_a_class_are_its_own_those_of_its_bases_and_of_its_module() -> None:
    assert sorted(lookups_of(Handler)) == ["carriers", "delays", "tiers"]
