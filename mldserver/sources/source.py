"""What the server asks of a source. A source has a ``Consumer`` (``consumer/shard.py``) for each shard, which does the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol, TypeAlias

from mldserver.consumer.progress_log import ProgressLog
from mldserver.consumer.shard import ConsumerParts


class SourceStatus(NamedTuple):
    """A source's state, for the status page and metrics."""

    address: str | None = None
    """The address or the stream that shards come from; None: none can come now."""
    accepted: int = 0
    """Connections accepted since the start."""
    connections: Mapping[str, int] = {}
    """The number of connections in each state of the protocol."""
    peers: Mapping[str, str] = {}
    """The peer that each shard comes from, by shard id."""
    since_ms: Mapping[str, int] = {}
    """Steady time at which the oldest batch in flight of each shard came, by shard id."""
    counts: ProgressLog | None = None
    """Counts of batches and records, for each shard."""
    lines: tuple[int, int] = (0, 0)
    """Bytes of unread messages, and how many there may be; 0: any."""
    retries: int = 0
    """Requests to the stream that were repeated since the start."""


class Source(Protocol):
    """Where shards come from, as the server sees it."""

    @property
    def waits_for(self) -> str | None:
        """Why no shard can come now, as a clause for ``server.unready``; None: they can."""

    def status(self) -> SourceStatus:
        """Return the source's state. The server calls this once a second."""

    @property
    def connections(self) -> int:
        """The number of shards that it serves, including connections that have not named their shard yet."""

    async def listening(self) -> str:
        """Return where it reads, once shards can come. Raises OperatorError when they never will."""

    async def run(self) -> None:
        """Serve until ``stop_accepting``, and then until the last shard is let go. Cancelled, it lets go at once.

        Raises OperatorError when it cannot work as it was told to.
        """

    def stop_accepting(self) -> None:
        """Take no more shards; those that are there go on."""

    async def drain(self) -> None:
        """Let each shard finish what it has in hand, then let all go; return when they are gone.

        Cancel it to give up waiting: they are then let go as they are.
        """


class SourceParts(NamedTuple):
    """What a source is made of."""

    consumers: ConsumerParts
    """What each shard's consumer is made of."""
    random: Callable[[], float]
    """Floats in [0, 1), for jitter."""


MakeSource: TypeAlias = "Callable[[SourceParts], Source]"
