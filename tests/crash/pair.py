"""A story played to two servers on one ledger: leases move between them, either may die or hang at any time."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import signal
import tempfile
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Final

from crash.held import in_dynamodb, in_sqlite
from crash.lives import Ground, Plan
from crash.local_life import LocalLife
from crash.stories import KINDS, OF_COMMANDS, OF_LAKES, OF_LETTERS, ONLY_IN, Story, check, write_handler
from crash.world import Death, Toll
from support.workers import NAMES, Application

from mldserver.config.kinds import UnixAddress
from mldserver.output.layout import SERVERS, server_tag
from mldserver.server import EXIT_CLEAN, EXIT_FAULT
from mldserver.testing import FakeStream, Habits
from mldserver.testing.fake_stream import Place

SELDOM: Final = frozenset(
    step for step in ONLY_IN if step.startswith(("late.", "revision.", "window.expired"))
)
"""They need rows that come late, and two servers whose leases move wait for each other: such rows come by chance."""
PATIENCE: Final = 4
"""In how many stories a seldom step may be missed before it is let go of: a server that is alone dies at each."""
NEVER: Final = {
    **dict.fromkeys(OF_LETTERS, "no story's dead letters go anywhere but into the ledger, or run again"),
    **dict.fromkeys(OF_COMMANDS, "no story has an operator"),
    **dict.fromkeys(OF_LAKES, "no story has a Spark driver"),
}
"""Steps that no pair comes to, and why: whoever comes to one all the same fails the test."""
HANGS_AT: Final = (
    "segment.written",
    "flush.registering",
    "job.running",
    "attempt.staged",
    "window.committed",
    "window.published",
    "batch.buffered",
)
"""Steps at which a server that hangs still has much to do when it goes on."""
_HUNG_TIMEOUTS: Final = 3
"""After so many timeouts a server that hangs goes on, whether or not it was expired: stopped in a transaction it holds the
lock of a ledger in a file, for which the other waits five seconds."""
_ANY_STEP: Final = Death()


class Movers(Application):
    """Two workers whose leases move, now and then back to a checkpoint that was stored before the last one."""

    def __init__(self, stream: FakeStream, *, seed: int, habits: Habits) -> None:
        super().__init__(stream, seed=seed, habits=habits)
        self._seen: dict[str, list[Place]] = {}

    def pass_on(self, shard_id: str) -> None:
        moves = self.moves
        super().pass_on(shard_id)
        place = self.table.place(shard_id)
        seen = self._seen.setdefault(shard_id, [])
        if self.moves > moves and seen and not self.table.ended(shard_id) and self.random.random() < 0.2:
            # No worker holds the lease at this moment.
            self.table._leases[shard_id].place = self.random.choice(seen)
        seen.append(place)

    async def run(self, pace: float) -> None:
        """Move leases until every shard's end is checkpointed; now and then a daemon dies."""
        while not self.finished:
            self.move_any()
            if self.random.random() < 0.03:
                self.daemons[self.random.choice(NAMES)].kill()
            await asyncio.sleep(pace * (0.02 + self.random.random() * 0.08))


class Pair:
    """One story, one ledger, two daemons, and as many lives of their servers as it takes."""

    never: ClassVar[Mapping[str, str]] = NEVER

    def __init__(
        self,
        root: Path,
        story: Story,
        toll: Toll,
        ground: Ground,
        *,
        kills: int,
        patience_seconds: float = 180.0,
    ) -> None:
        """Die at most ``kills`` times of what ``toll`` holds.

        No life may take longer than ``patience_seconds``: a server that hangs for good fails the test.
        """
        self.story = story
        self._root = root
        self._toll = toll
        self._ground = ground
        self._kills = kills
        self._patience = patience_seconds
        self._dice = random.Random(f"{story.seed}/pair")
        self._hangs = False
        """Whether one of the two is to hang: then the other must live on to expire it."""
        self._served: set[str] = set()
        """Those whose last life is over."""
        self._handler = write_handler(root, story.kind)
        self._pipeline = f"story-{story.seed}"
        self._numbers = itertools.count()
        self._sockets = tempfile.TemporaryDirectory(prefix="crash-")
        habits = Habits(seed=story.seed, max_records=24, idle_seconds=0.01)
        self._movers = Movers(story.stream, seed=story.seed, habits=habits)
        for name, daemon in self._movers.daemons.items():
            daemon.address = f"unix:{self._socket(name)}"

    def _socket(self, name: str) -> Path:
        return Path(self._sockets.name) / name

    def _log(self, name: str) -> Path:
        return self._root / f"{name}.log"

    @property
    def _out(self) -> Path:
        return self._root / "out"

    def _plan(self, name: str, server_id: str, death: Death | None) -> Plan:
        settings = {
            "listen": UnixAddress(self._socket(name)),
            "log_file": self._log(name),
            "log_format": "json",
            "pipeline": self._pipeline,
            "server_id": server_id,
            "server_timeout": self._ground.timeout_seconds,
            "flush_interval": 0.03,
            "settle_time_ms": 80,
            **KINDS[self.story.kind].settings,
            **self._ground.settings,
        }
        if self._ground.dynamodb is not None:
            settings["ledger"] = self._ground.dynamodb
        hangs = death is not None and death.hangs
        stream = self.story.stream if KINDS[self.story.kind].keyed else None
        return Plan(self._out, self._handler, str(self._root), settings, self._ground.environ, stream, hangs)

    async def play(self) -> None:
        """Play the story to its end and compare."""
        with self._sockets:
            async with asyncio.TaskGroup() as group:
                daemons = [group.create_task(each.run()) for each in self._movers.daemons.values()]
                group.create_task(self._movers.run(self._ground.pace))
                for name in NAMES:
                    group.create_task(self._serve(name, daemons))
        place = self._ground.dynamodb
        held = in_sqlite(self._out) if place is None else await in_dynamodb(place, self._pipeline)
        check(self.story, self._out, held, alone=False)
        assert not self._movers.violations(), f"the daemons complain: {self._movers.violations()}"
        assert self._movers.finished, f"not every end is checkpointed: {self._movers.table.checkpoints}"
        self._missed()

    async def _serve(self, name: str, daemons: list[asyncio.Task[int]]) -> None:
        while not await self._live(name, daemons):
            pass
        self._served.add(name)

    async def _live(self, name: str, daemons: list[asyncio.Task[int]]) -> bool:
        """See one life of a server through; True when it was its last."""
        death = self._next_death()
        server_id = self._dice.choice([name, f"{name}-{next(self._numbers)}"])
        lock = self._out / SERVERS / f"{server_tag(server_id)}.lock"
        before = self._told(name)
        life = LocalLife(self._plan(name, server_id, death), self._armed(death))
        await life.start()
        try:
            async with asyncio.timeout(self._patience):
                code = await self._see_through(life, daemons, death, lock)
        except TimeoutError as error:
            raise AssertionError(
                f"armed for {death}, {name} neither died nor ended: {self._state()}"
            ) from error
        finally:
            life.kill()
            self._hangs &= death is None or not death.hangs
        if self._ground.apart and code == -signal.SIGKILL and self._dice.random() < 0.25:
            lock.unlink(missing_ok=True)
        return self._count(death, code, life.met, self._told(name)[len(before) :])

    def _next_death(self) -> Death | None:
        """Choose how a life ends: at an instant, hanging, or at whichever of the steps ahead comes first."""
        if self._kills <= 0 or not self._toll.ahead:
            return None
        self._kills -= 1
        death = self._dice.choice(self._toll.ahead)
        if self._hangs:
            return _ANY_STEP
        self._hangs = death.hangs
        if not death.step:
            return death
        if all(each.step for each in self._toll.ahead) and self._dice.random() < 0.3:
            # What the other server is armed for may need a companion that dies.
            return Death(after_seconds=0.4 + self._dice.random() * 0.8)
        return _ANY_STEP

    def _armed(self, death: Death | None) -> str | None:
        """Return the steps at which a life ends: half of those ahead, so that not every life ends at its start."""
        if death is None or death.after_seconds:
            return None
        if death.hangs:
            return ",".join(f"{step}:{self._dice.randint(1, 4)}" for step in HANGS_AT)
        ahead = [each for each in self._toll.ahead if each.step]
        chosen = self._dice.sample(ahead, max(len(ahead) // 2, min(len(ahead), 4)))
        # Some steps come once in a life: that one is passed at first is tried until a story has missed it.
        times = {each.step: 1 if each.misses else self._dice.choice((1, 1, 2, 3)) for each in chosen}
        times |= dict.fromkeys(self.never, 1)
        return ",".join(f"{step}:{count}" for step, count in times.items())

    def _count(self, death: Death | None, code: int, met: str | None, told: str) -> bool:
        """Note how a life ended; True when it was in good order."""
        assert met not in self.never, f"{met} can happen here: take it off the list of those that cannot"
        expired = code == EXIT_FAULT and '"ServerExpired"' in told
        if death is not None and death.hangs and expired:
            self._toll.died["hangs"] += 1
            self._toll.ahead = deque(each for each in self._toll.ahead if each != death)
        elif death is not None and not death.hangs and code == -signal.SIGKILL:
            self._toll.died[met or ""] += 1
            self._toll.ahead = deque(
                each for each in self._toll.ahead if each != death and (not met or each.step != met)
            )
        elif expired:
            # The machine was too busy for its beats: no fault, but not the end that was meant.
            self._toll.died["silent"] += 1
        elif code != EXIT_CLEAN:
            raise AssertionError(f"armed for {death}, a server ended with {code}: {told[-6000:]}")
        return code == EXIT_CLEAN

    def _missed(self) -> None:
        """Note what this story could have come to and did not."""
        ahead = [
            replace(each, misses=each.misses + (self.story.kind in ONLY_IN.get(each.step, KINDS)))
            for each in self._toll.ahead
        ]
        self._toll.ahead = deque(each for each in ahead if each.step not in SELDOM or each.misses < PATIENCE)
        lost = [str(each) for each in ahead if each.misses > self._toll.patience]
        assert not lost, f"not died in {self._toll.patience} stories: {lost}; {dict(self._toll.died)}"

    async def _see_through(
        self, life: LocalLife, daemons: list[asyncio.Task[int]], death: Death | None, lock: Path
    ) -> int:
        async with asyncio.TaskGroup() as group:
            ended = group.create_task(life.ended())
            operator = group.create_task(self.operate(life))
            over = group.create_task(_tell_over(life, daemons, operator))
            fate = group.create_task(self._meet(life, death, lock))
            await asyncio.wait({ended})
            over.cancel()
            operator.cancel()
            fate.cancel()
        return ended.result()

    async def operate(self, life: LocalLife) -> None:
        """Do what an operator does to a life, until the daemons have delivered everything."""

    async def _meet(self, life: LocalLife, death: Death | None, lock: Path) -> None:
        """Do to a life what it does not do to itself. ``lock``: whoever expires it takes this file away."""
        if death is None:
            return
        if death.after_seconds:
            await asyncio.sleep(death.after_seconds)
            life.kill()
        if death.hangs:
            while not life.hangs:  # noqa: ASYNC110  # another process has no event to wait on
                await asyncio.sleep(0.02)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_HUNG_TIMEOUTS * self._ground.timeout_seconds):
                    while self._awaits_burial(lock):  # noqa: ASYNC110  # see above
                        await asyncio.sleep(0.05)
            await asyncio.sleep(self._dice.random())
            life.go_on()

    def _awaits_burial(self, lock: Path) -> bool:
        """Whether a server that hangs may still be expired: who has come to its own end expires nobody."""
        return lock.exists() and not self._served

    def _told(self, name: str) -> str:
        log = self._log(name)
        return log.read_text("utf-8", "replace") if log.exists() else ""

    def _state(self) -> str:
        told = [f"checkpoints: {self._movers.table.checkpoints}"]
        for name, daemon in self._movers.daemons.items():
            told.append(f"{name}: connected: {daemon.active_shards}, exits: {daemon.exits[-2:]}")
            told += self._told(name).splitlines()[-20:]
        return "\n".join(told)


async def _tell_over(life: LocalLife, daemons: list[asyncio.Task[int]], operator: asyncio.Task[None]) -> None:
    await asyncio.wait(daemons)
    operator.cancel()
    life.stream_is_over()
