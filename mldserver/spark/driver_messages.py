"""What the server and the Spark driver's process say to each other. Synchronous, no I/O.

A message is a frozen dataclass; on the socket pair it is a length (4 bytes, big-endian) and that many bytes of JSON:
an object with the fields and ``type``, the class's name.

    server → driver    Start, then any number of Run, RunGroup, Publish and Cancel, then Stop (or just the end of the
                       socket)
    driver → server    Started, Warm (or StartFailed), then Progress, and for each Run and Publish once Done, for each
                       RunGroup once DoneGroup, or for any of them FailedJob; Log at any time, JvmGone at the end

Each side believes that the other is the same program; bytes that do not fit raise WireError and end the driver.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import TYPE_CHECKING, Any

import orjson

from mldserver.jobs.engine import PublishJob, WindowJob
from mldserver.spark.sinks.sink import SinkSpec
from mldserver.windows import Window

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "LIMIT",
    "Cancel",
    "Decoder",
    "Done",
    "DoneGroup",
    "FailedJob",
    "JvmGone",
    "Log",
    "Message",
    "Output",
    "Progress",
    "Publish",
    "Run",
    "RunGroup",
    "Start",
    "StartFailed",
    "Started",
    "Stop",
    "Warm",
    "WireError",
    "encode",
]

LIMIT = 64 * 1024 * 1024
"""Bytes of one message. The largest are windows with very many segments: about 100 bytes each."""

_PREFIX = 4


class WireError(ValueError):
    """The bytes are no message: the other end is broken, or is not our program."""


@dataclass(frozen=True, slots=True)
class Start:
    """Make the session. The first message, sent once."""

    handler: str
    """Dotted path, ``module`` or ``module:Name``."""
    schema: str
    """The handler's own columns as Spark DDL."""
    master: str
    scratch: str
    """A directory of this driver's life: temporary files, the warm-up's window."""
    conf: dict[str, str] = field(default_factory=dict)
    """The user's settings; they win over every default."""
    python_path: tuple[str, ...] = ()
    ui: bool = False
    quick: bool = False
    """Short-lived use (tests, demo): options that start the JVM sooner and slow long jobs down."""
    archive: str | None = None
    """The class archive to start from, or to write when the JVM exits."""
    train: bool = False
    """True: this life only writes ``archive``: no handler is loaded, other processes come first."""
    concurrency: int = 1
    sink: SinkSpec | None = None
    """The table that Publish writes into."""


@dataclass(frozen=True, slots=True)
class Run:
    """Run one attempt at a window under an id that is never used again."""

    id: int
    job: WindowJob


@dataclass(frozen=True, slots=True)
class RunGroup:
    """Run one attempt at each of several windows, as one job."""

    id: int
    jobs: tuple[WindowJob, ...]

    @property
    def job(self) -> WindowJob:
        """The first: what the group is named after."""
        return self.jobs[0]


@dataclass(frozen=True, slots=True)
class Publish:
    """Write a committed output into the table, under an id of the same kind."""

    id: int
    job: PublishJob


@dataclass(frozen=True, slots=True)
class Cancel:
    """End a running or waiting job; FailedJob follows (or Done, when it came too late)."""

    id: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop the session and the JVM in good order, then exit."""


@dataclass(frozen=True, slots=True)
class Started:
    """The session exists; it is not warm yet."""

    spark_version: str
    ui: str | None = None
    """The UI's address."""


@dataclass(frozen=True, slots=True)
class Warm:
    """The warm-up's window went through; jobs run at once from now on."""


@dataclass(frozen=True, slots=True)
class StartFailed:
    """There will be no session; the driver exits."""

    fault: str
    """``handler``, ``operator`` or ``spark``: whose it is."""
    error: str
    message: str
    traceback: str = ""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a running job's tasks are."""

    id: int
    stages: int
    tasks: int
    tasks_done: int


@dataclass(frozen=True, slots=True)
class Done:
    """The job's output is complete in its staging directory; or in the table, for a Publish."""

    id: int
    files: tuple[str, ...]
    """Names relative to the staging directory; empty when the pipeline wrote for itself, and for a Publish."""
    rows: int


@dataclass(frozen=True, slots=True)
class Output:
    """What an attempt wrote."""

    files: tuple[str, ...]
    """Names of the data files, relative to the staging directory."""
    rows: int


@dataclass(frozen=True, slots=True)
class DoneGroup:
    """Every output of a group is complete, each in its own staging directory; in the order of the jobs."""

    id: int
    outputs: tuple[Output, ...]


@dataclass(frozen=True, slots=True)
class FailedJob:
    """The job failed or was cancelled; its staging directory may hold anything."""

    id: int
    error: str
    """The error's class name."""
    message: str
    """What it says, without Spark's and Java's inner workings."""
    traceback: str = ""
    """The user's own frames."""
    cancelled: bool = False


@dataclass(frozen=True, slots=True)
class JvmGone:
    """The driver's last words when its JVM has died under it."""

    exit_code: int
    """Minus the signal's number, where it was killed."""


@dataclass(frozen=True, slots=True)
class Log:
    """A line for the log from the driver itself."""

    level: str
    text: str


Message = (
    Start
    | (Run | RunGroup | Publish)
    | (Cancel | Stop | Started | Warm | StartFailed | Progress)
    | (Done | DoneGroup | FailedJob | JvmGone | Log)
)

_TYPES: dict[str, type[Message]] = {
    cls.__name__: cls
    for cls in (
        *(Start, Run, RunGroup, Publish, Cancel, Stop),
        *(Started, Warm, StartFailed, Progress, Done, DoneGroup, FailedJob, JvmGone, Log),
    )
}


def _window(told: dict[str, Any]) -> Window:
    start, end = told["start"], told["end"]
    return Window(
        id=told["id"],
        start=None if start is None else datetime.fromisoformat(start),
        end=None if end is None else datetime.fromisoformat(end),
        revision=told["revision"],
        pipeline=told["pipeline"],
    )


def _job(told: dict[str, Any]) -> WindowJob:
    older = {ddl: tuple(paths) for ddl, paths in told["older"].items()}
    segments = tuple(told["segments"])
    return WindowJob(**{**told, "window": _window(told["window"]), "segments": segments, "older": older})


def _jobs(told: list[dict[str, Any]]) -> tuple[WindowJob, ...]:
    return tuple(map(_job, told))


def _outputs(told: list[dict[str, Any]]) -> tuple[Output, ...]:
    return tuple(Output(tuple(each["files"]), each["rows"]) for each in told)


def _publish_job(told: dict[str, Any]) -> PublishJob:
    return PublishJob(**{**told, "window": _window(told["window"]), "files": tuple(told["files"])})


def _sink(told: dict[str, Any] | None) -> SinkSpec | None:
    return None if told is None else SinkSpec(**told)


_FROM_JSON: dict[tuple[type[Message], str], Callable[[Any], Any]] = {
    (Run, "job"): _job,
    (RunGroup, "jobs"): _jobs,
    (Publish, "job"): _publish_job,
    (Start, "python_path"): tuple,
    (Start, "sink"): _sink,
    (Done, "files"): tuple,
    (DoneGroup, "outputs"): _outputs,
}
"""Fields that JSON holds in another form than the class."""


def encode(message: Message) -> bytes:
    """Return the message as it goes over the socket. Raises WireError when it is larger than LIMIT.

    Halves of surrogate pairs, which a user's error may have in its text, are written as escapes.
    """
    # Shallow on purpose: orjson writes nested dataclasses and datetimes itself.
    body = {item.name: getattr(message, item.name) for item in fields(message)}
    told = {"type": type(message).__name__, **body}
    try:
        payload = orjson.dumps(told)
    except TypeError:  # orjson's JSONEncodeError
        payload = orjson.dumps({name: _encodable(value) for name, value in told.items()})
    if len(payload) > LIMIT:
        raise WireError(f"a message of {len(payload)} bytes is longer than {LIMIT}")
    return len(payload).to_bytes(_PREFIX, "big") + payload


def _encodable(value: Any) -> Any:
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def _decode(payload: bytes) -> Message:
    try:
        told = orjson.loads(payload)
        cls = _TYPES[told.pop("type")]
        plain = {name: _FROM_JSON.get((cls, name), lambda same: same)(value) for name, value in told.items()}
        return cls(**plain)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WireError(f"not a message: {payload[:100]!r} ({type(error).__name__}: {error})") from error


class Decoder:
    """Bytes of any chunking in, messages out."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """Take what the socket gave and return the messages that are complete. Raises WireError."""
        self._buffer += data
        messages = []
        while len(self._buffer) >= _PREFIX:
            length = int.from_bytes(self._buffer[:_PREFIX], "big")
            if length > LIMIT:
                raise WireError(f"a message of {length} bytes is longer than {LIMIT}")
            if len(self._buffer) < _PREFIX + length:
                break
            payload = bytes(self._buffer[_PREFIX : _PREFIX + length])
            del self._buffer[: _PREFIX + length]
            messages.append(_decode(payload))
        return messages

    @property
    def pending(self) -> int:
        """Bytes of a message that is not complete yet."""
        return len(self._buffer)
