"""Windows: how rows are cut, which are open, which may close. A synchronous core without event loop or I/O.

Two kinds are declared by handlers:

* ``tumbling(size, on=, lateness=, disorder=)``: half-open event-time intervals, aligned to the Unix epoch.
* ``batches(max_rows=, max_age=)``: bounded runs of rows in merge order, for pipelines without event time.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

__all__ = [
    "Batches",
    "Tumbling",
    "Window",
    "WindowSpec",
    "batches",
    "duration_ms",
    "tumbling",
]

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_UNITS_MS = {
    "ms": 1,
    "millisecond": 1,
    "s": 1000,
    "second": 1000,
    "m": 60_000,
    "min": 60_000,
    "minute": 60_000,
    "h": 3_600_000,
    "hour": 3_600_000,
    "d": 86_400_000,
    "day": 86_400_000,
    "w": 604_800_000,
    "week": 604_800_000,
}
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+?)s?\s*", re.IGNORECASE)


def duration_ms(value: str | float | timedelta) -> int:
    """Return a duration in milliseconds from ``"10 minutes"``, ``"500ms"``, seconds, or a timedelta.

    Raises ValueError for text that is no duration, and for negative ones.
    """
    if isinstance(value, timedelta):
        ms = round(value / timedelta(milliseconds=1))
    elif isinstance(value, str):
        match = _DURATION.fullmatch(value)
        unit = (
            _UNITS_MS.get("ms" if value.strip().lower().endswith("ms") else match[2].lower())
            if match
            else None
        )
        if match is None or unit is None:
            raise ValueError(
                f"not a duration: {value!r} (write for example '10 minutes', '500 ms' or '1 hour')"
            )
        ms = round(float(match[1]) * unit)
    else:
        ms = round(value * 1000)
    if ms < 0:
        raise ValueError(f"a duration cannot be negative: {value!r}")
    return ms


@dataclass(frozen=True, slots=True)
class Tumbling:
    """Half-open intervals of event time, aligned to the Unix epoch."""

    size_ms: int
    on: str | None = None
    """The TIMESTAMP column that holds the event time; None: the arrival time."""
    lateness_ms: int = 0
    """How long after its end a window stays open."""
    disorder_ms: int = 0
    """How far behind the latest event time of its shard a row may come without counting as late."""


@dataclass(frozen=True, slots=True)
class Batches:
    """Bounded runs of rows, in merge order."""

    max_rows: int
    max_age_ms: int


WindowSpec = Tumbling | Batches


def tumbling(
    size: str | float | timedelta,
    *,
    on: str | None = None,
    lateness: str | float | timedelta = 0,
    disorder: str | float | timedelta = 0,
) -> Tumbling:
    """Cut rows into event-time intervals of ``size``, aligned to the Unix epoch.

    Durations are text (``"1 hour"``), seconds or timedeltas. Raises ValueError for what is none.
    """
    size_ms = duration_ms(size)
    if size_ms == 0:
        raise ValueError("a window needs a size above zero")
    return Tumbling(size_ms, on, duration_ms(lateness), duration_ms(disorder))


def batches(*, max_rows: int = 1_000_000, max_age: str | float | timedelta = "1 minute") -> Batches:
    """Cut rows into runs of at most ``max_rows`` rows, none open for longer than ``max_age``.

    Raises ValueError for impossible bounds.
    """
    if max_rows < 1:
        raise ValueError("max_rows must be at least 1")
    return Batches(max_rows, duration_ms(max_age))


@dataclass(frozen=True, slots=True)
class Window:
    """One window, as ``on_window`` sees it."""

    id: str
    """Unique in its pipeline and safe as a directory name, e.g. ``2013-01-01T10-00-00Z`` or ``batch-000000000007``."""
    start: datetime | None
    """First instant that belongs to it (aware, UTC); None for ``batches``."""
    end: datetime | None
    """First instant after it; None for ``batches``."""
    revision: int = 1
    """1 for the first output of a window; higher when it is computed again."""
    pipeline: str = ""


def tumbling_id(start_ms: int) -> str:
    """Return the id of the tumbling window that starts at ``start_ms``: sortable, and safe in any file system."""
    at = _EPOCH + timedelta(milliseconds=start_ms)
    fraction = f".{start_ms % 1000:03d}" if start_ms % 1000 else ""
    return f"{at:%Y-%m-%dT%H-%M-%S}{fraction}Z"
