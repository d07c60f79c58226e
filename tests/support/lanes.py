"""How much a test lane does: examples, processes, seeds. Markers in the test files say which tests are in a lane."""

from __future__ import annotations

import os
from typing import Any, Final

import pytest

__all__ = ["EXAMPLES", "PROCESSES", "seeds"]

EXAMPLES: Final = {"core": 20, "quick": 20, "services": 100, "day": 100, "long": 500}
"""How many examples Hypothesis draws for a property that does not set a number."""

_THIRD: Final = len(os.sched_getaffinity(0)) > 2
"""Whether this process may use a third processor."""
PROCESSES: Final = {"core": 0, "quick": 2, "services": 2 + _THIRD, "day": 3 + _THIRD, "long": 2}
"""How many processes run a lane. By day one more than the processors: one often waits. Each may start a Spark of about 1 GiB."""


def seeds(count: int) -> list[Any]:
    """Return ``count`` seeds for a parametrized test, the second half marked for the long lane."""
    return [pytest.param(n, marks=pytest.mark.long) if 2 * n >= count else n for n in range(count)]
