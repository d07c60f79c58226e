"""A record processor of amazon_kclpy behind the real Java daemon: its own checkpoints are what the lease table holds."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest
from handler.kclpy.sampling import APPLICATIONS, Sample
from support.java_stack import Stack

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.slow, pytest.mark.timeout(540)]


@pytest.fixture
def sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sample:
    shutil.copy(APPLICATIONS / "sample_v3.py", tmp_path)
    monkeypatch.setenv("KCLPY_SAMPLE", str(tmp_path / "sample.jsonl"))
    (tmp_path / "sample.jsonl").touch()
    return Sample(tmp_path / "sample.jsonl")


def orders(first: int, last: int) -> list[dict[str, Any]]:
    return [{"key": f"key-{n}", "n": n} for n in range(first, last)]


async def test_its_checkpoints_are_stored_and_a_restart_delivers_what_it_had_not_checkpointed(
    tmp_path: Path, sample: Sample
) -> None:
    stack = Stack(tmp_path, "sample_v3:RecordProcessor")
    async with stack.running(shards=2):
        stack.start_server()
        stack.start_daemon()
        await stack.put(orders(0, 300))
        await stack.until("300 records", lambda: len(sample.payloads) == 300)
        stored = {event["shard"]: event["checkpoint"] for event in sample.events if "checkpoint" in event}
        assert len(stored) == 2
        await stack.until_checkpointed(stored)
        await stack.put(orders(300, 320))  # too few for another checkpoint
        await stack.until("320 records", lambda: len(sample.payloads) == 320)
        left = sample.uncheckpointed()
        assert len(left) >= 20
        assert await stack.end(stack.daemon) == 0
        stack.start_daemon()
        await stack.put(orders(320, 400))
        await stack.until("the rest", lambda: len(sample.payloads) == 400)
        assert await stack.end(stack.daemon) == 0
        assert await stack.end(stack.server) == 0
    assert {record for record, times in sample.payloads.items() if times == 2} == left
    assert sample.payloads.total() == 400 + len(left)
    assert len(sample.hooks("shutdown_requested")) == 4
