"""A house whose handler sets a timer for each record, and the task that fires timers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any, ClassVar

from coordinator.keyed_house import House

from mldserver import Timer, timer
from mldserver.coordinator.firing import Firing
from mldserver.coordinator.timed_stores import TimerIntake
from mldserver.records import Record
from mldserver.windows import TimeWindows


class Alarms:
    """A record sets its key's alarm some seconds after its arrival, or cancels it. The alarm says when it was due.

    A record may ask how many alarms of its key there were: a row says so.
    """

    schema = "key STRING, due BIGINT"
    windows = TimeWindows(10_000)
    fired: ClassVar[list[tuple[str, int]]] = []
    """All calls: the keys, and when their timers were due."""
    fails: ClassVar[bool] = False
    heals: ClassVar[bool] = False
    """Whether records with words for seconds count as one second."""

    def process_record(self, record: Record, ctx: Any) -> tuple[str, int] | None:
        if record.data == b"alarms?":
            return ctx.key, ctx.state.get("alarms", 0)
        if record.data == b"cancel":
            ctx.timers.cancel(self.alarm)
        elif record.data:
            seconds = b"1" if Alarms.heals and record.data.isalpha() else record.data
            ctx.timers.set(self.alarm, after=timedelta(seconds=float(seconds)))
        return None

    @timer
    def alarm(self, due: Timer, ctx: Any) -> tuple[str, int]:
        Alarms.fired.append((ctx.key, round(due.at.timestamp() * 1000)))
        if Alarms.fails:
            raise ValueError("no")
        ctx.state["alarms"] = ctx.state.get("alarms", 0) + 1
        return Alarms.fired[-1]


class TimedHouse(House):
    """A coordinator, consumers, and a handler whose timers fire. The time of day begins at 1,000,000 ms."""

    handler = Alarms
    polled = False

    @contextlib.asynccontextmanager
    async def life(self) -> AsyncIterator[None]:
        Alarms.fired, Alarms.fails, Alarms.heals = [], False, False
        async with super().life():
            self.timers: TimerIntake = self.pipeline.coordinator.timers
            self.firing = Firing(
                runtime=self.runtime,
                claims=self.parts.claims,
                timers=self.timers,
                clock=self.pipeline.clock,
            )
            async with asyncio.TaskGroup() as group:
                running = group.create_task(self.firing.run())
                try:
                    yield
                finally:
                    running.cancel()

    def arrival_ms(self, lag_ms: int) -> int:
        return self.pipeline.clock.now_ms() - lag_ms

    async def wait(self, seconds: float) -> None:
        await self.pipeline.clock.advance(seconds)

    async def tip(self, *shard_ids: str) -> None:
        """Show after a pause that the shards have no more records."""
        await self.wait(0.5)
        for shard_id in shard_ids:
            await self.put(shard_id)
        await self.wait(0.2)

    @property
    def fired(self) -> list[tuple[str, int]]:
        return Alarms.fired

    def rows(self) -> list[tuple[str, int]]:
        """The durable rows, wherever they are."""
        places = ("_mldserver/segments/*", "window=*", "_late/window=*")
        found = [row for place in places for row in self.pipeline.rows(place)]
        return sorted((row["key"], row["due"]) for row in found)
