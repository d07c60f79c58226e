"""The shards that this server reads: which are opened or refused, what becomes of their batches, and how they end.

A source asks ``CoordinatorIntake`` for a shard and gets an ``IntakeSession``: one shard under one connection.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import structlog
from msgspec import structs

from mldserver.base.clock import Clock
from mldserver.base.kill_points import kill_point
from mldserver.consumer.intake import AT_TIP, KnownShard, LedgerSnapshot, ShardListing, ShardOpening
from mldserver.coordinator.backpressure import Backpressure
from mldserver.coordinator.cleanup import Retention
from mldserver.coordinator.core.flush import Buffer, BufferedBatch, buffered, flush_at, last_effective_ms
from mldserver.coordinator.core.ledger_view import LedgerView
from mldserver.coordinator.core.lineage import DRAIN, Lineage
from mldserver.coordinator.core.open_windows import CoordinatorRules
from mldserver.coordinator.core.sessions import Session, SessionPosition, Sessions, skips_records
from mldserver.coordinator.core.watermark import Watermark
from mldserver.coordinator.membership import Membership
from mldserver.coordinator.progress import Reports
from mldserver.coordinator.store_claims import StoreClaims
from mldserver.coordinator.timer_counts import TimerCounts
from mldserver.effects import NOTHING, Effects
from mldserver.errors import GapRefused, PeerError
from mldserver.ledger.contract import ShardState, StoreState
from mldserver.ledger.operations import Ledger
from mldserver.ledger.rules import position_after_gap
from mldserver.records import Sequence
from mldserver.runtime.interface import BatchOutcome, TimerReport
from mldserver.stores import SnapshotSource, StateChange, StateSnapshot, StoreClaim, pack_changes
from mldserver.windows import WindowSpec

log = structlog.get_logger("mldserver")

_CORRECTION: Final = Effects(state=(pack_changes([StateChange(b"", None)]),))
"""Changes no key, and has the next flush correct when the store's first timer is due."""


@dataclass(kw_only=True, eq=False, slots=True)
class CoordinatorIntake:
    """An ``Intake``: what sources ask of the coordinator. It shares the coordinator's parts."""

    rules: CoordinatorRules
    spec: WindowSpec | None
    ledger: Ledger
    view: LedgerView
    clock: Clock
    buffer: Buffer
    lineage: Lineage
    watermark: Watermark
    sessions: Sessions
    backpressure: Backpressure
    membership: Membership
    retention: Retention
    reports: Reports
    flush: Callable[[str], Awaitable[None]]
    """Returns when a whole cycle that began after the call is done."""
    soon: Callable[[], None]
    """Requests a cycle at once."""
    snapshot: Callable[[Session], Awaitable[StateSnapshot]]
    """See ``StateFiles``."""
    ask_stream: Callable[[], Awaitable[bool]] | None
    """See ``Coordinator``."""
    claims: StoreClaims
    timer_counts: TimerCounts
    _openings: Counter[str] = field(init=False, default_factory=Counter)
    """How many connections are opening each shard now."""
    _unlisted: set[str] = field(init=False, default_factory=set)
    """Of these shards, those that the stream has not listed yet."""
    rows_accepted: int = field(init=False, default=0)
    flush_at: int = field(init=False)
    """At this many bytes of rows that no cycle has seen, the next cycle follows at once."""

    def __post_init__(self) -> None:
        self.flush_at = flush_at(self.rules.flush_bytes, 0, 0.0)

    async def check(self, opening: ShardOpening) -> None:
        """Raise GapRefused when a shard that has a live connection would start beyond its position."""
        live = self.sessions.live(opening.shard_id)
        if live is None or self.rules.accept_gap or not skips_records(opening.start, live.position.durable):
            return
        # Another server may have moved the position since the latest cycle: read the ledger again.
        state = (await self.ledger.peek()).shards.get(opening.shard_id)
        if state is not None and not state.gap_accepted:
            _refuse_gap(opening, state.position, ended=state.ended, accepted=False)

    def abandon(self, shard_id: str) -> None:
        """Release a shard whose connection was replaced by another that could not open it. The shard is missing then."""
        live = self.sessions.live(shard_id)
        if live is not None:
            live.disconnected()

    async def open_shard(self, opening: ShardOpening) -> IntakeSession:
        """Open a shard under a new epoch. Raises GapRefused when it starts beyond the ledger's position."""
        # Before the epoch is raised: a connection that is refused must not take the shard from the live one.
        await self.check(opening)
        with self.membership.opening(), self._opening(opening.shard_id):
            # The shard counts from now on. No window closes without it while the stream and the ledger answer.
            now_ms = self.clock.steady_ms()
            new = self.lineage.add(opening.shard_id, now_ms, parents=opening.parents)
            if (new or opening.shard_id in self._unlisted) and not opening.parents:
                await self._ask_for(opening.shard_id)
                now_ms = self.clock.steady_ms()
            if new:
                self.watermark.restart_settling(now_ms)
            return await self._open(opening, await self.claims.claim(opening), new=new)

    @contextlib.contextmanager
    def _opening(self, shard_id: str) -> Iterator[None]:
        """Keep a shard known until the block ends. A name that the stream does not list is forgotten then.

        So an invented name delays windows no longer than the stream takes to answer.
        """
        self._openings[shard_id] += 1
        try:
            yield
        finally:
            self._openings[shard_id] -= 1
            if not self._openings[shard_id]:
                del self._openings[shard_id]
                if shard_id in self._unlisted:
                    self._unlisted.remove(shard_id)
                    self.lineage.forget(shard_id)

    async def _ask_for(self, shard_id: str) -> None:
        """Ask the stream whether it has an unknown shard. Raises PeerError when it has not."""
        if self.ask_stream is None:
            return
        self._unlisted.add(shard_id)
        if await self.ask_stream() and not self._is_listed(shard_id) and not self.rules.accept_gap:
            raise PeerError(
                f"A daemon connected for shard {shard_id}, which the stream does not have.",
                did="The connection was closed, and nothing of the shard was taken.",
                advice="Find out who connects there. If the daemon reads another stream, name that one with --stream. If AWS "
                "lists the shard no more, delete its lease, or start once with --accept-gap.",
                shard=shard_id,
            )
        self._unlisted.discard(shard_id)

    def _is_listed(self, shard_id: str) -> bool:
        return self.retention.listed is not None and shard_id in self.retention.listed

    def forget_removed(self, shard_ids: Iterable[str]) -> None:
        """Forget shards that an operator removed from the ledger, unless the stream lists them or one is being opened."""
        for shard_id in shard_ids:
            if not self._is_listed(shard_id) and shard_id not in self._openings:
                self.lineage.forget(shard_id)

    async def _open(self, opening: ShardOpening, claim: StoreClaim | None, *, new: bool) -> IntakeSession:
        shard_id = opening.shard_id
        # The ledger keeps parents that only ListShards names, so that they order the shard after a restart too.
        parents = opening.parents or self.lineage.nodes[shard_id].parents
        start = opening.start if isinstance(opening.start, Sequence) else None
        state = await self.ledger.open_shard(shard_id, parents, store=claim, start=start)
        accepted = state.gap_accepted or self.rules.accept_gap
        _refuse_gap(opening, state.position, ended=state.ended, accepted=accepted)
        state = replace(state, position=position_after_gap(state, start) or state.position)
        # Read under the new epoch: records that an older session has not made durable are delivered again.
        parked = await self.ledger.parked_keys(shard_id) if self.rules.parks else {}
        store = None if claim is None else (await self.ledger.peek()).stores[state.store]
        await self.membership.read_ancestors(state)
        now_ms = self.clock.steady_ms()
        self.lineage.add(shard_id, now_ms, parents=state.parents)
        proved = self.lineage.proved_ended(shard_id)
        if proved:
            await self.ledger.end_shards(frozenset(proved))
        # No await from here on: a cycle must not see a shard that is opened only in part.
        session = IntakeSession(
            self, shard_id, state, parked, store, within_aggregates=opening.within_aggregates
        )
        if not self.sessions.open(
            session, state, self.clock.steady_ms(), tells_lag=opening.tells_lag, polled=opening.polled
        ):
            return session
        if new or proved:
            self.watermark.restart_settling(now_ms)
        log.info(
            "shard.opened",
            shard=shard_id,
            start=str(opening.start) if opening.start is not None else None,
            position=str(state.position) if state.position else None,
            epoch=state.epoch,
        )
        return session

    async def adopt(self, store_id: str) -> IntakeSession | None:
        """Open a session that fires the timers of a store whose shards have all ended. None: the ledger refuses it."""
        # The stream may have a child that it has not listed yet: the child's records come before the timers.
        if self.ask_stream is not None:
            answered, node = await self.ask_stream(), self.lineage.nodes.get(store_id)
            if not answered or node is None or node.children:
                return None
        if any(session.alive for session in self.sessions.of_store(store_id)):
            return None
        state = await self.ledger.adopt_store(store_id)
        if state is None:
            return None
        kill_point("store.adopted")
        store = (await self.ledger.peek()).stores[store_id]
        # No await from here on, as in ``_open``.
        session = IntakeSession(self, state.shard_id, state, {}, store, adopted=True)
        self.sessions.adopt(session, state, self.clock.steady_ms())
        log.info("store.adopted", store=store_id, shard=state.shard_id, epoch=state.epoch)
        return session

    def add_listing(self, listing: Mapping[str, ShardListing]) -> tuple[str, ...]:
        """Add the shards that the stream lists; return the new ones."""
        now_ms = self.clock.steady_ms()
        self.retention.listed = frozenset(listing)
        self.claims.ranges = {shard_id: each.key_range for shard_id, each in listing.items()}
        new = tuple(
            shard_id
            for shard_id, each in listing.items()
            if self.lineage.add(shard_id, now_ms, parents=each.parents)
        )
        if new:
            self.watermark.restart_settling(now_ms)
        for shard_id in new:
            log.info("shard.discovered", shard=shard_id, parents=self.lineage.nodes[shard_id].parents)
        return new

    def ledger_snapshot(self) -> LedgerSnapshot:
        """Return what the ledger held when this server looked last."""
        servers = frozenset(name for name in self.view.state.servers if not name.startswith(DRAIN))
        shards = {
            name: KnownShard(shard.position, shard.ended, shard.owner, shard.store)
            for name, shard in self.view.state.shards.items()
        }
        return LedgerSnapshot(self.ledger.server_id, servers | {self.ledger.server_id}, shards)

    # What sessions ask for.

    def accept(
        self, session: IntakeSession, outcome: BatchOutcome, now_ms: int, received_ms: int | None
    ) -> bool:
        """Accept a batch's effects; return whether the daemon may be answered at once."""
        shard_id, outline = session.shard_id, outcome.outline
        node = self.lineage.nodes[shard_id]
        floor_ms = self.lineage.floor_ms(shard_id) if node.effective_ms is None else node.effective_ms
        fresh = outline.records > outline.duplicates
        position, last = session.position, outline.last
        if last is not None:
            position.deliver(last)
            if fresh:
                position.accept(last)
        last = position.claim(outcome.position if outcome.keeps_position else last)
        session.outcomes += outcome is not AT_TIP
        if outcome.timers is not None:
            self._note_timers(session.store_id, outcome.timers)
        if outcome.effects is NOTHING or not outcome.effects:
            # Most batches of quiet shards only move a position. If rows have an event time, records without rows do
            # not show it.
            effective_ms = last_effective_ms(outline, floor_ms)
            event_ms = effective_ms if self.rules.on_arrival else None
            if fresh or last is not None:
                self.buffer.move(shard_id, session.epoch, last, effective_ms, event_ms, session.store_id)
        else:
            batch = buffered(
                shard_id,
                session.epoch,
                outcome,
                floor_ms=floor_ms,
                spec=self.spec,
                max_ahead_ms=self.rules.max_ahead_ms,
            )
            batch.last, batch.store = last, session.store_id
            if batch.ahead is not None:
                self.reports.count_ahead(shard_id, batch.ahead)
            self.buffer.add(batch)
            self.rows_accepted += 0 if batch.effects.rows is None else len(batch.effects.rows)
            effective_ms, event_ms = batch.effective_ms, batch.latest_event_ms
        if effective_ms is not None:
            node.effective_ms = effective_ms
        self.watermark.observed(
            shard_id,
            now_ms,
            records=outline.records,
            lag_ms=outline.millis_behind_latest,
            event_ms=event_ms if fresh else None,
            arrival_ms=effective_ms,
            reported_ms=outline.latest_arrival_ms,
            received_ms=received_ms,
        )
        if self.buffer.new_bytes >= self.flush_at:
            self.soon()
        if self.backpressure.is_held(session):
            return False
        self.watermark.answered(shard_id, now_ms)
        return True

    def accept_firing(self, session: IntakeSession, outcome: BatchOutcome) -> bool:
        """Accept the effects of a portion of timers; return whether the shard has room for more."""
        shard_id = session.shard_id
        node = self.lineage.nodes[shard_id]
        floor_ms = self.lineage.floor_ms(shard_id) if node.effective_ms is None else node.effective_ms
        session.outcomes += 1
        self.timer_counts.count_firing(outcome)
        if outcome.timers is not None:
            self._note_timers(session.store_id, outcome.timers)
            if not outcome.effects and self.sessions.differs(session.store_id, outcome.timers.next_due_ms):
                outcome = structs.replace(outcome, effects=_CORRECTION)
        if outcome.effects:
            batch = buffered(shard_id, session.epoch, outcome, floor_ms=floor_ms, spec=self.spec)
            # After a restart the shard's watermark goes on from its records, as it does now.
            batch.last = batch.latest_event_ms = None
            batch.store = session.store_id
            if batch.effective_ms is not None:
                node.effective_ms = batch.effective_ms
            self.buffer.add(batch)
            self.rows_accepted += 0 if batch.effects.rows is None else len(batch.effects.rows)
        has_room = not self.backpressure.is_held(session)
        if not has_room or self.buffer.new_bytes >= self.flush_at:
            self.soon()
        return has_room

    def _note_timers(self, store_id: str, report: TimerReport) -> None:
        self.sessions.next_due_ms[store_id] = report.next_call_ms
        self.timer_counts.count(store_id, report)

    async def admit(
        self,
        session: IntakeSession,
        *,
        answered: bool,
        checkpoint: Callable[[], Awaitable[object]] | None,
    ) -> None:
        """Return when the shard may have its next batch: first when memory has room, then when no operator pauses the shard.

        ``answered``: the batch is acknowledged already, so a pause has nothing to withhold. In a pause of all shards, and when an
        operator drains a paused one, everything is flushed, and ``checkpoint`` asks the daemon to store it: the lease can then move.
        """
        backpressure, shard_id = self.backpressure, session.shard_id
        if session.alive and backpressure.is_held(session):
            self.soon()
            await backpressure.wait(session, answered=answered)
        if not answered:
            await self._stay_paused(session, checkpoint)
        if session.alive:
            self.watermark.answered(shard_id, self.clock.steady_ms())

    async def _stay_paused(
        self, session: IntakeSession, checkpoint: Callable[[], Awaitable[object]] | None
    ) -> None:
        """Return when no pause holds the session's shard. See ``admit``."""
        pressure, shard_id, paused = self.backpressure, session.shard_id, session.paused
        try:
            while paused:
                await pressure.until(lambda: not session.paused or pressure.must_settle(shard_id))
                if paused := session.paused:
                    await self.flush("drain")
                    if checkpoint is not None:
                        await checkpoint()
                    pressure.draining.discard(shard_id)
                    pressure.settled.add(shard_id)
                    await pressure.release()  # wakes the drain command; the shard stays paused
        finally:
            pressure.settled.discard(shard_id)

    def move(self, session: IntakeSession, position: Sequence) -> None:
        """Move a shard's position with the next flush, without effects."""
        self.buffer.move(session.shard_id, session.epoch, position, store=session.store_id)

    async def end(self, session: IntakeSession) -> bool:
        """Flush, and mark a session's shard ended durably. False: the session has lost it meanwhile."""
        last = session.position.accepted
        end = BufferedBatch(
            session.shard_id, session.epoch, last=last, ends_shard=True, store=session.store_id
        )
        self.buffer.add(end)
        await self.flush("shard_ended")
        if not session.alive:
            return False
        session.alive, session.ended = False, True
        self.sessions.end(session, self.clock.steady_ms())
        log.info("shard.ended", shard=session.shard_id, position=str(session.position.durable))
        return True

    async def finish(self, session: IntakeSession) -> None:
        """Throttle a session's shard only for memory from now on: no batch follows."""
        session.finishing = True
        await self.backpressure.release()

    def let_go(self, session: IntakeSession) -> None:
        """Release a session's shard. It is missing until another session opens it."""
        if self.sessions.let_go(session, self.clock.steady_ms()):
            self.membership.released[session.shard_id] = session.epoch
            self.soon()


class IntakeSession:
    """A ``ShardIntake``. Once the shard is opened again or released, its calls do nothing."""

    def __init__(
        self,
        shards: CoordinatorIntake,
        shard_id: str,
        state: ShardState,
        parked: Mapping[str, Sequence],
        store: StoreState | None,
        *,
        within_aggregates: bool = True,
        adopted: bool = False,
    ) -> None:
        """Start at the ledger's position, under the epoch just raised; ``parked``: keys with dead letters.

        ``adopted``: the shard has ended, and the session only fires timers.
        """
        self._shards, self._watermark, self._clock = shards, shards.watermark, shards.clock
        self.shard_id = shard_id
        self.epoch = state.epoch
        self.parked = parked
        self.position = SessionPosition(state.position, within_aggregates=within_aggregates)
        self.alive = True
        self.finishing = False
        """Whether no batch follows."""
        self.ended = False
        """Whether the shard's end is durable."""
        self.adopted = adopted
        self.store = store
        """The shard's store as it was then; None: the handler keeps no state."""
        self.store_id = "" if store is None else store.store_id
        self.outcomes = state.epoch << 32
        """Rises with each accepted outcome of the runtime. Sessions of a shard have different numbers: a copy of its state that was
        read for an earlier session never passes for that of a later one.
        """

    @property
    def after(self) -> Sequence | None:
        """Records at or before this sequence were accepted earlier: they are dropped before the handler sees them."""
        return self.position.accepted

    @property
    def snapshot(self) -> SnapshotSource | None:
        """See ``ShardIntake``."""
        return None if self.store is None else partial(self._shards.snapshot, self)

    @property
    def next_number(self) -> int | None:
        """See ``ShardIntake``."""
        return None if self.store is None else self.outcomes + 1

    def batch_began(self, received_ms: int | None = None) -> None:
        """Report that processing of a batch begins. It was received at ``received_ms`` (steady time; None: now)."""
        if self.alive:
            came_ms = self._clock.steady_ms() if received_ms is None else received_ms
            self._watermark.began(self.shard_id, came_ms)

    def request_began(self) -> None:
        """Report that the shard is not silent, or that its end is being stored, until ``request_ended``."""
        if self.alive:
            self._watermark.busy(self.shard_id)
        elif self.ended:
            self._watermark.ending(self.shard_id)

    def request_ended(self) -> None:
        """Report that the daemon was answered: from now on the shard's silence counts."""
        now_ms = self._clock.steady_ms()
        if self.alive:
            self._watermark.free(self.shard_id, now_ms)
        elif self.ended:
            self._watermark.end_answered(self.shard_id, now_ms)

    def accept_batch(self, outcome: BatchOutcome, now_ms: int, received_ms: int | None = None) -> bool:
        """Accept a batch's effects; return whether the daemon may be answered without ``wait_for_room``."""
        return not self.alive or self._shards.accept(self, outcome, now_ms, received_ms)

    @property
    def next_due_ms(self) -> int | None:
        """When the first timer of the shard's store is due (ms since the epoch). None: no timers, or the state is not loaded yet."""
        return self._shards.sessions.next_due_ms.get(self.store_id)

    @property
    def may_fire(self) -> bool:
        """Whether timers of the shard may fire now: the session is alive, and the shard is neither throttled nor paused."""
        return self.alive and not self.finishing and not self._shards.backpressure.is_held(self)

    def accept_firing(self, outcome: BatchOutcome) -> bool:
        """Accept the effects of a portion of timers: no position moves. Return whether the shard has room for the next portion."""
        return not self.alive or self._shards.accept_firing(self, outcome)

    @property
    def paused(self) -> bool:
        """Whether an operator holds the shard's answers."""
        return self.alive and not self.finishing and self._shards.backpressure.is_paused(self.shard_id)

    async def wait_for_room(
        self, *, answered: bool = False, checkpoint: Callable[[], Awaitable[object]] | None = None
    ) -> None:
        """Wait while the shard is throttled; from then on its silence counts. See ``ShardIntake``."""
        await self._shards.admit(self, answered=answered, checkpoint=checkpoint)

    def advance(self, position: Sequence) -> None:
        """Report that a handler which keeps its position has checkpointed up to ``position`` in one of its hooks."""
        last = self.position.claim(position) if self.alive else None
        if last is not None:
            self._shards.move(self, last)

    def begin(self, position: Sequence) -> None:
        """Set where a shard begins for which the ledger has no position."""
        if self.alive and self.position.accepted is None:
            self.position.accept(position)
            self.advance(position)

    def checkpoint_due(self) -> Sequence | None:
        """Return the durable position when it is ahead of the last checkpoint, else None."""
        return self.position.due() if self.alive else None

    def checkpointed(self, position: Sequence) -> None:
        """Report that the daemon stored a checkpoint."""
        self.position.store(position)

    async def drain(self) -> None:
        """Flush what was accepted."""
        if self.alive and await self._flushed("shutdown_requested"):
            self.request_ended()

    async def end(self) -> bool:
        """Flush, and mark the shard ended durably. False: it is owned elsewhere."""
        if not self.alive:
            return False
        self.request_began()
        return await self._shards.end(self)

    async def _flushed(self, reason: str) -> bool:
        """Flush, and return whether the session still has its shard."""
        # The shard must not count as idle while the flush lasts: windows could close before the rows of its children, or
        # of its next owner.
        self.request_began()
        await self._shards.flush(reason)
        return self.alive

    async def lost(self) -> None:
        """Flush what was accepted, then release the shard."""
        if self.alive:
            await self._flushed("lease_lost")
        self.disconnected()

    async def finish(self) -> None:
        """Stop throttling the shard: no batch follows, and the server's last flush makes the accepted ones durable.

        Batches that were answered early and are in flight still wait for room in memory.
        """
        await self._shards.finish(self)

    def disconnected(self) -> None:
        """Release the shard without its end. It is missing from now on; buffered rows are still flushed."""
        if self.alive:
            self.alive = False
            self._shards.let_go(self)


def _refuse_gap(opening: ShardOpening, position: Sequence | None, *, ended: bool, accepted: bool) -> None:
    """Raise GapRefused when a daemon starts where records would be skipped; log it when that is accepted."""
    if not skips_records(opening.start, position, ended=ended):
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
