"""``mldserver functions``: shows the functions of a server, and changes their states and versions."""

from __future__ import annotations

import base64
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final

from cyclopts import App, Parameter

from mldserver.admin.http_client import NoAnswer
from mldserver.base.disk import sync
from mldserver.cli.ledger_tool import as_operator_errors, open_ledger
from mldserver.cli.render import AsJson, plain_text, print_result, table
from mldserver.cli.status import (
    EXIT_NOT_READY,
    FROM_SETTINGS,
    ServerOptions,
    SteeringOptions,
    fetch_status,
    function_rows,
    show_status,
)
from mldserver.cli.steer import ask, steer
from mldserver.config.settings import Settings
from mldserver.errors import EXIT_CLEAN, OperatorError
from mldserver.functions.package import Package, differences, read_package
from mldserver.ledger.contract import Wanted

EXIT_DIFFERENT: Final = 3

_HELP = """
Show the functions of a server, and change their states and versions. `mldserver help functions` explains both.

```
mldserver functions list
mldserver functions show departures
mldserver functions stage departures --code /srv/code/departures-2
mldserver functions deploy departures
mldserver functions rollback departures
mldserver functions pause departures
mldserver functions resume departures
mldserver functions undeploy departures --keep
mldserver functions export departures -o departures.zip
mldserver functions import departures.zip
mldserver functions diff departures departures.zip
```

Each change is kept in the function's ledger: every server of the function follows it within `flush_interval`, and a restart keeps it.
`list` and `show` ask the admin endpoint. The other commands use the server's Unix socket: run them on the server's host (ssh, kubectl
exec) as the server's user or root, with the server's settings file or --out.

Exit codes: 0 done; 1 no server answers; 2 the server refuses, and reports why; 3 not ready (`list`, `show`), or different (`diff`).
"""

app = App(name="functions", help=_HELP, help_format="markdown")
_OF_SERVER: Final = SteeringOptions()

Name = Annotated[str, Parameter(help="The function's name, as `mldserver functions list` shows it.")]
Yes = Annotated[bool, Parameter(negative=(), help="Accept that the version keeps state for a shorter time.")]


@app.command(name="list")
def list_functions(*, at: ServerOptions = FROM_SETTINGS, as_json: AsJson = False) -> int:
    """List the functions with their states and versions; if no server answers, what their ledgers hold."""
    try:
        _, status = fetch_status(at.client(), at.expected_pipeline())
    except NoAnswer as error:
        found = [_wanted_row(settings) for settings in at.all_resolved()]
        note = f"{error} This is what the ledgers hold:"
        print_result(as_json, {"functions": found, "note": note}, plain_text(note), "", table(found))
        return EXIT_NOT_READY
    rows = function_rows(status)
    print_result(as_json, {"functions": rows}, table(rows))
    return EXIT_CLEAN if status.ready else EXIT_NOT_READY


def _wanted_row(settings: Settings) -> dict[str, Any]:
    """Return what a function's ledger says is wanted."""
    row: dict[str, Any] = {"function": settings.pipeline, "wanted": None, "version": None, "reason": None}
    try:
        with open_ledger(settings) as (_, state, _):
            life = state.life
    except OperatorError as error:
        return row | {"reason": error.what}
    return row | {"wanted": Wanted(life.wanted).name.lower(), "version": life.deployed.id or None}


@app.command(name="show")
def show_function(name: Name, /, *, at: ServerOptions = FROM_SETTINGS, as_json: AsJson = False) -> int:
    """Show the status of one function, with its versions."""
    return show_status(at=replace(at, function=name), as_json=as_json)


@app.command
def stage(
    name: Name,
    /,
    *,
    code: Annotated[
        Path,
        Parameter(
            help="The folder from which the handler's module is imported, or a zip archive, a wheel or a package, on the server's "
            "host."
        ),
    ],
    yes: Yes = False,
    at: SteeringOptions = _OF_SERVER,
    as_json: AsJson = False,
) -> int:
    """Load another version of a function's code and check that it fits. It runs once it is deployed."""
    return _change("stage", name, at, as_json, path=str(code.absolute()), yes=yes)


@app.command
def deploy(
    name: Name, /, *, yes: Yes = False, at: SteeringOptions = _OF_SERVER, as_json: AsJson = False
) -> int:
    """Run the staged version, or start an undeployed or failed function again. Connections, leases, state and timers stay."""
    return _change("deploy", name, at, as_json, yes=yes)


@app.command
def rollback(
    name: Name, /, *, yes: Yes = False, at: SteeringOptions = _OF_SERVER, as_json: AsJson = False
) -> int:
    """Run the version that ran before."""
    return _change("rollback", name, at, as_json, yes=yes)


@app.command
def pause(name: Name, /, *, at: SteeringOptions = _OF_SERVER, as_json: AsJson = False) -> int:
    """Hold the answers to all shards: their daemons wait and keep their leases."""
    return _change("pause", name, at, as_json)


@app.command
def resume(name: Name, /, *, at: SteeringOptions = _OF_SERVER, as_json: AsJson = False) -> int:
    """Answer again."""
    return _change("resume", name, at, as_json)


@app.command
def undeploy(
    name: Name,
    /,
    *,
    keep: Annotated[
        bool, Parameter(negative=(), help="Keep positions, keyed state, timers and dead letters.")
    ] = False,
    at: SteeringOptions = _OF_SERVER,
    as_json: AsJson = False,
) -> int:
    """Stop a function on all servers and publish its open windows; then delete its positions, state, timers and dead letters."""
    return _change("undeploy", name, at, as_json, keep=keep)


@app.command
def export(
    name: Name,
    /,
    *,
    output: Annotated[Path, Parameter(name=["--output", "-o"], help="The file to write.")],
    at: SteeringOptions = _OF_SERVER,
    as_json: AsJson = False,
) -> int:
    """Write a function as a package: its settings without secrets, and its code."""
    data = _exported(name, at)
    package = read_package(data, "The answer")
    with as_operator_errors():
        output.write_bytes(data)
        sync(output)
    variables = package.variables()
    needs = f" Its secrets are variables of the environment: {', '.join(variables)}." if variables else ""
    text = f"The function {name} is in {output}: version {package.version}, {len(data):,} bytes.{needs}"
    print_result(as_json, {"file": str(output), "variables": variables}, plain_text(text))
    return EXIT_CLEAN


@app.command(name="import")
def import_package(
    file: Annotated[Path, Parameter(help="A package, on the server's host.")],
    /,
    *,
    yes: Yes = False,
    at: SteeringOptions = _OF_SERVER,
    as_json: AsJson = False,
) -> int:
    """Add the function in a package to the server, undeployed; if the function is there, stage the package's code."""
    argument = json.dumps({"path": str(file.absolute()), "yes": yes})
    return steer(at, "functions.import", argument, as_json=as_json)


@app.command
def diff(
    name: Name,
    file: Annotated[Path, Parameter(help="A package.")],
    /,
    *,
    at: SteeringOptions = _OF_SERVER,
) -> int:
    """Compare the function that the server runs with a package, as `diff -u` does."""
    with as_operator_errors():
        package: Package = read_package(file.read_bytes(), str(file))
    lines = differences(read_package(_exported(name, at), "The answer"), package)
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return EXIT_DIFFERENT if lines else EXIT_CLEAN


def _change(command: str, name: str, at: SteeringOptions, as_json: bool, **options: object) -> int:  # noqa: FBT001  # the commands' own flag
    """Send a command for a function to the server, and print the result."""
    return steer(replace(at, function=name), f"functions.{command}", json.dumps(options), as_json=as_json)


def _exported(name: str, at: SteeringOptions) -> bytes:
    """Return the package of a function. Raises NoAnswer, and OperatorError if the server refuses."""
    result = ask(replace(at, function=name), "functions.export", "{}")
    if not result.done:
        raise OperatorError(result.text)
    return base64.b64decode(result.text)
