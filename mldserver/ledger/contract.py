"""The ledger's vocabulary: what it holds of shards, segments, windows, servers, dead letters and keyed state, and what goes in.

``operations.py`` has the ledger itself.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from mldserver.effects import NOTHING, Effects
from mldserver.records import DeadLetter, Sequence
from mldserver.stores import ALL_KEYS, KeyRange

LETTERS_AT_ONCE: Final = 40
"""How many letters one transaction may take out: each may be two of the 100 operations of DynamoDB's (AWS limit)."""


_BATCH = re.compile(r"batch-(\d+)")


def storable(text: str) -> str:
    r"""Return text that UTF-8 can hold: lone surrogates, which user code can make, become ``\udc80``."""
    return text.encode("utf-8", "backslashreplace").decode()


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
    ended_ms: int | None = None
    """When it ended; None: it has not."""
    parents: tuple[str, ...] = ()
    """Parent shards where they are known (ListShards)."""
    owner: str | None = None
    """The server whose connection holds it; None after the lease was lost or the server expired."""
    gap_accepted: bool = False
    """The operator accepts that the next opening starts beyond the position; the opening clears it."""
    store: str = ""
    """The store that holds the keyed state of the shard's records; empty for a pipeline without keyed state."""

    @property
    def ended(self) -> bool:
        """Whether it is read to its end."""
        return self.ended_ms is not None


def with_ancestors(shards: Mapping[str, ShardState], shard_id: str) -> frozenset[str]:
    """Return a shard and its ancestors, as far as ``shards`` has them."""
    line: set[str] = set()
    waiting = [shard_id]
    while waiting:
        line.add(each := waiting.pop())
        parents = shards[each].parents if each in shards else ()
        waiting += [parent for parent in parents if parent not in line]
    return frozenset(line)


@dataclass(frozen=True, slots=True)
class StoreState:
    """What the ledger knows of a store of keyed state (``mldserver/stores.py``)."""

    store_id: str
    """The id of its shard (Kinesis), or of the root of its family of shards (DynamoDB Streams)."""
    serial: int = 0
    """The number of the last flush that changed it. A child's store goes on from its parents' highest serial, so that serials
    grow along the history of each key."""
    first: int = ALL_KEYS.first
    last: int = ALL_KEYS.last
    """The range of hashes that it holds, both bounds inclusive."""
    closed: bool = False
    """A child has taken over its state: flushes into it are refused."""
    next_due_ms: int | None = None
    """When the first of its timers is due (ms), as the last flush that changed it said; None: it has no timers. A child's store
    begins with the earliest of its parents'."""

    @property
    def key_range(self) -> KeyRange:
        """The range of hashes that it holds."""
        return KeyRange(self.first, self.last)


@dataclass(frozen=True, slots=True)
class StateFile:
    """A durable Parquet file with changes of keyed state, of one or more stores."""

    path: str
    """Relative to the output folder."""
    needed: Mapping[str, tuple[KeyRange, ...]]
    """The stores that need it, each with the ranges of hashes for which it does. A store's state are the rows in these ranges of
    all its files; of a key's rows the one with the highest serial counts."""
    rows: int
    bytes: int
    gone_ms: int | None = None
    """When the last store stopped needing it (ledger's time); None: a store needs it. Backups may still need it then."""


@dataclass(frozen=True, slots=True)
class StoreUpdate:
    """A store that a flush changes, valid only while the ledger holds the serial that the flush goes on from."""

    store_id: str
    previous: int
    """The store's serial before the flush, which raises it by one. Refused when the ledger holds another: a registration
    whose answer was lost can be repeated without doubling its changes, also when no position moves."""
    shards: tuple[str, ...]
    """The store's shards that are open at this server: ``FlushResult.lost_shards`` names them when the update is refused."""
    next_due_ms: int | None = None
    """The store's from then on (``StoreState``)."""


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
    """One server, as it last reported itself."""

    server_id: str
    beat_ms: int
    """When it last beat, by the ledger's time; two beats of a server are never the same."""
    watermark_ms: int | None = None
    """Its own shards' watermark, reported only after the rows that it counts on were registered; None: it has seen
    nothing yet, and holds the pipeline's."""
    idle: bool = False
    """It has no shards that count, or all are idle: it does not hold the pipeline's watermark."""
    held_by: str | None = None
    reason: str = ""
    shape: str = ""
    """Of its rows, as it declared it; empty before. No beat changes it."""
    life: int = field(default=0, compare=False)
    """The number of its registration: a server that finds another number, or no row, has expired. No beat changes it."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A durable Parquet file of rows of one window."""

    path: str
    """Relative to the output folder. Several sliding windows list one file, each under its id and bounds."""
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


def batch_id(number: int) -> str:
    """Return the id of the ``batches`` window with this number."""
    return f"batch-{number:012d}"


def batch_number(window_id: str) -> int | None:
    """Return the number in a ``batches`` window's id; None for other ids."""
    match = _BATCH.fullmatch(window_id)
    return int(match[1]) if match else None


@dataclass(frozen=True, slots=True)
class BatchProgress:
    """Where ``batches`` windows stand: the open one's number, its rows so far, and when its first row came."""

    number: int = 0
    rows: int = 0
    opened_ms: int | None = None

    def behind(self, window_ids: Iterable[str]) -> BatchProgress:
        """Return where they go on once these windows are cut: no number is given again. Others than ``batches`` do not count.

        A window that is cut for its age is not full, so that no flush has moved the number.
        """
        numbers = (batch_number(window_id) for window_id in window_ids)
        last = max((number for number in numbers if number is not None), default=-1)
        return BatchProgress(last + 1) if last >= self.number else self

    def moved_on(self, step: BatchStep) -> BatchProgress:
        """Return the progress after a step, whatever other servers have registered since it was planned."""
        since, until = step.since, step.until
        if until == since or until.number < self.number:
            return self
        if until.number > self.number:
            return until
        rows = self.rows + until.rows - (since.rows if since.number == until.number else 0)
        if rows >= step.max_rows:
            return BatchProgress(self.number + 1)
        return BatchProgress(self.number, rows, self.opened_ms if self.rows else until.opened_ms)


@dataclass(frozen=True, slots=True)
class BatchStep:
    """How a flush moves ``batches`` windows on: what lies between the two is what it puts in."""

    since: BatchProgress
    """Where its plan went on from."""
    until: BatchProgress
    max_rows: int
    """The most rows that a server puts into a window."""


@dataclass(frozen=True, slots=True)
class Flush:
    """One flush, registered in one transaction: segments, positions, effects, clock."""

    positions: tuple[PositionUpdate, ...]
    segments: tuple[Segment, ...] = ()
    effects: Effects = NOTHING
    """Except rows, which are in the segments."""
    clock: int = 0
    """The next free value of the pipeline's merge clock."""
    batches: BatchStep | None = None
    redriven: tuple[str, ...] = ()
    """Ids of dead letters that end with it, at most LETTERS_AT_ONCE: what they gave is among the rest of the flush."""
    stores: tuple[StoreUpdate, ...] = ()
    """The stores whose state changes."""
    state_file: StateFile | None = None
    """The file with these changes, needed by exactly these stores; None when no state changes."""
    every_ms: int | None = None
    """How often a sliding window begins. Then a segment's window is the last one that has its rows, and the other windows
    with its rows list the segment too. None: each segment belongs to one window."""


@dataclass(frozen=True, slots=True)
class FlushResult:
    """What a flush came to: registered as a whole, or refused as a whole with the reasons."""

    lost_shards: frozenset[str] = frozenset()
    """Shards that have a newer epoch or another position than ``previous``, or are unknown, and those of stores that are closed
    or have another serial: their rows must be left out."""
    cut_windows: frozenset[str] = frozenset()
    """Windows with rows of WINDOW segments that are cut already: these rows are late."""
    expired_windows: frozenset[str] = frozenset()
    """Windows with rows of RECOMPUTE segments that were cut and have no entry any more, are not retained, or were skipped: these
    rows go to the late dataset."""
    gone_letters: frozenset[str] = frozenset()
    """Redriven letters that are not there any more, or are not wanted: what they gave must be left out."""

    @property
    def registered(self) -> bool:
        """Whether the transaction took place."""
        return not (self.lost_shards or self.cut_windows or self.expired_windows or self.gone_letters)


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
    """Attempts begun, over all revisions; each has a separate staging directory."""
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

    @property
    def is_visible(self) -> bool:
        """Whether a revision of it was published."""
        return self.state is WindowState.PUBLISHED or self.revision > 1

    @property
    def can_be_recomputed(self) -> bool:
        """Whether it is published, and the segments that it was computed from are still there."""
        return (
            self.state is WindowState.PUBLISHED
            and not self.is_skipped
            and self.retained
            and bool(self.segments)
        )


Decision = Literal["retry", "set_aside", "skip", "recompute"]
"""What an operator does about a window that is halted or set aside; ``recompute``: about one that is published."""


@dataclass(frozen=True, slots=True)
class Commit:
    """One attempt's output, on its way to count, and then to be seen."""

    window_id: str
    attempt: int
    staging: str
    """The attempt's folder, relative to the output folder."""
    files: tuple[str, ...]
    """Relative to ``staging``; empty when there is nothing to show."""
    rows_out: int
    revision: int = 1
    """Of the window: what it is shown as. The ledger has its own."""


class Wanted(enum.StrEnum):
    """What an operator wants a function to be. Every server of the function follows."""

    DEPLOYED = "deployed"
    PAUSED = "paused"
    UNDEPLOYED = "undeployed"


@dataclass(frozen=True, slots=True)
class CodeVersion:
    """A version of a handler's code."""

    id: str = ""
    """``HandlerSpec.version``; empty for the code on the Python path."""
    path: str = ""
    """Of the code's archive, relative to the output folder; empty for the code on the Python path."""
    staged_ms: int = 0
    """When it was staged (ms since the epoch)."""


@dataclass(frozen=True, slots=True)
class FunctionLife:
    """What is wanted of a function (``functions/lifecycle.py``)."""

    wanted: Wanted = Wanted.DEPLOYED
    deployed: CodeVersion = CodeVersion()
    """The version that every server runs."""
    other: CodeVersion | None = None
    """The second version, if there is one: staged or previous."""
    other_is_previous: bool = False
    """Whether the second version was deployed before, and a rollback deploys it again. Else it is staged."""
    keep: bool = False
    """Whether the undeploy keeps positions, keyed state, timers and dead letters."""


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
    """How many of them are marked for a redrive."""
    servers: dict[str, ServerState] = field(default_factory=dict)
    cut_below_ms: int | None = None
    """Event-time windows that end at or before it and have no entry any more were cut: their rows are late. Windows
    that end in the future are not forgotten; only a change of their size can move it beyond the present
    (``declare``)."""
    ledger_id: str = field(default="", compare=False)
    """The ledger's id: generated at its creation, and again when it continues from an older state (``claim``)."""
    folder: str | None = field(default=None, compare=False)
    """The id of the output folder that claimed it; None before."""
    claims: int = field(default=0, compare=False)
    """How often a server has claimed it: a ledger that was rolled back has fewer than its folder has seen."""
    shape: str = ""
    """The fingerprint of the pipeline's present shape; empty before one was declared."""
    shapes: dict[str, str] = field(default_factory=dict)
    """The text of every shape that ever was, by fingerprint."""
    draining: bool = False
    """Servers must drain; or they have drained, and none was started since."""
    life: FunctionLife = field(default_factory=FunctionLife)
    """What is wanted of the function."""
    version: int = field(default=0, compare=False)
    """Rises with every change of the ledger: the caller passes it to ask for the next changes."""
    since: int = field(default=0, compare=False)
    """0: ``windows`` is complete. Else it holds only the windows that changed after this version, including those
    published and not retained since. All others are unchanged, or were removed after such a report."""
    segment_bytes: int = field(default=0, compare=False)
    """Bytes of all segments that windows wait for or retain, including windows missing from ``windows``; each file once."""
    open_bytes: int = field(default=0, compare=False)
    """Bytes of the segments of open windows, each file once."""
    under_way: dict[str, WindowEntry] = field(default_factory=dict, compare=False)
    """All windows that are cut or committed, whatever ``since`` is."""
    time_ms: int | None = field(default=None, compare=False)
    """The ledger's time when it was last written down; None: in a ledger without servers that has published nothing."""
    stores: dict[str, StoreState] = field(default_factory=dict)
    """The stores of keyed state by id, also closed ones whose shards are not pruned."""
    state_files: dict[str, StateFile] = field(default_factory=dict)
    """The files of keyed state by path, also those that wait for their deletion."""

    def paths(self) -> set[str]:
        """Return the paths of the segments and the state files in this state."""
        of_windows = (segment for e in self.windows.values() for segment in (*e.segments, *e.pending))
        return {segment.path for segment in (*self.late_segments, *of_windows)} | self.state_files.keys()


@dataclass(frozen=True, slots=True)
class ShapeChange:
    """A shape that a server declares, and what becomes of the ledger when it takes the place of another."""

    fingerprint: str
    text: str
    over: frozenset[str] = frozenset()
    """Published windows whose segments it cannot read: they are not retained any more."""
    window_ms: int | None = None
    """The size of event-time windows or panes (ms), where they were cut in another way before. The first of them begins at or
    after the end of every window that has begun: ``cut_below_ms`` rises to there. None: it stays."""
    forget_event_times: bool = False
    """Event time is another column from now on: where the shards' watermarks stood means nothing."""


@dataclass(frozen=True, slots=True)
class StoredLetter:
    """A dead letter, as a ledger holds it."""

    id: str
    """Its name in this ledger; never given again."""
    letter: DeadLetter
    wanted: bool = False
    """A server will redrive it."""
