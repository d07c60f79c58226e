"""How much of a flood of lines gets into the log."""

from __future__ import annotations

from typing import Any

import pytest

from mldserver.observe.logging import LIMIT_LINES, LIMIT_SECONDS, LineLimit

pytestmark = pytest.mark.quick


def lost(logged: list[dict[str, Any]]) -> list[int]:
    return [event["lines"] for event in logged if event["event"] == "log.lost"]


def test_what_a_flood_loses_is_reported_when_its_time_is_over_and_at_the_end(
    logged: list[dict[str, Any]],
) -> None:
    now = 0.0
    limit = LineLimit(now=lambda: now)
    assert sum(limit.passes() for _ in range(LIMIT_LINES + 30)) == LIMIT_LINES
    now = LIMIT_SECONDS - 0.1
    assert not limit.passes()
    assert lost(logged) == []
    now = LIMIT_SECONDS
    assert sum(limit.passes() for _ in range(LIMIT_LINES + 7)) == LIMIT_LINES
    assert lost(logged) == [31]
    limit.report()
    limit.report()
    assert lost(logged) == [31, 7]


def test_what_cannot_be_reported_stays_counted() -> None:
    reports: list[int] = []
    limit = LineLimit(lambda lines: bool(reports.append(lines)), now=lambda: 0.0)
    limit.lost = 3
    limit.report()
    limit.report()
    assert reports == [3, 3]
