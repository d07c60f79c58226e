"""What of a worker's pipe gets into the log, and what is kept for when it dies."""

from __future__ import annotations

from typing import Any

from workers.kit import named

from mldserver.observe.logging import BURST, Printed
from mldserver.workers.worker_process import _RawOutput


def told(logged: list[dict[str, Any]]) -> list[str]:
    return [event["text"] for event in named(logged, "handler.output")]


def test_lines_are_logged_and_empty_ones_are_not(logged: list[dict[str, Any]]) -> None:
    printed = _RawOutput()
    assert printed.take(["one", "", "two"])
    assert told(logged) == ["one", "two"]
    assert list(printed.last) == ["one", "", "two"]


def test_a_flood_is_cut_and_slowed_and_what_was_left_out_is_counted(logged: list[dict[str, Any]]) -> None:
    now = 0.0
    printed = _RawOutput(Printed(lambda: now))
    assert not printed.take(["x"] * (BURST + 500))
    assert (len(told(logged)), named(logged, "log.lost")) == (BURST, [])
    now += 1
    assert printed.take(["y"])
    assert told(logged)[BURST:] == ["y"]
    assert not printed.take(["z"] * 10_000)
    printed.limit.tell()
    assert sum(event["lines"] for event in named(logged, "log.lost")) + len(told(logged)) == BURST + 10_501
