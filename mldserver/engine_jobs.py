"""What an engine is asked to do with a window, and its answer. Plain values only: they cross a process border."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

from mldserver.windows import Window  # a job that crosses is read by its annotations

WINDOW: Final = "_window"
"""Column of a table that holds the window's id, text."""

REVISION: Final = "_revision"
"""Column of a table that holds the window's revision, INT."""

FINAL: Final = "_final"
"""Column of a table with early results that says whether a row is of a window's final output, BOOLEAN."""

NO_REVISION: Final = -(2**31)
"""The revision of a window of which a table holds nothing: below those of early results, which are below 1."""


def early_revision(segments: int) -> int:
    """Return as which revision of a table an early result counts: the higher, the more segments it is of."""
    return NO_REVISION + segments


Content = Literal["window", "late_rows", "dead_letters"]
"""What goes into a table."""


@dataclass(frozen=True, slots=True)
class FunctionView:
    """The published windows of a function, as files, for queries of handlers and for jobs of other functions."""

    name: str
    """The function's."""
    paths: tuple[str, ...]
    """Files, or folders of files, as Spark takes them; the latest window's last."""
    columns: tuple[str, str] | None = None
    """The columns of a window's start and end; None: windows have none."""
    size_ms: int = 0
    """Of a window."""
    schema: str = ""
    """The columns as Spark DDL, to show while there are no files; empty: they are not known before there are."""
    is_table: bool = False
    """Whether the view is the present files of the table that the function's sink writes into, in place of ``paths``."""
    serial: int = field(default=0, compare=False)
    """Rises with each look at what is published: a view with a higher one shows at least as much."""
    window: str | None = None
    """The id of the only window of the view; None: the view shows all windows."""


@dataclass(frozen=True, slots=True)
class WindowJob:
    """One attempt at one window."""

    window: Window
    attempt: int
    segments: tuple[str, ...]
    """Absolute paths (or URIs) of the window's Parquet files."""
    staging: str
    """Absolute path (or URI) of a directory that does not exist yet; the output goes there, nowhere else."""
    rows: int
    """Rows in the segments."""
    bytes: int
    """Bytes of the segments: what the number of partitions is chosen from."""
    out: str = field(default="", repr=False)
    """The output folder's URI as pyarrow takes it, with options and credentials; empty where paths are local."""
    older: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Those of ``segments`` that were written under another schema, by its DDL; every value of theirs is one of the
    handler's present schema too."""
    views: tuple[FunctionView, ...] = ()
    """The published windows of other functions, which ``on_window`` finds as views (``after``)."""
    previous: FunctionView | None = None
    """The result of the window before, for an ``on_window`` that takes it; None: there is none."""


@dataclass(frozen=True, slots=True)
class SparkWork:
    """What Spark did for an attempt, by the numbers that its own pages have; nothing where Spark does not say."""

    jobs: tuple[int, ...] = ()
    """The ids of the jobs."""
    stages: tuple[tuple[int, float], ...] = ()
    """The id of each stage that ran, and its seconds."""


NO_WORK: Final = SparkWork()


@dataclass(frozen=True, slots=True)
class WindowResult:
    """A finished attempt."""

    files: tuple[str, ...]
    """Names of the data files, relative to ``staging``; empty when the pipeline wrote for itself."""
    rows: int
    seconds: float
    """From the job's arrival at the engine to its end."""
    work: SparkWork = NO_WORK
    """Windows that share a job have the same."""


@dataclass(frozen=True, slots=True)
class PublishJob:
    """One committed output, to be written into the table that windows are published into."""

    window: Window
    staging: str
    """Absolute path (or URI) of the directory that holds the output."""
    files: tuple[str, ...]
    """Names of its data files, relative to ``staging``; empty for a revision that has nothing to show."""
    rows: int
    out: str = field(default="", repr=False)
    """As in WindowJob."""
    ledger: str = ""
    """The id of the ledger that holds the window: its revisions count there."""
    content: Content = "window"
    """What it holds: each content has a table of its own."""
