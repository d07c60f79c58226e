"""What a worker sends without being asked: heartbeats, and what is logged and printed in it.

The heartbeat has its own thread: a handler that blocks the event loop does not stop it. Only the server writes the
log. Floods of prints, and of what the handler and its libraries log, are limited (``LineLimit``). Lines that are
lost because the server does not read are counted too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, Final

import structlog

from mldserver.children.channel import send_now
from mldserver.children.process import resident_bytes
from mldserver.observe.log_events import EVENTS
from mldserver.observe.logging import LineLimit, Logger, caught_output, set_level
from mldserver.runtime.calls import Deadlines
from mldserver.stores import StoreSize
from mldserver.workers.wire import BeatMessage, ForwardedLog

PRINTED: Final = "handler.output"
OURS: Final = frozenset(EVENTS) - {PRINTED, "library.log"}
"""The runtime's own events. They are not limited: each belongs to a call."""
LONGEST: Final = 65_536
"""Longer texts in events are cut to so many characters."""
BEAT_SECONDS: Final = 0.5
URGENT_SECONDS: Final = 1.0
"""How long a thread waits for the server to accept a warning or an error."""


class LogForwarder:
    """Sends events to the server, from any thread."""

    def __init__(self, end: socket.socket) -> None:
        """Send through ``end``."""
        self._end = end
        self._lock = threading.RLock()
        # Separate limits: a handler that prints without end must not silence what it and its libraries log.
        self._prints = LineLimit(self._report_lost)
        self._logs = LineLimit(self._report_lost)

    def forward(self, _logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        """Send an event: the last of structlog's processors."""
        self.send(method, event.pop("event"), event)
        raise structlog.DropEvent

    def send(self, method: str, name: str, event: Mapping[str, Any]) -> None:
        """Send an event, whatever the handler has done to structlog's configuration."""
        urgent = method not in {"debug", "info"}
        with self._lock:
            limit = self._prints if name == PRINTED else self._logs
            if name not in OURS and not limit.passes():
                return
            fields = {key: _plain(value) for key, value in event.items()}
            if "self" in fields:  # a handler may bind it; no logger's method can be called with it
                fields["self_"] = fields.pop("self")
            if not self._send(ForwardedLog(method, name, fields), URGENT_SECONDS if urgent else 0.0):
                limit.lost += 1

    def _send(self, line: ForwardedLog, wait_seconds: float) -> bool:
        # If the server is gone, ``Heartbeat`` ends this process, and the line has no reader.
        with contextlib.suppress(OSError):
            return send_now(self._end, line, wait_seconds=wait_seconds)
        return False

    def _report_lost(self, lines: int) -> bool:
        return self._send(ForwardedLog("warning", "log.lost", {"lines": lines}), 0.0)

    def report_lost(self) -> None:
        """Log how many lines were lost since the last report, if any."""
        with self._lock:
            self._prints.report()
            self._logs.report()


def _plain(value: Any) -> Any:
    """Return a value with long texts cut. ``channel.encode`` turns other values into text."""
    if isinstance(value, int | float | None):
        return value
    if isinstance(value, dict):
        return {_plain(str(key)): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(each) for each in value]
    text = str(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} … and {len(text) - LONGEST} characters more"


@contextlib.contextmanager
def forwarding_logs(end: socket.socket, level: int) -> Iterator[LogForwarder]:
    """While the context lasts, send events from ``level`` (a number of ``logging``) on, and what is printed."""
    forwarder = LogForwarder(end)
    set_level(level)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.format_exc_info,
            forwarder.forward,
        ],
        wrapper_class=Logger,
        cache_logger_on_first_use=False,
    )

    def printed(stream: str, text: str) -> None:
        if Logger.level <= logging.INFO:
            forwarder.send("info", PRINTED, {"stream": stream, "text": text})

    with caught_output(printed):
        yield forwarder


class Heartbeat:
    """Sends the worker's condition to the server twice a second."""

    def __init__(
        self,
        end: socket.socket,
        loop: asyncio.AbstractEventLoop,
        deadlines: Deadlines,
        report_lost: Callable[[], None],
        state_sizes: Callable[[], tuple[StoreSize, ...]] = tuple,
    ) -> None:
        """``deadlines`` measures calls and logs slow ones; ``report_lost`` logs lost lines. All run in this thread."""
        self._end = end
        self._loop = loop
        self._deadlines = deadlines
        self._reports = report_lost, deadlines.log_slow_call
        self._state_sizes = state_sizes
        self._turned = time.monotonic()
        self._resident = 0

    def start(self) -> None:
        """Send heartbeats until the process ends. Call this on the event loop."""
        self._turn()
        threading.Thread(target=self._beat, name="pulse", daemon=True).start()

    def _turn(self) -> None:
        self._turned = time.monotonic()
        self._loop.call_later(BEAT_SECONDS / 2, self._turn)

    def _beat(self) -> None:
        while True:
            now = time.monotonic()
            if self._deadlines.here is not None:  # a call keeps the loop
                self._turned = now
            blocked = max(0.0, now - self._turned - BEAT_SECONDS)
            running_ms = self._deadlines.running_ms()
            blocked_ms = round(blocked * 1000)
            beat = BeatMessage(running_ms, blocked_ms, self._resident_bytes(), self._state_sizes())
            try:
                send_now(self._end, beat)
            except OSError:
                # The server is gone, and the loop, which would have noticed, may be in the handler's hands.
                os._exit(0)
            for report in self._reports:
                with contextlib.suppress(
                    Exception
                ):  # logging that the handler broke must not end the process
                    report()
            time.sleep(BEAT_SECONDS)

    def _resident_bytes(self) -> int:
        # The handler may have used up all descriptors for a while: then repeat the last value.
        self._resident = resident_bytes(os.getpid()) or self._resident
        return self._resident
