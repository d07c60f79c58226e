"""What a ledger holds in the end, read from its own storage: a file that is documented, or a table."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from crash.stories import Letter
from crash.timed import firing_of
from support.counted import Named, Store
from support.timed import Firing

from mldserver.base.clock import SystemClock
from mldserver.config.locations import DynamoPlace
from mldserver.ledger.dynamodb import DynamoLedger

_PLENTY = 1_000_000


@dataclass(frozen=True, slots=True)
class Held:
    """What the test asks of a ledger."""

    letters: Counter[Letter]
    """The dead letters."""
    segments: frozenset[str]
    """Paths of the files that windows are computed from."""
    revised: frozenset[str]
    """Windows that have more than one revision."""
    timers: frozenset[Firing] = frozenset()
    """The dead letters of timers."""
    state: Named = Named({}, {})  # noqa: RUF009  # a tuple that no test changes


def in_sqlite(out: Path) -> Held:
    """Ask the file itself."""
    with closing(sqlite3.connect(out / "_mldserver" / "ledger.sqlite")) as db:
        letters = db.execute(
            "SELECT data, shard_id, sequence FROM dead_letters WHERE coalesce(timer, '') = ''"
        ).fetchall()
        timers = db.execute("SELECT timer, partition_key, data FROM dead_letters WHERE timer > ''").fetchall()
        segments = db.execute("SELECT path FROM segments").fetchall()
        revised = db.execute("SELECT window_id FROM windows WHERE revision > 1").fetchall()
        stores = db.execute("SELECT store_id, first, last, closed FROM stores").fetchall()
        files = db.execute("SELECT path, needed FROM state_files").fetchall()
    return Held(
        Counter(Letter(json.loads(data)["id"], shard, sequence) for data, shard, sequence in letters),
        frozenset(path for (path,) in segments),
        frozenset(window for (window,) in revised),
        frozenset(firing_of(*letter) for letter in timers),
        _named(stores, files),
    )


def _named(stores: list[tuple[str, str, str, int]], files: list[tuple[str, str]]) -> Named:
    found = {
        name: Store((int(first, 16), int(last, 16)), bool(closed)) for name, first, last, closed in stores
    }
    needed = {
        path: {
            name: [found[name].hashes]
            if ranges is None
            else [(int(first, 16), int(last, 16)) for first, last in ranges]
            for name, ranges in json.loads(text).items()
        }
        for path, text in files
    }
    return Named(found, needed)


async def in_dynamodb(place: DynamoPlace, pipeline: str) -> Held:
    """Ask the table by way of the ledger: its rows are journals, compressed."""
    ledger = DynamoLedger(
        place.table,
        pipeline=pipeline,
        server_id="reader",
        clock=SystemClock(),
        region=place.region,
        endpoint_url=place.endpoint_url,
    )
    try:
        state = await ledger.peek()
        letters = await ledger.dead_letters(_PLENTY)
    finally:
        await ledger.close()
    windows = state.windows.values()
    return Held(
        Counter(
            Letter(json.loads(each.data)["id"], each.shard_id, str(each.sequence.number))
            for each in letters
            if not each.timer
        ),
        frozenset(each.path for entry in windows for each in (*entry.segments, *entry.pending)),
        frozenset(entry.window_id for entry in windows if entry.revision > 1),
        frozenset(
            firing_of(each.timer, each.partition_key or "", each.data) for each in letters if each.timer
        ),
        Named.of(state),
    )
