"""Several functions on one session of a cluster: their code on its executors, and a session that is replaced."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from spark.test_functions_with_spark import FunctionsOnSpark, named
from support.cluster import CONF, spark_parts

pytestmark = [pytest.mark.services, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    "connect",
    [
        # A minute; tests/spark replaces a driver for new code as well.
        pytest.param(False, id="classic", marks=pytest.mark.long),
        pytest.param(True, id="Spark Connect"),
    ],
)
async def test_functions_share_a_session_and_one_gets_new_code_while_the_windows_of_the_other_go_on(
    tmp_path: Path, logged: list[dict[str, Any]], *, connect: bool
) -> None:
    """The classic cluster has no core for a second session beside the first: that one then makes room."""
    if connect:
        pytest.importorskip("grpc", reason="Spark Connect's packages are not installed")
    async with spark_parts(tmp_path) as parts:
        await parts.cluster(workers=1)
        address = (await parts.connect_server(parts.url))[1] if connect else parts.url
        it = FunctionsOnSpark(tmp_path, address, {} if connect else CONF)
        a, b = it.engine("a", it.code("a", 1)), it.engine("b", it.code("b", 10))
        async with it.running(a, b):
            assert await it.compute(a, "w") == {1}
            assert await it.compute(b, "w") == {10}
            first = it.driver.life
            assert first is not None
            a.renew(it.code("a", 2))
            later = asyncio.ensure_future(it.compute(a, "later"))
            number = 0
            while not later.done() and not first.outdated:
                assert await it.compute(b, f"meanwhile-{number}") == {10}
                number += 1
            assert number > 3
            assert await later == {2}
            assert await it.compute(b, "after") == {10}
    assert named(logged, "spark.lost") == []
    assert len(named(logged, "spark.starting")) == (2 if connect else 3)
