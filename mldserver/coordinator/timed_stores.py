"""Which timers may fire: the stores with timers that this server has, how far their shards are read, and which stores are orphans.

A timer may fire when all records of its key that had arrived by its due time are accepted (``Watermark.frontier_ms``). The shards
of a DynamoDB table that share a store are judged together: a key's next records may come from any of them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from mldserver.base.clock import CivilClock, Clock
from mldserver.coordinator.core.ledger_view import LedgerView
from mldserver.coordinator.core.lineage import Lineage, Presence
from mldserver.coordinator.core.sessions import Session, Sessions, make_reload
from mldserver.coordinator.core.watermark import Watermark
from mldserver.coordinator.shards import IntakeSession
from mldserver.coordinator.timer_counts import TimerCounts


class TimedStore(NamedTuple):
    """A store of keyed state that this server has, and that has timers."""

    store_id: str
    sessions: tuple[IntakeSession, ...]
    """Of the store's shards; timers fire as outcomes of the first."""
    until_ms: int | None
    """Timers that are due by then may fire; None: none may, for the moment."""


@dataclass(kw_only=True, eq=False, slots=True)
class TimerIntake:
    """What the firing of timers asks of the coordinator, whose parts it shares."""

    view: LedgerView
    clock: Clock
    civil: CivilClock
    lineage: Lineage
    watermark: Watermark
    sessions: Sessions
    counts: TimerCounts
    adopt: Callable[[str], Awaitable[IntakeSession | None]]
    """Opens a session for an orphan. None: another server was faster, or a child of the shard has come."""
    flush: Callable[[str], Awaitable[None]]
    """Returns when a whole cycle that began after the call is done."""
    running: int = field(init=False, default=0)
    """How many portions of timers handlers work on now."""
    held: int = field(init=False, default=0)
    """How many stores here have a due timer that may not fire: a shard lags or is paused, or the server has no room."""
    longest_held: tuple[int, str] | None = field(init=False, default=None)
    """Since when the timer is due that has waited longest, and its store."""

    def stores(self) -> list[TimedStore]:
        """Return the stores that this server has and that have timers, as if none may fire."""
        return [TimedStore(store_id, tuple(sessions), None) for store_id, sessions in self._live().items()]

    def _live(self) -> dict[str, list[IntakeSession]]:
        found: dict[str, list[IntakeSession]] = {}
        timed = self.sessions.next_due_ms
        for session in self.sessions.all_live() if timed else ():
            assert isinstance(session, IntakeSession)
            if session.store_id in timed:
                found.setdefault(session.store_id, []).append(session)
        return found

    def due(self) -> list[TimedStore]:
        """Return the stores that have a timer which may fire now."""
        now_ms = self.clock.steady_ms()
        shown_ms = self.watermark.aws_ms(now_ms)
        if shown_ms is not None:
            self.civil.arrived(shown_ms, now_ms)
        civil_ms = self.civil.now_ms()
        live, next_ms = self._live(), self.sessions.next_due_ms
        due = {
            store_id: at_ms
            for store_id in live
            if (at_ms := next_ms[store_id]) is not None and at_ms <= civil_ms
        }
        incomplete = self._incomplete(due, now_ms) if due else frozenset()
        found, held = [], []
        for store_id, at_ms in due.items():
            sessions = live[store_id]
            until_ms = None if store_id in incomplete else self._frontier_ms(sessions, now_ms, civil_ms)
            if until_ms is not None and at_ms <= until_ms:
                found.append(TimedStore(store_id, tuple(sessions), until_ms))
            else:
                held.append((at_ms, store_id))
        self.held, self.longest_held = len(held), min(held, default=None)
        return found

    def _frontier_ms(self, sessions: Iterable[IntakeSession], now_ms: int, civil_ms: int) -> int | None:
        """Return until when timers of a store with these sessions may fire; None: none may."""
        frontier_ms = civil_ms
        for session in sessions:
            if not session.may_fire:
                return None
            if session.adopted:
                continue
            read_ms = self.watermark.frontier_ms(session.shard_id, now_ms, civil_ms)
            if read_ms is None:
                return None
            frontier_ms = min(frontier_ms, read_ms)
        return frontier_ms

    def _incomplete(self, store_ids: Collection[str], now_ms: int) -> frozenset[str]:
        """Return the stores of which a shard is expected that has no session here, or that may have a child soon."""
        shards = self.view.state.shards
        found: set[str] = set()
        settling, ended, lineage = self.watermark.is_settling(now_ms), Presence.ENDED, self.lineage
        # Nearly all shards have ended. There may be a week's shards, and every look comes here.
        nodes = [
            node
            for node in lineage.nodes.values()
            if node.presence is not ended or (settling and not node.children)
        ]
        is_missing = any(node.presence is Presence.MISSING for node in nodes)
        missing = {node.id for node in lineage.missing()} if is_missing else frozenset()
        for node in nodes:
            if node.presence in {Presence.ELSEWHERE, ended} or node.id in missing:
                found.update(shards[each].store for each in (node.id, *node.parents) if each in shards)
        return frozenset(found.intersection(store_ids))

    def is_whole(self, store: TimedStore) -> bool:
        """Return whether the live sessions of a store are still these: a visitor must keep the batches of all away."""
        live = self._live_of(store.store_id)
        return len(live) == len(store.sessions) and all(session.alive for session in store.sessions)

    def not_accepted(self, store: TimedStore) -> None:
        """Have the runtime load a store again before the next delivery of each of its shards."""
        make_reload(self._live_of(store.store_id))

    def _live_of(self, store_id: str) -> list[Session]:
        return [session for session in self.sessions.of_store(store_id) if session.alive]

    # Stores without a server.

    def orphans(self) -> dict[str, frozenset[str]]:
        """Return the stores with timers whose shards have all ended, without a known child, and that no server has; and their shards."""
        state, here = self.view.state, self.sessions.live_stores()
        waiting = {
            store_id
            for store_id, store in state.stores.items()
            if store.next_due_ms is not None and not store.closed and store_id not in here
        }
        if not waiting or self.watermark.is_settling(self.clock.steady_ms()):
            return {}
        for shard in state.shards.values():
            if not shard.ended or shard.owner not in {None, self.view.server_id}:
                waiting.discard(shard.store)
        for node in self.lineage.nodes.values():
            own = state.shards[node.id].store if node.id in state.shards else ""
            for parent in node.parents:
                if parent in state.shards and state.shards[parent].store != own:
                    waiting.discard(state.shards[parent].store)
        return {
            store_id: frozenset(each.shard_id for each in state.shards.values() if each.store == store_id)
            for store_id in sorted(waiting)
        }

    def is_abandoned(self, session: IntakeSession) -> bool:
        """Return whether a session of an adopted store has nothing left to do: it is over, or the store has no timers or is closed."""
        store = self.view.state.stores.get(session.store_id)
        return not session.alive or store is None or store.closed or store.next_due_ms is None
