"""Rules of a flush over a draft: weighed as a whole, then written as a whole. They mean what ``Ledger`` says."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

from mldserver.errors import InternalError
from mldserver.ledger import letter_rules
from mldserver.ledger.book import ShardRow
from mldserver.ledger.contract import FlushResult, SegmentKind, ShardState, WindowEntry, WindowState

if TYPE_CHECKING:
    from mldserver.ledger.book import Draft
    from mldserver.ledger.contract import Flush, PositionUpdate, Segment

__all__ = ["register"]


def register(draft: Draft, flush: Flush, now_ms: int) -> FlushResult:
    """Register a flush, or refuse it with every reason; InternalError for what the contract forbids."""
    stands = draft.totals.batch_progress
    progress = stands.moved_on(flush.batches) if flush.batches is not None else stands
    result = FlushResult(
        lost_shards=frozenset(update.shard_id for update in flush.positions if not _goes_on(draft, update)),
        cut_windows=frozenset(
            segment.window_id
            for segment in flush.segments
            if segment.kind is SegmentKind.WINDOW and _closed(draft, segment)
        ),
        expired_windows=frozenset(
            segment.window_id
            for segment in flush.segments
            if segment.kind is SegmentKind.RECOMPUTE and not _retained(draft, segment)
        ),
        gone_letters=letter_rules.missing(draft, flush.redriven),
        batch_progress=stands if progress is None else None,
    )
    if progress is None or not result.registered:
        return result
    for update in flush.positions:
        _move(draft, update, now_ms)
    by_window: defaultdict[tuple[SegmentKind, str], list[Segment]] = defaultdict(list)
    for segment in flush.segments:
        if segment.kind is not SegmentKind.LATE:
            by_window[segment.kind, segment.window_id].append(segment)
        elif draft.late.get(segment.path) is None:
            draft.late.put(segment.path, replace(segment, revision=0))
        else:
            raise _bug(f"The segment {segment.path} is registered already.", window=segment.window_id)
    for (kind, window_id), segments in by_window.items():
        _add(draft, kind, window_id, segments)
    letter_rules.remove(draft, flush.redriven)
    letter_rules.store(draft, flush.dead_letters)
    clock = max(draft.totals.clock, flush.clock)
    draft.totals = replace(draft.totals, clock=clock, batch_progress=progress)
    return result


def _goes_on(draft: Draft, update: PositionUpdate) -> bool:
    """Whether an update comes from the shard's latest epoch and goes on from where the shard stands."""
    row = draft.shards.get(update.shard_id)
    return row is not None and row.state.epoch == update.epoch and row.state.position == update.previous


def _closed(draft: Draft, segment: Segment) -> bool:
    """Whether a window takes no more rows. Its own entry says so; without one, what was pruned does."""
    entry, below = draft.windows.get(segment.window_id), draft.totals.cut_below_ms
    if entry is not None:
        return entry.state is not WindowState.OPEN
    return segment.end_ms is not None and below is not None and segment.end_ms <= below


def _retained(draft: Draft, segment: Segment) -> bool:
    """Whether a window takes late rows for a next revision: one that was skipped does not."""
    entry = draft.windows.get(segment.window_id)
    return entry is not None and entry.retained and not entry.is_skipped


def _move(draft: Draft, update: PositionUpdate, now_ms: int) -> None:
    row = draft.shards.get(update.shard_id)
    assert row is not None, "a flush with an unknown shard is refused"
    stored, position = row.state.position, update.position
    if stored is not None and (position is None or position < stored):
        what = f"The position of shard {update.shard_id} would go back from {stored} to {position}."
        raise _bug(what, shard=update.shard_id)
    # Not ``replace``, which takes four times as long: this is every shard of every flush.
    state = ShardState(
        update.shard_id,
        row.state.epoch,
        position,
        _latest(row.state.effective_ms, update.effective_ms),
        _latest(row.state.event_ms, update.event_ms),
        row.state.ended or update.ended,
        row.state.parents,
        row.state.owner,
        row.state.gap_accepted,
    )
    ended_ms = now_ms if row.ended_ms is None and update.ended else row.ended_ms
    draft.shards.put(update.shard_id, ShardRow(state, ended_ms))


def _latest(stored: int | None, update: int | None) -> int | None:
    if stored is None or update is None:
        return update if stored is None else stored
    return max(stored, update)


def _add(draft: Draft, kind: SegmentKind, window_id: str, segments: list[Segment]) -> None:
    """Add segments to an open window, which comes into being with its first, or to what waits for a cut one's next revision."""
    entry, first = draft.windows.get(window_id), segments[0]
    if kind is SegmentKind.WINDOW and entry is None:
        entry = WindowEntry(window_id, WindowState.OPEN, first.start_ms, first.end_ms)
    assert entry is not None, "a flush with such a segment is refused"
    if kind is SegmentKind.RECOMPUTE and entry.state is WindowState.OPEN:
        what = f"Window {window_id} is open: {first.path} is no segment for a later revision."
        raise _bug(what, window=window_id)
    for segment in segments:
        if segment.path in draft.book.paths or segment.path in draft.paths:
            raise _bug(f"The segment {segment.path} is registered already.", window=window_id)
        draft.paths.add(segment.path)
        if (entry.start_ms, entry.end_ms) != (segment.start_ms, segment.end_ms):
            raise InternalError(
                f"Window {window_id} has other bounds than those of {segment.path}.",
                did="The flush was rolled back.",
                advice="A changed window size needs an output folder of its own.",
                window=window_id,
            )
    fresh = tuple(replace(segment, revision=0) if segment.revision else segment for segment in segments)
    if kind is SegmentKind.RECOMPUTE:
        entry = replace(entry, pending=entry.pending + fresh)
    else:
        rows = sum(segment.rows for segment in fresh)
        entry = replace(entry, segments=entry.segments + fresh, rows_in=entry.rows_in + rows)
    draft.windows.put(window_id, entry)


def _bug(what: str, **where: str) -> InternalError:
    advice = "Report this with the log: it is a bug."
    return InternalError(what, did="The flush was rolled back.", advice=advice, **where)
