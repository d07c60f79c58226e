"""Early results: what a window holds so far, computed while it is open (``early`` in ``tumbling`` and ``sliding``).

One server of a pipeline computes them, one window at a time, and only while no window of its own is cut: a window that is cut
cancels the early job. An early result becomes visible only while its window has no other, under the lock of all publications, and
the first one takes it away under that lock: no reader finds both.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import structlog

from mldserver.base.clock import first_of
from mldserver.base.kill_points import kill_point
from mldserver.engine_jobs import PublishJob, early_revision
from mldserver.errors import DriverLost, LedgerError, fields_to_log
from mldserver.jobs.engine import RETRIED_ERRORS
from mldserver.jobs.run_gate import RunGate
from mldserver.jobs.steps import job_of
from mldserver.ledger.contract import Commit, WindowEntry, WindowState
from mldserver.output.layout import early_attempt_path, writer_tag
from mldserver.windows import as_window

if TYPE_CHECKING:
    from mldserver.jobs.steps import WindowSteps

log = structlog.get_logger("mldserver")


@dataclass(kw_only=True, eq=False)
class EarlyResults:
    """Computes and shows early results until cancelled."""

    steps: WindowSteps
    every_ms: int
    busy: asyncio.Event
    """Set while a window of this server is cut or committed."""
    gate: RunGate
    """The one of all windows."""
    quote_errors: bool = True
    shown: int = 0
    failed: int = 0
    _segments: dict[str, int] = field(default_factory=dict)
    """How many segments the latest early result of each open window is of."""
    _places: dict[str, str] = field(default_factory=dict)
    """On an object store: where the early result of each open window lies that is shown."""
    _given_up: set[str] = field(default_factory=set)
    """Windows whose early job lost the driver."""
    _latest: int = 0
    """The number of the latest attempt; not less than the time of day, so that no process of this server gives it twice."""

    async def run(self) -> None:
        """Look at the interval which open windows have changed, and compute these."""
        while True:
            await self.steps.clock.sleep(self.every_ms / 1000)
            try:
                entries = await self._changed()
            except RETRIED_ERRORS as error:
                log.warning("window.early_failed", **fields_to_log(error, quotes=self.quote_errors))
                continue
            for entry in entries:
                if self.busy.is_set():
                    break  # what is left is looked at again
                await first_of(self._try(entry), self.busy.wait())

    async def _changed(self) -> list[WindowEntry]:
        """Return the open windows with new rows, those that end first in front; none if another server computes them."""
        entries, servers = await self.steps.ledger.open_windows()
        self._segments = {each.window_id: self._segments.get(each.window_id, 0) for each in entries}
        self._given_up &= self._segments.keys()
        self._places = {window: place for window, place in self._places.items() if window in self._segments}
        if min(servers, default=None) != self.steps.ledger.server_id:
            return []
        changed = [
            each
            for each in entries
            if len(each.segments) != self._segments[each.window_id] and each.window_id not in self._given_up
        ]
        return sorted(changed, key=lambda entry: (entry.end_ms or 0, entry.window_id))

    async def _try(self, entry: WindowEntry) -> None:
        """Compute one early result. A failure is logged, and tried again at the next interval."""
        with structlog.contextvars.bound_contextvars(window=entry.window_id):
            try:
                async with self.gate.enter([(self.steps.pipeline, f"early {entry.window_id}")], alone=False):
                    await self._compute(entry)
            except RETRIED_ERRORS as error:
                if not isinstance(error, DriverLost) and not await self._is_open(entry):
                    return  # another server has published it, and deleted what an attempt had left
                self.failed += 1
                fields = fields_to_log(error, quotes=self.quote_errors)
                if isinstance(error, DriverLost):
                    # Or it might end the driver, and with it what other functions compute, at each interval.
                    self._given_up.add(entry.window_id)
                    fields["did"] = "The server computes no early result of this window any more."
                log.warning("window.early_failed", **fields)

    async def _is_open(self, entry: WindowEntry) -> bool:
        """Whether a window is still open, as far as the ledger says."""
        with contextlib.suppress(LedgerError):
            found = await self.steps.ledger.find((entry.window_id,))
            return any(each.state is WindowState.OPEN for each in found)
        return True

    async def _compute(self, entry: WindowEntry) -> None:
        steps, began_ms = self.steps, self.steps.clock.steady_ms()
        views = () if steps.predecessors is None else await steps.predecessors.views()
        self._latest = max(self._latest + 1, steps.clock.now_ms())
        tag = writer_tag(steps.ledger_id, steps.ledger.server_id)
        staging = early_attempt_path(steps.publisher.root, entry.window_id, self._latest, tag)
        bounds = entry.start_ms, entry.end_ms
        window = as_window(entry.window_id, *bounds, revision=0, pipeline=steps.pipeline, final=False)
        arguments = entry, window, 0, steps.store.uri(staging), steps.store, steps.older, views
        job = await asyncio.to_thread(job_of, *arguments)
        left: str | None = staging
        try:
            result = await steps.engine.compute(job)
            kill_point("early.computed")
            output = Commit(entry.window_id, 0, staging, result.files, result.rows, 0)
            if steps.publisher.table is not None:
                revision = early_revision(len(entry.segments))
                files = output.files, output.rows_out, steps.store.place, steps.ledger_id
                await steps.engine.publish(
                    PublishJob(replace(window, revision=revision), job.staging, *files)
                )
            else:
                stays = not steps.store.local
                left = None if stays else staging  # what may be shown from now on stays where it was written
                if not await asyncio.to_thread(self._show, output):
                    return
                if stays:
                    left, self._places[entry.window_id] = self._places.get(entry.window_id), staging
        finally:
            if left is not None:
                steps.delete_later(partial(steps.store.delete, left))
        self.shown += 1
        self._segments[entry.window_id] = len(entry.segments)
        log.info(
            "window.early",
            rows_in=job.rows,
            rows_out=result.rows,
            segments=len(entry.segments),
            files=len(result.files),
            spark_seconds=round(result.seconds, 3),
            seconds=round((steps.clock.steady_ms() - began_ms) / 1000, 3),
        )

    def _show(self, output: Commit) -> bool:
        """Make a result visible, unless its window is published; then return False. Blocking."""
        store = self.steps.store
        if store.local:
            if not output.files:
                store.prepare(output.staging)
            store.sync(output.staging)
        return self.steps.publisher.show_early(output)
