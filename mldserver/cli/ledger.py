"""``mldserver ledger``: shows where shards and servers stand; mends what needs a person; backs up and restores."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from mldserver.cli.backup import backup_ledger, restore_ledger
from mldserver.cli.ledger_tool import (
    HERE,
    AsJson,
    Where,
    answer,
    at_ledger,
    details,
    moment,
    on_ledger,
    table,
    tell,
    tell_json,
)
from mldserver.config.locations import SqlitePlace
from mldserver.errors import ConfigError, OperatorError
from mldserver.ledger.contract import WindowState

if TYPE_CHECKING:
    from rich.table import Table

    from mldserver.ledger.contract import LedgerState, ShardState
    from mldserver.ledger.operations import Ledger

_HELP = """
Show where shards and servers stand, reset shards, accept a gap, back up and restore. Servers that run are not disturbed.

```
mldserver ledger show --out out/departures
mldserver ledger show --ledger 'dynamodb://mldserver?region=eu-central-1' --pipeline departures --json
mldserver ledger accept-gap shardId-000000000003 --out out/departures
mldserver ledger reset shardId-000000000003 --out out/departures
mldserver ledger backup /backups/departures-monday --out out/departures
mldserver ledger restore /backups/departures-monday --out out/departures
mldserver ledger create --ledger 'dynamodb://mldserver?region=eu-central-1'
```

In a folder the ledger is the SQLite file `_mldserver/ledger.sqlite`; `mldserver/ledger/sqlite_file.py` documents its format.

Exit codes: 0 done, 2 there is no such shard or ledger, or it cannot be read.
"""

app = App(name="ledger", help=_HELP, help_format="markdown")

app.command(backup_ledger, name="backup")
app.command(restore_ledger, name="restore")


ShardId = Annotated[str, Parameter(help="Its id, as `ledger show` lists it.")]


@app.command(name="show")
def show_ledger(*, where: Where = HERE, as_json: AsJson = False) -> int:
    """Show shards with their positions, servers, and counts of the rest."""

    async def look(_ledger: Ledger, held: LedgerState) -> None:
        if as_json:
            tell_json(_everything(held))
        else:
            tell(details(_facts(held)))
            for grid in _tables(held):
                tell("", grid)

    at_ledger(where, look)
    return 0


@app.command(name="create")
def create_ledger(*, where: Where = HERE) -> int:
    """Create the table in DynamoDB that `--ledger` names, unless it is there: on-demand billing, for any pipelines.

    `mldserver/ledger/dynamodb.py` lists the permissions that this and the servers need.
    """
    settings = where.resolved()
    place = settings.ledger
    if isinstance(place, SqlitePlace):
        raise ConfigError(
            "A ledger in SQLite needs no table.",
            advice="Name one: --ledger 'dynamodb://TABLE?region=REGION'.",
        )

    async def create(ledger: Ledger) -> None:
        from mldserver.ledger.dynamodb import DynamoLedger  # noqa: PLC0415  # `--help` must not wait for AWS's client

        assert isinstance(ledger, DynamoLedger)
        await ledger.create_table()

    on_ledger(settings, create)
    tell(f"The table {place.table} is there.")
    return 0


@app.command(name="reset")
def reset_shards(*shards: ShardId, where: Where = HERE, as_json: AsJson = False) -> int:
    """Forget shards' positions, so that all that a daemon delivers of them counts again.

    Rows that were stored before stay where they are: read again, they count twice. Only shards that no server holds
    are reset. The daemon must start at the beginning (delete the shard's lease, or the application's lease table):
    one that goes on from its checkpoint is refused, unless the gap is accepted.
    """
    if not shards:
        raise OperatorError("No shard was named.", advice="`mldserver ledger show` shows them.")

    async def work(ledger: Ledger, held: LedgerState) -> None:
        # All are looked at before one is changed: a slip in the second name must not leave half of it done.
        for shard_id in shards:
            if (owner := _shard(held, shard_id).owner) is not None:
                raise OperatorError(
                    f"Shard {shard_id} is held by the server {owner}.",
                    advice="Stop that server first; a dead one's shards are free when another server has noticed.",
                )
        done = sorted(await ledger.reset(frozenset(shards)))
        answer(
            as_json,
            {"reset": done},
            details((shard_id, "is reset: it has no position any more.") for shard_id in done),
        )
        if left := sorted(set(shards).difference(done)):
            raise OperatorError(
                f"Not reset, because a server has opened them since: {', '.join(left)}.",
                advice="Stop the server first.",
            )

    at_ledger(where, work)
    return 0


@app.command(name="accept-gap")
def accept_gap(shard: ShardId, /, *, where: Where = HERE, as_json: AsJson = False) -> int:
    """Let a daemon start a shard beyond the ledger's position, once; the records between the two are lost."""

    async def work(ledger: Ledger, held: LedgerState) -> None:
        position = _shard(held, shard).position
        if not await ledger.accept_gap(shard):
            raise _unknown(shard)  # pruned since we looked
        answer(
            as_json,
            {"accepted": shard, "position": _text(position)},
            details([(shard, f"may start beyond {position or 'nothing'}, the next time it is opened.")]),
        )

    at_ledger(where, work)
    return 0


def _shard(held: LedgerState, shard_id: str) -> ShardState:
    if (shard := held.shards.get(shard_id)) is None:
        raise _unknown(shard_id)
    return shard


def _unknown(shard_id: str) -> OperatorError:
    return OperatorError(
        f"The ledger has no shard {shard_id}.", advice="`mldserver ledger show` shows those it has."
    )


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _everything(held: LedgerState) -> dict[str, Any]:
    counts = Counter(entry.state for entry in held.windows.values())
    return {
        "clock": held.clock,
        "cut_below_ms": held.cut_below_ms,
        "batch_progress": dataclasses.asdict(held.batch_progress),
        "dead_letters": held.dead_letters,
        "draining": held.draining,
        "late_files_waiting": len(held.late_segments),
        "windows": {str(state): counts[state] for state in WindowState},
        "segment_bytes": _segment_bytes(held),
        "servers": [dataclasses.asdict(server) for server in _by_id(held.servers)],
        "shards": [
            dataclasses.asdict(shard) | {"position": _text(shard.position), "parents": list(shard.parents)}
            for shard in _by_id(held.shards)
        ],
    }


def _by_id(entries: dict[str, Any]) -> list[Any]:
    return [entries[key] for key in sorted(entries)]


def _segment_bytes(held: LedgerState) -> int:
    return sum(
        segment.bytes for entry in held.windows.values() for segment in (*entry.segments, *entry.pending)
    )


def _facts(held: LedgerState) -> list[tuple[str, str]]:
    counts = Counter(entry.state for entry in held.windows.values())
    windows = [f"{counts[state]:,} {state.replace('_', ' ')}" for state in WindowState if counts[state]]
    facts = [
        ("windows", ", ".join(windows) or "none"),
        ("segments", f"{_segment_bytes(held):,} bytes"),
        ("dead letters", f"{held.dead_letters:,}"),
        ("merge clock", f"{held.clock:,}"),
    ]
    if held.draining:
        facts.append(("drain", "asked for; the next start ends it" if not held.servers else "under way"))
    if held.cut_below_ms is not None:
        facts.append(("forgotten", f"windows up to {moment(held.cut_below_ms)}"))
    if held.batch_progress.number:
        facts.append(
            ("open batch", f"number {held.batch_progress.number:,}, {held.batch_progress.rows:,} rows")
        )
    if held.late_segments:
        facts.append(("late files", f"{len(held.late_segments):,} not visible yet"))
    return facts


def _tables(held: LedgerState) -> tuple[Table, Table]:
    servers = table(
        "servers",
        ("server", "last beat", "watermark", "held by", "reason"),
        (
            (
                server.server_id,
                moment(server.beat_ms),
                "idle" if server.idle else moment(server.watermark_ms),
                server.held_by or "-",
                server.reason or "-",
            )
            for server in _by_id(held.servers)
        ),
    )
    shards = table(
        "shards",
        ("shard", "position", "event time", ">epoch", "held by", "parents", "note"),
        (
            (
                shard.shard_id,
                _text(shard.position) or "-",
                moment(shard.event_ms),
                str(shard.epoch),
                shard.owner or "-",
                ", ".join(shard.parents) or "-",
                ", ".join(["ended"] * shard.ended + ["gap accepted"] * shard.gap_accepted),
            )
            for shard in _by_id(held.shards)
        ),
    )
    return servers, shards
