"""Checks a handler in a process of its own, so that nothing it does reaches the caller: its import, and trial records."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

import msgspec

from mldserver.handler.loader import is_library, relative
from mldserver.handler.spec import Finding

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mldserver.records import DeadLetter

_DUMP_SECONDS: Final = 5.0
"""How long a hanging process may take to dump where it hangs."""
_FRAME: Final = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+) in ', re.MULTILINE)
"""A frame of ``faulthandler``'s dump."""
_RAISED: Final = re.compile(r'^[ |+]*File "(?P<file>[^"]+)", line (?P<line>\d+)', re.MULTILINE)
"""A frame of a traceback."""
_OUTPUT_LIMIT: Final = 10_000
_ROWS_SHOWN: Final = 5
_COLUMNS_SHOWN: Final = 8
_CELL_WIDTH: Final = 32
_EXAMPLE_WIDTH: Final = 200


@dataclass(frozen=True, slots=True)
class FailureClass:
    """Records that failed with one class of error, and the first of them."""

    name: str
    records: int
    error: str
    """The example's message, its first line."""
    place: str
    """The line of the user's code that raised it, ``file:line``; empty when the server refused what was returned."""
    data: str
    """The beginning of the example's payload."""


def by_class(letters: Iterable[DeadLetter]) -> tuple[FailureClass, ...]:
    """Return dead letters by class of error, the most frequent first."""
    counts: dict[str, int] = {}
    examples: dict[str, DeadLetter] = {}
    for letter in letters:
        name = letter.error.partition(":")[0]
        counts[name] = counts.get(name, 0) + 1
        examples.setdefault(name, letter)
    return tuple(
        FailureClass(
            name,
            counts[name],
            _cut(" ".join(one.error.splitlines()[:1]), _EXAMPLE_WIDTH),
            _raised_at(one.traceback),
            _cut(one.data[:1000].decode("utf-8", "backslashreplace"), _EXAMPLE_WIDTH),
        )
        for name, one in sorted(examples.items(), key=lambda item: -counts[item[0]])
    )


def _raised_at(traceback: str) -> str:
    """Return the innermost place outside libraries: an error inside one is placed where the user's code called it."""
    frames = [frame for frame in _RAISED.finditer(traceback) if not frame["file"].startswith("<")]
    frames = [frame for frame in frames if not is_library(frame["file"])] or frames
    return f"{relative(frames[-1]['file'])}:{frames[-1]['line']}" if frames else ""


def first_rows(tables: Iterable[Any]) -> tuple[tuple[str, ...], ...]:
    """Return the first rows of Arrow tables of one schema as text of bounded width, below the columns' names.

    The server's own columns are left out, if there are others. Empty without rows.
    """
    shown: list[tuple[str, ...]] = []
    names: list[str] = []
    for table in tables:
        names = names or [name for name in table.column_names if not name.startswith("_")][:_COLUMNS_SHOWN]
        rows = table.slice(0, _ROWS_SHOWN - len(shown)).to_pylist()
        shown += [tuple(_cut(str(row.get(name)), _CELL_WIDTH) for name in names) for row in rows]
        if len(shown) == _ROWS_SHOWN:
            break
    return (tuple(_cut(name, _CELL_WIDTH) for name in names), *shown) if shown else ()


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


@dataclass(frozen=True, slots=True)
class Trial:
    """What became of real records."""

    records: int
    rows: int
    first: tuple[tuple[str, ...], ...]
    """As ``first_rows`` returns them."""
    failures: tuple[FailureClass, ...]

    @property
    def failed(self) -> int:
        """How many records failed."""
        return sum(each.records for each in self.failures)


@dataclass(frozen=True, slots=True)
class Report:
    """What a check found."""

    findings: tuple[Finding, ...]
    summary: tuple[tuple[str, str], ...] = ()
    """What the handler has, as (name, text); empty when it cannot be run."""
    traceback: str = ""
    """Of an error that the module raised while it was imported."""
    output: str = ""
    """What the handler printed: while it was imported, and while records ran through it."""
    trial: Trial | None = None
    """None without records, or when the handler cannot be run."""

    @property
    def ok(self) -> bool:
        """Whether the handler can be run, and took every record that it was tried with."""
        return self.can_run and not (self.trial and self.trial.failed)

    @property
    def can_run(self) -> bool:
        """Whether the handler can be run."""
        return not any(finding.is_error for finding in self.findings)


def check_handler(
    path: str,
    *,
    retention_ms: int | None = None,
    timeout: float = 60.0,
    lines: Sequence[bytes] = (),
) -> Report:
    """Import and check the handler at a dotted path in a fresh interpreter; takes at most ``timeout`` seconds.

    ``lines``: records that it is tried with, each once, as one shard's.
    """
    doing = "importing it and running the records" if lines else "importing it"
    with tempfile.TemporaryDirectory(prefix="mldserver-check-") as folder:
        result, printed = Path(folder, "result.json"), Path(folder, "output.txt")
        arguments = [str(result), path, "" if retention_ms is None else str(retention_ms)]
        if lines:
            Path(folder, "records").write_bytes(b"\n".join(lines))
            arguments.append(str(Path(folder, "records")))
        with printed.open("wb") as output:
            code = _run(arguments, output, timeout)
        text = printed.read_text("utf-8", "replace")
        if result.exists():
            report = msgspec.json.decode(result.read_bytes(), type=Report)
        else:
            report = Report((_unfinished(code, text, timeout, doing),))
    return replace(report, output=text[-_OUTPUT_LIMIT:])


def _run(arguments: list[str], output: IO[bytes], timeout: float) -> int | None:
    """Run the child; return its exit code, or None when it had to be killed."""
    command = [sys.executable, "-X", "faulthandler", "-m", "mldserver.runtime.trial_child", *arguments]
    with subprocess.Popen(  # noqa: S603  # our own interpreter and module
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
    ) as child:
        try:
            return child.wait(timeout)
        except subprocess.TimeoutExpired:
            # faulthandler answers SIGABRT with the place that each thread is at.
            child.send_signal(signal.SIGABRT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_DUMP_SECONDS)
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)


def _unfinished(code: int | None, output: str, timeout: float, doing: str) -> Finding:
    """Tell how the child ended without a result."""
    file, line = _last_frame(output)
    if code is None:
        return Finding(f"{doing} takes longer than {timeout:g} s; the process was stopped", file, line)
    if code < 0:
        return Finding(f"{doing} crashes the interpreter ({_signal(-code)})", file, line)
    return Finding(f"{doing} ends the process, without an exception (exit code {code})", file, line)


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _last_frame(output: str) -> tuple[str, int]:
    """Return the innermost place outside the standard library and this package in a dump, if there is one."""
    own = (f"{Path(__file__).parents[1]}{os.sep}", str(Path(os.__file__).parent), "<")
    for frame in _FRAME.finditer(output):
        file = frame["file"]
        if "site-packages" in file or not file.startswith(own):
            return relative(file), int(frame["line"])
    return "", 0
