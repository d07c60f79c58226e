"""``SparkEngine``: keeps a Spark driver alive for as long as the server lives, and hands it windows.

    starting ──Started──▶ warming ──Warm──▶ ready ──end of the socket──▶ restarting ──back-off──▶ starting

A driver is one child process with its JVM (``driver.py``). After any failure, the engine kills the process group,
fails pending jobs with DriverLost, and starts a fresh driver after a back-off. The back-off grows until a job
succeeds, or a driver has lived for two minutes. If Java is missing, the handler cannot be imported, or a session on this machine never comes up, ``run``
raises.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import structlog

from mldserver.base.backoff import Backoff
from mldserver.base.clock import Clock, SystemClock
from mldserver.base.uris import redacted
from mldserver.children.process import resident_bytes
from mldserver.children.supervise import ChildExit, supervise
from mldserver.engine_jobs import PublishJob, WindowJob, WindowResult
from mldserver.errors import DriverLost, HandlerInvalid, HandlerUnready, NotThereYet, OperatorError
from mldserver.jobs.engine import Deadline, EngineFacts, deadline_seconds
from mldserver.sinks import is_tested
from mldserver.sinks.sink import Owner
from mldserver.spark.driver_messages import StartSession
from mldserver.spark.driver_session import Life, driver_command
from mldserver.spark.java import Java, archive_path, discard, probe
from mldserver.spark.session import environment, is_connect, is_local

log = structlog.get_logger("mldserver")

_FIRST_STARTS = 3
"""Starts of a local Spark that may fail, before the first success, until the settings are held to be wrong.

The death of a driver that was killed says nothing about the settings, and does not count."""

_TRAIN_SECONDS = 900
"""Beyond it the machine has no time to spare, and the class archive is not worth it."""

_SCRATCH = "spark-"
"""How the names of the drivers' scratch directories begin."""


@dataclass(eq=False)
class SparkEngine:
    """``mldserver.jobs.engine.Engine`` on a Spark driver in a child process. Times are in seconds."""

    setup: StartSession = field(repr=False)
    """What each driver is started with; the engine fills in its scratch folder, the table's owner and the archive."""
    _: KW_ONLY
    java_home: str | None = None
    cache_dir: Path | None = None
    """Where class archives lie; None: none is used."""
    work_dir: Path | None = None
    """A directory for scratch space, this server's own; None: the machine's temporary directory. With a local output
    folder it lies in it: there a cluster proves that it shares the folder (``warm_up.py``)."""
    job_deadline: Deadline = None
    """What a window's job may take: the setting ``window_deadline``."""
    start_deadline: float = 600
    cancel_grace: float = 10
    stop_grace: float = 10
    archive_after: float | None = 60
    """How long the driver must have been ready until a class archive is made where none is yet; None: never."""
    clock: Clock = field(default_factory=SystemClock)
    command: Sequence[str] = field(default_factory=driver_command)
    """What is started as the driver."""
    pipeline: str = ""
    ledger_id: str = ""
    """With ``pipeline``: whose the sink's table is. Set before ``run``."""
    log_error_messages: bool = True
    """Whether the log quotes what errors say in Spark's own log."""
    group_limit: int = 16
    """How many windows share one Spark job at most. Small windows cost about as much together as one of them alone; a
    group that fails is computed again window by window, so larger groups lose more."""

    def __post_init__(self) -> None:
        """Prepare; nothing is started."""
        if not self.setup.python_path:
            self.setup = msgspec.structs.replace(self.setup, python_path=(str(Path.cwd()),))
        self._work = None if self.work_dir is None else self.work_dir.absolute()
        self._slots = asyncio.Semaphore(self.setup.concurrency)
        self._changed = asyncio.Event()
        """Set and replaced at each change of ``_ready_life`` or ``_over``."""
        self._life: Life | None = None
        self._ready_life: Life | None = None
        self._over: str | None = None
        """Why no job will ever run again."""
        self._running = False
        self._closing = asyncio.Event()
        self._ended = asyncio.Event()
        self._starts = 0
        self._failed_starts = 0
        self._lost: str | None = None
        """How the last driver ended, until another is warm."""
        self._was_ready = False
        self._start_seconds: float | None = None
        self._code_changed = asyncio.Event()
        """Set when a driver that imports the changed handler must replace the present one."""
        self._retired: Life | None = None
        """The driver that was stopped for that."""
        self._on_slow: Callable[[str], None] = lambda _: None

    @property
    def is_ready(self) -> bool:
        """Whether a job would start at once."""
        life = self._ready_life
        return life is not None and not life.over.is_set() and not life.trouble

    @property
    def trouble(self) -> str | None:
        """Why no job would start, in words: what the driver says, or how the last one ended."""
        if (life := self._life) is not None and life is not self._retired:
            return life.reason(briefly=True) if life.over.is_set() else life.trouble or self._lost
        return self._lost

    def facts(self) -> EngineFacts:
        """Return the facts about Spark that the server's status shows."""
        life = self._ready_life
        started = None if life is None else life.started
        return EngineFacts(
            redacted(self.setup.master),
            None if started is None else started.spark_version,
            None if started is None else started.ui,
            self._start_seconds,
            0 if life is None else len(life.waiting),
            None if started is None or started.jvm_pid is None else resident_bytes(started.jvm_pid),
        )

    async def run(self) -> None:
        """Keep a driver alive, one process after another, until closed or cancelled.

        Raises JavaError when Java is missing or too old, HandlerInvalid when the driver cannot import the handler,
        OperatorError when a local session cannot be made.
        """
        self._running = True
        end_reason = "The engine is closed."
        try:
            java = None if is_connect(self.setup.master) else await probe(self.java_home, os.environ)
            await asyncio.to_thread(self._remove_old_scratch)
            if self.setup.sink is not None and not is_tested(self.setup.sink):
                log.warning("sink.untested", table=str(self.setup.sink))
            await self._keep_alive(java)
        except BaseException as error:
            end_reason = f"The engine ended: {error}"
            raise
        finally:
            self._over = end_reason
            self._running = False
            self._announce(None)
            self._ended.set()

    async def ready(self) -> None:
        """Return when a job would start at once. Raises DriverLost when the engine has ended."""
        await self._ready()

    async def compute(self, job: WindowJob) -> WindowResult:
        """Run one attempt. See ``Engine.compute``."""
        return (await self.compute_group((job,)))[0]

    async def compute_group(self, jobs: tuple[WindowJob, ...]) -> tuple[WindowResult, ...]:
        """Run attempts as one Spark job; wait for a driver and a free slot first.

        See ``Engine.compute_group``.
        """
        began = time.monotonic()
        async with self._slot() as free_slot:
            life = await self._ready()

            def on_slow(window_id: str) -> None:
                free_slot()  # another window may be computed beside the slow one
                self._on_slow(window_id)

            outputs = await life.ask(jobs, deadline_seconds(self.job_deadline, jobs), on_slow)
        seconds = time.monotonic() - began
        return tuple(WindowResult(output.files, output.rows, seconds) for output in outputs)

    async def publish(self, job: PublishJob) -> None:
        """Write an output into the table, waiting for a driver and for a free slot first. See ``Engine.publish``."""
        async with self._slots:
            life = await self._ready()
            await life.ask(job, deadline_seconds(self.job_deadline, (job,)))

    def when_slow(self, call: Callable[[str], None]) -> None:
        """Call ``call`` when the ``on_window`` of a window is slow. See ``Engine.when_slow``."""
        self._on_slow = call

    def renew(self, code: dict[str, tuple[str, bytes]]) -> None:
        """Start the driver afresh between two jobs. See ``Engine.renew``."""
        self.setup = msgspec.structs.replace(self.setup, code=code)
        self._code_changed.set()

    async def close(self) -> None:
        """Ask the driver to stop; kill it after ``stop_grace`` seconds. No process is left on return."""
        self._closing.set()
        if not self._running:
            return
        if self._life is not None:
            self._life.stop()
        try:
            async with asyncio.timeout(self.stop_grace):
                await self._ended.wait()
        except TimeoutError:
            if self._life is not None:
                self._life.kill("Spark did not stop in time.")
            await self._ended.wait()

    @contextlib.asynccontextmanager
    async def _slot(self) -> AsyncIterator[Callable[[], None]]:
        """Hold one of the slots for concurrent jobs. The block receives a function that frees the slot early."""
        await self._slots.acquire()
        release_once = contextlib.ExitStack()
        release_once.callback(self._slots.release)
        with release_once:
            yield release_once.close

    async def _ready(self) -> Life:
        """Wait for a driver that takes jobs, and return it. Raises DriverLost if the engine has ended.

        If a job of the driver is being cancelled, wait first until it has ended: the driver may be killed for it.
        """
        while True:
            # `_ready_life` still holds a dead driver while the engine cleans up after it.
            while (life := self._ready_life) is None or life.over.is_set():
                if self._over is not None:
                    error = DriverLost("No Spark driver will come any more.", did=self._over)
                    error.blame = "server"
                    raise error
                await self._changed.wait()
            if not life.is_cancelling:
                return life
            await life.cancellations_ended()

    def _announce(self, life: Life | None) -> None:
        """Set the driver that takes jobs (None: none does), and wake the tasks that wait in ``_ready``."""
        self._ready_life = life
        self._changed.set()
        self._changed = asyncio.Event()

    async def _keep_alive(self, java: Java | None) -> None:
        """Run one driver after another, with a back-off, until the engine is closing.

        Raises as ``_count_failure_or_raise`` if another driver cannot help.
        """

        async def run_once() -> ChildExit | None:
            reason, exit_code, who, did_jobs = "", None, "driver", False
            try:
                life = await self._run_driver(java)
            except OSError as error:
                self._lost = reason = f"No process could be started: {error}"
            else:
                if self._closing.is_set() or life is self._retired:
                    return None
                self._count_failure_or_raise(life)
                reason, exit_code, did_jobs = life.reason(), life.child.exit_code, life.jobs_done > 0
                if life.jvm_exit_code is not None:
                    who, exit_code = "jvm", life.jvm_exit_code
            fields = {"who": who, "reason": reason, "exit_code": exit_code}
            return ChildExit(lambda delay: log.error("spark.lost", delay_seconds=delay, **fields), did_jobs)

        if not self._closing.is_set():
            backoff = Backoff(base=1.0, cap=60.0)
            await supervise(run_once, backoff=backoff, clock=self.clock, stopping=self._closing)

    def _count_failure_or_raise(self, life: Life) -> None:
        """Count a driver's failed start; raise if starting another driver cannot help.

        Return without counting if the driver did not report a failed start, or if an earlier driver was ready.
        Raises HandlerInvalid or HandlerUnready if the handler is at fault, OperatorError if the settings are,
        and NotThereYet if a local Spark has failed to start ``_FIRST_STARTS`` times for another reason.
        """
        failed = life.failed
        if self._was_ready or failed is None:
            return
        if failed.fault == "handler":
            handler_error = HandlerUnready if failed.error == HandlerUnready.__name__ else HandlerInvalid
            raise handler_error(failed.message, handler=self.setup.handler, traceback=failed.traceback)
        self._failed_starts += 1
        local_starts_exhausted = is_local(self.setup.master) and self._failed_starts >= _FIRST_STARTS
        if failed.fault != "operator" and not local_starts_exhausted:
            return
        for error_type in (OperatorError, NotThereYet):
            if failed.error == error_type.__name__:
                raise error_type(failed.message)  # the driver's own message already contains the advice
        # An unreachable Connect server has the fault "spark" and is not local: the check above has returned.
        lacks_connect_packages = failed.error == "PySparkImportError" or "grpc" in failed.message
        if lacks_connect_packages:
            advice = "Spark Connect needs more packages: pip install 'mldserver[connect]'."
        else:
            advice = "Look at the settings spark_master and spark_conf."
        # Without a fault of the operator: the metastore or memory may be available at the next start.
        final_error = OperatorError if failed.fault == "operator" else NotThereYet
        master = redacted(self.setup.master)
        raise final_error(f"Spark cannot start on {master}: {failed.error}: {failed.message}", advice=advice)

    async def _run_driver(self, java: Java | None) -> Life:
        """Start a driver, wait until it is dead, and return it. Raises OSError if no process can be started.

        Always remove the driver's scratch directory. If the driver died before any job succeeded, also remove
        the class archive that it used.
        """
        self._starts += 1
        self._code_changed.clear()
        began = time.monotonic()
        start, driver_environment, missing_archive = await asyncio.to_thread(self._plan_start, java)
        log.info(
            "spark.starting",
            master=redacted(self.setup.master),
            java=java.version if java else None,
            start=self._starts,
        )
        try:
            self._life = life = await Life.begin(
                self.command,
                driver_environment,
                start,
                self.clock,
                cancel_grace=self.cancel_grace,
                log_error_messages=self.log_error_messages,
            )
            if self._closing.is_set():
                life.kill("The engine is closing.")
            async with asyncio.TaskGroup() as tasks:
                report_ready = tasks.create_task(self._report_ready(life, began, java, missing_archive))
                retire = tasks.create_task(self._retire(life))
                await life.live(self.start_deadline)
                report_ready.cancel()
                retire.cancel()
        finally:
            if self._life is not None and self._life is not self._retired:
                self._lost = self._life.reason(briefly=True)
            self._life = None
            self._announce(None)
            await asyncio.to_thread(shutil.rmtree, start.scratch, ignore_errors=True)
        stopped_by_engine = self._closing.is_set() or life is self._retired
        if start.archive is not None and life.jobs_done == 0 and not stopped_by_engine:
            # The archive may be truncated, which can crash the JVM: the next driver starts without an archive.
            with contextlib.suppress(OSError):
                await asyncio.to_thread(Path(start.archive).unlink, missing_ok=True)
        return life

    async def _retire(self, life: Life) -> None:
        """When the handler's code has changed, stop the driver as soon as it runs no job; kill it after the grace."""
        await self._code_changed.wait()
        async with contextlib.AsyncExitStack() as slots:
            # Holding every slot means that no job runs, and that no job can begin.
            for _ in range(self.setup.concurrency):
                await slots.enter_async_context(self._slots)
            self._retired = life
            life.stop()
            await self.clock.sleep(self.stop_grace)
            life.kill("Spark did not stop in time.")
            await life.over.wait()

    async def _report_ready(
        self, life: Life, began: float, java: Java | None, missing_archive: Path | None
    ) -> None:
        """Wait until the driver is warm, admit jobs and log ``spark.ready``; later, make the missing class archive.

        ``began``: when the start began, on ``time.monotonic``. ``missing_archive``: None if no archive must be made.
        """
        await life.warm.wait()
        self._was_ready = True
        self._lost = None
        self._announce(life)
        started = life.started
        self._start_seconds = round(time.monotonic() - began, 3)
        log.info(
            "spark.ready",
            seconds=self._start_seconds,
            spark_version=started.spark_version if started else None,
            ui=started.ui if started else None,
        )
        if missing_archive is None or self.archive_after is None:
            return
        await self.clock.sleep(self.archive_after)
        try:
            start, driver_environment, _ = await asyncio.to_thread(
                self._plan_start, java, train=missing_archive
            )
        except OSError as error:  # a full disk must not end a working driver
            log.warning("spark.log", logger=__name__, text=f"No class archive was made. {error}")
        else:
            await train(start, self.command, driver_environment, self.clock)

    def _plan_start(
        self, java: Java | None, *, train: Path | None = None
    ) -> tuple[StartSession, dict[str, str], Path | None]:
        """Return the start message of a driver, its environment, and the path of the missing class archive.

        The path is None if the archive exists, or if none is used. With ``train``, the driver only makes the archive
        at that path and runs no job. Makes the driver's scratch directory; raises OSError if that fails.
        """
        archive, missing_archive = train, None
        if archive is None and java is not None and self.cache_dir is not None:
            path = archive_path(self.cache_dir, java, self.setup.conf, os.environ, quick=self.setup.quick)
            # `os.path.isfile` is also False if a systemd unit hides the home directory: `Path.is_file` would raise.
            archive, missing_archive = (path, None) if os.path.isfile(path) else (None, path)  # noqa: PTH113  # see above
        if self._work is not None:
            self._work.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.mkdtemp(prefix=_SCRATCH, dir=self._work)
        start = msgspec.structs.replace(
            self.setup,
            owner=None if self.setup.sink is None else Owner(self.pipeline, self.ledger_id),
            new_ledger=self.setup.new_ledger and not self._was_ready,
            scratch=scratch,
            archive=None if archive is None else str(archive),
        )
        if train is not None:
            start = msgspec.structs.replace(
                start,
                train=True,
                handler="",
                master="local[1]",
                sink=None,
                place="",
                out="",
                code={},
            )
        return start, environment(start, os.environ, java_home=java.home if java else None), missing_archive

    def _remove_old_scratch(self) -> None:
        """Remove scratch directories of drivers whose server was killed. The directory is this server's own."""
        if self._work is not None:
            for left in self._work.glob(f"{_SCRATCH}*"):
                shutil.rmtree(left, ignore_errors=True)


def make_engine(handler: str, schema: str, **options: Any) -> SparkEngine:
    """Return an engine. ``options`` are fields of ``StartSession`` and of ``SparkEngine``."""
    session_options = {name: options.pop(name) for name in StartSession.__struct_fields__ if name in options}
    return SparkEngine(StartSession(handler, schema, **session_options), **options)


async def train(
    start: StartSession, command: Sequence[str], environment: Mapping[str, str], clock: Clock
) -> None:
    """Make the class archive ``start.archive``: start a separate driver, wait until it is warm, and stop it.

    The JVM writes the archive when it exits. A failure is only logged, since drivers also start without the archive.
    """
    assert start.archive is not None
    archive = Path(start.archive)
    outcome = "The time allowed for it was over."
    try:
        async with asyncio.timeout(_TRAIN_SECONDS):
            await asyncio.to_thread(discard, archive)
            life = await Life.begin(command, environment, start, clock, cancel_grace=0)
            async with asyncio.TaskGroup() as tasks:
                stopper = tasks.create_task(life.stop_when_warm())
                await life.live(_TRAIN_SECONDS)
                stopper.cancel()
            outcome = life.reason()
    except (OSError, TimeoutError) as error:
        outcome = str(error) or outcome
    finally:
        await asyncio.to_thread(shutil.rmtree, start.scratch, ignore_errors=True)
        with contextlib.suppress(OSError):
            await asyncio.to_thread(discard, archive)
    if await asyncio.to_thread(os.path.isfile, archive):
        outcome = f"Spark's classes are archived in {archive}: later starts take about half the time."
        log.info("spark.log", logger=__name__, text=outcome)
    else:
        log.warning("spark.log", logger=__name__, text=f"No class archive was made. {outcome}")
