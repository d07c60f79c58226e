"""``mldserver conformance``: plays a catalogue of the daemon's behaviour at any child, and judges it."""

from __future__ import annotations

import asyncio
import fnmatch
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path  # cyclopts reads the annotations
from typing import Annotated, Any, Final

import orjson
from cyclopts import App, Parameter
from cyclopts.validators import Number

from mldserver import __version__
from mldserver.cli.render import table, write_text
from mldserver.config.kinds import address
from mldserver.conformance import catalogue
from mldserver.conformance.cases import Case
from mldserver.conformance.player import Grade, Result, Target, counts, play_all
from mldserver.errors import EXIT_CLEAN, EXIT_FAULT, ConfigError, NotThereYet, leaves

_HELP = """
Test any child of the MultiLangDaemon against the daemon's behaviour.

Each case is a separate conversation, with a separate shard: a connection to HOST:PORT or unix:PATH, or a process that
COMMAND starts and that uses its standard streams. A failed case does not affect the next.

```
mldserver serve handlers.raw --accept-gap --listen 127.0.0.1:7075 --out out/trial
mldserver conformance 127.0.0.1:7075
mldserver conformance --json report.json -- python processor.py
mldserver conformance 127.0.0.1:7075 --only 'G*'
mldserver conformance --list
```

A child takes the test records for records of its stream: never test a production child. Checkpoint cases show nothing
unless the child's handler checkpoints. `mldserver help conformance` explains the verdicts. Exit codes: 0 no case failed, 1 a
case failed.
"""
_CONNECTIONS_AT_A_TIME: Final = 32
"""Connections."""

app = App(name="conformance", help=_HELP, help_format="markdown")


@app.default
def conformance(
    *child: Annotated[
        str,
        Parameter(
            help="`HOST:PORT`, `unix:PATH`, or a command with its arguments behind `--`.",
            allow_leading_hyphen=True,
        ),
    ],
    json: Annotated[Path | None, Parameter(help="Also write every case as JSON to this file.")] = None,
    only: Annotated[
        tuple[str, ...],
        Parameter(help="Run only cases with these numbers or sections (`*` for any); may be repeated."),
    ] = (),
    list_cases: Annotated[
        bool, Parameter(name="--list", negative=(), help="Show the cases, each with its source; run none.")
    ] = False,
    patience: Annotated[
        float,
        Parameter(help="Seconds that a child may take for each line.", validator=Number(gt=0)),
    ] = 10.0,
    at_a_time: Annotated[
        int | None,
        Parameter(help="Cases at a time. [default: 32; for processes twice as many as processors]"),
    ] = None,
) -> int:
    """Play the catalogue and return the exit code."""
    cases = list(catalogue())
    if only:
        wanted = re.compile("|".join(map(fnmatch.translate, only)))
        cases = [case for case in cases if wanted.match(case.number) or wanted.match(case.section)]
    if not cases:
        raise ConfigError(f"No case is named {' or '.join(only)}.", advice="Numbers are such as G07, or G*.")
    if list_cases:
        write_text(table([_case_fields(case) for case in cases]))
        return EXIT_CLEAN
    target = _target(child)
    default_at_a_time = 2 * (os.cpu_count() or 1) if target.command else _CONNECTIONS_AT_A_TIME
    show_progress = sys.stderr.isatty()
    done = 0

    def on_result(_result: Result) -> None:
        nonlocal done
        done += 1
        if show_progress:
            sys.stderr.write(f"\r{done} of {len(cases)} cases{'' if done < len(cases) else chr(10)}")

    try:
        results = asyncio.run(
            play_all(
                cases,
                target,
                at_a_time=at_a_time or default_at_a_time,
                patience=patience,
                on_result=on_result,
            )
        )
    except ExceptionGroup as group:
        error = next(leaves(group))
        if not isinstance(error, OSError):
            raise
        raise NotThereYet(
            f"The child cannot be reached: {error.strerror or error}.",
            did="No more cases were played.",
            advice="Name where it listens, or a command that starts it.",
        ) from error
    document = report(results, child)
    if json is not None:
        json.write_bytes(orjson.dumps(document, option=orjson.OPT_INDENT_2))
    write_text(*_report_tables(document))
    return EXIT_FAULT if any(result.verdict is Grade.FAIL for result in results) else EXIT_CLEAN


def _case_fields(case: Case) -> dict[str, Any]:
    return {name: getattr(case, name) for name in ("number", "section", "title", "source")}


def _target(child: Sequence[str]) -> Target:
    """Return what the command line names as the child: its address, or the command that starts it.

    Raises ConfigError if it names nothing.
    """
    if not child:
        raise ConfigError("No child is named.", advice="Give HOST:PORT, unix:PATH, or -- COMMAND.")
    if len(child) == 1 and ("/" not in child[0] or child[0].startswith("unix:")):
        try:
            return Target(str(address.parse(child[0])))
        except ValueError:
            pass  # a command
    return Target(command=tuple(child))


def report(results: Sequence[Result], child: Sequence[str]) -> dict[str, Any]:
    """Return the result of each case, and the counts of each section by verdict, as one document."""
    return {
        "schema": 1,
        "mldserver": __version__,
        "child": list(child),
        "sections": {
            section: {verdict.value: count for verdict, count in row.items()}
            for section, row in counts(results).items()
        },
        "cases": [
            _case_fields(result.case)
            | {"verdict": str(result.verdict), "why": result.why}
            | {"seconds": round(result.seconds, 3), "said": result.said}
            for result in results
        ],
    }


def _report_tables(document: dict[str, Any]) -> list[Any]:
    """Return a report as text: a row for each section and one for all, then every case that did not pass."""
    sections = document["sections"]
    sections = sections | {"all": {grade: sum(row[grade] for row in sections.values()) for grade in Grade}}
    rows = [{"section": name, "cases": sum(row.values())} | row for name, row in sections.items()]
    not_passed = [case for case in document["cases"] if case["verdict"] != Grade.PASS]
    if not not_passed:
        return [table(rows)]
    return [table(rows), "", table(not_passed, "number verdict title why source")]
