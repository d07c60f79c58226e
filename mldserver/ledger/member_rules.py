"""Rules of servers and shards over a draft: who lives, who holds what. They mean what ``Ledger`` says."""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import TYPE_CHECKING

from mldserver.errors import InternalError, ServerBuried
from mldserver.ledger import window_rules
from mldserver.ledger.book import ServerRow, ShardRow
from mldserver.ledger.contract import ServerState, ShardState, storable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from mldserver.ledger.book import Draft
    from mldserver.ledger.contract import ShapeChange

__all__ = [
    "accept_gap",
    "beat",
    "bury",
    "claim",
    "declare",
    "drain",
    "end_shards",
    "enter",
    "leave",
    "open_shard",
    "prune",
    "release_shard",
    "require",
    "reset",
]


def enter(draft: Draft, server_id: str, now_ms: int) -> int:
    """Register a server, burying who had its id before; return the life that it begins."""
    _release(draft, server_id)
    ledger_id = draft.totals.ledger_id or _new_ledger_id()
    draft.totals = replace(draft.totals, lives=draft.totals.lives + 1, ledger_id=ledger_id)
    draft.servers.put(server_id, ServerRow(ServerState(server_id, now_ms), draft.totals.lives))
    return draft.totals.lives


def _new_ledger_id() -> str:
    """Return eight hexadecimal digits that no other ledger has: they stand in the names of the files that it registers."""
    return uuid.uuid4().hex[:8]


def _lives(draft: Draft, server_id: str, life: int) -> bool:
    row = draft.servers.get(server_id)
    return row is not None and row.life == life


def require(draft: Draft, server_id: str, life: int) -> None:
    """Raise ServerBuried unless the server still lives this life."""
    if not _lives(draft, server_id, life):
        raise ServerBuried(
            f"Server {server_id} is not registered any more: another took it for dead, has its id,"
            " or has claimed the ledger anew (--new-ledger).",
            did="Nothing was written.",
            advice="It must start afresh; if it hung for long, look at the machine, or raise the time-out.",
            server=server_id,
        )


def beat(draft: Draft, state: ServerState, server_id: str) -> None:
    """Keep what a server tells of itself. Raises InternalError when it tells of another."""
    if state.server_id != server_id:
        raise InternalError(f"Server {server_id} told of {state.server_id}.", server=server_id)
    row = _row(draft, server_id)
    held_by = None if state.held_by is None else storable(state.held_by)
    state = replace(state, held_by=held_by, reason=storable(state.reason), shape=row.state.shape)
    draft.servers.put(server_id, replace(row, state=state))


def _row(draft: Draft, server_id: str) -> ServerRow:
    row = draft.servers.get(server_id)
    assert row is not None, "only registered servers come here"
    return row


def declare(draft: Draft, server_id: str, change: ShapeChange, version: int, now_ms: int) -> bool:
    """Note a server's shape. One that is not the pipeline's takes its place, if nobody wrote since ``version``."""
    if change.fingerprint != draft.totals.shape and draft.book.version != version:
        return False
    draft.declares = True
    row = _row(draft, server_id)
    draft.servers.put(server_id, replace(row, state=replace(row.state, shape=change.fingerprint)))
    if draft.shapes.get(change.fingerprint) is None:
        draft.shapes.put(change.fingerprint, change.text)
    # A drain is over once nobody is left who ran before: others that are just starting, too, have declared nothing.
    others = (row.state for name, row in draft.book.servers.items() if name != server_id)
    draining = draft.totals.draining and any(other.shape for other in others)
    known = change.fingerprint == draft.totals.shape
    draft.totals = replace(draft.totals, shape=change.fingerprint, draining=draining)
    if known:
        return True  # another server that starts has done the rest
    window_rules.let_go(draft, change.over)
    if change.window_ms is not None:
        window_rules.begin_anew(draft, change.window_ms, now_ms)
    if change.forget_event_times:
        for shard_id, shard in draft.book.shards.items():
            draft.shards.put(shard_id, replace(shard, state=replace(shard.state, event_ms=None)))
    return True


def drain(draft: Draft) -> None:
    """Ask all servers to drain."""
    draft.totals = replace(draft.totals, draining=True)


def bury(draft: Draft, seen: Mapping[str, int], server_id: str) -> frozenset[str]:
    """Remove servers that have not beaten since they were seen, but for the one that asks.

    Returns those that are gone, whoever removed them.
    """
    gone = set()
    for other_id in sorted(seen.keys() - {server_id}):
        row = draft.servers.get(other_id)
        if row is not None and row.state.beat_ms == seen[other_id]:
            _remove(draft, other_id)
            row = None
        if row is None:
            gone.add(other_id)
    return frozenset(gone)


def claim(draft: Draft, folder: str, instead_of: str | None, claimant: str | None) -> None:
    """Note whose ledger it is, unless that is known; in place of one that is given up, anew, with no other server."""
    totals = replace(draft.totals, claims=draft.totals.claims + 1, folder=draft.totals.folder or folder)
    if totals.ledger_id == instead_of:
        totals = replace(totals, ledger_id=_new_ledger_id(), folder=folder)
        for server_id in sorted(draft.book.servers.keys() - {claimant}):
            _remove(draft, server_id)
    draft.totals = totals


def leave(draft: Draft, server_id: str, life: int) -> None:
    """Take the server's row out, unless it is out already, or another has its id."""
    if _lives(draft, server_id, life):
        _remove(draft, server_id)


def _remove(draft: Draft, server_id: str) -> None:
    draft.servers.drop(server_id)
    _release(draft, server_id)


def _release(draft: Draft, server_id: str) -> None:
    """Let go what a server holds."""
    for shard_id, row in draft.book.shards.items():
        if row.state.owner == server_id:
            draft.shards.put(shard_id, replace(row, state=replace(row.state, owner=None)))
    for window_id in draft.book.unfinished:
        entry = draft.book.windows[window_id]
        if entry.owner == server_id:
            draft.windows.put(window_id, replace(entry, owner=None))


def _know(draft: Draft, shard_id: str, parents: tuple[str, ...]) -> ShardRow:
    """Return a shard, which is new or stays as it was, but for parents where they are named."""
    row = draft.shards.get(shard_id) or ShardRow(ShardState(shard_id, epoch=0))
    if parents:
        row = replace(row, state=replace(row.state, parents=parents))
    draft.shards.put(shard_id, row)
    return row


def open_shard(draft: Draft, shard_id: str, parents: tuple[str, ...], server_id: str) -> ShardState:
    """Raise the shard's epoch and own it; return its state with the gap that was accepted until now."""
    row = _know(draft, shard_id, parents)
    opened = replace(row.state, epoch=row.state.epoch + 1, owner=server_id)
    draft.shards.put(shard_id, replace(row, state=replace(opened, gap_accepted=False)))
    return opened


def release_shard(draft: Draft, shard_id: str, epoch: int) -> None:
    """Give a shard up, unless it was opened again since."""
    row = draft.shards.get(shard_id)
    if row is not None and row.state.epoch == epoch:
        draft.shards.put(shard_id, replace(row, state=replace(row.state, owner=None)))


def end_shards(draft: Draft, shard_ids: Iterable[str], now_ms: int) -> None:
    """Mark shards as ended; when one ended first stays. Those that nobody knew are noted as ended."""
    for shard_id in shard_ids:
        row = _know(draft, shard_id, ())
        if row.ended_ms is None:
            draft.shards.put(shard_id, ShardRow(replace(row.state, ended=True), now_ms))


def prune(
    draft: Draft, *, windows_before_ms: int, shards_before_ms: int, keep_shards: frozenset[str], limit: int
) -> int:
    """Forget windows that are over, and shards that ended before a time, but for those to keep; return how many."""
    over = window_rules.prune(draft, before_ms=windows_before_ms, limit=limit)
    gone = [
        shard_id
        for shard_id, row in draft.book.shards.items()
        if row.ended_ms is not None and row.ended_ms < shards_before_ms and shard_id not in keep_shards
    ]
    for shard_id in gone:
        draft.shards.drop(shard_id)
    return over + len(gone)


def accept_gap(draft: Draft, shard_id: str) -> bool:
    """Let the next opening start beyond the position; False when there is no such shard."""
    row = draft.shards.get(shard_id)
    if row is None:
        return False
    draft.shards.put(shard_id, replace(row, state=replace(row.state, gap_accepted=True)))
    return True


def reset(draft: Draft, shard_ids: Iterable[str]) -> frozenset[str]:
    """Forget where shards without an owner stand; the epoch is raised against what is still under way."""
    forgotten = set()
    for shard_id in shard_ids:
        row = draft.shards.get(shard_id)
        if row is not None and row.state.owner is None:
            state = replace(row.state, epoch=row.state.epoch + 1, position=None, ended=False)
            state = replace(state, effective_ms=None, event_ms=None)
            draft.shards.put(shard_id, ShardRow(state))
            forgotten.add(shard_id)
    return frozenset(forgotten)
