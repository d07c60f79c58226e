"""A coordinator with all below it and a daemon above it, over virtual time, that can die and come back."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from coordinator.outcomes import dead_letter, outcome
from support.shards import accept
from support.sqlite_table import TableEngine, read_table
from support.store import SqliteStore

from mldserver.config.settings import WindowSettings
from mldserver.consumer.intake import ShardListing, ShardOpening
from mldserver.coordinator.coordinator import Coordinator
from mldserver.coordinator.core.open_windows import CoordinatorRules
from mldserver.coordinator.core.shape import Column, Shape
from mldserver.coordinator.membership import ServerLocks
from mldserver.coordinator.shards import IntakeSession
from mldserver.deadletters.destinations import as_rows
from mldserver.engine_jobs import FunctionView
from mldserver.errors import LedgerError
from mldserver.jobs.predecessors import Predecessors
from mldserver.jobs.previous import PreviousResults
from mldserver.jobs.published import PublishedWindows
from mldserver.jobs.runner import WindowRunner
from mldserver.jobs.side_tables import SideTables
from mldserver.jobs.steps import WindowSteps
from mldserver.output.layout import LEDGER, SERVERS
from mldserver.output.owner import FolderClaim
from mldserver.output.store import OutputStore
from mldserver.records import Sequence
from mldserver.testing import LocalEngine, VirtualClock
from mldserver.windows import TimeWindows, WindowSpec, do_overlap

Records = list[tuple[int, int]]


def listed(parents: Mapping[str, tuple[str, ...]]) -> dict[str, ShardListing]:
    """Return a listing of a stream whose shards have these parents."""
    return {shard_id: ShardListing(names) for shard_id, names in parents.items()}


class Crash(Exception):
    """The process dies here; nothing in the server may catch it."""


@dataclass
class Faults:
    """Called before and after each call to the ledger and each change of the output folder."""

    at: int | None = None
    """The number of the call at which the process dies."""
    after: bool = False
    """Whether it dies after the call took effect."""
    hook: Callable[[str, bool], None] | None = None
    """May raise in place of a call (name, whether it has taken effect)."""
    calls: list[str] = field(default_factory=list)
    dead: bool = False

    async def pause(self) -> None:
        """Give way to others before and after each call to the ledger."""
        await asyncio.sleep(0)

    def before(self, name: str) -> None:
        if self.dead:
            raise Crash(name)
        self.calls.append(name)
        self._die(name, after=False)

    def done(self, name: str) -> None:
        self._die(name, after=True)

    def _die(self, name: str, *, after: bool) -> None:
        if len(self.calls) == self.at and after == self.after:
            self.dead = True
            raise Crash(name)
        if self.hook is not None:
            self.hook(name, after)


class InlineLedger:
    """The SQLite ledger without its thread, and with faults."""

    def __init__(self, path: Path, clock: VirtualClock, faults: Faults, server_id: str = "one") -> None:
        self.store = SqliteStore(path, pipeline="test", server_id=server_id, clock=clock)
        self.server_id = server_id
        self._faults = faults

    def time_ms(self) -> int:
        return self.store.ledger.time_ms()

    def __getattr__(self, name: str) -> Callable[..., Coroutine[None, None, Any]]:
        method = getattr(self.store, name)

        async def call(*args: Any, **named: Any) -> Any:
            await self._faults.pause()
            self._faults.before(name)
            result = method(*args, **named)
            if name == "open":
                self.store._db.execute("PRAGMA synchronous = OFF")
            self._faults.done(name)
            await self._faults.pause()
            return result

        return call


class FaultyStore(OutputStore):
    """The output folder, with faults at each change."""

    def __init__(self, out: str, faults: Faults) -> None:
        super().__init__(out)
        self._faults = faults

    def rename(self, source: str, target: str) -> None:
        self._faults.before("rename")
        super().rename(source, target)
        self._faults.done("rename")

    def exchange(self, one: str, other: str) -> None:
        self._faults.before("exchange")
        super().exchange(one, other)
        self._faults.done("exchange")

    def write(self, path: str, rows: Any, **options: Any) -> int:
        self._faults.before("write")
        size = super().write(path, rows, **options)
        self._faults.done("write")
        return size

    def delete(self, path: str) -> None:
        self._faults.before("delete")
        super().delete(path)
        self._faults.done("delete")


RULES = CoordinatorRules(
    flush_interval_ms=1000,
    missing_limit_ms=60_000,
    idle_time_ms=5000,
    quiet_time_ms=10_000,
    settle_time_ms=1000,
)
QUICK = replace(RULES, server_timeout_ms=5000, idle_time_ms=60_000, quiet_time_ms=120_000)
"""Of servers that share a ledger: one that dies is missed soon, a silent shard late."""


class Pipeline:
    """One output folder and what runs over it; ``life`` is one life of the process."""

    def __init__(
        self,
        out: Path,
        *,
        spec: WindowSpec | None = None,
        rules: CoordinatorRules = RULES,
        policy: WindowSettings | None = None,
        retry_seconds: tuple[float, float] = (0.1, 1.0),
        engine: Callable[[], LocalEngine] = LocalEngine,
        without_rows: bool = False,
        recompute: bool = False,
        side_tables: bool = False,
        delay_ms: int = 2000,
        server_id: str = "one",
        clock: VirtualClock | None = None,
        locks: bool = False,
        ask_stream: Callable[[], Awaitable[bool]] | None = None,
        keyed: bool = False,
    ) -> None:
        """Two with one ``out``, one ``clock`` and other ids are two servers on one ledger."""
        self.ask_stream = ask_stream
        self.keyed = keyed
        self.out = out
        self.spec = None if without_rows else spec or TimeWindows(10_000)
        self.overlap = do_overlap(self.spec)
        self.columns: tuple[Column, ...] = ()
        self.rules = replace(
            rules,
            late="recompute" if recompute else "separate",
            recompute_delay_ms=delay_ms,
            overlap=self.overlap,
        )
        self.policy = policy or WindowSettings(window_concurrency=1)
        self.retry_seconds = retry_seconds
        self.recompute = recompute
        self.side_table = out / "_side.sqlite" if side_tables else None
        self.make_engine = engine if self.side_table is None else partial(TableEngine, self.side_table)
        self.server_id = server_id
        self.locks = ServerLocks(out / SERVERS) if locks else None
        self.clock = clock or VirtualClock(1_000_000)
        self.faults = Faults()
        self.new_ledger = False
        self.log_error_messages = True
        self.keeps = False
        """Whether segments are kept although late rows go elsewhere (``keep_segments``)."""
        self.predecessors: Predecessors | None = None
        self.takes_previous = False
        """Whether each window is computed with the result of the one before."""
        self.place: str | None = None
        """Where the ledger is, if not in the folder."""
        self.names = itertools.count()
        self.coordinator: Coordinator
        self.runner: WindowRunner | None
        self.engine: LocalEngine
        self.ledger: Any

    def build(self) -> Coordinator:
        store = FaultyStore(str(self.out), self.faults)
        self.ledger = self.make_ledger()
        self.engine = self.make_engine()
        self.runner = None
        if self.spec is not None:
            early_ms = self.spec.early_ms if isinstance(self.spec, TimeWindows) else None
            published = PublishedWindows(
                shape=FunctionView("test", ()),
                has_view=True,
                ledger=self.ledger,
                store=store,
                clock=self.clock,
            )
            steps = WindowSteps(
                pipeline="test",
                ledger=self.ledger,
                store=store,
                engine=self.engine,
                clock=self.clock,
                retain=self.recompute or self.keeps,
                freed=lambda freed: self.coordinator.freed(freed),  # noqa: PLW0108  # made below
                predecessors=self.predecessors,
                overlap=self.overlap,
                has_early=early_ms is not None,
                previous=PreviousResults(ledger=self.ledger, published=published)
                if self.takes_previous
                else None,
            )
            retrying: dict[str, Any] = {
                "random": random.Random(0).random,
                "log_error_messages": self.log_error_messages,
                "retry_seconds": self.retry_seconds,
            }
            side_tables = None
            if self.side_table is not None:
                side_tables = SideTables(
                    steps,
                    tables={"late_rows": "delta:/late", "dead_letters": "delta:/letters"},
                    window_columns=("window_start", "window_end"),
                    letter_rows=partial(as_rows, pipeline="test"),
                    **retrying,
                )
            self.runner = WindowRunner(
                steps, self.policy, side_tables=side_tables, early_ms=early_ms, **retrying
            )
        self.coordinator = Coordinator(
            rules=replace(self.rules, in_order=self.takes_previous),
            spec=self.spec,
            shape=Shape.of("test", self.columns, self.spec),
            ledger=self.ledger,
            store=store,
            runner=self.runner,
            clock=self.clock,
            unique=lambda: f"{self.server_id}{next(self.names)}",
            claim=FolderClaim(store, pipeline="test", ledger=self.place, new_ledger=self.new_ledger),
            locks=self.locks,
            ask_stream=self.ask_stream,
            keyed=self.keyed,
        )
        return self.coordinator

    def make_ledger(self) -> Any:
        return InlineLedger(self.out / LEDGER, self.clock, self.faults, self.server_id)

    async def close_ledger(self) -> None:
        self.ledger.store.close()

    @contextlib.asynccontextmanager
    async def life(self) -> AsyncIterator[Coordinator]:
        """Start everything; at the end of the block the process is killed, without any goodbye."""
        coordinator = self.build()
        try:
            await coordinator.start()
            async with asyncio.TaskGroup() as group:
                parts = [coordinator.run(), self.engine.run()]
                if self.runner is not None:
                    parts.append(self.runner.run())
                tasks = [group.create_task(part) for part in parts]
                yield coordinator
                for task in tasks:
                    task.cancel()
        finally:
            await self.close_ledger()
            if self.locks is not None:
                let_die(self.locks)

    async def cycle(self) -> None:
        """Let one interval pass."""
        await self.clock.advance(self.rules.flush_interval_ms / 1000)

    async def open(self, shard: str, start: Any = "TRIM_HORIZON", **changes: Any) -> IntakeSession:
        values = {"tells_lag": True, "parents": ()} | changes
        return await self.coordinator.shards.open_shard(ShardOpening(shard, start, **values))

    async def give(self, session: IntakeSession, records: Records, **changes: Any) -> None:
        """Deliver a batch as a source does."""
        session.batch_began()
        await accept(session, outcome(session.shard_id, records, after=session.after, **changes))

    # What came out.

    def rows(self, pattern: str) -> list[dict[str, Any]]:
        found = [row for path in sorted(self.out.glob(pattern)) for row in pq.read_table(path).to_pylist()]
        return sorted(found, key=lambda row: (row["_time"], row["_clock"]))

    def published(self) -> dict[str, list[int]]:
        """Return the values of each visible window."""
        return {
            folder.name.removeprefix("window="): [
                row["value"] for row in self.rows(f"{folder.name}/*.parquet")
            ]
            for folder in sorted(self.out.glob("window=*"))
        }

    def window_rows(self) -> list[dict[str, Any]]:
        """Return the rows that readers see of windows; of those in several sliding windows one each, if all of these have it."""
        if not self.overlap:
            return self.rows("window=*/*.parquet")
        assert isinstance(self.spec, TimeWindows)
        copies: dict[int, list[dict[str, Any]]] = {}
        starts: dict[int, list[int]] = {}
        for folder in sorted(self.out.glob("window=*")):
            at = datetime.strptime(folder.name, "window=%Y-%m-%dT%H-%M-%SZ").replace(tzinfo=UTC)
            for row in self.rows(f"{folder.name}/*.parquet"):
                own = {name: value for name, value in row.items() if not name.startswith("window")}
                copies.setdefault(row["_clock"], []).append(own)
                starts.setdefault(row["_clock"], []).append(round(at.timestamp() * 1000))
        for clock, rows in copies.items():
            assert all(row == rows[0] for row in rows)
            ms = round(rows[0]["at"].timestamp() * 1000)
            candidates = range(-100_000, ms + 1, self.spec.pane_ms)
            assert starts[clock] == [start for start in candidates if start <= ms < start + self.spec.size_ms]
        return [rows[0] for rows in copies.values()]

    def late(self) -> list[int]:
        return [row["value"] for row in self.late_rows()]

    def late_rows(self) -> list[dict[str, Any]]:
        """Return what readers see of late rows, in their table or as files."""
        if self.side_table is None:
            return self.rows("_late/window=*/*.parquet")
        assert not list(self.out.glob("_late/*"))
        found = [row for window, row in self.side_rows() if window.startswith("late-")]
        return sorted(found, key=lambda row: (row["_time"], row["_clock"]))

    def side_rows(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the rows of the tables of late rows and dead letters, each with the id of its commit."""
        assert self.side_table is not None
        return [
            (window, row)
            for window, (_, tables) in read_table(self.side_table).items()
            for table in tables
            for row in table.to_pylist()
        ]

    def nameless_files(self) -> list[str]:
        """Return the private files that the ledger does not name."""
        windows = self.state().windows.values()
        named = {Path(each.path).name for entry in windows for each in (*entry.segments, *entry.pending)}
        return [name for name in self.private_files() if name not in named]

    def private_files(self) -> list[str]:
        return sorted(
            path.name
            for path in self.out.glob("_mldserver/**/*")
            if path.is_file()
            and "ledger" not in path.name
            and not path.name.endswith((".lock", "owner.json"))
        )

    def stored_dead_letters(self) -> list[tuple[str, Sequence]]:
        store = SqliteStore(self.out / LEDGER, pipeline="test", server_id="reader")
        store.peek()
        try:
            found = [(letter.shard_id, letter.sequence) for letter in store.dead_letters(10_000)]
        finally:
            store.close()
        if self.side_table is None:
            return found
        assert found == []
        rows = [row for window, row in self.side_rows() if window.startswith("dead-letters-")]
        return [(row["shard"], Sequence(int(row["sequence"]), row["sub_sequence"])) for row in rows]

    def state(self) -> Any:
        """Return what the ledger holds, between two lives."""
        store = SqliteStore(self.out / LEDGER, pipeline="test", server_id="reader")
        try:
            return store.peek()
        finally:
            store.close()


@dataclass
class Daemon:
    """The KCL, its lease table and a stream, as far as a coordinator can tell. It outlives the server."""

    records: dict[str, Records]
    parents: dict[str, tuple[str, ...]] = field(default_factory=dict)
    bad: int = 7
    """Every record whose number is a multiple of this becomes a dead letter."""
    checkpoints: dict[str, int] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)
    sizes: Callable[[], int] = lambda: 3
    behind: Callable[[int], int] = lambda number: number * 1700 if number % 4 == 0 else 0
    """How far a record's event time, its row's column ``at``, lies before its arrival (ms)."""

    async def consume(self, pipeline: Pipeline) -> None:
        """Read the stream to its end: shards side by side, children after their parents."""
        pending = [shard for shard in self.records if shard not in self.ended]
        while pending:
            ready = [s for s in pending if all(p in self.ended for p in self.parents.get(s, ()))]
            async with asyncio.TaskGroup() as group:
                for shard in ready:
                    group.create_task(self.read(pipeline, shard))
            pending = [shard for shard in pending if shard not in self.ended]

    async def read(self, pipeline: Pipeline, shard: str) -> None:
        at = self.checkpoints.get(shard, 0)
        start = Sequence(at) if at else "TRIM_HORIZON"
        session = await self.open(pipeline, shard, start)
        left = [record for record in self.records[shard] if record[0] > at]
        while left:
            size = self.sizes()
            batch, left = left[:size], left[size:]
            await self.give(pipeline, session, batch)
            self.checkpoint(session, batch[-1][0])
            await pipeline.clock.sleep(1.5)
        if await session.end():
            self.ended.add(shard)

    async def open(self, pipeline: Pipeline, shard: str, start: Any) -> IntakeSession:
        """Connect, and again when the ledger fails then: who is not answered comes back."""
        while True:
            try:
                return await pipeline.open(shard, start, parents=self.parents.get(shard, ()))
            except LedgerError:
                await pipeline.clock.sleep(0.1)

    async def give(self, pipeline: Pipeline, session: IntakeSession, batch: Records) -> None:
        after = session.after
        fresh = [number for number, _ in batch if after is None or Sequence(number) > after]
        letters = [dead_letter(session.shard_id, number) for number in fresh if number % self.bad == 0]
        rows = [number for number, _ in batch if number % self.bad]
        made = [(number, ms) for number, ms in batch if number in rows and number in fresh]
        columns = {
            "value": pa.array([number for number, _ in made], pa.int64()),
            "at": pa.array([ms - self.behind(number) for number, ms in made], pa.timestamp("ms", tz="UTC")),
        }
        await pipeline.give(session, batch, rows=rows, columns=columns, letters=letters)

    def checkpoint(self, session: IntakeSession, delivered: int) -> None:
        due = session.checkpoint_due()
        if due is not None:
            assert self.checkpoints.get(session.shard_id, 0) <= due.number <= delivered
            self.checkpoints[session.shard_id] = due.number
            session.checkpointed(due)

    def assert_exactly_once(self, pipeline: Pipeline) -> None:
        """Published windows, late rows and dead letters together are the stream, each record once and in order."""
        rows = pipeline.window_rows() + pipeline.late_rows()
        letters = pipeline.stored_dead_letters()
        found = Counter((row["_shard"], int(row["_sequence"])) for row in rows)
        found.update((shard, sequence.number) for shard, sequence in letters)
        expected = Counter((s, number) for s, records in self.records.items() for number, _ in records)
        assert found == expected
        assert all(sequence.number % self.bad == 0 for _, sequence in letters)
        rows.sort(key=lambda row: (row["_time"], row["_clock"]))
        order = [(row["_shard"], int(row["_sequence"])) for row in rows]
        for shard in self.records:
            own = [number for s, number in order if s == shard]
            assert own == sorted(own)
            firsts = [place for place, (s, _) in enumerate(order) if s == shard]
            for parent in self.parents.get(shard, ()):
                lasts = [place for place, (s, _) in enumerate(order) if s == parent]
                assert not firsts or not lasts or lasts[-1] < firsts[0]
        clocks = [row["_clock"] for row in rows]
        assert len(set(clocks)) == len(clocks)


def two(out: Path, **changes: Any) -> tuple[Pipeline, Pipeline]:
    """Return two servers of one pipeline, by one clock."""
    values = {"rules": QUICK, "clock": VirtualClock(1_000_000)} | changes
    return Pipeline(out, server_id="one", **values), Pipeline(out, server_id="two", **values)


def let_die(locks: ServerLocks) -> None:
    """Let a server's own file go as its process's end does; without effect when none is held."""
    if locks._held is not None:
        os.close(locks._held[1])
        locks._held = None


def missing(coordinator: Coordinator) -> tuple[str, ...]:
    return tuple(node.id for node in coordinator.lineage.missing())


def named(logged: list[dict[str, Any]], *names: str) -> list[dict[str, Any]]:
    """Return the log events of these names."""
    return [event for event in logged if event["event"] in names]


def fail(pipeline: Pipeline, name: str, error: Callable[[], Exception]) -> None:
    """Let every call of a name fail from now on."""

    def hook(called: str, after: bool) -> None:
        if called == name and not after:
            raise error()

    pipeline.faults.hook = hook
