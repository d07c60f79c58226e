"""Checks a handler in a process of its own, so that nothing it does at import reaches the caller."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

import orjson

from mldserver.runtime.loader import relative
from mldserver.runtime.spec import Finding

__all__ = ["Report", "check_handler"]

_DUMP_SECONDS: Final = 5.0
"""How long a hanging process may take to dump where it hangs."""
_FRAME: Final = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+) in ', re.MULTILINE)
"""A frame of ``faulthandler``'s dump."""
_OUTPUT_LIMIT: Final = 10_000


@dataclass(frozen=True, slots=True)
class Report:
    """What a check found."""

    findings: tuple[Finding, ...]
    summary: tuple[tuple[str, str], ...] = ()
    """What the handler has, as (name, text); empty when it cannot be run."""
    traceback: str = ""
    """Of an error that the module raised while it was imported."""
    output: str = ""
    """What the module printed while it was imported."""

    @property
    def ok(self) -> bool:
        """Whether the handler can be run."""
        return not any(finding.is_error for finding in self.findings)


def check_handler(path: str, *, retention_ms: int | None = None, timeout: float = 60.0) -> Report:
    """Import and check the handler at a dotted path in a fresh interpreter; takes at most ``timeout`` seconds."""
    with tempfile.TemporaryDirectory(prefix="mldserver-check-") as folder:
        result, printed = Path(folder, "result.json"), Path(folder, "output.txt")
        with printed.open("wb") as output:
            code = _run(
                [str(result), path, "" if retention_ms is None else str(retention_ms)], output, timeout
            )
        text = printed.read_text("utf-8", "replace")
        if result.exists():
            told = orjson.loads(result.read_bytes())
            findings = tuple(Finding(**finding) for finding in told["findings"])
            summary = tuple((name, line) for name, line in told["summary"])
            return Report(findings, summary, told["traceback"], text[-_OUTPUT_LIMIT:])
    return Report((_unfinished(code, text, timeout),), output=text[-_OUTPUT_LIMIT:])


def _run(arguments: list[str], output: IO[bytes], timeout: float) -> int | None:
    """Run the child; return its exit code, or None when it had to be killed."""
    command = [sys.executable, "-X", "faulthandler", "-m", "mldserver.runtime.check_child", *arguments]
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


def _unfinished(code: int | None, output: str, timeout: float) -> Finding:
    """Tell how the child ended without a result."""
    file, line = _last_frame(output)
    if code is None:
        return Finding(f"importing it takes longer than {timeout:g} s; the process was stopped", file, line)
    if code < 0:
        return Finding(f"it crashes the interpreter while it is imported ({_signal(-code)})", file, line)
    return Finding(
        f"it ends the process while it is imported, without an exception (exit code {code})", file, line
    )


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _last_frame(output: str) -> tuple[str, int]:
    """Return the innermost place outside the standard library and this package in a dump, if there is one."""
    own = (str(Path(__file__).parent), str(Path(os.__file__).parent), "<")
    for frame in _FRAME.finditer(output):
        file = frame["file"]
        if "site-packages" in file or not file.startswith(own):
            return relative(file), int(frame["line"])
    return "", 0
