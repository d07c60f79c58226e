"""Handlers with keyed state in worker processes: whatever happens to a process, each key counts on from what was accepted."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from msgspec.structs import replace
from support.serving import until
from workers.kit import delivery, descriptors, named, running

from mldserver.errors import StateMoved
from mldserver.records import Shard
from mldserver.runtime.failure_policy import FailurePolicy
from mldserver.runtime.interface import BatchOutcome, Delivery, outcome_of
from mldserver.runtime.keyed_state import STATE_BYTES
from mldserver.stores import ALL_KEYS, SnapshotSource, StateChange, StateSnapshot, unpack_changes
from mldserver.workers.runtime import WorkerRuntime
from mldserver.workers.shared_memory import Held
from mldserver.workers.worker import Limits

pytestmark = pytest.mark.usefixtures("logged")

HANDLER = """
import os, pathlib, time
from mldserver import Context

schema = "key STRING, n BIGINT"

def initialize(shard):
    while pathlib.Path("hold").exists():
        pathlib.Path("opening").touch()
        time.sleep(0.01)

def process_record(record, ctx: Context):
    ctx.state["n"] = ctx.state.get("n", 0) + int(ctx.settings.get("step", "1"))
    text = record.text()
    while text.endswith("?") and not pathlib.Path("go").exists():
        pathlib.Path("begun").touch()
        time.sleep(0.01)
    if text.endswith("!"):
        os._exit(3)
    return ctx.key, ctx.state["n"]
"""
"""Counts the records of each key. A ``?`` waits for the file ``go``, a ``!`` ends the process."""
COLUMNS = pa.schema([("key", pa.binary()), ("value", pa.binary()), ("expires_ms", pa.int64())])


class Store:
    """Stands for the coordinator: the state and the outcomes of a store that it has accepted."""

    def __init__(self, runtime: WorkerRuntime, *shards: str, name: str = "s") -> None:
        self._runtime, self._name = runtime, name
        self.accepted = dict.fromkeys(shards, 0)
        self.state: dict[bytes, StateChange] = {}
        self.reads = 0
        self.rows: dict[str, list[int]] = defaultdict(list)
        self.expected: Counter[str] = Counter()
        self.letters: Counter[str | None] = Counter()

    async def open(self) -> None:
        """Open all shards of the store."""
        for shard_id in self.accepted:
            await self._runtime.open(Shard(shard_id), self.source(shard_id))

    def source(self, shard_id: str) -> SnapshotSource:
        """Return what reads the store for a shard."""

        async def source() -> StateSnapshot:
            await asyncio.sleep(0)
            self.reads += 1
            others = {shard: number for shard, number in self.accepted.items() if shard != shard_id}
            rows = [change._asdict() for change in self.state.values()]
            entries = pa.Table.from_pylist(rows, schema=COLUMNS)
            return StateSnapshot(self._name, ALL_KEYS, self.accepted[shard_id], None, entries, others)

        return source

    def delivery(self, shard_id: str, *texts: str) -> Delivery:
        """Return the next batch of a shard: a record for each text, whose key is the text's first letter."""
        return replace(delivery(shard_id, *texts, key=None), number=self.accepted[shard_id] + 1)

    def accept(self, shard_id: str, outcome: BatchOutcome) -> None:
        """Accept the outcome of a shard's next batch."""
        self.accepted[shard_id] += 1
        for blob in outcome.effects.state:
            for change in unpack_changes(blob):
                if change.value is None:
                    self.state.pop(change.key, None)
                else:
                    self.state[change.key] = change
        self.letters.update(letter.partition_key for letter in outcome.effects.dead_letters)
        if (rows := outcome.effects.rows) is not None:
            for row in rows.to_pylist():
                self.rows[row["key"]].append(row["n"])

    async def process(self, shard_id: str, *texts: str) -> None:
        """Process a shard's next batch and accept its outcome."""
        self.accept(shard_id, await outcome_of(self._runtime.begin(self.delivery(shard_id, *texts))))

    def counts(self) -> dict[str, int]:
        """Return how many rows each key has, after a check that they count from 1 on."""
        assert all(rows == list(range(1, len(rows) + 1)) for rows in self.rows.values()), self.rows
        return {key: len(rows) for key, rows in self.rows.items()}


Make = Callable[..., WorkerRuntime]


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(HANDLER)

    def make(
        workers: int = 1, state_bytes: int = STATE_BYTES, step: str = "1", **policy: Any
    ) -> WorkerRuntime:
        return WorkerRuntime(
            "mine",
            workers=workers,
            policy=FailurePolicy(**policy),
            limits=Limits(None, None),
            state_bytes=state_bytes,
            settings={"step": step},
        )

    return make


async def kill(runtime: WorkerRuntime, worker: int = 0) -> None:
    """Kill a worker's process, and wait for its successor."""
    slot = runtime._workers[worker]
    died = await slot.process()
    os.kill(died.pid, signal.SIGKILL)
    await until(lambda: slot.ready not in {None, died})


async def test_a_process_that_dies_between_two_batches_takes_no_count_with_it(made: Make) -> None:
    async with running(made()) as runtime, asyncio.timeout(800):
        store = Store(runtime, "a")
        await store.open()
        begun = runtime.begin(store.delivery("a", "x", "y", "x"))
        assert isinstance(begun, asyncio.Future), "it needs no task"
        store.accept("a", await outcome_of(begun))
        await kill(runtime)
        await store.process("a", "x", "y")
        assert store.counts() == {"x": 3, "y": 2}
        assert store.reads == 2, "once for each process"


async def test_each_process_gets_the_settings(made: Make) -> None:
    async with running(made(step="10")) as runtime, asyncio.timeout(800):
        store = Store(runtime, "a")
        await store.open()
        await store.process("a", "x")
        await kill(runtime)
        await store.process("a", "x")
        assert store.rows == {"x": [10, 20]}


async def test_a_batch_whose_process_dies_counts_once(made: Make, tmp_path: Path) -> None:
    async with running(made()) as runtime, asyncio.timeout(800), asyncio.TaskGroup() as group:
        store = Store(runtime, "a")
        await store.open()
        await store.process("a", "x")
        batch = group.create_task(store.process("a", "x", "x?"))
        await until((tmp_path / "begun").exists)
        os.kill((await runtime._workers[0].process()).pid, signal.SIGKILL)
        (tmp_path / "go").touch()
        await batch
        await store.process("a", "x")
        assert store.counts() == {"x": 4}


async def test_a_process_that_dies_while_it_opens_the_shard_is_followed_by_one_that_has_the_state(
    made: Make, tmp_path: Path
) -> None:
    async with running(made()) as runtime, asyncio.timeout(800), asyncio.TaskGroup() as group:
        store = Store(runtime, "a")
        await store.open()
        await store.process("a", "x")
        (tmp_path / "hold").touch()
        await kill(runtime)
        batch = group.create_task(store.process("a", "x"))
        await until((tmp_path / "opening").exists)
        (tmp_path / "hold").unlink()
        os.kill((await runtime._workers[0].process()).pid, signal.SIGKILL)
        await batch
        assert store.counts() == {"x": 2}


async def test_new_code_counts_on(made: Make, tmp_path: Path) -> None:
    async with running(made(2)) as runtime, asyncio.timeout(800):
        store = Store(runtime, "a", "b")
        await store.open()
        await store.process("a", "x")
        await store.process("b", "y")
        (tmp_path / "mine.py").write_text(HANDLER + "\nversion = 'new'\n")
        await runtime.reload()
        assert runtime.spec.version == "new"
        reads = store.reads
        await store.process("a", "x")
        await store.process("b", "y")
        assert store.counts() == {"x": 2, "y": 2}
        assert store.reads == reads, "the new processes began with the state"


async def test_another_shard_of_the_store_that_is_opened_during_a_search_takes_nothing_from_it(
    made: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(made(attempts=1)) as runtime, asyncio.timeout(800):
        store = Store(runtime, "a", "b")
        await store.open()
        surely = runtime._surely

        async def condemned(part: Delivery, held: Held) -> BatchOutcome:
            outcome = await surely(part, held)
            if part.condemned:
                await store.process("b", "y")
            return outcome

        monkeypatch.setattr(runtime, "_surely", condemned)
        await store.process("a", *"xxxx", "x!", *"xxx")
        await store.process("a", "x")
        await store.process("b", "y")
        assert store.counts() == {"x": 8, "y": 2}


@pytest.mark.parametrize(
    "at", [pytest.param(0, marks=pytest.mark.long), 3, pytest.param(7, marks=pytest.mark.long)]
)
async def test_a_record_that_ends_its_process_takes_no_part_in_the_counts(
    made: Make, at: int, logged: list[dict[str, Any]]
) -> None:
    async with running(made(attempts=2)) as runtime, asyncio.timeout(800):
        store = Store(runtime, "a")
        await store.open()
        await store.process("a", "x", "y")
        texts = ["x", "y", "x", "x", "y", "x", "y", "x"]
        texts[at] += "!"
        await store.process("a", *texts)
        await store.process("a", "x", "y")
        # Without the record that ended its process.
        assert sum(store.counts().values()) == 2 + len(texts) - 1 + 2
    assert len(named(logged, "worker.lost")) > 2


async def test_a_search_that_is_given_up_leaves_no_count(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(made(attempts=1)) as runtime, asyncio.timeout(800):
        store = Store(runtime, "a")
        await store.open()
        surely = runtime._surely

        async def condemned(part: Delivery, held: Held) -> BatchOutcome:
            outcome = await surely(part, held)
            if part.condemned:
                batch.cancel()
            return outcome

        monkeypatch.setattr(runtime, "_surely", condemned)
        batch = asyncio.create_task(runtime.process(store.delivery("a", "x", "x", "y!")))
        await asyncio.wait({batch})
        assert batch.cancelled()
        await store.process("a", "x")
        assert store.counts() == {"x": 1}


async def test_an_outcome_that_the_server_dropped_does_not_count(
    made: Make, logged: list[dict[str, Any]]
) -> None:
    async with running(made()) as runtime, asyncio.timeout(800):
        store = Store(runtime, "a")
        await store.open()
        await store.process("a", "x")
        await outcome_of(runtime.begin(store.delivery("a", "x", "y")))
        await store.process("a", "x", "y")
        await runtime.process(store.delivery("a", "x", "y"))
        store.accept("a", await runtime.process(store.delivery("a", "x")))
        assert store.counts() == {"x": 3, "y": 1}
        assert len(named(logged, "state.moved")) == 2
        assert store.reads == 3
    assert named(logged, "worker.lost") == []


async def test_an_outcome_that_the_process_lacks_is_there_at_the_next_batch(made: Make) -> None:
    async with running(made(), standby=False) as runtime, asyncio.timeout(800):
        store = Store(runtime, "a", "b")
        await store.open()
        await store.process("a", "x")
        store.accepted["b"] += 1
        store.state[b"y"] = StateChange(b"y", msgspec.msgpack.encode({"n": 1}))
        store.rows["y"].append(1)
        await store.process("b", "y")
        await store.process("a", "x")
        assert store.counts() == {"x": 2, "y": 2}


async def test_a_state_that_never_fits_its_number_is_an_error(made: Make) -> None:
    async with running(made(), standby=False) as runtime, asyncio.timeout(800):
        store = Store(runtime, "a")
        await store.open()
        wrong = replace(store.delivery("a", "x"), number=7)
        with pytest.raises(StateMoved):
            await outcome_of(runtime.begin(wrong))
        await store.process("a", "x")
        assert store.counts() == {"x": 1}


async def test_shards_of_one_store_are_at_one_worker_and_each_is_right_after_each_others_troubles(
    made: Make, logged: list[dict[str, Any]]
) -> None:
    async with running(made(2)) as runtime, asyncio.timeout(800):
        store = Store(runtime, "a", "b", "c")
        await store.open()
        assert len(set(runtime.worker_of().values())) == 1
        for shard, key in ("ax", "by", "cz", "ax"):
            await store.process(shard, key)
        await outcome_of(runtime.begin(store.delivery("b", "y")))  # dropped
        for shard, key in ("by", "ax", "cz"):
            await store.process(shard, key)
        await kill(runtime, runtime.worker_of()["a"])
        for shard, key in ("cz", "by", "ax"):
            await store.process(shard, key)
        assert store.counts() == {"x": 4, "y": 3, "z": 3}
        # A child goes on with its parent's keys.
        await runtime.forget("b")
        store.accepted["d"] = 0
        del store.accepted["b"]
        await runtime.open(Shard("d"), store.source("d"))
        for shard, key in ("dy", "ax", "cz"):
            await store.process(shard, key)
        assert store.counts() == {"x": 5, "y": 4, "z": 4}
        # The connection ends with an outcome that is not accepted, while the store stays open for others.
        await outcome_of(runtime.begin(store.delivery("d", "y")))
        await runtime.forget("d")
        store.accepted["d"] = 0
        await runtime.open(Shard("d"), store.source("d"))
        for shard, key in ("dy", "ax"):
            await store.process(shard, key)
        assert store.counts() == {"x": 6, "y": 5, "z": 4}
    assert len(named(logged, "state.moved")) == 1


async def test_the_shards_of_a_store_leave_a_worker_that_failed_together_or_not_at_all(made: Make) -> None:
    runtime = made(3)
    for shard, store in {"a": "s", "b": "s", "kin": "t", "guilty": "t"}.items():
        await runtime._stores.add(shard, Store(runtime, shard, name=store).source(shard))
    runtime._plan = {"x": 0, "y": 0, "a": 2, "b": 2, "kin": 2, "guilty": 2}
    failed = runtime._workers[2]
    failed.opened |= {"a": 1, "b": 1, "kin": 1, "guilty": 1}
    failed.suspects = {"guilty"}
    failed._deaths.failures = 8
    runtime._evade(failed)
    assert runtime._plan == {"x": 0, "y": 0, "a": 1, "b": 1, "kin": 2, "guilty": 2}
    assert failed.opened == {"kin": 1, "guilty": 1}


async def test_shards_of_one_store_that_are_busy_at_the_same_time_count_right(made: Make) -> None:
    async with running(made()) as runtime, asyncio.timeout(800):
        store = Store(runtime, *"abcd")
        await store.open()

        async def play(shard: str) -> None:
            for number in range(40):
                if number in {10, 20}:
                    await outcome_of(runtime.begin(store.delivery(shard, shard)))  # dropped
                await store.process(shard, shard)

        async with asyncio.TaskGroup() as group:
            for shard in "abcd":
                group.create_task(play(shard))
            await until(lambda: store.accepted["a"] > 15)
            await kill(runtime)
        assert store.counts() == dict.fromkeys("abcd", 40)
        assert store.reads < 30, "those that are busy do not make each other open again"


async def test_a_large_store_crosses_in_a_file_and_leaves_no_descriptor(made: Make) -> None:
    async with running(made()) as runtime, asyncio.timeout(800):
        store = Store(runtime, "a")
        filler = {b"%07d" % n: StateChange(b"%07d" % n, b"\x81\xa1n\x01") for n in range(50_000)}
        store.state |= filler
        await store.open()
        before = descriptors()
        await kill(runtime)
        await store.process("a", "x")
        await kill(runtime)
        await store.process("a", "x")
        assert store.counts() == {"x": 2}
        assert descriptors() == before


async def test_workers_share_the_memory_that_state_may_take(
    made: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mldserver.workers.runtime._SHARE_SECONDS", 0.05)

    def empty(shard_id: str) -> SnapshotSource:
        async def source() -> StateSnapshot:
            return StateSnapshot(shard_id, ALL_KEYS, 0, None, COLUMNS.empty_table())

        return source

    async with running(made(2, state_bytes=1_000, attempts=1)) as runtime, asyncio.timeout(800):
        for shard_id in "ab":
            await runtime.open(Shard(shard_id), empty(shard_id))
        assert set(runtime.worker_of().values()) == {0, 1}
        await runtime.process(replace(delivery("a", "x", "y", key=None), number=1))
        await until(lambda: [tuple(size)[:2] for size in runtime.state_sizes()] == [("a", 2), ("b", 0)])
        assert runtime.trouble is None
        await runtime.process(replace(delivery("b", "x", "y", key=None), number=1))
        await until(lambda: sum(size.keys for size in runtime.state_sizes()) == 4)
        assert "keyed state takes 0 of 0 MiB (state_bytes)" in str(runtime.trouble)
        # Until a worker is told, after its heartbeat, its state may grow.
        failed, number = set[str](), 2
        while not failed:
            batch = replace(delivery("b", "v", "w", "x", "y", "z", key=None), number=number)
            outcome = await runtime.process(batch)
            failed = {letter.error.partition(":")[0] for letter in outcome.effects.dead_letters}
            number += 1
        assert failed == {"StateFull"}


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 6))])
async def test_random_troubles_of_shards_that_share_stores(
    made: Make, seed: int, long: bool, logged: list[dict[str, Any]]
) -> None:
    """Batches whose outcomes are accepted, discarded or cancelled, new sessions, records that end processes, and kills."""
    async with running(made(2, attempts=1)) as runtime, asyncio.timeout(800):
        dice = random.Random(seed)
        stores = [Store(runtime, *shards, name=shards) for shards in ("abc", "de", "f")]
        for store in stores:
            await store.open()

        async def play(store: Store, shard: str) -> None:
            for _ in range(400 if long else 40):
                texts = [shard] * dice.randint(1, 4)
                if (trouble := dice.random()) < 0.02:
                    texts.insert(dice.randrange(len(texts)), f"{shard}!")
                if 0.1 < trouble < 0.3:
                    await given_up(
                        runtime, store.delivery(shard, *texts), dice.choice([None, 0, 0.001, 0.01])
                    )
                if 0.25 < trouble < 0.35:
                    await runtime.forget(shard)
                    store.accepted[shard] = 0
                    await runtime.open(Shard(shard), store.source(shard))
                await store.process(shard, *texts)
                store.expected[shard] += len(texts)

        async def kill_now_and_then(playing: asyncio.Task[Any]) -> None:
            for _ in range(40 if long else 4):
                await asyncio.wait({playing}, timeout=dice.uniform(0.1, 1))
                if (process := dice.choice(runtime._workers).ready) is not None and not playing.done():
                    os.kill(process.pid, signal.SIGKILL)

        plays = [play(store, shard) for store in stores for shard in store.accepted]
        playing = asyncio.ensure_future(asyncio.gather(*plays))
        await asyncio.gather(playing, kill_now_and_then(playing))
        for store in stores:
            # A record that is in hand alone when its process is killed is taken for the cause.
            assert Counter(store.counts()) + store.letters == store.expected
    assert named(logged, "state.moved") != []


async def given_up(runtime: WorkerRuntime, batch: Delivery, seconds: float | None) -> None:
    """Begin a batch and discard its outcome; after ``seconds`` cancel it."""
    begun = asyncio.ensure_future(outcome_of(runtime.begin(batch)))
    await asyncio.wait({begun}, timeout=seconds)
    begun.cancel()
    await asyncio.wait({begun})
