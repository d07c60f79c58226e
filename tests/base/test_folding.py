"""Equal events become one line a minute."""

from __future__ import annotations

import pytest

from mldserver.base.folding import Folding

pytestmark = pytest.mark.quick


def test_equal_events_become_one_line_a_minute_that_counts_them() -> None:
    now = [0]
    folding = Folding(lambda: now[0], most=2)
    assert [folding.count("a") for _ in range(4)] == [1, 0, 0, 0]
    assert folding.count("b") == 1
    now[0] = 59_999
    assert folding.count("a") == 0
    now[0] = 60_000
    assert [folding.count("a") for _ in range(2)] == [5, 0]


def test_beyond_what_is_remembered_the_event_that_was_not_seen_for_longest_is_forgotten() -> None:
    folding = Folding(lambda: 0, most=2)
    assert [folding.count(failure) for failure in "abaca"] == [1, 1, 0, 1, 0]
    assert folding.count("b") == 1
