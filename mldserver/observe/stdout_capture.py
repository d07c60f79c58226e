"""What handlers print, as lines of the log: in this process (``caught_output``) and in others (``Printed``).

A log on standard output stays a log that way. A handler, or a function on Spark's workers, that prints a line for each
row makes millions of them. Were all of them logged, the event loop would have time for nothing else: a flood is cut, and
what is cut is counted.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import sys
import threading
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

import structlog

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import TextIO

log = structlog.get_logger("mldserver")

_LONGEST_LINE = 65_536
"""Characters; what has no line end by then is passed on in pieces, so that memory stays bounded."""


class CaughtStream(io.TextIOBase):
    """A text stream that passes on whole lines.

    Each thread has a line of its own: ``print(a, b)`` writes in pieces, and pieces of two threads must not mix.
    """

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

    @property
    def encoding(self) -> str:  # type: ignore[override]  # typeshed has a plain attribute
        """What bytes are taken for."""
        return "utf-8"

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
    """Replace ``sys.stdout`` and ``sys.stderr`` for a while; ``emit(stream, text)`` gets each line.

    ``stream`` is ``stdout`` or ``stderr``. Whatever ``emit`` itself prints goes to the former standard error.
    """
    former = sys.stdout, sys.stderr
    out = CaughtStream(lambda text: emit("stdout", text), fallback=former[1])
    err = CaughtStream(lambda text: emit("stderr", text), fallback=former[1])
    sys.stdout, sys.stderr = out, err
    try:
        yield
    finally:
        sys.stdout, sys.stderr = former
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
"""How often at most it is told that lines were left out."""


class Printed:
    """One stream's lines on their way into the log."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """Begin with room for a burst; ``now`` gives seconds."""
        self._now = now
        self._flood = RateLimit(now)
        self._lost = 0
        self._since = ""
        self._told = now()

    def passes(self) -> bool:
        """Whether one more line is to be logged; it is counted otherwise."""
        if self._lost and self._now() - self._told >= _TOLD_SECONDS:
            self.tell()
        if self._flood.passes():
            return True
        if not self._lost:
            self._since = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        self._lost += 1
        return False

    def tell(self) -> None:
        """Log how many lines were left out since that was told last, if there were any."""
        if self._lost:
            log.warning("log.lost", lines=self._lost, since=self._since)
            self._lost, self._told = 0, self._now()
