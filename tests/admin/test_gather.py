"""What a running server tells of itself: each count moves when that happens which it counts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.serving import quick, serving, until

from mldserver.admin.gather import EventTally, Gatherer
from mldserver.base.clock import SystemClock
from mldserver.coordinator.coordinator import Coordinator
from mldserver.coordinator.progress import CoordinatorStatus
from mldserver.coordinator.sections import waited_seconds
from mldserver.errors import WITHHELD
from mldserver.observe.logging import logging_to
from mldserver.records import Sequence
from mldserver.server import Server
from mldserver.testing import FakeMLD, FakeStream, Habits, VirtualClock

HANDLER = '''
"""One row for each record, but for those that ask for something else."""
from mldserver import Discard, tumbling

schema = "id BIGINT NOT NULL"
windows = tumbling("10 seconds")
failed = set()


def process_record(record):
    event = record.json()
    wish = event.get("wish")
    if wish == "poison":
        raise ValueError("poison")
    if wish == "discard":
        raise Discard("not wanted")
    if wish == "again" and event["id"] not in failed:
        failed.add(event["id"])
        raise OSError("not now")
    return event["id"],
'''
START_MS = 1_800_000_000_000


@pytest.fixture
def handler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "wishes.py").write_text(HANDLER)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "wishes"


def filled(shards: int, *wishes: str, records: int = 60, end: bool = True) -> FakeStream:
    stream = FakeStream(shards, seed=0, start_ms=START_MS)
    for number in range(records):
        wish = wishes[number] if number < len(wishes) else ""
        stream.put(json.dumps({"id": number, "wish": wish}).encode(), f"key-{number}")
    if end:
        stream.end()
    return stream


@contextlib.asynccontextmanager
async def told(
    tmp_path: Path,
    handler: str,
    *,
    stream: FakeStream | None = None,
    more: dict[str, Any] | None = None,
    **changes: Any,
) -> AsyncIterator[Server]:
    """Run a server whose log is counted."""
    settings = replace(quick(tmp_path / "out", handler, **changes), log_file=tmp_path / "log")
    tally = EventTally()
    with logging_to(settings, observers=[tally]):
        async with (
            asyncio.timeout(800),
            serving(settings, stream=stream, tally=tally, **(more or {})) as server,
        ):
            yield server


@pytest.mark.parametrize("workers", [None, "1"], ids=["inline", "a worker"])
async def test_by_default_neither_log_nor_status_quotes_what_errors_say(
    tmp_path: Path, handler: str, workers: str | None
) -> None:
    stream = filled(1, "poison", "again")
    async with told(
        tmp_path, handler, stream=stream, workers=workers, log_error_messages=False, on_failure="dead_letter"
    ) as server:
        daemon = FakeMLD(stream, await server.listening())
        await daemon.run()
        await server.finished()
        (letter,) = server.document().dead_letters.latest
    log = (tmp_path / "log").read_text()
    assert "handler.dead_letter" in log
    assert "wishes.py" in log
    assert "OSError" in log
    for text in ("ValueError: poison", "OSError: not now"):
        assert text not in log
    assert letter.error == f"ValueError: {WITHHELD}"
    assert "wishes.py" in letter.traceback
    assert "ValueError: poison" not in letter.traceback


async def test_what_came_and_what_became_of_it_is_counted(tmp_path: Path, handler: str) -> None:
    stream = filled(2, "poison", "poison", "discard", "again")
    async with told(tmp_path, handler, stream=stream, attempts=2) as server:
        before = server.document()
        assert (before.totals.records, before.totals.connections, before.windows.published) == (0, 0, 0)
        daemon = FakeMLD(stream, await server.listening(), habits=Habits(max_records=10))
        await daemon.run()
        await server.finished()
        status = server.document()
    totals = status.totals
    assert (totals.records, totals.rows, totals.rows_durable) == (60, 57, 57)
    assert totals.batches == daemon.batches_sent == sum(status.batch_seconds.counts)
    assert totals.bytes > 60 * 20
    assert (totals.dead_letters, totals.discarded, totals.skipped) == (2, 1, 0)
    assert totals.retries >= 1
    assert status.failures == {"ValueError": 2}
    assert totals.checkpoints >= 2, "each shard's end"
    assert (totals.connections, totals.connections_failed) == (2, 0)
    assert totals.flushes >= 1
    assert totals.segments >= 1
    assert totals.segment_bytes > 0
    assert totals.ledger_calls > 0
    assert totals.handler_seconds <= status.batch_seconds.sum_seconds + 0.1
    assert {(shard.id, shard.state) for shard in status.shards} == {
        ("shardId-000000000000", "ended"),
        ("shardId-000000000001", "ended"),
    }
    assert sum(shard.records for shard in status.shards) == 60
    assert sum(shard.bytes for shard in status.shards) == totals.bytes
    assert (status.windows.published, status.windows.rows_out) == (1, 57)
    assert sum(status.windows.seconds.counts) == 1
    (window,) = status.windows.latest
    assert (window.state, window.rows_in, window.rows_out, window.error) == ("done", 57, 57, None)
    assert window.cut_ms is not None
    assert window.done_ms is not None
    assert window.done_ms >= window.cut_ms
    assert status.dead_letters.waiting == 2
    assert [letter.error for letter in status.dead_letters.latest] == ["ValueError: poison"] * 2
    assert "wishes.py" in status.dead_letters.latest[0].traceback
    assert [(peer.this, peer.id) for peer in status.servers] == [(True, status.server_id)]
    assert status.stream_ended
    assert status.handler_version.startswith("sha256:")
    assert status.resident_bytes > 10 << 20
    assert status.spark is not None
    assert status.spark.ready


async def test_a_shard_at_work_tells_its_connection_lag_and_position(tmp_path: Path, handler: str) -> None:
    stream = filled(1, end=False)
    async with told(tmp_path, handler, stream=stream) as server:
        assert server.document().ready
        daemon = FakeMLD(stream, await server.listening())
        async with asyncio.TaskGroup() as group:
            playing = group.create_task(daemon.run())
            await until(lambda: server.document().totals.checkpoints > 0)
            await until(lambda: server.document().shards[0].lag_ms in range(1_000))
            status = server.document()
            playing.cancel()
    (shard,) = status.shards
    assert (shard.state, shard.records, shard.rows, shard.worker) == ("connected", 60, 60, None)
    assert shard.peer is not None
    assert shard.peer.startswith("127.0.0.1:")
    assert shard.position == shard.checkpoint is not None
    assert (shard.durable_age_seconds, shard.checkpoint_age_seconds) == (None, None)
    assert shard.watermark_ms is not None
    assert set(status.connections) <= {"idle", "processing"}
    assert status.watermark.at_ms is None or status.watermark.at_ms >= START_MS
    assert status.windows.open == 1
    assert set(status.budgets) == {"buffer", "lines", "segments"}
    assert status.budgets["segments"].used_bytes > 0


async def test_a_document_looks_at_the_coordinator_once(
    tmp_path: Path, handler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0
    look = Coordinator.status

    def counted(coordinator: Coordinator) -> CoordinatorStatus:
        nonlocal looks
        looks += 1
        return look(coordinator)

    async with told(tmp_path, handler, stream=filled(1)) as server:
        await server.listening()
        monkeypatch.setattr(Coordinator, "status", counted)
        assert server.document().ready
        assert looks == 1
        untold = server.document("a part cannot say it")
        assert (untold.ready, untold.reasons, untold.pid) == (False, ("a part cannot say it",), os.getpid())
        assert looks == 1


def test_a_server_that_starts_or_stops_says_so(tmp_path: Path, handler: str) -> None:
    settings = quick(tmp_path, handler)
    gatherer = Gatherer(clock=VirtualClock(), tally=EventTally())
    function = gatherer.function(settings, None, stage="starts (ledger and recovery)")
    status = gatherer.status({"departures": function})
    assert (status.ready, status.reasons) == (False, ("the function starts (ledger and recovery)",))
    assert not status.stopping
    assert gatherer.status({"departures": function}, stopping=True).stopping


async def test_a_loop_that_stands_still_is_told_of_once() -> None:
    class Standing(SystemClock):
        """Each sleep takes 250 ms longer than it should."""

        def __init__(self) -> None:
            self.at_ms = 0

        def steady_ms(self) -> int:
            return self.at_ms

        async def sleep(self, seconds: float) -> None:
            self.at_ms += round(seconds * 1000) + 250

    gatherer = Gatherer(clock=Standing(), tally=EventTally())
    await gatherer.pause(1.0)
    assert gatherer.status({}).loop_lag_seconds == 0.25
    assert gatherer.status({}).loop_lag_seconds == 0


async def test_documents_take_no_more_than_a_hundredth_of_the_time() -> None:
    class Slow(SystemClock):
        """Each look at it takes 20 ms."""

        at_ms = 0
        slept = 0.0

        def steady_ms(self) -> int:
            self.at_ms += 20
            return self.at_ms

        async def sleep(self, seconds: float) -> None:
            self.slept += seconds

    clock = Slow()
    gatherer = Gatherer(clock=clock, tally=EventTally())
    await gatherer.pause(1.0)
    assert round(clock.slept, 3) == 1.0
    await gatherer.pause(1.0)
    assert round(clock.slept, 3) == 1.0 + 2.0


def place(number: int) -> Sequence:
    return Sequence(number, 0)


def test_what_waits_is_as_old_as_its_oldest_part() -> None:
    seen: list[tuple[int, Sequence]] = []
    assert waited_seconds(seen, None, None, 0) is None
    assert waited_seconds(seen, place(5), place(5), 0) is None
    assert waited_seconds(seen, place(7), place(5), 1000) == 0
    assert waited_seconds(seen, place(9), place(5), 2000) == 1
    assert waited_seconds(seen, place(9), place(7), 4000) == 2
    assert waited_seconds(seen, place(9), place(9), 5000) is None


def test_however_long_something_waits_little_is_kept_of_it() -> None:
    seen: list[tuple[int, Sequence]] = []
    for second in range(10_000):
        age = waited_seconds(seen, place(second + 1), None, second * 1000)
        assert age == second
    assert len(seen) < 100


def test_events_of_the_log_are_counted_and_so_is_what_it_lost() -> None:
    tally = EventTally()
    tally({"event": "worker.lost", "level": "error"})
    tally({"event": "log.lost", "lines": 7})
    tally({"event": "admin.act", "act": "reload", "done": True})
    tally({"event": "admin.act", "act": "reload", "done": False})
    tally({"event": "admin.act", "act": "pause", "done": True})
    assert tally.lines_lost == 7
    assert (tally.counts["worker.lost"], tally.counts["reloaded"], tally.counts["refused"]) == (1, 1, 1)
