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
from mldserver.engine_jobs import FunctionView, PublishJob, WindowJob
from mldserver.errors import DriverLost, QueryFailed, QueryTooLarge, WindowFailed, without_messages
from mldserver.handler.queries import Query, QueryResult, discard
from mldserver.observe.logging import LineLimit
from mldserver.spark import driver_messages as wire
from mldserver.spark.driver_functions import LoadedFunctions

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
    """One driver process, from its start to its end: sends it jobs, and accepts its messages.

    When the process ends, pending jobs raise DriverLost.
    """

    outdated = False
    """Whether another driver replaces this one: it gets no further job, and its end is not logged as a loss."""
    jvm_exit_code: int | None = None
    """Set when the JVM died before its driver."""

    def __init__(
        self,
        start: wire.StartSession,
        clock: Clock,
        *,
        cancel_grace: float,
        log_error_messages: bool = True,
        changed: Callable[[], None] = lambda: None,
        is_shared: Callable[[], bool] = lambda: False,
    ) -> None:
        """Prepare; ``cancel_grace``: seconds that a cancelled job may take to end.

        ``log_error_messages``: whether the log quotes what errors say in Spark's own log. ``changed`` is called when
        the driver has reported something else than a job's answer, or has ended. ``is_shared`` says whether several
        functions have the driver: it is then not killed for a cancelled job that does not end.
        """
        self._log_error_messages = log_error_messages
        self._changed, self._is_shared = changed, is_shared
        self.start = start
        self._clock = clock
        self._cancel_grace = cancel_grace
        self.child: ChildProcess
        self._channel: Channel[wire.FromDriver]
        self._disconnected = asyncio.Event()
        """Set when the driver can send no further message."""
        self._ids = itertools.count(1)
        self.waiting: dict[
            int, tuple[wire.Job, asyncio.Future[wire.JobDone | QueryResult | wire.FailedJob]]
        ] = {}
        """By id: each job that the driver has not answered, and the future for its answer."""
        self._on_slow: dict[int, Callable[[str], None]] = {}
        """By job: called with a window's id when its ``on_window`` is slow."""
        self._blame: Blame | None = None
        """What caused the end, if that is known before the driver is dead."""
        self._cancelling: dict[int, tuple[str, asyncio.Event]] = {}
        """By job: its function, and what is set when the driver has answered a job that was cancelled."""
        self._busy: set[int] = set()
        """The unanswered jobs, except those whose ``on_window`` is slow."""
        self._tasks: asyncio.TaskGroup | None = None
        self._last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._stdout, self._stderr = LineLimit(), LineLimit()
        self._secrets = secrets_in(start.master, start.conf)
        self._redacted = redaction(self._secrets)
        """Removes the secrets of the settings from a text: the driver, Spark and the users' code may print them."""
        self._reason = ""
        self.trouble: str | None = None
        """Why no job can run now, as the driver's health check reports: the cluster is full, for example. None: jobs run."""
        self._trouble_count = 0
        """How many reports of trouble have come."""
        self.over = asyncio.Event()
        """Set when the driver takes no further job: it is dead, or is being killed."""
        self.warm = asyncio.Event()
        """Set when a function is loaded."""
        self.functions = LoadedFunctions()
        self.started: wire.Started | None = None
        self.failed: wire.StartFailed | wire.LoadFailed | None = None
        """Why the start failed, if the driver reported it."""
        self.ended = asyncio.Event()
        """Set by the owner of this life when nothing of it is left."""
        self.jobs_done = 0

    @classmethod
    async def begin(
        cls,
        command: Sequence[str],
        environment: Mapping[str, str],
        start: wire.StartSession,
        clock: Clock,
        **options: Any,
    ) -> Life:
        """Start a driver's process and send it its start message. ``options``: as for ``Life``. Raises OSError."""
        self = cls(start, clock, **options)
        self.child = child = await ChildProcess.start(
            command, environment=environment, output=[self._log_stdout, self._log_stderr], talks=True
        )
        assert child.end is not None, "it was started with a socket"
        self._channel = Channel(child.end, wire.FromDriver, receive=self._handle, ended=self._channel_ended)
        self._channel.send(start)
        return self

    def load(self, function: wire.LoadFunction) -> None:
        """Have the driver load a function, or load it again. ``functions`` will show whether it has."""
        sinks = [sink for sink in (function.sink, *function.side_sinks.values()) if sink is not None]
        places = (each for sink in sinks for each in (sink.options, sink.target))
        self._secrets |= secrets_in(function.storage, *places)
        self._redacted = redaction(self._secrets)
        self._channel.send(function)

    def reason(self, *, briefly: bool = False) -> str:
        """Return in a sentence why the driver ended; unless ``briefly``, also its last lines of output."""
        if self._reason:
            return self._reason
        last = f" It said last: {' | '.join(self._last_lines)}" if self._last_lines and not briefly else ""
        if self.jvm_exit_code == _OUT_OF_MEMORY:
            memory = self.start.conf.get("spark.driver.memory", "Spark's default of 1g")
            return (
                f"The JVM ran out of memory (exit code {_OUT_OF_MEMORY}), and its driver ended with it. Raise "
                f"spark.driver.memory in spark_conf (now {memory}).{last}"
            )
        if self.jvm_exit_code is not None:
            return f"The JVM died ({ending(self.jvm_exit_code)}), and its driver with it.{last}"
        if self.failed is not None:
            return f"The start failed: {self.failed.error}: {self.failed.message}{last}"
        code = self.child.exit_code
        return f"The driver's process died{'' if code is None else f' ({ending(code)})'}.{last}"

    async def live(self, start_deadline: float) -> None:
        """Accept the driver's messages; return when its process is dead.

        If it is not warm within ``start_deadline`` seconds, kill it. At the end all pending jobs raise DriverLost.
        """
        try:
            async with asyncio.TaskGroup() as self._tasks:
                late = f"The driver was not ready within {start_deadline:g} seconds."
                watches = (
                    self._tasks.create_task(
                        self._kill_unless_set(self.warm, start_deadline, late, SystemClock())
                    ),
                    self._tasks.create_task(self._watch_process()),
                )
                try:
                    await self._disconnected.wait()
                finally:
                    # The task group ends, also on cancellation: `ask` must create no further task in it.
                    self.over.set()
                    self._changed()
                    for _, ended in self._cancelling.values():
                        ended.set()
                for watch in watches:
                    watch.cancel()
                await self.child.close(_DRAIN_SECONDS)
        finally:
            self.over.set()
            self._changed()
            await self.child.close()
            self._channel.close()
            blame = self._guess_blame()
            for _, answer in self.waiting.values():
                if not answer.done():
                    answer.set_exception(self._lost_error(blame))
            self._stdout.report()
            self._stderr.report()

    def _channel_ended(self, protocol_error: str | None) -> None:
        """Note that the driver's socket ended: closed (None), or because of a malformed message. Called by the channel."""
        if protocol_error is not None:
            self._reason = f"The driver's messages cannot be read: {protocol_error}"
            self._blame = self._blame or self._guess_blame()
        self._disconnected.set()

    def kill(self, reason: str) -> None:
        """Kill the driver's process; ``live`` returns soon after. The first reason counts; empty: ``failed`` has it."""
        self._reason = self._reason or reason
        self._blame = self._blame or "server"
        self.over.set()
        self.child.kill()
        self._changed()

    def stop(self) -> None:
        """Ask the driver to stop Spark and exit."""
        self._blame = "server"
        self._channel.send(wire.Stop())

    async def stop_when_warm(self) -> None:
        """Wait until the driver is warm, then stop it: a driver that only makes the class archive runs no job."""
        await self.warm.wait()
        self.stop()

    def is_cancelling(self, function: str) -> bool:
        """Whether a cancelled job of a function has not ended yet. If it does not end in time, the driver may be killed."""
        return any(name == function for name, _ in self._cancelling.values())

    def jobs_of(self, function: str) -> int:
        """Return how many jobs of a function run."""
        return sum(request.function == function for request, _ in self.waiting.values())

    @property
    def is_quiet(self) -> bool:
        """Whether no job runs, except those whose ``on_window`` is slow."""
        return not self._busy

    async def ask(
        self,
        function: str,
        work: tuple[WindowJob, ...] | PublishJob,
        deadline: float | None,
        on_slow: Callable[[str], None] = lambda _: None,
    ) -> tuple[wire.Output, ...]:
        """Send the driver one job of a function and wait for its answer: compute windows and return their outputs, or publish.

        Raises WindowFailed if the job fails or takes longer than ``deadline`` seconds, or if one of several windows has a
        slow ``on_window``; DriverLost if the driver dies. ``on_slow`` is called if the ``on_window`` of a single window is
        slow. Cancelling this call cancels the job; if the job then does not end in time, the driver is killed.
        """
        if self.over.is_set():
            raise self._lost_error("server")  # the job has not begun, so it is not the cause
        job_id = next(self._ids)
        message = wire.RunWindows if isinstance(work, tuple) else wire.Publish
        request = message(job_id, work, function)  # type: ignore[arg-type]  # each takes its own kind of work
        # An error of several windows names none: any of them may be the cause.
        where = {} if isinstance(work, tuple) and work[1:] else {"window": request.job.window.id}
        answer: asyncio.Future[wire.JobDone | QueryResult | wire.FailedJob] = (
            asyncio.get_running_loop().create_future()
        )
        self.waiting[job_id] = (request, answer)
        self._on_slow[job_id] = on_slow
        self._busy.add(job_id)
        try:
            self._channel.send(request)
            kill_point("job.running" if isinstance(request, wire.RunWindows) else "sink.writing")
            mark = self._undisturbed_mark()
            while not (await asyncio.wait({answer}, timeout=deadline))[0]:
                if mark == self._undisturbed_mark():
                    what = f"The job ran longer than its deadline of {deadline:g} seconds."
                    raise WindowFailed(what, did="It was cancelled.", **where)
                mark = (
                    self._undisturbed_mark()
                )  # the job may have waited for the cluster: its deadline begins again
            result = answer.result()
            if isinstance(result, wire.JobDone):
                return result.outputs
            assert isinstance(result, wire.FailedJob), "only queries have results"
            what = self._redacted(f"{result.error}: {result.message}")
            traceback = self._redacted(result.traceback)
            failed = WindowFailed(what, advice=result.advice, traceback=traceback, **where)
            failed.quotes = result.error not in _OWN_ERRORS
            raise failed
        finally:
            del self._on_slow[job_id]
            self._no_longer_busy(job_id)
            is_unanswered = self.waiting.pop(job_id, None) is not None
            if is_unanswered and not self.over.is_set() and self._tasks is not None:
                ended = asyncio.Event()
                # A window does not wait until the job of an early result has ended.
                is_early = not request.job.window.final
                self._cancelling[job_id] = "" if is_early else function, ended
                self._channel.send(wire.CancelJob(job_id))
                # Only killing its process stops Python code that runs in a loop.
                reason = f"A cancelled job did not end within {self._cancel_grace:g} seconds."
                self._tasks.create_task(
                    self._kill_unless_set(ended, self._cancel_grace, reason, self._clock, function)
                )

    async def query(
        self, function: str, query: Query, views: tuple[FunctionView, ...], max_bytes: int
    ) -> QueryResult:
        """Have the driver run a query of a function's handler. Cancelling this call cancels the query.

        Raises QueryTooLarge and QueryFailed, and DriverLost if the driver dies.
        """
        if self.over.is_set():
            raise self._lost_error("server")
        job_id = next(self._ids)
        request = wire.RunQuery(job_id, query, views, max_bytes, function)
        answer: asyncio.Future[wire.JobDone | QueryResult | wire.FailedJob] = (
            asyncio.get_running_loop().create_future()
        )
        self.waiting[job_id] = (request, answer)
        try:
            self._channel.send(request)
            result = await answer
        finally:
            if self.waiting.pop(job_id, None) is not None and not self.over.is_set():
                self._channel.send(wire.CancelJob(job_id))
        if isinstance(result, QueryResult):
            return result
        assert isinstance(result, wire.FailedJob), "only windows have outputs"
        error = QueryTooLarge if result.error == QueryTooLarge.__name__ else QueryFailed
        text = result.message if error is QueryTooLarge else f"{result.error}: {result.message}"
        raise error(self._redacted(text), advice=result.advice)

    def _no_longer_busy(self, job_id: int) -> None:
        self._busy.discard(job_id)
        self._changed()

    async def _kill_unless_set(
        self, event: asyncio.Event, seconds: float, reason: str, clock: Clock, function: str | None = None
    ) -> None:
        """Kill the driver if ``event`` is not set within ``seconds``. If the session was in trouble meanwhile, wait again.

        Trouble is, for example, a full cluster: another driver would have to wait for it as long. ``function``: whose job must
        end; the owner of this life may replace the driver without killing it.
        """
        mark = self._undisturbed_mark()
        # An event that is set in the same turn of the event loop as the timeout counts as set.
        while not (await in_time(event.wait(), clock, seconds) or event.is_set()):
            if mark == self._undisturbed_mark():
                if function is not None and self._is_shared():
                    self.functions.stuck[function] = reason
                    self._changed()
                else:
                    self.kill(reason)
                return
            mark = self._undisturbed_mark()

    def _undisturbed_mark(self) -> object:
        """Return a value to compare with a later call's: the two are equal only if the session had no trouble since."""
        return object() if self.trouble is not None else self._trouble_count

    async def _watch_process(self) -> None:
        """When the driver's process exits, end this life even if the socket stays open in a process that user code forked."""
        await self.child.wait()
        self.child.kill()
        # The driver's last messages may still be in the socket.
        await asyncio.sleep(_DRAIN_SECONDS)
        self._disconnected.set()

    def _handle(self, message: wire.FromDriver, files: Descriptors) -> None:
        """Store what a message of the driver reports, and wake its waiters. Called by the channel for each message."""
        match message:
            case wire.Started():
                self.started = message
            case wire.FunctionLoaded():
                self.functions.loaded.add(message.name)
                self.warm.set()
            case wire.StartFailed() | wire.LoadFailed():
                self._accept_failure(message)
            case wire.JobDone() | wire.FailedJob() | wire.QueryDone():
                self._accept_answer(message, files)
            case wire.HookSlow() if message.id in self.waiting:  # else the job was cancelled
                self._report_slow(message)
            case wire.Health():
                self.trouble = self._redacted(message.trouble) or None
                self._trouble_count += self.trouble is not None
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
        self._changed()

    def _accept_failure(self, message: wire.StartFailed | wire.LoadFailed) -> None:
        """Store why the driver, or a function in it, did not start."""
        text, traceback = self._redacted(message.message), self._redacted(message.traceback)
        message = replace(message, message=text, traceback=traceback)
        if isinstance(message, wire.LoadFailed):
            self.functions.refused[message.name] = message
        else:
            self.failed = message

    def _accept_answer(
        self, message: wire.JobDone | wire.QueryDone | wire.FailedJob, files: Descriptors
    ) -> None:
        """Give a job's answer to the call that waits for it, or note that a cancelled job has ended."""
        if message.id in self._cancelling:
            self._cancelling.pop(message.id)[1].set()
        result: wire.JobDone | wire.FailedJob | QueryResult
        result = QueryResult(files.pop(0), message.order) if isinstance(message, wire.QueryDone) else message
        _, answer = self.waiting.pop(message.id, (None, None))
        if answer is not None and not answer.done():
            self.jobs_done += not isinstance(result, wire.FailedJob)
            answer.set_result(result)
        elif isinstance(result, QueryResult):
            discard(result)

    def _report_slow(self, message: wire.HookSlow) -> None:
        """Log that a window's ``on_window`` is slow. If the job has several windows, fail it: the slow one holds the others."""
        request, answer = self.waiting[message.id]
        if self.trouble is not None:
            return  # `on_window` may wait for the cluster
        line = self._redacted(message.line)
        # The driver's log is the server's, not a function's: the event names the function.
        named = {"pipeline": request.function} if request.function else {}
        log.warning("window.slow", window=message.window, seconds=message.seconds, line=line, **named)
        has_several_windows = isinstance(request, wire.RunWindows) and len(request.jobs) > 1
        if not has_several_windows:
            self._no_longer_busy(message.id)
            self._on_slow[message.id](message.window)
        elif not answer.done():
            what = f"on_window of window {message.window} runs for {message.seconds:g} s, at {line}."
            did = "The job of several windows was cancelled."
            answer.set_exception(WindowFailed(what, did=did, window=message.window))

    def _guess_blame(self) -> Blame:
        """Return what may have caused the driver's death, from the jobs that ran and the exit code.

        "others": several windows ran, and any of them may be the cause. If one at most ran, the cause is that "window";
        or "outside", if the exit code is a signal such as the kernel's when memory is short.
        """
        if self._blame is not None:
            return self._blame
        requests = [request for request, _ in self.waiting.values()]
        running = sum(len(each.jobs) if isinstance(each, wire.RunWindows) else 1 for each in requests)
        if running + len(self._cancelling) > 1:
            return "others"
        code = self.child.exit_code if self.jvm_exit_code is None else self.jvm_exit_code
        return "outside" if code in _FROM_OUTSIDE else "window"

    def _lost_error(self, blame: Blame) -> DriverLost:
        error = DriverLost(f"The Spark driver is gone. {self.reason()}", did="A fresh one starts.")
        error.blame = blame
        return error

    def _log_stdout(self, lines: list[str]) -> bool:
        """Log lines that the user's code printed; beyond the rate limit only count them. Return whether all were logged."""
        lines = list(map(self._redacted, lines))
        if self.started is None:  # standard output explains a crash at start
            self._last_lines += [line[:_LINE_CHARACTERS] for line in lines]
        passed = [self._stdout.passes() for _ in lines]
        for line in itertools.compress(lines, passed):
            log.info("handler.output", stream="stdout", text=line)
        return all(passed)

    def _log_stderr(self, lines: list[str]) -> bool:
        """Log lines of Spark's log; beyond the rate limit only count them. Return whether all were logged."""
        entries = [
            Entry(entry.level, self._redacted(entry.text), entry.logger, self._redacted(entry.exception))
            for entry in map(parse, lines)
        ]
        if not self._log_error_messages:
            entries = [entry.without_messages() for entry in entries]
        self._last_lines += [entry.text[:_LINE_CHARACTERS] for entry in entries if entry.level != "debug"]
        passed = [self._stderr.passes() for _ in lines]
        for entry in itertools.compress(entries, passed):
            self._log(entry)
        return all(passed)

    def _log(self, entry: Entry) -> None:
        fields = {"logger": entry.logger, "text": entry.text, "exception": entry.exception}
        getattr(log, entry.level)("spark.log", **{name: value for name, value in fields.items() if value})


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

_CANCELLED = re.compile(r"Lost task .*TaskKilled \(Stage cancelled: .*cancelled part of cancelled job group")
"""Said of each task of a job that the server itself has cancelled."""

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
        """Return the entry without the messages of exceptions, which may quote the user's data; their classes stay."""
        text, exception = self.text, self.exception
        if raised := _RAISED.search(text):
            text = f"{text[: raised.start()]}{without_messages(text[raised.start() :])}"
        return Entry(self.level, text, self.logger, without_messages(exception) if exception else "")


def parse(line: str) -> Entry:
    """Return a line of the driver's standard error as a log entry. Spark's lines are JSON; Java, Python and users write text."""
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
    is_noise = _ALWAYS_SAID.search(text) or _CANCELLED.match(text) or (fields and logger in _SAID_TWICE)
    return Entry("debug" if is_noise else _LEVELS.get(level, "info"), text, logger, "\n".join(stack))
