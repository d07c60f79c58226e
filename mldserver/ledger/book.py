"""A ledger in memory: what it holds at one version, and drafts of the next one. No I/O, no clock.

A ``Book`` is what all transactions up to ``version`` came to. A rule (``operations.py`` names them) reads and changes a
``Draft`` over it; the draft's ``Changes`` are what a store writes down, and what brings every server's book to the next
version. A draft that is thrown away has changed nothing.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from mldserver.ledger.contract import (
    BatchProgress,
    FunctionLife,
    LedgerState,
    Segment,
    ServerState,
    ShardState,
    StateFile,
    StoreState,
    WindowEntry,
    WindowState,
)
from mldserver.records import DeadLetter

_T = TypeVar("_T")

KINDS: Final = ("shards", "windows", "servers", "late", "letters", "shapes", "stores", "state_files")
"""The kinds of rows in addition to the totals: each a mapping by key, in a book, its drafts and their changes."""


@dataclass(frozen=True, slots=True)
class LedgerTotals:
    """Values that a ledger holds once."""

    clock: int = 0
    dead_letters: int = 0
    lives: int = 0
    """How often a server has registered."""
    cut_below_ms: int | None = None
    batch_progress: BatchProgress = field(default_factory=BatchProgress)
    ledger_id: str = ""
    folder: str | None = None
    claims: int = 0
    shape: str = ""
    draining: bool = False
    life: FunctionLife = field(default_factory=FunctionLife)


@dataclass(frozen=True, slots=True)
class LetterItem:
    """What became of the dead letters of one transaction: a bit for each, by its place in it.

    There may be tens of thousands: a transaction that takes some of them writes them all down again.
    """

    count: int
    wanted: int = 0
    """To be redriven."""
    gone: int = 0

    @property
    def there(self) -> int:
        """Those that are not gone."""
        return (1 << self.count) - 1 & ~self.gone


@dataclass(frozen=True, slots=True)
class Changes:
    """What one transaction writes: the new row by its key, None for one that goes."""

    totals: LedgerTotals | None = None
    shards: Mapping[str, ShardState | None] = field(default_factory=dict)
    windows: Mapping[str, WindowEntry | None] = field(default_factory=dict)
    servers: Mapping[str, ServerState | None] = field(default_factory=dict)
    late: Mapping[str, Segment | None] = field(default_factory=dict)
    """Files of the late dataset that may not be visible yet, by path, in order of registration."""
    letters: Mapping[str, LetterItem | None] = field(default_factory=dict)
    """By the version that stored them."""
    shapes: Mapping[str, str | None] = field(default_factory=dict)
    stores: Mapping[str, StoreState | None] = field(default_factory=dict)
    state_files: Mapping[str, StateFile | None] = field(default_factory=dict)
    """By path."""

    def __bool__(self) -> bool:
        return self.totals is not None or any(getattr(self, kind) for kind in KINDS)


class Book:
    """What a ledger holds at one version."""

    def __init__(self) -> None:
        self.version = 0
        self.news_from = 0
        """A reader behind this version must read everything: the book does not know all older changes."""
        self.totals = LedgerTotals()
        self.shards: dict[str, ShardState] = {}
        self.windows: dict[str, WindowEntry] = {}
        self.servers: dict[str, ServerState] = {}
        self.late: dict[str, Segment] = {}
        self.letters: dict[str, LetterItem] = {}
        self.shapes: dict[str, str] = {}
        self.stores: dict[str, StoreState] = {}
        self.state_files: dict[str, StateFile] = {}
        self.needed_files: dict[str, None] = {}
        """The paths of the state files that a store needs: few among those that wait for their deletion."""
        self.changed: dict[str, int] = {}
        """The version that changed each window last, in order of versions."""
        self.retained: list[tuple[int, str]] = []
        """Published windows that are retained, with the time of it (ms): those published longest ago first."""
        self.over: list[tuple[int, str]] = []
        """Published windows that are not retained, in the same way."""
        self.paths: Counter[str] = Counter()
        """In how many windows each segment is listed, by its path."""
        self._unpublished: Counter[str] = Counter()
        """In how many of these that are not published."""
        self._open: Counter[str] = Counter()
        """In how many of these that are open."""
        self.unfinished: set[str] = set()
        """Windows that are cut or committed: the few that change owners, among a day of retained ones."""
        self.segment_bytes = self.unpublished_bytes = self.open_bytes = 0
        """Bytes of the segments of all windows; of those that are not published; of those that are open."""
        self.redrives = 0
        """The number of letters marked for a redrive."""

    def apply(self, changes: Changes) -> None:
        """Go on to the next version."""
        self.version += 1
        self.totals = changes.totals or self.totals
        for window_id, entry in changes.windows.items():
            self._turn(self.windows.get(window_id), entry)
            before = self.changed.pop(window_id, 0)
            if entry is None:
                self.news_from = max(self.news_from, before)
            else:
                self.changed[window_id] = self.version
        for key, item in changes.letters.items():
            known = self.letters.get(key)
            self.redrives += item.wanted.bit_count() if item else 0
            self.redrives -= known.wanted.bit_count() if known else 0
        for path, file in changes.state_files.items():
            if file is not None and file.needed:
                self.needed_files[path] = None
            else:
                self.needed_files.pop(path, None)
        for kind in KINDS:
            rows = getattr(self, kind)
            for key, row in getattr(changes, kind).items():
                if row is None:
                    rows.pop(key, None)
                else:
                    rows[key] = row

    def restored(self, version: int) -> None:
        """Be of a version without having seen those before it."""
        self.version = self.news_from = version
        self.changed = {}

    def _turn(self, before: WindowEntry | None, entry: WindowEntry | None) -> None:
        """Keep what is known of all windows together up with one that changes."""
        old, new = segments_of(before), segments_of(entry)
        if (
            before is not None
            and entry is not None
            and before.state is entry.state
            and new[: len(old)] == old
        ):
            self._list(entry, new[len(old) :], 1)
        else:
            self._list(before, old, -1)
            self._list(entry, new, 1)
        for row, sign in ((before, -1), (entry, 1)):
            if row is None:
                continue
            if row.state in {WindowState.CUT, WindowState.COMMITTED}:
                (self.unfinished.add if sign > 0 else self.unfinished.discard)(row.window_id)
            elif row.state is WindowState.PUBLISHED:
                published, at = (
                    self.retained if row.retained else self.over,
                    (row.published_ms or 0, row.window_id),
                )
                if sign > 0:  # the latest, nearly always: at no cost
                    bisect.insort(published, at)
                else:
                    del published[bisect.bisect_left(published, at)]

    def _list(self, entry: WindowEntry | None, segments: tuple[Segment, ...], count: int) -> None:
        """Note that a window lists segments (``count`` is 1), or lists them no longer (-1)."""
        if entry is None:
            return
        self.segment_bytes += _listed(self.paths, segments, count)
        if entry.state is not WindowState.PUBLISHED:
            self.unpublished_bytes += _listed(self._unpublished, segments, count)
        if entry.state is WindowState.OPEN:
            self.open_bytes += _listed(self._open, segments, count)

    @property
    def retained_bytes(self) -> int:
        """Bytes of the segments that only published windows list."""
        return self.segment_bytes - self.unpublished_bytes

    @property
    def time_ms(self) -> int | None:
        """The ledger's time, as far as it was written down: of the latest heartbeat or publication; None: of neither."""
        beats = [server.beat_ms for server in self.servers.values()]
        published = [times[-1][0] for times in (self.retained, self.over) if times]
        again = [self.windows[window_id].published_ms for window_id in self.unfinished]
        return max((*beats, *published, *(ms for ms in again if ms is not None)), default=None)

    def everything(self) -> Changes:
        """Return the changes that make this book from an empty one."""
        return Changes(self.totals, **{kind: getattr(self, kind).copy() for kind in KINDS})

    def state(self, since: int = 0) -> LedgerState:
        """Return what the ledger holds, in collections that are the caller's; of windows the news since a version."""
        if not self.news_from <= since <= self.version:
            since = 0
        if since:
            latest = itertools.takewhile(lambda change: change[1] > since, reversed(self.changed.items()))
            names = reversed([window_id for window_id, _ in latest])
            windows = {window_id: self.windows[window_id] for window_id in names}
        else:
            # All but those to which nothing can happen any more.
            windows = {
                window_id: entry
                for window_id, entry in self.windows.items()
                if entry.retained or entry.state is not WindowState.PUBLISHED
            }
        return LedgerState(
            shards=self.shards.copy(),
            windows=windows,
            late_segments=tuple(self.late.values()),
            clock=self.totals.clock,
            batch_progress=self.totals.batch_progress,
            dead_letters=self.totals.dead_letters,
            redrives=self.redrives,
            servers=self.servers.copy(),
            cut_below_ms=self.totals.cut_below_ms,
            ledger_id=self.totals.ledger_id,
            folder=self.totals.folder,
            claims=self.totals.claims,
            shape=self.totals.shape,
            shapes=self.shapes.copy(),
            draining=self.totals.draining,
            life=self.totals.life,
            version=self.version,
            since=since,
            segment_bytes=self.segment_bytes,
            open_bytes=self.open_bytes,
            under_way={window_id: self.windows[window_id] for window_id in self.unfinished},
            time_ms=self.time_ms,
            stores=self.stores.copy(),
            state_files=self.state_files.copy(),
        )


def segments_of(entry: WindowEntry | None) -> tuple[Segment, ...]:
    """Return all segments of a window in order of registration: those that wait are the last."""
    if entry is None:
        return ()
    return entry.segments + entry.pending if entry.pending else entry.segments


def _listed(counts: Counter[str], segments: tuple[Segment, ...], count: int) -> int:
    """Add to the counts of segments; return by how much the bytes of those that are counted at all grow."""
    grown = 0
    for segment in segments:
        before = counts[segment.path]
        after = before + count
        if not before or not after:
            grown += count * segment.bytes
        if after:
            counts[segment.path] = after
        else:
            del counts[segment.path]
    return grown


@dataclass(eq=False, slots=True)
class Overlay(Generic[_T]):
    """Rows by key, with changes that the rows underneath do not see."""

    base: Mapping[str, _T]
    changed: dict[str, _T | None] = field(default_factory=dict)

    def get(self, key: str) -> _T | None:
        """Return a row as the draft has it; None when there is none."""
        return self.changed[key] if key in self.changed else self.base.get(key)

    def put(self, key: str, row: _T) -> None:
        """Write a row; an equal row does not count as a change."""
        if self.get(key) != row:
            self.changed[key] = row

    def drop(self, key: str) -> None:
        """Remove a row; a missing row does not count as a change."""
        if self.get(key) is not None:
            self.changed[key] = None


class Draft:
    """The next version of a book, while a rule makes it."""

    def __init__(self, book: Book) -> None:
        self.book = book
        self.totals = book.totals
        self.shards = Overlay(book.shards)
        self.windows = Overlay(book.windows)
        self.servers = Overlay(book.servers)
        self.late = Overlay(book.late)
        self.letters = Overlay(book.letters)
        self.shapes = Overlay(book.shapes)
        self.stores = Overlay(book.stores)
        self.state_files = Overlay(book.state_files)
        self.paths: set[str] = set()
        """Paths of segments that windows took in."""
        self.released: Counter[str] = Counter()
        """How many windows list each segment no longer, by its path."""
        self.dead_letters: tuple[DeadLetter, ...] = ()
        """Stored together with the changes."""
        self.declares = False
        """Whether a server declares a shape in it, and with it the pipeline's name."""
        self.spent: list[int] = []
        """Versions of whose letters none is left: their items go."""

    def changes(self) -> Changes:
        """Return what differs from the book."""
        totals = None if self.totals == self.book.totals else self.totals
        return Changes(totals, **{kind: getattr(self, kind).changed for kind in KINDS})
