"""A driver's jobs over a Spark that only fails: every one of them is answered, and a stopped session is told."""

from __future__ import annotations

import queue
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from spark.bench import job

from mldserver.children.channel import encode
from mldserver.spark import driver_messages
from mldserver.spark.driver import FunctionParts, Jobs
from mldserver.spark.session import DriverSession
from mldserver.spark.window_job import WindowHook

STOPPED = "the session is stopped"


class Wordless(Exception):
    def __str__(self) -> str:
        raise LookupError("no words")


class FailingSpark:
    """A session of Spark Connect whose every read raises the same error."""

    def __init__(self, error: BaseException, *, is_stopped: bool = False) -> None:
        self.error = error
        self.is_stopped = is_stopped
        self.tags = set()
        self.addTag = self.tags.add
        self.removeTag = self.tags.remove

    @property
    def read(self) -> Any:
        raise self.error


def said(spark: Any, *, connect: bool = True) -> list[Any]:
    """Run a job to its end, and a second one for which the first must have made room; return what is told."""
    told: queue.Queue[Any] = queue.Queue()
    session = DriverSession(spark, connect=connect, cores=1, jvm=None)
    jobs = Jobs(
        session=session,
        functions={"": FunctionParts("", WindowHook(None))},
        send=told.put,
        concurrency=1,
        on_session_stopped=lambda: told.put(STOPPED),
    )
    jobs.start(driver_messages.RunWindows(1, (job("first"),)))
    jobs.start(driver_messages.RunWindows(2, (job("second"),)))
    heard = [told.get()]
    while getattr(heard[-1], "id", None) != 2:
        heard.append(told.get())
    return heard


def chain(length: int) -> Exception:
    """Return an error that came of one that came of one …"""
    last = error = ValueError("0")
    for number in range(1, length):
        last.__cause__ = ValueError(str(number))
        last = last.__cause__
    return error


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (Wordless(), "(its message cannot be printed)"),
        (ValueError("half a pair: \ud83d"), "half a pair: \ud83d"),
        (chain(5000), "0"),
        (SystemExit(3), "3"),
    ],
    ids=["without words", "half a character", "with a thousand causes", "an exit"],
)
def test_a_job_is_answered_whatever_its_error_is_like(error: BaseException, message: str) -> None:
    heard = said(FailingSpark(error))
    assert [(answer.id, answer.error, answer.message) for answer in heard] == [
        (1, type(error).__name__, message),
        (2, type(error).__name__, message),
    ]
    assert all(encode(answer) for answer in heard)


@pytest.mark.parametrize(
    "spark",
    [
        FailingSpark(ValueError("no"), is_stopped=True),
        FailingSpark(RuntimeError("[INVALID_HANDLE.SESSION_CLOSED] The handle abc is invalid.")),
        FailingSpark(
            RuntimeError("(org.apache.spark.SparkSQLException) [INVALID_HANDLE.SESSION_NOT_FOUND] …")
        ),
    ],
    ids=["by the user's code", "by its server", "by one that told the class"],
)
def test_a_job_that_leaves_or_finds_a_session_stopped_is_answered_before_that_is_told(spark: Any) -> None:
    heard = said(spark)
    assert [getattr(each, "id", each) for each in heard] == [1, STOPPED, 2]


@pytest.mark.parametrize(("inner", "stopped"), [(None, True), (True, True), (False, False)])
def test_a_session_of_ones_own_is_stopped_by_python_or_by_spark_itself(
    inner: bool | None, stopped: bool
) -> None:
    java = None if inner is None else SimpleNamespace(sc=lambda: SimpleNamespace(isStopped=lambda: inner))
    spark: Any = SimpleNamespace(sparkContext=SimpleNamespace(_jsc=java))
    assert DriverSession(spark, connect=False, cores=1, jvm=None).is_stopped is stopped
    # Nothing can be asked of a JVM that is gone, and whoever watches it tells.
    assert STOPPED not in said(SimpleNamespace(), connect=False)


@pytest.mark.parametrize("connect", [False, True])
def test_a_job_is_cancelled_until_it_ends(monkeypatch: pytest.MonkeyPatch, *, connect: bool) -> None:
    cancels, begun, cancelled_twice = [], threading.Event(), threading.Event()

    def cancel(group: str) -> None:
        cancels.append(group)
        if len(cancels) > 1:
            cancelled_twice.set()

    def run(*_: object) -> None:
        begun.set()
        cancelled_twice.wait()
        raise ValueError("cancelled")

    java = SimpleNamespace(sc=lambda: SimpleNamespace(cancelJobGroupAndFutureJobs=cancel))
    context = SimpleNamespace(setJobGroup=lambda *_, **__: None, setLocalProperty=lambda *_: None, _jsc=java)
    spark: Any = SimpleNamespace(
        sparkContext=context, is_stopped=False, addTag=str, removeTag=str, interruptTag=cancel
    )
    monkeypatch.setattr("mldserver.spark.window_job.run_windows", run)
    monkeypatch.setattr("mldserver.spark.driver._CANCEL_AGAIN_SECONDS", 0)
    told: queue.Queue[Any] = queue.Queue()
    session = DriverSession(spark, connect=connect, cores=1, jvm=None)
    jobs = Jobs(
        session=session,
        functions={"": FunctionParts("", WindowHook(None))},
        send=told.put,
        concurrency=1,
        on_session_stopped=list,
    )
    jobs.start(driver_messages.RunWindows(1, (job("w"),)))
    begun.wait()
    jobs.cancel(1)
    assert told.get().cancelled
    assert len(cancels) > 1, "Spark has forgotten the first"
    jobs.cancel(1)


def test_a_hook_that_runs_for_long_is_told_with_its_window_and_the_line_it_is_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, go = threading.Event(), threading.Event()

    def on_window(_rows: object, _window: object) -> Any:
        begun.set()
        go.wait()  # the line
        raise ValueError("no more")

    def run(*given: Any) -> None:
        hook, (first, _) = given[2], given[3]
        hook.apply(None, first.window)

    monkeypatch.setattr("mldserver.spark.window_job.run_windows", run)
    monkeypatch.setattr("mldserver.spark.driver._SLOW_SECONDS", 0.0)
    told: queue.Queue[Any] = queue.Queue()
    spark: Any = SimpleNamespace(is_stopped=False, addTag=str, removeTag=str)
    session = DriverSession(spark, connect=True, cores=None, jvm=None)
    monkeypatch.setattr(DriverSession, "slots", lambda _: 1)
    hook = WindowHook(on_window)
    jobs = Jobs(
        session=session,
        functions={"": FunctionParts("", hook)},
        send=told.put,
        concurrency=1,
        on_session_stopped=list,
    )
    jobs.report_slow()
    jobs.start(driver_messages.RunWindows(1, (job("slow"), job("other"))))
    begun.wait()
    while "go.wait()  # the line" not in driver_messages.line_of(
        sys._current_frames().get(next(iter(jobs._jobs.values())).call.thread),
        None,  # type: ignore[union-attr]
    ):
        pass
    jobs._jobs[1].call.report_after_seconds = 0.0  # type: ignore[union-attr]
    jobs.report_slow()
    slow = told.get()
    assert (slow.id, slow.window) == (1, "slow")
    assert slow.line.startswith(("tests/spark/test_jobs.py:", __file__))
    assert slow.line.endswith(", in on_window: go.wait()  # the line")
    jobs._jobs[1].call.report_after_seconds = 1000.0  # type: ignore[union-attr]
    jobs.report_slow()
    go.set()
    assert told.get().error == "ValueError", "nothing more was said of the hook"


def test_where_no_line_of_the_users_is_seen_the_hook_itself_is_named() -> None:
    async def on_window() -> None: ...

    assert driver_messages.line_of(None, on_window).endswith(", in on_window")
    assert driver_messages.line_of(None, None) == ""
