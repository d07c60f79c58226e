"""The last hour of a function of a running server, for its page: one point for each ten seconds of status documents."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

import msgspec

from mldserver.status_document import SECONDS, FunctionStatus, Histogram, Status, Totals

__all__ = ["History", "Point", "quantile"]

POINT_MS: Final = 10_000
"""Between two points."""
POINTS: Final = 360
"""An hour of points."""


class Point(msgspec.Struct, frozen=True, gc=False):
    """What a function did in the ten seconds before an instant. Names end in their unit, as in ``Status``."""

    at_ms: int
    ready: bool
    """Whether the function was ready in every document."""
    records_per_second: float
    rows_per_second: float
    bytes_per_second: float
    median_seconds: float | None
    """From a batch's last byte to its answer; None without batches."""
    p99_seconds: float | None
    lag_ms: int | None
    """The largest lag of any shard in any document."""
    watermark_ms: int | None
    dead_letters: int
    loop_lag_seconds: float
    resident_bytes: int


@dataclass(slots=True)
class History:
    """The points of the last hour, in bounded memory. ``_previous`` is the server and the function at the last point."""

    _points: deque[Point] = field(default_factory=lambda: deque(maxlen=POINTS))
    _previous: tuple[Status, FunctionStatus] | None = None
    _ready: bool = True
    _lag_ms: int | None = None
    _loop_lag_seconds: float = 0.0

    def add(self, status: Status, function: FunctionStatus) -> None:
        """Add the status of this second: of the server and of the function.

        After ten seconds, add a point: rates since the last one, and the worst values.
        """
        if (
            self._previous is None
            or status.started_ms != self._previous[0].started_ms
            or status.taken_ms < self._previous[0].taken_ms
        ):
            # The clock was set back, or another server answers: no rate can be computed, and the hour starts again.
            self._points.clear()
        else:
            lags = (self._lag_ms, *(shard.lag_ms for shard in function.shards))
            self._ready &= function.ready
            self._lag_ms = max((lag for lag in lags if lag is not None), default=None)
            self._loop_lag_seconds = max(self._loop_lag_seconds, status.loop_lag_seconds)
            ago, previous = self._previous
            if status.taken_ms - ago.taken_ms < POINT_MS:
                return
            seconds = (status.taken_ms - ago.taken_ms) / 1000
            before, now = previous.totals, function.totals
            if now.batches < before.batches or now.records < before.records:
                before = Totals()  # the function began again
            self._points.append(
                Point(
                    at_ms=status.taken_ms,
                    ready=self._ready,
                    records_per_second=round((now.records - before.records) / seconds, 1),
                    rows_per_second=round((now.rows - before.rows) / seconds, 1),
                    bytes_per_second=round((now.bytes - before.bytes) / seconds, 1),
                    median_seconds=quantile(0.5, previous.batch_seconds, function.batch_seconds),
                    p99_seconds=quantile(0.99, previous.batch_seconds, function.batch_seconds),
                    lag_ms=self._lag_ms,
                    watermark_ms=function.watermark.at_ms,
                    dead_letters=now.dead_letters - before.dead_letters,
                    loop_lag_seconds=round(self._loop_lag_seconds, 4),
                    resident_bytes=status.resident_bytes,
                )
            )
        self._previous = status, function
        self._ready, self._lag_ms, self._loop_lag_seconds = True, None, 0.0

    def json(self) -> bytes:
        """Return the points as columns, the oldest first: a list for each field of ``Point``."""
        return msgspec.json.encode(
            {name: [getattr(point, name) for point in self._points] for name in Point.__struct_fields__}
        )


def quantile(share: float, before: Histogram, now: Histogram) -> float | None:
    """Return the quantile, in seconds, of the durations counted between two histograms; None without durations.

    Durations count as evenly spread between two bounds.
    """
    # Counts do not fall; a count that does is taken as unchanged.
    counts = [max(0, late - early) for early, late in zip(before.counts, now.counts, strict=True)]
    remaining = share * sum(counts)
    if not remaining:
        return None
    lower = 0.0
    for upper, count in zip(SECONDS, counts, strict=False):
        if count >= remaining:
            return round(lower + (upper - lower) * remaining / count, 6)
        remaining -= count
        lower = upper
    # The quantile is longer than every bound.
    return lower
