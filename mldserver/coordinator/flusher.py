"""Makes buffered rows durable: write the segments, register them, and again without what the ledger refused.

Also cuts: both change which windows are open, so both live here and only the coordinator's one cycle calls them.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from mldserver.coordinator.flush import BufferedBatch, FlushPlan, plan
from mldserver.coordinator.layout import segment_path
from mldserver.coordinator.recovery import publish_late
from mldserver.coordinator.windows import OpenWindows, WindowKey, fits
from mldserver.errors import LedgerError, OperatorError
from mldserver.state.ledger import BatchProgress, Flush, PositionUpdate, Segment, WindowState

if TYPE_CHECKING:
    from collections.abc import Callable

    from mldserver.clock import Clock
    from mldserver.coordinator.store import OutputStore
    from mldserver.coordinator.windows import WindowSpec
    from mldserver.state.ledger import Ledger, LedgerState, WindowEntry

__all__ = ["Flushed", "Flusher"]

log = structlog.get_logger("mldserver")


@dataclass(frozen=True, slots=True)
class Flushed:
    """What a flush came to."""

    positions: tuple[PositionUpdate, ...]
    """The positions that moved."""
    bytes: int
    """Bytes of the segments that now wait for their window."""
    lost_shards: frozenset[str]
    """Shards whose rows were left out: they are owned elsewhere, or were opened again."""


class Flusher:
    """The writing side of the cycle. Not re-entrant: the coordinator calls it from one task."""

    def __init__(
        self,
        *,
        spec: WindowSpec | None,
        ledger: Ledger,
        store: OutputStore,
        clock: Clock,
        unique: Callable[[], str],
    ) -> None:
        """``unique`` gives a name part that no other file has."""
        self._spec = spec
        self._ledger = ledger
        self._store = store
        self._clock = clock
        self._unique = unique
        self._merge_clock = 0
        self._cut: set[str] = set()
        self._cut_below_ms: int | None = None
        self._late: tuple[Segment, ...] = ()
        self._doubtful: tuple[str, ...] = ()
        self.open_windows: OpenWindows | None = None
        self.failing = False
        self.rows_durable = 0
        self.rows_late = 0
        self.dead_letters = 0

    def restore(self, state: LedgerState, open_windows: OpenWindows | None) -> None:
        """Go on from what the ledger holds. Raises OperatorError when its windows were cut in another way."""
        self._merge_clock = state.clock
        self._cut_below_ms = state.cut_below_ms
        self.open_windows = open_windows
        if open_windows is None:
            return
        for entry in state.windows.values():
            key = WindowKey(entry.window_id, entry.start_ms, entry.end_ms)
            if not fits(key, open_windows.spec):
                raise OperatorError(
                    f"The output folder holds windows of another kind or size than the handler's: {entry.window_id}.",
                    advice="Give the changed handler an output folder of its own, or the windows that it had.",
                    window=entry.window_id,
                )
            if entry.state is WindowState.OPEN:
                open_windows.opened([key])
            else:
                self._cut.add(entry.window_id)
                open_windows.cut([entry.window_id])

    def _is_cut(self, key: WindowKey) -> bool:
        below = self._cut_below_ms
        return key.id in self._cut or (below is not None and key.end_ms is not None and key.end_ms <= below)

    async def flush(self, batches: list[BufferedBatch], reason: str) -> Flushed:
        """Make batches durable. Raises OSError or LedgerError, and then nothing has changed."""
        began_ms = self._clock.now_ms()
        lost: frozenset[str] = frozenset()
        await self._clear_up()
        while True:
            live = [batch for batch in batches if batch.shard_id not in lost]
            planned = self._plan(live)
            segments = await self._write(planned)
            try:
                result = await self._ledger.register(
                    Flush(planned.positions, segments, planned.dead_letters, planned.clock, planned.progress)
                )
            except LedgerError:
                self._doubtful = tuple(segment.path for segment in segments)
                raise
            if result.registered:
                break
            log.warning(
                "flush.refused",
                lost_shards=sorted(result.lost_shards),
                cut_windows=sorted(result.cut_windows),
            )
            await asyncio.to_thread(self._discard, [segment.path for segment in segments])
            lost |= result.lost_shards
            self._cut |= result.cut_windows
        self._registered(planned, segments)
        log.debug(
            "flush.done",
            rows=planned.rows,
            segments=len(segments),
            late_rows=sum(segment.rows for segment in segments if segment.late),
            bytes=sum(segment.bytes for segment in segments),
            shards=len(planned.positions),
            dead_letters=len(planned.dead_letters),
            seconds=(self._clock.now_ms() - began_ms) / 1000,
            reason=reason,
        )
        waiting = sum(segment.bytes for segment in segments if not segment.late)
        return Flushed(planned.positions, waiting, lost)

    async def _clear_up(self) -> None:
        """Delete what the last flush wrote for a ledger that failed.

        Not before it answers again: until then nobody can tell that the files are not named; and nothing is written
        meanwhile, or a ledger that stays away would fill the disk with files that nobody names.
        """
        if self._doubtful:
            await self._ledger.register(Flush((), clock=self._merge_clock))
            await asyncio.to_thread(self._discard, list(self._doubtful))
            self._doubtful = ()

    def _plan(self, batches: list[BufferedBatch]) -> FlushPlan:
        return plan(
            batches,
            spec=self._spec,
            clock=self._merge_clock,
            progress=self.open_windows.progress if self.open_windows is not None else BatchProgress(),
            now_ms=self._clock.now_ms(),
            is_cut=self._is_cut,
        )

    async def _write(self, planned: FlushPlan) -> tuple[Segment, ...]:
        segments: list[Segment] = []
        for file in planned.files:
            key = file.key
            path = segment_path(key.id, self._merge_clock, self._unique(), late=file.late)
            try:
                size = await asyncio.to_thread(self._store.write, path, file.rows)
            except OSError:
                # A full disk must not fill further with what no ledger entry will ever name.
                await asyncio.to_thread(self._discard, [path, *(segment.path for segment in segments)])
                raise
            segments.append(
                Segment(path, key.id, len(file.rows), size, key.start_ms, key.end_ms, late=file.late)
            )
        return tuple(segments)

    def _discard(self, paths: list[str]) -> None:
        for path in paths:
            self._store.delete(path)

    def _registered(self, planned: FlushPlan, segments: tuple[Segment, ...]) -> None:
        self._merge_clock = planned.clock
        if self.open_windows is not None:
            self.open_windows.progress = planned.progress
            self.open_windows.opened(file.key for file in planned.files if not file.late)
        self.rows_durable += planned.rows
        self.dead_letters += len(planned.dead_letters)
        late = tuple(segment for segment in segments if segment.late)
        for segment in late:
            self.rows_late += segment.rows
            log.warning("window.late", window=segment.window_id, rows=segment.rows)
        self._late += late

    async def publish_late(self) -> None:
        """Make registered late rows visible. Raises OSError or LedgerError; repeatable."""
        if self._late:
            await publish_late(self._late, self._ledger, self._store)
            self._late = ()

    async def cut(self, watermark_ms: int | None, *, close_all: bool) -> tuple[WindowEntry, ...]:
        """Cut every open window that may close, oldest first."""
        if self.open_windows is None:
            return ()
        closable = self.open_windows.closable(
            watermark_ms=watermark_ms, now_ms=self._clock.now_ms(), close_all=close_all
        )
        if not closable:
            return ()
        entries = await self._ledger.cut(closable)
        self._cut.update(closable)
        self.open_windows.cut(closable)
        for entry in entries:
            log.debug(
                "window.cut",
                window=entry.window_id,
                segments=len(entry.segments),
                rows=sum(segment.rows for segment in entry.segments),
            )
        return entries

    async def prune(self, windows_before_ms: int, shards_before_ms: int) -> None:
        """Forget what is older than its retention."""
        if self.open_windows is not None:
            # A ``batches`` window that was cut for its age moved the progress here, and in the ledger only by its
            # entry: without that its number would be given again.
            await self._ledger.register(
                Flush((), clock=self._merge_clock, batch_progress=self.open_windows.progress)
            )
        await self._ledger.prune(windows_before_ms=windows_before_ms, shards_before_ms=shards_before_ms)
