"""Random servers that accept, discard, cancel and open again, over one runtime: no count is ever lost or doubled."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import pyarrow as pa
import pytest

from mldserver.records import Record, Shard
from mldserver.runtime.interface import BatchOutcome, Delivery, Records, outcome_of
from mldserver.runtime.state_values import decode_state, encode_state
from mldserver.stores import ALL_KEYS, StateSnapshot, unpack_changes

SHARDS = ("shard-a", "shard-b")


class Server:
    """The accepted counts of a family of shards, of which each has keys of its own."""

    def __init__(self, runtime: Any, random: random.Random) -> None:
        self.runtime, self.random = runtime, random
        self.counts: Counter[str] = Counter()
        self.accepted = dict.fromkeys(SHARDS, 0)
        self.answered: dict[str, tuple[list[str], BatchOutcome]] = {}
        self.loads = 0

    async def open(self, shard: str) -> None:
        """Open a shard in a new session; what was answered in the old one is dropped."""
        self.answered.pop(shard, None)
        self.accepted[shard] = 0

        async def snapshot() -> StateSnapshot:
            self.loads += 1
            columns = {
                "key": pa.array([key.encode() for key in self.counts], pa.binary()),
                "value": pa.array([encode_state({"n": n}) for n in self.counts.values()], pa.binary()),
                "expires_ms": pa.nulls(len(self.counts), pa.int64()),
            }
            others = {name: n for name, n in self.accepted.items() if name != shard}
            await asyncio.sleep(0)  # what it says may be out of date when it arrives
            return StateSnapshot("family", ALL_KEYS, self.accepted[shard], None, pa.table(columns), others)

        await self.runtime.open(Shard(shard), snapshot)

    async def deliver(self, shard: str) -> None:
        """Process a batch of a shard that owes no answer; sometimes give it up on the way."""
        if shard in self.answered:
            return
        keys = [f"{shard}-{self.random.randrange(3)}" for _ in range(self.random.randrange(4))]
        records = [
            Record(
                shard_id=shard, sequence_number=str(n), partition_key=key, arrival_ms=1, data=self._payload()
            )
            for n, key in enumerate(keys, 1)
        ]
        delivery = Delivery(shard, Records(records), 1, None, number=self.accepted[shard] + 1)
        begun = self.runtime.begin(delivery)
        task = asyncio.ensure_future(outcome_of(begun))
        if self.random.random() < 0.2:
            for _ in range(self.random.randrange(4)):
                await asyncio.sleep(0)
            task.cancel()
        await asyncio.wait({task})
        if not isinstance(begun, BatchOutcome):
            begun.close()  # a task that is cancelled before it begins has not awaited it
        if not task.cancelled():
            failed = {letter.sequence.number for letter in task.result().effects.dead_letters}
            good = [key for n, key in enumerate(keys, 1) if n not in failed]
            self.answered[shard] = good, task.result()

    def accept(self, shard: str) -> None:
        """Accept a batch that was answered: each key has as many records more as it had in it."""
        keys, outcome = self.answered.pop(shard, ([], None))
        if outcome is None:
            return
        self.accepted[shard] += 1
        self.counts.update(keys)
        changed = {
            change.key.decode(): decode_state(change.value or b"")
            for blob in outcome.effects.state
            for change in unpack_changes(blob)
        }
        assert changed == {key: {"n": self.counts[key]} for key in keys}

    def _payload(self) -> bytes:
        return self.random.choice([b"", b"", b"", b"once", b"bad"])


@pytest.mark.parametrize("hooks", ["at once", "async"])
@pytest.mark.parametrize("first", range(0, 60, 20))
async def test_no_count_is_lost_or_doubled_whatever_becomes_of_the_outcomes(
    kit: Any, hooks: str, first: int, logged: Any
) -> None:
    called = Counter[Any]()

    def count(record: Any, ctx: Any) -> None:
        ctx.state["n"] = ctx.state.get("n", 0) + 1
        called[id(record)] += 1
        if record.data == b"bad":
            raise ValueError("bad")
        if record.data == b"once" and called[id(record)] == 1:
            raise OSError("not now")

    async def count_slowly(record: Any, ctx: Any) -> None:
        await asyncio.sleep(0)
        count(record, ctx)
        await asyncio.sleep(0)

    loads = 0
    for seed in range(first, first + 20):
        chosen = random.Random(seed)
        runtime = await kit.start(process_record=count if hooks == "at once" else count_slowly, at_once=True)
        server = Server(runtime, chosen)
        for shard in SHARDS:
            await server.open(shard)
        for _ in range(40):
            shard, other = chosen.sample(SHARDS, 2)
            match chosen.choice(
                ["deliver", "deliver", "both", "accept", "accept", "discard", "open", "open both"]
            ):
                case "deliver":
                    await server.deliver(shard)
                case "both":
                    await asyncio.gather(server.deliver(shard), server.deliver(other))
                case "accept":
                    server.accept(shard)
                case "discard":
                    server.answered.pop(shard, None)
                case "open":
                    await server.open(shard)
                case "open both":
                    await asyncio.gather(server.open(shard), server.deliver(other))
        loads += server.loads
    assert loads > 20 * 10, "discarded outcomes lead to new snapshots"
