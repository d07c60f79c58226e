"""How redriven dead letters become part of a flush."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Collection, Iterator
from dataclasses import dataclass, field

from mldserver.coordinator.core.flush import Buffer, buffered
from mldserver.coordinator.core.ledger_view import LedgerView
from mldserver.coordinator.core.sessions import Session, Sessions, make_reload
from mldserver.coordinator.timer_counts import TimerCounts
from mldserver.ledger.contract import with_ancestors
from mldserver.runtime.interface import BatchOutcome, TimerReport
from mldserver.stores import hash_of, key_bytes
from mldserver.windows import WindowSpec


@dataclass(eq=False, slots=True)
class StoreVisit:
    """One use of a store by redriven letters, while none of its shards has a batch at the handler."""

    session: Session
    """The letters run as an outcome of this session."""
    sessions: list[Session]
    """All sessions of the store here."""
    registered: bool = False
    report: TimerReport | None = None
    """What the letters' outcome says of the store's timers."""

    @property
    def number(self) -> int:
        """What ``Delivery.number`` must be."""
        return self.session.outcomes + 1


@dataclass(eq=False, slots=True)
class RedriveIntake:
    """Accepts the outcomes of redriven dead letters."""

    view: LedgerView
    spec: WindowSpec | None
    buffer: Buffer
    flush: Callable[[str], Awaitable[None]]
    """Returns when a whole cycle that began after the call is done."""
    sessions: Sessions
    timer_counts: TimerCounts = field(default_factory=TimerCounts)
    waits_for: str = ""
    """Why letters of a handler that keeps state wait; empty: none waits."""
    _registering: StoreVisit | None = field(init=False, default=None)
    """Counts if the next flush registers its letters; None: no visit waits for that, or not any more."""

    @property
    def wanted(self) -> int:
        """How many dead letters in the ledger are marked for a redrive."""
        return self.view.state.redrives

    @property
    def elsewhere(self) -> frozenset[str]:
        """Shards that another server has: that server redrives their letters."""
        return self.view.owned_elsewhere()

    def line(self, shard_id: str) -> frozenset[str]:
        """Return a shard and its ancestors, as far as the ledger has them."""
        return with_ancestors(self.view.state.shards, shard_id)

    def home(self, shard_id: str, key: str | None) -> str | None:
        """Return the store that has a key of a shard now. None: no open store, or it is not clear which.

        It is the shard's own store until a child of the shard is open, then the open store whose range has the key.
        """
        state = self.view.state
        shard = state.shards.get(shard_id)
        own = None if shard is None else state.stores.get(shard.store)
        if own is not None and not own.closed:
            return own.store_id
        hashed = hash_of(key_bytes(key or ""))
        found = [
            store.store_id
            for store in state.stores.values()
            if not store.closed and hashed in store.key_range
        ]
        return found[0] if len(found) == 1 else None

    def is_elsewhere(self, store_id: str) -> bool:
        """Return whether another server has a shard of a store: that server redrives the letters."""
        return any(self.view.state.shards[shard_id].store == store_id for shard_id in self.elsewhere)

    def live(self, store_id: str) -> list[Session]:
        """Return this server's live sessions of a store."""
        return [session for session in self.sessions.of_store(store_id) if session.alive]

    @contextlib.contextmanager
    def visit(self, store_id: str, shard_id: str) -> Iterator[StoreVisit]:
        """Use a store with live sessions here for letters of a shard. Unless they are registered, all its shards load it again.

        The caller must keep batches of these sessions away from the handler meanwhile.
        """
        sessions = self.live(store_id)
        visit = StoreVisit(
            next((each for each in sessions if each.shard_id == shard_id), sessions[0]), sessions
        )
        if len(sessions) > 1:
            # The letters' keys may be another shard's, and only this session's number is compared.
            make_reload([visit.session])
        try:
            yield visit
        finally:
            if not visit.registered:
                # The runtime may have applied the letters' changes, also to timers: the next portion finds when one is due.
                make_reload(self.live(store_id))
                self.sessions.next_due_ms[store_id] = 0

    async def settle(self, store_id: str) -> None:
        """Return once no flush can change a store without the reader's knowledge (``Sessions.unsettled``)."""
        while store_id in self.sessions.unsettled:
            await self.flush("redrive")
            self.sessions.unsettled.discard(store_id)

    async def register(
        self, shard_id: str, outcome: BatchOutcome, ids: tuple[str, ...], visit: StoreVisit | None = None
    ) -> None:
        """Register what a shard's letters produced together with their removal; leave it out if they were removed before.

        All that the shard had accepted before is durable too when this returns. ``visit``: of the letters' store, if the handler
        keeps state. Then nothing is registered if a shard of the store was opened since its beginning: its copy of the store does
        not have the letters' changes.
        """
        # Rows keep the times that they would have had; no position moves.
        batch = buffered(shard_id, 0, outcome, floor_ms=None, spec=self.spec)
        batch.last = batch.effective_ms = batch.latest_event_ms = None
        batch.redriven = ids
        if visit is not None:
            session = visit.session
            assert session.store is not None, "only stores of sessions are visited"
            batch.shard_id, batch.epoch = session.shard_id, session.epoch
            batch.store = session.store.store_id
            if self.live(batch.store) != visit.sessions:
                return
            self.sessions.unsettled.add(batch.store)
            self._registering, visit.report = visit, outcome.timers
        number = self.buffer.add(batch)
        try:
            await self.flush("redrive")
        finally:
            # After a cancellation the letters are redriven again, and must not be in one flush twice.
            self.buffer.remove([number])
            self._registering = None
        self.sessions.unsettled.discard(batch.store)

    def registered(self, shard_ids: Collection[str]) -> None:
        """Note the shards on whose sessions letters ran that a flush has registered now.

        If their visit was cancelled meanwhile, nothing is counted: all shards of the store load it again, after that flush.
        """
        visit = self._registering
        if visit is not None and visit.session.shard_id in shard_ids:
            visit.session.outcomes += 1
            visit.registered = True
            if visit.report is not None and visit.session.store is not None:
                self.sessions.next_due_ms[visit.session.store.store_id] = visit.report.next_call_ms
                self.timer_counts.count(visit.session.store.store_id, visit.report)
