"""``SharedDriver``: keeps a Spark driver alive while a function of the server needs one, and gives jobs to it.

    starting ──Started──▶ loading ──FunctionLoaded──▶ ready ──end of the socket──▶ restarting ──back-off──▶ starting

A driver is one child process with its JVM (``driver.py``); all functions of the server share it. After any failure of the
driver, its process group is killed, pending jobs fail with DriverLost, and a fresh driver starts after a back-off. The
back-off grows until a job succeeds, or a driver has lived for two minutes. A function that cannot be loaded does not
affect the others.

A driver must be replaced when a function has other code than the driver has imported, or when user code hangs in it. The
only function of a server waits for the restart. With several functions, the next driver starts while the present one runs the
jobs of the other functions, and replaces it once it has loaded every function. For that time two drivers need memory. If there is
too little, all functions wait for the restart.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec
import structlog

from mldserver.base.backoff import Backoff
from mldserver.base.clock import Clock, SystemClock, first_of, in_time
from mldserver.base.uris import redacted
from mldserver.children.process import resident_bytes
from mldserver.children.supervise import ChildExit, supervise
from mldserver.engine_jobs import FunctionView, PublishJob, WindowJob
from mldserver.errors import (
    DriverLost,
    MldserverError,
    OperatorError,
)
from mldserver.handler.queries import Query, QueryResult
from mldserver.jobs.engine import EngineFacts
from mldserver.jobs.run_gate import RunGate
from mldserver.spark.driver_functions import DriverFunction, error_of, excluded
from mldserver.spark.driver_messages import (
    WARM_UP,
    LoadFailed,
    Output,
    StartSession,
)
from mldserver.spark.driver_session import Life, driver_command
from mldserver.spark.driver_start import (
    has_room_beside,
    log_lost,
    plan_start,
    remove_old_folders,
    remove_old_scratch,
    report_of,
)
from mldserver.spark.java import Java, probe
from mldserver.spark.session import environment, is_connect, is_local
from mldserver.spark.slots import FairSlots
from mldserver.spark.trainer import train

log = structlog.get_logger("mldserver")

_FIRST_STARTS = 3
"""Starts of a local Spark that may fail, before the first success, until the settings are held to be wrong.

The death of a driver that was killed says nothing about the settings, and does not count."""

_PATIENCE_SECONDS = 1.0
"""How long a query waits for windows: Spark never takes a core from a task that runs, so a window would wait for the query's."""

_ADVICE = "Give both functions the same module, rename it in one function, or serve one function with a separate server."

Outcome = Literal["follows", "unfit", "refuses", "outdated"]


@dataclass(eq=False)
class SharedDriver:
    """Runs one driver after another for the functions that have joined. Times are in seconds."""

    setup: StartSession = field(default_factory=StartSession, repr=False)
    """What each driver is started with; scratch folder and archive are filled in."""
    _: KW_ONLY
    work_dir: Path | None = None
    """Where the drivers' scratch directories lie (``own_folder``); None: in the folder of the first function."""
    java_home: str | None = None
    cache_dir: Path | None = None
    """Where class archives lie; None: none is used."""
    start_deadline: float = 600
    cancel_grace: float = 10
    stop_grace: float = 10
    archive_after: float | None = 60
    """How long the driver must have been ready until a class archive is made where none is yet; None: never."""
    clock: Clock = field(default_factory=SystemClock)
    command: Sequence[str] = field(default_factory=driver_command)
    """What is started as the driver."""
    log_error_messages: bool = True
    """Whether the log quotes what errors say in Spark's own log."""

    def __post_init__(self) -> None:
        """Prepare; nothing is started."""
        if not self.setup.python_path:
            self.setup = msgspec.structs.replace(self.setup, python_path=(str(Path.cwd()),))
        self.run_gate = RunGate()
        """Shared by the window runners of all functions."""
        self.functions: dict[str, DriverFunction] = {}
        """The functions that have joined, by name."""
        self.life: Life | None = None
        """The driver that serves, or that starts while none serves."""
        self.start_seconds: float | None = None
        self._slots = FairSlots(self.setup.concurrency)
        self._query_slots = FairSlots(self.setup.query_concurrency)
        self._early_slots = FairSlots(1)
        self._changed = asyncio.Event()
        """Set and replaced at each change that a waiting task may have to see."""
        self._lives: list[Life] = []
        """The drivers that live."""
        self._successor: Life | None = None
        """The driver that ``_run_once`` runs next; None: a fresh one."""
        self._tasks: asyncio.TaskGroup | None = None
        self._closing = asyncio.Event()
        """Set when the last function has left."""
        self._idle = asyncio.Event()
        """Set while no driver is needed, and none lives."""
        self._idle.set()
        self.idle = self._idle.wait
        """Returns when no driver is left. Call it after the last function has left."""
        self._latest_serial = 0
        self._starts = 0
        self._failed_starts = 0
        self._was_ready = False
        self._lost: str | None = None
        """How the last driver ended, until another is ready."""

    # What functions do.

    async def join(self, function: DriverFunction) -> None:
        """Have the driver load a function, and start one if there is none. The function ends if another one excludes it."""
        await asyncio.to_thread(remove_old_scratch, function.work_dir, self._lives)
        self._latest_serial = function.serial = self._latest_serial + 1
        if excluded := self._excluded(function):
            error = OperatorError(excluded, did="The other functions go on.", advice=_ADVICE)
            self.leave(function, f"The engine ended: {error}", error)
        elif not function.over.is_set():
            self.functions[function.name] = function
            self._reconcile()

    def leave(self, function: DriverFunction, reason: str, error: MldserverError | None = None) -> None:
        """Let no further job of a function begin. When the last one leaves, the driver is stopped (on an error: killed)."""
        if function.over.is_set():
            return
        function.end_reason, function.error = reason, error
        function.over.set()
        if self.functions.get(function.name) is function:
            del self.functions[function.name]
            for life in self._lives:
                life.functions.asked.pop(function.name, None)
            if not self.functions:
                self._closing.set()
                for life in tuple(self._lives):
                    if error is None:
                        life.stop()
                    else:
                        life.kill("")
        self._reconcile()

    def renew(self, function: DriverFunction, code: dict[str, tuple[str, bytes]]) -> None:
        """Have later jobs of a function run with ``code`` (``HandlerSpec.code``), in a fresh driver."""
        function.load = msgspec.structs.replace(function.load, code=code)
        self._latest_serial = function.serial = self._latest_serial + 1
        function.trouble = None
        self._reconcile()

    def serving(self, function: DriverFunction) -> Life | None:
        """Return the driver that runs jobs of a function; None: there is none now."""
        life = self.life
        if life is None or life.over.is_set() or life.outdated or not function.is_loaded_in(life.functions):
            return None
        return None if function.name in life.functions.stuck else life

    def trouble_of(self, function: DriverFunction) -> str | None:
        """Return why no job of a function would start, in words; None: nothing is known."""
        stuck = "" if self.life is None else self.life.functions.stuck.get(function.name, "")
        return function.trouble or self._excluded(function) or stuck or self.trouble

    @property
    def is_ready(self) -> bool:
        """Whether jobs of a function would start at once."""
        return any(
            life is not None and not life.trouble for life in map(self.serving, self.functions.values())
        )

    @property
    def trouble(self) -> str | None:
        """Why no job would start, in words: what the driver says, or how the last one ended."""
        life = self.life
        if life is None or life.outdated:
            return self._lost
        return life.reason(briefly=True) if life.over.is_set() else life.trouble or self._lost

    def facts(self, life: Life | None = None, jobs: int | None = None) -> EngineFacts:
        """Return the facts about Spark that a status shows; ``life`` and ``jobs``: of one function, else of the driver."""
        life = life or (self.life if self.is_ready and jobs is None else None)
        started = None if life is None else life.started
        return EngineFacts(
            redacted(self.setup.master),
            None if started is None else started.spark_version,
            None if started is None else started.ui,
            self.start_seconds,
            (0 if life is None else len(life.waiting)) if jobs is None else jobs,
            None if started is None or started.jvm_pid is None else resident_bytes(started.jvm_pid),
            None if started is None else started.application,
        )

    async def ready(self, function: DriverFunction) -> Life:
        """Wait for a driver that takes jobs of a function, and return it. Raises DriverLost if the function has left.

        If a job of the function is being cancelled, wait first until it has ended: the driver may be replaced for it.
        """
        while (life := self.serving(function)) is None or life.is_cancelling(function.name):
            if function.over.is_set():
                error = DriverLost("No Spark driver will come any more.", did=function.end_reason)
                error.blame = "server"
                raise error
            await self._changed.wait()
        return life

    async def ask(
        self,
        function: DriverFunction,
        work: tuple[WindowJob, ...] | PublishJob,
        deadline: float | None,
        on_slow: Callable[[str], None],
    ) -> tuple[Output, ...]:
        """Run one job, as ``Life.ask``; wait for a driver and a slot first. A job whose hook is slow frees its slot.

        Early results have a slot of their own, so that no other job waits for them.
        """
        is_early = not (work[0] if isinstance(work, tuple) else work).window.final
        slots = self._early_slots if is_early else self._slots
        while True:
            await self.ready(function)
            async with slots.hold(function.name) as free_slot:
                life = self.serving(function)
                if life is None or life.is_cancelling(function.name):
                    continue  # others may have the slot meanwhile

                def slow(window_id: str) -> None:
                    free_slot()  # another window may be computed beside the slow one
                    if not is_early:
                        on_slow(window_id)

                return await life.ask(function.name, work, deadline, slow)

    async def query(
        self, function: DriverFunction, query: Query, views: tuple[FunctionView, ...], max_bytes: int
    ) -> QueryResult:
        """Run a query, as ``Life.query``; wait for a driver and a slot first, and a little for windows that are computed."""
        while True:
            await self.ready(function)
            async with self._query_slots.hold(function.name):
                await in_time(self._slots.idle(), self.clock, _PATIENCE_SECONDS)
                if (life := self.serving(function)) is not None:
                    return await life.query(function.name, query, views, max_bytes)

    # The life of drivers.

    async def run(self) -> None:
        """Keep a driver alive while there are functions, one process after another, until cancelled.

        An error that no other driver could help ends the functions, and is not raised here.
        """
        if self.work_dir is not None:
            await asyncio.to_thread(remove_old_folders, self.work_dir)
        try:
            while True:
                while not self.functions:
                    await self._changed.wait()
                self._idle.clear()
                self._closing.clear()
                try:
                    java = None if is_connect(self.setup.master) else await probe(self.java_home, os.environ)
                    await self._serve(java)
                except OperatorError as error:
                    self._end_all(error)
                finally:
                    self._idle.set()
        finally:
            for function in tuple(self.functions.values()):
                self.leave(function, "The engine ended: its task was cancelled.")
            if self.work_dir is not None:
                with contextlib.suppress(OSError):  # it is not there, or not empty
                    self.work_dir.rmdir()

    def _end_all(self, error: MldserverError) -> None:
        for function in tuple(self.functions.values()):
            self.leave(function, f"The engine ended: {error}", error)

    async def _serve(self, java: Java | None) -> None:
        """Run drivers until the last function has left."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            helpers = [tasks.create_task(self._replace_drivers(java)), tasks.create_task(self._kill_late())]
            if not self._closing.is_set():
                await supervise(
                    partial(self._run_once, java),
                    backoff=Backoff(base=1.0, cap=60.0),
                    clock=self.clock,
                    stopping=self._closing,
                )
            helpers[0].cancel()
            for life in tuple(self._lives):  # a replaced one, or the next
                await life.ended.wait()
            helpers[1].cancel()
        self._successor = None

    async def _kill_late(self) -> None:
        """After the last function has left, kill the drivers that do not stop in time."""
        await self._closing.wait()
        await asyncio.sleep(self.stop_grace)
        for life in tuple(self._lives):
            life.kill("Spark did not stop in time.")

    async def _run_once(self, java: Java | None) -> ChildExit | None:
        """Run a driver from its start, or from where it follows another one, to its end; for ``supervise``."""
        life, self._successor = self._successor, None
        try:
            life = life or await self._begin(java)
        except OSError as error:
            self._lost = f"No process could be started: {error}"
            return ChildExit(partial(log_lost, self._lost, None, "driver"))
        self.life = life
        self._reconcile()
        while not life.ended.is_set() and not (life.outdated and self._successor is not None):
            changed = self._changed.wait()
            await first_of(life.ended.wait(), changed)
        if self._closing.is_set() or life.outdated:
            return None
        self._end_if_hopeless(life)
        return ChildExit(report_of(life), life.jobs_done > 0)

    def _end_if_hopeless(self, life: Life) -> None:
        """If another driver could not help what this one reported at its start, end the functions that are concerned.

        Nothing is done if the driver did not report a failed start, or if an earlier start succeeded.
        """
        failed = life.failed
        function = self.functions.get(failed.name) if isinstance(failed, LoadFailed) else None
        had_success = self._was_ready if function is None else function.was_loaded
        if failed is None or had_success:
            return
        if failed.fault != "handler":
            self._failed_starts += 1
        hopeless = is_local(self.setup.master) and self._failed_starts >= _FIRST_STARTS
        error = error_of(failed, function, self.setup.master, hopeless=hopeless)
        if error is None:
            return
        if function is None:
            self._end_all(error)
        else:
            self.leave(function, f"The engine ended: {error}", error)

    async def _begin(self, java: Java | None) -> Life:
        """Start a driver, which loads the functions as soon as it can. Raises OSError if no process can be started."""
        self._starts += 1
        began = time.monotonic()
        start, missing_archive = await asyncio.to_thread(self._plan_start, java)
        log.info(
            "spark.starting",
            master=redacted(self.setup.master),
            java=java.version if java else None,
            start=self._starts,
        )
        try:
            life = await Life.begin(
                self.command,
                self._environment(start, java),
                start,
                self.clock,
                cancel_grace=self.cancel_grace,
                log_error_messages=self.log_error_messages,
                changed=self._reconcile,
                is_shared=lambda: len(self.functions) > 1,
            )
        except BaseException:
            shutil.rmtree(start.scratch, ignore_errors=True)
            raise
        self._lives.append(life)
        assert self._tasks is not None
        self._tasks.create_task(self._live(life, began, java, missing_archive))
        return life

    async def _live(self, life: Life, began: float, java: Java | None, missing_archive: Path | None) -> None:
        """Accept a driver's messages until it is dead, then set ``life.ended``.

        Always remove the driver's scratch directory. If the driver died before any job succeeded, also remove
        the class archive that it used.
        """
        start = life.start
        try:
            if self._closing.is_set():
                life.kill("The engine is closing.")
            async with asyncio.TaskGroup() as tasks:
                report_ready = tasks.create_task(self._report_ready(life, began, java, missing_archive))
                await life.live(self.start_deadline)
                report_ready.cancel()
        finally:
            if self.life is life:
                self.life = None
                if not life.outdated:
                    self._lost = life.reason(briefly=True)
            self._lives.remove(life)
            self._reconcile()
            await asyncio.to_thread(shutil.rmtree, start.scratch, ignore_errors=True)
            stopped_by_engine = self._closing.is_set() or life.outdated
            if start.archive is not None and life.jobs_done == 0 and not stopped_by_engine:
                # The archive may be truncated, which can crash the JVM: the next driver starts without an archive.
                with contextlib.suppress(OSError):
                    await asyncio.to_thread(Path(start.archive).unlink, missing_ok=True)
            life.ended.set()

    async def _report_ready(
        self, life: Life, began: float, java: Java | None, missing_archive: Path | None
    ) -> None:
        """Log ``spark.ready`` when the driver serves; later, make the missing class archive.

        ``began``: when the start began, on ``time.monotonic``. ``missing_archive``: None if no archive must be made.
        """
        await life.warm.wait()
        while self.life is not life:  # it starts beside another one
            await self._changed.wait()
        started = life.started
        self.start_seconds = round(time.monotonic() - began, 3)
        log.info(
            "spark.ready",
            seconds=self.start_seconds,
            spark_version=started.spark_version if started else None,
            ui=started.ui if started else None,
            application=started.application if started else None,
        )
        if missing_archive is None or self.archive_after is None:
            return
        await self.clock.sleep(self.archive_after)
        try:
            start, _ = await asyncio.to_thread(self._plan_start, java, train=missing_archive)
        except OSError as error:  # a full disk must not end a working driver
            log.warning("spark.log", logger=__name__, text=f"No class archive was made. {error}")
        else:
            await train(start, self.command, self._environment(start, java), self.clock)

    # Functions in a driver.

    def _reconcile(self) -> None:
        """Load what a driver lacks, act on what it has reported, and wake all that wait for a change."""
        for life in tuple(self._lives):
            if life.over.is_set() or life.outdated:
                continue
            for function in tuple(self.functions.values()):
                if (
                    function.name not in life.functions.asked
                    and not function.needs_other_than(life.functions)
                    and not self._excluded(function)
                ):
                    self._load(function, life)
                if life is self.life:
                    self._accept(function, life)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _load(self, function: DriverFunction, life: Life) -> None:
        load = function.load
        folder = function.work_dir or tempfile.gettempdir()
        # Beside the scratch folder, which is this user's alone: executors may be others.
        place = load.place or f"{folder}/{Path(life.start.scratch).name}{WARM_UP}"
        new_ledger = load.new_ledger and not function.was_loaded
        life.functions.ask(load)
        life.load(msgspec.structs.replace(load, place=place, new_ledger=new_ledger))

    def _accept(self, function: DriverFunction, life: Life) -> None:
        """Act on whether the serving driver has loaded a function."""
        if function.is_loaded_in(life.functions):
            function.was_loaded, function.trouble = True, None
            function.backoff.worked()
            self._was_ready, self._lost = True, None
        if (
            life.functions.asked.get(function.name) is not function.load
            or function.name not in life.functions.refused
        ):
            return
        failed = life.functions.refused.pop(function.name)
        if len(self.functions) == 1:
            life.failed = failed
            life.kill("")
            return
        error = None if function.was_loaded else error_of(failed, function, self.setup.master)
        if error is not None:
            self.leave(function, f"The engine ended: {error}", error)
            return
        function.trouble = f"The start failed: {failed.error}: {failed.message}"
        assert self._tasks is not None
        self._tasks.create_task(self._load_again(function, life))

    async def _load_again(self, function: DriverFunction, life: Life) -> None:
        """Try after a back-off to load a function that the driver has refused for a reason that may pass."""
        load = function.load
        await first_of(self.clock.sleep(function.backoff.failed()), life.over.wait(), self._closing.wait())
        if not life.over.is_set() and life.functions.asked.get(load.name) is load is function.load:
            self._load(function, life)

    def _excluded(self, function: DriverFunction) -> str:
        return excluded(function, self.functions.values())

    # Replacing a driver.

    async def _replace_drivers(self, java: Java | None) -> None:
        """Whenever a function needs another driver than the present one, replace that. Runs until cancelled."""
        assert self._tasks is not None
        backoff = Backoff(base=1.0, cap=60.0)
        while True:
            while (old := self.life) is None or old.outdated or old.over.is_set() or not self._misfits(old):
                await self._changed.wait()
            outcome: Outcome = "unfit"
            if len(self.functions) > 1 and has_room_beside(old):
                with contextlib.suppress(OSError):
                    life = await self._begin(java)
                    outcome = await self._settle(life, old)
            if outcome == "unfit":
                await self._retire(old)
            elif outcome == "follows":
                backoff.worked()
                if not old.over.is_set():
                    self._tasks.create_task(self._retire(old))
            elif outcome == "refuses":
                delay = backoff.failed()
                report_of(life)(delay)
                await first_of(self.clock.sleep(delay), self._other_code())

    async def _other_code(self) -> None:
        """Return when a function has joined or has changed."""
        former = self._latest_serial
        while self._latest_serial == former:
            await self._changed.wait()

    def _misfits(self, life: Life) -> bool:
        """Whether a function needs another driver, and could be loaded there."""
        return any(
            function.needs_other_than(life.functions) and not self._excluded(function)
            for function in self.functions.values()
        )

    async def _settle(self, life: Life, old: Life) -> Outcome:
        """Wait until a driver that starts while ``old`` runs has loaded all functions, and have it follow ``old``.

        Return "unfit" if two drivers cannot run at a time here, "refuses" if it could not load a function, and "outdated" if
        yet another driver is needed: it is dead then.
        """
        while True:
            if old.over.is_set():
                self._successor = life
                return "follows"
            refused = next((name for name in life.functions.refused if name in self.functions), None)
            if refused is not None:
                function, failed = self.functions[refused], life.functions.refused.pop(refused)
                error = None if function.was_loaded else error_of(failed, function, self.setup.master)
                if error is not None:
                    self.leave(function, f"The engine ended: {error}", error)
                    continue
                life.failed = failed
                function.trouble = life.reason(briefly=True)
                return await self._kill(life, "", "refuses")
            if self._misfits(life):
                return await self._kill(life, "The code has changed again.", "outdated")
            if life.over.is_set() or life.trouble is not None:
                return await self._kill(life, life.trouble or "", "unfit")
            waited_for = [each for each in self.functions.values() if not self._excluded(each)]
            if all(each.is_loaded_in(life.functions) for each in waited_for):
                self.life = self._successor = life
                self._reconcile()
                return "follows"
            await self._changed.wait()

    @staticmethod
    async def _kill(life: Life, reason: str, outcome: Outcome) -> Outcome:
        life.kill(reason)
        await life.ended.wait()
        return outcome

    async def _retire(self, life: Life) -> None:
        """Give a driver no further job, stop it when it runs none, and kill it after the grace."""
        life.outdated = True
        self._reconcile()
        while not (life.is_quiet or life.over.is_set()):
            await self._changed.wait()
        if not life.over.is_set():
            life.stop()
        if not await in_time(life.ended.wait(), self.clock, self.stop_grace):
            life.kill("Spark did not stop in time.")
            await life.ended.wait()

    # Starting one.

    def _plan_start(
        self, java: Java | None, *, train: Path | None = None
    ) -> tuple[StartSession, Path | None]:
        functions = tuple(self.functions.values())
        work_dir = self.work_dir or next((function.work_dir for function in functions), None)
        own_umask = any(not function.load.out for function in functions)
        setup = msgspec.structs.replace(self.setup, own_umask=own_umask)
        return plan_start(setup, work_dir, self.cache_dir, java, train)

    @staticmethod
    def _environment(start: StartSession, java: Java | None) -> dict[str, str]:
        return environment(start, os.environ, java_home=java.home if java else None)
