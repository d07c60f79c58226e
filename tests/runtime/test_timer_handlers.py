"""Timers of every shape of handler, from its source to a row: a callback of a module or a class sets itself a row."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from mldserver.handler.inspection import load_spec
from mldserver.records import Record, Shard
from mldserver.runtime.failure_policy import FailurePolicy
from mldserver.runtime.inline import InlineRuntime
from mldserver.runtime.interface import BatchOutcome, Delivery, DueTimers, Records
from mldserver.testing import VirtualClock

pytestmark = pytest.mark.quick

SHARD = "shard"
INSERT = b'{"eventName":"INSERT","dynamodb":{"Keys":{"id":{"S":"1"}},"NewImage":{"id":{"S":"1"}}}}'
REMOVE = b'{"eventName":"REMOVE","dynamodb":{"Keys":{"id":{"S":"1"}},"OldImage":{"id":{"S":"1"}}}}'
BEGIN = "from mldserver import timer\nschema = 'key STRING, payload STRING, at TIMESTAMP'\n"
CLASS = BEGIN + "class Handler:\n    schema = schema\n"

SHAPES = {
    "a module": (
        "",
        BEGIN + "def process_record(record, ctx):\n"
        '    if record.data.startswith(b\'{"eventName":"REMOVE\'): ctx.timers.cancel(alarm)\n'
        "    else: ctx.timers.set(alarm, after='1 min', payload='p')\n"
        "@timer\n"
        "def alarm(due, ctx): return ctx.key, due.payload, due.at\n",
    ),
    "an asynchronous module": (
        "",
        BEGIN + "import asyncio\n"
        "async def process_record(record, ctx):\n"
        "    await asyncio.sleep(0)\n"
        '    if record.data.startswith(b\'{"eventName":"REMOVE\'): ctx.timers.cancel(alarm)\n'
        "    else: ctx.timers.set(alarm, after='1 min', payload='p')\n"
        "@timer\n"
        "async def alarm(due, ctx):\n"
        "    await asyncio.sleep(0)\n"
        "    return ctx.key, due.payload, due.at\n",
    ),
    "hooks of changes in a module": (
        "",
        BEGIN + "def on_insert(change, ctx): ctx.timers.set(alarm, after='1 min', payload='p')\n"
        "def on_delete(change, ctx): ctx.timers.cancel(alarm)\n"
        "@timer\n"
        "def alarm(due, ctx): return ctx.key, due.payload, due.at\n",
    ),
    "hooks of changes in a class": (
        "Handler",
        CLASS
        + "    def on_insert(self, change, ctx): ctx.timers.set(self.alarm, after='1 min', payload='p')\n"
        "    def on_delete(self, change, ctx): ctx.timers.cancel(Handler.alarm)\n"
        "    @timer\n"
        "    def alarm(self, due, ctx): return ctx.key, due.payload, due.at\n",
    ),
    "asynchronous hooks of changes in a class": (
        "Handler",
        CLASS + "    def __init__(self): self.payload = 'p'\n"
        "    async def on_insert(self, change, ctx): ctx.timers.set(self.alarm, after='1 min')\n"
        "    async def on_delete(self, change, ctx): ctx.timers.cancel(self.alarm)\n"
        "    @timer\n"
        "    async def alarm(self, due, ctx): return ctx.key, self.payload, due.at\n",
    ),
    "a class with changes and process_record": (
        "Handler",
        CLASS + "    changes = True\n"
        "    def process_record(self, change, ctx):\n"
        "        if change.kind == 'delete': ctx.timers.cancel(self.alarm)\n"
        "        else: ctx.timers.set(self.alarm, after='1 min', payload='p')\n"
        "    @staticmethod\n"
        "    @timer\n"
        "    def alarm(due, ctx): return ctx.key, due.payload, due.at\n",
    ),
}

Run = Callable[..., Awaitable[BatchOutcome]]


@pytest.fixture(params=SHAPES)
async def handler(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Open a shard of a handler; return what sends it records or fires its timers."""
    name, text = SHAPES[request.param]
    (tmp_path / "mine.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    spec = load_spec(f"mine:{name}" if name else "mine")
    clock = VirtualClock()
    runtime = InlineRuntime(spec, policy=FailurePolicy(), clock=clock, random=lambda: 0.0)
    await runtime.start()
    await runtime.open(Shard(SHARD))
    numbers = iter(range(1, 99))

    async def run(*data: bytes, until_ms: int | None = None) -> BatchOutcome:
        records = [
            Record(
                shard_id=SHARD,
                sequence_number=str(place),
                data=each,
                partition_key='{"id":{"S":"1"}}',
                arrival_ms=1000,
            )
            for place, each in enumerate(data, 1)
        ]
        payload = Records(records) if until_ms is None else DueTimers(until_ms, 10)
        return await runtime.process(Delivery(SHARD, payload, 61_500, None, number=next(numbers)))

    yield run
    await runtime.close()
    sys.modules.pop("mine", None)


async def test_a_callback_of_any_shape_gives_its_row_when_its_timer_is_due(handler: Run) -> None:
    outcome = await handler(INSERT)
    assert outcome.timers is not None
    assert (outcome.timers.pending, outcome.timers.next_due_ms) == (1, 61_000)
    assert (await handler(until_ms=60_999)).effects.rows is None
    outcome = await handler(until_ms=61_000)
    assert (outcome.effects.dead_letters, outcome.effects.rows is not None) == ((), True)
    [row] = outcome.effects.rows.to_pylist()
    assert (row["key"], row["payload"], row["at"].timestamp()) == ('{"id":{"S":"1"}}', "p", 61)
    assert (await handler(until_ms=99_000)).effects.rows is None


async def test_a_callback_of_any_shape_can_be_cancelled(handler: Run) -> None:
    outcome = await handler(INSERT, REMOVE)
    assert outcome.timers is not None
    assert (outcome.timers.set, outcome.timers.cancelled, outcome.timers.pending) == (1, 1, 0)
    assert (await handler(until_ms=99_000)).effects.rows is None
