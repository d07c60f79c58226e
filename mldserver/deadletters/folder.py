"""Dead letters as files in a folder: the output folder's ``_dead_letters``, or another one."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Literal

from mldserver.deadletters.files import file_content, file_name, grouped

if TYPE_CHECKING:
    from mldserver.output.store import OutputStore
    from mldserver.records import DeadLetter

__all__ = ["FolderDestination"]


class FolderDestination:
    """A ``Destination``: one file for each shard of a flush."""

    def __init__(
        self, store: OutputStore, folder: str, *, pipeline: str, kind: Literal["jsonl", "parquet"]
    ) -> None:
        """Write below ``folder`` of a store; empty: into the store itself."""
        self._store = store
        self._folder = folder
        self._pipeline = pipeline
        self._kind = kind

    async def store(self, letters: tuple[DeadLetter, ...]) -> tuple[DeadLetter, ...]:
        """Write files; none is too large."""
        await asyncio.to_thread(self._write, letters)
        return ()

    def _write(self, letters: tuple[DeadLetter, ...]) -> None:
        for group in grouped(letters):
            name = file_name(group, self._kind)
            path = f"{self._folder}/{name}" if self._folder else name
            data = file_content(group, self._pipeline, self._kind)
            if not self._store.local:
                self._store.put(path, data)
                continue
            # Readers see a file whole or not at all, also after a power cut.
            self._store.put(f"{path}.part", data)
            self._store.sync(f"{path}.part")
            self._store.rename(f"{path}.part", path)
            self._store.sync(path)

    async def close(self) -> None:
        """Do nothing."""
