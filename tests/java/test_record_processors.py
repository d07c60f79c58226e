"""A record processor of amazon_kclpy behind the real Java daemon, whose lease table holds its own checkpoints; and what
the daemon does when the server is gone."""

from __future__ import annotations

import shutil
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from handler.kclpy.sampling import APPLICATIONS, Sample
from support.java_stack import Stack

pytestmark = pytest.mark.slow


@pytest.fixture
def sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sample:
    shutil.copy(APPLICATIONS / "sample_v3.py", tmp_path)
    monkeypatch.setenv("KCLPY_SAMPLE", str(tmp_path / "sample.jsonl"))
    (tmp_path / "sample.jsonl").touch()
    return Sample(tmp_path / "sample.jsonl")


def orders(first: int, last: int) -> list[dict[str, Any]]:
    return [{"key": f"key-{n}", "n": n} for n in range(first, last)]


@pytest.mark.long  # by day tests/kcl/test_supervisor.py holds the ends of the JVM, and test_end_to_end.py the real one
async def test_the_jvm_of_a_killed_server_ends_at_once_and_what_was_not_checkpointed_comes_again_when_one_is_back(
    tmp_path: Path, sample: Sample
) -> None:
    stack = Stack(tmp_path, "sample_v3:RecordProcessor")
    async with stack.running(shards=2):
        stack.start_server()
        # What the JVM would wait for children that are gone: longer than this test.
        stack.start_daemon(shutdownGraceMillis="600000")
        await stack.put(orders(0, 300))
        await stack.until("300 records", lambda: len(sample.payloads) == 300)
        stored = {event["shard"]: event["checkpoint"] for event in sample.events if "checkpoint" in event}
        assert len(stored) == 2
        await stack.until_checkpointed(stored)
        await stack.put(orders(300, 320))  # too few for another checkpoint
        await stack.until("320 records", lambda: len(sample.payloads) == 320)
        left = sample.uncheckpointed()
        assert len(left) >= 20
        await stack.end(stack.server, signal.SIGKILL)
        stack.server = None
        await stack.until("no JVM", lambda: not stack.jvms())
        await stack.until("it waits", lambda: stack.daemon_events()[-1]["event"] == "kcl.waiting")
        stack.start_server()
        await stack.put(orders(320, 400))
        await stack.until("the rest", lambda: len(sample.payloads) == 400)
        assert await stack.end(stack.daemon) == 0
        assert await stack.end(stack.server) == 0
    assert {record for record, times in sample.payloads.items() if times == 2} == left
    assert sample.payloads.total() == 400 + len(left)
    assert len(sample.hooks("shutdown_requested")) == 2
    told = stack.daemon_events()
    assert {event["level"] for event in told} <= {"info", "warning", "error"}
    gained = Counter(event["shard"] for event in told if event["event"] == "kcl.lease_gained")
    assert set(gained.values()) == {2}
    (cut,) = [event for event in told if event["event"] == "kcl.cut_short"]
    assert "killed" in cut["did"]
    faults = Counter(
        event["advice"] for event in told if event["event"] == "kcl.fault" and "repeated" not in event
    )
    assert set(faults.values()) == {1}
    # A bridge that was writing when the server died says so itself.
    assert all("The server's log" in advice or "whether the server runs" in advice for advice in faults), [
        e for e in told if e["event"] == "kcl.fault"
    ]
    # Nothing of the JVM's own, but that it works.
    assert {event["text"] for event in told if event["event"] == "kcl.log"} == {
        "Initialization complete. Starting worker loop."
    }
