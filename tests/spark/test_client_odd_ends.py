"""The engine against a scripted driver: ends that are noticed late, disks and caches that refuse."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from spark.bench import Bench, HandClock, job
from support.serving import until

from mldserver.errors import DriverLost
from mldserver.spark import driver_messages, driver_session, shared_driver
from mldserver.spark.java import Java


def texts(logged: list[dict[str, Any]], name: str) -> list[str]:
    return [event["text"] for event in logged if event["event"] == name]


@pytest.mark.parametrize("way", ["forks", "forks away"])
async def test_a_death_is_noticed_though_a_forked_child_holds_the_socket(
    tmp_path: Path, logged: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr(driver_session, "_DRAIN_SECONDS", 0.1)
    it = Bench(tmp_path, "good")
    try:
        async with it.running():
            with pytest.raises(DriverLost, match="exit code 9"):
                await it.engine.compute(job(way))
            await it.clock.end_sleep()
            assert (await it.engine.compute(job("w"))).files == ("w.parquet",)
    finally:
        for text in texts(logged, "handler.output"):
            if text.startswith("away "):
                os.kill(int(text.removeprefix("away ")), signal.SIGKILL)


async def test_a_job_waits_for_the_next_driver_while_what_the_last_one_left_is_cleaned_up(
    tmp_path: Path, java: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = Bench(tmp_path, "good", master="local[1]", java_home=str(java), archive_after=60)
    training, tidy = asyncio.Event(), asyncio.Event()

    async def train(start: driver_messages.StartSession, *_: object) -> None:
        shutil.rmtree(start.scratch)
        training.set()
        try:
            await asyncio.Event().wait()
        finally:
            await tidy.wait()

    monkeypatch.setattr(shared_driver, "train", train)
    async with it.running():
        await it.engine.ready()
        await it.clock.end_sleep()
        await training.wait()
        with pytest.raises(DriverLost):
            await it.engine.compute(job("dies"))
        call = asyncio.ensure_future(it.engine.compute(job("w")))
        await asyncio.wait({call}, timeout=0.05)
        assert (it.engine.is_ready, call.done()) == (False, False)
        tidy.set()
        await it.clock.end_sleep()
        assert (await call).files == ("w.parquet",)


@pytest.mark.parametrize("first", ["the answer", "the cancelling"])
async def test_a_job_may_end_in_the_very_moment_in_which_it_is_cancelled(tmp_path: Path, first: str) -> None:
    it = Bench(tmp_path, "good")
    async with it.running():
        await it.engine.ready()
        alive = it.engine.driver.life
        assert alive is not None
        call = asyncio.ensure_future(it.engine.compute(job("hangs")))
        await until(lambda: bool(alive.waiting))
        (job_id,) = alive.waiting
        if first == "the cancelling":
            call.cancel()
        # Behind the call's own step in the loop's queue, and before any that this brings about.
        asyncio.get_running_loop().call_soon(alive._accept_answer, driver_messages.JobDone(job_id, ()), [])
        if first == "the answer":
            asyncio.get_running_loop().call_soon(call.cancel)
        with pytest.raises(asyncio.CancelledError):
            await call
        assert not alive._cancelling, "nobody waits for an end that has been, and kills the driver for it"
        assert (await it.engine.compute(job("w"))).files == ("w.parquet",)
    assert len(it.lives) == 1


async def test_a_window_of_very_many_segments_is_computed(tmp_path: Path) -> None:
    it = Bench(tmp_path, "good")
    async with it.running():
        long = replace(job("long"), segments=("/a/segment",) * 500_000)
        assert (await it.engine.compute(long)).files == ("long.parquet",)
    assert len(it.lives) == 1


async def test_a_disk_without_room_for_an_archive_costs_no_driver(
    tmp_path: Path, java: Path, logged: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    it = Bench(tmp_path, "good", master="local[1]", java_home=str(java), archive_after=60)
    plan = it.engine.driver._plan_start

    def without_room(found: Java | None, *, train: Path | None = None) -> Any:
        if train is not None:
            raise OSError(errno.ENOSPC, "No space left on device")
        return plan(found)

    monkeypatch.setattr(it.engine.driver, "_plan_start", without_room)
    async with it.running():
        await it.engine.ready()
        await it.clock.end_sleep()
        await until(lambda: bool(texts(logged, "spark.log")))
        assert (await it.engine.compute(job("w"))).files == ("w.parquet",)
    assert texts(logged, "spark.log") == ["No class archive was made. [Errno 28] No space left on device"]
    assert len(it.lives) == 1


async def test_a_cache_that_cannot_be_looked_into_is_gone_without(
    tmp_path: Path, java: Path, logged: list[dict[str, Any]]
) -> None:
    nowhere = tmp_path / ("x" * 300)  # as a folder without permission is, for who may do all
    it = Bench(tmp_path, "good", master="local[1]", java_home=str(java), archive_after=60, cache_dir=nowhere)
    async with it.running():
        await it.engine.ready()
        await it.clock.end_sleep()
        await until(lambda: bool(texts(logged, "spark.log")))
        assert (await it.engine.compute(job("w"))).files == ("w.parquet",)
    (text,) = texts(logged, "spark.log")
    assert text.startswith("No class archive was made. [Errno 36]")
    assert len(it.lives) == 1


async def test_a_driver_that_waits_for_the_cluster_at_its_start_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[str] = []
    clock = HandClock()
    start = driver_messages.StartSession("spark://h:7077", str(tmp_path))
    life = driver_session.Life(start, clock, cancel_grace=0)
    monkeypatch.setattr(life, "kill", killed.append)
    life.trouble = "The cluster has given Spark no executor for more than 20 s."
    late = asyncio.create_task(life._kill_unless_set(life.warm, 600, "late", clock))
    assert [await clock.end_sleep() for _ in range(3)] == [600] * 3
    _, ended = await clock.sleeps.get()
    assert killed == []
    life.trouble = None
    ended.set()
    # The wait has cost it none of its time.
    assert await clock.end_sleep() == 600
    await late
    assert killed == ["late"]


async def test_an_outdated_driver_ends_between_two_jobs_and_nobody_takes_that_for_a_loss(
    tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    it = Bench(tmp_path, "good")
    async with it.running(), asyncio.TaskGroup() as group:
        running = group.create_task(it.engine.compute(job("hangs")))
        await it.engine.ready()
        await until(lambda: bool(it.engine.driver.life and it.engine.driver.life.waiting))
        it.engine.renew({})
        later = group.create_task(it.engine.compute(job("later")))
        await asyncio.sleep(0)
        assert not it.engine.driver.life.over.is_set(), "a job is under way"  # type: ignore[union-attr]
        await asyncio.sleep(0.3)
        assert len(it.lives) == 1, "the next one would serve nobody yet"
        running.cancel()
        assert (await later).files == ("later.parquet",)
        assert len(it.lives) == 2
        assert it.engine.trouble is None
    assert [event for event in logged if event["event"] == "spark.lost"] == []
    assert [event["start"] for event in logged if event["event"] == "spark.starting"] == [1, 2]


async def test_an_outdated_driver_does_not_wait_for_a_hook_that_may_hang(tmp_path: Path) -> None:
    it = Bench(tmp_path, "good")
    slow: list[str] = []
    it.engine.when_slow(slow.append)
    async with it.running():
        call = asyncio.ensure_future(it.engine.compute(job("slow")))
        await until(lambda: bool(slow))
        it.engine.renew({})
        assert (await it.engine.compute(job("w"))).files == ("w.parquet",)
        with pytest.raises(DriverLost) as lost:
            await call
        assert lost.value.blame == "server"


async def test_an_outdated_driver_that_does_not_stop_is_killed(tmp_path: Path) -> None:
    it = Bench(tmp_path, "stubborn", stop_grace=0.01)
    async with it.running():
        await it.engine.ready()
        it.engine.renew({})
        assert await it.clock.end_sleep() == 0.01
        await until(lambda: len(it.lives) == 2)
        await it.engine.ready()
