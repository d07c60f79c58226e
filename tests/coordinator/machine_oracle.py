"""What must hold after every step: ledger, files and stream, compared by reading all of them anew."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pyarrow.parquet as pq
from coordinator.machine_stream import Stream, StreamShard
from support.store import SqliteStore

from mldserver.ledger.contract import LedgerState, WindowEntry, WindowState
from mldserver.output.layout import LEDGER
from mldserver.windows import Tumbling, WindowSpec, tumbling_id

_STEPS = list(WindowState)


class Row(NamedTuple):
    """A row as it was written."""

    shard: str
    number: int
    time_ms: int
    clock: int


class Oracle:
    """Looks at one output folder after each step, and remembers what it saw."""

    def __init__(self, out: Path, stream: Stream, spec: WindowSpec, *, one_server: bool) -> None:
        self._out = out
        self._stream = stream
        self._spec = spec
        self._one_server = one_server
        self._reader = SqliteStore(out / LEDGER, pipeline="test", server_id="reader")
        self._files: dict[tuple[str, int], tuple[Row, ...]] = {}
        self._before = LedgerState()
        self._visible: dict[str, set[Row]] = {}
        self.delivered: dict[str, int] = {}
        """The latest sequence number of each shard that any connection has carried."""

    def close(self) -> None:
        self._reader.close()

    def peek(self) -> LedgerState:
        return self._reader.peek()

    def check(self) -> None:
        """Raise AssertionError for the first thing that does not hold."""
        state = self._reader.peek()
        visible = {
            folder.name.removeprefix("window="): self._rows(folder.glob("*.parquet"))
            for folder in sorted(self._out.glob("window=*"))
        }
        late = self._late(state)
        windows = {window_id: self._registered(state, window_id, visible) for window_id in visible}
        windows |= {
            window_id: self._registered(state, window_id, visible)
            for window_id in state.windows.keys() - visible.keys()
        }
        rows = [row for found in (*windows.values(), *late.values()) for row in found]
        self._exactly_once(state, rows)
        self._in_order(rows)
        self._places(windows, late)
        for window_id, entry in state.windows.items():
            self._output(entry, visible.get(window_id))
        self._positions(state)
        self._never_back(state, visible)

    def finished(self) -> bool:
        state = self._reader.peek()
        return not state.late_segments and all(
            entry.state is WindowState.PUBLISHED and not entry.pending for entry in state.windows.values()
        )

    def check_end(self) -> None:
        """Hold what readers see at the end against the stream, and the ledger's file against its own rules."""
        seen = Counter((row.shard, row.number) for row in self._rows(self._out.glob("window=*/*.parquet")))
        seen.update((row.shard, row.number) for row in self._rows(self._out.glob("_late/window=*/*.parquet")))
        truth = Counter(
            (name, record.number)
            for name, shard in self._stream.shards.items()
            for record in shard.records
            if record.kind == "row"
        )
        assert seen == truth, f"missing {truth - seen}, too many {seen - truth}"
        db = self._reader._db
        assert db is not None
        assert db.execute("PRAGMA quick_check").fetchone()[0] == "ok"
        assert db.execute("PRAGMA foreign_key_check").fetchall() == []

    # Reading.

    def _rows(self, paths: Iterable[Path]) -> tuple[Row, ...]:
        return tuple(row for path in sorted(paths) for row in self._read(path))

    def _read(self, path: Path) -> tuple[Row, ...]:
        key = (str(path.relative_to(self._out)), path.stat().st_ino)
        if key not in self._files:
            table = pq.ParquetFile(path).read(["_shard", "_sequence", "_time", "_clock"])
            self._files[key] = tuple(
                Row(each["_shard"], int(each["_sequence"]), each["_time"], each["_clock"])
                for each in table.to_pylist()
            )
        return self._files[key]

    def _late(self, state: LedgerState) -> dict[str, tuple[Row, ...]]:
        """Return the rows of the late dataset by window: files that are visible, and those that are registered."""
        files = {f"{path.parent.name}/{path.name}": path for path in self._out.glob("_late/window=*/*")}
        for segment in state.late_segments:
            window_id, name = segment.path.rsplit("/", 2)[1:]
            files.setdefault(f"window={window_id}/{name}", self._out / segment.path)
        late: dict[str, tuple[Row, ...]] = {}
        for name, path in files.items():
            window_id = name.partition("/")[0].removeprefix("window=")
            late[window_id] = late.get(window_id, ()) + self._read(path)
        return late

    def _registered(
        self, state: LedgerState, window_id: str, visible: dict[str, tuple[Row, ...]]
    ) -> tuple[Row, ...]:
        """Return a window's rows: its segments while the ledger has them, and then its output."""
        entry = state.windows.get(window_id)
        if entry is None or not entry.retained:
            return visible[window_id]
        return self._rows(self._out / each.path for each in (*entry.segments, *entry.pending))

    # Promises.

    def _exactly_once(self, state: LedgerState, rows: list[Row]) -> None:
        """Every record up to its shard's position is in one place, and none beyond it is anywhere."""
        found = Counter((row.shard, row.number, "row") for row in rows)
        found.update(
            (letter.shard_id, letter.sequence.number, "bad") for letter in self._reader.dead_letters(10_000)
        )
        expected = Counter(
            (name, record.number, record.kind)
            for name, shard in self._stream.shards.items()
            for record in shard.records
            if record.kind != "none" and record.number <= _position(state, name)
        )
        assert found == expected, f"missing {expected - found}, too many {found - expected}"

    def _in_order(self, rows: list[Row]) -> None:
        first: dict[str, tuple[int, int]] = {}
        last: dict[str, tuple[int, int]] = {}
        numbers: dict[str, int] = {}
        for row in sorted(rows, key=lambda row: (row.time_ms, row.clock)):
            assert row.number > numbers.get(row.shard, 0), f"{row} after {numbers[row.shard]}"
            numbers[row.shard] = row.number
            first.setdefault(row.shard, (row.time_ms, row.clock))
            last[row.shard] = (row.time_ms, row.clock)
        for name, shard in self._stream.shards.items():
            for parent in shard.parents:
                if name in first and parent in last:
                    assert last[parent] < first[name], f"{name} begins before its parent {parent} is over"
        if self._one_server:
            assert len({row.clock for row in rows}) == len(rows), "two rows have one clock value"

    def _places(self, windows: dict[str, tuple[Row, ...]], late: dict[str, tuple[Row, ...]]) -> None:
        """Every row is in its own window, however it came there."""
        if not isinstance(self._spec, Tumbling):
            most = self._spec.max_rows
            assert all(len(rows) <= most for rows in windows.values()), f"more than {most} rows"
            assert not late, "batches have no late rows"
            return
        homes = {
            (name, record.number): self._home(record.at_ms if self._spec.on else time_ms)
            for name, shard in self._stream.shards.items()
            for record, time_ms in zip(shard.records, self._stream.effective(name), strict=True)
        }
        for window_id, rows in (*windows.items(), *late.items()):
            for row in rows:
                home = homes[row.shard, row.number]
                assert home == window_id, f"{row} is in {window_id}, not in {home}"

    def _home(self, event_ms: int) -> str:
        assert isinstance(self._spec, Tumbling)
        return tumbling_id(event_ms // self._spec.size_ms * self._spec.size_ms)

    def _output(self, entry: WindowEntry, visible: tuple[Row, ...] | None) -> None:
        """What readers see of a retained window is one whole revision of it; the last one once it is published."""
        if visible is None:
            assert entry.state is not WindowState.PUBLISHED, f"{entry.window_id} is published and not there"
            return
        assert entry.state is not WindowState.OPEN, f"{entry.window_id} is open and visible"
        seen = Counter(visible)
        revisions = range(
            1 if entry.state is not WindowState.PUBLISHED else entry.revision, entry.revision + 1
        )
        whole = (
            Counter(self._rows(self._out / s.path for s in entry.segments if s.revision <= revision))
            for revision in revisions
        )
        assert seen in whole, f"{entry.window_id}: readers see {visible}, which is no revision of it"

    def _positions(self, state: LedgerState) -> None:
        """Checkpoint <= position <= delivered."""
        for name, shard in self._stream.shards.items():
            position = _position(state, name)
            assert shard.checkpoint <= position <= self.delivered.get(name, 0), (
                f"{name}: checkpoint {shard.checkpoint}, position {position}, delivered {self.delivered.get(name)}"
            )
            assert not shard.ended or state.shards[name].ended, f"{name}: its end is not durable"
            assert name not in state.shards or not state.shards[name].ended or self._is_over(shard, position)

    @staticmethod
    def _is_over(shard: StreamShard, position: int) -> bool:
        return shard.closed and all(record.number <= position for record in shard.records)

    def _never_back(self, state: LedgerState, visible: dict[str, tuple[Row, ...]]) -> None:
        """Nothing that was durable or visible is undone: positions, epochs, the clock, windows, rows that readers saw."""
        before, self._before = self._before, state
        assert state.clock >= before.clock
        assert (state.cut_below_ms or 0) >= (before.cut_below_ms or 0)
        assert state.batch_progress.number >= before.batch_progress.number
        assert state.dead_letters >= before.dead_letters
        for name, shard in before.shards.items():
            assert state.shards[name].epoch >= shard.epoch
            assert not shard.ended or state.shards[name].ended
            assert _position(state, name) >= _position(before, name)
        for window_id, entry in before.windows.items():
            if window_id in state.windows:
                _goes_on(entry, state.windows[window_id])
        for window_id, rows in visible.items():
            assert self._visible.get(window_id, set()) <= set(rows), f"{window_id} has lost rows"
        assert self._visible.keys() <= visible.keys(), "a window is not to be seen any more"
        self._visible = {window_id: set(rows) for window_id, rows in visible.items()}


def _position(state: LedgerState, name: str) -> int:
    shard = state.shards.get(name)
    return 0 if shard is None or shard.position is None else shard.position.number


def _goes_on(before: WindowEntry, now: WindowEntry) -> None:
    """A window goes forward only, and what a revision covers is fixed when it is cut."""
    assert now.attempt >= before.attempt
    assert now.revision >= before.revision
    assert before.retained or not now.retained
    if now.revision == before.revision and before.state is not WindowState.SET_ASIDE:
        assert _STEPS.index(now.state) >= _STEPS.index(before.state), f"{before.state} became {now.state}"
        if before.state in {WindowState.COMMITTED, WindowState.PUBLISHED}:
            assert now.files == before.files, f"{now.window_id}: another output counts for the same revision"
    if before.state is not WindowState.OPEN and now.retained:
        covered = [each for each in now.segments if each.revision <= before.revision]
        assert covered == list(before.segments), f"{now.window_id}: the segments of a revision have changed"
