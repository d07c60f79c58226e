"""What of a worker's pipe gets into the log, and what is kept for when it dies."""

from __future__ import annotations

from typing import Any

from workers.kit import named

from mldserver.observe.logging import LIMIT_LINES, LIMIT_SECONDS, LineLimit
from mldserver.workers.worker_process import _RawOutput


def told(logged: list[dict[str, Any]]) -> list[str]:
    return [event["text"] for event in named(logged, "handler.output")]


def test_lines_are_logged_and_empty_ones_are_not(logged: list[dict[str, Any]]) -> None:
    printed = _RawOutput()
    assert printed.log_lines(["one", "", "two"])
    assert told(logged) == ["one", "two"]
    assert list(printed.last) == ["one", "", "two"]


def test_a_flood_is_cut_and_slowed_and_what_was_left_out_is_counted(logged: list[dict[str, Any]]) -> None:
    now = 0.0
    printed = _RawOutput(LineLimit(now=lambda: now))
    assert not printed.log_lines(["x"] * (LIMIT_LINES + 500))
    assert (len(told(logged)), named(logged, "log.lost")) == (LIMIT_LINES, [])
    now += LIMIT_SECONDS
    assert printed.log_lines(["y"])
    assert told(logged)[LIMIT_LINES:] == ["y"]
    assert not printed.log_lines(["z"] * 10_000)
    printed.limit.report()
    assert (
        sum(event["lines"] for event in named(logged, "log.lost")) + len(told(logged)) == LIMIT_LINES + 10_501
    )
