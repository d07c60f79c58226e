"""The steps of a window's life, each for several windows at a time: attempt, commit, publish.

Publishing is a rename, a manifest, or the engine's write into a table.

Windows that are ready together share what costs the same for one as for many: the engine's job, the ledger's commit,
the syncs of the disk, and the hop to a thread for each of these.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import structlog

from mldserver.base.clock import Clock
from mldserver.base.kill_points import kill_point
from mldserver.engine_jobs import NO_WORK, FunctionView, PublishJob, SparkWork, WindowJob, WindowResult
from mldserver.jobs.engine import Engine
from mldserver.jobs.predecessors import Predecessors
from mldserver.jobs.previous import PreviousResults
from mldserver.ledger.contract import Commit, WindowEntry, WindowState
from mldserver.ledger.operations import Ledger
from mldserver.output import joined
from mldserver.output.layout import attempt_path, writer_tag, written
from mldserver.output.publish import Publisher
from mldserver.output.store import Garbage, OutputStore
from mldserver.windows import Window, as_window

log = structlog.get_logger("mldserver")

_READING_MS = 5000
"""How long a replaced output stays: a reader may have opened its folder just before, and is about to list it. Were it
empty by then, the reader would miss the window without a sign; so it finds names that are gone, and lists again."""


@dataclass(frozen=True, slots=True)
class Committed:
    """An attempt whose output counts, but may not be visible yet."""

    entry: WindowEntry
    output: Commit
    seconds: float
    """What the engine took; 0 for an output that was committed in an earlier life, or by another server."""
    began_ms: int
    work: SparkWork = NO_WORK


@dataclass(kw_only=True)
class WindowSteps:
    """The steps that compute and publish windows. They raise every failure: ``WindowRunner`` decides what follows."""

    pipeline: str
    ledger: Ledger
    store: OutputStore
    engine: Engine
    clock: Clock
    retain: bool
    """Whether a window's segments are kept after it is published, so that late rows can make a next revision."""
    freed: Callable[[int], None]
    """Called with the bytes of deleted segments."""
    table: str | None = None
    """What a log calls the table that the engine publishes into; None: outputs are published as files."""
    ledger_id: str = ""
    """Of the ledger that attempts are made for."""
    older: Mapping[str, str] = field(default_factory=dict)
    """For segments of an earlier handler with other columns: their schema as DDL, by the fingerprint in their names."""
    overlap: bool = False
    """Whether windows share segments."""
    predecessors: Predecessors | None = None
    """The functions whose windows come first; None: windows wait for none."""
    previous: PreviousResults | None = None
    """The results of the windows before; None: ``on_window`` takes none."""
    has_early: bool = False
    """Whether windows have early results, which their first revisions replace."""
    _replaced: asyncio.Queue[tuple[int, Callable[[], None]]] = field(default_factory=asyncio.Queue)

    def __post_init__(self) -> None:
        self.publisher = Publisher(self.store, self.table, early=self.has_early)
        self.garbage = Garbage(self.store)

    async def compute(self, entries: Sequence[WindowEntry]) -> tuple[Committed, ...] | None:
        """Begin an attempt at each window, run all as one job, and commit those that are still this server's.

        Omits windows that this server lost or need not compute any more, and those that lost their claim while the
        job ran. Returns None if no attempt was begun. Raises LedgerError, OSError, and what the engine raises.
        """
        began_ms = self.clock.steady_ms()
        views = () if self.predecessors is None else await self.predecessors.views()
        begun = await self._begin(entries, views)
        if not begun:
            return None
        jobs = tuple(job for _, _, job in begun)
        if self.previous is not None:
            before = [await self.previous.find(entry) for entry, _, _ in begun]
            jobs = tuple(replace(job, previous=view) for job, view in zip(jobs, before, strict=True))
        if len(jobs) == 1:
            results: tuple[WindowResult, ...] = (await self.engine.compute(jobs[0]),)
        else:
            results = await self.engine.compute_group(jobs)
        kill_point("attempt.computed")
        outputs = tuple(
            Commit(entry.window_id, job.attempt, staging, result.files, result.rows, entry.revision)
            for (entry, staging, job), result in zip(begun, results, strict=True)
        )
        if self.store.local:
            # To publish an output without files, the publisher renames an empty folder.
            if empty := [output.staging for output in outputs if not output.files]:
                await asyncio.to_thread(self.store.prepare, *empty)
            # Sync before the commit: a committed output must survive a crash of the host.
            await asyncio.to_thread(self.store.sync, *(output.staging for output in outputs))
        kill_point("attempt.staged")
        accepted = await self.ledger.commit(outputs)
        kill_point("window.committed")
        return tuple(
            Committed(entry, output, result.seconds, began_ms, result.work)
            for (entry, _, _), output, result in zip(begun, outputs, results, strict=True)
            if entry.window_id in accepted
        )

    async def _begin(
        self, entries: Sequence[WindowEntry], views: tuple[FunctionView, ...]
    ) -> tuple[tuple[WindowEntry, str, WindowJob], ...]:
        """Number a new attempt at each window in the ledger, and return for each (window, staging folder, job).

        Omit windows that are no longer this server's. The staging folder is relative to the output folder, and empty.
        """
        attempts = await self.ledger.begin_attempts(tuple(entry.window_id for entry in entries))
        tag = writer_tag(self.ledger_id, self.ledger.server_id)
        for entry in entries:
            if entry.window_id not in attempts:
                log.debug("window.dropped", window=entry.window_id, revision=entry.revision)
        kill_point("attempt.begun")

        def begin(entry: WindowEntry) -> tuple[WindowEntry, str, WindowJob]:
            number = attempts[entry.window_id]
            staging = attempt_path(self.publisher.root, entry.window_id, number, tag)
            # An earlier process of this server may have left files of an attempt with the same number.
            self.store.delete(staging)
            if self.store.local:
                self.store.prepare(staging.rpartition("/")[0])
            job = job_of(
                entry, self._window(entry), number, self.store.uri(staging), self.store, self.older, views
            )
            return entry, staging, job

        ours = [entry for entry in entries if entry.window_id in attempts]
        return await asyncio.to_thread(self.store.for_each, begin, ours)

    def _window(self, entry: WindowEntry) -> Window:
        return as_window(
            entry.window_id, entry.start_ms, entry.end_ms, revision=entry.revision, pipeline=self.pipeline
        )

    async def find_committed(self, entry: WindowEntry) -> Committed | None:
        """Read from the ledger whether this revision of a window is committed, and this server's to publish; else return None.

        A commit may exist already if its answer was lost, after a crash, or if a dead server made it.
        """
        stored = next(iter(await self.ledger.find((entry.window_id,))), None)
        expected = (WindowState.COMMITTED, self.ledger.server_id, entry.revision)
        if (
            stored is None
            or stored.staging is None
            or (stored.state, stored.owner, stored.revision) != expected
        ):
            log.debug("window.dropped", window=entry.window_id, revision=entry.revision)
            return None
        output = Commit(
            stored.window_id, stored.attempt, stored.staging, stored.files, stored.rows_out, stored.revision
        )
        return Committed(stored, output, 0.0, self.clock.steady_ms())

    async def publish(self, committed: Sequence[Committed]) -> None:
        """Make committed windows visible, and delete the files that they no longer need. May be repeated.

        Raises OSError and LedgerError; for a table also what the engine raises.
        """
        outputs = tuple(window.output for window in committed)
        into_table = self.publisher.table is not None
        if into_table:
            await self._into_table(committed)
        else:
            await asyncio.to_thread(self.publisher.publish, outputs)
        kill_point("window.visible")
        # Pass the attempt: on a retry another server may already have revised the window; then only our attempt is marked.
        unneeded = await self.ledger.published(
            {output.window_id: output.attempt for output in outputs}, retain=self.retain
        )
        kill_point("window.published")
        # Delete at once what no reader can have open: a first revision replaces no output, except an early one, and readers of a
        # table open no files.
        first = 0 if self.has_early else 1
        deletable_now = tuple(output for output in outputs if output.revision <= first or into_table)
        # The ledger returns each segment only once, so remember them in ``garbage`` before deleting.
        self.garbage.add(unneeded)

        def clean() -> int:
            self.store.for_each(self.publisher.clean, deletable_now)
            kill_point("window.cleaning")
            # What other sliding windows list stays for them.
            over = (unneeded,) if self.overlap else (window.entry.segments for window in committed)
            for segments in over:
                if len(segments) >= joined.SEGMENTS_PER_FILE:
                    self.garbage.add_unfinished(*joined.files(self.store, segments))
            return self.garbage.delete_now()

        freed_bytes = await asyncio.to_thread(clean)
        for output in outputs:
            if output not in deletable_now:
                self.delete_later(partial(self.publisher.clean, output))
        kill_point("window.cleaned")
        self.freed(freed_bytes)

    async def _into_table(self, committed: Sequence[Committed]) -> None:
        """Have the engine write each window into the table. Raises FileNotFoundError if a window's output is gone."""
        for entry, output in ((window.entry, window.output) for window in committed):
            first = f"{output.staging}/{output.files[0]}" if output.files else None
            if first is not None and not await asyncio.to_thread(self.store.exists, first):
                # The output was published and then deleted.
                raise FileNotFoundError(errno.ENOENT, f"{output.staging} does not hold the window's output")
            window, staging = self._window(entry), self.store.uri(output.staging)
            job = PublishJob(window, staging, output.files, output.rows_out, self.store.place, self.ledger_id)
            await self.engine.publish(job)
            kill_point("sink.written")

    def delete_later(self, delete: Callable[[], None]) -> None:
        """Call ``delete`` in a thread 5 s from now: readers may have open what was replaced."""
        self._replaced.put_nowait((self.clock.steady_ms() + _READING_MS, delete))

    async def clean_up(self) -> None:
        """Delete the files of replaced outputs 5 s after their replacement, until cancelled. Readers may have them open."""
        while True:
            due_ms, delete = await self._replaced.get()
            await self.clock.sleep(max(0, due_ms - self.clock.steady_ms()) / 1000)
            # A disk that fails must not stop this: a later start finds what is left.
            with contextlib.suppress(OSError):
                await asyncio.to_thread(delete)


def job_of(
    entry: WindowEntry,
    window: Window,
    attempt: int,
    staging: str,
    store: OutputStore,
    older: Mapping[str, str],
    views: tuple[FunctionView, ...] = (),
) -> WindowJob:
    """Return the job over a window's segments in ``store``; its output goes to ``staging``. Blocking. Raises OSError.

    ``older``: as ``WindowSteps.older``.
    """
    sizes = joined.to_read(store, entry.segments)
    by_ddl: dict[str, tuple[str, ...]] = {}
    for path in sizes:
        if (ddl := older.get(written(path).shape)) is not None:
            by_ddl[ddl] = (*by_ddl.get(ddl, ()), store.uri(path))
    return WindowJob(
        window,
        attempt,
        tuple(map(store.uri, sizes)),
        staging,
        sum(segment.rows for segment in entry.segments),
        sum(sizes.values()),
        store.place,
        by_ddl,
        views,
    )
