"""Makes buffered rows durable: write the segments, register them, and again without what the ledger refused.

Also cuts: both change which windows are open, so both live here and only the coordinator's one cycle calls them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import pyarrow as pa
import structlog
from msgspec import structs

from mldserver.base.clock import Clock
from mldserver.base.kill_points import kill_point
from mldserver.coordinator.cleanup import publish_late
from mldserver.coordinator.core.flush import BufferedBatch, FlushPlan, WindowRows, plan
from mldserver.coordinator.core.ledger_view import LedgerView
from mldserver.coordinator.core.open_windows import (
    CoordinatorRules,
    CutWindows,
    OpenWindows,
    WindowKey,
    windows_with,
)
from mldserver.effects import Effects
from mldserver.errors import LedgerError
from mldserver.jobs.side_tables import SideTables
from mldserver.ledger.contract import (
    BatchProgress,
    BatchStep,
    Flush,
    FlushResult,
    LedgerState,
    PositionUpdate,
    Segment,
    SegmentKind,
    StateFile,
    StoreState,
    StoreUpdate,
    WindowEntry,
    WindowState,
)
from mldserver.ledger.operations import Ledger
from mldserver.output import joined
from mldserver.output.layout import LETTERS, segment_path, state_path, written
from mldserver.output.store import Garbage, OutputStore
from mldserver.records import DeadLetter, Sequence
from mldserver.windows import Batches, TimeWindows, WindowSpec

log = structlog.get_logger("mldserver")

_LATE_WINDOWS = 1000
_LETTERS = 1000
"""Dead letters that are read at a time."""
_PAST_ALL = 10**9
"""A place behind every dead letter of a transaction."""
_AHEAD_SHARE = 10
"""Rows of windows that are too far ahead of the stream may take one part in so many of the disk's bound."""


@dataclass(frozen=True, slots=True)
class Flushed:
    """What a flush came to."""

    positions: tuple[PositionUpdate, ...]
    """The positions that moved."""
    bytes: int
    """Bytes of the segments that now wait for their window."""
    lost_shards: frozenset[str]
    """Shards whose rows were left out: they are owned elsewhere, or were opened again, or another shard of their store is lost."""
    stores: tuple[StoreUpdate, ...]
    """The stores that changed."""
    redriven: tuple[str, ...]
    """Shards with a store of which letters were redriven, once for each outcome."""


class Destination(Protocol):
    """Keeps letters durably, before the positions of their records move.

    A server that dies between the two has written them, and writes them again when their records come again: the id
    of a letter's document (``deadletters/destinations.py``) is the same both times.
    """

    async def store(self, letters: tuple[DeadLetter, ...]) -> tuple[DeadLetter, ...]:
        """Return when the letters are durable; return those that are too large for the place: the ledger keeps them.

        Raises OSError or LedgerError when the place is out of reach, also after some were written: all are given again.
        """

    async def close(self) -> None:
        """Let go of connections; no call may follow."""


@dataclass(kw_only=True, eq=False, slots=True)
class Flusher:
    """The writing side of the cycle. Not re-entrant: the coordinator calls it from one task."""

    spec: WindowSpec | None
    shape: str
    """The fingerprint of the rows'."""
    ledger: Ledger
    view: LedgerView
    store: OutputStore
    clock: Clock
    unique: Callable[[], str]
    """Gives a name part that no other file of this server has."""
    rules: CoordinatorRules
    letters: Destination | None = None
    """Where dead letters go; None: they stay in the ledger."""
    side_tables: SideTables | None = None
    """Where late rows or dead letters go; None: late rows go into the late dataset of the output folder."""
    open_windows: OpenWindows | None = field(init=False)
    """None for a handler without rows."""
    cut_windows: CutWindows = field(init=False)
    garbage: Garbage = field(init=False)
    rows_durable: int = field(init=False, default=0)
    rows_late: int = field(init=False, default=0)
    dead_letters: int = field(init=False, default=0)
    flushes: int = field(init=False, default=0)
    segments: int = field(init=False, default=0)
    """Files that were registered, and what they took."""
    uncut_bytes: int = field(init=False, default=0)
    """Bytes in memory of the batches that were registered since windows were cut."""
    segment_bytes: int = field(init=False, default=0)
    latest_letters: deque[DeadLetter] = field(init=False, default_factory=lambda: deque(maxlen=20))
    late_by_window: dict[str, int] = field(init=False, default_factory=dict)
    """Rows that came late, of the windows for which some came lately."""
    _merge_clock: int = field(init=False, default=0)
    _late: tuple[Segment, ...] = field(init=False, default=())
    _doubtful: tuple[Segment | StateFile, ...] = field(init=False, default=())
    """Files of a flush whose answer was lost."""
    _doubtful_stores: tuple[StoreUpdate, ...] = field(init=False, default=())
    _numbers: frozenset[int] = field(init=False, default=frozenset())
    """The numbers of the batches of the latest flush: of that one if it is in doubt."""
    _unanswered: int | None = field(init=False, default=None)
    """The ledger's version before a flush with dead letters of which it is not known whether it was registered; None: of
    each it is."""
    _small: dict[str, list[str]] = field(init=False, default_factory=dict)
    """Small segments of open windows that are not joined yet."""

    def __post_init__(self) -> None:
        self.open_windows = None if self.spec is None else OpenWindows(self.spec)
        self.cut_windows, self.garbage = CutWindows(self.rules), Garbage(self.store)

    @property
    def letter_rows(self) -> Callable[[tuple[DeadLetter, ...]], pa.Table] | None:
        """Returns dead letters as rows, if they go into a table; else None."""
        return None if self.side_tables is None else self.side_tables.letter_rows

    @property
    def garbage_bytes(self) -> int:
        """What files take on disk that are of no use, and could not be deleted yet."""
        return self.garbage.bytes + sum(file.bytes for file in self._doubtful)

    def follow_ledger(self) -> None:
        """Continue from what the ledger holds now, of other servers too. Never while a flush or a cut is in progress.

        The clock above all: a shard that comes from another server continues behind the rows that it has there.
        """
        state, tag = self.view.state, self.view.tag
        self._merge_clock = max(self._merge_clock, state.clock)
        # Also those of a registration whose answer was lost.
        self._late = tuple(segment for segment in state.late_segments if written(segment.path).tag == tag)
        if self.open_windows is None:
            return
        self._arrived(shard.effective_ms for shard in state.shards.values())
        if state.batch_progress.number >= self.open_windows.progress.number:
            self.open_windows.progress = state.batch_progress
        for entry in state.windows.values():
            if entry.state is WindowState.OPEN:
                self.open_windows.add(entry)
            else:
                if entry.window_id in self.open_windows:
                    self.uncut_bytes = 0  # another server has cut it
                self.open_windows.cut([entry.window_id])
        self.cut_windows.update(state, self.clock.steady_ms())

    def recovered(self, state: LedgerState) -> tuple[tuple[StoreUpdate, ...], frozenset[int]]:
        """Return the stores and the numbers of the batches of the last flush, if it was registered although its answer was lost."""
        if self._doubtful_stores and any(file.path in state.state_files for file in self._doubtful):
            return self._doubtful_stores, self._numbers
        return (), frozenset()

    def _arrived(self, times_ms: Iterable[int | None]) -> None:
        """Note arrival times: windows that begin further ahead of the latest than ``max_ahead`` are too far ahead."""
        windows, most_ms = self.open_windows, self.rules.max_ahead_ms
        latest_ms = max((ms for ms in times_ms if ms is not None), default=None)
        if windows is not None and most_ms is not None and latest_ms is not None:
            windows.ahead_from_ms = max(windows.ahead_from_ms or 0, latest_ms + most_ms)

    def _kind(self, key: WindowKey) -> SegmentKind:
        """Return what rows are for that are assigned to this window: of sliding windows, LATE if they are too late for any."""
        kinds = {self._kind_in(window) for window in windows_with(key, self.spec)}
        return next(
            kind for kind in (SegmentKind.LATE, SegmentKind.RECOMPUTE, SegmentKind.WINDOW) if kind in kinds
        )

    def _kind_in(self, window: WindowKey) -> SegmentKind:
        is_open = self.open_windows is not None and window.id in self.open_windows
        return SegmentKind.WINDOW if is_open else self.cut_windows.kind(window)

    async def flush(
        self,
        numbered: Mapping[int, BufferedBatch],
        reason: str,
        durable: Mapping[str, Sequence | None],
        stores: Mapping[str, tuple[StoreState, StoreUpdate]],
    ) -> Flushed:
        """Make batches durable. Raises OSError or LedgerError, and then nothing has changed.

        ``numbered``: the batches by their numbers in the buffer, in the order in which they were accepted.
        ``durable``: the shards' positions in the ledger, as far as this server knows; a shard that has another one
        there (an earlier flush whose answer was lost, or another server) is lost. ``stores``: see ``Sessions.stores``.
        """
        began_ms = self.clock.steady_ms()
        lost: frozenset[str] = frozenset()
        gone: frozenset[str] = frozenset()
        await self._clear_up()
        self._numbers = frozenset(numbered)
        batches = await self._without_stored(list(numbered.values()))
        self._arrived(batch.effective_ms for batch in batches)
        while True:
            # Of redriven letters all or none are registered.
            # A store is flushed whole or not at all.
            lost_stores = {batch.store for batch in batches if batch.shard_id in lost} - {""}
            live = [
                batch
                for batch in batches
                if batch.store not in lost_stores
                and (gone.isdisjoint(batch.redriven) if batch.redriven else batch.shard_id not in lost)
            ]
            # A thread plans: sorting millions of rows takes tens of milliseconds and would block the loop. If a
            # window expires meanwhile, the ledger refuses its rows.
            updates = {store_id: update for store_id, (_, update) in stores.items()}
            planned = await asyncio.to_thread(self._plan, live, durable, updates)
            segments = await self._write(planned)
            segments += await self._write_letters(planned, segments)
            state_file = await self._write_state(planned, segments, stores)
            result = await self._register(planned, segments, state_file)
            if result.registered:
                break
            await self.garbage.delete(_files(segments, state_file))
            lost |= result.lost_shards
            gone |= result.gone_letters
            self._refused(result)
        kill_point("flush.registered")
        self._unanswered = None
        late_rows = self.rows_late
        self._registered(planned, segments)
        self.uncut_bytes += sum(batch.bytes for batch in live)
        log.debug(
            "flush.done",
            rows=planned.rows,
            segments=len(segments),
            late_rows=self.rows_late - late_rows,
            bytes=sum(segment.bytes for segment in segments),
            shards=len(planned.positions),
            dead_letters=len(planned.effects.dead_letters),
            seconds=(self.clock.steady_ms() - began_ms) / 1000,
            reason=reason,
        )
        waiting = sum(segment.bytes for segment in segments if segment.kind is not SegmentKind.LATE)
        left_out = {batch.shard_id for batch in batches if batch.store in lost_stores}
        redriven = tuple(batch.shard_id for batch in live if batch.redriven and batch.store)
        return Flushed(planned.positions, waiting, lost | left_out, planned.stores, redriven)

    async def _clear_up(self) -> None:
        """Delete what the last flush wrote for a ledger that failed, unless it was registered after all.

        Only the ledger shows which segments were registered. So the flusher writes nothing until the ledger answers;
        otherwise a long outage would fill the disk with unnamed files.
        """
        if self._doubtful:
            named = (await self.ledger.peek()).paths()
            self.garbage.add(file for file in self._doubtful if file.path not in named)
            self._doubtful = self._doubtful_stores = ()
        await self.garbage.delete()

    async def _without_stored(self, batches: list[BufferedBatch]) -> list[BufferedBatch]:
        """Return the batches without the dead letters that a flush has stored whose answer was lost.

        Where a flush moves a shard's position, that shows whether it was registered. A handler that keeps its position may
        have dead letters before that moves: these are looked for themselves.
        """
        if self._unanswered is None:
            return batches
        stored: Counter[tuple[str, int]] = Counter()
        after: str | None = f"{self._unanswered}.{_PAST_ALL}"
        while page := await self.ledger.letters(after=after, limit=_LETTERS):
            stored.update((each.letter.record, each.letter.at_ms) for each in page)
            after = page[-1].id
        left: list[BufferedBatch] = []
        for batch in batches:
            letters = []
            for letter in () if batch.redriven else batch.effects.dead_letters:
                known = (letter.record, letter.at_ms)
                stored[known] -= 1
                if stored[known] < 0:
                    letters.append(letter)
            if not batch.redriven and len(letters) < len(batch.effects.dead_letters):
                rest = structs.replace(batch.effects, dead_letters=tuple(letters))
                batch = structs.replace(batch, effects=rest)  # noqa: PLW2901
            left.append(batch)
        return left

    async def _register(
        self, planned: FlushPlan, segments: tuple[Segment, ...], state_file: StateFile | None
    ) -> FlushResult:
        effects = planned.effects
        if self.letters is not None and effects.dead_letters:
            # What does not fit where dead letters go stays in the ledger.
            try:
                left = await self.letters.store(effects.dead_letters)
            except (OSError, LedgerError):
                await self.garbage.delete(_files(segments, state_file))
                raise
            effects = structs.replace(effects, dead_letters=left)
            kill_point("letters.stored")
        if self.letter_rows is not None:
            effects = structs.replace(effects, dead_letters=())  # they are a segment
        effects = Effects.without_rows([effects, planned.redriven_effects])
        windows, step, every_ms = self.open_windows, None, None
        if windows is not None and isinstance(windows.spec, Batches):
            step = BatchStep(windows.progress, planned.progress, windows.spec.max_rows)
        elif isinstance(self.spec, TimeWindows):
            every_ms = self.spec.every_ms
        kill_point("flush.registering")
        try:
            return await self.ledger.register(
                Flush(
                    planned.positions,
                    segments,
                    effects,
                    planned.clock,
                    step,
                    planned.redriven,
                    planned.stores,
                    state_file,
                    every_ms,
                )
            )
        except LedgerError:
            self._doubtful, self._doubtful_stores = _files(segments, state_file), planned.stores
            if effects.dead_letters and self._unanswered is None:
                self._unanswered = self.view.state.version
            raise

    def _refused(self, result: FlushResult) -> None:
        self.cut_windows.refused(result)
        if self.open_windows is not None:
            # ``batches``: the next rows go to a window behind those that another server has cut.
            self.open_windows.cut(result.cut_windows)
        names = ("lost_shards", "cut_windows", "expired_windows", "gone_letters")
        log.warning("flush.refused", **{name: sorted(getattr(result, name)) for name in names})

    def _plan(
        self,
        batches: list[BufferedBatch],
        durable: Mapping[str, Sequence | None],
        stores: Mapping[str, StoreUpdate],
    ) -> FlushPlan:
        windows = self.open_windows
        planned = plan(
            batches,
            spec=self.spec,
            clock=self._merge_clock,
            progress=BatchProgress() if windows is None else windows.progress,
            now_ms=self.clock.now_ms(),
            durable=durable,
            kind=self._kind,
            stores=stores,
        )
        keys = [file.key for file in planned.files if file.kind is SegmentKind.WINDOW]
        most_bytes = self.rules.segment_disk_bytes // _AHEAD_SHARE
        too_many = frozenset() if windows is None else windows.leave_out_ahead(keys, most_bytes)
        if not too_many:
            return planned
        files = (
            replace(file, kind=SegmentKind.LATE) if file.key.id in too_many else file
            for file in planned.files
        )
        return replace(planned, files=tuple(files))

    async def _write(self, planned: FlushPlan) -> tuple[Segment, ...]:
        """Write each file. Raises OSError, and then deletes what was written."""
        files = {
            segment_path(
                file.key.id,
                self._merge_clock,
                self.unique(),
                kind=file.kind,
                tag=self.view.tag,
                shape=self.shape,
            ): file
            for file in planned.files
        }
        done: list[Segment] = []

        def write(item: tuple[str, WindowRows]) -> Segment:
            path, file = item
            size = self.store.write(path, file.rows)
            kill_point("segment.written")
            key = file.key
            segment = Segment(path, key.id, len(file), size, key.start_ms, key.end_ms, file.kind)
            done.append(segment)
            return segment

        try:
            return await asyncio.to_thread(self.store.for_each, write, files.items()) if files else ()
        except OSError:
            # A full disk must not fill further with what no ledger entry will ever name.
            self.garbage.add_unfinished(*files)
            await self.garbage.delete(done)
            raise

    async def _write_letters(self, planned: FlushPlan, segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
        """Write the dead letters that go into a table. Raises OSError, and then deletes all that the flush has written."""
        letters = planned.effects.dead_letters
        if self.letter_rows is None or not letters:
            return ()
        kind = SegmentKind.LATE
        path = segment_path(
            LETTERS, self._merge_clock, self.unique(), kind=kind, tag=self.view.tag, shape=self.shape
        )
        try:
            size = await asyncio.to_thread(self.store.write, path, self.letter_rows(letters))
        except OSError:
            self.garbage.add_unfinished(path)
            await self.garbage.delete(segments)
            raise
        kill_point("segment.written")
        return (Segment(path, LETTERS, len(letters), size, kind=kind),)

    async def _write_state(
        self,
        planned: FlushPlan,
        segments: tuple[Segment, ...],
        stores: Mapping[str, tuple[StoreState, StoreUpdate]],
    ) -> StateFile | None:
        """Write the changes of state. Raises OSError, and then deletes all that the flush has written."""
        if planned.state is None:
            return None
        path = state_path(self._merge_clock, self.unique(), tag=self.view.tag)
        try:
            size = await asyncio.to_thread(self.store.write, path, planned.state)
        except OSError:
            self.garbage.add_unfinished(path)
            await self.garbage.delete(segments)
            raise
        kill_point("state.written")
        needed = {update.store_id: (stores[update.store_id][0].key_range,) for update in planned.stores}
        return StateFile(path, needed, len(planned.state), size)

    def _registered(self, planned: FlushPlan, segments: tuple[Segment, ...]) -> None:
        self._merge_clock = planned.clock
        if self.open_windows is not None:
            self.open_windows.progress = planned.progress
            taken = (file for file in planned.files if file.kind is not SegmentKind.LATE)
            windows = [window for file in taken for window in windows_with(file.key, self.spec)]
            self.open_windows.opened(each for each in windows if self._kind_in(each) is SegmentKind.WINDOW)
            again = [each.id for each in windows if each.id not in self.open_windows]
            self.cut_windows.registered(again, self.clock.steady_ms())
        self.rows_durable += planned.rows
        self.flushes += 1
        self.segments += len(segments)
        self.segment_bytes += sum(segment.bytes for segment in segments)
        self.dead_letters += len(planned.effects.dead_letters)
        self.latest_letters.extend(planned.effects.dead_letters)
        late = [segment for segment in segments if segment.kind is not SegmentKind.WINDOW]
        for segment in late:
            if segment.window_id == LETTERS:
                continue
            self.rows_late += segment.rows
            rows = self.late_by_window.pop(segment.window_id, 0) + segment.rows
            self.late_by_window[segment.window_id] = rows  # behind the others: the first is the one to forget
            if len(self.late_by_window) > _LATE_WINDOWS:
                del self.late_by_window[next(iter(self.late_by_window))]
            log.warning("window.late", window=segment.window_id, rows=segment.rows, kind=str(segment.kind))
        for segment in segments:
            if segment.kind is SegmentKind.WINDOW and segment.bytes <= joined.SMALL_BYTES:
                self._small.setdefault(segment.window_id, []).append(segment.path)
        self._late += tuple(segment for segment in late if segment.kind is SegmentKind.LATE)

    async def publish_late(self) -> None:
        """Make registered late rows visible, or hand them to their table. Raises OSError or LedgerError; repeatable."""
        if self._late:
            await publish_late(self._late, self.ledger, self.store, self.side_tables)
            self._late = ()

    async def join_small(self) -> None:
        """Join small segments of the open window that has the most, if they are enough for one file."""
        open_windows = self.open_windows or ()
        self._small = {window: paths for window, paths in self._small.items() if window in open_windows}
        paths = max(self._small.values(), key=len, default=[])
        if len(paths) < joined.SEGMENTS_PER_FILE:
            return
        members = paths[: joined.SEGMENTS_PER_FILE]
        del paths[: joined.SEGMENTS_PER_FILE]
        # If the join fails, Spark reads the small segments. The next flush reports a failing disk, and the window a
        # damaged segment.
        with contextlib.suppress(OSError, pa.ArrowException):
            await asyncio.to_thread(joined.join, self.store, members)

    async def cut(
        self, watermark_ms: int | None, *, close_all: bool, gather: bool = False
    ) -> tuple[WindowEntry, ...]:
        """Cut every open window that may close, oldest first, then those that are due to be computed again.

        ``gather``: late rows wait for more late rows, even if every window closes.
        A window whose present revision is not published yet cannot be cut again: it stays due.
        """
        if self.open_windows is None:
            return ()
        now_ms = self.clock.steady_ms()
        closable = self.open_windows.closable(
            watermark_ms=watermark_ms, now_ms=now_ms, wall_ms=self.clock.now_ms(), close_all=close_all
        )
        due = self.cut_windows.due(now_ms, at_once=close_all and not gather)
        if not closable and not due:
            return ()
        kill_point("revision.cutting" if due else "window.cutting")
        all_until_ms = self.open_windows.latest_end_ms(closable) if self.rules.in_order else None
        entries = await self.ledger.cut((*closable, *due), all_until_ms=all_until_ms)
        kill_point("revision.cut" if due else "window.cut")
        self.uncut_bytes = 0
        cut = (*closable, *(entry.window_id for entry in entries))
        self.open_windows.cut(cut)
        self.cut_windows.cut(cut)
        for entry in entries:
            log.debug(
                "window.cut",
                window=entry.window_id,
                revision=entry.revision,
                segments=len(entry.segments),
                rows=sum(segment.rows for segment in entry.segments),
            )
        return entries


def _files(segments: tuple[Segment, ...], state_file: StateFile | None) -> tuple[Segment | StateFile, ...]:
    """Return all files of a flush."""
    return segments if state_file is None else (*segments, state_file)
