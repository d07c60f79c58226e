"""What a batch costs by its shape, whatever the machine: what is timed is in ``bench/``."""

from __future__ import annotations

import uvloop
from bench.hot.calls import calls_of_a_batch


def test_a_normal_batch_of_one_record_takes_few_calls() -> None:
    """It took 283 before it was one call: weight does not creep back."""
    calls = uvloop.run(calls_of_a_batch())
    del calls["ns a call"]
    assert sum(calls.values()) <= 90, calls
