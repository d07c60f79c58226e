"""Rules of servers, shards and windows over a draft: live servers, owners, and a window's life after its rows.

They mean what ``Ledger`` says.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import islice, takewhile
from typing import Final

from mldserver.errors import InternalError
from mldserver.ledger import state_rules
from mldserver.ledger.book import Book, Draft
from mldserver.ledger.contract import (
    Commit,
    Decision,
    FunctionLife,
    Segment,
    ServerState,
    ShapeChange,
    ShardState,
    Wanted,
    WindowEntry,
    WindowState,
    storable,
)
from mldserver.records import Sequence
from mldserver.stores import StoreClaim

_UNDER_WAY: Final = frozenset({WindowState.CUT, WindowState.COMMITTED})


def enter(draft: Draft, server_id: str, now_ms: int) -> int:
    """Register a server, expiring who had its id before; return the life that it begins.

    It goes on with the ledger's time. ``now_ms``, of this host's clock, begins it, and counts again only where it can let no
    window expire too early.
    """
    before, time_ms = draft.servers.get(server_id), draft.book.time_ms
    if time_ms is not None:
        alone = not draft.book.servers and not draft.book.retained
        now_ms = max(time_ms, now_ms if alone else 0, 0 if before is None else before.beat_ms + 1)
    _remove(draft, server_id)
    # Eight hexadecimal digits that no other ledger has: they stand in the names of the files that it registers.
    life, ledger_id = draft.totals.lives + 1, draft.totals.ledger_id or uuid.uuid4().hex[:8]
    draft.totals = replace(draft.totals, lives=life, ledger_id=ledger_id)
    draft.servers.put(server_id, ServerState(server_id, now_ms, life=life))
    return life


def beat(draft: Draft, state: ServerState, server_id: str) -> None:
    """Store a server's report about itself. Raises InternalError for a report about another server."""
    if state.server_id != server_id:
        raise InternalError(f"Server {server_id} told of {state.server_id}.", server=server_id)
    known = draft.servers.get(server_id)
    assert known is not None, "only registered servers come here"
    held_by = None if state.held_by is None else storable(state.held_by)
    state = replace(state, held_by=held_by, reason=storable(state.reason))
    draft.servers.put(server_id, replace(state, shape=known.shape, life=known.life))


def declare(draft: Draft, server_id: str, change: ShapeChange, version: int, now_ms: int) -> bool:
    """Store a server's shape. A different shape replaces the pipeline's if the ledger is still at ``version``."""
    if change.fingerprint != draft.totals.shape and draft.book.version != version:
        return False
    draft.declares = True
    own = draft.servers.get(server_id)
    assert own is not None, "only registered servers come here"
    draft.servers.put(server_id, replace(own, shape=change.fingerprint))
    if draft.shapes.get(change.fingerprint) is None:
        draft.shapes.put(change.fingerprint, change.text)
    # A drain is over once all servers that ran before have left: other starting servers have declared nothing yet.
    others = [server for name, server in draft.book.servers.items() if name != server_id]
    undeployed = draft.totals.life.wanted is Wanted.UNDEPLOYED
    draining = draft.totals.draining and (undeployed or any(other.shape for other in others))
    known = change.fingerprint == draft.totals.shape
    draft.totals = replace(draft.totals, shape=change.fingerprint, draining=draining)
    if known:
        return True  # another server that starts has done the rest
    for window_id in change.over:
        entry = draft.windows.get(window_id)
        if entry is not None and entry.state is WindowState.PUBLISHED:
            _let_go(draft, entry)
    if change.window_ms is not None:
        # Windows of the new size begin at or after the end of every one that has begun.
        entries = draft.book.windows.values()
        begun = [entry.end_ms for entry in entries if entry.start_ms is not None and entry.start_ms <= now_ms]
        last = max((end for end in (*begun, draft.totals.cut_below_ms) if end is not None), default=None)
        if last is not None:
            below = -(-last // change.window_ms) * change.window_ms
            draft.totals = replace(draft.totals, cut_below_ms=below)
    if change.forget_event_times:
        for shard_id, shard in draft.book.shards.items():
            draft.shards.put(shard_id, replace(shard, event_ms=None))
    return True


def drain(draft: Draft) -> None:
    """Ask all servers to drain."""
    draft.totals = replace(draft.totals, draining=True)


def change_life(draft: Draft, before: FunctionLife, after: FunctionLife) -> bool:
    """Change what is wanted of the function, if it is ``before``. An undeploy drains.

    A deploy ends that drain only where servers still run: if none does, the first one that declares its shape ends it, and may
    change the shape.
    """
    totals = draft.totals
    if totals.life != before:
        return False
    draining = totals.draining
    if after.wanted is Wanted.UNDEPLOYED:
        draining = True
    elif before.wanted is Wanted.UNDEPLOYED:
        draining = draining and not any(server.shape for server in draft.book.servers.values())
    draft.totals = replace(totals, life=after, draining=draining)
    return True


def may_forget(life: FunctionLife, shards: Mapping[str, ShardState]) -> bool:
    """Return whether the function is undeployed, keeps nothing, and no server has a shard of it."""
    undeployed = life.wanted is Wanted.UNDEPLOYED and not life.keep
    return undeployed and not any(shard.owner for shard in shards.values())


def forget(draft: Draft, now_ms: int) -> bool:
    """Forget keyed state and event times of an undeployed function; False if a server has a shard of it, or it is kept."""
    shards = draft.book.shards
    if not may_forget(draft.totals.life, shards):
        return False
    state_rules.forget_state(draft, shards, now_ms)
    for shard_id in shards:
        shard = draft.shards.get(shard_id)
        assert shard is not None
        # The position stays: up to there everything was forgotten. The next opening may begin behind it.
        draft.shards.put(shard_id, replace(shard, gap_accepted=True, event_ms=None))
    return True


def expire_servers(draft: Draft, seen: Mapping[str, int], server_id: str) -> frozenset[str]:
    """Remove servers that have not beaten since they were seen, except the caller.

    Returns those that are gone, including those removed by other servers.
    """
    gone = set()
    for other_id in sorted(seen.keys() - {server_id}):
        other = draft.servers.get(other_id)
        if other is None or other.beat_ms == seen[other_id]:
            _remove(draft, other_id)
            gone.add(other_id)
    return frozenset(gone)


def claim(draft: Draft, folder: str, instead_of: str | None, claimant: str | None) -> None:
    """Store the folder unless one is stored; if the id is ``instead_of``, replace both, and remove other servers."""
    totals = replace(draft.totals, claims=draft.totals.claims + 1, folder=draft.totals.folder or folder)
    if totals.ledger_id == instead_of:
        totals = replace(totals, ledger_id=uuid.uuid4().hex[:8], folder=folder)
        for server_id in sorted(draft.book.servers.keys() - {claimant}):
            _remove(draft, server_id)
    draft.totals = totals


def leave(draft: Draft, server_id: str, life: int) -> None:
    """Take the server's row out, unless it is out already, or another has its id."""
    server = draft.servers.get(server_id)
    if server is not None and server.life == life:
        _remove(draft, server_id)


def _remove(draft: Draft, server_id: str) -> None:
    """Take a server's row out, if it has one, and let go what it holds."""
    draft.servers.drop(server_id)
    for shard_id, shard in draft.book.shards.items():
        if shard.owner == server_id:
            draft.shards.put(shard_id, replace(shard, owner=None))
    for window_id in draft.book.unfinished:
        entry = draft.book.windows[window_id]
        if entry.owner == server_id:
            draft.windows.put(window_id, replace(entry, owner=None))


def open_shard(
    draft: Draft,
    shard_id: str,
    parents: tuple[str, ...],
    server_id: str,
    claim: StoreClaim | None = None,
    start: Sequence | None = None,
) -> ShardState:
    """Raise the shard's epoch, own it and its store; return its state with the position and the accepted gap until now."""
    shard = draft.shards.get(shard_id) or ShardState(shard_id, epoch=0)
    opened = replace(shard, epoch=shard.epoch + 1, owner=server_id, parents=parents or shard.parents)
    if claim is not None:
        opened = replace(opened, store=state_rules.open_store(draft, opened, claim))
    # A server that dies before its first flush must not meet the same gap again, which would then be refused.
    position = position_after_gap(shard, start) or opened.position
    draft.shards.put(shard_id, replace(opened, position=position, gap_accepted=False))
    return opened


def position_after_gap(shard: ShardState, start: Sequence | None) -> Sequence | None:
    """Return ``start`` if it is beyond the position of a shard whose gap is accepted; else None."""
    beyond = start is not None and (shard.position is None or shard.position < start)
    return start if beyond and shard.gap_accepted and not shard.ended else None


def release_shard(draft: Draft, shard_id: str, epoch: int) -> None:
    """Give a shard up, unless it was opened again since."""
    shard = draft.shards.get(shard_id)
    if shard is not None and shard.epoch == epoch:
        draft.shards.put(shard_id, replace(shard, owner=None))


def end_shards(draft: Draft, shard_ids: Iterable[str], now_ms: int) -> None:
    """Mark shards as ended; the first end time stays. Unknown shards are added as ended."""
    for shard_id in shard_ids:
        shard = draft.shards.get(shard_id) or ShardState(shard_id, epoch=0)
        if not shard.ended:
            draft.shards.put(shard_id, replace(shard, ended_ms=now_ms))


def accept_gap(draft: Draft, shard_id: str) -> bool:
    """Allow the next opening to start beyond the position; False when the shard is unknown."""
    shard = draft.shards.get(shard_id)
    if shard is not None:
        draft.shards.put(shard_id, replace(shard, gap_accepted=True))
    return shard is not None


def reset(
    draft: Draft, shard_ids: Iterable[str], now_ms: int, *, forget_state: bool = False
) -> frozenset[str]:
    """Forget where shards without an owner stand; the epoch is raised against what is still under way."""
    forgotten = set()
    for shard_id in _without_state(draft, shard_ids, now_ms, forget=forget_state):
        shard = draft.shards.get(shard_id)
        if shard is not None and shard.owner is None:
            shard = replace(shard, epoch=shard.epoch + 1, position=None, ended_ms=None, gap_accepted=False)
            draft.shards.put(shard_id, replace(shard, effective_ms=None, event_ms=None))
            forgotten.add(shard_id)
    return frozenset(forgotten)


def forget_shards(
    draft: Draft, shard_ids: Iterable[str], now_ms: int, *, forget_state: bool = False
) -> frozenset[str]:
    """Forget shards without an owner; return those."""
    forgotten = set()
    for shard_id in _without_state(draft, shard_ids, now_ms, forget=forget_state):
        shard = draft.shards.get(shard_id)
        if shard is not None and shard.owner is None:
            draft.shards.drop(shard_id)
            forgotten.add(shard_id)
    state_rules.drop_unused(draft)
    return frozenset(forgotten)


def _without_state(draft: Draft, shard_ids: Iterable[str], now_ms: int, *, forget: bool) -> frozenset[str]:
    """Return the shards that have no keyed state, after it was forgotten if that is wanted."""
    if forget:
        return state_rules.forget_state(draft, shard_ids, now_ms)
    return frozenset(shard_ids) - state_rules.shards_with_state(draft.book)


def cut(
    draft: Draft, window_ids: Iterable[str], server_id: str, *, all_until_ms: int | None = None
) -> tuple[WindowEntry, ...]:
    """Fix the segments of windows that are open, or published with more waiting; return those, in order.

    ``all_until_ms``: cut every open window that ends by then, too, those that end first in front. No other will open.
    """
    entries = []
    if all_until_ms is not None:
        ends = (
            (entry.end_ms, window_id)
            for window_id, entry in draft.book.windows.items()
            if entry.state is WindowState.OPEN and entry.end_ms is not None and entry.end_ms <= all_until_ms
        )
        window_ids = dict.fromkeys((*(window_id for _, window_id in sorted(ends)), *window_ids))
        below = max(all_until_ms, draft.totals.cut_below_ms or all_until_ms)
        draft.totals = replace(draft.totals, cut_below_ms=below)
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
        entry = _with_segments(entry, added)
        draft.windows.put(window_id, entry)
        entries.append(entry)
    progress = draft.totals.batch_progress.behind(entry.window_id for entry in entries)
    draft.totals = replace(draft.totals, batch_progress=progress)
    return tuple(entries)


def _with_segments(entry: WindowEntry, added: Iterable[Segment]) -> WindowEntry:
    """Make segments part of the window's revision; none waits then."""
    segments = (*entry.segments, *(replace(segment, revision=entry.revision) for segment in added))
    return replace(entry, segments=segments, pending=(), rows_in=sum(segment.rows for segment in segments))


def preceding(windows: Mapping[str, WindowEntry], window_id: str) -> tuple[WindowEntry | None, bool]:
    """Return the published window that ends last before a window does, and whether one before it is still to be published.

    Windows that were set aside or skipped do not count.
    """
    window, latest, waits = windows.get(window_id), None, False
    if window is None or window.end_ms is None:
        return None, False
    for entry in windows.values():
        if entry.end_ms is None or entry.end_ms >= window.end_ms:
            continue
        waits = waits or entry.state in _UNDER_WAY
        if entry.state is not WindowState.PUBLISHED or entry.is_skipped:
            continue
        if latest is None or latest.end_ms is None or latest.end_ms < entry.end_ms:
            latest = entry
    return latest, waits


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
    """Stop retaining a published window; return its segments that no other window lists.

    A window with segments that wait is left as it is.
    """
    if entry.pending:
        return ()
    draft.windows.put(entry.window_id, replace(entry, retained=False, segments=()))
    draft.released.update(segment.path for segment in entry.segments)
    paths, released = draft.book.paths, draft.released
    return tuple(segment for segment in entry.segments if released[segment.path] >= paths[segment.path])


def expire(draft: Draft, *, published_before_ms: int, keep_bytes: int, limit: int) -> tuple[Segment, ...]:
    """Stop retaining windows by age, then by size; return the segments to delete."""
    book, kept, left = draft.book, draft.book.retained_bytes, limit
    free: list[Segment] = []
    for published_ms, window_id in book.retained:
        if not left or not (published_ms < published_before_ms or kept > keep_bytes):
            break
        entry = book.windows[window_id]
        if gone := _let_go(draft, entry):
            left -= 1
            kept -= sum(segment.bytes for segment in gone)
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
    """Do what an operator decides about a window that is halted or set aside, or published."""
    entry = draft.windows.get(window_id)
    if decision == "recompute" and entry is not None and entry.can_be_recomputed:
        entry = replace(entry, state=WindowState.CUT, revision=entry.revision + 1)
        draft.windows.put(window_id, _with_segments(entry, entry.pending))
        return True
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
            entry = _with_segments(entry, entry.pending)
        case _:
            return False
    draft.windows.put(window_id, entry)
    return True


def _last(book: Book, until_ms: int) -> str | None:
    """Return the id of the published window that ends last, at ``until_ms`` at the latest."""
    shown = (
        entry
        for entry in book.windows.values()
        if entry.state is WindowState.PUBLISHED and not entry.is_skipped
    )
    ends = (
        (entry.end_ms, entry.window_id)
        for entry in shown
        if entry.end_ms is not None and entry.end_ms <= until_ms
    )
    return max(ends, default=(0, None))[1]


def prune(
    draft: Draft,
    *,
    windows_before_ms: int,
    shards_before_ms: int,
    keep_shards: frozenset[str],
    limit: int,
    ends_before_ms: int | None = None,
    keep_last: bool = False,
) -> int:
    """Forget old windows, at most ``limit``, and old shards, except ``keep_shards``; return how many.

    A window is old if it is no longer retained, was published before ``windows_before_ms``, and does not end after
    ``ends_before_ms`` (event time; None: as ``windows_before_ms``). A shard is old if it ended before ``shards_before_ms``, and
    no child could find its keyed state without it. ``keep_last``: of windows published until ``ends_before_ms`` the one that
    ends last is kept. The
    totals keep what later rules need of forgotten windows: up to which time windows were cut, and the progress of runs of rows.
    """
    book = draft.book
    old = takewhile(
        lambda published: published[0] < windows_before_ms, book.over
    )  # (published_ms, window id), in order
    entries = (book.windows[window_id] for _, window_id in old)
    end_ms = windows_before_ms if ends_before_ms is None else ends_before_ms
    last = _last(book, end_ms) if keep_last else None
    past = (e for e in entries if (e.end_ms is None or e.end_ms <= end_ms) and e.window_id != last)
    over = tuple(islice(past, limit))
    ends = [entry.end_ms for entry in over] + [draft.totals.cut_below_ms]
    below = max((end for end in ends if end is not None), default=None)
    progress = draft.totals.batch_progress.behind(entry.window_id for entry in over)
    draft.totals = replace(draft.totals, cut_below_ms=below, batch_progress=progress)
    for entry in over:
        draft.windows.drop(entry.window_id)
    gone = len(over)
    keep_shards |= state_rules.last_holders(book)
    for shard_id, shard in book.shards.items():
        if shard.ended_ms is not None and shard.ended_ms < shards_before_ms and shard_id not in keep_shards:
            draft.shards.drop(shard_id)
            gone += 1
    state_rules.drop_unused(draft)
    return gone
