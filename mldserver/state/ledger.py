"""The ledger: the one durable record of positions, segments, windows and dead letters.

It is the only place that decides what counts. Rows count when the transaction that moves their shard's position
registers their segment; a window's output counts when the transaction that commits it succeeds. Every method below
is one transaction: it happens wholly or not at all, whatever dies.

Implementations: ``sqlite.py`` (one server; the file lies beside the segments).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from mldserver.records import Sequence
    from mldserver.runtime.base import DeadLetter

__all__ = [
    "BatchProgress",
    "Flush",
    "FlushResult",
    "Ledger",
    "LedgerState",
    "PositionUpdate",
    "Segment",
    "ShardState",
    "WindowEntry",
    "WindowState",
]


@dataclass(frozen=True, slots=True)
class ShardState:
    """What the ledger knows of a shard."""

    shard_id: str
    epoch: int
    """Raised each time a connection opens the shard; only the latest epoch may move its position."""
    position: Sequence | None = None
    """Everything at or before it is durable; None when nothing is yet."""
    effective_ms: int | None = None
    """Effective time of the last durable record; floors the shard's next records and its children's."""
    event_ms: int | None = None
    """Latest event time among durable rows: where the shard's watermark goes on after a restart."""
    ended: bool = False
    parents: tuple[str, ...] = ()
    """Parent shards where they are known (ListShards)."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A durable Parquet file of rows of one window."""

    path: str
    """Relative to the output folder."""
    window_id: str
    rows: int
    bytes: int
    start_ms: int | None = None
    end_ms: int | None = None
    """The window's bounds; None for ``batches``."""
    late: bool = False
    """True: rows that came after their window was cut. The file belongs to the late dataset."""


@dataclass(frozen=True, slots=True)
class PositionUpdate:
    """A shard's new place, valid only while ``epoch`` is the shard's latest."""

    shard_id: str
    epoch: int
    position: Sequence | None
    effective_ms: int | None
    event_ms: int | None
    ended: bool = False


@dataclass(frozen=True, slots=True)
class BatchProgress:
    """Where ``batches`` windows stand: the open one's number, its rows so far, and when its first row came."""

    number: int = 0
    rows: int = 0
    opened_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Flush:
    """One flush, registered in one transaction: segments, positions, dead letters, clock."""

    positions: tuple[PositionUpdate, ...]
    segments: tuple[Segment, ...] = ()
    dead_letters: tuple[DeadLetter, ...] = ()
    clock: int = 0
    """The next free value of the pipeline's merge clock."""
    batch_progress: BatchProgress | None = None


@dataclass(frozen=True, slots=True)
class FlushResult:
    """What a flush came to: registered as a whole, or refused as a whole with the reasons."""

    lost_shards: frozenset[str] = frozenset()
    """Shards that have a newer epoch: their rows must be left out."""
    cut_windows: frozenset[str] = frozenset()
    """Windows of ``segments`` (late ones aside) that are cut already: their rows are late."""

    @property
    def registered(self) -> bool:
        """Whether the transaction took place."""
        return not self.lost_shards and not self.cut_windows


class WindowState(enum.StrEnum):
    """The life of a window once it has segments: each step is one ledger transaction."""

    OPEN = "open"
    CUT = "cut"
    """Its list of segments is fixed."""
    COMMITTED = "committed"
    """Its output counts, but may not be visible yet."""
    PUBLISHED = "published"
    """Its output is visible."""
    SET_ASIDE = "set_aside"
    """Its job kept failing under the policy ``dead_letter``; its segments are kept."""


@dataclass(frozen=True, slots=True)
class WindowEntry:
    """What the ledger knows of a window."""

    window_id: str
    state: WindowState
    start_ms: int | None = None
    end_ms: int | None = None
    revision: int = 1
    attempt: int = 0
    """Attempts begun; each has a staging directory of its own."""
    segments: tuple[Segment, ...] = ()
    staging: str | None = None
    """The directory (relative to the output folder) that holds the committed output until it is published."""
    files: tuple[str, ...] = ()
    rows_in: int = 0
    rows_out: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True)
class LedgerState:
    """Everything that a start needs."""

    shards: dict[str, ShardState] = field(default_factory=dict)
    windows: dict[str, WindowEntry] = field(default_factory=dict)
    """Windows that are not yet published, and retained ones that are."""
    late_segments: tuple[Segment, ...] = ()
    """Registered files of the late dataset that may not be visible yet."""
    clock: int = 0
    batch_progress: BatchProgress = BatchProgress()
    dead_letters: int = 0
    cut_below_ms: int | None = None
    """Event-time windows that end at or before it and have no entry any more were cut: their rows are late."""


class Ledger(Protocol):
    """One pipeline's ledger. Every method is one transaction, done when it returns. Raises LedgerError."""

    async def open(self) -> LedgerState:
        """Create or open the ledger and return what it holds.

        Raises LedgerVersionError for a newer or foreign ledger, LedgerError for a damaged one; never repairs.
        """
        ...

    async def open_shard(self, shard_id: str, parents: tuple[str, ...] = ()) -> ShardState:
        """Raise the shard's epoch (creating the shard when it is new) and return its state with that epoch."""
        ...

    async def know_shards(self, parents_by_shard: dict[str, tuple[str, ...]]) -> None:
        """Note shards that the stream lists, with their parents. Epochs and positions stay."""
        ...

    async def end_shards(self, shard_ids: frozenset[str]) -> None:
        """Mark shards as ended that the operator or the stream says will never come back."""
        ...

    async def register(self, flush: Flush) -> FlushResult:
        """Register a flush as a whole, or refuse it as a whole before anything is written.

        A window is cut when its entry says so or, without an entry, when it ends at or before ``cut_below_ms``.
        Raises InternalError when a position would go down, a path is registered twice, or a segment's bounds are
        not those of its open window.
        """
        ...

    async def cut(self, window_ids: tuple[str, ...]) -> tuple[WindowEntry, ...]:
        """Fix the segments of open windows; windows that are not open are left out of the answer."""
        ...

    async def begin_attempt(self, window_id: str) -> int:
        """Count an attempt at a cut (or set-aside) window and return its number; also sets it back to cut.

        Raises InternalError for a window in any other state.
        """
        ...

    async def commit(
        self, window_id: str, *, attempt: int, staging: str, files: tuple[str, ...], rows_out: int
    ) -> bool:
        """Make an attempt's output count. False when the window is not cut any more or the attempt is not the latest."""
        ...

    async def published(self, window_id: str) -> tuple[Segment, ...]:
        """Note that the output is visible; return the segments that are now free to delete.

        The window's entry stays until it is pruned. A second call returns none; InternalError unless committed.
        """
        ...

    async def late_published(self, paths: tuple[str, ...]) -> None:
        """Note that files of the late dataset are visible."""
        ...

    async def set_aside(self, window_id: str, error: str) -> None:
        """Put a cut window aside with its segments, after its last attempt."""
        ...

    async def prune(self, *, windows_before_ms: int, shards_before_ms: int) -> int:
        """Forget windows published, and shards ended, before those times (ms). Returns how many rows went.

        ``shards_before_ms`` must lie further back than the stream keeps records: a pruned shard that comes back
        is a new one.
        """
        ...

    async def dead_letters(self, limit: int = 100) -> tuple[DeadLetter, ...]:
        """Return stored dead letters, oldest first."""
        ...

    async def close(self) -> None:
        """Close after every call that was made before; no call may follow (InternalError)."""
        ...
