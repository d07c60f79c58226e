"""A pipeline that writes for itself, with real Spark: its calls carry the keys that make what it writes happen once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from crash.lives import Plan
from crash.spark_life import SparkLife
from support.serving import until
from support.spark_classes import QUICK

from mldserver.config.kinds import UnixAddress
from mldserver.testing import FakeMLD, FakeStream, Habits

pytestmark = [pytest.mark.long, pytest.mark.slow]

HANDLER: Final = '''
"""Notes each call, writes nothing else; the second window's fails where a file asks for it."""
from pathlib import Path

from mldserver import tumbling

schema = "id BIGINT NOT NULL, at TIMESTAMP NOT NULL"
windows = tumbling("10 seconds", on="at", lateness="1 hour")
writes_for_itself = True
HERE = Path({here!r})


def process_record(record):
    event = record.json()
    return event["id"], event["at"]


def on_window(rows, window):
    with (HERE / "calls").open("a") as calls:
        calls.write(f"{{window.id}} {{window.revision}} {{rows.count()}}\\n")
    asked = HERE / "fail"
    if window.id == "{second}" and asked.exists():
        asked.unlink()
        raise RuntimeError("as asked")
'''
FIRST: Final = "2027-01-15T08-00-00Z"
SECOND: Final = "2027-01-15T08-00-10Z"
LAST: Final = "2027-01-15T10-00-00Z"
Call = tuple[str, int, int]
"""A window's id, its revision, and how many rows it had."""


class Pipeline:
    """One output folder, one daemon, and what the hook has noted."""

    def __init__(self, root: Path, address: Path) -> None:
        (root / "notes.py").write_text(HANDLER.format(here=str(root), second=SECOND))
        self.root = root
        self.stream = FakeStream(1, seed=1, start_ms=1_800_000_000_000)
        settings: dict[str, Any] = {
            "listen": UnixAddress(address),
            "log_file": root / "log",
            "log_format": "json",
            "cache_dir": root / "cache",
            "flush_interval": 0.05,
            "settle_time_ms": 200,
            "max_ahead": "none",  # the record that closes the windows is two hours ahead
            "quiet_time": 600.0,
            "idle_time": 600.0,
            "recompute_delay": 0.05,
            "retry_seconds": (0.05, 0.5),
            "spark_conf": QUICK,
        }
        self.plan = Plan(root / "out", "notes", str(root), settings)
        self.daemon = FakeMLD(
            self.stream,
            f"unix:{address}",
            habits=Habits(seed=1, idle_seconds=0.01),
            supervised=True,
            backoff_seconds=0.01,
        )

    def put(self, number: int, time: str) -> None:
        self.stream.put(json.dumps({"id": number, "at": f"2027-01-15T{time}Z"}).encode(), f"key-{number}")

    def calls(self) -> Counter[Call]:
        noted = self.root / "calls"
        lines = noted.read_text().splitlines() if noted.exists() else []
        return Counter(
            (name, int(revision), int(rows)) for name, revision, rows in (each.split() for each in lines)
        )

    @contextlib.asynccontextmanager
    async def life(self, step: str | None = None) -> AsyncIterator[SparkLife]:
        life = SparkLife(self.plan, step)
        await life.start()
        try:
            yield life
        finally:
            life.kill()


@pytest.fixture
def pipeline(tmp_path: Path) -> Iterator[Pipeline]:
    with tempfile.TemporaryDirectory(prefix="notes-") as sockets:
        yield Pipeline(tmp_path, Path(sockets) / "server")


async def test_a_call_made_again_has_the_same_window_and_revision_and_a_recomputation_the_next(
    pipeline: Pipeline,
) -> None:
    for number in range(6):
        pipeline.put(number, f"08:00:0{number}" if number < 4 else f"08:00:1{number}")
    pipeline.put(6, "10:00:00")  # closes the two windows before it at the same time
    both = Counter({(FIRST, 1, 4): 1, (SECOND, 1, 2): 1})

    async with asyncio.TaskGroup() as group:
        playing = group.create_task(pipeline.daemon.run())
        async with asyncio.timeout(800), pipeline.life("attempt.computed") as life:
            assert await life.ended() == -signal.SIGKILL
        assert pipeline.calls() == both

        # The two share a job. It fails with the second's call, and each runs alone: the first, which did not fail, too.
        (pipeline.root / "fail").touch()
        async with asyncio.timeout(800), pipeline.life() as life:
            again = Counter(dict.fromkeys(both, 3))
            await until(lambda: pipeline.calls() == again)
            pipeline.put(7, "08:00:09")
            later = again + Counter({(FIRST, 2, 5): 1})
            await until(lambda: pipeline.calls() == later)
            pipeline.stream.end()
            await playing
            life.stream_is_over()
            assert await life.ended() == 0
    assert pipeline.calls() == later + Counter({(LAST, 1, 1): 1})
    assert not list(pipeline.plan.out.glob("window=*"))
