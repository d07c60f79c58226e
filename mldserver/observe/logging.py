"""Configures structlog: JSON lines or lines for people, on standard output or in a file; libraries and prints included.

Parts of the server log with ``structlog.get_logger("mldserver")``; nothing is configured before ``logging_to``.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import structlog

from mldserver.errors import OperatorError
from mldserver.observe.log_lines import as_json, as_text
from mldserver.observe.stdout_capture import caught_output
from mldserver.observe.writer import LogOutput, LogWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping

    from mldserver.config.settings import Level, LogFormat, Settings
    from mldserver.observe.writer import Lost

_LEVELS: Final = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}

_log = structlog.get_logger("mldserver")
_current: LogWriter | None = None


class _LineLogger:
    """What structlog calls at the end of its chain: every method hands over the finished line."""

    def __init__(self, writer: LogWriter, render: Callable[[MutableMapping[str, Any]], bytes]) -> None:
        self._writer = writer
        self._render = render

    def msg(self, event: MutableMapping[str, Any]) -> None:
        """Hand over an event."""
        urgent = _LEVELS[event["level"]] >= _LEVELS["warning"]
        self._writer.line(self._render(event), stamp=event["timestamp"], urgent=urgent)

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
) -> LogWriter:
    """Send structlog's events from ``level`` on to ``output``; ``auto`` is pretty on a terminal, else JSON.

    ``observers`` see every event, at whatever level (of workers: those that they send). Return what writes the log, in a
    thread, until it is closed.
    """
    lowest = _LEVELS[level]

    def observe(logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        structlog.processors.add_log_level(logger, method, event)
        for observer in observers:
            observer(event)
        if _LEVELS[event["level"]] < lowest:
            raise structlog.DropEvent
        return event

    terminal = output.is_terminal
    pretty = log_format == "pretty" or (log_format == "auto" and terminal)
    colours = terminal and not os.environ.get("NO_COLOR")

    def render(event: MutableMapping[str, Any]) -> bytes:
        if pretty:
            return as_text(event, colours=colours).encode("utf-8", "backslashreplace")
        return as_json(event)

    def render_lost(lost: Lost) -> bytes:
        fields = {"level": "warning", "event": "log.lost", "lines": lost.lines, "since": lost.since}
        return render({"timestamp": lost.until, **fields})

    writer = LogWriter(output, render_lost)
    logger = _LineLogger(writer, render)
    structlog.configure(
        processors=[structlog.contextvars.merge_contextvars, *([observe] if observers else ()), _finish],
        wrapper_class=structlog.make_filtering_bound_logger(0 if observers else lowest),
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
        getattr(_log, level)("library.log", logger=record.name, text=text, exc_info=record.exc_info)


@contextlib.contextmanager
def libraries_through_us() -> Iterator[None]:
    """Log what libraries log, from warnings on, for as long as the context lasts."""
    root = logging.getLogger()
    former, former_level = root.handlers[:], root.level
    root.handlers[:] = [LibraryHandler()]
    root.setLevel(logging.WARNING)
    logging.captureWarnings(capture=True)
    try:
        yield
    finally:
        logging.captureWarnings(capture=False)
        root.handlers[:] = former
        root.setLevel(former_level)


@contextlib.contextmanager
def _stdout_for_the_log() -> Iterator[int]:
    """Give a descriptor of the former standard output, and let descriptor 1 be standard error meanwhile.

    Otherwise a handler's subprocess, or a C library, would write between the log's lines.
    """
    sys.stdout.flush()
    own = os.dup(1)
    os.dup2(2, 1)
    try:
        yield own
    finally:
        os.dup2(own, 1)
        os.close(own)


@contextlib.contextmanager
def logging_to(settings: Settings, *, observers: Collection[Observer] = ()) -> Iterator[LogWriter]:
    """Log as the settings say, for as long as the context lasts, prints and library logs included.

    ``observers``: as ``configure`` has them. Its end waits a few seconds at most until everything is written.

    Raises OperatorError when the log file cannot be opened.
    """
    global _current  # noqa: PLW0603  # a process has one log, as it has one standard output
    with contextlib.ExitStack() as stack:
        if settings.log_file is None:
            output = LogOutput.to_stream(stack.enter_context(_stdout_for_the_log()))
        else:
            output = LogOutput.to_file(settings.log_file)
        writer = configure(
            output, level=settings.log_level, log_format=settings.log_format, observers=observers
        )
        stack.callback(writer.close)
        stack.callback(structlog.reset_defaults)
        stack.enter_context(libraries_through_us())
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


def reopen() -> None:
    """Open the log file again (SIGHUP, after logrotate moved it). Without a log file it does nothing.

    When it cannot be opened the log goes on in the old file, and says so.
    """
    if _current is None or (path := _current.path) is None:
        return
    try:
        _current.reopen()
    except OperatorError as error:
        _log.error("log.reopen_failed", **error.told())
    else:
        _log.info("log.reopened", path=str(path))
