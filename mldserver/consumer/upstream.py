"""What a consumer asks of its source."""

from __future__ import annotations

import asyncio
import enum
from typing import Protocol

from mldserver.errors import MldserverError
from mldserver.records import Sequence


class CheckpointOutcome(enum.Enum):
    """What became of a checkpoint."""

    STORED = enum.auto()
    FAILED = enum.auto()
    """Given up for now."""
    STOPPED = enum.auto()
    """The lease is gone."""
    CLOSED = enum.auto()
    """The connection is closed."""


class Upstream(Protocol):
    """A source that sends batches, and waits for each to be acknowledged."""

    @property
    def has_room(self) -> bool:
        """Whether there is memory for more unprocessed batches."""

    def hold(self, change: int) -> None:
        """Count by how many bytes more, or less, unprocessed batches take."""

    def acknowledge(self) -> None:
        """Acknowledge the batch or the request that the source waits for."""

    def checkpoint(self, position: Sequence | None) -> asyncio.Future[CheckpointOutcome]:
        """Ask for a checkpoint at ``position``; None: at the shard's end."""

    def close(self, error: MldserverError | None = None) -> None:
        """Close the source's connection because of an error."""

    @property
    def debugging(self) -> bool:
        """Whether each batch is logged by itself."""

    @property
    def peer(self) -> str:
        """Who the batches come from, for the log."""


class Fetching:
    """Stands for a source that fetches batches itself, and stores nothing."""

    has_room = True
    debugging = False
    peer = ""

    def hold(self, change: int) -> None:
        """Count nothing."""

    def acknowledge(self) -> None:
        """Do nothing: the source awaits ``Consumer.acknowledged``."""

    def close(self, error: MldserverError | None = None) -> None:
        """Do nothing: ``Consumer.acknowledged`` raises the error."""
