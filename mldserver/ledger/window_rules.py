"""Rules of windows over a draft: their life after the rows, step by step. They mean what ``Ledger`` says."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from mldserver.ledger.book import segment_bytes
from mldserver.ledger.contract import WindowState, storable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from mldserver.ledger.book import Draft
    from mldserver.ledger.contract import Commit, Decision, Segment, WindowEntry

_UNDER_WAY: Final = frozenset({WindowState.CUT, WindowState.COMMITTED})


def cut(draft: Draft, window_ids: Iterable[str], server_id: str) -> tuple[WindowEntry, ...]:
    """Fix the segments of windows that are open, or published with more waiting; return those, in order."""
    entries = []
    for window_id in window_ids:
        entry = draft.windows.get(window_id)
        if entry is None:
            continue
        if entry.state is WindowState.OPEN:
            revision, before, added = entry.revision, entry.pending, entry.segments
        elif entry.state is WindowState.PUBLISHED and entry.pending:
            revision, before, added = entry.revision + 1, entry.segments, entry.pending
        else:
            continue
        entry = replace(entry, state=WindowState.CUT, revision=revision, owner=server_id, segments=before)
        entry = _take_in(entry, added)
        draft.windows.put(window_id, entry)
        entries.append(entry)
    _go_behind(draft, entries)
    return tuple(entries)


def _go_behind(draft: Draft, entries: Iterable[WindowEntry]) -> None:
    """Let ``batches`` go on behind windows that are cut."""
    numbered = (entry.window_id for entry in entries if entry.end_ms is None)
    draft.totals = replace(draft.totals, batch_progress=draft.totals.batch_progress.behind(numbered))


def _take_in(entry: WindowEntry, added: Iterable[Segment]) -> WindowEntry:
    """Make segments part of the window's revision; none waits then."""
    segments = (*entry.segments, *(replace(segment, revision=entry.revision) for segment in added))
    return replace(entry, segments=segments, pending=(), rows_in=sum(segment.rows for segment in segments))


def adopt(draft: Draft, server_id: str) -> tuple[WindowEntry, ...]:
    """Own every window that is cut or committed and has no owner, oldest first."""
    unfinished = (draft.book.windows[window_id] for window_id in draft.book.unfinished)
    orphans = [entry for entry in unfinished if entry.owner is None]
    # Windows of ``batches`` have no start; their ids are in order.
    orphans.sort(key=lambda entry: (entry.start_ms is not None, entry.start_ms or 0, entry.window_id))
    adopted = tuple(replace(entry, owner=server_id) for entry in orphans)
    for entry in adopted:
        draft.windows.put(entry.window_id, entry)
    return adopted


def _cut_and_owned(draft: Draft, window_id: str, server_id: str) -> WindowEntry | None:
    entry = draft.windows.get(window_id)
    ours = entry is not None and entry.state is WindowState.CUT and entry.owner == server_id
    return entry if ours else None


def begin_attempts(draft: Draft, window_ids: Iterable[str], server_id: str) -> dict[str, int]:
    """Count an attempt at each window that is cut and this server's; return their numbers."""
    begun: dict[str, int] = {}
    for window_id in window_ids:
        entry = _cut_and_owned(draft, window_id, server_id)
        if entry is not None:
            begun[window_id] = entry.attempt + 1
            draft.windows.put(window_id, replace(entry, attempt=entry.attempt + 1))
    return begun


def commit(draft: Draft, commits: Iterable[Commit], server_id: str) -> frozenset[str]:
    """Make latest attempts at this server's cut windows count; return the windows."""
    counted = set()
    for output in commits:
        entry = _cut_and_owned(draft, output.window_id, server_id)
        if entry is None or entry.attempt != output.attempt:
            continue
        entry = replace(entry, state=WindowState.COMMITTED, staging=output.staging, error=None)
        entry = replace(entry, files=output.files, rows_out=output.rows_out)
        draft.windows.put(output.window_id, entry)
        counted.add(output.window_id)
    return frozenset(counted)


def published(
    draft: Draft, attempts: Mapping[str, int], server_id: str, *, retain: bool, now_ms: int
) -> tuple[Segment, ...]:
    """Note that outputs of this server's attempts are visible; return the segments of windows not retained."""
    free: list[Segment] = []
    for window_id, attempt in attempts.items():
        entry = draft.windows.get(window_id)
        if entry is None or entry.state is not WindowState.COMMITTED:
            continue
        if (entry.owner, entry.attempt) != (server_id, attempt):
            continue
        entry = replace(entry, state=WindowState.PUBLISHED, owner=None, staging=None, error=None)
        entry = replace(entry, published_ms=now_ms)
        draft.windows.put(window_id, entry)
        if not retain:
            free.extend(_let_go(draft, entry))
    return tuple(free)


def _let_go(draft: Draft, entry: WindowEntry) -> tuple[Segment, ...]:
    """Stop retaining a published window; return its segments. One with segments that wait is left as it is."""
    if entry.pending:
        return ()
    draft.windows.put(entry.window_id, replace(entry, retained=False, segments=()))
    return entry.segments


def let_go(draft: Draft, window_ids: Iterable[str]) -> None:
    """Stop retaining those of these windows that are published."""
    for window_id in window_ids:
        entry = draft.windows.get(window_id)
        if entry is not None and entry.state is WindowState.PUBLISHED:
            _let_go(draft, entry)


def begin_anew(draft: Draft, size_ms: int, now_ms: int) -> None:
    """Let windows of this size begin at or after the end of every one that has begun."""
    entries = draft.book.windows.values()
    begun = [entry.end_ms for entry in entries if entry.start_ms is not None and entry.start_ms <= now_ms]
    last = max((end for end in (*begun, draft.totals.cut_below_ms) if end is not None), default=None)
    if last is not None:
        draft.totals = replace(draft.totals, cut_below_ms=-(-last // size_ms) * size_ms)


def expire(draft: Draft, *, published_before_ms: int, keep_bytes: int, limit: int) -> tuple[Segment, ...]:
    """Stop retaining windows by age, then by size; return the segments to delete."""
    book, kept, left = draft.book, draft.book.retained_bytes, limit
    free: list[Segment] = []
    for window_id in book.retained.oldest(None if kept > keep_bytes else published_before_ms):
        entry = book.windows[window_id]
        old = entry.published_ms is not None and entry.published_ms < published_before_ms
        if not left or not (old or kept > keep_bytes):
            break
        gone = _let_go(draft, entry)
        if gone:
            left -= 1
            kept -= segment_bytes(entry)
            free.extend(gone)
    return tuple(free)


def late_published(draft: Draft, paths: Iterable[str]) -> None:
    """Forget late files that are visible; those that are not listed (any more) do not matter."""
    for path in paths:
        draft.late.drop(path)


def set_aside(draft: Draft, window_id: str, error: str, server_id: str) -> None:
    """Put a cut window of this server aside."""
    entry = _cut_and_owned(draft, window_id, server_id)
    if entry is not None:
        entry = replace(entry, state=WindowState.SET_ASIDE, owner=None, error=storable(error))
        draft.windows.put(window_id, entry)


def halt(draft: Draft, window_id: str, error: str, server_id: str, *, first: bool) -> bool:
    """Keep why a window of this server is halted; if not for the first time, only where there is an error still."""
    entry = draft.windows.get(window_id)
    if entry is None or entry.state not in _UNDER_WAY or entry.owner != server_id:
        return False
    if not first and entry.error is None:
        return False
    draft.windows.put(window_id, replace(entry, error=storable(error)))
    return True


def decide(draft: Draft, window_id: str, decision: Decision, now_ms: int) -> bool:
    """Do what an operator decides about a window that is halted or set aside."""
    entry = draft.windows.get(window_id)
    if entry is None or entry.error is None:
        return False
    match decision, entry.state:
        case "retry", WindowState.SET_ASIDE:
            entry = replace(entry, state=WindowState.CUT, error=None)
        case "retry", WindowState.CUT | WindowState.COMMITTED:
            entry = replace(entry, error=None)
        case "set_aside", WindowState.CUT:
            entry = replace(entry, state=WindowState.SET_ASIDE, owner=None)
        case "skip", WindowState.CUT | WindowState.SET_ASIDE:
            entry = replace(entry, state=WindowState.PUBLISHED, owner=None, published_ms=now_ms)
            entry = _take_in(entry, entry.pending)
        case _:
            return False
    draft.windows.put(window_id, entry)
    return True


def prune(draft: Draft, *, before_ms: int, limit: int) -> int:
    """Forget windows that were published and are not retained; return how many."""
    book = draft.book
    old = (book.windows[window_id] for window_id in book.over.oldest(before_ms))
    past = (entry for entry in old if entry.end_ms is None or entry.end_ms <= before_ms)
    over = tuple(itertools.islice(past, limit))
    ends = [entry.end_ms for entry in over] + [draft.totals.cut_below_ms]
    below = max((end for end in ends if end is not None), default=None)
    draft.totals = replace(draft.totals, cut_below_ms=below)
    _go_behind(draft, over)
    for entry in over:
        draft.windows.drop(entry.window_id)
    return len(over)
