"""From a committed output into a table, over an engine whose table fails on purpose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from coordinator.pipeline import Pipeline, named
from support.sqlite_table import FailingTable, read_table

from mldserver.config.settings import WindowSettings
from mldserver.coordinator.coordinator import Coordinator
from mldserver.errors import DriverLost, WindowFailed
from mldserver.ledger.contract import WindowState
from mldserver.testing import LocalEngine
from mldserver.windows import TimeWindows, time_window_id

pytestmark = pytest.mark.quick

W = [time_window_id(start) for start in range(0, 40_000, 10_000)]


class Tables(Pipeline):
    """A pipeline whose windows go into a table."""

    def __init__(self, root: Path, errors: list[Exception] | None = None, **policy: Any) -> None:
        self.table = root / "table.sqlite"
        super().__init__(
            root / "out",
            spec=TimeWindows(10_000),
            policy=WindowSettings(
                **{f"window_{name}": value for name, value in {"concurrency": 1, **policy}.items()}
            ),
            retry_seconds=(1.0, 60.0),
            engine=lambda: FailingTable(self.table, errors or []),
        )

    def build(self) -> Coordinator:
        coordinator = super().build()
        assert self.runner is not None
        self.runner.steps.publisher.table = "delta:/lake"
        return coordinator

    def rows(self) -> dict[str, tuple[int, int]]:
        """The revision and the number of rows of each window."""
        found = read_table(self.table)
        return {each: (revision, sum(map(len, tables))) for each, (revision, tables) in found.items()}

    def staged(self) -> list[Path]:
        return list((self.out / "_mldserver" / "staging").rglob("part-*"))


async def three_windows(pipeline: Pipeline) -> None:
    session = await pipeline.open("a")
    records = [(n, 5000 * n) for n in range(6)]
    await pipeline.give(session, [*((n + 1, ms) for n, ms in records), (9, 30_000)])
    for _ in range(2):
        await pipeline.cycle()


async def test_windows_go_into_the_table_and_their_staged_files_go(
    tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    pipeline = Tables(tmp_path)
    async with pipeline.life():
        await three_windows(pipeline)
        assert pipeline.rows() == dict.fromkeys(W[:3], (1, 2))
        assert (pipeline.published(), pipeline.staged()) == ({}, [])
    assert {event["path"] for event in named(logged, "window.done")} == {"delta:/lake"}


async def test_a_table_that_fails_is_written_again_and_the_window_is_neither_computed_again_nor_set_aside(
    tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    errors = [WindowFailed("no quota"), DriverLost("gone"), WindowFailed("no quota")]
    pipeline = Tables(tmp_path, errors, attempts=2, on_failure="dead_letter")
    async with pipeline.life():
        await three_windows(pipeline)
        assert pipeline.state().windows[W[0]].state is WindowState.COMMITTED
        await pipeline.clock.advance(200)
        assert pipeline.rows() == {**dict.fromkeys(W[:3], (1, 2)), W[3]: (1, 1)}
        assert [job.window.id for job in pipeline.engine.jobs] == W
        assert pipeline.runner is not None
        assert (pipeline.runner.set_aside, pipeline.staged()) == (0, [])
    assert named(logged, "window.set_aside") == []
    assert len(named(logged, "window.halted")) == 1


async def test_an_output_that_was_published_by_another_and_deleted_is_not_asked_for_again(
    tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    pipeline = Tables(tmp_path, [WindowFailed("no quota")])
    async with pipeline.life():
        session = await pipeline.open("a")
        await pipeline.give(session, [(1, 1000), (2, 10_000)])
        await pipeline.cycle()
        assert pipeline.state().windows[W[0]].state is WindowState.COMMITTED
        for file in pipeline.staged():
            file.unlink()
        await pipeline.ledger.published({W[0]: 1}, retain=False)
        await pipeline.clock.advance(200)
        assert pipeline.runner is not None
        assert (pipeline.engine.asked.count(W[0]), pipeline.runner.unfinished) == (1, {})
    assert len(named(logged, "window.failed")) == 2


async def test_an_engine_that_was_given_no_table_says_so(
    tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    pipeline = Tables(tmp_path)
    pipeline.make_engine = LocalEngine
    async with pipeline.life():
        await three_windows(pipeline)
    assert "no table" in named(logged, "window.failed")[0]["what"]


async def test_published_windows_that_are_retried_fill_a_new_table(tmp_path: Path) -> None:
    pipeline = Tables(tmp_path)
    pipeline.recompute = True
    async with pipeline.life():
        await three_windows(pipeline)
        pipeline.table.unlink()
        for window in W[:2]:
            assert pipeline.ledger.store.decide(window, "recompute", now_ms=pipeline.clock.now_ms())
        await pipeline.clock.advance(3)
        assert pipeline.rows() == dict.fromkeys(W[:2], (2, 2))
        assert {pipeline.state().windows[window].state for window in W[:2]} == {WindowState.PUBLISHED}


async def test_a_published_window_that_is_retried_replaces_its_folder(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, spec=TimeWindows(10_000), recompute=True)
    async with pipeline.life():
        await three_windows(pipeline)
        (before,) = (tmp_path / f"window={W[0]}").iterdir()
        assert pipeline.ledger.store.decide(W[0], "recompute", now_ms=pipeline.clock.now_ms())
        await pipeline.clock.advance(3)
        (after,) = (tmp_path / f"window={W[0]}").iterdir()
        assert (before.name, after.name) == ("part-00000-0001.parquet", "part-00000-0002.parquet")
        assert pipeline.published()[W[0]] == [1, 2]
