"""Rules of servers and shards over a draft: who lives, who holds what. They mean what ``Ledger`` says."""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import TYPE_CHECKING

from mldserver.errors import InternalError, ServerBuried
from mldserver.ledger import window_rules
from mldserver.ledger.contract import ServerState, ShardState, storable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from mldserver.ledger.book import Draft
    from mldserver.ledger.contract import ShapeChange


def enter(draft: Draft, server_id: str, now_ms: int) -> int:
    """Register a server, burying who had its id before; return the life that it begins."""
    _remove(draft, server_id)
    life, ledger_id = draft.totals.lives + 1, draft.totals.ledger_id or _new_ledger_id()
    draft.totals = replace(draft.totals, lives=life, ledger_id=ledger_id)
    draft.servers.put(server_id, ServerState(server_id, now_ms, life=life))
    return life


def _new_ledger_id() -> str:
    """Return eight hexadecimal digits that no other ledger has: they stand in the names of the files that it registers."""
    return uuid.uuid4().hex[:8]


def _lives(draft: Draft, server_id: str, life: int) -> bool:
    server = draft.servers.get(server_id)
    return server is not None and server.life == life


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
    known = draft.servers.get(server_id)
    assert known is not None, "only registered servers come here"
    held_by = None if state.held_by is None else storable(state.held_by)
    state = replace(state, held_by=held_by, reason=storable(state.reason))
    draft.servers.put(server_id, replace(state, shape=known.shape, life=known.life))


def declare(draft: Draft, server_id: str, change: ShapeChange, version: int, now_ms: int) -> bool:
    """Note a server's shape. One that is not the pipeline's takes its place, if nobody wrote since ``version``."""
    if change.fingerprint != draft.totals.shape and draft.book.version != version:
        return False
    draft.declares = True
    own = draft.servers.get(server_id)
    assert own is not None, "only registered servers come here"
    draft.servers.put(server_id, replace(own, shape=change.fingerprint))
    if draft.shapes.get(change.fingerprint) is None:
        draft.shapes.put(change.fingerprint, change.text)
    # A drain is over once nobody is left who ran before: others that are just starting, too, have declared nothing.
    others = [server for name, server in draft.book.servers.items() if name != server_id]
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
            draft.shards.put(shard_id, replace(shard, event_ms=None))
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
        other = draft.servers.get(other_id)
        if other is None or other.beat_ms == seen[other_id]:
            _remove(draft, other_id)
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
    """Take a server's row out, if it has one, and let go what it holds."""
    draft.servers.drop(server_id)
    for shard_id, shard in draft.book.shards.items():
        if shard.owner == server_id:
            draft.shards.put(shard_id, replace(shard, owner=None))
    for window_id in draft.book.unfinished:
        entry = draft.book.windows[window_id]
        if entry.owner == server_id:
            draft.windows.put(window_id, replace(entry, owner=None))


def open_shard(draft: Draft, shard_id: str, parents: tuple[str, ...], server_id: str) -> ShardState:
    """Raise the shard's epoch and own it; return its state with the gap that was accepted until now."""
    shard = draft.shards.get(shard_id) or ShardState(shard_id, epoch=0)
    opened = replace(shard, epoch=shard.epoch + 1, owner=server_id, parents=parents or shard.parents)
    draft.shards.put(shard_id, replace(opened, gap_accepted=False))
    return opened


def release_shard(draft: Draft, shard_id: str, epoch: int) -> None:
    """Give a shard up, unless it was opened again since."""
    shard = draft.shards.get(shard_id)
    if shard is not None and shard.epoch == epoch:
        draft.shards.put(shard_id, replace(shard, owner=None))


def end_shards(draft: Draft, shard_ids: Iterable[str], now_ms: int) -> None:
    """Mark shards as ended; when one ended first stays. Those that nobody knew are noted as ended."""
    for shard_id in shard_ids:
        shard = draft.shards.get(shard_id) or ShardState(shard_id, epoch=0)
        if not shard.ended:
            draft.shards.put(shard_id, replace(shard, ended_ms=now_ms))


def prune(
    draft: Draft, *, windows_before_ms: int, shards_before_ms: int, keep_shards: frozenset[str], limit: int
) -> int:
    """Forget windows that are over, and shards that ended before a time, but for those to keep; return how many."""
    over = window_rules.prune(draft, before_ms=windows_before_ms, limit=limit)
    gone = [
        shard_id
        for shard_id, shard in draft.book.shards.items()
        if shard.ended_ms is not None and shard.ended_ms < shards_before_ms and shard_id not in keep_shards
    ]
    for shard_id in gone:
        draft.shards.drop(shard_id)
    return over + len(gone)


def accept_gap(draft: Draft, shard_id: str) -> bool:
    """Let the next opening start beyond the position; False when there is no such shard."""
    shard = draft.shards.get(shard_id)
    if shard is not None:
        draft.shards.put(shard_id, replace(shard, gap_accepted=True))
    return shard is not None


def reset(draft: Draft, shard_ids: Iterable[str]) -> frozenset[str]:
    """Forget where shards without an owner stand; the epoch is raised against what is still under way."""
    forgotten = set()
    for shard_id in shard_ids:
        shard = draft.shards.get(shard_id)
        if shard is not None and shard.owner is None:
            shard = replace(shard, epoch=shard.epoch + 1, position=None, ended_ms=None)
            draft.shards.put(shard_id, replace(shard, effective_ms=None, event_ms=None))
            forgotten.add(shard_id)
    return frozenset(forgotten)
