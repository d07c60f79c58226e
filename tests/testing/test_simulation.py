"""The real server against the fake daemon over TCP, without Spark: every record comes out exactly once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

import pyarrow.dataset as ds
import pytest

from mldserver.config.kinds import OnFailure, TcpAddress
from mldserver.config.settings import Settings
from mldserver.testing import FakeStream, Form, LocalEngine, VirtualClock
from mldserver.testing import simulation as simulation_module
from mldserver.testing.fake_stream import Place
from mldserver.testing.playground import read_lines
from mldserver.testing.simulation import Faults, Simulation, build_stream

LINES = read_lines(None, limit=2000)


# Longer than a restart of the daemon, which brings shards that were never seen.
CONSTANTS: Final = {"settle_time_ms": 300}


@pytest.fixture(autouse=True)
def quick_fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation_module, "_RESTART_SECONDS", 0.05)
    monkeypatch.setattr(simulation_module, "_LEASE_BACK_SECONDS", 0.05)


def settings(out: Path) -> Settings:
    return Settings(
        handler="handlers.departures_daily",
        out=out,
        listen=TcpAddress("127.0.0.1", 0),
        flush_interval_ms=200,
        workers=None,
        constants=CONSTANTS,
    )


def stream(*, seed: int = 1, splits: int = 0, merges: int = 0, lines: list[bytes] = LINES) -> FakeStream:
    return build_stream(lines, shards=3, seed=seed, splits=splits, merges=merges, start_ms=1_800_000_000_000)


def written(out: Path, *more: str) -> list[tuple[object, ...]]:
    """Return (shard, sequence), and more columns, of every row in the windows and in the late dataset."""
    rows: list[tuple[object, ...]] = []
    for folder in (out, out / "_late"):
        if folder.exists():
            dataset = ds.dataset(folder, format="parquet", partitioning="hive")
            table = dataset.to_table(["_shard", "_sequence", *more])
            rows += zip(*table.to_pydict().values(), strict=True)
    return sorted(rows)


def put(source: FakeStream) -> list[tuple[str, str]]:
    return sorted(
        (shard.id, record.sequence_number) for shard in source.shards.values() for record in shard.records
    )


@pytest.mark.parametrize("form", list(Form))
async def test_a_calm_stream_comes_out_exactly_once(tmp_path: Path, form: Form) -> None:
    source = stream(splits=1, merges=1)
    simulation = Simulation(
        settings(tmp_path), source, form=form, seed=1, max_records=200, engine=LocalEngine()
    )
    report = await simulation.run()
    assert report.violations == ()
    assert report.ok
    assert report.deliveries == len(LINES)
    assert written(tmp_path) == put(source)


@pytest.mark.parametrize(("form", "seed"), [(Form.KCL3, 1), (Form.V2, 2), (Form.V1, 3), (Form.KCL3, 4)])
async def test_a_stormy_stream_comes_out_exactly_once(tmp_path: Path, form: Form, seed: int) -> None:
    source = stream(seed=seed, splits=2, merges=1)
    faults = Faults(lost_leases=3, throttle=0.2, crashes=2)
    simulation = Simulation(
        settings(tmp_path), source, form=form, seed=seed, max_records=100, faults=faults, engine=LocalEngine()
    )
    report = await simulation.run()
    assert [text.split(":")[0] for text in report.exits] == ["137", "137", "0"]
    assert report.deliveries > len(LINES)
    assert written(tmp_path) == put(source)
    assert report.violations == ()
    assert report.ok


async def test_at_a_speed_so_many_seconds_of_arrival_times_are_played_in_one(
    tmp_path: Path, virtual_clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = build_stream(LINES[:50], shards=1, seed=1, records_per_second=1, start_ms=1_400_000_000_000)
    simulation = Simulation(settings(tmp_path), source, clock=virtual_clock, speed=20)
    seen = []

    async def listening() -> str:
        return ""

    async def read_each_second() -> int:
        for _ in range(4):
            seen.append(len(source.read(*source.shards, Place("TRIM_HORIZON"), 100)[0]))
            await virtual_clock.sleep(1)
        return 0

    monkeypatch.setattr(simulation.server, "listening", listening)
    monkeypatch.setattr(simulation.mld, "run", read_each_second)
    await virtual_clock.drive(simulation._play_records(), step=1)
    assert seen == [1, 21, 41, 50]


async def test_a_handler_that_halts_ends_the_simulation_without_success(tmp_path: Path) -> None:
    source = stream(lines=[*LINES[:10], b"not json"])
    cautious = replace(settings(tmp_path), on_failure=OnFailure.HALT, attempts=1)
    report = await Simulation(cautious, source, engine=LocalEngine()).run()
    assert not report.ok
    assert not report.finished
    assert report.exits[0].startswith("1:")


async def test_a_server_that_cannot_start_ends_the_simulation(tmp_path: Path) -> None:
    broken = replace(settings(tmp_path), handler="no.such.handler")
    report = await Simulation(broken, stream(), engine=LocalEngine()).run()
    assert report.server_exit == 2
    assert report.status is None
    assert not report.ok


async def test_a_window_that_keeps_failing_ends_the_simulation(tmp_path: Path) -> None:
    def fail(*_args: object) -> ValueError:
        raise ValueError("no")

    constants = CONSTANTS | {"retry_seconds": (0.01, 0.01)}
    impatient = replace(settings(tmp_path), window_attempts=1, constants=constants)
    seen = []
    report = await Simulation(impatient, stream(), engine=LocalEngine(on_table=fail), max_records=300).run(
        lambda simulation: seen.append(simulation.status)
    )
    assert report.finished
    assert not report.ok
    assert report.status is not None
    assert report.status.windows_halted
    assert len(seen) > 1


def test_the_same_seed_makes_the_same_stream() -> None:
    def shape(seed: int) -> list[tuple[str, tuple[str, ...], int]]:
        made = stream(seed=seed, splits=3, merges=2)
        return [(shard.id, shard.parents, len(shard.records)) for shard in made.shards.values()]

    assert shape(1) == shape(1)
    assert shape(1) != shape(2)
    assert sum(records for _, _, records in shape(1)) == len(LINES)


def test_a_merge_without_neighbours_is_left_out() -> None:
    made = build_stream([b"x"], shards=1, seed=0, merges=2, start_ms=0)
    assert list(made.shards) == ["shardId-000000000000"]
    assert made.ended


@pytest.mark.parametrize("form", list(Form))
async def test_kpl_aggregates_come_out_record_by_record(tmp_path: Path, form: Form) -> None:
    source = FakeStream(2, seed=6)
    for first in range(0, 600, 7):
        group = LINES[first : first + 7]
        source.put_aggregate([(f"key-{first}", line) for line in group])
        source.put(LINES[first], f"plain-{first}")
    source.end()
    faults = Faults(lost_leases=1, crashes=1)
    report = await Simulation(
        settings(tmp_path), source, form=form, seed=6, max_records=20, faults=faults, engine=LocalEngine()
    ).run()
    expected = sorted(
        (shard.id, record.sequence_number, record.sub_sequence_number)
        for shard in source.shards.values()
        for record in shard.records
    )
    assert written(tmp_path, "_sub_sequence") == expected
    assert report.violations == ()
    assert report.ok
