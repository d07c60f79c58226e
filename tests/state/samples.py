"""Samples of what goes into a ledger, and steps that its tests share."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from mldserver.records import Sequence
from mldserver.runtime.base import DeadLetter
from mldserver.state.ledger import (
    Flush,
    LedgerState,
    PositionUpdate,
    Segment,
    WindowState,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from mldserver.state.ledger import Ledger
    from mldserver.state.store import SqliteStore

    Factory = Callable[..., Ledger]

DIGITS_56 = 10**55 + 7
HUGE = Sequence(DIGITS_56, 3)
W1, W2 = "1970-01-01T00-00-00Z", "1970-01-01T00-00-10Z"
BOUNDS = {W1: (0, 10_000), W2: (10_000, 20_000), "batch-000000000001": (None, None)}


def seg(path: str, window_id: str = W1, *, rows: int = 5, late: bool = False) -> Segment:
    start_ms, end_ms = BOUNDS[window_id]
    return Segment(path, window_id, rows, rows * 100, start_ms, end_ms, late=late)


def move(shard: str = "a", epoch: int = 1, position: Sequence | None = HUGE, **more: Any) -> PositionUpdate:
    return PositionUpdate(shard, epoch, position, **({"effective_ms": None, "event_ms": None} | more))


def letter(number: int, **more: Any) -> DeadLetter:
    fields = {
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
    return DeadLetter(**(fields | more))


@contextlib.asynccontextmanager
async def opened(factory: Factory) -> AsyncIterator[tuple[Ledger, LedgerState]]:
    ledger = factory()
    state = await ledger.open()
    try:
        yield ledger, state
    finally:
        await ledger.close()


async def held(factory: Factory) -> LedgerState:
    async with opened(factory) as (_, state):
        return state


async def bring_to(ledger: Ledger, state: WindowState, window_id: str = W1, path: str = "s1") -> None:
    """Give the window one segment and take it to a state."""
    assert (await ledger.register(Flush((), (seg(path, window_id),)))).registered
    if state is WindowState.OPEN:
        return
    await ledger.cut((window_id,))
    if state is WindowState.CUT:
        return
    attempt = await ledger.begin_attempt(window_id)
    if state is WindowState.SET_ASIDE:
        await ledger.set_aside(window_id, "it failed")
        return
    assert await ledger.commit(window_id, attempt=attempt, staging="stage/1", files=("f1", "f2"), rows_out=2)
    if state is WindowState.PUBLISHED:
        await ledger.published(window_id)


def play(store: SqliteStore, number: int = 0) -> Iterator[None]:
    """Take a window of its own through its life, one transaction a step, each of several statements."""
    shard, window = f"shard-{number}", f"batch-{number:012d}"
    segments = tuple(Segment(f"s{number}-{n}", window, 1, 1) for n in range(3))
    late = Segment(f"l{number}", window, 1, 1, late=True)
    store.open_shard(shard, ("parent",))
    yield
    store.register(Flush((move(shard),), segments, (letter(number),), clock=number * 2 + 1), now_ms=1)
    yield
    store.cut((window,))
    yield
    store.begin_attempt(window)
    yield
    store.commit(window, attempt=1, staging="stage", files=("f",), rows_out=1)
    yield
    store.published(window, now_ms=2)
    yield
    store.register(Flush((move(shard, ended=True),), (late,), clock=number * 2 + 2), now_ms=3)
    yield
    store.prune(windows_before_ms=9, shards_before_ms=9)
    yield
