"""``mldserver status``: one look at a running server, or at the ledger when none answers.

Here is also what ``top`` and the steering commands share: where the server is, and how its status is set as tables.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path  # cyclopts reads the annotations
from typing import Annotated, Any, Final, NamedTuple

import msgspec
from cyclopts import App, Group, Parameter
from rich.console import RenderableType
from rich.table import Table

from mldserver.admin.access import find_token
from mldserver.admin.document import Shard, Status
from mldserver.admin.http_client import Client, NoAnswer, read_status
from mldserver.base.tls import client_context
from mldserver.cli.ledger_tool import (
    AsJson,
    Where,
    answer,
    details,
    first_line,
    moment,
    plain,
    state_at,
    table,
)
from mldserver.config.kinds import Address, TcpAddress, is_local
from mldserver.config.kinds import address as parse_address
from mldserver.config.locations import SqlitePlace
from mldserver.config.resolve import ledger_file
from mldserver.config.settings import Settings
from mldserver.errors import EXIT_CLEAN, ConfigError, NotThereYet, OperatorError
from mldserver.ledger.contract import LedgerState
from mldserver.ledger.sqlite_file import pipeline_of

EXIT_NOT_READY: Final = 3

_WINDOWS: Final = 5
"""The latest windows that are shown; more only of those that are not done."""
_LETTERS: Final = 3

_HELP = """
Show the status of a running server: shards with lag and position, watermark, windows, workers, Spark, dead letters, other
servers.

```
mldserver status
mldserver status --out out/departures
mldserver status --admin unix:/run/departures.admin --json | jq .reasons
mldserver status --admin server.example:7071 --ca ca.pem --certificate me.pem --key me.key
```

The command asks the server's admin endpoint (`admin`). If no server answers, the command shows the ledger's contents, and says so.

Exit codes: 0 ready; 3 not ready, or no server answers; 2 unknown: no server and no ledger, or the server refuses.
"""

app = App(name="status", help=_HELP, help_format="markdown")


@Parameter(name="*", group=Group("Where the server is"))
@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions(Where):
    """Options that name a server and the client's credentials. Environment variables and the settings file count too."""

    admin: str | None = None
    """The server's admin endpoint: `host:port` or `unix:PATH`. [default: as for `mldserver serve`]"""
    admin_token_file: Path | None = None
    """The file with the server's token. [default: as for `mldserver serve`; on loopback the file that the server created]"""
    ca: Path | None = None
    """The authority of the server's certificate, outside loopback. [default: `tls_client_ca`, else the system's authorities]"""
    certificate: Path | None = None
    """The caller's certificate. [default: `tls_certificate`]"""
    key: Path | None = None
    """The certificate's private key. [default: in the certificate's file, or `tls_key`]"""
    insecure: Annotated[bool, Parameter(negative=())] = False
    """Ask a server outside loopback without TLS, if it was started so. [default: as for `mldserver serve`]"""

    def client(self, *, steers: bool = False) -> Client:
        """Return the endpoint's client. Raises ConfigError for what cannot be meant, OperatorError for files that cannot be read.

        With ``steers``, the client has the token that the server created, if no other is named. On loopback, reading needs
        no token.
        """
        settings = self.resolved(
            admin=self.admin, admin_token_file=self.admin_token_file, insecure=self.insecure or None
        )
        address, token_file, tls = settings.admin, settings.admin_token_file, None
        if address is None:
            raise ConfigError(
                f"admin = none ({settings.origin('admin')}): there is no endpoint to ask.",
                advice="Name the server's with --admin.",
            )
        if self.admin is None and "admin" not in settings.origins:
            address = _told_address(settings) or address
        in_clear = is_local(address) or settings.insecure
        if self.ca is not None or self.certificate is not None or not in_clear:
            certificate, key = settings.tls_certificate, settings.tls_key
            if self.certificate is not None:
                certificate, key = self.certificate, self.key
            try:
                tls = client_context(certificate, key, self.ca or settings.tls_client_ca)
            # A server may wait for its files; a command was given the wrong ones.
            except NotThereYet as error:
                raise ConfigError(error.what, advice=error.advice) from error
        elif token_file is None and steers and isinstance(address, TcpAddress) and is_local(address):
            from mldserver.admin.endpoint_keeper import token_file as made  # noqa: PLC0415  # who only reads need not wait for it

            token_file = made(settings)
            if not token_file.exists():
                raise ConfigError(
                    f"There is no token of a server at {token_file}.",
                    advice="Give --out as the server has it, or --admin-token-file.",
                )
        return Client(address, token=None if token_file is None else find_token(token_file), tls=tls)

    def meant_pipeline(self) -> str | None:
        """Return the pipeline whose server is meant; None: whichever answers, because nothing names one, or an address does."""
        settings = self.resolved()
        if self.admin is not None and not any((self.out, self.ledger, self.pipeline)):
            return None
        in_ledger = pipeline_of(ledger_file(settings)) if isinstance(settings.ledger, SqlitePlace) else None
        named = settings.pipeline if {"pipeline", "handler"} & settings.origins.keys() else None
        return self.pipeline or in_ledger or named


def _told_address(settings: Settings) -> Address | None:
    """Return where a server of this output folder says that its endpoint listens; None: none says so."""
    from mldserver.admin.endpoint_keeper import address_file  # noqa: PLC0415  # `--help` must not wait for it

    try:
        return parse_address.parse(address_file(settings).read_text("utf-8").strip())
    except (OSError, ValueError):
        return None


HERE: Final = ServerOptions()
"""As for ``mldserver serve``."""


def ask(client: Client, pipeline: str | None) -> tuple[dict[str, Any], Status]:
    """Return a server's status, raw and parsed. A server that is not alive is not ready, whatever its last status says.

    Raises NoAnswer if no server, or a server of another ``pipeline``, answers; Refused if the server denies access.
    """
    document = client.status()
    status = read_status(document)
    if pipeline not in {None, status.pipeline}:
        raise NoAnswer(
            f"The server at {client.address} is of the pipeline {status.pipeline}, not of {pipeline}.",
            advice="Name its endpoint with --admin.",
        )
    raw: dict[str, Any] = json.loads(document)
    if (silence := client.silence()) is not None:
        changes: dict[str, Any] = {"ready": False, "reasons": (silence, *status.reasons)}
        return raw | changes, msgspec.structs.replace(status, **changes)
    return raw, status


@app.default
def show_status(*, at: ServerOptions = HERE, as_json: AsJson = False) -> int:
    """Show a server's status, or the ledger when none answers."""
    try:
        document, status = ask(at.client(), at.meant_pipeline())
    except NoAnswer as error:
        from mldserver.cli.ledger import everything  # noqa: PLC0415  # only when no server answers

        held, shown = instead(at, error)
        answer(as_json, {"ready": False, "reasons": [str(error)], "ledger": everything(held)}, *shown)
        return EXIT_NOT_READY
    answer(as_json, document, details(facts(status)), *tables(status, shards(status.shards)))
    return EXIT_CLEAN if status.ready else EXIT_NOT_READY


def instead(at: ServerOptions, no_answer: NoAnswer) -> tuple[LedgerState, list[RenderableType]]:
    """Return what the ledger holds when no server answers, and how it is shown. Raises OperatorError when there is none either."""
    from mldserver.cli.ledger import overview  # noqa: PLC0415  # only then

    try:
        held = state_at(at)
    except OperatorError as error:
        raise OperatorError(f"{no_answer} Nor can the ledger be read: {error}") from error
    return held, [plain(f"{no_answer} This is what the ledger holds:"), "", *overview(held)]


def tables(status: Status, shards: Table) -> list[RenderableType]:
    """Return all tables of a status that have rows: shards, windows, workers, other servers, the latest dead letters."""
    workers = [
        (
            one.number,
            one.pid,
            one.shards,
            size(one.resident_bytes),
            one.restarts,
            span(one.running_seconds or None),
        )
        for one in status.workers
    ]
    servers = []
    for one in status.servers:
        if not one.this:
            watermark = "idle" if one.idle else moment(one.watermark_ms)
            servers.append((one.id, span(one.beat_age_seconds), watermark, one.reason or None))
    # `mldserver dead-letters show` has them whole.
    latest = status.dead_letters.latest[-_LETTERS:]
    letters = [(moment(one.at_ms), one.shard, one.sequence, first_line(one.error)) for one in latest]
    grids = (
        shards,
        windows(status),
        table("workers", (">worker", ">process", ">shards", ">memory", ">restarts", ">call runs"), workers),
        table("other servers", ("server", ">last beat", "watermark", "reason"), servers),
        table("latest dead letters", ("at", "shard", "sequence", "error"), letters),
    )
    return [part for grid in grids if grid.row_count for part in ("", grid)]


def facts(status: Status) -> list[tuple[str, str]]:
    """Return what is said once, by name; what there is nothing to say of is left out."""
    totals, spans, spark = status.totals, status.windows, status.spark
    state = ["ready" if status.ready else "NOT READY"] + ["paused"] * status.paused
    state += ["stopping"] * status.stopping + ["the stream has ended"] * status.stream_ended
    up = span((status.taken_ms - status.started_ms) / 1000)
    found = [
        ("pipeline", f"{status.pipeline}, {status.handler}"),
        ("server", f"{status.server_id} on {status.host}, process {status.pid}, {status.version}, up {up}"),
        ("state", ", ".join(state)),
        *(("", reason) for reason in status.reasons),
        *([("listening", status.listening)] if status.listening else []),
        ("records", f"{totals.records:,} in {totals.batches:,} batches, {size(totals.bytes)}"),
        ("rows", f"{totals.rows:,}, {totals.rows_durable:,} durable, {totals.rows_late:,} late"),
    ]
    failed = {"dead letters": totals.dead_letters, "skipped": totals.skipped, "retries": totals.retries}
    if any(failed.values()):
        by_class = ", ".join(f"{name} {count:,}" for name, count in status.failures.items())
        found.append(("failures", _counts(failed) + (f" ({by_class})" if by_class else "")))
    mark = status.watermark
    holder = " of ".join(filter(None, [mark.held_by, mark.server and f"server {mark.server}"]))
    said = [moment(mark.at_ms), holder and f"held by {holder}", mark.reason, "STUCK" if mark.stuck else ""]
    found.append(("watermark", ", ".join(filter(None, said))))
    counts = {"open": spans.open, "waiting": spans.waiting, "published": spans.published}
    counts |= {"set aside": spans.set_aside, "halted": len(spans.halted)}
    found.append(("windows", _counts(counts) or "none"))
    if spark is not None:
        trouble = "" if spark.ready else spark.trouble or "it starts"
        jobs = f"{spark.jobs:,} jobs" if spark.ready else ""
        found.append(
            ("Spark", ", ".join(filter(None, [spark.version, spark.master, trouble, jobs, spark.ui])))
        )
    if (waiting := status.dead_letters.waiting) is not None:
        found.append(("dead letters", f"{waiting:,} waiting, {status.dead_letters.redriving:,} run again"))
    limits = [f"{name} {size(b.used_bytes)} of {size(b.limit_bytes)}" for name, b in status.budgets.items()]
    found += [("budgets", ", ".join(limits))] if limits else []
    late = f"the event loop was late by {span(status.loop_lag_seconds)}"
    found.append(
        ("process", f"{size(status.resident_bytes)} of memory, {late}, log level {status.log_level}")
    )
    return found


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)


class Rates(NamedTuple):
    """What a shard, or all, had in a second."""

    records: float = 0.0
    rows: float = 0.0
    bytes: float = 0.0


def shards(
    entries: Iterable[Shard],
    title: str = "shards",
    *,
    rates: Mapping[str, Rates] | None = None,
    narrow: bool = False,
) -> Table:
    """Return shards as a table, in the order in which they come: with their rates, or else with their positions.

    ``narrow``: of rates only that of records.
    """
    counts = [">records/s"] if narrow else [">records/s", ">rows/s", ">bytes/s"]
    if rates is None:
        counts = [">no checkpoint", ">records", ">rows", ">worker", "position", "peer"]
    rows = []
    for shard in entries:
        lag = None if shard.lag_ms is None else span(shard.lag_ms / 1000)
        cells: list[object] = [shard.id, shard.state, lag, span(shard.durable_age_seconds)]
        if rates is None:
            cells += [span(shard.checkpoint_age_seconds), f"{shard.records:,}", f"{shard.rows:,}"]
            cells += [shard.worker, shard.position or None, shard.peer or None]
        elif (rate := rates.get(shard.id)) is not None:
            cells += [f"{rate.records:,.0f}", f"{rate.rows:,.0f}", size(rate.bytes)]
        else:
            cells += [None, None, None]
        rows.append(cells)
    columns = ("shard", "state", ">lag", ">not durable", *counts)
    return table(title, columns, [cells[: len(columns)] for cells in rows])


def windows(status: Status) -> Table:
    """Return the windows that are not done, and the latest of the others, as a table."""
    latest = status.windows.latest
    chosen = [one for at, one in enumerate(latest, _WINDOWS - len(latest)) if at >= 0 or one.state != "done"]
    rows = []
    for one in chosen:
        counts = [None if count is None else f"{count:,}" for count in (one.rows_in, one.rows_out)]
        seconds = None if one.seconds is None else f"{one.seconds:.1f}"
        cut = None if one.cut_ms is None else moment(one.cut_ms // 1000 * 1000)
        state = one.state.replace("_", " ")
        rows.append([one.id, state, one.revision, *counts, seconds, cut, first_line(one.error)])
    columns = ("window", "state", ">revision", ">rows in", ">rows out", ">seconds", "cut", "error")
    return table("windows", columns, rows)


_SPANS: Final = ((86_400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s"))


def span(seconds: float | None) -> str:
    """Return a time as people say it, in one or two units; a dash for none."""
    if seconds is None:
        return "-"
    whole_seconds = round(seconds)
    for factor, unit, rest_factor, rest_unit in _SPANS:
        if whole_seconds >= factor:
            many, rest = divmod(whole_seconds, factor)
            return f"{many} {unit}" + (f" {rest // rest_factor} {rest_unit}" if rest >= rest_factor else "")
    return f"{seconds:.1f} s" if seconds >= 1 else f"{round(seconds * 1000)} ms"


def size(amount: float) -> str:
    """Return bytes in the binary unit that makes a short number."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:  # noqa: PLR2004  # of each unit
            return f"{amount:.0f} {unit}" if unit == "B" or amount >= 10 else f"{amount:.1f} {unit}"  # noqa: PLR2004  # three digits
        amount /= 1024
    return f"{amount:,.1f} TiB"
