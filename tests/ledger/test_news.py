"""Beats and retention with many windows: what they answer, and that they cost what happened, not what is retained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from mldserver.ledger import rules
from mldserver.ledger.book import Book, Draft
from mldserver.ledger.contract import (
    Commit,
    Flush,
    LedgerState,
    Segment,
    ServerState,
    WindowEntry,
    WindowState,
)
from mldserver.ledger.operations import Ledger
from tests.ledger.samples import BATCH, W1, W2, W3, attempted, bring_to, more, opened, seg, take_to
from tests.support.operations import counting_python, counting_sqlite
from tests.support.store import SqliteStore

if TYPE_CHECKING:
    from tests.ledger.samples import Factory

TOLD = ServerState("one", 9)


async def news(ledger: Ledger, since: LedgerState) -> LedgerState:
    return await ledger.sync(ServerState(ledger.server_id, 9), since.version)


async def test_a_beat_tells_the_windows_that_changed_since_the_version_that_is_named(
    ledger_factory: Factory,
) -> None:
    async with opened(ledger_factory) as (ledger, state):
        await bring_to(ledger, WindowState.OPEN)
        first = await news(ledger, state)
        assert (set(first.windows), first.since) == ({W1}, state.version)
        await bring_to(ledger, WindowState.OPEN, W2, "s2")
        second = await news(ledger, first)
        assert set(second.windows) == {W2}
        assert (await news(ledger, second)).windows == {}
        await take_to(ledger, WindowState.CUT)
        assert set((await news(ledger, second)).windows) == {W1}
        assert set((await news(ledger, first)).windows) == {W1, W2}, "a version may be asked for again"
        assert set((await ledger.sync(TOLD)).windows) == {W1, W2}


async def test_news_also_tell_of_windows_that_are_over(ledger_factory: Factory) -> None:
    async with opened(ledger_factory) as (ledger, _):
        await bring_to(ledger, WindowState.PUBLISHED)
        before = await ledger.sync(TOLD)
        await ledger.expire(published_before_ms=10**9, keep_bytes=0)
        entry = (await news(ledger, before)).windows[W1]
        assert (entry.state, entry.retained, entry.segments) == (WindowState.PUBLISHED, False, ())
        assert (await ledger.sync(TOLD)).windows == {}


async def test_who_may_have_missed_a_window_that_was_pruned_is_told_everything(
    ledger_factory: Factory,
) -> None:
    async with opened(ledger_factory) as (ledger, _):
        for window_id in (W1, W2):
            await bring_to(ledger, WindowState.PUBLISHED, window_id, window_id)
        before = await ledger.sync(TOLD)
        await ledger.register(Flush((), (more("r1", W2),)))
        await ledger.expire(published_before_ms=10**9, keep_bytes=0)
        over = await news(ledger, before)
        assert await ledger.prune(windows_before_ms=10**9, shards_before_ms=0) == 1
        missed = await news(ledger, before)
        assert (missed.since, set(missed.windows)) == (0, {W2})
        heard = await news(ledger, over)
        assert (heard.since, heard.windows) == (over.version, {}), "it was told before it went"


async def test_a_version_that_is_not_there_yet_is_told_everything(ledger_factory: Factory) -> None:
    async with opened(ledger_factory) as (ledger, state):
        await bring_to(ledger, WindowState.OPEN)
        told = await ledger.sync(TOLD, state.version + 1000)
        assert (told.since, set(told.windows)) == (0, {W1})


async def test_windows_are_found_by_their_ids(ledger_factory: Factory) -> None:
    async with opened(ledger_factory) as (ledger, _):
        await bring_to(ledger, WindowState.PUBLISHED)
        await bring_to(ledger, WindowState.OPEN, W2, "s2")
        await ledger.expire(published_before_ms=10**9, keep_bytes=0)
        found = await ledger.find((W2, W3, W1))
        assert [(each.window_id, each.state, each.retained) for each in found] == [
            (W2, WindowState.OPEN, True),
            (W1, WindowState.PUBLISHED, False),
        ]
        assert await ledger.find(()) == ()
        assert [each.window_id for each in await ledger.visible_windows()] == [W1]


async def test_retention_and_pruning_go_step_by_step(ledger_factory: Factory, clock: Any) -> None:
    async with opened(ledger_factory) as (ledger, _):
        for window_id in (W3, W1, W2):
            clock.ms += 1000
            await bring_to(ledger, WindowState.PUBLISHED, window_id, window_id)
        gone = [
            [
                each.window_id
                for each in await ledger.expire(published_before_ms=before, keep_bytes=0, limit=2)
            ]
            for before in (10**9, 0, 10**9)
        ]
        assert gone == [[W3, W1], [W2], []]
        counts = [await ledger.prune(windows_before_ms=10**9, shards_before_ms=0, limit=2) for _ in range(3)]
        assert counts == [2, 1, 0]


async def test_windows_with_rows_that_wait_do_not_stop_retention_from_going_on(
    ledger_factory: Factory, clock: Any
) -> None:
    async with opened(ledger_factory) as (ledger, _):
        for window_id in (W1, W2, BATCH):
            clock.ms += 1000
            await bring_to(ledger, WindowState.PUBLISHED, window_id, window_id)
        await ledger.register(Flush((), (more("r1"),)))
        (free,) = await ledger.expire(published_before_ms=10**9, keep_bytes=0, limit=1)
        assert free == seg(W2, W2, revision=1)


async def test_what_is_retained_is_counted_through_revisions(ledger_factory: Factory) -> None:
    async with opened(ledger_factory) as (ledger, _):
        await bring_to(ledger, WindowState.PUBLISHED)
        await ledger.register(Flush((), (more("r1"),)))
        await take_to(ledger, WindowState.CUT)
        await bring_to(ledger, WindowState.PUBLISHED, W2, "s2")
        assert await ledger.expire(published_before_ms=0, keep_bytes=500) == (), "only W2 is published"
        assert await ledger.commit((await attempted(ledger),)) == {W1}
        await ledger.published({W1: 2})
        assert await ledger.expire(published_before_ms=0, keep_bytes=1500) == ()
        assert len(await ledger.expire(published_before_ms=0, keep_bytes=1499)) >= 1


# What it costs.


def _publish_all(store: SqliteStore, first: int, count: int) -> None:
    """Publish windows of one segment each, in some transactions."""
    names = [f"w{number:06d}" for number in range(first, first + count)]
    segments = tuple(Segment(f"s-{name}", name, 1, 10, n, n + 1) for n, name in enumerate(names))
    store.register(Flush((), segments), now_ms=1)
    store.cut(tuple(names))
    begun = store.begin_attempts(tuple(names))
    store.commit(tuple(Commit(name, attempt, "stage", ("f",), 1) for name, attempt in begun.items()))
    store.published(begun, now_ms=first)


CALLS: dict[str, Callable[[SqliteStore, int], Any]] = {
    "sync": lambda store, version: store.sync(TOLD, version),
    "register": lambda store, _: store.register(Flush((), (Segment("n", "new", 1, 1, 0, 1),)), now_ms=9),
    "cut": lambda store, _: store.cut(("w000003",)),
    "adopt": lambda store, _: store.adopt(),
    "expire by age": lambda store, _: store.expire(published_before_ms=1, keep_bytes=10**9, limit=5),
    "expire by bytes": lambda store, _: store.expire(published_before_ms=0, keep_bytes=0, limit=5),
    "expire nothing": lambda store, _: store.expire(published_before_ms=0, keep_bytes=10**9),
    "prune nothing": lambda store, _: store.prune(windows_before_ms=10**9, shards_before_ms=0),
}


@pytest.mark.parametrize("name", CALLS)
def test_in_sqlite_a_call_reads_no_more_rows_however_many_windows_are_retained(
    tmp_path: Path, name: str
) -> None:
    counts = []
    for count in (100, 2_000):
        store = SqliteStore(tmp_path / f"{count}.sqlite", pipeline="p", server_id="one")
        store.open(now_ms=0)
        assert store._db is not None
        store._db.execute("PRAGMA synchronous = OFF")
        for first in range(0, count, 100):
            _publish_all(store, first, 100)
        version = store.sync(TOLD).version
        with counting_sqlite(store._db) as of_sqlite, counting_python() as of_python:
            CALLS[name](store, version)
        counts.append((of_sqlite.count, of_python.count))
        store.close()
    few, many = counts
    assert many[0] <= few[0] * 1.1 + 50
    assert many[1] <= few[1] * 1.1 + 50


def _book(windows: int) -> Book:
    book, draft = Book(), Draft(Book())
    for number in range(windows):
        name = f"w{number:06d}"
        segments = (Segment(f"s-{name}", name, 1, 10, number, number + 1),)
        entry = WindowEntry(
            name, WindowState.PUBLISHED, number, number + 1, segments=segments, published_ms=number
        )
        draft.windows.put(name, entry)
    book.apply(draft.changes())
    return book


RULES: dict[str, Callable[[Draft], Any]] = {
    "sync": lambda draft: draft.book.state(draft.book.version),
    "expire by age": lambda draft: rules.expire(draft, published_before_ms=5, keep_bytes=10**9, limit=5),
    "expire by bytes": lambda draft: rules.expire(draft, published_before_ms=0, keep_bytes=0, limit=5),
    "adopt": lambda draft: rules.adopt(draft, "one"),
    "prune": lambda draft: rules.prune(
        draft, windows_before_ms=10**9, shards_before_ms=0, keep_shards=frozenset(), limit=10
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_a_rule_looks_at_no_more_windows_however_many_are_retained(name: str) -> None:
    counts = []
    for count in (100, 2_000):
        book = _book(count)
        with counting_python() as operations:
            told = RULES[name](Draft(book))
        counts.append(operations.count)
        if name == "sync":
            assert told.windows == {}
    assert counts[1] <= counts[0] * 1.1 + 50
