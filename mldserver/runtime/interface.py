"""What the server asks of a runtime: the place where handlers run.

A runtime takes batches as their source has them (``Payload``) and gives rows back as Arrow tables. It may do so
inside the server's process (``inline.py``) or in worker processes; callers of this interface see no difference, so
all values that cross it can be encoded. Values made for each batch are msgspec structs: a frozen dataclass takes five
times as long to make.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Mapping
from typing import Any, Final, Protocol, TypeAlias

import msgspec

from mldserver.effects import NOTHING, Effects
from mldserver.errors import InternalError
from mldserver.handler.queries import QueryResult
from mldserver.protocol.batch_decoder import BatchDecoder
from mldserver.protocol.messages import Line, Version
from mldserver.protocol.wire_records import DecodedBatch
from mldserver.records import Hook, Record, Sequence, Shard
from mldserver.stores import SnapshotSource, StoreSize

META_COLUMNS = ("_time", "_clock", "_shard", "_sequence", "_sub_sequence", "_arrival")
"""Columns that every row carries in addition to the handler's.

``_time`` int64, effective time in ms; ``_clock`` int64, the pipeline's merge order; ``_shard`` string; ``_sequence``
string (decimal); ``_sub_sequence`` int64; ``_arrival`` timestamp[ms, UTC], null in V1. A runtime fills all but
``_clock``; its ``_time`` is the running maximum of arrival times inside the batch (every record counts, with or
without rows; the time of receipt where the daemon gives none), which the coordinator raises to the shard's.
"""


class Payload(Protocol):
    """The records of one batch, in the form in which their source has them."""

    @property
    def size(self) -> int:
        """Size in bytes, an estimate of the time to decode the batch and to build its rows."""

    def decode(self, decoder: BatchDecoder) -> DecodedBatch:
        """Return the records, in shard order. ``decoder`` belongs to the shard. Raises PeerError."""

    def packed(self) -> tuple[int, Line]:
        """Return the payload's form and bytes, which ``unpacked`` reads in another process."""


class MLDLine(msgspec.Struct, frozen=True):
    """A ``processRecords`` message as it came, without its line end."""

    line: Line
    version: Version

    @property
    def size(self) -> int:
        """The line's length."""
        return len(self.line)

    def decode(self, decoder: BatchDecoder) -> DecodedBatch:
        """Decode the line. Raises PeerError when it is not a valid message."""
        return decoder.decode(self.line, self.version)

    def packed(self) -> tuple[int, Line]:
        """Return the line itself."""
        return int(self.version), self.line


_RECORDS, _TIMERS = 0, -1
"""The forms of ``Records`` and ``DueTimers``. The form of a line is its protocol version."""


class Records(msgspec.Struct, frozen=True):
    """Decoded records of one shard; the caller must pass them in the shard's order."""

    records: list[Record]
    millis_behind_latest: int | None = None

    @property
    def size(self) -> int:
        """The payloads' bytes."""
        return sum([len(record.raw_data or b"") for record in self.records])

    def decode(self, _decoder: BatchDecoder) -> DecodedBatch:
        """Return the records."""
        return DecodedBatch(self.records, self.millis_behind_latest)

    def packed(self) -> tuple[int, Line]:
        """Return the records in MessagePack, without their shard."""
        plain = [
            (each.sequence_text, each.sub_sequence_number, each.raw_data, each.partition_key, each.arrival_ms)
            for each in self.records
        ]
        return _RECORDS, msgspec.msgpack.encode((self.millis_behind_latest, plain))


class TimerFilter(msgspec.Struct, frozen=True):
    """Which timers to cancel: those to which all that is given applies."""

    key: str | None = None
    timer_id: str | None = None
    """``callback``: all timers of this callback; ``callback/name``: those with this id."""
    due_before_ms: int | None = None


class TimerLetter(msgspec.Struct, frozen=True):
    """A dead letter of a timer, to run once more. A timer with its id that is set now stays as it is."""

    key: str
    timer_id: str
    due_ms: int
    payload: bytes
    """In MessagePack, as in ``DeadLetter.data``."""


class DueTimers(msgspec.Struct, frozen=True):
    """Timers of a shard's store to fire, in the order of their due times: a batch whose records are timers.

    The process that has the store chooses them (``TimerTable.due``). A handler without timers cannot have this payload.
    """

    until_ms: int
    """Fire timers that are due at or before this time."""
    limit: int
    """Fire, skip or cancel at most so many."""
    cancel: TimerFilter | None = None
    """Instead of firing timers, cancel those that match, whenever they are due."""
    letters: tuple[TimerLetter, ...] = ()
    """Instead of timers that are set, run these."""

    @property
    def size(self) -> int:
        """An estimate: their number is not known before."""
        return _TIMER_BYTES * max(self.limit, len(self.letters))

    def decode(self, _decoder: BatchDecoder) -> DecodedBatch:
        """Raise InternalError: only a store has the timers."""
        raise InternalError(
            "Timers are due, but the handler has none.",
            did="The timers stay set.",
            advice="Start the server again.",
        )

    def packed(self) -> tuple[int, Line]:
        """Return the request in MessagePack."""
        return _TIMERS, msgspec.msgpack.encode(self)


_TIMER_BYTES: Final = 64


class TimerReport(msgspec.Struct, frozen=True):
    """What a batch did with timers, and what its store holds afterwards."""

    set: int = 0
    """Timers that calls have set, also in place of others."""
    cancelled: int = 0
    """Timers that calls, or a ``TimerFilter``, have cancelled."""
    fired: int = 0
    """Timers whose callback succeeded, or failed for good."""
    skipped: int = 0
    """Timers that were too late for ``max_lateness``."""
    failed: int = 0
    """Timers whose callback failed, and that are set again."""
    lateness: tuple[int, ...] = ()
    """How late first calls were: a count for each of ``base.clock.BOUNDS_MS`` and one more (see ``Durations``). Empty without
    first calls."""
    lateness_sum_ms: int = 0
    pending: int = 0
    """Timers that are set."""
    unknown: int = 0
    """Timers of ``pending`` whose callback the loaded handler does not have: they are held."""
    callbacks: tuple[str, ...] = ()
    """The callbacks of ``pending``."""
    next_due_ms: int | None = None
    """When the first of ``pending`` is due; None without timers. The ledger keeps it."""
    next_call_ms: int | None = None
    """When the first is due whose callback the loaded handler has: nothing fires before."""

    def joined(self, parts: Iterable[TimerReport | None]) -> TimerReport:
        """Return the report of several parts of a batch, of which this is the last."""
        all_ = [part for part in parts if part is not None]
        counts = {
            name: sum(getattr(part, name) for part in all_)
            for name in ("set", "cancelled", "fired", "skipped", "failed", "lateness_sum_ms")
        }
        lateness = tuple(map(sum, zip(*(part.lateness for part in all_ if part.lateness), strict=True)))
        return msgspec.structs.replace(self, **counts, lateness=lateness)


def unpacked(form: int, data: Any, shard_id: str) -> Payload:
    """Return the payload whose form and bytes (or a view of them) came from another process."""
    if form == _TIMERS:
        return msgspec.msgpack.decode(data, type=DueTimers)
    if form != _RECORDS:
        return MLDLine(data, Version(form))
    lag, plain = msgspec.msgpack.decode(data)
    return Records(
        [
            Record(
                shard_id=shard_id,
                sequence_number=number,
                sub_sequence_number=sub,
                data=raw,
                partition_key=key,
                arrival_ms=arrival_ms,
            )
            for number, sub, raw, key, arrival_ms in plain
        ],
        lag,
    )


class Delivery(msgspec.Struct, frozen=True):
    """One batch of a shard on its way to a handler."""

    shard_id: str
    payload: Payload
    received_ms: int
    """When it was complete (server's clock); replaces arrival times that its source does not report. For timers, the civil time of
    the firing."""
    after: Sequence | None
    """Records at or before this sequence were accepted earlier: they are dropped before the handler sees them."""
    part: range | None = None
    """Process only these of the records after ``after``; None: all. The outline covers the whole batch in both
    cases."""
    condemned: str | None = None
    """The error of all records, if they have failed for good and may not reach the handler again."""
    redriven: bool = False
    """The records are dead letters that run once more.

    Records of parked keys run too. A record that fails for good is a dead letter again, whatever the policy says,
    so the batch never raises HandlerHalted.
    """
    number: int | None = None
    """For keyed handlers: how many outcomes of the shard's session the server has accepted, plus one. None: not checked."""
    behind: bool = False
    """Its daemon was answered already, or batches before it are worked on: it may wait a few milliseconds to be handed on
    with others, and does not reach the handler when one before it fails."""


class BatchOutline(msgspec.Struct, frozen=True):
    """What the coordinator must know of a batch in addition to its rows."""

    records: int
    """Records in the message (KPL aggregates counted by their user records), duplicates included."""
    duplicates: int
    """How many of them were at or before ``Delivery.after``."""
    first: Sequence | None
    last: Sequence | None
    """First and last sequence in the message; None when it was empty."""
    latest_arrival_ms: int | None
    """Latest arrival time of its records (time of receipt in V1); None when it was empty."""
    millis_behind_latest: int | None
    """``millisBehindLatest`` of the daemon; None if it sent null or speaks V1."""


class BatchOutcome(msgspec.Struct, frozen=True):
    """The result of a batch: each record has rows, is a dead letter, was skipped, is a duplicate, or gave no row."""

    outline: BatchOutline
    effects: Effects = NOTHING
    attempts: int = 1
    """The most calls that any record of the batch took."""
    skipped: int = 0
    """Records that failed for good and are not kept (``on_failure = skip``)."""
    discarded: int = 0
    """Records that the handler discarded (``Discard``)."""
    keeps_position: bool = False
    """Whether the handler reports its own position: the shard's position moves no further than ``position``."""
    position: Sequence | None = None
    """The last checkpoint of such a handler, perhaps from an earlier batch; None: none yet."""
    owes: bool = False
    """Whether the handler has records that it has not checkpointed. Only the instance that has them can finish
    them."""
    timers: TimerReport | None = None
    """For handlers with timers only."""


Begun: TypeAlias = "BatchOutcome | Coroutine[None, None, BatchOutcome] | asyncio.Future[BatchOutcome | Coroutine[None, None, BatchOutcome]]"
"""A batch's outcome, or an awaitable for it."""


async def outcome_of(begun: Begun) -> BatchOutcome:
    """Wait for the outcome of a batch that was begun."""
    while not isinstance(begun, BatchOutcome):
        begun = await begun
    return begun


class Runtime(Protocol):
    """Runs one pipeline's handler. Calls for one shard never overlap; calls for different shards may."""

    @property
    def trouble(self) -> str | None:
        """What an operator should look at, as a clause for ``server.unready``; None while everything works."""

    def state_sizes(self) -> tuple[StoreSize, ...]:
        """Return how much keyed state the handler's processes hold, the largest stores first (``stores.largest``)."""

    async def start(self) -> None:
        """Prepare to open shards. Raises HandlerError when the handler cannot be loaded."""

    async def run(self) -> None:
        """Run background work, after ``start`` and until cancelled."""

    async def open(self, shard: Shard, snapshot: SnapshotSource | None = None) -> None:
        """Make the shard's handler (a fresh instance for classes) and run its ``initialize`` hook.

        ``snapshot`` reads the shard's store, for keyed handlers (``HandlerSpec.keyed``). The runtime calls it each time
        that it must load the store, also after this call. None: the store is empty.

        Opening a shard again replaces what was there. Failures are retried for as long as the caller waits, but
        under the policy ``halt``: then HandlerHalted.
        """

    def begin(self, delivery: Delivery) -> Begun:
        """Begin ``process``, as far as possible without waiting; return its outcome or an awaitable.

        A future completes by itself, perhaps with a coroutine; a coroutine must be awaited (``outcome_of`` does
        both). They raise as ``process`` does, and so does this. To abandon the rest, cancel the future or close the
        coroutine.
        """

    async def process(self, delivery: Delivery) -> BatchOutcome:
        """Decode a batch and run the handler over its records.

        Also fires timers (``DueTimers``), of which none stops the shard; it may fire fewer than are due. A portion whose timers
        end their process comes back with one.

        Raises PeerError when its payload is not a valid message (the handler was not called), HandlerHalted when a
        record failed for good under the policy ``halt``, HandlerLost when a handler that ``owes`` is gone with its
        process: its records must be delivered again, so the connection has to be closed. No other error of the
        handler leaves it.
        """

    async def notify(self, shard_id: str, hook: Hook) -> Sequence | None:
        """Run a life-cycle hook, if the handler has it. Its failures are retried, then logged, never raised.

        Raises HandlerLost as ``process`` does, unless the lease is lost anyway.

        Returns what a handler that keeps its position (``BatchOutcome``) has checkpointed by then; None for others.
        """

    async def park(self, shard_id: str, keys: Mapping[str, Sequence]) -> None:
        """Hold back the later records of partition keys, under ``on_key_failure = park``; else do nothing.

        ``keys``: those of an open shard that have dead letters from earlier, each with the sequence of the first: what
        is stored when the shard is opened. Their records become dead letters without a call; so do, from then on, those
        behind each dead letter of a batch, of which the runtime takes note itself.
        """

    async def unpark(self, shard_id: str, key: str) -> None:
        """Process the later records of a key again, from the next batch on: its dead letters are gone."""

    async def fill_lookup(self, name: str, result: QueryResult) -> None:
        """Replace the table of a lookup in each process of the handler, present and future. The result's file is closed.

        Raises QueryFailed if the result has no unique key.
        """

    async def forget(self, shard_id: str) -> None:
        """Drop the shard's handler state: its connection is gone, and no newer one has opened the shard."""

    async def close(self) -> None:
        """Stop; no call may follow."""
