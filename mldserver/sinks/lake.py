"""What the sinks of Delta Lake and Iceberg have in common: the files of a window beside the table, columns, partitions.

Spark writes a window's Parquet files, with the columns ``_window`` and ``_revision``, into the attempt's directory. A sink
brings the committed files into the table's location, under names that say their window, ledger and revision. Then it
commits metadata with the Python library of the format. Two servers that publish one output bring the same files under the
same names. A file that no commit names is an orphan once its window has this revision or a later one: ``sweep``.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from mldserver.base.uris import opened, reach
from mldserver.engine_jobs import PublishJob
from mldserver.errors import OperatorError
from mldserver.sinks.sink import SinkSpec, refuse_table

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq
    from pyarrow.fs import FileSystem
    from pyspark.sql import SparkSession

TRIES: Final = 20
"""How often a commit that lost a race is decided anew, before the server is told: it tries again later."""

UNITS: Final = ("day", "month", "year")
"""What ``partition_by`` among ``sink_options`` may be; the first is the default."""

_NAME: Final = re.compile(r"(.+)\.([0-9a-f]+)\.(-?\d+)\.[0-9a-f]{12}\.parquet(?:\.[0-9a-f]{12}\.tmp)?")
_WIDER: Final = (("int8", "int16", "int32", "int64"), ("float", "double"))
_TIMESTAMPS: Final = "spark.sql.parquet.outputTimestampType"


class LakeFile(NamedTuple):
    """What the name of a file says that a sink has brought."""

    window: str
    ledger: str
    revision: int


def written_by(path: str) -> LakeFile | None:
    """Return what a file's name says; None for files of others."""
    match = _NAME.fullmatch(path.rpartition("/")[2])
    return None if match is None else LakeFile(match[1], match[2], int(match[3]))


def may_hold(path: str, window_id: str) -> bool:
    """Whether a file may hold rows of a window: one that the server has written for another window does not."""
    file = written_by(path)
    return file is None or file.window == window_id


def check_settings(sink: SinkSpec) -> None:
    """Raise ValueError where the table is named twice, or ``partition_by`` is none of ``UNITS``."""
    refuse_table(sink)
    if (unit := sink.options.get("partition_by", UNITS[0])) not in UNITS:
        raise ValueError(f"sink_options: partition_by = {unit} is none of {', '.join(UNITS)}")


def unit_and_options(sink: SinkSpec) -> tuple[str, dict[str, str]]:
    """Return what the table is partitioned by, and the options for the library."""
    options = dict(sink.options)
    return options.pop("partition_by", UNITS[0]), options


def day_of(job: PublishJob, unit: str) -> date | None:
    """Return the first day of the day, month or year that a window starts in; None for a window without a start."""
    if job.window.start is None:
        return None
    day = job.window.start.date()
    return day if unit == "day" else day.replace(day=1, month=day.month if unit == "month" else 1)


@contextlib.contextmanager
def needs(extra: str) -> Iterator[None]:
    """Raise an ImportError of the block as OperatorError: it names the extra that has the library."""
    try:
        yield
    except ImportError as error:
        raise OperatorError(
            f"sink = {extra}:… needs a Python library that is not installed: {error}.",
            advice=f"Run pip install 'mldserver[{extra}]' in the server's environment.",
        ) from error


def check_session(spark: SparkSession) -> None:
    """Raise OperatorError where Spark would write timestamps that the libraries do not take."""
    kind = spark.conf.get(_TIMESTAMPS, "")
    if kind not in {"TIMESTAMP_MICROS", "TIMESTAMP_MILLIS"}:
        raise OperatorError(
            f"This Spark session has {_TIMESTAMPS} = {kind}, and the table's library does not take such timestamps.",
            advice=f"Set {_TIMESTAMPS} = TIMESTAMP_MICROS in spark_conf, or in the configuration of Spark Connect.",
        )


def optional(kind: pa.DataType) -> pa.DataType:
    """Return a type whose inner fields may all be null, as tables store it. Spark marks what it knows to be never null."""
    import pyarrow as pa  # noqa: PLC0415  # settings name places long before one is opened

    if pa.types.is_struct(kind):
        return pa.struct([pa.field(each.name, optional(each.type)) for each in kind])
    if pa.types.is_map(kind):
        return pa.map_(optional(kind.key_type), optional(kind.item_type))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.list_(pa.field("element", optional(kind.value_type)))
    same = {pa.large_string(): pa.string(), pa.string_view(): pa.string(), pa.large_binary(): pa.binary()}
    return same.get(kind, kind)


def changes(table: pa.Schema, found: pa.Schema, where: str) -> dict[str, pa.Field]:
    """Return the columns that a window's columns ``found`` add to those of the table, or make wider, by name.

    Raises OperatorError, which names the columns, where a window's columns do not go into the table.
    """
    import pyarrow as pa  # noqa: PLC0415  # see above

    names = {name.lower(): name for name in table.names}
    changed, faults = {}, []
    for field in found:
        kind, name = optional(field.type), field.name
        present = optional(table.field(name).type) if name in table.names else None
        if "timestamp[ns" in str(kind):
            faults.append(f"{name} has nanoseconds (set {_TIMESTAMPS} = TIMESTAMP_MICROS in spark_conf)")
        elif present is None and name.lower() in names:
            faults.append(f"{name} is called {names[name.lower()]} in the table")
        elif present is None or _is_wider(kind, present):
            changed[name] = pa.field(name, kind)
        elif kind != present and not _is_wider(present, kind):
            faults.append(f"{name} is {kind} in the window and {present} in the table")
    lacking = (field.name for field in table if not field.nullable and field.name not in found.names)
    faults += [f"{name} must have a value in the table, and the window lacks it" for name in lacking]
    if faults:
        raise OperatorError(
            f"A window does not go into the table {where}: {'; '.join(faults)}.",
            did="Nothing was written to the table. The window's output is kept, and is tried again.",
            advice="A table takes new columns and wider numbers. Change the table with its own tools, or name another "
            "table and compute the window again.",
        )
    return changed


def footers(job: PublishJob) -> dict[str, tuple[int, pq.FileMetaData]]:
    """Return the size in bytes and the footer of each of an output's files that has rows, by name. Raises OSError."""
    import pyarrow.parquet as pq  # noqa: PLC0415  # see above

    found = {}
    for file in job.files:
        filesystem, path = reach(f"{job.staging}/{file}", job.out)
        with filesystem.open_input_file(path) as source:
            found[file] = source.size(), pq.read_metadata(source)
    return {file: each for file, each in found.items() if each[1].num_rows}


def _is_wider(kind: pa.DataType, than: pa.DataType) -> bool:
    """Return whether each value of ``than`` is one of ``kind``, and not the other way round."""
    import pyarrow as pa  # noqa: PLC0415  # see above

    if pa.types.is_decimal(kind) and pa.types.is_decimal(than):
        return bool(kind.scale == than.scale and kind.precision > than.precision)
    one, other = str(kind), str(than)
    return any({one, other} <= {*row} and row.index(one) > row.index(other) for row in _WIDER)


class Folder:
    """The place of a table's files."""

    def __init__(self, filesystem: FileSystem, base: str) -> None:
        """``base``: the place's path in the file system."""
        self.filesystem, self.base = filesystem, base.rstrip("/")

    @classmethod
    def at(cls, place: str) -> Folder:
        """Return the folder of a local path, or of a URI as pyarrow takes it. Raises as ``opened``."""
        return cls(*(opened(place) if "://" in place else reach(place, "")))

    def bring(self, job: PublishJob, files: Iterable[str], into: str) -> list[str]:
        """Bring files of a committed output into the folder ``into`` of this place; return their paths here.

        May be repeated, and done by several servers at once. A local file becomes a second name of the same file; an
        object store copies it by itself. Raises OSError; FileNotFoundError if an output's file is gone.
        """
        attempt, paths = job.staging.rpartition("/")[2], []
        for file in files:
            token = hashlib.sha256(f"{attempt}/{file}".encode()).hexdigest()[:12]
            name = f"{job.window.id}.{job.ledger}.{job.window.revision}.{token}.parquet"
            paths.append(f"{into}/{name}" if into else name)
            source, path = reach(f"{job.staging}/{file}", job.out)
            self._copy(source, path, f"{self.base}/{paths[-1]}")
        if self.is_local and paths:
            folder = f"{self.base}/{into}".rstrip("/")
            self.sync(folder, folder.rpartition("/")[0])
        return paths

    @property
    def is_local(self) -> bool:
        """Whether the files are on a disk of this machine."""
        return bool(self.filesystem.type_name == "local")

    def has(self, path: str) -> bool:
        """Return whether a folder of this place holds anything."""
        from pyarrow import fs  # noqa: PLC0415  # see above

        selector = fs.FileSelector(f"{self.base}/{path}", allow_not_found=True)
        try:
            return bool(self.filesystem.get_file_info(selector))
        except FileNotFoundError:
            # It was not there when Arrow listed it, and was when Arrow asked why: another server has just made it.
            return True

    def _copy(self, source: FileSystem, path: str, target: str) -> None:
        from pyarrow import fs  # noqa: PLC0415  # see above

        if not self.is_local:
            if source.equals(self.filesystem):
                self.filesystem.copy_file(path, target)
            else:
                fs.copy_files(path, target, source_filesystem=source, destination_filesystem=self.filesystem)
            return
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        if source.type_name == "local":
            try:
                os.link(path, target)
            except FileExistsError:
                return  # by another server, or a former try
            except FileNotFoundError:
                raise
            except OSError:
                pass  # another disk, or one without links
            else:
                return
        # Another server may copy it too: a name appears only with the whole file.
        part = f"{target}.{secrets.token_hex(6)}.tmp"
        fs.copy_files(path, part, source_filesystem=source, destination_filesystem=self.filesystem)
        self.sync(part)
        Path(part).replace(target)

    @staticmethod
    def sync(*paths: str) -> None:
        """Make local files and folders durable."""
        for path in paths:
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)

    def sweep(self, ledger: str, revision_of: Callable[[str], int], kept: Collection[str]) -> int:
        """Delete the files of failed attempts that belong to ``ledger``; return their number.

        ``revision_of``: returns a window's revision in the table, NO_REVISION if there is none. ``kept``: the paths here that the
        table names, or named not long ago. A file of a later revision than its window's stays: it may be committed yet.
        """
        from pyarrow import fs  # noqa: PLC0415  # see above

        found = self.filesystem.get_file_info(
            fs.FileSelector(self.base, recursive=True, allow_not_found=True)
        )
        deleted = 0
        for entry in found:
            about = written_by(entry.path)
            path = entry.path[len(self.base) + 1 :]
            if about is None or about.ledger != ledger or path in kept:
                continue
            if about.revision <= revision_of(about.window):
                with contextlib.suppress(FileNotFoundError):  # another server sweeps too
                    self.filesystem.delete_file(entry.path)
                    deleted += 1
        return deleted
