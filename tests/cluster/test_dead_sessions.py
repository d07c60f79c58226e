"""Sessions that die without a word: the engine says why within half a minute, and windows are computed on a fresh driver."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from cluster.test_on_a_cluster import ROWS, engine, running, segments
from support.cluster import spark_parts
from support.serving import until

from mldserver.engine_jobs import WindowJob
from mldserver.errors import DriverLost
from mldserver.spark.client import SparkEngine
from mldserver.windows import Window

pytestmark = [pytest.mark.services, pytest.mark.slow]


class Jobs:
    """Jobs of one window over the same segments."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.paths = segments(folder / "segments", 1)
        self.attempt = 0

    def next(self, name: str = "identity") -> WindowJob:
        self.attempt += 1
        staging = str(self.folder / "staging" / str(self.attempt))
        return WindowJob(Window(name, None, None), self.attempt, self.paths, staging, ROWS, 1000)


async def trouble(spark: SparkEngine) -> str:
    """Return what the engine says: within half a minute, or a whole one where the machine is busy with other tests."""
    async with asyncio.timeout(800):
        await until(lambda: spark.trouble is not None)
    assert spark.trouble is not None
    assert not spark.is_ready
    return spark.trouble


async def test_a_master_that_was_started_again_while_nothing_ran_is_noticed(tmp_path: Path) -> None:
    jobs = Jobs(tmp_path)
    async with spark_parts(tmp_path) as parts:
        master, (worker,) = await parts.cluster(workers=1)
        async with running(engine(parts.url, tmp_path / "work")) as spark:
            assert (await spark.compute(jobs.next())).rows == ROWS
            await master.kill()
            await master.start()
            # The worker comes back to the master by itself, and ends the executor.
            await until(lambda: not worker.executors())
            assert "does not know the application any more" in await trouble(spark)
            assert (await spark.compute(jobs.next())).rows == ROWS
            assert spark.trouble is None


@pytest.mark.long
async def test_a_cluster_without_resources_is_waited_for(tmp_path: Path) -> None:
    jobs = Jobs(tmp_path)
    async with spark_parts(tmp_path) as parts:
        _, (worker,) = await parts.cluster(workers=1)
        async with running(engine(parts.url, tmp_path / "work")) as spark:
            first = spark._life
            await worker.kill(executors=True)
            waiting = asyncio.ensure_future(spark.compute(jobs.next()))
            assert "given Spark no executor" in await trouble(spark)
            assert not waiting.done()
            await parts.worker()
            assert (await waiting).rows == ROWS
            await until(lambda: spark.is_ready)
            assert spark._life is first, "a fresh driver would not have had more"


@pytest.mark.long
async def test_a_connect_server_that_is_gone_is_noticed_idle_and_during_a_job(tmp_path: Path) -> None:
    pytest.importorskip("grpc", reason="Spark Connect's packages are not installed")
    jobs = Jobs(tmp_path)
    async with spark_parts(tmp_path) as parts:
        server, address = await parts.connect_server()
        async with running(engine(address, tmp_path / "work")) as spark:
            assert (await spark.compute(jobs.next())).rows == ROWS
            await server.kill()
            assert "The Spark Connect server is gone" in await trouble(spark)
            await server.start()
            assert (await spark.compute(jobs.next())).rows == ROWS
            assert spark.trouble is None

            endless = asyncio.ensure_future(spark.compute(jobs.next("endless")))
            await asyncio.wait({endless}, timeout=3)
            await server.kill()
            with pytest.raises(DriverLost, match="The Spark Connect server is gone"):
                async with asyncio.timeout(800):
                    await endless
            await server.start()
            assert (await spark.compute(jobs.next())).rows == ROWS
