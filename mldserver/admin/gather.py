"""The server's status and readiness: made from the parts of its functions, in its own process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import socket
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import structlog
from msgspec.structs import asdict as fields_of
from msgspec.structs import replace

from mldserver import __version__
from mldserver import status_document as document
from mldserver.assembly import Parts
from mldserver.base.clock import Clock
from mldserver.children.process import resident_bytes
from mldserver.config.settings import Settings
from mldserver.consumer.progress_log import ShardCounts
from mldserver.coordinator.progress import CoordinatorStatus
from mldserver.errors import without_messages
from mldserver.jobs.engine import EngineState
from mldserver.observe.logging import Logger, lines_lost
from mldserver.sources.source import SourceStatus
from mldserver.workers.runtime import WorkerRuntime

log = structlog.get_logger("mldserver")

_WATCH_SECONDS: Final = 0.25
_LAG_PROBE_SECONDS: Final = 0.1
"""How long each sleep is that measures how late the event loop wakes."""
_LONGEST_PAUSE_SECONDS: Final = 3.0
"""The longest pause between two status documents."""
_EVENTS: Final = {
    "answered_early": ("batch.answered_early",),
    "checkpoints_retried": ("checkpoint.retried",),
    "checkpoints_failed": ("checkpoint.failed",),
    "connections_failed": ("connection.failed",),
    "stream_gaps": ("stream.gap", "stream.shard_gone", "shard.gap_accepted"),
    "flushes_failed": ("flush.failed",),
    "workers_lost": ("worker.lost",),
    "workers_replaced": ("worker.replaced",),
    "spark_starts": ("spark.starting",),
    "spark_lost": ("spark.lost",),
    "windows_failed": ("window.failed", "window.group_failed", "window.halted", "window.set_aside"),
    "reloads": ("reloaded",),
    "reloads_refused": ("refused",),
}
"""Totals that are numbers of logged events, with the events' names as ``EventTally`` counts them."""
_ENDED: Final = 100
_NOTHING: Final = ShardCounts()
_SUMMED_OVER_SHARDS: Final = ("batches", "records", "rows", "bytes")
"""Totals that a source counts for each shard."""
_COUNTED_TOGETHER: Final = ("duplicates", "retries", "skipped", "discarded", "checkpoints")
"""Totals that a source counts for all shards together."""
_SAMPLES: Final = 65
_OPEN_FILES: Final = Path("/proc/self/fd")


@dataclass(slots=True)
class Readiness:
    """Whether the server is ready: every part works, and no part needs a person or a restart.

    A new server is not ready, and that is not reported.
    """

    green: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while the server is ready; read only."""
    _fault_reported: bool = False
    """Whether a fault was reported since the server was last ready."""

    def update(self, parts: Parts) -> str | None:
        """Set or clear ``green`` from the parts' state, and return the change that the caller must log.

        Returns the reason if the server is no longer ready, ``""`` if it has become ready, and None without a change.
        """
        was_ready = self.green.is_set()
        reasons = unready(parts)
        if not reasons:
            self.green.set()
            self._fault_reported = False
            return None if was_ready else ""
        self.green.clear()
        # Do not report that Spark is still starting. Report a fault, also one that occurs while Spark starts again.
        reason, is_fault = reasons[0]
        is_new_fault = is_fault and not self._fault_reported
        if not was_ready and not is_new_fault:
            return None
        self._fault_reported = is_fault
        return reason

    async def watch(self, parts: Parts, clock: Clock, stopping: asyncio.Event) -> None:
        """Update the readiness four times a second and log each change, until cancelled."""
        began_ms = clock.steady_ms()
        while True:
            reason = self.update(parts)
            if reason == "":
                log.info("server.ready", seconds=(clock.steady_ms() - began_ms) / 1000)
            elif reason is not None and not stopping.is_set():
                log.error("server.unready", reason=reason)
            await clock.sleep(_WATCH_SECONDS)


def unready(parts: Parts, status: CoordinatorStatus | None = None) -> list[tuple[str, bool]]:
    """Return why the server is not ready, as pairs of a reason and whether it is a fault; empty if the server is ready.

    The most urgent reason comes first. A part that is still starting is a reason, but not a fault.
    ``status``: the coordinator's status, if the caller has it already.
    """
    status = status or parts.coordinator.status()
    found: list[tuple[str, bool]] = []
    if parts.source.waits_for is not None:
        found.append((parts.source.waits_for, False))
    if status.windows_halted:
        window = status.windows_halted[0]
        found.append((f"window {window} keeps failing and every other waits for it", True))
    overdue = None if parts.runner is None or status.windows_halted else parts.runner.overdue()
    if overdue is not None:
        window, seconds, usual = overdue
        beside = "" if usual is None else f", and such windows take {usual:.0f} s"
        hint = "see its latest window.slow or window.failed"
        what = f"window {window} has been worked on for {seconds / 60:.0f} minutes{beside}: {hint}"
        found.append((what, True))
    if status.flush_failing:
        found.append((f"rows cannot be made durable: {status.flush_failing.rstrip('.')}", True))
    if status.stuck:
        who = "the watermark" if status.held_by is None else f"shard {status.held_by}"
        where = "" if status.held_by_server is None else f" at server {status.held_by_server}"
        found.append(
            (f"{who}{where} stands still ({status.reason}), and windows that are due wait for it", True)
        )
    if status.unread_shards:
        found.append(
            (
                f"no shard is connected, and {status.unread_shards} have not ended: start the daemon, or see what it logs",
                True,
            )
        )
    side_tables = None if parts.runner is None else parts.runner.side_tables
    may_be_troubled = (parts.runtime, parts.queries, parts.swap, parts.firing, side_tables, parts.runner)
    troubled = (part for part in may_be_troubled if part is not None)
    found += [(part.trouble, True) for part in troubled if part.trouble is not None]
    if parts.engine is not None and not parts.engine.is_ready:
        why = parts.engine.trouble
        reason = "Spark is not running" if why is None else f"Spark computes no window. {why}"
        found.append((f"{reason}: windows wait for it, rows go on being stored", why is not None))
    return found


@dataclass(slots=True)
class EventTally:
    """Counts logged events: an observer for ``logging_to``, called by any thread that logs."""

    counts: Counter[str] = field(default_factory=Counter)
    """The number of events by name, of the whole server. Reloads count as ``reloaded`` or ``refused``."""
    by_function: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """The same of each function: of events that name a ``pipeline``."""
    lines_lost: int = 0
    """Lines that ``log.lost`` events report as lost."""

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Count one event."""
        name = event["event"]
        if name == "log.lost":
            self.lines_lost += event["lines"]
        elif name == "admin.act" and event.get("act") == "reload":
            name = "reloaded" if event.get("done") else "refused"
        self.counts[name] += 1
        if pipeline := event.get("pipeline"):
            self.by_function[pipeline][name] += 1


class Gatherer:
    """Creates ``Status`` documents from the functions' parts, and measures how late the event loop is between them."""

    def __init__(self, *, clock: Clock, tally: EventTally) -> None:
        """``tally`` counts the events that the server logs."""
        self._clock, self._tally = clock, tally
        self._started_ms = clock.now_ms()
        self._loop_lag_ms = 0
        """The most that the event loop was late since the last document."""
        self._pause_ended_ms: int | None = None
        """When the last pause ended; None before the first one."""
        self._unreadable: dict[str, str] = {}
        """Why the status of a function could not be read last time."""

    async def pause(self, seconds: float = 1.0) -> None:
        """Sleep for at least ``seconds`` between two documents, and measure how late the event loop wakes meanwhile.

        The pause is at least a hundred times as long as the work since the last pause took, up to 3 s. So a large status
        document takes at most about 1 % of the time.
        """
        work_ms = 0 if self._pause_ended_ms is None else self._clock.steady_ms() - self._pause_ended_ms
        hundred_times_seconds = 100 * work_ms / 1000
        seconds = max(seconds, min(hundred_times_seconds, _LONGEST_PAUSE_SECONDS))
        for _ in range(round(seconds / _LAG_PROBE_SECONDS)):
            before_ms = self._clock.steady_ms()
            await self._clock.sleep(_LAG_PROBE_SECONDS)
            late_ms = self._clock.steady_ms() - before_ms - round(_LAG_PROBE_SECONDS * 1000)
            self._loop_lag_ms = max(self._loop_lag_ms, late_ms)
        self._pause_ended_ms = self._clock.steady_ms()

    def status(
        self,
        functions: Mapping[str, document.FunctionStatus],
        *,
        engine: EngineState | None = None,
        stopping: bool = False,
        failure: str = "",
    ) -> document.Status:
        """Return the server's present status: its own facts, and its ``functions`` by name.

        ``engine`` is the driver of all functions. ``failure`` is why functions cannot be read: it replaces the reasons.

        Each call resets the loop lag, which counts from document to document. So only ``StatusFeed`` may call this
        regularly; clients read the feed's latest document and do not affect each other.
        """
        server: dict[str, Any] = {
            "taken_ms": self._clock.now_ms(),
            "version": __version__,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started_ms": self._started_ms,
            "stopping": stopping,
            "log_level": logging.getLevelName(Logger.level).lower(),
            "loop_lag_seconds": self._loop_lag_ms / 1000,
            "resident_bytes": resident_bytes(os.getpid()) or 0,
            "cpu_seconds": time.process_time(),
            "open_files_limit": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        }
        with contextlib.suppress(OSError):  # /proc exists on Linux only
            server["open_files"] = sum(1 for _ in _OPEN_FILES.iterdir())
        self._loop_lag_ms = 0
        if failure:
            server |= {"ready": False, "reasons": (failure,)}
        if engine is not None:
            server["spark"] = document.Spark(
                ready=engine.is_ready, trouble=engine.trouble, **asdict(engine.facts())
            )
        totals = self._of_all(functions.values())
        if len(functions) == 1:  # its events include those of the server
            functions = {name: replace(each, totals=totals) for name, each in functions.items()}
        return document.status_of(functions, totals, **server)

    def function(
        self, settings: Settings, parts: Parts | None, *, stage: str = "", failure: str = "", **life: Any
    ) -> document.FunctionStatus:
        """Return a function's present status. ``life``: fields of ``FunctionStatus`` about its life cycle.

        ``parts`` is None while the function does not run. ``stage`` is the reason to show while the function starts or stops,
        as a verb phrase: ``"starts (ledger and recovery)"``. It is ignored while the function works; it must begin with
        ``stops`` while it stops. ``failure`` is why the function does not run, or why its parts cannot be read: the document
        then has only what is known without them.
        """
        life |= {"pipeline": settings.pipeline, "handler": settings.handler}
        if parts is not None and not failure:
            try:
                status = self._running(settings, parts, stage, life)
            except Exception as error:
                failure = f"the status cannot be collected: {type(error).__name__}: {error}"
                if failure != self._unreadable.get(settings.pipeline):
                    log.exception("admin.failed", did="Its readiness is red; the function continues.")
                self._unreadable[settings.pipeline] = failure
            else:
                return status
        return document.FunctionStatus(
            server_id=settings.server_id or "", reasons=(failure or f"the function {stage}",), **life
        )

    def _running(
        self, settings: Settings, parts: Parts, stage: str, life: Mapping[str, Any]
    ) -> document.FunctionStatus:
        """Return the status of a function that runs. Arguments as for ``function``."""
        source, coordinator = parts.source.status(), parts.coordinator.status()
        reasons = tuple(reason for reason, _ in unready(parts, coordinator))
        if stage.startswith("stops"):
            reasons = (f"the function {stage}",)
        counts, runtime, runner = source.counts, parts.runtime, parts.runner
        workers: tuple[document.WorkerRow, ...] = ()
        worker_of: dict[str, int] = {}
        version = parts.handler_version
        if isinstance(runtime, WorkerRuntime):
            workers, worker_of = runtime.rows(), runtime.worker_of()
            version = runtime.spec.version  # a reload changes it
        windows = None
        if runner is not None:
            windows = runner.section(coordinator.windows_open, coordinator.late_by_window)
        return document.FunctionStatus(
            handler_version=version,
            server_id=parts.ledger.server_id,
            listening=source.address,
            ready=not reasons,
            reasons=reasons,
            totals=_totals(parts, source, coordinator, self._tally.by_function[settings.pipeline]),
            batch_seconds=document.Histogram() if counts is None else document.histogram(counts.took),
            failures={}
            if counts is None
            else dict(counts.failures + parts.coordinator.shards.timer_counts.failures),
            connections=dict(source.connections),
            windows=windows or document.Windows(),
            workers=workers,
            **parts.coordinator.sections(
                coordinator,
                source,
                worker_of,
                state_sizes=runtime.state_sizes(),
                state_bytes=settings.state_bytes,
                has_timers=parts.firing is not None,
                shown=str if settings.log_error_messages else without_messages,
            ),
            **life,
        )

    def _of_all(self, functions: Iterable[document.FunctionStatus]) -> document.Totals:
        """Return the counts of all functions together. Those of logged events include events of the server itself."""
        sums: Counter[str] = Counter()
        for each in functions:
            sums.update(fields_of(each.totals))
        return document.Totals(
            **sums
            | _event_totals(self._tally.counts)
            | {"log_lines_lost": self._tally.lines_lost + lines_lost()}
        )


def _totals(
    parts: Parts, source: SourceStatus, coordinator: CoordinatorStatus, events: Counter[str]
) -> document.Totals:
    """Return a function's counts since the start: of the source, the coordinator, the ledger, and of logged events."""
    ledger, counts = parts.ledger, source.counts
    batches: dict[str, Any] = {}
    if counts is not None:
        # ``gone``: the sum of shards that the source has forgotten.
        of_shards = [counts.gone, *counts.shards.values()]
        batches = {name: sum([getattr(each, name) for each in of_shards]) for name in _SUMMED_OVER_SHARDS}
        batches |= {name: getattr(counts, name) for name in _COUNTED_TOGETHER}
        batches["handler_seconds"] = counts.handler_ms / 1000
        batches["held_seconds"] = counts.held_ms / 1000
        for name, count in parts.coordinator.shards.timer_counts.firings.items():
            batches[name] += count
    return document.Totals(
        **batches,
        rows_durable=coordinator.rows_durable,
        segments=coordinator.segments,
        segment_bytes=coordinator.segment_bytes_written,
        rows_late=coordinator.rows_late,
        rows_ahead=coordinator.rows_ahead,
        dead_letters=coordinator.dead_letters,
        connections=source.accepted,
        stream_retries=source.retries,
        flushes=coordinator.flushes,
        ledger_calls=ledger.calls,
        ledger_faults=ledger.faults,
        ledger_seconds=ledger.spent_ms / 1000,
        **_event_totals(events),
    )


def _event_totals(events: Counter[str]) -> dict[str, int]:
    """Return the totals that are numbers of logged events, by their names in ``Totals``."""
    return {name: sum(events[each] for each in counted) for name, counted in _EVENTS.items()}
