"""The sample application of amazon_kclpy, in its three versions, through the real server against the fake daemon."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from handler.kclpy.sampling import VERSIONS, Sample, filled, play
from support.serving import quick, serving, until

from mldserver.testing import FakeMLD, Form, Habits


async def read_to_the_end(
    version: str, form: Form, out: Path, sample: Sample, logged: list[dict[str, Any]], *, throttled: int = 0
) -> None:
    stream = filled(2, 400, reshard=True)
    stream.end()
    daemon = FakeMLD(stream, "", habits=Habits(form=form, max_records=30))
    daemon.leases.refuse(next(iter(stream.shards)), times=throttled)
    async with serving(quick(out, f"{version}:RecordProcessor")) as server:
        await play(server, daemon)
    assert daemon.finished
    assert daemon.violations == []
    assert sample.records == Counter(range(400))
    ended = sample.hooks("shard_ended") or sample.hooks("shutdown")
    assert sorted(event["shard"] for event in ended) == sorted(stream.shards)
    events = Counter(entry["event"] for entry in logged)
    assert not {"handler.failed", "handler.hook_failed", "handler.end_not_checkpointed"} & set(events)


@pytest.mark.parametrize(
    ("version", "form"),
    [
        ("sample_v1", Form.V1),
        ("sample_v1", Form.KCL3),
        ("sample_v2", Form.V2),
        ("sample_v2", Form.KCL3),
        ("sample_v3", Form.V1),
        ("sample_v3", Form.KCL3),
    ],
)
async def test_it_processes_every_record_once_through_a_split_to_the_end_of_every_shard(
    version: str, form: Form, tmp_path: Path, sample: Sample, logged: list[dict[str, Any]]
) -> None:
    await read_to_the_end(version, form, tmp_path / "out", sample, logged)


async def test_amazons_own_sample_runs_as_it_is_installed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = filled(2, 200, reshard=True)
    stream.end()
    daemon = FakeMLD(stream, "", habits=Habits(max_records=30))
    async with serving(quick(tmp_path / "out", "samples.sample_kclpy_app:RecordProcessor")) as server:
        await play(server, daemon)
    assert (daemon.finished, daemon.violations) == (True, [])
    assert capsys.readouterr().err.count("Partition Key") == 200


async def test_a_throttled_lease_table_is_the_servers_business(
    tmp_path: Path, sample: Sample, logged: list[dict[str, Any]]
) -> None:
    await read_to_the_end("sample_v3", Form.KCL3, tmp_path / "out", sample, logged, throttled=2)
    assert "checkpoint.retried" in [entry["event"] for entry in logged]


@pytest.mark.usefixtures("without_amazon_kclpy")
@pytest.mark.parametrize("version", VERSIONS)
async def test_it_does_the_same_where_amazon_kclpy_is_not_installed(
    version: str, tmp_path: Path, sample: Sample, logged: list[dict[str, Any]]
) -> None:
    await read_to_the_end(version, Form.KCL3, tmp_path / "out", sample, logged)
    assert sys.modules["amazon_kclpy"].__spec__ is not None
    assert sys.modules["amazon_kclpy"].__spec__.origin == "mldserver"


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_restart_delivers_exactly_what_was_not_checkpointed(
    version: str, tmp_path: Path, sample: Sample
) -> None:
    stream = filled(3, 500)
    settings = quick(tmp_path / "out", f"{version}:RecordProcessor")
    async with serving(settings) as server:
        first = FakeMLD(stream, "", habits=Habits(max_records=25), stop_at_end=False)
        first.at(300, first.terminate)
        await play(server, first)
    processed, left = sample.records, sample.uncheckpointed()
    assert set(processed.values()) == {1}
    assert bool(left) == (version != "sample_v2")  # which checkpoints when it is asked to stop
    stream.end()
    async with serving(settings) as server:
        second = FakeMLD(stream, "", habits=Habits(max_records=25), leases=first.leases)
        await play(server, second)
    assert sample.records == Counter(range(500)) + Counter(map(int, left))


async def test_a_stopped_server_has_kept_every_checkpoint(tmp_path: Path, sample: Sample) -> None:
    stream = filled(2, 600)
    settings = quick(tmp_path / "out", "sample_v3:RecordProcessor", flush_interval=600.0)
    daemon = FakeMLD(stream, "", habits=Habits(max_records=25), supervised=True, backoff_seconds=0.02)
    async with asyncio.TaskGroup() as group:
        async with serving(settings) as first:
            daemon.address = await first.listening()
            playing = group.create_task(daemon.run())
            async with asyncio.timeout(800):
                await until(lambda: daemon.records_sent >= 300)
        left = sample.uncheckpointed()
        stream.end()
        async with serving(settings) as second:
            daemon.address = await second.listening()
            async with asyncio.timeout(800):
                await playing
    assert sample.records == Counter(range(600)) + Counter(map(int, left))


async def test_killed_daemons_and_lost_leases_lose_nothing_and_bring_nothing_back_that_was_stored(
    tmp_path: Path, sample: Sample
) -> None:
    stream = filled(2, 1200)
    stream.end()
    daemon = FakeMLD(stream, "", habits=Habits(max_records=20), supervised=True, backoff_seconds=0.02)
    stored: set[int] = set()
    told = 0

    def kill() -> None:
        nonlocal told
        told = len(sample.events)
        for shard in stream.shards.values():
            at = daemon.checkpoints[shard.id].order()
            numbers = [(0, *record.order) for record in shard.records]
            stored.update(int(shard.records[i].data or b"") for i, each in enumerate(numbers) if each <= at)
        if stored:
            daemon.kill()
        else:
            daemon.at(daemon.records_sent + 1, kill)  # on a slow disk nothing was durable yet

    daemon.at(200, lambda: daemon.lose_lease(next(iter(stream.shards)), back_after_seconds=0.1))
    daemon.at(900, kill)
    settings = quick(tmp_path / "out", "sample_v3:RecordProcessor", flush_interval=0.005)
    async with serving(settings) as server:
        await play(server, daemon)
    assert daemon.life == 2
    assert set(sample.records) == set(range(1200))
    assert stored, "nothing was stored before the kill"
    assert not stored & {int(event["record"]) for event in sample.events[told:] if "record" in event}


async def test_a_processor_that_never_checkpoints_gets_everything_again(
    tmp_path: Path, sample: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = filled(1, 100)
    (tmp_path / "silent.py").write_text(
        "from sample_v3 import RecordProcessor as Sample\n\n\n"
        "class RecordProcessor(Sample):\n    CHECKPOINT_EVERY = 10_000\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "silent", raising=False)
    settings = quick(tmp_path / "out", "silent:RecordProcessor")
    for life in (1, 2):
        async with serving(settings) as server, asyncio.TaskGroup() as group:
            daemon = FakeMLD(stream, await server.listening(), habits=Habits(), stop_at_end=False)
            playing = group.create_task(daemon.run())
            async with asyncio.timeout(800):
                await until(lambda life=life: sample.records.total() == 100 * life)
            daemon.terminate()
            await playing
    assert set(sample.records.values()) == {2}
