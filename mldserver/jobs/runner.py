"""From a cut window to a published one: groups of windows, attempts, and what follows failures.

    cut ──begin_attempts──▶ engine ──commit (the only moment that counts)──▶ rename ──▶ published ──▶ segments freed

Windows that are ready together share one job and one commit, where the engine allows it. When that fails each runs
alone, so that one bad window costs the others time, and nothing else. Every step can be repeated: what a crash or a dead
server left is submitted like any other window, and goes on where it stood.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import structlog

from mldserver.base.backoff import backoff
from mldserver.base.clock import Durations, Flag, in_time
from mldserver.config.settings import WindowSettings
from mldserver.errors import (
    DriverLost,
    LedgerError,
    MldserverError,
    OperatorError,
    SparkError,
    WindowFailed,
    without_messages,
)
from mldserver.jobs.engine import allowed_seconds
from mldserver.ledger.contract import Decision, LedgerState, WindowEntry, WindowState
from mldserver.status_document import WindowRow, Windows, histogram

if TYPE_CHECKING:
    from mldserver.jobs.steps import Committed, WindowSteps

log = structlog.get_logger("mldserver")

_DECIDED: Mapping[WindowState, Decision] = {WindowState.SET_ASIDE: "set_aside", WindowState.PUBLISHED: "skip"}

_FAULTS = (SparkError, LedgerError, OperatorError, OSError)
"""What a window is tried again after; all else is a bug."""

_NUMBERS = re.compile(r"\d+")

_MOST_SIGNALS = 5
"""Deaths of a driver by a signal, in a row and with one window alone there, from which on they count against the window."""

_RETRY_SECONDS = (1.0, 60.0)
"""The first wait between two runs of a window, and the longest. Most errors of a job pass within seconds (an executor
that was lost) or not at all; a halted window is tried again once a minute, which costs a cluster little."""

_LATEST = 100
"""Latest windows, kept for the server's status."""

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
    rows_out: int | None = None
    error: str | None = None
    begun_ms: int | None = None
    """When it was taken from the queue, by the steady clock."""
    failed_runs: int = 0
    """Of its job."""
    failed_steps: int = 0
    """All else: what the ledger or the disk refused, and writing an output that counts into its table."""
    lost_runs: int = 0
    """Runs that ended with a driver's death that does not count against it."""
    signals: int = 0
    """Such deaths in a row by a signal while it was alone."""
    suspect: bool = False
    """Whether a driver died while it and others were there: it runs alone until it succeeds, or until its hook is slow."""
    joined: bool = False
    """Whether others may run beside its present attempt, because its hook is slow."""
    stays_alone: bool = False
    """Whether the driver died while others had joined it: nothing runs beside its next attempt, however slow it is."""
    traceback: str = ""
    """The one that was logged last, without its numbers: Spark counts stages and tasks in its messages."""
    decided: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when an operator has decided about it, while it is halted."""
    kept: bool = False
    """Whether the ledger holds why it is halted, as far as this server knows."""

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
            late_rows=late_rows,
            error=self.error,
        )


class _Company:
    """Lets attempts run beside each other, or one alone. Those that must be alone go first."""

    def __init__(self) -> None:
        self._changed = Flag()
        self._inside: dict[frozenset[str], bool] = {}
        """The windows of each attempt that runs and is not left out, and whether it must be alone."""
        self._alone = 0
        """How many wait to be alone."""

    @contextlib.asynccontextmanager
    async def enter(self, windows: Iterable[str], *, alone: bool) -> AsyncIterator[None]:
        """Wait for a place, and have it until the block ends."""
        key = frozenset(windows)
        self._alone += alone
        try:
            while self._inside if alone else (self._alone or any(self._inside.values())):
                await self._changed.wait()
        finally:
            self._alone -= alone
            self._wake()
        self._inside[key] = alone
        try:
            yield
        finally:
            self._inside.pop(key, None)
            self._wake()

    def leave_out(self, window_id: str) -> None:
        """Let others run as if the attempt at a window had ended."""
        for key in [key for key in self._inside if window_id in key]:
            del self._inside[key]
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed.clear()


class WindowRunner:
    """Takes cut windows and sees them through, oldest first.

    The policy says how often a window's job is run (in one life of the server), and what then. What fails beside jobs, the
    ledger or the disk, is tried again however often; as many failures of those in their turn halt the others. ``halt``:
    the window is tried again for ever, at the longest wait, and all others wait for it, unless an operator decides
    otherwise (``Ledger.decide``); ``dead_letter``: it is set aside with its segments and the others go on.

    A driver's death counts against a window that was alone there. Where several were, each runs alone from then on until it
    has succeeded, and the death counts for none. So do deaths from outside: a signal, or a cluster that is gone. A window that
    meets signals whenever it is alone is the cause after all (``_MOST_SIGNALS``).

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
        retry_seconds: tuple[float, float] = _RETRY_SECONDS,
    ) -> None:
        """Take the steps one by one; ``random`` gives [0, 1) for jitter.

        ``log_error_messages``: whether log and status quote what errors of jobs say. The ledger keeps it in any case.
        ``retry_seconds``: the first and the longest wait between runs.
        """
        self._retry_seconds = retry_seconds
        self._messages = log_error_messages
        self.steps = steps
        self._policy = policy
        self._random = random
        self._ledger, self._engine, self._clock = steps.ledger, steps.engine, steps.clock
        self._queue: asyncio.Queue[WindowEntry] = asyncio.Queue()
        self.unfinished: dict[tuple[str, int], WindowLife] = {}
        """The windows and revisions that are cut and not published yet."""
        self.latest: deque[WindowLife] = deque(maxlen=_LATEST)
        self.halted: dict[str, WindowLife] = {}
        """Windows that kept failing and that every other waits for."""
        self._go = asyncio.Event()
        self._go.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.idle = self._idle.wait
        """Returns when no window is waiting or running."""
        self.published = self.set_aside = self.rows_out = 0
        self._alone: deque[tuple[WindowEntry, Committed | None]] = deque()
        """Windows that come next, each alone, with their output where it counts already."""
        self._company = _Company()
        self._slow: set[str] = set()
        """Windows whose hooks were slow; beside each one more worker goes on until it is done."""
        self._relief = 0
        """How many workers there are more than ``window_concurrency``."""
        self._workers: asyncio.TaskGroup | None = None
        self._engine.when_slow(self.relieve)
        self.took = Durations()
        """Windows from being taken up until their output was visible."""

    def apply_decisions(self, state: LedgerState) -> None:
        """Take in what operators decided about halted windows: each is looked at again at once."""
        for window_id, life in self.halted.items():
            entry = state.windows.get(window_id)
            # Without a stored error, the window may have succeeded. A missing entry may mean no change.
            if not life.kept or (entry.is_halted if entry is not None else state.since):
                continue
            life.kept = False
            life.decided.set()
            decision = _DECIDED.get(entry.state, "retry") if entry is not None else "skip"
            log.warning("window.decided", window=window_id, decision=decision)

    def submit(self, entries: Iterable[WindowEntry]) -> None:
        """Take windows that are this server's: CUT ones are computed, COMMITTED ones published. Twice is once."""
        for entry in entries:
            if _key(entry) not in self.unfinished:
                life = WindowLife(entry, self._clock.now_ms(), self._clock.steady_ms())
                self.unfinished[_key(entry)] = life
                self.latest.append(life)
                self._idle.clear()
                self._queue.put_nowait(entry)

    async def run(self) -> None:
        """Compute windows until cancelled; ``policy.window_concurrency`` at a time."""
        async with asyncio.TaskGroup() as group:
            self._workers = group
            group.create_task(self.steps.clean_up(), name="replaced outputs")
            for _ in range(self._policy.window_concurrency):
                group.create_task(self._work(), name="windows")
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                self._workers = None  # a group that ends takes no task any more

    def relieve(self, window_id: str) -> None:
        """Let others go on beside a window whose hook is slow, and maybe hangs: as many more as run anyway, at most."""
        if self._workers is None:
            return
        for (each, _), life in self.unfinished.items():
            if each == window_id and not life.stays_alone:
                life.joined = True
                self._company.leave_out(window_id)
        if window_id in self._slow:
            return
        if len(self._slow) < self._policy.window_concurrency:
            self._slow.add(window_id)
            self._relief += 1
            self._workers.create_task(self._work(), name="windows")

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
            halted=tuple(sorted(self.halted)),
            rows_out=self.rows_out,
            seconds=histogram(self.took),
            oldest_age_seconds=self.oldest_seconds(),
            latest=tuple(life.row(late_by_window.get(life.entry.window_id, 0)) for life in self.latest),
        )

    def overdue(self) -> tuple[str, float] | None:
        """Return the window that has been worked on for longer than one run may take, and for how many seconds; None: none.

        What waits in the queue does not count: after an outage, many windows wait for each other.
        """
        begun = [life for life in self.unfinished.values() if life.begun_ms is not None]
        for life in begun:
            assert life.begun_ms is not None
            seconds = (self._clock.steady_ms() - life.begun_ms) / 1000
            size = sum(segment.bytes for segment in life.entry.segments)
            if seconds > allowed_seconds(self._policy.window_deadline_seconds, size):
                return life.entry.window_id, seconds
        return None

    async def _work(self) -> None:
        while True:
            if not self._alone:
                await self._take_group()
            # One at a time: another worker may take what this one has left.
            if self._alone:
                entry, committed = self._alone.popleft()
                await self._go.wait()
                self.unfinished[_key(entry)].begun_ms = self._clock.steady_ms()
                with structlog.contextvars.bound_contextvars(window=entry.window_id):
                    await self._see_through(entry, committed)
                self._end(entry)
            if self._relief > len(self._slow) and not self._alone:
                self._relief -= 1
                return

    async def _take_group(self) -> None:
        """Take what is ready together from the queue, and leave in ``_alone`` what must run, or go on, alone."""
        first = await self._queue.get()
        await self._go.wait()
        group = [first]
        size = sum(segment.bytes for segment in first.segments)
        # Large windows gain nothing by a shared job, and each would wait for all the others' outputs.
        while len(group) < self._engine.group_limit and not self._queue.empty() and size <= _GROUP_BYTES:
            group.append(self._queue.get_nowait())
            size += sum(segment.bytes for segment in group[-1].segments)
        left: dict[str, Committed | None] = {first.window_id: None}
        if len(group) > 1:
            lives = [self.unfinished[_key(entry)] for entry in group]
            for life in lives:
                life.begun_ms = self._clock.steady_ms()
            left = await self._together(group)
            for life in lives:
                life.begun_ms = None
        entries = {entry.window_id: entry for entry in group}
        self._alone += [(entries[window_id], committed) for window_id, committed in left.items()]
        for window_id in entries.keys() - left.keys():
            self._end(entries[window_id])

    def _end(self, entry: WindowEntry) -> None:
        self._slow.discard(entry.window_id)
        self.unfinished.pop(_key(entry), None)
        if not self.unfinished:
            self._idle.set()

    async def _together(self, group: Sequence[WindowEntry]) -> dict[str, Committed | None]:
        """See windows through as one; return those that must go on alone, with their output where it counts.

        In the order in which they go on: last the one that the others' job failed of, where that is known.
        """
        alone: dict[str, Committed | None] = {
            entry.window_id: None for entry in group if entry.state is WindowState.COMMITTED
        }
        entries = [entry for entry in group if entry.window_id not in alone]
        try:
            async with self._company.enter([entry.window_id for entry in entries], alone=False):
                done = await self.steps.compute(entries)
        except _FAULTS as error:
            log.warning("window.group_failed", windows=len(entries), **self._fields(error))
            for entry in entries:
                life = self.unfinished[_key(entry)]
                life.suspect = isinstance(error, DriverLost) and error.blame == "others"
            cause = error.where.get("window") if isinstance(error, MldserverError) else None
            return dict.fromkeys(
                sorted((entry.window_id for entry in group), key=lambda each: each == cause), None
            )
        # Whoever began an attempt and is not among them finds out alone what has become of the window.
        alone |= {entry.window_id: None for entry in entries}
        alone |= {window.entry.window_id: window for window in done or ()}
        try:
            await self._publish(done or ())
        except _FAULTS as error:
            log.warning("window.group_failed", windows=len(done or ()), **self._fields(error))
            return alone
        for window in done or ():
            del alone[window.entry.window_id]
        return alone

    async def _publish(self, committed: Sequence[Committed]) -> None:
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
            life.rows_out = output.rows_out
            self.rows_out += output.rows_out
            self.took.add(now_ms - life.submitted_ms)
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
                lag_seconds=life.seconds,
                seconds=round((now_ms - window.began_ms) / 1000, 3),
                path=self.steps.publisher.shown(entry.window_id) if output.files else None,
            )

    async def _see_through(self, entry: WindowEntry, committed: Committed | None) -> None:
        life = self.unfinished[_key(entry)]
        while True:
            life.joined = False
            try:
                async with self._company.enter([entry.window_id], alone=life.suspect):
                    # After the commit only publishing is retried: another computation would not count.
                    committed = committed or await self._commit(entry)
                    life.kept = False  # by the commit
                    if committed is not None:
                        await self._publish([committed])
            except _FAULTS as error:
                # An output that counts cannot be set aside: only publishing it is left, and tried for ever.
                of_run = committed is None and isinstance(error, WindowFailed | DriverLost)
                if await self._failed(life, error, of_run=of_run):
                    break
                if committed is not None and isinstance(error, FileNotFoundError):
                    # Somebody else may have published it, and the next revision too: the ledger knows.
                    committed, entry = None, replace(entry, state=WindowState.COMMITTED)
            else:
                break
        # The others go on, unless another window halts them.
        self.halted.pop(entry.window_id, None)
        if not self.halted:
            self._go.set()

    async def _commit(self, entry: WindowEntry) -> Committed | None:
        """Compute a window, or find its output committed. None: it is not this server's any more, or done."""
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

    async def _failed(self, life: WindowLife, error: Exception, *, of_run: bool) -> bool:
        """Apply the policy to a failed attempt; True when the window is done with."""
        window_id, fields = life.entry.window_id, self._fields(error)
        before, life.traceback = life.traceback, _NUMBERS.sub("", fields.get("traceback") or "")
        if life.traceback and life.traceback == before:
            del fields["traceback"]  # it was logged the time before
        life.state, life.error = "failed", str(error) if self._quotable(error) else fields["what"]
        counts = _counts(life, error)
        life.lost_runs += not counts
        life.failed_runs += counts and of_run
        life.failed_steps += counts and not of_run
        most = max(life.failed_runs, life.failed_steps)
        last = most >= self._policy.window_attempts
        worn_out = of_run and life.failed_runs >= self._policy.window_attempts
        if worn_out and self._policy.window_on_failure == "dead_letter":
            try:
                await self._ledger.set_aside(window_id, str(error))
            except LedgerError as refused:
                # It stays cut: the next attempt that fails tries again to put it aside.
                fields = refused.told()
            else:
                self.set_aside += 1
                life.state = "set_aside"
                log.error("window.set_aside", attempts=life.failed_runs, **fields)
                return True
        tries = life.failed_runs + life.failed_steps + life.lost_runs
        life.state = "halted" if last else life.state
        base, cap = self._retry_seconds
        delay = cap if last else backoff(tries, base, cap, self._random())
        if last and window_id not in self.halted:
            self.halted[window_id] = life
            self._go.clear()
            way_out = f"`mldserver windows retry {window_id}` tries it at once"
            way_out += ", `set-aside` or `skip` let those behind it go on." if of_run else "."
            fields["advice"] = " ".join(filter(None, [fields.get("advice"), way_out]))
            log.error("window.halted", attempts=most, **fields)
        else:
            log.warning("window.failed", attempt=tries, delay_seconds=round(delay, 3), **fields)
        if not last:
            await self._clock.sleep(delay)
        elif await self._keep_error(life, error):
            await in_time(life.decided.wait(), self._clock, delay)
            life.decided.clear()
        return False

    async def _keep_error(self, life: WindowLife, error: Exception) -> bool:
        """Store a halted window's error in the ledger. Return False if an operator has decided meanwhile."""
        try:
            kept = await self._ledger.halt(life.entry.window_id, str(error), first=not life.kept)
        except LedgerError:
            return True  # logged already; the next failure stores its error
        decided, life.kept = life.kept and not kept, kept
        return not decided

    def _quotable(self, error: Exception) -> bool:
        return self._messages or not isinstance(error, WindowFailed) or not error.quotes

    def _fields(self, error: Exception) -> dict[str, Any]:
        """Return a failure as fields of the log."""
        fields = error.told() if isinstance(error, MldserverError) else {"what": str(error)}
        if not self._quotable(error):
            fields |= {
                name: without_messages(fields[name]) for name in ("what", "traceback") if name in fields
            }
        return fields


def _counts(life: WindowLife, error: Exception) -> bool:
    """Tell whether a failure counts against the window, and note what follows from a driver's death."""
    blame = error.blame if isinstance(error, DriverLost) else None
    life.signals = life.signals + 1 if blame == "outside" else 0
    life.suspect = life.suspect or blame == "others"
    life.stays_alone = blame == "others" and life.joined
    return blame in {None, "window"} or life.signals >= _MOST_SIGNALS


def _key(entry: WindowEntry) -> tuple[str, int]:
    return entry.window_id, entry.revision
