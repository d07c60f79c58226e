"""One shard on one connection: the asyncio shell around ``DaemonProtocol``, with what a KCL worker does in between."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from mldserver.base.clock import Clock, in_time
from mldserver.testing.daemon import DaemonProtocol, Form, NoServer
from mldserver.testing.fake_stream import FakeStream, LeaseTable, Place

_READ_BYTES: Final = 1 << 16
_CHECKPOINT: Final = b'{"action":"checkpoint"'
"""How the answer to a checkpoint begins."""


class DaemonHangs(Exception):
    """The real daemon would wait for ever; the message names the awaited answer and the skipped line."""


async def connect(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to ``host:port`` or ``unix:PATH``. Raises OSError."""
    if address.startswith("unix:"):
        return await asyncio.open_unix_connection(address.removeprefix("unix:"))
    host, _, port = address.rpartition(":")
    return await asyncio.open_connection(host.strip("[]"), int(port))


def abort(writer: asyncio.StreamWriter, *, reset: bool) -> None:
    """Cut a connection; ``reset`` lets the peer see a reset instead of an orderly end."""
    if reset:
        with contextlib.suppress(OSError):  # closed already
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.transport.abort()


@dataclass(frozen=True, slots=True)
class Habits:
    """How the worker behaves, as its properties file would say."""

    form: Form = Form.KCL3
    seed: int = 0
    max_records: int = 1000
    """Most stored records in one batch (``maxRecords``); each batch has a random number up to this."""
    call_with_empty: bool = True
    """``callProcessRecordsEvenForEmptyRecordList``."""
    idle_seconds: float = 0.05
    """Pause between two reads of a shard without new records (``idleTimeBetweenReadsInMillis``)."""
    checkpoint_seconds: float = 0.0
    """How long the lease table takes to store a checkpoint."""
    close_patience_seconds: float = 10.0
    """How long the server may take to close after the last status before it counts as a violation."""
    raise_on_hang: bool = True
    """Raise DaemonHangs instead of waiting for ever, as the Java does."""


@dataclass(slots=True)
class DaemonSession:
    """Delivers one shard from its checkpoint until the lease is lost, the shard ends, or something breaks."""

    core: DaemonProtocol
    life: int
    address: str
    stream: FakeStream
    leases: LeaseTable
    clock: Clock
    habits: Habits
    on_batch: Callable[[int], None]
    """Called with the number of records once a batch is sent, before it is answered."""
    stopping: bool = False
    """SIGTERM: ask for the last checkpoint and leave."""
    _writer: asyncio.StreamWriter | None = None

    async def run(self) -> None:
        """Connect and deliver the shard until it ends, its lease is lost, or SIGTERM. Raises JvmExit, NoServer and DaemonHangs."""
        try:
            reader, writer = await connect(self.address)
        except OSError as error:
            text = f"{self.core.shard_id}: the bridge found no server at {self.address}: {error}"
            raise NoServer(text) from error
        self._writer = writer
        try:
            await self._deliver_shard(reader, writer)
        finally:
            if self.core.finished:
                writer.close()
            else:  # the process dies: unsent bytes are dropped
                writer.transport.abort()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def abort(self, *, reset: bool) -> None:
        """Cut the connection, if it is open. With ``reset`` the server sees a reset."""
        if self._writer is not None:
            abort(self._writer, reset=reset)

    async def _deliver_shard(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Send ``initialize``, batches and the ending (``leaseLost`` or ``shardEnded``), each once the previous one is answered.

        If the lease is handed over or the JVM stops, ``shutdownRequested`` lets the server checkpoint before ``leaseLost``.
        """
        core, shard_id, v1 = self.core, self.core.shard_id, self.habits.form is Form.V1
        read_up_to = self.leases.place(shard_id)
        # The seed makes the batches' sizes repeatable.
        batch_sizes = random.Random(f"{self.habits.seed}/{self.life}/{shard_id}")  # noqa: S311  # not secret
        core.initialize()
        await self._await_answer(reader, writer)
        while not core.finished:
            lease_lost, hand_over = self.leases.elsewhere(shard_id), self.leases.leaving(shard_id)
            if lease_lost:
                core.lease_lost()
            elif self.stopping or hand_over:
                if not v1:  # V1 has no shutdownRequested
                    core.shutdown_requested()
                    await self._await_answer(reader, writer)
                if self.leases.leaving(shard_id):
                    self.leases.lose(shard_id)
                core.lease_lost()
            else:
                # Determined before the read: records that become readable in between are still read.
                no_more_records = self.stream.shards[shard_id].closed and not self.stream.waiting(shard_id)
                limit = batch_sizes.randint(1, self.habits.max_records)
                records, millis_behind = self.stream.read(shard_id, read_up_to, limit, raw=v1)
                if records:
                    read_up_to = Place(records[-1].sequence_number, records[-1].sub_sequence_number)
                    core.process_records(records, millis_behind)
                    self.on_batch(len(records))
                elif no_more_records:
                    core.shard_ended()
                else:
                    await self.clock.sleep(self.habits.idle_seconds)
                    if not self.habits.call_with_empty:
                        continue
                    core.process_records((), 0)
            await self._await_answer(reader, writer)
        await self._close_and_drain(reader, writer)

    async def _await_answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Send the request, and reply to the server's checkpoints, until its status. Raises JvmExit and DaemonHangs."""
        try:
            while True:
                if data := self.core.data_to_send():
                    if self.habits.checkpoint_seconds and data.startswith(_CHECKPOINT):
                        await self.clock.sleep(self.habits.checkpoint_seconds)
                    writer.write(data)
                    await writer.drain()
                if self.core.outstanding is None:
                    return
                received = await reader.read(_READ_BYTES)
                if not received:
                    break
                self.core.receive_data(received)
                if (hang := self.core.hang) is not None and self.habits.raise_on_hang:
                    raise DaemonHangs(
                        f"{self.core.shard_id}: the daemon waits for the answer to {hang.waiting_for} for ever. "
                        f"{hang.reason}: {hang.line!r}"
                    )
        except ConnectionError:
            pass  # a reset looks like an EOF to the child's pipes
        self.core.receive_eof()

    async def _close_and_drain(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Send EOF, and read until the server's EOF. A late EOF is a violation: the real daemon would wait without a limit."""

        async def read_to_eof() -> None:
            with contextlib.suppress(ConnectionError):
                if writer.can_write_eof():
                    writer.write_eof()
                while received := await reader.read(_READ_BYTES):
                    self.core.receive_data(received)

        if not await in_time(read_to_eof(), self.clock, self.habits.close_patience_seconds):
            self.core.violations.append(
                f"{self.core.shard_id}: the server did not close within {self.habits.close_patience_seconds} s after "
                "the last status: the daemon drains its output for ever"
            )
