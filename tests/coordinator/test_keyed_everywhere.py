"""Every record counts once in its key's state, wherever the process dies, and whichever call fails or loses its answer."""

from __future__ import annotations

from pathlib import Path

import pytest
from coordinator.keyed import Daemon, a_pipeline, run
from coordinator.pipeline import Crash, Faults, Pipeline

from mldserver.errors import LedgerError
from mldserver.output.layout import STATE

CALLS = {"register", "compact_state", "forget_state_files", "open_shard", "peek", "write", "delete"}


def step_of(*, long: bool) -> int:
    """Return how many calls lie between two places."""
    return 1 if long else 13


async def lives(pipeline: Pipeline, daemon: Daemon) -> bool:
    """Run until all is counted, or the process dies; True when it got to the end."""
    done = False
    try:
        await run(pipeline, daemon)
        done = True
    except* Crash:
        pass
    return done


def assert_tidy(pipeline: Pipeline) -> None:
    """No state file is left that the ledger does not name."""
    named = {Path(path).name for path in pipeline.state().state_files}
    assert {path.name for path in (pipeline.out / STATE).glob("*")} == named


@pytest.mark.parametrize("after", [False, True])
async def test_wherever_the_process_dies_the_next_life_counts_every_record_once(
    tmp_path: Path, long: bool, after: bool
) -> None:
    place, died = 1, True
    while died:
        pipeline, daemon = a_pipeline(tmp_path / str(place)), Daemon()
        pipeline.faults.at, pipeline.faults.after = place, after
        died = not await lives(pipeline, daemon)
        if died:
            pipeline.faults = Faults()
            daemon.size = 3  # delivered again with other borders
            assert await lives(pipeline, daemon)
        assert_tidy(pipeline)
        place += step_of(long=long)
    assert place > 100
    assert set(pipeline.faults.calls) > CALLS


def fail_once(faults: Faults, place: int, *, answer: bool) -> list[str]:
    """Let the n-th call fail, or the next one that the server must survive; ``answer``: after it took effect.

    Returns where its name will be.
    """
    failed: list[str] = []

    def hook(name: str, after: bool) -> None:
        # A start that fails is tried again by whoever started it.
        if failed or after != answer or len(faults.calls) < place or "open_shard" not in faults.calls:
            return
        if name in {"write", "delete", "rename"}:
            failed.append(name)
            raise OSError(28, "No space left")
        failed.append(name)
        raise LedgerError(name)

    faults.hook = hook
    return failed


@pytest.mark.parametrize("answer", [False, True], ids=["without effect", "lost answer"])
async def test_a_call_that_fails_costs_nothing(tmp_path: Path, long: bool, answer: bool) -> None:
    place, total = 1, 1000
    while place < total:
        pipeline, daemon = a_pipeline(tmp_path / str(place)), Daemon()
        failed = fail_once(pipeline.faults, place, answer=answer)
        assert await lives(pipeline, daemon)
        assert_tidy(pipeline)
        if not failed:
            break
        place += step_of(long=long)
    assert 100 < place < total
