"""``mldserver kcl``: the real Java MultiLangDaemon, connected to a running server."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import random
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path  # cyclopts reads the annotations
from typing import Annotated, Literal

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
from mldserver.config.resolve import resolve
from mldserver.config.settings import Settings, specs
from mldserver.errors import ConfigError
from mldserver.kcl.launch import Files, bridge_command, find_jars, find_java, prepare, private_files
from mldserver.kcl.lease_worker import LeaseWorker, host_worker
from mldserver.kcl.properties import (
    DaemonSettings,
    daemon_properties,
    parse_pairs,
    shutdown_seconds,
    start_of,
)
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

Stream, region, log level and format, and Java may also come from `MLDSERVER_…` variables or `mldserver.toml`;
`--connect` is then where the server listens. The log file may not: it would be the server's. On another host than the
server's the connections are encrypted, and each side shows a certificate: `--tls-certificate`, `--tls-key`, `--tls-ca`.

Example: `mldserver kcl --stream departures --app departures-hourly --region eu-central-1`

Exit codes: 0 the daemon was stopped and ended by itself; 1 a fault, such as a daemon that the system killed while it was
stopped, or something that may yet be there: start it again;
2 wrong settings, or no Java, jars or AWS credentials; 3 it had to be killed. What is not there yet, such as the server or AWS, is waited for.
""",
)


@app.default
def kcl(
    *,
    app: Annotated[str, Parameter(help="The KCL application: also the name of its lease table in DynamoDB.")],
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
    """Run the Java MultiLangDaemon until stopped; return the exit code."""
    # An option with a setting's name is that setting; the table of settings also asks for a handler, which does not run here.
    given = {name: value for name, value in locals().items() if name in specs()} | {"handler": "kcl"}
    # Never the server's log file: two processes would rotate it.
    settings = resolve(
        given, environ=os.environ, folder=working_directory(), config=config, leave_out=("log_file",)
    )
    if not app.strip():
        raise ConfigError("The KCL application's name is empty.", advice="Use --app NAME.")
    if isinstance(settings.listen, TcpAddress) and not settings.listen.port:
        raise ConfigError(
            f"The address {settings.listen} has port 0, to which no client can connect.",
            advice="Give --connect the address that the server's log says (server.listening).",
        )
    daemon_settings = DaemonSettings(
        stream=_required("stream", settings.stream),
        app=app,
        region=_required("region", settings.region),
        executable="",
        worker=host_worker(),
        position=start_of(initial_position),
        retrieval=retrieval,
        endpoint_url=settings.endpoint_url,
        kinesis_endpoint=kinesis_endpoint,
        dynamodb_endpoint=dynamodb_endpoint,
        cloudwatch_endpoint=cloudwatch_endpoint,
        extra=parse_pairs(property),
    )
    entitle(app, "kcl")
    faulthandler.enable(file=2)  # as for a server: the watchdog's SIGABRT
    # SIGUSR1 would end the process before the event loop handles it. The daemon and its bridges ignore it too.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    tls = _bridge_tls(settings)
    if settings.listen_secret is not None:
        read_secret(settings.listen_secret)  # report errors now, not once per bridge
    daemon_properties(daemon_settings)  # report errors before anything is compiled
    with private_files() as files, logging_to(settings):
        daemon_settings = replace(
            daemon_settings, executable=bridge_command(settings.listen, files, tls, settings.listen_secret)
        )
        return asyncio.run(_run_daemon(settings, files, daemon_settings, java_option, tls))


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


async def _run_daemon(
    settings: Settings,
    files: Files,
    daemon_settings: DaemonSettings,
    java_options: tuple[str, ...],
    tls: tuple[Path, ...],
) -> int:
    """Write the daemon's files, then run the supervisor until a signal stops it; return the exit code.

    Raises JavaError, ConfigError or OperatorError if something that the daemon needs is missing.
    """
    # Credentials that are configured for Java alone cannot be checked here.
    has_own_provider = any("credentialsprovider" in name.lower() for name in daemon_settings.extra)
    if not has_own_provider and not any(option.startswith("-Daws.") for option in java_options):
        await require_aws(daemon_settings.stream, region=daemon_settings.region)
    properties = daemon_properties(daemon_settings)
    java = await find_java(str(settings.java_home) if settings.java_home else None, os.environ)
    shown = {name: redacted(value) for name, value in properties.items()}
    start_fields = {"java": java.version, "retrieval": daemon_settings.retrieval, "properties": shown}
    start_fields["command"] = [java.command, *map(redacted_option, java_options)]
    command, environment = prepare(
        files,
        java=java.command,
        jars=find_jars(),
        properties=properties,
        java_options=java_options,
        environment=os.environ,
    )
    clock = SystemClock()
    supervisor = Supervisor(
        command=command,
        environment=environment,
        backoff=Backoff(base=1.0, cap=60.0),
        grace=shutdown_seconds(properties) + CLOSE_SECONDS,
        clock=clock,
        chance=random.SystemRandom().random,
        server=settings.listen,
        answers=partial(answers, settings.listen, tls),
        worker=LeaseWorker(properties, clock),
        start_fields=start_fields,
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, supervisor.stop)
    service = Service(os.environ, clock=clock)

    def on_hangup() -> None:
        with service.reloading():
            reopen()

    loop.add_signal_handler(signal.SIGHUP, on_hangup)
    loop.add_signal_handler(signal.SIGUSR1, reopen)
    async with asyncio.TaskGroup() as group:
        systemd_reports = group.create_task(service.run(supervisor.report), name="systemd")
        code = await supervisor.run()
        systemd_reports.cancel()
    return code
