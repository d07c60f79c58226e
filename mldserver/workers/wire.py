"""What server and worker say to each other: one message a datagram, in MessagePack, with file descriptors beside it.

    server → worker    Start, then any number of Open, Process, Notify, Forget and Cancel; the end of the socket ends it
    worker → server    Loaded (or Refused), then Beat and LogLine at any time, and once for each Open, Process, Notify and
                       Forget: Done, Opened or Failed

Both sides are the same program. Bytes that do not fit raise WireError: then the worker is not to be trusted any more.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from mldserver import errors
from mldserver.errors import InternalError, MldserverError
from mldserver.records import Sequence

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = [
    "BeatMessage",
    "Cancel",
    "Done",
    "Failed",
    "Finished",
    "Forget",
    "FromServer",
    "FromWorker",
    "HookMessage",
    "Loaded",
    "LogLine",
    "Open",
    "Outline",
    "Park",
    "Place",
    "Process",
    "Start",
    "Unpark",
    "WireError",
    "decode_from_server",
    "decode_from_worker",
    "encode",
    "error_of",
    "failed",
    "plain",
    "position",
    "restored",
    "sequence_of",
    "sequence_text",
]


class WireError(Exception):
    """The other side does not speak this protocol."""


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """A message; its class's name is its tag."""


class Start(_Message, frozen=True):
    """The first message."""

    handler: str
    """Dotted path."""
    python_path: list[str]
    """Searched before the worker's own."""
    directory: str
    policy: dict[str, Any]
    """A ``FailurePolicy`` as plain values."""
    concurrency: int | None
    deadline_seconds: float | None
    arena_bytes: int
    """Of the shared memory that comes with this message."""
    log_level: int


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Where a line lies: in the message, in the arena, or in a file of its own that comes with the message."""

    length: int
    inline: bytes | None = None
    offset: int | None = None
    """In the arena; None, and no inline either: in the file."""


class Process(_Message, frozen=True):
    """Take a batch through the handler."""

    id: int
    shard: str
    line: Place
    """Where its payload's bytes are."""
    form: int
    """As ``Payload.packed`` says."""
    received_ms: int
    after: str | None
    """A sequence as ``number/sub``."""
    part: tuple[int, int] | None = None
    """Only these of its fresh records, from and to; None: all."""
    condemned: str | None = None
    """Why none of them may reach the handler any more: they are dead letters."""
    redriven: bool = False


class Open(_Message, frozen=True):
    """Open a shard."""

    id: int
    shard: str
    start: str | None
    start_sub: int


class HookMessage(_Message, frozen=True):
    """Run a life-cycle hook."""

    id: int
    shard: str
    hook: str


class Park(_Message, frozen=True):
    """Let the later records of keys wait behind their dead letters."""

    id: int
    shard: str
    keys: dict[str, str]
    """Sequences by key."""


class Unpark(_Message, frozen=True):
    """Let the later records of a key be processed again."""

    id: int
    shard: str
    key: str


class Forget(_Message, frozen=True):
    """Drop a shard's handler."""

    id: int
    shard: str


class Cancel(_Message, frozen=True):
    """Nobody waits for a request any more; it is answered all the same, so that its line's room is known to be free."""

    id: int


class Loaded(_Message, frozen=True):
    """The handler is there: what a ``HandlerSpec`` says of it, as plain values."""

    kind: str
    record_hook: str
    hooks: dict[str, bool]
    """Which it has, and whether each is asynchronous."""
    concurrency: int
    schema: str | None
    """As DDL."""
    tumbling: tuple[int, str | None, int, int] | None
    """Size, column, lateness and disorder, in ms."""
    batches: tuple[int, int] | None
    """Rows, and age in ms."""
    warnings: list[tuple[str, str, int]]


class Outline(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A ``BatchOutline``."""

    records: int
    duplicates: int
    first: str | None
    last: str | None
    latest_arrival_ms: int | None
    millis_behind_latest: int | None


class Done(_Message, frozen=True):
    """What became of a batch. Its rows are an Arrow stream, in the message or in a file that comes with it."""

    id: int
    outline: Outline
    letters: list[dict[str, Any]]
    rows: bytes | None
    """None: there are none, or they are in the file."""
    rows_bytes: int
    """0: there are none."""
    # As in ``BatchOutcome``.
    attempts: int = 1
    skipped: int = 0
    discarded: int = 0
    keeps_position: bool = False
    position: str | None = None
    owes: bool = False


class Finished(_Message, frozen=True):
    """Any other request is done."""

    id: int
    position: str | None = None
    """What a handler that keeps its position has checkpointed, after a hook."""


class Failed(_Message, frozen=True):
    """A request ended with an error, or the worker cannot start (id 0)."""

    id: int
    error: str
    """A class of ``mldserver.errors``, or the name of another."""
    what: str
    did: str
    advice: str
    where: dict[str, Any]
    cancelled: bool = False


class BeatMessage(_Message, frozen=True):
    """A sign of life (see ``life.Beat``)."""

    running_ms: int
    blocked_ms: int
    resident_bytes: int


class LogLine(_Message, frozen=True):
    """An event for the log."""

    level: str
    event: str
    fields: dict[str, Any]


FromServer = Start | Process | Open | HookMessage | Park | Unpark | Forget | Cancel
FromWorker = Loaded | Done | Finished | Failed | BeatMessage | LogLine

_T = TypeVar("_T")
_encoder = msgspec.msgpack.Encoder(enc_hook=str)
_server_decoder: msgspec.msgpack.Decoder[FromServer] = msgspec.msgpack.Decoder(FromServer)
_worker_decoder: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)


def encode(message: FromServer | FromWorker) -> bytes:
    """Return the message's bytes; what MessagePack does not know becomes text.

    That are objects, numbers beyond 64 bits, and the halves of surrogate pairs that a handler's texts may hold.
    """
    try:
        return _encoder.encode(message)
    except (UnicodeEncodeError, OverflowError):
        return _encoder.encode(_encodable(msgspec.to_builtins(message, builtin_types=(bytes,), enc_hook=str)))


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return str(value)
    if isinstance(value, dict):
        return {_encodable(key): _encodable(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_encodable(each) for each in value]
    return value


def decode_from_server(data: bytes) -> FromServer:
    """Return a message of the server's. Raises WireError."""
    return _decoded(_server_decoder, data)


def decode_from_worker(data: bytes) -> FromWorker:
    """Return a message of the worker's. Raises WireError."""
    return _decoded(_worker_decoder, data)


def _decoded(decoder: msgspec.msgpack.Decoder[_T], data: bytes) -> _T:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"{len(data)} bytes are no message: {error}") from None


# Values that cross.


def sequence_text(sequence: Sequence | None) -> str | None:
    """Return a sequence as it crosses: its number has up to 56 digits."""
    return None if sequence is None else str(sequence)


def sequence_of(text: str | None) -> Sequence | None:
    """Return what ``sequence_text`` was given."""
    return None if text is None else position(text)


def position(text: str) -> Sequence:
    """Return the sequence of ``number/sub``."""
    number, _, sub = text.partition("/")
    return Sequence(int(number), int(sub or 0))


def plain(value: DataclassInstance) -> dict[str, Any]:
    """Return a dataclass's fields as they cross: the numbers of sequences have up to 56 digits."""
    fields = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    sequences = _sequences(type(value))
    return {name: sequence_text(each) if name in sequences else each for name, each in fields.items()}


def restored(cls: type[_T], values: dict[str, Any]) -> _T:
    """Return the dataclass that ``plain`` was given."""
    names: frozenset[str] = _sequences(cls)  # type: ignore[arg-type]  # every class can be hashed
    for name in names & values.keys():
        values[name] = sequence_of(values[name])
    return cls(**values)


@functools.cache
def _sequences(cls: type) -> frozenset[str]:
    return frozenset(each.name for each in dataclasses.fields(cls) if "Sequence" in str(each.type))


def failed(request: int, error: BaseException, *, cancelled: bool = False) -> Failed:
    """Return an error as it crosses."""
    if isinstance(error, MldserverError):
        where = {key: value for key, value in error.where.items() if value is not None}
        return Failed(request, error.name, error.what, error.did, error.advice, where)
    return Failed(request, type(error).__name__, str(error), "", "", {}, cancelled=cancelled)


def error_of(message: Failed) -> MldserverError:
    """Return the error that ``failed`` was given, as the same class where it is one of ours."""
    cls = getattr(errors, message.error, None)
    if isinstance(cls, type) and issubclass(cls, MldserverError):
        return cls(message.what, did=message.did, advice=message.advice, **message.where)
    return InternalError(f"Unexpected {message.error} in a worker: {message.what}")
