"""The server's status and readiness: made from its parts, in its own process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import socket
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import structlog

from mldserver import __version__
from mldserver import status_document as document
from mldserver.assembly import Parts
from mldserver.base.clock import Clock
from mldserver.children.process import resident_bytes
from mldserver.config.settings import Settings
from mldserver.consumer.progress_log import ShardCounts
from mldserver.coordinator.progress import CoordinatorStatus
from mldserver.errors import without_messages
from mldserver.observe.logging import Logger, lines_lost
from mldserver.sources.source import SourceStatus
from mldserver.workers.runtime import WorkerRuntime

log = structlog.get_logger("mldserver")

_WATCH_SECONDS: Final = 0.25
_LOOK_SECONDS: Final = 0.1
"""How often it is looked how late the event loop is."""
_LONGEST_SECONDS: Final = 3.0
"""Between two documents."""
_FAILED: Final = ("failed", "group_failed", "halted", "set_aside")
_GAPS: Final = ("stream.gap", "stream.shard_gone", "shard.gap_accepted")
_ENDED: Final = 100
_NOTHING: Final = ShardCounts()
_OF_SHARDS: Final = ("batches", "records", "rows", "bytes")
_OF_ALL: Final = ("duplicates", "retries", "skipped", "discarded", "checkpoints")
"""Totals that a source knows: of each shard, and of all together."""
_SAMPLES: Final = 65
_OPEN_FILES: Final = Path("/proc/self/fd")


@dataclass(slots=True)
class Readiness:
    """Green once every part works; red while something needs a person or a restart.

    It starts red, silently: a server that starts is not broken.
    """

    green: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while everything works; read only."""
    _told_broken: bool = False
    """Whether a fault was reported since it was green last."""

    def update(self, parts: Parts) -> str | None:
        """Look at the parts; return a change to report: why it turned red, or nothing (``""``) where it turned green."""
        red = unready(parts)
        if not red:
            was_green = self.green.is_set()
            self.green.set()
            self._told_broken = False
            return None if was_green else ""
        # Do not report that Spark is still starting. Report a fault, also one that occurs while Spark starts again.
        reason, broken = red[0]
        news = self.green.is_set() or (broken and not self._told_broken)
        self.green.clear()
        if not news:
            return None
        self._told_broken = broken
        return reason

    async def watch(self, parts: Parts, clock: Clock, stopping: asyncio.Event) -> None:
        """Look again and again, and log what is worth reporting, until cancelled."""
        began_ms = clock.steady_ms()
        while True:
            reason = self.update(parts)
            if reason == "":
                log.info("server.ready", seconds=(clock.steady_ms() - began_ms) / 1000)
            elif reason is not None and not stopping.is_set():
                log.error("server.unready", reason=reason)
            await clock.sleep(_WATCH_SECONDS)


def unready(parts: Parts, status: CoordinatorStatus | None = None) -> list[tuple[str, bool]]:
    """Return why it is red, the most urgent first, and whether each is more than a part that has not started yet."""
    status = status or parts.coordinator.status()
    found: list[tuple[str, bool]] = []
    if parts.source.waits_for is not None:
        found.append((parts.source.waits_for, False))
    if status.windows_halted:
        window = status.windows_halted[0]
        found.append((f"window {window} keeps failing and every other waits for it", True))
    overdue = None if parts.runner is None or status.windows_halted else parts.runner.overdue()
    if overdue is not None:
        window, seconds = overdue
        hint = "see its latest window.slow or window.failed"
        found.append((f"window {window} has been worked on for {seconds / 60:.0f} minutes: {hint}", True))
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
    if parts.runtime.trouble is not None:
        found.append((parts.runtime.trouble, True))
    if parts.engine is not None and not parts.engine.is_ready:
        why = parts.engine.trouble
        reason = "Spark is not running" if why is None else f"Spark computes no window. {why}"
        found.append((f"{reason}: windows wait for it, rows go on being stored", why is not None))
    return found


@dataclass(slots=True)
class EventTally:
    """Counts logged events: an observer for ``logging_to``, called by any thread that logs."""

    counts: Counter[str] = field(default_factory=Counter)
    """Events by their name; a reload that was refused as ``refused``."""
    lines_lost: int = 0
    """Lines of floods that were cut."""

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Count one event."""
        name = event["event"]
        if name == "log.lost":
            self.lines_lost += event["lines"]
        elif name == "admin.act" and event.get("act") == "reload":
            name = "reloaded" if event.get("done") else "refused"
        self.counts[name] += 1


class Gatherer:
    """Makes a ``Status`` from a server's parts."""

    def __init__(self, settings: Settings, *, clock: Clock, tally: EventTally) -> None:
        """``tally`` sees what is logged."""
        self._settings, self._clock, self._tally = settings, clock, tally
        self._started_ms = clock.now_ms()
        self._late_ms = 0
        self._slept_ms: int | None = None

    async def pause(self, seconds: float = 1.0) -> None:
        """Sleep, longer where what is done between takes more than a hundredth of that; see how late the event loop is."""
        took_ms = 0 if self._slept_ms is None else self._clock.steady_ms() - self._slept_ms
        seconds = max(seconds, min(took_ms / 10, _LONGEST_SECONDS))
        for _ in range(round(seconds / _LOOK_SECONDS)):
            before_ms = self._clock.steady_ms()
            await self._clock.sleep(_LOOK_SECONDS)
            late_ms = self._clock.steady_ms() - before_ms - round(_LOOK_SECONDS * 1000)
            self._late_ms = max(self._late_ms, late_ms)
        self._slept_ms = self._clock.steady_ms()

    def status(self, parts: Parts | None, *, doing: str = "", wrong: str = "") -> document.Status:
        """Return how the server is now. ``parts``: None until they work; ``doing``: what a server does that is not at work.

        ``wrong``: why the parts cannot be asked.
        """
        settings, stopping = self._settings, doing.startswith("stops")
        common: dict[str, Any] = {
            "taken_ms": self._clock.now_ms(),
            "pipeline": settings.pipeline,
            "handler": settings.handler,
            "version": __version__,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started_ms": self._started_ms,
            "stopping": stopping,
            "log_level": logging.getLevelName(Logger.level).lower(),
            "loop_lag_seconds": self._late_ms / 1000,
            "resident_bytes": resident_bytes(os.getpid()) or 0,
            "cpu_seconds": time.process_time(),
            "open_files_limit": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        }
        with contextlib.suppress(OSError):  # a system that does not say
            common["open_files"] = sum(1 for _ in _OPEN_FILES.iterdir())
        self._late_ms = 0
        doing = f"the server {doing}"
        if parts is None or wrong:
            own_id = settings.server_id or ""
            return document.Status(server_id=own_id, ready=False, reasons=(wrong or doing,), **common)
        source, told = parts.source.status(), parts.coordinator.status()
        reasons = (doing,) if stopping else tuple(reason for reason, _ in unready(parts, told))
        counts, runtime, engine, runner = source.counts, parts.runtime, parts.engine, parts.runner
        workers: tuple[document.WorkerRow, ...] = ()
        worker_of: dict[str, int] = {}
        version = parts.handler_version
        if isinstance(runtime, WorkerRuntime):
            workers, worker_of = runtime.rows(), runtime.worker_of()
            version = runtime.spec.version  # it changes with a reload
        shown = str if settings.log_error_messages else without_messages
        windows = None if runner is None else runner.section(told.windows_open, told.late_by_window)
        spark = None
        if engine is not None:
            spark = document.Spark(ready=engine.is_ready, trouble=engine.trouble, **asdict(engine.facts()))
        return document.Status(
            handler_version=version,
            server_id=parts.ledger.server_id,
            listening=source.address,
            ready=not reasons,
            reasons=reasons,
            totals=self._totals(parts, source, told),
            batch_seconds=document.Histogram() if counts is None else document.histogram(counts.took),
            failures={} if counts is None else dict(counts.failures),
            connections=dict(source.connections),
            windows=windows or document.Windows(),
            workers=workers,
            spark=spark,
            **parts.coordinator.sections(told, source, worker_of, shown=shown),
            **common,
        )

    def _totals(self, parts: Parts, source: SourceStatus, told: CoordinatorStatus) -> document.Totals:
        seen, ledger, counts = self._tally.counts, parts.ledger, source.counts
        batches: dict[str, Any] = {}
        if counts is not None:
            of_shards = [counts.gone, *counts.shards.values()]
            batches = {name: sum([getattr(each, name) for each in of_shards]) for name in _OF_SHARDS}
            batches |= {name: getattr(counts, name) for name in _OF_ALL}
            batches["handler_seconds"] = counts.handler_ms / 1000
            batches["held_seconds"] = counts.held_ms / 1000
        return document.Totals(
            **batches,
            rows_durable=told.rows_durable,
            segments=told.segments,
            segment_bytes=told.segment_bytes_written,
            rows_late=told.rows_late,
            rows_ahead=told.rows_ahead,
            dead_letters=told.dead_letters,
            answered_early=seen["batch.answered_early"],
            checkpoints_retried=seen["checkpoint.retried"],
            checkpoints_failed=seen["checkpoint.failed"],
            connections=source.accepted,
            connections_failed=seen["connection.failed"],
            stream_retries=source.retries,
            stream_gaps=sum(seen[name] for name in _GAPS),
            flushes=told.flushes,
            flushes_failed=seen["flush.failed"],
            workers_lost=seen["worker.lost"],
            workers_replaced=seen["worker.replaced"],
            spark_starts=seen["spark.starting"],
            spark_lost=seen["spark.lost"],
            windows_failed=sum(seen[f"window.{name}"] for name in _FAILED),
            ledger_calls=ledger.calls,
            ledger_faults=ledger.faults,
            ledger_seconds=ledger.spent_ms / 1000,
            log_lines_lost=self._tally.lines_lost + lines_lost(),
            reloads=seen["reloaded"],
            reloads_refused=seen["refused"],
        )
