"""From a line to fresh records, and from rows back to a batch's outcome. Synchronous, no user code runs here."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from mldserver.protocol.codec import decode_records
from mldserver.runtime.base import BatchOutline, DeadLetter
from mldserver.runtime.failure import Dead, Failure, describe

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mldserver.records import Record
    from mldserver.runtime.base import Delivery
    from mldserver.runtime.rows import Built

__all__ = ["Taken", "damaged", "dead_letter", "join_rows", "take"]


@dataclass(frozen=True, slots=True)
class Taken:
    """A decoded batch."""

    fresh: Sequence[Record]
    """The records that the handler is to see, in shard order: those after ``Delivery.after``."""
    outline: BatchOutline
    times_ms: Any
    """For each fresh record its ``_time`` (numpy, int64): the running maximum of arrival times in the message."""


def take(delivery: Delivery) -> Taken:
    """Decode a line and drop what was accepted earlier. Raises PeerError for a line that is no batch."""
    batch = decode_records(delivery.line, version=delivery.version, shard_id=delivery.shard_id)
    records = batch.records
    received = delivery.received_ms
    duplicates = 0
    if delivery.after is not None:
        duplicates = bisect_right(records, delivery.after, key=lambda record: record.sequence)
    arrivals = [received if record.arrival_ms is None else record.arrival_ms for record in records]
    times_ms = np.maximum.accumulate(np.array(arrivals, np.int64))
    outline = BatchOutline(
        records=len(records),
        duplicates=duplicates,
        first=records[0].sequence if records else None,
        last=records[-1].sequence if records else None,
        latest_arrival_ms=int(times_ms[-1]) if records else None,
        millis_behind_latest=batch.millis_behind_latest,
    )
    return Taken(records[duplicates:], outline, times_ms[duplicates:])


def damaged(records: Sequence[Record]) -> dict[int, Failure]:
    """Return the records whose base64 is damaged, by index: a table of the others can be made."""
    faults = {}
    for index, record in enumerate(records):
        try:
            record.data  # noqa: B018  # reading it decodes it
        except ValueError as error:
            faults[index] = Failure(describe(error).error)
    return faults


def join_rows(parts: Sequence[Built], taken: Taken, *, shard_id: str) -> Any:
    """Return the rows of all calls for a batch as one table in shard order, with META_COLUMNS but ``_clock``.

    None when there are no rows.
    """
    parts = [part for part in parts if part.table is not None]
    if not parts:
        return None
    index = np.concatenate([np.array(part.records, np.int64) for part in parts])
    table = pa.concat_tables([part.table for part in parts])
    if np.any(index[1:] < index[:-1]):
        order = np.argsort(index, kind="stable")
        index, table = index[order], table.take(pa.array(order))
    records = [taken.fresh[place] for place in index.tolist()]
    meta = {
        "_time": pa.array(taken.times_ms[index], pa.int64()),
        "_shard": pa.repeat(pa.scalar(shard_id, pa.string()), len(records)),
        "_sequence": pa.array([record.sequence_text for record in records], pa.string()),
        "_sub_sequence": pa.array([record.sub_sequence_number for record in records], pa.int64()),
        "_arrival": pa.array([record.arrival_ms for record in records], pa.timestamp("ms", tz="UTC")),
    }
    for name, column in meta.items():
        table = table.append_column(name, column)
    return table.combine_chunks()


def dead_letter(record: Record, dead: Dead, *, handler: str, at_ms: int) -> DeadLetter:
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
        attempts=dead.attempts,
        error=dead.failure.error,
        traceback=dead.failure.traceback,
        handler=handler,
        at_ms=at_ms,
    )
