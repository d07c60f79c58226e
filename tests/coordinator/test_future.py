"""A row that is dated far in the future, in a stream that goes on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from coordinator.outcomes import outcome
from coordinator.pipeline import RULES, Pipeline, named
from support.shards import accept

from mldserver.coordinator.core.open_windows import MOST_AHEAD
from mldserver.coordinator.shards import IntakeSession
from mldserver.records import Sequence
from mldserver.testing import VirtualClock
from mldserver.windows import TimeWindows, time_window_id

YEAR_2096 = 4_000_000_000_000


async def give(pipeline: Pipeline, session: IntakeSession, number: int, event_ms: int) -> None:
    """Deliver a record that arrives now, and whose event is of another time."""
    session.batch_began()
    columns = {
        "value": pa.array([number], pa.int64()),
        "at": pa.array([event_ms], pa.timestamp("ms", tz="UTC")),
    }
    arrived = [(number, pipeline.clock.now_ms())]
    await accept(session, outcome(session.shard_id, arrived, after=session.after, columns=columns))


FUTURE = replace(RULES, retention_ms=60_000, on_arrival=False)


def a_pipeline(out: Path, **changes: Any) -> Pipeline:
    rules = replace(FUTURE, **changes)
    return Pipeline(out, spec=TimeWindows(10_000, on="at"), rules=rules, clock=VirtualClock(1_000_000))


async def test_it_makes_no_other_row_late_not_over_restarts_either(
    tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    pipeline = a_pipeline(tmp_path)
    for life in range(3):
        async with pipeline.life() as coordinator:
            a = await pipeline.open("a", Sequence(30 * life) if life else "TRIM_HORIZON")
            for second in range(30):
                event_ms = YEAR_2096 if second == 5 else pipeline.clock.now_ms()
                await give(pipeline, a, 30 * life + second + 1, event_ms)
                await pipeline.cycle()
            status = coordinator.status()
            assert (status.rows_late, status.rows_ahead) == (0, 1)
            assert status.watermark_ms is not None
            assert pipeline.clock.now_ms() - status.watermark_ms <= 2000
        event_ms = pipeline.state().shards["a"].event_ms
        assert event_ms is not None
        assert event_ms <= pipeline.clock.now_ms()
        assert pipeline.state().windows[time_window_id(YEAR_2096)].segments, "it is kept in its own window"
    told = named(logged, "row.ahead")
    assert [(each["shard"], each["rows"]) for each in told] == [("a", 1)] * 3
    assert told[0]["sequence"] == "6"
    assert told[0]["ahead_seconds"] == (YEAR_2096 - 1_005_000) / 1000


async def test_they_are_told_once_a_minute_with_the_one_that_is_furthest_ahead(
    tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    pipeline = a_pipeline(tmp_path)
    async with pipeline.life() as coordinator:
        a, b = await pipeline.open("a"), await pipeline.open("b")
        for number in range(1, 101):
            await give(pipeline, a, number, YEAR_2096 + number % 70 * 10_000)
            await give(pipeline, b, number, pipeline.clock.now_ms())
            await pipeline.cycle()
        await pipeline.clock.advance(60)
        assert coordinator.status().rows_ahead == 100
    told = named(logged, "row.ahead")
    assert sum(each["rows"] for each in told) == 100
    assert len(told) == 3
    assert [each["sequence"] for each in told[:2]] == ["1", "61"]
    assert told[2]["sequence"] == "69"


async def test_windows_that_are_ahead_are_no_more_than_a_bound_and_what_is_beyond_goes_to_the_late_dataset(
    tmp_path: Path,
) -> None:
    pipeline = a_pipeline(tmp_path, max_ahead_ms=600_000)
    async with pipeline.life() as coordinator:
        a = await pipeline.open("a")
        now_ms = pipeline.clock.now_ms()
        near = time_window_id(now_ms + 400_000)
        await give(pipeline, a, 1, now_ms + 400_000)
        for number in range(2, 252):
            await give(pipeline, a, number, YEAR_2096 + number * 10_000)
            if number % 50 == 0:
                await pipeline.cycle()
        await pipeline.cycle()
        assert coordinator.status().windows_open == 1 + MOST_AHEAD
        assert near in pipeline.state().windows
        await give(pipeline, a, 252, YEAR_2096 + 2 * 10_000)
        for _ in range(5):  # late files become visible one by one
            await pipeline.cycle()
        assert pipeline.state().windows[time_window_id(YEAR_2096 + 20_000)].rows_in == 2, (
            "it was there before"
        )
        assert sorted(pipeline.late()) == list(range(2 + MOST_AHEAD, 252))


async def test_rows_from_the_future_never_fill_the_disk(tmp_path: Path) -> None:
    bound = 200_000
    pipeline = a_pipeline(tmp_path, segment_disk_bytes=bound, retention_bytes=0)
    async with pipeline.life() as coordinator:
        a, b = await pipeline.open("a"), await pipeline.open("b")
        for number in range(1, 241):
            await give(pipeline, a, number, YEAR_2096 + number % 3 * 10_000)
            await give(pipeline, b, number, pipeline.clock.now_ms())
            await pipeline.cycle()
            assert coordinator.status().segment_bytes <= bound / 3
        status = coordinator.status()
        assert status.windows_published >= 20, "the others go on"
        kept = sum(entry.rows_in for entry in pipeline.state().windows.values() if entry.window_id > "2090")
        assert kept + len(pipeline.late()) == 240
        assert 0 < kept < 100
    async with pipeline.life():
        a = await pipeline.open("a", Sequence(240))
        await give(pipeline, a, 241, YEAR_2096)
        await pipeline.cycle()
        assert 241 in pipeline.late(), "a new server knows what is there"


async def test_while_others_only_say_what_is_ahead_normal_windows_close_when_the_stream_is_quiet(
    tmp_path: Path,
) -> None:
    """And one that is ahead does not get a revision with each row."""
    pipeline = a_pipeline(tmp_path)
    async with pipeline.life() as coordinator:
        a = await pipeline.open("a")
        await give(pipeline, a, 1, 1_000_000)
        for number in range(2, 62):
            await give(pipeline, a, number, YEAR_2096 + number)
            await pipeline.cycle()
        assert pipeline.published()[time_window_id(1_000_000)] == [1]
        assert pipeline.state().windows[time_window_id(YEAR_2096)].revision == 1
        assert not coordinator.status().stuck


async def test_where_any_row_may_run_ahead_it_closes_what_is_before_it(tmp_path: Path) -> None:
    pipeline = a_pipeline(tmp_path, max_ahead_ms=None)
    async with pipeline.life() as coordinator:
        a = await pipeline.open("a")
        await give(pipeline, a, 1, 1_000_000)
        await give(pipeline, a, 2, YEAR_2096)
        await pipeline.clock.advance(3)
        assert list(pipeline.published()) == [time_window_id(1_000_000)]
        assert coordinator.status().rows_ahead == 0


async def test_it_does_not_close_the_windows_before_it_for_good(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, spec=TimeWindows(10_000, on="at"), rules=FUTURE, recompute=True)
    async with pipeline.life():
        a, b = await pipeline.open("a"), await pipeline.open("b")
        await give(pipeline, a, 1, 1_000_000)
        await give(pipeline, a, 2, YEAR_2096)
        await give(pipeline, b, 3, 1_000_500)
        await pipeline.clock.advance(20)
        assert pipeline.published()[time_window_id(YEAR_2096)] == [2], "the stream was quiet"
        # Long enough for both windows to expire, and for what is forgotten to be forgotten.
        for _ in range(85):
            await pipeline.clock.advance(60)
        now_ms = pipeline.clock.now_ms()
        assert pipeline.state().cut_below_ms == 1_010_000
        for number in range(10, 40, 2):
            await give(pipeline, b, number, now_ms + number * 2000)
            await pipeline.cycle()
        await give(pipeline, a, 4, YEAR_2096 + 1)
        await pipeline.clock.advance(30)
        assert pipeline.late() == [4], "its own window is cut, and has its output"
        found = pipeline.published()
    seen = [value for window in found.values() for value in window]
    assert sorted(seen) == [1, 2, 3, *range(10, 40, 2)]
    assert len(found) > 5


async def test_when_the_stream_comes_to_its_window_that_is_not_forgotten_at_once(tmp_path: Path) -> None:
    """Forgetting it closes all windows before it, which are the stream's present by then."""
    pipeline = a_pipeline(tmp_path, flush_interval_ms=10_000)
    prune_ms = pipeline.clock.now_ms() + 2 * 3_600_000
    async with pipeline.life():
        a = await pipeline.open("a")
        await give(pipeline, a, 1, 1_000_000)
        await give(pipeline, a, 2, prune_ms - 15_000)
        await pipeline.clock.advance(90)
        assert pipeline.published()[time_window_id(prune_ms - 20_000)] == [2], "the stream was quiet"
        while pipeline.clock.now_ms() < prune_ms + 10_000:
            await pipeline.clock.advance(10)
        await give(pipeline, a, 3, prune_ms - 25_000)
        await pipeline.clock.advance(90)
        assert (pipeline.published()[time_window_id(prune_ms - 30_000)], pipeline.late()) == ([3], [])
