"""Cut windows that must wait for other windows: those of other functions (``after``), or the ones before (``previous``)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import structlog

from mldserver.base.clock import Clock, in_time
from mldserver.errors import LedgerError
from mldserver.jobs.predecessors import Predecessors
from mldserver.jobs.previous import PreviousResults
from mldserver.ledger.contract import WindowEntry, WindowState

log = structlog.get_logger("mldserver")

_LOOK_SECONDS: Final = 0.5
"""How often the server looks whether held windows must still wait."""

_LONG_MS: Final = 60_000
"""A window that has waited for longer for a function that does not run is reported."""


@dataclass(slots=True, eq=False)
class _Waiting:
    entry: WindowEntry
    since_ms: int
    """By the steady clock."""
    waits_for: str | None = None
    """The function whose windows come first, when that was looked at last."""


@dataclass(kw_only=True, eq=False)
class HeldWindows:
    """Holds windows until nothing comes before them any more."""

    predecessors: Predecessors | None
    """The functions whose windows come first; None: there are none."""
    previous: PreviousResults | None
    """The results of the function's own windows; None: a window needs none of another."""
    clock: Clock
    release: Callable[[WindowEntry], None]
    """Called with each window that need not wait any more."""
    _held: list[_Waiting] = field(default_factory=list)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def submit(self, entry: WindowEntry) -> None:
        """Release a window, now or later. One whose output counts already is released now: only its publication is left."""
        window = _Waiting(entry, self.clock.steady_ms())
        if entry.state is WindowState.COMMITTED or (
            self.previous is None and not self._misses_function(window)
        ):
            self.release(entry)
            return
        self._held.append(window)
        self._changed.set()

    def look(self) -> None:
        """Look now whether windows must still wait: one was published."""
        self._changed.set()

    async def run(self) -> None:
        """Release held windows once nothing comes first any more, until cancelled."""
        while True:
            await in_time(self._changed.wait(), self.clock, _LOOK_SECONDS)
            self._changed.clear()
            # A ledger that is out of reach is asked again.
            with contextlib.suppress(LedgerError):
                for window in sorted(
                    self._held, key=lambda held: (held.entry.end_ms or 0, held.entry.window_id)
                ):
                    if not self._misses_function(window) and not await self._misses_previous(window.entry):
                        self._held.remove(window)
                        self.release(window.entry)

    def _misses_function(self, window: _Waiting) -> bool:
        """Return whether a function that comes first has not published all of its windows up to the end of this one."""
        missing = None if self.predecessors is None else self.predecessors.missing(window.entry)
        if missing is not None and missing != window.waits_for:
            entry = window.entry
            log.info("window.waiting", window=entry.window_id, revision=entry.revision, function=missing)
        window.waits_for = missing
        return missing is not None

    async def _misses_previous(self, entry: WindowEntry) -> bool:
        return self.previous is not None and await self.previous.is_missing(entry)

    @property
    def trouble(self) -> str | None:
        """Which windows wait for a function that does not run here, as a clause; None: there are none."""
        first, now_ms = self.predecessors, self.clock.steady_ms()
        for window in self._held:
            missing = first is not None and window.waits_for and window.waits_for not in first.published
            if missing and now_ms - window.since_ms > _LONG_MS:
                return f"window {window.entry.window_id} waits for the function {window.waits_for}, which does not run"
        return None
