"""Samples of what goes into a ledger, and steps that its tests share."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any

from mldserver.effects import Effects
from mldserver.ledger.contract import (
    Commit,
    Flush,
    LedgerState,
    PositionUpdate,
    Segment,
    SegmentKind,
    WindowEntry,
    WindowState,
)
from mldserver.ledger.operations import Ledger
from mldserver.records import DeadLetter, Sequence

if TYPE_CHECKING:
    from tests.support.store import SqliteStore

    Factory = Callable[..., Ledger]

DIGITS_56 = 10**55 + 7
HUGE = Sequence(DIGITS_56, 3)
W1, W2, W3 = "1970-01-01T00-00-00Z", "1970-01-01T00-00-10Z", "1970-01-01T00-00-20Z"
BATCH = "batch-000000000001"
BOUNDS = {W1: (0, 10_000), W2: (10_000, 20_000), W3: (20_000, 30_000), BATCH: (None, None)}


def seg(
    path: str,
    window_id: str = W1,
    *,
    rows: int = 5,
    kind: SegmentKind = SegmentKind.WINDOW,
    revision: int = 0,
) -> Segment:
    start_ms, end_ms = BOUNDS[window_id]
    return Segment(path, window_id, rows, rows * 100, start_ms, end_ms, kind, revision)


def more(path: str, window_id: str = W1, *, rows: int = 5, revision: int = 0) -> Segment:
    return seg(path, window_id, rows=rows, kind=SegmentKind.RECOMPUTE, revision=revision)


def late(path: str, window_id: str = W1, *, rows: int = 5) -> Segment:
    return seg(path, window_id, rows=rows, kind=SegmentKind.LATE)


def move(shard: str = "a", epoch: int = 1, position: Sequence | None = HUGE, **fields: Any) -> PositionUpdate:
    return PositionUpdate(shard, epoch, position, **({"effective_ms": None, "event_ms": None} | fields))


def letter(number: int, **fields: Any) -> DeadLetter:
    usual = {
        "shard_id": "a",
        "sequence": Sequence(DIGITS_56 + number, number),
        "partition_key": "ключ",
        "data": b"\x00\xff payload",
        "arrival_ms": 123,
        "attempts": 4,
        "error": "ValueError: no",
        "traceback": "Traceback …\n  line\n",
        "handler": "handlers.departures",
        "at_ms": 456,
    }
    return DeadLetter(**(usual | fields))


@contextlib.asynccontextmanager
async def opened(factory: Factory, server_id: str = "one") -> AsyncIterator[tuple[Ledger, LedgerState]]:
    """Open the ledger as a server. It does not leave at the end: that is what a crash looks like."""
    ledger = factory(server_id)
    state = await ledger.open()
    try:
        yield ledger, state
    finally:
        await ledger.close()


@contextlib.asynccontextmanager
async def peeked(factory: Factory) -> AsyncIterator[tuple[Ledger, LedgerState]]:
    """Open the ledger as a tool."""
    ledger = factory("tool")
    try:
        yield ledger, await ledger.peek()
    finally:
        await ledger.close()


async def held(factory: Factory) -> LedgerState:
    """What the ledger holds, but for the servers."""
    async with peeked(factory) as (_, state):
        return dataclasses.replace(state, servers={})


async def entry(factory: Factory, window_id: str = W1) -> WindowEntry:
    return (await held(factory)).windows[window_id]


async def attempted(ledger: Ledger, window_id: str = W1) -> Commit:
    """Begin an attempt; return what it would commit."""
    attempt = (await ledger.begin_attempts((window_id,)))[window_id]
    return Commit(window_id, attempt, f"stage/{attempt}", ("f1", "f2"), 2)


async def bring_to(ledger: Ledger, state: WindowState, window_id: str = W1, path: str = "s1") -> None:
    """Give the window one segment and take it to a state."""
    assert (await ledger.register(Flush((), (seg(path, window_id),)))).registered
    if state is not WindowState.OPEN:
        await take_to(ledger, state, window_id)


async def take_to(ledger: Ledger, state: WindowState, window_id: str = W1) -> None:
    """Cut a window, and take it to a state."""
    assert [each.window_id for each in await ledger.cut((window_id,))] == [window_id]
    if state is WindowState.CUT:
        return
    output = await attempted(ledger, window_id)
    if state is WindowState.SET_ASIDE:
        await ledger.set_aside(window_id, "it failed")
        return
    assert await ledger.commit((output,)) == {window_id}
    if state is WindowState.PUBLISHED:
        await ledger.published({window_id: output.attempt})


def play(store: SqliteStore, number: int = 0) -> Iterator[None]:
    """Take a window of its own through its life, one transaction a step, each of several statements."""
    shard, window = f"shard-{number}", f"batch-{number:012d}"
    segments = tuple(Segment(f"s{number}-{n}", window, 1, 1) for n in range(3))
    later = Segment(f"r{number}", window, 1, 1, kind=SegmentKind.RECOMPUTE)
    too_late = Segment(f"l{number}", window, 1, 1, kind=SegmentKind.LATE)
    store.open_shard(shard, ("parent",))
    yield
    store.register(
        Flush((move(shard),), segments, Effects(dead_letters=(letter(number),)), clock=number * 2 + 1),
        now_ms=1,
    )
    yield
    for revision in (1, 2):
        store.cut((window,))
        yield
        store.begin_attempts((window,))
        yield
        store.commit((Commit(window, revision, "stage", ("f",), 1),))
        yield
        store.published({window: revision}, now_ms=2)
        yield
        if revision == 1:
            store.register(Flush((), (later,)), now_ms=3)
            yield
    store.expire(published_before_ms=9, keep_bytes=0)
    yield
    update = move(shard, previous=HUGE, ended=True)
    store.register(Flush((update,), (too_late,), clock=number * 2 + 2), now_ms=3)
    yield
    store.prune(windows_before_ms=9, shards_before_ms=9)
    yield
