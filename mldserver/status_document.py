"""A running server's status: one document, from which metrics, page and terminal are made.

``Status`` has the facts of the server, and a ``FunctionStatus`` for each function that it hosts. Each part reports its own
section; ``admin/gather.py`` puts them together once a second, less often where there are very many shards. ``/status`` shows the
document as JSON (``for_json``). Counts
are since the start of the server; names end in their unit; ``…_ms`` without another word are milliseconds since the epoch.
Fields may be added under the same ``SCHEMA``; it rises when one goes or changes its meaning. No field ever holds a secret, or
a record's data beyond what a handler's own error says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from mldserver.base.clock import BOUNDS_MS, Durations

SCHEMA: Final = 2
SECONDS: Final = tuple(ms / 1000 for ms in BOUNDS_MS)
"""Upper bounds of the histograms. Times are measured in whole milliseconds."""


class _Part(msgspec.Struct, frozen=True, gc=False):
    """A part of the document."""


class Histogram(_Part, frozen=True, kw_only=True):
    """How long things took."""

    counts: tuple[int, ...] = (0,) * (len(SECONDS) + 1)
    """How many took at most so long as the bound of ``SECONDS``, and longer than the one before; the last: all longer ones."""
    sum_seconds: float = 0.0


def histogram(durations: Durations) -> Histogram:
    """Return a section of measured durations."""
    return Histogram(counts=tuple(durations.counts), sum_seconds=durations.sum_ms / 1000)


class Totals(_Part, frozen=True, kw_only=True):
    """Counts since the start."""

    batches: int = 0
    """Batches that held records; those of quiet shards hold none."""
    records: int = 0
    """Records that came, those within KPL aggregates counted singly."""
    duplicates: int = 0
    """Records that had been taken in before, and were dropped unseen."""
    rows: int = 0
    """Rows that handlers gave."""
    bytes: int = 0
    """Of batches that held records, as they came."""
    rows_durable: int = 0
    segments: int = 0
    """Files of rows that were made durable."""
    segment_bytes: int = 0
    rows_late: int = 0
    rows_ahead: int = 0
    dead_letters: int = 0
    """Records that failed for good and were kept aside."""
    skipped: int = 0
    """Records that failed for good and were not."""
    discarded: int = 0
    """Records that the handler discarded."""
    retries: int = 0
    """Calls of the handler that were made again after a failure: of each batch, the most that any record took."""
    answered_early: int = 0
    handler_seconds: float = 0.0
    """In which batches were worked on by handlers, their sum."""
    held_seconds: float = 0.0
    """In which answers were held back for want of memory or disk, their sum; a wait counts when it is over."""
    checkpoints: int = 0
    checkpoints_retried: int = 0
    checkpoints_failed: int = 0
    connections: int = 0
    """Connections that were accepted."""
    connections_failed: int = 0
    stream_retries: int = 0
    """Requests to DynamoDB Streams that were repeated after an error or a throttle."""
    stream_gaps: int = 0
    """How often records expired before this server read them, or an operator accepted that records were skipped."""
    flushes: int = 0
    flushes_failed: int = 0
    workers_lost: int = 0
    workers_replaced: int = 0
    spark_starts: int = 0
    spark_lost: int = 0
    windows_failed: int = 0
    """Attempts at windows, alone or together, that failed."""
    ledger_calls: int = 0
    ledger_faults: int = 0
    ledger_seconds: float = 0.0
    log_lines_lost: int = 0
    reloads: int = 0
    reloads_refused: int = 0


class ShardRow(_Part, frozen=True, kw_only=True):
    """A shard that this server has, or that is missing."""

    id: str
    state: str
    """``connected``, ``held`` (its answer waits for memory or disk), ``paused``, ``missing``, ``left_out`` (missing for too
    long: it holds nothing any more), ``ended`` (the latest hundred)."""
    peer: str | None = None
    lag_ms: int | None = None
    """How far it is behind the stream's tip at least: what its latest batch reported (``millisBehindLatest``), plus the time
    since. For a shard without a reader, the time since its last one. None: unknown, as when its daemon reports no lag, or is
    silent and sends no empty batches."""
    position: str | None = None
    """Everything at or before this sequence is durable."""
    checkpoint: str | None = None
    """The latest sequence that its daemon has stored; None: none in this connection."""
    durable_age_seconds: float | None = None
    """How long the oldest record that is not durable yet has been here, give or take a second; None: all are durable."""
    checkpoint_age_seconds: float | None = None
    """How long the oldest durable position that no checkpoint covers has waited, give or take a second; None: nothing waits."""
    watermark_ms: int | None = None
    """Its own."""
    records: int = 0
    """What came of it since the start of the server."""
    rows: int = 0
    bytes: int = 0
    worker: int | None = None
    """Which worker has it."""


class WatermarkSection(_Part, frozen=True, kw_only=True):
    """Up to which event time no more rows are expected."""

    at_ms: int | None = None
    held_by: str | None = None
    """The shard that holds it."""
    server: str | None = None
    """The other server that holds it; None: this one."""
    reason: str = ""
    stuck: bool = False


class WindowRow(_Part, frozen=True, kw_only=True):
    """One of the latest windows."""

    id: str
    state: str
    """``computing``, ``done``, ``failed`` (it is tried again), ``halted``, ``set_aside``."""
    revision: int = 1
    start_ms: int | None = None
    end_ms: int | None = None
    """Its bounds; None for ``batches``."""
    cut_ms: int | None = None
    """When this server cut it, or took it over."""
    done_ms: int | None = None
    rows_in: int | None = None
    rows_out: int | None = None
    seconds: float | None = None
    """From its cut to its visible output."""
    spark_seconds: float | None = None
    spark_jobs: tuple[int, ...] = ()
    """The ids of the Spark jobs that computed it, as Spark's own page has them; none on Spark Connect."""
    stage_seconds: dict[int, float] = {}
    """The seconds of the stages of these jobs, by the stage's id."""
    late_rows: int = 0
    error: str | None = None


class Windows(_Part, frozen=True, kw_only=True):
    """All windows, and the latest ones."""

    open: int = 0
    waiting: int = 0
    """Cut, and not published yet."""
    published: int = 0
    set_aside: int = 0
    early: int = 0
    """Early results that were shown."""
    early_failed: int = 0
    """Early results whose jobs failed."""
    halted: tuple[str, ...] = ()
    rows_out: int = 0
    seconds: Histogram = Histogram()
    """From cut to visible output."""
    oldest_age_seconds: float | None = None
    """For how long the oldest window that is cut has waited to be published; None: none waits."""
    latest: tuple[WindowRow, ...] = ()
    """The latest hundred that this server has cut, the oldest first."""


class WorkerRow(_Part, frozen=True, kw_only=True):
    """A worker."""

    number: int
    pid: int | None = None
    generation: int = 0
    """Which of its processes this is."""
    shards: int = 0
    resident_bytes: int = 0
    restarts: int = 0
    running_seconds: float = 0.0
    """How long the present synchronous call of the handler runs, or it has blocked the worker's event loop."""


class Spark(_Part, frozen=True, kw_only=True):
    """The session that computes windows."""

    ready: bool
    trouble: str | None = None
    master: str = ""
    version: str | None = None
    ui: str | None = None
    """Where its own page is, when it is served."""
    start_seconds: float | None = None
    jobs: int = 0
    """Jobs that run."""
    jvm_resident_bytes: int | None = None
    """Memory of the driver's JVM; None on Spark Connect, and while there is none."""
    application: str | None = None
    """The id of the application, as Spark's own pages have it; None on Spark Connect."""


class LetterRow(_Part, frozen=True, kw_only=True):
    """One of the latest dead letters."""

    at_ms: int
    shard: str
    sequence: str
    error: str
    traceback: str = ""
    attempts: int = 0


class DeadLetters(_Part, frozen=True, kw_only=True):
    """Records that failed for good."""

    waiting: int | None = None
    """How many the ledger keeps; None: they go elsewhere."""
    redriving: int = 0
    waits_for: str = ""
    """Why letters that must run again wait; empty: none waits."""
    latest: tuple[LetterRow, ...] = ()
    """The latest twenty of this server, the oldest first."""


class Peer(_Part, frozen=True, kw_only=True):
    """A server on the ledger."""

    id: str
    this: bool
    beat_age_seconds: float | None = None
    watermark_ms: int | None = None
    idle: bool = False
    reason: str = ""


class StoreRow(_Part, frozen=True, kw_only=True):
    """One of the largest stores of keyed state at this server."""

    id: str
    keys: int
    bytes: int
    """About how much memory they take."""
    files: int
    """How many files a process reads to open it."""
    serial: int
    """How many flushes have changed it, those of the stores before it included."""


class KeyedStateSection(_Part, frozen=True, kw_only=True):
    """Keyed state: what this server's processes hold, and its files."""

    keys: int
    files: int
    """Files of all servers that a store needs."""
    file_bytes: int
    snapshots: int = 0
    """How often a process got the state of a store, since the start."""
    snapshot_seconds: float = 0.0
    """How long that took together."""
    compactions: int = 0
    """How often several files became one, since the start."""
    stores: tuple[StoreRow, ...] = ()
    """The largest twenty, the largest first."""


class TimersSection(_Part, frozen=True, kw_only=True):
    """Durable timers of this server's shards; counts are since the start."""

    set: int = 0
    """How often a handler has set a timer; a timer that is set again counts again."""
    cancelled: int = 0
    """Timers that a handler or an operator has cancelled."""
    fired: int = 0
    """Callbacks that succeeded, gave a dead letter, or were left out by a failure rule."""
    skipped: int = 0
    """Timers that were later than their ``max_lateness``."""
    failed: int = 0
    """Callbacks that failed and are set again."""
    lateness: Histogram = Histogram()
    """How long after its due time each callback was called for the first time."""
    pending: int = 0
    """Timers that the open stores of this server hold now."""
    unknown: int = 0
    """Pending timers whose callback the handler does not have. They wait for a version that has it."""
    held: int = 0
    """Shards with due timers that do not fire: the shard lags, is paused, or has no room in memory."""
    held_by: str | None = None
    """The shard whose timer has been due for the longest; None: no timer is held."""
    held_seconds: float = 0.0
    """For how long that timer has been due."""
    next_due_ms: int | None = None
    """When the next timer is due; None: none is pending."""
    clock_ahead_seconds: float = 0.0
    """By how much the host's clock is ahead of the time by which timers fire; negative: behind it; 0: by no more than 2 s."""


class Budget(_Part, frozen=True, kw_only=True):
    """What is bounded."""

    used_bytes: int
    limit_bytes: int


class VersionRow(_Part, frozen=True, kw_only=True):
    """A version of a function's code that the ledger names."""

    id: str
    """``Python path`` for the code there."""
    role: str
    """``deployed``, ``staged`` (``functions deploy`` would deploy it) or ``previous`` (``functions rollback`` would)."""
    staged_ms: int | None = None


class FunctionStatus(_Part, frozen=True, kw_only=True):
    """One function: its handler, its life cycle, and its parts while they run."""

    pipeline: str = ""
    """Its name."""
    handler: str = ""
    handler_version: str = ""
    """The digest of the handler's code that workers run; it changes with a reload."""
    lifecycle: str = "deployed"
    """``deploying``, ``deployed``, ``pausing``, ``paused``, ``resuming``, ``undeploying``, ``undeployed`` or ``failed``."""
    versions: tuple[VersionRow, ...] = ()
    """Empty while the code has always been that on the Python path."""
    server_id: str = ""
    """This server's name on the function's ledger."""
    listening: str | None = None
    ready: bool = False
    reasons: tuple[str, ...] = ()
    """Why it is not ready, in words."""
    paused: bool = False
    totals: Totals = Totals()
    batch_seconds: Histogram = Histogram()
    """From the last byte of a batch that held records until it was done with."""
    failures: dict[str, int] = {}
    """Dead letters by their error's class: at most a hundred classes, then ``other``."""
    connections: dict[str, int] = {}
    """How many connections are in each state of the protocol."""
    shards: tuple[ShardRow, ...] = ()
    watermark: WatermarkSection = WatermarkSection()
    windows: Windows = Windows()
    workers: tuple[WorkerRow, ...] = ()
    dead_letters: DeadLetters = DeadLetters()
    servers: tuple[Peer, ...] = ()
    state: KeyedStateSection | None = None
    """None for a handler that keeps no state."""
    timers: TimersSection | None = None
    """None for a handler without timers."""
    budgets: dict[str, Budget] = {}
    """``buffer`` (rows in memory), ``lines`` (unread messages), ``segments`` (disk), ``state`` (keyed state in memory)."""
    stream_ended: bool = False
    unread_shards: int = 0
    """Shards that have not ended, where none has been connected for longer than a daemon's restart takes; 0 before that."""

    @property
    def is_wanted(self) -> bool:
        """Whether the function is deployed or paused: the server's readiness includes it."""
        return self.lifecycle not in {"undeploying", "undeployed"}


class Status(FunctionStatus, frozen=True, kw_only=True):
    """The whole document.

    The fields of ``FunctionStatus`` are those of the only function, if there is one. With several functions ``ready``,
    ``reasons`` and ``totals`` are those of all together, and the other fields have their defaults; JSON leaves them out.
    """

    schema: int = SCHEMA
    taken_ms: int
    version: str
    host: str
    pid: int
    started_ms: int
    stopping: bool = False
    log_level: str = "info"
    loop_lag_seconds: float = 0.0
    """The longest that the event loop was late since the last document."""
    spark: Spark | None = None
    """The driver of all functions; None if no handler gives rows."""
    resident_bytes: int = 0
    cpu_seconds: float = 0.0
    """CPU time of the server's process, its threads included."""
    open_files: int = 0
    """File descriptors that the server's process has open; 0: the system does not say."""
    open_files_limit: int = 0
    functions: dict[str, FunctionStatus] = {}
    """By name, in the order of the settings. Empty in documents of schema 1."""

    @property
    def by_name(self) -> Mapping[str, FunctionStatus]:
        """The functions by name, also of a document of schema 1."""
        return self.functions or {self.pipeline: self}

    def of_function(self, name: str) -> Status:
        """Return the status with the fields of one function, as that of a server which has no other."""
        function = self.by_name[name]
        return msgspec.structs.replace(
            self, **{field: getattr(function, field) for field in FunctionStatus.__struct_fields__}
        )


_OF_ALL: Final = ("ready", "reasons", "totals")
"""Fields of a function that a server with several has, too."""


def status_of(functions: Mapping[str, FunctionStatus], totals: Totals | None = None, **server: Any) -> Status:
    """Return the status of a server; ``server``: its own facts.

    ``totals`` are those of all functions together; they are needed only with several. The server is ready if each function
    that is wanted is ready. With several functions each reason begins with the function's name.
    """
    if len(functions) == 1:
        (only,) = functions.values()
        fields = {name: getattr(only, name) for name in FunctionStatus.__struct_fields__}
        if not only.is_wanted:
            fields |= {"ready": True, "reasons": ()}
    else:
        wanted = {name: each for name, each in functions.items() if each.is_wanted}
        reasons = tuple(f"{name}: {reason}" for name, each in wanted.items() for reason in each.reasons)
        ready = all(each.ready for each in wanted.values())
        fields = {"ready": ready, "reasons": reasons, "totals": totals or Totals()}
    return Status(**(fields | server), functions=dict(functions))


def for_json(status: Status) -> Status | dict[str, Any]:
    """Return what JSON shows of a status: with several functions the server has no fields of a single one."""
    if len(status.functions) <= 1:
        return status
    of_a_function = set(FunctionStatus.__struct_fields__) - set(_OF_ALL)
    return {name: getattr(status, name) for name in Status.__struct_fields__ if name not in of_a_function}
