"""Several functions on one scripted driver: what one of them does, and what the others have of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from spark.bench import FAKE, HandClock, job
from support.processes import group_members
from support.serving import until

from mldserver.errors import DriverLost, HandlerInvalid, JavaError, OperatorError
from mldserver.spark import shared_driver
from mldserver.spark.client import SparkEngine, make_engine
from mldserver.spark.driver_messages import StartSession
from mldserver.spark.driver_start import own_folder
from mldserver.spark.shared_driver import SharedDriver


def plan(text: str) -> dict[str, tuple[str, bytes]]:
    """Return the code of a function that says what the scripted driver does when it loads it."""
    return {"plan": ("/plan.py", text.encode())}


class Shared:
    """A driver for functions that the test adds, over a clock whose sleeps the test ends."""

    def __init__(self, tmp_path: Path, **options: Any) -> None:
        self.folder = tmp_path
        self.state = tmp_path / "lives"
        self.clock = HandClock()
        session = StartSession("sc://nowhere", concurrency=options.pop("concurrency", 2))
        command = [sys.executable, str(FAKE), options.pop("script", "good"), str(self.state)]
        self.driver = SharedDriver(
            session, **{"clock": self.clock, "command": command, "stop_grace": 600, **options}
        )

    def engine(self, name: str, text: str = "", **options: Any) -> SparkEngine:
        """Return a function's engine, which does not run yet. ``text``: what its module says."""
        code = {"code": plan(text)} if text else {}
        return make_engine(
            "handlers.x",
            "a INT",
            driver=self.driver,
            pipeline=name,
            work_dir=self.folder / name,
            **{**code, **options},
        )

    @property
    def lives(self) -> list[int]:
        return [int(pid) for pid in self.state.read_text().split()] if self.state.exists() else []

    @contextlib.asynccontextmanager
    async def running(self, *engines: SparkEngine) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as tasks:
            driving = tasks.create_task(self.driver.run())
            for engine in engines:
                tasks.create_task(engine.run())
            try:
                yield
            finally:
                for function in tuple(self.driver.functions.values()):
                    self.driver.leave(function, "The test is over.")
                await self.driver.idle()
                driving.cancel()
        assert not [pid for life in self.lives for pid in group_members(life)]
        assert not [left for folder in self.folder.iterdir() if folder.is_dir() for left in folder.iterdir()]


@pytest.fixture
def it(tmp_path: Path) -> Shared:
    return Shared(tmp_path)


@pytest.fixture(autouse=True)
def with_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_driver, "has_room_beside", lambda _: True)


def named(logged: list[dict[str, Any]], event: str) -> list[dict[str, Any]]:
    return [each for each in logged if each["event"] == event]


async def test_two_functions_have_one_driver(it: Shared, logged: list[dict[str, Any]]) -> None:
    a, b = it.engine("a"), it.engine("b")
    async with it.running(a, b):
        assert (await a.compute(job("w"))).files == ("w.parquet",)
        assert (await b.compute(job("w"))).files == ("w.parquet",)
        assert (a.is_ready, b.is_ready) == (True, True)
        hangs = asyncio.ensure_future(a.compute(job("hangs")))
        await until(lambda: a.facts().jobs == 1)
        assert (b.facts().jobs, it.driver.facts().jobs, it.driver.is_ready) == (0, 1, True)
        assert a.facts().version == it.driver.facts().version == "4.3.0"
        hangs.cancel()
    assert len(it.lives) == 1
    assert [len(named(logged, event)) for event in ("spark.starting", "spark.ready")] == [1, 1]


async def test_no_driver_starts_before_a_function_needs_one_and_none_is_left_behind_the_last(
    it: Shared,
) -> None:
    async with it.running(), asyncio.TaskGroup() as tasks:
        await asyncio.sleep(0.05)
        assert it.lives == []
        for number in (1, 2):
            a = it.engine("a")
            life = tasks.create_task(a.run())
            await a.ready()
            await a.close()
            await life
            assert len(it.lives) == number
            assert not group_members(it.lives[-1])


async def test_a_function_that_closes_leaves_the_driver_to_the_others(it: Shared) -> None:
    a, b = it.engine("a"), it.engine("b")
    async with it.running(a, b):
        await a.ready()
        await b.ready()
        await a.close()
        with pytest.raises(DriverLost, match="The engine is closed"):
            await a.compute(job("w"))
        assert (await b.compute(job("w"))).rows == 5
        again = it.engine("a")
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(again.run())
            assert (await again.compute(job("w"))).rows == 5
            await again.close()
    assert len(it.lives) == 1


async def test_a_module_that_cannot_be_imported_ends_its_function_alone(
    it: Shared, logged: list[dict[str, Any]]
) -> None:
    a, b = it.engine("a"), it.engine("b", "fails:handler")
    async with it.running(a):
        await a.ready()
        with pytest.raises(HandlerInvalid, match="no session"):
            await b.run()
        with pytest.raises(DriverLost, match=r"The engine ended: .*no session"):
            await b.ready()
        assert (await a.compute(job("w"))).rows == 5
        # The author has mended it. The driver has imported the former module: it must be another one.
        mended = it.engine("b", "good")
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(mended.run())
            assert (await mended.compute(job("w"))).rows == 5
            assert (await a.compute(job("w"))).rows == 5
            await mended.close()
    assert len(it.lives) == 2
    assert not named(logged, "spark.lost")


async def test_the_only_function_that_cannot_be_imported_takes_the_driver_along_and_another_starts_one(
    it: Shared,
) -> None:
    async with it.running():
        with pytest.raises(HandlerInvalid):
            await it.engine("b", "fails:handler").run()
        await it.driver.idle()
        assert not group_members(it.lives[0])
        a = it.engine("a")
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(a.run())
            assert (await a.compute(job("w"))).rows == 5
            await a.close()


async def test_a_function_that_spark_refuses_is_tried_again_in_the_same_driver(it: Shared) -> None:
    a, b = it.engine("a"), it.engine("b", "fails:spark")
    async with it.running(a, b):
        assert (await a.compute(job("w"))).rows == 5
        for seconds in (1, 2, 4):
            assert await it.clock.end_sleep() == seconds
        assert (b.is_ready, b.trouble) == (False, "The start failed: SomeError: no session")
        assert (a.is_ready, a.trouble) == (True, None)
    assert len(it.lives) == 1


async def test_a_function_that_spark_has_refused_once_says_so_until_it_is_loaded(it: Shared) -> None:
    a, b = it.engine("a"), it.engine("b", "fails once")
    async with it.running(a, b):
        await until(lambda: b.trouble == "The start failed: SomeError: no room")
        assert await it.clock.end_sleep() == 1
        assert (await b.compute(job("w"))).rows == 5
        assert b.trouble is None


async def test_all_functions_wait_for_the_next_driver_when_one_has_killed_it(it: Shared) -> None:
    a, b = it.engine("a"), it.engine("b")
    async with it.running(a, b):
        await b.ready()
        beside = asyncio.ensure_future(b.compute(job("hangs")))
        await until(lambda: b.facts().jobs == 1)
        with pytest.raises(DriverLost) as mine:
            await a.compute(job("dies"))
        with pytest.raises(DriverLost) as other:
            await beside
        assert (mine.value.blame, other.value.blame) == ("others", "others")
        assert await it.clock.end_sleep() == 1
        assert (await a.compute(job("w"))).rows == (await b.compute(job("w"))).rows == 5
    assert len(it.lives) == 2


async def test_a_drivers_scratch_is_in_no_functions_folder_and_what_dead_processes_left_is_swept_away(
    tmp_path: Path,
) -> None:
    """A function that starts again removes what it does not know in its folder."""
    own = own_folder(tmp_path / "drivers")
    host = own.name.rpartition("-")[0]
    dead = 2**30  # no system numbers its processes so far
    kept = [f"{host}-{os.getppid()}", f"{host}-text", f"elsewhere-{dead}"]
    for name in (*kept, f"{host}-{dead}", own.name):
        (own.parent / name / "spark-left").mkdir(parents=True)
    it = Shared(tmp_path, work_dir=own)
    a = it.engine("a")
    async with asyncio.TaskGroup() as tasks:
        driving = tasks.create_task(it.driver.run())
        tasks.create_task(a.run())
        await a.ready()
        assert [path.name.startswith("spark-") for path in own.iterdir()] == [True]
        assert not (own / "spark-left").exists()
        assert sorted(path.name for path in own.parent.iterdir()) == sorted([*kept, own.name])
        await a.close()
        driving.cancel()
    assert not own.exists()


async def test_java_is_missing_for_all_functions(it: Shared) -> None:
    it.driver.setup = StartSession("local[1]")
    it.driver.java_home = str(it.folder / "nowhere")
    async with it.running():
        errors = await asyncio.gather(it.engine("a").run(), it.engine("b").run(), return_exceptions=True)
    assert {type(error) for error in errors} == {JavaError}


# Hooks that hang.


async def test_a_hook_that_hangs_holds_no_slot_and_the_windows_of_others_go_on(
    tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    it = Shared(tmp_path, concurrency=1)
    a, b = it.engine("a"), it.engine("b")
    slow: list[str] = []
    a.when_slow(slow.append)
    async with it.running(a, b):
        hangs = asyncio.ensure_future(a.compute(job("slow")))
        await until(lambda: bool(slow))
        assert (await b.compute(job("w"))).rows == 5
        assert (await a.compute(job("w"))).rows == 5
        assert not hangs.done()
        hangs.cancel()
    (event,) = named(logged, "window.slow")
    assert (event["pipeline"], event["window"]) == ("a", "slow")


async def test_for_a_job_that_cannot_be_cancelled_a_driver_with_other_functions_is_replaced_and_not_killed(
    it: Shared, logged: list[dict[str, Any]]
) -> None:
    a, b = it.engine("a"), it.engine("b")
    async with it.running(a, b):
        await asyncio.gather(a.ready(), b.ready())
        hangs = asyncio.ensure_future(a.compute(job("hangs for good")))
        await until(lambda: a.facts().jobs == 1)
        old = it.driver.life
        hangs.cancel()
        beside = asyncio.ensure_future(b.compute(job("hangs")))
        await until(lambda: b.facts().jobs == 1)
        assert await it.clock.end_sleep() == it.driver.cancel_grace
        later = asyncio.ensure_future(a.compute(job("w")))
        assert (await later).rows == (await b.compute(job("w"))).rows == 5
        assert it.driver.life is not old
        assert not beside.done()
        beside.cancel()
    assert len(it.lives) == 2
    assert not named(logged, "spark.lost")


# Fair slots.


async def test_a_hundred_due_windows_delay_the_window_of_another_function_by_one_job(tmp_path: Path) -> None:
    it = Shared(tmp_path, concurrency=1)
    a, b = it.engine("a"), it.engine("b")
    done: list[str] = []

    async def compute(engine: SparkEngine, window: str) -> None:
        await engine.compute(job(window))
        done.append(window)

    async with it.running(a, b):
        await asyncio.gather(a.ready(), b.ready())
        async with asyncio.TaskGroup() as tasks:
            for number in range(100):
                tasks.create_task(compute(a, f"a{number}"))
            await until(lambda: len(done) >= 3)
            before = len(done)
            tasks.create_task(compute(b, "b"))
    # One job of `a` ran already, and another one may have ended in the same turn of the event loop.
    assert done.index("b") <= before + 2
    assert len(done) == 101


# A driver beside another one.


async def test_the_windows_of_others_go_on_while_a_function_gets_another_driver(
    it: Shared, logged: list[dict[str, Any]]
) -> None:
    a, b = it.engine("a", "version 1"), it.engine("b")
    go = it.folder / "go"
    async with it.running(a, b):
        await asyncio.gather(a.ready(), b.ready())
        a.renew(plan(f"waits:{go}"))
        later = asyncio.ensure_future(a.compute(job("later")))
        await until(lambda: len(it.lives) == 2)
        for number in range(20):
            assert (await b.compute(job(f"b{number}"))).rows == 5
        running = asyncio.ensure_future(b.compute(job("hangs")))
        await until(lambda: b.facts().jobs == 1)
        old = it.driver.life
        assert (later.done(), a.is_ready, b.is_ready) == (False, False, True)
        go.touch()
        assert (await later).rows == 5
        assert (await b.compute(job("w"))).rows == 5
        assert old is not None
        assert not old.over.is_set(), "a job of it runs still"
        running.cancel()
        await old.ended.wait()
        assert len(it.lives) == 2
    assert not named(logged, "spark.lost")
    assert len(named(logged, "spark.ready")) == 2


async def test_without_memory_for_two_drivers_all_functions_wait_for_the_next_one(
    it: Shared, logged: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_driver, "has_room_beside", lambda _: False)
    a, b = it.engine("a", "version 1"), it.engine("b")
    async with it.running(a, b):
        await asyncio.gather(a.ready(), b.ready())
        old = it.driver.life
        assert old is not None
        running = asyncio.ensure_future(b.compute(job("hangs")))
        await until(lambda: b.facts().jobs == 1)
        a.renew(plan("version 2"))
        await until(lambda: old.outdated)
        await asyncio.sleep(0.3)
        assert len(it.lives) == 1
        running.cancel()
        assert (await b.compute(job("w"))).rows == (await a.compute(job("w"))).rows == 5
        assert old.ended.is_set()
    assert not named(logged, "spark.lost")


@pytest.mark.parametrize("text", ["lacks executors", "dies"])
async def test_where_two_drivers_cannot_run_at_a_time_the_present_one_makes_room(
    it: Shared, text: str
) -> None:
    a, b = it.engine("a", "version 1"), it.engine("b")
    async with it.running(a, b):
        await asyncio.gather(a.ready(), b.ready())
        old = it.driver.life
        assert old is not None
        running = asyncio.ensure_future(b.compute(job("hangs")))
        await until(lambda: b.facts().jobs == 1)
        a.renew(plan(text))
        await until(lambda: old.outdated)
        assert not old.over.is_set(), "a job of it runs still"
        running.cancel()
        await old.ended.wait()
        assert len(it.lives) >= 2


async def test_new_code_that_cannot_be_loaded_stops_its_own_windows_until_it_is_mended(
    it: Shared, logged: list[dict[str, Any]]
) -> None:
    a, b = it.engine("a", "version 1"), it.engine("b")
    async with it.running(a, b):
        await asyncio.gather(a.ready(), b.ready())
        a.renew(plan("fails:handler:HandlerInvalid"))
        later = asyncio.ensure_future(a.compute(job("later")))
        assert await it.clock.end_sleep() == 1
        seconds, _ = await it.clock.sleeps.get()
        assert seconds == 2
        assert a.trouble == "The start failed: HandlerInvalid: no session"
        assert (await b.compute(job("w"))).rows == 5
        assert b.trouble is None
        assert [event["reason"] for event in named(logged, "spark.lost")] == [a.trouble] * 2
        a.renew(plan("version 3"))
        assert (await later).rows == 5
        assert a.trouble is None
        assert (await b.compute(job("w"))).rows == 5


async def test_a_driver_that_dies_while_the_next_one_starts_is_followed_by_it(it: Shared) -> None:
    a, b = it.engine("a", "version 1"), it.engine("b")
    go = it.folder / "go"
    async with it.running(a, b):
        await asyncio.gather(a.ready(), b.ready())
        a.renew(plan(f"waits:{go}"))
        await until(lambda: len(it.lives) == 2)
        with pytest.raises(DriverLost):
            await b.compute(job("dies"))
        assert await it.clock.end_sleep() == 1
        go.touch()
        assert (await b.compute(job("w"))).rows == (await a.compute(job("w"))).rows == 5
        assert len(it.lives) == 2


# What one driver cannot have.


@pytest.mark.parametrize(
    ("mine", "other", "told"),
    [
        (
            {"code": {"common": ("/a.py", b"1")}},
            {"code": {"common": ("/b.py", b"2")}},
            "Function b has a module common with another text than function a",
        ),
        (
            {"storage": {"fs.s3a.bucket.lake.secret.key": "one"}},
            {"storage": {"fs.s3a.bucket.lake.secret.key": "two"}},
            r"Function b has another value of Spark's setting fs\.s3a\.bucket\.lake\.secret\.key",
        ),
    ],
    ids=["modules", "credentials"],
)
async def test_what_two_functions_cannot_have_in_one_driver_is_refused(
    it: Shared, mine: dict[str, Any], other: dict[str, Any], told: str
) -> None:
    a, b = it.engine("a", **mine), it.engine("b", **other)
    async with it.running(a):
        await a.ready()
        with pytest.raises(OperatorError, match=told) as refused:
            await b.run()
        assert (await a.compute(job("w"))).rows == 5
    assert "two" not in str(refused.value)


async def test_equal_modules_and_settings_are_shared(it: Shared) -> None:
    shared = {"code": {"common": ("/a.py", b"1")}, "storage": {"fs.s3.impl": "S3A"}}
    a, b = it.engine("a", **shared), it.engine("b", **shared)
    async with it.running(a, b):
        assert (await a.compute(job("w"))).rows == (await b.compute(job("w"))).rows == 5
    assert len(it.lives) == 1


async def test_a_module_that_two_functions_share_changes_when_both_have_changed(it: Shared) -> None:
    old, new = ({"common": ("/common.py", text)} for text in (b"1", b"2"))
    a, b = it.engine("a", code=old), it.engine("b", code=old)
    async with it.running(a, b):
        await asyncio.gather(a.ready(), b.ready())
        a.renew(new)
        later = asyncio.ensure_future(a.compute(job("w")))
        assert (await b.compute(job("w"))).rows == 5
        assert (a.is_ready, b.is_ready, later.done()) == (False, True, False)
        assert "Function a has a module common with another text than function b" in (a.trouble or "")
        assert (len(it.lives), b.trouble) == (1, None)
        with pytest.raises(DriverLost):
            await b.compute(job("dies"))
        assert await it.clock.end_sleep() == 1
        assert (await b.compute(job("w"))).rows == 5
        b.renew(new)
        assert (await later).rows == (await b.compute(job("w"))).rows == 5
        assert a.trouble is None
    assert len(it.lives) == 3
