"""Timers in worker processes: each fires once, whatever happens to a process; one that ends its process fails alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from msgspec.structs import replace
from workers.kit import delivery, running

from mldserver.records import DeadLetter, Shard
from mldserver.runtime.failure_policy import FailurePolicy
from mldserver.runtime.interface import BatchOutcome, Delivery, DueTimers, Payload, TimerLetter, outcome_of
from mldserver.stores import ALL_KEYS, StateChange, StateSnapshot, unpack_changes
from mldserver.workers.runtime import WorkerRuntime
from mldserver.workers.worker import Limits

pytestmark = pytest.mark.usefixtures("logged")

HANDLER = """
import os
from mldserver import timer

schema = "key STRING, name STRING"

def process_record(record, ctx):
    for name in record.text()[1:]:
        ctx.timers.set(alarm, after=1, name=name, payload=name)

@timer
def alarm(due, ctx):
    if due.name == "!":
        os._exit(3)
    return ctx.key, due.payload
"""
"""Sets a timer for each letter of a record but the first. The timer ``!`` ends its process."""
SHARD = "shard"
COLUMNS = pa.schema(
    [("key", pa.binary()), ("value", pa.binary()), ("expires_ms", pa.int64()), ("timer", pa.string())]
)
LATER = 1 << 50


class Store:
    """Stands for the coordinator: what it has accepted of one shard."""

    def __init__(self, runtime: WorkerRuntime) -> None:
        self._runtime = runtime
        self.accepted = 0
        self.changes: dict[tuple[bytes, str], StateChange] = {}
        self.rows: list[tuple[str, str]] = []
        self.letters: list[DeadLetter] = []
        self.portions: list[int] = []
        """How many timers each portion has fired."""

    async def read(self) -> StateSnapshot:
        rows = [change._asdict() for change in self.changes.values()]
        entries = pa.Table.from_pylist(
            [row | {"timer": row["timer"] or None} for row in rows], schema=COLUMNS
        )
        return StateSnapshot("store", ALL_KEYS, self.accepted, None, entries)

    async def process(self, payload: Payload | Delivery, **fields: object) -> BatchOutcome:
        """Process the next batch, and accept its outcome."""
        given = payload if isinstance(payload, Delivery) else Delivery(SHARD, payload, 5000, None)
        sent = replace(given, number=self.accepted + 1, **fields)
        outcome = await outcome_of(self._runtime.begin(sent))
        self.accepted += 1
        for blob in outcome.effects.state:
            for change in unpack_changes(blob):
                self.changes[change.key, change.timer] = change
                if change.value is None:
                    del self.changes[change.key, change.timer]
        self.letters += outcome.effects.dead_letters
        if (rows := outcome.effects.rows) is not None:
            self.rows += [(row["key"], row["name"]) for row in rows.to_pylist()]
        return outcome

    async def fire(self, limit: int) -> None:
        """Fire portions until no timer is set."""
        for _ in range(20):
            outcome = await self.process(DueTimers(LATER, limit))
            assert outcome.timers is not None
            self.portions.append(outcome.timers.fired)
            if outcome.timers.pending == 0:
                return
        pytest.fail(f"Timers are left after {self.portions}.")


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerRuntime]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(HANDLER)
    return WorkerRuntime("mine", workers=1, policy=FailurePolicy(attempts=2), limits=Limits(None, None))


async def test_a_timer_fires_once_with_its_payload(runtime: WorkerRuntime) -> None:
    async with running(runtime):
        store = Store(runtime)
        await runtime.open(Shard(SHARD), store.read)
        await store.process(delivery(SHARD, "kab", "lc", key=None))
        assert sorted(timer for _, timer in store.changes) == ["alarm/a", "alarm/b", "alarm/c"]
        await store.fire(limit=2)
        assert (store.rows, store.portions) == ([("k", "a"), ("k", "b"), ("l", "c")], [2, 1])
        assert (store.changes, store.letters) == ({}, [])


async def test_a_timer_that_ends_its_process_is_found_and_the_others_fire_once(
    runtime: WorkerRuntime,
) -> None:
    async with running(runtime):
        store = Store(runtime)
        await runtime.open(Shard(SHARD), store.read)
        await store.process(delivery(SHARD, "kabcd!ef", key=None))
        await store.fire(limit=16)
        assert "".join(name for _, name in store.rows) == "abcdef"
        [letter] = store.letters
        assert (letter.timer, letter.partition_key, letter.error.partition(":")[0]) == (
            "alarm/!",
            "k",
            "WorkerDied",
        )
        assert store.changes == {}
        assert max(store.portions) == 4


async def test_of_letters_of_timers_the_one_that_ends_its_process_is_found(runtime: WorkerRuntime) -> None:
    async with running(runtime):
        store = Store(runtime)
        await runtime.open(Shard(SHARD), store.read)
        letters = tuple(TimerLetter("k", f"alarm/{name}", 0, b"\xa1" + name.encode()) for name in "a!b")
        await store.process(DueTimers(LATER, 16, letters=letters), redriven=True)
        assert store.rows == [("k", "a"), ("k", "b")]
        assert [letter.timer for letter in store.letters] == ["alarm/!"]
