"""A whole server whose Spark is killed under it: each row is there once in the end, and at no time twice."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest
from cluster.served import Served
from support.cluster import can_blind, spark_parts

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

BUSY = 40
"""Milliseconds for each of a window's hundred rows: time for a kill."""


async def test_whatever_of_a_cluster_is_killed_each_row_is_there_once_and_a_blind_worker_is_refused(
    tmp_path: Path,
) -> None:
    async with spark_parts(tmp_path / "workers") as parts:
        master = await parts.master()
        server = Served(tmp_path, parts.url)
        server.out.mkdir()
        first = await parts.worker()
        if can_blind(server.out):
            # A cluster with a worker that does not see the folder is refused.
            blind = await parts.worker(blind=server.out)
            await server.start()
            assert await server.ended() == 2
            (failed,) = server.log("server.failed")
            assert "Spark's executors do not all see the output's storage" in failed["what"]
            assert "on 127.0.0.2 (executor" in failed["what"]
            assert "Set out to shared storage" in failed["what"]
            await blind.kill(executors=True)
        second = await parts.worker()

        async with server.fed():
            server.send()
            await server.until_exact()

            # Every executor; then a worker with its executor.
            server.send(pause_ms=BUSY)
            await server.until_computing()
            for pid in (*first.executors(), *second.executors()):
                os.kill(pid, signal.SIGKILL)
            await server.until_exact()
            server.send(pause_ms=BUSY)
            await server.until_computing()
            await first.kill(executors=True)
            await server.until_exact()
            await first.start()

            # The master: what runs is finished all the same.
            server.send(pause_ms=BUSY)
            await server.until_computing()
            await master.kill()
            await master.start()
            await server.until_exact()


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
