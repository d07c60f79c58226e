"""A driver that prints without end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from spark.bench import Bench, job
from support.serving import until

from mldserver.observe.logging import LIMIT_LINES


def lost(logged: list[dict[str, Any]]) -> list[int]:
    return [event["lines"] for event in logged if event["event"] == "log.lost"]


async def test_of_a_drivers_flood_a_burst_is_logged_and_the_rest_is_counted(
    tmp_path: Path, logged: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mldserver.observe.logging.LIMIT_SECONDS", 1e9)
    it = Bench(tmp_path, "good")
    async with it.running():
        await it.engine.compute(job("floods"))
        alive = it.engine.driver.life
        assert alive is not None
        await until(lambda: alive._stdout.lost == alive._stderr.lost == 5000 - LIMIT_LINES)
        assert alive._last_lines[-1] == "4999"
    texts = [str(number) for number in range(LIMIT_LINES)]
    assert [event["text"] for event in logged if event["event"] == "handler.output"] == texts
    assert [event["text"] for event in logged if event["event"] == "spark.log"] == texts
    # One more of standard output: what the driver says as it stops.
    assert sorted(lost(logged)) == [5000 - LIMIT_LINES, 5001 - LIMIT_LINES]
