"""A story played to two servers on one ledger: leases move between them, either may die or hang at any time."""

from __future__ import annotations

import asyncio
import itertools
import random
import signal
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from crash.held import in_dynamodb, in_sqlite
from crash.lives import Plan
from crash.local_life import LocalLife
from crash.stories import KINDS, ONLY_IN, check, write_handler
from crash.world import Death
from support.workers import NAMES, Application

from mldserver.config.kinds import UnixAddress
from mldserver.output.layout import SERVERS, server_tag
from mldserver.server import EXIT_CLEAN, EXIT_FAULT
from mldserver.testing import Habits

if TYPE_CHECKING:
    from crash.stories import Story
    from crash.world import Toll

    from mldserver.config import DynamoPlace
    from mldserver.testing import FakeStream
    from mldserver.testing.leases import Place

SELDOM: Final = frozenset(
    step for step in ONLY_IN if step.startswith(("late.", "revision.", "window.expired"))
)
"""They need rows that come late, and two servers whose leases move wait for each other: such rows come by chance."""
EXTRA: Final = 4
"""How many deaths more than those that were asked for a story has at its end."""
_EXTRA: Final = -1
PATIENCE: Final = 4
"""In how many stories a seldom step may be missed, or a server may hang without being taken for dead."""


@dataclass(frozen=True, slots=True)
class Ground:
    """What the two servers have in common."""

    dynamodb: DynamoPlace | None = None
    """Where the ledger is, if not in a file."""
    environ: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    pace: float = 1.0
    """How long leases stay where they are, beside what a ledger in a file allows."""
    timeout_seconds: float = 1.2
    """``server_timeout``."""
    apart: bool = False
    """Whether they are on hosts of their own: now and then the lock of a dead server cannot be seen."""


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
            "settle_time": 0.08,
            "quiet_time": 600.0,
            "idle_time": 600.0,
            "recompute_delay": 0.05,
            **KINDS[self.story.kind].settings,
            **self._ground.settings,
        }
        if self._ground.dynamodb is not None:
            settings["ledger"] = self._ground.dynamodb
        hangs = death is not None and death.hangs
        return Plan(self._out, self._handler, str(self._root), settings, self._ground.environ, hangs)

    async def play(self) -> None:
        """Play the story to its end and compare."""
        with self._sockets:
            async with asyncio.TaskGroup() as group:
                daemons = [group.create_task(each.run()) for each in self._movers.daemons.values()]
                group.create_task(self._movers.run(self._ground.pace))
                for name in NAMES:
                    group.create_task(self._serve(name, daemons))
            # Files that a server was about to delete when it died may be of one that lived on: the next start deletes them.
            self._kills = 0
            await self._serve(NAMES[0], daemons)
        place = self._ground.dynamodb
        held = in_sqlite(self._out) if place is None else await in_dynamodb(place, self._pipeline)
        check(self.story, self._out, held, alone=False)
        assert not self._movers.violations(), f"the daemons complain: {self._movers.violations()}"
        assert self._movers.finished, f"not every end is checkpointed: {self._movers.table.checkpoints}"

    async def _serve(self, name: str, daemons: list[asyncio.Task[int]]) -> None:
        while not await self._live(name, daemons):
            pass

    async def _live(self, name: str, daemons: list[asyncio.Task[int]]) -> bool:
        """See one life of a server through; True when it was its last."""
        death = self._next_death()
        number = next(self._numbers)
        server_id = self._dice.choice([name, f"{name}-{number}"])
        before = self._told(name)
        step = str(death) if death is not None and death.step else None
        life = LocalLife(self._plan(name, server_id, death), step)
        await life.start()
        try:
            async with asyncio.timeout(self._patience):
                code = await self._see_through(life, daemons, death)
        except TimeoutError as error:
            raise AssertionError(
                f"armed for {death}, {name} neither died nor ended: {self._state()}"
            ) from error
        finally:
            life.kill()
        if self._ground.apart and code == -signal.SIGKILL and self._dice.random() < 0.25:
            (self._out / SERVERS / f"{server_tag(server_id)}.lock").unlink(missing_ok=True)
        return self._count(death, code, self._told(name)[len(before) :])

    def _next_death(self) -> Death | None:
        if self._kills <= 0:
            return None
        self._kills -= 1
        kind = self.story.kind
        death = next((each for each in self._toll.ahead if kind in ONLY_IN.get(each.step, KINDS)), None)
        if death is not None:
            self._toll.ahead.remove(death)
            return death
        # What the other server is armed for may need a companion that dies.
        self._kills = min(self._kills, EXTRA)
        return Death(after_seconds=0.4 + self._dice.random() * 0.8, misses=_EXTRA)

    def _count(self, death: Death | None, code: int, told: str) -> bool:
        """Note how a life ended; True when it was in good order."""
        buried = code == EXIT_FAULT and '"ServerBuried"' in told
        if code == EXIT_CLEAN:
            if death is not None and death.hangs and death.misses >= PATIENCE and self._toll.died["hangs"]:
                # Nobody took it for dead: the other was at its own end, or waited for a lock that this one held.
                self._toll.died["outlived"] += 1
            elif death is not None and death.step in SELDOM and death.misses == PATIENCE:
                self._toll.ahead.append(Death(after_seconds=0.3))
            elif death is not None and death.misses != _EXTRA:
                self._toll.missed(death)
            return True
        if death is not None and death.hangs and buried:
            self._toll.died["hangs"] += 1
        elif death is not None and not death.hangs and code == -signal.SIGKILL:
            self._toll.died[death.step] += 1
        elif buried:
            # The machine was too busy for its beats: no fault, but not the end that was meant.
            self._toll.died["silent"] += 1
            if death is not None:
                self._toll.ahead.append(death)
        else:
            raise AssertionError(f"armed for {death}, a server ended with {code}: {told[-6000:]}")
        return False

    async def _see_through(
        self, life: LocalLife, daemons: list[asyncio.Task[int]], death: Death | None
    ) -> int:
        async with asyncio.TaskGroup() as group:
            ended = group.create_task(life.ended())
            over = group.create_task(_tell_over(life, daemons))
            fate = group.create_task(self._meet(life, death))
            await asyncio.wait({ended})
            over.cancel()
            fate.cancel()
        return ended.result()

    async def _meet(self, life: LocalLife, death: Death | None) -> None:
        """Do to a life what it does not do to itself."""
        if death is None:
            return
        if death.after_seconds:
            await asyncio.sleep(death.after_seconds)
            life.stop() if death.hangs else life.kill()
        if death.hangs:
            while not life.hangs:  # noqa: ASYNC110  # another process has no event to wait on
                await asyncio.sleep(0.02)
            await asyncio.sleep(self._ground.timeout_seconds * self._dice.uniform(1.2, 2.2))
            life.go_on()

    def _told(self, name: str) -> str:
        log = self._log(name)
        return log.read_text("utf-8", "replace") if log.exists() else ""

    def _state(self) -> str:
        told = [f"checkpoints: {self._movers.table.checkpoints}"]
        for name, daemon in self._movers.daemons.items():
            told.append(f"{name}: connected: {daemon.active_shards}, exits: {daemon.exits[-2:]}")
            told += self._told(name).splitlines()[-20:]
        return "\n".join(told)


async def _tell_over(life: LocalLife, daemons: list[asyncio.Task[int]]) -> None:
    await asyncio.wait(daemons)
    life.stream_is_over()
