"""Batch outcomes as a runtime would give them, for the coordinator's tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from mldserver.effects import Effects
from mldserver.records import DeadLetter, Sequence
from mldserver.runtime.interface import BatchOutcome, BatchOutline


def outcome(
    shard: str,
    records: list[tuple[int, int]],
    *,
    after: Sequence | None = None,
    rows: list[int] | None = None,
    columns: dict[str, Any] | None = None,
    letters: list[DeadLetter] | None = None,
    lag_ms: int | None = 0,
) -> BatchOutcome:
    """Return what becomes of ``records``, pairs of sequence number and arrival time (ms).

    ``after``: those at or before it are duplicates. ``rows``: the sequence numbers that make a row (default: all).
    ``columns``: the handler's own columns, one value a row; default is one column ``value`` with the sequence number.
    """
    times = np.maximum.accumulate(np.array([ms for _, ms in records], np.int64)) if records else []
    fresh = [
        (number, ms, time)
        for (number, ms), time in zip(records, times, strict=True)
        if after is None or Sequence(number) > after
    ]
    outline = BatchOutline(
        records=len(records),
        duplicates=len(records) - len(fresh),
        first=Sequence(records[0][0]) if records else None,
        last=Sequence(records[-1][0]) if records else None,
        latest_arrival_ms=max((ms for _, ms in records), default=None),
        millis_behind_latest=lag_ms,
    )
    made = [each for each in fresh if rows is None or each[0] in rows]
    if not made:
        return BatchOutcome(outline, Effects(dead_letters=tuple(letters or ())))
    own = columns or {"value": pa.array([number for number, _, _ in made], pa.int64())}
    table = pa.table(
        {
            **own,
            "_time": pa.array([int(time) for _, _, time in made], pa.int64()),
            "_shard": pa.array([shard] * len(made), pa.string()),
            "_sequence": pa.array([str(number) for number, _, _ in made], pa.string()),
            "_sub_sequence": pa.array([0] * len(made), pa.int64()),
            "_arrival": pa.array([ms for _, ms, _ in made], pa.timestamp("ms", tz="UTC")),
        }
    )
    return BatchOutcome(outline, Effects(table, tuple(letters or ())))


def dead_letter(shard: str, number: int) -> DeadLetter:
    """Return a record that failed for good."""
    return DeadLetter(
        shard, Sequence(number), None, b"payload", 5, 3, "ValueError: no", "Traceback …", "handlers.x", 9
    )
