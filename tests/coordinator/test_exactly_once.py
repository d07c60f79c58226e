"""The union of published windows, late rows and dead letters is the input, exactly once, wherever the process dies."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from coordinator.pipeline import Crash, Daemon, Faults, Pipeline

from mldserver.coordinator.windows import Tumbling, WindowSpec, batches
from mldserver.errors import LedgerError

if TYPE_CHECKING:
    from pathlib import Path

SPECS = {"tumbling": Tumbling(10_000), "batches": batches(max_rows=4, max_age="2 s")}


def stream() -> Daemon:
    """A split with another shard beside it; times go back and forth inside shards."""
    return Daemon(
        {
            "a": [(n, 2000 * n - (n % 3) * 1700) for n in range(1, 7)],
            "b": [(n, 8000 + 1500 * n) for n in range(20, 24)],
            "c": [(30, 83_000), (35, 84_000)],
            "z": [(n, 9000 * n) for n in range(1, 6)],
        },
        {"b": ("a",), "c": ("a",)},
    )


async def live(pipeline: Pipeline, daemon: Daemon) -> bool:
    """Run until the stream is read and published, or the process dies; True when it got to the end."""
    done = False

    async def work() -> None:
        await daemon.consume(pipeline)
        await pipeline.coordinator.over()
        await pipeline.runner.idle()

    try:
        async with asyncio.timeout(20), pipeline.life():
            await pipeline.clock.drive(work(), step=1)
            done = True
    except* Crash:
        pass
    return done


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
async def test_a_stream_with_a_split_comes_out_exactly_once(tmp_path: Path, spec: WindowSpec) -> None:
    pipeline, daemon = Pipeline(tmp_path, spec=spec), stream()
    assert await live(pipeline, daemon)
    daemon.assert_exactly_once(pipeline)
    assert pipeline.private_files() == []
    # The sweeps below mean something only while all of these are in it.
    assert Counter(pipeline.faults.calls).keys() >= {
        *("open", "open_shard", "register", "cut", "begin_attempt", "commit", "published"),
        *("write", "publish", "delete"),
    }


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
async def test_wherever_the_process_dies_the_next_life_makes_it_exactly_once(
    tmp_path: Path, spec: WindowSpec
) -> None:
    """Between two calls nothing durable happens: dying before each call is dying anywhere."""
    place, died = 0, True
    while died:
        place += 1
        pipeline, daemon = Pipeline(tmp_path / str(place), spec=spec), stream()
        pipeline.faults.at = place
        died = not await live(pipeline, daemon)
        if died:
            pipeline.faults = Faults()
            daemon.sizes = lambda: 2  # delivered again with other borders
            assert await live(pipeline, daemon)
        daemon.assert_exactly_once(pipeline)
        assert pipeline.private_files() == []
    assert place > 40


@pytest.mark.parametrize("seed", range(8))
async def test_a_process_that_dies_again_and_again_makes_it_exactly_once(tmp_path: Path, seed: int) -> None:
    choose = random.Random(seed)
    pipeline, daemon = Pipeline(tmp_path, spec=choose.choice(list(SPECS.values()))), stream()
    daemon.sizes = lambda: choose.randint(1, 4)
    while True:
        pipeline.faults = Faults(at=choose.randint(1, 60), after=choose.random() < 0.5)
        if await live(pipeline, daemon):
            break
    daemon.assert_exactly_once(pipeline)
    assert pipeline.private_files() == []


def fail_once(faults: Faults, place: int) -> list[str]:
    """Let the n-th call fail, or the next one that the server must survive; return where its name will be."""
    failed: list[str] = []

    def hook(name: str, after: bool) -> None:
        if after or failed or len(faults.calls) < place or name in {"open", "open_shard"}:
            return
        failed.append(name)
        raise OSError(28, "No space left") if name in {"write", "publish", "delete"} else LedgerError(name)

    faults.hook = hook
    return failed


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
async def test_a_call_that_fails_without_effect_costs_nothing(tmp_path: Path, spec: WindowSpec) -> None:
    total = 100
    for place in range(1, total):
        pipeline, daemon = Pipeline(tmp_path / str(place), spec=spec), stream()
        failed = fail_once(pipeline.faults, place)
        assert await live(pipeline, daemon)
        daemon.assert_exactly_once(pipeline)
        assert pipeline.private_files() == []
        assert pipeline.coordinator.status().segment_bytes == 0
        if not failed:
            break
    assert 40 < place < total - 1
