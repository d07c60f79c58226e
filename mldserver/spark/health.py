"""Health checks of a session on other machines, and their consequences. Runs in the driver's process.

Little of it raises an error by itself. A standalone master that was started again kills the executors of an application that
it does not know, and jobs wait for ever; a Connect client repeats its calls for minutes when its server is gone. So the driver
looks every few seconds. The driver ends if a fresh one would solve the problem. It only reports a lack of
resources: a full cluster has none for a fresh driver either.

A local master dies with its JVM, which is watched anyway: it is only asked whether it still answers.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from mldserver.spark import driver_messages as wire

_TICK_SECONDS: Final = 0.5
"""How often the judge looks at the time."""
_LOOK_TICKS: Final = 4
"""A session is looked at every so many ticks."""
_STOOD_STILL_SECONDS: Final = 10.0
"""When the judge itself has not run for so long, this machine stood still: that says nothing of others."""

DENIED: Final = "denied"
"""The sign that a Spark Connect server takes neither token nor user: UNAUTHENTICATED or PERMISSION_DENIED, in gRPC's words."""

CLOSED: Final = "[INVALID_HANDLE.SESSION_"
"""What a Spark Connect server's errors name when it has let go of a session, or is another than it was."""

STOPPED: Final = "The Spark session is stopped, and no job can run on it any more."


class _Rule(NamedTuple):
    """What follows from a sign that does not pass."""

    seconds: float
    text: str
    """A sentence; ``{}`` in it is what was heard."""
    over: bool = False
    """Whether nothing will ever run on this session."""


_RULES: Final[Mapping[str, tuple[_Rule, ...]]] = {
    # A job that ends on a stopped session reports its own error first, and ends the driver itself (``Jobs``).
    "stopped": (_Rule(5, STOPPED, over=True),),
    "closed": (_Rule(0, "The Spark Connect server has let go of the session: {}", over=True),),
    # A server that is only started again forgets the session, too.
    "gone": (_Rule(10, "The Spark Connect server is gone: {}", over=True),),
    "refused": (_Rule(10, "The Spark Connect server refuses calls: {}"),),
    DENIED: (_Rule(10, "The Spark Connect server refuses the token and user of spark_master: {}"),),
    # Executors run jobs while a master is down. A master that takes over from another notifies the driver.
    "unknown": (
        _Rule(
            5,
            "No executor is left, and Spark's master does not know the application any more, or is gone.",
            over=True,
        ),
    ),
    "no executors": (_Rule(20, "The cluster has given Spark no executor for more than 20 s."),),
    "starved": (_Rule(20, "No task of a job that waits has run for more than 20 s: the cluster is full."),),
    "silent": (
        _Rule(120, "Spark has not answered for 2 minutes.", over=True),
        _Rule(20, "Spark has not answered for more than 20 s."),
    ),
}


@dataclass(slots=True)
class HealthJudge:
    """Says what follows from the signs that are seen. Times are steady seconds."""

    _first_seen: dict[str, float] = field(default_factory=dict)
    """When each sign that is there was first seen."""
    _judged_at: float = 0.0

    def verdict(self, now: float, signs: Mapping[str, str]) -> wire.Health:
        """Apply ``_RULES``: return the session's health at ``now``. ``signs``: each present sign of trouble, with its text.

        A rule applies when its sign has lasted for the rule's seconds. Time in which this machine stood still does not count.
        """
        pause = now - self._judged_at
        stood_still = pause if pause > _STOOD_STILL_SECONDS else 0.0
        self._judged_at = now
        former, self._first_seen = self._first_seen, {}
        for sign in signs:
            self._first_seen[sign] = former[sign] + stood_still if sign in former else now
        for sign, rules in _RULES.items():
            for rule in rules:
                # While a check of the session hangs ("silent"), the other signs are outdated, and must not end the driver.
                is_outdated = rule.over and sign != "silent" and "silent" in signs
                if sign in signs and now - self._first_seen[sign] >= rule.seconds and not is_outdated:
                    return wire.Health(rule.text.format(signs[sign]), rule.over)
        return wire.Health("")


class Cluster:
    """Looks at a classic session whose executors run elsewhere."""

    def __init__(self, spark: Any, is_stopped: Callable[[], bool]) -> None:
        """Learn how executors come: all at the start, or with the work."""
        self._is_stopped = is_stopped
        self._context = spark.sparkContext
        conf = self._context.getConf()
        self._dynamic = conf.get("spark.dynamicAllocation.enabled", "false") == "true"
        self._most = int(conf.get("spark.dynamicAllocation.maxExecutors", "2147483647"))
        self._standalone = str(self._context.master).startswith("spark://")

    def signs_of_trouble(self) -> dict[str, str]:
        """Return the signs of trouble, as keys of ``_RULES`` with a text: an executor is missing that Spark waits for.

        Raises what py4j raises when the JVM exits.
        """
        if self._is_stopped():
            return {"stopped": ""}
        spark = self._context._jsc.sc()  # noqa: SLF001  # no Python face yet
        has_executors = spark.getExecutorMemoryStatus().size() > 1  # the driver counts too
        if has_executors:
            return {}
        wanted = self._most
        if self._dynamic:
            tracker = self._context.statusTracker()
            stages = [stage for stage in map(tracker.getStageInfo, tracker.getActiveStageIds()) if stage]
            wanted = min(wanted, sum(stage.numTasks - stage.numCompletedTasks for stage in stages))
        if not wanted:
            return {}  # no work: with dynamic allocation, Spark then needs no executor
        signs = {"no executors": ""}
        if self._standalone:
            # Repeat the present request for executors: the master refuses an application that it does not know.
            maps = getattr(self._context._jvm, "scala.collection.immutable.Map$")  # noqa: SLF001  # as above
            try:
                known = bool(spark.requestTotalExecutors(wanted, 0, getattr(maps, "MODULE$").empty()))
            except Exception:  # noqa: BLE001  # Java's: there is no way to the master
                known = False
            if not known:
                signs["unknown"] = ""
        return signs


@dataclass(eq=False)
class ConnectServer:
    """Looks at a session of Spark Connect with a separate client."""

    _client: Any
    """Repeats nothing."""
    _tasks: dict[str | None, tuple[int, int]] = field(default_factory=dict)
    """By operation: how many of its tasks are left, and run."""

    def signs_of_trouble(self) -> dict[str, str]:
        """Call the server once and return the signs of trouble. The call also keeps it from closing an unused session."""
        try:
            self._client.get_configs("spark.sql.session.timeZone")
        except Exception as error:  # noqa: BLE001  # of any of the client's classes
            text = wire.message(error)
            status_code = getattr(error, "getGrpcStatusCode", None)
            status = str(status_code()) if status_code is not None else text
            details = re.search(r'details = "(.*)"', text)
            sign = "refused"
            if CLOSED in text:
                sign = "closed"
            elif "UNAVAILABLE" in status:
                sign = "gone"
            elif "UNAUTHENTICATED" in status or "PERMISSION_DENIED" in status:
                sign = DENIED
            return {sign: details[1] if details else text}
        # Iterate over a copy, since threads that run jobs change the dict.
        tasks = self._tasks.copy().values()
        no_task_runs = any(left for left, _ in tasks) and not any(running for _, running in tasks)
        return {"starved": ""} if no_task_runs else {}

    def note_progress(
        self, stages: Iterable[Any] | None, inflight_tasks: int, operation_id: str | None, *, done: bool
    ) -> None:
        """Note how many tasks of a job are left and run. The session calls this for each progress report of the server."""
        if done:
            self._tasks.pop(operation_id, None)
        else:
            left = sum(stage.num_tasks - stage.num_completed_tasks for stage in stages or ())
            self._tasks[operation_id] = left, inflight_tasks


def with_session(url: str) -> str:
    """Return a Connect server's URL that names a new session, unless it names one already: several clients may share it."""
    if ";session_id=" in url:
        return url
    server, slash, options = url.removeprefix("sc://").partition("/")
    return f"sc://{server}{slash or '/'}{options};session_id={uuid.uuid4()}"


@dataclass(eq=False)
class JobWatch:
    """Tells the server whether a job would run, and which hooks are slow.

    One thread asks Spark, and may hang; another judges, and never does.
    """

    look: Callable[[], Mapping[str, str]]
    """Returns the signs of trouble."""
    send: Callable[[wire.Health], None]
    fall: Callable[[wire.Health], None]
    """Called instead of ``send`` when nothing will ever run on the session."""
    pause: Callable[[], bool] = field(default_factory=lambda: lambda: threading.Event().wait(_TICK_SECONDS))
    now: Callable[[], float] = time.monotonic
    pool: Executor = field(default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="ask"))
    """Where Spark is asked."""
    report_slow: Callable[[], None] = lambda: None
    """Says which hooks are slow; set when there can be any. It never waits."""
    _checks: int = 0
    _latest_signs: Mapping[str, str] = field(default_factory=dict)

    def run(self) -> None:
        """Check the session every two seconds and report each change of its health, until it is dead or ``pause`` returns True."""
        judge, reported = HealthJudge(), wire.Health("")
        with self.pool:
            check: Future[None] = self.pool.submit(self._check_session)
            while not (self.pause() or reported.over):
                hangs = not check.done()
                self.report_slow()
                signs = {**self._latest_signs, "silent": ""} if hangs else self._latest_signs
                health = judge.verdict(self.now(), signs)
                if not hangs:
                    check = self.pool.submit(self._check_session)
                if health != reported:
                    reported = health
                    (self.fall if health.over else self.send)(health)

    def _check_session(self) -> None:
        if self._checks % _LOOK_TICKS == 0:
            with contextlib.suppress(Exception):  # a dying JVM raises; its watcher handles that
                self._latest_signs = self.look()
        self._checks += 1
