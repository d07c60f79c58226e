"""``mldserver check``: imports a handler in a process of its own and reports what is wrong with it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

from cyclopts import App

from mldserver.cli.process import working_directory
from mldserver.coordinator.windows import duration_ms
from mldserver.errors import ConfigError

if TYPE_CHECKING:
    from mldserver.runtime.check import Report

__all__ = ["EXIT_BROKEN", "app", "check", "render"]

EXIT_BROKEN: Final = 1

_HELP = """
Import a handler and report everything that is wrong with it, with file and line where possible.

```
mldserver check handlers.departures
mldserver check handlers.clicks:Clicks --retention '24 hours'
```

The handler is imported in a process of its own; what it prints there is shown. Exit code: 0 it can be run, 1 it
cannot, 2 the command was called wrongly.
"""

app = App(name="check", help=_HELP, help_format="markdown")


@app.default
def check(handler: str, /, *, retention: str | None = None, timeout: float = 60.0) -> int:
    """Check a handler.

    Parameters
    ----------
    handler
        Dotted path of the handler: `package.module` or `package.module:Name`.
    retention
        How long the stream keeps its records, such as '24 hours': windows must not be longer.
    timeout
        Seconds that importing the handler may take.
    """
    from mldserver.runtime.check import check_handler  # noqa: PLC0415  # `mldserver check --help` needs none of it

    if timeout <= 0:
        raise ConfigError(f"--timeout {timeout:g} is not above zero.")
    working_directory()  # where the handler is looked for
    report = check_handler(handler, retention_ms=_retention_ms(retention), timeout=timeout)
    sys.stdout.write(render(handler, report))
    return 0 if report.ok else EXIT_BROKEN


def _retention_ms(retention: str | None) -> int | None:
    try:
        return None if retention is None else duration_ms(retention)
    except ValueError as error:
        raise ConfigError(f"--retention: {error}.") from error


def render(handler: str, report: Report) -> str:
    """Return a report as text: findings as ``file:line: sentence``, then what was found."""
    lines = [str(finding) for finding in report.findings]
    if report.traceback:
        lines += ["", *report.traceback.rstrip().splitlines()]
    if report.output.strip():
        lines += ["", "It printed while it was imported:"]
        lines += [f"  {line}" for line in report.output.rstrip().splitlines()]
    if lines and report.summary:
        lines.append("")
    lines += [f"{name:8} {text}" for name, text in report.summary]
    errors = sum(finding.is_error for finding in report.findings)
    problems = "1 problem" if errors == 1 else f"{errors} problems"
    lines += ["", f"{handler}: {'it can be run' if report.ok else problems}"]
    return "\n".join(lines).lstrip("\n") + "\n"
