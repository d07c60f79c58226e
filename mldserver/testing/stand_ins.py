"""Replacements for Spark and for time: an engine in which a function makes the output, and a clock that a test advances."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from io import BytesIO
from typing import TYPE_CHECKING, Final, TypeVar

from mldserver.base.clock import Clock, SystemClock
from mldserver.base.kill_points import kill_point
from mldserver.base.uris import reach
from mldserver.engine_jobs import PublishJob, WindowJob, WindowResult
from mldserver.errors import WindowFailed
from mldserver.jobs.engine import EngineFacts
from mldserver.windows import WINDOW_COLUMNS, Window

if TYPE_CHECKING:
    import pyarrow as pa

    OnTable = Callable[[pa.Table, Window], pa.Table]

_ORDER: Final = ("_time", "_clock")


@dataclass(slots=True)
class LocalEngine:
    """``mldserver.jobs.engine.Engine`` in this process.

    ``on_table`` receives a window's rows as an Arrow table in the pipeline's total order, all columns included, and returns the
    table to write; the default writes the rows unchanged. The columns ``window_columns`` are added.
    """

    on_table: OnTable | None = None
    fail: Callable[[WindowJob], Exception | None] | None = None
    """Called before each attempt; what it returns is raised, after half-written output was left in staging."""
    delay_seconds: float = 0.0
    """How long each attempt takes at least, on ``clock``."""
    start_seconds: float = 0.0
    """How long ``run`` takes to become ready, on ``clock``."""
    clock: Clock = field(default_factory=SystemClock)
    group_limit: int = 1
    """How many windows may share one job."""
    jobs: list[WindowJob] = field(default_factory=list)
    """Every attempt, in the order in which they began."""
    groups: list[int] = field(default_factory=list)
    """How many windows each job had."""
    window_columns: tuple[str, str] | None = WINDOW_COLUMNS
    """The names of the columns with the window's bounds, as in a handler."""
    ledger_id: str = ""
    """The identity of the windows' ledger."""
    slow: Callable[[str], None] | None = field(default=None, init=False)
    """The callback that ``when_slow`` received."""
    trouble: None = field(default=None, init=False)
    """This engine reports no trouble."""
    _ready: asyncio.Event = field(default_factory=asyncio.Event)
    _closed: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Become ready, then stay so until closed or cancelled."""
        if self.start_seconds:
            await self.clock.sleep(self.start_seconds)
        self._ready.set()
        await self._closed.wait()

    @property
    def is_ready(self) -> bool:
        """Whether ``run`` has started it and ``close`` has not ended it."""
        return self._ready.is_set() and not self._closed.is_set()

    def facts(self) -> EngineFacts:
        """Return default facts."""
        return EngineFacts()

    async def ready(self) -> None:
        """Return once ``run`` has started it."""
        await self._ready.wait()

    async def compute(self, job: WindowJob) -> WindowResult:
        """Run one attempt. Raises WindowFailed when the function fails or staging exists, and injected errors."""
        return (await self.compute_group((job,)))[0]

    async def compute_group(self, jobs: tuple[WindowJob, ...]) -> tuple[WindowResult, ...]:
        """Run attempts at several windows as one job, one ``delay_seconds`` long. Raises as ``compute``."""
        await self._ready.wait()
        began = time.monotonic()
        self.jobs += jobs
        self.groups.append(len(jobs))
        if self.delay_seconds:
            await self.clock.sleep(self.delay_seconds)
        if self.fail is not None:
            for job in jobs:
                if (error := self.fail(job)) is not None:
                    await asyncio.to_thread(_write_partial_output, job)
                    raise error
        rows = await asyncio.to_thread(
            lambda: [_compute(job, self.on_table, self.window_columns) for job in jobs]
        )
        seconds = time.monotonic() - began
        return tuple(
            WindowResult((_file(job),), count, seconds) for job, count in zip(jobs, rows, strict=True)
        )

    async def publish(self, job: PublishJob) -> None:
        """Raise WindowFailed: it has no tables."""
        raise WindowFailed(f"This engine has no table to publish window {job.window.id} into")

    def when_slow(self, call: Callable[[str], None]) -> None:
        """Keep the callback for the test."""
        self.slow = call

    def renew(self, code: dict[str, tuple[str, bytes]]) -> None:
        """Do nothing: it has no handler."""

    async def close(self) -> None:
        """Let ``run`` return."""
        self._closed.set()


def _file(job: WindowJob) -> str:
    """Return the attempt's own file name, as Spark does: readers must not confuse revisions."""
    return f"part-00000-{job.attempt:04d}.parquet"


def _write_partial_output(job: WindowJob) -> None:
    filesystem, staging = reach(job.staging, job.out)
    filesystem.create_dir(staging, recursive=True)
    with filesystem.open_output_stream(f"{staging}/{_file(job)}.crashed") as stream:
        stream.write(b"PAR1 half a file")


def _compute(job: WindowJob, on_table: OnTable | None, window_columns: tuple[str, str] | None) -> int:
    """Read a window's segments, pass them through ``on_table``, and write the output; return its number of rows. Blocking."""
    import pyarrow as pa  # noqa: PLC0415  # the plugin's users may never compute a window
    import pyarrow.parquet as pq  # noqa: PLC0415  # see above
    from pyarrow.fs import FileType  # noqa: PLC0415  # see above

    # Not `read_table`, which would take the names of the folders on the way for columns.
    segments = []
    for path in job.segments:
        filesystem, file = reach(path, job.out)
        with filesystem.open_input_stream(file) as stream:
            segments.append(pq.ParquetFile(BytesIO(bytes(stream.read()))).read())
    rows = pa.concat_tables(segments, promote_options="permissive")
    if len(rows) != job.rows:
        raise WindowFailed(
            f"The segments of window {job.window.id} hold {len(rows)} rows, but the ledger has registered {job.rows}"
        )
    order = [(name, "ascending") for name in _ORDER if name in rows.column_names]
    rows = rows.sort_by(order) if order else rows
    try:
        output = rows if on_table is None else on_table(rows, job.window)
    except Exception as error:
        raise WindowFailed(
            f"The function failed on window {job.window.id}: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(output, pa.Table):
        raise WindowFailed(f"The function returned {output!r} for window {job.window.id}, not an Arrow table")
    for name, at in zip(window_columns or (), (job.window.start, job.window.end), strict=False):
        if at is not None and name not in output.column_names:
            instants = pa.repeat(pa.scalar(at, pa.timestamp("us", "UTC")), len(output))
            output = output.append_column(name, instants)
    kill_point("job.running")
    filesystem, staging = reach(job.staging, job.out)
    if filesystem.get_file_info(staging).type != FileType.NotFound:
        raise WindowFailed(f"The staging directory {job.staging} exists already")
    filesystem.create_dir(staging, recursive=True)
    pq.write_table(output, f"{staging}/{_file(job)}", filesystem=filesystem)
    return int(output.num_rows)


_NS_PER_MS = 1_000_000
_LOOP_TURNS = 25
"""Turns of the event loop after each wake-up: enough for a chain of as many awaits."""

T = TypeVar("T")


class VirtualClock:
    """``mldserver.base.clock.Clock`` for tests: a sleeper wakes only when ``advance`` reaches its time."""

    def __init__(self, now_ms: int = 1_800_000_000_000) -> None:
        """Start at ``now_ms`` milliseconds since the Unix epoch; steady time starts at zero."""
        self._wall_ms = now_ms
        self._now_ns = 0
        self._order = itertools.count()
        self._sleepers: list[tuple[int, int, asyncio.Future[None]]] = []

    def now_ms(self) -> int:
        """Return milliseconds since the Unix epoch."""
        return self._wall_ms + self.steady_ms()

    def steady_ms(self) -> int:
        """Return milliseconds since the start."""
        return self._now_ns // _NS_PER_MS

    def step(self, seconds: float) -> None:
        """Set the time of day forward, or back when negative; sleeps do not become shorter or longer."""
        self._wall_ms += round(seconds * 1000)

    @property
    def sleepers(self) -> int:
        """How many tasks wait for this clock."""
        return sum(not future.done() for _, _, future in self._sleepers)

    async def sleep(self, seconds: float) -> None:
        """Return once the clock was advanced by ``seconds``; with zero or less only yield to other tasks."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        future = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now_ns + round(seconds * 1e9), next(self._order), future))
        await future

    async def advance(self, seconds: float) -> None:
        """Move on by ``seconds``, waking each sleeper at its own time and in order.

        After each wake-up the event loop runs the tasks that are ready, so a task that sleeps again within the
        span wakes again. Raises ValueError for negative spans.
        """
        if seconds < 0:
            raise ValueError(f"time does not go back: {seconds}")
        target = self._now_ns + round(seconds * 1e9)
        await _run_ready_tasks()
        while self._sleepers and self._sleepers[0][0] <= target:
            due, _, future = heapq.heappop(self._sleepers)
            if future.done():  # its task was cancelled
                continue
            self._now_ns = max(self._now_ns, due)
            future.set_result(None)
            await _run_ready_tasks()
        self._now_ns = target

    async def drive(self, work: Coroutine[object, object, T], *, step: float = 0.05) -> T:
        """Run ``work`` to its end, advancing by ``step`` seconds whenever the loop has had its turns."""
        async with asyncio.TaskGroup() as group:
            task = group.create_task(work)
            while not task.done():
                await self.advance(step)
        return task.result()


async def _run_ready_tasks() -> None:
    for _ in range(_LOOP_TURNS):
        await asyncio.sleep(0)
