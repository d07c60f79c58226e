"""How ``batches`` windows are numbered."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mldserver.coordinator.core.open_windows import assign
from mldserver.ledger.contract import BatchProgress, BatchStep, batch_id, batch_number
from mldserver.windows import batches

pytestmark = pytest.mark.quick


def test_a_batchs_name_tells_its_number() -> None:
    assert batch_id(7) == "batch-000000000007"
    assert batch_number(batch_id(7)) == 7
    assert batch_number(batch_id(10**13)) == 10**13


@pytest.mark.parametrize(
    "other", ["2013-01-01T10-00-00Z", "ms+0000000000000000007", "batch-", "batch-7x", ""]
)
def test_other_names_have_no_number(other: str) -> None:
    assert batch_number(other) is None


def test_batches_go_on_behind_the_last_that_is_cut() -> None:
    stands = BatchProgress(4, 5, 100)
    assert stands.behind([batch_id(3), "w"]) == stands
    assert stands.behind([batch_id(4)]) == BatchProgress(5)
    assert stands.behind([batch_id(9), batch_id(2)]) == BatchProgress(10)
    assert BatchProgress().behind([]) == BatchProgress()
    assert BatchProgress().behind([batch_id(0)]) == BatchProgress(1)


def step(since: BatchProgress, until: BatchProgress) -> BatchStep:
    return BatchStep(since, until, max_rows=10)


def test_a_step_ends_where_it_was_planned_when_nobody_else_took_one() -> None:
    since, until = BatchProgress(1, 5, 100), BatchProgress(3, 2, 200)
    assert since.moved_on(step(since, until)) == until
    assert since.moved_on(step(since, since)) == since
    # A ledger that is behind what its server has seen.
    assert BatchProgress().moved_on(step(since, until)) == until


def test_a_step_in_the_same_window_counts_on_from_what_others_put_in() -> None:
    since = BatchProgress(1)
    stands = BatchProgress(1, 5, 100)
    assert stands.moved_on(step(since, BatchProgress(1, 4, 200))) == BatchProgress(1, 9, 100)
    assert stands.moved_on(step(since, BatchProgress(1, 5, 200))) == BatchProgress(2)
    assert stands.moved_on(step(since, BatchProgress(1, 6, 200))) is None
    assert BatchProgress(1).moved_on(
        step(BatchProgress(1, 0, 50), BatchProgress(1, 4, 200))
    ) == BatchProgress(1, 4, 200)


def test_a_step_beyond_its_window_is_planned_anew_when_others_were_there() -> None:
    since = BatchProgress(1, 2, 100)
    for stands in (BatchProgress(1, 3, 100), BatchProgress(2), BatchProgress(7, 1, 300)):
        for until in (BatchProgress(2), BatchProgress(2, 1, 200), BatchProgress(9, 9, 200)):
            assert stands.moved_on(step(since, until)) is None
    # But for one that puts nothing in.
    assert BatchProgress(7, 1, 300).moved_on(step(since, since)) == BatchProgress(7, 1, 300)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 25)), max_size=40), st.integers(1, 9))
def test_no_window_has_more_rows_than_its_bound_however_many_servers_plan_at_once(
    flushes: list[tuple[int, int]], max_rows: int
) -> None:
    stands = BatchProgress()
    # Where each server thinks that they stand: they hear of others only when they are refused.
    seen = [stands] * 3
    held: Counter[str] = Counter()
    spec = batches(max_rows=max_rows)
    for now_ms, (server, rows) in enumerate(flushes):
        for _ in range(2):
            planned = assign(spec, np.zeros(rows, np.int64), progress=seen[server], now_ms=now_ms)
            moved = stands.moved_on(BatchStep(seen[server], planned.progress, max_rows))
            if moved is not None:
                break
            seen[server] = stands
        assert moved is not None, "planned from where they stand"
        seen[server], stands = planned.progress, moved
        held.update(planned.keys[place].id for place in planned.index)
    assert max(held.values(), default=0) <= max_rows
    assert sum(held.values()) == sum(rows for _, rows in flushes)
    assert sorted(held) == [batch_id(number) for number in range(len(held))]
    # All but the one in progress are full.
    assert all(held[batch_id(number)] == max_rows for number in range(stands.number))
    assert held[batch_id(stands.number)] == stands.rows
