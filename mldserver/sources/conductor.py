"""One task for each connection: takes the daemon's requests one by one through handler and coordinator.

Every request runs the same way: what must be durable is made durable, a checkpoint follows where one is due, and only
then the status goes out. EOF cancels whatever is in progress; the daemon delivers it again.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from mldserver.errors import InternalError, MldserverError, PeerError
from mldserver.faults import kill_point
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
from mldserver.records import Sequence, Shard
from mldserver.runtime.base import Delivery, Hook
from mldserver.sources.base import ShardOpening
from mldserver.sources.link import CheckpointOutcome
from mldserver.sources.owners import Superseded

if TYPE_CHECKING:
    from mldserver.clock import Clock
    from mldserver.protocol.messages import Line, RequestMessage
    from mldserver.runtime.base import BatchOutcome, Runtime
    from mldserver.sources.base import Intake, ShardIntake
    from mldserver.sources.link import Link
    from mldserver.sources.owners import Claim, ShardOwners

__all__ = ["Conductor"]


class Conductor:
    """Drives one connection from ``initialize`` to its end."""

    def __init__(
        self, link: Link, *, runtime: Runtime, intake: Intake, owners: ShardOwners, clock: Clock
    ) -> None:
        """Take the parts that the requests run through."""
        self._link = link
        self._runtime = runtime
        self._intake = intake
        self._owners = owners
        self._clock = clock
        self._shard_id = ""
        self._version = Version.V2
        self._claim: Claim | None = None
        self._shard: ShardIntake | None = None
        self._settled = False
        self._told_taken_over = False
        self._finishing = False
        self._quiet = asyncio.Event()
        self._batches = 0
        self._records = 0

    @property
    def shard_id(self) -> str:
        """The connection's shard; empty before ``initialize``."""
        return self._shard_id

    async def run(self) -> None:
        """Serve until the connection is closed, then let go of the shard. Errors end the connection, no more."""
        began = self._clock.now_ms()
        try:
            async with asyncio.TaskGroup() as group:
                work = group.create_task(self._serve())
                await self._link.wait_closed()
                work.cancel()
        finally:
            await self._let_go()
        if self._link.close_reason not in {CloseReason.FAILED, CloseReason.EOF_IN_REQUEST}:
            self._link.log.info(
                "connection.closed",
                reason=str(self._link.close_reason),
                seconds=(self._clock.now_ms() - began) / 1000,
                batches=self._batches,
                records=self._records,
            )

    async def finish(self) -> None:
        """Take no more requests; return when the one that is outstanding is answered."""
        self._finishing = True
        await self._quiet.wait()

    async def _serve(self) -> None:
        try:
            while not self._finishing:
                self._quiet.set()
                message = await self._link.request()
                if message is None or self._finishing:
                    return
                self._quiet.clear()
                await self._take(message)
        except MldserverError as error:
            self._link.abort(error)
        except Exception as error:  # noqa: BLE001  # whatever it is, only this connection may end by it
            fault = InternalError(
                f"Unexpected {type(error).__name__}: {error}", did="The connection was closed."
            )
            fault.__cause__ = error
            self._link.abort(fault)
        finally:
            self._quiet.set()

    async def _take(self, message: RequestMessage) -> None:
        if self._claim is not None and not self._claim.current:
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
        if not self._told_taken_over:
            self._told_taken_over = True
            self._link.log.warning("shard.taken_over", peer=self._link.peer)
        if isinstance(message, ProcessRecords):
            self._link.processed()
        if message == ShardEnded() or message == Shutdown(ShutdownReason.TERMINATE):
            raise self._owned_elsewhere()
        self._link.answer()

    async def _open(self, message: Initialize) -> None:
        self._shard_id, self._version = message.shard_id, message.version
        claim = self._claim = self._owners.take(message.shard_id)
        async with claim.work():
            kill_point("shard.opening")
            self._shard = await self._intake.open_shard(
                ShardOpening(message.shard_id, _start(message), tells_lag=message.version is Version.V2)
            )
            kill_point("shard.opened")
            await self._runtime.open(Shard(message.shard_id, message.sequence_number))
        self._link.answer()

    async def _process(self, line: Line) -> None:
        shard, claim = self._opened()
        began = self._clock.now_ms()
        delivery = Delivery(self._shard_id, line, self._version, received_ms=began, after=shard.after)
        async with claim.work():
            shard.began()
            kill_point("batch.received")
            try:
                outcome = await self._runtime.process(delivery)
            except PeerError as error:
                self._link.reject(error)
                return
            finally:
                self._link.processed()
            kill_point("batch.handled")
            handled = self._clock.now_ms()
            await shard.accept(outcome)
            kill_point("batch.buffered")
            answerable = self._clock.now_ms()
            if self._finishing:
                await shard.drain()
        checkpoint = await self._checkpoint(shard)
        self._link.answer()
        kill_point("batch.answered")
        self._tell_batch(outcome, len(line), checkpoint, (began, handled, answerable))

    async def _drain(self) -> None:
        """``shutdownRequested``: one chance to checkpoint everything, since another worker goes on from there."""
        shard, claim = self._opened()
        async with claim.work():
            await self._runtime.notify(self._shard_id, Hook.SHUTDOWN_REQUESTED)
            await shard.drain()
        kill_point("shard.drained")
        self._link.log.info("shard.shutdown_requested", position=_shown(shard.after))
        await self._checkpoint(shard)
        self._link.answer()

    async def _lose(self) -> None:
        shard, claim = self._opened()
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
        async with claim.work():
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

    async def _let_go(self) -> None:
        if self._claim is None:
            return
        if self._shard is not None and not self._settled and self._claim.current:
            if not self._finishing:
                self._link.log.warning("shard.disconnected", position=_shown(self._shard.after))
            self._shard.disconnected()
        try:
            async with self._claim.work():
                await self._runtime.forget(self._shard_id)
        except Superseded:
            return
        self._owners.release(self._shard_id, self._claim)

    def _tell_batch(
        self, outcome: BatchOutcome, size: int, checkpoint: Sequence | None, times: tuple[int, int, int]
    ) -> None:
        began, handled, answerable = times
        outline = outcome.outline
        self._batches += 1
        self._records += outline.records
        # An idle shard sends an empty batch a second: a line of each would bury the others.
        tell = self._link.log.info if outline.records else self._link.log.debug
        tell(
            "batch.done",
            records=outline.records,
            rows=0 if outcome.rows is None else outcome.rows.num_rows,
            duplicates=outline.duplicates,
            dead_letters=len(outcome.dead_letters),
            bytes=size,
            first=_shown(outline.first),
            last=_shown(outline.last),
            millis_behind_latest=outline.millis_behind_latest,
            attempts=outcome.attempts,
            handler_seconds=(handled - began) / 1000,
            held_seconds=(answerable - handled) / 1000,
            checkpoint=_shown(checkpoint),
            seconds=(self._clock.now_ms() - began) / 1000,
        )


def _start(message: Initialize) -> Sequence | str | None:
    number = message.sequence_number
    if number is None or not number.isdigit():
        return number
    return Sequence(int(number), message.sub_sequence_number or 0)


def _shown(position: Sequence | None) -> str | None:
    return None if position is None else str(position)
