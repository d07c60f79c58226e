"""Counts batches, and tells in the log of those that are as they should be: one line a shard and interval, not one a batch."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import structlog

from mldserver.base.clock import BOUNDS_MS, Clock, Durations
from mldserver.consumer.core import InFlight
from mldserver.records import Sequence

if TYPE_CHECKING:
    from mldserver.runtime.interface import BatchOutcome


_CLASSES: Final = 100
_LONG_MS: Final = 1000
"""A batch whose shard was throttled for so long is logged by itself."""


@dataclass(slots=True, eq=False)
class ShardCounts:
    """What came of a shard since the start of the server, over all its connections. Batches without records count nowhere."""

    batches: int = 0
    records: int = 0
    rows: int = 0
    bytes: int = 0


class ProgressLog:
    """What came of all shards. Lets every connection that has news tell them, once an interval: one task for all of them."""

    def __init__(self, *, clock: Clock, seconds: float) -> None:
        """Look after the connections that have news every so many seconds."""
        self._clock = clock
        self._seconds = seconds
        self.shards: dict[str, ShardCounts] = {}
        self.gone = ShardCounts()
        """Of those that are forgotten."""
        self.took = Durations()
        """Batches from their last byte until they were done with."""
        self.handler_ms = self.held_ms = 0
        self.duplicates = self.retries = self.skipped = self.discarded = self.checkpoints = 0
        self.failures: Counter[str] = Counter()
        """Dead letters by their error's class; ``other`` once there are many classes."""
        self.news: set[Progress] = set()
        """Who tells at the end of the interval."""
        self.come = asyncio.Event()
        """Set when there is somebody."""

    def forget(self, shard_ids: Iterable[str]) -> None:
        """Count shards that are over and known no more among those that are gone."""
        for counts in [self.shards.pop(shard_id) for shard_id in shard_ids]:
            self.gone.batches += counts.batches
            self.gone.records += counts.records
            self.gone.rows += counts.rows
            self.gone.bytes += counts.bytes

    def count_failures(self, outcome: BatchOutcome) -> None:
        """Count what is unusual in a batch."""
        self.duplicates += outcome.outline.duplicates
        self.retries += max(0, outcome.attempts - 1)
        self.skipped += outcome.skipped
        self.discarded += outcome.discarded
        for letter in outcome.effects.dead_letters:
            name = letter.error.partition(":")[0]
            self.failures[name if name in self.failures or len(self.failures) < _CLASSES else "other"] += 1

    async def run(self) -> None:
        """Work until cancelled; nothing wakes it while nothing comes."""
        while True:
            await self.come.wait()
            await self._clock.sleep(self._seconds)
            self.come.clear()
            news, self.news = self.news, set()
            for one in news:
                one.tell()


@dataclass(slots=True, eq=False)
class Progress:
    """Counts one connection's batches."""

    log: structlog.typing.FilteringBoundLogger
    """May be replaced by one that knows more."""
    interval: ProgressLog
    all_batches: int = 0
    all_records: int = 0
    _counts: ShardCounts = field(default_factory=ShardCounts)
    _told: tuple[int, int, int, int] | None = None
    """What there was of the shard when the first batch came that was not told yet."""
    _first: Sequence | None = None
    _last: Sequence | None = None
    _lag_ms: int | None = None
    _slowest_ms: int = 0

    def open(self, shard_id: str, log: structlog.typing.FilteringBoundLogger) -> None:
        """Count for a shard from now on."""
        self.log, self._counts = log, self.interval.shards.setdefault(shard_id, ShardCounts())

    def report(self, batch: InFlight, *, each: bool, debugging: bool) -> None:
        """Count a batch that is done. If ``each``, log it by itself if it is unusual, or if the log takes everything.

        An empty batch, as idle shards send every second, does not count.
        """
        outcome: BatchOutcome = batch.outcome
        outline, effects, counts, interval = outcome.outline, outcome.effects, self._counts, self.interval
        took_ms = (batch.stored_ms or batch.done_ms) - batch.received_ms
        handler_ms = batch.processed_ms - (batch.began_ms or batch.received_ms)
        held_ms = batch.done_ms - batch.processed_ms
        interval.held_ms += held_ms
        self.all_batches += 1
        if outline.records:
            self.all_records += outline.records
            if self._told is None:
                interval.news.add(self)
                interval.come.set()
                self._told = (counts.batches, counts.records, counts.rows, counts.bytes)
                self._first, self._slowest_ms = outline.first, 0
            counts.batches += 1
            counts.records += outline.records
            counts.rows += 0 if effects.rows is None else len(effects.rows)
            counts.bytes += batch.size
            took = interval.took  # written out: every batch comes by
            took.counts[bisect_left(BOUNDS_MS, took_ms)] += 1
            took.sum_ms += took_ms
            interval.handler_ms += handler_ms
            self._last, self._lag_ms = outline.last, outline.millis_behind_latest
            if took_ms > self._slowest_ms:  # noqa: PLR1730  # every batch comes by: max() costs three times as much
                self._slowest_ms = took_ms
        failed = outcome.attempts > 1 or effects.dead_letters or outcome.skipped or outcome.discarded
        if failed or outline.duplicates:
            interval.count_failures(outcome)
        unusual = bool(failed or batch.late or held_ms >= _LONG_MS or outline.duplicates)
        if each and (unusual or debugging):
            self._log_batch(batch, outcome, took_ms, handler_ms, unusual=unusual)

    def _log_batch(
        self, batch: InFlight, outcome: BatchOutcome, took_ms: int, handler_ms: int, *, unusual: bool
    ) -> None:
        outline, effects = outcome.outline, outcome.effects
        (self.log.info if unusual else self.log.debug)(
            "batch.done",
            records=outline.records,
            rows=0 if effects.rows is None else effects.rows.num_rows,
            duplicates=outline.duplicates,
            dead_letters=len(effects.dead_letters),
            skipped=outcome.skipped,
            discarded=outcome.discarded,
            bytes=batch.size,
            first=outline.first and str(outline.first),
            last=outline.last and str(outline.last),
            millis_behind_latest=outline.millis_behind_latest,
            attempts=outcome.attempts,
            handler_seconds=handler_ms / 1000,
            held_seconds=(batch.done_ms - batch.processed_ms) / 1000,
            checkpoint=batch.checkpoint and str(batch.checkpoint),
            seconds=took_ms / 1000,
        )

    def tell(self) -> None:
        """Log what has come since the last time; nothing when nothing has."""
        if self._told is None:
            return
        names, counts = ("batches", "records", "rows", "bytes"), self._counts
        news = zip(names, self._told, strict=True)
        fields: dict[str, Any] = {
            name: value - told for name, told in news if (value := getattr(counts, name)) > told
        }
        if self._lag_ms:
            fields["millis_behind_latest"] = self._lag_ms
        self.log.info(
            "batches.done",
            **fields,
            first=str(self._first),
            last=str(self._last),
            slowest_seconds=self._slowest_ms / 1000,
        )
        self._told = None
