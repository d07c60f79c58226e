from __future__ import annotations

from typing import Any

import pytest

from mldserver.observe.logging import BURST, LINES_A_SECOND, Printed

pytestmark = pytest.mark.quick


def lost(logged: list[dict[str, Any]]) -> list[int]:
    return [event["lines"] for event in logged if event["event"] == "log.lost"]


def test_what_a_flood_loses_is_told_once_a_second_and_at_the_end(logged: list[dict[str, Any]]) -> None:
    now = 0.0
    printed = Printed(lambda: now)
    assert sum(printed.passes() for _ in range(BURST + 30)) == BURST
    now = 0.5
    assert sum(printed.passes() for _ in range(LINES_A_SECOND)) == LINES_A_SECOND // 2
    assert lost(logged) == []
    now = 1.5
    assert printed.passes()
    assert lost(logged) == [30 + LINES_A_SECOND // 2]
    now = 100.0
    assert sum(printed.passes() for _ in range(BURST + 7)) == BURST
    printed.tell()
    printed.tell()
    assert lost(logged) == [30 + LINES_A_SECOND // 2, 1, 6]
