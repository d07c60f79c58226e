"""Record processors in worker processes: as inline, and nothing is lost when a process dies."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from handler.kclpy.sampling import VERSIONS, Sample, filled, play
from support.serving import quick, serving

from mldserver.testing import FakeMLD, Habits


@pytest.mark.parametrize(
    "version", [*(pytest.param(each, marks=pytest.mark.long) for each in VERSIONS[:-1]), VERSIONS[-1]]
)
async def test_it_processes_every_record_once_to_the_end_of_every_shard(
    version: str, tmp_path: Path, sample: Sample
) -> None:
    stream = filled(2, 400, reshard=True)
    stream.end()
    daemon = FakeMLD(stream, "", habits=Habits(max_records=30))
    async with serving(quick(tmp_path / "out", f"{version}:RecordProcessor", workers=2)) as server:
        await play(server, daemon)
    assert (daemon.finished, daemon.life, daemon.violations) == (True, 1, [])
    assert sample.records == Counter(range(400))


def sample_that_checkpoints_every(records: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write the sample with another number of records between two checkpoints; return its dotted path."""
    (folder / "variant.py").write_text(
        "from sample_v3 import RecordProcessor as Sample\n\n\n"
        f"class RecordProcessor(Sample):\n    CHECKPOINT_EVERY = {records}\n"
    )
    monkeypatch.chdir(folder)
    return "variant:RecordProcessor"


def kill_worker(logged: list[dict[str, Any]]) -> None:
    """Kill the process of the only worker."""
    os.kill([event["pid"] for event in logged if event["event"] == "worker.started"][-1], signal.SIGKILL)


async def test_a_process_that_dies_with_records_not_checkpointed_costs_the_connection_and_not_the_records(
    tmp_path: Path, sample: Sample, monkeypatch: pytest.MonkeyPatch, logged: list[dict[str, Any]]
) -> None:
    handler = sample_that_checkpoints_every(10_000, tmp_path, monkeypatch)
    stream = filled(1, 300)
    stream.end()
    daemon = FakeMLD(stream, "", habits=Habits(max_records=15), supervised=True, backoff_seconds=0.05)
    daemon.at(130, lambda: kill_worker(logged))
    async with serving(quick(tmp_path / "out", handler, workers=1)) as server:
        await play(server, daemon)
    assert daemon.life == 2
    assert set(sample.records) == set(range(300))
    errors = [event["what"] for event in logged if event["event"] == "connection.failed"]
    assert len(errors) == 1
    assert "had not checkpointed" in errors[0]


async def test_a_processor_that_checkpoints_each_batch_survives_its_process_unnoticed(
    tmp_path: Path, sample: Sample, monkeypatch: pytest.MonkeyPatch, logged: list[dict[str, Any]]
) -> None:
    handler = sample_that_checkpoints_every(1, tmp_path, monkeypatch)
    stream = filled(2, 300)
    stream.end()
    daemon = FakeMLD(stream, "", habits=Habits(max_records=15))
    daemon.at(130, lambda: kill_worker(logged))
    async with serving(quick(tmp_path / "out", handler, workers=1)) as server:
        await play(server, daemon)
    assert (daemon.finished, daemon.life, daemon.violations) == (True, 1, [])
    assert set(sample.records) == set(range(300))
    assert [event for event in logged if event["event"] == "worker.lost"]
