"""The messages between server and worker (``children/channel.py`` carries them), and the values that cross.

    server → worker    StartWorker, then once WorkerNumber, and any number of Open, Process, Notify, Park, Unpark, Forget,
                       FillLookup, CancelRequest, LogLevel and StateRoom. The end of the socket ends the worker.
    worker → server    HandlerLoaded, or Failed with id 0. Then BeatMessage and ForwardedLog at any time; BatchDone once for
                       each Process, Finished once for each other request, or Failed for any of them.

Queries of the handler have a socket of their own, because a hook may wait for one on the worker's event loop
(``worker_queries.py``):

    worker → server    AskQuery and CancelRequest
    server → worker    QueryAnswered or Failed, once for each AskQuery

A sequence's number has up to 56 digits: it crosses as bytes (``pack_sequence``).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import structs

from mldserver import errors
from mldserver.children.channel import Descriptors, Message
from mldserver.effects import NOTHING, Effects
from mldserver.errors import InternalError, MldserverError, StateMoved
from mldserver.handler.queries import LookupSpec, Query  # msgspec reads them
from mldserver.handler.spec import (
    Finding,
    HandlerKind,
    HandlerSpec,
    HookSpec,
    RecordHook,
    TimerHook,
    parse_schema,
)
from mldserver.records import Sequence, pack_sequence, unpack_sequence
from mldserver.runtime.failure_policy import FailurePolicy  # msgspec reads it
from mldserver.runtime.interface import BatchOutcome, BatchOutline, TimerReport
from mldserver.stores import KeyRange, SnapshotSource, StateSnapshot, StoreSize, unpack_changes
from mldserver.windows import WINDOW_COLUMNS, Batches, TimeWindows
from mldserver.workers.shared_memory import rows_from, rows_in


class StartWorker(Message, frozen=True):
    """The first message. The arena's descriptor and that of the socket for queries come with it."""

    pipeline: str
    handler: str
    """The handler's dotted path."""
    python_path: list[str]
    """Folders to search for modules before the worker's own."""
    directory: str
    policy: FailurePolicy
    concurrency: int | None
    deadline_seconds: float | None
    arena_bytes: int
    state_bytes: int
    """The memory that keyed state may take in the process; StateRoom changes it."""
    settings: dict[str, str]
    """What the handler reads as ``ctx.settings``."""
    log_level: int
    query_seconds: float = 30.0
    """How long a query may take."""
    code: dict[str, tuple[str, bytes]] = msgspec.field(default_factory=dict)
    """The user's modules as the first process loaded them (``HandlerSpec.code``). Empty: load them from the disk."""


class WorkerNumber(Message, frozen=True):
    """The standby worker becomes a worker with this number, which ``ps`` shows."""

    number: int


class WorkerRequest(Message, frozen=True):
    """A message that is answered by BatchDone, Finished or Failed."""

    id: int
    shard: str


class Process(WorkerRequest, frozen=True):
    """Process a batch. Its payload is in the message, in the arena, or in a passed file."""

    form: int
    """The payload's form, as ``Payload.packed`` returns it."""
    received_ms: int
    after: bytes | None
    inline: bytes | None
    offset: int | None
    """The place in the arena. None without ``inline``: the payload is in a file."""
    length: int
    part: tuple[int, int] | None = None
    """Process only these of the fresh records (start, stop); None: all."""
    condemned: str | None = None
    """Make all records dead letters with this error, without a call; None: call the handler."""
    redriven: bool = False
    behind: bool = False
    """Earlier batches of the shard may be unanswered; refuse this one if one of them fails."""
    number: int | None = None
    """As in ``Delivery``."""


class SentStore(msgspec.Struct, frozen=True, array_like=True):
    """A ``StateSnapshot``, whose entries are an Arrow stream in a passed file."""

    store: str
    first: bytes
    last: bytes
    accepted: int
    clock_ms: int | None
    siblings: dict[str, int]
    size: int
    """The file's."""
    deltas: tuple[bytes, ...] = ()
    """Changes that follow the snapshot: those of earlier parts of the batch whose next part needs the shard."""


class Open(WorkerRequest, frozen=True):
    """Open a shard. With a store, a file comes too."""

    start: str | None
    start_sub: int
    store: SentStore | None = None
    """The shard's store, for a handler with keyed state."""


class Notify(WorkerRequest, frozen=True):
    """Run a life-cycle hook."""

    hook: str


class Park(WorkerRequest, frozen=True):
    """Hold back later records of keys behind their dead letters."""

    keys: dict[str, bytes]
    """Sequences by key."""


class Unpark(WorkerRequest, frozen=True):
    """Process later records of a key again."""

    key: str


class Forget(WorkerRequest, frozen=True):
    """Drop a shard's handler. With id 0 the server does not wait for the answer."""


class FillLookup(WorkerRequest, frozen=True):
    """Replace the table of the lookup ``name``. The result's file comes too."""

    name: str
    order: tuple[int, ...]
    """As in ``QueryResult``."""


class AskQuery(Message, frozen=True):
    """Run a query of the handler."""

    id: int
    query: Query


class QueryAnswered(Message, frozen=True):
    """A query has a result, whose file comes too."""

    id: int
    order: tuple[int, ...]
    """As in ``QueryResult``."""


class CancelRequest(Message, frozen=True):
    """The caller has given up a request, or a query. A request is still answered, so that its line's room can be reused."""

    id: int


class LogLevel(Message, frozen=True):
    """Log from this level on."""

    level: int


class StateRoom(Message, frozen=True):
    """Keyed state may take so much memory in the process: what the server's other workers leave of ``state_bytes``."""

    bytes: int


class HandlerLoaded(Message, frozen=True):
    """The handler is loaded: its ``HandlerSpec`` without callable objects."""

    kind: HandlerKind
    record_hook: RecordHook
    hooks: dict[str, HookSpec]
    concurrency: int
    schema: str | None
    """The schema as DDL."""
    time_windows: TimeWindows | None
    batches: Batches | None
    warnings: tuple[Finding, ...]
    version: str = ""
    keyed: bool = False
    state_ttl_ms: int | None = None
    timers: dict[str, TimerHook] = msgspec.field(default_factory=dict)
    lookups: tuple[LookupSpec, ...] = ()
    code: dict[str, tuple[str, bytes]] = msgspec.field(default_factory=dict)
    after: tuple[str, ...] = ()
    window_columns: tuple[str, str] | None = WINDOW_COLUMNS
    writes_for_itself: bool = False
    """As in ``HandlerSpec``."""


class BatchDone(Message, frozen=True):
    """A batch's outcome (see ``BatchOutcome``). Its rows are an Arrow stream, in the message or a passed file."""

    id: int
    records: int
    duplicates: int
    first: bytes | None
    last: bytes | None
    latest_arrival_ms: int | None
    millis_behind_latest: int | None
    rows: bytes | None = None
    """None: there are no rows, or they are in a file."""
    rows_bytes: int = 0
    """Size of the file; 0: there is no file."""
    attempts: int = 1
    effects: dict[str, list[Any]] = msgspec.field(default_factory=dict)
    """All kinds except rows, as ``Effects.packed`` returns them."""
    skipped: int = 0
    discarded: int = 0
    keeps_position: bool = False
    position: bytes | None = None
    owes: bool = False
    """Whether the handler has records that it has not checkpointed."""
    timers: TimerReport | None = None


class Finished(Message, frozen=True):
    """A request other than Process is done."""

    id: int
    position: bytes | None = None
    """After a hook: the position of a handler that keeps its own."""


class Failed(Message, frozen=True):
    """A request ended with an error, or the worker cannot start (id 0)."""

    id: int
    error: str
    """A class of ``mldserver.errors``, or the name of another."""
    what: str
    did: str
    advice: str
    where: dict[str, Any]


class BeatMessage(Message, frozen=True):
    """A heartbeat (see ``worker.judge``)."""

    running_ms: int
    blocked_ms: int
    resident_bytes: int
    state: tuple[StoreSize, ...] = ()
    """As ``Runtime.state_sizes`` returns it."""


class ForwardedLog(Message, frozen=True):
    """An event for the log."""

    level: str
    event: str
    fields: dict[str, Any]


FromServer = (
    StartWorker
    | WorkerNumber
    | Process
    | Open
    | Notify
    | Park
    | Unpark
    | Forget
    | FillLookup
    | CancelRequest
    | LogLevel
    | StateRoom
)
QueryRequest = AskQuery | CancelRequest
QueryAnswer = QueryAnswered | Failed
FromWorker = HandlerLoaded | BatchDone | Finished | Failed | BeatMessage | ForwardedLog


def packed_keys(keys: Mapping[str, Sequence]) -> dict[str, bytes]:
    """Return sequences by key in the form of a message."""
    return {key: data for key, sequence in keys.items() if (data := pack_sequence(sequence)) is not None}


def loaded_of(spec: HandlerSpec) -> HandlerLoaded:
    """Return what the server must know about a handler."""
    windows = spec.windows
    return HandlerLoaded(
        spec.kind,
        spec.record_hook,
        dict(spec.hooks),
        spec.concurrency,
        None if spec.schema is None else spec.schema.ddl,
        windows if isinstance(windows, TimeWindows) else None,
        windows if isinstance(windows, Batches) else None,
        spec.warnings,
        spec.version,
        spec.keyed,
        spec.state_ttl_ms,
        dict(spec.timers),
        spec.lookups,
        spec.code,
        spec.after,
        spec.window_columns,
        spec.writes_for_itself,
    )


def spec_of(handler: str, loaded: HandlerLoaded) -> HandlerSpec:
    """Return a handler's spec without callable objects."""
    return HandlerSpec(
        path=handler,
        kind=loaded.kind,
        target=None,
        record_hook=loaded.record_hook,
        hooks=loaded.hooks,
        schema=None if loaded.schema is None else parse_schema(loaded.schema),
        windows=loaded.time_windows or loaded.batches,
        warnings=loaded.warnings,
        concurrency=loaded.concurrency,
        version=loaded.version,
        keyed=loaded.keyed,
        state_ttl_ms=loaded.state_ttl_ms,
        timers=loaded.timers,
        lookups=loaded.lookups,
        code=loaded.code,
        after=loaded.after,
        window_columns=loaded.window_columns,
        writes_for_itself=loaded.writes_for_itself,
    )


def done_of(
    request: int, outcome: BatchOutcome, *, rows: bytes | None = None, rows_bytes: int = 0
) -> BatchDone:
    """Return the message that answers the Process request with this id.

    ``rows``: the rows as an Arrow stream. For many rows it is in a passed file instead: ``rows_bytes`` is the file's size.
    """
    outline = outcome.outline
    first = pack_sequence(outline.first)
    return BatchDone(
        id=request,
        records=outline.records,
        duplicates=outline.duplicates,
        first=first,
        last=first if outline.last is outline.first else pack_sequence(outline.last),
        latest_arrival_ms=outline.latest_arrival_ms,
        millis_behind_latest=outline.millis_behind_latest,
        rows=rows,
        rows_bytes=rows_bytes,
        attempts=outcome.attempts,
        effects=outcome.effects.packed(),
        skipped=outcome.skipped,
        discarded=outcome.discarded,
        keeps_position=outcome.keeps_position,
        position=pack_sequence(outcome.position),
        owes=outcome.owes,
        timers=outcome.timers,
    )


def outcome_of(done: BatchDone, files: Descriptors) -> BatchOutcome:
    """Return the outcome that a message contains. The rows are read from the message, or from the first of ``files``.

    That file is removed from ``files`` and closed; the rows stay readable.
    """
    rows = None if done.rows is None else rows_from(done.rows)
    if done.rows_bytes:
        file = files.pop(0)
        try:
            rows = rows_in(file, done.rows_bytes)
        finally:
            os.close(file)
    first = unpack_sequence(done.first)
    last = first if done.last == done.first else unpack_sequence(done.last)
    return BatchOutcome(
        outline=BatchOutline(
            records=done.records,
            duplicates=done.duplicates,
            first=first,
            last=last,
            latest_arrival_ms=done.latest_arrival_ms,
            millis_behind_latest=done.millis_behind_latest,
        ),
        effects=NOTHING if rows is None and not done.effects else Effects.unpacked(rows, done.effects),
        attempts=done.attempts,
        skipped=done.skipped,
        discarded=done.discarded,
        keeps_position=done.keeps_position,
        position=unpack_sequence(done.position) if done.keeps_position else None,
        owes=done.owes,
        timers=done.timers,
    )


def joined(parts: list[BatchOutcome]) -> BatchOutcome:
    """Return one outcome for the parts of a batch, given in order."""
    effects = [part.effects for part in parts]
    rows = [each.rows for each in effects if each.rows is not None]
    last = parts[-1]
    positions = [part.position for part in parts if part.position is not None]
    return BatchOutcome(
        outline=last.outline,
        effects=structs.replace(
            Effects.without_rows(effects), rows=pa.concat_tables(rows).combine_chunks() if rows else None
        ),
        attempts=max(part.attempts for part in parts),
        skipped=sum(part.skipped for part in parts),
        discarded=sum(part.discarded for part in parts),
        keeps_position=last.keeps_position,
        position=max(positions, default=None),
        owes=last.owes,
        timers=None if last.timers is None else last.timers.joined([part.timers for part in parts]),
    )


def sent_of(snapshot: StateSnapshot, size: int, deltas: tuple[bytes, ...]) -> SentStore:
    """Return a snapshot for an Open message; its entries are in a file of ``size`` bytes. For ``deltas`` see there."""
    first, last = (bound.to_bytes(16, "big") for bound in snapshot.key_range)
    return SentStore(
        snapshot.store_id,
        first,
        last,
        snapshot.accepted,
        snapshot.clock_ms,
        snapshot.siblings,
        size,
        deltas,
    )


def source_of(sent: SentStore, file: int) -> SnapshotSource:
    """Return what gives the snapshot, with the deltas, to the first caller, and raises StateMoved for each later one.

    Only the server can read the store again: the error asks for another Open. The file is closed at once.
    """
    try:
        entries = rows_in(file, sent.size)
    finally:
        os.close(file)
    left = [entries]

    async def source() -> StateSnapshot:
        if not left:
            raise StateMoved(
                "A batch does not follow the state of its store in the worker process.",
                did="The server opens the shard again with the present state.",
            )
        return StateSnapshot(
            sent.store,
            KeyRange(int.from_bytes(sent.first, "big"), int.from_bytes(sent.last, "big")),
            sent.accepted,
            sent.clock_ms,
            changed(left.pop(), sent.deltas),
            sent.siblings,
        )

    return source


def changed(entries: pa.Table, blobs: Iterable[bytes]) -> pa.Table:
    """Return the entries of a snapshot after the changes in ``blobs`` (``pack_changes``), in order."""
    changes = {(change.key, change.timer): change for blob in blobs for change in unpack_changes(blob)}
    if not changes:
        return entries
    if "timer" not in entries.column_names:
        entries = entries.append_column("timer", pa.nulls(len(entries), pa.string()))
    touched = pc.is_in(entries["key"], pa.array([key for key, _ in changes], pa.binary()))
    rows = [
        row for row in entries.filter(touched).to_pylist() if (row["key"], row["timer"] or "") not in changes
    ]
    rows += [
        change._asdict() | {"timer": change.timer or None}
        for change in changes.values()
        if change.value is not None
    ]
    untouched = entries.filter(pc.invert(touched))
    return pa.concat_tables([untouched, pa.Table.from_pylist(rows, schema=entries.schema)])


def failed(request: int, error: BaseException) -> Failed:
    """Return the message for an error."""
    if isinstance(error, MldserverError):
        where = {key: value for key, value in error.where.items() if value is not None}
        return Failed(request, type(error).__name__, error.what, error.did, error.advice, where)
    return Failed(request, type(error).__name__, str(error), "", "", {})


def error_of(message: Failed) -> MldserverError:
    """Return the error in a message, of the same class if it is one of ``mldserver.errors``."""
    cls = getattr(errors, message.error, None)
    if isinstance(cls, type) and issubclass(cls, MldserverError):
        return cls(message.what, did=message.did, advice=message.advice, **message.where)
    return InternalError(f"Unexpected {message.error} in a worker: {message.what}")
