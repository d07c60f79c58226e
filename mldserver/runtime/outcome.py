"""From a payload to fresh records, and from rows back to a batch's outcome. Synchronous, no user code runs here."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import structlog

from mldserver.effects import NOTHING, Effects
from mldserver.errors import HandlerHalted, InternalError, MldserverError
from mldserver.handler.failure import Failure, describe
from mldserver.protocol.batch_decoder import BatchDecoder
from mldserver.records import DeadLetter, Record
from mldserver.runtime.interface import BatchOutline, Delivery, DueTimers
from mldserver.runtime.keyed_state import KeyedState
from mldserver.runtime.plan import End
from mldserver.runtime.rows import Built
from mldserver.runtime.timer_table import DueTimer
from mldserver.stores import TimerEntry

log = structlog.get_logger("mldserver")


_arrival_ms: Final = attrgetter("arrival_ms")


class FreshBatch(msgspec.Struct, frozen=True):
    """A decoded batch."""

    fresh: Sequence[Record]
    """The records for the handler, in shard order: those after ``Delivery.after``."""
    outline: BatchOutline
    arrivals_ms: Sequence[int]
    """The arrival times of all records of the message, including duplicates, or the time of receipt for records
    without one."""

    def times_ms(self) -> Any:
        """Return for each fresh record its ``_time`` (numpy, int64): the running maximum of the arrival times."""
        times_ms = np.maximum.accumulate(np.array(self.arrivals_ms, np.int64))
        return times_ms[len(times_ms) - len(self.fresh) :]


def decode_batch(delivery: Delivery, decoder: BatchDecoder) -> FreshBatch:
    """Decode a batch and drop what was accepted earlier.

    Raises PeerError for an invalid payload, InternalError for an unexpected failure of the decoder.
    """
    try:
        batch = delivery.payload.decode(decoder)
        records = batch.records
        if not records:
            return FreshBatch((), BatchOutline(0, 0, None, None, None, batch.millis_behind_latest), ())
        first, after = records[0].sequence, delivery.after
        duplicates = 0
        if after is not None and first <= after:
            duplicates = bisect_right(records, after, key=lambda record: record.sequence)
        arrivals: list[Any] = list(map(_arrival_ms, records))
        try:
            latest_ms = max(arrivals)
        except TypeError:
            # A record has no arrival time, which only V1 messages allow. Catching is cheaper than searching each batch.
            latest_ms = None
        if latest_ms is None:
            arrivals = [delivery.received_ms if arrival is None else arrival for arrival in arrivals]
            latest_ms = max(arrivals)
        outline = BatchOutline(
            records=len(records),
            duplicates=duplicates,
            first=first,
            last=first if len(records) == 1 else records[-1].sequence,
            latest_arrival_ms=latest_ms,
            millis_behind_latest=batch.millis_behind_latest,
        )
    except MldserverError:
        raise
    except Exception as error:
        raise InternalError(f"A batch cannot be decoded: {describe(error).error}.") from error
    return FreshBatch(records[duplicates:] if duplicates else records, outline, arrivals)


def due_batch(delivery: Delivery, due: DueTimers, store: KeyedState) -> FreshBatch:
    """Return the timers of a store that a delivery asks for, in the place of records; remove what it asks to cancel."""
    shard_id, received_ms, clock_ms = (
        delivery.shard_id,
        delivery.received_ms,
        store.clocks.get(delivery.shard_id, 0),
    )
    asked = [(each.key, each.timer_id, TimerEntry(each.due_ms, each.payload)) for each in due.letters]
    if store.timers is not None and due.cancel is not None:
        store.timers.cancel(due.cancel, due.limit)
    elif store.timers is not None and not asked:
        asked = store.timers.due(due.until_ms, due.limit)
    timers = [
        DueTimer(shard_id, delivery.after, *each, received_ms=received_ms, is_letter=bool(due.letters))
        for each in asked
    ]
    return FreshBatch(
        timers, BatchOutline(0, 0, None, None, None, None), [max(clock_ms, timer.due_ms) for timer in timers]
    )


def decode_failures(records: Sequence[Record]) -> dict[int, Failure]:
    """Return a Failure for each record whose base64 is damaged, by the record's index; empty if all can be decoded.

    The traceback is blank: it would show only this server's code, which is not at fault.
    """
    failures = {}
    for index, record in enumerate(records):
        try:
            record.data  # noqa: B018  # reading it decodes it
        except ValueError as error:
            failures[index] = msgspec.structs.replace(describe(error), traceback="", frames="")
    return failures


def join_rows(parts: Sequence[Built], decoded: FreshBatch, *, shard_id: str) -> Effects:
    """Return the rows of all calls for a batch as one table in shard order; NOTHING if no call gave rows.

    Adds META_COLUMNS except ``_clock``, which the coordinator's flush adds because it orders the rows of all shards.
    """
    parts = [part for part in parts if part.table is not None]
    if not parts:
        return NOTHING
    # For each row, the index of its record in ``decoded.fresh``.
    record_index = np.concatenate([np.array(part.records, np.int64) for part in parts])
    table = pa.concat_tables([part.table for part in parts])
    in_shard_order = np.all(record_index[:-1] <= record_index[1:])
    if not in_shard_order:
        order = np.argsort(record_index, kind="stable")  # stable: the rows of one record keep their order
        record_index, table = record_index[order], table.take(pa.array(order))
    records = [decoded.fresh[index] for index in record_index.tolist()]
    meta = {
        "_time": pa.array(decoded.times_ms()[record_index], pa.int64()),
        "_shard": pa.repeat(pa.scalar(shard_id, pa.string()), len(records)),
        "_sequence": pa.array([record.sequence_text for record in records], pa.string()),
        "_sub_sequence": pa.array([record.sub_sequence_number for record in records], pa.int64()),
        "_arrival": pa.array([record.arrival_ms for record in records], pa.timestamp("ms", tz="UTC")),
    }
    for name, column in meta.items():
        table = table.append_column(name, column)
    return Effects(table.combine_chunks())


def dead_letter(record: Record, end: End, *, handler: str, version: str, at_ms: int) -> DeadLetter:
    """Return a record that failed for good; damaged base64 is kept as it came."""
    try:
        data = record.data
    except ValueError:
        data = str(record.raw_data).encode()
    return DeadLetter(
        shard_id=record.shard_id,
        sequence=record.sequence,
        partition_key=record.partition_key,
        data=data,
        arrival_ms=record.arrival_ms,
        attempts=end.attempts,
        error=end.failure.error,
        traceback=end.failure.traceback,
        handler=handler,
        at_ms=at_ms,
        parked_behind=end.behind,
        handler_version=version,
        timer=record.timer_id if isinstance(record, DueTimer) else None,
        due_ms=record.due_ms if isinstance(record, DueTimer) else None,
    )


def halted(
    failure: Failure,
    hook: str,
    *,
    shard: str,
    handler: str,
    attempts: int,
    messages: bool,
    sequence: str | None = None,
) -> HandlerHalted:
    """Return the error that stops a shard, and log it.

    A record failed for good, or, without ``sequence``, ``initialize`` did. ``messages``: as in ``Failure.logged``.
    """
    where: dict[str, Any] = {"shard": shard, "handler": handler, "hook": hook}
    if sequence is not None:
        where["sequence"] = sequence
    logged_fields = failure.logged(messages=messages)
    what = logged_fields.pop("what")
    where |= logged_fields
    log.critical("handler.halted", **where, what=what, attempts=attempts)
    return HandlerHalted(
        f"{hook} failed for good: {what}.",
        did="The shard is not opened."
        if sequence is None
        else "The shard is stopped; nothing after this record was accepted.",
        advice="Mend the handler and start again"
        + ("." if sequence is None else ", or let such records become dead letters."),
        **where,
        attempts=attempts,
    )
