"""From the setting ``dead_letters`` to a ``Destination``: files in a folder, or a place in AWS."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Literal, cast

from mldserver.deadletters.files import FOLDER, file_content, file_name, grouped
from mldserver.errors import NotThereYet, OperatorError
from mldserver.output.store import OutputStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from mldserver.base.clock import Clock
    from mldserver.config import Settings
    from mldserver.coordinator.redrive_intake import Destination
    from mldserver.records import DeadLetter


class FolderDestination:
    """A ``Destination``: one file for each shard of a flush."""

    def __init__(
        self, store: OutputStore, folder: str, *, pipeline: str, kind: Literal["jsonl", "parquet"]
    ) -> None:
        """Write below ``folder`` of a store."""
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
            path = f"{self._folder}/{file_name(group, self._kind)}"
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


def destination_of(
    settings: Settings, store: OutputStore, clock: Clock, jitter: Callable[[], float]
) -> Destination | None:
    """Return where dead letters go; None for the ledger. Blocking. Raises OperatorError for a URI that leads nowhere."""
    place, pipeline = settings.dead_letters, settings.pipeline
    if place is None:
        return None
    if place.kind in {"jsonl", "parquet"}:
        kind = cast("Literal['jsonl', 'parquet']", place.kind)
        if not place.target:
            return FolderDestination(store, FOLDER, pipeline=pipeline, kind=kind)
        try:
            other = OutputStore(place.target)
        except (OSError, ValueError, NotImplementedError) as error:
            raise (NotThereYet if isinstance(error, OSError) else OperatorError)(
                f"dead_letters = {place} cannot be reached: {error}.",
                advice="Check the URI: its name, and the options after the question mark.",
            ) from error
        # Another pipeline on the same stream, with files of the same names, may have the same place.
        return FolderDestination(other, pipeline, pipeline=pipeline, kind=kind)
    from mldserver.deadletters.aws_destinations import DESTINATIONS  # noqa: PLC0415  # most servers never need AWS's client

    return DESTINATIONS[place.kind](
        place.target,
        pipeline=pipeline,
        clock=clock,
        jitter=jitter,
        region=settings.region,
        endpoint_url=settings.endpoint_url,
    )
