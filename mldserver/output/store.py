"""The output folder: segments are written here, outputs are published here. Blocking; call it in a thread.

Any file system that pyarrow knows can hold it (``file:``, a plain path, ``s3://`` …). On a local one every file and
every rename is synced to disk before the ledger may name it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from mldserver.base.disk import exchange, make_folder, make_private, sync
from mldserver.base.uris import NOTHING_RENAMED, opened, spark_uri
from mldserver.ledger.contract import Segment, StateFile
from mldserver.output.layout import PRIVATE, SPARK

_T = TypeVar("_T")
_R = TypeVar("_R")

_DELETE_TRIES = 5

_REQUESTS = 16
"""How many an object store is sent at the same time; pyarrow's client has more connections."""

_GROUP_ROWS = 256 * 1024
"""Rows that only one task can read: of pyarrow's million, of a window's one segment, the other cores would get none."""

_DELTA = {
    **dict.fromkeys(("_time", "_clock", "_arrival", "_sub_sequence"), "DELTA_BINARY_PACKED"),
    "_sequence": "DELTA_BYTE_ARRAY",
}
"""What hardly differs from row to row, as differences: half the bytes and half the time of the default, which tries a
dictionary of values that never come twice. Spark's vectorised reader knows both (Spark 3.3)."""

_SAMPLE = 1000
"""Rows of a large file by which its columns are judged."""
_LARGE = 20 * _SAMPLE
_UNIQUE = 0.99
"""The share of values that come once, from which on there are so many that no dictionary would hold them."""


class OutputStore:
    """A pipeline's output folder. Paths are relative to it; OSError says what the file system says."""

    def __init__(self, out: str, *, home: Path | None = None) -> None:
        """``out``: a local path or a URI that pyarrow.fs understands; ``home``: where scratch space is, if elsewhere.

        Blocking for a URI, and then raises OSError, ValueError and NotImplementedError, as pyarrow does.
        """
        if "://" in out:
            self._fs, self._base = opened(out)
        else:
            self._fs, self._base = pafs.LocalFileSystem(), str(Path(out).absolute())
        self.local = isinstance(self._fs, pafs.LocalFileSystem)
        self._folders = self._fs.type_name not in NOTHING_RENAMED
        self.place = "" if self.local else out
        """The folder's URI as pyarrow takes it, options and credentials included; empty for a local folder."""
        self._root = self._base if self.local else spark_uri(out)
        self._home = home or (Path(self._base) if self.local else None)

    def uri(self, path: str = "") -> str:
        """Return the absolute path, or for remote file systems the URI as Spark knows it, of ``path``."""
        return f"{self._root}/{path}" if path else self._root

    def _absolute(self, path: str) -> str:
        return f"{self._base}/{path}" if path else self._base

    def _make_room(self, target: str) -> None:
        """Make a new file's folder; object stores have no folders, and would be queried for each parent."""
        if self._folders:
            self._fs.create_dir(target.rpartition("/")[0], recursive=True)

    def for_each(self, step: Callable[[_T], _R], items: Iterable[_T]) -> tuple[_R, ...]:
        """Do a step for each item: one after the other on a disk, side by side where each waits for another machine.

        Raises what a step raises, when all are over.
        """
        if self.local:
            return tuple(map(step, items))
        with ThreadPoolExecutor(_REQUESTS, thread_name_prefix="storage") as pool:
            return tuple(pool.map(step, items))

    def prepare(self, *folders: str, durable: bool = False) -> None:
        """Make the folder, and the named ones in it; ``durable``: no power cut takes these away again."""
        for folder in ("", *folders):
            if folder == PRIVATE:
                self.keep_private(folder)
            self._fs.create_dir(self._absolute(folder), recursive=True)
            if durable and folder and self.local:
                make_folder(Path(self._absolute(folder)))

    def keep_private(self, folder: str) -> None:
        """Make a local folder that only this user may enter, unless it is there."""
        if self.local:
            make_private(Path(self._absolute(folder)))

    def write(self, path: str, rows: pa.Table, *, microseconds: bool = False) -> int:
        """Write rows as one Parquet file and return its size in bytes once it is safe on disk.

        ``microseconds``: write all timestamps in this unit, which is the only one that Delta Lake and Iceberg know.

        Raises OSError: FileNotFoundError when another server expired this one and removed the file at once.
        """
        target, encodings = self._absolute(path), _encodings(rows)
        self._make_room(target)
        try:
            stream = self._fs.open_output_stream(target)
        except FileNotFoundError:
            # ``drop_empty`` of another thread took the folder in between.
            self._make_room(target)
            stream = self._fs.open_output_stream(target)
        with stream:
            pq.write_table(
                rows,
                stream,
                row_group_size=_GROUP_ROWS,
                # A third smaller than snappy on JSON-like rows, and as fast to read.
                compression="zstd",
                compression_level=1,
                coerce_timestamps="us" if microseconds else None,
                use_dictionary=[name for name in rows.column_names if name not in encodings],
                column_encoding=encodings,
                # No reader filters on ranges of these, and comparing the texts takes a tenth of the time.
                write_statistics=[name for name in rows.column_names if name not in {"_shard", "_sequence"}],
            )
        self.sync(path)
        size = self._fs.get_file_info(target).size
        if size is None:
            raise FileNotFoundError(errno.ENOENT, "it is gone as soon as it was written", path)
        return int(size)

    def parquet(self, path: str) -> pq.ParquetFile:
        """Open a Parquet file, to be closed by its reader. Raises OSError, and ArrowInvalid where it is not whole."""
        return pq.ParquetFile(self._absolute(path), filesystem=self._fs)

    def sync(self, *paths: str) -> None:
        """Force local files (or all in folders) and every directory entry that leads to them to disk, each once."""
        if not self.local:
            return
        wanted: dict[Path, None] = {}
        above: dict[Path, None] = {}
        for path in paths:
            target = Path(self._absolute(path))
            wanted |= dict.fromkeys([*target.rglob("*"), target])
            # A folder on the way may be new too: its own entry lies in the folder above it.
            above |= dict.fromkeys(parent for parent in target.parents if parent.is_relative_to(self._base))
        for entry in [*wanted, *sorted(above, key=lambda folder: len(folder.parts), reverse=True)]:
            sync(entry)

    def sync_entries(self, folder: str = "") -> None:
        """Force what a local folder names to disk: after renames in it, of things that are on disk themselves."""
        if self.local:
            sync(Path(self._absolute(folder)))

    def exists(self, path: str) -> bool:
        """Whether a file or folder is there."""
        return bool(self._fs.get_file_info(self._absolute(path)).type != pafs.FileType.NotFound)

    def publish(self, source: str, target: str) -> bool:
        """Rename a file or folder into place; repeatable. False: there was nothing left to do.

        Raises FileNotFoundError when neither source nor target exists.
        """
        self._make_room(self._absolute(target))
        try:
            self.rename(source, target)
        except OSError:
            # Not every file system says which error it is when the source is gone (S3: any).
            if self.exists(source):
                raise
            if self.exists(target):
                return False
            raise FileNotFoundError(f"neither {self.uri(source)} nor {self.uri(target)} exists") from None
        self.sync(target)
        return True

    def rename(self, source: str, target: str) -> None:
        """Rename a folder; one that is in the way and not empty is an error. Not synced."""
        self._fs.move(self._absolute(source), self._absolute(target))

    def move(self, source: str, target: str) -> None:
        """Move a file or folder to where nothing is, making the folders above. Not synced."""
        for path in [source] if self.local else [path for path, _ in self.files(source)] or [source]:
            destination = self._absolute(target + path.removeprefix(source))
            self._make_room(destination)
            self._fs.move(self._absolute(path), destination)

    def exchange(self, one: str, other: str) -> None:
        """Let two local folders change places in one step. Not synced."""
        exchange(self._absolute(one), self._absolute(other))

    @contextlib.contextmanager
    def alone(self, lock: str) -> Iterator[None]:
        """Hold a lock file of a local folder against all threads and processes; elsewhere do nothing."""
        if not self.local:
            yield
            return
        with Path(self._absolute(lock)).open("wb") as file:
            # The kernel lets go of it when the process dies, however it dies.
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def put(self, path: str, data: bytes) -> None:
        """Write a small file at once (on object stores: one put)."""
        target = self._absolute(path)
        self._make_room(target)
        with self._fs.open_output_stream(target) as stream:
            stream.write(data)

    def replace(self, path: str, data: bytes) -> None:
        """Write a small file in place of what is there: readers find one of the two, whole, also after a power cut."""
        if not self.local:
            self.put(path, data)
            return
        self.put(f"{path}.part", data)
        self.sync(f"{path}.part")
        self._fs.move(self._absolute(f"{path}.part"), self._absolute(path))
        self.sync(path)

    def get(self, path: str) -> bytes:
        """Return a small file's content."""
        with self._fs.open_input_stream(self._absolute(path)) as stream:
            return bytes(stream.read())

    def save(self, path: str, target: Path) -> None:
        """Bring a file out to where nothing deletes it: on one disk by a second name, else by a copy.

        Raises OSError: FileNotFoundError when it is gone.
        """
        target.parent.mkdir(parents=True, exist_ok=True)
        if self.local:
            _second_name(Path(self._absolute(path)), target)
        else:
            pafs.copy_files(
                self._absolute(path),
                str(target),
                source_filesystem=self._fs,
                destination_filesystem=pafs.LocalFileSystem(),
            )

    def bring_back(self, source: Path, path: str) -> None:
        """Do the opposite of ``save``. Not synced."""
        target = self._absolute(path)
        self._make_room(target)
        if self.local:
            _second_name(source, Path(target))
        else:
            pafs.copy_files(str(source), target, destination_filesystem=self._fs)

    def delete(self, path: str) -> None:
        """Delete a file or a folder with all in it; one that is gone already, or goes meanwhile, is fine."""
        target = self._absolute(path)
        for left in reversed(range(_DELETE_TRIES)):
            try:
                kind = self._fs.get_file_info(target).type
                if kind == pafs.FileType.Directory:
                    self._fs.delete_dir(target)
                elif kind != pafs.FileType.NotFound:
                    self._fs.delete_file(target)
            except OSError:
                # Servers that start together may clean up after the same dead one.
                if not left:
                    raise
            else:
                return

    def drop_empty(self, folder: str) -> None:
        """Delete a local folder when nothing is in it, even if another thread is about to write there."""
        if self.local:
            with contextlib.suppress(OSError):
                Path(self._absolute(folder)).rmdir()

    def files(self, folder: str) -> Iterator[tuple[str, int]]:
        """Yield (path, bytes) of every file below a folder."""
        selector = pafs.FileSelector(self._absolute(folder), allow_not_found=True, recursive=True)
        for info in self._fs.get_file_info(selector):
            if info.type == pafs.FileType.File:
                yield info.path.removeprefix(self._base).lstrip("/"), int(info.size)

    def scratch(self) -> list[Path]:
        """Return the folders that servers of this host gave their Spark drivers."""
        if self._home is None:
            return []
        return [path for path in (self._home / SPARK).glob("*") if path.is_dir()]

    def folders(self, folder: str) -> Iterator[str]:
        """Yield the paths of the folders directly in a folder."""
        selector = pafs.FileSelector(self._absolute(folder), allow_not_found=True)
        for info in self._fs.get_file_info(selector):
            if info.type == pafs.FileType.Directory:
                yield info.path.removeprefix(self._base).lstrip("/")


def _encodings(rows: pa.Table) -> dict[str, str]:
    """Return how the columns are written whose values hardly repeat; all others get a dictionary.

    To find out that a dictionary is of no use takes as long as to write ten columns as differences.
    """
    found = {name: encoding for name, encoding in _DELTA.items() if name in rows.column_names}
    if len(rows) < _LARGE:
        return found
    places = pa.array(range(0, len(rows), len(rows) // _SAMPLE))
    for column in rows.schema:
        differs = pa.types.is_integer(column.type) or pa.types.is_timestamp(column.type)
        if column.name in found or not (
            differs
            or pa.types.is_floating(column.type)
            or pa.types.is_string(column.type)
            or pa.types.is_binary(column.type)
        ):
            continue
        values = pc.count_distinct(rows.column(column.name).take(places)).as_py()
        if values >= _UNIQUE * len(places):
            found[column.name] = "DELTA_BINARY_PACKED" if differs else "PLAIN"
    return found


def _second_name(source: Path, target: Path) -> None:
    try:
        target.hardlink_to(source)
    except FileNotFoundError:
        raise
    except OSError:
        # Another disk, or a file system that knows no links.
        shutil.copyfile(source, target)


@dataclass(eq=False, slots=True)
class Garbage:
    """Files that no ledger entry names, or will ever name, until they are deleted.

    A disk that fails to delete must not be taken for one that has room: they count until they are gone.
    """

    store: OutputStore
    _files: dict[str, int] = field(init=False, default_factory=dict)

    @property
    def bytes(self) -> int:
        """What they take."""
        return sum(self._files.values())

    def add(self, files: Iterable[Segment | StateFile]) -> None:
        """Take in files that the ledger does not name."""
        self._files |= {file.path: file.bytes for file in files}

    def add_unfinished(self, *paths: str) -> None:
        """Take in files that may be there and are in no account: copies, and what could not be written whole."""
        for path in paths:
            self._files.setdefault(path, 0)

    async def delete(self, files: Iterable[Segment | StateFile] = ()) -> int:
        """Take in these too, and do in a thread what ``delete_now`` does."""
        self.add(files)
        return await asyncio.to_thread(self.delete_now) if self._files else 0

    def delete_now(self) -> int:
        """Delete all, and the folders that are empty then; return what they took. Blocking; two threads may do so at once.

        Raises OSError; what could not be deleted stays for the next call.
        """

        def delete(path: str) -> int:
            self.store.delete(path)
            return self._files.pop(path, 0)

        files = list(self._files)
        freed_bytes = sum(self.store.for_each(delete, files))
        for folder in {path.rpartition("/")[0] for path in files}:
            self.store.drop_empty(folder)
        return freed_bytes
