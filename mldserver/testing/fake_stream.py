"""A Kinesis stream in memory, and the lease table of a KCL application that reads it.

The stream has shards with parents and hash ranges, seeded sequence numbers, splits and merges. The lease table says who
owns which shard, and how far it was checkpointed: ``LeaseTable`` outlives workers, ``CheckpointRange`` is one shard's
checkpointer inside a running one, with the rules of KCL's ``ShardRecordProcessorCheckpointer``.
"""

from __future__ import annotations

import bisect
import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from mldserver.stores import ALL_KEYS, KeyRange, hash_of, key_bytes

_DIGIT_BORDER: Final = 10**55
"""Sequence numbers begin just below it and soon grow a digit: compared as texts they would be out of order."""
_STEP: Final = 10**40


@dataclass(frozen=True, slots=True)
class StreamRecord:
    """A user record as the KCL hands it over."""

    sequence_number: str
    data: bytes | None
    partition_key: str | None
    arrival_ms: int
    sub_sequence_number: int = 0
    aggregated: bool = False
    """Whether the record came inside a KPL aggregate."""

    @property
    def order(self) -> tuple[int, int]:
        """The record's place in its shard, comparable."""
        return (int(self.sequence_number), self.sub_sequence_number)


@dataclass(slots=True)
class HashRange:
    """One shard: the records of a range of hashes. It is closed once it was split or merged, or the stream ended."""

    id: str
    parents: tuple[str, ...]
    key_range: KeyRange
    """The MD5 hashes of its partition keys (ListShards: HashKeyRange)."""
    closed: bool = False
    records: list[StreamRecord] = field(default_factory=list)
    """User records, in order; those of one aggregate share a sequence number."""
    raw: list[StreamRecord] = field(default_factory=list)
    """Records as Kinesis stores them, KPL aggregates whole: what a V1 daemon delivers."""


class FakeStream:
    """A deterministic stream. Records are put, and shards change, only when a test says so."""

    def __init__(self, shards: int = 1, *, seed: int = 0, start_ms: int = 1_800_000_000_000) -> None:
        """Open with ``shards`` equal shards; records without an arrival time come 1 ms apart from ``start_ms``."""
        if shards < 1:
            raise ValueError("a stream has at least one shard")
        self._random = random.Random(seed)  # noqa: S311  # numbers that repeat, not secrets
        self._next_number = _DIGIT_BORDER - 20 * _STEP
        self._now_ms = start_ms
        self.tip_ms: Callable[[], int] | None = None
        """Returns the time now: later records of a shard (arrival times must ascend) cannot be read yet. None: all can."""
        self.shards: dict[str, HashRange] = {}
        bounds = [(ALL_KEYS.last + 1) * index // shards for index in range(shards + 1)]
        for first, behind in itertools.pairwise(bounds):
            self._add_shard((), KeyRange(first, behind - 1))

    @property
    def open_shards(self) -> tuple[str, ...]:
        """Ids of the shards that still take records, oldest first."""
        return tuple(shard.id for shard in self.shards.values() if not shard.closed)

    @property
    def ended(self) -> bool:
        """Whether no shard takes records any more."""
        return not self.open_shards

    @property
    def records(self) -> int:
        """How many user records were put, over all shards."""
        return sum(len(shard.records) for shard in self.shards.values())

    def put(
        self,
        data: bytes | None,
        partition_key: str | None = None,
        *,
        shard_id: str | None = None,
        arrival_ms: int | None = None,
    ) -> StreamRecord:
        """Put one record: into the shard of its key's hash, or into ``shard_id``.

        A key of None (a DynamoDB stream has none) needs a ``shard_id``. Raises ValueError for a closed shard.
        """
        shard, number, at = self._place(partition_key, shard_id, arrival_ms)
        record = StreamRecord(number, data, partition_key, at)
        shard.records.append(record)
        shard.raw.append(record)
        return record

    def put_aggregate(
        self,
        user_records: Iterable[tuple[str, bytes]],
        *,
        shard_id: str | None = None,
        arrival_ms: int | None = None,
    ) -> tuple[StreamRecord, ...]:
        """Put (partition key, data) pairs as one KPL aggregate, in the shard of the first key."""
        from aws_kinesis_agg.aggregator import RecordAggregator  # noqa: PLC0415  # needed for aggregates only

        pairs = list(user_records)
        aggregator = RecordAggregator()
        for key, data in pairs:
            aggregator.add_user_record(key, data)
        key, _, blob = aggregator.clear_and_get().get_contents()
        shard, number, at = self._place(pairs[0][0], shard_id, arrival_ms)
        shard.raw.append(StreamRecord(number, blob, key, at))
        users = tuple(
            StreamRecord(number, data, user_key, at, sub, aggregated=True)
            for sub, (user_key, data) in enumerate(pairs)
        )
        shard.records.extend(users)
        return users

    def split(self, shard_id: str, at: int | None = None) -> tuple[str, str]:
        """Close a shard and open two children; return their ids.

        ``at``: the first hash of the second child (SplitShard: NewStartingHashKey); None: the children get equal halves.
        Raises ValueError for a closed shard, or when a child would be empty (Kinesis refuses that too).
        """
        parent = self._open(shard_id)
        first, last = parent.key_range
        start = (first + last) // 2 + 1 if at is None else at
        if not first < start <= last:
            raise ValueError(
                f"{shard_id} cannot be split at {start}: it has the hashes from {first} to {last}"
            )
        parent.closed = True
        left = self._add_shard((shard_id,), KeyRange(first, start - 1))
        return left, self._add_shard((shard_id,), KeyRange(start, last))

    def merge(self, shard_id: str, adjacent_id: str) -> str:
        """Close two adjacent shards and open their child; return its id.

        Raises ValueError when one is closed or they are not adjacent (Kinesis refuses that too).
        """
        low, high = sorted((self._open(shard_id), self._open(adjacent_id)), key=lambda shard: shard.key_range)
        if low.key_range.last + 1 != high.key_range.first:
            raise ValueError(f"{shard_id} and {adjacent_id} are not adjacent")
        low.closed = high.closed = True
        return self._add_shard((shard_id, adjacent_id), KeyRange(low.key_range.first, high.key_range.last))

    def adjacent_pairs(self) -> tuple[tuple[str, str], ...]:
        """Return the pairs of open shards that could be merged, by hash range."""
        live = sorted((self.shards[name] for name in self.open_shards), key=lambda shard: shard.key_range)
        return tuple((low.id, high.id) for low, high in itertools.pairwise(live))

    def end(self) -> None:
        """Close every shard without children: the stream is over."""
        for shard in self.shards.values():
            shard.closed = True

    def waiting(self, shard_id: str) -> bool:
        """Whether a shard has records that cannot be read yet."""
        records = self.shards[shard_id].records
        return self.tip_ms is not None and bool(records) and records[-1].arrival_ms > self.tip_ms()

    def read(
        self, shard_id: str, after: Place, limit: int, *, raw: bool = False
    ) -> tuple[Sequence[StreamRecord], int]:
        """Return up to ``limit`` stored records after a place, and how many ms they are behind the tip.

        An aggregate counts as one and is never cut, but records of it at or before the place are left out (KCL).
        ``raw``: aggregates stay whole. The lag is 0 when nothing follows.
        """
        shard = self.shards[shard_id]
        records = shard.raw if raw else shard.records
        if self.tip_ms is not None:
            records = records[: bisect.bisect_right(records, self.tip_ms(), key=lambda one: one.arrival_ms)]
        low = 0
        if after.number.isdecimal():
            low = bisect.bisect_right(records, (int(after.number), after.sub), key=lambda one: one.order)
        high = min(low + limit, len(records))
        while (
            low < high < len(records) and records[high].sequence_number == records[high - 1].sequence_number
        ):
            high += 1
        if high >= len(records):
            return records[low:], 0
        return records[low:high], max(0, records[-1].arrival_ms - records[high - 1].arrival_ms)

    def _place(
        self, partition_key: str | None, shard_id: str | None, arrival_ms: int | None
    ) -> tuple[HashRange, str, int]:
        """Return the shard that takes a record, the record's sequence number, and when it arrives."""
        if shard_id is not None:
            shard = self._open(shard_id)
        elif partition_key is None:
            raise ValueError("a record without a partition key needs a shard_id")
        else:
            hashed = hash_of(key_bytes(partition_key))
            shard = next(one for one in self.shards.values() if not one.closed and hashed in one.key_range)
        self._next_number += self._random.randint(1, _STEP)
        self._now_ms = self._now_ms + 1 if arrival_ms is None else max(self._now_ms, arrival_ms)
        return shard, str(self._next_number), self._now_ms if arrival_ms is None else arrival_ms

    def _open(self, shard_id: str) -> HashRange:
        shard = self.shards[shard_id]
        if shard.closed:
            raise ValueError(f"{shard_id} is closed")
        return shard

    def _add_shard(self, parents: tuple[str, ...], key_range: KeyRange) -> str:
        shard_id = f"shardId-{len(self.shards):012d}"
        self.shards[shard_id] = HashRange(shard_id, parents, key_range)
        return shard_id


_BELOW_ALL: Final = {"AT_TIMESTAMP": -3, "TRIM_HORIZON": -2, "LATEST": -1}


class JavaThrow(Exception):
    """An exception on the Java side, by its simple class name."""

    def __init__(self, simple_name: str, why: str) -> None:
        super().__init__(f"{simple_name}: {why}")
        self.simple_name = simple_name


class WorkerMistake(JavaThrow):
    """Thrown because of what the worker asked, not because of the lease table's state."""


class Place(NamedTuple):
    """KCL's ExtendedSequenceNumber: digits or a sentinel, and a sub-sequence number. Equal when the texts are."""

    number: str
    sub: int = 0

    def order(self) -> tuple[int, int, int]:
        """Return a key that compares as the Java does: sentinels below digits, SHARD_END above.

        Raises WorkerMistake (IllegalArgumentException) for text that is neither.
        """
        if self.number == "SHARD_END":
            return (1, 0, 0)
        if self.number in _BELOW_ALL:
            return (0, _BELOW_ALL[self.number], self.sub)
        if not self.number.isdecimal():
            raise WorkerMistake("IllegalArgumentException", f"neither digits nor a sentinel: {self.number!r}")
        return (0, int(self.number), self.sub)

    def __str__(self) -> str:
        """Return the number, with ``/sub`` where there is one."""
        return f"{self.number}/{self.sub}" if self.sub else self.number


TRIM_HORIZON: Final = Place("TRIM_HORIZON")
SHARD_END: Final = Place("SHARD_END")


class CheckpointRange:
    """What may be checkpointed now: between the last checkpoint and the last record delivered (KCL 3.1.3)."""

    def __init__(self, initial: Place, store: Callable[[Place], None]) -> None:
        """Begin at ``initial``; ``store`` writes to the lease table and raises JavaThrow when it cannot."""
        self.last = initial
        self.largest = initial
        self._store = store
        self._last_record: Place | None = None

    def delivered(self, place: Place) -> None:
        """A record at ``place`` goes to the worker with the next message."""
        if place.order() > self.largest.order():
            self.largest = place

    def reach_end(self) -> None:
        """The shard is read to its end: SHARD_END may be stored, and the last record's place stands for it."""
        self._last_record = self.largest
        self.largest = SHARD_END

    def checkpoint(self, number: str | None, sub: int | None) -> None:
        """Checkpoint as the worker asked; a number of None means everything delivered.

        Raises WorkerMistake (IllegalArgumentException) outside the permitted range, JavaThrow when the lease table
        refuses.
        """
        wanted = self.largest
        if number is not None:
            wanted = Place(number, sub or 0)
            if wanted.sub < 0 or not self.last.order() <= wanted.order() <= self.largest.order():
                raise WorkerMistake(
                    "IllegalArgumentException", f"{wanted} is not between {self.last} and {self.largest}"
                )
        # The Java compares what was asked, not what would be stored: asking for the last record at the shard's end
        # stores nothing, and reports success, when exactly that record had been checkpointed before.
        if wanted == self.last:
            return
        stored = SHARD_END if wanted == self._last_record else wanted
        self._store(stored)
        self.last = stored


@dataclass(slots=True)
class _Lease:
    place: Place = TRIM_HORIZON
    token: int = 0
    """Changes with the owner: a checkpoint under an old token is refused."""
    elsewhere: bool = False
    """Another worker owns it."""
    leaving: bool = False
    """It is being handed over gracefully: ``shutdownRequested`` comes first."""


class LeaseTable:
    """Checkpoints and owners of one application's shards; survives every restart of a worker."""

    def __init__(self, *, seed: int = 0, throttle: float = 0.0) -> None:
        """``throttle`` is the probability (0 to 1) that a checkpoint is refused with ThrottlingException."""
        self.throttle = throttle
        self._random = random.Random(seed)  # noqa: S311  # faults that repeat, not secrets
        self._leases: defaultdict[str, _Lease] = defaultdict(_Lease)
        self._refusals: dict[str, list[str]] = {}
        self.refused: Counter[str] = Counter()
        """Checkpoints refused so far, by Java exception."""

    @property
    def checkpoints(self) -> dict[str, Place]:
        """Return the stored checkpoint of every shard that was ever leased."""
        return {shard_id: lease.place for shard_id, lease in self._leases.items() if lease.token}

    def place(self, shard_id: str) -> Place:
        """Return the shard's checkpoint; TRIM_HORIZON before the first one."""
        return self._leases[shard_id].place

    def ended(self, shard_id: str) -> bool:
        """Return whether the shard's end was checkpointed."""
        return self._leases[shard_id].place == SHARD_END

    def acquire(self, shard_id: str) -> int:
        """Take (or renew after a restart) the lease; return the token that checkpoints must carry."""
        lease = self._leases[shard_id]
        lease.token += 1
        lease.elsewhere = lease.leaving = False
        return lease.token

    def lose(self, shard_id: str, *, graceful: bool = False) -> None:
        """Give the lease to another worker: at once, or after a ``shutdownRequested``."""
        lease = self._leases[shard_id]
        if graceful:
            lease.leaving = True
            return
        lease.token += 1
        lease.elsewhere = True
        lease.leaving = False

    def grant(self, shard_id: str) -> None:
        """Give the lease back to this application's worker."""
        lease = self._leases[shard_id]
        lease.elsewhere = lease.leaving = False

    def elsewhere(self, shard_id: str) -> bool:
        """Return whether another worker owns the lease."""
        return self._leases[shard_id].elsewhere

    def leaving(self, shard_id: str) -> bool:
        """Return whether the lease is about to be handed over."""
        return self._leases[shard_id].leaving

    def refuse(self, shard_id: str, *, times: int = 1, error: str = "ThrottlingException") -> None:
        """Refuse the shard's next ``times`` checkpoints with ``error``, a Java exception's simple name."""
        self._refusals.setdefault(shard_id, []).extend([error] * times)

    def store(self, shard_id: str, token: int, place: Place) -> None:
        """Store a checkpoint. Raises JavaThrow: ShutdownException without the lease, or an injected refusal."""
        lease = self._leases[shard_id]
        if lease.elsewhere or lease.token != token:
            refusal = JavaThrow("ShutdownException", "another worker holds the lease")
        elif refusals := self._refusals.get(shard_id):
            refusal = JavaThrow(refusals.pop(0), "injected")
        elif self._random.random() < self.throttle:
            refusal = JavaThrow("ThrottlingException", "injected by probability")
        else:
            lease.place = place
            return
        self.refused[refusal.simple_name] += 1
        raise refusal
