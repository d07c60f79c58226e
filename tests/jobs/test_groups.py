"""Windows that share a job, that are computed again, and that turn out to be somebody else's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from coordinator.pipeline import Pipeline
from jobs.test_runner import W, make, named, three_windows

from mldserver.config.settings import WindowSettings
from mldserver.engine_jobs import WindowJob
from mldserver.errors import DriverLost, LedgerError, WindowFailed
from mldserver.ledger.book import Book, Draft
from mldserver.ledger.contract import WindowState
from mldserver.ledger.operations import Transaction
from mldserver.testing import LocalEngine
from mldserver.windows import TimeWindows

pytestmark = pytest.mark.quick


def shared(
    tmp_path: Path,
    *,
    limit: int = 8,
    fail: Callable[[WindowJob], Exception | None] | None = None,
    **policy: Any,
) -> Pipeline:
    return make(tmp_path, engine=lambda: LocalEngine(fail=fail, group_limit=limit), **policy)


async def test_windows_that_are_ready_together_share_one_job_one_commit_and_one_publishing(
    tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    pipeline = shared(tmp_path)
    async with pipeline.life():
        await three_windows(pipeline)
        assert pipeline.published() == {W[0]: [1, 2], W[1]: [3, 4], W[2]: [5, 6]}
        assert pipeline.engine.groups == [3]
        assert (pipeline.runner.published, len(pipeline.runner.unfinished)) == (3, 0)
    calls = pipeline.faults.calls
    assert [calls.count(call) for call in ("begin_attempts", "commit", "published")] == [1, 1, 1]
    assert [(event["window"], event["rows_out"]) for event in named(logged, "window.done")] == [
        (W[0], 2),
        (W[1], 2),
        (W[2], 2),
    ]


async def test_no_more_windows_share_a_job_than_the_engine_allows(tmp_path: Path) -> None:
    pipeline = shared(tmp_path, limit=2)
    async with pipeline.life():
        await three_windows(pipeline)
        assert len(pipeline.published()) == 3
        assert pipeline.engine.groups == [2, 1]


async def test_large_windows_share_no_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mldserver.jobs.runner._GROUP_BYTES", 1)
    pipeline = shared(tmp_path)
    async with pipeline.life():
        await three_windows(pipeline)
        assert len(pipeline.published()) == 3
        assert pipeline.engine.groups == [1, 1, 1]


@pytest.mark.parametrize("error", [WindowFailed, DriverLost])
async def test_when_a_shared_job_fails_each_window_runs_alone_and_only_the_bad_one_suffers(
    tmp_path: Path, logged: list[dict[str, Any]], error: type[Exception]
) -> None:
    pipeline = shared(
        tmp_path,
        fail=lambda job: error("bad row") if job.window.id == W[0] else None,
        on_failure="dead_letter",
    )
    async with pipeline.life():
        await three_windows(pipeline)
        await pipeline.clock.advance(30)
        assert list(pipeline.published())[:2] == W[1:3]
        assert pipeline.runner.set_aside == 1
        assert pipeline.engine.groups[:6] == [3, 1, 1, 1, 1, 1]
        assert (len(pipeline.runner.unfinished), pipeline.state().windows[W[0]].state) == (
            0,
            WindowState.SET_ASIDE,
        )
    assert [event["windows"] for event in named(logged, "window.group_failed")] == [3]
    assert [event["attempt"] for event in named(logged, "window.failed")] == [1, 2]


async def test_a_shared_commit_whose_answer_is_lost_is_not_computed_again(tmp_path: Path) -> None:
    pipeline = shared(tmp_path)
    lost: list[str] = []

    def lose(name: str, after: bool) -> None:
        if name == "commit" and after and not lost:
            lost.append(name)
            raise LedgerError("no answer")

    pipeline.faults.hook = lose
    async with pipeline.life():
        await three_windows(pipeline)
        assert pipeline.published() == {W[0]: [1, 2], W[1]: [3, 4], W[2]: [5, 6]}
        assert pipeline.engine.groups == [3]


@pytest.mark.parametrize("limit", [1, 8])
@pytest.mark.parametrize(
    ("step", "error"), [("rename", OSError(5, "I/O")), ("published", LedgerError("busy"))]
)
async def test_a_publishing_that_fails_is_done_again_window_by_window(
    tmp_path: Path, limit: int, step: str, error: Exception
) -> None:
    left = [error] * 3

    def fail(name: str, after: bool) -> None:
        if name == step and not after and left:
            raise left.pop()

    pipeline = shared(tmp_path, limit=limit)
    pipeline.faults.hook = fail
    async with pipeline.life():
        await three_windows(pipeline)
        await pipeline.clock.advance(120)
        assert {window: pipeline.published()[window] for window in W[:3]} == {
            W[0]: [1, 2],
            W[1]: [3, 4],
            W[2]: [5, 6],
        }
        computed = [job.window.id for job in pipeline.engine.jobs]
        assert [computed.count(window) for window in W[:3]] == [1, 1, 1]


async def test_a_window_of_the_group_that_lost_its_claim_is_computed_alone(tmp_path: Path) -> None:
    claims: list[int] = []

    def steal(name: str, after: bool) -> None:
        if name == "commit" and not after and not claims:
            claims.extend(pipeline.ledger.store.begin_attempts((W[1],)).values())

    pipeline = shared(tmp_path)
    pipeline.faults.hook = steal
    async with pipeline.life():
        await three_windows(pipeline)
        assert pipeline.published() == {W[0]: [1, 2], W[1]: [3, 4], W[2]: [5, 6]}
        assert pipeline.engine.groups == [3, 1]


@pytest.mark.parametrize("limit", [1, 8])
async def test_windows_that_another_server_has_taken_are_dropped_in_silence(
    tmp_path: Path, logged: list[dict[str, Any]], limit: int
) -> None:
    taken: list[str] = []

    def take(name: str, after: bool) -> None:
        if name == "begin_attempts" and not after and not taken:
            taken.append(name)
            pipeline.ledger.store.ledger._store.transact(Transaction(give_away), Book.state)

    def give_away(draft: Draft) -> None:
        for window_id in draft.book.unfinished:
            draft.windows.put(window_id, replace(draft.book.windows[window_id], owner="two"))

    pipeline = shared(tmp_path, limit=limit)
    pipeline.faults.hook = take
    async with pipeline.life():
        await three_windows(pipeline)
        assert pipeline.published() == {}
        assert (len(pipeline.runner.unfinished), pipeline.engine.jobs) == (0, [])
    assert {event["window"] for event in named(logged, "window.dropped")} == set(W[:3])
    assert named(logged, "window.failed", "window.group_failed") == []


async def test_output_that_somebody_else_has_published_and_replaced_is_let_go(tmp_path: Path) -> None:
    """The ledger says so when the output is gone: it is not waited for for ever."""
    pipeline = shared(tmp_path, limit=1)
    gone: list[str] = []

    def vanish(name: str, after: bool) -> None:
        if name == "rename" and not after and not gone:
            gone.append(name)
            pipeline.ledger.store.published({W[0]: 1}, now_ms=0)
            raise FileNotFoundError(2, "gone")

    pipeline.faults.hook = vanish
    async with pipeline.life():
        await three_windows(pipeline)
        await pipeline.clock.advance(5)
        assert list(pipeline.published())[:2] == W[1:3]
        assert pipeline.runner.halted == {}


# Revisions.


def again(tmp_path: Path, *, limit: int = 1, policy: WindowSettings | None = None) -> Pipeline:
    return Pipeline(
        tmp_path,
        spec=TimeWindows(10_000, "at"),
        recompute=True,
        delay_ms=3000,
        policy=policy,
        engine=lambda: LocalEngine(group_limit=limit),
    )


async def late_row(pipeline: Pipeline, session: Any, number: int, at_ms: int) -> None:
    import pyarrow as pa  # only here

    columns = {
        "value": pa.array([number], pa.int64()),
        "at": pa.array([at_ms], pa.timestamp("ms", tz="UTC")),
    }
    await pipeline.give(session, [(number, 1000 * number)], columns=columns)


async def test_late_rows_make_the_next_revision_over_all_rows_of_the_window(
    tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    pipeline = again(tmp_path)
    async with pipeline.life():
        session = await pipeline.open("a")
        for number, at_ms in ((1, 1000), (2, 15_000)):
            await late_row(pipeline, session, number, at_ms)
        await pipeline.cycle()
        await pipeline.cycle()
        assert pipeline.published() == {W[0]: [1]}
        for number in (3, 4):
            await late_row(pipeline, session, number, 500)
            await pipeline.cycle()
            assert pipeline.published() == {W[0]: [1]}, "late rows are gathered"
        for _ in range(3):
            await pipeline.cycle()
        assert pipeline.published()[W[0]] == [1, 3, 4]
        assert pipeline.late() == []
        jobs = [job for job in pipeline.engine.jobs if job.window.id == W[0]]
        assert [(job.window.revision, job.attempt, job.rows) for job in jobs] == [(1, 1, 1), (2, 2, 3)]
        assert len(list((tmp_path / f"window={W[0]}").iterdir())) == 1
        await pipeline.clock.advance(6)
        assert pipeline.nameless_files() == []
    assert [event["revision"] for event in named(logged, "window.done") if event["window"] == W[0]] == [1, 2]


async def test_what_a_revision_replaced_is_gone_after_the_next_start_at_the_latest(tmp_path: Path) -> None:
    pipeline = again(tmp_path)
    async with pipeline.life():
        session = await pipeline.open("a")
        for number, at_ms in ((1, 1000), (2, 15_000), (3, 500)):
            await late_row(pipeline, session, number, at_ms)
            await pipeline.cycle()
            await pipeline.cycle()
        for _ in range(2):
            await pipeline.cycle()
        assert pipeline.published()[W[0]] == [1, 3]
        assert len(pipeline.nameless_files()) == 1
    async with pipeline.life():
        assert pipeline.nameless_files() == []
        assert pipeline.published()[W[0]] == [1, 3]


async def test_a_disk_that_will_not_delete_what_was_replaced_stops_nothing(tmp_path: Path) -> None:
    pipeline = again(tmp_path)
    async with pipeline.life():
        session = await pipeline.open("a")
        for number, at_ms in ((1, 1000), (2, 15_000), (3, 500)):
            await late_row(pipeline, session, number, at_ms)
            await pipeline.cycle()
            await pipeline.cycle()

        def fail(name: str, after: bool) -> None:
            if name == "delete" and pipeline.published().get(W[0]) == [1, 3]:
                raise OSError(5, "I/O")

        pipeline.faults.hook = fail
        await pipeline.clock.advance(10)
        assert pipeline.published()[W[0]] == [1, 3]
        assert len(pipeline.nameless_files()) == 1


async def test_a_revision_that_is_not_published_when_the_process_dies_is_finished_by_the_next_life(
    tmp_path: Path,
) -> None:
    pipeline = again(tmp_path)
    async with pipeline.life():
        session = await pipeline.open("a")
        for number, at_ms in ((1, 1000), (2, 15_000), (3, 500)):
            await late_row(pipeline, session, number, at_ms)
            await pipeline.cycle()
            await pipeline.cycle()
    assert pipeline.published()[W[0]] == [1]
    async with pipeline.life():
        await pipeline.clock.advance(5)
        assert pipeline.published()[W[0]] == [1, 3]
