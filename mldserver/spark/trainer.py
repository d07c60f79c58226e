"""Makes the archive of Spark's classes, with which later JVMs start in half the time. A separate driver, which runs no job, writes it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import structlog

from mldserver.base.clock import Clock
from mldserver.spark.driver_messages import WARM_UP, LoadFunction, StartSession
from mldserver.spark.driver_session import Life
from mldserver.spark.java import discard

log = structlog.get_logger("mldserver")

_TRAIN_SECONDS = 900
"""Beyond it the machine has no time to spare, and the class archive is not worth it."""

_SCHEMA = "id BIGINT NOT NULL, text STRING, at TIMESTAMP"
"""Columns of the window that the driver computes."""


async def train(
    start: StartSession, command: Sequence[str], environment: Mapping[str, str], clock: Clock
) -> None:
    """Make the class archive ``start.archive``: start a separate driver, wait until a window went through, and stop it.

    The JVM writes the archive when it exits. A failure is only logged, since drivers also start without the archive.
    """
    assert start.archive is not None
    archive = Path(start.archive)
    outcome = "The time allowed for it was over."
    try:
        async with asyncio.timeout(_TRAIN_SECONDS):
            await asyncio.to_thread(discard, archive)
            life = await Life.begin(command, environment, start, clock, cancel_grace=0)
            life.load(LoadFunction(schema=_SCHEMA, place=f"{start.scratch}{WARM_UP}"))
            async with asyncio.TaskGroup() as tasks:
                stopper = tasks.create_task(life.stop_when_warm())
                await life.live(_TRAIN_SECONDS)
                stopper.cancel()
            outcome = life.reason()
    except (OSError, TimeoutError) as error:
        outcome = str(error) or outcome
    finally:
        await asyncio.to_thread(shutil.rmtree, start.scratch, ignore_errors=True)
        with contextlib.suppress(OSError):
            await asyncio.to_thread(discard, archive)
    if await asyncio.to_thread(os.path.isfile, archive):
        outcome = f"Spark's classes are archived in {archive}: later starts take about half the time."
        log.info("spark.log", logger=__name__, text=outcome)
    else:
        log.warning("spark.log", logger=__name__, text=f"No class archive was made. {outcome}")
