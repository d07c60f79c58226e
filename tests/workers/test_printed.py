"""What of a worker's pipe gets into the log, and what is kept for when it dies."""

from __future__ import annotations

from typing import Any

from workers.kit import named

from mldserver.observe.logging import BURST, Printed
from mldserver.workers.process import _Printed


def told(logged: list[dict[str, Any]]) -> list[str]:
    return [event["text"] for event in named(logged, "handler.output")]


def test_lines_are_logged_and_empty_ones_are_not(logged: list[dict[str, Any]]) -> None:
    printed = _Printed()
    assert printed.take(["one", "", "two"])
    assert told(logged) == ["one", "two"]
    assert printed.last_words == "one\n\ntwo"


def test_a_flood_is_cut_and_slowed_and_what_was_left_out_is_counted(logged: list[dict[str, Any]]) -> None:
    now = 0.0
    printed = _Printed()
    printed._limit = Printed(lambda: now)
    assert not printed.take(["x"] * (BURST + 500))
    assert (len(told(logged)), named(logged, "log.lost")) == (BURST, [])
    now += 1
    assert printed.take(["y"])
    assert told(logged)[BURST:] == ["y"]
    assert not printed.take(["z"] * 10_000)
    printed.end()
    assert sum(event["lines"] for event in named(logged, "log.lost")) + len(told(logged)) == BURST + 10_501


def test_after_stacks_were_asked_for_lines_are_kept_and_not_logged(logged: list[dict[str, Any]]) -> None:
    printed = _Printed()
    printed.take(["before"])
    printed.only_keep()
    assert printed.take(["y"] * 2000 + ["File a.py, line 1"])
    assert told(logged) == ["before"]
    assert printed.last_words.endswith("y\nFile a.py, line 1")
    assert "before" not in printed.last_words
