"""The shards that this server has: opened and refused, heard of, taken in batch by batch, let go of.

A source asks ``Shards`` for a shard and gets a ``ShardSession``: one shard under one connection.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog
from msgspec.structs import replace

from mldserver.coordinator.core.flush import buffered, moved, shard_end
from mldserver.coordinator.core.positions import ShardPosition, Start, judge_start
from mldserver.errors import GapRefused

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from mldserver.base.clock import Clock
    from mldserver.coordinator.backpressure import Backpressure
    from mldserver.coordinator.core.buffer import Buffer
    from mldserver.coordinator.core.lineage import Lineage
    from mldserver.coordinator.core.rules import CoordinatorRules
    from mldserver.coordinator.core.sessions import Sessions
    from mldserver.coordinator.core.watermark import Watermark
    from mldserver.coordinator.cycle import Cycle
    from mldserver.coordinator.membership import Membership
    from mldserver.coordinator.reports import AheadRows
    from mldserver.coordinator.retention import Retention
    from mldserver.ledger.contract import ShardState
    from mldserver.ledger.operations import Ledger
    from mldserver.records import Sequence
    from mldserver.runtime.interface import BatchOutcome
    from mldserver.sources.intake import ShardOpening
    from mldserver.windows import WindowSpec

__all__ = ["ShardSession", "Shards"]

log = structlog.get_logger("mldserver")


class Shards:
    """An ``Intake``: what sources ask of the coordinator, and what their sessions do."""

    def __init__(
        self,
        *,
        rules: CoordinatorRules,
        spec: WindowSpec | None,
        ledger: Ledger,
        clock: Clock,
        buffer: Buffer,
        lineage: Lineage,
        watermark: Watermark,
        sessions: Sessions,
        backpressure: Backpressure,
        membership: Membership,
        retention: Retention,
        ahead: AheadRows,
        cycle: Cycle,
        ask_stream: Callable[[], Awaitable[None]] | None,
    ) -> None:
        """Share the coordinator's parts; see ``Coordinator`` for ``ask_stream``."""
        self.rules = rules
        self.clock = clock
        self.buffer = buffer
        self.lineage = lineage
        self.watermark = watermark
        self.backpressure = backpressure
        self.rows_accepted = 0
        self._spec = spec
        self._ledger = ledger
        self._sessions = sessions
        self._membership = membership
        self._retention = retention
        self._ahead = ahead
        self._cycle = cycle
        self._ask_stream = ask_stream

    async def flush(self, reason: str) -> None:
        """Return when a whole cycle that began after this call is done."""
        await self._cycle.whole(reason)

    async def check(self, opening: ShardOpening) -> None:
        """Raise GapRefused when a shard that has a live connection would start beyond its position."""
        live = self._sessions.live(opening.shard_id)
        if live is None or self.rules.accept_gap or not _is_gap(opening, live.position.durable):
            return
        # Another server may have read it on since this one heard of it: the ledger knows.
        state = (await self._ledger.peek()).shards.get(opening.shard_id)
        if state is not None and not state.gap_accepted:
            _refuse_gap(opening, state.position, ended=state.ended, accepted=False)

    def abandon(self, shard_id: str) -> None:
        """Let go of a shard that its connection has lost to one that could not open it: it is missing from now on."""
        live = self._sessions.live(shard_id)
        if live is not None:
            live.disconnected()

    async def open_shard(self, opening: ShardOpening) -> ShardSession:
        """Take a shard in under a new epoch. Raises GapRefused when it starts beyond the ledger's position."""
        # Before the epoch is raised: a connection that is refused must not cost the live one its shard.
        await self.check(opening)
        with self._membership.opening():
            # It counts from now on: however long the stream and the ledger take to answer, no window closes without it.
            now_ms = self.clock.steady_ms()
            new = self.lineage.know(opening.shard_id, now_ms, parents=opening.parents)
            if new:
                self.watermark.settle(now_ms)
            if new and self._ask_stream is not None and not opening.parents:
                await self._ask_stream()
            return await self._open(opening, new=new)

    async def _open(self, opening: ShardOpening, *, new: bool) -> ShardSession:
        shard_id = opening.shard_id
        # Parents that only ListShards names are kept with the shard: after a restart they order it all the same.
        parents = opening.parents or self.parents(shard_id)
        state = await self._ledger.open_shard(shard_id, parents)
        accepted = state.gap_accepted or self.rules.accept_gap
        _refuse_gap(opening, state.position, ended=state.ended, accepted=accepted)
        # Under the new epoch: what an older one has not stored by now is delivered again.
        parked = await self._ledger.parked_keys(shard_id) if self.rules.parks else {}
        await self._membership.learn_ancestors(state)
        now_ms = self.clock.steady_ms()
        self.lineage.know(shard_id, now_ms, parents=state.parents)
        proved = self.lineage.proved_ended(shard_id)
        if proved:
            await self._ledger.end_shards(frozenset(proved))
        # No await from here on: a cycle must not see the shard half taken in.
        session = ShardSession(self, shard_id, state, parked, within_aggregates=opening.within_aggregates)
        if not self._sessions.take_in(session, state, self.clock.steady_ms(), tells_lag=opening.tells_lag):
            return session
        if new or proved:
            self.watermark.settle(now_ms)
        log.info(
            "shard.opened",
            shard=shard_id,
            start=str(opening.start) if opening.start is not None else None,
            position=str(state.position) if state.position else None,
            epoch=state.epoch,
        )
        return session

    def know(self, listing: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
        """Learn the shards that the stream lists, with their parents; return the new ones."""
        now_ms = self.clock.steady_ms()
        self._retention.listed = frozenset(listing)
        new = tuple(
            shard for shard, parents in listing.items() if self.lineage.know(shard, now_ms, parents=parents)
        )
        if new:
            self.watermark.settle(now_ms)
        return new

    def parents(self, shard_id: str) -> tuple[str, ...]:
        """Return a shard's parents, as far as they are known."""
        return self.lineage[shard_id].parents if shard_id in self.lineage else ()

    # What shard sessions ask.

    def take(
        self, session: ShardSession, outcome: BatchOutcome, now_ms: int, received_ms: int | None
    ) -> bool:
        """Buffer a batch of a live session; return whether its daemon may be answered: its shard is not held back."""
        shard_id, outline = session.shard_id, outcome.outline
        node = self.lineage[shard_id]
        batch = buffered(
            shard_id,
            session.epoch,
            outcome,
            floor_ms=self.lineage.floor_ms(shard_id) if node.effective_ms is None else node.effective_ms,
            spec=self._spec,
            max_ahead_ms=self.rules.max_ahead_ms,
        )
        last = session.settle(outcome)
        if last != batch.last:
            batch = replace(batch, last=last)
        if batch.ahead is not None:
            self._ahead.note(shard_id, batch.ahead)
        if batch.effective_ms is not None:
            node.effective_ms = batch.effective_ms
        fresh = outline.records > outline.duplicates
        self.watermark.observed(
            shard_id,
            now_ms,
            records=outline.records,
            lag_ms=outline.millis_behind_latest,
            event_ms=batch.latest_event_ms if fresh else None,
            arrival_ms=batch.effective_ms,
            received_ms=received_ms,
        )
        if fresh or batch.last is not None:
            self.buffer.add(batch)
            self.rows_accepted += 0 if batch.rows is None else len(batch.rows)
        if self.buffer.bytes >= self.rules.flush_bytes:
            self._cycle.soon()
        if self.backpressure.is_held(session):
            return False
        self.watermark.answered(shard_id, now_ms)
        return True

    async def admit(self, session: ShardSession) -> None:
        """Wait while the session's shard is held back."""
        if self.backpressure.is_held(session):
            self._cycle.soon()
            await self.backpressure.wait(session)

    def end(self, session: ShardSession) -> None:
        """Buffer a shard's end, so that the next flush marks it durably."""
        self.buffer.add(shard_end(session.shard_id, session.epoch, session.position.accepted))

    def ended(self, session: ShardSession) -> None:
        """Let go of a shard whose end is durable."""
        self._sessions.end(session, self.clock.steady_ms())
        log.info("shard.ended", shard=session.shard_id, position=str(session.position.durable))

    def disconnected(self, session: ShardSession) -> None:
        """Let go of a shard without its end: it is missing from now on."""
        if self._sessions.let_go(session, self.clock.steady_ms()):
            self._membership.let_go(session.shard_id, session.epoch)
            self._cycle.soon()


class ShardSession:
    """A ``ShardIntake``. It dies when the shard is opened again, or its owner lets go; then it does nothing."""

    def __init__(
        self,
        shards: Shards,
        shard_id: str,
        state: ShardState,
        parked: Mapping[str, Sequence],
        *,
        within_aggregates: bool = True,
    ) -> None:
        """Start at the ledger's position, under the epoch just raised; ``parked``: keys with dead letters."""
        self._shards = shards
        self.shard_id = shard_id
        self.epoch = state.epoch
        self.parked = parked
        self.position = ShardPosition(state.position, within_aggregates=within_aggregates)
        self.alive = True
        self.finishing = False
        """Whether no batch follows."""

    @property
    def after(self) -> Sequence | None:
        """Everything at or before it was accepted earlier and must be dropped unseen."""
        return self.position.accepted

    def began(self) -> None:
        """Note that a batch was received: the shard is not silent while it is worked on."""
        if self.alive:
            self._shards.watermark.began(self.shard_id, self._shards.clock.steady_ms())

    def take(self, outcome: BatchOutcome, now_ms: int, received_ms: int | None = None) -> bool:
        """Take a batch's rows; return whether the daemon may be answered, or is to wait until it is ``admitted``."""
        return not self.alive or self._shards.take(self, outcome, now_ms, received_ms)

    async def admitted(self) -> None:
        """Wait while the shard is held back; from then on its silence counts."""
        if self.alive:
            await self._shards.admit(self)
            self._answered()

    async def accept(self, outcome: BatchOutcome) -> None:
        """Take a batch's rows; returns when the daemon may be answered."""
        if not self.take(outcome, self._shards.clock.steady_ms()):
            await self.admitted()

    def settle(self, outcome: BatchOutcome) -> Sequence | None:
        """Count a batch as accepted; return how far the shard's position moves with it, None: it stays."""
        outline, position = outcome.outline, self.position
        last = outline.last
        if last is not None:
            position.deliver(last)
            if outline.records > outline.duplicates:
                position.accept(last)
        return position.claim(outcome.position if outcome.keeps_position else last)

    def advance(self, position: Sequence) -> None:
        """Note that a handler which keeps its position has checkpointed so far in a hook of its own."""
        last = self.position.claim(position) if self.alive else None
        if last is not None:
            self._shards.buffer.add(moved(self.shard_id, self.epoch, last))

    def checkpoint_due(self) -> Sequence | None:
        """Return the durable position when it is ahead of the last checkpoint, else None."""
        return self.position.due() if self.alive else None

    def checkpointed(self, position: Sequence) -> None:
        """Note that the daemon stored a checkpoint."""
        self.position.store(position)

    async def drain(self) -> None:
        """Flush what was accepted."""
        if self.alive:
            self._leaving()
            await self._shards.flush("shutdown_requested")
            self._answered()

    async def end(self) -> bool:
        """Flush, and mark the shard ended durably. False: it is owned elsewhere."""
        if not self.alive:
            return False
        self._leaving()
        self._shards.end(self)
        await self._shards.flush("shard_ended")
        if self._replaced():
            return False
        self.alive = False
        self._shards.ended(self)
        return True

    def _leaving(self) -> None:
        # While the ledger is out of reach nothing more comes: taken for idle, the shard would let windows close whose rows
        # its children have, or its next owner.
        self._shards.watermark.leaving(self.shard_id)

    def _answered(self) -> None:
        if self.alive:
            self._shards.watermark.answered(self.shard_id, self._shards.clock.steady_ms())

    def _replaced(self) -> bool:
        return not self.alive

    async def lost(self) -> None:
        """Flush what was accepted, then let go."""
        if self.alive:
            self._leaving()
            await self._shards.flush("lease_lost")
        self.disconnected()

    async def finish(self) -> None:
        """Be held back no more: no batch follows, and what was taken is made durable by the server's last flush."""
        self.finishing = True
        await self._shards.backpressure.release()

    def disconnected(self) -> None:
        """Let go without an ending; what is buffered is still flushed."""
        if self.alive:
            self.alive = False
            self._shards.disconnected(self)


def _is_gap(opening: ShardOpening, position: Sequence | None, *, ended: bool = False) -> bool:
    """Tell whether a daemon that starts so would skip records behind a position."""
    return judge_start(opening.start, position, ended=ended) is Start.BEYOND


def _refuse_gap(opening: ShardOpening, position: Sequence | None, *, ended: bool, accepted: bool) -> None:
    """Raise GapRefused when a daemon starts where records would be skipped; log it when that is accepted."""
    if not _is_gap(opening, position, ended=ended):
        return
    if accepted:
        log.error(
            "shard.gap_accepted",
            shard=opening.shard_id,
            start=str(opening.start),
            position=str(position) if position else None,
        )
        return
    raise GapRefused(
        f"The daemon starts shard {opening.shard_id} at {opening.start}, beyond the ledger's position "
        f"({position or 'none'}): records between the two would never be processed.",
        did="The connection was closed.",
        advice="Restore the ledger that belongs to this KCL application, or delete the application's lease table "
        "to read again, or accept the loss once with --accept-gap.",
        shard=opening.shard_id,
    )
