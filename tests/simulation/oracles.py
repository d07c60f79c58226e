"""What must hold at every moment of a world."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from mldserver.base.clock import Clock
from mldserver.coordinator.core.flush import Buffer, BufferedBatch
from mldserver.coordinator.progress import CoordinatorStatus
from mldserver.ledger.contract import Flush
from mldserver.records import Sequence
from mldserver.testing import FakeStream, LeaseTable, Place
from mldserver.testing.fake_stream import SHARD_END, HashRange, StreamRecord


class Violated(AssertionError):
    """A promise was broken."""


def leaves(error: BaseException) -> list[BaseException]:
    """Return the errors of a group, or the one."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for each in error.exceptions for leaf in leaves(each)]
    return [error]


@dataclass
class Positions:
    """Checkpoint <= position <= delivered, watched where each of the three moves."""

    delivered: dict[str, Sequence] = field(default_factory=dict)
    durable: dict[str, Sequence] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)
    delivered_ms: dict[tuple[str, int], int] = field(default_factory=dict)
    """When each record was delivered last, by its shard and number; in that order."""
    broken: list[str] = field(default_factory=list)

    def deliver(self, shard: str, record: StreamRecord, *, whole: bool) -> None:
        """Note a record; ``whole``: with all that is aggregated in it."""
        place = Sequence(int(record.sequence_number), 10**6 if whole else record.sub_sequence_number)
        self.delivered[shard] = max(self.delivered.get(shard, place), place)

    def register(self, flush: Flush) -> None:
        for update in flush.positions:
            shard, position = update.shard_id, update.position
            if update.ended:
                self.ended.add(shard)
            if position is None:
                continue
            if position > self.delivered.get(shard, Sequence(-1)):
                self.broken.append(f"{shard}: position {position} was never delivered")
            if position < self.durable.get(shard, position):
                self.broken.append(f"{shard}: position {position} goes down")
            self.durable[shard] = position

    def checkpoint(self, shard: str, place: Place) -> None:
        if place == SHARD_END:
            if shard not in self.ended:
                self.broken.append(f"{shard}: its end is checkpointed, but is not durable")
        elif place.number.isdecimal() and Sequence(int(place.number), place.sub) > self.durable.get(
            shard, Sequence(-1)
        ):
            self.broken.append(f"{shard}: checkpoint {place} runs ahead of {self.durable.get(shard)}")


@dataclass(slots=True)
class _Queue:
    """When the batches of one connection were fetched: KCL fetches some before they are taken."""

    fetched_ms: int
    taken_ms: deque[int] = field(default_factory=lambda: deque(maxlen=5))
    """Of the latest batches: four are in the queue, and one is being put there."""

    def take(self, now_ms: int, idle_ms: int) -> int:
        """Take the next batch; return when it was fetched."""
        room_ms = self.taken_ms[0] if len(self.taken_ms) == self.taken_ms.maxlen else 0
        self.fetched_ms = min(now_ms, max(self.fetched_ms + idle_ms, room_ms))
        self.taken_ms.append(now_ms)
        return self.fetched_ms


class WatchedStream(FakeStream):
    """A stream that tells what was delivered, and whose batches may have waited in the daemon's queue."""

    positions: Positions
    clock: Clock
    prefetch_ms: int | None = None
    """How often the daemon fetches a batch while there is room in its queue; None: it has no queue."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._queues: dict[str, _Queue] = {}
        self._put_ms: dict[str, int] = {}
        """By sequence number."""

    def _place(self, *args: Any) -> tuple[HashRange, str, int]:
        found = super()._place(*args)
        self._put_ms[found[1]] = self.clock.now_ms()
        return found

    def connected(self, shard_id: str) -> None:
        """Begin with an empty queue."""
        self._queues.pop(shard_id, None)

    def _fetched(self, shard_id: str, after: Place, limit: int, *, raw: bool) -> Any:
        """Return what a fetch found, perhaps some time ago."""
        records, behind = super().read(shard_id, after, limit, raw=raw)
        if self.prefetch_ms is None or self.shards[shard_id].closed:  # the daemon has looked just now
            return records, behind
        now_ms = self.clock.now_ms()
        queue = self._queues.setdefault(shard_id, _Queue(now_ms))
        fetched_ms = queue.take(now_ms, self.prefetch_ms)
        shown = [each for each in records if self._put_ms[each.sequence_number] <= fetched_ms]
        if not shown:  # a fake daemon waits before it hands on an empty batch, longer than KCL
            queue.fetched_ms = now_ms
            return records, behind
        return shown, behind if len(shown) == len(records) else 0

    def read(self, shard_id: str, after: Place, limit: int, *, raw: bool = False) -> Any:
        records, behind = self._fetched(shard_id, after, limit, raw=raw)
        for record in records:
            key = shard_id, int(record.sequence_number)
            self.positions.delivered_ms.pop(key, None)
            self.positions.delivered_ms[key] = self.clock.now_ms()
        for record in records[-1:]:
            self.positions.deliver(shard_id, record, whole=raw)
        return records, behind


class WatchedLeases(LeaseTable):
    """A lease table that tells what was checkpointed."""

    positions: Positions

    def store(self, shard_id: str, token: int, place: Place) -> None:
        super().store(shard_id, token, place)
        self.positions.checkpoint(shard_id, place)


@dataclass
class Memory:
    """What servers buffer, watched where it grows: no more than their budget and, of each shard, one batch, one portion of
    timers, and one of dead letters that run again.

    Whoever finds no room waits, behind the batch that it has brought.
    """

    budget: int
    broken: list[str]
    """Where to tell."""
    short: int = 0
    """How often more came than there was room for."""

    def buffer(self) -> WatchedBuffer:
        """Stand in for the class of buffers."""
        return WatchedBuffer(self)


class WatchedBuffer(Buffer):
    """A buffer whose batches are weighed by the oracle too."""

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self._memory = memory
        self._largest: dict[tuple[str, bool, bool], int] = {}
        """Of each shard's batches, and of its dead letters that run again and its timers: these come between two batches."""

    def add(self, batch: BufferedBatch) -> int:
        memory, before = self._memory, self.bytes
        number, size = super().add(batch), _weigh(batch)
        source = _source(batch)
        self._largest[source] = max(size, self._largest.get(source, 0))
        held = list(self._batches.values())  # a snapshot would be a cycle to it
        taken = sum(map(_weigh, held))
        sources = set(map(_source, held))
        room = memory.budget + sum(self._largest[source] for source in sources)
        memory.short += before <= memory.budget < taken
        if taken > room:
            memory.broken.append(f"{taken} bytes are buffered, more than {room}")
        if self.bytes != taken:
            memory.broken.append(f"{self.bytes} bytes are said to be buffered, not {taken}")
        return number


def _source(batch: BufferedBatch) -> tuple[str, bool, bool]:
    return batch.shard_id, bool(batch.redriven), batch.timers is not None and batch.last is None


def _weigh(batch: BufferedBatch) -> int:
    letters = sum(len(each.data) + len(each.traceback) for each in batch.effects.dead_letters)
    state = sum(map(len, batch.effects.state))
    return letters + state + (0 if batch.effects.rows is None else batch.effects.rows.nbytes)


@dataclass
class Progress:
    """What one life of a server shows of itself: the watermark never goes back."""

    watermark_ms: int | None = None

    def look(self, status: CoordinatorStatus) -> list[str]:
        broken = []
        seen, self.watermark_ms = self.watermark_ms, status.watermark_ms
        if seen is not None and (status.watermark_ms is None or status.watermark_ms < seen):
            broken.append(f"the watermark went back from {seen} to {status.watermark_ms}")
        return broken
