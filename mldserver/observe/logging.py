"""Configures structlog: JSON lines or lines for people, on standard output or in a file; libraries and prints included.

Parts of the server log with ``structlog.get_logger("mldserver")``; nothing is configured before ``logging_to``.

What handlers print becomes lines of the log too: in this process (``caught_output``) and in others (``Printed``). A log on
standard output stays a log that way. A handler, or a function on Spark's workers, that prints a line for each
row makes millions of them. Were all of them logged, the event loop would have time for nothing else: a flood is cut, and
what is cut is counted.
"""

from __future__ import annotations

import codecs
import contextlib
import functools
import io
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, TextIO, TypeAlias

import structlog

from mldserver.base.uris import redaction
from mldserver.config.settings import Level, LogFormat, Settings
from mldserver.errors import OperatorError
from mldserver.observe.log_lines import as_json, as_text
from mldserver.observe.writer import LogOutput, LogWriter

_LEVELS: Final = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}

log = structlog.get_logger("mldserver")


class Logger(structlog.make_filtering_bound_logger(0)):  # type: ignore[misc]  # a class made at run time
    """What all parts log through. Its base has the methods that the level lets pass: it changes for bound loggers, too."""

    level = 0
    """As ``logging`` numbers it."""
    observed = False
    """Whether an observer receives events from info on, although only higher levels are logged."""


def set_level(level: int) -> None:
    """Log in this process what is at ``level`` (a number of ``logging``) or above from now on."""
    Logger.level = level
    passed = min(level, logging.INFO) if Logger.observed else level
    Logger.__bases__ = (structlog.make_filtering_bound_logger(passed),)


_current: LogWriter | None = None


@dataclass(frozen=True, slots=True)
class _LineLogger:
    """What structlog calls at the end of its chain: every method hands over the finished line."""

    writer: LogWriter
    render: Callable[[Mapping[str, Any]], bytes]

    def msg(self, event: MutableMapping[str, Any]) -> None:
        """Hand over an event."""
        urgent = _LEVELS[event["level"]] >= _LEVELS["warning"]
        self.writer.line(self.render(event), stamp=event["timestamp"], urgent=urgent)

    debug = info = warning = warn = error = exception = critical = fatal = log = msg


@functools.lru_cache(maxsize=2)
def _second(seconds: int) -> str:
    """Return a time as the log writes it: the calendar is asked once a second."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")


def _finish(
    logger: Any, method: str, event: MutableMapping[str, Any]
) -> tuple[tuple[MutableMapping[str, Any]], dict[str, Any]]:
    """Do all that every line needs in one step: each costs as much as the line's JSON."""
    if "exc_info" in event:
        event = structlog.processors.format_exc_info(logger, method, event)
    structlog.processors.add_log_level(logger, method, event)
    seconds, rest = divmod(time.time_ns(), 1_000_000_000)
    event["timestamp"] = f"{_second(seconds)}.{rest // 1000:06d}Z"
    return (event,), {}


Observer: TypeAlias = "Callable[[Mapping[str, Any]], None]"
"""Sees events as ``log_events.py`` declares them, in the call that logs them: it must not raise, wait or log."""


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

    ``observers`` see events from info on even where only graver ones are logged (of workers: those that they send). Lower
    ones they see where these are logged: to make them for observers alone would cost more than a batch. Return what writes
    the log, in a thread, until it is closed.
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

    hide = redaction(secrets, in_json=not pretty)

    def render(event: Mapping[str, Any]) -> bytes:
        if pretty:
            return hide(as_text(event, colours=colours)).encode("utf-8", "backslashreplace")
        line = as_json(event)
        return hide(line.decode()).encode() if secrets else line

    Logger.observed = bool(observers)
    set_level(_LEVELS[level])
    told = {"level": "warning", "event": "log.lost"}
    writer = LogWriter(
        output,
        lambda lost: render({"timestamp": lost.until, **told, "lines": lost.lines, "since": lost.since}),
    )
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


_LONGEST_LINE = 65_536
"""Characters; what has no line end by then is passed on in pieces, so that memory stays bounded."""


class CaughtStream(io.TextIOBase):
    """A text stream that passes on whole lines.

    Each thread has a line of its own: ``print(a, b)`` writes in pieces, and pieces of two threads must not mix.
    """

    encoding = "utf-8"

    def __init__(self, emit: Callable[[str], None], *, fallback: TextIO | None = None) -> None:
        """Pass lines to ``emit``. What ``emit`` itself prints goes to ``fallback``, or nowhere."""
        super().__init__()
        self._emit = emit
        self._fallback = fallback
        # Re-entrant: a signal handler may print while the same thread does.
        self._lock = threading.RLock()
        self._started: dict[int, str] = {}
        self._emitting = threading.local()
        self.buffer = _Bytes(self)
        """For handlers that write bytes."""

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, text: str, /) -> int:
        """Take text; pass on the lines that it completes."""
        if getattr(self._emitting, "now", False):
            if self._fallback is not None:
                self._fallback.write(text)
            return len(text)
        thread = threading.get_ident()
        with self._lock:
            *lines, rest = (self._started.pop(thread, "") + text).split("\n")
            while len(rest) >= _LONGEST_LINE:
                lines.append(rest[:_LONGEST_LINE])
                rest = rest[_LONGEST_LINE:]
            if rest:
                self._started[thread] = rest
        self._pass_on(lines)
        return len(text)

    def finish(self) -> None:
        """Pass on lines that were begun and never ended."""
        with self._lock:
            rest = list(self._started.values())
            self._started.clear()
        self._pass_on(rest)

    def _pass_on(self, lines: list[str]) -> None:
        self._emitting.now = True
        try:
            for line in lines:
                self._emit(line.rstrip("\r"))
        finally:
            self._emitting.now = False


class _Bytes(io.RawIOBase):
    """The bytes side of a CaughtStream."""

    def __init__(self, text: CaughtStream) -> None:
        super().__init__()
        self._text = text
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def writable(self) -> bool:
        return True

    def write(self, data: bytes | bytearray | memoryview, /) -> int:  # type: ignore[override]  # any buffer
        self._text.write(self._decoder.decode(bytes(data)))
        return len(data)


@contextlib.contextmanager
def caught_output(emit: Callable[[str, str], None]) -> Iterator[None]:
    """Log what libraries log, from warnings on, and catch what is printed, for as long as the context lasts.

    ``emit(stream, text)`` gets each line of ``sys.stdout`` and ``sys.stderr``; ``stream`` is ``stdout`` or ``stderr``.
    Whatever ``emit`` itself prints goes to the former standard error.
    """
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    former = sys.stdout, sys.stderr
    out = CaughtStream(lambda text: emit("stdout", text), fallback=former[1])
    err = CaughtStream(lambda text: emit("stderr", text), fallback=former[1])
    root.handlers[:] = [LibraryHandler()]
    root.setLevel(logging.WARNING)
    logging.captureWarnings(capture=True)
    sys.stdout, sys.stderr = out, err
    try:
        yield
    finally:
        sys.stdout, sys.stderr = former
        logging.captureWarnings(capture=False)
        root.handlers[:] = handlers
        root.setLevel(level)
        out.finish()
        err.finish()


LINES_A_SECOND: Final = 200
BURST: Final = 1000


class RateLimit:
    """Lets a burst pass, then so many lines a second."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """Begin with room for a burst; ``now`` gives seconds."""
        self._now = now
        self._room = float(BURST)
        self._at = now()

    def passes(self) -> bool:
        """Whether one more line does."""
        now = self._now()
        self._room = min(float(BURST), self._room + (now - self._at) * LINES_A_SECOND)
        self._at = now
        if self._room < 1:
            return False
        self._room -= 1
        return True


_TOLD_SECONDS: Final = 1.0
"""Seconds between two reports of omitted lines, at least."""


class Printed(RateLimit):
    """Rate limit of one stream's lines to the log: lines beyond the limit are counted, and the count is logged."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """Begin with room for a burst; ``now`` gives seconds."""
        super().__init__(now)
        self._lost = 0
        self._since = ""
        self._told = now()

    def passes(self) -> bool:
        """Return whether one more line may be logged; count the line otherwise."""
        if self._lost and self._now() - self._told >= _TOLD_SECONDS:
            self.tell()
        if super().passes():
            return True
        if not self._lost:
            self._since = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        self._lost += 1
        return False

    def tell(self) -> None:
        """Log how many lines were omitted since the last report, if any."""
        if self._lost:
            log.warning("log.lost", lines=self._lost, since=self._since)
            self._lost, self._told = 0, self._now()


@contextlib.contextmanager
def logging_to(settings: Settings, *, observers: Collection[Observer] = ()) -> Iterator[LogWriter]:
    """Log as the settings say, for as long as the context lasts, prints and library logs included.

    ``observers``: as ``configure`` has them. Its end waits a few seconds at most until everything is written.

    Raises OperatorError when the log file cannot be opened.
    """
    global _current  # noqa: PLW0603  # a process has one log, as it has one standard output
    with contextlib.ExitStack() as stack:
        if settings.log_file is None:
            # Descriptor 1 is standard error meanwhile: otherwise a handler's subprocess, or a C library, would write
            # between the log's lines.
            sys.stdout.flush()
            former = os.dup(1)
            stack.callback(os.close, former)
            stack.callback(os.dup2, former, 1)
            os.dup2(2, 1)
            output = LogOutput(os.dup(former))
        else:
            output = LogOutput(settings.log_file)
        writer = configure(
            output,
            level=settings.log_level,
            log_format=settings.log_format,
            observers=observers,
            secrets=settings.secrets(),
        )
        stack.callback(writer.close)
        stack.callback(structlog.reset_defaults)
        # A handler may configure structlog to print; what is printed is logged: if that were printed too, it would
        # never end. So this logger stays as structlog is configured now.
        now = structlog.get_config()
        ours = structlog.wrap_logger(
            now["logger_factory"](), processors=now["processors"], wrapper_class=now["wrapper_class"]
        )
        stack.enter_context(
            caught_output(lambda stream, text: ours.info("handler.output", stream=stream, text=text))
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
