"""Files that no ledger entry names, or will ever name, until they are deleted.

A disk that fails to delete must not be taken for one that has room: they count until they are gone.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mldserver.ledger.contract import Segment
    from mldserver.output.store import OutputStore

__all__ = ["Garbage"]


class Garbage:
    """What one task has to delete."""

    def __init__(self, store: OutputStore) -> None:
        """``store``: where the files lie."""
        self._store = store
        self._files: dict[str, int] = {}

    @property
    def bytes(self) -> int:
        """What they take."""
        return sum(self._files.values())

    def add(self, segments: Iterable[Segment]) -> None:
        """Take in segments that the ledger does not name."""
        self._files |= {segment.path: segment.bytes for segment in segments}

    def add_unfinished(self, path: str) -> None:
        """Take in a file that may be there, of unknown size: writing it failed."""
        self._files.setdefault(path, 0)

    async def delete(self) -> int:
        """Delete all, and the folders that are empty then; return what they took.

        Raises OSError; what could not be deleted stays for the next call.
        """
        files = dict(self._files)
        if not files:
            return 0
        deleted: list[str] = []
        try:
            await asyncio.to_thread(self._delete, files, deleted)
        finally:
            for path in deleted:
                self._files.pop(path, None)
        return sum(files.values())

    def _delete(self, files: Iterable[str], deleted: list[str]) -> None:
        for path in files:
            self._store.delete(path)
            deleted.append(path)
        for folder in {path.rpartition("/")[0] for path in files}:
            self._store.drop_empty(folder)
