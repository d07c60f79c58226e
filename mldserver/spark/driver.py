"""The Spark driver's process: ``python -m mldserver.spark.driver FD``, a child of the server.

The main thread only reads messages, so that it always notices when the server is gone. Other threads make the
session and run windows, one thread for each job. py4j binds a Python thread to a Java thread,
and job groups and tags belong to the Java thread: so a job sets its own, in the thread that runs it. Cancelling goes by
them from any thread. The process leads a process group that holds the JVM too. If the socket closes, the JVM dies or
a message is malformed, it kills the whole group at once: there is nothing to save, since only the ledger's commits
count.

Standard output and standard error belong to Spark and to the user's code; the server reads them as text. Messages go
over the socket alone.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mldserver.base.service import entitle
from mldserver.children.channel import WireError, receive_now, send_now
from mldserver.engine_jobs import FINAL, REVISION, WINDOW, Content, FunctionView, WindowJob
from mldserver.errors import HandlerError, MldserverError
from mldserver.sinks import find
from mldserver.sinks.sink import SinkSpec, check_result
from mldserver.spark import driver_messages as wire
from mldserver.spark import user_code
from mldserver.spark.health import CLOSED, STOPPED, JobWatch
from mldserver.spark.java import keep
from mldserver.spark.session import (
    EARLY,
    MOST_POOLS,
    QUERIES,
    WINDOWS,
    DriverSession,
    open_session,
    pool_name,
)
from mldserver.windows import Window

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from mldserver.spark.query_job import Views
    from mldserver.spark.window_job import WindowHook

_CANCEL_AGAIN_SECONDS = 0.5

_SLOW_SECONDS = 60.0
"""``on_window`` usually only builds a query, in milliseconds. A call that runs for a minute may hang."""

_DEATH_SECONDS = 5
"""How long after its calls began to fail a dying JVM may still be there."""


@dataclass(slots=True)
class _HookCall:
    """A call of the user's ``on_window`` that runs now."""

    window: str
    thread: int
    began: float
    report_after_seconds: float = _SLOW_SECONDS
    """How long it may run until it is reported as slow; doubled at each report."""


@dataclass(slots=True)
class _DriverJob:
    request: wire.Job
    group: str
    """The name of its Spark job group. Never used twice: Spark refuses later jobs of a cancelled group."""
    cancelled: bool = False
    running: bool = False
    ended: threading.Event = field(default_factory=threading.Event)
    call: _HookCall | None = None


@dataclass(frozen=True, slots=True)
class FunctionParts:
    """What jobs need of a function that is loaded."""

    schema: str
    hook: WindowHook
    sink: SinkSpec | None = None
    """Where outputs are published, if that is a table."""
    side_sinks: Mapping[Content, SinkSpec] = field(default_factory=dict)
    """The same of other content."""


@dataclass(kw_only=True)
class Jobs:
    """Runs what the server asks for, and answers each message exactly once.

    ``concurrency`` windows run at a time, and ``query_concurrency`` queries.
    """

    session: DriverSession
    send: Callable[..., None]
    """Called from any thread with a message, and perhaps with files, which it closes."""
    concurrency: int
    query_concurrency: int = 1
    scratch: str = ""
    """The folder for results of queries."""
    on_session_stopped: Callable[[], None]
    """Called from any thread when a job ends and its session can run no further job."""
    functions: dict[str, FunctionParts] = field(default_factory=dict)
    """The functions whose jobs can run, by name."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _jobs: dict[int, _DriverJob] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._pool = ThreadPoolExecutor(self.concurrency, thread_name_prefix=WINDOWS)
        self._query_pool = ThreadPoolExecutor(self.query_concurrency, thread_name_prefix=QUERIES)
        self._views: Views | None = None

    def start(self, request: wire.Job) -> None:
        """Queue a job; it begins when a thread is free."""
        job = _DriverJob(request, f"mldserver-{request.id}-{request.label.replace(' ', '-')}")
        with self._lock:
            self._jobs[request.id] = job
        pool = self._query_pool if isinstance(request, wire.RunQuery) else self._pool
        pool.submit(self._run_and_answer, job)

    def cancel(self, job_id: int) -> None:
        """Cancel a job in Spark, and return when it has ended. Does nothing for a job that was answered already."""
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
            # Cancel repeatedly: Spark refuses later jobs of a cancelled group, but not the stages that a plan begins with.
            if job.ended.wait(_CANCEL_AGAIN_SECONDS):
                return

    def _run_and_answer(self, job: _DriverJob) -> None:
        """Run a job in this pool thread, and send the server its result: JobDone, or FailedJob for any error.

        If the JVM died under the job, send nothing: the JVM's watcher ends this process. If the session can run no
        further job, call ``on_session_stopped`` after the answer.
        """
        with self._lock:
            job.running = not job.cancelled
        answer: wire.Message
        session_is_gone, files = False, list[int]()
        try:
            if job.running:
                answer = self._run(job, files)
            else:
                text = "The job was cancelled before it began."
                answer = wire.FailedJob(job.request.id, "Cancelled", text, cancelled=True)
        except BaseException as error:  # noqa: BLE001  # the user's code may raise anything, SystemExit included
            if self.session.jvm is not None and wire.lost_connection(error):
                # Calls into a dead JVM fail a moment before its process has exited.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.session.jvm.wait(_DEATH_SECONDS)
                    return
            answer = self._failed_job(job, error)
            session_is_gone = self.session.connect and CLOSED in answer.message
        with self._lock:
            del self._jobs[job.request.id]
        job.ended.set()
        self.send(answer, files)
        with contextlib.suppress(Exception):  # a dying JVM raises; its watcher handles that
            session_is_gone = session_is_gone or self.session.is_stopped
        if session_is_gone:
            self.on_session_stopped()

    def _failed_job(self, job: _DriverJob, error: BaseException) -> wire.FailedJob:
        """Return the message that reports a job's error; on a cluster, with advice about the executors that failed."""
        fault, advice = wire.describe(error), ""
        if not (self.session.is_local or job.cancelled):
            from mldserver.spark.counts import advice_on, where_failed  # noqa: PLC0415  # pyspark, which the server never imports

            jobs = job.request.jobs if isinstance(job.request, wire.RunWindows) else ()
            segments = [path for each in jobs for path in each.segments]
            sentences = where_failed(self.session.spark), advice_on(wire.text_of(error), segments)
            advice = " ".join(filter(None, sentences))
        return wire.FailedJob(
            job.request.id,
            fault.error,
            fault.message,
            fault.traceback,
            cancelled=job.cancelled,
            advice=advice,
        )

    def _run(self, job: _DriverJob, files: list[int]) -> wire.JobDone | wire.QueryDone:
        """Do what the server requested in this thread: compute windows (``on_window``), publish an output, or run a query.

        The Spark jobs of it get a group (on Spark Connect: a tag), by which ``cancel`` finds them. Files that go with the
        answer are added to ``files``. Raises what the user's code, Spark or the sink raises.
        """
        from mldserver.spark.local_staging import can_stage_locally, compute_via_local_disk  # noqa: PLC0415  # pyarrow, as below
        from mldserver.spark.window_job import run_windows  # noqa: PLC0415  # pyspark, which the server never imports

        spark, request = self.session.spark, job.request
        if self.session.connect:
            spark.addTag(job.group)
        else:
            # Cancelling must not interrupt threads: HDFS marks nodes as dead when a call to them is interrupted.
            spark.sparkContext.setJobGroup(job.group, request.label, interruptOnCancel=False)
            spark.sparkContext.setLocalProperty("spark.scheduler.pool", self._scheduler_pool(request))
        try:
            if isinstance(request, wire.RunQuery):
                return self._query(request, files)
            function = self.functions[request.function]
            if isinstance(request, wire.Publish):
                content = request.job.content
                sink = function.sink if content == "window" else function.side_sinks.get(content)
                if sink is None:
                    raise ValueError("no table was named to publish into")
                find(sink.format).publish(spark, sink, request.job)
                return wire.JobDone(request.id, ())
            cores = self.session.slots()
            hook = replace(
                function.hook, around=partial(self._record_hook_call, job), read_view=self._read_view
            )

            def compute(jobs: Sequence[WindowJob]) -> tuple[wire.Output, ...]:
                return run_windows(spark, function.schema, hook, jobs, cores)

            jobs = request.jobs
            if jobs[0].views:
                self._session_views().make(jobs[0].views)
            # Only a local master's tasks, which run on this machine, can read files that this process fetches.
            if self.session.is_local and can_stage_locally(jobs[0].out, self.session.hadoop):
                return wire.JobDone(request.id, compute_via_local_disk(jobs, compute))
            return wire.JobDone(request.id, compute(jobs))
        finally:
            if self.session.connect:
                spark.removeTag(job.group)

    def _scheduler_pool(self, request: wire.Job) -> str:
        """Return the job's pool of the fair scheduler.

        It shares the cores among pools, and runs the jobs of one pool one after the other. Queries have one pool, and so have
        early results. With several
        functions the windows of each have a pool; those of an only function have one for each thread.
        """
        if isinstance(request, wire.RunQuery):
            return QUERIES
        if not request.job.window.final:
            return EARLY
        names = list(self.functions)
        thread = int(threading.current_thread().name.rpartition("_")[2])
        return pool_name(names.index(request.function) if len(names) > 1 else thread)

    def _session_views(self) -> Views:
        """Return the views of the functions' published windows."""
        from mldserver.spark.query_job import Views  # noqa: PLC0415  # pyspark, which the server never imports

        with self._lock:
            self._views = self._views or Views(
                self.session.spark,
                lambda name: self.functions[name].sink if name in self.functions else None,
            )
            return self._views

    def _read_view(self, view: FunctionView) -> DataFrame | None:
        return self._session_views().read(view)

    def _query(self, request: wire.RunQuery, files: list[int]) -> wire.QueryDone:
        from mldserver.spark.query_job import run_query  # noqa: PLC0415  # pyspark, which the server never imports

        views = self._session_views()
        result = run_query(
            self.session.spark,
            views,
            request.views,
            request.query,
            max_bytes=request.max_bytes,
            folder=self.scratch,
        )
        files.append(result.file)
        return wire.QueryDone(request.id, result.order)

    @contextlib.contextmanager
    def _record_hook_call(self, job: _DriverJob, window: Window) -> Iterator[None]:
        """Note in ``job`` that ``on_window`` runs while the context lasts, so that ``report_slow`` sees a slow call."""
        job.call = _HookCall(window.id, threading.get_ident(), time.monotonic())
        try:
            yield
        finally:
            job.call = None

    def report_slow(self) -> None:
        """Report each call of ``on_window`` that has run for a minute, two, four…, with its current line. Never waits for Spark."""
        with self._lock:
            jobs = list(self._jobs.values())
        for job in jobs:
            call = job.call
            if call is None or (seconds := time.monotonic() - call.began) < call.report_after_seconds:
                continue
            call.report_after_seconds *= 2
            hook = self.functions[job.request.function].hook
            line = wire.line_of(sys._current_frames().get(call.thread), hook.on_window)  # noqa: SLF001  # the only way
            self.send(wire.HookSlow(job.request.id, call.window, round(seconds, 1), line))


@dataclass(eq=False, repr=False)  # what it was started with holds secrets
class Driver:
    """One driver's life: StartSession, functions, jobs, Stop."""

    _sock: socket.socket
    _start: wire.StartSession | None = None
    _session: DriverSession | None = None
    _jobs: Jobs | None = None
    _loads: queue.SimpleQueue[wire.LoadFunction] = field(default_factory=queue.SimpleQueue)
    """The functions that are not loaded yet, in the order of their messages."""
    _warm_ups: list[str] = field(default_factory=list)
    """The local folders of warm-up windows."""
    _stopping: bool = False

    def send(self, message: wire.Message, files: Sequence[int] = ()) -> None:
        """Send a message from any thread; ``files`` are closed. If that fails, the server is gone: kill this process."""
        try:
            send_now(self._sock, message, files)
        except OSError:
            self.die()

    def run(self) -> None:
        """Read messages until the process ends."""
        try:
            while messages := receive_now(self._sock, wire.FromServer):
                for message in messages:
                    self._handle(message)
        except Exception as error:  # noqa: BLE001  # bytes that are no message, or no thread for a job
            print(f"the server's messages cannot be taken: {error}", file=sys.stderr)  # noqa: T201  # the log's way out
        finally:
            self.die()

    def _handle(self, message: wire.FromServer) -> None:
        """Carry out a message of the server in another thread, since this thread must go on reading messages.

        Raises WireError for a message that may not come now, such as a job before the session is ready.
        """
        match message:
            case wire.StartSession():
                self._start = message
                entitle(message.app_name.removeprefix("mldserver: "), "Spark driver")
                threading.Thread(
                    target=self._start_and_load, args=(message,), name="start", daemon=True
                ).start()
            case wire.LoadFunction():
                self._loads.put(message)
            case wire.RunWindows() | wire.Publish() | wire.RunQuery() if self._jobs is not None:
                self._jobs.start(message)
            case wire.CancelJob() if self._jobs is not None:
                threading.Thread(
                    target=self._jobs.cancel, args=(message.id,), name="cancel", daemon=True
                ).start()
            case wire.Stop():
                self._stopping = True
                threading.Thread(target=self._stop, name="stop", daemon=True).start()
            case _:
                raise WireError(f"{type(message).__name__} does not come now")

    def _start_and_load(self, start: wire.StartSession) -> None:
        """Make the session, then load each function that the server sends. Never returns.

        If there is no session, send ``StartFailed`` and end the process. A function that cannot be loaded is only
        reported, by ``LoadFailed``.
        """
        try:
            jobs, code = self._make_session(start)
        except BaseException as error:  # noqa: BLE001  # pyspark may raise anything
            self.send(wire.StartFailed(*_at_fault(error)))
            self.die()
            return  # only where a test has replaced `die`
        self._jobs = jobs
        while True:
            load = self._loads.get()
            try:
                jobs.functions[load.name] = self._load(jobs.session, load, code)
            except BaseException as error:  # noqa: BLE001  # importing the user's module may raise anything
                self.send(wire.LoadFailed(load.name, *_at_fault(error)))
            else:
                self.send(wire.FunctionLoaded(load.name))

    def _make_session(self, start: wire.StartSession) -> tuple[Jobs, user_code.UserCode]:
        """Create the Spark session and what watches it. Return what runs jobs, and what brings code to the executors."""
        if start.train:
            os.nice(19)
        session = self._session = open_session(start)
        if session.jvm is not None:
            wait = session.jvm.wait
            threading.Thread(
                target=lambda: self._send_and_die(wire.JvmGone(wait())), name="jvm", daemon=True
            ).start()
        watch = JobWatch(session.health_check(), self.send, self._send_and_die)
        threading.Thread(target=watch.run, name="watch", daemon=True).start()
        ui = None if session.connect else session.spark.sparkContext.uiWebUrl
        application = None if session.connect else session.spark.sparkContext.applicationId
        jvm_pid = None if session.jvm is None else session.jvm.pid
        self.send(wire.Started(session.spark.version, ui, jvm_pid, application))
        sys.path[:0] = [entry for entry in start.python_path if entry not in sys.path]
        code = user_code.UserCode(start)
        code.guard_executors()
        jobs = Jobs(
            session=session,
            send=self.send,
            concurrency=MOST_POOLS,
            query_concurrency=start.query_concurrency,
            scratch=start.scratch,
            on_session_stopped=partial(self._send_and_die, wire.Health(STOPPED, over=True)),
        )
        watch.report_slow = jobs.report_slow
        return jobs, code

    def _load(
        self, session: DriverSession, load: wire.LoadFunction, code: user_code.UserCode
    ) -> FunctionParts:
        """Load a function's handler, ship its code to the executors, run its warm-up window, and check its tables.

        The session comes before the handler, whose module may create UDFs and columns.
        """
        from mldserver.handler.loader import load as load_handler  # noqa: PLC0415  # imports belong to what may fail
        from mldserver.spark.warm_up import warm_up  # noqa: PLC0415  # see above
        from mldserver.spark.window_job import hook_of  # noqa: PLC0415  # see above

        for name, value in load.storage.items():
            session.spark.conf.set(name, value)
        directory = next(iter(code.start.python_path), None)
        code.keep(load)
        hook = hook_of(
            load_handler(load.handler, directory=directory, seconds=None).target if load.handler else None
        )
        if hook.on_window is not None:
            code.ship(session, load)
        if not load.out:
            self._warm_ups.append(load.place)
        warm_up(session, load)
        for spec in (load.sink, *load.side_sinks.values()):
            if spec is not None:
                sink = find(spec.format)
                sink.check(session.spark, spec)
                if load.owner is not None:
                    sink.own(session.spark, spec, load.owner, new_ledger=load.new_ledger)
        if load.sink is not None:
            added = (WINDOW, REVISION, FINAL) if hook.has_early else (WINDOW, REVISION)
            hook = replace(hook, check=partial(check_result, added=added), stamped=True)
        return FunctionParts(load.schema, hook, load.sink, load.side_sinks)

    def _send_and_die(self, reason: wire.JvmGone | wire.Health) -> None:
        """Send the server the reason and kill this process at once; do nothing if it is stopping anyway."""
        if not self._stopping:
            self.send(reason)
            self.die()

    def _stop(self) -> None:
        """Stop Spark and its JVM, then exit. The server waits, and kills this process if that takes too long.

        A driver that was started only to make a class archive (``train``) keeps the archive if the JVM exited well.
        """
        if self._session is None or self._jobs is None:
            self.die()
        session, start = self._session, self._start
        assert session is not None
        assert start is not None
        try:
            session.stop()
            code = 0 if session.jvm is None else session.jvm.wait()
            if start.train and start.archive is not None and code == 0:
                keep(Path(start.archive))
        except Exception as error:  # noqa: BLE001  # whatever it is, the process ends now, and all of its group
            self.send(
                wire.Log("warning", f"Spark did not stop in good order: {wire.describe(error).message}")
            )
            self.die()
        self._remove_scratch()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # the user's code may have closed the stream
                stream.flush()
        os._exit(0)  # threads of cancelled jobs may still hang in user code

    def die(self) -> None:
        """Kill this process at once, with the JVM and all else in the process group. Does not return."""
        session = self._session
        if session is not None and session.jvm is not None:
            session.jvm.kill()
        self._remove_scratch()
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    def _remove_scratch(self) -> None:
        if self._start is not None:
            for left in (self._start.scratch, *self._warm_ups):
                shutil.rmtree(left, ignore_errors=True)


def _at_fault(error: BaseException) -> tuple[str, str, str, str]:
    """Return who must act, and the error's class, message and traceback.

    That is the author of the "handler", the "operator", or, for all other errors, "spark".
    """
    fault = wire.describe(error)
    if isinstance(error, HandlerError):
        return "handler", fault.error, fault.message, str(error.where.get("traceback", fault.traceback))
    who = "operator" if isinstance(error, (ImportError, MldserverError)) else "spark"
    return who, fault.error, fault.message, fault.traceback


def main() -> None:
    """Run a driver on an inherited socket. Never returns."""
    parser = argparse.ArgumentParser(
        prog="mldserver.spark.driver", description="A child of mldserver; not for people."
    )
    parser.add_argument("fd", type=int, help="the inherited end of a socket pair")
    sock = socket.socket(fileno=parser.parse_args().fd)
    os.set_inheritable(sock.fileno(), False)
    # Ctrl-C on a terminal is for the server; it stops this process in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # the server opens its log file again
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # whatever replaced it is left alone
    Driver(sock).run()


if __name__ == "__main__":
    main()
