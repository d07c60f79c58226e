"""One world from one seed: real servers over a virtual loop, a stream, a daemon, and everything that goes wrong.

Nothing of a server is replaced but what lies at its edges: threads, sockets, time, names of files, and Spark. Servers
are killed and started again over the same folder; the daemon's JVM is killed, loses leases, and delivers again with
other borders; ledger, disk and engine fail before or after they took effect.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import orjson
from simulation import counted, handlers, timed, timed_handlers
from simulation.faults import Faults, FaultyStore
from simulation.operators import Operator
from simulation.oracles import (
    Memory,
    Positions,
    Violated,
    WatchedLeases,
    WatchedStream,
)
from simulation.ordered import numbered
from simulation.outputs import Outputs, is_timer
from simulation.plan import Plan
from simulation.servers import Supervised
from simulation.tables import in_memory
from support.virtual_loop import LoopClock, VirtualLoop
from support.virtual_process import VirtualExecutor, VirtualWorker, stand_ins

from mldserver.assembly import ledger_of
from mldserver.base.threads import WorkerThread
from mldserver.config.resolve import resolve
from mldserver.config.settings import Settings
from mldserver.coordinator.core.flush import Buffer
from mldserver.output.store import OutputStore
from mldserver.testing import FakeMLD, Habits
from mldserver.testing.daemon import Form
from mldserver.testing.daemon_session import DaemonSession

LONGEST_SECONDS = 2 * 3600.0
"""A world that has not come to its end by then never will."""
MISSING_SECONDS = 12
_NOWHERE = "127.0.0.1:1"


class Daemon(FakeMLD):
    """A worker whose shards go each to one of several servers, another one at every connection."""

    servers: list[Supervised]
    dice: random.Random
    stream: WatchedStream

    def stay_away(self, seconds: float) -> None:
        """Kill the JVM; its supervisor starts it again after so long."""
        self._backoff = seconds
        self.kill()

    def _new_session(self, shard_id: str) -> DaemonSession:
        self._backoff = 1.0
        self.stream.connected(shard_id)
        for server in self.servers:
            server.unread = None
        addresses = [each.address for each in self.servers if each.address is not None]
        self.address = self.dice.choice(addresses or [_NOWHERE])
        return super()._new_session(shard_id)


@dataclass
class World:
    """Everything of one run."""

    plan: Plan
    folder: Path
    loop: VirtualLoop
    dice: random.Random
    positions: Positions
    memory: Memory
    trace: list[str] = field(default_factory=list)
    holding: asyncio.TaskGroup = field(init=False)

    def __post_init__(self) -> None:
        plan = self.plan
        self.clock = LoopClock(self.loop)
        self.stream = WatchedStream(plan.shards, seed=plan.seed, start_ms=self.clock.now_ms())
        self.outputs = Outputs(plan, self.stream, self.folder / "out", self.positions)
        self.faults = Faults(plan, self.dice, self.positions, self.note, self.outputs, self.clock)
        self.leases = WatchedLeases(seed=plan.seed, throttle=plan.throttle)
        self.stream.clock = self.clock
        self.stream.prefetch_ms = plan.prefetch_ms
        self.stream.positions = self.leases.positions = self.positions
        self.mld = Daemon(
            self.stream,
            _NOWHERE,
            habits=Habits(
                form=plan.form,
                seed=plan.seed,
                max_records=plan.max_records,
                idle_seconds=0.7,
                checkpoint_seconds=plan.checkpoint_seconds,
            ),
            leases=self.leases,
            clock=self.clock,
            supervised=True,
            keep_history=False,
        )
        settings = self._settings()
        self.servers = [
            Supervised(
                name,
                plan,
                replace(settings, server_id=name if plan.fixed_name else None),
                LoopClock(self.loop),
                self.faults,
                self.stream,
            )
            for name in ("left", "right", "third")[: plan.servers]
        ]
        self.timers = random.Random(f"{plan.seed}/timers")
        self.servers[0].clock.step(plan.ahead)
        self.mld.servers, self.mld.dice = self.servers, self.dice
        self.ledger = ledger_of(settings, server_id="operator", clock=self.clock)
        self.operator = Operator(plan, self.dice, self.ledger, self.faults, self.clock)

    def _settings(self) -> Settings:
        plan = self.plan
        fixed = {
            "handler": f"simulation.{'timed_' * plan.timed}handlers:{plan.handler_class}",
            "pipeline": "world",
            "out": str(self.folder / "out"),
            "listen": "127.0.0.1:0",
            "flush_interval": f"{round(plan.flush_seconds * 1000)} ms",
            "buffer_bytes": str(plan.buffer_bytes),
            "flush_bytes": str(min(64 << 20, plan.buffer_bytes)),
            "idle_time": "6 s",
            "quiet_time": "30 s",
            "window_concurrency": str(plan.jobs),
            "retry_base": "50 ms",
            "workers": "inline",
            "server_timeout": "8 s",
            "stream": "world" if plan.listed else None,
            "late": plan.late,
            "recompute_delay": "2 s",
            "max_ahead": "5 s",
            "segment_disk_bytes": str(plan.disk_bytes),
            "missing_limit": f"{MISSING_SECONDS} s" if plan.outage else "10 min",
            "answer_deadline": "2 s" if plan.handler == "Slowly" else "20 s",
            "retention": plan.retention,
            "on_failure": plan.on_failure,
            "on_key_failure": "park" if plan.parks else "continue",
            "window_on_failure": plan.window_on_failure,
            "ledger": "dynamodb://ledgers?region=eu-central-1" if plan.table else None,
        }
        constants = {"settle_time_ms": 2000, "retry_seconds": (0.5, 5.0)}
        return replace(resolve(fixed, environ={}, folder=self.folder), constants=constants)

    def note(self, text: str) -> None:
        self.trace.append(f"{self.loop.time():10.4f} {text}")

    # The stream.

    async def produce(self) -> None:
        """Put records and change shards over time, then end the stream."""
        plan, dice = self.plan, self.dice
        changes = ["split"] * plan.splits + ["merge"] * plan.merges
        moments = [(round(dice.uniform(0, plan.seconds), plan.digits), "put") for _ in range(plan.records)]
        moments += [(dice.uniform(0, plan.seconds), change) for change in changes]
        for number, (at, what) in enumerate(sorted(moments)):
            paused = plan.pause if at > plan.seconds / 2 else 0.0
            await self.clock.sleep(at + paused - self.loop.time())
            if what == "put":
                self._put(number)
            elif what == "split":
                self.stream.split(dice.choice(self.stream.open_shards))
            elif pairs := self.stream.adjacent_pairs():
                self.stream.merge(*dice.choice(pairs))
        self.faults.calm = True
        self.leases.throttle = 0.0
        self.note("calm")
        await self.clock.sleep(dice.choice((0.0, 5.0, 40.0)))
        self.stream.end()

    def _put(self, number: int) -> None:
        now_ms, size = self.clock.now_ms(), 1
        if self.faults.hit(self.plan.steps_back):
            now_ms -= self.dice.randint(1, 6000)
        if self.faults.hit(self.plan.aggregates):
            size = self.dice.randint(2, 4)
        key = f"key-{self.dice.randrange(self.plan.keys) if self.plan.keys else number}"
        users = [(key, self._payload(10 * number + sub)) for sub in range(size)]
        if size > 1:
            self.stream.put_aggregate(users, arrival_ms=now_ms)
        else:
            self.stream.put(users[0][1], users[0][0], arrival_ms=now_ms)

    def _fate(self) -> int:
        """How many calls for a record fail; -1: all."""
        for odds, fails in (
            (self.plan.poison, (-1, -1)),
            (self.plan.stubborn, (3, 7)),
            (self.plan.flaky, (1, 2)),
        ):
            if self.faults.hit(odds):
                return self.dice.randint(*fails)
        return 0

    def _payload(self, number: int) -> bytes:
        at = self.clock.now_ms() - self.dice.randint(0, self.dice.choice((100, 1500, 9000)))
        if self.faults.hit(self.plan.future):
            at += self.dice.choice((60_000, 70 * 365 * 86_400_000, 86_400_000 + number * 4000))
            self.faults.tell("dated ahead", str(number))
        slow = self.dice.choice((0.0, 0.0, 0.0, 0.01, self.plan.slowest))
        fails = self._fate()
        none = not fails and self.faults.hit(self.plan.rowless)
        told = {"n": number, "at": at, "fails": fails, "slow": slow, "none": none}
        if self.plan.timed:
            told |= {"put": self.clock.now_ms(), "timers": list(self._acts())}
        return orjson.dumps(told | ({"reset": True} if self.faults.hit(self.plan.resets) else {}))

    def _acts(self) -> Iterator[dict[str, Any]]:
        """What a record does with timers of its key."""
        dice = self.timers
        for _ in range(dice.choice((0, 1, 1, 2))):
            callback = dice.choice(("alarm", "alarm", "chime", "brief"))
            act: dict[str, Any] = {"timer": callback + dice.choice(("", "/a", "/b"))}
            if dice.random() < 0.25:
                yield act
                continue
            ms = dice.choice((-4000, 0, 700, 3000, 3000, 9000, 25_000)) + dice.choice(
                (0, dice.randint(0, 2000))
            )
            at = self.plan.form is Form.V1 or dice.random() < 0.3
            act |= {"due": self.clock.now_ms() + ms} if at else {"after": max(ms, 0)}
            fate = dice.random()
            fails = dice.choice((-1, 3, 4)) if fate < self.plan.poison + self.plan.stubborn else 0
            act["fails"] = dice.choice((1, 2)) if not fails and fate < 0.3 else fails
            if dice.random() < 0.15:
                act["drops"] = dice.choice(("alarm", "chime", "brief")) + dice.choice(("", "/a", "/b"))
            yield act | {"again": [dice.choice((0, 500, 4000)) for _ in range(dice.choice((0, 0, 0, 1, 3)))]}

    # What goes wrong.

    async def trouble(self) -> None:
        """Let things go wrong at moments of their own."""
        plan, dice = self.plan, self.dice
        acts = [self._kill] * plan.kills + [self._kill_jvm] * plan.jvm_kills
        acts += [self._drop] * plan.drops + [self._lose] * plan.lost_leases
        acts += [self._stall] * plan.stalls + [self._restart] * plan.restarts
        acts += [self._step_clock] * plan.clock_steps + [self._hold] * plan.holds
        acts += [self._stay_away] * bool(plan.outage)
        seconds = plan.seconds + plan.pause
        moments = [(dice.uniform(0, seconds), n, act) for n, act in enumerate(acts)]
        if plan.pause and plan.troubled:
            # The clock has carried the watermark by then, beyond what the shards have shown that come again.
            moments.append((plan.seconds / 2 + plan.pause - 1, len(acts), self._drop))
        async with asyncio.TaskGroup() as self.holding:
            for at, _, act in sorted(moments):
                await self.clock.sleep(at - self.loop.time())
                act()

    def _kill(self) -> None:
        process = self.dice.choice(self.servers).process
        if process is not None and not process.dead:
            self.faults.tell("killed", process.name)
            self.faults.kill(process)

    def _stall(self) -> None:
        process, seconds = self.dice.choice(self.servers).process, self.dice.choice((1.0, 6.0, 25.0))
        if process is not None:
            self.faults.tell("stalled", f"{process.name} for {seconds} s")
            process.stalled_until = self.loop.time() + seconds

    def _restart(self) -> None:
        server = self.dice.choice(self.servers)
        self.faults.tell("restarted", server.name)
        server.restart()

    def _step_clock(self) -> None:
        steps = (-172_800.0, -8.0, 10.0, 172_800.0) if self.plan.days else (-3600.0, -8.0, 10.0, 3600.0)
        server, seconds = self.dice.choice(self.servers), self.dice.choice(steps)
        self.faults.tell("clock set", f"{server.name} by {seconds} s")
        server.clock.step(seconds)

    def _hold(self) -> None:
        server, seconds = self.dice.choice(self.servers), self.dice.choice((0.5, 3.0, 15.0))
        self.holding.create_task(server.hold(seconds))

    def _kill_jvm(self) -> None:
        self.faults.tell("jvm killed", f"life {self.mld.life}")
        self.mld.kill()

    def _stay_away(self) -> None:
        self.faults.tell("daemon away", f"for {self.plan.outage} s")
        self.mld.stay_away(self.plan.outage)
        for server in self.servers:
            server.unread = self.loop.time(), server.lives

    def _drop(self) -> None:
        if shards := sorted(self.mld.active_shards):
            self.faults.tell("dropped", "one of " + ", ".join(shards))
            self.mld.drop(self.dice.choice(shards))

    def _lose(self) -> None:
        if shards := sorted(self.mld.active_shards):
            self.faults.tell("lease lost", "one of " + ", ".join(shards))
            graceful = self.dice.random() < 0.5
            back = self.dice.choice((0.2, 2.0, 12.0))
            self.mld.lose_lease(self.dice.choice(shards), graceful=graceful, back_after_seconds=back)

    # From the beginning to the end.

    async def live(self) -> None:
        """Run to the end of the stream and the last window. Raises Violated."""
        async with asyncio.timeout(LONGEST_SECONDS), asyncio.TaskGroup() as group:
            for each in self.servers:
                group.create_task(each.run())
            group.create_task(self.produce())
            group.create_task(self.trouble())
            caring = group.create_task(self.operator.run())
            await self.mld.run()
            for each in self.servers:
                await each.finished()
            async with self.operator.visiting:
                caring.cancel()
            await self.operator.finish()
            for each in self.servers:
                each.stop()
        self.note("over")

    async def judge(self) -> None:
        """Compare what came out with the stream. Raises Violated."""
        self.faults.told["throttled"] = self.leases.refused["ThrottlingException"]
        self.faults.told["short of memory"] = self.memory.short
        state = await self.ledger.peek()
        letters = await self.ledger.dead_letters(100_000)
        await self.ledger.close()
        self.outputs.fired_ms = {due_ms for _, due_ms, _ in timed_handlers.fired}
        broken = self.positions.broken + self.outputs.check(letters, self.operator.purged)
        if self.plan.timed:
            start_ms = self.clock.now_ms() - round(self.loop.time() * 1000)
            broken += timed.check(self.outputs, letters, self.operator.purged, state, start_ms)
            self.faults.told["timers fired"] = sum(map(is_timer, self.outputs.rows))
        elif self.plan.keyed:
            broken += counted.check(self.outputs, letters, state)
        if self.plan.keyed:
            self.faults.told["counted late"] = len(self.outputs.letters_ever & self.outputs.rows)
            self.faults.told["inherited"] = sum(store.closed for store in state.stores.values())
        self.faults.told["revised"] = self.outputs.revisions
        if self.plan.early:
            self.faults.told["early results"] = len(self.outputs.early_seen)
        exact = self.plan.form is not Form.V1 or not self.plan.clocks_differ
        if self.plan.calm and self.plan.by_arrival and exact and self.outputs.late:
            broken.append(f"{self.outputs.late} rows are late for no reason")
        broken += [text for text in self.mld.violations if not self._excused(text)]
        broken += [f"{each.shard_id} is not ended" for each in state.shards.values() if not each.ended]
        if broken:
            raise Violated("; ".join(broken))

    def _excused(self, text: str) -> bool:
        """A connection ends under the daemon where the world or a halting handler ended it, or the ledger failed."""
        return self.plan.troubled and "the JVM exits: EOF" in text


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    memory = Path("/dev/shm")
    where = str(memory) if os.access(memory, os.W_OK) else None
    path = tempfile.mkdtemp(prefix="mldserver-world-", dir=where)
    try:
        yield Path(path)
    finally:
        shutil.rmtree(path)


def play(plan: Plan, planted: Mapping[object, object] | None = None) -> World:
    """Run one world to its end. Raises Violated, or whatever ended it early, with the end of its trace as a note.

    ``planted``: classes of the server, and those that stand in for them.
    """
    dice = random.Random(f"{plan.seed}/world")
    names = random.Random(f"{plan.seed}/names")
    positions = Positions()
    memory = Memory(plan.buffer_bytes, positions.broken)
    store = type("FaultyStore", (FaultyStore,), {})
    replaced: dict[object, object] = {
        OutputStore: store,
        WorkerThread: VirtualWorker,
        ThreadPoolExecutor: VirtualExecutor,
        Buffer: memory.buffer,
    }
    handlers.failed.clear()
    timed_handlers.fired.clear()
    with _folder() as folder, stand_ins(replaced | dict(planted or {})):
        loop = VirtualLoop(lambda: plan.latency * dice.choice((0.2, 0.5, 1.0, 1.0, 3.0)))
        loop.set_task_factory(numbered())
        timed_handlers.watch = loop
        with (
            asyncio.Runner(loop_factory=lambda: loop) as runner,
            mock.patch.object(os, "fsync", return_value=None),
            mock.patch.object(os, "getpid", return_value=4711),  # of servers' names
            in_memory(random.Random(f"{plan.seed}/table")) if plan.table else contextlib.nullcontext(),
            mock.patch.object(
                uuid, "uuid4", side_effect=lambda: uuid.UUID(int=names.getrandbits(128), version=4)
            ),
        ):
            world = World(plan, folder, loop, dice, positions, memory)
            store.faults = world.faults
            try:
                runner.run(world.live())
                runner.run(world.judge())
            except BaseException as error:
                error.add_note("\n".join(world.trace[-80:]))
                raise
        return world


def summary(world: World) -> dict[str, Any]:
    """What two runs of one seed must agree on."""
    return {"seconds": world.loop.time(), "calls": world.faults.calls, "trace": world.trace}
