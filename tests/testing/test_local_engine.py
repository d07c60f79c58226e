from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from mldserver import Window
from mldserver.engine_jobs import WindowJob
from mldserver.errors import DriverLost, WindowFailed
from mldserver.jobs.engine import Engine
from mldserver.testing import LocalEngine, VirtualClock

WINDOW = Window("w1", datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 2, tzinfo=UTC))


def job(folder: Path, attempt: int = 1) -> WindowJob:
    segments = []
    for n, clocks in enumerate(([2, 3], [0, 1])):
        path = folder / f"segment-{n}.parquet"
        pq.write_table(pa.table({"v": clocks, "_time": [5, 5], "_clock": clocks}), path)
        segments.append(str(path))
    return WindowJob(WINDOW, attempt, tuple(segments), str(folder / "staging" / str(attempt)), 4, 100)


async def compute(engine: LocalEngine, each: WindowJob) -> Any:
    async with asyncio.TaskGroup() as group:
        group.create_task(engine.run())
        await engine.ready()
        assert engine.is_ready
        try:
            result = await engine.compute(each)
        finally:
            await engine.close()
    return result


def test_it_is_an_engine(local_engine: LocalEngine) -> None:
    engine: Engine = local_engine
    assert not engine.is_ready


async def test_rows_come_out_in_the_total_order(tmp_path: Path, local_engine: LocalEngine) -> None:
    each = job(tmp_path)
    result = await compute(local_engine, each)
    assert result.rows == 4
    assert result.seconds >= 0
    table = pq.read_table(f"{each.staging}/{result.files[0]}")
    assert table.column("v").to_pylist() == [0, 1, 2, 3]
    assert local_engine.jobs == [each]


async def test_a_function_makes_the_output(tmp_path: Path) -> None:
    def on_table(rows: pa.Table, window: Window) -> pa.Table:
        assert window is WINDOW
        return pa.table({"total": [pc.sum(rows["v"]).as_py()]})

    each = job(tmp_path)
    result = await compute(LocalEngine(on_table), each)
    assert result.rows == 1
    assert pq.read_table(f"{each.staging}/{result.files[0]}").to_pylist() == [
        {"total": 6, "window_start": WINDOW.start, "window_end": WINDOW.end}
    ]


async def test_the_columns_of_the_windows_bounds_have_other_names_or_are_the_tables_own_or_are_not_there(
    tmp_path: Path,
) -> None:
    engine = LocalEngine(
        lambda _rows, _window: pa.table({"until": [7]}), window_columns=("since", "until"), group_limit=2
    )
    result = await compute(engine, job(tmp_path))
    table = pq.read_table(f"{job(tmp_path).staging}/{result.files[0]}")
    assert table.to_pylist() == [{"until": 7, "since": WINDOW.start}]
    without = job(tmp_path, attempt=2)
    result = await compute(LocalEngine(window_columns=None), without)
    assert pq.read_schema(f"{without.staging}/{result.files[0]}").names == ["v", "_time", "_clock"]


async def test_segments_that_hold_other_numbers_of_rows_than_the_ledger_fail_the_window(
    tmp_path: Path,
) -> None:
    short = replace(job(tmp_path), rows=5)
    told = "hold 4 rows, but the ledger has registered 5"
    with pytest.RaisesGroup(pytest.RaisesExc(WindowFailed, match=told)):
        await compute(LocalEngine(), short)


async def test_a_function_that_returns_nothing_fails_its_window(tmp_path: Path) -> None:
    with pytest.RaisesGroup(
        pytest.RaisesExc(WindowFailed, match="returned None for window w1, not an Arrow")
    ):
        await compute(LocalEngine(lambda _rows, _window: None), job(tmp_path))  # type: ignore[arg-type,return-value]  # the mistake


async def test_a_failing_function_is_a_failed_window(tmp_path: Path) -> None:
    def on_table(_rows: pa.Table, _window: Window) -> pa.Table:
        raise ZeroDivisionError("by zero")

    with pytest.RaisesGroup(pytest.RaisesExc(WindowFailed, match="ZeroDivisionError: by zero")):
        await compute(LocalEngine(on_table), job(tmp_path))


async def test_staging_must_be_new(tmp_path: Path) -> None:
    each = job(tmp_path)
    (tmp_path / "staging" / "1").mkdir(parents=True)
    with pytest.RaisesGroup(pytest.RaisesExc(WindowFailed, match="exists already")):
        await compute(LocalEngine(), each)


async def test_injected_failures_leave_wreckage_and_pass(tmp_path: Path) -> None:
    def fail(each: WindowJob) -> DriverLost | None:
        return DriverLost("gone") if each.attempt == 1 else None

    with pytest.RaisesGroup(DriverLost):
        await compute(LocalEngine(fail=fail), job(tmp_path))
    assert list((tmp_path / "staging" / "1").iterdir())
    assert (await compute(LocalEngine(fail=fail), job(tmp_path, attempt=2))).rows == 4


async def test_several_windows_share_one_job(tmp_path: Path) -> None:
    engine = LocalEngine(group_limit=2)
    jobs = (job(tmp_path, attempt=1), job(tmp_path, attempt=2))
    async with asyncio.TaskGroup() as group:
        group.create_task(engine.run())
        results = await engine.compute_group(jobs)
        await engine.close()
    assert [result.rows for result in results] == [4, 4]
    assert (engine.jobs, engine.groups) == ([*jobs], [2])
    files = [f"{each.staging}/{result.files[0]}" for each, result in zip(jobs, results, strict=True)]
    assert [pq.read_table(file).num_rows for file in files] == [4, 4]
    assert results[0].files != results[1].files, "readers must not take one attempt's files for another's"


async def test_one_bad_window_fails_the_job_for_all(tmp_path: Path) -> None:
    engine = LocalEngine(fail=lambda each: WindowFailed("bad") if each.attempt == 2 else None, group_limit=2)
    with pytest.RaisesGroup(WindowFailed):
        async with asyncio.TaskGroup() as group:
            group.create_task(engine.run())
            await engine.compute_group((job(tmp_path, attempt=1), job(tmp_path, attempt=2)))


async def test_starts_and_delays_take_the_clocks_time(tmp_path: Path, virtual_clock: VirtualClock) -> None:
    engine = LocalEngine(start_seconds=20, delay_seconds=5, clock=virtual_clock)
    before = virtual_clock.now_ms()
    await virtual_clock.drive(compute(engine, job(tmp_path)), step=1)
    assert virtual_clock.now_ms() - before >= 25_000
