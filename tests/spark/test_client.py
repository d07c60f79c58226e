"""The engine against a scripted driver: what dies, hangs, lies or is cancelled."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from spark.bench import Bench, job
from support.serving import until

from mldserver.base.clock import SystemClock
from mldserver.engine_jobs import WindowResult
from mldserver.errors import DriverLost, HandlerInvalid, JavaError, NotThereYet, OperatorError, WindowFailed
from mldserver.sinks.sink import Owner, SinkSpec
from mldserver.spark import driver_messages, shared_driver
from mldserver.spark.driver_messages import Health, StartSession
from mldserver.spark.driver_session import Life
from mldserver.spark.java import probe


@pytest.fixture
def bench(tmp_path: Path) -> Callable[..., Bench]:
    return lambda script="good", **settings: Bench(tmp_path, script, **settings)


def events(logged: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [event for event in logged if event["event"] == name]


async def test_a_job_comes_back_with_its_files(
    bench: Callable[..., Bench], logged: list[dict[str, Any]]
) -> None:
    it = bench()
    assert not it.engine.is_ready
    async with it.running():
        await it.engine.ready()
        assert it.engine.is_ready
        assert (it.engine.facts().jvm_resident_bytes or 0) > 1 << 20
        result = await it.engine.compute(job("w", rows=7))
        assert result == WindowResult(("w.parquet",), 7, result.seconds)
    assert not it.engine.is_ready
    assert it.engine.facts().jvm_resident_bytes is None
    assert events(logged, "spark.ready")[0]["ui"] == "http://ui"
    assert events(logged, "handler.output")[-1]["text"] == "stopping in order"
    assert not events(logged, "spark.lost")


async def test_several_jobs_come_back_in_their_order(bench: Callable[..., Bench]) -> None:
    it = bench()
    async with it.running():
        results = await it.engine.compute_group((job("a", rows=1), job("b", rows=2)))
        assert [(result.files, result.rows) for result in results] == [
            (("a.parquet",), 1),
            (("b.parquet",), 2),
        ]


async def test_a_group_fails_dies_and_ends_at_its_deadline_as_a_whole(bench: Callable[..., Bench]) -> None:
    it = bench()
    async with it.running():
        with pytest.raises(WindowFailed, match="ValueError: no good") as caught:
            await it.engine.compute_group((job("a"), job("fails")))
        assert caught.value.where == {"traceback": "File my.py"}
        it.engine.job_deadline = 0.05
        with pytest.raises(WindowFailed, match=r"deadline of 0\.05 seconds"):
            await it.engine.compute_group((job("a"), job("hangs")))
        it.engine.job_deadline = None
        assert len(await it.engine.compute_group((job("a"), job("b")))) == 2
    it = bench()
    async with it.running():
        with pytest.raises(DriverLost):
            await it.engine.compute_group((job("dies"), job("b")))
        await it.clock.end_sleep()
        call = asyncio.ensure_future(it.engine.compute_group((job("a"), job("hangs"))))
        await it.engine.ready()
        await asyncio.wait({call}, timeout=0.05)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert len(await it.engine.compute_group((job("a"), job("b")))) == 2


async def test_a_job_asked_for_early_waits_for_the_driver(bench: Callable[..., Bench]) -> None:
    it = bench()
    async with asyncio.TaskGroup() as tasks, it.running():
        assert (await tasks.create_task(it.engine.compute(job("w")))).files == ("w.parquet",)


async def test_jobs_beyond_the_concurrency_wait_their_turn(bench: Callable[..., Bench]) -> None:
    it = bench(concurrency=1)
    async with it.running(), asyncio.TaskGroup() as tasks:
        first = tasks.create_task(it.engine.compute(job("hangs")))
        await it.engine.ready()
        second = tasks.create_task(it.engine.compute(job("w")))
        await asyncio.wait({first, second}, timeout=0.05)
        assert not second.done()
        first.cancel()
        assert (await second).files == ("w.parquet",)


async def test_a_failed_job_is_told_with_the_users_traceback(bench: Callable[..., Bench]) -> None:
    it = bench()
    async with it.running():
        with pytest.raises(WindowFailed, match="ValueError: no good") as caught:
            await it.engine.compute(job("fails"))
        assert caught.value.where == {"window": "fails", "traceback": "File my.py"}
        assert caught.value.advice == "Remove it."
        assert caught.value.quotes
        assert (await it.engine.compute(job("w"))).rows == 5


@pytest.mark.parametrize(
    ("death", "reason"),
    [
        ("dies", r"process died \(exit code 9\)"),
        ("garbage", "cannot be read"),
        ("wrong", "messages cannot be read: .* 'Stop'"),
    ],
)
async def test_a_driver_that_dies_or_lies_under_a_job_is_replaced(
    bench: Callable[..., Bench], logged: list[dict[str, Any]], death: str, reason: str
) -> None:
    it = bench()
    async with it.running():
        with pytest.raises(DriverLost, match=reason):
            await it.engine.compute(job(death))
        assert await it.clock.end_sleep() == 1
        assert (await it.engine.compute(job("w"))).files == ("w.parquet",)
    assert len(it.lives) == 2
    assert re.search(reason, events(logged, "spark.lost")[0]["reason"])


async def test_back_off_doubles_until_a_job_has_succeeded(bench: Callable[..., Bench]) -> None:
    it = bench()
    async with it.running():
        for expected in (1, 2, 4):
            with pytest.raises(DriverLost):
                await it.engine.compute(job("dies"))
            assert await it.clock.end_sleep() == expected
        await it.engine.compute(job("w"))
        with pytest.raises(DriverLost):
            await it.engine.compute(job("dies"))
        assert await it.clock.end_sleep() == 1
        await it.engine.ready()


async def test_the_last_words_of_a_driver_are_told(
    bench: Callable[..., Bench], logged: list[dict[str, Any]]
) -> None:
    it = bench("dies first")
    async with it.running():
        await it.clock.end_sleep()
        await it.engine.ready()
    lost = events(logged, "spark.lost")[0]
    assert lost["exit_code"] == 3
    assert lost["who"] == "driver"
    assert lost["reason"] == (
        "The driver's process died (exit code 3). It said last: java: command not understood"
    )


async def test_a_jvm_that_dies_under_its_driver_is_named(
    bench: Callable[..., Bench], logged: list[dict[str, Any]]
) -> None:
    it = bench()
    async with it.running():
        with pytest.raises(
            DriverLost, match=r"The JVM died \(killed by signal 9 \(SIGKILL\)\), and its driver with it"
        ):
            await it.engine.compute(job("jvm dies"))
        await it.clock.end_sleep()
    lost = events(logged, "spark.lost")[0]
    assert (lost["who"], lost["exit_code"]) == ("jvm", -9)


@pytest.mark.parametrize(
    ("conf", "now"), [({}, "Spark's default of 1g"), ({"spark.driver.memory": "2g"}, "2g")]
)
async def test_a_jvm_without_memory_is_named_with_the_setting_to_raise(
    bench: Callable[..., Bench], logged: list[dict[str, Any]], conf: dict[str, str], now: str
) -> None:
    it = bench(conf=conf)
    async with it.running():
        said = rf"ran out of memory \(exit code 3\).* Raise spark\.driver\.memory in spark_conf \(now {now}\)"
        with pytest.raises(DriverLost, match=said) as caught:
            await it.engine.compute(job("needs memory"))
        assert caught.value.blame == "window"
        assert "spark.driver.memory" in (it.engine.trouble or "")
        await it.clock.end_sleep()
    assert "spark.driver.memory" in events(logged, "spark.lost")[0]["reason"]


async def test_secrets_are_in_no_event_and_in_no_error_whatever_a_driver_says(
    bench: Callable[..., Bench], logged: list[dict[str, Any]]
) -> None:
    it = bench(
        "says all it knows",
        master="sc://me_myself:1/;user_id=me_myself;token=open%2Fsesame",
        conf={"spark.hadoop.fs.s3a.secret.key": "hush-hush", "spark.x": "told-freely"},
        sink=SinkSpec("jdbc", "jdbc:h2:mem", "t", {"user": "me_myself", "password": 'hush "quoted"'}),
    )
    async with it.running():
        await it.clock.end_sleep()
        await it.engine.ready()
        with pytest.raises(WindowFailed) as caught:
            await it.engine.compute(job("tells"))
        trouble = it.engine.trouble or ""
    assert "me_myself" in trouble
    all_said = [*map(repr, logged), str(caught.value), repr(caught.value.where), trouble]
    assert {event["event"] for event in logged} >= {
        *("spark.starting", "handler.output", "spark.log", "spark.lost", "spark.ready")
    }
    assert not [said for said in all_said if re.search(r"hush|sesame|open/", said)]
    assert [said for said in all_said if "told-freely" in said]
    assert events(logged, "spark.starting")[0]["master"] == "sc://me_myself:1/;user_id=me_myself;token=…"


async def test_a_start_that_is_given_up_is_told_without_the_token(bench: Callable[..., Bench]) -> None:
    it = bench("fails:operator", master="sc://nowhere/;token=open-sesame")
    with pytest.raises(ExceptionGroup) as caught:
        async with it.running():
            await it.engine.ready()
    told = "".join(traceback.format_exception(caught.value))
    assert "Spark cannot start on sc://nowhere/;token=…: SomeError" in told
    assert "open-sesame" not in told


async def test_closing_does_not_wait_for_the_back_off(bench: Callable[..., Bench]) -> None:
    it = bench("dies at once")
    async with it.running():
        await it.clock.sleeps.get()
        assert not it.engine.is_ready


async def test_a_driver_that_never_gets_warm_is_replaced(
    bench: Callable[..., Bench], logged: list[dict[str, Any]]
) -> None:
    it = bench("silent", start_deadline=0.5)
    async with it.running():
        await it.clock.end_sleep()
    assert events(logged, "spark.lost")[0]["reason"] == "The driver was not ready within 0.5 seconds."


async def test_cancelling_the_call_cancels_the_job_and_spares_the_driver(bench: Callable[..., Bench]) -> None:
    it = bench()
    async with it.running():
        await it.engine.ready()
        call = asyncio.ensure_future(it.engine.compute(job("hangs")))
        await asyncio.wait({call}, timeout=0.05)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert (await it.engine.compute(job("w"))).rows == 5
        assert len(it.lives) == 1


async def test_a_cancelled_job_that_goes_on_costs_the_driver_its_life(
    bench: Callable[..., Bench], logged: list[dict[str, Any]]
) -> None:
    it = bench("deaf", cancel_grace=7)
    async with it.running():
        await it.engine.ready()
        call = asyncio.ensure_future(it.engine.compute(job("hangs")))
        await asyncio.wait({call}, timeout=0.05)
        call.cancel()
        assert await it.clock.end_sleep() == 7
        assert await it.clock.end_sleep() == 1
        assert (await it.engine.compute(job("w"))).rows == 5
    assert events(logged, "spark.lost")[0]["reason"] == "A cancelled job did not end within 7 seconds."


async def test_no_job_goes_to_a_driver_that_is_about_to_be_killed(bench: Callable[..., Bench]) -> None:
    it = bench("deaf", concurrency=2, cancel_grace=7)
    async with it.running():
        beside = asyncio.ensure_future(it.engine.compute(job("hangs")))
        call = asyncio.ensure_future(it.engine.compute(job("hangs")))
        await it.engine.ready()
        life = it.engine.driver.life
        assert life is not None
        await until(lambda: len(life.waiting) == 2)
        call.cancel()
        await asyncio.wait({call})
        later = asyncio.ensure_future(it.engine.compute(job("w")))
        assert await it.clock.end_sleep() == 7
        with pytest.raises(DriverLost) as caught:
            await beside
        assert caught.value.blame == "server", "it was killed for the other one"
        assert await it.clock.end_sleep() == 1
        assert (await later).rows == 5


async def test_a_job_that_gets_the_slot_of_a_cancelled_one_waits_for_its_end(
    bench: Callable[..., Bench],
) -> None:
    it = bench("deaf", concurrency=1, cancel_grace=7)
    async with it.running():
        call = asyncio.ensure_future(it.engine.compute(job("hangs")))
        await it.engine.ready()
        life = it.engine.driver.life
        assert life is not None
        await until(lambda: len(life.waiting) == 1)
        later = asyncio.ensure_future(it.engine.compute(job("w")))
        await asyncio.sleep(0.05)
        call.cancel()
        assert await it.clock.end_sleep() == 7
        assert await it.clock.end_sleep() == 1
        assert (await later).rows == 5


async def test_a_job_that_waits_beside_a_cancelled_one_ends_with_the_engine(
    bench: Callable[..., Bench],
) -> None:
    it = bench("deaf", concurrency=2, cancel_grace=7)
    run = asyncio.ensure_future(it.engine.run())
    call = asyncio.ensure_future(it.engine.compute(job("hangs")))
    await it.engine.ready()
    life = it.engine.driver.life
    assert life is not None
    await until(lambda: bool(life.waiting))
    call.cancel()
    await asyncio.wait({call})
    later = asyncio.ensure_future(it.engine.compute(job("w")))
    await asyncio.sleep(0)
    run.cancel()
    await asyncio.wait({run})
    with pytest.raises(DriverLost):
        await asyncio.wait_for(later, 10)


@pytest.mark.parametrize(
    ("names", "blame"),
    [
        (["dies"], "window"),
        (["garbage"], "window"),
        (["is killed"], "outside"),
        (["jvm dies"], "outside"),
        (["is forgotten"], "server"),
        (["hangs", "dies"], "others"),
        (["hangs", "is killed"], "others"),
    ],
)
async def test_whose_doing_a_drivers_death_may_be_is_told_to_each_of_its_jobs(
    bench: Callable[..., Bench], names: list[str], blame: str
) -> None:
    it = bench(concurrency=2)
    async with it.running():
        calls = []
        await it.engine.ready()
        life = it.engine.driver.life
        assert life is not None
        for number, name in enumerate(names):
            calls.append(asyncio.ensure_future(it.engine.compute(job(name))))
            await until(lambda most=number: len(life.waiting) > most or calls[-1].done())  # type: ignore[misc]
        errors = await asyncio.gather(*calls, return_exceptions=True)
        assert [error.blame for error in errors if isinstance(error, DriverLost)] == [blame] * len(names)


async def test_in_a_group_several_windows_were_there(bench: Callable[..., Bench]) -> None:
    it = bench()
    async with it.running():
        with pytest.raises(DriverLost) as caught:
            await it.engine.compute_group((job("dies"), job("b")))
        assert caught.value.blame == "others"


async def test_a_slow_hook_is_named_and_another_window_is_computed_beside_it(
    bench: Callable[..., Bench], logged: list[dict[str, Any]]
) -> None:
    it = bench()
    slow: list[str] = []
    it.engine.when_slow(slow.append)
    async with it.running():
        call = asyncio.ensure_future(it.engine.compute(job("slow")))
        await until(lambda: bool(slow))
        assert (await it.engine.compute(job("w"))).rows == 5
        assert not call.done()
        call.cancel()
        await asyncio.wait({call})
        # Its place is given back once.
        hangs = asyncio.ensure_future(it.engine.compute(job("hangs")))
        waits = asyncio.ensure_future(it.engine.compute(job("w")))
        await asyncio.wait({waits}, timeout=0.05)
        assert not waits.done()
        hangs.cancel()
        assert (await waits).rows == 5
    assert slow == ["slow"]
    (event,) = events(logged, "window.slow")
    assert (event["window"], event["seconds"]) == ("slow", 60.0)
    assert event["line"] == "my.py:7, in on_window: wait()"


async def test_a_slow_hook_ends_the_job_of_several_windows(
    bench: Callable[..., Bench], logged: list[dict[str, Any]]
) -> None:
    it = bench()
    slow: list[str] = []
    it.engine.when_slow(slow.append)
    async with it.running():
        with pytest.raises(WindowFailed, match=r"of window slow runs for 60 s, at my.py:7, in on_window"):
            await it.engine.compute_group((job("a"), job("slow")))
        assert (await it.engine.compute(job("w"))).rows == 5
    assert (slow, len(events(logged, "window.slow"))) == ([], 1)


async def test_a_hook_that_waits_for_executors_is_not_slow(
    bench: Callable[..., Bench], logged: list[dict[str, Any]]
) -> None:
    it = bench()
    async with it.running():
        await it.engine.compute(job("slow for want of executors"))
    assert not events(logged, "window.slow")


async def test_a_job_beyond_its_deadline_fails_and_is_cancelled(bench: Callable[..., Bench]) -> None:
    it = bench(job_deadline=0.05)
    async with it.running():
        with pytest.raises(WindowFailed, match=r"longer than its deadline of 0\.05 seconds"):
            await it.engine.compute(job("hangs"))
        it.engine.job_deadline = None
        assert (await it.engine.compute(job("w"))).rows == 5
    assert len(it.lives) == 1


async def test_a_job_that_waits_for_executors_outlives_its_deadline_and_the_engine_says_why_it_waits(
    bench: Callable[..., Bench],
) -> None:
    it = bench(concurrency=3)
    async with it.running():
        first = asyncio.ensure_future(it.engine.compute(job("starves")))
        await until(lambda: it.engine.trouble is not None)
        assert (it.engine.trouble, it.engine.is_ready) == ("No executors.", False)
        # Only now: a slow machine may take longer than that until the trouble is told.
        it.engine.job_deadline = 0.05
        starving = asyncio.ensure_future(it.engine.compute(job("starves")))
        await asyncio.wait({starving}, timeout=0.2)
        assert not starving.done()
        it.engine.job_deadline = None  # of the one that starves it stays
        await it.engine.compute(job("feeds"))
        await asyncio.gather(first, starving)
        assert (it.engine.trouble, it.engine.is_ready) == (None, True)


def test_a_wait_that_is_over_has_cost_a_job_none_of_its_time(tmp_path: Path) -> None:
    life = Life(StartSession("spark://h:1", str(tmp_path)), SystemClock(), cancel_grace=1)
    for before in ("", "No executors."):
        life._handle(Health(before), ())
        mark = life._undisturbed_mark()
        life._handle(Health("No executors."), ())
        assert mark != life._undisturbed_mark()
        life._handle(Health(""), ())
        assert mark != life._undisturbed_mark()
        assert life._undisturbed_mark() == life._undisturbed_mark()


async def test_a_driver_that_judges_its_session_dead_ends_with_the_reason_and_a_fresh_one_follows(
    bench: Callable[..., Bench], logged: list[dict[str, Any]]
) -> None:
    it = bench()
    async with it.running():
        with pytest.raises(DriverLost, match="The master has forgotten us"):
            await it.engine.compute(job("is forgotten"))
        await until(lambda: bool(events(logged, "spark.lost")))
        assert (it.engine.trouble, it.engine.is_ready) == ("The master has forgotten us.", False)
        await it.clock.end_sleep()
        assert (await it.engine.compute(job("w"))).rows == 5
        assert (it.engine.trouble, it.engine.is_ready) == (None, True)
    assert [event["reason"] for event in events(logged, "spark.lost")] == ["The master has forgotten us."]
    assert len(it.lives) == 2


async def test_everything_that_is_said_reaches_the_log(
    bench: Callable[..., Bench], logged: list[dict[str, Any]]
) -> None:
    it = bench()
    async with it.running():
        await it.engine.compute(job("talks"))
    assert [event["text"] for event in events(logged, "handler.output")] == ["printed by the user"]
    said = {event["text"]: event["level"] for event in events(logged, "spark.log")}
    assert said == {"careful": "warning", "told by Spark": "warning", "no line end": "info"}


async def test_a_driver_that_does_not_stop_is_killed_with_its_children(bench: Callable[..., Bench]) -> None:
    it = bench("stubborn", stop_grace=0.1)
    async with it.running():
        await it.engine.ready()


async def test_cancelling_run_kills_the_driver(bench: Callable[..., Bench]) -> None:
    it = bench("stubborn")
    run = asyncio.ensure_future(it.engine.run())
    await it.engine.ready()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    it.check_nothing_is_left()
    with pytest.raises(DriverLost, match="No Spark driver will come any more"):
        await it.engine.compute(job("w"))
    await it.engine.close()


@pytest.mark.parametrize("jobs_first", [True, False])
async def test_a_job_that_is_cancelled_together_with_the_engine_ends_as_cancelled(
    bench: Callable[..., Bench], jobs_first: bool
) -> None:
    it = bench()
    async with asyncio.TaskGroup() as tasks:
        run = tasks.create_task(it.engine.run())
        await it.engine.ready()
        computing = tasks.create_task(it.engine.compute(job("hangs")))
        await until(lambda: it.engine.driver.life is not None and bool(it.engine.driver.life.waiting))
        for task in (computing, run) if jobs_first else (run, computing):
            task.cancel()
    assert (run.cancelled(), computing.cancelled()) == (True, True)
    it.check_nothing_is_left()


async def test_what_an_earlier_server_left_is_swept_away(bench: Callable[..., Bench]) -> None:
    it = bench()
    (it.work / "spark-left").mkdir(parents=True)
    (it.work / "spark-left" / "spill").touch()
    async with it.running():
        await it.engine.ready()
        assert not (it.work / "spark-left").exists()


async def test_a_handler_that_the_driver_cannot_import_ends_the_engine(bench: Callable[..., Bench]) -> None:
    it = bench("fails:handler")
    with pytest.raises(HandlerInvalid, match="no session"):
        await it.engine.run()
    with pytest.raises(DriverLost):
        await it.engine.ready()


@pytest.mark.parametrize("script", ["fails:operator", "fails to start:operator"])
async def test_settings_that_cannot_work_end_the_engine(bench: Callable[..., Bench], script: str) -> None:
    it = bench(script)
    with pytest.raises(OperatorError, match="Spark cannot start on sc://nowhere: SomeError: no session"):
        await it.engine.run()


@pytest.mark.parametrize("kind", [OperatorError, NotThereYet])
async def test_what_a_sink_finds_at_the_start_ends_the_engine_with_its_words_and_as_the_same_error(
    bench: Callable[..., Bench], kind: type[OperatorError]
) -> None:
    it = bench(f"fails:operator:{kind.__name__}")
    with pytest.raises(OperatorError, match=r"^no session$") as caught:
        await it.engine.run()
    assert type(caught.value) is kind


@pytest.mark.parametrize("script", ["fails:spark", "fails to start:spark"])
async def test_a_cluster_that_is_away_is_waited_for(
    bench: Callable[..., Bench], logged: list[dict[str, Any]], script: str
) -> None:
    it = bench(script)
    async with it.running():
        for expected in (1, 2, 4, 8):
            assert await it.clock.end_sleep() == expected
    assert "SomeError: no session" in events(logged, "spark.lost")[0]["reason"]


async def test_a_local_spark_that_fails_three_times_ends_the_engine(
    bench: Callable[..., Bench], java: Path
) -> None:
    it = bench("fails:spark", master="local[1]", java_home=str(java))
    ended, *delays = await asyncio.gather(
        it.engine.run(), it.clock.end_sleep(), it.clock.end_sleep(), return_exceptions=True
    )
    assert isinstance(ended, OperatorError)
    assert "Spark cannot start on local[1]" in ended.what
    assert delays == [1, 2]
    assert len(it.lives) == 3


async def test_a_driver_that_was_killed_as_it_started_is_not_held_against_the_settings(
    bench: Callable[..., Bench], java: Path
) -> None:
    it = bench("killed, then fails", master="local[1]", java_home=str(java))
    ended, *delays = await asyncio.gather(
        it.engine.run(), *(it.clock.end_sleep() for _ in range(3)), return_exceptions=True
    )
    assert isinstance(ended, OperatorError)
    assert delays == [1, 2, 4]
    assert len(it.lives) == 4


async def test_a_missing_java_is_told_before_anything_starts(
    bench: Callable[..., Bench], tmp_path: Path
) -> None:
    it = bench(master="local[1]", java_home=str(tmp_path / "nowhere"))
    with pytest.raises(JavaError, match="cannot be run: No such file"):
        await it.engine.run()
    assert not it.state.exists()


async def test_a_program_that_cannot_be_started_is_tried_again(
    bench: Callable[..., Bench], logged: list[dict[str, Any]], tmp_path: Path
) -> None:
    it = bench(command=[str(tmp_path / "no-such-program")])
    it.state.write_text("")
    async with it.running():
        await it.clock.end_sleep()
    assert "No process could be started" in events(logged, "spark.lost")[0]["reason"]


async def test_an_archive_under_which_the_driver_died_is_thrown_away(
    bench: Callable[..., Bench], java: Path, logged: list[dict[str, Any]]
) -> None:
    it = bench("dies first", master="local[1]", java_home=str(java))
    plan = it.engine.driver._plan_start
    start, wanted = plan(await probe(str(java), os.environ))
    wanted.parent.mkdir()
    wanted.write_text("damaged")
    shutil.rmtree(start.scratch)
    async with it.running():
        await it.clock.end_sleep()
        await it.engine.ready()
        assert not wanted.exists()


async def test_an_archive_is_made_when_the_driver_has_been_ready_for_a_while(
    bench: Callable[..., Bench], java: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = bench(master="local[1]", java_home=str(java), archive_after=60)
    asked: asyncio.Future[driver_messages.StartSession] = asyncio.get_running_loop().create_future()

    async def train(start: driver_messages.StartSession, *_: object) -> None:
        shutil.rmtree(start.scratch)
        asked.set_result(start)

    monkeypatch.setattr(shared_driver, "train", train)
    async with it.running():
        await it.engine.ready()
        assert await it.clock.end_sleep() == 60
        start = await asked
    assert (start.train, start.master) == (True, "local[1]")
    assert start.archive is not None
    assert start.archive.startswith(str(it.engine.driver.cache_dir))


async def test_closing_what_never_ran_does_nothing(bench: Callable[..., Bench]) -> None:
    it = bench()
    await it.engine.close()
    assert not it.state.exists()


async def test_only_the_first_driver_takes_a_table_from_another_owner(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[driver_messages.LoadFunction] = []
    load = Life.load
    monkeypatch.setattr(Life, "load", lambda life, sent: (loads.append(sent), load(life, sent)))
    it = bench(sink=SinkSpec("toy", "/toys"), pipeline="flights", new_ledger=True)
    it.engine.ledger_id = "1ed9e400"  # known once the ledger is open
    async with it.running():
        with pytest.raises(DriverLost):
            await it.engine.compute(job("dies"))
        await it.clock.end_sleep()
        await it.engine.ready()
    owner = Owner("flights", "1ed9e400")
    assert [(each.owner, each.new_ledger) for each in loads] == [(owner, True), (owner, False)]
