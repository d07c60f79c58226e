"""An engine on a scripted driver, over a clock whose sleeps the test ends."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from support.processes import group_members

from mldserver.engine_jobs import WindowJob
from mldserver.spark.client import make_engine
from mldserver.windows import Window

FAKE = Path(__file__).with_name("fake_driver.py")


class HandClock:
    """Each sleep waits until the test lets it end; the test sees how long it was to be."""

    def __init__(self) -> None:
        self.sleeps = asyncio.Queue()

    def now_ms(self) -> int:
        return 0

    steady_ms = now_ms

    async def sleep(self, seconds: float) -> None:
        ended = asyncio.Event()
        self.sleeps.put_nowait((seconds, ended))
        await ended.wait()

    async def end_sleep(self) -> float:
        seconds, ended = await self.sleeps.get()
        ended.set()
        return seconds


def job(name: str, rows: int = 5) -> WindowJob:
    return WindowJob(Window(name, None, None), 1, ("/segment",), "/staging", rows, 100)


class Bench:
    def __init__(self, tmp_path: Path, script: str, **settings: Any) -> None:
        self.state = tmp_path / "lives"
        self.clock = HandClock()
        self.work = tmp_path / "work"
        self.engine = make_engine(
            "handlers.x",
            "a INT",
            **{
                "master": "sc://nowhere",
                "work_dir": self.work,
                "cache_dir": tmp_path / "cache",
                "clock": self.clock,
                "command": [sys.executable, str(FAKE), script, str(self.state)],
                "stop_grace": 600,
                **settings,
            },
        )

    @property
    def lives(self) -> list[int]:
        # On a loaded machine a driver may be killed before it could write its line.
        return [int(pid) for pid in self.state.read_text().split()] if self.state.exists() else []

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.engine.run())
            try:
                yield
            finally:
                await self.engine.close()
        self.check_nothing_is_left()

    def check_nothing_is_left(self) -> None:
        assert not [pid for life in self.lives for pid in group_members(life)]
        assert list(self.work.iterdir()) == []
