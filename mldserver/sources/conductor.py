"""One task for each connection: takes the daemon's requests one by one through handler and coordinator.

A normal batch does not wake it: it is one synchronous call, from the received bytes to the status (``_at_once``).

Every request runs the same way: what must be durable is made durable, a checkpoint follows where one is due, and only
then the status goes out. A batch that takes long is answered before it is done (``inflight.py``). EOF cancels whatever
is in progress; the daemon delivers it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from mldserver.base.flag import Flag
from mldserver.base.kill_points import kill_point
from mldserver.errors import InternalError, MldserverError, PeerError
from mldserver.protocol.events import CloseReason
from mldserver.protocol.messages import (
    Initialize,
    LeaseLost,
    ProcessRecords,
    ShardEnded,
    Shutdown,
    ShutdownReason,
    Version,
)
from mldserver.records import Hook, Sequence, Shard
from mldserver.runtime.interface import BatchOutcome, Delivery, MLDLine, outcome_of
from mldserver.sources.inflight import Batch, UnderWay
from mldserver.sources.intake import ShardOpening
from mldserver.sources.link import CheckpointOutcome
from mldserver.sources.progress_log import Progress
from mldserver.sources.shard_claims import Superseded

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from mldserver.base.clock import Clock
    from mldserver.protocol.messages import Line, RequestMessage
    from mldserver.runtime.interface import Begun, Runtime
    from mldserver.sources.inflight import EarlyAnswers
    from mldserver.sources.intake import Intake, ShardIntake
    from mldserver.sources.link import Link
    from mldserver.sources.progress_log import ProgressLog
    from mldserver.sources.shard_claims import Claim, ShardOwners

__all__ = ["Conductor"]


_LONG_MS: Final = 1000
"""A batch whose shard was held back for so long has a line of its own."""


class _Done(msgspec.Struct, frozen=True):
    """What became of a batch, and when (ms of steady time)."""

    outcome: BatchOutcome
    bytes: int
    received_ms: int
    began_ms: int
    handled_ms: int
    answerable_ms: int


class _Begun(msgspec.Struct, frozen=True):
    """A batch that was worked on at once until something was to be waited for."""

    received_ms: int
    outcome: BatchOutcome | None = None
    """What became of it; the coordinator has it."""
    rest: Begun | None = None
    """What the runtime has still to do."""
    late: bool = False
    """Whether it has taken so long that the daemon is answered before it is done."""
    line: Line = b""
    size: int = 0
    """Its line and how long that came, while the runtime works on it by itself: it may empty a long one."""

    def close(self) -> None:
        """Let go of what was not done, if anything is left of it."""
        rest: Any = self.rest
        if isinstance(rest, asyncio.Future) and not rest.cancel():
            # It is done, and perhaps with more to be awaited.
            rest = None if rest.cancelled() or rest.exception() is not None else rest.result()
        if inspect.iscoroutine(rest):
            rest.close()


class Conductor:
    """Drives one connection from ``initialize`` to its end."""

    def __init__(
        self,
        link: Link,
        *,
        runtime: Runtime,
        intake: Intake,
        owners: ShardOwners,
        early: EarlyAnswers,
        progress: ProgressLog,
        clock: Clock,
    ) -> None:
        """Take the parts that the requests run through; ``early`` and ``progress`` are shared by all connections."""
        self._link = link
        self._runtime = runtime
        self._intake = intake
        self._owners = owners
        self._clock = clock
        # Receipts stand in for arrival times that V1 does not send: whoever sets the clock must not disorder them.
        self._wall_ms = clock.now_ms() - clock.steady_ms()
        self._shard_id = ""
        self._version = Version.V2
        self._claim: Claim | None = None
        self._shard: ShardIntake | None = None
        self._settled = False
        self._told_taken_over = False
        self._finishing = False
        self._quiet = Flag()
        self._deadline = early.deadline_seconds
        self._under_way = UnderWay(
            self._work,
            late=self._done_late,
            failed=self._abort,
            freed=link.processed,
            has_room=link.has_room,
            early=early,
            clock=clock,
        )
        self._early = early
        self._begun: _Begun | None = None
        """A batch that ``_serve`` is to go on with."""
        self._posted: _Begun | None = None
        """A batch that the runtime works on by itself."""
        self._progress = Progress(link.log, progress)
        link.at_once = self._at_once

    @property
    def shard_id(self) -> str:
        """The connection's shard; empty before ``initialize``."""
        return self._shard_id

    async def run(self) -> None:
        """Serve until the connection is closed, then let go of the shard. Errors end the connection, no more."""
        began = self._clock.steady_ms()
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._serve()), group.create_task(self._under_way.run())]
                await self._link.wait_closed()
                for task in tasks:
                    task.cancel()
        finally:
            await self._let_go()
        self._progress.tell()
        if self._link.close_reason not in {CloseReason.FAILED, CloseReason.EOF_IN_REQUEST}:
            self._link.log.info(
                "connection.closed",
                reason=str(self._link.close_reason),
                seconds=(self._clock.steady_ms() - began) / 1000,
                batches=self._progress.all_batches,
                records=self._progress.all_records,
            )

    async def finish(self) -> None:
        """Take no more requests; return when the one that is outstanding is answered, and no batch is under way.

        A shard that is being opened is not waited for: nothing of it was taken. One that is held back is let go.
        """
        self._finishing = True
        if self._claim is not None and not self._claim.opened:
            return
        if self._shard is not None:
            await self._shard.finish()
        await self._quiet.wait()
        await self._under_way.idle()

    async def _serve(self) -> None:
        try:
            while not self._finishing:
                self._quiet.set()
                message = await self._link.request()
                if message is None or (self._begun is None and self._finishing):
                    return
                self._quiet.clear()
                await self._take(message)
                # Not kept until the next one comes: a shard that is idle must not hold its last batch's line.
                del message
        except Exception as error:  # noqa: BLE001  # whatever it is, only this connection may end by it
            self._abort(error)
        finally:
            self._quiet.set()

    def _abort(self, error: Exception) -> None:
        if isinstance(error, Superseded):
            return  # what is still asked for here is answered unread
        if not isinstance(error, MldserverError):
            fault = InternalError(
                f"Unexpected {type(error).__name__}: {error}", did="The connection was closed."
            )
            fault.__cause__ = error
            error = fault
        self._link.abort(error)

    async def _take(self, message: RequestMessage) -> None:
        if self._claim is not None and not self._claim.current:
            if isinstance(message, ProcessRecords):
                self._link.processed(len(message.line))
            self._take_unread(message)
            return
        try:
            await self._take_owned(message)
        except Superseded:
            self._take_unread(message)

    async def _take_owned(self, message: RequestMessage) -> None:
        match message:
            case Initialize():
                await self._open(message)
            case ProcessRecords(line):
                await self._process(line)
            case LeaseLost() | Shutdown(ShutdownReason.ZOMBIE):
                await self._lose()
            case ShardEnded() | Shutdown(ShutdownReason.TERMINATE):
                await self._end()
            case _:
                await self._drain()

    def _take_unread(self, message: RequestMessage) -> None:
        """Answer for a shard that another connection owns: its records reach the handler there."""
        self._drop_begun()
        if not self._told_taken_over:
            self._told_taken_over = True
            self._link.log.warning("shard.taken_over", peer=self._link.peer)
        if message == ShardEnded() or message == Shutdown(ShutdownReason.TERMINATE):
            raise self._owned_elsewhere()
        self._link.answer()

    async def _open(self, message: Initialize) -> None:
        self._shard_id, self._version = message.shard_id, message.version
        v2 = message.version is Version.V2
        opening = ShardOpening(message.shard_id, _start(message), tells_lag=v2, within_aggregates=v2)
        await self._intake.check(opening)
        claim = self._claim = self._owners.take(message.shard_id)
        claim.superseded = self._superseded
        async with claim.work():
            kill_point("shard.opening")
            self._shard = await self._intake.open_shard(opening)
            kill_point("shard.opened")
            start_sub = message.sub_sequence_number or 0
            await self._runtime.open(Shard(message.shard_id, message.sequence_number, start_sub))
            if self._shard.parked:
                await self._runtime.park(message.shard_id, self._shard.parked)
            claim.opened = True
        # Its lines name the shard from now on.
        self._progress.log = self._link.log
        self._link.answer()

    def _at_once(self, line: Line) -> bool:
        """Work on a batch and answer it, before anything else happens; False: ``_serve`` is to do it, or the rest of it.

        Nearly every batch of a handler that need not be waited for is one call of this. It goes over into the connection's
        task before it begins where anything is under way, or another has the shard; and in the middle, with what was done
        so far, where the handler failed or the shard is held back, or a checkpoint is due.
        """
        claim, shard = self._claim, self._shard
        if shard is None or claim is None or not claim.current or claim.lock.locked() or self._finishing:
            return False
        if not self._quiet.is_set() or len(self._under_way):
            return False
        kill_point("batch.received")
        received_ms = self._clock.steady_ms()
        payload = MLDLine(line, self._version)
        delivery = Delivery(
            self._shard_id, payload, received_ms=received_ms + self._wall_ms, after=shard.after
        )
        try:
            outcome = self._runtime.begin(delivery)
            if isinstance(outcome, BatchOutcome):
                return self._finish_at_once(shard, outcome, len(line), received_ms)
            shard.began()
            if isinstance(outcome, asyncio.Future):
                self._post(_Begun(received_ms, rest=outcome, line=line, size=len(line)), outcome)
                return True
            return self._go_over(_Begun(received_ms, rest=outcome))
        except PeerError as error:
            self._link.reject(error)
        except Exception as error:  # noqa: BLE001  # whatever it is, only this connection may end by it
            self._abort(error)
        return True

    def _finish_at_once(
        self, shard: ShardIntake, outcome: BatchOutcome, size: int, received_ms: int, *, began: bool = False
    ) -> bool:
        """Take what became of a batch, and answer it; False: the connection's task is to answer."""
        kill_point("batch.handled")
        now_ms = self._clock.steady_ms()
        answerable = shard.take(outcome, now_ms, None if began else received_ms)
        kill_point("batch.buffered")
        if not answerable or self._finishing or shard.checkpoint_due() is not None:
            return self._go_over(_Begun(received_ms, outcome))
        self._link.answer()
        kill_point("batch.answered")
        self._note(_Done(outcome, size, received_ms, received_ms, now_ms, now_ms), now_ms)
        return True

    def _go_over(self, begun: _Begun) -> Literal[False]:
        """Let the connection's task go on with a batch; nobody else comes between."""
        self._begun = begun
        self._opened()[1].hold()
        self._quiet.clear()
        return False

    # A batch that the runtime works on by itself: nobody is woken for it, unless it takes long.

    def _post(self, begun: _Begun, outcome: asyncio.Future[Any]) -> None:
        self._posted = begun
        self._opened()[1].hold()
        self._quiet.clear()
        self._link.hold(begun.size)
        self._early.owes(self)
        outcome.add_done_callback(self._handled)

    @property
    def since_ms(self) -> int | None:
        """When the batch came that is worked on and not answered (see ``EarlyAnswers``)."""
        return None if self._posted is None else self._posted.received_ms

    def answer_early(self) -> None:
        """Let the connection's task answer, and wait for what becomes of the batch; not while memory is short."""
        if self._link.has_room() and (posted := self._unpost()) is not None:
            self._go_over(_Begun(posted.received_ms, rest=posted.rest, late=True))
            self._link.wake(ProcessRecords(posted.line))

    def _unpost(self) -> _Begun | None:
        posted, self._posted = self._posted, None
        if posted is not None:
            self._early.has_answered(self)
            self._link.processed(posted.size)
        return posted

    def _handled(self, outcome: asyncio.Future[Any]) -> None:
        """Answer a batch that was worked on; where something is to be waited for, wake the connection's task."""
        posted = self._unpost()
        if posted is None or outcome.cancelled():
            return  # it went over, or is not wanted any more
        shard, claim = self._opened()
        try:
            result = outcome.result()
            if not isinstance(result, BatchOutcome):
                self._go_over(_Begun(posted.received_ms, rest=result))
            elif self._finish_at_once(shard, result, posted.size, posted.received_ms, began=True):
                claim.let_go()
                self._quiet.set()
                return
            self._link.wake(ProcessRecords(posted.line))
        except PeerError as error:
            self._link.reject(error)
        except Exception as error:  # noqa: BLE001  # see above
            self._abort(error)

    def _superseded(self) -> None:
        """Another connection has the shard, in the middle of a batch: answer it unread."""
        posted = self._unpost()
        if posted is not None:
            posted.close()
            self._take_unread(ProcessRecords(posted.line))
            self._quiet.set()

    def _drop_begun(self) -> None:
        for begun in (self._begun, self._unpost()):
            if begun is not None:
                begun.close()
        self._begun = None

    async def _process(self, line: Line) -> None:
        shard, _ = self._opened()
        begun = self._begun
        if begun is None:
            kill_point("batch.received")
        try:
            done = await self._under_way.submit(line, late=begun is not None and begun.late)
        except PeerError as error:
            self._link.reject(error)
            return
        checkpoint = await self._checkpoint(shard)
        self._link.answer()
        kill_point("batch.answered")
        if done is not None:
            self._note(done, self._clock.steady_ms(), checkpoint)
        else:
            self._link.log.warning(
                "batch.answered_early",
                seconds=self._deadline,
                batches=len(self._under_way),
                bytes=self._under_way.bytes,
            )

    async def _work(self, batch: Batch[_Done]) -> _Done:
        """Take one batch through handler and coordinator; return when the daemon may be answered."""
        shard, claim = self._opened()
        began_ms = self._clock.steady_ms()
        if self._begun is None:
            shard.began()  # from here on: a shard whose batch waits, behind dead letters that run again, is not silent
        begun, self._begun = self._begun or _Begun(batch.received_ms), None
        with contextlib.closing(begun):
            async with claim.work():
                outcome, answerable = begun.outcome, False
                if outcome is None:
                    received_ms = batch.received_ms + self._wall_ms
                    payload = MLDLine(batch.line, self._version)
                    delivery = Delivery(self._shard_id, payload, received_ms=received_ms, after=shard.after)
                    outcome = await outcome_of(begun.rest or self._runtime.process(delivery))
                    kill_point("batch.handled")
                self._under_way.free(batch)
                batch.handled = True
                handled_ms = self._clock.steady_ms()
                if begun.outcome is None:
                    answerable = shard.take(outcome, handled_ms)
                    kill_point("batch.buffered")
                if not answerable:
                    await shard.admitted()
                answerable_ms = self._clock.steady_ms()
                if self._finishing:
                    await shard.drain()
        return _Done(outcome, batch.size, begun.received_ms, began_ms, handled_ms, answerable_ms)

    def _done_late(self, _batch: Batch[_Done], done: _Done) -> None:
        self._note(done, self._clock.steady_ms(), late=True)

    async def _drain(self) -> None:
        """``shutdownRequested``: one chance to checkpoint everything, since another worker goes on from there.

        What is not done within the answer deadline is given up: it is delivered again to whoever reads on.
        """
        shard, claim = self._opened()
        await self._within_deadline(self._under_way.idle())
        await self._give_up()
        claim.evict()
        async with claim.work():
            position = await self._runtime.notify(self._shard_id, Hook.SHUTDOWN_REQUESTED)
            if position is not None:
                shard.advance(position)
            await shard.drain()
        kill_point("shard.drained")
        self._link.log.info("shard.shutdown_requested", position=_shown(shard.after))
        await self._checkpoint(shard)
        self._link.answer()

    async def _within_deadline(self, wait: Coroutine[None, None, None]) -> None:
        """Wait for the answer deadline at most."""
        async with asyncio.TaskGroup() as group:
            task = group.create_task(wait)
            if self._deadline is not None:
                timer = group.create_task(self._clock.sleep(self._deadline))
                await asyncio.wait({task, timer}, return_when=asyncio.FIRST_COMPLETED)
                timer.cancel()
                task.cancel()

    async def _give_up(self) -> None:
        if dropped := await self._under_way.drop():
            self._link.log.warning("batch.given_up", batches=dropped)

    async def _lose(self) -> None:
        shard, claim = self._opened()
        await self._give_up()
        claim.evict()
        async with claim.work():
            await self._runtime.notify(self._shard_id, Hook.LEASE_LOST)
            await shard.lost()
            self._settled = True
        kill_point("shard.lost")
        self._link.log.info("shard.lost", position=_shown(shard.after))
        self._link.answer()

    async def _end(self) -> None:
        """The shard's end. Without its checkpoint there is no status: see ``protocol/states.py``."""
        shard, claim = self._opened()
        await self._under_way.idle()
        claim.evict()
        async with claim.work():
            if self._under_way.incomplete:
                raise self._unfinished()
            await self._runtime.notify(self._shard_id, Hook.SHARD_ENDED)
            self._settled = await shard.end()
        if not self._settled:
            raise self._owned_elsewhere()
        kill_point("shard.end_durable")
        outcome = await self._link.checkpoint(None)
        kill_point("shard.end_stored")
        if outcome in {CheckpointOutcome.STORED, CheckpointOutcome.STOPPED}:
            self._link.answer()

    async def _checkpoint(self, shard: ShardIntake) -> Sequence | None:
        """Checkpoint the durable position where it is due; return what was stored."""
        position = shard.checkpoint_due()
        if position is None:
            return None
        kill_point("checkpoint.asking")
        if await self._link.checkpoint(position) is not CheckpointOutcome.STORED:
            return None
        kill_point("checkpoint.stored")
        shard.checkpointed(position)
        return position

    def _opened(self) -> tuple[ShardIntake, Claim]:
        assert self._shard is not None, "initialize opened the shard, or the claim is not current"
        assert self._claim is not None, "initialize claimed the shard"
        return self._shard, self._claim

    def _owned_elsewhere(self) -> PeerError:
        return PeerError(
            f"The daemon says that shard {self._shard_id} has ended, but another connection owns the shard.",
            did="The connection was closed without a checkpoint: only the owner knows what is durable.",
            advice="The daemon's JVM exits now; its supervisor must restart it.",
        )

    def _unfinished(self) -> PeerError:
        return PeerError(
            f"The daemon says that shard {self._shard_id} has ended, but records of it were given up before.",
            did="The connection was closed without a checkpoint, so that they are delivered again.",
            advice="The daemon's JVM exits now; its supervisor must restart it.",
        )

    async def _let_go(self) -> None:
        self._drop_begun()
        if self._claim is None:
            return
        if self._claim.current and self._shard is None:
            # Whoever had the shard before lost it to this connection, which never came to have it.
            self._intake.abandon(self._shard_id)
        elif self._shard is not None and not self._settled and self._claim.current:
            if not self._finishing:
                self._link.log.warning("shard.disconnected", position=_shown(self._shard.after))
            self._shard.disconnected()
        self._claim.evict()
        try:
            async with self._claim.work():
                await self._runtime.forget(self._shard_id)
        except Superseded:
            return
        self._owners.release(self._shard_id, self._claim)

    def _note(
        self, done: _Done, now_ms: int, checkpoint: Sequence | None = None, *, late: bool = False
    ) -> None:
        """Count a batch; give it a line of its own where it is unusual, or each is to have one."""
        outcome, outline = done.outcome, done.outcome.outline
        self._progress.note(outcome, done.bytes, now_ms - done.received_ms)
        held_ms = done.answerable_ms - done.handled_ms
        failed = outcome.attempts > 1 or outcome.dead_letters or outcome.skipped or outcome.discarded
        unusual = failed or late or held_ms >= _LONG_MS or outline.duplicates
        if not unusual and not self._link.debugging:
            return
        (self._link.log.info if unusual else self._link.log.debug)(
            "batch.done",
            records=outline.records,
            rows=0 if outcome.rows is None else outcome.rows.num_rows,
            duplicates=outline.duplicates,
            dead_letters=len(outcome.dead_letters),
            skipped=outcome.skipped,
            discarded=outcome.discarded,
            bytes=done.bytes,
            first=_shown(outline.first),
            last=_shown(outline.last),
            millis_behind_latest=outline.millis_behind_latest,
            attempts=outcome.attempts,
            handler_seconds=(done.handled_ms - done.began_ms) / 1000,
            held_seconds=held_ms / 1000,
            checkpoint=_shown(checkpoint),
            seconds=(now_ms - done.received_ms) / 1000,
        )


def _start(message: Initialize) -> Sequence | str | None:
    number = message.sequence_number
    if number is None or not number.isdigit():
        return number
    return Sequence(int(number), message.sub_sequence_number or 0)


def _shown(position: Sequence | None) -> str | None:
    return None if position is None else str(position)
