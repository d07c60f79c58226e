"""What a crash run plays: a stream with splits, merges, late rows and poison, and what must come of it.

The expectation is computed here from the records alone; nothing of the server's code is used.
"""

from __future__ import annotations

import json
import random
import sqlite3
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

import pyarrow.dataset as ds
import pyarrow.parquet as pq

from mldserver.testing import FakeStream

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

START: Final = datetime(2027, 1, 15, 8, tzinfo=UTC)
SIZE: Final = timedelta(seconds=10)
TWICE: Final = 1_000_000
"""Added to the id of a record's second row."""

_HANDLER: Final = '''
"""Rows of {kind} windows: none, one or two for each record."""
from mldserver import batches, tumbling

schema = "id BIGINT NOT NULL, at TIMESTAMP NOT NULL, arrived BIGINT"
windows = {windows}


def process_record(record):
    event = record.json()
    if event["kind"] == "poison":
        raise ValueError("poison")
    arrived = int(record.approximate_arrival_timestamp.timestamp() * 1000)
    row = (event["id"], event["at"], arrived)
    return {{"none": [], "twice": [row, (event["id"] + {twice}, event["at"], arrived)]}}.get(event["kind"], row)
'''
WINDOWS: Final = {
    "column": 'tumbling("10 seconds", on="at", lateness="2 seconds")',
    "arrival": 'tumbling("10 seconds")',
    "batches": 'batches(max_rows=37, max_age="80 ms")',
}


@dataclass(frozen=True, slots=True)
class Story:
    """One stream and the handler that reads it."""

    seed: int
    windows: str
    """A key of ``WINDOWS``."""
    stream: FakeStream
    rows: Counter[int]
    """The ids that must come out, in windows or in the late dataset."""
    poisoned: Counter[int]
    """The ids that must be in the dead letters."""


def told(seed: int, *, windows: str, records: int, shards: int = 2) -> Story:
    """Make a story: ids count up, event times mostly with them; every tenth record or so is something else."""
    dice = random.Random(f"{seed}/story")
    stream = FakeStream(shards, seed=seed, start_ms=_ms(START))
    changes = sorted(dice.sample(range(records // 10, records), 3))
    rows: Counter[int] = Counter()
    poisoned: Counter[int] = Counter()
    for number in range(records):
        if changes and number == changes[0]:
            _reshard(stream, dice, split=len(changes) != 2)
            del changes[0]
        kind = dice.choices(["row", "old", "none", "twice", "poison"], [80, 8, 3, 6, 3])[0]
        at = START + timedelta(milliseconds=100 * number)
        event_at = at - timedelta(seconds=dice.randint(5, 60)) if kind == "old" else at
        event = {"id": number, "at": event_at.isoformat(), "kind": kind}
        stream.put(json.dumps(event).encode(), f"key-{number}", arrival_ms=_ms(at))
        poisoned.update([number] if kind == "poison" else [])
        rows.update({"none": [], "poison": [], "twice": [number, number + TWICE]}.get(kind, [number]))
    stream.end()
    return Story(seed, windows, stream, rows, poisoned)


def _reshard(stream: FakeStream, dice: random.Random, *, split: bool) -> None:
    if split or len(stream.open_shards) < 2:
        stream.split(dice.choice(stream.open_shards))
    else:
        stream.merge(*dice.choice(stream.adjacent_pairs()))


def _ms(at: datetime) -> int:
    return round(at.timestamp() * 1000)


def write_handler(folder: Path, windows: str) -> str:
    """Write the story's handler and return its dotted path."""
    name = f"rows_by_{windows}"
    source = _HANDLER.format(kind=windows, windows=WINDOWS[windows], twice=TWICE)
    (folder / f"{name}.py").write_text(source)
    return name


@dataclass(frozen=True, slots=True)
class Row:
    """One row that came out, and where."""

    id: int
    window: str
    late: bool
    at_ms: int
    arrived_ms: int
    order: tuple[int, int]
    """``_time`` and ``_clock``."""
    shard: str
    sequence: int


def published(out: Path) -> Iterator[Row]:
    """Yield what readers of the output and of the late dataset see."""
    for late, folder in ((False, out), (True, out / "_late")):
        for file in ds.dataset(folder, format="parquet").files if folder.exists() else ():
            window = file.rsplit("/", 2)[1].removeprefix("window=")
            for row in pq.ParquetFile(file).read().to_pylist():
                yield Row(
                    row["id"],
                    window,
                    late,
                    _ms(row["at"].replace(tzinfo=UTC) if row["at"].tzinfo is None else row["at"]),
                    row["arrived"],
                    (row["_time"], row["_clock"]),
                    row["_shard"],
                    int(row["_sequence"]),
                )


def dead_letters(out: Path) -> Counter[int]:
    """Return the ids in the dead letters, from the ledger's documented file format."""
    with closing(sqlite3.connect(out / "_mldserver" / "ledger.sqlite")) as db:
        return Counter(json.loads(data)["id"] for (data,) in db.execute("SELECT data FROM dead_letters"))


def check(story: Story, out: Path) -> None:
    """Compare everything that came out with what must; each difference is named."""
    rows = list(published(out))
    found = Counter(row.id for row in rows)
    assert found == story.rows, f"lost: {story.rows - found}; doubled or foreign: {found - story.rows}"
    letters = dead_letters(out)
    assert letters == story.poisoned, f"lost: {story.poisoned - letters}; doubled: {letters - story.poisoned}"
    for row in rows:
        if story.windows != "batches":
            when = row.at_ms if story.windows == "column" else row.order[0]
            begin = datetime.fromtimestamp(when // _MS_SIZE * _MS_SIZE // 1000, UTC)
            assert row.window == begin.strftime("%Y-%m-%dT%H-%M-%SZ"), row
        assert story.windows != "arrival" or row.order[0] >= row.arrived_ms, row
    _check_order(rows)


_MS_SIZE: Final = SIZE // timedelta(milliseconds=1)


def _check_order(rows: list[Row]) -> None:
    """The order of a shard's rows by (_time, _clock) is the order of their records."""
    last: dict[str, int] = {}
    for row in sorted(rows, key=lambda row: row.order):
        assert last.get(row.shard, -1) <= row.sequence, f"out of order in its shard: {row}"
        last[row.shard] = row.sequence
