"""``mldserver kcl``: the real Java MultiLangDaemon, connected to a running server."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import random
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path  # cyclopts reads the annotations
from typing import Annotated, Any, Final, Literal

from cyclopts import App, Parameter

from mldserver.base.aws import require_aws
from mldserver.base.backoff import Backoff
from mldserver.base.clock import SystemClock
from mldserver.base.secret import read_secret
from mldserver.base.service import Service, entitle
from mldserver.base.tls import client_context
from mldserver.base.uris import redacted, redacted_option
from mldserver.cli import working_directory
from mldserver.config.kinds import TcpAddress, UnixAddress
from mldserver.config.resolve import check_security, resolve, resolve_functions
from mldserver.config.settings import Settings, specs
from mldserver.errors import ConfigError
from mldserver.kcl.launch import (
    bridge_command,
    bridge_program,
    find_jars,
    find_java,
    prepare,
    private_files,
)
from mldserver.kcl.lease_worker import LeaseWorker, host_worker
from mldserver.kcl.properties import (
    DaemonSettings,
    daemon_properties,
    parse_pairs,
    shutdown_seconds,
    start_of,
)
from mldserver.kcl.side_by_side import SideBySide
from mldserver.kcl.supervisor import Supervisor, answers
from mldserver.observe.logging import logging_to, reopen
from mldserver.protocol.connection import CLOSE_SECONDS

app = App(
    name="kcl",
    help="""Run Amazon's Java MultiLangDaemon and connect it to a server.

Needs Java 17 or later and the extra: `pip install 'mldserver[kcl]'`. AWS credentials are found as every AWS SDK finds
them. The daemon is started once the server answers; it leases the stream's shards and opens one connection for each.
When one of them ends, the daemon ends too, and is started again after a delay that doubles up to a minute. Run one on
every host that should share the work: each host keeps its worker identifier, under which a restarted daemon renews its leases.

Where the settings have several functions, one command runs a daemon with its own JVM for each function that daemons feed, or for one
with `--function`. Each is a KCL application with the name of its function. A daemon that fails does not affect the others.

Stream, region, log level and format, and Java may also come from `MLDSERVER_…` variables or `mldserver.toml`;
`--connect` is then where the server listens. The log file may not: it would be the server's. On another host than the
server's the connections are encrypted, and each side shows a certificate: `--tls-certificate`, `--tls-key`, `--tls-ca`.

Examples: `mldserver kcl --stream departures --app departures-hourly --region eu-central-1`, `mldserver kcl --config shop.toml`

Exit codes: 0 the daemon was stopped and ended by itself; 1 a fault, such as a daemon that the system killed while it was
stopped, or something that may yet be there: start it again;
2 wrong settings, or no Java, jars or AWS credentials; 3 it had to be killed. What is not there yet, such as the server or AWS, is waited for.
""",
)


@app.default
def kcl(
    *,
    function: Annotated[
        str | None,
        Parameter(help="The function to run a daemon for. [default: all functions of the settings]"),
    ] = None,
    app: Annotated[
        str | None,
        Parameter(
            help="The KCL application: also the name of its lease table in DynamoDB. [default: the function's name]",
            env_var="KCL_APP",
        ),
    ] = None,
    stream: Annotated[str | None, Parameter(help="The Kinesis stream's name.")] = None,
    region: Annotated[str | None, Parameter(help="The stream's AWS region.")] = None,
    listen: Annotated[
        str | None,
        Parameter(name=["--connect", "--listen"], help="Where the server listens: HOST:PORT or unix:/path."),
    ] = None,
    tls_certificate: Annotated[
        str | None,
        Parameter(help="The client's certificate for TLS connections to the server (PEM)."),
    ] = None,
    tls_key: Annotated[
        str | None, Parameter(help="The certificate's private key; none: in the same file.")
    ] = None,
    tls_client_ca: Annotated[
        str | None,
        Parameter(
            name=["--tls-ca", "--tls-client-ca"], help="The authority of the server's certificate (PEM)."
        ),
    ] = None,
    listen_secret: Annotated[
        str | None,
        Parameter(help="The file with the secret that the server requires (its listen_secret)."),
    ] = None,
    insecure: Annotated[bool | None, Parameter(help="Connect to another host in clear text.")] = None,
    initial_position: Annotated[
        str,
        Parameter(help="Where shards without a checkpoint start: TRIM_HORIZON, LATEST or an ISO 8601 time."),
    ] = "TRIM_HORIZON",
    retrieval: Annotated[
        Literal["polling", "fan-out"],
        Parameter(help="How records are read; fan-out registers a consumer of the stream, which AWS bills."),
    ] = "polling",
    endpoint_url: Annotated[
        str | None,
        Parameter(help="Endpoint of all three AWS services, except those named below; for emulators."),
    ] = None,
    kinesis_endpoint: Annotated[str | None, Parameter(help="Endpoint of Kinesis alone.")] = None,
    dynamodb_endpoint: Annotated[str | None, Parameter(help="Endpoint of DynamoDB alone.")] = None,
    cloudwatch_endpoint: Annotated[str | None, Parameter(help="Endpoint of CloudWatch alone.")] = None,
    property: Annotated[  # noqa: A002  # the option's name
        tuple[str, ...],
        Parameter(
            help="A daemon property KEY=VALUE, see deploy/mld.properties; may be repeated.", negative=""
        ),
    ] = (),
    java_option: Annotated[
        tuple[str, ...],
        Parameter(
            help="An option for the JVM such as -Xmx512m; may be repeated.",
            negative="",
            allow_leading_hyphen=True,
        ),
    ] = (),
    java_home: Annotated[str | None, Parameter(help="Java's folder; none: JAVA_HOME, then PATH.")] = None,
    log_file: Annotated[str | None, Parameter(help="Log to this file, which SIGHUP reopens.")] = None,
    log_level: Annotated[str | None, Parameter(help="The lowest level logged.")] = None,
    log_format: Annotated[str | None, Parameter(help="auto, json or pretty.")] = None,
    config: Annotated[Path | None, Parameter(help="Settings file instead of mldserver.toml.")] = None,
) -> int:
    """Run the Java MultiLangDaemons until stopped; return the exit code."""
    # An option with a setting's name is that setting.
    given = {name: value for name, value in locals().items() if name in specs()}
    functions = _functions(given, function, config)
    extra = parse_pairs(property)
    if len(functions) > 1:
        _check_for_several(functions, {"--app": app, "--connect": listen}, extra)
    daemons = [
        _FunctionDaemon(
            settings,
            DaemonSettings(
                stream=_required("stream", settings.stream),
                app=_application(settings, app),
                region=_required("region", settings.region),
                executable="",
                worker=host_worker(),
                position=start_of(initial_position),
                retrieval=retrieval,
                endpoint_url=settings.endpoint_url,
                kinesis_endpoint=kinesis_endpoint,
                dynamodb_endpoint=dynamodb_endpoint,
                cloudwatch_endpoint=cloudwatch_endpoint,
                extra=extra,
            ),
            java_option,
            _bridge_tls(settings),
        )
        for settings in functions
    ]
    for daemon in daemons:
        daemon.check()  # report errors before anything is compiled
    entitle(" ".join(daemon.settings.app for daemon in daemons), "kcl")
    faulthandler.enable(file=2)  # as for a server: the watchdog's SIGABRT
    # SIGUSR1 would end the process before the event loop handles it. The daemon and its bridges ignore it too.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    with logging_to(functions[0]):
        return asyncio.run(_run_daemons(daemons))


@dataclass(frozen=True, slots=True)
class _FunctionDaemon:
    """The daemon of one function."""

    function: Settings
    settings: DaemonSettings
    java_options: tuple[str, ...]
    tls: tuple[Path, ...]
    """The paths of authority, certificate and key with which its bridges connect; () for clear text."""

    def check(self) -> None:
        """Raise ConfigError if the daemon's properties are wrong, or the secret's file cannot be read."""
        if self.function.listen_secret is not None:
            read_secret(self.function.listen_secret)  # report errors now, not once per bridge
        daemon_properties(self.settings)

    async def require_credentials(self) -> None:
        """Raise ConfigError if there are no AWS credentials. Those that are configured for Java alone cannot be checked here."""
        has_own_provider = any("credentialsprovider" in name.lower() for name in self.settings.extra)
        if not has_own_provider and not any(option.startswith("-Daws.") for option in self.java_options):
            await require_aws(self.settings.stream, region=self.settings.region)


def _functions(
    given: Mapping[str, object], function: str | None, config: Path | None
) -> tuple[Settings, ...]:
    """Return the settings of the functions to run daemons for. Raises ConfigError if they are wrong, or no function needs a daemon."""
    # Never the server's log file: two processes would rotate it.
    sources: dict[str, Any] = {"environ": os.environ, "folder": working_directory(), "config": config}
    sources |= {"handler_required": False, "leave_out": ("log_file",)}
    if function is None:
        functions = resolve_functions(given, **sources)
    else:
        functions = (resolve(given, function=function, **sources),)
    fed = tuple(settings for settings in functions if settings.source == "mld")
    if not fed:
        names = " and ".join(settings.pipeline for settings in functions)
        raise ConfigError(
            f"No daemon is needed: {names} ({functions[0].origin('source')}) reads its stream itself.",
            advice="Run `mldserver serve` alone.",
        )
    for settings in fed:
        check_security(settings)
        if isinstance(settings.listen, TcpAddress) and not settings.listen.port:
            raise ConfigError(
                f"The address {settings.listen} has port 0, to which no client can connect.",
                advice="Give --connect the address that the server's log says (server.listening).",
            )
    return fed


_OF_ONE_APPLICATION: Final = frozenset({
    *("coordinatorStateTableName", "streamArn", "tableName", "workerMetricsTableName"),
})  # fmt: skip
"""Properties that two KCL applications must not share."""


def _check_for_several(
    functions: Sequence[Settings], options: Mapping[str, str | None], properties: Mapping[str, str]
) -> None:
    """Raise ConfigError for an option or a property that can be right for one function only."""
    given = [option for option, value in options.items() if value is not None]
    given += [f"--property {name}" for name in sorted(_OF_ONE_APPLICATION & properties.keys())]
    if given:
        names = ", ".join(settings.pipeline for settings in functions)
        raise ConfigError(
            f"{given[0]} is for one function, and the settings have several: {names}.",
            advice="Name one with --function, or leave the option out.",
        )


def _application(settings: Settings, app: str | None) -> str:
    """Return the name of the KCL application: as given, else the function's name. Raises ConfigError if there is none."""
    is_named = settings.handler or {"pipeline", "handler"} & settings.origins.keys()
    name = settings.pipeline if app is None and is_named else app or ""
    if not name.strip():
        raise ConfigError("The KCL application's name is empty.", advice="Use --app NAME.")
    return name


def _bridge_tls(settings: Settings) -> tuple[Path, ...]:
    """Return the paths (authority, certificate, key) with which bridges connect to the server; () for clear text.

    Raises ConfigError if they are incomplete or wrong, NotThereYet if a file is missing.
    """
    certificate, ca = settings.tls_certificate, settings.tls_client_ca
    if certificate is None or isinstance(settings.listen, UnixAddress):
        return ()
    if ca is None:
        raise ConfigError(
            "Nothing says which authority the server's certificate is from.", advice="Use --tls-ca FILE."
        )
    # Report errors now, not once per bridge.
    client_context(certificate, settings.tls_key, ca)
    return ca, certificate, settings.tls_key or certificate


def _required(name: str, value: str | None) -> str:
    if not value:
        raise ConfigError(f"No {name} was given.", advice=f"Use --{name}, or set MLDSERVER_{name.upper()}.")
    return value


async def _run_daemons(daemons: Sequence[_FunctionDaemon]) -> int:
    """Write the daemons' files, then run the supervisors until a signal stops them; return the exit code.

    Raises JavaError, ConfigError or OperatorError if something that all daemons need is missing.
    """
    for daemon in daemons:
        await daemon.require_credentials()
    clock = SystemClock()
    with contextlib.ExitStack() as stack:
        supervisors = await _supervisors(daemons, clock, stack)
        together = SideBySide(supervisors, clock)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, together.stop)
        service = Service(os.environ, clock=clock)

        def on_hangup() -> None:
            with service.reloading():
                reopen()

        loop.add_signal_handler(signal.SIGHUP, on_hangup)
        loop.add_signal_handler(signal.SIGUSR1, reopen)
        async with asyncio.TaskGroup() as group:
            systemd_reports = group.create_task(service.run(together.report), name="systemd")
            code = await together.run()
            systemd_reports.cancel()
    return code


async def _supervisors(
    daemons: Sequence[_FunctionDaemon], clock: SystemClock, stack: contextlib.ExitStack
) -> dict[str, Supervisor]:
    """Write each daemon's files, which are gone when ``stack`` ends; return a supervisor for each function by its name."""
    java_home = daemons[0].function.java_home
    java = await find_java(str(java_home) if java_home else None, os.environ)
    jars = find_jars()
    shared = stack.enter_context(private_files())
    programs = {is_tls: bridge_program(shared, tls=is_tls) for is_tls in {bool(each.tls) for each in daemons}}
    supervisors = {}
    for daemon in daemons:
        function, tls = daemon.function, daemon.tls
        bridge = bridge_command(programs[bool(tls)], function.listen, tls, function.listen_secret)
        properties = daemon_properties(replace(daemon.settings, executable=bridge))
        command, environment = prepare(
            stack.enter_context(private_files()),
            java=java.command,
            jars=jars,
            properties=properties,
            java_options=daemon.java_options,
            environment=os.environ,
        )
        supervisors[function.pipeline] = Supervisor(
            command=command,
            environment=environment,
            backoff=Backoff(base=1.0, cap=60.0),
            grace=shutdown_seconds(properties) + CLOSE_SECONDS,
            clock=clock,
            chance=random.SystemRandom().random,
            server=function.listen,
            answers=partial(answers, function.listen, tls),
            worker=LeaseWorker(properties, clock),
            start_fields={
                "java": java.version,
                "retrieval": daemon.settings.retrieval,
                "properties": {name: redacted(value) for name, value in properties.items()},
                "command": [java.command, *map(redacted_option, daemon.java_options)],
            },
        )
    return supervisors
