"""``SparkEngine``: the engine of one function, on a Spark driver that the functions of a server share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, fields
from pathlib import Path
from typing import Any

import msgspec
import structlog

from mldserver.engine_jobs import FunctionView, PublishJob, WindowJob, WindowResult
from mldserver.handler.queries import Query, QueryResult
from mldserver.jobs.engine import Deadline, EngineFacts, deadline_seconds
from mldserver.sinks.sink import Owner
from mldserver.spark.driver_functions import DriverFunction
from mldserver.spark.driver_messages import LoadFunction, StartSession
from mldserver.spark.shared_driver import SharedDriver

log = structlog.get_logger("mldserver")


@dataclass(eq=False)
class SparkEngine:
    """``mldserver.jobs.engine.Engine`` on a driver in a child process. Times are in seconds."""

    setup: LoadFunction = field(repr=False)
    """What the driver loads; the engine fills in the table's owner, and its driver the rest."""
    driver: SharedDriver
    _: KW_ONLY
    owns_driver: bool = False
    """Whether ``run`` runs the driver, too: no other function has it."""
    work_dir: Path | None = None
    """A directory for scratch space, this server's own; None: the machine's temporary directory. With a local output
    folder it lies in it: there a cluster proves that it shares the folder (``warm_up.py``)."""
    job_deadline: Deadline = None
    """What a window's job may take: the setting ``window_deadline``."""
    ledger_id: str = ""
    """With the function's name: whose the sink's table is. Set before ``run``."""
    group_limit: int = 16
    """How many windows share one Spark job at most. Small windows cost about as much together as one of them alone; a
    group that fails is computed again window by window, so larger groups lose more."""

    def __post_init__(self) -> None:
        """Prepare; nothing is started."""
        work_dir = None if self.work_dir is None else self.work_dir.absolute()
        self._function = DriverFunction(self.setup, work_dir)
        self._joined = False
        self._on_slow: Callable[[str], None] = lambda _: None

    @property
    def is_ready(self) -> bool:
        """Whether a job would start at once."""
        life = self.driver.serving(self._function)
        return life is not None and not life.trouble

    @property
    def trouble(self) -> str | None:
        """Why no job would start, in words: what the driver says, or how the last one ended."""
        return self.driver.trouble_of(self._function)

    def facts(self) -> EngineFacts:
        """Return the facts about Spark that the server's status shows."""
        life = self.driver.serving(self._function)
        jobs = 0 if life is None else life.jobs_of(self._function.name)
        return self.driver.facts(life, jobs)

    async def run(self) -> None:
        """Have the driver load the function, in each of its processes, until closed or cancelled.

        Raises JavaError when Java is missing or too old, HandlerInvalid when the driver cannot import the handler,
        OperatorError when a local session cannot be made, or when another function of the driver excludes this one.
        """
        function, setup = self._function, self.setup
        if setup.sink is not None or setup.side_sinks:
            owner = Owner(self.setup.name, self.ledger_id)
            function.load = msgspec.structs.replace(function.load, owner=owner)
        self._joined = True
        try:
            if self.owns_driver:
                async with asyncio.TaskGroup() as tasks:
                    driving = tasks.create_task(self.driver.run())
                    await self._stay()
                    if function.error is None:
                        await self.driver.idle()
                    driving.cancel()
            else:
                await self._stay()
        finally:
            self.driver.leave(function, "The engine ended: its task was cancelled.")
        if function.error is not None:
            raise function.error

    async def _stay(self) -> None:
        await self.driver.join(self._function)
        await self._function.over.wait()

    async def ready(self) -> None:
        """Return when a job would start at once. Raises DriverLost when the engine has ended."""
        await self.driver.ready(self._function)

    async def compute(self, job: WindowJob) -> WindowResult:
        """Run one attempt. See ``Engine.compute``."""
        return (await self.compute_group((job,)))[0]

    async def compute_group(self, jobs: tuple[WindowJob, ...]) -> tuple[WindowResult, ...]:
        """Run attempts as one Spark job; wait for a driver and a free slot first.

        See ``Engine.compute_group``.
        """
        began = time.monotonic()
        deadline = deadline_seconds(self.job_deadline, jobs)
        outputs = await self.driver.ask(self._function, jobs, deadline, self._on_slow)
        seconds = time.monotonic() - began
        return tuple(WindowResult(output.files, output.rows, seconds, output.work) for output in outputs)

    async def publish(self, job: PublishJob) -> None:
        """Write an output into the table, waiting for a driver and for a free slot first. See ``Engine.publish``."""
        deadline = deadline_seconds(self.job_deadline, (job,))
        await self.driver.ask(self._function, job, deadline, self._on_slow)

    async def query(self, query: Query, views: tuple[FunctionView, ...], max_bytes: int) -> QueryResult:
        """Run a query of the handler, waiting for a driver and for a free slot first.

        Raises QueryTooLarge beyond ``max_bytes``, QueryFailed and DriverLost. Cancelling the call cancels the query.
        """
        return await self.driver.query(self._function, query, views, max_bytes)

    def when_slow(self, call: Callable[[str], None]) -> None:
        """Call ``call`` when the ``on_window`` of a window is slow. See ``Engine.when_slow``."""
        self._on_slow = call

    def renew(self, code: dict[str, tuple[str, bytes]]) -> None:
        """Run later jobs in a driver that has imported ``code``. See ``Engine.renew``."""
        self.driver.renew(self._function, code)

    async def close(self) -> None:
        """Let no further job begin. If this was the driver's last function, stop the driver, and return when it is gone.

        The driver is killed if it does not stop within its ``stop_grace`` seconds.
        """
        if not self._joined:
            return
        self.driver.leave(self._function, "The engine is closed.")
        if not self.driver.functions:
            await self.driver.idle()


def make_engine(
    handler: str, schema: str, *, driver: SharedDriver | None = None, pipeline: str = "", **options: Any
) -> SparkEngine:
    """Return an engine. ``options`` are fields of ``LoadFunction`` and ``SparkEngine``.

    Without ``driver`` the engine has a driver of its own, and ``options`` may be fields of ``StartSession`` and
    ``SharedDriver``, too.
    """
    if driver is None:
        driver, options = _own_driver(options)
        options["owns_driver"] = True
    loading = {name: options.pop(name) for name in LoadFunction.__struct_fields__ if name in options}
    return SparkEngine(LoadFunction(pipeline, handler, schema, **loading), driver, **options)


def _own_driver(options: dict[str, Any]) -> tuple[SharedDriver, dict[str, Any]]:
    """Return a driver that is made of some of the options, and the other options."""
    session = StartSession.__struct_fields__
    own = {each.name for each in fields(SharedDriver)} - {"setup", "work_dir"}
    setup = StartSession(**{name: value for name, value in options.items() if name in session})
    driver = SharedDriver(setup, **{name: value for name, value in options.items() if name in own})
    others = {name: value for name, value in options.items() if name not in own and name not in session}
    return driver, others
