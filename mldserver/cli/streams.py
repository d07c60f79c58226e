"""``mldserver streams``: shows the stream of a table in DynamoDB, and how far a pipeline has read it."""

from __future__ import annotations

import asyncio
import random
import sys
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import structlog
from cyclopts import App, Parameter

from mldserver.base.clock import SystemClock
from mldserver.cli.ledger_tool import FROM_SETTINGS, LedgerOptions, read_ledger
from mldserver.cli.render import AsJson, facts_and_tables, format_time, print_result
from mldserver.config.locations import DynamoPlace
from mldserver.config.settings import Settings
from mldserver.dynamodb_streams.shard_tree import TRIM_HORIZON, After, ShardTree, StreamShard
from mldserver.errors import ConfigError, NotThereYet
from mldserver.ledger.contract import LedgerState, ShardState

if TYPE_CHECKING:
    from mldserver.dynamodb_streams.streams_api import Description, StreamsApi

_HELP = """
Show the stream of a table in DynamoDB: its shards, and with a ledger how far the pipeline has read them.

```
mldserver streams describe orders --region eu-central-1
mldserver streams describe orders --region eu-central-1 --out out/orders
mldserver streams describe orders --endpoint-url http://127.0.0.1:8000 --json
```
"""
_PATIENCE_SECONDS: Final = 20.0
_EMPTY_PAGES: Final = 5
"""This many empty pages in a row cross any gap of an open shard."""

app = App(name="streams", help=_HELP, help_format="markdown")


class _Row(NamedTuple):
    """One shard, as it is shown."""

    shard: StreamShard
    stored: ShardState | None = None
    """What the ledger stores about the shard."""
    lag_ms: int | None = None
    """The age of the oldest change after the ledger's position; 0: no change; None: unknown."""
    note: str = ""


@app.command(name="describe")
def describe_stream(
    stream: Annotated[
        str | None,
        Parameter(
            help="A table's name: its newest stream. Or a stream's ARN. [default: `source`, as for `mldserver serve`]"
        ),
    ] = None,
    /,
    *,
    region: Annotated[str | None, Parameter(help="AWS region. [default: as for `mldserver serve`]")] = None,
    endpoint_url: Annotated[
        str | None, Parameter(help="Endpoint of an emulator. [default: as for `mldserver serve`]")
    ] = None,
    where: LedgerOptions = FROM_SETTINGS,
    as_json: AsJson = False,
) -> int:
    """Show a stream's shards, parents first: open, closed, or read to the end.

    With a ledger (--out or --ledger), also show the positions and the lag: the age of the oldest change that is not durable
    yet. To find it, the command briefly reads a few records, as one more reader.
    """
    if not structlog.is_configured():
        structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    settings = where.resolved() if stream is None else where.all_resolved()[0]
    place = _stream_place(stream, settings, region, endpoint_url)
    state = None if where == FROM_SETTINGS else read_ledger(where)
    description, newest, rows = asyncio.run(_read_stream(place, state))
    document = _stream_document(description, newest, rows)
    columns = "shard parent state first last"
    if state is not None:
        columns += " position lag_ms owner note"
    print_result(as_json, document, *facts_and_tables(document | _summary(document), shards=columns))
    return 0


def _stream_place(
    stream: str | None, settings: Settings, region: str | None, endpoint_url: str | None
) -> DynamoPlace:
    """Return the table or stream to show, with its region and endpoint: the options come before the settings.

    Raises ConfigError if neither names a stream.
    """
    place = settings.source
    if stream is not None:
        place = DynamoPlace(stream)
    elif place == "mld":
        raise ConfigError(
            "No stream was named, and the settings name no source that is one.",
            advice="Name a table, or a stream's ARN.",
        )
    return DynamoPlace(
        place.table,
        region or place.region or settings.region,
        endpoint_url or place.endpoint_url or settings.endpoint_url,
    )


async def _read_stream(place: DynamoPlace, state: LedgerState | None) -> tuple[Description, str, list[_Row]]:
    """Read a stream from AWS. Return (its description, the ARN of the table's newest enabled stream or "", a row for each shard).

    ``state``: what the pipeline's ledger holds, which adds positions and lags; None: show the stream alone.
    """
    from mldserver.dynamodb_streams.streams_api import StreamsApi, streams_client  # noqa: PLC0415  # `--help` must not wait for AWS's client

    clock = SystemClock()
    api = StreamsApi(
        lambda: streams_client(region=place.region, endpoint_url=place.endpoint_url),
        clock=clock,
        random=random.random,
        patience_seconds=_PATIENCE_SECONDS,
    )
    async with api:
        description = await api.describe(await api.resolve(place.table))
        try:
            newest = await api.resolve(description.table)
        except NotThereYet:
            newest = ""
        tree = ShardTree()
        tree.add_listing(description.shards, whole=True)
        stored = {} if state is None else state.shards
        rows = [_Row(shard, stored.get(shard.id)) for _, shard in tree.walk()]
        for shard_id, stored_shard in sorted(stored.items()):
            if shard_id not in tree and not stored_shard.ended:
                row = _Row(StreamShard(shard_id), stored=stored_shard, note="not in the stream any more")
                rows.append(row)
        if state is not None:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(_with_lag(api, description.arn, row, api.now_ms())) for row in rows
                ]
            rows = [task.result() for task in tasks]
    return description, newest, rows


async def _with_lag(api: StreamsApi, arn: str, row: _Row, now_ms: int) -> _Row:
    """Return a shard's row with its lag: the age of the first change after the ledger's position, read from the stream.

    A shard that has ended, or is gone, gets none. If the lag cannot be found, the row's note says why.
    """
    from mldserver.dynamodb_streams.reader import to_record  # noqa: PLC0415  # see above
    from mldserver.dynamodb_streams.streams_api import ShardGone, Trimmed  # noqa: PLC0415  # see above

    position = row.stored.position if row.stored else None
    if row.note or (row.stored is not None and row.stored.ended):
        return row
    if (
        position is not None and not position.number
    ):  # no record yet, only the time from which the shard is read
        return row._replace(note=f"begins at {format_time(position.sub)}")
    note = "not begun" if position is None else ""
    try:
        iterator: str | None
        iterator = await api.iterator(
            arn, row.shard.id, TRIM_HORIZON if position is None else After(position.number)
        )
        for _ in range(_EMPTY_PAGES):
            if iterator is None:
                break
            records, iterator = await api.records(iterator, limit=1)
            if records:
                arrival_ms = to_record(row.shard.id, records[0]).arrival_ms
                return row._replace(lag_ms=max(0, now_ms - (arrival_ms or now_ms)), note=note)
    except Trimmed:
        return row._replace(note="the position was trimmed: changes are lost")
    except ShardGone:
        return row._replace(note="not in the stream any more")
    return row._replace(lag_ms=0, note=note)


def _stream_document(description: Description, newest: str, rows: list[_Row]) -> dict[str, Any]:
    """Return the result of `streams describe` as a JSON document. ``newest``: as `_read_stream` returns it."""
    shards = []
    for row in rows:
        shard, stored = row.shard, row.stored
        position = None if stored is None else stored.position
        shards.append(
            {
                "shard": shard.id,
                "parent": shard.parent,
                "state": "ended" if stored and stored.ended else "open" if shard.last is None else "closed",
                "first": None if shard.first is None else str(shard.first),
                "last": None if shard.last is None else str(shard.last),
                "position": str(position) if position is not None and position.number else None,
                "owner": (stored and stored.owner) or None,
                "lag_ms": row.lag_ms,
                "note": row.note or None,
            }
        )
    return {
        "stream": description.arn,
        "table": description.table,
        "status": description.status,
        "view_type": description.view_type,
        "newest_enabled": newest or None,
        "lag_ms": max((row.lag_ms for row in rows if row.lag_ms is not None), default=None),
        "shards": shards,
    }


def _summary(document: dict[str, Any]) -> dict[str, Any]:
    """Return what only the text shows: the number of shards in each state, and a note about a disabled stream."""
    newest = document["newest_enabled"]
    other = f"The table's stream is {newest}." if newest else "The table has no enabled stream."
    note = f"What is left of this stream can be read for 24 hours after it was disabled. {other}"
    return {
        "states": dict(Counter(shard["state"] for shard in document["shards"])),
        "newest_enabled": None,
        "note": None if document["stream"] == newest else note,
    }
