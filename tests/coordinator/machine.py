"""Everything that can happen to coordinators on one ledger, as rules of a state machine.

The coordinator, its flusher, its window runner, the ledger and the output folder are the real ones, on a virtual clock.
A rule begins something and lets the loop turn a few times, so that rules meet each other half-way: ``turn`` and ``wait``
bring them on. After each rule all promises are checked; at the end everything is finished and compared with the stream.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar

from coordinator.machine_base import MachineBase
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from mldserver.errors import DriverLost, WindowFailed

pick = st.integers(0, 7)
turns = st.sampled_from([0, 0, 1, 2, 3, 5, 8, 13, 20, 60])
New = tuple[int, int, str]
"""A record that is new in the stream: how long ago it arrived, how much earlier it happened (ms), its kind."""


def arrived(earliest_ms: int, latest_ms: int) -> st.SearchStrategy[list[New]]:
    kinds = st.sampled_from(["row"] * 6 + ["none", "bad"])
    one = st.tuples(st.integers(earliest_ms, latest_ms), st.integers(-5000, 0), kinds)
    return st.lists(one, min_size=1, max_size=4)


news = arrived(-6000, 0)
delivery = st.tuples(
    pick,
    news,
    st.integers(1, 5),
    st.integers(0, 3),
    st.sampled_from([0, 0, 0.3, 1, 2]),
)
"""Which connection, what is new in its shard, how many records at most, turns the handler takes, seconds afterwards."""
bursts = st.lists(delivery, min_size=2, max_size=5)
floods = st.lists(st.tuples(pick, news, st.just(3), st.integers(0, 1), st.just(0)), min_size=10, max_size=14)
"""Small batches, and many: what each shard may have too many of is little beside all that comes."""
Delivery = tuple[int, list[New], int, int, float]


class PipelineMachine(MachineBase):
    """One server, one stream."""

    # The stream.

    @rule(number=pick)
    @precondition(lambda self: len(self.stream.shards) < 8)
    def split(self, number: int) -> None:
        growing = self.stream.growing()
        self.split_shard(growing[number % len(growing)])

    @rule(number=pick)
    @precondition(lambda self: len(self.stream.growing()) > 1 and len(self.stream.shards) < 8)
    def merge(self, number: int) -> None:
        growing = self.stream.growing()
        at = number % len(growing)
        self.stream.child(growing[at], growing[at - 1])

    @rule(server=pick)
    @precondition(lambda self: self.any_up)
    def list_shards(self, server: int) -> None:
        if self.host(server).up:
            listing = {name: shard.parents for name, shard in self.stream.shards.items()}
            self.host(server).pipeline.coordinator.shards.know(listing)

    # Connections.

    @rule(number=pick, server=pick, amid=st.none() | turns, turns=turns)
    @precondition(lambda self: self.any_up)
    def open(self, number: int, server: int, amid: int | None, turns: int) -> None:
        """A lease is taken, perhaps amid a cycle: what another connection had of the shard goes on, unknowing."""
        readable = self.stream.readable()
        if not readable:
            return
        name = readable[number % len(readable)]
        for host in self.hosts:
            if amid is not None and host.up:
                self.flush_now(host, amid)
        if self.host(server).up:
            self.go(lambda: self.connect(self.host(server), name), turns)

    def deliver(self, batches: list[Delivery], turns: int) -> None:
        """The next batches of some shards, whatever their borders were the last time."""
        for number, new, size, think, seconds in batches:
            if self.idle:
                connection = self.some_connection(number)
                if not self.stream.shards[connection.shard].closed:
                    self.produce(connection.shard, new)
                self.go(partial(self.give, connection, size, think), turns)
            if seconds:
                self.play(self.clock.advance(seconds))

    def daemon(self, server: int, batches: list[Delivery]) -> None:
        """A daemon that does what it should: it connects, delivers, checkpoints, ends what is over."""
        having = {
            each.shard
            for host in self.hosts
            for each in host.connections
            if each.has_lease(self.stream) and not each.closed
        }
        for place, name in enumerate(self.stream.readable()):
            host = self.host(server + place)
            if name not in having and host.up:
                self.go(partial(self.connect, host, name), 40)
        if self.idle:
            self.deliver(batches, 5)
        for connection in self.idle:
            self.store(connection)
        for connection in self.over:
            self.go(partial(self.send_end, connection), 40)

    # More than once: most of what happens is that daemons read, and an example may do without some of the rules.
    deliver_1 = precondition(lambda self: self.idle)(rule(batches=bursts, turns=turns)(deliver))
    deliver_2 = precondition(lambda self: self.idle)(rule(batches=bursts, turns=turns)(deliver))

    daemon_1 = rule(server=pick, batches=bursts)(daemon)
    daemon_2 = rule(server=pick, batches=bursts)(daemon)
    daemon_3 = rule(server=pick, batches=bursts)(daemon)

    @rule(number=pick, server=pick, batch=delivery, amid=st.integers(0, 6))
    @precondition(lambda self: self.idle)
    def come_again(self, number: int, server: int, batch: Delivery, amid: int) -> None:
        """A daemon connects anew amid the flush of what it delivered, and delivers that again with other borders."""
        old, (_, new, size, think, _) = self.some_connection(number), batch
        self.deliver([(number, new, 5, 0, 0)], 5)
        self.flush_now(old.host, amid)
        host = self.host(server)
        if host.up and old.shard in self.stream.readable():
            self.go(lambda: self.connect(host, old.shard), 20)
            connection = host.connections[-1] if host.connections else old
            if connection.is_idle:
                self.go(lambda: self.give(connection, size, think), amid)

    @rule(number=pick, server=pick, last=arrived(-500, 0), first=arrived(-9000, -3000))
    @precondition(lambda self: self.any_up and len(self.stream.shards) < 8)
    def split_and_read(self, number: int, server: int, last: list[New], first: list[New]) -> None:
        """A shard is split and read to its end; its children begin with what arrived before its last records did."""
        readable = [name for name in self.stream.readable() if not self.stream.shards[name].closed]
        if not readable:
            return
        name = readable[number % len(readable)]
        self.produce(name, last)
        self.split_shard(name)
        self.read_out(self.host(server), name, 12)
        for child in [each for each in self.stream.readable() if name in self.stream.shards[each].parents]:
            self.produce(child, first)
            self.read_out(self.host(server), child, 3)

    def come_back(self, number: int, server: int, batches: list[Delivery], seconds: int) -> None:
        """All daemons fall silent, so that the clock carries the watermark; then one comes again, which has shown less."""
        self.daemon(server, batches)
        self.read_up(5)
        self.play(self.clock.advance(seconds))
        self.promises()
        self.open(number, server, None, 20)
        self.play(self.clock.advance(1.5))

    come_back_1 = precondition(lambda self: self.any_up)(
        rule(number=pick, server=pick, batches=bursts, seconds=st.sampled_from([8, 15]))(come_back)
    )
    come_back_2 = precondition(lambda self: self.any_up)(
        rule(number=pick, server=pick, batches=bursts, seconds=st.sampled_from([8, 15]))(come_back)
    )

    @rule(number=pick)
    @precondition(lambda self: self.idle)
    def checkpoint(self, number: int) -> None:
        """What a connection may checkpoint; only one that has the lease can."""
        self.store(self.some_connection(number))

    @rule(number=pick, turns=turns)
    @precondition(lambda self: self.over)
    def end(self, number: int, turns: int) -> None:
        connection = self.over[number % len(self.over)]
        self.go(partial(self.send_end, connection), turns)

    @rule(number=pick, turns=turns)
    @precondition(lambda self: self.idle)
    def drain(self, number: int, turns: int) -> None:
        connection = self.some_connection(number)
        self.go(lambda: connection.send(connection.alive.drain), turns)

    @rule(number=pick, turns=turns)
    @precondition(lambda self: self.idle)
    def lose(self, number: int, turns: int) -> None:
        connection = self.some_connection(number)
        self.go(lambda: connection.send(connection.lost), turns)

    @rule(number=pick)
    def disconnect(self, number: int) -> None:
        connections = [each for host in self.hosts for each in host.connections]
        if connections:
            self.go(connections[number % len(connections)].leave)

    # Time.

    @rule(turns=turns)
    def turn(self, turns: int) -> None:
        self.go(turns=turns)

    @rule(seconds=st.sampled_from([0.1, 1, 1, 2, 4, 8, 15]))
    def wait(self, seconds: float) -> None:
        self.play(self.clock.advance(seconds))

    @rule(seconds=st.sampled_from([20, 70, 700, 5000]))
    def leap(self, seconds: int) -> None:
        """Everything stands still for long, as when the host sleeps: retentions and time limits are over at once."""
        self.clock._now_ns += seconds * 10**9
        self.play(self.clock.advance(1))

    @rule(server=pick, turns=turns)
    @precondition(lambda self: self.any_up)
    def flush(self, server: int, turns: int) -> None:
        host = self.host(server)
        if host.up:
            self.flush_now(host, turns)

    # Failures.

    @rule(jobs=st.integers(1, 5), failure=st.sampled_from([WindowFailed, DriverLost]))
    def fail_jobs(self, jobs: int, failure: type[Exception]) -> None:
        self.failing_jobs, self.failure = jobs, failure

    @rule(server=pick, works=st.booleans())
    @precondition(lambda self: self.any_up)
    def engine(self, server: int, works: bool) -> None:
        """Spark is away, or back."""
        self.engine_of(server, works=works)

    @rule(server=pick, window=pick)
    @precondition(lambda self: self.any_up)
    def retry(self, server: int, window: int) -> None:
        """An operator's."""
        self.retry_windows(self.host(server), window)

    @rule(server=pick, calls=st.integers(0, 12), after=st.booleans(), turns=turns)
    @precondition(lambda self: self.any_up)
    def fail(self, server: int, calls: int, after: bool, turns: int) -> None:
        """The ledger or the disk fails once, perhaps after the call took effect."""
        trouble = self.host(server).trouble
        trouble.fail_in, trouble.fail_after = calls, after
        self.go(turns=turns)

    def run_short(self, server: int, lacking: str | None, batches: list[Delivery], turns: int) -> None:
        """Nothing becomes durable while daemons read on: writes fail, or the ledger does not answer (None)."""
        self.daemon(server, [])
        trouble = self.host(server).trouble
        if lacking is None:
            trouble.awake.clear()
        trouble.lacking = lacking
        self.deliver(batches, 5)
        self.promises()
        trouble.lacking = None
        self.go(trouble.awake.set, turns)

    lacks = st.sampled_from(["write", "register", None])
    run_short_1 = precondition(lambda self: self.any_up)(
        rule(server=pick, lacking=lacks, batches=floods, turns=turns)(run_short)
    )
    run_short_2 = precondition(lambda self: self.any_up)(
        rule(server=pick, lacking=lacks, batches=floods, turns=turns)(run_short)
    )

    @rule(server=pick, calls=st.integers(1, 30), after=st.booleans())
    @precondition(lambda self: self.any_up)
    def die_later(self, server: int, calls: int, after: bool) -> None:
        self.host(server).trouble.die_in(calls, after=after)

    @rule(server=pick)
    @precondition(lambda self: self.any_up)
    def crash(self, server: int) -> None:
        self.play(self.host(server).kill())

    @rule(server=pick)
    @precondition(lambda self: self.any_up)
    def stop(self, server: int) -> None:
        """A stop in order, as far as it comes: rows durable, connections closed, out of the ledger."""
        host = self.host(server)
        if host.up:
            self.play(self.clock.drive(self.leave(host), step=0.2))

    @rule(server=pick, renamed=st.booleans(), dies=st.none() | st.integers(1, 30), turns=turns)
    @precondition(lambda self: self.any_down)
    def start(self, server: int, renamed: bool, dies: int | None, turns: int) -> None:
        """A process starts, or dies on the way: under its old name or a new one."""
        host = self.host(server)
        if host.task is None or host.task.done():
            self.go(lambda: self.begin_life(host, renamed, dies), turns)


class FleetMachine(PipelineMachine):
    """Two servers on one ledger: leases move between them, and each can hang and come back after it was buried."""

    servers: ClassVar[int] = 2

    @rule(number=pick, amid=st.none() | turns, turns=turns)
    @precondition(lambda self: self.idle)
    def move(self, number: int, amid: int | None, turns: int) -> None:
        """A lease goes to the other server; the connection that had it goes on for a while."""
        connection = self.some_connection(number)
        other = next(host for host in self.hosts if host is not connection.host)
        if other.up and connection.has_lease(self.stream):
            if amid is not None:
                self.flush_now(connection.host, amid)
            self.go(lambda: self.connect(other, connection.shard), turns)

    @rule(server=pick, turns=turns)
    def hang(self, server: int, turns: int) -> None:
        """A server stops between two calls to its ledger: swapped out, or behind a disk that does not answer."""
        self.host(server).trouble.awake.clear()
        self.go(turns=turns)

    @rule(server=pick, batches=bursts, seconds=st.sampled_from([0, 2, 8]))
    @precondition(lambda self: self.idle)
    def hang_for_a_while(self, server: int, batches: list[Delivery], seconds: int) -> None:
        """One server hangs while daemons read on at the other."""
        self.hang(server, 0)
        self.daemon(server + 1, batches)
        self.play(self.clock.advance(seconds))
        self.wake(server, 3)

    @rule(server=pick, batches=bursts, seconds=st.sampled_from([2, 8]), turns=turns)
    @precondition(lambda self: self.idle)
    def hang_in_a_job(self, server: int, batches: list[Delivery], seconds: int, turns: int) -> None:
        """One server hangs while it computes windows: long enough, and the other does so in its place."""
        self.engine_of(server, works=False)
        self.daemon(server, batches)
        self.play(self.clock.advance(6))
        self.hang(server, 0)
        self.play(self.clock.advance(seconds))
        self.engine_of(server, works=True)
        self.wake(server, turns)

    @rule(server=pick, turns=turns)
    def wake(self, server: int, turns: int) -> None:
        self.go(self.host(server).trouble.awake.set, turns)
