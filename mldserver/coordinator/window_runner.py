"""From a cut window to a published one: attempts on the engine, commit, publish, and what follows failures.

    cut ──begin_attempt──▶ engine ──commit (the only moment that counts)──▶ rename ──▶ published ──▶ segments deleted

Every step can be repeated: recovery at start calls the same functions.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import structlog

from mldserver.coordinator.layout import SEGMENTS, STAGING, staging_path, window_path
from mldserver.coordinator.windows import as_window
from mldserver.errors import DriverLost, LedgerError, SparkError, WindowFailed
from mldserver.spark.engine import WindowJob

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from mldserver.clock import Clock
    from mldserver.coordinator.store import OutputStore
    from mldserver.spark.engine import Engine, WindowResult
    from mldserver.state.ledger import Ledger, Segment, WindowEntry

__all__ = ["WindowPolicy", "WindowRunner"]

log = structlog.get_logger("mldserver")


@dataclass(frozen=True, slots=True)
class WindowPolicy:
    """What happens to windows whose job fails."""

    attempts: int = 3
    """Attempts (in one life of the server) before the policy applies."""
    retry_base_seconds: float = 1.0
    retry_cap_seconds: float = 60.0
    on_failure: Literal["halt", "dead_letter"] = "halt"
    """``halt``: the window is tried again for ever, every ``retry_cap_seconds``, and all others wait for it;
    ``dead_letter``: it is set aside with its segments and the others go on."""
    concurrency: int = 1


@dataclass(frozen=True, slots=True)
class _Committed:
    """An attempt whose output counts, but may not be visible yet."""

    attempt: int
    staging: str
    result: WindowResult
    began_ms: int


class WindowRunner:
    """Takes cut windows and sees them through, oldest first."""

    def __init__(
        self,
        *,
        pipeline: str,
        policy: WindowPolicy,
        ledger: Ledger,
        store: OutputStore,
        engine: Engine,
        clock: Clock,
        random: Callable[[], float],
        freed: Callable[[int], None],
    ) -> None:
        """``random`` gives [0, 1) for jitter; ``freed`` is told the bytes of deleted segments."""
        self._pipeline = pipeline
        self._policy = policy
        self._ledger = ledger
        self._store = store
        self._engine = engine
        self._clock = clock
        self._random = random
        self._freed = freed
        self._queue: asyncio.Queue[WindowEntry] = asyncio.Queue()
        self._unfinished: dict[str, int] = {}
        self._freeing: dict[str, tuple[Segment, ...]] = {}
        self._halted: set[str] = set()
        self._go = asyncio.Event()
        self._go.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.published = 0
        self.set_aside = 0

    @property
    def waiting(self) -> int:
        """How many windows are cut and not published yet."""
        return len(self._unfinished)

    @property
    def halted(self) -> frozenset[str]:
        """Windows that kept failing and that every other waits for."""
        return frozenset(self._halted)

    def submit(self, entries: Iterable[WindowEntry]) -> None:
        """Take cut windows."""
        for entry in entries:
            self._unfinished[entry.window_id] = self._clock.now_ms()
            self._idle.clear()
            self._queue.put_nowait(entry)

    async def idle(self) -> None:
        """Return when no window is waiting or running."""
        await self._idle.wait()

    async def run(self) -> None:
        """Compute windows until cancelled; ``policy.concurrency`` at a time."""
        async with asyncio.TaskGroup() as group:
            for _ in range(self._policy.concurrency):
                group.create_task(self._work(), name="windows")

    async def _work(self) -> None:
        while True:
            entry = await self._queue.get()
            await self._go.wait()
            with structlog.contextvars.bound_contextvars(window=entry.window_id):
                await self._see_through(entry)
            self._unfinished.pop(entry.window_id, None)
            if not self._unfinished:
                self._idle.set()

    async def _see_through(self, entry: WindowEntry) -> None:
        failures = 0
        committed: _Committed | None = None
        while True:
            try:
                # Once committed only publishing is tried again: the output counts, computing it anew would not.
                committed = committed or await self._compute(entry)
                await self.publish(entry.window_id, committed.staging, has_files=bool(committed.result.files))
            except (SparkError, LedgerError, OSError) as error:
                failures += 1
                if await self._failed(entry, error, failures):
                    return
            else:
                self._resume(entry.window_id)
                self._tell(entry, committed)
                return

    async def _compute(self, entry: WindowEntry) -> _Committed:
        began_ms = self._clock.now_ms()
        attempt = await self._ledger.begin_attempt(entry.window_id)
        staging = staging_path(entry.window_id, attempt)
        # What an attempt of an earlier life left under the same number is not this one's.
        await asyncio.to_thread(self._store.delete, staging)
        await asyncio.to_thread(self._store.prepare, staging.rpartition("/")[0])
        result = await self._engine.compute(self._job(entry, attempt, staging))
        if result.files:
            await asyncio.to_thread(self._store.sync, staging)
        committed = await self._ledger.commit(
            entry.window_id, attempt=attempt, staging=staging, files=result.files, rows_out=result.rows
        )
        if not committed:
            raise WindowFailed(
                f"Attempt {attempt} at window {entry.window_id} lost its claim before it could commit.",
                did="Its output was thrown away.",
                pipeline=self._pipeline,
            )
        return _Committed(attempt, staging, result, began_ms)

    def _job(self, entry: WindowEntry, attempt: int, staging: str) -> WindowJob:
        window = as_window(
            entry.window_id, entry.start_ms, entry.end_ms, revision=entry.revision, pipeline=self._pipeline
        )
        return WindowJob(
            window,
            attempt,
            tuple(self._store.uri(segment.path) for segment in entry.segments),
            self._store.uri(staging),
            sum(segment.rows for segment in entry.segments),
            sum(segment.bytes for segment in entry.segments),
        )

    async def publish(self, window_id: str, staging: str | None, *, has_files: bool) -> None:
        """Make a committed window visible and free its segments. Repeatable."""
        if has_files and staging is not None:
            await asyncio.to_thread(self._store.publish, staging, window_path(window_id))
        # The ledger names them once; when they cannot be deleted, publishing is tried again.
        segments = self._freeing.setdefault(window_id, await self._ledger.published(window_id))
        await asyncio.to_thread(self._clean, window_id, [segment.path for segment in segments])
        del self._freeing[window_id]
        self._freed(sum(segment.bytes for segment in segments))
        self.published += 1

    def _clean(self, window_id: str, paths: list[str]) -> None:
        for path in paths:
            self._store.delete(path)
        self._store.delete(f"{STAGING}/{window_id}")
        self._store.drop_empty(f"{SEGMENTS}/{window_id}")

    def _tell(self, entry: WindowEntry, committed: _Committed) -> None:
        now_ms = self._clock.now_ms()
        result = committed.result
        log.info(
            "window.done",
            revision=entry.revision,
            rows_in=sum(segment.rows for segment in entry.segments),
            rows_out=result.rows,
            segments=len(entry.segments),
            files=len(result.files),
            attempt=committed.attempt,
            spark_seconds=round(result.seconds, 3),
            lag_seconds=round((now_ms - self._unfinished[entry.window_id]) / 1000, 3),
            seconds=round((now_ms - committed.began_ms) / 1000, 3),
            path=self._store.uri(window_path(entry.window_id)) if result.files else None,
        )

    async def _failed(self, entry: WindowEntry, error: Exception, failures: int) -> bool:
        """Apply the policy to a failed attempt; True when the window is done with."""
        told = error.told() if isinstance(error, SparkError | LedgerError) else {"what": str(error)}
        last = failures >= self._policy.attempts
        if last and self._policy.on_failure == "dead_letter" and isinstance(error, WindowFailed | DriverLost):
            try:
                await self._ledger.set_aside(entry.window_id, str(error))
            except LedgerError as refused:
                # It stays cut: the next attempt that fails tries again to put it aside.
                told = refused.told()
            else:
                self.set_aside += 1
                self._resume(entry.window_id)
                log.error("window.set_aside", attempts=failures, **told)
                return True
        delay = self._policy.retry_cap_seconds if last else self._delay(failures)
        if last and entry.window_id not in self._halted:
            self._halted.add(entry.window_id)
            self._go.clear()
            log.error("window.halted", attempts=failures, **told)
        else:
            log.warning("window.failed", attempt=failures, delay_seconds=round(delay, 3), **told)
        await self._clock.sleep(delay)
        return False

    def _resume(self, window_id: str) -> None:
        """Let the others go on, unless another window halts them."""
        self._halted.discard(window_id)
        if not self._halted:
            self._go.set()

    def _delay(self, failures: int) -> float:
        most: float = min(
            self._policy.retry_cap_seconds, self._policy.retry_base_seconds * 2 ** (failures - 1)
        )
        return most * (0.5 + self._random() / 2)
