"""What the server asks of a source. A source has a ``Consumer`` (``consumer/shard.py``) for each shard, which does the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol, TypeAlias

from mldserver.consumer.progress_log import ProgressLog
from mldserver.consumer.shard import ConsumerParts


class SourceStatus(NamedTuple):
    """What a source knows of itself, for whoever looks at the server."""

    address: str | None = None
    """Where shards come from; None: they cannot now."""
    accepted: int = 0
    """How many connections there were since the start."""
    connections: Mapping[str, int] = {}
    """How many are in each state of the protocol."""
    peers: Mapping[str, str] = {}
    """Who each shard comes from."""
    since_ms: Mapping[str, int] = {}
    """When the oldest batch of a shard came that is being worked on (steady time)."""
    counts: ProgressLog | None = None
    """What came of the shards."""
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
        """Return what it knows of itself: once a second."""

    @property
    def connections(self) -> int:
        """How many shards it serves, connections that have not named theirs among them."""

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
