"""Windows that are computed with the result of the one before: a running total, through deaths, late rows and other servers."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from coordinator.pipeline import RULES, Crash, Daemon, Faults, Pipeline, two

from mldserver.config.settings import WindowSettings
from mldserver.engine_jobs import WindowJob
from mldserver.errors import LedgerError, WindowFailed
from mldserver.ledger.contract import WindowState
from mldserver.testing import LocalEngine
from mldserver.windows import TimeWindows, Window, time_window_id

pytestmark = pytest.mark.quick

W = [time_window_id(start) for start in range(0, 100_000, 10_000)]
ON_COLUMN = replace(RULES, on_arrival=False)


class Totals(LocalEngine):
    """Gives each row the number of rows in all windows up to its own, from the total of the window before."""

    def __init__(self) -> None:
        super().__init__(self.add)

    def add(self, rows: pa.Table, window: Window) -> pa.Table:
        job = next(job for job in reversed(self.jobs) if job.window.id == window.id)
        before = 0
        for file in () if job.previous is None else job.previous.paths:
            before = pq.ParquetFile(file).read(["total"])["total"][0].as_py()
        return rows.append_column("total", pa.array([before + len(rows)] * len(rows)))


def pipeline_of(out: Path, **changes: Any) -> Pipeline:
    values = {"spec": TimeWindows(10_000, "at"), "rules": ON_COLUMN, "engine": Totals} | changes
    pipeline = Pipeline(out, **values)
    pipeline.takes_previous = True
    return pipeline


def two_of(out: Path, **changes: Any) -> tuple[Pipeline, Pipeline]:
    one, other = two(out, spec=TimeWindows(10_000), engine=Totals, **changes)
    one.takes_previous = other.takes_previous = True
    return one, other


def stream() -> Daemon:
    """A split with another shard beside it; some rows are late, and some windows have none."""
    return Daemon(
        {
            "a": [(n, 2000 * n - (n % 3) * 1700) for n in range(1, 7)],
            "b": [(n, 8000 + 1500 * n) for n in range(20, 24)],
            "c": [(n, 73_000 + 1000 * n) for n in range(30, 46)],
            "z": [(n, 9000 * n) for n in range(1, 6)],
        },
        {"b": ("a",), "c": ("a",)},
    )


def windows_of(pipeline: Pipeline) -> list[tuple[str, int]]:
    """Return the window and the total of each visible row."""
    return [
        (time_window_id(round(row["window_start"].timestamp() * 1000)), row["total"])
        for row in pipeline.rows("window=*/*.parquet")
    ]


def totals(pipeline: Pipeline) -> dict[str, int]:
    """Return the total of each published window, on which its rows agree."""
    found = set(windows_of(pipeline))
    assert len(found) == len(dict(found))
    return dict(found)


def assert_totals(pipeline: Pipeline) -> None:
    """Each window's total is the number of rows in it and in all windows before it."""
    counts = Counter(window for window, _ in windows_of(pipeline))
    assert totals(pipeline) == {
        window: sum(counts[each] for each in counts if each <= window) for window in counts
    }


async def live(pipelines: tuple[Pipeline, ...], daemons: tuple[Daemon, ...]) -> bool:
    """Run until the streams are read and published, or a server dies; True when all got to the end."""
    done = False

    async def work() -> None:
        async with asyncio.TaskGroup() as group:
            for pipeline, daemon in zip(pipelines, daemons, strict=True):
                group.create_task(daemon.consume(pipeline))
        for pipeline in pipelines:
            await pipeline.coordinator.over()
        for pipeline in pipelines:
            assert pipeline.runner is not None
            await pipeline.runner.idle()

    async def run(left: tuple[Pipeline, ...]) -> None:
        if not left:
            await pipelines[0].clock.drive(work(), step=1)
            return
        async with left[0].life():
            await run(left[1:])

    try:
        async with asyncio.timeout(800):
            await run(pipelines)
            done = True
    except* Crash:
        pass
    return done


async def give(pipeline: Pipeline, session: Any, *records: tuple[int, int]) -> None:
    """Deliver records, each with its number and its event time."""
    for number, at_ms in records:
        columns = {"value": pa.array([number]), "at": pa.array([at_ms], pa.timestamp("ms", tz="UTC"))}
        await pipeline.give(session, [(number, 1_000_000 + number)], columns=columns, lag_ms=1)


async def test_each_window_has_the_total_of_the_one_before(tmp_path: Path) -> None:
    pipeline, daemon = pipeline_of(tmp_path), stream()
    assert await live((pipeline,), (daemon,))
    daemon.assert_exactly_once(pipeline)
    assert_totals(pipeline)
    assert len(totals(pipeline)) > 5
    assert pipeline.late(), "nothing was late, and the order was not tried"


async def test_wherever_the_process_dies_the_totals_are_the_same(tmp_path: Path, long: bool) -> None:
    step = 1 if long else 13
    place, died = 1 - step, True
    while died:
        place += step
        pipeline, daemon = pipeline_of(tmp_path / str(place)), stream()
        pipeline.faults.at = place
        died = not await live((pipeline,), (daemon,))
        if died:
            pipeline.faults = Faults()
            daemon.sizes = lambda: 2
            assert await live((pipeline,), (daemon,))
        daemon.assert_exactly_once(pipeline)
        assert_totals(pipeline)
    assert place > 40


async def test_windows_of_several_workers_and_servers_follow_one_another(tmp_path: Path) -> None:
    one, other = two_of(tmp_path, policy=WindowSettings(window_concurrency=3))
    left = Daemon({"a": [(n, 700 * n) for n in range(1, 80)]})
    right = Daemon({"z": [(n, 1900 * n) for n in range(1, 30)]})
    assert await live((one, other), (left, right))
    assert_totals(one)
    assert len(totals(one)) > 4


async def test_a_window_waits_for_the_one_before_however_slow_it_is(tmp_path: Path) -> None:
    pipeline = pipeline_of(tmp_path, policy=WindowSettings(window_concurrency=3))

    class Slow(Totals):
        async def compute(self, job: WindowJob) -> Any:
            await pipeline.clock.sleep(8 if job.window.id in {W[0], W[2]} else 0)
            return await super().compute(job)

    pipeline.make_engine = Slow
    async with pipeline.life():
        session = await pipeline.open("a")
        await give(pipeline, session, (1, 1000), (2, 11_000), (3, 21_000), (4, 31_000), (5, 45_000))
        await pipeline.clock.advance(6)
        assert totals(pipeline) == {}
        await pipeline.clock.advance(6)
        assert totals(pipeline) == {W[0]: 1, W[1]: 2}
        await pipeline.clock.advance(10)
        assert totals(pipeline) == {W[0]: 1, W[1]: 2, W[2]: 3, W[3]: 4}


async def test_rows_for_a_window_before_one_that_was_cut_are_late_though_it_never_was(tmp_path: Path) -> None:
    pipeline = pipeline_of(tmp_path)
    async with pipeline.life():
        session = await pipeline.open("a")
        await give(pipeline, session, (1, 1000), (2, 45_000), (3, 60_000))
        await pipeline.clock.advance(3)
        assert totals(pipeline) == {W[0]: 1, W[4]: 2}
        await give(pipeline, session, (4, 25_000))
        await pipeline.clock.advance(3)
        assert (totals(pipeline), pipeline.late()) == ({W[0]: 1, W[4]: 2}, [4])
        assert W[2] not in pipeline.state().windows


async def test_a_window_that_another_server_has_opened_is_cut_before_a_later_one(tmp_path: Path) -> None:
    one, other = two_of(tmp_path)
    async with one.life(), other.life():
        left, right = await one.open("a"), await other.open("b")
        await one.give(left, [(1, 1000), (2, 11_000)], lag_ms=1)
        await other.give(right, [(3, 5000), (4, 15_000)], lag_ms=1)
        await one.clock.advance(4)
        await one.give(left, [(5, 32_000)], lag_ms=1)
        await other.give(right, [(6, 33_000)], lag_ms=1)
        await one.clock.advance(6)
        assert totals(one) == {W[0]: 2, W[1]: 4}


async def test_a_window_that_was_set_aside_is_left_out_of_the_order(tmp_path: Path) -> None:
    policy = WindowSettings(window_on_failure="dead_letter", window_attempts=2)
    pipeline = pipeline_of(tmp_path, policy=policy)

    def fail(job: WindowJob) -> Exception | None:
        return WindowFailed("no") if job.window.id == W[1] else None

    async with pipeline.life():
        pipeline.engine.fail = fail
        session = await pipeline.open("a")
        await give(pipeline, session, (1, 1000), (2, 11_000), (3, 21_000), (4, 45_000))
        await pipeline.clock.advance(10)
        assert totals(pipeline) == {W[0]: 1, W[2]: 2}
        assert pipeline.state().windows[W[1]].state is WindowState.SET_ASIDE
        pipeline.engine.fail = None
        await pipeline.ledger.decide(W[1], "retry")
        await pipeline.clock.advance(10)
        assert totals(pipeline) == {W[0]: 1, W[1]: 2, W[2]: 2}, (
            "it has the one before, and nothing follows again"
        )


async def test_the_last_window_is_remembered_for_the_next_one_however_old_it_is(tmp_path: Path) -> None:
    pipeline = pipeline_of(tmp_path)
    async with pipeline.life():
        session = await pipeline.open("a")
        await give(pipeline, session, (1, 1000), (2, 11_000), (3, 21_000))
        await pipeline.clock.advance(3)
        later_ms = pipeline.ledger.time_ms() + 10**9
        pruned = {"windows_before_ms": later_ms, "shards_before_ms": 0, "ends_before_ms": later_ms}
        assert await pipeline.ledger.prune(**pruned, keep_last=True) == 1
        assert [entry.window_id for entry in await pipeline.ledger.visible_windows()] == [W[1]]
        await give(pipeline, session, (4, 45_000))
        await pipeline.clock.advance(3)
        assert totals(pipeline) == {W[0]: 1, W[1]: 2, W[2]: 3}


async def test_a_ledger_that_is_out_of_reach_is_asked_again_for_the_window_before(tmp_path: Path) -> None:
    pipeline, failed = pipeline_of(tmp_path), []

    def hook(name: str, after: bool) -> None:
        if name == "preceding" and not after and len(failed) < 3:
            failed.append(name)
            raise LedgerError("away")

    pipeline.faults.hook = hook
    async with pipeline.life():
        session = await pipeline.open("a")
        await give(pipeline, session, (1, 1000), (2, 11_000), (3, 21_000))
        await pipeline.clock.advance(10)
        assert (totals(pipeline), len(failed)) == ({W[0]: 1, W[1]: 2}, 3)
