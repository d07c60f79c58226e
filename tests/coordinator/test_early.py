"""Early results: what an open window holds so far, which no reader finds beside the final one, whatever dies."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from coordinator.pipeline import Faults, Pipeline, named, two
from coordinator.test_exactly_once import live, stream
from support.sqlite_table import TableEngine, read_table

from mldserver.engine_jobs import WindowJob
from mldserver.errors import DriverLost, LedgerError, WindowFailed
from mldserver.output.manifest import current_files
from mldserver.testing import LocalEngine
from mldserver.windows import TimeWindows, time_window_id

pytestmark = pytest.mark.quick

SPEC = TimeWindows(10_000, early_ms=2000)
W = [time_window_id(start) for start in range(0, 100_000, 10_000)]


def early(pipeline: Pipeline) -> dict[str, list[int]]:
    """Return the values of each early result that is shown."""
    return {
        folder.name.removeprefix("window="): sorted(
            value
            for file in folder.glob("*.parquet")
            for value in pq.ParquetFile(file).read(["value"])["value"].to_pylist()
        )
        for folder in sorted(pipeline.out.glob("_early/window=*"))
    }


def watch(pipeline: Pipeline) -> list[str]:
    """Look at each step of the pipeline for a window that is shown twice; return those, as they are found."""
    found: list[str] = []

    def look(name: str, after: bool) -> None:
        shown = {folder.name for folder in pipeline.out.glob("window=*")}
        found.extend(
            f"{folder.name} at {name}"
            for folder in pipeline.out.glob("_early/window=*")
            if folder.name in shown
        )

    pipeline.faults.hook = look
    return found


async def test_an_open_window_shows_what_it_holds_until_its_result_takes_that_away(
    tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    pipeline = Pipeline(tmp_path, spec=SPEC)
    async with pipeline.life():
        twice = watch(pipeline)
        session = await pipeline.open("a")
        await pipeline.give(session, [(1, 1000), (2, 2000)], lag_ms=1)
        await pipeline.clock.advance(5)
        assert (early(pipeline), pipeline.published()) == ({W[0]: [1, 2]}, {})
        await pipeline.give(session, [(3, 3000)], lag_ms=1)
        await pipeline.clock.advance(5)
        assert early(pipeline) == {W[0]: [1, 2, 3]}
        assert len(named(logged, "window.early")) == 2, "nothing was computed that had not changed"
        await pipeline.give(session, [(4, 12_000)], lag_ms=1)
        await pipeline.clock.advance(5)
        assert (early(pipeline), pipeline.published()) == ({W[1]: [4]}, {W[0]: [1, 2, 3]})
        await pipeline.clock.advance(10)
        assert [name for name in pipeline.private_files() if "part-" in name] == []
        assert twice == []
    assert [job.window.final for job in pipeline.engine.jobs] == [False, False, True, False]
    assert {job.window.revision for job in pipeline.engine.jobs if not job.window.final} == {0}


async def test_readers_choose_whether_they_see_early_results(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, spec=SPEC)
    async with pipeline.life():
        session = await pipeline.open("a")
        await pipeline.give(session, [(1, 1000), (4, 12_000)], lag_ms=1)
        await pipeline.clock.advance(8)
    windows = [
        [path.split("/")[-2] for path in current_files(str(tmp_path), early=both).paths]
        for both in (False, True)
    ]
    assert windows == [[f"window={W[0]}"], [f"window={W[0]}", f"window={W[1]}"]]


async def test_a_window_that_is_cut_cancels_the_early_job(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, spec=SPEC)

    class Slow(LocalEngine):
        async def compute(self, job: WindowJob) -> Any:
            await pipeline.clock.sleep(0 if job.window.final else 60)
            return await super().compute(job)

    pipeline.make_engine = Slow
    async with pipeline.life():
        session = await pipeline.open("a")
        await pipeline.give(session, [(1, 1000)], lag_ms=1)
        await pipeline.clock.advance(5)
        await pipeline.give(session, [(4, 12_000)], lag_ms=1)
        await pipeline.clock.advance(3)
        assert pipeline.published() == {W[0]: [1]}
        await pipeline.clock.advance(100)
        assert early(pipeline) == {W[1]: [4]}


async def test_an_early_result_that_comes_after_the_cut_is_not_shown(
    tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    one, other = two(tmp_path, spec=SPEC)

    class Slow(LocalEngine):
        async def compute(self, job: WindowJob) -> Any:
            result = await super().compute(job)
            await one.clock.sleep(0 if job.window.final else 9)
            return result

    one.make_engine = Slow
    async with one.life(), other.life():
        left, right = await one.open("a"), await other.open("b")
        await one.give(left, [(1, 1000)], lag_ms=1)
        await other.give(right, [(2, 2000)], lag_ms=1)
        await one.clock.advance(4)
        other.coordinator.cuts_all = True  # the other one cuts what this one computes early
        await one.clock.advance(12)
        assert other.published() == {W[0]: [1, 2]}
        assert early(one) == {}
    assert named(logged, "window.early") == []


async def test_one_server_computes_early_results_and_another_when_it_is_gone(tmp_path: Path) -> None:
    one, other = two(tmp_path, spec=SPEC)
    async with other.life():
        async with one.life():
            left, right = await one.open("a"), await other.open("b")
            await one.give(left, [(1, 1000)], lag_ms=1)
            await other.give(right, [(2, 2000)], lag_ms=1)
            await one.clock.advance(5)
            assert early(one) == {W[0]: [1, 2]}
            assert other.engine.jobs == []
        await other.give(right, [(3, 3000)], lag_ms=1)
        await one.clock.advance(20)
        assert early(other) == {W[0]: [1, 2, 3]}


async def test_an_early_job_that_fails_is_told_and_leaves_the_result_before(
    tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    pipeline = Pipeline(tmp_path, spec=SPEC)
    async with pipeline.life():
        session = await pipeline.open("a")
        await pipeline.give(session, [(1, 1000)], lag_ms=1)
        await pipeline.clock.advance(5)
        pipeline.engine.fail = lambda job: None if job.window.final else WindowFailed("no memory")
        await pipeline.give(session, [(2, 2000)], lag_ms=1)
        await pipeline.clock.advance(5)
        assert early(pipeline) == {W[0]: [1]}
        assert pipeline.runner.section(0, {}).early_failed == 2
        assert "no memory" in named(logged, "window.early_failed")[0]["what"]
        await pipeline.give(session, [(4, 12_000)], lag_ms=1)
        await pipeline.clock.advance(5)
        assert pipeline.published() == {W[0]: [1, 2]}


async def test_a_window_whose_early_job_loses_the_driver_has_no_further_ones(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, spec=SPEC)
    async with pipeline.life():
        session = await pipeline.open("a")
        await pipeline.give(session, [(1, 1000)], lag_ms=1)
        pipeline.engine.fail = lambda job: None if job.window.final else DriverLost("out of memory")
        await pipeline.clock.advance(9)
        assert (early(pipeline), len(pipeline.engine.jobs)) == ({}, 1)
        pipeline.engine.fail = None
        await pipeline.give(session, [(4, 12_000)], lag_ms=1)
        await pipeline.clock.advance(5)
        assert (early(pipeline), pipeline.published()) == ({W[1]: [4]}, {W[0]: [1]})


async def test_early_results_go_when_windows_have_none_any_more(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, spec=SPEC)
    async with pipeline.life():
        session = await pipeline.open("a")
        await pipeline.give(session, [(1, 1000)], lag_ms=1)
        await pipeline.clock.advance(5)
        assert early(pipeline) == {W[0]: [1]}
    pipeline.spec = TimeWindows(10_000)
    async with pipeline.life():
        assert early(pipeline) == {}


async def test_a_ledger_that_is_out_of_reach_is_asked_again(
    tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    pipeline, failed = Pipeline(tmp_path, spec=SPEC), []

    def hook(name: str, after: bool) -> None:
        if name in {"open_windows", "find"} and not after and len(failed) < 4:
            failed.append(name)
            raise LedgerError("away")

    pipeline.faults.hook = hook
    async with pipeline.life():
        session = await pipeline.open("a")
        await pipeline.give(session, [(1, 1000)], lag_ms=1)
        await pipeline.clock.advance(14)
        assert early(pipeline) == {W[0]: [1]}
    assert len(named(logged, "window.early_failed")) == 4


async def test_a_table_shows_early_rows_until_the_final_ones_replace_them(tmp_path: Path) -> None:
    table = tmp_path / "_table.sqlite"
    pipeline = Pipeline(tmp_path, spec=SPEC, engine=partial(TableEngine, table))

    def shown() -> dict[str, tuple[bool, list[int]]]:
        return {
            window: (revision < 0, sorted(value for rows in tables for value in rows["value"].to_pylist()))
            for window, (revision, tables) in read_table(table).items()
        }

    async with pipeline.life():
        pipeline.runner.steps.publisher.table = "delta:/lake"
        session = await pipeline.open("a")
        await pipeline.give(session, [(1, 1000), (2, 2000)], lag_ms=1)
        await pipeline.clock.advance(5)
        assert shown() == {W[0]: (True, [1, 2])}
        await pipeline.give(session, [(3, 3000)], lag_ms=1)
        await pipeline.clock.advance(5)
        assert shown() == {W[0]: (True, [1, 2, 3])}
        await pipeline.give(session, [(4, 12_000)], lag_ms=1)
        await pipeline.clock.advance(12)
        assert shown() == {W[0]: (False, [1, 2, 3]), W[1]: (True, [4])}
        assert [name for name in pipeline.private_files() if "part-" in name] == []
        assert early(pipeline) == {}


@pytest.mark.parametrize("every_ms", [None, 2000], ids=["tumbling", "sliding"])
async def test_wherever_the_process_dies_no_window_is_shown_twice(
    tmp_path: Path, every_ms: int | None, long: bool
) -> None:
    spec = TimeWindows(8000, "at", early_ms=1000, every_ms=every_ms)
    step = 1 if long else 23 if every_ms is None else 97
    place, died, shown = 1 - step, True, 0
    while died:
        place += step
        pipeline, daemon = Pipeline(tmp_path / str(place), spec=spec, recompute=True), stream()
        pipeline.rules = replace(pipeline.rules, flush_interval_ms=500)
        twice = watch(pipeline)
        pipeline.faults.at = place
        died = not await live(pipeline, daemon)
        shown += sum(not job.window.final for job in pipeline.engine.jobs)
        if died:
            pipeline.faults = Faults()
            again = watch(pipeline)
            assert await live(pipeline, daemon)
            twice += again
        assert (twice, early(pipeline)) == ([], {})
        daemon.assert_exactly_once(pipeline)
    assert shown > 10
