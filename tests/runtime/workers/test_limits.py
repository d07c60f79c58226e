"""What workers are measured by, with handlers that work hard, or leak: neither is taken for one that hangs."""

from __future__ import annotations

import asyncio
import textwrap
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from runtime.workers.kit import delivery, named, running

from mldserver.records import Shard
from mldserver.runtime.failure import FailurePolicy
from mldserver.runtime.workers.life import Limits
from mldserver.runtime.workers.runtime import WorkerRuntime

if TYPE_CHECKING:
    from pathlib import Path

KILL_AFTER_MS = 1500
CALL_SECONDS = 0.3
BUSY = """
import time

{define} process_record(record):
    end = time.monotonic() + {seconds}
    while time.monotonic() < end:
        pass
"""


@pytest.mark.parametrize("define", ["def", "async def"])
async def test_a_worker_that_is_busy_for_longer_than_any_call_may_take_is_not_taken_for_a_dead_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[dict[str, Any]], define: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "busy.py").write_text(BUSY.format(define=define, seconds=CALL_SECONDS))
    limits = Limits(KILL_AFTER_MS, None)
    runtime = WorkerRuntime("busy", workers=1, policy=FailurePolicy(), limits=limits)
    records = round(2.5 * KILL_AFTER_MS / 1000 / CALL_SECONDS)
    async with running(runtime), asyncio.timeout(60):
        await runtime.open(Shard("s"))
        outcome = await runtime.process(delivery("s", *map(str, range(records))))
    assert outcome.outline.records == records
    assert named(logged, "worker.lost", "worker.replaced", "handler.dead_letter") == []
