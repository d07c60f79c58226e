"""One driver's life as the server sees it: from its start to the end of its socket, and every job's answer in between.

Its standard output and error become events of the log. Spark writes JSON there, by the log4j settings that ``session.py``
gives it; Java, Python and the user's code write whatever they like.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import orjson
import structlog
from msgspec.structs import replace

from mldserver.base.clock import Clock, SystemClock, in_time
from mldserver.base.kill_points import kill_point
from mldserver.base.uris import redaction, secrets_in
from mldserver.children.channel import Channel, Descriptors
from mldserver.children.process import ChildProcess, ending
from mldserver.engine_jobs import PublishJob, WindowJob
from mldserver.errors import DriverLost, WindowFailed, without_messages
from mldserver.observe.logging import LineLimit
from mldserver.spark import driver_messages as wire

log = structlog.get_logger("mldserver")

Blame = Literal["window", "others", "outside", "server"]
"""As in ``DriverLost``."""

_LAST_LINES = 20
"""Lines of a driver's standard error that explain its death."""

_LINE_CHARACTERS = 300

_FROM_OUTSIDE = frozenset(
    code
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM)
    for code in (-number, 128 + number)
)
"""Exit codes of a process that was sent a signal. Java's handlers exit with 128 plus the signal's number."""

_OUT_OF_MEMORY = 3
"""A JVM's exit code by ``-XX:+ExitOnOutOfMemoryError``."""

_DRAIN_SECONDS = 2
"""How long output may still come once the driver is dead: a worker in another group may hold the pipe a little."""


def driver_command() -> list[str]:
    """Return the command line of a driver, without its socket's number."""
    return [sys.executable, "-m", "mldserver.spark.driver"]


_OWN_ERRORS: Final = frozenset({"CountsDiffer", "HandlerInvalid", "OperatorError"})
"""Errors of jobs whose sentences are this program's, without values of rows."""
_RAISED: Final = re.compile(r"(?:[A-Za-z_$][\w$]*\.)*[A-Za-z_$][\w$]*(?:Error|Exception|Fault)(?=: )")
"""Where a line of Spark's log begins to say what an error says."""


class Life:
    """Reads one driver's messages until it ends. Pending jobs then raise DriverLost."""

    def __init__(
        self, start: wire.StartSession, clock: Clock, *, cancel_grace: float, log_error_messages: bool = True
    ) -> None:
        """Prepare; ``cancel_grace``: seconds that a cancelled job may take to end.

        ``log_error_messages``: whether the log quotes what errors say in Spark's own log.
        """
        self._messages = log_error_messages
        self._start = start
        self._clock = clock
        self._cancel_grace = cancel_grace
        self.child: ChildProcess
        self._channel: Channel[wire.FromDriver]
        self._hung_up = asyncio.Event()
        """Set when no message can come any more."""
        self._ids = itertools.count(1)
        self.waiting: dict[
            int, tuple[wire.RunWindows | wire.Publish, asyncio.Future[wire.JobDone | wire.FailedJob]]
        ] = {}
        """The jobs that it works on, by their ids, and what waits for their answers."""
        self._on_slow: dict[int, Callable[[str], None]] = {}
        """What is called when a hook of one of them is slow."""
        self._blame: Blame | None = None
        """Whose doing the end is, if that is known before the driver is dead."""
        self._cancelling: dict[int, asyncio.Event] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._stdout, self._stderr = LineLimit(), LineLimit()
        options = {} if start.sink is None else start.sink.options
        self._redacted = redaction(secrets_in(start.master, start.conf, start.storage, options))
        """Without the secrets that the driver was given: it, Spark and the user's code may say them."""
        self._reason = ""
        self.trouble: str | None = None
        """Why a job would not run, as the driver says."""
        self._troubles = 0
        """How often it has said so."""
        self.over = asyncio.Event()
        """Set when a job would not even be sent: the driver is dead, or is being killed."""
        self.warm = asyncio.Event()
        """Set when the driver is warm."""
        self.started: wire.Started | None = None
        self.failed: wire.StartFailed | None = None
        """Why the start failed, if the driver reported it."""
        self.jobs_done = 0
        self.jvm_exit_code: int | None = None
        """Set when the JVM died before its driver."""

    @classmethod
    async def begin(
        cls,
        command: Sequence[str],
        environment: Mapping[str, str],
        start: wire.StartSession,
        clock: Clock,
        *,
        cancel_grace: float,
        log_error_messages: bool = True,
    ) -> Life:
        """Start a driver's process. Raises OSError."""
        self = cls(start, clock, cancel_grace=cancel_grace, log_error_messages=log_error_messages)
        self.child = child = await ChildProcess.start(
            command, environment=environment, output=[self._take_stdout, self._take_stderr], talks=True
        )
        assert child.end is not None, "it was started with a socket"
        self._channel = Channel(child.end, wire.FromDriver, receive=self._take, ended=self._end)
        return self

    def reason(self, *, briefly: bool = False) -> str:
        """Return why the life ended, in a sentence; unless ``briefly`` with what was said last."""
        if self._reason:
            return self._reason
        said = f" It said last: {' | '.join(self._last_lines)}" if self._last_lines and not briefly else ""
        if self.jvm_exit_code == _OUT_OF_MEMORY:
            memory = self._start.conf.get("spark.driver.memory", "Spark's default of 1g")
            return (
                f"The JVM ran out of memory (exit code {_OUT_OF_MEMORY}), and its driver ended with it. Raise "
                f"spark.driver.memory in spark_conf (now {memory}).{said}"
            )
        if self.jvm_exit_code is not None:
            return f"The JVM died ({ending(self.jvm_exit_code)}), and its driver with it.{said}"
        if self.failed is not None:
            return f"The start failed: {self.failed.error}: {self.failed.message}{said}"
        code = self.child.exit_code
        return f"The driver's process died{'' if code is None else f' ({ending(code)})'}.{said}"

    async def live(self, start_deadline: float) -> None:
        """Run the life; return when the driver is dead. ``start_deadline``: seconds until it must be warm."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                late = f"The driver was not ready within {start_deadline:g} seconds."
                watches = (
                    self._tasks.create_task(
                        self._kill_unless(self.warm, start_deadline, late, SystemClock())
                    ),
                    self._tasks.create_task(self._watch_end()),
                )
                self._channel.send(self._start)
                try:
                    await self._hung_up.wait()
                finally:
                    # Also when it is cancelled: from now on the group takes no task any more.
                    self.over.set()
                    for ended in self._cancelling.values():
                        ended.set()
                for watch in watches:
                    watch.cancel()
                await self.child.close(_DRAIN_SECONDS)
        finally:
            self.over.set()
            await self.child.close()
            self._channel.close()
            blame = self._whose()
            for _, answer in self.waiting.values():
                if not answer.done():
                    answer.set_exception(self._lost(blame))
            self._stdout.report()
            self._stderr.report()

    def _end(self, garbled: str | None) -> None:
        if garbled is not None:
            self._reason = f"The driver's messages cannot be read: {garbled}"
            self._blame = self._blame or self._whose()
        self._hung_up.set()

    def kill(self, reason: str) -> None:
        """End the life at once; ``live`` returns soon after."""
        self._reason = self._reason or reason
        self._blame = self._blame or "server"
        self.over.set()
        self.child.kill()

    def stop(self) -> None:
        """Ask the driver to stop in good order."""
        self._blame = "server"
        self._channel.send(wire.Stop())

    async def stop_when_warm(self) -> None:
        """Do so: that is all a driver is for that writes the class archive."""
        await self.warm.wait()
        self.stop()

    @property
    def is_doubtful(self) -> bool:
        """Whether a job is being cancelled, and may yet cost the driver its life."""
        return bool(self._cancelling)

    async def settled(self) -> None:
        """Return when that is decided."""
        for ended in tuple(self._cancelling.values()):
            await ended.wait()

    async def ask(
        self,
        work: tuple[WindowJob, ...] | PublishJob,
        deadline: float | None,
        on_slow: Callable[[str], None] = lambda _: None,
    ) -> tuple[wire.Output, ...]:
        """Run windows as one job and return their outputs; or write an output into the table.

        Raises WindowFailed when it fails, takes longer than ``deadline`` seconds, or is of several windows one of whose hooks is
        slow; DriverLost when the driver dies. ``on_slow`` is called when the hook of a single window is slow. Cancelling this
        call cancels the job; a job that goes on all the same costs the driver its life.
        """
        if self.over.is_set():
            raise self._lost("server")  # it has not begun
        number = next(self._ids)
        run = wire.RunWindows(number, work) if isinstance(work, tuple) else wire.Publish(number, work)
        # In a group, the slow window is unknown.
        about = {} if isinstance(work, tuple) and work[1:] else {"window": run.job.window.id}
        answer: asyncio.Future[wire.JobDone | wire.FailedJob] = asyncio.get_running_loop().create_future()
        self.waiting[number] = (run, answer)
        self._on_slow[number] = on_slow
        try:
            self._channel.send(run)
            kill_point("job.running" if isinstance(run, wire.RunWindows) else "sink.writing")
            calm = self._calm()
            while not (await asyncio.wait({answer}, timeout=deadline))[0]:
                if calm == self._calm():
                    said = f"The job ran longer than its deadline of {deadline:g} seconds."
                    raise WindowFailed(said, did="It was cancelled.", **about)
                calm = self._calm()  # as in `_kill_unless`: it has its time once more
            done = answer.result()
            if isinstance(done, wire.JobDone):
                return done.outputs
            said = self._redacted(f"{done.error}: {done.message}")
            traceback = self._redacted(done.traceback)
            failed = WindowFailed(said, advice=done.advice, traceback=traceback, **about)
            failed.quotes = done.error not in _OWN_ERRORS
            raise failed
        finally:
            del self._on_slow[number]
            no_answer = self.waiting.pop(number, None) is not None
            if no_answer and not self.over.is_set() and self._tasks is not None:
                ended = self._cancelling[number] = asyncio.Event()
                self._channel.send(wire.CancelJob(number))
                # Python code in a loop cannot be stopped otherwise.
                late = f"A cancelled job did not end within {self._cancel_grace:g} seconds."
                self._tasks.create_task(self._kill_unless(ended, self._cancel_grace, late, self._clock))

    async def _kill_unless(self, event: asyncio.Event, seconds: float, reason: str, clock: Clock) -> None:
        calm = self._calm()
        # Set in the very turn in which the time is over, it counts.
        while not (await in_time(event.wait(), clock, seconds) or event.is_set()):
            if calm == self._calm():
                self.kill(reason)
                return
            # What has waited for the cluster has its time once more: another driver would not be quicker.
            calm = self._calm()

    def _calm(self) -> object:
        """Return what equals itself later if the session has not been in trouble for a moment meanwhile."""
        return object() if self.trouble is not None else self._troubles

    async def _watch_end(self) -> None:
        """Notice an end that the socket hides: a process that the user's code forked holds it open."""
        await self.child.wait()
        self.child.kill()
        # Its last words may be on their way; who left the group with the socket will not close it.
        await asyncio.sleep(_DRAIN_SECONDS)
        self._hung_up.set()

    def _take(self, message: wire.FromDriver, _files: Descriptors) -> None:
        match message:
            case wire.Started():
                self.started = message
            case wire.Warm():
                self.warm.set()
            case wire.StartFailed():
                self.failed = replace(
                    message,
                    message=self._redacted(message.message),
                    traceback=self._redacted(message.traceback),
                )
            case wire.JobDone() | wire.FailedJob():
                self._answer(message)
            case wire.HookSlow() if message.id in self.waiting:  # or it is of a job that was cancelled
                self._report_slow(message)
            case wire.Health():
                self.trouble = self._redacted(message.trouble) or None
                self._troubles += self.trouble is not None
                if message.over:
                    self._reason = self._reason or self.trouble or ""
                    self._blame = self._blame or "server"
                    self.over.set()
            case wire.JvmGone():
                self.jvm_exit_code = message.exit_code
            case wire.Log():
                text = self._redacted(message.text)
                self._last_lines.append(text[:_LINE_CHARACTERS])
                self._log(Entry(message.level, text, "mldserver.spark.driver"))

    def _answer(self, message: wire.JobDone | wire.FailedJob) -> None:
        if message.id in self._cancelling:
            self._cancelling.pop(message.id).set()
        _, answer = self.waiting.pop(message.id, (None, None))
        if answer is not None and not answer.done():
            self.jobs_done += isinstance(message, wire.JobDone)
            answer.set_result(message)

    def _report_slow(self, message: wire.HookSlow) -> None:
        run, answer = self.waiting[message.id]
        if self.trouble is not None:
            return  # the hook may wait for the cluster
        line = self._redacted(message.line)
        log.warning("window.slow", window=message.window, seconds=message.seconds, line=line)
        if not (isinstance(run, wire.RunWindows) and run.jobs[1:]):
            self._on_slow[message.id](message.window)
        elif not answer.done():
            said = f"on_window of window {message.window} runs for {message.seconds:g} s, at {line}."
            did = "The job of several windows was cancelled."
            answer.set_exception(WindowFailed(said, did=did, window=message.window))

    def _whose(self) -> Blame:
        """Return what may have caused the driver's death, from the jobs that ran and the exit code.

        "others": several windows ran, so any of them may be the cause. With one at most it is that "window", unless the exit code is a
        signal that comes from "outside", such as the kernel's when memory is short.
        """
        if self._blame is not None:
            return self._blame
        runs = [
            run.jobs if isinstance(run, wire.RunWindows) else (run.job,) for run, _ in self.waiting.values()
        ]
        if sum(map(len, runs)) + len(self._cancelling) > 1:
            return "others"
        code = self.child.exit_code if self.jvm_exit_code is None else self.jvm_exit_code
        return "outside" if code in _FROM_OUTSIDE else "window"

    def _lost(self, blame: Blame) -> DriverLost:
        error = DriverLost(f"The Spark driver is gone. {self.reason()}", did="A fresh one starts.")
        error.blame = blame
        return error

    def _take_stdout(self, lines: list[str]) -> bool:
        """Log lines, or count them; return whether all were logged."""
        lines = list(map(self._redacted, lines))
        if self.started is None:  # standard output explains a crash at start
            self._last_lines += [line[:_LINE_CHARACTERS] for line in lines]
        passed = [self._stdout.passes() for _ in lines]
        for line in itertools.compress(lines, passed):
            log.info("handler.output", stream="stdout", text=line)
        return all(passed)

    def _take_stderr(self, lines: list[str]) -> bool:
        """Log what lines say, or count them; return whether all were logged."""
        entries = [
            Entry(one.level, self._redacted(one.text), one.logger, self._redacted(one.exception))
            for one in map(parse, lines)
        ]
        if not self._messages:
            entries = [entry.without_messages() for entry in entries]
        self._last_lines += [entry.text[:_LINE_CHARACTERS] for entry in entries if entry.level != "debug"]
        passed = [self._stderr.passes() for _ in lines]
        for entry in itertools.compress(entries, passed):
            self._log(entry)
        return all(passed)

    def _log(self, entry: Entry) -> None:
        told = {"logger": entry.logger, "text": entry.text, "exception": entry.exception}
        getattr(log, entry.level)("spark.log", **{name: value for name, value in told.items() if value})


# Spark logs as errors what it then retries, and every error of the user's code. The server's own events
# (window.failed, spark.lost) report the outcome, at its proper level.
_LEVELS = {
    "TRACE": "debug",
    "DEBUG": "debug",
    "INFO": "info",
    "WARN": "warning",
    "ERROR": "warning",
    "FATAL": "error",
}

_ALWAYS_SAID = re.compile(
    r"WARNING: Using incubator modules|Using Spark's default log4j profile|Setting default log level to"
    r"|To adjust logging level use|NOTE: SPARK_\w+ is|Unable to load native-hadoop library"
)
"""Said at every start, about nothing that a person could or should change."""

_SAID_TWICE = frozenset(
    {
        "DataFrameQueryContextLogger",
        "org.apache.spark.sql.execution.datasources.FileFormatWriter",
        "org.apache.spark.util.Utils",
    }
)
"""Loggers that repeat a job's error, which comes back with the job's answer anyway."""

_FRAMES = 40
"""Lines of a Java stack that are kept."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One event: ``spark.log``, or ``handler.output`` when the user's code printed it."""

    level: str
    text: str
    logger: str = ""
    exception: str = ""

    def without_messages(self) -> Entry:
        """Return the entry without what errors say in it."""
        text, exception = self.text, self.exception
        if raised := _RAISED.search(text):
            text = f"{text[: raised.start()]}{without_messages(text[raised.start() :])}"
        return Entry(self.level, text, self.logger, without_messages(exception) if exception else "")


def parse(line: str) -> Entry:
    """Return what a line of the driver's standard error says."""
    fields: dict[str, Any] = {}
    if line.startswith("{"):
        with contextlib.suppress(ValueError):
            fields = orjson.loads(line)
    level, text, logger, stack = "INFO", line, "", []
    if "level" in fields and "msg" in fields:
        level, text, logger = str(fields["level"]), str(fields["msg"]), str(fields.get("logger", ""))
        exception = fields.get("exception")
        stack = str(exception or "").splitlines()
        if isinstance(exception, dict):  # pyspark's own logger, in Python
            stack = [f"{exception.get('class')}: {exception.get('msg')}"]
        if len(stack) > _FRAMES:
            stack[_FRAMES:] = [f"\t… {len(stack) - _FRAMES} more"]
    quiet = _ALWAYS_SAID.search(text) or (fields and logger in _SAID_TWICE)
    return Entry("debug" if quiet else _LEVELS.get(level, "info"), text, logger, "\n".join(stack))
