"""Whatever a daemon does in whatever order: exactly once, order kept, and checkpoint <= position <= delivered.

The script's steps are what can happen to shards of one stream: batches of any size, empty ones, connections that break
or are replaced, leases that are lost, ends, explicit flushes, time, and the server's own death. After the script the
stream is read to its end.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from coordinator.pipeline import Daemon, Pipeline
from hypothesis import given, settings
from hypothesis import strategies as st

from mldserver.coordinator.shards import ShardSession
from mldserver.records import Sequence
from mldserver.windows import Tumbling, WindowSpec, batches

PARENTS = {"b": ("a",), "c": ("a",)}
NAMES = "abcz"


def stream(times: list[int]) -> Daemon:
    """Twelve records a shard, whose times go on by ``times``, also backwards."""
    records: dict[str, list[tuple[int, int]]] = {}
    for place, shard in enumerate(NAMES):
        ms, records[shard] = 10_000, []
        for number in range(1, 13):
            ms += times[(place * 5 + number) % len(times)]
            records[shard].append((number, ms))
    return Daemon(records, PARENTS, bad=5)


class Script:
    """One life of the server, and the connections in it."""

    def __init__(self, pipeline: Pipeline, daemon: Daemon) -> None:
        self.pipeline = pipeline
        self.daemon = daemon
        self.sessions: dict[str, ShardSession] = {}
        self.given: dict[str, int] = {}
        self.watermark: int | None = None

    async def step(self, what: str, shard: str, amount: int) -> None:
        daemon, session = self.daemon, self.sessions.get(shard)
        if what == "wait":
            await self.pipeline.clock.advance(amount)
        elif what == "open":
            await self.open(shard)
        elif session is None:
            return
        elif what == "give":
            batch = daemon.records[shard][self.given[shard] :][:amount]
            self.given[shard] += len(batch)
            await daemon.give(self.pipeline, session, batch)
        elif what == "empty":
            await self.pipeline.give(session, [])
        elif what == "drain":
            await session.drain()
        elif what == "store":
            daemon.checkpoint(session, self.delivered(shard))
        elif what == "break":
            session.disconnected()
            del self.sessions[shard]
        elif what == "lose":
            await session.lost()
            del self.sessions[shard]
        elif what == "end" and self.given[shard] == len(daemon.records[shard]):
            assert await session.end()
            daemon.ended.add(shard)
            del self.sessions[shard]
        self.check()

    async def open(self, shard: str) -> None:
        daemon = self.daemon
        if shard in daemon.ended or not all(p in daemon.ended for p in PARENTS.get(shard, ())):
            return
        at = daemon.checkpoints.get(shard, 0)
        self.given[shard] = sum(number <= at for number, _ in daemon.records[shard])
        start = Sequence(at) if at else "TRIM_HORIZON"
        self.sessions[shard] = await self.pipeline.open(shard, start, parents=PARENTS.get(shard, ()))

    def delivered(self, shard: str) -> int:
        given = self.given[shard]
        return self.daemon.records[shard][given - 1][0] if given else 0

    def check(self) -> None:
        for shard, session in self.sessions.items():
            place = session.position
            stored = self.daemon.checkpoints.get(shard, 0)
            durable = place.durable.number if place.durable else 0
            accepted = place.accepted.number if place.accepted else 0
            assert stored <= durable <= accepted
            due = session.checkpoint_due()
            assert due is None or due.number <= self.delivered(shard)
        now = self.pipeline.coordinator.status().watermark_ms
        assert self.watermark is None or (now is not None and now >= self.watermark)
        self.watermark = now


steps = st.lists(
    st.one_of(
        st.tuples(st.just("give"), st.sampled_from(NAMES), st.integers(1, 6)),
        st.tuples(st.just("open"), st.sampled_from(NAMES), st.just(0)),
        st.tuples(st.sampled_from(["store", "break", "lose", "end"]), st.sampled_from(NAMES), st.just(0)),
        st.tuples(st.sampled_from(["drain", "empty"]), st.sampled_from(NAMES), st.just(0)),
        st.tuples(st.just("wait"), st.just(""), st.integers(1, 12)),
        st.tuples(st.just("die"), st.just(""), st.just(0)),
    ),
    max_size=40,
)


async def play(out: Path, spec: WindowSpec, daemon: Daemon, script: list[tuple[str, str, int]]) -> None:
    pipeline = Pipeline(out, spec=spec)
    left = list(script)
    while left:
        async with pipeline.life():
            acts = Script(pipeline, daemon)
            for shard in NAMES:
                await acts.open(shard)
            while left and (step := left.pop(0))[0] != "die":
                await pipeline.clock.drive(acts.step(*step), step=0.2)

    async def rest() -> None:
        await daemon.consume(pipeline)
        await pipeline.coordinator.over()
        await pipeline.runner.idle()

    async with pipeline.life():
        await pipeline.clock.drive(rest(), step=1)
    daemon.assert_exactly_once(pipeline)
    assert pipeline.private_files() == []


@settings(max_examples=settings().max_examples // 5)
@given(
    st.sampled_from([Tumbling(10_000), batches(max_rows=5, max_age="3 s")]),
    st.lists(st.integers(-4000, 9000), min_size=1, max_size=12),
    steps,
)
def test_any_order_of_events_gives_every_record_once_and_in_order(
    spec: WindowSpec, times: list[int], script: list[tuple[str, str, int]]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(play(Path(folder), spec, stream(times), script))
