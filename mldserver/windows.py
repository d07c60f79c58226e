"""Windows, as handlers declare and receive them.

A handler declares one of three kinds:

* ``tumbling(size, on=, lateness=, disorder=, early=)``: half-open event-time intervals, aligned to the Unix epoch.
* ``sliding(size, every=, on=, lateness=, disorder=, early=)``: the same, except that one begins at each ``every``, so that they overlap.
* ``batches(max_rows=, max_age=)``: bounded runs of rows in merge order, for pipelines without event time.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MS = timedelta(milliseconds=1)
_BOUNDS = (datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC))
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
_PER_MS = {"ms": 1, "us": 1_000, "ns": 1_000_000}
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", re.IGNORECASE)
_LONGEST_MS = 2**53

WINDOW_COLUMNS = ("window_start", "window_end")
"""The columns of the output that hold its window's bounds, unless the handler names others (``window_columns``)."""


def duration_ms(value: str | float | timedelta) -> int:
    """Return a duration in milliseconds from ``"10 minutes"``, ``"500ms"``, seconds, or a timedelta.

    Raises ValueError for text that is not a duration, and for durations that are negative or longer than 285,000 years.
    """
    if isinstance(value, timedelta):
        ms: float = value / timedelta(milliseconds=1)
    elif isinstance(value, str):
        match = _DURATION.fullmatch(value)
        name = match[2].lower() if match else ""
        plural = len(name) > 2 and name.endswith("s")  # noqa: PLR2004  # ms, and single letters, have no plural
        unit = _UNITS_MS.get(name[:-1] if plural else name)
        if match is None or unit is None:
            raise ValueError(
                f"not a duration: {value!r} (write for example '10 minutes', '500 ms' or '1 hour')"
            )
        ms = float(match[1]) * unit
    else:
        ms = value * 1000
    if ms < 0:
        raise ValueError(f"a duration cannot be negative: {value!r}")
    if not ms <= _LONGEST_MS:
        raise ValueError(f"a duration cannot be that long: {value!r}")
    return round(ms)


def milliseconds(column: pa.ChunkedArray) -> NDArray[np.int64]:
    """Return a timestamp column of any unit as whole milliseconds, rounded down, also before 1970."""
    ticks: NDArray[np.int64] = column.cast("int64").to_numpy()
    unit = column.type.unit
    return ticks * 1000 if unit == "s" else ticks // _PER_MS[unit]


def counted(count: int, noun: str) -> str:
    """Return a count with its noun, in the plural unless it is 1."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def span_text(ms: int) -> str:
    """Return a duration for people: ``90 min``, ``2 d``."""
    for unit, size in (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("s", 1000)):
        if ms and ms % size == 0:
            return f"{ms // size} {unit}"
    return f"{ms} ms"


_LEAST_EARLY_MS = 1000

MOST_OVERLAPPING = 100
"""Into how many sliding windows a row may go: the ledger lists its segment in each."""


@dataclass(frozen=True, slots=True)
class TimeWindows:
    """Half-open intervals of event time, aligned to the Unix epoch: tumbling windows, or sliding ones."""

    size_ms: int
    on: str | None = None
    """The TIMESTAMP column that holds the event time; None: the arrival time."""
    lateness_ms: int = 0
    """How long after its end a window stays open."""
    disorder_ms: int = 0
    """How far behind the latest event time of its shard a row may come without counting as late."""
    every_ms: int | None = None
    """How often a sliding window begins; None: tumbling windows, each of which begins at the end of the one before.

    The rows between two such times are a *pane*. They belong to all windows that overlap the pane.
    """
    early_ms: int | None = None
    """How often an open window that has new rows is computed; None: windows have no early results."""

    @property
    def pane_ms(self) -> int:
        """The length of a pane; of tumbling windows, their size."""
        return self.every_ms or self.size_ms

    @property
    def panes(self) -> int:
        """How many panes a window has, which is also how many windows have a pane."""
        return self.size_ms // self.pane_ms


@dataclass(frozen=True, slots=True)
class Batches:
    """Bounded runs of rows, in merge order."""

    max_rows: int
    max_age_ms: int


WindowSpec = TimeWindows | Batches


def do_overlap(windows: WindowSpec | None) -> bool:
    """Return whether windows share rows: sliding windows do."""
    return isinstance(windows, TimeWindows) and windows.panes > 1


def tumbling(
    size: str | float | timedelta,
    *,
    on: str | None = None,
    lateness: str | float | timedelta = 0,
    disorder: str | float | timedelta = 0,
    early: str | float | timedelta | None = None,
) -> TimeWindows:
    """Return windows that are event-time intervals of ``size``, aligned to the Unix epoch.

    ``on`` names the TIMESTAMP column of ``schema`` that holds the event time; None: the arrival time. A window stays open
    for ``lateness`` after its end. A row that is at most ``disorder`` behind the latest event time of its shard is not late.
    ``early``: how often an open window is computed that has new rows; None: never.

    A duration is text (``"1 hour"``, ``"500 ms"``), a number of seconds, or a timedelta. Raises ValueError for any other
    text, for a negative duration, for a ``size`` of zero, and for an ``early`` that is not below ``size``, or under a second.
    """
    size_ms = duration_ms(size)
    if size_ms == 0:
        raise ValueError("a window needs a size above zero")
    early_ms = None if early is None else duration_ms(early)
    if early_ms is not None and not _LEAST_EARLY_MS <= early_ms < size_ms:
        raise ValueError(f"early must be at least 1 s, and less than the size, {span_text(size_ms)}")
    return TimeWindows(size_ms, on, duration_ms(lateness), duration_ms(disorder), early_ms=early_ms)


def sliding(
    size: str | float | timedelta,
    *,
    every: str | float | timedelta,
    on: str | None = None,
    lateness: str | float | timedelta = 0,
    disorder: str | float | timedelta = 0,
    early: str | float | timedelta | None = None,
) -> TimeWindows:
    """Return windows of ``size`` of which one begins at each multiple of ``every`` since the Unix epoch.

    ``size`` is a multiple of ``every``, at most 100 times it. A row belongs to each window that contains its event time, and is
    stored once. The other arguments are those of ``tumbling``. Raises ValueError as ``tumbling`` does, and for an ``every`` that
    does not fit ``size``.
    """
    base = tumbling(size, on=on, lateness=lateness, disorder=disorder, early=early)
    every_ms = duration_ms(every)
    if every_ms == 0 or base.size_ms % every_ms:
        raise ValueError(
            f"a window's size must be a multiple of every, and {span_text(base.size_ms)} is not one of {span_text(every_ms)}"
        )
    if base.size_ms > MOST_OVERLAPPING * every_ms:
        raise ValueError(f"a window's size may be at most {MOST_OVERLAPPING} times every")
    return replace(base, every_ms=None if every_ms == base.size_ms else every_ms)


def batches(*, max_rows: int = 1_000_000, max_age: str | float | timedelta = "1 minute") -> Batches:
    """Return windows of at most ``max_rows`` rows of each server, each open for at most ``max_age``.

    All servers of a pipeline fill one window together. ``max_age`` is a duration as for ``tumbling``. Raises ValueError
    if ``max_rows`` is below 1, or ``max_age`` is not a duration.
    """
    if max_rows < 1:
        raise ValueError("max_rows must be at least 1")
    return Batches(max_rows, duration_ms(max_age))


@dataclass(frozen=True, slots=True)
class Window:
    """The window whose rows ``on_window`` receives."""

    id: str
    """Unique in its pipeline and safe as a directory name, e.g. ``2013-01-01T10-00-00Z`` or ``batch-000000000007``."""
    start: datetime | None
    """The first instant of the window, an aware UTC datetime; None for ``batches``."""
    end: datetime | None
    """The first instant after the window, an aware UTC datetime; None for ``batches``."""
    revision: int = 1
    """1 for the first output of a window. It rises when the server computes the window again, over all its rows, because
    of late rows.

    ``id`` and ``revision`` are the idempotency key of an ``on_window`` that writes its output itself: a repeated attempt
    has the same two values, and a higher revision must replace everything that lower ones wrote.
    """
    pipeline: str = ""
    """The pipeline's name."""
    final: bool = True
    """False for an early result (``early`` in ``tumbling`` and ``sliding``): more rows may come. ``revision`` is 0 then."""


def time_window_id(start_ms: int) -> str:
    """Return the id of the window of time that starts at ``start_ms``: readable, and safe in any file system.

    A start outside the years 1 to 9999 (a column may hold anything) is written in milliseconds.
    """
    at = _instant(start_ms)
    if at in _BOUNDS:
        return f"ms{start_ms:+020d}"
    fraction = f".{start_ms % 1000:03d}" if start_ms % 1000 else ""
    # Not strftime: its %Y does not pad years before 1000 on every platform.
    return (
        f"{at.year:04d}-{at.month:02d}-{at.day:02d}T{at.hour:02d}-{at.minute:02d}-{at.second:02d}{fraction}Z"
    )


def pane_starts(event_ms: NDArray[np.int64], spec: TimeWindows) -> NDArray[np.int64]:
    """Return for each event time the start of its pane (ms), aligned to the epoch, also before 1970.

    It is the start of the last window that contains the event time; of tumbling windows, of the only one.
    """
    return event_ms - event_ms % spec.pane_ms


def overlapping(start_ms: int, end_ms: int, every_ms: int) -> tuple[tuple[str, int, int], ...]:
    """Return the sliding windows that contain a pane, those that end first in front: id, start and end (ms).

    ``start_ms`` and ``end_ms`` are the bounds of the last of them, which starts with the pane. ``every_ms``: as in
    ``TimeWindows``.
    """
    size_ms = end_ms - start_ms
    first_ms = start_ms - size_ms + every_ms
    return tuple(
        (time_window_id(at_ms), at_ms, at_ms + size_ms) for at_ms in range(first_ms, start_ms + 1, every_ms)
    )


def as_window(
    window_id: str,
    start_ms: int | None,
    end_ms: int | None,
    *,
    revision: int,
    pipeline: str,
    final: bool = True,
) -> Window:
    """Return the handler's view of a window; bounds beyond the years 1 to 9999 are cut to these."""
    start = None if start_ms is None else _instant(start_ms)
    end = None if end_ms is None else _instant(end_ms)
    return Window(window_id, start, end, revision, pipeline, final)


def _instant(ms: int) -> datetime:
    first, last = _BOUNDS
    if ms <= (first - _EPOCH) // _MS:
        return first
    return last if ms >= (last - _EPOCH) // _MS else _EPOCH + ms * _MS
