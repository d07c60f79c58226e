"""What a batch costs by its shape, whatever the machine: what is timed is in ``bench/``."""

from __future__ import annotations

import pytest
import uvloop
from bench.hot.calls import calls_of_a_batch


@pytest.mark.parametrize(("workers", "most"), [(None, 70), (1, 105)], ids=["inline", "with a worker"])
def test_a_normal_batch_of_one_record_takes_few_calls(workers: int | None, most: int) -> None:
    """It took 283 inline before it was one call: weight does not creep back."""
    seen = []
    for _ in range(
        3
    ):  # what is done by the clock, which is more on a slow machine, is not beside each of them
        calls = uvloop.run(calls_of_a_batch(workers))
        del calls["ns a call"]
        seen.append(calls)
        if sum(calls.values()) <= most:
            return
    pytest.fail(f"More than {most}: {seen}")
