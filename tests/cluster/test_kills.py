"""A whole server whose Spark is killed under it: each row is there once in the end, and at no time twice."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from cluster.served import Served
from support.cluster import spark_parts

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

BUSY = 40
"""Milliseconds for each of a window's hundred rows: time for a kill."""


async def test_a_connect_server_that_is_killed_costs_no_row_and_doubles_none(tmp_path: Path) -> None:
    pytest.importorskip("grpc", reason="Spark Connect's packages are not installed")
    async with spark_parts(tmp_path / "workers") as parts:
        connect, address = await parts.connect_server()
        server = Served(tmp_path, address)
        async with server.fed():
            server.send()
            await server.until_exact()
            server.send(pause_ms=BUSY)
            await server.until_computing()
            await connect.kill()
            await connect.start()
            await server.until_exact()
