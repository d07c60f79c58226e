"""Queries and lookup tables of handlers in worker processes. A list plays Spark."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from support.serving import until
from workers.kit import delivery, named, running

from mldserver.errors import MldserverError, QueryFailed
from mldserver.handler.queries import Query, QueryResult, values_of
from mldserver.records import Shard
from mldserver.runtime.failure_policy import FailurePolicy
from mldserver.runtime.interface import BatchOutcome
from mldserver.workers.runtime import WorkerRuntime
from mldserver.workers.worker import Limits

Done = Callable[[QueryResult | MldserverError], None]

HEAD = """
import asyncio, gc, os
from mldserver import Lookup, tumbling
schema = "said STRING"

def open_results():
    gc.collect()
    files = [os.readlink(f"/proc/self/fd/{each}") for each in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{each}")]
    return sum("mldserver-query" in each for each in (*files, *open("/proc/self/maps")))
"""


@dataclass
class Port:
    """Answers queries when it is told to."""

    at_once: bool = True
    failure: QueryFailed | None = None
    asked: list[tuple[Query, Done]] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)

    def begin(self, query: Query, done: Done) -> Callable[[], object]:
        self.asked.append((query, done))
        if self.at_once:
            # Not before this returns: the answer of a real one takes at least a turn of the loop.
            asyncio.get_running_loop().call_soon(done, self.failure or result(**values_of(query)))
        return lambda: self.cancelled.append(query.text)


def result(**columns: Any) -> QueryResult:
    file = os.memfd_create("mldserver-query")
    table = pa.table({name: each if isinstance(each, list) else [each] for name, each in columns.items()})
    with pa.OSFile(f"/proc/self/fd/{file}", "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return QueryResult(file, tuple(range(-(-table.num_rows // 2))))


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Port], WorkerRuntime]:
    monkeypatch.chdir(tmp_path)

    def make(text: str, port: Port, attempts: int = 1) -> WorkerRuntime:
        (tmp_path / "mine.py").write_text(HEAD + text)
        policy = FailurePolicy(attempts=attempts)
        return WorkerRuntime("mine", workers=1, policy=policy, limits=Limits(None, None), queries=port)

    return make


def said(outcome: BatchOutcome) -> list[str]:
    assert outcome.effects.rows is not None, [letter.traceback for letter in outcome.effects.dead_letters]
    texts: list[str] = outcome.effects.rows["said"].to_pylist()
    return texts


@pytest.mark.parametrize(
    "text",
    [
        "def process_record(record, ctx): return (ctx.sql('SELECT :x', x=record.text()).one().x,)",
        "async def process_record(record, ctx): return ((await ctx.asql('SELECT :x', x=record.text())).one().x,)",
        "blocking = True\ndef process_record(record, ctx): return (ctx.sql('SELECT :x', x=record.text()).one().x,)",
    ],
    ids=["on the loop", "async", "on a thread"],
)
async def test_a_hook_asks_and_gets_its_rows(make: Callable[..., WorkerRuntime], text: str) -> None:
    async with running(make(text, Port()), standby=False) as runtime:
        await runtime.open(Shard("s"))
        assert said(await runtime.process(delivery("s", "one", "two"))) == ["one", "two"]


async def test_an_error_of_a_query_is_an_error_of_the_call(make: Callable[..., WorkerRuntime]) -> None:
    text = """
from mldserver.errors import QueryFailed
def process_record(record, ctx):
    if record.text() == "lets it be":
        return (ctx.sql("SELECT").one().x,)
    try:
        ctx.sql("SELECT")
    except QueryFailed as error:
        return (str(error),)
"""
    port = Port(failure=QueryFailed("TABLE_OR_VIEW_NOT_FOUND: nowhere", advice="Look."))
    async with running(make(text, port), standby=False) as runtime:
        await runtime.open(Shard("s"))
        outcome = await runtime.process(delivery("s", "catches it", "lets it be"))
    assert said(outcome) == ["TABLE_OR_VIEW_NOT_FOUND: nowhere Look."]
    (letter,) = outcome.effects.dead_letters
    assert letter.error.startswith("QueryFailed: TABLE_OR_VIEW_NOT_FOUND: nowhere")


@pytest.mark.parametrize("kind", ["def", "async def"])
async def test_however_a_hook_leaves_its_streams_they_are_gone_after_the_call(
    make: Callable[..., WorkerRuntime], kind: str
) -> None:
    ask = "ctx.sql" if kind == "def" else "await ctx.asql"
    text = f"""
kept = []
{kind} process_record(record, ctx):
    before = open_results()
    if record.text() == "reports":
        return (str(before),)
    outer = {ask}("SELECT", n=[1, 2, 3, 4, 5], stream=True)
    kept.append(outer)
    for row in outer:
        inner = iter({ask}("SELECT", n=[1, 2, 3], stream=True))
        kept.append(inner)
        next(inner)
        if record.text() == "breaks":
            break
        if record.text() == "returns":
            return (str(row.n),)
        raise ValueError(row.n)
    return ("broke",)
"""
    async with running(make(text, Port()), standby=False) as runtime:
        await runtime.open(Shard("s"))
        outcome = await runtime.process(delivery("s", "breaks", "returns", "raises", "reports"))
    assert said(outcome) == ["broke", "1", "0"]
    assert [letter.error for letter in outcome.effects.dead_letters] == ["ValueError: 1"]


async def test_a_call_cancelled_at_its_deadline_cancels_its_query(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        HEAD + "async def process_record(record, ctx): await ctx.asql('SLOW')\n"
    )
    port = Port(at_once=False)
    policy, limits = FailurePolicy(attempts=1), Limits(None, None)
    runtime = WorkerRuntime(
        "mine", workers=1, policy=policy, limits=limits, queries=port, deadline_seconds=0.3
    )
    async with running(runtime, standby=False):
        await runtime.open(Shard("s"))
        outcome = await runtime.process(delivery("s", "one"))
        await until(lambda: port.cancelled == ["SLOW"])
        port.asked[0][1](result(x="late"))  # an answer that crosses the cancellation is dropped
    assert [letter.error for letter in outcome.effects.dead_letters] == [
        "TimeoutError: it took longer than 0.3 s"
    ]


async def test_the_queries_of_a_killed_worker_are_cancelled(make: Callable[..., WorkerRuntime]) -> None:
    port = Port(at_once=False)
    text = "def process_record(record, ctx): return (ctx.sql('SLOW').one().x,)"
    async with running(make(text, port, attempts=3)) as runtime:
        await runtime.open(Shard("s"))
        batch = asyncio.create_task(runtime.process(delivery("s", "one")))
        await until(lambda: len(port.asked) == 1)
        (row,) = runtime.rows()
        assert row.pid is not None
        os.kill(row.pid, signal.SIGKILL)
        await until(lambda: len(port.asked) == 2)  # the next process asks again
        assert port.cancelled == ["SLOW"]
        port.asked[1][1](result(x="answer"))
        assert said(await batch) == ["answer"]


LOOKUP = """
tiers = Lookup("SELECT", key="customer")
def process_record(record):
    row = tiers.get(record.text())
    return (row.tier if row else "none",)
"""


async def test_a_shard_opens_when_the_required_lookup_has_its_table(
    make: Callable[..., WorkerRuntime],
) -> None:
    async with running(make(LOOKUP, Port()), standby=False) as runtime:
        assert [(each.name, each.required) for each in runtime.spec.lookups] == [("tiers", True)]
        opening = asyncio.create_task(runtime.open(Shard("s")))
        await asyncio.sleep(0)
        assert not opening.done()
        await runtime.fill_lookup("tiers", result(customer=["a", "b", "c"], tier=["1", "2", "3"]))
        await opening
        assert said(await runtime.process(delivery("s", "a", "c", "d"))) == ["1", "3", "none"]
        await runtime.fill_lookup("tiers", result(customer=["d"], tier=["4"]))
        assert said(await runtime.process(delivery("s", "a", "d"))) == ["none", "4"]


async def test_the_process_after_a_killed_one_has_the_present_tables(
    make: Callable[..., WorkerRuntime],
) -> None:
    async with running(make(LOOKUP, Port())) as runtime:
        await runtime.fill_lookup("tiers", result(customer=["a"], tier=["1"]))
        await runtime.open(Shard("s"))
        await runtime.process(delivery("s", "a"))
        await runtime.fill_lookup("tiers", result(customer=["a"], tier=["2"]))
        for _ in range(2):
            pid = runtime.rows()[0].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            await until(lambda pid=pid: runtime.rows()[0].pid not in {None, pid})
            assert said(await runtime.process(delivery("s", "a"))) == ["2"]


async def test_a_table_that_does_not_fit_leaves_the_one_before_also_for_later_processes(
    make: Callable[..., WorkerRuntime],
) -> None:
    async with running(make(LOOKUP, Port())) as runtime:
        await runtime.fill_lookup("tiers", result(customer=["a"], tier=["1"]))
        await runtime.open(Shard("s"))
        with pytest.raises(QueryFailed, match="repeat a value of its key customer"):
            await runtime.fill_lookup("tiers", result(customer=["a", "a"], tier=["2", "3"]))
        assert said(await runtime.process(delivery("s", "a"))) == ["1"]
        pid = runtime.rows()[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert said(await runtime.process(delivery("s", "a"))) == ["1"]


async def test_new_code_with_other_lookups_is_refused(
    make: Callable[..., WorkerRuntime], tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    async with running(make(LOOKUP, Port()), standby=False) as runtime:
        (tmp_path / "mine.py").write_text(HEAD + LOOKUP.replace("SELECT", "SELECT 2"))
        with pytest.raises(
            MldserverError, match="lookups was tiers, and is tiers with another query or interval"
        ):
            await runtime.reload()
    assert not named(logged, "worker.lost")
