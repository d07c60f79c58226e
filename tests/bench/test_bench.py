"""The benchmarks run and come to right results; how fast they are is not asserted."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from bench.command import main
from bench.rounds import in_turn, timed

if TYPE_CHECKING:
    from pathlib import Path


def test_every_benchmark_runs_at_a_tiny_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = tmp_path / "told.json"
    arguments = [
        "--rows",
        "10",
        "3000",
        "--per-row",
        "3000",
        "--seconds",
        "40",
        "--rounds",
        "1",
        "--pace",
        "0",
        "--small-windows",
        "12",
        "--retained",
        "300",
        "--disk",
        "2",
        "--share",
        "0.01",
    ]
    assert main([*arguments, "--engine", "local", "--folder", str(tmp_path), "--json", str(told)]) == 0
    document = json.loads(told.read_text())
    assert [each["rows"] for each in document["windows"]] == [10, 3000]
    assert all(each["ratio"] > 0 for each in document["windows"])
    assert set(document["small_windows"]) == {"together", "singly"}
    assert set(document["per_row"]) == {"merge", "heap", "write", "bare_write", "bare_write_snappy"}
    assert document["checkpoints"]["batches"] == 3 * 40
    assert document["checkpoints"]["windows"] == 0
    # On a virtual clock this is no matter of speed: the flush interval of 5 s, and the next request.
    assert 0 < document["checkpoints"]["median_seconds"] <= document["checkpoints"]["longest_seconds"] <= 8
    assert set(document["retained"]) == {"100", "300"}
    caught = document["catch_up"]
    assert caught["stream_bytes"] == 10 * caught["disk_bytes"]
    assert caught["buffered_bytes"] <= caught["buffer_bytes"] + 4 * 300_000
    assert set(document["hot"]["shapes"]) == {"1 x 100 B", "500 x 100 B", "500 x 1 KiB", "10,000 x 1 KiB"}
    printed = capsys.readouterr().out
    assert "ns a row" in printed
    assert "What it must reach" in printed
    assert [path.name for path in tmp_path.iterdir()] == ["told.json"]


@pytest.mark.slow
def test_windows_are_measured_on_spark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = tmp_path / "told.json"
    arguments = ["--only", "windows", "--rows", "500", "--rounds", "1", "--pace", "0"]
    assert main([*arguments, "--folder", str(tmp_path), "--json", str(told)]) == 0
    (measured,) = json.loads(told.read_text())["windows"]
    assert measured["rows"] == 500
    assert "(spark)" in capsys.readouterr().out


def test_nobody_is_always_first() -> None:
    assert in_turn(("a", "b", "c"), 2) == ["a", "b", "c", "b", "c", "a"]


def test_the_first_round_warms_up_and_does_not_count() -> None:
    calls: list[str] = []
    assert set(timed({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 2)) == {"a", "b"}
    assert calls == ["a", "b", "b", "a", "a", "b"]
