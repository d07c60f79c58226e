"""The jobs of one driver: each in a thread of its own, cancelled and watched from others. Runs in the driver's process.

py4j binds a Python thread to a Java thread, and job groups and tags belong to the Java thread: so a job sets its own,
in the thread that runs it. Cancelling goes by them from any thread.
"""

from __future__ import annotations

import contextlib
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mldserver.spark import driver_messages as wire
from mldserver.spark.sinks import find
from mldserver.spark.window_job import run_windows

if TYPE_CHECKING:
    from collections.abc import Callable

    from mldserver.spark.session import Session
    from mldserver.spark.sinks.sink import SinkSpec
    from mldserver.spark.window_job import Pipeline

_PROGRESS_SECONDS = 0.5
_CANCEL_AGAIN_SECONDS = 0.5

_CLOSED = "[INVALID_HANDLE.SESSION_"
"""What a Spark Connect server's errors name when it has let go of a session: after an hour without a job, say."""

_DEATH_SECONDS = 5
"""How long after its calls began to fail a dying JVM may still be there."""


@dataclass(slots=True)
class _Job:
    run: wire.Run | wire.Publish
    group: str
    """Never used twice: Spark remembers cancelled groups and refuses their later jobs."""
    cancelled: bool = False
    running: bool = False
    ended: threading.Event = field(default_factory=threading.Event)
    progress: tuple[int, int, int] | None = None
    """As it was sent last."""


@dataclass(kw_only=True)
class Jobs:
    """Runs what the server asks for, ``concurrency`` at a time, and answers each Run exactly once."""

    session: Session
    schema: str
    pipeline: Pipeline
    send: Callable[[wire.Message], None]
    """Called from any thread."""
    concurrency: int
    stopped: Callable[[], None]
    """Called from any thread when a job has left, or found, a session on which no other can run."""
    sink: SinkSpec | None = None
    """Where outputs are published, if that is a table."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _jobs: dict[int, _Job] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._pool = ThreadPoolExecutor(self.concurrency, thread_name_prefix="window")

    def start(self, run: wire.Run | wire.Publish) -> None:
        """Take a job; it begins when a thread is free."""
        job = _Job(run, f"mldserver-{run.id}-{run.job.window.id}")
        with self._lock:
            self._jobs[run.id] = job
        self._pool.submit(self._run, job)

    def cancel(self, job_id: int) -> None:
        """End a job, and return when it has ended. One that is not there any more has been answered already."""
        with self._lock:
            job = self._jobs.get(job_id)
            if job is None or job.cancelled:
                return
            job.cancelled = True
            running = job.running
        if not running:
            return
        spark = self.session.spark
        while True:
            if self.session.connect:
                spark.interruptTag(job.group)
            else:
                spark.sparkContext._jsc.sc().cancelJobGroupAndFutureJobs(job.group)  # noqa: SLF001  # no Python face yet
            # Again: of a cancelled group Spark refuses later jobs, but not the stages that a plan begins with.
            if job.ended.wait(_CANCEL_AGAIN_SECONDS):
                return

    def _run(self, job: _Job) -> None:
        with self._lock:
            job.running = not job.cancelled
        answer: wire.Message
        closed = False
        try:
            answer = wire.FailedJob(
                job.run.id, "Cancelled", "The job was cancelled before it began.", cancelled=True
            )
            if job.running:
                answer = self._compute(job)
        except BaseException as error:  # noqa: BLE001  # the user's code may raise anything, SystemExit included
            if self._jvm_is_gone(error):
                return  # not the job's failure: whoever watches the JVM ends this process, and so the job
            fault = wire.describe(error)
            closed = self.session.connect and _CLOSED in fault.message
            answer = wire.FailedJob(
                job.run.id, fault.error, fault.message, fault.traceback, cancelled=job.cancelled
            )
        with self._lock:
            del self._jobs[job.run.id]
        job.ended.set()
        self.send(answer)
        with contextlib.suppress(Exception):  # of a JVM that is going: whoever watches it sees to that
            closed = closed or self.session.is_stopped
        if closed:
            self.stopped()

    def _jvm_is_gone(self, error: BaseException) -> bool:
        """Whether an error came from a dead JVM. Its calls fail a moment before its end can be seen."""
        jvm = self.session.jvm
        if jvm is None or not wire.lost_connection(error):
            return False
        try:
            jvm.wait(_DEATH_SECONDS)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _compute(self, job: _Job) -> wire.Done:
        spark, window = self.session.spark, job.run.job.window
        if self.session.connect:
            spark.addTag(job.group)
        else:
            # No interruption of threads on cancelling: HDFS marks nodes as dead when it is interrupted.
            count = len(job.run.jobs) if isinstance(job.run, wire.Run) else 1
            others = f" and {count - 1} more" if count > 1 else ""
            spark.sparkContext.setJobGroup(job.group, f"window {window.id}{others}", interruptOnCancel=False)
        try:
            if isinstance(job.run, wire.Run):
                schema, cores = self.schema, self.session.cores
                return wire.Done(job.run.id, run_windows(spark, schema, self.pipeline, job.run.jobs, cores))
            if self.sink is None:
                raise ValueError("no table was named to publish into")
            find(self.sink.format).publish(spark, self.sink, job.run.job)
            return wire.Done(job.run.id, ())
        finally:
            if self.session.connect:
                spark.removeTag(job.group)

    def watch(self) -> None:
        """Send the progress of running jobs whenever it changes; for a thread of its own, never returns."""
        pause = threading.Event()
        while not pause.wait(_PROGRESS_SECONDS):
            with self._lock:
                running = [job for job in self._jobs.values() if job.running]
            for job in running:
                with contextlib.suppress(Exception):  # a courtesy: a JVM that is going is not noticed here
                    progress = self._tasks(job.group)
                    if progress[0] and progress != job.progress:
                        job.progress = progress
                        self.send(wire.Progress(job.run.id, *progress))

    def _tasks(self, group: str) -> tuple[int, int, int]:
        tracker = self.session.spark.sparkContext.statusTracker()
        stage_ids: list[int] = []
        for job_id in tracker.getJobIdsForGroup(group):
            info = tracker.getJobInfo(job_id)
            # py4j hands over a Java array; iterating it is one call an element.
            stage_ids += [int(stage_id) for stage_id in (info.stageIds if info else ())]
        stages = [stage for stage in map(tracker.getStageInfo, stage_ids) if stage]
        return len(stages), sum(s.numTasks for s in stages), sum(s.numCompletedTasks for s in stages)
