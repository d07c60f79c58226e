"""Rules of rows and dead letters over a draft. They mean what ``Ledger`` says.

A flush is weighed as a whole, then written as a whole.

The letters of one transaction are one item, which is never changed: the book says which of them are marked and which
are gone, and the item goes with the last. A letter's id is the item's version and its place in there: ``17.0``.

To *redrive* a letter, a tool marks it. A server finds the mark, runs the handler, and registers the result together
with the letter's end, in one flush (``Flush.redriven``): two servers that take the same letter, or one that dies in
between, count it once. A record that fails again is a new letter of the same flush.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice

from mldserver.errors import InternalError
from mldserver.ledger import state_rules
from mldserver.ledger.book import Book, Draft, LetterItem
from mldserver.ledger.contract import (
    Flush,
    FlushResult,
    PositionUpdate,
    Segment,
    SegmentKind,
    ShardState,
    StoredLetter,
    WindowEntry,
    WindowState,
)
from mldserver.records import DeadLetter
from mldserver.windows import overlapping


def register(draft: Draft, flush: Flush, now_ms: int) -> FlushResult:
    """Register a flush, or refuse it with every reason; InternalError for what the contract forbids."""
    overlap = flush.every_ms is not None
    of_windows = (segment for segment in flush.segments if segment.kind is not SegmentKind.LATE)
    listed = [each for segment in of_windows for each in _windows_with(segment, flush.every_ms)]
    refused = {(each.kind, each.window_id) for each in listed if _refuses(draft, each, overlap=overlap)}
    letters = {letter_id: _find(draft, letter_id) for letter_id in flush.redriven}
    result = FlushResult(
        lost_shards=frozenset(_lost_shards(draft, flush)),
        cut_windows=frozenset(window_id for kind, window_id in refused if kind is SegmentKind.WINDOW),
        expired_windows=frozenset(window_id for kind, window_id in refused if kind is SegmentKind.RECOMPUTE),
        gone_letters=frozenset(
            letter_id
            for letter_id, place in letters.items()
            if place is None or not place[1].wanted & place[2]
        ),
    )
    if not result.registered:
        return result
    if flush.stores or flush.state_file is not None:
        state_rules.change(draft, flush)
    for update in flush.positions:
        _move(draft, update, now_ms)
    _note_files(draft, flush.segments)
    by_window: defaultdict[tuple[SegmentKind, str], list[Segment]] = defaultdict(list)
    for each in listed:
        by_window[each.kind, each.window_id].append(each)
    for (kind, window_id), segments in by_window.items():
        _add(draft, kind, window_id, segments, overlap=overlap)
    remove(draft, flush.redriven)
    store(draft, flush.effects.dead_letters)
    totals = draft.totals
    progress = totals.batch_progress
    if flush.batches is not None:
        progress = progress.moved_on(flush.batches)
    draft.totals = replace(totals, clock=max(totals.clock, flush.clock), batch_progress=progress)
    return result


def _note_files(draft: Draft, segments: Iterable[Segment]) -> None:
    """Note the paths of new segments, and store those of the late dataset. Raises InternalError for a path that is known."""
    for segment in segments:
        path, is_late = segment.path, segment.kind is SegmentKind.LATE
        if draft.late.get(path) if is_late else path in draft.book.paths or path in draft.paths:
            raise _bug(f"The segment {path} is registered already.", window=segment.window_id)
        if is_late:
            draft.late.put(path, replace(segment, revision=0))
        else:
            draft.paths.add(path)


def _lost_shards(draft: Draft, flush: Flush) -> set[str]:
    """Return the shards that another session or another flush has moved: the flush does not go on from where they stand."""
    lost = state_rules.refused(draft, flush) if flush.stores else set()
    for update in flush.positions:
        shard = draft.shards.get(update.shard_id)
        if shard is None or shard.epoch != update.epoch or shard.position != update.previous:
            lost.add(update.shard_id)
    return lost


def _windows_with(segment: Segment, every_ms: int | None) -> tuple[Segment, ...]:
    """Return a new segment as each window with its rows lists it: as it is, unless windows overlap (``Flush.every_ms``)."""
    if every_ms is None:
        return (replace(segment, revision=0) if segment.revision else segment,)
    assert segment.start_ms is not None
    assert segment.end_ms is not None, "windows that overlap are windows of time"
    return tuple(
        replace(segment, window_id=window_id, start_ms=start_ms, end_ms=end_ms, revision=0)
        for window_id, start_ms, end_ms in overlapping(segment.start_ms, segment.end_ms, every_ms)
    )


def _refuses(draft: Draft, segment: Segment, *, overlap: bool) -> bool:
    """Whether a window is not, or not any more, what a segment's rows were written for.

    ``overlap``: rows that are late in one window may be the first ones of another.
    """
    entry, below = draft.windows.get(segment.window_id), draft.totals.cut_below_ms
    late = segment.kind is SegmentKind.RECOMPUTE
    if entry is not None:
        return not entry.retained or entry.is_skipped if late else entry.state is not WindowState.OPEN
    # Its own entry says whether it takes rows; without one, what was pruned does.
    pruned = segment.end_ms is not None and below is not None and segment.end_ms <= below
    return pruned or (late and not overlap)


def _move(draft: Draft, update: PositionUpdate, now_ms: int) -> None:
    shard = draft.shards.get(update.shard_id)
    assert shard is not None, "a flush with an unknown shard is refused"
    stored, position = shard.position, update.position
    if stored is not None and (position is None or position < stored):
        what = f"The position of shard {update.shard_id} would go back from {stored} to {position}."
        raise _bug(what, shard=update.shard_id)
    # Not ``replace``, which takes four times as long: this is every shard of every flush.
    moved = ShardState(
        update.shard_id,
        shard.epoch,
        position,
        _latest(shard.effective_ms, update.effective_ms),
        _latest(shard.event_ms, update.event_ms),
        now_ms if update.ended and not shard.ended else shard.ended_ms,
        shard.parents,
        shard.owner,
        shard.gap_accepted,
        shard.store,
    )
    draft.shards.put(update.shard_id, moved)


def _latest(stored: int | None, update: int | None) -> int | None:
    if stored is None or update is None:
        return update if stored is None else stored
    return max(stored, update)


def _add(draft: Draft, kind: SegmentKind, window_id: str, segments: list[Segment], *, overlap: bool) -> None:
    """Add segments to an open window, which begins to exist with its first, or to what waits for a cut one's next revision."""
    entry, first = draft.windows.get(window_id), segments[0]
    if entry is None:
        entry = WindowEntry(window_id, WindowState.OPEN, first.start_ms, first.end_ms)
    is_open = entry.state is WindowState.OPEN
    if kind is SegmentKind.RECOMPUTE and is_open and not overlap:
        what = f"Window {window_id} is open: {first.path} cannot be a segment for a later revision."
        raise _bug(what, window=window_id)
    for segment in segments:
        if (entry.start_ms, entry.end_ms) != (segment.start_ms, segment.end_ms):
            raise InternalError(
                f"Window {window_id} has other bounds than those of {segment.path}.",
                did="The flush was rolled back.",
                advice="A changed window size needs another output folder.",
                window=window_id,
            )
    if not is_open:
        entry = replace(entry, pending=entry.pending + tuple(segments))
    else:
        # Rows that are late in another window only are not late in this one.
        fresh = tuple(
            replace(each, kind=SegmentKind.WINDOW) if kind is SegmentKind.RECOMPUTE else each
            for each in segments
        )
        rows = sum(segment.rows for segment in fresh)
        entry = replace(entry, segments=entry.segments + fresh, rows_in=entry.rows_in + rows)
    draft.windows.put(window_id, entry)


def _bug(what: str, **where: str) -> InternalError:
    advice = "Report this with the log: it is a bug."
    return InternalError(what, did="The flush was rolled back.", advice=advice, **where)


def store(draft: Draft, letters: tuple[DeadLetter, ...], *, wanted: bool = False) -> None:
    """Add letters, once a draft."""
    if not letters:
        return
    draft.dead_letters = letters
    item = LetterItem(len(letters))
    draft.letters.put(str(draft.book.version + 1), replace(item, wanted=item.there) if wanted else item)
    draft.totals = replace(draft.totals, dead_letters=draft.totals.dead_letters + len(letters))


def mark(draft: Draft, ids: Iterable[str], *, wanted: bool) -> frozenset[str]:
    """Mark letters, or take the mark away; return those that are there."""
    marked = set()
    for letter_id in ids:
        if (place := _find(draft, letter_id)) is not None:
            key, item, bit = place
            draft.letters.put(key, replace(item, wanted=item.wanted | bit if wanted else item.wanted & ~bit))
            marked.add(letter_id)
    return frozenset(marked)


def remove(draft: Draft, ids: Iterable[str]) -> frozenset[str]:
    """Delete letters; return those that were there."""
    gone = set()
    for letter_id in ids:
        if (place := _find(draft, letter_id)) is None:
            continue
        key, item, bit = place
        item = replace(item, wanted=item.wanted & ~bit, gone=item.gone | bit)
        if item.there:
            draft.letters.put(key, item)
        else:
            draft.letters.drop(key)
            draft.spent.append(int(key))
        gone.add(letter_id)
    if gone:
        draft.totals = replace(draft.totals, dead_letters=draft.totals.dead_letters - len(gone))
    return frozenset(gone)


def page(book: Book, after: str | None, limit: int, *, wanted: bool) -> Iterator[tuple[int, list[int]]]:
    """Yield a page of letters in order of storage: items by their version, and the places in each.

    ``after``: those behind this id. ``wanted``: only marked ones.
    """
    version, _, place = (after or "0.0").partition(".")
    behind = (int(version), int(place)) if after and version.isdigit() and place.isdigit() else (0, -1)
    for number in sorted(int(key) for key in book.letters):
        if number < behind[0] or limit <= 0:
            continue
        item = book.letters[str(number)]
        first = behind[1] + 1 if number == behind[0] else 0
        selected = list(islice(places(item.wanted if wanted else item.there, first), limit))
        limit -= len(selected)
        if selected:
            yield number, selected


def places(bits: int, first: int = 0) -> Iterator[int]:
    """Yield the places of an item whose bits are set, from one on."""
    bits = bits >> first << first
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


def stored(book: Book, version: int, place: int, letter: DeadLetter) -> StoredLetter:
    """Return a letter with its id and its mark in the book."""
    wanted = book.letters[str(version)].wanted >> place & 1
    return StoredLetter(f"{version}.{place}", letter, wanted=bool(wanted))


def _find(draft: Draft, letter_id: str) -> tuple[str, LetterItem, int] | None:
    """Return a letter's item with its key, and its bit there; None when it is gone, or never was."""
    key, _, place = letter_id.partition(".")
    item = draft.letters.get(key)
    if item is None or not (place.isascii() and place.isdigit()):
        return None
    bit = 1 << int(place) if int(place) < item.count else 0
    return (key, item, bit) if item.there & bit else None
