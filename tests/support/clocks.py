"""Clocks for tests: time passes only when the test, or a sleep that returns at once, moves it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field


@dataclass
class HandClock:
    """A clock that the test moves by hand. Nothing may sleep on it."""

    ms: int = 0

    def now_ms(self) -> int:
        return self.ms

    steady_ms = now_ms

    async def sleep(self, seconds: float) -> None:
        raise AssertionError(f"nothing may sleep here, least of all {seconds} s")


@dataclass
class RecordingClock(HandClock):
    """A clock whose sleeps move the time, return after one turn of the loop, and are recorded."""

    slept: list[float] = field(default_factory=list)

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.ms += round(seconds * 1000)
        await asyncio.sleep(0)
