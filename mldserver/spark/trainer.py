"""Makes the class archive: a driver of its own, at the lowest priority, that starts, warms up, and exits."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from mldserver.spark import archive
from mldserver.spark.driver_session import Life

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mldserver.base.clock import Clock
    from mldserver.spark.driver_messages import Start

log = structlog.get_logger("mldserver")

_LIMIT_SECONDS = 900
"""Beyond it the machine has no time to spare, and the archive is not worth it."""


async def train(start: Start, command: Sequence[str], environment: Mapping[str, str], clock: Clock) -> None:
    """Write ``start.archive``. Whatever goes wrong is logged only: nothing needs the file."""
    assert start.archive is not None
    wanted = Path(start.archive)
    said = "The time allowed for it was over."
    try:
        async with asyncio.timeout(_LIMIT_SECONDS):
            await asyncio.to_thread(_clear, wanted)
            said = await _live(start, command, environment, clock)
    except (OSError, TimeoutError) as error:
        said = str(error) or said
    finally:
        await asyncio.to_thread(_tidy, start, wanted)
    if await asyncio.to_thread(archive.is_there, wanted):
        said = f"Spark's classes are archived in {wanted}: later starts take about half the time."
        log.info("spark.log", logger=__name__, text=said)
    else:
        log.warning("spark.log", logger=__name__, text=f"No class archive was made. {said}")


async def _live(start: Start, command: Sequence[str], environment: Mapping[str, str], clock: Clock) -> str:
    life = await Life.begin(command, environment, start, clock, cancel_grace=0)
    async with asyncio.TaskGroup() as tasks:
        stopper = tasks.create_task(_stop_when_warm(life))
        await life.live(_LIMIT_SECONDS)
        stopper.cancel()
    return life.reason()


async def _stop_when_warm(life: Life) -> None:
    await life.warm.wait()
    life.stop()


def _clear(wanted: Path) -> None:
    wanted.parent.mkdir(parents=True, exist_ok=True)
    archive.discard(wanted)


def _tidy(start: Start, wanted: Path) -> None:
    shutil.rmtree(start.scratch, ignore_errors=True)
    with contextlib.suppress(OSError):
        archive.discard(wanted)
