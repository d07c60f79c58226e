"""The output folder: segments are written here, outputs are published here. Blocking; call it in a thread.

Any file system that pyarrow knows can hold it (``file:``, a plain path, ``s3://`` …). On a local one every file and
every rename is synced to disk before the ledger may name it.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.fs as pafs
import pyarrow.parquet as pq

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

__all__ = ["OutputStore"]


class OutputStore:
    """A pipeline's output folder. Paths are relative to it; OSError says what the file system says."""

    def __init__(self, out: str) -> None:
        """``out``: a local path or a URI that pyarrow.fs understands."""
        if "://" in out:
            self._fs, self._base = pafs.FileSystem.from_uri(out)
        else:
            self._fs, self._base = pafs.LocalFileSystem(), str(Path(out).absolute())
        self.local = isinstance(self._fs, pafs.LocalFileSystem)
        self._scheme = "" if self.local else out.split("://", 1)[0] + "://"

    def uri(self, path: str = "") -> str:
        """Return the absolute path, or for remote file systems the URI, of ``path``."""
        return f"{self._scheme}{self._absolute(path)}"

    def _absolute(self, path: str) -> str:
        return f"{self._base}/{path}" if path else self._base

    def prepare(self, *folders: str) -> None:
        """Make the folder, and the named ones in it."""
        for folder in ("", *folders):
            self._fs.create_dir(self._absolute(folder), recursive=True)

    def write(self, path: str, rows: pa.Table) -> int:
        """Write rows as one Parquet file and return its size in bytes once it is safe on disk."""
        target = self._absolute(path)
        with self._open(target) as stream:
            # zstd: a third smaller than snappy on JSON-like rows, and as fast to read.
            pq.write_table(rows, stream, compression="zstd", compression_level=1)
        self.sync(path)
        return int(self._fs.get_file_info(target).size)

    def _open(self, target: str) -> Any:
        folder = target.rpartition("/")[0]
        self._fs.create_dir(folder, recursive=True)
        try:
            return self._fs.open_output_stream(target)
        except FileNotFoundError:
            # ``drop_empty`` of another thread took the folder in between.
            self._fs.create_dir(folder, recursive=True)
            return self._fs.open_output_stream(target)

    def sync(self, path: str) -> None:
        """Force a local file (or all in a folder) and every directory entry that leads to it to disk."""
        if not self.local:
            return
        target = Path(self._absolute(path))
        # A folder on the way may be new too: its own entry lies in the folder above it.
        above = [parent for parent in target.parents if parent.is_relative_to(self._base)]
        for each in [*target.rglob("*"), target, *above]:
            descriptor = os.open(each, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def exists(self, path: str) -> bool:
        """Whether a file or folder is there."""
        return bool(self._fs.get_file_info(self._absolute(path)).type != pafs.FileType.NotFound)

    def publish(self, source: str, target: str) -> bool:
        """Rename a file or folder into place; repeatable. False: there was nothing left to do.

        Raises FileNotFoundError when neither source nor target exists.
        """
        if not self.exists(source):
            if not self.exists(target):
                raise FileNotFoundError(f"neither {self.uri(source)} nor {self.uri(target)} exists")
            return False
        destination = self._absolute(target)
        self._fs.create_dir(destination.rpartition("/")[0], recursive=True)
        self._fs.move(self._absolute(source), destination)
        if self.local:
            self.sync(target)
        return True

    def delete(self, path: str) -> None:
        """Delete a file or a folder with all in it; one that is gone already is fine."""
        target = self._absolute(path)
        kind = self._fs.get_file_info(target).type
        if kind == pafs.FileType.Directory:
            self._fs.delete_dir(target)
        elif kind != pafs.FileType.NotFound:
            self._fs.delete_file(target)

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

    def folders(self, folder: str) -> Iterator[str]:
        """Yield the paths of the folders directly in a folder."""
        selector = pafs.FileSelector(self._absolute(folder), allow_not_found=True)
        for info in self._fs.get_file_info(selector):
            if info.type == pafs.FileType.Directory:
                yield info.path.removeprefix(self._base).lstrip("/")
