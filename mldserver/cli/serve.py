"""``mldserver serve`` and ``drain``: every setting as an option, then the server until it stops."""

from __future__ import annotations

import contextlib
import gc
import inspect
import os
import signal
from collections.abc import Callable, Mapping
from functools import partial
from keyword import iskeyword
from pathlib import Path  # cyclopts reads the annotations
from typing import TYPE_CHECKING, Annotated, Any, Final

from cyclopts import App, Group, Parameter

from mldserver.base.service import Service
from mldserver.cli import print_error, working_directory
from mldserver.config.resolve import choose, resolve_functions
from mldserver.config.settings import Settings, specs
from mldserver.errors import EXIT_FORCED

if TYPE_CHECKING:
    from mldserver.function_commands import ReadSettings
    from mldserver.server import Server

_FORCED_SECONDS: Final = 5.0
"""How long a forced server may take to end its parts, until the process ends without it."""

_HELP = """
Run a handler: listen for daemons or read a stream, compute windows, checkpoint.

```
mldserver serve handlers.departures --listen 127.0.0.1:7070 --out out/departures
mldserver serve mypackage.orders:Orders --listen unix:/run/orders.sock --log-file orders.log
mldserver serve handlers.shop --source 'dynamodb://orders?region=eu-central-1' --from latest
mldserver serve handlers.departures shop.orders:Orders
mldserver serve
```

Each handler is a function with its own ledger, folder and address. Without a handler, the server runs the functions of `mldserver.toml`,
which has a table `[functions.NAME]` for each (`mldserver help functions`).

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
Handlers = Annotated[
    str,
    Parameter(
        help="The handlers' dotted paths: package.module or package.module:Name. Without one, the settings file names them."
    ),
]
Config = Annotated[
    Path | None,
    Parameter(help="Settings file. [default: mldserver.toml in the working directory, if it exists]"),
]

FunctionName = Annotated[
    str | None, Parameter(help="The function to drain, where the settings file has several.")
]

app = App(
    name="serve", help=_HELP, help_format="markdown", usage="Usage: mldserver serve [HANDLERS] [OPTIONS]"
)


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
        is_flag, is_list = spec.kind.flag, spec.kind.many
        option_type: Any = bool | None if is_flag else list[str] | None if is_list else str | None
        parameter = Parameter(
            name=spec.option,
            help=f"{spec.help} [default: {spec.shown_default}]",
            group=group,
            negative=None if is_flag else (),
            metavar=spec.kind.metavar,
            show=rare or spec.common,
        )
        if spec.name not in leave_out:
            parameters.append(
                inspect.Parameter(
                    f"{spec.name}_" if iskeyword(spec.name) else spec.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=None,
                    annotation=Annotated[option_type, parameter],
                )
            )
    return parameters


def serve(*handler: Handlers, config: Config = None, **given: object) -> int:
    """Run the server and return its exit code. ``given`` are raw settings by name."""
    folder, environ = working_directory(), dict(os.environ)

    def read_settings(more: Mapping[str, Mapping[str, object]]) -> tuple[Settings, ...]:
        return resolve_functions(
            given, environ=environ, folder=folder, config=config, handlers=handler, more=more
        )

    return run_server(*read_settings({}), read_settings=read_settings)


def add_settings_options(app: App, command: Callable[..., int]) -> None:
    """Make ``command`` the command of ``app``, with an option for each setting in place of its ``**given``.

    ``--help`` shows the common settings, ``--help-all`` every setting.
    """
    signature = inspect.signature(command, eval_str=True)
    own_options = [
        option for option in signature.parameters.values() if option.kind is not inspect.Parameter.VAR_KEYWORD
    ]

    def register(app: App, *, rare: bool) -> App:
        leave_out = frozenset(option.name for option in own_options)
        options = settings_parameters(leave_out=leave_out, rare=rare)
        # cyclopts reads a command's options from its signature.
        command.__signature__ = signature.replace(parameters=[*own_options, *options])  # type: ignore[attr-defined]  # functions may carry one (PEP 362)
        app.default(command)
        return app

    def help_all() -> None:
        """Display every option, including rarely needed ones, and exit."""
        whole = App(name=f"mldserver {app.name[0]}", help=app.help, help_format="markdown", usage=app.usage)
        register(whole, rare=True).help_print([])

    register(app, rare=False).command(help_all, name="--help-all")


add_settings_options(app, serve)


def run_server(*functions: Settings, drain: bool = False, read_settings: ReadSettings | None = None) -> int:
    """Run a server until it stops; return its exit code. After a forced stop, end the process instead of returning.

    ``functions``: the settings of each function. ``drain``: the server only drains the pipeline, then stops.
    ``read_settings`` reads them again, with further functions. Raises OperatorError if the log file cannot be opened.
    """
    import faulthandler  # noqa: PLC0415  # `--help` and wrong settings must not wait for the server's imports

    import uvloop  # noqa: PLC0415  # see above

    from mldserver.admin.endpoint import AdminEndpoint  # noqa: PLC0415  # see above
    from mldserver.admin.gather import EventTally  # noqa: PLC0415  # `--help` and wrong settings must not wait for it
    from mldserver.base.clock import SystemClock  # noqa: PLC0415  # see above
    from mldserver.base.service import Service, entitle  # noqa: PLC0415  # see above
    from mldserver.observe.logging import logging_to  # noqa: PLC0415  # see above
    from mldserver.server import Server  # noqa: PLC0415  # see above

    settings = functions[0]  # of the server, which are the same in all
    entitle(", ".join(each.pipeline for each in functions), "drain" if drain else "server")
    # systemd's watchdog kills a process whose event loop hangs with SIGABRT: print the stacks then.
    faulthandler.enable(file=2)
    # SIGUSR1 would end the process before the event loop handles it.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    with contextlib.ExitStack() as logs:
        has_endpoint, tally = not drain and settings.admin is not None, EventTally()
        logs.enter_context(logging_to(*functions, observers=[tally] if has_endpoint else []))
        gc.freeze()  # imported objects stay for ever: the collector need not scan them in the event loop's time
        clock = SystemClock()
        endpoint = AdminEndpoint(settings, clock) if has_endpoint else None
        service = Service(os.environ, clock=clock)
        server = Server(
            functions,
            drain=drain,
            endpoint=endpoint,
            service=service,
            tally=tally,
            read_settings=read_settings,
        )
        code = uvloop.run(_run_or_exit(server, service, partial(_exit_now, settings, logs)))
    _print_exit_code(settings, code)
    return code


async def _run_or_exit(server: Server, service: Service, exit_now: Callable[[], None]) -> int:
    """Run the server and return its exit code. After a forced stop call ``exit_now``, which ends the process at once.

    A forced server that has not ended after ``_FORCED_SECONDS`` is ended so, too. A call that hangs in a thread would
    hold up the event loop's and the interpreter's end. Child processes see their sockets close, and exit.
    """
    import asyncio  # noqa: PLC0415  # see ``run_server``

    import structlog  # noqa: PLC0415  # see ``run_server``

    log = structlog.get_logger("mldserver")

    async def exit_if_stuck() -> None:
        await server.forced.wait()
        await asyncio.sleep(_FORCED_SECONDS)
        log.critical(
            "server.failed",
            exit_code=EXIT_FORCED,
            what=f"The server did not end within {_FORCED_SECONDS:g} seconds of being forced.",
            did="The process ended without waiting for it; what was not durable is delivered again.",
        )
        exit_now()

    async with asyncio.TaskGroup() as group:
        watchdog = group.create_task(exit_if_stuck(), name="last resort")
        systemd_reports = group.create_task(service.run(server.report), name="systemd")
        code = await server.run()
        for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
            signal.signal(
                number, signal.SIG_IGN
            )  # the server has stopped: a signal must not change the exit code
        watchdog.cancel()
        systemd_reports.cancel()
    if code == EXIT_FORCED:
        exit_now()
    return code


def _exit_now(settings: Settings, logs: contextlib.ExitStack) -> None:
    """End the process at once, after writing the log."""
    try:
        logs.close()
        _print_exit_code(settings, EXIT_FORCED)
    finally:
        os._exit(EXIT_FORCED)


def _print_exit_code(settings: Settings, code: int) -> None:
    """Print the exit code of a failed server to standard error, if its log went to a file."""
    if code and settings.log_file is not None:
        print_error(f"stopped with exit code {code}; {settings.log_file} says why.")


_DRAIN_HELP = """
Drain a pipeline: its servers accept no more records and exit with code 0, and every open window is closed and published.

```
mldserver drain handlers.departures --out out/departures
mldserver drain --function departures
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


def drain(
    handler: Handler = None, /, *, function: FunctionName = None, config: Config = None, **given: object
) -> int:
    """Drain the pipeline and return the exit code. ``given`` are raw settings by name.

    Raises OperatorError if the ledger does not exist; the drain does not create one. Raises ConfigError if the settings have
    several functions and ``function`` names none.
    """
    functions = resolve_functions(
        given,
        environ=os.environ,
        folder=working_directory(),
        config=config,
        handlers=() if handler is None else (handler,),
    )
    name = choose([settings.pipeline for settings in functions], function)
    settings = next(settings for settings in functions if settings.pipeline == name)
    from mldserver.cli.ledger_tool import open_ledger  # noqa: PLC0415  # `--help` and wrong settings must not wait for its imports

    with open_ledger(settings):
        pass  # the ledger exists and can be read
    return run_server(settings, drain=True)


add_settings_options(drain_app, drain)
