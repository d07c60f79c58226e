"""``mldserver status``: one look at a running server, or at the ledger when none answers.

Here is also what ``top`` and the steering commands share: where the server is, and how its status is set as tables.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path  # cyclopts reads the annotations
from typing import Annotated, Any, Final

import msgspec
from cyclopts import App, Group, Parameter
from rich.console import RenderableType

from mldserver.admin.addresses import steering_socket, stored_address
from mldserver.admin.http_client import Client, NoAnswer, read_status
from mldserver.base.tls import client_context
from mldserver.cli.ledger_tool import LedgerOptions, read_ledger
from mldserver.cli.render import (
    AsJson,
    details,
    format_duration,
    format_size,
    plain_text,
    print_result,
    table,
)
from mldserver.config.kinds import Address, TcpAddress, UnixAddress, is_local
from mldserver.config.locations import SqlitePlace
from mldserver.config.resolve import ledger_file
from mldserver.config.settings import Settings
from mldserver.errors import EXIT_CLEAN, ConfigError, NotThereYet, OperatorError
from mldserver.ledger.sqlite_file import pipeline_of
from mldserver.status_document import FunctionStatus, Status
from mldserver.windows import counted

EXIT_NOT_READY: Final = 3

_WINDOWS: Final = 5
"""How many of the latest windows are shown; unfinished windows are always shown."""
_LETTERS: Final = 3
_STORES: Final = 5

_HELP = """
Show the status of a running server: shards with lag and position, watermark, windows, workers, Spark, dead letters, other
servers.

```
mldserver status
mldserver status --out out/departures
mldserver status --function departures
mldserver status --admin unix:/run/departures.admin --json | jq .reasons
mldserver status --admin server.example:7071 --ca ca.pem --certificate me.pem --key me.key
```

The command asks the server's admin endpoint (`admin`). If no server answers, the command shows the ledger's contents, and says so.

Exit codes: 0 ready; 3 not ready, or no server answers; 2 unknown: no server and no ledger, or the server refuses.
"""

app = App(name="status", help=_HELP, help_format="markdown")


@Parameter(name="*", group=Group("Where the server is"))
@dataclass(frozen=True, slots=True, kw_only=True)
class SteeringOptions(LedgerOptions):
    """Options that name a server on this host. Environment variables and the settings file count too."""

    admin: str | None = None
    """The server's admin endpoint: `host:port` or `unix:PATH`. [default: as for `mldserver serve`]"""

    def steering_client(self) -> Client:
        """Return a client of the server's Unix socket. Raises NoAnswer if there is none, ConfigError for another host's."""
        settings = self.all_resolved(admin=self.admin)[0]
        address = self._endpoint_address(settings)
        if isinstance(address, TcpAddress):
            path = steering_socket(settings, address.port)
            names_other_host = self.admin is not None and not is_local(address)
            if names_other_host:
                raise ConfigError(
                    f"{address} only shows the server; steering goes over its Unix socket on its host.",
                    advice="Run the command on the server's host (ssh, kubectl exec) with its --out, or --admin unix:PATH.",
                )
            if not path.exists():
                raise NoAnswer(
                    f"No server can be steered here: {path} does not exist.",
                    advice="Start the server, or run the command on its host (ssh, kubectl exec) with its --out, or --admin "
                    "unix:PATH.",
                )
            address = UnixAddress(path)
        return Client(address)

    def _endpoint_address(self, settings: Settings) -> Address:
        """Return the configured address, or else the one that a server of the output folder has stored."""
        if settings.admin is None:
            raise ConfigError(
                f"admin = none ({settings.origin('admin')}): there is no endpoint to ask.",
                advice="Name the server's with --admin.",
            )
        if "admin" in settings.origins:
            return settings.admin
        return stored_address(settings) or settings.admin

    def expected_pipeline(self) -> str | None:
        """Return the pipeline that the answering server must run; None: any, as the options name only an address, nothing, or several functions.

        The options --function and --pipeline come first, then the name in the ledger's file, then the settings.
        """
        functions = self.all_resolved()
        names_only_address = self.admin is not None and not any(
            (self.out, self.ledger, self.pipeline, self.function)
        )
        if names_only_address or len(functions) > 1:
            return None
        (settings,) = functions
        in_ledger = pipeline_of(ledger_file(settings)) if isinstance(settings.ledger, SqlitePlace) else None
        is_configured = bool({"pipeline", "handler"} & settings.origins.keys())
        return self.function or self.pipeline or in_ledger or (settings.pipeline if is_configured else None)


@Parameter(name="*", group=Group("Where the server is"))
@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions(SteeringOptions):
    """Options that name a server on any host, and the client's certificate."""

    ca: Path | None = None
    """The authority of the server's certificate, outside loopback. [default: `tls_client_ca`, else the system's authorities]"""
    certificate: Path | None = None
    """The caller's certificate. [default: `tls_certificate`]"""
    key: Path | None = None
    """The certificate's private key. [default: in the certificate's file, or `tls_key`]"""
    insecure: Annotated[bool, Parameter(negative=())] = False
    """Ask a server outside loopback without TLS, if it was started so. [default: as for `mldserver serve`]"""

    def client(self) -> Client:
        """Return the endpoint's client. Raises ConfigError for contradicting options, and for files that cannot be read."""
        settings = self.all_resolved(admin=self.admin, insecure=self.insecure or None)[0]
        address, tls = self._endpoint_address(settings), None
        may_be_clear_text = is_local(address) or settings.insecure
        if self.ca is not None or self.certificate is not None or not may_be_clear_text:
            certificate, key = settings.tls_certificate, settings.tls_key
            if self.certificate is not None:
                certificate, key = self.certificate, self.key
            try:
                tls = client_context(certificate, key, self.ca or settings.tls_client_ca)
            except (
                NotThereYet
            ) as error:  # a server would wait for missing files; for a command they are an error
                raise ConfigError(error.what, advice=error.advice) from error
        return Client(address, tls=tls)


FROM_SETTINGS: Final = ServerOptions()
"""As for ``mldserver serve``."""


def fetch_status(client: Client, pipeline: str | None) -> tuple[dict[str, Any], Status]:
    """Return a server's status, raw and parsed; of a server with several functions that of the function ``pipeline``, if it is given.

    Raises NoAnswer if no server, or a server of another ``pipeline``, answers; Refused if the server denies access.
    """
    document = client.status()
    status = read_status(document)
    if pipeline not in {None, *status.by_name}:
        raise NoAnswer(
            f"The server at {client.address} is of the pipeline {', '.join(status.by_name)}, not of {pipeline}.",
            advice="Name its endpoint with --admin.",
        )
    raw = json.loads(document)
    if pipeline is not None and len(status.functions) > 1:
        raw |= raw.pop("functions")[pipeline]
        status = status.of_function(pipeline)
    return raw, status


@app.default
def show_status(*, at: ServerOptions = FROM_SETTINGS, as_json: AsJson = False) -> int:
    """Show a server's status, or the ledger when none answers."""
    try:
        document, status = fetch_status(at.client(), at.expected_pipeline())
    except NoAnswer as error:
        ledger, shown = read_ledger_instead(at, error)
        print_result(as_json, {"ready": False, "reasons": [str(error)], "ledger": ledger}, *shown)
        return EXIT_NOT_READY
    print_result(as_json, document, *text(status))
    return EXIT_CLEAN if status.ready else EXIT_NOT_READY


def read_ledger_instead(
    at: ServerOptions, no_answer: NoAnswer
) -> tuple[dict[str, Any], list[RenderableType]]:
    """Return the ledger's contents as a document and as text. Raises OperatorError when no ledger can be read either."""
    from mldserver.cli.ledger import ledger_document, ledger_text  # noqa: PLC0415  # only when no server answers

    try:
        ledger = ledger_document(read_ledger(at))
    except OperatorError as error:
        raise OperatorError(f"{no_answer} Nor can the ledger be read: {error}") from error
    return ledger, [plain_text(f"{no_answer} This is what the ledger holds:"), "", *ledger_text(ledger)]


_TABLES: Final = {
    "functions": "function state ready shards lag_ms records rows version staged previous reason",
    "versions": "id role staged_ms",
    "shards": "id state lag_ms durable_age_seconds checkpoint_age_seconds records rows worker position peer",
    "windows": "id state revision rows_in rows_out seconds cut_ms error",
    "workers": "number pid shards resident_bytes restarts running_seconds",
    "largest stores of keyed state": "id keys bytes files serial",
    "other servers": "id beat_age_seconds watermark_ms idle reason",
    # `mldserver dead-letters show` shows all of a letter.
    "latest dead letters": "at_ms shard sequence error",
}


_OF_ONE: Final = {"pipeline", "failures", "watermark", "windows", "budgets"}
"""Facts that a server with several functions has for each of them only."""


def rows(entries: Iterable[msgspec.Struct]) -> list[dict[str, Any]]:
    """Return entries of the status document as rows of a table."""
    return [msgspec.structs.asdict(entry) for entry in entries]


def text(status: Status, *, shards: bool = True) -> list[RenderableType]:
    """Return a status as text: its facts, and a table for each list that has rows."""
    latest, state = status.windows.latest, status.state
    older, newest = latest[:-_WINDOWS], latest[-_WINDOWS:]
    lists = {
        "shards": status.shards if shards else (),
        "versions": status.versions,
        "windows": [*(window for window in older if window.state != "done"), *newest],
        "workers": status.workers,
        "largest stores of keyed state": () if state is None else state.stores[:_STORES],
        "other servers": [server for server in status.servers if not server.this],
        "latest dead letters": status.dead_letters.latest[-_LETTERS:],
    }
    about = facts(status)
    if not status.pipeline:  # these are facts of one function
        about = {name: fact for name, fact in about.items() if name not in _OF_ONE}
    shown: list[RenderableType] = [details(about)]
    if not status.pipeline:
        shown += ["", table(function_rows(status), _TABLES["functions"], title="functions")]
    for name, entries in lists.items():
        if entries:
            shown += ["", table(rows(entries), _TABLES[name], title=name)]
    return shown


def function_rows(status: Status) -> list[dict[str, Any]]:
    """Return a row about each function; ``--function`` shows all about one."""
    return [_function_row(name, function) for name, function in status.by_name.items()]


def _function_row(name: str, function: FunctionStatus) -> dict[str, Any]:
    versions = {version.role: version.id for version in function.versions}
    return {
        "function": name,
        "state": function.lifecycle,
        "ready": ("yes" if function.ready else "no") if function.is_wanted else None,
        "shards": len(function.shards),
        "lag_ms": max((shard.lag_ms for shard in function.shards if shard.lag_ms is not None), default=None),
        "records": function.totals.records,
        "rows": function.totals.rows,
        "version": function.handler_version,
        "staged": versions.get("staged"),
        "previous": versions.get("previous"),
        "reason": next(iter(function.reasons), ""),
    }


def facts(status: Status) -> dict[str, Any]:
    """Return the facts of a status that are not lists, as texts or small mappings by label, in the order of the output."""
    words = ["ready" if status.ready else "NOT READY"]
    if status.paused:
        words.append("pausing" if status.lifecycle == "pausing" else "paused")
    words += ["stopping"] * status.stopping + ["the stream has ended"] * status.stream_ended
    of_several = len(status.functions) > 1
    if of_several and status.pipeline and status.lifecycle not in {"deployed", *words}:
        words.append(status.lifecycle)
    server_id = f"{status.server_id} on " if status.pipeline else ""
    up = format_duration((status.taken_ms - status.started_ms) / 1000)
    totals, windows, spark, letters = status.totals, status.windows, status.spark, status.dead_letters
    state, timers = status.state, status.timers
    return {
        "pipeline": f"{status.pipeline}, {status.handler}" if status.pipeline else "",
        "server": f"{server_id}{status.host}, process {status.pid}, {status.version}, up {up}",
        "state": ", ".join(words),
        "reasons": "\n".join(status.reasons),
        "listening": status.listening,
        "records": f"{totals.records:,} in {totals.batches:,} batches, {format_size(totals.bytes)}",
        "rows": f"{totals.rows:,}, {totals.rows_durable:,} durable, {totals.rows_late:,} late",
        "failures": {name: getattr(totals, name) for name in ("dead_letters", "skipped", "retries")}
        | status.failures,
        "watermark": msgspec.structs.asdict(status.watermark),
        "windows": {name: getattr(windows, name) for name in ("open", "waiting", "published", "set_aside")}
        | ({"early results": windows.early} if windows.early else {})
        | {"halted": len(windows.halted)},
        "Spark": spark
        and {name: getattr(spark, name) for name in ("version", "master", "ready", "trouble", "jobs", "ui")},
        "dead letters": letters.waiting is not None
        and {"waiting": letters.waiting, "redriving": letters.redriving}
        | ({"waits for": letters.waits_for} if letters.waits_for else {}),
        "keyed state": state
        and {
            "keys here": state.keys,
            "files": state.files,
            "size": format_size(state.file_bytes),
            "snapshots": state.snapshots,
            "compactions": state.compactions,
        },
        "timers": timers
        and {
            name: getattr(timers, name)
            for name in ("pending", "set", "cancelled", "fired", "skipped", "failed")
        }
        | ({"without a callback": timers.unknown} if timers.unknown else {})
        | (
            {
                "held": f"{counted(timers.held, 'shard')}, {timers.held_by} for {format_duration(timers.held_seconds)}"
            }
            if timers.held
            else {}
        ),
        "budgets": ", ".join(
            f"{name} {format_size(budget.used_bytes)} of {format_size(budget.limit_bytes)}"
            for name, budget in status.budgets.items()
        ),
        "process": {
            "memory": format_size(status.resident_bytes),
            "event loop late by": format_duration(status.loop_lag_seconds),
            "log level": status.log_level,
        },
    }
