"""What the server and the Spark driver's process say to each other (``children/channel.py`` carries it).

server → driver    StartSession, then any number of LoadFunction, RunWindows, Publish, RunQuery and CancelJob, then Stop (or
                   the end of the socket)
driver → server    Started (or StartFailed), for each LoadFunction once FunctionLoaded or LoadFailed, and for each RunWindows,
                   Publish and RunQuery once JobDone (QueryDone) or FailedJob; HookSlow while an ``on_window`` runs for long; Health and Log at any time, JvmGone at the end

An error is put into a message for the person who wrote ``on_window``. A failed call into Spark brings fifty lines of py4j
and Java with it. What helps is the sentence of the innermost error and the user's own frames; that is what is kept.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final

import msgspec

from mldserver.children import channel
from mldserver.engine_jobs import (  # msgspec reads them
    NO_WORK,
    Content,
    FunctionView,  # msgspec reads it
    PublishJob,
    SparkWork,
    WindowJob,
)
from mldserver.handler.loader import is_library, relative
from mldserver.handler.queries import Query  # msgspec reads it
from mldserver.sinks.sink import Owner, SinkSpec  # msgspec reads them

WARM_UP: Final = "-warm-up"
"""What the folder of a warm-up's window has behind the scratch folder's name, where the output is a local folder."""


class StartSession(channel.Message, frozen=True):
    """Make the session. The first message, sent once."""

    master: str = "local[*]"
    scratch: str = ""
    """A directory of this driver's life: for temporary files."""
    conf: dict[str, str] = msgspec.field(default_factory=dict)
    """The user's settings; they win over every default."""
    python_path: tuple[str, ...] = ()
    """Folders that are importable in the driver and in Spark's workers; empty: the working directory."""
    quick: bool = False
    """Short-lived use (tests, demo): options that start the JVM sooner and slow long jobs down."""
    archive: str | None = None
    """The class archive to start from, or to write when the JVM exits."""
    train: bool = False
    """True: this life only writes ``archive``: no handler is loaded, other processes come first."""
    concurrency: int = 1
    query_concurrency: int = 2
    """How many queries of handlers run at a time, beside windows."""
    app_name: str = "mldserver"
    """What the cluster, the UI and the event log call the application, unless ``conf`` does."""
    py_files: tuple[str, ...] = ()
    """Files of Python code for the executors, in addition to the handlers'."""
    python: str | None = None
    """The executors' interpreter; None: PYSPARK_PYTHON, or what Spark takes."""
    own_umask: bool = True
    """Whether files that Spark writes get the server's umask: it does not if no output is a local folder."""


class LoadFunction(channel.Message, frozen=True):
    """Load a function's handler into the session. Sent any time after StartSession."""

    name: str = ""
    """The function's name: jobs name it."""
    handler: str = ""
    """Dotted path, ``module`` or ``module:Name``; empty: rows are written as they are."""
    schema: str = ""
    """The handler's own columns as Spark DDL."""
    sink: SinkSpec | None = None
    """The table that Publish writes into."""
    side_sinks: dict[Content, SinkSpec] = msgspec.field(default_factory=dict)
    """The tables that Publish writes other content into than windows."""
    owner: Owner | None = None
    """Whose these tables are, or become."""
    new_ledger: bool = False
    """The first driver takes the tables from another owner; later ones do not, or they might take them back."""
    storage: dict[str, str] = msgspec.field(default_factory=dict)
    """Hadoop's settings of the output folder's storage: the session's own, never on the JVM's command line."""
    place: str = ""
    """Where the warm-up's window lies, as Spark knows it, in the storage of the output."""
    out: str = ""
    """``WindowJob.out`` of it."""
    code: dict[str, tuple[str, bytes]] = msgspec.field(default_factory=dict)
    """File and text of the user's modules by name: what the driver and its Python workers import (``HandlerSpec.code``)."""


class RunWindows(channel.Message, frozen=True):
    """Run one attempt at each of these windows, as one job, under an id that is never used again."""

    id: int
    jobs: tuple[WindowJob, ...]
    function: str = ""
    """Whose windows they are."""

    @property
    def job(self) -> WindowJob:
        """The first."""
        return self.jobs[0]

    @property
    def label(self) -> str:
        """What Spark's pages call the job."""
        more = f" and {len(self.jobs) - 1} more" if self.jobs[1:] else ""
        return f"window {self.job.window.id}{more}"


class Publish(channel.Message, frozen=True):
    """Write a committed output into the table, under an id of the same kind."""

    id: int
    job: PublishJob
    function: str = ""
    """Whose table that is."""

    @property
    def label(self) -> str:
        """What Spark's pages call the job."""
        return f"window {self.job.window.id}"


class RunQuery(channel.Message, frozen=True):
    """Run a query of a handler, under an id of the same kind."""

    id: int
    query: Query
    views: tuple[FunctionView, ...]
    """Those that it names, as they are now."""
    max_bytes: int
    """Of the result's file."""
    function: str = ""
    """Whose handler asks."""

    @property
    def label(self) -> str:
        """What Spark's pages call the job."""
        return f"query of {self.function}"


class CancelJob(channel.Message, frozen=True):
    """End a running or waiting job; FailedJob follows (or JobDone, when the cancellation came too late)."""

    id: int


class Stop(channel.Message, frozen=True):
    """Stop the session and the JVM in good order, then exit."""


class Started(channel.Message, frozen=True):
    """The session exists; it is not warm yet."""

    spark_version: str
    ui: str | None = None
    """The UI's address."""
    jvm_pid: int | None = None
    """None on Spark Connect."""
    application: str | None = None
    """What Spark calls the session on its pages and in its event log; None on Spark Connect."""


class FunctionLoaded(channel.Message, frozen=True):
    """A function's handler is loaded, and its warm-up's window went through: its jobs run at once from now on."""

    name: str


class StartFailed(channel.Message, frozen=True):
    """There will be no session; the driver exits."""

    fault: str
    """``handler``, ``operator`` or ``spark``: whose it is."""
    error: str
    message: str
    traceback: str = ""


class LoadFailed(channel.Message, frozen=True):
    """A function was not loaded. The session and all other functions stay as they are."""

    name: str
    fault: str
    """As in StartFailed."""
    error: str
    message: str
    traceback: str = ""


class HookSlow(channel.Message, frozen=True):
    """A window's ``on_window`` has run for a minute, two, four and so on."""

    id: int
    window: str
    seconds: float
    line: str
    """The line of the user's code that runs: its file, number, function and text."""


class Output(msgspec.Struct, frozen=True, array_like=True):
    """What an attempt wrote."""

    files: tuple[str, ...]
    """Names of the data files, relative to the staging directory; empty when the pipeline wrote for itself."""
    rows: int
    work: SparkWork = NO_WORK


class JobDone(channel.Message, frozen=True):
    """Every output is complete in its own staging directory; or in the table, for a Publish."""

    id: int
    outputs: tuple[Output, ...]
    """In the order of the jobs; none for a Publish."""


class QueryDone(channel.Message, frozen=True):
    """A query has a result, whose file comes too."""

    id: int
    order: tuple[int, ...]
    """As in ``QueryResult``."""


class FailedJob(channel.Message, frozen=True):
    """The job failed or was cancelled; its staging directory may hold anything."""

    id: int
    error: str
    """The error's class name."""
    message: str
    """What it says, without Spark's and Java's inner workings."""
    traceback: str = ""
    """The user's own frames."""
    cancelled: bool = False
    advice: str = ""
    """Where its tasks failed, and what to do; never text of the user's code, Spark or a database."""


class Health(channel.Message, frozen=True):
    """Whether a job would run now. Sent when that changes."""

    trouble: str
    """Why it would not, in a sentence; empty: it would."""
    over: bool = False
    """Whether nothing will ever run on this session: the driver ends."""


class JvmGone(channel.Message, frozen=True):
    """The driver's last words when its JVM has died under it."""

    exit_code: int
    """Minus the signal's number, where it was killed."""


class Log(channel.Message, frozen=True):
    """A line for the log from the driver itself."""

    level: str
    text: str


Job = RunWindows | Publish | RunQuery
FromServer = StartSession | LoadFunction | Job | CancelJob | Stop
FromDriver = (
    Started
    | StartFailed
    | FunctionLoaded
    | LoadFailed
    | HookSlow
    | JobDone
    | QueryDone
    | FailedJob
    | Health
    | JvmGone
    | Log
)
Message = FromServer | FromDriver


_LIMIT = 20_000
"""Characters of a message or a traceback: a query plan in an error can have megabytes."""

_LIBRARY = Path(os.__file__).parent

_TRACEBACK: Final = "Traceback (most recent call last):"
_FRAME: Final = re.compile(r'\s*File "([^"]+)", line (\d+), in (\S+)')
_RAISED: Final = re.compile(r"[A-Za-z_][\w.]*(: .*)?$")
"""The last line of a traceback: the error's class, and what it says."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A reported error: its class, message and user frames."""

    error: str
    message: str
    traceback: str


def describe(error: BaseException) -> Fault:
    """Describe ``error``. Failures in the code of the user's exception are caught."""
    name, text = type(error).__name__, message(error)
    try:
        frames = _shorten("".join(_traceback_lines(error, set())).rstrip())
    except Exception:  # noqa: BLE001  # a thousand causes in a row, say: better no frames than no answer
        frames = f"{name}: {text}"
    return Fault(name, text, frames)


def text_of(error: BaseException) -> str:
    """Return all that an error says, whatever code its class has."""
    try:
        return str.__str__(str(error))  # what a __str__ returns may be of a class with code of its own
    except BaseException:  # noqa: BLE001  # the user's __str__ may fail in any way; so does py4j's without its JVM
        return "(its message cannot be printed)"


def message(error: BaseException) -> str:
    """Return an error's text without Java's stack trace; an error that the user's Python code raised comes first."""
    text = text_of(error)
    user_error = _python_worker_error(text)
    # An exception raised in Java carries "\n\tat package.Class.method" lines, Spark's own a "JVM stacktrace:" part.
    for marker in ("\nJVM stacktrace:", "\n\tat ", "\nDriver stacktrace:"):
        text = text.partition(marker)[0]
    return _shorten(f"{user_error}{text.strip() or type(error).__name__}")


def _python_worker_error(text: str) -> str:
    """Find the last Python traceback in a message of Spark; return its error and the user's line as one line, or "".

    An executor's Python process raised it (a UDF, for example). Spark puts the traceback anywhere into its own message.
    """
    lines = text.rpartition(_TRACEBACK)[2].splitlines() if _TRACEBACK in text else []
    users_line = ""
    for line in lines:
        if frame := _FRAME.match(line):
            path, number, function = frame.groups()
            if not is_library(path) and "/pyspark.zip/" not in path:
                users_line = f" ({relative(path)}:{number}, in {function})"
        elif raised := _RAISED.match(line):
            return f"{raised[0].strip()}{users_line}\n"
    return ""


def line_of(frame: FrameType | None, function: object) -> str:
    """Return which line of the user's code a thread is at, for people; without one, where ``function`` is defined."""
    stack = [] if frame is None else traceback.extract_stack(frame)
    users_frames = [each for each in stack if not is_library(each.filename)]
    if users_frames:
        innermost = users_frames[-1]
        return f"{relative(innermost.filename)}:{innermost.lineno}, in {innermost.name}: {innermost.line}"
    code = getattr(inspect.unwrap(function) if callable(function) else function, "__code__", None)
    return "" if code is None else f"{relative(code.co_filename)}:{code.co_firstlineno}, in {code.co_name}"


def lost_connection(error: BaseException) -> bool:
    """Whether an error, or one of its causes, may mean that the other end of a connection (the JVM) died."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        if isinstance(current, (OSError, EOFError)) or type(current).__name__ == "Py4JNetworkError":
            return True
        seen.add(id(current))
        current = current.__cause__ or current.__context__
    return False


def _traceback_lines(error: BaseException, seen: set[int]) -> list[str]:
    """Return the traceback as Python writes it, causes first, but only with the user's frames. ``seen``: ids of printed errors."""
    lines: list[str] = []
    seen.add(id(error))
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None and id(cause) not in seen:
        relation = "was the direct cause of" if error.__cause__ else "was being handled during"
        lines += [*_traceback_lines(cause, seen), f"\nThe error above {relation} the one below:\n\n"]
    stack = traceback.extract_tb(error.__traceback__)
    # Compare whole paths: a folder of the user's may have the name of one of these packages.
    specs = (importlib.util.find_spec(name) for name in ("pyspark", "py4j"))
    packages = (Path(spec.origin).parent for spec in specs if spec is not None and spec.origin)
    folders = (Path(__file__).parent, _LIBRARY / "concurrent" / "futures", _LIBRARY / "asyncio", *packages)
    machinery = ("<frozen ", *(f"{folder}/" for folder in folders))
    frames = [frame for frame in stack if not frame.filename.startswith(machinery)]
    if frames:
        lines += ["Traceback (most recent call last):\n", *traceback.format_list(frames)]
    kind = type(error)
    prefix = "" if kind.__module__ in {"builtins", "__main__"} else f"{kind.__module__}."
    lines.append(f"{prefix}{kind.__name__}: {message(error)}\n")
    return lines


def _shorten(text: str) -> str:
    return text if len(text) <= _LIMIT else f"{text[:_LIMIT]} … ({len(text)} characters)"
