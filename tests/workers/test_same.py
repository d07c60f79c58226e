"""Whatever a shard goes through, it comes to the same inline and in a worker: outcomes, errors, what handlers see."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import itertools
import json
import random
import sys
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from workers.kit import without_standby

from mldserver.base.clock import SystemClock
from mldserver.errors import MldserverError
from mldserver.handler.inspection import load_spec
from mldserver.protocol.messages import Version
from mldserver.records import Hook, Sequence, Shard
from mldserver.runtime.failure_policy import FailurePolicy, OnFailure, OnKeyFailure, failure_rule
from mldserver.runtime.inline import InlineRuntime
from mldserver.runtime.interface import BatchOutcome, Delivery, MLDLine, Runtime
from mldserver.workers.runtime import WorkerRuntime
from mldserver.workers.worker import Limits

HANDLERS = '''
"""They do what each record says; what they have seen so far is in their rows."""
import asyncio

from mldserver import BatchResult, Discard, Fatal, Retry, batches


class ByRecord:
    schema = "id STRING, seen BIGINT, hooks STRING, text STRING"
    windows = batches(max_rows=1000, max_age="1 hour")

    def __init__(self):
        self.seen = 0
        self.hooks = []

    def initialize(self, shard):
        self.hooks.append(f"initialize {shard.id.split('-')[-1]} {shard.start} {shard.start_sub}")

    def shutdown_requested(self, shard):
        self.hooks.append("shutdown_requested")
        raise ValueError("this hook always fails")

    def lease_lost(self, shard):
        self.hooks.append("lease_lost")

    def process_record(self, record):
        what = record.json()
        self.seen += 1
        row = (record.sequence_text, self.seen, ",".join(self.hooks), None)
        match what:
            case "rows":
                return [row, row]
            case "none":
                return None
            case "large":
                return (*row[:3], "x" * 20_000)
            case "fail":
                raise ValueError("no good, \\N{SNOWMAN}")
            case "rule":
                raise LookupError("by a rule")
            case "discard":
                raise Discard("not wanted")
            case "fatal":
                raise Fatal("never")
            case "retry":
                raise Retry("later", after=0)
            case "wrong":
                return ("too", "few")
        return row


class InLanes(ByRecord):
    concurrency = 3

    async def process_record(self, record):
        await asyncio.sleep(0)
        return (record.sequence_text, 0, *ByRecord.process_record(self, record)[2:])


class ByBatch(ByRecord):
    process_record = None

    def process_records(self, batch):
        rows, failed = [], {}
        for place, record in enumerate(batch):
            try:
                row = ByRecord.process_record(self, record)
            except ValueError as error:
                failed[place] = error
            else:
                rows += [] if row is None else row if isinstance(row, list) else [row]
        return BatchResult(rows, failed) if failed else rows


class Effects(ByRecord):
    schema = windows = None

    def process_record(self, record):
        ByRecord.process_record(self, record)
'''
KINDS = ["row", "rows", "none", "large", "fail", "rule", "discard", "fatal", "retry", "wrong", "broken"]
PLAIN = FailurePolicy(attempts=2, retry_base_seconds=0, failure_rules=(failure_rule("LookupError=skip"),))
POLICIES = {
    "ByRecord": PLAIN,
    "InLanes": dataclasses.replace(PLAIN, on_key_failure=OnKeyFailure.PARK, attempts=1),
    "ByBatch": dataclasses.replace(PLAIN, on_failure=OnFailure.SKIP),
    "Effects": dataclasses.replace(PLAIN, on_failure=OnFailure.HALT),
}
batch_of_kinds = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 2)), max_size=8)
steps = st.one_of(
    st.tuples(st.just("process"), batch_of_kinds),
    st.tuples(st.just("again"), batch_of_kinds),
    st.tuples(st.just("hook"), st.sampled_from(list(Hook))),
    st.tuples(st.sampled_from(["reopen", "garbage", "park", "unpark"]), st.none()),
)


class Both:
    """Two runtimes, of which one must not be told from the other."""

    def __init__(self, runner: asyncio.Runner, path: str, policy: FailurePolicy) -> None:
        self._runner = runner
        self._numbers = itertools.count()
        common: dict[str, Any] = {"policy": policy, "deadline_seconds": None}
        self.inline = InlineRuntime(load_spec(path), clock=SystemClock(), random=random.random, **common)
        self.workers = WorkerRuntime(path, workers=1, limits=Limits(None, None), **common)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._runner.run(work)

    async def start(self) -> asyncio.Task[None]:
        await self.inline.start()
        without_standby(self.workers)
        await self.workers.load()
        await self.workers.start()
        return asyncio.create_task(self.workers.run())

    async def end(self, running: asyncio.Task[None]) -> None:
        running.cancel()
        await asyncio.wait({running})
        await self.workers.close()
        await self.inline.close()

    async def play(self, script: list[tuple[str, Any]]) -> tuple[list[Any], list[Any]]:
        shard = f"shardId-{next(self._numbers):012d}"
        return await told(self.inline, shard, script), await told(self.workers, shard, script)


@pytest.fixture(scope="module", params=POLICIES)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    folder: Path = tmp_path_factory.mktemp("same")
    (folder / "the_same.py").write_text(HANDLERS)
    with pytest.MonkeyPatch.context() as patch, asyncio.Runner() as runner:
        patch.syspath_prepend(str(folder))
        both = Both(runner, f"the_same:{request.param}", POLICIES[request.param])
        running = both.run(both.start())
        yield both
        both.run(both.end(running))
    sys.modules.pop("the_same", None)


async def told(runtime: Runtime, shard: str, script: list[tuple[str, Any]]) -> list[Any]:
    """Play a script on a shard of its own; return what came of each step."""
    await runtime.open(Shard(shard, "TRIM_HORIZON"))
    outcomes: list[Any] = []
    number = 1
    for step, what in script:
        try:
            match step:
                case "process" | "again":
                    after = Sequence(number - 1) if step == "process" else Sequence(number)
                    line = line_of(what, number)
                    number += len(what)
                    outcome = await runtime.process(Delivery(shard, MLDLine(line, Version.V2), 9_000, after))
                    outcomes.append(plain(outcome))
                case "garbage":
                    await runtime.process(
                        Delivery(shard, MLDLine(bytearray(b"[1]"), Version.V2), 9_000, None)
                    )
                case "hook":
                    outcomes.append(await runtime.notify(shard, what))
                case "reopen":
                    await runtime.open(Shard(shard, str(number), start_sub=3))
                case "park":
                    await runtime.park(shard, {"key-0": Sequence(1, 2)})
                case "unpark":
                    await runtime.unpark(shard, "key-0")
        except MldserverError as error:
            outcomes.append((type(error), str(error), error.where))
    await runtime.forget(shard)
    return outcomes


def line_of(kinds: list[tuple[str, int]], first: int) -> bytes:
    records = [
        {
            "data": "=!" if kind == "broken" else base64.b64encode(json.dumps(kind).encode()).decode(),
            "partitionKey": f"key-{key}",
            "sequenceNumber": str(number),
            "subSequenceNumber": 0,
            "approximateArrivalTimestamp": 1_000 + number,
            "action": "record",
        }
        for number, (kind, key) in enumerate(kinds, first)
    ]
    return json.dumps({"action": "processRecords", "records": records, "millisBehindLatest": 5}).encode()


def plain(outcome: BatchOutcome) -> dict[str, Any]:
    """Return an outcome so that two can be compared; when it happened is left out."""
    letters = [dataclasses.replace(letter, at_ms=0) for letter in outcome.effects.dead_letters]
    table = outcome.effects.rows
    rows = None if table is None else (table.schema, table.to_pylist())
    fields = {name: getattr(outcome, name) for name in outcome.__struct_fields__ if name != "effects"}
    return fields | {"rows": rows, "dead_letters": letters}


@settings(max_examples=40)
@given(script=st.lists(steps, min_size=1, max_size=6))
def test_every_script_comes_to_the_same(both: Both, script: list[tuple[str, Any]]) -> None:
    inline, workers = both.run(both.play(script))
    assert workers == inline


def test_large_lines_and_large_rows_come_to_the_same(both: Both) -> None:
    many = [("row", 1)] * 600
    script = [("process", many), ("process", [("large", 1)] * 200), ("process", many)]
    inline, workers = both.run(both.play(script))
    assert workers == inline
