"""Writes late rows and dead letters into tables of their own, each segment exactly once (``late_sink``, ``dead_letters``).

    registered ──copy with the table's columns──▶ staged ──engine.publish──▶ in the table ──late_published──▶ deleted

For the table, a segment is the first revision of a window with an id of its own. A table accepts that once, from
whatever server (``sinks/``). So every step may be repeated, and two servers that took over a dead one may do the same.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Final

import structlog

from mldserver.base.backoff import Backoff
from mldserver.base.kill_points import kill_point
from mldserver.engine_jobs import REVISION, WINDOW, Content, PublishJob
from mldserver.errors import OperatorError, fields_to_log
from mldserver.jobs.engine import RETRIED_ERRORS, RETRY_SECONDS
from mldserver.ledger.contract import Segment
from mldserver.output.layout import LETTERS, attempt_path, writer_tag
from mldserver.windows import Window, as_window

if TYPE_CHECKING:
    import pyarrow as pa

    from mldserver.jobs.steps import WindowSteps
    from mldserver.records import DeadLetter

log = structlog.get_logger("mldserver")

_FILE: Final = "late.parquet"


class SideTables:
    """The segments that wait for their tables, oldest first. One that cannot be written holds those behind it."""

    def __init__(
        self,
        steps: WindowSteps,
        *,
        tables: Mapping[Content, str],
        window_columns: tuple[str, str] | None,
        random: Callable[[], float],
        letter_rows: Callable[[tuple[DeadLetter, ...]], pa.Table] | None = None,
        log_error_messages: bool = True,
        retry_seconds: tuple[float, float] = RETRY_SECONDS,
    ) -> None:
        """``tables``: as a log shows them. ``window_columns``: names of the columns of a window's start and end.

        ``letter_rows`` returns dead letters as rows; None: they have no table. ``random`` gives [0, 1) for jitter.
        ``log_error_messages`` and ``retry_seconds``: see ``WindowRunner``.
        """
        self.tables, self.letter_rows = tables, letter_rows
        self._steps, self._window_columns = steps, window_columns
        self._random, self._backoff = random, Backoff(*retry_seconds)
        self._quote_errors = log_error_messages
        self._waiting: dict[str, Segment] = {}
        self._arrived, self._idle = asyncio.Event(), asyncio.Event()
        self._idle.set()
        self.idle = self._idle.wait
        """Returns when no segment waits."""
        self._written = ""
        """The path of the oldest segment, if it is in the table and the ledger knows that."""
        self.trouble: str | None = None
        """Why the oldest segment could not be written; None: nothing has failed since the last one was."""

    @property
    def is_idle(self) -> bool:
        """Whether no segment waits."""
        return not self._waiting

    def submit(self, segments: Iterable[Segment]) -> tuple[Segment, ...]:
        """Take segments that the ledger holds as late; return those that have no table. Twice is once."""
        left = []
        for segment in segments:
            if content_of(segment) in self.tables:
                self._waiting.setdefault(segment.path, segment)
            else:
                left.append(segment)
        if self._waiting:
            self._idle.clear()
            self._arrived.set()
        return tuple(left)

    async def run(self) -> None:
        """Write what waits into its table, until cancelled."""
        while True:
            await self._arrived.wait()
            segment = next(iter(self._waiting.values()))
            content = content_of(segment)
            try:
                await self._write(segment)
            except RETRIED_ERRORS as error:
                fields = fields_to_log(error, quotes=self._quote_errors)
                what = content.replace("_", " ")
                self.trouble = f"{what} cannot be written into {self.tables[content]}: {fields['what']}"
                delay = self._backoff.failed(self._random())
                log.warning(
                    "table.failed",
                    content=content,
                    window=segment.window_id,
                    attempt=self._backoff.failures,
                    delay_seconds=round(delay, 3),
                    **fields,
                )
                await self._steps.clock.sleep(delay)
                continue
            self.trouble = None
            self._backoff.worked()
            del self._waiting[segment.path]
            if not self._waiting:
                self._arrived.clear()
                self._idle.set()

    async def _write(self, segment: Segment) -> None:
        """Write a segment into the table, unless another server has, and delete it. Raises ``RETRIED_ERRORS``."""
        steps = self._steps
        number = hashlib.sha256(segment.path.encode()).hexdigest()[:16]
        kind = "" if content_of(segment) == "dead_letters" else "late-"
        name, bounds = f"{kind}{segment.window_id}-{number}", (segment.start_ms, segment.end_ms)
        window = as_window(name, *bounds, revision=1, pipeline=steps.pipeline)
        tag = writer_tag(steps.ledger_id, steps.ledger.server_id)
        staging = attempt_path(steps.publisher.root, window.id, 1, tag)
        if self._written != segment.path:
            await self._publish(segment, window, staging)
            self._written = segment.path  # if it cannot be deleted, only that is tried again
        await asyncio.to_thread(self._delete, segment.path, staging)

    async def _publish(self, segment: Segment, window: Window, staging: str) -> None:
        """Bring a segment into the table, and tell the ledger. Raises ``RETRIED_ERRORS``."""
        steps, began_ms = self._steps, self._steps.clock.steady_ms()
        try:
            await asyncio.to_thread(self._stage, segment, window, staging)
        except FileNotFoundError:
            if segment.path in (await steps.ledger.peek()).paths():
                raise
            return  # another server has written it
        kill_point("late.staged")
        place = (steps.store.uri(staging), (_FILE,), segment.rows, steps.store.place, steps.ledger_id)
        content = content_of(segment)
        await steps.engine.publish(PublishJob(window, *place, content=content))
        kill_point("late.moved")
        await steps.ledger.late_published((segment.path,))
        kill_point("late.published")
        log.info(
            "table.written",
            content=content,
            window=segment.window_id,
            rows=segment.rows,
            path=self.tables[content],
            seconds=(steps.clock.steady_ms() - began_ms) / 1000,
        )

    def _stage(self, segment: Segment, window: Window, staging: str) -> None:
        """Copy a segment with the columns that the table adds. Raises OSError."""
        import pyarrow as pa  # noqa: PLC0415  # a server without this setting never needs it

        store = self._steps.store
        try:
            with store.parquet(segment.path) as file:
                rows = file.read()
        except pa.ArrowInvalid as error:
            raise OperatorError(
                f"The file {store.uri(segment.path)} is damaged: {error}.",
                did="It stays where it is, and those behind it wait.",
                advice="Restore it from a backup.",
            ) from error
        bounds = zip(self._window_columns or (), (window.start, window.end), strict=False)
        added = {name: pa.scalar(at, pa.timestamp("us", "UTC")) for name, at in bounds if at is not None}
        added |= {WINDOW: pa.scalar(window.id), REVISION: pa.scalar(window.revision, pa.int32())}
        taken = {name.lower() for name in rows.column_names}
        for name, value in added.items():
            if name.lower() not in taken:
                rows = rows.append_column(name, pa.repeat(value, len(rows)))
        # A former try may have left its file, which may be the table's file too, under another name: not to be written into.
        store.delete(staging)
        store.write(f"{staging}/{_FILE}", rows, microseconds=True)

    def _delete(self, *paths: str) -> None:
        store = self._steps.store
        for path in paths:
            store.delete(path)
            store.drop_empty(path.rpartition("/")[0])


def content_of(segment: Segment) -> Content:
    """Return what a late segment holds."""
    return "dead_letters" if segment.window_id == LETTERS else "late_rows"
