"""Keeps a child process running: one rule for workers, standby workers, Spark's driver and the Java daemon.

After each exit the supervisor waits, for longer and longer while the exits follow each other, and starts the next process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

from mldserver.base.backoff import Backoff
from mldserver.base.clock import Clock, first_of

HEALTHY_SECONDS: Final = 120.0
"""A run of this length is healthy: earlier failures no longer count. Spark and the KCL take up to a minute to start."""


class ChildExit(NamedTuple):
    """How one run of a child process ended."""

    report: Callable[[float], None]
    """Logs the exit; receives the seconds until the next start."""
    useful: bool = False
    """Whether the run did some work: earlier failures no longer count."""


async def supervise(
    run_once: Callable[[], Awaitable[ChildExit | None]],
    *,
    backoff: Backoff,
    clock: Clock,
    stopping: asyncio.Event | None = None,
    chance: Callable[[], float] = lambda: 1.0,
) -> None:
    """Run a child process again and again, until the caller is cancelled or ``stopping`` is set.

    ``run_once`` runs one process from its start to its end. If it returns None, the exit was intended: it does not count
    as a failure, and the next run starts at once. ``chance`` returns numbers from 0 to 1, for the back-off's jitter.
    Raises what ``run_once`` raises.
    """
    stop = stopping or asyncio.Event()
    while True:
        began_ms = clock.steady_ms()
        child_exit = await run_once()
        if stop.is_set():
            return
        if child_exit is None:
            continue
        if child_exit.useful or clock.steady_ms() - began_ms >= HEALTHY_SECONDS * 1000:
            backoff.worked()
        delay_seconds = backoff.failed(chance())
        child_exit.report(delay_seconds)
        await first_of(stop.wait(), clock.sleep(delay_seconds))
        if stop.is_set():
            return
