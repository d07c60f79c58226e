"""How a driver judges its session: by signs and by time, over a Spark that does what the test says."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from types import SimpleNamespace
from typing import Any, ParamSpec, TypeVar

import pytest

from mldserver.spark.driver_messages import Health
from mldserver.spark.health import STOPPED, Cluster, ConnectServer, HealthJudge, JobWatch, with_session
from mldserver.spark.session import DriverSession

P = ParamSpec("P")
T = TypeVar("T")


def judged(signs: Mapping[str, str], seconds: float) -> Health:
    """Return the verdict when these signs have been there for so long, looked at every other second."""
    judge, now = HealthJudge(), 1000.0
    while now < 1000 + seconds:
        judge.verdict(now, signs)
        now += 2
    return judge.verdict(1000 + seconds, signs)


@pytest.mark.parametrize(
    ("signs", "seconds", "text"),
    [
        ({"stopped": ""}, 5, STOPPED),
        ({"closed": "why"}, 0, "The Spark Connect server has let go of the session: why"),
        ({"gone": "no way"}, 10, "The Spark Connect server is gone: no way"),
        ({"no executors": "", "unknown": ""}, 5, "does not know the application any more"),
        ({"silent": ""}, 120, "has not answered for 2 minutes"),
    ],
)
def test_what_a_fresh_driver_mends_is_over_once_it_has_lasted(
    signs: dict[str, str], seconds: float, text: str
) -> None:
    verdict = judged(signs, seconds)
    assert verdict.over
    assert text in verdict.trouble
    assert not judged(signs, seconds - 1).over if seconds else True


@pytest.mark.parametrize(
    ("sign", "seconds", "text"),
    [
        ("refused", 10, "refuses calls: heard"),
        ("denied", 10, "refuses the token and user of spark_master: heard"),
        ("no executors", 20, "given Spark no executor for more than 20 s"),
        ("starved", 20, "the cluster is full"),
        ("silent", 20, "has not answered for more than 20 s"),
    ],
)
def test_what_it_only_has_to_wait_for_is_told_and_never_over(sign: str, seconds: float, text: str) -> None:
    assert judged({sign: "heard"}, seconds - 1) == Health("")
    assert text in judged({sign: "heard"}, seconds).trouble
    assert not judged({sign: "heard"}, seconds + 90).over


def test_a_sign_that_passes_begins_anew() -> None:
    judge = HealthJudge()
    for now in range(0, 60, 6):
        assert judge.verdict(now, {"gone": "x"}) == Health("")
        assert judge.verdict(now + 4, {}) == Health("")


def test_what_happened_while_this_machine_stood_still_counts_for_nothing() -> None:
    judge = HealthJudge()
    judge.verdict(100, {"silent": "", "gone": "x"})
    assert judge.verdict(5000, {"silent": "", "gone": "x"}) == Health("")
    assert judge.verdict(5009, {"silent": "", "gone": "x"}) == Health("")
    assert judge.verdict(5010, {"gone": "x"}).over


def test_no_session_ends_by_what_was_seen_before_a_look_that_hangs() -> None:
    judge = HealthJudge()
    judge.verdict(100, {"gone": "x"})
    for now in range(102, 120, 2):
        assert not judge.verdict(now, {"gone": "x", "silent": ""}).over
    assert judge.verdict(120, {"gone": "x"}).over


class Classic:
    """A classic session on a cluster, as far as it is looked at."""

    def __init__(self, master: str = "spark://h:7077", executors: int = 0, **conf: str) -> None:
        self.executors = executors
        self.stopped = False
        self.stages: list[tuple[int, int]] = []
        self.master_says: object = True
        self.asked: list[int] = []
        self.java = SimpleNamespace(
            isStopped=lambda: self.stopped,
            getExecutorMemoryStatus=lambda: SimpleNamespace(size=lambda: self.executors + 1),
            requestTotalExecutors=self.request,
        )
        module = SimpleNamespace(**{"MODULE$": SimpleNamespace(empty=dict)})
        tracker = SimpleNamespace(
            getActiveStageIds=lambda: [*range(len(self.stages)), 99],
            getStageInfo=lambda n: (
                SimpleNamespace(numTasks=self.stages[n][0], numCompletedTasks=self.stages[n][1])
                if n != 99
                else None
            ),
        )
        context = SimpleNamespace(
            master=master,
            getConf=lambda: {f"spark.dynamicAllocation.{name}": value for name, value in conf.items()},
            _jsc=SimpleNamespace(sc=lambda: self.java),
            _jvm=SimpleNamespace(**{"scala.collection.immutable.Map$": module}),
            statusTracker=lambda: tracker,
        )
        self.spark: Any = SimpleNamespace(sparkContext=context)
        self.session = DriverSession(self.spark, connect=False, cores=None, jvm=None)
        self.cluster = Cluster(self.spark, lambda: self.session.is_stopped)

    def request(self, count: int, _aware: int, _counts: object) -> object:
        self.asked.append(count)
        if isinstance(self.master_says, Exception):
            raise self.master_says
        return self.master_says


def test_executors_that_are_there_are_all_that_is_asked() -> None:
    it = Classic(executors=1)
    assert (it.cluster.signs_of_trouble(), it.asked) == ({}, [])
    it.stopped = True
    assert it.cluster.signs_of_trouble() == {"stopped": ""}


@pytest.mark.parametrize("says", [False, ConnectionError("closed")])
def test_a_master_that_refuses_or_is_not_reached_does_not_know_the_application(says: object) -> None:
    it = Classic()
    assert it.cluster.signs_of_trouble() == {"no executors": ""}
    it.master_says = says
    assert it.cluster.signs_of_trouble() == {"no executors": "", "unknown": ""}
    assert it.asked == [2**31 - 1] * 2, "as many as the master would give anyway"


def test_another_cluster_manager_is_not_asked() -> None:
    it = Classic("k8s://https://h:6443")
    assert (it.cluster.signs_of_trouble(), it.asked) == ({"no executors": ""}, [])


def test_under_dynamic_allocation_only_tasks_that_wait_need_executors() -> None:
    it = Classic(enabled="true", maxExecutors="5")
    it.stages = [(4, 4)]
    assert it.cluster.signs_of_trouble() == {}
    it.stages.append((8, 5))
    assert (it.cluster.signs_of_trouble(), it.asked) == ({"no executors": ""}, [3])
    it.stages.append((100, 0))
    it.cluster.signs_of_trouble()
    assert it.asked == [3, 5]


class GrpcError(Exception):
    def __init__(self, code: str, details: str) -> None:
        super().__init__(f'<_InactiveRpcError …\n\tdetails = "{details}"\n\tdebug = …')
        self.getGrpcStatusCode = lambda: f"StatusCode.{code}"


def connect(error: Exception | None = None) -> ConnectServer:
    def get_configs(_: str) -> None:
        if error is not None:
            raise error

    return ConnectServer(SimpleNamespace(get_configs=get_configs))


@pytest.mark.parametrize(
    ("error", "signs"),
    [
        (None, {}),
        (GrpcError("UNAVAILABLE", "Connection refused"), {"gone": "Connection refused"}),
        (GrpcError("UNAUTHENTICATED", "Your token has expired"), {"denied": "Your token has expired"}),
        (GrpcError("PERMISSION_DENIED", "Not you"), {"denied": "Not you"}),
        (GrpcError("RESOURCE_EXHAUSTED", "Too many"), {"refused": "Too many"}),
        (
            ValueError("[INVALID_HANDLE.SESSION_CHANGED] The handle …"),
            {"closed": "[INVALID_HANDLE.SESSION_CHANGED] The handle …"},
        ),
    ],
)
def test_a_connect_server_is_heard_by_a_small_call(error: Exception | None, signs: dict[str, str]) -> None:
    assert connect(error).signs_of_trouble() == signs


def test_a_connect_servers_job_starves_while_tasks_wait_and_none_runs() -> None:
    server = connect()
    stage = SimpleNamespace(num_tasks=4, num_completed_tasks=1)
    done = SimpleNamespace(num_tasks=2, num_completed_tasks=2)
    server.note_progress(stages=[done, stage], inflight_tasks=1, operation_id="a", done=False)
    server.note_progress(stages=[done], inflight_tasks=0, operation_id="b", done=False)
    assert server.signs_of_trouble() == {}
    server.note_progress(stages=[done, stage], inflight_tasks=0, operation_id="a", done=False)
    assert server.signs_of_trouble() == {"starved": ""}
    server.note_progress(stages=[stage], inflight_tasks=1, operation_id="c", done=False)
    assert server.signs_of_trouble() == {}, "it waits for another job of ours"
    server.note_progress(stages=None, inflight_tasks=0, operation_id="c", done=True)
    assert server.signs_of_trouble() == {"starved": ""}
    server.note_progress(stages=None, inflight_tasks=0, operation_id="a", done=True)
    assert server.signs_of_trouble() == {}


def test_several_clients_share_a_session_by_its_name() -> None:
    uuid = r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
    for url, pattern in (
        ("sc://h", rf"sc://h/;session_id={uuid}"),
        ("sc://h:1/", rf"sc://h:1/;session_id={uuid}"),
        ("sc://h:1/;token=x", rf"sc://h:1/;token=x;session_id={uuid}"),
    ):
        assert re.fullmatch(pattern, with_session(url))
    assert with_session("sc://h/;session_id=mine") == "sc://h/;session_id=mine"


def test_each_kind_of_session_is_looked_at_in_its_way() -> None:
    it = Classic("local[2]")
    local = DriverSession(it.spark, connect=False, cores=2, jvm=None).health_check()
    assert (local(), it.asked) == ({}, [])
    it.stopped = True
    assert local() == it.session.health_check()() == {"stopped": ""}
    handlers: list[object] = []
    server = connect()
    spark: Any = SimpleNamespace(registerProgressHandler=handlers.append)
    assert (
        DriverSession(spark, connect=True, cores=None, jvm=None, server=server).health_check()
        == server.signs_of_trouble
    )
    assert handlers == [server.note_progress]


class AtOnce(Executor):
    """Calls what it is given before it returns: a look takes no time, whatever else this machine does."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        called: Future[T] = Future()
        called.set_result(fn(*args, **kwargs))
        return called


def heard(look: Callable[[], Mapping[str, str]], count: int) -> tuple[list[Health], list[Health]]:
    """Watch until so many messages were sent, a second a tick; return them and the last words."""
    sent: list[Health] = []
    fell: list[Health] = []
    seconds = itertools.count(1000)

    watch = JobWatch(
        look,
        sent.append,
        fell.append,
        pause=lambda: len(sent) >= count,
        now=lambda: float(next(seconds)),
        pool=AtOnce(),
    )
    watch.run()
    return sent, fell


def test_the_server_is_told_when_it_changes_and_what_ends_a_driver_is_its_last_word() -> None:
    signs: list[Mapping[str, str]] = [{"refused": "x"}] * 40 + [{}] * 40 + [{"gone": "away"}] * 1000
    looks = iter(signs)
    sent, fell = heard(lambda: next(looks), count=9)
    assert sent == [Health("The Spark Connect server refuses calls: x"), Health("")]
    assert fell == [Health("The Spark Connect server is gone: away", over=True)]


def test_a_spark_that_hangs_is_judged_all_the_same() -> None:
    hangs: Future[Any] = Future()
    sent: list[Health] = []

    def send(health: Health) -> None:
        sent.append(health)
        if not hangs.done():
            hangs.set_result(None)

    pool: Any = contextlib.nullcontext()
    pool.submit = lambda _ask: hangs
    seconds = itertools.count(1000)
    JobWatch(dict, send, pytest.fail, lambda: len(sent) > 1, lambda: float(next(seconds)), pool).run()
    assert sent == [Health("Spark has not answered for more than 20 s."), Health("")]


def test_a_look_that_fails_says_nothing() -> None:
    failures = itertools.count()

    def look() -> Mapping[str, str]:
        if next(failures) < 10:
            raise OSError("the JVM is going")
        return {"stopped": ""}

    assert heard(look, count=1) == ([], [Health(STOPPED, over=True)])
