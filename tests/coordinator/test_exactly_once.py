"""The union of published windows, late rows and dead letters is the input, exactly once, wherever the process dies.

By either policy for late rows: windows in their latest revision, or the late dataset.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest
from coordinator.pipeline import Crash, Daemon, Faults, Pipeline

from mldserver.errors import LedgerError
from mldserver.windows import TimeWindows, WindowSpec, batches

pytestmark = pytest.mark.usefixtures("joins_early")


class Case(NamedTuple):
    """What a pipeline does with its rows."""

    spec: WindowSpec
    recompute: bool
    side_tables: bool = False


CASES = {
    "recompute": Case(TimeWindows(10_000, "at"), recompute=True),
    "separate": Case(TimeWindows(10_000, "at"), recompute=False),
    "side tables": Case(TimeWindows(10_000, "at"), recompute=False, side_tables=True),
    "sliding": Case(TimeWindows(8_000, "at", every_ms=2_000), recompute=True),
    "sliding beside": Case(TimeWindows(8_000, "at", every_ms=2_000), recompute=False),
    "arrival": Case(TimeWindows(10_000), recompute=True),
    "batches": Case(batches(max_rows=4, max_age="2 s"), recompute=True),
}


def step_of(case: Case, *, long: bool) -> int:
    """Return how many calls lie between two places of death: fewest where everything happens, more in a day's run."""
    if not long:
        return 31 if case == CASES["sliding"] else 11  # it has many more calls
    return 1 if case == CASES["recompute"] else 3


every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
every_case_in_long = pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case, id=name, marks=() if name in {"recompute", "side tables", "sliding"} else pytest.mark.long
        )
        for name, case in CASES.items()
    ],
)
"""A day's run sweeps over the ones in which everything happens."""


def stream() -> Daemon:
    """A split with another shard beside it; times go back and forth inside shards, event times far back at the end."""
    return Daemon(
        {
            "a": [(n, 2000 * n - (n % 3) * 1700) for n in range(1, 7)],
            "b": [(n, 8000 + 1500 * n) for n in range(20, 24)],
            "c": [(n, 53_000 + 1000 * n) for n in range(30, 46)],
            "z": [(n, 9000 * n) for n in range(1, 6)],
        },
        {"b": ("a",), "c": ("a",)},
    )


def assert_tidy(pipeline: Pipeline) -> None:
    """No file is left that the ledger does not name; without recomputing none at all.

    Joined files of sliding windows go with their segments.
    """
    left = pipeline.nameless_files()
    assert [name for name in left if not (pipeline.overlap and name.startswith("joined-"))] == []
    if not pipeline.recompute:
        assert pipeline.private_files() == []


async def live(pipeline: Pipeline, daemon: Daemon) -> bool:
    """Run until the stream is read and published, or the process dies; True when it got to the end."""
    done = False

    async def work() -> None:
        await daemon.consume(pipeline)
        await pipeline.coordinator.over()
        await pipeline.runner.idle()
        await pipeline.clock.sleep(6)  # what revisions replaced is deleted a while later

    try:
        async with asyncio.timeout(800), pipeline.life():
            await pipeline.clock.drive(work(), step=1)
            done = True
    except* Crash:
        pass
    return done


@every_case
async def test_a_stream_with_a_split_comes_out_exactly_once(tmp_path: Path, case: Case) -> None:
    pipeline, daemon = Pipeline(tmp_path, **case._asdict()), stream()
    assert await live(pipeline, daemon)
    daemon.assert_exactly_once(pipeline)
    assert_tidy(pipeline)
    # The sweeps below mean something only while all of these are in it.
    assert Counter(pipeline.faults.calls).keys() >= {
        *("open", "open_shard", "register", "cut", "begin_attempts", "commit", "published"),
        *("write", "rename", "delete"),
        *(("late_published",) if not case.recompute else ()),
    }
    if isinstance(case.spec, TimeWindows) and case.spec.on:
        again = {entry.window_id for entry in pipeline.state().windows.values() if entry.revision > 1}
        assert bool(again) == case.recompute != bool(pipeline.late())


@every_case_in_long
async def test_wherever_the_process_dies_the_next_life_makes_it_exactly_once(
    tmp_path: Path, case: Case, long: bool
) -> None:
    """Between two calls nothing durable happens: dying before each call is dying anywhere."""
    step = step_of(case, long=long)
    place, died = 1 - step, True
    while died:
        place += step
        pipeline, daemon = Pipeline(tmp_path / str(place), **case._asdict()), stream()
        pipeline.faults.at = place
        died = not await live(pipeline, daemon)
        if died:
            pipeline.faults = Faults()
            daemon.sizes = lambda: 2  # delivered again with other borders
            assert await live(pipeline, daemon)
        daemon.assert_exactly_once(pipeline)
        assert_tidy(pipeline)
    assert place > 40


def fail_once(faults: Faults, place: int) -> list[str]:
    """Let the n-th call fail, or the next one that the server must survive; return where its name will be."""
    failed: list[str] = []

    def hook(name: str, after: bool) -> None:
        # A start that fails is tried again by whoever started it; an opening, by the daemon.
        if (
            after
            or failed
            or len(faults.calls) < place
            or "open_shard" not in faults.calls
            or name == "open_shard"
        ):
            return
        failed.append(name)
        raise (
            OSError(28, "No space left")
            if name in {"write", "rename", "exchange", "delete"}
            else LedgerError(name)
        )

    faults.hook = hook
    return failed


@every_case_in_long
async def test_a_call_that_fails_without_effect_costs_nothing(tmp_path: Path, case: Case, long: bool) -> None:
    total = 800
    for place in range(1, total, 2 + step_of(case, long=long)):
        pipeline, daemon = Pipeline(tmp_path / str(place), **case._asdict()), stream()
        failed = fail_once(pipeline.faults, place)
        assert await live(pipeline, daemon)
        daemon.assert_exactly_once(pipeline)
        # With recomputation the segments of published windows are retained.
        assert case.recompute or pipeline.private_files() == []
        if not failed:
            break
    assert 40 < place < total - 12
