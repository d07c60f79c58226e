"""The batches of one connection: each from its line to the status.

Nearly every batch is one synchronous call, from the received bytes to the status (``Batches.at_once``), and with a worker
two: one there and one back. Whatever is to be waited for is awaited in the task of what is under way (``Batches._work``),
where the same functions go on with what was done so far.

A batch that takes long is answered before it is done (``inflight.py``). So is one that is handed to a worker whose last
was soon done: the next comes while this one is worked on, and a few that are short go in one message.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Callable
from typing import Any, Final

import msgspec

from mldserver.base.clock import Clock, Flag
from mldserver.base.kill_points import kill_point
from mldserver.errors import PeerError
from mldserver.protocol.messages import Line, ProcessRecords, Version
from mldserver.records import Sequence
from mldserver.runtime.interface import BatchOutcome, Delivery, MLDLine, Runtime, outcome_of
from mldserver.sources.inflight import EarlyAnswers, InflightBatch, UnderWay
from mldserver.sources.intake import ShardIntake
from mldserver.sources.link import CheckpointOutcome, Link
from mldserver.sources.progress_log import Progress, ProgressLog
from mldserver.sources.shard_claims import Claim

_LONG_MS: Final = 1000
"""A batch whose shard was held back for so long has a line of its own."""
_QUICK_MS: Final = 50
"""The next batch is answered ahead where the last was done within so long."""
_MOST_AHEAD: Final = 64
"""Batches of a shard that are answered and not done; what they take of memory is bounded by their lines."""
_MOST_AHEAD_BYTES: Final = 1 << 20


class OpenShard(msgspec.Struct, frozen=True, eq=False):
    """The connection's shard, once it is open."""

    id: str
    version: Version
    intake: ShardIntake
    claim: Claim


class _BatchDone(msgspec.Struct, frozen=True):
    """What became of a batch, and when (ms of steady time)."""

    outcome: BatchOutcome
    bytes: int
    received_ms: int
    began_ms: int
    handled_ms: int
    answerable_ms: int


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
        self.quiet.set()
        self.under_way = UnderWay(
            self._work,
            late=lambda batch, done: self._note(done, clock.steady_ms(), late=batch.late),
            failed=failed,
            hold=link.hold,
            has_room=lambda: link.budget.has_room and not self.opened.intake.paused,
            goes_on=self._goes_on,
            early=early,
            clock=clock,
        )
        self._owed: InflightBatch[_BatchDone] | None = None
        """The last batch, if it is begun and the daemon waits for it: ``process`` is to answer, once the task takes over."""
        self._quick = False
        """Whether the last batch that the runtime worked on by itself was soon done."""
        self.progress = Progress(link.log, progress)
        self._since_ms: int | None = None
        """When the first part of the line came that is incomplete; None: no line is."""
        self._received_ms = 0
        """When the first bytes of the batch came that ``process`` is to do."""
        link.at_once, link.line_began = self.at_once, self._line_began

    def open(self, shard: OpenShard) -> None:
        """Take batches of this shard from now on; its lines name it."""
        self._open = shard
        shard.claim.superseded = self._superseded
        self.progress.open(shard.id, self._link.log)

    @property
    def over(self) -> bool:
        """Whether no batch may begin any more, and ``process`` has none to answer."""
        return self.finishing and self._owed is None

    @property
    def opened(self) -> OpenShard:
        """The shard."""
        assert self._open is not None, "initialize opened the shard, or the claim is not current"
        return self._open

    def at_once(self, line: Line) -> bool:
        """Work on a batch and answer it, or begin it, before anything else happens; False: ``process`` is to do it all.

        That is so where the task works on others, or another has the shard. The task takes over in the middle, with what
        was done so far, where the handler failed or the shard is held back, or a checkpoint is due.
        """
        shard, under_way = self._open, self.under_way
        received_ms = self._clock.steady_ms() if self._since_ms is None else self._since_ms
        self._received_ms = received_ms
        if shard is None or self.finishing or not self.quiet.up or under_way.awaited or not shard.claim.free:
            return False
        kill_point("batch.received")
        intake, first = shard.intake, not under_way.batches
        size = len(line)
        ahead = self._quick and self._may_be_ahead(shard, 1, size)
        delivery = self._delivery(shard, line, received_ms, behind=ahead or not first)
        try:
            outcome = self._runtime.begin(delivery)
            taken = first and type(outcome) is BatchOutcome
            if type(outcome) is BatchOutcome and first:
                now_ms = self._clock.steady_ms()
                if self._take(shard, outcome, now_ms, received_ms) and intake.checkpoint_due() is None:
                    self._link.answer()
                    kill_point("batch.answered")
                    self._note(_BatchDone(outcome, size, received_ms, received_ms, now_ms, now_ms), now_ms)
                    return True
            elif first:
                intake.began(received_ms)
            batch: InflightBatch[_BatchDone] = InflightBatch(
                line, size, received_ms, begun=outcome, after=delivery.after, taken=taken
            )
            if first:
                shard.claim.hold()
            self._link.hold(size)
            if not ahead or not isinstance(outcome, asyncio.Future):
                batch.answer = asyncio.get_running_loop().create_future()
                self._owed = batch
                self.quiet.clear()
            under_way.add(batch)
            if batch.answer is None:
                self._link.answer()
                kill_point("batch.answered")
            if isinstance(outcome, asyncio.Future):
                outcome.add_done_callback(self._handled)
            else:
                under_way.go_on()
        except Exception as error:  # noqa: BLE001  # whatever it is, only this connection may end by it
            self._refuse(error)
        return True

    def _line_began(self, began: bool) -> None:  # noqa: FBT001  # a callback
        """Note the first bytes of a line: however long the rest takes, the shard is not silent."""
        self._since_ms = self._clock.steady_ms() if began else None
        if self._open is not None:
            (self._open.intake.busy if began else self._open.intake.answered)()

    def _may_be_ahead(self, shard: OpenShard, count: int = 0, size: int = 0) -> bool:
        """Whether all that is under way, and so many batches and bytes more, may be answered before it is done."""
        return (
            len(self.under_way.batches) + count <= _MOST_AHEAD
            and self.under_way.bytes + size <= _MOST_AHEAD_BYTES
            and self._link.budget.has_room
            and shard.intake.checkpoint_due() is None
        )

    def _delivery(self, shard: OpenShard, line: Line, received_ms: int, *, behind: bool = False) -> Delivery:
        return Delivery(
            shard.id,
            MLDLine(line, shard.version),
            received_ms=received_ms + self._wall_ms,
            after=shard.intake.after,
            behind=behind,
        )

    def _take(
        self, shard: OpenShard, outcome: BatchOutcome, now_ms: int, received_ms: int | None = None
    ) -> bool:
        """Take what became of a batch; return whether the shard is not held back."""
        kill_point("batch.handled")
        admitted = shard.intake.take(outcome, now_ms, received_ms)
        kill_point("batch.buffered")
        return admitted

    def _handled(self, _: asyncio.Future[Any]) -> None:
        """Take what the runtime has done by itself, in order; where something is to be waited for, the task takes over."""
        shard, under_way = self.opened, self.under_way
        try:
            while under_way.batches and not under_way.awaited:
                batch = under_way.batches[0]
                begun = batch.begun
                assert isinstance(begun, asyncio.Future), "else the task has taken over"
                if not begun.done():
                    return
                outcome = None if self.finishing or begun.exception() is not None else begun.result()
                if not isinstance(outcome, BatchOutcome) or _overlaps(shard, batch, outcome):
                    under_way.go_on()
                    return
                now_ms, ahead = self._clock.steady_ms(), batch.answer is None
                if not self._take(shard, outcome, now_ms) or not (
                    ahead or shard.intake.checkpoint_due() is None
                ):
                    batch.begun, batch.taken = outcome, True
                    under_way.go_on()
                    return
                under_way.take_out()
                if under_way.batches:
                    shard.intake.began(under_way.batches[0].received_ms)
                else:
                    shard.claim.let_go()
                received_ms = batch.received_ms
                self._quick = now_ms - received_ms < _QUICK_MS and self._early.deadline_seconds is not None
                if (owed := self._owed) is not None and (
                    batch is owed or (self._quick and self._may_be_ahead(shard))
                ):
                    self._owed = owed.answer = None
                    self._early.has_answered(under_way)
                    self._link.answer()
                    kill_point("batch.answered")
                    self.quiet.set()
                self._note(_BatchDone(outcome, batch.size, received_ms, received_ms, now_ms, now_ms), now_ms)
        except Exception as error:  # noqa: BLE001  # see above
            self.let_go()  # neither this one again nor any behind it
            self._refuse(error)

    def _refuse(self, error: Exception) -> None:
        if isinstance(error, PeerError):
            self._link.reject(error)
        else:
            self._failed(error)

    def _goes_on(self) -> None:
        """The task has taken over: let the connection's task wait for it, where the daemon does."""
        self._quick = False
        if self._owed is not None:
            self._link.wake(ProcessRecords(b""))  # the line is kept already

    def _superseded(self) -> None:
        """Another connection has the shard: let go of what is under way, answer unread what is not answered.

        The task, if it works on that, is cancelled with the claim, and lets go itself: not before its call has ended.
        """
        if not self.under_way.awaited:
            owed = self._owed
            self.let_go()
            if owed is not None:
                self._unread(ProcessRecords(b""))
                self.quiet.set()

    def let_go(self) -> None:
        """Give up all that is under way: it is not to be taken any more."""
        self._owed = None
        self.under_way.give_up()

    # In the connection's task.

    async def process(self, line: Line) -> None:
        """Take a batch, or wait for the one that was begun, and answer it."""
        batch, self._owed = self._owed, None
        try:
            if batch is not None:
                done = await self.under_way.answer(batch)
            else:
                kill_point("batch.received")
                if not self.under_way.batches:
                    self.opened.intake.began(self._received_ms)
                done = await self.under_way.submit(line, self._received_ms)
        except PeerError as error:
            self._link.reject(error)
            return
        checkpoint = await self.checkpoint()
        self._link.answer()
        self.opened.intake.answered()
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
        intake.busy()
        kill_point("checkpoint.asking")
        if await self._link.checkpoint(position) is not CheckpointOutcome.STORED:
            return None
        kill_point("checkpoint.stored")
        self.progress.interval.checkpoints += 1
        intake.checkpointed(position)
        return position

    async def _work(self, batch: InflightBatch[_BatchDone]) -> _BatchDone:
        """Take one batch through handler and coordinator; return when the daemon may be answered."""
        shard, began_ms = self.opened, self._clock.steady_ms()
        intake = shard.intake
        with contextlib.closing(batch):
            async with shard.claim.work():
                if inspect.iscoroutine(batch.begun) and batch.after != intake.after:
                    batch.begun.close()  # it waited behind others, and is to know what they brought
                    batch.begun = None
                outcome = None if batch.begun is None else await outcome_of(batch.begun)
                if outcome is None or (not batch.taken and _overlaps(shard, batch, outcome)):
                    delivery = self._delivery(shard, batch.line, batch.received_ms)
                    outcome = await self._runtime.process(delivery)
                self.under_way.free(batch)
                batch.handled = True
                handled_ms = self._clock.steady_ms()
                if batch.taken or not self._take(shard, outcome, handled_ms):
                    await intake.admitted(answered=batch.answered, checkpoint=self.checkpoint)
                answerable_ms = self._clock.steady_ms()
                if self.finishing and batch is self.under_way.batches[-1]:
                    await intake.drain()  # once for all of them: the stop has a deadline
        if len(self.under_way.batches) > 1:
            intake.began(self.under_way.batches[1].received_ms)
        return _BatchDone(outcome, batch.size, batch.received_ms, began_ms, handled_ms, answerable_ms)

    def _note(
        self, done: _BatchDone, now_ms: int, checkpoint: Sequence | None = None, *, late: bool = False
    ) -> None:
        """Count a batch; give it a line of its own where it is unusual, or each is to have one."""
        outcome, outline, progress = done.outcome, done.outcome.outline, self.progress
        progress.note(outcome, done.bytes, now_ms - done.received_ms, done.handled_ms - done.began_ms)
        held_ms = done.answerable_ms - done.handled_ms
        progress.interval.held_ms += held_ms
        failed = outcome.attempts > 1 or outcome.effects.dead_letters or outcome.skipped or outcome.discarded
        if failed or outline.duplicates:
            progress.interval.count_failures(outcome)
        unusual = failed or late or held_ms >= _LONG_MS or outline.duplicates
        if not unusual and not self._link.debugging:
            return
        (self._link.log.info if unusual else self._link.log.debug)(
            "batch.done",
            records=outline.records,
            rows=0 if outcome.effects.rows is None else outcome.effects.rows.num_rows,
            duplicates=outline.duplicates,
            dead_letters=len(outcome.effects.dead_letters),
            skipped=outcome.skipped,
            discarded=outcome.discarded,
            bytes=done.bytes,
            first=outline.first and str(outline.first),
            last=outline.last and str(outline.last),
            millis_behind_latest=outline.millis_behind_latest,
            attempts=outcome.attempts,
            handler_seconds=(done.handled_ms - done.began_ms) / 1000,
            held_seconds=held_ms / 1000,
            checkpoint=checkpoint and str(checkpoint),
            seconds=(now_ms - done.received_ms) / 1000,
        )


def _overlaps(shard: OpenShard, batch: InflightBatch[_BatchDone], outcome: BatchOutcome) -> bool:
    """Whether a batch that was begun behind others has records of theirs: it is to be worked on again, without them."""
    first, after = outcome.outline.first, shard.intake.after
    return first is not None and after is not None and first <= after and batch.after != after
