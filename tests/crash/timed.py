"""Crash stories whose records set, replace and cancel timers: the handler, its dice, and the comparison with the sequential model."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import msgspec
from support.timed import Act, Call, Fired, Firing, Recorded, Rules, check_timers

HANDLER: Final = '''
"""Rows of records and of timers; both count in the state of their key."""
from datetime import UTC, datetime, timedelta

from mldserver import timer, tumbling

schema = (
    "id BIGINT NOT NULL, at TIMESTAMP NOT NULL, arrived BIGINT, key STRING, counted BIGINT, seen STRING, "
    "timer STRING, link BIGINT, due BIGINT, attempt BIGINT"
)
windows = tumbling("10 seconds")
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def process_record(record, ctx):
    event, found = record.json(), seen(ctx)
    arrived = round(record.approximate_arrival_timestamp.timestamp() * 1000)
    for act in event["timers"]:
        callback, _, name = act["timer"].partition("/")
        if "after" in act:
            told = {"n": event["id"], "link": 0, "due": arrived + act["after"], "fails": 0, "again": [], **act}
            ctx.timers.set(CALLBACKS[callback], after=timedelta(milliseconds=act["after"]), name=name, payload=told)
        else:
            ctx.timers.cancel(CALLBACKS[callback], name)
    counted = count(ctx)
    if event["what"] == "poison":
        raise ValueError("poison")
    return event["id"], event["at"], arrived, ctx.key, counted, found, None, None, None, None


@timer
def alarm(due, ctx):
    return fire(alarm, due, ctx)


@timer(max_lateness="2 seconds")
def brief(due, ctx):
    return fire(brief, due, ctx)


def fire(callback, due, ctx):
    told, found, at_ms = due.payload, seen(ctx), (due.at - EPOCH) // timedelta(milliseconds=1)
    counted = count(ctx)
    if told["again"]:
        step, *rest = told["again"]
        told = {**told, "link": told["link"] + 1, "due": told["due"] + step, "again": rest}
        at = EPOCH + timedelta(milliseconds=told["due"])
        ctx.timers.set(callback, at=at, name=due.name, payload=told)
    if told["fails"] < 0 or due.attempt < told["fails"]:
        raise ConnectionError("not to be had now")
    told = due.payload
    return told["n"], due.at, None, ctx.key, counted, found, told["timer"], told["link"], at_ms, due.attempt


def seen(ctx):
    return " ".join("{timer}:{n}.{link}".format(**each.payload) for each in ctx.timers)


def count(ctx):
    ctx.state["seen"] = counted = ctx.state.get("seen", 0) + 1
    return counted


CALLBACKS = {"alarm": alarm, "brief": brief}
'''
COLUMNS: Final = frozenset({"key", "counted", "seen", "timer", "link", "due", "attempt"})
"""Columns that its rows have beside those of other stories."""


class Counted(NamedTuple):
    """Those columns of one row."""

    key: str
    counted: int
    seen: str
    timer: str | None
    link: int | None
    due: int | None
    attempt: int | None


def acts(dice: random.Random) -> Iterator[dict[str, Any]]:
    """What a record does with timers of its key."""
    for _ in range(dice.choice((0, 1, 1, 2))):
        act = {"timer": dice.choice(("alarm", "alarm", "brief")) + dice.choice(("", "/a"))}
        if dice.random() < 0.2:
            yield act
            continue
        after = dice.choice((0, 500, 2300, 4000, 9000)) + dice.choice((0, dice.randint(0, 2000)))
        fails = dice.choice((0,) * 8 + (1, 2, -1))
        again = [] if fails else [dice.choice((0, 500, 4000)) for _ in range(dice.choice((0, 0, 1, 2)))]
        yield act | {"after": after, "fails": fails, "again": again}


def firing_of(timer: str, key: str, payload: bytes) -> Firing:
    """Return which firing a dead letter is."""
    told = msgspec.msgpack.decode(payload)
    return Firing(key, timer, told["n"], told["link"])


def check_calls(
    events: Mapping[int, tuple[int, Mapping[str, Any]]],
    rows: Iterable[tuple[int, Counted]],
    letters: Collection[Firing],
) -> tuple[list[str], dict[str, int]]:
    """Compare rows (the record's id, and columns) with the model; return what is wrong, and how many calls each key had.

    ``events``: when each record arrived (ms), and what it holds.
    """
    calls: dict[str, list[tuple[int, Call]]] = {}
    broken = []
    for number, row in rows:
        if row.timer is None:
            arrival_ms, event = events[number]
            told = msgspec.convert(event["timers"], tuple[Act, ...])
            call: Call = Recorded(number, told, arrival_ms, arrival_ms, row.seen.split())
        else:
            firing = Firing(row.key, row.timer, number, row.link or 0)
            broken += [f"{firing} has a row and a dead letter"] if firing in letters else []
            call = Fired(firing, row.due or 0, row.attempt or 0, row.seen.split())
        calls.setdefault(row.key, []).append((row.counted, call))
    return broken + check_timers(calls, Rules(letters)), {key: len(found) for key, found in calls.items()}
