"""A listener to test: fakes of what it serves: a runtime and a coordinator that note what they are asked, and a small daemon."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from collections.abc import Sequence as Several
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from mldserver.base.clock import Clock, SystemClock
from mldserver.base.tls import ServerTLS
from mldserver.config.kinds import Address, TcpAddress
from mldserver.consumer.claims import Claims
from mldserver.consumer.intake import ShardOpening
from mldserver.consumer.shard import ConsumerParts
from mldserver.protocol.batch_decoder import BatchDecoder
from mldserver.protocol.connection import ConnectionLimits, RetryPolicy
from mldserver.records import Hook, Sequence, Shard
from mldserver.runtime.interface import BatchOutcome, BatchOutline, Delivery
from mldserver.sources.mld import MLDListener
from mldserver.stores import SnapshotSource

ANYWHERE = TcpAddress("127.0.0.1", 0)
QUICK = ConnectionLimits(
    line_limit=64 * 1024,
    initialize_timeout_seconds=600,
    partial_line_timeout_seconds=600,
    close_timeout_seconds=60,
    retries=RetryPolicy(attempts=3, base_seconds=0.001, cap_seconds=0.002),
    end_retries=RetryPolicy(attempts=3, base_seconds=0.001, cap_seconds=0.002),
)


class FakeRuntime:
    """Decodes as a real one does; ``gate`` holds ``process`` until it is set, ``failure`` is raised by it."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.decoders: dict[str, BatchDecoder] = {}
        self.opened: list[Shard] = []
        self.snapshots: list[SnapshotSource | None] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.reached = asyncio.Event()
        self.doors = asyncio.Event()
        """Holds ``open`` until it is set."""
        self.doors.set()
        self.failures: dict[str, Exception] = {}
        self.cancelled = 0
        self.empties = False
        """Whether long lines are emptied once they are passed on, as the one with worker processes does."""
        self.position: Sequence | None = None
        """What a handler that keeps its position has checkpointed."""

    async def start(self) -> None: ...

    async def open(self, shard: Shard, snapshot: SnapshotSource | None = None) -> None:
        self.snapshots.append(snapshot)
        self.calls.append(("open", shard.id, shard.start))
        self.opened.append(shard)
        await self.doors.wait()
        self._fail("open")

    def begin(self, delivery: Delivery) -> Any:
        return self.process(delivery)

    async def process(self, delivery: Delivery) -> BatchOutcome:
        self.calls.append(("process", delivery.shard_id))
        self.reached.set()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        self._fail("process")
        shard_id = delivery.shard_id
        batch = delivery.payload.decode(self.decoders.setdefault(shard_id, BatchDecoder(shard_id)))
        _, line = delivery.payload.packed()
        if self.empties and isinstance(line, bytearray):
            line.clear()
        sequences = [record.sequence for record in batch.records]
        outline = BatchOutline(
            records=len(sequences),
            duplicates=sum(delivery.after is not None and each <= delivery.after for each in sequences),
            first=sequences[0] if sequences else None,
            last=sequences[-1] if sequences else None,
            latest_arrival_ms=None,
            millis_behind_latest=batch.millis_behind_latest,
        )
        return BatchOutcome(outline)

    async def notify(self, shard_id: str, hook: Hook) -> Sequence | None:
        self.calls.append((str(hook), shard_id))
        return self.position

    async def park(self, shard_id: str, keys: Mapping[str, Sequence]) -> None:
        self.calls.append(("park", shard_id, *keys))

    async def forget(self, shard_id: str) -> None:
        self.calls.append(("forget", shard_id))
        self._fail("forget")

    async def close(self) -> None: ...

    def _fail(self, where: str) -> None:
        if where in self.failures:
            raise self.failures[where]


@dataclass
class FakeShard:
    """Everything accepted is durable once drained; ``eager`` makes it so at once."""

    opening: ShardOpening
    calls: list[str] = field(default_factory=list)
    after: Sequence | None = None
    last: Sequence | None = None
    eager: bool = True
    durable: Sequence | None = None
    stored: list[Sequence] = field(default_factory=list)
    ends: bool = True
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    parked: Mapping[str, Sequence] = field(default_factory=dict)
    snapshot: SnapshotSource | None = None
    next_number: int | None = None
    """Counts what is accepted, once it is set."""

    received: list[int | None] = field(default_factory=list)
    """When the batches came that were begun."""
    working: bool = False
    asked: bool = False

    def batch_began(self, received_ms: int | None = None) -> None:
        self.calls.append("began")
        self.received.append(received_ms)
        self.working = True

    def request_began(self) -> None:
        self.asked = True

    def request_ended(self) -> None:
        self.asked = False

    @property
    def silent(self) -> bool:
        """Whether its silence counts."""
        return not self.working and not self.asked

    def accept_batch(self, outcome: BatchOutcome, now_ms: int, received_ms: int | None = None) -> bool:
        self.calls.append("accept")
        if self.next_number is not None:
            self.next_number += 1
        self.last = outcome.outline.last or self.after
        if self.gate.is_set():
            self.taken()
            self.working = False
        return self.gate.is_set()

    paused: bool = False

    async def wait_for_room(
        self, *, answered: bool = False, checkpoint: Callable[[], Awaitable[object]] | None = None
    ) -> None:
        await self.gate.wait()
        self.taken()

    def taken(self) -> None:
        self.after = self.last
        if self.eager:
            self.durable = self.after

    def advance(self, position: Sequence) -> None:
        self.calls.append(f"advance {position}")

    def checkpoint_due(self) -> Sequence | None:
        return self.durable if self.durable and self.durable not in self.stored else None

    def checkpointed(self, position: Sequence) -> None:
        self.stored.append(position)

    async def drain(self) -> None:
        self.calls.append("drain")
        self.durable = self.after

    async def end(self) -> bool:
        self.calls.append("end")
        return self.ends

    async def lost(self) -> None:
        self.calls.append("lost")

    def disconnected(self) -> None:
        self.calls.append("disconnected")

    async def finish(self) -> None:
        self.gate.set()


class FakeIntake:
    """Opens fake shards; ``prepare`` may change them, ``refusal`` is raised instead."""

    def __init__(self) -> None:
        self.shards: list[FakeShard] = []
        self.refusal: Exception | None = None
        self.known_refusal: Exception | None = None
        """What is raised before anything is asked of the ledger."""
        self.abandoned: list[str] = []
        self.prepare: Callable[[FakeShard], None] = lambda shard: None

    async def check(self, opening: ShardOpening) -> None:
        if self.known_refusal is not None:
            raise self.known_refusal

    def abandon(self, shard_id: str) -> None:
        self.abandoned.append(shard_id)

    async def open_shard(self, opening: ShardOpening) -> FakeShard:
        if self.refusal is not None:
            raise self.refusal
        shard = FakeShard(opening)
        shard.gate.set()
        self.prepare(shard)
        self.shards.append(shard)
        return shard


class Daemon:
    """The daemon's end of one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, message: dict[str, Any] | bytes) -> None:
        data = (
            message
            if isinstance(message, bytes)
            else json.dumps(message, separators=(",", ":")).encode() + b"\n"
        )
        self.writer.write(data)
        await self.writer.drain()

    async def receive(self) -> dict[str, Any]:
        line = await self.reader.readline()
        assert line.endswith(b"\n"), f"the server closed: {line!r}"
        message: dict[str, Any] = json.loads(line)
        return message

    async def ask(self, message: dict[str, Any] | bytes) -> dict[str, Any]:
        await self.send(message)
        return await self.receive()

    async def initialize(
        self, shard_id: str = "shardId-000000000000", start: str | None = "TRIM_HORIZON"
    ) -> None:
        message = {
            "action": "initialize",
            "shardId": shard_id,
            "sequenceNumber": start,
            "subSequenceNumber": 0,
        }
        assert await self.ask(message) == {"action": "status", "responseFor": "initialize"}

    async def process(self, *numbers: int, behind: int | None = 0) -> None:
        """Send a batch of records with these sequence numbers."""
        records = [
            {
                "data": "eA==",
                "partitionKey": "k",
                "sequenceNumber": str(number),
                "approximateArrivalTimestamp": 1_700_000_000_000,
                "subSequenceNumber": 0,
                "action": "record",
            }
            for number in numbers
        ]
        await self.send({"action": "processRecords", "records": records, "millisBehindLatest": behind})

    async def answered(self, action: str) -> None:
        """Take the status for a request."""
        assert await self.receive() == {"action": "status", "responseFor": action}

    async def checkpointed(self, *, error: str | None = None) -> dict[str, Any]:
        """Take a checkpoint, reply to it, and return it."""
        asked = await self.receive()
        assert asked["action"] == "checkpoint", asked
        await self.send({**asked, "error": error})
        return asked

    async def sees_the_end(self) -> None:
        with contextlib.suppress(ConnectionError):
            assert await self.reader.read() == b""

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()


@dataclass
class House:
    """A running listener with its fakes."""

    listener: MLDListener
    runtime: FakeRuntime
    intake: FakeIntake
    address: str
    running: asyncio.Task[None]
    daemons: list[Daemon] = field(default_factory=list)
    client: ssl.SSLContext | None = None
    """What daemons show; None: they speak clear text."""

    def parts(self, clock: Clock) -> ConsumerParts:
        """Return what another listener on this house's fakes is made of."""
        return ConsumerParts(self.runtime, self.intake, Claims(), clock)

    async def connect(self) -> Daemon:
        if self.address.startswith("unix:"):
            streams = await asyncio.open_unix_connection(self.address.removeprefix("unix:"))
        else:
            host, port = self.address.rsplit(":", 1)
            streams = await asyncio.open_connection(host, int(port), ssl=self.client)
        daemon = Daemon(*streams)
        self.daemons.append(daemon)
        return daemon

    async def empty(self) -> None:
        """Wait until every connection is gone."""
        await self.holds_connections(0)

    async def holds_connections(self, count: int) -> None:
        """Wait until there are so many connections."""
        while self.listener.connections != count:  # noqa: ASYNC110  # the listener has no event for it: only tests ask
            await asyncio.sleep(0)

    async def opens(self, count: int) -> None:
        """Wait until the runtime was asked to open so many shards."""
        while sum(call[0] == "open" for call in self.runtime.calls) < count:  # noqa: ASYNC110  # see above
            await asyncio.sleep(0)

    async def holds(self, size: int) -> None:
        """Wait until so many bytes of unread lines are held."""
        while self.listener._budget.held < size:  # noqa: ASYNC110  # see empty
            await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def serving(
    address: Address = ANYWHERE,
    *,
    connection_limit: int = 100,
    read_bytes: int = 2**20,
    clock: Clock | None = None,
    answer_deadline: float | None = None,
    tls: tuple[ServerTLS | None, ssl.SSLContext | None] = (None, None),
    allow_shards: Several[str] = (),
    secret: bytes | None = None,
    keyed: bool = False,
    **limits: Any,
) -> AsyncIterator[House]:
    runtime, intake = FakeRuntime(), FakeIntake()
    listener = MLDListener(
        address,
        ConsumerParts(runtime, intake, Claims(), clock or SystemClock(), keyed),
        answer_deadline=answer_deadline,
        limits=replace(QUICK, **limits),
        connection_limit=connection_limit,
        read_bytes=read_bytes,
        tls=tls[0],
        allow_shards=allow_shards,
        secret=secret,
        random=lambda: 0.5,
    )
    running = asyncio.create_task(listener.run())
    house = House(listener, runtime, intake, await listener.listening(), running, client=tls[1])
    try:
        yield house
    finally:
        for daemon in house.daemons:
            await daemon.close()
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


class Build(Protocol):
    """Starts a listener."""

    async def __call__(self, *address: Any, **limits: Any) -> House: ...
