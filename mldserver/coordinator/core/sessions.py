"""This server's sessions: the owner of each shard, its position, and its entry in the ledger. A synchronous core.

A shard belongs to its newest session, the one with the highest epoch. Records of an older session that are not durable
are delivered again from the daemon's checkpoint.

Of a session's position it holds always: checkpointed <= durable <= accepted. What is checkpointed is also never beyond
what this connection delivered: after a lost lease or a replay the ledger is ahead of the daemon, which refuses a
checkpoint at a record that it has not delivered yet (KCL 3.1.3: IllegalArgumentException). A position covers a complete
prefix of the shard's records: batches are accepted in shard order, and a batch is accepted only when every record of it
has its rows buffered or its dead letter made.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as SequenceABC
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Final, Protocol

from mldserver.coordinator.core.lineage import Lineage
from mldserver.coordinator.core.watermark import Watermark
from mldserver.errors import InternalError
from mldserver.ledger.contract import LedgerState, PositionUpdate, ShardState, StoreState, StoreUpdate
from mldserver.records import Sequence

if TYPE_CHECKING:
    from mldserver.coordinator.core.flush import Buffer, BufferedBatch

_MOST_ENDS: Final = 1024
"""Of batches that are remembered where aggregates must be whole; an even number."""


def skips_records(start: Sequence | str | None, position: Sequence | None, *, ended: bool = False) -> bool:
    """Whether a daemon that starts so would skip records behind the ledger's position of the shard.

    ``start``: the sequence after which records follow, one of the KCL's sentinels, or None for a daemon that does not
    report it (V1). With None or a time, the function cannot detect a gap. ``ended``: the ledger has the shard's end,
    so that nothing is left
    to skip. ``LATEST`` with a position skips: the daemon has no checkpoint, and goes to the stream's tip.
    """
    if ended:
        return False
    if isinstance(start, Sequence):
        return position is None or start > position
    return start == "SHARD_END" or (start == "LATEST" and position is not None)


class SessionPosition:
    """One shard's progress under one connection."""

    __slots__ = ("_ends", "_whole", "accepted", "checkpointed", "claimed", "delivered", "durable")

    def __init__(self, durable: Sequence | None, *, within_aggregates: bool = True) -> None:
        """Start from the ledger's position: all before it was accepted in an earlier life.

        ``within_aggregates``: whether a checkpoint says how far it goes into a KPL aggregate. V1's says its sequence
        number only, and covers all of it: there only the ends of batches are checkpointed, which no aggregate crosses.
        """
        self.accepted = durable
        self.claimed = durable
        self.delivered: Sequence | None = None
        self.durable = durable
        self.checkpointed: Sequence | None = None
        self._whole: Sequence | None = None
        """The last end of a batch that was passed; all aggregates are whole there."""
        self._ends: deque[Sequence] | None = None if within_aggregates else deque()
        """The ends of the batches behind it."""

    def deliver(self, last: Sequence | None) -> None:
        """Note that the daemon delivered every record up to ``last``, perhaps again; None: an empty batch."""
        if last is None or (self.delivered is not None and last <= self.delivered):
            return
        self.delivered = last
        if self._ends is not None:
            self._ends.append(last)
            if len(self._ends) > _MOST_ENDS:
                # A handler that does not checkpoint. Every other one will do; of an odd number that is the last one too.
                self._ends = deque(islice(self._ends, 0, None, 2))

    def accept(self, last: Sequence | None) -> None:
        """Note that every record up to ``last`` is taken care of; None (an empty batch) changes nothing."""
        if last is not None and (self.accepted is None or last > self.accepted):
            self.accepted = last

    def claim(self, position: Sequence | None) -> Sequence | None:
        """Return the new durable position, now that a handler has finished all records up to ``position``.

        For handlers that keep their position: accepted records wait in no buffer here, but are not done before the
        handler says so. Never beyond what was accepted; None: no further than what was claimed before.
        """
        if position is None or self.accepted is None:
            return None
        position = min(position, self.accepted)
        if self.claimed is not None and position <= self.claimed:
            return None
        self.claimed = position
        return position

    def register(self, position: Sequence | None) -> None:
        """Note that the ledger moved the position. Raises InternalError when it is beyond what was accepted."""
        if position is None or (self.durable is not None and position <= self.durable):
            return
        if self.accepted is None or position > self.accepted:
            raise InternalError(f"position {position} would pass what was accepted, {self.accepted}")
        self.durable = position

    def due(self) -> Sequence | None:
        """Return what may be checkpointed now: the durable prefix of what was delivered, unless it is stored."""
        if self.durable is None or self.delivered is None:
            return None
        while self._ends and self._ends[0] <= min(self.durable, self.delivered):
            self._whole = self._ends.popleft()
        due = self._whole if self._ends is not None else min(self.durable, self.delivered)
        if due is None or (self.checkpointed is not None and due <= self.checkpointed):
            return None
        return due

    def store(self, position: Sequence) -> None:
        """Note that the daemon stored a checkpoint. Raises InternalError when it is beyond the durable position."""
        if self.durable is None or position > self.durable:
            raise InternalError(f"checkpoint {position} is ahead of the durable position {self.durable}")
        if self.checkpointed is None or position > self.checkpointed:
            self.checkpointed = position


class Session(Protocol):
    """One shard under one connection."""

    shard_id: str
    epoch: int
    """Under which it was opened; of two sessions of a shard the later has the higher."""
    position: SessionPosition
    alive: bool
    finishing: bool
    """Whether no batch follows."""
    store: StoreState | None
    """The shard's store as it was when the session was opened; None: the handler keeps no state."""
    outcomes: int
    """Rises with each outcome of the runtime that the session accepts. Redriven ones count once they are registered."""
    adopted: bool
    """The session has no connection: its shard has ended, and the server fires the timers of its store."""

    def disconnected(self) -> None:
        """Let go of the shard; nothing when it is dead already."""


@dataclass(kw_only=True, eq=False, slots=True)
class Sessions:
    """The latest session of each shard that was opened here, alive or not."""

    lineage: Lineage
    watermark: Watermark
    buffer: Buffer
    """Holds what they gave."""
    _sessions: dict[str, Session] = field(init=False, default_factory=dict)
    _stores: dict[str, StoreState] = field(init=False, default_factory=dict)
    """Their stores. The serial is the one on which the runtime's copy of the store and the buffered changes rest."""
    next_due_ms: dict[str, int | None] = field(init=False, default_factory=dict)
    """When the first timer of each store is due (ms), as its last outcome or snapshot said; None: it has no timers."""
    unsettled: set[str] = field(init=False, default_factory=set)
    """The stores that the flush under way may change, with batches that are not among those of ``Buffer.of_store``. Who reads
    such a store waits for the flush."""

    def live(self, shard_id: str) -> Session | None:
        """Return the session that has a shard; None if no session of this server has it."""
        session = self._sessions.get(shard_id)
        return session if session is not None and session.alive else None

    def open(
        self, session: Session, state: ShardState, now_ms: int, *, tells_lag: bool, polled: bool = False
    ) -> bool:
        """Give a known shard to a session that was opened with ``state``, at the expense of an older one.

        False, and the session is dead: a newer one was taken in since it was opened.
        """
        shard_id = session.shard_id
        if not self._take(session):
            return False
        arrival_ms = self.lineage.nodes[shard_id].effective_ms = state.effective_ms
        self.lineage.connect(shard_id, now_ms)
        event_ms = state.event_ms
        if event_ms is None and self.watermark.rules.on_arrival:
            event_ms = self.lineage.floor_ms(shard_id)
        self.watermark.connect(
            shard_id,
            now_ms,
            tells_lag=tells_lag,
            event_ms=event_ms,
            arrival_ms=arrival_ms,
            polled=polled,
        )
        return True

    def adopt(self, session: Session, state: ShardState, now_ms: int) -> None:
        """Give a shard that has ended to a session which only fires timers. Windows do not wait for it."""
        self.lineage.add(session.shard_id, now_ms, ended=True)
        self.lineage.reach(session.shard_id, state.effective_ms)
        if self._take(session):
            self.lineage.nodes[session.shard_id].adopted = True

    def _take(self, session: Session) -> bool:
        """Make a session the latest of its shard. False, and the session is dead: a newer one has the shard."""
        old = self._sessions.get(session.shard_id)
        if old is not None and old.epoch > session.epoch:
            session.alive = False
            return False
        if old is not None:
            old.alive = False
        self.buffer.drop_shard(session.shard_id)
        self._sessions[session.shard_id] = session
        if session.store is not None:
            self._open_store(session.store, session)
        return True

    def _open_store(self, store: StoreState, session: Session) -> None:
        """Note where a store stands, unless another session has it. A session that has adopted the store gives it up.

        Batches of sessions that are over rest on an older copy of the store. They are dropped, and will be delivered again.
        """
        others = [each for each in self.of_store(store.store_id) if each is not session]
        for each in others:
            if each.adopted:
                each.disconnected()
        if any(each.alive for each in others):
            return
        # A flush may have raised the serial since the ledger was read.
        known = self._stores.get(store.store_id, store)
        self._stores[store.store_id] = known if known.serial > store.serial else store
        if sum(self.buffer.drop_shard(each.shard_id) for each in others):
            self.unsettled.add(store.store_id)

    def all_live(self) -> list[Session]:
        """Return the sessions that have a shard."""
        return [session for session in self._sessions.values() if session.alive]

    def of_store(self, store_id: str) -> list[Session]:
        """Return the sessions of a store's shards, alive or not."""
        return [
            each
            for each in self._sessions.values()
            if each.store is not None and each.store.store_id == store_id
        ]

    def live_stores(self) -> dict[str, StoreState]:
        """Return the stores that a session has now."""
        ids = {
            each.store.store_id for each in self._sessions.values() if each.alive and each.store is not None
        }
        return {store_id: self._stores[store_id] for store_id in ids}

    def let_go(self, session: Session, now_ms: int) -> bool:
        """Note that a session let go of its shard without its end: it is missing. False: a newer one has it."""
        if self._sessions.get(session.shard_id) is not session:
            return False
        self.lineage.disconnect(session.shard_id, now_ms)
        self.lineage.nodes[session.shard_id].adopted = False
        self.watermark.disconnect(session.shard_id)
        return True

    def end(self, session: Session, now_ms: int) -> None:
        """Note that a session's shard has ended durably."""
        self.lineage.end(session.shard_id, now_ms)
        self.watermark.disconnect(session.shard_id)
        self.watermark.restart_settling(now_ms)

    def forget(self, shard_ids: Iterable[str]) -> None:
        """Forget the sessions of shards that are forgotten."""
        for shard_id in shard_ids:
            self._sessions.pop(shard_id, None)
        left = {session.store.store_id for session in self._sessions.values() if session.store is not None}
        self._stores = {store_id: store for store_id, store in self._stores.items() if store_id in left}
        self.next_due_ms = {store_id: ms for store_id, ms in self.next_due_ms.items() if store_id in left}

    def loaded(self, store_id: str, *times_ms: int | None) -> None:
        """Note when the first timer is due in a copy of a store that was read for a runtime, and when the ledger says so.

        An outcome that was accepted meanwhile may know of an earlier one. A time that is too early does no harm: nothing fires, and
        the outcome says when the first one is due.
        """
        known = (*times_ms, self.next_due_ms.get(store_id))
        self.next_due_ms[store_id] = min((ms for ms in known if ms is not None), default=None)

    def differs(self, store_id: str, due_ms: int | None) -> bool:
        """Return whether the ledger has another time for a store's first timer: a child begins with its parents' earliest."""
        store = self._stores.get(store_id)
        return store is not None and store.next_due_ms != due_ms

    # What becomes of them in the ledger.

    def durable(self) -> dict[str, Sequence | None]:
        """Return how far each shard is durable, as far as was heard here."""
        return {shard_id: session.position.durable for shard_id, session in self._sessions.items()}

    def stores(self) -> dict[str, tuple[StoreState, StoreUpdate]]:
        """Return the stores of all sessions, and how a change of each is registered."""
        shards: dict[str, list[str]] = {store_id: [] for store_id in self._stores}
        for session in self._sessions.values():
            if session.store is not None and session.store.store_id in shards:
                shards[session.store.store_id].append(session.shard_id)
        return {
            store_id: (
                store,
                StoreUpdate(store_id, store.serial, tuple(shards[store_id]), store.next_due_ms),
            )
            for store_id, store in self._stores.items()
        }

    def catch_up(
        self, state: LedgerState, stores: SequenceABC[StoreUpdate] = (), flushed: Iterable[int] = ()
    ) -> None:
        """See what became of the sessions in the ledger: opened elsewhere, or further than was heard.

        ``stores``: changes of a flush that was registered, although its answer was lost. ``flushed``: the numbers of its batches.
        """
        self._changed(stores)
        self.buffer.drop_registered(flushed, {update.store_id for update in stores})
        for each in self._sessions.values():
            if each.adopted and each.alive and not self._is_left(each, state):
                each.disconnected()
        for shard in state.shards.values():
            session = self._sessions.get(shard.shard_id)
            if session is None or shard.epoch < session.epoch:
                continue
            if shard.epoch > session.epoch:
                # Another server has it: this connection may claim nothing any more.
                session.disconnected()
                continue
            session.position.register(shard.position)
            if shard.position is not None:
                self.buffer.drop_durable(shard.shard_id, shard.epoch, shard.position)

    @staticmethod
    def _is_left(session: Session, state: LedgerState) -> bool:
        """Return whether no child has come to the store that a session has adopted."""
        assert session.store is not None, "only stores are adopted"
        store_id = session.store.store_id
        store = state.stores.get(store_id)
        family = (shard for shard in state.shards.values() if shard.store == store_id)
        return store is not None and not store.closed and all(shard.ended for shard in family)

    def _changed(self, stores: Iterable[StoreUpdate]) -> None:
        for update in stores:
            store = self._stores.get(update.store_id)
            # Another server may have changed it since: then it was read again.
            if store is not None and store.serial == update.previous:
                self._stores[update.store_id] = replace(
                    store, serial=update.previous + 1, next_due_ms=update.next_due_ms
                )

    def registered(self, updates: Iterable[PositionUpdate], stores: Iterable[StoreUpdate] = ()) -> None:
        """Note the positions that a flush has moved, and the stores that it changed."""
        self._changed(stores)
        for update in updates:
            session = self._sessions.get(update.shard_id)
            if session is not None and session.epoch == update.epoch:
                session.position.register(update.position)

    def left_out(self, batches: Iterable[BufferedBatch], lost_shards: AbstractSet[str]) -> None:
        """Note which shards' rows a flush has left out: their sessions let go.

        They may not claim those rows, neither with a checkpoint nor with the shard's end. All sessions of such a shard's store let
        go: their runtime's copy of the store has changes that were left out. A shard that was opened again meanwhile has a newer
        session, which has accepted none of it, and read the store without it.
        """
        stores = set()
        for batch in batches:
            session = self._sessions.get(batch.shard_id)
            if batch.shard_id in lost_shards and session is not None and session.epoch == batch.epoch:
                stores.add(batch.store)
                session.disconnected()
        for store_id in stores - {""}:
            # The next session reads from the ledger where the store stands: an operator may have made it forget the store.
            self._stores.pop(store_id, None)
            for session in self.of_store(store_id):
                session.disconnected()
                # What was accepted meanwhile must not move a position past what was left out.
                self.buffer.drop_shard(session.shard_id)


def make_reload(sessions: Iterable[Session]) -> None:
    """Have the runtime load the store again before the next delivery of each session.

    Its copy contains the session's last outcome, or one more that was not accepted. The next number but one fits neither.
    """
    for session in sessions:
        session.outcomes += 2
