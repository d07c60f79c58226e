"""One task for each connection: takes the daemon's requests one by one, from ``initialize`` to the shard's end.

Every request runs the same way: what must be durable is made durable, a checkpoint follows where one is due, and only
then the status goes out. A normal batch does not wake the task (``batches.py``). EOF cancels whatever is in progress; the
daemon delivers it again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection
from fnmatch import fnmatchcase

from mldserver.base.clock import Clock, first_of
from mldserver.base.kill_points import kill_point
from mldserver.errors import InternalError, MldserverError, PeerError
from mldserver.protocol.events import CloseReason
from mldserver.protocol.messages import (
    Initialize,
    LeaseLost,
    ProcessRecords,
    RequestMessage,
    ShardEnded,
    Shutdown,
    ShutdownReason,
    Version,
)
from mldserver.records import Hook, Sequence, Shard
from mldserver.runtime.interface import Runtime
from mldserver.sources.batches import Batches, OpenShard
from mldserver.sources.inflight import EarlyAnswers
from mldserver.sources.intake import Intake, ShardIntake, ShardOpening
from mldserver.sources.link import CheckpointOutcome, Link
from mldserver.sources.progress_log import ProgressLog
from mldserver.sources.shard_claims import Claim, ShardOwners, Superseded


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
        allow_shards: Collection[str] = (),
    ) -> None:
        """Take the parts that the requests run through; ``early`` and ``progress`` are shared by all connections.

        ``allow_shards``: patterns of the shards that may be connected for; none: any.
        """
        self._link = link
        self._runtime = runtime
        self._intake = intake
        self._owners = owners
        self._clock = clock
        self._allow_shards = allow_shards
        self._deadline = early.deadline_seconds
        self._claim: Claim | None = None
        self._shard: ShardIntake | None = None
        self.shard_id = ""
        """The shard that was asked for; empty before."""
        self._settled = False
        self._ended = False
        """Whether the shard was read to its end here."""
        self._told_taken_over = False
        self._batches = Batches(
            link,
            runtime=runtime,
            early=early,
            progress=progress,
            clock=clock,
            failed=self._abort,
            unread=self._take_unread,
        )

    @property
    def since_ms(self) -> int | None:
        """When the oldest batch came that is being worked on (steady time); None: none is."""
        batches = self._batches.under_way.batches
        return batches[0].received_ms if batches else None

    async def run(self) -> None:
        """Serve until the connection is closed, then let go of the shard. Errors end the connection, no more."""
        began = self._clock.steady_ms()
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._serve()), group.create_task(self._batches.under_way.run())]
                await self._link.over.wait()
                for task in tasks:
                    task.cancel()
        finally:
            await self._let_go()
        self._batches.progress.tell()
        if self._link.close_reason not in {CloseReason.FAILED, CloseReason.EOF_IN_REQUEST}:
            self._link.log.info(
                "connection.closed",
                reason=str(self._link.close_reason),
                seconds=(self._clock.steady_ms() - began) / 1000,
                batches=self._batches.progress.all_batches,
                records=self._batches.progress.all_records,
            )

    async def finish(self) -> None:
        """Take no more requests; return when the one that is outstanding is answered, and no batch is under way.

        A shard that is being opened is not waited for: nothing of it was taken. One that is held back is let go.
        """
        self._batches.finishing = True
        if self._claim is not None and not self._claim.opened:
            return
        if self._shard is not None:
            await self._shard.finish()
        await self._batches.quiet.wait()
        await self._batches.under_way.idle.wait()

    async def _serve(self) -> None:
        try:
            while not self._batches.finishing:
                self._batches.quiet.set()
                message = await self._link.request()
                if message is None or self._batches.over:
                    return
                self._batches.quiet.clear()
                await self._take(message)
                # Not kept until the next one comes: a shard that is idle must not hold its last batch's line.
                del message
        except Exception as error:  # noqa: BLE001  # whatever it is, only this connection may end by it
            self._abort(error)
        finally:
            self._batches.quiet.set()

    def _abort(self, error: Exception) -> None:
        if isinstance(error, Superseded):
            return  # what is still asked for here is answered unread
        if not isinstance(error, MldserverError):
            fault = InternalError(
                f"Unexpected {type(error).__name__}: {error}", did="The connection was closed."
            )
            fault.__cause__ = error
            error = fault
        self._link.close(error)

    async def _take(self, message: RequestMessage) -> None:
        if self._claim is not None and not self._claim.current:
            if isinstance(message, ProcessRecords):
                self._link.hold(-len(message.line))
            self._take_unread(message)
            return
        try:
            match message:
                case Initialize():
                    await self._open(message)
                case ProcessRecords(line):
                    await self._batches.process(line)
                case LeaseLost() | Shutdown(ShutdownReason.ZOMBIE):
                    await self._lose()
                case ShardEnded() | Shutdown(ShutdownReason.TERMINATE):
                    await self._end()
                case _:
                    await self._drain()
        except Superseded:
            self._take_unread(message)

    def _take_unread(self, message: RequestMessage) -> None:
        """Answer for a shard that another connection owns: its records reach the handler there."""
        if not self._told_taken_over:
            self._told_taken_over = True
            self._link.log.warning("shard.taken_over", peer=self._link.peer)
        if message == ShardEnded() or message == Shutdown(ShutdownReason.TERMINATE):
            raise self._owned_elsewhere()
        self._link.answer()

    async def _open(self, message: Initialize) -> None:
        shard_id = self.shard_id = message.shard_id
        v2 = message.version is Version.V2
        if self._allow_shards and not any(fnmatchcase(shard_id, pattern) for pattern in self._allow_shards):
            raise PeerError(
                f"A daemon connected for shard {shard_id}, which allow_shards does not name.",
                did="The connection was closed, and nothing of the shard was taken.",
                advice="Find out who connects there; if it is a shard of this pipeline's stream, name it in allow_shards.",
                shard=shard_id,
            )
        start, start_sub = message.sequence_number, message.sub_sequence_number or 0
        begins = Sequence(int(start), start_sub) if start is not None and start.isdigit() else start
        opening = ShardOpening(shard_id, begins, tells_lag=v2, within_aggregates=v2)
        await self._intake.check(opening)
        claim = self._claim = self._owners.take(shard_id)
        claim.abandoned = self._close_abandoned
        async with claim.work():
            kill_point("shard.opening")
            self._shard = shard = await self._intake.open_shard(opening)
            kill_point("shard.opened")
            await self._runtime.open(Shard(shard_id, start, start_sub))
            if shard.parked:
                await self._runtime.park(shard_id, shard.parked)
            claim.opened = True
        self._batches.open(OpenShard(shard_id, message.version, shard, claim))
        self._link.answer()

    def _close_abandoned(self) -> None:
        """Close: the connection that took the shard over has ended, and what was answered unread here was read nowhere."""
        self._link.close(
            PeerError(
                f"Another connection took shard {self.shard_id} over and has ended before the shard did.",
                did="This connection of the shard was closed, so that its daemon delivers again from the checkpoint.",
                advice="The daemon's JVM exits now; its supervisor must restart it. "
                "If no lease has moved, find out who connected: see shard.taken_over.",
            )
        )

    async def _drain(self) -> None:
        """``shutdownRequested``: one chance to checkpoint everything, since another worker goes on from there.

        What is not done within the answer deadline is given up: it is delivered again to whoever reads on.
        """
        opened = self._batches.opened
        shard, claim = opened.intake, opened.claim
        shard.busy()
        idle = self._batches.under_way.idle.wait()
        await (idle if self._deadline is None else first_of(idle, self._clock.sleep(self._deadline)))
        await self._give_up()
        async with claim.work():
            position = await self._runtime.notify(self.shard_id, Hook.SHUTDOWN_REQUESTED)
            if position is not None:
                shard.advance(position)
            await shard.drain()
        kill_point("shard.drained")
        self._link.log.info("shard.shutdown_requested", position=shard.after and str(shard.after))
        await self._batches.checkpoint()
        self._link.answer()
        shard.answered()

    async def _give_up(self) -> None:
        """Let nobody work on the shard any more."""
        if dropped := await self._batches.under_way.drop():
            self._link.log.warning("batch.given_up", batches=dropped)
        self._batches.opened.claim.evict()

    async def _lose(self) -> None:
        opened = self._batches.opened
        shard, claim = opened.intake, opened.claim
        shard.busy()
        await self._give_up()
        async with claim.work():
            await self._runtime.notify(self.shard_id, Hook.LEASE_LOST)
            await shard.lost()
            self._settled = True
        kill_point("shard.lost")
        self._link.log.info("shard.lost", position=shard.after and str(shard.after))
        self._link.answer()

    async def _end(self) -> None:
        """The shard's end. Without its checkpoint there is no status: see ``protocol/states.py``."""
        opened = self._batches.opened
        shard, claim = opened.intake, opened.claim
        shard.busy()
        await self._batches.under_way.idle.wait()
        claim.evict()
        async with claim.work():
            if self._batches.under_way.incomplete:
                raise PeerError(
                    f"The daemon says that shard {self.shard_id} has ended, but records of it were given up before.",
                    did="The connection was closed without a checkpoint, so that they are delivered again.",
                    advice="The daemon's JVM exits now; its supervisor must restart it.",
                )
            await self._runtime.notify(self.shard_id, Hook.SHARD_ENDED)
            self._settled = self._ended = await shard.end()
            shard.busy()  # its children come only once the daemon has stored the end
        if not self._settled:
            raise self._owned_elsewhere()
        kill_point("shard.end_durable")
        try:
            outcome = await self._link.checkpoint(None)
            kill_point("shard.end_stored")
            self._batches.progress.interval.checkpoints += outcome is CheckpointOutcome.STORED
            if outcome in {CheckpointOutcome.STORED, CheckpointOutcome.STOPPED}:
                self._link.answer()
        finally:
            shard.answered()

    def _owned_elsewhere(self) -> PeerError:
        return PeerError(
            f"The daemon says that shard {self.shard_id} has ended, but another connection owns the shard.",
            did="The connection was closed without a checkpoint: only the owner knows what is durable.",
            advice="The daemon's JVM exits now; its supervisor must restart it.",
        )

    async def _let_go(self) -> None:
        self._batches.let_go()
        if self._claim is None:
            return
        if self._claim.current and self._shard is None:
            # Whoever had the shard before lost it to this connection, which never came to have it.
            self._intake.abandon(self.shard_id)
        elif self._shard is not None and not self._settled and self._claim.current:
            if not self._batches.finishing:
                self._link.log.warning(
                    "shard.disconnected", position=self._shard.after and str(self._shard.after)
                )
            self._shard.disconnected()
        self._claim.evict()
        with contextlib.suppress(Superseded):
            async with self._claim.work():
                await self._runtime.forget(self.shard_id)
        self._owners.release(self.shard_id, self._claim, ended=self._ended)
