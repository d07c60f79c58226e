"""A whole pipeline without AWS or Java: the real server, a fake stream, and a fake daemon over loopback.

``mldserver sim`` and ``mldserver demo`` run this module; tests use it directly. One seed decides batch borders, splits and
faults. Only how the shards' batches interleave depends on the machine's speed.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import IO, Final, Self

from mldserver.base.clock import Clock, SystemClock, in_time
from mldserver.config.settings import Settings
from mldserver.coordinator.progress import CoordinatorStatus
from mldserver.errors import EXIT_FAULT, EXIT_OPERATOR
from mldserver.jobs.engine import Engine
from mldserver.records import Sequence as Position
from mldserver.server import Server
from mldserver.testing.daemon import Form, NoServer
from mldserver.testing.daemon_session import DaemonHangs, Habits
from mldserver.testing.fake_kinesis import FakeKinesis
from mldserver.testing.fake_mld import EXIT_KILLED, FakeMLD
from mldserver.testing.fake_stream import FakeStream, LeaseTable

_RESTART_SECONDS: Final = 0.5
_LEASE_BACK_SECONDS: Final = 0.5
_TICK_SECONDS: Final = 0.25
_PATIENCE_SECONDS: Final = 1.0
_PROGRESS_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class Faults:
    """What goes wrong, and how often."""

    lost_leases: int = 0
    """Leases that go to another worker and come back; every second one gracefully."""
    throttle: float = 0.0
    """The probability (0 to 1) that a checkpoint is throttled."""
    crashes: int = 0
    """How often the daemon's JVM is killed and started again."""


def build_stream(
    lines: Sequence[bytes],
    *,
    shards: int,
    seed: int,
    splits: int = 0,
    merges: int = 0,
    records_per_second: float = 1000.0,
    start_ms: int,
    arrivals: Sequence[int] | None = None,
    keys: Sequence[str] = (),
    ends: bool = True,
) -> FakeStream:
    """Return a stream with one record for each line, and with splits and merges of shards.

    ``keys``: the partition key of each record; empty: each record has a different one.

    The seed decides where the splits and merges come between the records, and which open shards they take. A merge is
    skipped if no two open shards have adjacent hash ranges. Arrival times begin at ``start_ms`` (milliseconds since the
    epoch), unless ``arrivals`` has one for each line. The stream is ended after the last record, unless ``ends`` is False.
    """
    stream = FakeStream(shards, seed=seed, start_ms=start_ms)
    shape_random = random.Random(f"{seed}/shape")  # noqa: S311  # repeatable, not secret
    changes = [*(["split"] * splits), *(["merge"] * merges)]
    line_numbers = sorted(shape_random.randrange(len(lines) + 1) for _ in changes)
    shape_random.shuffle(changes)
    changes_to_come = list(zip(line_numbers, changes, strict=True))
    for number in range(len(lines) + 1):
        while changes_to_come and changes_to_come[0][0] <= number:
            _, change = changes_to_come.pop(0)
            if change == "split":
                stream.split(shape_random.choice(stream.open_shards))
            elif pairs := stream.adjacent_pairs():
                stream.merge(*shape_random.choice(pairs))
        if number < len(lines):
            arrival_ms = (
                arrivals[number] if arrivals else start_ms + round(number * 1000 / records_per_second)
            )
            stream.put(lines[number], keys[number] if keys else f"key-{number}", arrival_ms=arrival_ms)
    if ends:
        stream.end()
    return stream


@dataclass(frozen=True, slots=True)
class Report:
    """How a simulation went."""

    server_exit: int
    status: CoordinatorStatus | None
    """The server's last snapshot; None if it never started."""
    finished: bool
    """Every record was delivered, and the end of every shard checkpointed."""
    violations: tuple[str, ...]
    exits: tuple[str, ...]
    """Why the daemon's JVM exited, each time."""
    deliveries: int
    refused: dict[str, int] = field(default_factory=dict)
    """Checkpoints refused, by Java exception."""

    @property
    def ok(self) -> bool:
        """Whether everything was delivered, checkpointed and computed, without a violation of the protocol."""
        windows_done = self.status is not None and not self.status.windows_waiting
        return self.server_exit == 0 and self.finished and windows_done and not self.violations

    @property
    def exit_code(self) -> int:
        """0 for success, 2 when the server refused its settings, else 1."""
        if self.ok:
            return 0
        return EXIT_OPERATOR if self.server_exit == EXIT_OPERATOR else EXIT_FAULT


class ServerRun(ABC):
    """One run of a server together with its records: subclasses play them in ``_play_records``."""

    server: Server

    def __init__(self, clock: Clock) -> None:
        """Prepare; ``run`` starts the server."""
        self.clock = clock
        self._activity = "delivering records"
        self._status: CoordinatorStatus | None = None

    @abstractmethod
    async def _play_records(self) -> None:
        """Deliver the records to the server; return when every result is published."""

    @property
    @abstractmethod
    def delivered(self) -> bool:
        """Whether every record was delivered."""

    async def _serve_until_played(self, watch: Callable[[Self], None]) -> int:
        """Run the server until ``_play_records`` has returned (or the server has), then stop it; return its exit code.

        ``watch`` is called with this run a few times a second, for example to print its progress, and once at the end.
        """
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(self.server.run(), name="server")
            playing = group.create_task(self._play_records(), name="play")
            watching = group.create_task(self._watch_at_interval(watch), name="watch")
            await asyncio.wait({serving, playing}, return_when=asyncio.FIRST_COMPLETED)
            playing.cancel()
            await asyncio.wait({playing})
            self.server.stop("the simulation is over")
            if self.halted:
                self.server.force()  # a failed window would wait for an operator, and there is none
            await asyncio.wait({serving})
            watching.cancel()
        watch(self)
        return serving.result()

    async def _wait_until_published(self) -> None:
        """Return when the server has published every window, or a window waits for an operator."""
        while not self.halted:
            if await in_time(self.server.finished(), self.clock, _PATIENCE_SECONDS):
                return

    async def _watch_at_interval(self, watch: Callable[[Self], None]) -> None:
        while True:
            watch(self)
            await self.clock.sleep(_TICK_SECONDS)

    @property
    def status(self) -> CoordinatorStatus | None:
        """The server's latest snapshot; None before its parts are built."""
        with contextlib.suppress(RuntimeError):
            self._status = self.server.status()
        return self._status

    @property
    def halted(self) -> bool:
        """Whether a window has failed for good."""
        status = self.status
        return status is not None and bool(status.windows_halted)

    @property
    def phase(self) -> str:
        """What the run is doing, or waiting for, as text for the progress lines of ``mldserver sim`` and ``demo``."""
        if (status := self.status) is None:
            return "starting the server"
        if not self.delivered:
            return self._activity
        if status.windows_halted:
            return "stopped: a window has failed for good"
        # A stopping server is not ready either, but then no window waits.
        if status.windows_waiting and not self.server.is_ready:
            return "every record is durable and checkpointed; waiting for the engine to start"
        if not status.stream_ended:
            return "waiting for other shards to show up: the stream may not be over yet"
        return "computing windows" if status.windows_waiting else "every window is published"


class ProgressLines:
    """Writes a line when the phase of a run changes, and every few seconds while it does not."""

    def __init__(self, out: IO[str]) -> None:
        """Measure time from now on."""
        self._out = out
        self._began = self._written_at = time.monotonic()
        self._phase = ""

    def __call__(self, run: ServerRun) -> None:
        """Write the elapsed seconds, the phase and counts of ``run``, if its phase is new or the last line is 5 s old."""
        now, phase, status = time.monotonic(), run.phase, run.status
        line_is_recent = now - self._written_at < _PROGRESS_SECONDS
        if phase == self._phase and line_is_recent:
            return
        self._phase, self._written_at = phase, now
        counts = (
            f"  {status.rows_durable:,} rows durable, {status.windows_published:,} windows" if status else ""
        )
        self._out.write(f"{now - self._began:5.1f} s  {phase}{counts}\n")
        self._out.flush()


class Simulation(ServerRun):
    """One run of a server over a fake stream."""

    def __init__(
        self,
        settings: Settings,
        stream: FakeStream,
        *,
        form: Form = Form.KCL3,
        seed: int = 0,
        max_records: int = 1000,
        faults: Faults | None = None,
        engine: Engine | None = None,
        clock: Clock | None = None,
        speed: float | None = None,
        fire_timers: bool = False,
    ) -> None:
        """Prepare a server, and a fake daemon that plays ``stream`` to it. ``settings`` should listen on port 0.

        ``engine``: in place of Spark. ``speed``: seconds of arrival times that are played in one second; None: all at once.
        ``fire_timers``: ``stream`` has not ended. Once its records are durable, fire pending timers without waiting for their
        due times, and end it.
        """
        super().__init__(clock or SystemClock())
        self.stream = stream
        self._speed, self._fires_timers = speed, fire_timers
        self.faults = faults or Faults()
        self.server = Server(settings, engine=engine, clock=clock, kinesis=FakeKinesis(stream, clock).make)
        self._fault_random = random.Random(f"{seed}/faults")  # noqa: S311  # repeatable, not secret
        self._next_loss_is_graceful = False
        self.mld = FakeMLD(
            stream,
            "",
            habits=Habits(form=form, seed=seed, max_records=max_records),
            leases=LeaseTable(seed=seed, throttle=self.faults.throttle),
            clock=clock,
            keep_history=False,
        )

    async def run(self, watch: Callable[[Simulation], None] = lambda _self: None) -> Report:
        """Play the stream to its end, stop the server, and report; ``watch`` is called a few times a second."""
        server_exit = await self._serve_until_played(watch)
        return Report(
            server_exit=server_exit,
            status=self.status,
            finished=self.mld.finished,
            violations=tuple(self.mld.violations),
            exits=tuple(f"{jvm_exit.code}: {jvm_exit.reason}" for jvm_exit in self.mld.exits),
            deliveries=self.mld.records_sent,
            refused=dict(self.mld.leases.refused),
        )

    @property
    def delivered(self) -> bool:
        """Whether every record was delivered, and every shard's end checkpointed."""
        return self.mld.finished

    async def _play_records(self) -> None:
        """Plan the faults, then run the fake daemon until the stream is over, and wait until all windows are published.

        The daemon is started again after each crash that ``Faults.crashes`` plans.
        """
        self.mld.address = await self.server.listening()
        records = max(1, self.stream.records)
        for _ in range(self.faults.crashes):
            self.mld.at(self._fault_random.randint(1, records), self.mld.kill)
        for _ in range(self.faults.lost_leases):
            self.mld.at(self._fault_random.randint(1, records), self._lose_random_lease)
        if (speed := self._speed) is not None:
            # A record becomes readable at its arrival time; that time starts now at the first record, and runs at ``speed``.
            began_ms, shards = self.clock.steady_ms(), self.stream.shards.values()
            first_arrival_ms = min(
                (shard.records[0].arrival_ms for shard in shards if shard.records), default=0
            )
            self.stream.tip_ms = lambda: first_arrival_ms + int((self.clock.steady_ms() - began_ms) * speed)
        async with asyncio.TaskGroup() as group:
            firing = group.create_task(self._fire_and_end()) if self._fires_timers else None
            try:
                while await self.mld.run() == EXIT_KILLED:
                    await self.clock.sleep(_RESTART_SECONDS)
            except (NoServer, DaemonHangs):
                return  # the report shows it: as the server's exit code, or as a violation
            finally:
                if firing is not None:
                    firing.cancel()
        if self.mld.finished:
            await self._wait_until_published()

    async def _fire_and_end(self) -> None:
        """Fire the pending timers once all records are durable, then end the stream."""
        last = {
            shard.id: str(Position(*record.order))
            for shard in self.stream.shards.values()
            for record in shard.records[-1:]
        }

        def is_durable() -> bool:
            at = {row.id: row.position for row in self.server.document().shards}
            return all(at.get(name) == place or self.mld.leases.ended(name) for name, place in last.items())

        while not is_durable():
            await self.clock.sleep(_TICK_SECONDS)
        self._activity = "firing timers"
        await self.server.fire_timers()
        self.stream.end()

    def _lose_random_lease(self) -> None:
        """Move the lease of a connected shard to another worker for a moment: gracefully every second time."""
        shard_id = self._fault_random.choice(sorted(self.mld.active_shards))
        self.mld.lose_lease(
            shard_id, graceful=self._next_loss_is_graceful, back_after_seconds=_LEASE_BACK_SECONDS
        )
        self._next_loss_is_graceful = not self._next_loss_is_graceful
