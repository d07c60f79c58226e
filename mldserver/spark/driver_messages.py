"""What the server and the Spark driver's process say to each other (``children/channel.py`` carries it).

server → driver    Start, then any number of Run, RunGroup, Publish and Cancel, then Stop (or just the end of the
socket)
driver → server    Started, Warm (or StartFailed), then Progress, and for each Run and Publish once Done, for each
RunGroup once DoneGroup, or for any of them FailedJob; Log at any time, JvmGone at the end
"""

from __future__ import annotations

import msgspec

from mldserver.children import channel
from mldserver.jobs.engine import PublishJob, WindowJob  # noqa: TC001  # msgspec reads them
from mldserver.spark.sinks.sink import SinkSpec  # noqa: TC001  # msgspec reads it


class Start(channel.Message, frozen=True):
    """Make the session. The first message, sent once."""

    handler: str
    """Dotted path, ``module`` or ``module:Name``."""
    schema: str
    """The handler's own columns as Spark DDL."""
    master: str
    scratch: str
    """A directory of this driver's life: temporary files, the warm-up's window."""
    conf: dict[str, str] = msgspec.field(default_factory=dict)
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


class Run(channel.Message, frozen=True):
    """Run one attempt at a window under an id that is never used again."""

    id: int
    job: WindowJob


class RunGroup(channel.Message, frozen=True):
    """Run one attempt at each of several windows, as one job."""

    id: int
    jobs: tuple[WindowJob, ...]

    @property
    def job(self) -> WindowJob:
        """The first: what the group is named after."""
        return self.jobs[0]


class Publish(channel.Message, frozen=True):
    """Write a committed output into the table, under an id of the same kind."""

    id: int
    job: PublishJob


class Cancel(channel.Message, frozen=True):
    """End a running or waiting job; FailedJob follows (or Done, when it came too late)."""

    id: int


class Stop(channel.Message, frozen=True):
    """Stop the session and the JVM in good order, then exit."""


class Started(channel.Message, frozen=True):
    """The session exists; it is not warm yet."""

    spark_version: str
    ui: str | None = None
    """The UI's address."""


class Warm(channel.Message, frozen=True):
    """The warm-up's window went through; jobs run at once from now on."""


class StartFailed(channel.Message, frozen=True):
    """There will be no session; the driver exits."""

    fault: str
    """``handler``, ``operator`` or ``spark``: whose it is."""
    error: str
    message: str
    traceback: str = ""


class Progress(channel.Message, frozen=True):
    """How far a running job's tasks are."""

    id: int
    stages: int
    tasks: int
    tasks_done: int


class Done(channel.Message, frozen=True):
    """The job's output is complete in its staging directory; or in the table, for a Publish."""

    id: int
    files: tuple[str, ...]
    """Names relative to the staging directory; empty when the pipeline wrote for itself, and for a Publish."""
    rows: int


class Output(msgspec.Struct, frozen=True, array_like=True):
    """What an attempt wrote."""

    files: tuple[str, ...]
    """Names of the data files, relative to the staging directory."""
    rows: int


class DoneGroup(channel.Message, frozen=True):
    """Every output of a group is complete, each in its own staging directory; in the order of the jobs."""

    id: int
    outputs: tuple[Output, ...]


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


class JvmGone(channel.Message, frozen=True):
    """The driver's last words when its JVM has died under it."""

    exit_code: int
    """Minus the signal's number, where it was killed."""


class Log(channel.Message, frozen=True):
    """A line for the log from the driver itself."""

    level: str
    text: str


FromServer = Start | Run | RunGroup | Publish | Cancel | Stop
FromDriver = Started | Warm | StartFailed | Progress | Done | DoneGroup | FailedJob | JvmGone | Log
Message = FromServer | FromDriver
