"""What batches report of timers: by store, and in all since the start of the server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from mldserver.base.clock import Durations
from mldserver.runtime.interface import BatchOutcome, TimerReport

_COUNTED: Final = ("set", "cancelled", "fired", "skipped", "failed")


@dataclass(eq=False, slots=True)
class TimerCounts:
    """Counts for the status document (``status_document.TimersSection``)."""

    totals: dict[str, int] = field(init=False, default_factory=lambda: dict.fromkeys(_COUNTED, 0))
    """By names of ``TimerReport``."""
    lateness: Durations = field(init=False, default_factory=Durations)
    """Of first calls."""
    firings: Counter[str] = field(init=False, default_factory=Counter)
    """Of portions, which no source counts: ``rows``, and timers that failed for good and were ``skipped`` or ``discarded``."""
    failures: Counter[str] = field(init=False, default_factory=Counter)
    """Dead letters of portions by their error's class."""
    _latest: dict[str, TimerReport] = field(init=False, default_factory=dict)
    """By store, what its last batch reported."""

    def loaded(self, store_id: str, pending: int, callbacks: tuple[str, ...]) -> None:
        """Note that a store was read that has so many timers, of these callbacks."""
        self._latest[store_id] = TimerReport(pending=pending, callbacks=callbacks)

    def count(self, store_id: str, report: TimerReport) -> None:
        """Count what a batch has reported."""
        self._latest[store_id] = report
        for name in _COUNTED:
            self.totals[name] += getattr(report, name)
        if report.lateness:
            self.lateness.counts = list(map(sum, zip(self.lateness.counts, report.lateness, strict=True)))
            self.lateness.sum_ms += report.lateness_sum_ms

    def count_firing(self, outcome: BatchOutcome) -> None:
        """Count what a portion has given in addition to its report."""
        rows, letters = outcome.effects.rows, outcome.effects.dead_letters
        self.firings["rows"] += 0 if rows is None else len(rows)
        self.firings["skipped"] += outcome.skipped
        self.firings["discarded"] += outcome.discarded
        self.failures.update(letter.error.partition(":")[0] for letter in letters)

    def callbacks(self, store_ids: Iterable[str]) -> frozenset[str]:
        """Return the callbacks for which timers are pending in these stores; forget the other stores."""
        return frozenset(name for report in self.latest(store_ids) for name in report.callbacks)

    def latest(self, store_ids: Iterable[str]) -> list[TimerReport]:
        """Return the last report of each of these stores that has one, and forget the other stores."""
        self._latest = {each: self._latest[each] for each in store_ids if each in self._latest}
        return list(self._latest.values())
