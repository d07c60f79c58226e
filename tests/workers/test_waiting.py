"""What waits in a worker to be tried again, for however long, holds up no other shard."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from support.serving import until
from workers.kit import delivery, running

from mldserver.records import Shard
from mldserver.runtime.failure_policy import FailurePolicy
from mldserver.workers import gate
from mldserver.workers.runtime import WorkerRuntime
from mldserver.workers.worker import Limits

HANDLER = """
import pathlib, time

def initialize(shard):
    if shard.id == "waiting":
        pathlib.Path("tried").touch()
        raise ConnectionError("its database is away")

def process_record(record):
    pathlib.Path(record.text()).touch()
    while record.text() == "long" and not pathlib.Path("go").exists():
        time.sleep(0.01)
"""


@pytest.mark.usefixtures("logged")
async def test_a_batch_that_was_in_hand_when_its_worker_died_does_not_wait_for_another_shards_initialize(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(HANDLER)
    hours = FailurePolicy(retry_base_seconds=7200)
    runtime = WorkerRuntime("mine", workers=1, policy=hours, limits=Limits(None, None))
    (worker,) = runtime._workers
    monkeypatch.setattr(gate, "IDLE_CHECKS", 2)
    async with running(runtime), asyncio.timeout(800):
        waiting = asyncio.create_task(runtime.open(Shard("waiting")))
        for shard in "ab":
            await runtime.open(Shard(shard))
        await until((tmp_path / "tried").exists)
        for _ in range(2):  # from the second time on, the shard that waits is a suspect too
            (tmp_path / "long").unlink(missing_ok=True)
            (tmp_path / "go").unlink(missing_ok=True)
            long = asyncio.create_task(runtime.process(delivery("a", "long")))
            await until((tmp_path / "long").exists)
            os.kill((await worker.process()).pid, signal.SIGKILL)
            (tmp_path / "go").touch()
            for batch in (long, runtime.process(delivery("b", "short"))):
                assert (await batch).outline.records == 1
        assert not waiting.done()
        waiting.cancel()
