"""A handler that counts the records of each key, as the coordinator sees it: a session's outcomes with state."""

from __future__ import annotations

import asyncio
from collections import Counter as Counts
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import msgspec
import pyarrow as pa
from coordinator.outcomes import outcome
from coordinator.pipeline import RULES, Pipeline
from support.shards import accept

from mldserver.coordinator.shards import IntakeSession
from mldserver.effects import Effects
from mldserver.errors import LedgerError
from mldserver.records import Sequence
from mldserver.runtime.interface import BatchOutcome, BatchOutline, TimerReport
from mldserver.stores import ALL_KEYS, KeyRange, StateChange, StateSnapshot, StoreClaim, hash_of, pack_changes

CLAIM: Final = StoreClaim(ALL_KEYS)


LOG: Final = "log"
"""The timer of a key that is never due: its value lists the timers of the key that have fired."""
_NEVER_MS: Final = 1 << 40


def counts(snapshot: StateSnapshot) -> dict[str, int]:
    rows = [row for row in snapshot.entries.to_pylist() if row["timer"] is None]
    assert len({row["key"] for row in rows}) == len(rows)
    return {row["key"].decode(): int(row["value"]) for row in rows}


@dataclass
class Counter:
    """A handler's process: counts the records of each key, from the snapshot that it opened with."""

    session: IntakeSession
    entries: dict[str, int] = field(default_factory=dict)
    ttl_ms: int | None = None
    alarms: dict[int, tuple[str, int]] = field(default_factory=dict)
    """The key and the due time of each timer that is set, by the number of the record that has set it."""
    fired: dict[str, list[int]] = field(default_factory=dict)
    """The timers of each key that have fired."""

    async def load(self) -> None:
        assert self.session.snapshot is not None
        snapshot = await self.session.snapshot()
        assert snapshot.accepted + 1 == self.session.next_number
        self.entries = counts(snapshot)
        timers = [row for row in snapshot.entries.to_pylist() if row["timer"]]
        self.alarms = {
            int(row["value"]): (row["key"].decode(), row["expires_ms"])
            for row in timers
            if row["timer"] != LOG
        }
        self.fired = {
            row["key"].decode(): [int(number) for number in row["value"].split()]
            for row in timers
            if row["timer"] == LOG
        }
        first_ms = min((row["expires_ms"] for row in timers), default=None)
        assert (self.session.next_due_ms or _NEVER_MS) <= (first_ms or _NEVER_MS)

    def report(self) -> TimerReport:
        first_ms = min((due_ms for _, due_ms in self.alarms.values()), default=None)
        return TimerReport(pending=len(self.alarms), next_due_ms=first_ms, next_call_ms=first_ms)

    def run(self, records: list[tuple[int, str]], **named: Any) -> BatchOutcome:
        changed = {}
        for number, key in records:
            self.entries[key] = count = self.entries.get(key, 0) + 1
            expires_ms = None if self.ttl_ms is None else number + self.ttl_ms
            changed[key] = StateChange(key.encode(), str(count).encode(), expires_ms)
        made = outcome(self.session.shard_id, [(number, number) for number, _ in records], rows=[], **named)
        blob = pack_changes(changed.values())
        effects = Effects(dead_letters=made.effects.dead_letters, state=(blob,) if changed else ())
        return msgspec.structs.replace(made, effects=effects)

    def with_alarms(self, made: BatchOutcome, records: list[tuple[int, str]], after_ms: int) -> BatchOutcome:
        """Return a batch's outcome that also sets a timer for each record."""
        changes = []
        for number, key in records:
            self.alarms[number] = (key, number + after_ms)
            change = StateChange(key.encode(), b"%d" % number, number + after_ms, f"alarm/{number}")
            changes.append(change)
        effects = msgspec.structs.replace(
            made.effects, state=(*made.effects.state, *([pack_changes(changes)] if changes else []))
        )
        return msgspec.structs.replace(made, effects=effects, timers=self.report())

    def fire(self, until_ms: int) -> BatchOutcome:
        """Fire the timers that are due."""
        due = sorted((due_ms, number) for number, (_, due_ms) in self.alarms.items() if due_ms <= until_ms)
        changes = []
        for _, number in due:
            key, _ = self.alarms.pop(number)
            done = self.fired.setdefault(key, [])
            done.append(number)
            changes.append(StateChange(key.encode(), None, None, f"alarm/{number}"))
            changes.append(StateChange(key.encode(), " ".join(map(str, done)).encode(), _NEVER_MS, LOG))
        # A blob has each entry once.
        newest = {(change.key, change.timer): change for change in changes}
        outline = BatchOutline(0, 0, None, None, max((due_ms for due_ms, _ in due), default=None), None)
        state = (pack_changes(newest.values()),) if due else ()
        return BatchOutcome(outline, Effects(state=state), timers=self.report())

    async def give(
        self,
        *records: tuple[int, str],
        delivered: list[tuple[int, str]] | None = None,
        after_ms: int | None = None,
    ) -> None:
        """Deliver a batch as a source does. ``delivered``: with records that were accepted earlier.

        ``after_ms``: each record sets a timer that is due so long after its arrival.
        """
        self.session.batch_began()
        made = self.run(list(records))
        if after_ms is not None:
            made = self.with_alarms(made, list(records), after_ms)
        if delivered is not None:
            whole = outcome(self.session.shard_id, [(number, number) for number, _ in delivered], rows=[])
            outline = msgspec.structs.replace(whole.outline, duplicates=len(delivered) - len(records))
            made = msgspec.structs.replace(made, outline=outline)
        await accept(self.session, made)


async def opened(
    pipeline: Pipeline, shard: str = "a", start: Any = "TRIM_HORIZON", claim: StoreClaim = CLAIM, **named: Any
) -> Counter:
    counter = Counter(await pipeline.open(shard, start, store=claim, **named))
    await counter.load()
    return counter


# A stream whose shard splits, and what reads it.

MIDDLE: Final = ALL_KEYS.last // 2
RANGES: Final = {"a": ALL_KEYS, "b": KeyRange(0, MIDDLE), "c": KeyRange(MIDDLE + 1, ALL_KEYS.last)}
_AFTER_MS: Final = 3
KEYS: Final = [f"k{number}" for number in range(5)]
QUICK: Final = replace(RULES, retention_ms=3000)


def records() -> dict[str, list[tuple[int, str]]]:
    """Return a parent's records, enough for compactions, and those of its two children."""
    found: dict[str, list[tuple[int, str]]] = {
        "a": [(n, KEYS[n % 5]) for n in range(1, 21)],
        "b": [],
        "c": [],
    }
    for n in range(21, 31):
        key = KEYS[n % 5]
        found["b" if hash_of(key.encode()) in RANGES["b"] else "c"].append((n, key))
    return found


@dataclass
class Daemon:
    """The KCL and a stream. It outlives the server."""

    checkpoints: dict[str, int] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)
    size: int = 2

    async def read(self, pipeline: Pipeline, shard: str) -> Counter:
        """Read a shard from its checkpoint to its last record, however often it must be opened for that."""
        while True:
            counter = await self._open(pipeline, shard)
            await self._deliver(pipeline, counter)
            if counter.session.alive:
                return counter

    async def _open(self, pipeline: Pipeline, shard: str) -> Counter:
        parents = () if shard == "a" else ("a",)
        while True:
            at = self.checkpoints.get(shard)
            start = Sequence(at) if at else "TRIM_HORIZON"
            try:
                return await opened(pipeline, shard, start, StoreClaim(RANGES[shard]), parents=parents)
            except LedgerError:
                await pipeline.clock.sleep(0.1)

    async def _deliver(self, pipeline: Pipeline, counter: Counter) -> None:
        """Deliver what is not checkpointed, and checkpoint what is durable."""
        session = counter.session
        at = self.checkpoints.get(session.shard_id, 0)
        left = [record for record in records()[session.shard_id] if record[0] > at]
        while left and session.alive:
            batch, left = left[: self.size], left[self.size :]
            after = session.after
            fresh = [record for record in batch if after is None or Sequence(record[0]) > after]
            await counter.give(*fresh, delivered=batch, after_ms=_AFTER_MS)
            if (due := session.checkpoint_due()) is not None:
                self.checkpoints[session.shard_id] = due.number
                session.checkpointed(due)
            await pipeline.clock.sleep(1.5)
            # The next flush has nothing but these timers.
            if session.alive and (due_ms := session.next_due_ms) is not None and due_ms <= batch[-1][0]:
                session.accept_firing(counter.fire(batch[-1][0]))
                await pipeline.clock.sleep(1.5)

    async def run(self, pipeline: Pipeline) -> None:
        """Read the stream to its end. Then each key's count must be the number of its records.

        The timer of each record has fired once, or it is still set.
        """
        while "a" not in self.ended:
            parent = await self.read(pipeline, "a")
            if await parent.session.end():
                self.ended.add("a")
        children = [await self.read(pipeline, shard) for shard in ("b", "c")]
        await pipeline.clock.sleep(6)  # files that compaction has replaced are deleted
        found: dict[str, int] = {}
        timers: list[tuple[str, int]] = []
        for child in children:
            assert child.session.alive
            try:
                await child.load()
            except LedgerError:  # the test lets one call fail
                await child.load()
            assert found.keys().isdisjoint(child.entries)
            found |= child.entries
            timers += [(key, number) for number, (key, _) in child.alarms.items()]
            timers += [(key, number) for key, numbers in child.fired.items() for number in numbers]
            assert min(due_ms for _, due_ms in child.alarms.values()) > 26, "the others were due"
        assert sorted(timers) == sorted((key, n) for shard in records().values() for n, key in shard)
        assert found == Counts(key for shard in records().values() for _, key in shard)


def a_pipeline(out: Path) -> Pipeline:
    return Pipeline(out, without_rows=True, rules=QUICK)


async def run(pipeline: Pipeline, daemon: Daemon) -> None:
    """Run until all is read and counted."""
    async with asyncio.timeout(100), pipeline.life():
        await pipeline.clock.drive(daemon.run(pipeline), step=1)


# Timers.


def key_of(value: int) -> bytes:
    return b"k%d" % value


def setting(session: IntakeSession, at: tuple[int, int], *dues: tuple[int, int]) -> BatchOutcome:
    """Return the outcome of a record (number, arrival) that sets a timer for each of ``dues``: a value and a due time."""
    made = outcome(session.shard_id, [at], rows=[])
    changes = [StateChange(key_of(value), b"set", due_ms, "alarm") for value, due_ms in dues]
    report = TimerReport(
        set=len(dues), next_due_ms=(first := min(ms for _, ms in dues)), next_call_ms=first, pending=len(dues)
    )
    return msgspec.structs.replace(made, effects=Effects(state=(pack_changes(changes),)), timers=report)


def firing(
    session: IntakeSession, *dues: tuple[int, int], next_due_ms: int | None = None, rows: bool = True
) -> BatchOutcome:
    """Return the outcome of timers that fire: a row for each, and the timer is gone."""
    latest_ms = max((due_ms for _, due_ms in dues), default=None)
    outline = BatchOutline(0, 0, None, None, latest_ms, None)
    table = pa.table(
        {
            "value": pa.array([value for value, _ in dues], pa.int64()),
            "_time": pa.array([due_ms for _, due_ms in dues], pa.int64()),
            "_shard": pa.array([session.shard_id] * len(dues), pa.string()),
            "_sequence": pa.nulls(len(dues), pa.string()),
            "_sub_sequence": pa.nulls(len(dues), pa.int64()),
            "_arrival": pa.nulls(len(dues), pa.timestamp("ms", tz="UTC")),
        }
    )
    blob = pack_changes(StateChange(key_of(value), None, None, "alarm") for value, _ in dues)
    effects = Effects(table if rows and dues else None, state=(blob,) if dues else ())
    report = TimerReport(fired=len(dues), next_due_ms=next_due_ms, next_call_ms=next_due_ms)
    return BatchOutcome(outline, effects, timers=report)


async def pending(session: IntakeSession) -> dict[int, int]:
    """Return the values and due times of the timers in a session's store."""
    assert session.snapshot is not None
    rows = (await session.snapshot()).entries.to_pylist()
    return {int(row["key"][1:]): row["expires_ms"] for row in rows if row["timer"] == "alarm"}
