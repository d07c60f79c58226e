"""A process as its host sees it: its name in ``ps``, its memory, its signals, and its reports to systemd.

systemd names a socket in ``NOTIFY_SOCKET``, and accepts datagrams of lines there (sd_notify(3)). Without that
variable the process reports nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import Final, NamedTuple

from setproctitle import setproctitle

from mldserver.base.clock import Clock

TELL_SECONDS: Final = 1.0
"""Between two reports to systemd."""
_EXTEND_US: Final = 15_000_000
"""How long a start or a stop may take from each word on (µs): as long as the event loop turns, nothing ends it."""
_TEXT_CHARACTERS: Final = 500
"""A datagram that is too long is lost, with all that is in it."""


def entitle(pipeline: str, role: str) -> None:
    """Let ``ps`` and ``top`` show what this process is: ``mldserver: departures worker 2``."""
    setproctitle(f"mldserver: {pipeline} {role}")


def keep_memory(size: int) -> None:
    """Make the process keep up to twice ``size`` freed bytes for later allocations; ``size``: less than 32 MiB.

    glibc does so after a block of that size was freed, unless mallopt(3) set M_MMAP_THRESHOLD. Otherwise it may
    return each batch's memory to the system, depending on the sizes of its line and records. The next batch then pays
    for as many page faults, a tenth to a quarter of its CPU time.
    """
    bytes(size)  # freed at once, and not even touched


@contextlib.contextmanager
def handling(signals: Mapping[signal.Signals, Callable[[], None]]) -> Iterator[None]:
    """Make the running loop call these handlers at signals. Outside the main thread, this does nothing."""
    loop = asyncio.get_running_loop()
    for number, handler in signals.items():
        with contextlib.suppress(ValueError, RuntimeError):
            loop.add_signal_handler(number, handler)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError, RuntimeError):
            for number in signals:
                loop.remove_signal_handler(number)


class ServiceReport(NamedTuple):
    """How a service is."""

    text: str
    """One line, for people."""
    ready: bool = False
    stopping: bool = False


class Service:
    """This process as a unit of systemd."""

    def __init__(self, environ: Mapping[str, str], *, clock: Clock) -> None:
        """``environ`` names systemd's socket, or does not."""
        self._address = environ.get("NOTIFY_SOCKET", "").replace("@", "\0", 1)
        self._clock = clock
        self._sent = ServiceReport("")
        """What systemd knows. Once it is ready it stays so: what is red later is in its text."""

    async def run(self, report: Callable[[], ServiceReport]) -> None:
        """Report to systemd once a second until cancelled. If the event loop hangs, no report comes: the watchdog acts."""
        try:
            while self._address:
                self._report(report())
                await self._clock.sleep(TELL_SECONDS)
        finally:
            if self._address:
                self._report(report())  # a stop may take less than a second

    def new_lines(self, report: ServiceReport) -> list[str]:
        """Return sd_notify(3) lines for what has changed since the last report. A line extends the time-out of a start or stop."""
        before = self._sent
        # A line break would begin an assignment, and systemd drops a datagram that is not valid text.
        text = "".join(each if each.isprintable() else " " for each in report.text[:_TEXT_CHARACTERS])
        self._sent = ServiceReport(text, before.ready or report.ready, report.stopping)
        is_new = {
            f"STATUS={text}": text != before.text,
            "READY=1": report.ready and not before.ready,
            "STOPPING=1": report.stopping and not before.stopping,
            f"EXTEND_TIMEOUT_USEC={_EXTEND_US}": report.stopping or not self._sent.ready,
        }
        return [line for line, new in is_new.items() if new]

    @contextlib.contextmanager
    def reloading(self) -> Iterator[None]:
        """Report a reload to systemd for as long as the context lasts. While the process starts or stops, report nothing."""
        running = self._sent.ready and not self._sent.stopping
        if running:
            self._send(["RELOADING=1", f"MONOTONIC_USEC={self._clock.steady_ms() * 1000}"])
        try:
            yield
        finally:
            if running and not self._sent.stopping:
                self._send(["READY=1"])

    def _report(self, report: ServiceReport) -> None:
        # By itself: no text that systemd or the socket refuses keeps it from the watchdog.
        self._send(["WATCHDOG=1"])
        if new_lines := self.new_lines(report):
            self._send(new_lines)

    def _send(self, lines: list[str]) -> None:
        # A failure has no consequence: systemd is gone, or does not read.
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
            end.setblocking(False)
            end.sendto("\n".join(lines).encode(errors="replace"), self._address)
