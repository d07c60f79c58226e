"""The benchmarks run and come to right results; how fast they are is not asserted."""

from __future__ import annotations

import io
import json
import resource
from pathlib import Path
from typing import Final

import pytest
from bench.command import WIDTH, main
from bench.hot import peers
from bench.hot.lines import Shape
from bench.hot.matrix_tables import matrix_tables
from bench.hot.room import FILES, Room, open_files
from bench.hot.runs import BARE, Effort, side_by_side
from bench.rounds import against, in_turn, timed
from rich.console import Console

GIB: Final = 1 << 30


def test_a_benchmark_runs_at_a_tiny_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = tmp_path / "told.json"
    arguments = ["--only", "windows", "--rows", "10", "--rounds", "2", "--warm-up", "1", "--pace", "0"]
    arguments += ["--engine", "local"]
    assert main([*arguments, "--folder", str(tmp_path), "--json", str(told)]) == 0
    assert [each["rows"] for each in json.loads(told.read_text())["windows"]] == [10]
    assert "(local)" in capsys.readouterr().out


@pytest.mark.long
def test_every_benchmark_runs_at_a_tiny_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = tmp_path / "told.json"
    arguments = [
        "--rows",
        "10",
        "3000",
        "--warm-up",
        "1",
        "--per-row",
        "3000",
        "--seconds",
        "40",
        "--rounds",
        "1",
        "--pace",
        "0",
        "--segments",
        "1",
        "20",
        "--segment-rows",
        "3000",
        "--small-windows",
        "12",
        "--retained",
        "300",
        "--poison",
        "500",
        "--records",
        "3000",
        "--state-records",
        "3000",
        "--clicks",
        "3000",
        "--timers",
        "3000",
        "--idle-timers",
        "5",
        "--load-seconds",
        "2",
        "--phase-seconds",
        "1",
        "--requests",
        "50",
        "--share",
        "0.01",
        "--shapes",
        "500x100",
        "10000x1024",
        "--connections",
        "3",
        "--memory",
        "40",
    ]
    assert main([*arguments, "--engine", "local", "--folder", str(tmp_path), "--json", str(told)]) == 0
    document = json.loads(told.read_text())
    assert [each["rows"] for each in document["windows"]] == [10, 3000]
    assert all(each["ratio"] > 0 for each in document["windows"])
    assert set(document["segments"]) == {"1", "20"}
    ways = {"together", "singly", "together on S3", "singly on S3", "floor"}
    assert set(document["small_windows"]) == ways
    assert set(document["per_row"]) == {"merge", "heap", "write", "bare_write", "bare_write_snappy"}
    assert document["checkpoints"]["batches"] == 3 * 40
    assert document["checkpoints"]["windows"] == 0
    # On a virtual clock this is no matter of speed: the flush interval of 5 s, and the next request.
    assert 0 < document["checkpoints"]["median_seconds"] <= document["checkpoints"]["longest_seconds"] <= 8
    assert set(document["retained"]) == {"100", "300"}
    assert set(document["poison"]) == {"good", "poison", "share"}
    assert set(document["streams"]["merge"]) == {"8", "64", "512"}
    assert set(document["streams"]["read"]) == {"1", "8", "64"}
    assert {"stateless", "keyed", "worker", "dict"} <= set(document["state"]["10000"])
    assert set(document["timers"]) == {"1", "10"}
    assert all(each["fired_s"] > 0 and each["late_50"] > 0 for each in document["timers"].values())
    assert document["functions"]["one"]["resident"] < document["functions"]["five"]["resident"]
    assert set(document["isolation"]) == {"alone", "raises", "floods", "sleeps", "kills", "all of them"}
    assert all(0 < each["p50_ms"] <= each["p99_ms"] for each in document["isolation"].values())
    assert document["admin_load"]["beside records_s"] > 0
    assert set(document["hot"]["shapes"]) == {"1 x 100 B", "500 x 100 B", "500 x 1 KiB", "10,000 x 1 KiB"}
    cells = document["hot"]["matrix"]["cells"]
    assert set(cells) == {"500 x 100 B", "10,000 x 1 KiB"}
    small, large = cells["500 x 100 B"]["3"], cells["10,000 x 1 KiB"]["3"]
    assert set(small["measured"]) == {"raw echo", "inline", "workers", "amazon_kclpy", "bare decode"}
    assert not small["left_out"]
    assert not large["measured"]
    assert "3 lines of 14.9 MiB in flight" in large["left_out"]["inline"]
    printed = capsys.readouterr().out
    assert "ns a row" in printed
    assert "What it must reach" in printed
    assert "not measured (1)" in printed
    assert [path.name for path in tmp_path.iterdir()] == ["told.json"]


@pytest.mark.long
@pytest.mark.slow
def test_windows_are_measured_on_spark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = tmp_path / "told.json"
    arguments = ["--only", "windows", "--rows", "500", "--rounds", "1", "--warm-up", "1", "--pace", "0"]
    assert main([*arguments, "--folder", str(tmp_path), "--json", str(told)]) == 0
    (measured,) = json.loads(told.read_text())["windows"]
    assert measured["rows"] == 500
    assert "(spark)" in capsys.readouterr().out


async def test_no_further_round_begins_when_the_time_is_over() -> None:
    shape = Shape(1, 100, 3)
    async with peers.echo() as echo:
        told = await side_by_side({"raw echo": echo}, shape, Effort(3, 0.1), connections=2, bare=True)
        assert told["raw echo"]["rounds"] == 3
        assert told["raw echo"]["resident_bytes"] > 0
        assert set(told) == {"raw echo", BARE}
        told = await side_by_side({"raw echo": echo}, shape, Effort(3, 0.1, seconds=0), connections=2)
        assert told["raw echo"]["rounds"] == 1


def test_a_cell_that_memory_has_no_room_for_says_how_much_it_lacks() -> None:
    room = Room(memory=2 * GIB, files=10_000)
    assert room.lacking(64, GIB // 64) is None
    lacking = "65 lines of 16.0 MiB in flight, held by 2 servers: 2.0 GiB, where 2.0 GiB may be used"
    assert room.lacking(65, GIB // 64) == lacking
    assert room.lacking_for_processes(64, GIB // 128, GIB // 128) is None
    lacking = "128 processes of 16.0 MiB beside the servers: 2.1 GiB, where 2.0 GiB may be used"
    assert room.lacking_for_processes(128, GIB // 64, 400 << 10) == lacking


def test_a_cell_that_needs_more_open_files_than_are_allowed_says_so() -> None:
    room = Room(memory=GIB, files=1024)
    assert room.lacking(2000, 400) == "6,200 open files, the limit is 1,024"
    assert room.lacking(200, 400) is None
    assert room.lacking_for_processes(200, 1, 400) == "1,200 open files, the limit is 1,024"


def test_as_many_files_may_be_open_as_the_largest_cell_needs_and_only_meanwhile() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
        with open_files():
            assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(FILES, before[1])
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 1024
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_matrix_shows_ratios_beside_numbers_and_why_somebody_is_missing() -> None:
    numbers = {"cpu_ns": 200.0, "cpu_s_gib": 0.2, "records_s": 1e6, "p50_us": 500.0, "p99_us": 900.0}
    echo = {**numbers, "rounds": 3}
    inline = {**{name: 5 * number for name, number in numbers.items()}, "rounds": 3}
    cell = {
        "batches": 7,
        "measured": {"raw echo": echo, "inline": inline, "bare decode": {"cpu_ns": 50.0, "cpu_s_gib": 0.1}},
        "left_out": {"amazon_kclpy": "too many processes"},
    }
    alone = {"batches": 80, "measured": {"raw echo": echo, "amazon_kclpy": inline}, "left_out": {}}
    measured = {
        "cells": {"500 x 1 KiB": {1: alone, 64: cell}},
        "workers": 3,
        "seconds": 1.0,
        "load": [0.5, 2.0],
    }
    printed = io.StringIO()
    Console(width=WIDTH, file=printed).print(*matrix_tables(measured))
    shown = [" ".join(line.replace("│", " ").split()) for line in printed.getvalue().splitlines()]
    assert "64 3 x 7 raw echo 200 0.20 1,000,000 0.50 0.90" in shown
    assert "inline 1,000 (5) 1.00 (5) 5,000,000 (5) 2.50 (5) 4.50 (5)" in shown
    assert "bare decode 50 (0.25) 0.10 (0.5)" in shown
    assert "1 3 x 80 raw echo 200 0.20 1,000,000 0.50 0.90 5 x" in shown
    assert "amazon_kclpy not measured (1)" in shown
    assert "(1) too many processes" in shown


def test_nobody_is_always_first() -> None:
    assert in_turn(("a", "b", "c"), 2) == ["a", "b", "c", "b", "c", "a"]


def test_the_first_round_warms_up_and_does_not_count() -> None:
    calls: list[str] = []
    assert set(timed({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 2)) == {"a", "b"}
    assert calls == ["a", "b", "b", "a", "a", "b"]


def test_a_ratio_says_how_far_chance_alone_takes_it() -> None:
    assert against([6.0], [4.0]) == (1.5, None)
    assert against([6.0, 6.0], [4.0, 4.0]) == (1.5, 0.0)
    # By hand: each deviates by sqrt(16 / 3) of 10, or as much of 5; both together sqrt(2) of that, and half for four rounds.
    assert against([8.0, 12.0] * 2, [4.0, 6.0] * 2) == pytest.approx((2.0, 2 * (2 / 3) ** 0.5 / 5))
