"""The command line: ``mldserver COMMAND``. Each command is a separate module, imported when it is called.

This module also handles a missing working directory, and standard streams that are closed or cannot be written.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NoReturn

from cyclopts import App, CycloptsError

from mldserver.base.uris import redacted
from mldserver.errors import EXIT_FAULT, EXIT_OPERATOR, MldserverError, OperatorError, leaves

EXIT_INTERRUPTED: Final = 130
"""128 + SIGINT, as shells expect."""
EXIT_READER_GONE: Final = 141
"""128 + SIGPIPE: the signal ends other programs, but Python ignores it."""

_PROSE_WIDTH: Final = 110

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
mldserver status
mldserver top
mldserver pause
mldserver functions list
mldserver logs -f mldserver.log --level warning
mldserver windows list --out out/departures
mldserver drain handlers.departures --out out/departures
mldserver ledger show --out out/departures
mldserver streams describe TABLE --region eu-central-1
mldserver dead-letters list --out out/departures
mldserver help handlers
```
"""

# The texts stand here so that `mldserver --help` imports none of the commands.
_COMMANDS: Final = {
    "serve": "Run a handler: listen for daemons, compute windows, checkpoint.",
    "drain": "Stop a pipeline's servers and publish all windows, so that you can change the pipeline.",
    "check": "Import a handler and report everything that is wrong with it.",
    "sim": "Run a whole pipeline without AWS or the Java daemon, with faults on request.",
    "demo": "Play real departures, or a shop's orders, through the server and show the windows.",
    "status": "Show the status of a running server; the exit code says whether it is ready.",
    "top": "Show the status of a running server, live in a terminal.",
    "pause": "Pause a running server's answers: daemons wait, and keep their leases.",
    "resume": "Resume shards that were paused or drained.",
    "flush": "Make all rows of a running server durable now.",
    "drain-shard": "Make a shard's rows durable, checkpoint it, and hold it, so that its lease can move.",
    "log-level": "Set the lowest level that a running server logs.",
    "reload": "Load the handler's new code in a running server, without losing a connection.",
    "logs": "Show and follow a server's log.",
    "functions": "Show a server's functions; stage, deploy, pause, undeploy, export and import them.",
    "windows": "Show windows; retry, set aside or skip windows that keep failing.",
    "ledger": "Show shards' positions and servers; reset a shard, or accept its gap.",
    "state": "Show the state that a handler keeps for its keys.",
    "timers": "Show the timers that a handler has set, or cancel some.",
    "dead-letters": "Show records that failed for good, run them again, or delete them.",
    "streams": "Show the stream of a DynamoDB table, and how far the pipeline has read it.",
    "kcl": "Run the Java MultiLangDaemon and connect it to a server.",
    "conformance": "Test any child of the MultiLangDaemon against the daemon's behaviour.",
}

_MODULE_OF: Final = {
    "drain": "serve:drain_app",
    "timers": "timer_commands:app",
    "windows": "window_commands:app",
    **{
        name: f"steer:{name.replace('-', '_')}_app"
        for name in ("pause", "resume", "flush", "drain-shard", "log-level", "reload")
    },
}
"""Commands whose module has a different name."""

_STDOUT: Final = 1
_STDERR: Final = 2
_ESCAPE_UNENCODABLE: Final = "backslashreplace"
"""Error handler for text that the terminal cannot encode, such as file names that are not UTF-8: escape, do not fail."""


class ReaderGone(BrokenPipeError):
    """The reader of standard output has ended: `head` and pagers end when they have seen enough."""


class StandardOutput(io.FileIO):
    """Standard output's descriptor. Its write errors are not faults of the program, unlike other OSErrors."""

    def write(self, data: bytes | bytearray | memoryview, /) -> int:  # type: ignore[override]  # any buffer
        """Write some of ``data``. Raises ReaderGone if the reader has ended, OperatorError for other errors (a full disk).

        After an error the descriptor is the null device: Python flushes at exit, and must not fail again then.
        """
        try:
            return super().write(data)
        except OSError as error:
            null_device = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null_device, self.fileno())
            os.close(null_device)
            if isinstance(error, BrokenPipeError):
                raise ReaderGone(*error.args) from error
            raise OperatorError(
                f"Standard output cannot be written: {error.strerror}.",
                did="Not all of it is there.",
                advice="Send it elsewhere.",
            ) from error


def protect_standard_streams() -> None:
    """Make ``sys.stdout`` raise its write errors as ``StandardOutput`` does. Replace missing standard streams by the null device.

    A file that is opened later would otherwise get the number of the missing stream, and receive its output.
    """
    for descriptor in range(_STDERR + 1):
        try:
            os.fstat(descriptor)
        except OSError:  # it is closed, and the lowest free number: the next file gets it
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stderr is None:
        sys.stderr = open(_STDERR, "w", encoding="utf-8", errors=_ESCAPE_UNENCODABLE, closefd=False)  # noqa: SIM115  # for as long as the process lives
    former = sys.stdout
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(StandardOutput(_STDOUT, "w", closefd=False)),
        encoding=former.encoding if former else "utf-8",
        errors=former.errors if former and former.errors != "strict" else _ESCAPE_UNENCODABLE,
        line_buffering=os.isatty(_STDOUT),
    )


def print_error(text: str) -> None:
    """Write a line to standard error. Ignore an error of that write: it cannot be reported."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"mldserver: {redacted(text)}\n")
        sys.stderr.flush()


def working_directory() -> Path:
    """Return the working directory. Raises OperatorError when it was deleted, or cannot be read."""
    try:
        return Path.cwd()
    except OSError as error:
        raise OperatorError(
            f"There is no working directory: {error.strerror}.",
            advice="The folder was deleted: start from another.",
        ) from error


def _version() -> str:
    import mldserver  # noqa: PLC0415  # only --version asks
    from mldserver.version import commit_of  # noqa: PLC0415  # see above

    commit = commit_of(Path(mldserver.__file__).parent)
    python = f"Python {platform.python_version()}"
    return f"mldserver {mldserver.__version__} ({f'commit {commit}, ' if commit else ''}{python})"


def show_page(topic: str | None = None, /) -> None:
    """Show a page of the documentation. Without a topic: list the pages.

    ```
    mldserver help
    mldserver help handlers
    mldserver help settings | less
    ```

    A terminal shows the page formatted; otherwise the output is its Markdown.
    """
    import mldserver  # noqa: PLC0415  # other commands need none of it

    docs = Path(mldserver.__file__).parent / "docs"
    pages = {path.stem: path for path in sorted(docs.glob("*.md"))}
    if topic is None:
        summaries = [list(filter(None, path.read_text("utf-8").splitlines()))[1] for path in pages.values()]
        width = max(map(len, pages))
        lines = [f"{page:<{width}}  {summary}" for page, summary in zip(pages, summaries, strict=True)]
        lines += [
            "",
            "Read one with `mldserver help PAGE`; a command's options with `mldserver COMMAND --help`.",
        ]
        sys.stdout.write("\n".join(lines) + "\n")
        return
    if topic not in pages:
        similar = difflib.get_close_matches(topic, pages, n=3, cutoff=0.5)
        raise OperatorError(
            f"There is no page {topic!r}.",
            advice=f"{'Near to it' if similar else 'There'} are: {', '.join(similar or pages)}.",
        )
    text = pages[topic].read_text("utf-8")
    if not sys.stdout.isatty():
        sys.stdout.write(text)
        return
    from rich.console import Console  # noqa: PLC0415  # see above
    from rich.markdown import Markdown  # noqa: PLC0415  # see above

    console = Console(file=sys.stdout)
    console.print(Markdown(text), width=min(console.width, _PROSE_WIDTH))


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
    app.command(show_page, name="help")
    for name, text in _COMMANDS.items():
        where = _MODULE_OF.get(name, f"{name.replace('-', '_')}:app")
        app.command(f"mldserver.cli.{where}", name=name, help=None if name == called else text)
    return app


def _explain_removed(arguments: Sequence[str]) -> None:
    """Report options whose setting was removed, with what holds instead."""
    from mldserver.config.settings import REMOVED  # noqa: PLC0415  # other commands need none of it

    for option in (word.partition("=")[0] for word in arguments if word.startswith("--")):
        if replacement := REMOVED.get(option[2:].replace("-", "_")):
            print_error(f"{option} was removed. Leave it out. {replacement}")


def run(arguments: Sequence[str]) -> int:
    """Run a command and return the process's exit code.

    Errors of the operator or the handler are reported in one paragraph on standard error; tracebacks are for bugs. The exit
    code is 2 if only a person can fix all errors.
    """
    errors: list[MldserverError]
    try:
        result = command_line(arguments)(
            arguments, exit_on_error=False, print_error=True, result_action="return_value"
        )
        sys.stdout.flush()
    except CycloptsError:  # printed already
        _explain_removed(arguments)
        return EXIT_OPERATOR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except ReaderGone:
        return EXIT_READER_GONE
    except MldserverError as error:
        errors = [error]
    except ExceptionGroup as group:  # out of a command's task group
        if group.split(ReaderGone)[1] is None:  # it holds nothing else
            return EXIT_READER_GONE
        own_errors, bugs = group.split(MldserverError)
        if bugs is not None or own_errors is None:
            raise
        errors = list(leaves(own_errors))
    else:
        return result if isinstance(result, int) else 0
    for failure in errors:
        print_error(str(failure))
    return EXIT_OPERATOR if all(failure.lasting for failure in errors) else EXIT_FAULT


def main() -> NoReturn:
    """Run the command that the process was called with, and exit."""
    protect_standard_streams()
    if not sys.flags.safe_path:
        # Handlers are found in the working directory, as users of other Python servers expect. Where that was deleted
        # there are none: commands that need it say so.
        with contextlib.suppress(OSError):
            sys.path.insert(0, os.getcwd())  # noqa: PTH109  # sys.path holds text
    sys.exit(run(sys.argv[1:]))
