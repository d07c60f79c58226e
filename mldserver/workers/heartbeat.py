"""The worker's heartbeat, from a thread of its own: a handler that keeps the loop busy does not stop it."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mldserver.children.channel import send_now
from mldserver.workers.wire import BeatMessage

if TYPE_CHECKING:
    import asyncio
    import socket
    from collections.abc import Callable, Iterable

BEAT_SECONDS: Final = 0.5
_STATM: Final = Path("/proc/self/statm")
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


class Heartbeat:
    """Tells the server twice a second how the worker is."""

    def __init__(
        self,
        end: socket.socket,
        loop: asyncio.AbstractEventLoop,
        running_ms: Callable[[], int],
        in_call: Callable[[], bool],
        tells: Iterable[Callable[[], None]],
    ) -> None:
        """``running_ms``: how long the present synchronous call runs; ``in_call``: whether one keeps the loop.

        ``tells`` log what there is to tell. All of them are called in the thread.
        """
        self._end = end
        self._loop = loop
        self._running_ms = running_ms
        self._in_call = in_call
        self._tells = tuple(tells)
        self._turned = time.monotonic()
        self._resident = 0

    def start(self) -> None:
        """Beat until the process ends. Called on the loop."""
        self._turn()
        threading.Thread(target=self._beat, name="pulse", daemon=True).start()

    def _turn(self) -> None:
        self._turned = time.monotonic()
        self._loop.call_later(BEAT_SECONDS / 2, self._turn)

    def _beat(self) -> None:
        while True:
            now = time.monotonic()
            if self._in_call():
                self._turned = now
            blocked = max(0.0, now - self._turned - BEAT_SECONDS)
            beat = BeatMessage(self._running_ms(), round(blocked * 1000), self._resident_bytes())
            try:
                send_now(self._end, beat)
            except OSError:
                # The server is gone, and the loop, which would have noticed, may be in the handler's hands.
                os._exit(0)
            for tell in self._tells:
                with contextlib.suppress(
                    Exception
                ):  # the handler may have broken the log: that is no end of life
                    tell()
            time.sleep(BEAT_SECONDS)

    def _resident_bytes(self) -> int:
        # The handler may have used up all descriptors for a while: then it is as it was.
        with contextlib.suppress(OSError):
            self._resident = int(_STATM.read_text().split()[1]) * _PAGE
        return self._resident
