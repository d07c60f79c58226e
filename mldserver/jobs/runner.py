"""From a cut window to a published one: groups of windows, attempts, and what follows failures.

    cut ──begin_attempts──▶ engine ──commit (the only moment that counts)──▶ rename ──▶ published ──▶ segments freed

Windows that are ready together share one job and one commit, where the engine allows it. When that fails each runs
alone, so that one bad window costs the others time, and nothing else. Every step can be repeated: what a crash or a dead
server left is submitted like any other window, and goes on where it stood.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING, Literal

import structlog

from mldserver.base.backoff import backoff
from mldserver.base.clock import Durations, in_time
from mldserver.config.settings import WindowSettings
from mldserver.engine_jobs import NO_WORK, SparkWork
from mldserver.errors import (
    DriverLost,
    LedgerError,
    MldserverError,
    WindowFailed,
    fields_to_log,
    may_quote,
)
from mldserver.jobs.early import EarlyResults
from mldserver.jobs.engine import RETRIED_ERRORS, RETRY_SECONDS, allowed_seconds
from mldserver.jobs.held import HeldWindows
from mldserver.jobs.run_gate import RunGate, WindowKey
from mldserver.jobs.side_tables import SideTables
from mldserver.ledger.contract import Decision, LedgerState, WindowEntry, WindowState
from mldserver.status_document import WindowRow, Windows, histogram

if TYPE_CHECKING:
    from mldserver.jobs.steps import Committed, WindowSteps

log = structlog.get_logger("mldserver")

_DECISION_OF_STATE: Mapping[WindowState, Decision] = {
    WindowState.SET_ASIDE: "set_aside",
    WindowState.PUBLISHED: "skip",
}

_NUMBERS = re.compile(r"\d+")

_MAX_SIGNAL_DEATHS = 5
"""So many deaths of a driver by a signal, in a row while one window ran alone, count against the window."""

_LATEST = 100
"""Latest windows, kept for the server's status, and latest runs, from which the usual time comes."""

_FEW_RUNS = 5
"""So many runs say what is usual."""

_LONG_TIMES = 10.0
_LONG_SECONDS = 60.0
"""A run is far beyond its usual time if it takes so many times that, and more than a minute: a hook is slow then, too."""

_GROUP_BYTES = 64 * 1024 * 1024
"""A group takes no more windows once its segments have so many bytes; so at most its last window is a large one."""


@dataclass(slots=True, eq=False)
class WindowLife:
    """What has become of a window that this server took up."""

    entry: WindowEntry
    cut_ms: int
    """When that was (time of day)."""
    submitted_ms: int
    """The same by the steady clock."""
    state: Literal["computing", "done", "failed", "halted", "set_aside"] = "computing"
    """``failed``: it is tried again."""
    done_ms: int | None = None
    seconds: float | None = None
    """Until its output was visible."""
    spark_seconds: float | None = None
    work: SparkWork = NO_WORK
    rows_out: int | None = None
    error: str | None = None
    begun_ms: int | None = None
    """When it was taken from the queue, by the steady clock."""
    run_ms: int | None = None
    """When its present run began, by the steady clock; None: it waits for the next one."""
    failed_runs: int = 0
    """Of its job."""
    failed_steps: int = 0
    """All else: what the ledger or the disk refused, and writing an output that counts into its table."""
    lost_runs: int = 0
    """Runs that ended with a driver's death that does not count against it."""
    signals: int = 0
    """Such deaths in a row by a signal while it was alone."""
    suspect: bool = False
    """Whether a driver died while it and others ran: it runs alone until it succeeds, or until its ``on_window`` is slow."""
    joined: bool = False
    """Whether other windows may run beside its present attempt, because its ``on_window`` is slow."""
    stays_alone: bool = False
    """Whether the driver died while others had joined it: nothing runs beside its next attempt, however slow it is."""
    traceback: str = ""
    """The one that was logged last, without its numbers: Spark counts stages and tasks in its messages."""
    decided: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when an operator has decided about it, while it is halted."""
    error_is_stored: bool = False
    """Whether the ledger holds the error for which the window is halted, as far as this server knows."""

    @property
    def size(self) -> int:
        """The bytes of its segments."""
        return sum(segment.bytes for segment in self.entry.segments)

    def row(self, late_rows: int) -> WindowRow:
        """Return its row of the status document."""
        entry = self.entry
        return WindowRow(
            id=entry.window_id,
            state=self.state,
            revision=entry.revision,
            start_ms=entry.start_ms,
            end_ms=entry.end_ms,
            cut_ms=self.cut_ms,
            done_ms=self.done_ms,
            rows_in=sum(segment.rows for segment in entry.segments),
            rows_out=self.rows_out,
            seconds=self.seconds,
            spark_seconds=self.spark_seconds,
            spark_jobs=self.work.jobs,
            stage_seconds=dict(self.work.stages),
            late_rows=late_rows,
            error=self.error,
        )


class WindowRunner:
    """Computes and publishes the windows that were cut, oldest first, and retries what fails.

    The policy says how often a window's job is run (in one life of the server), and what then. What fails beside jobs, the
    ledger or the disk, is tried again however often; as many failures of those in their turn halt the others. ``halt``:
    the window is tried again for ever, at the longest wait, and all others wait for it, unless an operator decides
    otherwise (``Ledger.decide``); ``dead_letter``: it is set aside with its segments and the others go on.

    A driver's death counts against a window that was alone there. Where several were, each runs alone from then on until it
    has succeeded, and the death counts for none. So do deaths from outside: a signal, or a cluster that is gone. A window that
    meets signals whenever it is alone is the cause after all (``_MAX_SIGNAL_DEATHS``).

    While a hook of ``on_window`` is slow, it may hang, and one more worker continues with the other windows, also if the slow
    window must run alone. If the driver dies then, the slow window's next attempt is alone to its end, and a death counts
    against it. So a window that hangs, or kills its driver late, holds the others for every other attempt at most.
    """

    def __init__(
        self,
        steps: WindowSteps,
        policy: WindowSettings,
        *,
        random: Callable[[], float],
        log_error_messages: bool = True,
        retry_seconds: tuple[float, float] = RETRY_SECONDS,
        gate: RunGate | None = None,
        side_tables: SideTables | None = None,
        early_ms: int | None = None,
    ) -> None:
        """Take the steps one by one; ``random`` gives [0, 1) for jitter.

        ``log_error_messages``: whether log and status quote what errors of jobs say. The ledger keeps it in any case.
        ``retry_seconds``: the first and the longest wait between runs. ``gate``: the one of the engine's driver, if other
        functions share that. ``side_tables``: where late rows and dead letters go, if those
        are tables. ``early_ms``: how often open windows are computed; None: never.
        """
        self._retry_seconds = retry_seconds
        self._quote_errors = log_error_messages
        self.steps = steps
        self._policy = policy
        self._random = random
        self._ledger, self._engine, self._clock = steps.ledger, steps.engine, steps.clock
        self._ready_windows: asyncio.Queue[WindowEntry] = asyncio.Queue()
        self.unfinished: dict[tuple[str, int], WindowLife] = {}
        """The windows and revisions that are cut and not published yet."""
        self.latest: deque[WindowLife] = deque(maxlen=_LATEST)
        self.halted: dict[str, WindowLife] = {}
        """Windows that kept failing and that every other waits for."""
        self._held: HeldWindows | None = None
        """Windows that wait for other windows; None: those of this function do not."""
        if steps.predecessors is not None or steps.previous is not None:
            self._held = HeldWindows(
                predecessors=steps.predecessors,
                previous=steps.previous,
                clock=steps.clock,
                release=self._ready_windows.put_nowait,
            )
        self._not_halted = asyncio.Event()
        self._not_halted.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._busy = asyncio.Event()
        """Set while a window is waiting or running: then no early result is computed."""
        self.side_tables = side_tables
        self.published = self.set_aside = self.rows_out = 0
        self._alone: deque[tuple[WindowEntry, Committed | None]] = deque()
        """Windows that come next, each alone, with their output where it counts already."""
        self._run_gate = gate or RunGate()
        self.early: EarlyResults | None = None
        if early_ms is not None:
            self.early = EarlyResults(
                steps=steps,
                every_ms=early_ms,
                busy=self._busy,
                gate=self._run_gate,
                quote_errors=log_error_messages,
            )
        self._slow_windows: set[str] = set()
        """Windows whose hooks were slow; beside each one more worker goes on until it is done."""
        self._extra_workers = 0
        """How many workers there are more than ``window_concurrency``."""
        self._workers: asyncio.TaskGroup | None = None
        self._engine.when_slow(self.add_worker_beside)
        self._runs: deque[tuple[float, int]] = deque(maxlen=_LATEST)
        """Seconds and bytes of the latest runs that succeeded."""
        self.took = Durations()
        """Windows from being taken up until their output was visible."""

    def apply_decisions(self, state: LedgerState) -> None:
        """Wake the retries of halted windows about which an operator has decided: retry, set aside or skip.

        ``state``: what has changed in the ledger (``state.since`` is not 0), or the whole ledger.
        """
        for window_id, life in self.halted.items():
            entry = state.windows.get(window_id)
            still_halted = entry.is_halted if entry is not None else bool(state.since)
            # Without a stored error there is nothing that an operator could have decided about.
            if not life.error_is_stored or still_halted:
                continue
            life.error_is_stored = False
            life.decided.set()
            decision = _DECISION_OF_STATE.get(entry.state, "retry") if entry is not None else "skip"
            log.warning("window.decided", window=window_id, decision=decision)

    def submit(self, entries: Iterable[WindowEntry]) -> None:
        """Take windows that are this server's: CUT ones are computed, COMMITTED ones published. Twice is once."""
        for entry in entries:
            if _key(entry) not in self.unfinished:
                life = WindowLife(entry, self._clock.now_ms(), self._clock.steady_ms())
                self.unfinished[_key(entry)] = life
                self.latest.append(life)
                self._idle.clear()
                self._busy.set()
                (self._ready_windows.put_nowait if self._held is None else self._held.submit)(entry)

    @property
    def trouble(self) -> str | None:
        """Which windows wait for a function that does not run here, as a clause; None: there are none."""
        return None if self._held is None else self._held.trouble

    async def run(self) -> None:
        """Compute windows until cancelled; ``policy.window_concurrency`` at a time."""
        async with asyncio.TaskGroup() as group:
            self._workers = group
            group.create_task(self.steps.clean_up(), name="replaced outputs")
            if self._held is not None:
                group.create_task(self._held.run(), name="held windows")
            if self.side_tables is not None:
                group.create_task(self.side_tables.run(), name="side tables")
            if self.early is not None:
                group.create_task(self.early.run(), name="early results")
            for _ in range(self._policy.window_concurrency):
                group.create_task(self._work_forever(), name="windows")
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                self._workers = None  # a group that ends takes no task any more

    def add_worker_beside(self, window_id: str) -> None:
        """Start one more worker beside a window whose ``on_window`` is slow, since it may hang. Called by the engine.

        At most ``window_concurrency`` extra workers run. Other windows may now run beside the slow one, even if it had to
        run alone, unless the driver died the last time that they did (``stays_alone``).
        """
        if self._workers is None:
            return
        for (each, _), life in self.unfinished.items():
            if each == window_id and not life.stays_alone:
                life.joined = True
                self._run_gate.release((self.steps.pipeline, window_id))
        if window_id not in self._slow_windows and len(self._slow_windows) < self._policy.window_concurrency:
            self._slow_windows.add(window_id)
            self._extra_workers += 1
            self._workers.create_task(self._work_forever(), name="windows")

    @property
    def is_idle(self) -> bool:
        """Whether no window is waiting or running, and nothing waits for a side table."""
        return not self.unfinished and (self.side_tables is None or self.side_tables.is_idle)

    async def idle(self) -> None:
        """Return when no window is waiting or running, and nothing waits for a side table."""
        await self._idle.wait()
        if self.side_tables is not None:
            await self.side_tables.idle()

    def oldest_seconds(self) -> float | None:
        """Return for how long the oldest window that is cut has waited to be published; None: none waits."""
        waiting = [life.submitted_ms for life in self.unfinished.values()]
        return (self._clock.steady_ms() - min(waiting)) / 1000 if waiting else None

    def section(self, windows_open: int, late_by_window: Mapping[str, int]) -> Windows:
        """Return the status document's section of windows. ``late_by_window``: the late rows of some."""
        return Windows(
            open=windows_open,
            waiting=len(self.unfinished),
            published=self.published,
            set_aside=self.set_aside,
            early=0 if self.early is None else self.early.shown,
            early_failed=0 if self.early is None else self.early.failed,
            halted=tuple(sorted(self.halted)),
            rows_out=self.rows_out,
            seconds=histogram(self.took),
            oldest_age_seconds=self.oldest_seconds(),
            latest=tuple(life.row(late_by_window.get(life.entry.window_id, 0)) for life in self.latest),
        )

    def overdue(self) -> tuple[str, float, float | None] | None:
        """Return a window that takes too long, for how many seconds already, and how many such windows usually take.

        That is a run that is far beyond the usual time of the latest runs, or a window that has been worked on for longer
        than one run may take: then the usual time is None. None: there is no such window. What waits in the queue does not
        count: after an outage, many windows wait for each other.
        """
        now_ms = self._clock.steady_ms()
        for life in self.unfinished.values():
            if life.run_ms is not None and len(self._runs) >= _FEW_RUNS and self._engine.is_ready:
                seconds, usual = (now_ms - life.run_ms) / 1000, self._usual_seconds(life.size)
                if seconds > max(_LONG_SECONDS, _LONG_TIMES * usual):
                    return life.entry.window_id, seconds, usual
            if life.begun_ms is not None:
                seconds = (now_ms - life.begun_ms) / 1000
                if seconds > allowed_seconds(self._policy.window_deadline_seconds, life.size):
                    return life.entry.window_id, seconds, None
        return None

    def _usual_seconds(self, size: int) -> float:
        """Return what a run at a window of ``size`` bytes usually takes."""
        seconds = median(seconds for seconds, _ in self._runs)
        usual_size = max(median(size for _, size in self._runs), 1)
        return seconds * max(1.0, size / usual_size)

    async def _work_forever(self) -> None:
        """One worker: run groups of ready windows, and the windows that must continue alone. An extra worker ends in time."""
        while True:
            if not self._alone:
                await self._process_group()
            # Other workers take windows from `_alone` too, so it may be empty.
            if self._alone:
                entry, committed = self._alone.popleft()
                await self._not_halted.wait()
                self.unfinished[_key(entry)].begun_ms = self._clock.steady_ms()
                with structlog.contextvars.bound_contextvars(window=entry.window_id):
                    await self._run_until_done(entry, committed)
                self._forget(entry)
            if self._extra_workers > len(self._slow_windows) and not self._alone:
                self._extra_workers -= 1
                return

    async def _process_group(self) -> None:
        """Wait for a ready window; run it with others that are ready as one job. Put those that did not finish into ``_alone``.

        A single ready window is not run here, but put into ``_alone``.
        """
        first = await self._ready_windows.get()
        await self._not_halted.wait()
        group = [first]
        size = sum(segment.bytes for segment in first.segments)
        # Large windows gain nothing by a shared job, and each would wait for all the others' outputs.
        while (
            len(group) < self._engine.group_limit and not self._ready_windows.empty() and size <= _GROUP_BYTES
        ):
            group.append(self._ready_windows.get_nowait())
            size += sum(segment.bytes for segment in group[-1].segments)
        unfinished: dict[str, Committed | None] = {first.window_id: None}
        if len(group) > 1:
            lives = [self.unfinished[_key(entry)] for entry in group]
            for life in lives:
                life.begun_ms = life.run_ms = self._clock.steady_ms()
            unfinished = await self._run_group(group)
            for life in lives:
                life.begun_ms = life.run_ms = None
        entries = {entry.window_id: entry for entry in group}
        self._alone += [(entries[window_id], committed) for window_id, committed in unfinished.items()]
        for window_id in entries.keys() - unfinished.keys():
            self._forget(entries[window_id])

    def _forget(self, entry: WindowEntry) -> None:
        """Forget a window that is published, set aside, or no longer this server's."""
        self._slow_windows.discard(entry.window_id)
        self.unfinished.pop(_key(entry), None)
        if self._held is not None:
            self._held.look()
        if not self.unfinished:
            self._idle.set()
            self._busy.clear()

    async def _run_group(self, group: Sequence[WindowEntry]) -> dict[str, Committed | None]:
        """Compute windows as one job, and publish them. Return those that must continue alone, in this order.

        The value is the window's output if that is committed and only its publication is left. A window that is known to
        have made the job fail comes last.
        """
        alone: dict[str, Committed | None] = {
            entry.window_id: None for entry in group if entry.state is WindowState.COMMITTED
        }
        entries = [entry for entry in group if entry.window_id not in alone]
        try:
            async with self._run_gate.enter(self._gate_keys(entries), alone=False):
                done = await self.steps.compute(entries)
        except RETRIED_ERRORS as error:
            log.warning(
                "window.group_failed", windows=len(entries), **fields_to_log(error, quotes=self._quote_errors)
            )
            for entry in entries:
                life = self.unfinished[_key(entry)]
                life.suspect = isinstance(error, DriverLost) and error.blame == "others"
            cause = error.where.get("window") if isinstance(error, MldserverError) else None
            return dict.fromkeys(
                sorted((entry.window_id for entry in group), key=lambda each: each == cause), None
            )
        # A window whose attempt was not committed may be another server's by now: it continues alone, which finds out.
        alone |= {entry.window_id: None for entry in entries}
        alone |= {window.entry.window_id: window for window in done or ()}
        try:
            await self._publish(done or ())
        except RETRIED_ERRORS as error:
            log.warning(
                "window.group_failed",
                windows=len(done or ()),
                **fields_to_log(error, quotes=self._quote_errors),
            )
            return alone
        for window in done or ():
            del alone[window.entry.window_id]
        return alone

    def _gate_keys(self, entries: Iterable[WindowEntry]) -> list[WindowKey]:
        return [(self.steps.pipeline, entry.window_id) for entry in entries]

    async def _publish(self, committed: Sequence[Committed]) -> None:
        """Make committed outputs visible to readers, count them, and log ``window.done`` for each. Raises as ``steps.publish``."""
        if not committed:
            return
        await self.steps.publish(committed)
        self.published += len(committed)
        now_ms = self._clock.steady_ms()
        for window in committed:
            entry, output = window.entry, window.output
            life = self.unfinished[_key(entry)]
            life.state, life.error, life.done_ms = "done", None, self._clock.now_ms()
            life.seconds, life.spark_seconds = (now_ms - life.submitted_ms) / 1000, window.seconds
            life.rows_out, life.work = output.rows_out, window.work
            self.rows_out += output.rows_out
            self.took.add(now_ms - life.submitted_ms)
            if life.run_ms is not None:
                self._runs.append(((now_ms - life.run_ms) / 1000, life.size))
            log.info(
                "window.done",
                window=entry.window_id,
                revision=entry.revision,
                rows_in=sum(segment.rows for segment in entry.segments),
                rows_out=output.rows_out,
                segments=len(entry.segments),
                files=len(output.files),
                attempt=output.attempt,
                spark_seconds=round(window.seconds, 3),
                spark_jobs=list(window.work.jobs),
                lag_seconds=life.seconds,
                seconds=round((now_ms - window.began_ms) / 1000, 3),
                path=self.steps.publisher.shown(entry.window_id) if output.files else None,
            )

    async def _run_until_done(self, entry: WindowEntry, committed: Committed | None) -> None:
        """Compute, commit and publish one window, retrying until it is published, set aside, or another server's.

        ``committed``: its output, if only the publication is left.
        """
        life = self.unfinished[_key(entry)]
        while True:
            life.joined, life.run_ms = False, self._clock.steady_ms()
            try:
                async with self._run_gate.enter(self._gate_keys([entry]), alone=life.suspect):
                    # After the commit only the publication is retried: the ledger accepts no second output.
                    committed = committed or await self._compute_or_find(entry)
                    life.error_is_stored = False  # the commit has deleted it
                    if committed is not None:
                        await self._publish([committed])
            except RETRIED_ERRORS as error:
                life.run_ms = None
                # A committed output cannot be set aside: its publication is retried without end.
                job_failed = committed is None and isinstance(error, WindowFailed | DriverLost)
                if await self._handle_failure(life, error, job_failed=job_failed):
                    break
                if committed is not None and isinstance(error, FileNotFoundError):
                    # Another server may have published the output and deleted its files: ask the ledger.
                    committed, entry = None, replace(entry, state=WindowState.COMMITTED)
            else:
                break
        # Other windows continue, unless a further window is halted.
        self.halted.pop(entry.window_id, None)
        if not self.halted:
            self._not_halted.set()

    async def _compute_or_find(self, entry: WindowEntry) -> Committed | None:
        """Compute and commit a window, or return its output if that is committed already.

        Return None if the window is done, or no longer this server's. Raises as ``steps.compute``.
        """
        if entry.state is WindowState.COMMITTED:
            return await self.steps.find_committed(entry)
        done = await self.steps.compute([entry])
        if done is None:
            return await self.steps.find_committed(entry)
        if not done:
            raise WindowFailed(
                f"An attempt at window {entry.window_id} lost its claim before it could commit.",
                did="Its output was thrown away.",
                pipeline=self.steps.pipeline,
            )
        return done[0]

    async def _handle_failure(self, life: WindowLife, error: Exception, *, job_failed: bool) -> bool:
        """Count a failure of a window and wait before its next attempt; return False. Return True if it was set aside.

        ``job_failed``: its Spark job failed, not another step. After ``window_attempts`` failures that count against the
        window, set it aside (``window_on_failure = dead_letter``), or halt it: all others wait, while it is retried once a
        minute, or as soon as an operator decides.
        """
        window_id, fields = life.entry.window_id, fields_to_log(error, quotes=self._quote_errors)
        former_traceback, life.traceback = life.traceback, _NUMBERS.sub("", fields.get("traceback") or "")
        if life.traceback and life.traceback == former_traceback:
            del fields["traceback"]  # it was logged the time before
        life.state, life.error = (
            "failed",
            str(error) if may_quote(error, quotes=self._quote_errors) else fields["what"],
        )
        counts_against_window = _count_driver_death(life, error)
        if not counts_against_window:
            life.lost_runs += 1
        elif job_failed:
            life.failed_runs += 1
        else:
            life.failed_steps += 1
        failures = max(life.failed_runs, life.failed_steps)
        must_halt = failures >= self._policy.window_attempts
        must_set_aside = (
            job_failed
            and life.failed_runs >= self._policy.window_attempts
            and self._policy.window_on_failure == "dead_letter"
        )
        if must_set_aside:
            try:
                await self._ledger.set_aside(window_id, str(error))
            except LedgerError as refused:
                # The next failure tries again to set it aside.
                fields = refused.told()
            else:
                self.set_aside += 1
                life.state = "set_aside"
                log.error("window.set_aside", attempts=life.failed_runs, **fields)
                return True
        attempts = life.failed_runs + life.failed_steps + life.lost_runs
        life.state = "halted" if must_halt else life.state
        base, cap = self._retry_seconds
        delay = cap if must_halt else backoff(attempts, base, cap, self._random())
        if must_halt and window_id not in self.halted:
            self.halted[window_id] = life
            self._not_halted.clear()
            commands = f"`mldserver windows retry {window_id}` tries it at once"
            commands += ", `set-aside` or `skip` let those behind it go on." if job_failed else "."
            fields["advice"] = " ".join(filter(None, [fields.get("advice"), commands]))
            log.error("window.halted", attempts=failures, **fields)
        else:
            log.warning("window.failed", attempt=attempts, delay_seconds=round(delay, 3), **fields)
        if not must_halt:
            await self._clock.sleep(delay)
        elif await self._store_error(life, error):
            await in_time(life.decided.wait(), self._clock, delay)
            life.decided.clear()
        return False

    async def _store_error(self, life: WindowLife, error: Exception) -> bool:
        """Store a halted window's error in the ledger. Return False if an operator has decided meanwhile."""
        try:
            is_stored = await self._ledger.halt(
                life.entry.window_id, str(error), first=not life.error_is_stored
            )
        except LedgerError:
            return True  # logged already; the next failure stores its error
        # The ledger stores a further error only if no operator has decided since the first one.
        was_decided, life.error_is_stored = life.error_is_stored and not is_stored, is_stored
        return not was_decided


def _count_driver_death(life: WindowLife, error: Exception) -> bool:
    """Return whether a failure counts against the window. If the driver died, decide whether the window must run alone.

    It must if several windows ran, any of which may have killed the driver. A death by a signal counts only if
    ``_MAX_SIGNAL_DEATHS`` happen in a row.
    """
    blame = error.blame if isinstance(error, DriverLost) else None
    life.signals = life.signals + 1 if blame == "outside" else 0
    life.suspect = life.suspect or blame == "others"
    life.stays_alone = blame == "others" and life.joined
    return blame in {None, "window"} or life.signals >= _MAX_SIGNAL_DEATHS


def _key(entry: WindowEntry) -> tuple[str, int]:
    return entry.window_id, entry.revision
