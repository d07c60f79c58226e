from __future__ import annotations

import pytest

from mldserver.observe.logging import BURST, LINES_A_SECOND, RateLimit

pytestmark = pytest.mark.quick


def test_a_flood_gets_a_burst_and_then_so_many_a_second() -> None:
    now = 0.0
    flood = RateLimit(lambda: now)
    assert sum(flood.passes() for _ in range(2 * BURST)) == BURST
    now = 0.5
    assert sum(flood.passes() for _ in range(2 * BURST)) == LINES_A_SECOND // 2
    now = 3600.0
    assert sum(flood.passes() for _ in range(2 * BURST)) == BURST
