"""The driver's own process, in this one."""

from __future__ import annotations

import errno
import io
import os
import socket
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from spark.bench import job

from mldserver.children.channel import FRAME_BYTES, pair, send_now
from mldserver.spark.driver import Driver, Jobs
from mldserver.spark.driver_messages import Log, RunWindows, StartSession
from mldserver.spark.session import DriverSession


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_driver_leaves_though_a_hook_has_closed_a_standard_stream(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    left = []
    monkeypatch.setattr(os, "_exit", left.append)
    closed = io.TextIOWrapper(io.BytesIO())
    closed.close()
    monkeypatch.setattr(sys, name, closed)
    here, there = socket.socketpair()
    with closing(here), closing(there):
        driver = Driver(here)
        driver._start = StartSession("local[1]", scratch=str(tmp_path / "scratch"))
        driver._session = cast("DriverSession", SimpleNamespace(stop=lambda: None, jvm=None))
        driver._jobs = cast("Jobs", SimpleNamespace())
        driver._stop()
    assert left == [0]


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[Driver]:
    """Notes the drivers that end at once, instead of this process."""
    drivers: list[Driver] = []
    monkeypatch.setattr(Driver, "die", lambda driver: drivers.append(driver))  # noqa: PLW0108  # it is to be bound
    return drivers


def test_a_driver_that_can_take_no_job_ends_at_once(
    ended: list[Driver], capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(_: object) -> None:
        raise RuntimeError("can't start new thread")

    here, there = pair()
    with closing(here), closing(there):
        driver = Driver(there)
        driver._jobs = cast("Jobs", SimpleNamespace(start=refuse))
        send_now(here, RunWindows(1, (job("w"),)))
        driver.run()
    assert ended == [driver]
    assert capsys.readouterr().err == "the server's messages cannot be taken: can't start new thread\n"


def test_a_driver_that_cannot_answer_ends_at_once(
    ended: list[Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", full)
    here, there = pair()
    with closing(here), closing(there):
        driver = Driver(here)
        driver.send(Log("warning", "x" * FRAME_BYTES))
    assert ended == [driver]
