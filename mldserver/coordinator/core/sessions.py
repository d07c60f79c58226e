"""The sessions of this server: who has each shard, and what becomes of it in the ledger. A synchronous core.

A shard's newest session has it, which its epoch tells. What an older one delivered and is not durable comes again from
the daemon's checkpoint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Set as AbstractSet

    from mldserver.coordinator.core.buffer import Buffer
    from mldserver.coordinator.core.flush import BufferedBatch
    from mldserver.coordinator.core.lineage import Lineage
    from mldserver.coordinator.core.positions import ShardPosition
    from mldserver.coordinator.core.watermark import Watermark
    from mldserver.ledger.contract import PositionUpdate, ShardState
    from mldserver.records import Sequence

__all__ = ["Session", "Sessions"]


class Session(Protocol):
    """One shard under one connection."""

    shard_id: str
    epoch: int
    """Under which it was opened; of two sessions of a shard the later has the higher."""
    position: ShardPosition
    alive: bool
    finishing: bool
    """Whether no batch follows."""

    def disconnected(self) -> None:
        """Let go of the shard; nothing when it is dead already."""
        ...


class Sessions:
    """The latest session of each shard that was opened here, alive or not."""

    def __init__(
        self, *, lineage: Lineage, watermark: Watermark, buffer: Buffer, max_ahead_ms: int | None = None
    ) -> None:
        """Start with none; ``lineage`` and ``watermark`` are told who connects, and ``buffer`` holds what they gave.

        ``max_ahead_ms``: how far beyond its latest arrival time the ledger's event time of a shard may lie.
        """
        self._max_ahead_ms = max_ahead_ms
        self._lineage = lineage
        self._watermark = watermark
        self._buffer = buffer
        self._sessions: dict[str, Session] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def live(self, shard_id: str) -> Session | None:
        """Return the session that has a shard; None when nobody here has it."""
        session = self._sessions.get(shard_id)
        return session if session is not None and session.alive else None

    def has(self, session: Session) -> bool:
        """Whether no newer session of its shard was taken in."""
        return self._sessions.get(session.shard_id) is session

    def take_in(self, session: Session, state: ShardState, now_ms: int, *, tells_lag: bool) -> bool:
        """Give a known shard to a session that was opened with ``state``, at the expense of an older one.

        False, and the session is dead: a newer one was taken in since it was opened.
        """
        shard_id, old = session.shard_id, self._sessions.get(session.shard_id)
        if old is not None and old.epoch > session.epoch:
            session.alive = False
            return False
        if old is not None:
            old.alive = False
        self._buffer.drop_shard(shard_id)
        self._sessions[shard_id] = session
        self._lineage[shard_id].effective_ms = state.effective_ms
        self._lineage.connect(shard_id, now_ms)
        self._watermark.connect(
            shard_id,
            now_ms,
            tells_lag=tells_lag,
            event_ms=self._first_event_ms(state),
            arrival_ms=state.effective_ms,
        )
        return True

    def _first_event_ms(self, state: ShardState) -> int | None:
        if state.event_ms is None and self._watermark.rules.on_arrival:
            return self._lineage.floor_ms(state.shard_id)
        if state.event_ms is None or state.effective_ms is None or self._max_ahead_ms is None:
            return state.event_ms
        # A row from the future was counted before there was a bound, or while it was wider. Where the shard really is,
        # its next row tells.
        return state.event_ms if state.event_ms - state.effective_ms <= self._max_ahead_ms else None

    def let_go(self, session: Session, now_ms: int) -> bool:
        """Note that a session let go of its shard without its end: it is missing. False: a newer one has it."""
        if not self.has(session):
            return False
        self._lineage.disconnect(session.shard_id, now_ms)
        self._watermark.disconnect(session.shard_id)
        return True

    def end(self, session: Session, now_ms: int) -> None:
        """Note that a session's shard has ended durably."""
        self._lineage.end(session.shard_id, now_ms)
        self._watermark.disconnect(session.shard_id)
        self._watermark.settle(now_ms)

    def forget(self, shard_ids: Iterable[str]) -> None:
        """Forget the sessions of shards that are forgotten."""
        for shard_id in shard_ids:
            self._sessions.pop(shard_id, None)

    # What becomes of them in the ledger.

    def durable(self) -> dict[str, Sequence | None]:
        """Return how far each shard is durable, as far as was heard here."""
        return {shard_id: session.position.durable for shard_id, session in self._sessions.items()}

    def catch_up(self, shards: Iterable[ShardState]) -> None:
        """See what became of the sessions in the ledger: opened elsewhere, or further than was heard."""
        for shard in shards:
            session = self._sessions.get(shard.shard_id)
            if session is None or shard.epoch < session.epoch:
                continue
            if shard.epoch > session.epoch:
                # Another server has it: this connection may claim nothing any more.
                session.disconnected()
                continue
            session.position.register(shard.position)
            if shard.position is not None:
                self._buffer.drop_durable(shard.shard_id, shard.epoch, shard.position)

    def registered(self, updates: Iterable[PositionUpdate]) -> None:
        """Note the positions that a flush has moved."""
        for update in updates:
            session = self._sessions.get(update.shard_id)
            if session is not None and session.epoch == update.epoch:
                session.position.register(update.position)

    def left_out(self, batches: Iterable[BufferedBatch], lost_shards: AbstractSet[str]) -> None:
        """Note which shards' rows a flush has left out: their sessions let go.

        They may not claim those rows, neither with a checkpoint nor with the shard's end.
        """
        for batch in batches:
            session = self._sessions.get(batch.shard_id)
            if batch.shard_id in lost_shards and session is not None and session.epoch == batch.epoch:
                session.disconnected()
