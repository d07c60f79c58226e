"""A whole server whose Spark is killed under it: each row is there once in the end, and at no time twice."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest
from cluster.served import Served
from support.cluster import NOT_BLINDED, can_blind, spark_parts

pytestmark = [pytest.mark.services, pytest.mark.slow]


async def test_whatever_is_killed_and_whoever_is_blind_each_row_is_there_once(tmp_path: Path) -> None:
    async with spark_parts(tmp_path / "workers") as parts:
        master = await parts.master()
        server = Served(tmp_path, parts.url)
        server.out.mkdir()
        first = await parts.worker()
        blind = await parts.worker(blind=server.out) if can_blind(server.out) else None
        if blind:
            # A cluster with a worker that does not see the folder is refused.
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

            # Every executor; then the workers with theirs.
            server.send(held=True)
            await server.until_computing()
            for pid in (*first.executors(), *second.executors()):
                with contextlib.suppress(ProcessLookupError):  # one may end by itself once another is gone
                    os.kill(pid, signal.SIGKILL)
            server.let_go()
            await server.until_exact()
            server.send(held=True)
            await server.until_computing()
            for worker in (first, second):
                await worker.kill(executors=True)
            server.let_go()
            if blind:
                # None is left but one that came later and is blind: no window is done, and the event says where.
                await blind.start()
                where = "Its tasks failed on 127.0.0.2 (executor "
                await server.until(lambda: where in str(server.log("window.failed")))
                assert server.rows().total() == 200
            await first.start()
            if blind:
                await blind.kill(executors=True)
            await server.until_exact()

            # The master, then the server.
            server.send(held=True)
            await server.until_computing()
            await master.kill()
            await master.start()
            server.let_go()
            await server.until_exact()
            server.send(held=True)
            await server.until_computing()
            await server.kill()
            server.let_go()
            await server.until_exact()
    if not blind:
        pytest.skip(f"All but what a blind worker does: {NOT_BLINDED}")


async def test_a_connect_server_on_a_cluster_that_is_killed_costs_no_row_and_doubles_none(
    tmp_path: Path,
) -> None:
    pytest.importorskip("grpc", reason="Spark Connect's packages are not installed")
    async with spark_parts(tmp_path / "workers") as parts:
        await parts.cluster(workers=1)
        connect, address = await parts.connect_server(parts.url)
        server = Served(tmp_path, address)
        async with server.fed():
            server.send()
            await server.until_exact()
            server.send(held=True)
            await server.until_computing()
            await connect.kill()
            await connect.start()
            server.let_go()
            await server.until_exact()
