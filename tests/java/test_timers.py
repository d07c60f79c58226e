"""The real Java MultiLangDaemon and a handler whose records set timers: through a split, a merge and kills each fires once, as the model says."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from crash import timed
from crash.held import in_sqlite
from crash.seeds import crash_seed
from java.test_keyed_state import KEYS, PIECE, Pieces, journey
from support.counted import stored_counts
from support.java_stack import Stack
from support.timed import Act, Call, Fired, Firing, Recorded, Rules, check_timers

pytestmark = [pytest.mark.slow, pytest.mark.long]

HANDLER = """
import time
from datetime import UTC, datetime, timedelta

from mldserver import timer

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def process_record(record, ctx):
    order, found = record.json(), seen(ctx)
    arrived = (ctx.now - EPOCH) // timedelta(milliseconds=1)
    for act in order["timers"]:
        callback, _, name = act["timer"].partition("/")
        if "after" in act:
            told = {"n": order["n"], "link": 0, "due": arrived + act["after"], **act}
            ctx.timers.set(CALLBACKS[callback], after=timedelta(milliseconds=act["after"]), name=name, payload=told)
        else:
            ctx.timers.cancel(CALLBACKS[callback], name)
    ctx.state["calls"] = [*ctx.state.get("calls", ()), ["record", order["n"], arrived, found]]


@timer
def alarm(due, ctx):
    fire(alarm, due, ctx)


@timer(max_lateness="2 seconds")
def brief(due, ctx):
    fire(brief, due, ctx)


def fire(callback, due, ctx):
    told, found, at_ms = due.payload, seen(ctx), (due.at - EPOCH) // timedelta(milliseconds=1)
    late_ms = round(time.time() * 1000) - at_ms
    call = ["timer", told["timer"], told["n"], told["link"], at_ms, due.attempt, late_ms, found]
    ctx.state["calls"] = [*ctx.state.get("calls", ()), call]
    if told["again"]:
        step, *rest = told["again"]
        again = {**told, "link": told["link"] + 1, "due": told["due"] + step, "again": rest}
        ctx.timers.set(callback, at=EPOCH + timedelta(milliseconds=again["due"]), name=due.name, payload=again)
    if told["fails"] < 0 or due.attempt < told["fails"]:
        raise ConnectionError("not to be had now")


def seen(ctx):
    return " ".join("{timer}:{n}.{link}".format(**each.payload) for each in ctx.timers)


CALLBACKS = {"alarm": alarm, "brief": brief}
"""
"""It gives no rows, so that no Spark starts: the state of a key is the list of its calls."""
EARLY_MS = 100
"""How far the emulator's arrival times may be behind the time at which a record can be read."""


def orders(dice: random.Random, pieces: int) -> Pieces:
    numbers = iter(range(pieces * PIECE))
    return [
        [
            {"n": next(numbers), "key": dice.choice(KEYS), "timers": list(timed.acts(dice))}
            for _ in range(PIECE)
        ]
        for _ in range(pieces)
    ]


def call_of(key: str, told: list[Any], orders: dict[int, dict[str, Any]]) -> Call:
    """Return an entry of the handler's list as the model has it."""
    if told[0] == "record":
        _, n, arrived_ms, found = told
        acts = msgspec.convert(orders[n]["timers"], tuple[Act, ...])
        return Recorded(n, acts, arrived_ms, arrived_ms, found.split())
    _, timer, n, link, at_ms, attempt, _, found = told
    return Fired(Firing(key, timer, n, link), at_ms, attempt, found.split())


async def test_each_timer_fires_once_through_a_split_a_merge_and_kills_of_server_and_jvm(
    tmp_path: Path,
) -> None:
    dice = random.Random(crash_seed())
    pieces = orders(dice, 7)
    (tmp_path / "timed_orders.py").write_text(HANDLER)
    stack = Stack(tmp_path, "timed_orders")

    def pending() -> list[tuple[Any, ...]]:
        return stack.query("SELECT store_id FROM stores WHERE NOT closed AND next_due_ms IS NOT NULL")

    async with stack.running(shards=2):
        await journey(stack, dice, pieces)
        await stack.until("all timers have fired", lambda: not pending(), limit=120)
        assert await stack.end(stack.daemon) == 0
        assert await stack.end(stack.server) == 0
    held = in_sqlite(stack.out)
    found: Any
    found, broken = stored_counts(stack.out, *held.state)
    by_number = {order["n"]: order for piece in pieces for order in piece}
    calls = {key: [call_of(key, each, by_number) for each in told] for key, told in found.items()}
    called = [call.n for each in calls.values() for call in each if isinstance(call, Recorded)]
    assert sorted(called) == sorted(by_number)
    rules = Rules(held.timers, early_ms=EARLY_MS)
    broken += check_timers({key: enumerate(each, 1) for key, each in calls.items()}, rules)
    assert broken == [], "\n".join(broken)
    late_ms = [each[6] for told in found.values() for each in told if each[0] == "timer"]
    assert min(late_ms) > -EARLY_MS
    print(
        f"{len(late_ms)} firings, {len(held.timers)} dead letters; late by {sorted(late_ms)[len(late_ms) // 2]} ms (median)"
    )
    assert len(late_ms) > PIECE
    assert stack.samples.ahead == []
