"""The command line: ``mldserver COMMAND``. Each command is a module of its own, imported when it is called."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

from cyclopts import App, CycloptsError

from mldserver.cli.stdio import ReaderGone, complain, guard_output
from mldserver.errors import EXIT_FAULT, EXIT_OPERATOR, MldserverError, leaves

if TYPE_CHECKING:
    from collections.abc import Sequence

EXIT_INTERRUPTED: Final = 130
"""128 + SIGINT, as shells expect."""
EXIT_READER_GONE: Final = 141
"""128 + SIGPIPE, which ends other programs where it does not end Python's."""

_HELP = """
Kinesis and DynamoDB Streams consumers in one daemon.

The MultiLangDaemon connects, handlers turn records into rows, closed windows become DataFrames on Spark, and
checkpoints follow what is durably committed.

Try it, write a handler, run it:

```
mldserver demo
mldserver check handlers.departures
mldserver sim handlers.departures --input events.jsonl
mldserver serve handlers.departures --listen 127.0.0.1:7070 --out out/departures
mldserver kcl --stream NAME --app NAME --region eu-central-1
mldserver logs -f mldserver.log --level warning
mldserver windows list --out out/departures
mldserver drain handlers.departures --out out/departures
mldserver ledger show --out out/departures
mldserver dead-letters list --out out/departures
mldserver help handlers
```
"""

# The texts stand here so that `mldserver --help` imports none of the commands.
_COMMANDS: Final = {
    "serve": "Run a handler: listen for daemons, compute windows, checkpoint.",
    "drain": "Stop the servers of a pipeline and publish all they have, so that it can be changed.",
    "check": "Import a handler and report everything that is wrong with it.",
    "sim": "Run a whole pipeline without AWS or Java, faults on request.",
    "demo": "Play real departures through the server and show the windows.",
    "logs": "Show and follow a server's log.",
    "windows": "Show windows, and run those again that were set aside.",
    "ledger": "Show where shards and servers stand; reset a shard, or accept its gap.",
    "dead-letters": "Show records that failed for good, run them again, or delete them.",
    "kcl": "Run the Java MultiLangDaemon, connected to a server.",
    "help": "Show a page of the documentation, or list the pages.",
}

_ELSEWHERE: Final = {"drain": "serve:drain_app", "sim": "play:app", "demo": "play:demo_app"}
"""Commands whose module has another's name."""


def _version() -> str:
    import mldserver  # noqa: PLC0415  # only --version asks
    from mldserver.version import commit_of  # noqa: PLC0415  # see above

    commit = commit_of(Path(mldserver.__file__).parent)
    python = f"Python {platform.python_version()}"
    return f"mldserver {mldserver.__version__} ({f'commit {commit}, ' if commit else ''}{python})"


def command_line(arguments: Sequence[str]) -> App:
    """Return the application for these arguments; commands are imported only when they are called.

    cyclopts lets a lazy command's short text replace the long help that the command brings itself, so the command
    that is called is registered without one.
    """
    app = App(
        name="mldserver",
        help=_HELP,
        help_format="markdown",
        version=_version,
        suppress_keyboard_interrupt=False,
    )
    called = next(iter(arguments), None)
    for name, text in _COMMANDS.items():
        where = _ELSEWHERE.get(name, f"{name.replace('-', '_')}:app")
        app.command(f"mldserver.cli.{where}", name=name, help=None if name == called else text)
    return app


def run(arguments: Sequence[str]) -> int:
    """Run a command and return the process's exit code.

    What the operator or their handler got wrong is told in one paragraph on standard error; tracebacks are for bugs.
    """
    try:
        result = command_line(arguments)(
            arguments, exit_on_error=False, print_error=True, result_action="return_value"
        )
        sys.stdout.flush()
    except CycloptsError:  # printed already
        return EXIT_OPERATOR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except ReaderGone:
        return EXIT_READER_GONE
    except MldserverError as error:
        return _told([error])
    except ExceptionGroup as group:  # out of a command's task group
        ours, others = group.split(MldserverError)
        nobody_reads = group.split(ReaderGone)[1] is None
        if not nobody_reads and others is not None:
            raise
        return EXIT_READER_GONE if nobody_reads or ours is None else _told(list(leaves(ours)))
    return result if isinstance(result, int) else 0


def _told(errors: list[MldserverError]) -> int:
    """Tell errors on standard error and return the exit code: 2 when only a person can do something about them all."""
    for error in errors:
        complain(str(error))
    return EXIT_OPERATOR if all(error.lasting for error in errors) else EXIT_FAULT


def main() -> NoReturn:
    """Run the command that the process was called with, and exit."""
    guard_output()
    if not sys.flags.safe_path:
        # Handlers are found in the working directory, as users of other Python servers expect. Where that was deleted
        # there are none: commands that need it say so.
        with contextlib.suppress(OSError):
            sys.path.insert(0, os.getcwd())  # noqa: PTH109  # sys.path holds text
    sys.exit(run(sys.argv[1:]))
