"""What the process was started with, and may not have: a working directory, and standard streams that take what is written."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from pathlib import Path
from typing import Final

from mldserver.errors import OperatorError

_STDOUT: Final = 1
_STDERR: Final = 2
_ESCAPED: Final = "backslashreplace"
"""For text that the terminal's encoding does not have, such as file names that are no UTF-8: no reason to fail."""


class ReaderGone(BrokenPipeError):
    """Nobody reads standard output any more: `head` and pagers end when they have seen enough."""


class StandardOutput(io.FileIO):
    """Standard output's descriptor. Where it cannot be written, that is no fault of the program, as another OSError is."""

    def write(self, data: bytes | bytearray | memoryview, /) -> int:  # type: ignore[override]  # any buffer
        """Write some of ``data``. Raises ReaderGone, and OperatorError when the disk is full; later writes go nowhere."""
        try:
            return super().write(data)
        except BrokenPipeError as error:
            _discard(self.fileno())
            raise ReaderGone(*error.args) from error
        except OSError as error:
            _discard(self.fileno())
            raise OperatorError(
                f"Standard output cannot be written: {error.strerror}.",
                did="Not all of it is there.",
                advice="Send it elsewhere.",
            ) from error


def _discard(descriptor: int) -> None:
    """Let what is still written go nowhere: Python flushes at exit, and nothing may complain then."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def guard_output() -> None:
    """Let ``sys.stdout`` tell its own errors from all others. Streams that the process was started without go nowhere."""
    for descriptor in range(_STDERR + 1):
        try:
            os.fstat(descriptor)
        except OSError:  # what is opened later must not be taken for it; the lowest that is free is this one
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stderr is None:
        sys.stderr = open(_STDERR, "w", encoding="utf-8", errors=_ESCAPED, closefd=False)  # noqa: SIM115  # for as long as the process lives
    former = sys.stdout
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(StandardOutput(_STDOUT, "w", closefd=False)),
        encoding=former.encoding if former else "utf-8",
        errors=former.errors if former and former.errors != "strict" else _ESCAPED,
        line_buffering=os.isatty(_STDOUT),
    )


def complain(text: str) -> None:
    """Write a line to standard error. Where it cannot be written there is nobody to be told."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"mldserver: {text}\n")
        sys.stderr.flush()


def working_directory() -> Path:
    """Return it. Raises OperatorError when it was deleted, or cannot be looked up."""
    try:
        return Path.cwd()
    except OSError as error:
        raise OperatorError(
            f"There is no working directory: {error.strerror}.",
            advice="Somebody has deleted it: start from another.",
        ) from error
