from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from mldserver.base.clock import SystemClock
from mldserver.spark.driver_messages import StartSession
from mldserver.spark.trainer import train

FAKE = Path(__file__).with_name("fake_driver.py")


@pytest.fixture
def wanted(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "spark-4-java-17-a.jsa"


@pytest.fixture
def start(tmp_path: Path, wanted: Path) -> StartSession:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    return StartSession("local[1]", str(scratch), archive=str(wanted), train=True)


def told(logged: list[dict[str, Any]]) -> dict[str, str]:
    return {
        event["text"]: event["level"] for event in logged if event.get("logger") == "mldserver.spark.trainer"
    }


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def run(start: StartSession, command: list[str]) -> None:
    await train(start, command, dict(os.environ), SystemClock())


async def test_a_trained_archive_is_announced(
    start: StartSession, wanted: Path, tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    await run(start, [sys.executable, str(FAKE), "trains", str(tmp_path / "lives"), f"archive={wanted}"])
    said = f"Spark's classes are archived in {wanted}: later starts take about half the time."
    assert told(logged) == {said: "info"}
    assert names_in(tmp_path) == ["cache", "lives"]


async def test_a_training_without_result_is_a_warning_and_nothing_more(
    start: StartSession, wanted: Path, tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    wanted.parent.mkdir()
    wanted.with_name(f"{wanted.name}.999999999.tmp").write_text("half")
    await run(start, [sys.executable, str(FAKE), "dies at once", str(tmp_path / "lives")])
    said = "No class archive was made. The driver's process died (exit code 3). It said last: java: command not understood"
    assert told(logged) == {said: "warning"}
    assert names_in(wanted.parent) == []


async def test_a_training_that_cannot_start_is_a_warning_too(
    start: StartSession, tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    await run(start, [str(tmp_path / "no-such-program")])
    ((text, level),) = told(logged).items()
    assert level == "warning"
    assert "No such file" in text
