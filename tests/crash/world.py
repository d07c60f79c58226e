"""A story played to servers that die: each life is armed with one death, the daemon delivers again, until all is out."""

from __future__ import annotations

import asyncio
import itertools
import random
import signal
import tempfile
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from crash.held import in_dynamodb, in_sqlite
from crash.lives import Ground, Life, Plan
from crash.local_life import LocalLife
from crash.stories import KINDS, ONLY_IN, Story, check, shown_twice, told, write_handler

from mldserver.config.kinds import UnixAddress
from mldserver.testing import FakeMLD, Habits

if TYPE_CHECKING:
    import pyarrow as pa

RECORDS: Final = 500
MISSES: Final = 20
WORKERS_EVERY: Final = 7
"""One in so many stories, of each kind in turn, is played to servers with a worker process, whose start costs a life a
second of the processor. In the others handlers run inside the server."""


@dataclass(frozen=True, slots=True)
class Death:
    """One way to die: at a step for the n-th time, or some time after the start."""

    step: str = ""
    times: int = 1
    after_seconds: float = 0.0
    hangs: bool = False
    """It is stopped there, and goes on when others have taken it for dead."""
    misses: int = 0

    def __str__(self) -> str:
        instant = f"after {self.after_seconds:.3f} s" if self.after_seconds else "whatever comes first"
        return f"{self.step}:{self.times}" if self.step else instant


@dataclass(slots=True)
class Toll:
    """What is still to be died, and what was."""

    ahead: deque[Death]
    died: Counter[str] = field(default_factory=Counter)
    """Kills by step; the key of random instants is the empty text."""
    patience: int = MISSES
    """In how many stories a death may be missed."""
    with_workers: int = 0
    """How many of those that died had a worker process."""

    @classmethod
    def of(cls, deaths: Iterable[Death]) -> Toll:
        """Begin with these deaths."""
        return cls(deque(deaths))

    def next(self, kind: str) -> Death | None:
        """Take the next death that a story of this kind can come to."""
        found = next((each for each in self.ahead if kind in ONLY_IN.get(each.step, KINDS)), None)
        if found is not None:
            self.ahead.remove(found)
        return found

    def missed(self, death: Death) -> None:
        """A story ended before the death came: it is tried again early in another, at its first occasion."""
        assert death.misses < self.patience, f"{death.step} was not reached in {self.patience} stories"
        times = death.times if death.misses == 0 else 1
        # Not as a story's first: some steps are those of a server that comes after one that died.
        while len(self.ahead) < 2:
            self.ahead.append(Death(after_seconds=0.3))
        self.ahead.insert(2, replace(death, times=min(times, 2), misses=death.misses + 1))


class World:
    """One story, one output folder, one daemon, and as many servers, one after the other, as it takes."""

    def __init__(
        self,
        root: Path,
        story: Story,
        toll: Toll,
        *,
        kills: int,
        life: Callable[[Plan, str | None], Life] = LocalLife,
        settings: dict[str, Any] | None = None,
        patience_seconds: float = 120.0,
        tables: Callable[[], Iterable[tuple[str, pa.Table]]] = tuple,
        ground: Ground | None = None,
    ) -> None:
        """Die at most ``kills`` times of what ``toll`` holds; ``life`` makes a life armed for a step.

        ``tables`` reads windows that are published elsewhere than below ``root``. ``ground`` says where the ledger is; None: in a
        file. No life may take longer than ``patience_seconds``: a server that hangs fails the test.
        """
        self.story = story
        self._toll = toll
        self._kills = kills
        self._life = life
        self._patience = patience_seconds
        self._tables = tables
        self._dice = random.Random(f"{story.seed}/world")
        self._out = root / "out"
        # Not below ``root``: the path of a Unix socket may have 107 bytes.
        self._sockets = tempfile.TemporaryDirectory(prefix="crash-")
        address = Path(self._sockets.name) / "server"
        self._ground = ground = ground or Ground()
        told_settings = {
            "pipeline": f"story-{story.seed}",
            "listen": UnixAddress(address),
            "flush_interval": 0.03,
            "settle_time_ms": 80,
            "quiet_time": 600.0,
            "idle_time": 600.0,
            "log_file": root / "log",
            "log_format": "json",
            "recompute_delay": 0.05,
            **KINDS[story.kind].settings,
            **(settings or {}),
            **ground.settings,
        }
        if ground.dynamodb is not None:
            told_settings["ledger"] = ground.dynamodb
        handler = write_handler(root, story.kind)
        stream = story.stream if KINDS[story.kind].keyed else None
        self._plan = Plan(self._out, handler, str(root), told_settings, ground.environ, stream)
        self._mld = FakeMLD(
            story.stream,
            f"unix:{address}",
            habits=Habits(seed=story.seed, max_records=24, idle_seconds=0.01),
            supervised=True,
            backoff_seconds=0.01,
            keep_history=False,
        )
        for number in sorted(self._dice.sample(range(10, RECORDS), 5)):
            self._mld.at(number, self._disturb)

    def _disturb(self) -> None:
        """Move a lease, with or without a word, or kill the daemon."""
        what = self._dice.choice(["lose", "hand over", "kill", "refuse"])
        shards = sorted(self._mld.active_shards)
        if what == "kill":
            self._mld.kill()
        elif what == "refuse":
            self._mld.leases.refuse(self._dice.choice(shards))
        else:
            graceful = what == "hand over"
            self._mld.lose_lease(self._dice.choice(shards), graceful=graceful, back_after_seconds=0.02)

    async def play(self) -> None:
        """Play the story to its end and compare."""
        with self._sockets:
            async with asyncio.TaskGroup() as group:
                daemon = group.create_task(self._mld.run(), name="daemon")
                while not await self._live(daemon):
                    pass
        await self.compare()

    async def compare(self) -> None:
        """Compare what came out with the story."""
        place = self._ground.dynamodb
        held = in_sqlite(self._out) if place is None else await in_dynamodb(place, f"story-{self.story.seed}")
        check(self.story, self._out, held, tables=self._tables())
        serious = [told for told in self._mld.violations if "EOF" not in told and "reset" not in told]
        assert not serious, f"the daemon complains: {serious}"
        assert self._mld.finished, f"not every shard's end is checkpointed: {self._mld.checkpoints}"

    async def _live(self, daemon: asyncio.Task[int]) -> bool:
        """See one life of the server through; True when it was the last."""
        death = self._toll.next(self.story.kind) if self._kills > 0 else None
        life = self._life(self._plan, str(death) if death is not None and death.step else None)
        await life.start()
        try:
            async with asyncio.timeout(self._patience):
                code = await self._see_through(life, daemon, death)
        except TimeoutError as error:
            raise AssertionError(
                f"armed for {death}, the server neither died nor ended: {self._told()}"
            ) from error
        finally:
            life.kill()
        assert shown_twice(self._out) == set()
        if code == -signal.SIGKILL and death is not None:
            self._kills -= 1
            self._toll.died[death.step] += 1
            self._toll.with_workers += self._plan.settings.get("workers") is not None
            return False
        assert code == 0, f"the server ended with {code}: {self._tail()}"
        if death is not None:
            self._toll.missed(death)
        return True

    async def _see_through(self, life: Life, daemon: asyncio.Task[int], death: Death | None) -> int:
        async with asyncio.TaskGroup() as group:
            ended = group.create_task(life.ended())
            operator = group.create_task(self.operate(life))
            over = group.create_task(_tell_over(life, daemon, operator))
            timer = group.create_task(_kill_after(life, death.after_seconds if death else 0.0))
            await asyncio.wait({ended})
            over.cancel()
            operator.cancel()
            timer.cancel()
        return ended.result()

    async def operate(self, life: Life) -> None:
        """Do what an operator does to a life, until its daemon has delivered everything."""

    def _told(self) -> str:
        mld = self._mld
        daemon = f"connected: {mld.active_shards}, exits: {mld.exits[-2:]}, checkpoints: {mld.checkpoints}"
        return f"{daemon}\n{self._tail()}"

    def _tail(self) -> str:
        return tail(self._plan.settings["log_file"])


def tail(log: Path) -> str:
    """Return the last lines of a server's log, or that it ended before it wrote one."""
    if not log.exists():
        return f"(there is no log: {log.name} was never written)"
    return "\n".join(log.read_text("utf-8", "replace").splitlines()[-20:])


async def _tell_over(life: Life, daemon: asyncio.Task[int], operator: asyncio.Task[None]) -> None:
    await asyncio.wait({daemon})
    operator.cancel()
    life.stream_is_over()


async def _kill_after(life: Life, seconds: float) -> None:
    if seconds:
        await asyncio.sleep(seconds)
        life.kill()


async def play_all(
    root: Path,
    toll: Toll,
    seed: int,
    *,
    kills_per_story: int = 12,
    at_once: int = 2,
    records: int = RECORDS,
    play: Callable[[Path, Story, Toll, int], Awaitable[None]] | None = None,
    kind_for: Callable[[Toll, str], str] | None = None,
) -> int:
    """Play stories, ``at_once`` at a time, until every death was died; return how many stories that took.

    ``play`` plays one story in a folder with so many kills, in the place of ``World``; ``kind_for`` may choose a
    story's kind by what is ahead.
    """
    stories = itertools.count()
    played = 0

    async def worker() -> None:
        nonlocal played
        while toll.ahead:
            number = next(stories)
            folder = root / f"{number}"
            folder.mkdir()
            kind = (kind_for or needed)(toll, list(KINDS)[number % len(KINDS)])
            story = told(seed * 1000 + number, kind=kind, records=records * KINDS[kind].length)
            try:
                if play is None:
                    settings = {"workers": 1} if number % WORKERS_EVERY == 2 else {}
                    await World(folder, story, toll, kills=kills_per_story, settings=settings).play()
                else:
                    await play(folder, story, toll, kills_per_story)
            except BaseException:
                print(f"crash story {story.seed} ({kind}) failed; its files: {folder}")
                raise
            played += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(worker())
    return played


def needed(toll: Toll, usual: str) -> str:
    """Return the kind of story that the first of what is ahead needs."""
    kinds = ONLY_IN.get(toll.ahead[0].step, (usual,))
    return usual if usual in kinds else kinds[0]
