"""What a crash run plays: a stream with splits, merges, late rows and poison, and what must come of it.

The expectation is computed here from the records alone; nothing of the server's code is used.
"""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow.dataset as ds
import pyarrow.parquet as pq
from crash import timed
from support.counted import check_stored
from support.sqlite_table import read_table

from mldserver.config.locations import LetterPlace
from mldserver.sinks.sink import SinkSpec
from mldserver.testing import FakeStream

if TYPE_CHECKING:
    import pyarrow as pa
    from crash.held import Held

START: Final = datetime(2027, 1, 15, 8, tzinfo=UTC)
SIZE: Final = timedelta(seconds=10)
_STEP: Final = timedelta(milliseconds=100)
"""Between two records."""
TABLE: Final = "_table.sqlite"
"""In the output folder: where the small engine publishes windows, when a story's sink is a table."""
_LETTERS: Final = "dead-letters-"
"""What the ids of commits of dead letters begin with."""
_FEW_KEYS: Final = 23
TWICE: Final = 1_000_000
"""Added to the id of a record's second row."""

_HANDLER: Final = '''
"""Rows ({kind}): none, one or two for each record."""
from mldserver import batches, tumbling

schema = "id BIGINT NOT NULL, at TIMESTAMP NOT NULL, arrived BIGINT"
windows = {windows}


def process_record({arguments}):
    event = record.json()
{count}    if event["what"] == "poison":
        raise ValueError("poison")
    arrived = int(record.approximate_arrival_timestamp.timestamp() * 1000)
    row = (event["id"], event["at"], arrived)
    return {{"none": [], "twice": [row, (event["id"] + {twice}, event["at"], arrived)]}}.get(event["what"], row)
'''
_COUNT: Final = """\
    seen = ctx.state.get("seen", 0)
    ctx.state["seen"] = seen + 1
    if seen != event["nth"]:
        event["id"] = -1 - event["id"]
"""
"""A wrong count makes another row than the story expects. A record that fails does not count."""
_BY_COLUMN: Final = 'tumbling("10 seconds", on="at", lateness="2 seconds")'


_BOUNDS: Final = frozenset({"window_start", "window_end"})
"""What an output tells beside its rows."""
_NAMES: Final = frozenset(
    {"id", "at", "arrived", "_time", "_clock", "_shard", "_sequence", "_sub_sequence", "_arrival"}
)


@dataclass(frozen=True, slots=True)
class Kind:
    """One way to cut windows, and to deal with late rows."""

    windows: str
    """As in the handler."""
    settings: dict[str, Any] = field(default_factory=dict)
    column: bool = False
    """Whether windows are cut on the rows' own times."""
    batches: bool = False
    late: bool = False
    """Whether the late dataset may hold rows in the end."""
    keyed: bool = False
    """Whether the handler counts the records of each key in its state."""
    timed: bool = False
    """Whether records set timers (``timed.py``)."""
    length: int = 1
    """Its stories have so many times the records of others."""


KINDS: Final = {
    "recompute": Kind(_BY_COLUMN, column=True),
    "table": Kind(_BY_COLUMN, {"sink": SinkSpec("delta", "in the engine's own file")}, column=True),
    "separate": Kind(_BY_COLUMN, {"late": "separate"}, column=True, late=True),
    "side_tables": Kind(
        _BY_COLUMN,
        {
            "late": "separate",
            "late_sink": SinkSpec("delta", "in the engine's own file"),
            "dead_letters": LetterPlace("delta", "there too"),
        },
        column=True,
        late=True,
    ),
    "forgetful": Kind(_BY_COLUMN, {"retention_bytes": 1}, column=True, late=True),
    "early": Kind(f'{_BY_COLUMN[:-1]}, early="1 s")', {"early_ms": 15}, column=True),
    "arrival": Kind('tumbling("10 seconds")'),
    "batches": Kind('batches(max_rows=37, max_age="80 ms")', batches=True),
    "keyed": Kind('tumbling("10 seconds")', {"stream": "told", "retention": 0.2}, keyed=True, length=3),
    "timed": Kind('tumbling("10 seconds")', {"stream": "told", "retention": 0.2}, keyed=True, timed=True),
}


_FILES: Final = tuple(kind for kind in KINDS if kind != "table")
ONLY_IN: Final = {
    "window.renamed": _FILES,
    "sink.writing": ("table", "side_tables"),
    "sink.written": ("table",),
    "late.staged": ("side_tables",),
    "late.moved": ("separate", "side_tables", "forgetful"),
    "late.published": ("separate", "side_tables", "forgetful"),
    "revision.cutting": ("recompute",),
    "revision.cut": ("recompute",),
    "revision.exchanged": ("recompute",),
    "window.expired": ("forgetful",),
    "early.computed": ("early",),
    "early.showing": ("early",),
    "early.shown": ("early",),
    "early.hidden": ("early",),
    "timers.firing": ("timed",),
    "timers.fired": ("timed",),
    "store.adopted": ("timed",),
    "state.loading": ("keyed", "timed"),
    "state.loaded": ("keyed", "timed"),
    "state.written": ("keyed", "timed"),
    "state.compacting": ("keyed", "timed"),
    "state.compacted": ("keyed", "timed"),
    "state.dropped": ("keyed", "timed"),
}
"""Steps that some kinds of story come to, and others do not, or seldom."""

OF_STATE: Final = frozenset(step for step, kinds in ONLY_IN.items() if kinds[0] == "keyed")
"""Steps that have a test of their own too: there a server dies at each of them with either runtime."""

OF_TIMERS: Final = frozenset(step for step, kinds in ONLY_IN.items() if kinds[0] == "timed")
"""Others that have, as well."""

OF_LETTERS: Final = frozenset({"letters.stored", "redrive.taken", "redrive.handled", "redrive.done"})
"""Steps that no story comes to: they have a test of their own."""
OF_COMMANDS: Final = frozenset({"function.wanted", "function.swapping"})
"""Steps of an operator's commands, which no story has: ``test_pause.py``."""

OF_LAKES: Final = frozenset({"table.filled", "table.committed"})
"""Steps of the driver's process, which no story has: ``sinks/test_delta.py``, ``sinks/test_iceberg.py``."""


class Columns(NamedTuple):
    """A row as it must come out: every column but ``_clock``, which tells in which order the rows were merged."""

    id: int
    at_ms: int
    arrived_ms: int
    time_ms: int
    """``_time``. A story's records never arrive before those that precede them, so it is the arrival time."""
    shard: str
    sequence: str
    sub_sequence: int
    arrival_ms: int
    """``_arrival``."""


class Letter(NamedTuple):
    """A dead letter as it must be found."""

    id: int
    shard: str
    sequence: str


@dataclass(frozen=True, slots=True)
class Story:
    """One stream and the handler that reads it."""

    seed: int
    kind: str
    """A key of ``KINDS``."""
    stream: FakeStream
    rows: Counter[Columns]
    """What must come out, in windows or in the late dataset."""
    poisoned: Counter[Letter]
    """What must be in the dead letters."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """How many records of each key count, for a handler that keeps state."""
    events: Mapping[int, tuple[int, Mapping[str, Any]]] = field(default_factory=dict)
    """When each record arrived (ms), and what it holds, by its id; for a handler with timers."""


def told(seed: int, *, kind: str, records: int, shards: int = 2) -> Story:
    """Make a story: ids count up, event times mostly with them; every tenth record or so is something else."""
    dice = random.Random(f"{seed}/story")
    # The server compares the due times of timers with the time of day.
    start = (
        START if not KINDS[kind].timed else datetime.now(UTC).replace(microsecond=0) - _STEP * (records + 120)
    )
    stream = FakeStream(shards, seed=seed, start_ms=_ms(start))
    changes = sorted(dice.sample(range(records // 10, records), 3))
    counts: Counter[str] = Counter()
    events = {}
    for number in range(records):
        if changes and number == changes[0]:
            _reshard(stream, dice, split=len(changes) != 2)
            del changes[0]
        # A call with a timer can be told from outside only if each record has one row.
        weights = [80, 8, 0, 0, 3] if KINDS[kind].timed else [80, 8, 3, 6, 3]
        what = dice.choices(["row", "old", "none", "twice", "poison"], weights)[0]
        at = start + _STEP * number
        event_at = at - timedelta(seconds=dice.randint(5, 60)) if what == "old" else at
        key = f"key-{number % _FEW_KEYS if KINDS[kind].keyed else number}"
        event = {"id": number, "at": event_at.isoformat(), "what": what, "nth": counts[key]}
        if KINDS[kind].timed:
            event["timers"] = list(timed.acts(dice))
            events[number] = _ms(at), event
        counts[key] += what != "poison"
        stream.put(json.dumps(event).encode(), key, arrival_ms=_ms(at))
    stream.end()
    return Story(seed, kind, stream, *_expected(stream), +counts, events)


def _expected(stream: FakeStream) -> tuple[Counter[Columns], Counter[Letter]]:
    rows: Counter[Columns] = Counter()
    poisoned: Counter[Letter] = Counter()
    for shard in stream.shards.values():
        for record in shard.records:
            assert record.data is not None
            event = json.loads(record.data)
            number, what = event["id"], event["what"]
            if what == "poison":
                poisoned[Letter(number, shard.id, record.sequence_number)] += 1
            for row_id in {"none": [], "poison": [], "twice": [number, number + TWICE]}.get(what, [number]):
                at_ms, arrival_ms = _ms(datetime.fromisoformat(event["at"])), record.arrival_ms
                rest = (shard.id, record.sequence_number, 0, arrival_ms)
                rows[Columns(row_id, at_ms, arrival_ms, arrival_ms, *rest)] += 1
    return rows, poisoned


def _reshard(stream: FakeStream, dice: random.Random, *, split: bool) -> None:
    if split or len(stream.open_shards) < 2:
        stream.split(dice.choice(stream.open_shards))
    else:
        stream.merge(*dice.choice(stream.adjacent_pairs()))


def _ms(at: datetime) -> int:
    return round(at.timestamp() * 1000)


def write_handler(folder: Path, kind: str) -> str:
    """Write the story's handler and return its dotted path."""
    name, keyed = f"rows_{kind}", KINDS[kind].keyed
    arguments, count = ("record, ctx", _COUNT) if keyed else ("record", "")
    text = _HANDLER.format(
        kind=kind, windows=KINDS[kind].windows, twice=TWICE, arguments=arguments, count=count
    )
    text = timed.HANDLER if KINDS[kind].timed else text
    (folder / f"{name}.py").write_text(text, "utf-8")
    return name


@dataclass(frozen=True, slots=True)
class Row:
    """One row that came out, and where."""

    columns: Columns
    clock: int
    window: str
    late: bool
    call: timed.Counted | None = None
    """Of a handler with timers."""

    @property
    def fired(self) -> bool:
        """Whether a timer gave it."""
        return self.call is not None and self.call.timer is not None


def published(out: Path, tables: Iterable[tuple[str, pa.Table]] = ()) -> Iterator[Row]:
    """Yield what readers of the output and of the late dataset see; ``tables``: a window's rows in a table elsewhere."""
    for late, folder in ((False, out), (True, out / "_late")):
        for file in ds.dataset(folder, format="parquet").files if folder.exists() else ():
            window = file.rsplit("/", 2)[1].removeprefix("window=")
            yield from _rows(pq.ParquetFile(file).read(), window, late=late)
    for window, table in _in_tables(out, tables):
        late = window.startswith("late-")
        name = window.removeprefix("late-").rpartition("-")[0] if late else window
        if not window.startswith(_LETTERS):
            yield from _rows(table, name, late=late, bounds=True)


def letters_in_tables(out: Path, tables: Iterable[tuple[str, pa.Table]]) -> Counter[Letter]:
    """Return the dead letters that are rows of tables; arguments as for ``published``."""
    return Counter(
        Letter(json.loads(row["data"])["id"], row["shard"], row["sequence"])
        for window, table in _in_tables(out, tables)
        if window.startswith(_LETTERS)
        for row in table.to_pylist()
    )


def _in_tables(out: Path, tables: Iterable[tuple[str, pa.Table]]) -> Iterator[tuple[str, pa.Table]]:
    stored = ((window, table) for window, (_, files) in read_table(out / TABLE).items() for table in files)
    for window, table in itertools.chain(stored, tables):
        yield (
            window,
            table.drop_columns([each for each in ("_window", "_revision") if each in table.column_names]),
        )


def _rows(table: pa.Table, window: str, *, late: bool, bounds: bool | None = None) -> Iterator[Row]:
    """Yield a file's rows. ``bounds``: whether it has the columns of its window; None: if it is a window with bounds."""
    has_bounds = not (late or window.startswith("batch-")) if bounds is None else bounds
    calls = timed.COLUMNS if "timer" in table.column_names else frozenset[str]()
    expected = _NAMES | (_BOUNDS if has_bounds else frozenset()) | calls
    assert {*table.column_names} == expected, f"{window}: {table.column_names}"
    for row in table.to_pylist():
        columns = Columns(
            row["id"],
            _ms(_aware(row["at"])),
            row["arrived"],
            row["_time"],
            row["_shard"],
            row["_sequence"],
            row["_sub_sequence"],
            -1 if row["_arrival"] is None else _ms(_aware(row["_arrival"])),
        )
        call = timed.Counted(*(row[name] for name in timed.Counted._fields)) if calls else None
        yield Row(columns, row["_clock"], window, late, call)


def _aware(at: datetime) -> datetime:
    return at.replace(tzinfo=UTC) if at.tzinfo is None else at


def shown_twice(out: Path) -> set[str]:
    """Return the windows that readers see early and in the end."""
    early = {folder.name for folder in out.glob("_early/window=*")}
    return {name for name in early if (out / name).exists()}


def nameless(out: Path, held: Held) -> set[str]:
    """Return files of segments and attempts that nothing will ever name or delete."""
    private = out / "_mldserver"
    files = [
        file
        for part in ("segments", "state", "staging")
        for file in (private / part).rglob("*")
        if file.is_file()
    ]
    # What a revision replaced, and attempts at it that Spark's death ended, stay for some seconds, for readers that are
    # about to list the first, or until the next start.
    kept = {file for file in files if _replaced(file.relative_to(private), held)}
    kept |= {out / path for path in held.state.files}
    return {str(file.relative_to(out)) for file in {*files} - kept} - held.segments


def _replaced(file: Path, held: Held) -> bool:
    """Whether a revision has replaced what a file belongs to; retention may have forgotten the window.

    ``file``: ``staging/<window>/<attempt>/...``; deeper than that lies what a job had not finished.
    """
    part, window, *_ = file.parts
    if part != "staging" or len(file.parts) < 4:
        return False
    attempt, *below = file.parts[2:]
    number = attempt.partition("-")[0]
    if number == "early":
        return True
    exchanged = (
        len(below) == 1 and file.name.startswith("part-00000-") and file.stem != f"part-00000-{number}"
    )
    return exchanged or window in held.revised


def check(
    story: Story,
    out: Path,
    held: Held,
    *,
    alone: bool = True,
    tables: Iterable[tuple[str, pa.Table]] = (),
) -> None:
    """Compare everything that came out with what must; each difference is named.

    ``alone``: no two servers ran at the same time, so that no two rows have one ``_clock``. ``tables``: see ``published``.
    """
    tables = list(tables)
    rows = list(published(out, tables))
    found = Counter(row.columns for row in rows if not row.fired)
    assert found == story.rows, f"lost: {story.rows - found}; doubled or foreign: {found - story.rows}"
    letters = held.letters + letters_in_tables(out, tables)
    assert letters == story.poisoned, f"lost: {story.poisoned - letters}; doubled: {letters - story.poisoned}"
    assert shown_twice(out) == set()
    left = nameless(out, held)
    assert not left, f"left behind: {left}"
    kind = KINDS[story.kind]
    counts = story.counts if kind.keyed else {}
    if kind.timed:
        calls = [(row.columns.id, row.call) for row in rows if row.call is not None]
        broken, counts = timed.check_calls(story.events, calls, held.timers)
        assert broken == [], "\n".join(broken)
    assert check_stored(out, held.state, counts) == []
    assert kind.late or not any(row.late for row in rows)
    for row in rows:
        if not kind.batches:
            at_ms = row.columns.at_ms if kind.column else row.columns.time_ms
            assert row.window == _window_of(at_ms), row
    clocks = {row.clock for row in rows}
    assert not alone or len(clocks) == len(rows), f"{len(clocks)} clocks of {len(rows)} rows"
    _check_order([row for row in rows if not row.fired])


def _window_of(at_ms: int) -> str:
    size_ms = SIZE // timedelta(milliseconds=1)
    return datetime.fromtimestamp(at_ms // size_ms * size_ms // 1000, UTC).strftime("%Y-%m-%dT%H-%M-%SZ")


def _check_order(rows: list[Row]) -> None:
    """The order of a shard's rows by (_time, _clock) is the order of their records, and of each one's rows."""
    last: dict[str, tuple[int, int]] = {}
    for row in sorted(rows, key=lambda row: (row.columns.time_ms, row.clock)):
        columns = row.columns
        place = (int(columns.sequence), columns.id)
        assert last.get(columns.shard, (-1, -1)) < place, f"out of order in its shard: {row}"
        last[columns.shard] = place
