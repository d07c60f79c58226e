"""The consumption of one shard: its claim, its handler and its session with the coordinator, for every source.

    open      claim the shard, open it in the coordinator and its handler in the runtime
    deliver   process a batch and accept its outcome; the source is acknowledged when it may go on
    drain     process what is in flight, and make it durable: another server will read the shard on
    end       the shard is read to its end: make that durable
    lose      the lease is lost: give up what is in flight
    forget    release the shard, however it was left; always the last call

The state machine in ``core.py`` decides; this shell carries out its orders. Nearly every batch is one synchronous call, from its
delivery to its acknowledgement, and with a worker two: one there and one back. What must be awaited is awaited in one task (``run``).
A source that fetches batches itself needs no such task: it awaits ``acknowledged`` after each delivery.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final, NamedTuple, cast

import structlog

from mldserver.base import kill_points
from mldserver.base.clock import CivilClock, Clock, Flag, first_of
from mldserver.base.kill_points import kill_point
from mldserver.consumer.claims import Claim, Claims, Loss, Superseded
from mldserver.consumer.core import Consumption, InFlight, Order, Phase, Signal, Stage, Work
from mldserver.consumer.deadlines import AnswerDeadlines
from mldserver.consumer.intake import AT_TIP, Intake, ShardIntake, ShardOpening
from mldserver.consumer.progress_log import Progress, ProgressLog
from mldserver.consumer.upstream import CheckpointOutcome, Fetching, Upstream
from mldserver.errors import InternalError, MldserverError, PeerError
from mldserver.records import Hook, Sequence, Shard
from mldserver.runtime.interface import BatchOutcome, Delivery, Payload, Runtime, outcome_of

log = structlog.get_logger("mldserver")

# An attribute of an enum class costs four times a global: every batch comes through here.
_ACKNOWLEDGE, _REPORT, _SUBMIT, _ACCEPT = Order.ACKNOWLEDGE, Order.REPORT, Order.SUBMIT, Order.ACCEPT
_DONE, _EMPTY = Stage.DONE, Work.EMPTY
_AWAITED: Final = frozenset({Work.AWAITING, Work.THROTTLED, Work.FLUSHING})
_CHECKPOINTING: Final = frozenset(
    {Phase.CHECKPOINTING, Phase.FINISHING_CHECKPOINT, Phase.SUPERSEDED_CHECKPOINT}
)


class ConsumerParts(NamedTuple):
    """What consumers are made of."""

    runtime: Runtime
    intake: Intake
    claims: Claims
    clock: Clock
    keyed: bool = False
    """Whether the handler keeps state: then the runtime has one batch of a shard at a time."""
    civil: CivilClock | None = None
    """Gives receipts their time of day; None: the clock does."""


class Consumer:
    """Consumes one shard for a source."""

    def __init__(
        self,
        parts: ConsumerParts,
        *,
        counts: ProgressLog | None = None,
        deadlines: AnswerDeadlines | None = None,
        upstream: Upstream | None = None,
        log: structlog.typing.FilteringBoundLogger = log,
    ) -> None:
        """``counts`` collects what the log reports of batches. ``deadlines`` watches batches that are due for an early answer.

        ``upstream``: the source, if it sends batches and waits for answers; None: it fetches them, and awaits ``acknowledged``.
        """
        self._parts = parts
        self._clock = parts.clock
        self._deadlines = deadlines or AnswerDeadlines(clock=parts.clock, seconds=None)
        self._source: Any = upstream or Fetching()
        self._sends = upstream is not None
        self.log = log
        self.progress = Progress(log, counts or ProgressLog(clock=parts.clock, seconds=0))
        # Receipts stand in for arrival times that V1 does not send: a clock that is set must not disorder them.
        self._wall_ms = (parts.civil or parts.clock).now_ms() - parts.clock.steady_ms()
        self._keyed = parts.keyed
        self.core = Consumption(early=self._deadlines.seconds is not None, one_at_a_time=parts.keyed)
        self.shard_id = ""
        """Empty until ``open``."""
        self.failure: Exception | None = None
        """Why the consumption has failed."""
        self._claim: Claim
        self.intake: ShardIntake
        """The shard's session with the coordinator, once it is opened there."""
        self._has_session = False
        self._stopping = False
        self._wake = Flag()
        self._changed: Flag | None = None
        self._awaited: InFlight | None = None
        """The batch for which the task does, or awaits, something."""

    @property
    def alive(self) -> bool:
        """Whether the shard is open, and no other server has opened it since."""
        return self._has_session and self.intake.alive

    @property
    def due(self) -> Sequence | None:
        """The durable position that the source may store, if it has moved since the last one was stored."""
        return self.intake.checkpoint_due()

    @property
    def is_open(self) -> bool:
        """Whether batches may be delivered."""
        return self.core.phase is Phase.IDLE

    @property
    def since_ms(self) -> int | None:
        """Steady time at which the oldest batch in flight came; None: none is in flight."""
        return self.core.batches[0].received_ms if self.core.batches else None

    # The verbs.

    async def open(
        self, opening: ShardOpening, start: Shard | Callable[[ShardIntake], Awaitable[Shard]]
    ) -> None:
        """Claim the shard and open it; ``start``: where its handler begins, or what decides that once the ledger's position is known.

        Raises GapRefused if records would be skipped, Superseded if another connection claims the shard meanwhile.
        """
        runtime, intake, claims, *_ = self._parts
        shard_id = self.shard_id = opening.shard_id
        await intake.check(opening)
        claim = self._claim = claims.take(shard_id)
        claim.on_loss = self._lost_claim
        self.core.signal(Signal.CLAIM)
        async with claim.work():
            kill_point("shard.opening")
            session = self.intake = await intake.open_shard(opening)
            self._has_session = True
            session.request_began()  # a shard whose handler opens slowly is not silent
            kill_point("shard.opened")
            shard = start if isinstance(start, Shard) else await start(session)
            await runtime.open(shard, session.snapshot)
            if session.parked:
                await runtime.park(shard_id, session.parked)
            session.request_ended()
            claim.opened = True
        self.progress.open(shard_id, self.log)
        self._signal(Signal.OPENED)

    def deliver(self, payload: Payload, size: int, received_ms: int | None = None) -> None:
        """Take a batch of ``size`` bytes; ``received_ms``: steady time at which its first bytes came (default: now)."""
        core = self.core
        if received_ms is None:
            received_ms = self._clock.steady_ms()
        batch = InFlight(payload, size, received_ms)
        try:
            ahead = core.quick and self._source.has_room and self.intake.checkpoint_due() is None
            if core.deliver(batch, free=not self._claim.visits, ahead=ahead):
                if kill_points.armed:
                    kill_point("batch.received")
                self._carry_out()
                if batch.stage is not _DONE and core.batches:  # not given up
                    batch.held = True
                    self._source.hold(size)
                    if core.owed is batch:
                        self._deadlines.watch(self)
            else:
                self._carry_out()
        except Exception as error:  # noqa: BLE001  # whatever it is, only this shard's source may end by it
            self._fail(error)

    def receiving(self, began: bool) -> None:  # noqa: FBT001  # of what: the method's name
        """Note that the first bytes of a message came, or that it is complete: meanwhile the shard is not silent."""
        if self._has_session and began:
            self.intake.request_began()
        elif self._has_session and self.core.phase not in _CHECKPOINTING:
            self.intake.request_ended()

    async def acknowledged(self) -> Sequence | None:
        """Return ``due`` once each delivered batch is accepted, and there is room for more.

        Raises what the runtime has raised, and Superseded if another connection has claimed the shard.
        """
        core = self.core
        while core.batches:
            if core.work in _AWAITED:
                await self._await_first()
            else:
                await self._until(lambda: not core.batches or core.work in _AWAITED)
        if self.failure is not None:
            raise self.failure
        if core.phase is Phase.SUPERSEDED:
            raise Superseded
        return self.intake.checkpoint_due()

    def checkpointed(self, position: Sequence) -> None:
        """Note that the source has stored a position."""
        self.intake.checkpointed(position)

    async def at_tip(self, began_ms: int) -> None:
        """Note that a request to the stream, which began at this steady time, found the shard's tip; return if there is room."""
        if not self.intake.accept_batch(AT_TIP, self._clock.steady_ms(), began_ms):
            await self.intake.wait_for_room()

    async def drain(self, *, flush: bool = True) -> None:
        """Process what is in flight, for one deadline at most, then make it durable: another server reads the shard on.

        ``flush``: if not, the caller makes everything durable. Raises Superseded.
        """
        if not self._request(Signal.DRAIN):
            return
        intake, core = self.intake, self.core
        intake.request_began()
        idle, seconds = self._until(lambda: not core.batches), self._deadlines.seconds
        await (idle if seconds is None else first_of(idle, self._clock.sleep(seconds)))
        if core.phase is not Phase.DRAINING:
            return
        self._give_up()
        async with self._claim.work():
            position = await self._parts.runtime.notify(self.shard_id, Hook.SHUTDOWN_REQUESTED)
            if position is not None:
                intake.advance(position)
            if flush:
                await intake.drain()
        if flush:
            kill_point("shard.drained")
        self.log.info("shard.shutdown_requested", position=intake.after and str(intake.after))
        await self._ready()

    async def lose(self) -> None:
        """Give up what is in flight: the lease is lost, or another server has opened the shard. Raises Superseded."""
        if not self._request(Signal.LOSE):
            return
        intake = self.intake
        intake.request_began()
        self._give_up()
        async with self._claim.work():
            await self._parts.runtime.notify(self.shard_id, Hook.LEASE_LOST)
            await intake.lost()
        kill_point("shard.lost")
        self.log.info("shard.lost", position=intake.after and str(intake.after))
        await self._ready()

    async def end(self) -> bool:
        """Make the shard's end durable, and have it checkpointed. False: another connection or server owns the shard.

        Raises Superseded, and PeerError if a batch was given up before.
        """
        if not self._request(Signal.END):
            return False
        intake, core = self.intake, self.core
        intake.request_began()
        await self._until(lambda: not core.batches)
        if core.phase is not Phase.ENDING:
            return False
        self._claim.evict()
        async with self._claim.work():
            if core.incomplete:
                raise PeerError(
                    f"The daemon says that shard {self.shard_id} has ended, but records of it were given up before.",
                    did="The connection was closed without a checkpoint, so that they are delivered again.",
                    advice="The daemon's JVM exits now; its supervisor must restart it.",
                )
            await self._parts.runtime.notify(self.shard_id, Hook.SHARD_ENDED)
            if not await intake.end():
                self._fail(self._owned_elsewhere())
                return False
            intake.request_began()  # the shard's children come only once its end is stored
        kill_point("shard.end_durable")
        await self._ready()
        return True

    async def forget(self) -> None:
        """Release the shard: its handler, its session and its claim."""
        core = self.core
        ended, claimed = core.phase in {Phase.ENDING_CHECKPOINT, Phase.ENDED}, core.phase is not Phase.NEW
        self._signal(Signal.FORGET)
        self._deadlines.waiting.discard(self)
        if not claimed:
            return
        claim = self._claim
        claim.evict()
        with contextlib.suppress(Superseded):
            async with claim.work():
                await self._parts.runtime.forget(self.shard_id)
        self._parts.claims.release(self.shard_id, claim, ended=ended)

    async def finish(self) -> None:
        """Take no more batches, since the server stops; return when none is in flight and the source waits for nothing.

        A shard that is being opened is not waited for, since nothing of it was accepted. A throttled one continues.
        """
        core, self._stopping = self.core, True
        core.stop()
        self._carry_out()
        if core.phase is Phase.NEW or not self._claim.opened:
            return
        await self.intake.finish()
        await self._until(lambda: not core.in_request and not core.batches)

    async def stop_throttling(self) -> None:
        """Wait for room no more: no batch follows the one in flight."""
        if self._has_session:
            await self.intake.finish()

    async def run(self) -> None:
        """Await what batches need to be awaited for, until cancelled; only for a source that sends."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self.core.work in _AWAITED:
                await self._await_first()

    def acknowledge_late(self) -> None:
        """Acknowledge the batch that the source waits for, if there is memory for more, and an operator does not pause the shard."""
        try:
            memory = self._source.has_room and not self.intake.paused
            if self.core.deadline(due=self.intake.checkpoint_due() is not None, memory=memory):
                self._carry_out()
        except Exception as error:  # noqa: BLE001  # see deliver
            self._fail(error)

    @property
    def owed_since_ms(self) -> int | None:
        """Steady time at which the batch came that the source waits for."""
        return self.core.owed_since_ms

    # Carrying out orders.

    def _signal(self, signal: Signal) -> None:
        self.core.signal(signal)
        self._carry_out()

    def _request(self, signal: Signal) -> bool:
        """Note a request of the source; return whether it must be carried out: not if another connection has the shard."""
        self._signal(signal)
        return self.core.phase in {Phase.DRAINING, Phase.LOSING, Phase.ENDING}

    async def _ready(self) -> None:
        """Acknowledge a request, after the checkpoint that is due; return when that is done."""
        ends, core = self.core.phase is Phase.ENDING, self.core
        due = (
            self._sends
            and core.phase is not Phase.LOSING
            and (ends or self.intake.checkpoint_due() is not None)
        )
        self._signal(Signal.READY_DUE if due else Signal.READY)
        await self._until(lambda: not core.in_request)
        self.intake.request_ended()

    def _carry_out(self) -> None:  # noqa: C901  # a call for each order would cost more than what it does
        orders = self.core.orders
        while orders:
            order, batch = orders.pop(0)
            if order is _ACKNOWLEDGE:
                self._source.acknowledge()
                if batch is not None:
                    if kill_points.armed:
                        kill_point("batch.answered")
                    self._deadlines.waiting.discard(self)
                    if batch.late:
                        self._report_late()
            elif order is _REPORT and batch is not None:
                self.progress.report(batch, each=self._sends, debugging=self._source.debugging)
            elif order is _SUBMIT and batch is not None:
                self._submit(batch)
            elif order is _ACCEPT and batch is not None:
                self._accept(batch)
            elif order is Order.BEGIN:
                first = self.core.batches[0]
                first.began = True
                self.intake.batch_began(first.received_ms)
            else:
                self._carry_out_rare(order, batch)
        if self._changed is not None:
            self._changed.set()

    def _carry_out_rare(self, order: Order, batch: InFlight | None) -> None:
        match order:
            case Order.AWAIT:
                self._wake.set()
            case Order.CHECKPOINT:
                ends = self.core.phase is Phase.ENDING_CHECKPOINT
                position = None if ends else self.intake.checkpoint_due()
                assert ends or position is not None, "without a position it would cover everything delivered"
                self._checkpoint(position).add_done_callback(partial(self._replied, position, batch))
            case Order.GIVE_UP:
                self._give_up()
            case Order.FAIL:
                self._source.close(as_ours(self.failure or self._owned_elsewhere()))
            case _:
                assert order is Order.RELEASE, order
                if not self._has_session:
                    # The connection that had the shard before lost it to this one, which could not open it.
                    self._parts.intake.abandon(self.shard_id)
                    return
                if self._sends and not self._stopping:
                    self.log.warning(
                        "shard.disconnected", position=self.intake.after and str(self.intake.after)
                    )
                self.intake.disconnected()

    def _submit(self, batch: InFlight) -> None:
        """Begin a batch in the runtime, as far as possible without a wait."""
        core, is_first = self.core, batch is self.core.batches[0]
        after = batch.after = self.intake.after
        keyed = self._keyed
        delivery = Delivery(
            self.shard_id,
            batch.payload,
            received_ms=batch.received_ms + self._wall_ms,
            after=after,
            behind=(batch.ahead or not is_first) and not keyed,  # nothing of the shard follows it meanwhile
            number=self.intake.next_number if keyed else None,
        )
        begun = self._parts.runtime.begin(delivery)
        if type(begun) is BatchOutcome:
            batch.outcome = begun
            if is_first:
                self._accept(batch)
            else:
                core.unfinished(batch)
            return
        batch.begun = begun
        if is_first and not batch.began:
            self._claim.hold()
            batch.began = True
            self.intake.batch_began(batch.received_ms)
        if isinstance(begun, asyncio.Future):
            begun.add_done_callback(partial(self._settled, batch))
            core.submitted(batch)
        else:
            core.unfinished(batch)

    def _settled(self, batch: InFlight, future: asyncio.Future[Any]) -> None:
        """Note what the runtime has done by itself."""
        if future.cancelled():
            return
        try:
            if future.exception() is not None:
                self.core.unfinished(batch)  # the task raises it
            elif isinstance(result := future.result(), BatchOutcome):
                batch.outcome = result
                self.core.processed(batch)
            else:
                batch.begun = result
                self.core.unfinished(batch)
            self._carry_out()
        except Exception as error:  # noqa: BLE001  # see deliver
            self._fail(error)

    def _accept(self, batch: InFlight) -> None:
        """Let the coordinator accept the first batch, whose outcome is known."""
        core = self.core
        if batch.began and self._overlaps(batch, batch.outcome):
            core.unfinished(batch)
            return
        now_ms = batch.processed_ms = self._clock.steady_ms()
        if kill_points.armed:
            kill_point("batch.handled")
        room = self.intake.accept_batch(batch.outcome, now_ms, None if batch.began else batch.received_ms)
        if kill_points.armed:
            kill_point("batch.buffered")
        if room:
            if batch.held:
                self._free(batch)
            owed, intake = core.owed, self.intake
            core.done(
                batch,
                now_ms,
                due=owed is not None and self._sends and intake.checkpoint_due() is not None,
                memory=owed is not None and owed is not batch and self._source.has_room,
            )
            if self._claim.holds and core.work is _EMPTY:
                self._claim.let_go()
        else:
            self._claim.hold()
            core.throttled(batch)

    def _delivery(self, batch: InFlight) -> Delivery:
        batch.after = self.intake.after
        received_ms = batch.received_ms + self._wall_ms
        number = self.intake.next_number
        return Delivery(
            self.shard_id, batch.payload, received_ms=received_ms, after=batch.after, number=number
        )

    def _overlaps(self, batch: InFlight, outcome: BatchOutcome) -> bool:
        """Whether a batch that was begun behind others has records of theirs: it is processed again, without them."""
        first, after = outcome.outline.first, self.intake.after
        return first is not None and after is not None and first <= after and batch.after != after

    # In the task.

    async def _await_first(self) -> None:
        """Do what the first batch needs to be awaited for."""
        core = self.core
        batch = self._awaited = core.batches[0]
        try:
            async with self._claim.work():
                if batch.stage is not Stage.ACCEPTED:
                    batch.began_ms = self._clock.steady_ms()
                    batch.outcome = await self._outcome(batch)
                    self._free(batch)
                    batch.processed_ms = self._clock.steady_ms()
                    kill_point("batch.handled")
                    room = core.is_first(batch) and self.intake.accept_batch(
                        batch.outcome, batch.processed_ms
                    )
                    kill_point("batch.buffered")
                else:
                    room = False
                if core.is_first(batch) and not room:
                    if batch.stage is not Stage.ACCEPTED:
                        core.throttled(batch)
                    owed = core.owed is batch
                    checkpoint = self._checkpoint_now if owed and self._sends else None
                    await self.intake.wait_for_room(answered=not owed, checkpoint=checkpoint)
                if core.is_first(batch) and core.must_flush:
                    core.signal(Signal.FLUSH)
                    await self.intake.drain()
            if core.is_first(batch):
                self._free(batch)
                due = core.owed is batch and self._sends and self.intake.checkpoint_due() is not None
                core.done(batch, self._clock.steady_ms(), due=due)
                self._carry_out()
        except Superseded:
            pass  # it was given up
        except Exception as error:  # noqa: BLE001  # see deliver
            self._fail(error)
        finally:
            self._awaited = None
            if not core.is_first(batch):
                self._close(batch)

    async def _outcome(self, batch: InFlight) -> BatchOutcome:
        begun, outcome = batch.begun, cast("BatchOutcome | None", batch.outcome)
        if inspect.iscoroutine(begun) and batch.after != self.intake.after:
            begun.close()  # it was begun behind others, and does not know what they have brought
        elif outcome is None and begun is not None:
            outcome = await outcome_of(begun)
        if outcome is None or self._overlaps(batch, outcome):
            outcome = await self._parts.runtime.process(self._delivery(batch))
        return outcome

    # Checkpoints.

    def _checkpoint(self, position: Sequence | None) -> asyncio.Future[CheckpointOutcome]:
        """Ask the source for a checkpoint; None: at the shard's end."""
        self.intake.request_began()
        if position is not None:
            kill_point("checkpoint.asking")
        reply: asyncio.Future[CheckpointOutcome] = self._source.checkpoint(position)
        reply.add_done_callback(partial(self._stored, position))
        return reply

    def _stored(self, position: Sequence | None, reply: asyncio.Future[CheckpointOutcome]) -> None:
        if reply.cancelled() or reply.result() is not CheckpointOutcome.STORED:
            return
        self.progress.interval.checkpoints += 1
        if position is not None:
            kill_point("checkpoint.stored")
            self.intake.checkpointed(position)

    def _replied(
        self, position: Sequence | None, batch: InFlight | None, reply: asyncio.Future[CheckpointOutcome]
    ) -> None:
        """Acknowledge what waited for a checkpoint: the source has stored it, or has not."""
        if position is None:
            kill_point("shard.end_stored")
        outcome = reply.result()
        try:
            if batch is not None and outcome is CheckpointOutcome.STORED:
                batch.checkpoint, batch.stored_ms = position, self._clock.steady_ms()
            if outcome is not CheckpointOutcome.CLOSED:
                self.core.checkpointed()
                self._carry_out()
            self.intake.request_ended()
        except Exception as error:  # noqa: BLE001  # see deliver
            self._fail(error)

    async def _checkpoint_now(self) -> None:
        """Checkpoint what is durable while a batch waits for room: an operator moves the shard to another server."""
        position = self.intake.checkpoint_due()
        if position is not None:
            await self._checkpoint(position)

    # Endings.

    def _lost_claim(self, loss: Loss) -> None:
        """Give up what is in flight, or close the source. The connection that claims the shard calls this."""
        if loss is Loss.SUPERSEDED:
            self.log.warning("shard.taken_over", peer=self._source.peer)
            try:
                self.core.superseded()
                self._carry_out()
            except Exception as error:  # noqa: BLE001  # the claiming connection must not end by it
                self._fail(error)
            return
        self._source.close(
            PeerError(
                f"Another connection took shard {self.shard_id} over and has ended before the shard did.",
                did="This connection of the shard was closed, so that its daemon delivers again from the checkpoint.",
                advice="The daemon's JVM exits now; its supervisor must restart it. "
                "If no lease has moved, find out who connected: see shard.taken_over.",
            )
        )

    def _owned_elsewhere(self) -> PeerError:
        return PeerError(
            f"The daemon says that shard {self.shard_id} has ended, but another connection owns the shard.",
            did="The connection was closed without a checkpoint: only the owner knows what is durable.",
            advice="The daemon's JVM exits now; its supervisor must restart it.",
        )

    def _fail(self, error: Exception) -> None:
        """End the consumption because of an error."""
        self.failure = error
        self._signal(Signal.FAILURE)

    def _give_up(self) -> None:
        """Cancel everything in flight, including what the task awaits, and the visitors."""
        given_up = self.core.give_up()
        for batch in given_up:
            self._free(batch)
            if batch is not self._awaited:
                self._close(batch)
        if given_up and self.core.phase in {Phase.DRAINING, Phase.LOSING}:
            self.log.warning("batch.given_up", batches=len(given_up))
        claim = self._claim
        claim.interrupt()
        claim.evict()

    def _free(self, batch: InFlight) -> None:
        """Count a batch's bytes no more."""
        if batch.held:
            batch.held = False
            self._source.hold(-batch.size)

    def _close(self, batch: InFlight) -> None:
        """Cancel what the runtime does with a batch."""
        rest: Any = batch.begun
        if isinstance(rest, asyncio.Future) and not rest.cancel():
            # It is done, and perhaps with more to be awaited.
            rest = None if rest.cancelled() or rest.exception() is not None else rest.result()
        if inspect.iscoroutine(rest):
            rest.close()

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Return once a condition holds; it is asked after each signal."""
        if self._changed is None:
            self._changed = Flag()
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    def _report_late(self) -> None:
        core, seconds = self.core, self._deadlines.seconds
        self.log.warning("batch.answered_early", seconds=seconds, batches=len(core.batches), bytes=core.bytes)


def as_ours(error: Exception) -> MldserverError:
    """Return an error of ours as it is, any other as an InternalError."""
    if isinstance(error, MldserverError):
        return error
    fault = InternalError(f"Unexpected {type(error).__name__}: {error}", did="The connection was closed.")
    fault.__cause__ = error
    return fault
