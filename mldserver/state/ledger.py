"""The ledger: the one durable record of positions, segments, windows and dead letters.

It is the only place that decides what counts. Rows count when the transaction that moves their shard's position
registers their segment; a window's output counts when the transaction that commits it succeeds. Every method below
is one transaction: it happens wholly or not at all, whatever dies.

Several servers may share a ledger. Each registers under an id of its own and beats; a server that has not beaten for
long is *buried* by another: its row goes, so that whatever it still tries is refused (``ServerBuried``), its windows
are adopted, and only then are its unregistered files deleted. A server that opens the ledger under an id that is
registered buries the one that had it. Shards are fenced by epochs, windows by attempts.

A server registers with ``open``; then every call may follow. A tool opens the ledger with ``peek``; then only
``peek``, ``end_shards``, ``decide``, ``accept_gap``, ``reset``, ``drain``, ``close`` and those of dead letters may, else
InternalError. Of a server that was buried, or has left, every call that writes raises ServerBuried, except ``leave`` and
those. Implementations: ``sqlite.py`` (servers of one host; the file lies beside the segments) and ``dynamodb.py``.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from mldserver.state.batches import BatchProgress, BatchStep
from mldserver.state.letters import LetterBook
from mldserver.state.shapes import ShapeBook

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mldserver.records import DeadLetter, Sequence

__all__ = [
    "BatchProgress",
    "BatchStep",
    "Commit",
    "Decision",
    "Flush",
    "FlushResult",
    "Ledger",
    "LedgerState",
    "PositionUpdate",
    "Segment",
    "SegmentKind",
    "ServerState",
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
    owner: str | None = None
    """The server whose connection holds it; None after its lease was lost, or its server buried."""
    gap_accepted: bool = False
    """The operator accepts that the next opening starts beyond the position; the opening clears it."""


class SegmentKind(enum.StrEnum):
    """What a segment's rows are for."""

    WINDOW = "window"
    """Rows of a window that is open."""
    RECOMPUTE = "recompute"
    """Rows that came after their window was cut, while its segments are retained: for its next revision."""
    LATE = "late"
    """Rows that came when their window was not retained any more: for the late dataset."""


@dataclass(frozen=True, slots=True)
class ServerState:
    """One server, as it last told of itself."""

    server_id: str
    beat_ms: int
    """When it last beat, by its own time of day; two beats of a server are never the same."""
    watermark_ms: int | None = None
    """Its own shards' watermark, told only after everything that the watermark counted on was registered; None:
    it has seen nothing yet, and holds the pipeline's."""
    idle: bool = False
    """It has no shards that count, or all are idle: it does not hold the pipeline's watermark."""
    held_by: str | None = None
    reason: str = ""
    shape: str = ""
    """Of its rows, as it declared it; empty before. No beat changes it."""


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
    kind: SegmentKind = SegmentKind.WINDOW
    revision: int = 0
    """The revision of the window that first took it in; 0: not cut yet."""


@dataclass(frozen=True, slots=True)
class PositionUpdate:
    """A shard's new place, valid only while ``epoch`` is the shard's latest."""

    shard_id: str
    epoch: int
    position: Sequence | None
    effective_ms: int | None
    event_ms: int | None
    ended: bool = False
    previous: Sequence | None = None
    """The position that this update goes on from. Refused (as a lost shard) when the ledger holds another, so that a
    registration whose answer was lost can be repeated without doubling its rows."""


@dataclass(frozen=True, slots=True)
class Flush:
    """One flush, registered in one transaction: segments, positions, dead letters, clock."""

    positions: tuple[PositionUpdate, ...]
    segments: tuple[Segment, ...] = ()
    dead_letters: tuple[DeadLetter, ...] = ()
    clock: int = 0
    """The next free value of the pipeline's merge clock."""
    batches: BatchStep | None = None
    redriven: tuple[str, ...] = ()
    """Ids of dead letters that end with it, at most LETTERS_AT_ONCE: what they gave is among the rest of the flush."""


@dataclass(frozen=True, slots=True)
class FlushResult:
    """What a flush came to: registered as a whole, or refused as a whole with the reasons."""

    lost_shards: frozenset[str] = frozenset()
    """Shards that have a newer epoch or another position than ``previous``, or are unknown: their rows must be left
    out."""
    cut_windows: frozenset[str] = frozenset()
    """Windows of WINDOW segments that are cut already: their rows are late."""
    expired_windows: frozenset[str] = frozenset()
    """Windows of RECOMPUTE segments that have no entry, are not retained, or were skipped: their rows go to the late
    dataset."""
    gone_letters: frozenset[str] = frozenset()
    """Redriven letters that are not there any more, or are not wanted: what they gave must be left out."""
    batch_progress: BatchProgress | None = None
    """Where ``batches`` windows stand, when the flush has no room in what other servers left: to be planned anew."""

    @property
    def registered(self) -> bool:
        """Whether the transaction took place."""
        refused = self.lost_shards or self.cut_windows or self.expired_windows or self.gone_letters
        return not refused and self.batch_progress is None


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
    """Attempts begun, over all revisions; each has a staging directory of its own."""
    owner: str | None = None
    """The server that computes it, while it is CUT or COMMITTED; None then: any server may adopt it."""
    segments: tuple[Segment, ...] = ()
    """WINDOW and RECOMPUTE segments that the present revision covers; kept after publishing while ``retained``."""
    pending: tuple[Segment, ...] = ()
    """RECOMPUTE segments that wait for the next revision."""
    retained: bool = True
    """Whether its segments are kept; late rows lead to a new revision then, unless it was skipped."""
    published_ms: int | None = None
    """When its latest revision became visible."""
    staging: str | None = None
    """The directory (relative to the output folder) that holds the committed output until it is published."""
    files: tuple[str, ...] = ()
    rows_in: int = 0
    rows_out: int = 0
    error: str | None = None
    """Why it is SET_ASIDE; or CUT or COMMITTED and *halted*: it keeps failing, and the windows behind it wait; or
    PUBLISHED and *skipped*: an operator has given up what the present revision would have shown."""

    @property
    def is_halted(self) -> bool:
        """Whether the server that has it waits for it to succeed, or for a ``Decision``."""
        return self.error is not None and self.state in {WindowState.CUT, WindowState.COMMITTED}

    @property
    def is_skipped(self) -> bool:
        """Whether an operator has given it up: it stays as it is, and late rows lead to no revision."""
        return self.error is not None and self.state is WindowState.PUBLISHED


Decision = Literal["retry", "set_aside", "skip"]
"""What an operator does about a window that is halted or set aside."""


@dataclass(frozen=True, slots=True)
class Commit:
    """One attempt's output, on its way to count."""

    window_id: str
    attempt: int
    staging: str
    files: tuple[str, ...]
    rows_out: int


@dataclass(frozen=True, slots=True)
class LedgerState:
    """Everything that a start needs."""

    shards: dict[str, ShardState] = field(default_factory=dict)
    windows: dict[str, WindowEntry] = field(default_factory=dict)
    """Windows that are not yet published, and retained ones that are; or the news of windows (``since``)."""
    late_segments: tuple[Segment, ...] = ()
    """Registered files of the late dataset that may not be visible yet."""
    clock: int = 0
    batch_progress: BatchProgress = field(default_factory=BatchProgress)
    dead_letters: int = 0
    """How many there are."""
    redrives: int = 0
    """How many of them are to be redriven."""
    servers: dict[str, ServerState] = field(default_factory=dict)
    cut_below_ms: int | None = None
    """Event-time windows that end at or before it and have no entry any more were cut: their rows are late. Windows
    whose end is to come are not forgotten; only a change of their size lets it go beyond the present (``declare``)."""
    ledger_id: str = field(default="", compare=False)
    """Which ledger this is: made with it, and anew when it goes on from an older state (``claim``)."""
    folder: str | None = field(default=None, compare=False)
    """The id of the output folder that claimed it; None before."""
    claims: int = field(default=0, compare=False)
    """How often a server has claimed it: a ledger that was rolled back has fewer than its folder has seen."""
    shape: str = ""
    """The fingerprint of the pipeline's present shape; empty before one was declared."""
    shapes: dict[str, str] = field(default_factory=dict)
    """The text of every shape that ever was, by fingerprint."""
    draining: bool = False
    """Servers are to drain; or have, and none was started since."""
    version: int = field(default=0, compare=False)
    """Rises with every change of the ledger: what to ask for the next news with."""
    since: int = field(default=0, compare=False)
    """0: ``windows`` is complete. Else it holds only those that changed after this version, also those that are
    published and not retained since; all others are as they were then, or gone after having been told of so."""


class Ledger(LetterBook, ShapeBook, Protocol):
    """One pipeline's ledger. Every method is one transaction, done when it returns. Raises LedgerError."""

    @property
    def server_id(self) -> str:
        """The id under which this server is known."""

    async def open(self) -> LedgerState:
        """Create or open the ledger, register this server, and return what the ledger holds.

        Who had this id before is buried. Without a first ``sync`` this server holds the watermark (None, not idle).
        Raises LedgerVersionError for a newer or foreign ledger, LedgerError for a damaged one; never repairs.
        """

    async def peek(self) -> LedgerState:
        """Return what the ledger holds, opening it when it is not open, without registering: for tools.

        Creates nothing: raises LedgerError when there is no ledger, and else as ``open``.
        """

    async def sync(self, told: ServerState, since: int = 0) -> LedgerState:
        """Beat: keep what the server tells (``beat_ms`` too), and return what the ledger holds now.

        ``since``: the ``version`` of a state that the caller has already: of windows only the news are returned, unless
        some that it may not have heard of are gone; the answer's ``since`` says which. So it is cheap however many
        windows are retained. Raises InternalError when ``told`` is of another server.
        """

    async def find(self, window_ids: tuple[str, ...]) -> tuple[WindowEntry, ...]:
        """Return windows as they are, also those that are published and not retained; unknown ones are left out."""

    async def bury(self, seen: Mapping[str, int]) -> frozenset[str]:
        """Remove servers whose last beat (ms) is still the one that was seen; return those that are gone.

        One that has beaten since lives, whatever the clocks say: beats are compared for equality alone. Those that were
        gone already, or never there, are returned too. Their shards lose their owner; their windows (CUT, COMMITTED)
        may be adopted. A server never buries itself.
        """

    async def claim(self, folder: str, *, instead_of: str | None = None) -> LedgerState:
        """Be the ledger of an output folder, unless it is another's; return what it holds then.

        ``instead_of``: if that is its ``ledger_id`` still, it gets a new one and the folder: what was written under the
        old one, and is not named, is not this ledger's any more. All other servers are removed, as if buried.
        """

    async def leave(self) -> None:
        """Take this server's row out: an orderly stop. Its shards and windows lose their owner.

        Without effect when it is out already.
        """

    async def open_shard(self, shard_id: str, parents: tuple[str, ...] = ()) -> ShardState:
        """Raise the shard's epoch (creating the shard when it is new), own it, and return its state with that epoch.

        ``gap_accepted`` is returned once and cleared.
        """

    async def release_shard(self, shard_id: str, epoch: int) -> None:
        """Give up owning a shard whose lease or connection is gone; nothing happens under another epoch."""

    async def know_shards(self, parents_by_shard: dict[str, tuple[str, ...]]) -> None:
        """Note shards that the stream lists, with their parents. Epochs and positions stay."""

    async def end_shards(self, shard_ids: frozenset[str]) -> None:
        """Mark shards as ended that the operator or the stream says will never come back."""

    async def register(self, flush: Flush) -> FlushResult:
        """Register a flush as a whole, or refuse it as a whole before anything is written.

        A window is cut when its entry says so or, without an entry, when it ends at or before ``cut_below_ms``.
        RECOMPUTE segments of a retained window (SET_ASIDE ones too) become ``pending``. The rows of ``batches`` are
        added to those that other servers have put in since the plan, and refused when the window would have more
        than ``max_rows``, or another has been begun: so none ever has more. Raises InternalError when a
        position would go down, a path is registered twice, a segment's bounds are not those of its window, or a
        RECOMPUTE segment's window is OPEN.
        """

    async def cut(self, window_ids: tuple[str, ...]) -> tuple[WindowEntry, ...]:
        """Fix the segments of windows and own them; those that cannot be cut are left out of the answer.

        An OPEN window becomes CUT at revision 1; a PUBLISHED one with pending segments becomes CUT at the next
        revision, over all its segments; ``files``, ``rows_out`` and ``published_ms`` stay those of the revision
        that is visible, until the commit. ``batch_progress`` goes on behind a ``batches`` window that is cut: its
        number, told by its id, is never given again.
        """

    async def adopt(self) -> tuple[WindowEntry, ...]:
        """Own every CUT or COMMITTED window that has no owner, and return them."""

    async def begin_attempts(self, window_ids: tuple[str, ...]) -> dict[str, int]:
        """Count an attempt at each of these windows that is CUT and this server's still; return their numbers."""

    async def commit(self, commits: tuple[Commit, ...]) -> frozenset[str]:
        """Make attempts' outputs count, together; return the windows for which it happened.

        Left out are windows that are not CUT any more, not ours, or have a newer attempt.
        """

    async def published(self, attempts: Mapping[str, int], *, retain: bool = True) -> tuple[Segment, ...]:
        """Note that outputs are visible; return the segments that are now free to delete (of windows not retained).

        ``attempts``: of each window the attempt whose output was made visible. Passed over are windows that are not
        COMMITTED with that attempt, or not this server's, any more: who repeats a call whose answer was lost says
        nothing of the revision that another server has committed meanwhile. ``retain=False``: late rows lead to no
        revision, so that the windows are not retained, but for those with pending segments. Entries stay until they
        are pruned.
        """

    async def expire(
        self, *, published_before_ms: int, keep_bytes: int, limit: int = 1000
    ) -> tuple[Segment, ...]:
        """Stop retaining PUBLISHED windows, and return the segments to delete.

        First all published before a time, then those published longest ago until the segments of all PUBLISHED
        windows take at most ``keep_bytes``. Windows with pending segments stay. At most ``limit`` windows a call: when
        the answer is of so many, more may follow.
        """

    async def late_published(self, paths: tuple[str, ...]) -> None:
        """Note that files of the late dataset are visible."""

    async def set_aside(self, window_id: str, error: str) -> None:
        """Put a window aside with its segments, after its last attempt, if it is CUT and this server's still."""

    async def halt(self, window_id: str, error: str, *, first: bool) -> bool:
        """Keep why a CUT or COMMITTED window of this server is halted, until it commits or is published.

        False: it is neither, or not ours, any more; or not ``first``, and the error is gone: an operator wants a retry.
        """

    async def decide(self, window_id: str, decision: Decision) -> bool:
        """Do what an operator decides about a window that is halted or SET_ASIDE. False: it is none.

        ``retry`` forgets the error: its server tries a halted one at once, any may adopt the other, which is CUT again.
        ``set_aside`` is for halted ones that are CUT. ``skip`` makes a window that is CUT or SET_ASIDE PUBLISHED, with no
        new output: what its last revision wrote stays. It keeps its error; its pending segments join the present
        revision, which is retained as any other; rows that come later go to the late dataset (``expired_windows``).
        """

    async def accept_gap(self, shard_id: str) -> bool:
        """Let the next opening of a shard start beyond its position. False: no such shard."""

    async def reset(self, shard_ids: frozenset[str]) -> frozenset[str]:
        """Forget positions, times and ends of shards without an owner, so that they are read again.

        Returns which those were. Their epochs are raised, so that nothing that is under way moves them.
        """

    async def prune(
        self,
        *,
        windows_before_ms: int,
        shards_before_ms: int,
        keep_shards: frozenset[str] = frozenset(),
        limit: int = 10_000,
    ) -> int:
        """Forget windows published and not retained, and shards ended, before those times (ms), but for ``keep_shards``.

        A window that ends after ``windows_before_ms`` stays, whenever it was published (a row from the future, and a
        quiet stream): ``cut_below_ms`` would close every window up to its end for good.
        Returns how many rows went. At most ``limit`` windows a call, those published longest ago: when so many rows
        went, more may follow. Windows that are retained stay (``expire`` them first).
        A pruned shard that comes back is a new one, all of whose records count again: ``shards_before_ms`` must lie
        further back than the stream keeps records, unless all of which it keeps any are among ``keep_shards``.
        """

    async def close(self) -> None:
        """Close after every call that was made before; no call may follow (InternalError)."""
