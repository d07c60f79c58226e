"""What a start finds, told as lives of one output folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from coordinator.pipeline import Crash, Faults, FaultyStore, Pipeline
from support.store import SqliteStore

from mldserver.errors import LedgerError, OperatorError
from mldserver.ledger.contract import SegmentKind, WindowState
from mldserver.output.layout import LEDGER, STAGING, attempt_path, segment_path, writer_tag
from mldserver.windows import TimeWindows, batches, time_window_id

pytestmark = pytest.mark.quick

FIRST, SECOND = time_window_id(0), time_window_id(10_000)


async def first_life(pipeline: Pipeline, dies_before: str | None = None, times: int = 1) -> None:
    """Two windows get rows; the first is closed by the watermark. The process dies at its n-th call of a kind."""
    seen: list[str] = []

    def die(name: str, after: bool) -> None:
        if name == dies_before and not after:
            seen.append(name)
            if len(seen) == times:
                pipeline.faults.dead = True
                raise Crash(name)

    pipeline.faults = Faults(hook=die)
    try:
        async with pipeline.life():
            session = await pipeline.open("a")
            await pipeline.give(session, [(1, 1000), (2, 2000), (3, 15_000)])
            for _ in range(3):
                await pipeline.cycle()
    except* Crash:
        pass
    pipeline.faults = Faults()


def told(logged: list[dict[str, Any]]) -> dict[str, Any]:
    return [event for event in logged if event["event"] == "recovery.done"][-1]


async def test_a_first_start_finds_nothing(tmp_path: Path, logged: list[dict[str, Any]]) -> None:
    async with Pipeline(tmp_path).life():
        pass
    found = told(logged)
    assert {name: found[name] for name in found if name not in {"event", "level"}} == {
        "shards": 0,
        "windows_published": 0,
        "windows_restarted": 0,
        "late_published": 0,
        "files_deleted": 0,
        "clock": 0,
    }


async def test_what_is_committed_and_not_visible_is_published_without_computing_it_again(
    tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    pipeline = Pipeline(tmp_path)
    await first_life(pipeline, dies_before="rename")
    assert pipeline.published() == {}
    assert pipeline.state().windows[FIRST].state is WindowState.COMMITTED
    async with pipeline.life():
        await pipeline.cycle()
        assert pipeline.published() == {FIRST: [1, 2]}
        assert pipeline.engine.jobs == []
    assert told(logged)["windows_published"] == 1
    assert FIRST not in pipeline.state().windows, "published, and not retained"


async def test_what_was_made_visible_but_not_noted_is_noted(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path)
    await first_life(pipeline, dies_before="published")
    assert pipeline.published() == {FIRST: [1, 2]}
    async with pipeline.life():
        await pipeline.cycle()
    assert FIRST not in pipeline.state().windows, "published, and not retained"
    assert pipeline.published() == {FIRST: [1, 2]}


async def test_a_window_that_is_cut_is_computed_by_the_next_life(
    tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    pipeline = Pipeline(tmp_path)
    await first_life(pipeline, dies_before="commit")
    async with pipeline.life():
        await pipeline.cycle()
        assert pipeline.published() == {FIRST: [1, 2]}
        assert [job.attempt for job in pipeline.engine.jobs] == [2]
    assert told(logged)["windows_restarted"] == 1


async def test_windows_that_are_cut_are_taken_up_oldest_first(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, spec=TimeWindows(500))
    pipeline.faults = Faults()
    async with pipeline.life():
        session = await pipeline.open("a")
        pipeline.runner._not_halted.clear()
        await pipeline.give(session, [(n, 250 * n) for n in range(1, 10)])
        for _ in range(3):
            await pipeline.cycle()
    async with pipeline.life():
        await pipeline.cycle()
        starts = [job.window.start for job in pipeline.engine.jobs]
        assert len(starts) > 3
        assert starts == sorted(starts)


async def test_files_that_no_entry_names_are_deleted_and_others_stay(
    tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    pipeline = Pipeline(tmp_path)
    await first_life(pipeline, dies_before="register")
    orphans = pipeline.private_files()
    assert len(orphans) == 2
    async with pipeline.life():
        assert pipeline.private_files() == []
        assert list((tmp_path / "_mldserver" / "segments").iterdir()) == []
    assert told(logged)["files_deleted"] == 2
    await first_life(pipeline, dies_before="cut")
    kept = pipeline.private_files()
    async with pipeline.life():
        assert pipeline.private_files() == kept
        assert pipeline.coordinator.status().segment_bytes > 0
        assert pipeline.coordinator.status().windows_open == 2
    assert told(logged)["files_deleted"] == 0


async def test_what_an_attempt_left_in_staging_is_deleted(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path)
    await first_life(pipeline, dies_before="commit")
    (left,) = (tmp_path / "_mldserver" / "staging" / FIRST).iterdir()
    assert left.name == f"0001-{writer_tag(pipeline.state().ledger_id, 'one')}"
    async with pipeline.life():
        assert not left.exists()


async def test_what_servers_that_live_have_under_way_is_left_alone(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path)
    await first_life(pipeline)
    other = SqliteStore(tmp_path / LEDGER, pipeline="test", server_id="two")
    ledger_id = other.open(now_ms=pipeline.clock.now_ms()).ledger_id
    theirs, nobodys = (
        tmp_path
        / segment_path("w", 1, "u", kind=SegmentKind.WINDOW, tag=writer_tag(ledger_id, name), shape="0" * 12)
        for name in ("two", "dead")
    )
    job = tmp_path / attempt_path(STAGING, "w", 1, writer_tag(ledger_id, "two"))
    job.mkdir(parents=True)
    theirs.parent.mkdir(parents=True)
    for path in (theirs, nobodys, job / "part"):
        path.touch()
    async with pipeline.life():
        assert theirs.exists()
        assert (job / "part").exists()
        assert not nobodys.exists()
    other.close()


async def test_a_window_whose_cut_went_unheard_is_taken_up_by_the_next_cycle(tmp_path: Path) -> None:
    lost: list[str] = []

    def lose(name: str, after: bool) -> None:
        if name == "cut" and after and not lost:
            lost.append(name)
            raise LedgerError("no answer")

    pipeline = Pipeline(tmp_path)
    pipeline.faults = Faults(hook=lose)
    async with pipeline.life():
        session = await pipeline.open("a")
        await pipeline.give(session, [(1, 1000), (2, 2000), (3, 15_000)])
        for _ in range(6):
            await pipeline.cycle()
        assert lost
        assert pipeline.published()[FIRST] == [1, 2]
        assert [job.window.id for job in pipeline.engine.jobs].count(FIRST) == 1


async def test_where_outputs_cannot_be_replaced_a_start_that_recomputes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(store: FaultyStore, one: str, other: str) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(FaultyStore, "exchange", refuse)
    with pytest.raises(OperatorError, match="late = separate"):
        async with Pipeline(tmp_path, recompute=True).life():
            pass
    async with Pipeline(tmp_path).life():
        pass


async def test_late_rows_that_are_registered_become_visible(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path)
    await first_life(pipeline)
    assert pipeline.published() == {FIRST: [1, 2]}
    pipeline.faults = Faults(hook=lambda name, after: _die_at(pipeline, name, "rename"))
    try:
        async with pipeline.life():
            session = await pipeline.open("b")
            await pipeline.give(session, [(8, 500)])
            await pipeline.cycle()
    except* Crash:
        pass
    assert pipeline.late() == []
    pipeline.faults = Faults()
    async with pipeline.life():
        assert pipeline.late() == [8]
    assert pipeline.state().late_segments == ()


def _die_at(pipeline: Pipeline, name: str, at: str) -> None:
    if name == at:
        pipeline.faults.dead = True
        raise Crash(name)


async def test_the_merge_clock_goes_on(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path)
    await first_life(pipeline)
    async with pipeline.life():
        session = await pipeline.open("a")
        await pipeline.give(session, [(4, 16_000), (5, 50_000)])
        for _ in range(3):
            await pipeline.cycle()
    assert [row["_clock"] for row in pipeline.rows(f"window={SECOND}/*")] == [2, 3]


@pytest.mark.parametrize("spec", [TimeWindows(20_000), batches()], ids=["size", "kind"])
async def test_an_output_folder_with_other_windows_is_refused(tmp_path: Path, spec: TimeWindows) -> None:
    pipeline = Pipeline(tmp_path)
    await first_life(pipeline)
    pipeline.spec = spec
    with pytest.raises(OperatorError, match="there were windows of 10 s of arrival time, and are"):
        async with pipeline.life():
            pass


async def test_a_handler_without_rows_recovers_its_positions_only(
    tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    pipeline = Pipeline(tmp_path, without_rows=True)
    async with pipeline.life():
        session = await pipeline.open("a")
        await pipeline.give(session, [(1, 1000)], rows=[])
        await pipeline.cycle()
    async with pipeline.life():
        assert (await pipeline.open("a", None)).after.number == 1
    assert told(logged)["shards"] == 1
    assert not (tmp_path / "_mldserver" / "segments").exists()


async def test_the_segments_of_all_servers_count_and_no_longer_when_another_deletes_them(
    tmp_path: Path,
) -> None:
    pipeline = Pipeline(tmp_path, recompute=True)
    await first_life(pipeline)
    async with pipeline.life():
        before = pipeline.coordinator.status().segment_bytes
        other = SqliteStore(tmp_path / LEDGER, pipeline="test", server_id="two")
        other.open(now_ms=pipeline.clock.now_ms())
        freed = other.expire(published_before_ms=2**40, keep_bytes=0)
        assert sum(segment.bytes for segment in freed) > 0
        await pipeline.cycle()
        left = before - sum(segment.bytes for segment in freed)
        assert pipeline.coordinator.status().segment_bytes == left > 0
    other.close()
