"""What workers are measured by, of whom one that works hard, or leaks, does not hang; and what memory they keep."""

from __future__ import annotations

import asyncio
import ctypes
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from workers.kit import delivery, named, running

from mldserver.base.clock import SystemClock
from mldserver.records import Shard
from mldserver.runtime.failure_policy import FailurePolicy
from mldserver.workers.runtime import WorkerRuntime
from mldserver.workers.worker import Limits

KILL_AFTER_MS = 8000
RECORDS = 3
"""Whose calls take longer together than one may take."""
BUSY = """
import time
from mldserver.workers import worker_reports

now, beats, send_now = time.monotonic_ns(), 0, worker_reports.send_now
time.monotonic_ns = lambda: now

def send(end, message, **options):
    global beats
    beats += isinstance(message, worker_reports.BeatMessage)
    return send_now(end, message, **options)

worker_reports.send_now = send

{define} process_record(record):
    global now
    now += 5 * 10**9
    until = beats + 2
    while beats < until:
        pass
"""
"""A call takes five seconds by the worker's clock, which stands still else, and goes on until that was told."""
MEMORY_BYTES = 320 << 20
LEAKS = f"""
import os, time
book = os.open("book", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
leaked = []

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def process_records(batch):
    for record in batch:
        os.write(book, record.data + b"\\n")
    # Past the limit, and not near to where a worker is killed for it.
    if resident() < {MEMORY_BYTES} * 1.1:
        leaked.append(b"x" * (20 << 20))
    time.sleep(0.02)
"""

TOUCHES = """
import resource

def process_records(batch):
    for record in batch:
        len(record.data)
    with open("book", "a") as book:
        print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt, file=book)
"""


class Still(SystemClock):
    """By it the worker is never silent: how long its beats are on their way says something of the machine."""

    def steady_ms(self) -> int:
        return 0


@pytest.fixture
def runtime_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Limits], WorkerRuntime]:
    monkeypatch.chdir(tmp_path)

    def make(text: str, limits: Limits) -> WorkerRuntime:
        (tmp_path / "mine.py").write_text(text)
        return WorkerRuntime("mine", workers=1, policy=FailurePolicy(), limits=limits, clock=Still())

    return make


@pytest.mark.parametrize("define", ["def", pytest.param("async def", marks=pytest.mark.long)])
async def test_a_worker_that_is_busy_for_longer_than_any_call_may_take_is_not_taken_for_a_dead_one(
    runtime_of: Callable[[str, Limits], WorkerRuntime], logged: list[dict[str, Any]], define: str
) -> None:
    busy = BUSY.format(define=define)
    async with (
        running(runtime_of(busy, Limits(KILL_AFTER_MS, None)), standby=False) as runtime,
        asyncio.timeout(800),
    ):
        await runtime.open(Shard("s"))
        outcome = await runtime.process(delivery("s", *map(str, range(RECORDS))))
    assert outcome.outline.records == RECORDS
    assert named(logged, "worker.lost", "worker.replaced", "handler.dead_letter") == []


async def test_a_worker_that_leaks_is_replaced_between_batches_none_of_which_is_called_twice(
    runtime_of: Callable[[str, Limits], WorkerRuntime], logged: list[dict[str, Any]], tmp_path: Path
) -> None:
    delivered: list[str] = []

    async def deliver(shard: str) -> None:
        await runtime.open(Shard(shard))
        while len(named(logged, "worker.replaced", "worker.lost")) < 2:
            texts = [f"{shard}{len(delivered)}-{number}" for number in range(3)]
            delivered.extend(texts)
            assert (await runtime.process(delivery(shard, *texts))).outline.records == 3

    async with running(runtime_of(LEAKS, Limits(None, MEMORY_BYTES))) as runtime, asyncio.timeout(800):
        await asyncio.gather(deliver("a"), deliver("b"))
    assert named(logged, "worker.lost", "handler.dead_letter") == []
    assert all(event["bytes"] > MEMORY_BYTES for event in named(logged, "worker.replaced"))
    assert Counter((tmp_path / "book").read_text().split()) == Counter(delivered)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="it is about glibc")
async def test_the_memory_that_a_long_batch_took_is_there_for_the_next(
    runtime_of: Callable[[str, Limits], WorkerRuntime], tmp_path: Path
) -> None:
    async with running(runtime_of(TOUCHES, Limits(KILL_AFTER_MS, None)), standby=False) as runtime:
        await runtime.open(Shard("s"))
        for _ in range(3):
            await runtime.process(delivery("s", *["x" * 1000] * 10_000))
    _, before, after = map(int, (tmp_path / "book").read_text().split())
    assert after - before < 1000, "pages are touched for the first time, of 2,500 that its records take"
