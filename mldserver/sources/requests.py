"""The requests of one daemon, from ``initialize`` to the shard's end: each is one call of the shard's ``Consumer``.

Batches do not wake this task: the link passes them to the consumer at once. EOF cancels whatever goes on; the daemon delivers again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from fnmatch import fnmatchcase

from mldserver.consumer.claims import Superseded
from mldserver.consumer.deadlines import AnswerDeadlines
from mldserver.consumer.intake import ShardOpening
from mldserver.consumer.progress_log import ProgressLog
from mldserver.consumer.shard import Consumer, ConsumerParts, as_ours
from mldserver.errors import PeerError
from mldserver.protocol.events import CloseReason
from mldserver.protocol.messages import (
    Initialize,
    LeaseLost,
    Line,
    RequestMessage,
    ShardEnded,
    Shutdown,
    ShutdownReason,
    Version,
)
from mldserver.records import Sequence, Shard
from mldserver.runtime.interface import MLDLine
from mldserver.sources.link import Link


class Requests:
    """Carries out a daemon's requests, one by one."""

    def __init__(
        self,
        link: Link,
        *,
        parts: ConsumerParts,
        deadlines: AnswerDeadlines,
        counts: ProgressLog,
        allow_shards: Collection[str] = (),
    ) -> None:
        """``deadlines`` and ``counts`` are shared by all connections. ``allow_shards``: see ``MLDListener``."""
        self._link = link
        self._clock = parts.clock
        self._allow_shards = allow_shards
        self._version = Version.V2
        self._stopping = False
        self._line_since_ms: int | None = None
        """Steady time at which the first bytes of the incomplete line came; None: no line is incomplete."""
        self.consumer = Consumer(parts, counts=counts, deadlines=deadlines, upstream=link, log=link.log)
        link.on_batch, link.on_partial = self._deliver, self._note_partial

    async def run(self) -> None:
        """Serve the daemon until its connection is closed, then release the shard. An error ends only this connection."""
        link, began_ms = self._link, self._clock.steady_ms()
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._serve()), group.create_task(self.consumer.run())]
                await link.over.wait()
                for task in tasks:
                    task.cancel()
        finally:
            await self.consumer.forget()
        progress = self.consumer.progress
        progress.tell()
        if link.close_reason not in {CloseReason.FAILED, CloseReason.EOF_IN_REQUEST}:
            link.log.info(
                "connection.closed",
                reason=str(link.close_reason),
                seconds=(self._clock.steady_ms() - began_ms) / 1000,
                batches=progress.all_batches,
                records=progress.all_records,
            )

    async def finish(self) -> None:
        """Take no more requests; return when the outstanding one is answered, and no batch is in flight."""
        self._stopping = True
        await self.consumer.finish()

    def _deliver(self, line: Line) -> None:
        """Pass a batch to the shard's consumer, with the time at which its first bytes came."""
        self.consumer.deliver(MLDLine(line, self._version), len(line), self._line_since_ms)

    def _note_partial(self, began: bool) -> None:  # noqa: FBT001  # a callback
        """Note that an incomplete line began, or was completed: while a line is incomplete, the shard is not idle."""
        self._line_since_ms = self._clock.steady_ms() if began else None
        self.consumer.receiving(began)

    async def _serve(self) -> None:
        """Carry out requests until no more come or the server stops. An error closes this connection only."""
        try:
            while (message := await self._link.request()) is not None and not self._stopping:
                try:
                    await self._carry_out(message)
                except Superseded:
                    continue  # the consumer acknowledges the request without carrying it out
        except Exception as error:  # noqa: BLE001  # whatever it is, only this connection may end by it
            self._link.close(as_ours(error))

    async def _carry_out(self, message: RequestMessage) -> None:
        """Carry out one request; ``drain`` serves ``shutdownRequested``."""
        consumer = self.consumer
        match message:
            case Initialize():
                await self._open(message)
            case LeaseLost() | Shutdown(ShutdownReason.ZOMBIE):
                await consumer.lose()
            case ShardEnded() | Shutdown(ShutdownReason.TERMINATE):
                await consumer.end()
            case _:
                await consumer.drain()

    async def _open(self, message: Initialize) -> None:
        """Open the shard that ``initialize`` names. Raises PeerError if ``allow_shards`` does not allow it."""
        shard_id = message.shard_id
        v2 = message.version is Version.V2
        if self._allow_shards and not any(fnmatchcase(shard_id, pattern) for pattern in self._allow_shards):
            raise PeerError(
                f"A daemon connected for shard {shard_id}, which allow_shards does not name.",
                did="The connection was closed, and nothing of the shard was taken.",
                advice="Find out who connects there; if it is a shard of this pipeline's stream, name it in allow_shards.",
                shard=shard_id,
            )
        self._version = message.version
        # Where the daemon starts: at a record, or at a name such as TRIM_HORIZON.
        start, start_sub = message.sequence_number, message.sub_sequence_number or 0
        checkpoint = Sequence(int(start), start_sub) if start is not None and start.isdigit() else start
        self.consumer.log = self._link.log  # it names the shard now
        await self.consumer.open(
            ShardOpening(shard_id, checkpoint, tells_lag=v2, within_aggregates=v2),
            Shard(shard_id, start, start_sub),
        )
