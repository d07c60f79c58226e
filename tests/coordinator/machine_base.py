"""What state machines over coordinators have in common: the world they play in, its promises, and its end."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import ClassVar, TypeVar

from coordinator.machine_oracle import Oracle
from coordinator.machine_servers import Connection, Host
from coordinator.machine_stream import Made, Stream
from coordinator.pipeline import RULES, Pipeline
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant
from support.virtual_loop import VirtualLoop

from mldserver.config.settings import WindowSettings
from mldserver.engine_jobs import WindowJob
from mldserver.errors import WindowFailed
from mldserver.ledger.contract import WindowState
from mldserver.testing import LocalEngine, VirtualClock
from mldserver.windows import Tumbling, batches

T = TypeVar("T")

SPECS = [
    Tumbling(4000),
    Tumbling(4000, on="at", lateness_ms=500, disorder_ms=1000),
    batches(max_rows=4, max_age="3 s"),
]
BUFFER_BYTES = (300, 300, 300, 3000)
"""Some five rows, which binds whenever a flush fails; at times what rarely binds, so that flushes merge many batches."""
FLUSH_BYTES = 1500
PATIENCE_SECONDS = 400
"""Virtual seconds in which everything must be finished once nothing fails any more."""


class MachineBase(RuleBasedStateMachine):
    """Servers on one ledger, a stream, and nothing that happens yet."""

    servers: ClassVar[int] = 1

    @initialize(
        spec=st.sampled_from(SPECS),
        recompute=st.booleans(),
        dead_letter=st.booleans(),
        locks=st.booleans(),
        retained_bytes=st.sampled_from([0, 6000, 1 << 30]),
        buffer_bytes=st.sampled_from(BUFFER_BYTES),
        group_limit=st.sampled_from([1, 3]),
    )
    def begin(
        self,
        spec: Tumbling,
        recompute: bool,
        dead_letter: bool,
        locks: bool,
        retained_bytes: int,
        buffer_bytes: int,
        group_limit: int,
    ) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.loop = VirtualLoop(lambda: 0.001)
        self.clock = VirtualClock(1_000_000)
        self.stream = Stream()
        self.failing_jobs = 0
        self.failure: type[Exception] = WindowFailed
        self.buffer_bytes = buffer_bytes
        on_arrival = not (isinstance(spec, Tumbling) and spec.on)
        rules = replace(
            RULES,
            flush_bytes=FLUSH_BYTES,
            buffer_bytes=buffer_bytes,
            retention_ms=600_000,
            server_timeout_ms=5000,
            retention_bytes=retained_bytes,
            on_arrival=on_arrival,
            disorder_ms=0 if on_arrival else 1000,
        )
        policy = WindowSettings(
            window_attempts=2,
            window_on_failure="dead_letter" if dead_letter else "halt",
        )
        out = Path(self.folder.name)
        self.hosts = [
            Host(
                Pipeline(
                    out,
                    spec=spec,
                    rules=rules,
                    policy=policy,
                    recompute=recompute,
                    engine=lambda: LocalEngine(fail=self.fail_job, group_limit=group_limit),
                    server_id=name,
                    clock=self.clock,
                    locks=locks,
                ),
                name,
            )
            for name in ("one", "two")[: self.servers]
        ]
        self.oracle = Oracle(out, self.stream, spec, one_server=self.servers == 1)
        self.broken = True
        for host in self.hosts:
            self.play(self.start_up(host))
        for place, name in enumerate(self.stream.readable()):
            self.go(partial(self.connect, self.host(place), name), 40)
        self.broken = False

    def teardown(self) -> None:
        if not hasattr(self, "oracle"):
            return
        try:
            if not self.broken:
                self.play(self.finish())
                self.oracle.check()
                self.oracle.check_end()
        finally:
            for host in self.hosts:
                self.loop.run_until_complete(host.kill())
            self.go(turns=100)  # what was cancelled ends
            self.oracle.close()
            self.loop.close()
            self.folder.cleanup()

    # How rules are played.

    def play(self, work: Coroutine[None, None, T]) -> T:
        """Run something to its end on the loop; a machine in which anything was wrong is not finished."""
        before, self.broken = self.broken if hasattr(self, "broken") else False, True
        result = self.loop.run_until_complete(work)
        self.broken = before
        return result

    def go(self, begin: Callable[[], None] | None = None, turns: int = 0) -> None:
        """Begin something, and let the loop turn."""

        async def some() -> None:
            if begin is not None:
                begin()
            for _ in range(turns):
                await asyncio.sleep(0)

        self.play(some())

    async def start_up(self, host: Host) -> None:
        host.start(renamed=False)
        while not host.up:
            host.look()
            await self.clock.advance(0.1)

    def fail_job(self, job: WindowJob) -> Exception | None:
        if self.failing_jobs <= 0:
            return None
        self.failing_jobs -= 1
        return self.failure(f"{job.window.id} was not to be computed")

    def host(self, number: int) -> Host:
        return self.hosts[number % len(self.hosts)]

    @property
    def any_up(self) -> bool:
        return any(host.up for host in self.hosts)

    @property
    def any_down(self) -> bool:
        return any(host.task is None or host.task.done() for host in self.hosts)

    @property
    def idle(self) -> list[Connection]:
        return [each for host in self.hosts for each in host.idle]

    @property
    def over(self) -> list[Connection]:
        """Connections that have carried all of their shards."""
        shards = self.stream.shards
        return [
            each
            for each in self.idle
            if shards[each.shard].closed and each.given == len(shards[each.shard].records)
        ]

    def some_connection(self, number: int) -> Connection:
        idle = self.idle
        return idle[number % len(idle)]

    def split_shard(self, name: str) -> None:
        self.stream.child(name)
        self.stream.child(name)

    def produce(self, shard: str, new: list[tuple[int, int, str]]) -> None:
        for ago, earlier, kind in new:
            ms = self.clock.now_ms() + ago
            self.stream.add(shard, ms, ms + earlier, kind)  # type: ignore[arg-type]  # drawn from the kinds

    def connect(self, host: Host, name: str) -> Connection:
        shard = self.stream.shards[name]
        shard.lease += 1
        connection = Connection(host, name, shard.lease)
        host.connections.append(connection)
        connection.send(connection.open, self.stream)
        return connection

    def send_end(self, connection: Connection) -> None:
        connection.send(connection.end, self.stream)

    def give(self, connection: Connection, size: int, think: int) -> None:
        shard = self.stream.shards[connection.shard]
        batch = shard.records[connection.given : connection.given + size]
        connection.given += len(batch)
        left = len(shard.records) - connection.given
        self.note(connection.shard, batch)
        connection.send(connection.give, batch, think, 1000 * left)

    def note(self, name: str, batch: list[Made]) -> None:
        if batch:
            delivered = self.oracle.delivered
            delivered[name] = max(delivered.get(name, 0), batch[-1].number)

    def store(self, connection: Connection) -> None:
        due = connection.alive.checkpoint_due()
        if due is None:
            return
        shard = self.stream.shards[connection.shard]
        if connection.has_lease(self.stream):
            delivered = shard.records[connection.given - 1].number
            assert shard.checkpoint <= due.number <= delivered
            shard.checkpoint = due.number
            connection.alive.checkpointed(due)

    def read_out(self, host: Host, name: str, messages: int) -> None:
        """Bring a shard on by some messages; to its end, when these are enough and nothing fails."""
        for _ in range(messages):
            if host.up and not self.stream.shards[name].ended:
                self.go(partial(self.read_on, host, name), 20)
                self.play(self.clock.advance(0.2))

    def read_up(self, turns: int) -> None:
        """Deliver what is left of every shard that has a connection."""
        for _ in range(turns):
            for connection in self.idle:
                if connection.is_idle and connection.given < len(
                    self.stream.shards[connection.shard].records
                ):
                    self.go(partial(self.give, connection, 5, 0), 5)
            self.play(self.clock.advance(0.2))

    def flush_now(self, host: Host, turns: int) -> None:
        self.go(host.pipeline.coordinator._cycle.soon, turns)

    def engine_of(self, server: int, *, works: bool) -> None:
        host = self.host(server)
        if host.up and works:
            self.go(host.pipeline.engine._ready.set)
        elif host.up:
            host.pipeline.engine._ready.clear()

    def retry_windows(self, host: Host, number: int | None = None) -> None:
        entries = self.oracle.peek().windows.values()
        aside = sorted(each.window_id for each in entries if each.state is WindowState.SET_ASIDE)
        if number is not None:
            aside = aside[number : number + 1]
        for window_id in aside if host.up else ():
            host.pipeline.ledger.store.decide(window_id, "retry", now_ms=self.clock.now_ms())

    async def leave(self, host: Host) -> None:
        for connection in list(host.connections):
            connection.leave()
        await self.clock.sleep(1)
        if host.up:
            host.trouble.calm()
            await host.pipeline.coordinator.leave()
        await host.kill()

    def begin_life(self, host: Host, renamed: bool, dies: int | None) -> None:
        host.start(renamed=renamed)
        if dies is not None:
            host.trouble.die_in(dies, after=dies % 2 == 0)

    # What holds.

    @invariant()
    def promises(self) -> None:
        self.broken = True
        for host in self.hosts:
            host.look()
        self.oracle.check()
        for host in self.hosts:
            if host.up:
                self.status(host)
        self.broken = False

    def status(self, host: Host) -> None:
        status = host.pipeline.coordinator.status()
        before, host.watermark_ms = host.watermark_ms, status.watermark_ms
        now = status.watermark_ms
        assert before is None or (now is not None and now >= before), f"watermark: {before}, then {now}"
        # Whoever finds no room waits behind the batch that it has brought: each shard has at most one too many.
        shards = {batch.shard_id for batch in host.pipeline.coordinator.buffer.snapshot().values()}
        room = self.buffer_bytes + host.largest * len(shards)
        assert status.buffered_bytes <= room, f"{status.buffered_bytes} bytes are buffered, of {room}"
        positions = self.oracle.peek().shards
        for connection in host.connections:
            session = connection.session
            if session is not None and (due := session.checkpoint_due()) is not None:
                durable = positions[connection.shard].position
                assert durable is not None
                assert due <= durable, f"checkpoint {due} would be ahead of {durable}"

    # The end.

    async def finish(self) -> None:
        """Nothing fails any more: everything is delivered, computed and published within bounded time."""
        self.failing_jobs = 0
        for host in self.hosts:
            host.trouble.calm()
            if host.up:
                host.pipeline.engine._ready.set()
        for name in self.stream.growing():
            self.stream.shards[name].closed = True
        for _ in range(PATIENCE_SECONDS):
            await self.advance_all()
            if all(shard.ended for shard in self.stream.shards.values()) and self.oracle.finished():
                break
        else:
            raise AssertionError(f"not finished: {self.oracle.peek()}")

    async def advance_all(self) -> None:
        for host in self.hosts:
            host.look()
            if host.task is None or host.task.done():
                self.begin_life(host, renamed=False, dies=None)
            self.retry_windows(host)
        living = [host for host in self.hosts if host.up]
        for place, name in enumerate(self.stream.readable()):
            if living:
                self.read_on(living[place % len(living)], name)
        await self.clock.advance(1)

    def read_on(self, host: Host, name: str) -> None:
        """Bring a shard one message further, at whichever server has its lease."""
        shard = self.stream.shards[name]
        having = [
            each for h in self.hosts for each in h.connections if each.shard == name and not each.closed
        ]
        reading = next((each for each in having if each.has_lease(self.stream)), None)
        if reading is None:
            self.connect(host, name)
        elif reading.is_idle and not reading.alive.alive:
            reading.leave()
        elif reading.is_idle and reading.given < len(shard.records):
            self.give(reading, 5, 0)
        elif reading.is_idle and shard.closed:
            reading.send(reading.end, self.stream)
