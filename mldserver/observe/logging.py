"""Configures structlog: JSON lines or lines for people, on standard output or in a file; libraries and prints included.

Parts of the server log with ``structlog.get_logger("mldserver")``; nothing is configured before ``logging_to``.

What handlers print becomes lines of the log too: in this process (``caught_output``) and in others (``LineLimit``). A log on
standard output stays a log that way. A handler, or a function on Spark's workers, that prints a line for each
row makes millions of them. Were all of them logged, the event loop would have time for nothing else: a flood is cut, and
what is cut is counted.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache, partial
from typing import Any, Final, TypeAlias

import structlog

from mldserver.base.lines import TextLines
from mldserver.base.uris import redaction
from mldserver.config.settings import Level, LogFormat, Settings
from mldserver.errors import OperatorError
from mldserver.observe.log_lines import as_json, as_text
from mldserver.observe.writer import LogOutput, LogWriter

_LEVELS: Final = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}

log = structlog.get_logger("mldserver")


class Logger(structlog.make_filtering_bound_logger(0)):  # type: ignore[misc]  # a class made at run time
    """The logger of all parts. Bound loggers follow a change of level, because it changes this class's base."""

    level = 0
    """The level, a number of ``logging``."""
    observed = False
    """Whether an observer receives events from info on, although only higher levels are logged."""
    secrets: frozenset[str] = frozenset()
    """What no line may hold."""
    in_json = False
    """Whether lines are JSON."""
    hide: Callable[[str], str]
    """Returns a line without the secrets."""


def hide_more(secrets: Collection[str]) -> None:
    """Hide further secrets in all lines from now on."""
    Logger.secrets |= frozenset(secrets)
    Logger.hide = redaction(Logger.secrets, in_json=Logger.in_json)


def set_level(level: int) -> None:
    """Log from ``level`` (a number of ``logging``) on in this process."""
    Logger.level = level
    passed = min(level, logging.INFO) if Logger.observed else level
    Logger.__bases__ = (structlog.make_filtering_bound_logger(passed),)


_current: LogWriter | None = None


@dataclass(frozen=True, slots=True)
class _LineLogger:
    """The end of structlog's chain: every method renders and queues the line."""

    writer: LogWriter
    render: Callable[[Mapping[str, Any]], bytes]

    def msg(self, event: MutableMapping[str, Any]) -> None:
        """Render an event and queue the line."""
        urgent = _LEVELS[event["level"]] >= _LEVELS["warning"]
        self.writer.line(self.render(event), stamp=event["timestamp"], urgent=urgent)

    debug = info = warning = warn = error = exception = critical = fatal = log = msg


@lru_cache(maxsize=2)
def _second(seconds: int) -> str:
    """Return a time in the log's form. The cache saves the calendar's work within one second."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")


def _finish(
    logger: Any, method: str, event: MutableMapping[str, Any]
) -> tuple[tuple[MutableMapping[str, Any]], dict[str, Any]]:
    """Add level, timestamp and traceback, and return the logger's arguments: structlog's last processor, one for all for speed."""
    if "exc_info" in event:
        event = structlog.processors.format_exc_info(logger, method, event)
    structlog.processors.add_log_level(logger, method, event)
    seconds, rest = divmod(time.time_ns(), 1_000_000_000)
    event["timestamp"] = f"{_second(seconds)}.{rest // 1000:06d}Z"
    return (event,), {}


Observer: TypeAlias = "Callable[[Mapping[str, Any]], None]"
"""Receives each event that is logged, in the call that logs it: it must not raise, wait or log."""


def configure(
    output: LogOutput,
    *,
    level: Level = "info",
    log_format: LogFormat = "auto",
    observers: Collection[Observer] = (),
    secrets: Collection[str] = (),
) -> LogWriter:
    """Send structlog's events from ``level`` on to ``output``; ``auto`` is pretty on a terminal, else JSON.

    No line holds one of the ``secrets``, even if a handler, a library or Spark wrote it.

    ``observers`` receive all events from info on, even if ``level`` is higher, and debug events only if these are logged: to
    make them for observers alone would cost more than a batch. Return the writer, whose thread writes until it is closed.
    """

    def observe(logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        structlog.processors.add_log_level(logger, method, event)
        for observer in observers:
            observer(event)
        if _LEVELS[event["level"]] < Logger.level:
            raise structlog.DropEvent
        return event

    terminal = output.is_terminal
    pretty = log_format == "pretty" or (log_format == "auto" and terminal)
    colours = terminal and not os.environ.get("NO_COLOR")

    Logger.secrets, Logger.in_json = frozenset(), not pretty
    hide_more(secrets)

    def render(event: Mapping[str, Any]) -> bytes:
        if pretty:
            return Logger.hide(as_text(event, colours=colours)).encode("utf-8", "backslashreplace")
        line = as_json(event)
        return Logger.hide(line.decode()).encode() if Logger.secrets else line

    Logger.observed = bool(observers)
    set_level(_LEVELS[level])

    def render_lost(lines: int, stamp: str) -> bytes:
        return render({"timestamp": stamp, "level": "warning", "event": "log.lost", "lines": lines})

    writer = LogWriter(output, render_lost)
    logger = _LineLogger(writer, render)
    structlog.configure(
        processors=[structlog.contextvars.merge_contextvars, *([observe] if observers else ()), _finish],
        wrapper_class=Logger,
        logger_factory=lambda *_names: logger,
        # Proxies at module level must follow when tests configure again; a log call costs microseconds either way.
        cache_logger_on_first_use=False,
    )
    return writer


class LibraryHandler(logging.Handler):
    """Passes on what libraries (botocore, asyncio, warnings …) log through the standard library."""

    def emit(self, record: logging.LogRecord) -> None:
        """Log the record as ``library.log``."""
        try:
            text = record.getMessage()
        except Exception:  # noqa: BLE001  # a library's wrong format arguments are no reason to lose its message
            text = f"{record.msg} {record.args}"
        level = max(
            (name for name, at in _LEVELS.items() if at <= record.levelno),
            key=_LEVELS.__getitem__,
            default="debug",
        )
        getattr(log, level)("library.log", logger=record.name, text=text, exc_info=record.exc_info)


class _CaughtLines(io.RawIOBase):
    """Passes on each line of the bytes that are written to it."""

    def __init__(self, emit: Callable[[str], None]) -> None:
        super().__init__()
        self._emit = emit
        self._lines = TextLines()
        # Re-entrant: a signal handler may print while the same thread does.
        self._lock = threading.RLock()

    def writable(self) -> bool:
        return True

    def write(self, data: bytes | bytearray | memoryview, /) -> int:  # type: ignore[override]  # any buffer
        with self._lock:
            lines = self._lines.feed_text(bytes(data))
        for line in lines:
            self._emit(line)
        return len(data)

    def finish(self) -> None:
        """Pass on a line that has no end."""
        for line in self._lines.finish_text():
            self._emit(line)


@contextlib.contextmanager
def caught_output(emit: Callable[[str, str], None]) -> Iterator[None]:
    """Log what libraries log, from warnings on, and catch what is printed, for as long as the context lasts.

    ``emit(stream, text)`` gets each line of ``sys.stdout`` and ``sys.stderr``; ``stream`` is ``stdout`` or ``stderr``. It
    must not print.
    """
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    former = sys.stdout, sys.stderr
    caught = [_CaughtLines(partial(emit, name)) for name in ("stdout", "stderr")]
    root.handlers[:] = [LibraryHandler()]
    root.setLevel(logging.WARNING)
    logging.captureWarnings(capture=True)
    sys.stdout, sys.stderr = [
        io.TextIOWrapper(each, encoding="utf-8", errors="backslashreplace", write_through=True)  # type: ignore[type-var]  # raw is enough: it is written through
        for each in caught
    ]
    try:
        yield
    finally:
        sys.stdout, sys.stderr = former
        logging.captureWarnings(capture=False)
        root.handlers[:] = handlers
        root.setLevel(level)
        for each in caught:
            each.finish()


LIMIT_LINES: Final = 1000
LIMIT_SECONDS: Final = 5.0


def _report_lost(lines: int) -> bool:
    log.warning("log.lost", lines=lines)
    return True


class LineLimit:
    """Lets LIMIT_LINES lines of one source into the log in LIMIT_SECONDS, and counts the others."""

    def __init__(
        self, report: Callable[[int], bool] = _report_lost, *, now: Callable[[], float] = time.monotonic
    ) -> None:
        """``report`` logs how many lines were omitted, and returns whether it could; ``now`` returns seconds."""
        self._report = report
        self._now = now
        self._began = now()
        self._logged = 0
        self.lost = 0
        """Lines that were omitted and are not reported yet."""

    def passes(self) -> bool:
        """Return whether one more line may be logged; count the line otherwise."""
        now = self._now()
        if now - self._began >= LIMIT_SECONDS:
            self.report()
            self._began, self._logged = now, 0
        self._logged += 1
        passed = self._logged <= LIMIT_LINES
        self.lost += not passed
        return passed

    def report(self) -> None:
        """Report the lines that were omitted since the last report, if any."""
        if self.lost and self._report(self.lost):
            self.lost = 0


@contextlib.contextmanager
def logging_to(*functions: Settings, observers: Collection[Observer] = ()) -> Iterator[LogWriter]:
    """Log as the settings say, for as long as the context lasts, prints and library logs included.

    ``functions``: the settings of each function; the log hides the secrets of all. ``observers``: see ``configure``. At the end, wait a few seconds at most until everything is written.

    Raises OperatorError when the log file cannot be opened.
    """
    global _current  # noqa: PLW0603  # a process has one log, as it has one standard output
    settings = functions[0]  # of the log, which are the same in all
    with contextlib.ExitStack() as stack:
        if settings.log_file is None:
            # Descriptor 1 is standard error meanwhile: otherwise a handler's subprocess, or a C library, would write
            # between the log's lines.
            sys.stdout.flush()
            real_stdout = os.dup(1)
            stack.callback(os.close, real_stdout)
            stack.callback(os.dup2, real_stdout, 1)
            os.dup2(2, 1)
            output = LogOutput(os.dup(real_stdout))
        else:
            output = LogOutput(settings.log_file)
        writer = configure(
            output,
            level=settings.log_level,
            log_format=settings.log_format,
            observers=observers,
            secrets=set().union(*(each.secrets() for each in functions)),
        )
        stack.callback(writer.close)
        stack.callback(structlog.reset_defaults)
        # A handler may configure structlog to print. Its prints are logged, and must not be printed again: an endless
        # loop. So the logger for prints keeps today's configuration.
        config = structlog.get_config()
        print_log = structlog.wrap_logger(
            config["logger_factory"](), processors=config["processors"], wrapper_class=config["wrapper_class"]
        )
        stack.enter_context(
            caught_output(lambda stream, text: print_log.info("handler.output", stream=stream, text=text))
        )
        _current = writer
        try:
            yield writer
        finally:
            _current = None


def lines_lost() -> int:
    """Return how many lines the log has lost: the disk was full, or its reader stalled or gone."""
    return 0 if _current is None else _current.lost


def reopen() -> None:
    """Open the log file again (SIGHUP or SIGUSR1, after logrotate moved it). Without a log file it does nothing.

    When it cannot be opened the log goes on in the old file, and says so.
    """
    if _current is None or (path := _current.path) is None:
        return
    try:
        _current.reopen()
    except OperatorError as error:
        log.error("log.reopen_failed", **error.told())
    else:
        log.info("log.reopened", path=str(path))
