"""What the log tells of batches that are as they should be: one line a shard and interval, not one a batch."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import structlog

    from mldserver.base.clock import Clock
    from mldserver.records import Sequence
    from mldserver.runtime.interface import BatchOutcome


class ProgressLog:
    """Lets every connection that has news tell them, once an interval: one task for all of them."""

    def __init__(self, *, clock: Clock, seconds: float) -> None:
        """Look after the connections that have news every so many seconds."""
        self._clock = clock
        self._seconds = seconds
        self._news: set[Progress] = set()
        self._come = asyncio.Event()

    def has_news(self, one: Progress) -> None:
        """Let it tell at the end of the interval."""
        self._news.add(one)
        self._come.set()

    async def run(self) -> None:
        """Work until cancelled; nothing wakes it while nothing comes."""
        while True:
            await self._come.wait()
            await self._clock.sleep(self._seconds)
            self._come.clear()
            news, self._news = self._news, set()
            for one in news:
                one.tell()


@dataclass(slots=True, eq=False)
class Progress:
    """Sums one connection's batches."""

    log: structlog.typing.FilteringBoundLogger
    """May be replaced by one that knows more."""
    interval: ProgressLog
    all_batches: int = 0
    all_records: int = 0
    _summed: dict[str, int] = field(default_factory=dict)
    """Of the batches that were not told yet: how many, and how much is in them."""
    _first: Sequence | None = None
    _last: Sequence | None = None
    _lag_ms: int | None = None
    _slowest_ms: int = 0

    def note(self, outcome: BatchOutcome, size: int, took_ms: int) -> None:
        """Add a batch of ``size`` bytes; an empty one, as idle shards send every second, is not worth a line."""
        outline, rows, summed = outcome.outline, outcome.rows, self._summed
        self.all_batches += 1
        if not outline.records:
            return
        self.all_records += outline.records
        if not summed:
            self.interval.has_news(self)
            self._summed = summed = {"batches": 0, "records": 0, "rows": 0, "bytes": 0}
            self._first, self._slowest_ms = outline.first, 0
        summed["batches"] += 1
        summed["records"] += outline.records
        summed["rows"] += 0 if rows is None else len(rows)
        summed["bytes"] += size
        self._last, self._lag_ms = outline.last, outline.millis_behind_latest
        if took_ms > self._slowest_ms:  # noqa: PLR1730  # every batch comes by: max() costs three times as much
            self._slowest_ms = took_ms

    def tell(self) -> None:
        """Log what has come since the last time; nothing when nothing has."""
        if not self._summed:
            return
        fields: dict[str, Any] = {name: value for name, value in self._summed.items() if value}
        if self._lag_ms:
            fields["millis_behind_latest"] = self._lag_ms
        self.log.info(
            "batches.done",
            **fields,
            first=str(self._first),
            last=str(self._last),
            slowest_seconds=self._slowest_ms / 1000,
        )
        self._summed = {}
