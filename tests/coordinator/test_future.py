"""A row that is dated far in the future, in a stream that goes on."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow as pa
from coordinator.outcomes import outcome
from coordinator.pipeline import RULES, Pipeline

from mldserver.coordinator.watermark import WatermarkRules
from mldserver.coordinator.windows import Tumbling, tumbling_id

if TYPE_CHECKING:
    from pathlib import Path

    from mldserver.coordinator.shard_session import ShardSession

YEAR_2096 = 4_000_000_000_000


async def give(pipeline: Pipeline, session: ShardSession, number: int, event_ms: int) -> None:
    """Deliver a record that arrives now, and whose event is of another time."""
    session.began()
    columns = {
        "value": pa.array([number], pa.int64()),
        "at": pa.array([event_ms], pa.timestamp("ms", tz="UTC")),
    }
    arrived = [(number, pipeline.clock.now_ms())]
    await session.accept(outcome(session.shard_id, arrived, after=session.after, columns=columns))


async def test_it_does_not_close_the_windows_before_it_for_good(tmp_path: Path) -> None:
    watermark = WatermarkRules(on_arrival=False, idle_ms=5000, quiet_ms=10_000, settle_ms=1000)
    rules = replace(RULES, retention_ms=60_000, watermark=watermark)
    pipeline = Pipeline(tmp_path, spec=Tumbling(10_000, on="at"), rules=rules, recompute=True)
    async with pipeline.life():
        a, b = await pipeline.open("a"), await pipeline.open("b")
        await give(pipeline, a, 1, 1_000_000)
        await give(pipeline, a, 2, YEAR_2096)
        await give(pipeline, b, 3, 1_000_500)
        await pipeline.clock.advance(20)
        assert pipeline.published()[tumbling_id(YEAR_2096)] == [2], "the stream was quiet"
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
