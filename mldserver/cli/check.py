"""``mldserver check``: imports a handler in a process of its own and reports what is wrong with it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path  # cyclopts reads the annotations
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter
from cyclopts.validators import Number

from mldserver.cli import working_directory
from mldserver.config.kinds import pairs
from mldserver.errors import EXIT_FAULT, ConfigError
from mldserver.observe.log_lines import harmless
from mldserver.windows import duration_ms

if TYPE_CHECKING:
    from mldserver.runtime.trial import FailureClass, TrialReport


_HELP = """
Import a handler and report everything that is wrong with it, with file and line where possible.

```
mldserver check handlers.departures
mldserver check handlers.clicks:Clicks --retention '24 hours'
mldserver check handlers.departures --input events.jsonl
```

The handler is imported in a separate process; its printed output is shown. With `--input` records run through it
there, each once; nothing is stored. Exit code: 0 it can be run, 1 it cannot, or records failed (unless
`--allow-dead-letters`), 2 the command was called wrongly.
"""

app = App(name="check", help=_HELP, help_format="markdown")


@app.default
def check(
    handler: str,
    /,
    *,
    input: Path | None = None,  # noqa: A002  # the option's name
    limit: Annotated[int | None, Parameter(validator=Number(gte=1))] = None,
    key_field: str | None = None,
    handler_settings: list[str] | None = None,
    allow_dead_letters: Annotated[bool, Parameter(negative=())] = False,
    retention: str | None = None,
    timeout: float = 60.0,
) -> int:
    """Check a handler.

    Parameters
    ----------
    handler
        Dotted path of the handler: `package.module` or `package.module:Name`.
    input
        File of records to run through the handler, one a line, as for `sim`; .gz and .xz are unpacked.
    limit
        Run at most this many records.
    key_field
        Fields of JSON records that make their partition keys, such as `carrier,flight`. Without it each record has a
        different key.
    handler_settings
        Constants that the handler reads as `ctx.settings`, such as `threshold=20`; may be repeated.
    allow_dead_letters
        Exit with 0 even if records fail; failures are still shown.
    retention
        How long the stream keeps its records, such as '24 hours': windows must not be longer.
    timeout
        Seconds that importing the handler and running the records may take.
    """
    from mldserver.runtime.trial import check_handler  # noqa: PLC0415  # `mldserver check --help` needs none of it

    if timeout <= 0:
        raise ConfigError(f"--timeout {timeout:g} is not above zero.")
    working_directory()  # where the handler is looked for
    try:
        retention_ms = None if retention is None else duration_ms(retention)
    except ValueError as error:
        raise ConfigError(f"--retention: {error}.") from error
    try:
        settings = pairs.parse(handler_settings or [])
    except ValueError as error:
        raise ConfigError(f"--handler-settings: {error}.") from error
    lines, keys = list[bytes](), list[str]()
    if input is not None:
        from mldserver.testing.playground import partition_keys, read_lines  # noqa: PLC0415  # see above

        lines = read_lines(input, limit=limit)
        keys = [] if key_field is None else partition_keys(lines, key_field)
    report = check_handler(
        handler, retention_ms=retention_ms, timeout=timeout, lines=lines, keys=keys, settings=settings
    )
    sys.stdout.write(render(handler, report))
    passed = report.can_run if allow_dead_letters else report.ok
    return 0 if passed else EXIT_FAULT


def render(handler: str, report: TrialReport) -> str:
    """Return the text that `check` prints: the findings, the handler's output, its summary, and the result of the records.

    ``report.trial`` is the result of running records through the handler; None without ``--input``.
    """
    lines = [str(finding) for finding in report.findings]
    if report.traceback:
        lines += ["", *report.traceback.rstrip().splitlines()]
    if report.output.strip():
        lines += ["", "It printed while it was imported:" if report.trial is None else "It printed:"]
        lines += [f"  {line}" for line in report.output.rstrip().splitlines()]
    if lines and report.summary:
        lines.append("")
    lines += [f"{name:8} {text}" for name, text in report.summary]
    if trial := report.trial:
        lines += ["", f"records  {trial.records} gave {trial.rows} rows; {trial.failed} failed"]
        lines += row_lines(trial.first)
        if trial.timers:
            lines.append(
                f"timers   {trial.timers} are set at the end: `mldserver sim --fire-timers` calls them"
            )
        if trial.queries:
            often = (
                " That is too often: use a Lookup, cache=, or join in on_window."
                if trial.queries * 10 > trial.records
                else ""
            )
            lines.append(
                f"queries  {trial.queries} were made, and none was answered: a check has no Spark.{often}"
            )
        for text in failure_lines(trial.failures):
            label = "" if text.startswith(" ") else "failed"  # indented lines continue the one above
            lines.append(f"{label:8} {text}")
    errors = sum(finding.is_error for finding in report.findings)
    problems = "1 problem" if errors == 1 else f"{errors} problems"
    if trial and trial.failed:
        problems = f"{trial.failed} of {trial.records} records failed"
    lines += ["", f"{handler}: {'it can be run' if report.ok else problems}"]
    return "\n".join(lines).lstrip("\n") + "\n"


def failure_lines(failures: Iterable[FailureClass]) -> list[str]:
    """Return failed records as text: for each class of error the count, and the place and data of the first."""
    lines = []
    for failure in failures:
        lines.append(f"{failure.records} with {harmless(failure.name)}, such as")
        place = f"{failure.place}: " if failure.place else ""
        lines += [f"  {harmless(place + failure.error)}", f"  in {harmless(failure.data)}"]
    return lines


def row_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows, the names of their columns first, as lines of aligned text."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(harmless(cell).ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
