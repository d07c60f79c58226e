"""The batches of one connection: each from its line to the status.

Nearly every batch is one synchronous call, from the received bytes to the status (``Batches.at_once``), and with a worker
two: one there and one back. Whatever is to be waited for is awaited in the connection's task (``Batches.process``), where
the same functions go on with what was done so far.

A batch that takes long is answered before it is done (``inflight.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from mldserver.base.clock import Flag
from mldserver.base.kill_points import kill_point
from mldserver.errors import PeerError
from mldserver.protocol.messages import ProcessRecords, Version
from mldserver.runtime.interface import BatchOutcome, Delivery, MLDLine, outcome_of
from mldserver.sources.inflight import Batch, UnderWay
from mldserver.sources.link import CheckpointOutcome
from mldserver.sources.progress_log import Progress

if TYPE_CHECKING:
    from collections.abc import Callable

    from mldserver.base.clock import Clock
    from mldserver.protocol.messages import Line
    from mldserver.records import Sequence
    from mldserver.runtime.interface import Begun, Runtime
    from mldserver.sources.inflight import EarlyAnswers
    from mldserver.sources.intake import ShardIntake
    from mldserver.sources.link import Link
    from mldserver.sources.progress_log import ProgressLog
    from mldserver.sources.shard_claims import Claim

_LONG_MS: Final = 1000
"""A batch whose shard was held back for so long has a line of its own."""


class OpenShard(msgspec.Struct, frozen=True, eq=False):
    """The connection's shard, once it is open."""

    id: str
    version: Version
    intake: ShardIntake
    claim: Claim


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
    """What came, while the runtime works on it by itself."""

    def close(self) -> None:
        """Let go of what was not done, if anything is left of it."""
        rest: Any = self.rest
        if isinstance(rest, asyncio.Future) and not rest.cancel():
            # It is done, and perhaps with more to be awaited.
            rest = None if rest.cancelled() or rest.exception() is not None else rest.result()
        if inspect.iscoroutine(rest):
            rest.close()


class Batches:
    """Takes a connection's batches through handler and coordinator, and answers each."""

    def __init__(
        self,
        link: Link,
        *,
        runtime: Runtime,
        early: EarlyAnswers,
        progress: ProgressLog,
        clock: Clock,
        failed: Callable[[Exception], None],
        unread: Callable[[ProcessRecords], None],
    ) -> None:
        """Tell ``failed`` why the connection cannot go on; let ``unread`` answer what another connection's shard brings."""
        self._link = link
        self._runtime = runtime
        self._clock = clock
        self._failed = failed
        self._unread = unread
        self._early = early
        # Receipts stand in for arrival times that V1 does not send: whoever sets the clock must not disorder them.
        self._wall_ms = clock.now_ms() - clock.steady_ms()
        self._open: OpenShard | None = None
        self.finishing = False
        """Whether no batch may begin any more."""
        self.quiet = Flag()
        """Set while no request is outstanding."""
        self.under_way = UnderWay(
            self._work,
            late=lambda _, done: self._note(done, clock.steady_ms(), late=True),
            failed=failed,
            freed=link.processed,
            has_room=link.has_room,
            early=early,
            clock=clock,
        )
        self._begun: _Begun | None = None
        """A batch that ``process`` is to go on with."""
        self._posted: _Begun | None = None
        """A batch that the runtime works on by itself."""
        self.progress = Progress(link.log, progress)
        link.at_once = self.at_once

    def open(self, shard: OpenShard) -> None:
        """Take batches of this shard from now on; its lines name it."""
        self._open = shard
        shard.claim.superseded = self._superseded
        self.progress.log = self._link.log

    @property
    def over(self) -> bool:
        """Whether no batch may begin any more, and ``process`` has none to go on with."""
        return self.finishing and self._begun is None

    def at_once(self, line: Line) -> bool:
        """Work on a batch and answer it, before anything else happens; False: ``process`` is to do it, or the rest of it.

        It goes over into the connection's task before it begins where anything is under way, or another has the shard; and
        in the middle, with what was done so far, where the handler failed or the shard is held back, or a checkpoint is
        due.
        """
        shard = self._open
        if (
            shard is None
            or self.finishing
            or not self.quiet.up
            or self.under_way.batches
            or not shard.claim.free
        ):
            return False
        kill_point("batch.received")
        received_ms, intake = self._clock.steady_ms(), shard.intake
        delivery = Delivery(
            shard.id,
            MLDLine(line, shard.version),
            received_ms=received_ms + self._wall_ms,
            after=intake.after,
        )
        try:
            outcome = self._runtime.begin(delivery)
            if type(outcome) is BatchOutcome:
                return self._finish(shard, outcome, len(line), received_ms)
            intake.began()
            if not isinstance(outcome, asyncio.Future):
                return self._go_over(_Begun(received_ms, rest=outcome))
            self._post(shard, _Begun(received_ms, rest=outcome, line=line), outcome)
        except Exception as error:  # noqa: BLE001  # whatever it is, only this connection may end by it
            self._refuse(error)
        return True

    def _finish(
        self, shard: OpenShard, outcome: BatchOutcome, size: int, received_ms: int, *, began: bool = False
    ) -> bool:
        """Take what became of a batch, and answer it; False: the connection's task is to answer."""
        kill_point("batch.handled")
        now_ms = self._clock.steady_ms()
        answerable = shard.intake.take(outcome, now_ms, None if began else received_ms)
        kill_point("batch.buffered")
        if not answerable or self.finishing or shard.intake.checkpoint_due() is not None:
            return self._go_over(_Begun(received_ms, outcome))
        self._link.answer()
        kill_point("batch.answered")
        self._note(_Done(outcome, size, received_ms, received_ms, now_ms, now_ms), now_ms)
        return True

    def _go_over(self, begun: _Begun) -> Literal[False]:
        """Let the connection's task go on with a batch; nobody else comes between."""
        self._begun = begun
        self.opened.claim.hold()
        self.quiet.clear()
        return False

    def _refuse(self, error: Exception) -> None:
        if isinstance(error, PeerError):
            self._link.reject(error)
        else:
            self._failed(error)

    @property
    def opened(self) -> OpenShard:
        """The shard."""
        assert self._open is not None, "initialize opened the shard, or the claim is not current"
        return self._open

    # A batch that the runtime works on by itself: nobody is woken for it, unless it takes long.

    def _post(self, shard: OpenShard, begun: _Begun, outcome: asyncio.Future[Any]) -> None:
        self._posted = begun
        shard.claim.hold()
        self.quiet.clear()
        self._link.hold(len(begun.line))
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
            self._link.processed(len(posted.line))
        return posted

    def _handled(self, outcome: asyncio.Future[Any]) -> None:
        """Answer a batch that was worked on; where something is to be waited for, wake the connection's task."""
        posted = self._unpost()
        if posted is None or outcome.cancelled():
            return  # it went over, or is not wanted any more
        shard = self.opened
        try:
            result = outcome.result()
            if type(result) is not BatchOutcome:
                self._go_over(_Begun(posted.received_ms, rest=result))
            elif self._finish(shard, result, len(posted.line), posted.received_ms, began=True):
                shard.claim.let_go()
                self.quiet.set()
                return
            self._link.wake(ProcessRecords(posted.line))
        except Exception as error:  # noqa: BLE001  # see above
            self._refuse(error)

    def _superseded(self) -> None:
        """Another connection has the shard, in the middle of a batch: answer it unread."""
        posted = self._unpost()
        if posted is not None:
            posted.close()
            self._unread(ProcessRecords(posted.line))
            self.quiet.set()

    def drop_begun(self) -> None:
        """Let go of a batch that was begun and is not to be taken any more."""
        for begun in (self._begun, self._unpost()):
            if begun is not None:
                begun.close()
        self._begun = None

    # In the connection's task.

    async def process(self, line: Line) -> None:
        """Take a batch, or what is left of the one that was begun, and answer it."""
        begun = self._begun
        if begun is None:
            kill_point("batch.received")
        received_ms = self._clock.steady_ms() if begun is None else begun.received_ms
        try:
            done = await self.under_way.submit(line, received_ms, late=begun is not None and begun.late)
        except PeerError as error:
            self._link.reject(error)
            return
        checkpoint = await self.checkpoint()
        self._link.answer()
        kill_point("batch.answered")
        if done is not None:
            self._note(done, self._clock.steady_ms(), checkpoint)
        else:
            self._link.log.warning(
                "batch.answered_early",
                seconds=self._early.deadline_seconds,
                batches=len(self.under_way.batches),
                bytes=self.under_way.bytes,
            )

    async def checkpoint(self) -> Sequence | None:
        """Checkpoint the durable position where it is due; return what was stored."""
        intake = self.opened.intake
        position = intake.checkpoint_due()
        if position is None:
            return None
        kill_point("checkpoint.asking")
        if await self._link.checkpoint(position) is not CheckpointOutcome.STORED:
            return None
        kill_point("checkpoint.stored")
        intake.checkpointed(position)
        return position

    async def _work(self, batch: Batch[_Done]) -> _Done:
        """Take one batch through handler and coordinator; return when the daemon may be answered."""
        shard = self.opened
        began_ms, intake = self._clock.steady_ms(), shard.intake
        if self._begun is None:
            intake.began()  # from here on: a shard whose batch waits, behind dead letters that run again, is not silent
        begun, self._begun = self._begun or _Begun(batch.received_ms), None
        with contextlib.closing(begun):
            async with shard.claim.work():
                outcome, answerable = begun.outcome, False
                if outcome is None:
                    delivery = Delivery(
                        shard.id,
                        MLDLine(batch.line, shard.version),
                        received_ms=batch.received_ms + self._wall_ms,
                        after=intake.after,
                    )
                    outcome = await outcome_of(begun.rest or self._runtime.process(delivery))
                    kill_point("batch.handled")
                self.under_way.free(batch)
                batch.handled = True
                handled_ms = self._clock.steady_ms()
                if begun.outcome is None:
                    answerable = intake.take(outcome, handled_ms)
                    kill_point("batch.buffered")
                if not answerable:
                    await intake.admitted()
                answerable_ms = self._clock.steady_ms()
                if self.finishing:
                    await intake.drain()
        return _Done(outcome, batch.size, batch.received_ms, began_ms, handled_ms, answerable_ms)

    def _note(
        self, done: _Done, now_ms: int, checkpoint: Sequence | None = None, *, late: bool = False
    ) -> None:
        """Count a batch; give it a line of its own where it is unusual, or each is to have one."""
        outcome, outline = done.outcome, done.outcome.outline
        self.progress.note(outcome, done.bytes, now_ms - done.received_ms)
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


def _shown(position: Sequence | None) -> str | None:
    return None if position is None else str(position)
