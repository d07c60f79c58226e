"""``mldserver serve`` and ``drain``: every setting as an option, then the server until it stops."""

from __future__ import annotations

import contextlib
import gc
import inspect
import os
import signal
from collections.abc import Callable
from functools import partial
from keyword import iskeyword
from pathlib import Path  # cyclopts reads the annotations
from typing import TYPE_CHECKING, Annotated, Any, Final

from cyclopts import App, Group, Parameter

from mldserver.base.service import Service
from mldserver.cli import complain, working_directory
from mldserver.config.resolve import resolve
from mldserver.config.settings import Settings, specs
from mldserver.errors import EXIT_FORCED

if TYPE_CHECKING:
    from mldserver.server import Server

_LAST_SECONDS: Final = 5.0
"""How long a forced server may take to end its parts, until the process ends without it."""

_HELP = """
Run a handler: listen for daemons or read a stream, compute windows, checkpoint.

```
mldserver serve handlers.departures --listen 127.0.0.1:7070 --out out/departures
mldserver serve mypackage.orders:Orders --listen unix:/run/orders.sock --log-file orders.log
mldserver serve handlers.shop --source 'dynamodb://orders?region=eu-central-1' --from latest
```

`--help` shows the common options, `--help-all` shows all. Every option is also an environment variable (`--line-limit` is `MLDSERVER_LINE_LIMIT`) and a key of `mldserver.toml`
(`line_limit = "64 MiB"`). The command line overrides variables, and variables override the file.

Durations are written `500 ms`, `30 s`, `10 minutes` or in seconds; sizes `64 MiB` or in bytes.

SIGTERM and SIGINT stop the server: shards finish their request, closed windows are committed, positions
checkpointed. A signal during the start cancels the start. A second signal forces the exit. SIGHUP reopens the log file and reads
the certificates again; SIGUSR1 only reopens the log file.

Exit codes: 0 clean; 1 a fault, or something that is not available yet (a folder, a port, the ledger's network): start again;
2 an error that a person must fix (settings, handler, Java, a damaged ledger, no region or credentials for `stream`); 3 forced
(a second signal, or the end of the grace period).
"""

Handler = Annotated[
    str | None, Parameter(help="The handler's dotted path: package.module or package.module:Name.")
]
Config = Annotated[
    Path | None,
    Parameter(help="Settings file. [default: mldserver.toml in the working directory, if it exists]"),
]

app = App(name="serve", help=_HELP, help_format="markdown", usage="Usage: mldserver serve HANDLER [OPTIONS]")


def settings_parameters(
    *, leave_out: frozenset[str] = frozenset(), rare: bool = False
) -> list[inspect.Parameter]:
    """Return an option for every setting, as parameters of a command: all text, None when not given.

    ``leave_out`` names settings that a command asks for in its own way. ``rare`` ones are hidden unless they are shown.
    """
    groups: dict[str, Group] = {}
    parameters = []
    for spec in specs().values():
        group = groups.setdefault(spec.section, Group(spec.section, sort_key=len(groups) + 1))
        flag, many = spec.kind.flag, spec.kind.many
        kind: Any = bool | None if flag else list[str] | None if many else str | None
        parameter = Parameter(
            name=spec.option,
            help=f"{spec.help} [default: {spec.shown_default}]",
            group=group,
            negative=None if flag else (),
            metavar=spec.kind.metavar,
            show=rare or spec.common,
        )
        if spec.name not in leave_out:
            parameters.append(
                inspect.Parameter(
                    f"{spec.name}_" if iskeyword(spec.name) else spec.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=None,
                    annotation=Annotated[kind, parameter],
                )
            )
    return parameters


def serve(handler: Handler = None, /, *, config: Config = None, **given: object) -> int:
    """Run the server and return its exit code. ``given`` are raw settings by name."""
    raw = {"handler": handler, **given}
    return live(resolve(raw, environ=os.environ, folder=working_directory(), config=config))


def takes_settings(app: App, command: Callable[..., int]) -> None:
    """Make ``command`` what an application runs, with the table of settings in the place of its ``**given``.

    ``--help`` shows the common settings, ``--help-all`` every setting.
    """
    own = inspect.signature(command, eval_str=True)
    kept = [option for option in own.parameters.values() if option.kind is not inspect.Parameter.VAR_KEYWORD]

    def among(app: App, *, rare: bool) -> App:
        options = settings_parameters(leave_out=frozenset(option.name for option in kept), rare=rare)
        command.__signature__ = own.replace(parameters=[*kept, *options])  # type: ignore[attr-defined]  # functions may carry one (PEP 362)
        app.default(command)
        return app

    def help_all() -> None:
        """Display every option, including rarely needed ones, and exit."""
        whole = App(name=f"mldserver {app.name[0]}", help=app.help, help_format="markdown", usage=app.usage)
        among(whole, rare=True).help_print([])

    among(app, rare=False).command(help_all, name="--help-all")


takes_settings(app, serve)


def live(settings: Settings, *, drain: bool = False) -> int:
    """Run a server until it stops; return its exit code. Once it was forced, the process ends in here.

    ``drain``: it does nothing but drain the pipeline. Raises OperatorError when the log file cannot be opened.
    """
    import faulthandler  # noqa: PLC0415  # `--help` and wrong settings must not wait for the server's imports

    import uvloop  # noqa: PLC0415  # see above

    from mldserver.admin.endpoint import AdminEndpoint  # noqa: PLC0415  # see above
    from mldserver.admin.gather import EventTally  # noqa: PLC0415  # `--help` and wrong settings must not wait for it
    from mldserver.base.clock import SystemClock  # noqa: PLC0415  # see above
    from mldserver.base.service import Service, entitle  # noqa: PLC0415  # see above
    from mldserver.observe.logging import logging_to  # noqa: PLC0415  # see above
    from mldserver.server import Server  # noqa: PLC0415  # see above

    entitle(settings.pipeline, "drain" if drain else "server")
    # systemd's watchdog ends a loop that stands still by SIGABRT: this says where it stood.
    faulthandler.enable(file=2)
    # Until the event loop takes it.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    with contextlib.ExitStack() as logs:
        shown, tally = not drain and settings.admin is not None, EventTally()
        logs.enter_context(logging_to(settings, observers=[tally] if shown else []))
        gc.freeze()  # what was imported stays: the collector would stop the event loop to look through it
        clock = SystemClock()
        endpoint = AdminEndpoint(settings, clock) if shown else None
        service = Service(os.environ, clock=clock)
        server = Server(settings, drain=drain, endpoint=endpoint, service=service, tally=tally)
        code = uvloop.run(_life(server, service, partial(_leave, settings, logs)))
    _tell(settings, code)
    return code


async def _life(server: Server, service: Service, leave: Callable[[], None]) -> int:
    """Run the server and return its exit code; when it was forced, end the process with ``leave`` instead.

    A call that hangs in a thread would hold up the end of the loop and of the interpreter, whether its caller was
    cancelled or not, and user code may refuse to be cancelled: only the end of the process is sure. What the server has
    started sees its sockets end then, and ends too.
    """
    import asyncio  # noqa: PLC0415  # see ``live``

    import structlog  # noqa: PLC0415  # see ``live``

    log = structlog.get_logger("mldserver")

    async def last_resort() -> None:
        await server.forced.wait()
        await asyncio.sleep(_LAST_SECONDS)
        log.critical(
            "server.failed",
            exit_code=EXIT_FORCED,
            what=f"The server did not end within {_LAST_SECONDS:g} seconds of being forced.",
            did="The process ended without waiting for it; what was not durable is delivered again.",
        )
        leave()

    async with asyncio.TaskGroup() as group:
        watching = group.create_task(last_resort(), name="last resort")
        telling = group.create_task(service.run(server.report), name="systemd")
        code = await server.run()
        for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)  # what has ended in order would die of one that comes now
        watching.cancel()
        telling.cancel()
    if code == EXIT_FORCED:
        leave()
    return code


def _leave(settings: Settings, logs: contextlib.ExitStack) -> None:
    """End the process without waiting for anything but the log."""
    try:
        logs.close()
        _tell(settings, EXIT_FORCED)
    finally:
        os._exit(EXIT_FORCED)


def _tell(settings: Settings, code: int) -> None:
    if code and settings.log_file is not None:  # the log went to the file, not to the terminal
        complain(f"stopped with exit code {code}; {settings.log_file} says why.")


_DRAIN_HELP = """
Drain a pipeline: its servers accept no more records and exit with code 0, and every open window is closed and published.

```
mldserver drain handlers.departures --out out/departures
```

Give the command the servers' settings, and the handler as they run it. The drain waits until all other servers have stopped, on
every host. Then it closes and publishes the remaining windows; the shards' positions remain. Afterwards the pipeline can be
started with another window size, schema or name: `mldserver help operations` has the procedure for each change.

A drain closes open windows early: later rows for them are late. A signal stops the drain by force, without loss; the next drain
continues, and a start without a change just serves again.

Exit codes: 0 everything is published; 2 the ledger does not exist; else as for `mldserver serve`.
"""

drain_app = App(
    name="drain", help=_DRAIN_HELP, help_format="markdown", usage="Usage: mldserver drain HANDLER [OPTIONS]"
)


def drain(handler: Handler = None, /, *, config: Config = None, **given: object) -> int:
    """Drain the pipeline and return the exit code. ``given`` are raw settings by name.

    Raises OperatorError if the ledger does not exist; the drain does not create one.
    """
    raw = {"handler": handler, **given}
    settings = resolve(raw, environ=os.environ, folder=working_directory(), config=config)
    from mldserver.cli.ledger_tool import at_ledger  # noqa: PLC0415  # `--help` and wrong settings must not wait for its imports

    with at_ledger(settings):
        pass  # what can be read can be drained
    return live(settings, drain=True)


takes_settings(drain_app, drain)
