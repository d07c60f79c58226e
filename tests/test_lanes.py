"""Which tests run when: what the lists name is there, and no process is left alone with a long test at the end."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import cast

import pytest
from support.lanes import LONGEST, NOT_QUICK, QUICK, SERVICES, TESTS, dealt


@dataclass(frozen=True)
class Item:
    """As much of a test as the order depends on."""

    path: Path


@pytest.mark.parametrize("name", [*QUICK, *NOT_QUICK, *SERVICES, *chain.from_iterable(LONGEST)])
def test_what_a_lane_names_is_there(name: str) -> None:
    assert (TESTS / name).exists()


@pytest.mark.parametrize("processes", [2, 3, 4])
def test_each_process_begins_with_a_share_of_the_longest(processes: int) -> None:
    long = {TESTS / name / "test_one.py" if not name.endswith(".py") else TESTS / name for name in LONGEST[0]}
    long |= {TESTS / "spark" / f"test_{n}.py" for n in range(4)} | {TESTS / "crash" / "test_world.py"}
    items = [Item(path) for path in sorted(long)] + [Item(TESTS / "base" / f"test_{n}.py") for n in range(90)]
    ordered = [cast("Item", item) for item in dealt(cast("list[pytest.Item]", items), processes)]
    assert sorted(ordered, key=str) == sorted(items, key=str)
    begins = [0]
    for left in range(processes, 1, -1):
        begins.append(begins[-1] + (len(items) - begins[-1]) // left)
    assert all(ordered[at].path in long for at in begins[: len(LONGEST)])
    # One process has all that shares Spark's session.
    spark = [at for at, item in enumerate(ordered) if item.path.parent == TESTS / "spark"]
    assert spark == list(range(spark[0], spark[0] + 4))
