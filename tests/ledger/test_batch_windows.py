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
    assert stands.moved_on(step(since, BatchProgress(1, 6, 200))) == BatchProgress(2)
    assert BatchProgress(1).moved_on(
        step(BatchProgress(1, 0, 50), BatchProgress(1, 4, 200))
    ) == BatchProgress(1, 4, 200)


def test_a_step_into_another_window_than_that_in_progress_never_goes_back() -> None:
    since = BatchProgress(1, 2, 100)
    stands = BatchProgress(2, 4, 300)
    assert stands.moved_on(step(since, BatchProgress(1, 9, 100))) == stands
    assert stands.moved_on(step(since, BatchProgress(2))) == stands
    assert stands.moved_on(step(since, BatchProgress(2, 5, 400))) == BatchProgress(2, 9, 300)
    assert stands.moved_on(step(since, BatchProgress(2, 7, 400))) == BatchProgress(3)
    assert stands.moved_on(step(since, BatchProgress(3, 1, 400))) == BatchProgress(3, 1, 400)
    assert BatchProgress(2).moved_on(step(since, BatchProgress(2, 5, 400))) == BatchProgress(2, 5, 400)
    assert stands.moved_on(step(since, since)) == stands, "one that puts nothing in"


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 25)), max_size=40), st.integers(1, 9))
def test_each_server_keeps_the_bound_and_no_row_is_counted_twice(
    steps: list[tuple[int, int]], max_rows: int
) -> None:
    stands = BatchProgress()
    # Where each server believes that they stand: without rows, a step is a look at the ledger.
    seen = [stands] * 3
    held: Counter[tuple[int, str]] = Counter()
    spec = batches(max_rows=max_rows)
    for now_ms, (server, rows) in enumerate(steps):
        if not rows:
            seen[server] = stands
            continue
        planned = assign(spec, np.zeros(rows, np.int64), progress=seen[server], now_ms=now_ms)
        stands = stands.moved_on(BatchStep(seen[server], planned.progress, max_rows))
        seen[server] = planned.progress
        held.update((server, planned.keys[place].id) for place in planned.index)
    windows: Counter[str] = Counter()
    for (_, window), rows in held.items():
        windows[window] += rows
    assert max(held.values(), default=0) <= max_rows, "of each server"
    assert sum(windows.values()) == sum(rows for _, rows in steps)
    assert sorted(windows) == [batch_id(number) for number in range(len(windows))], "no number is left out"
    # All but the one in progress are full.
    assert all(windows[batch_id(number)] >= max_rows for number in range(stands.number))
    assert windows[batch_id(stands.number)] == stands.rows
