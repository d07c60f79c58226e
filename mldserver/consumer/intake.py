"""What the consumption of a shard asks of the coordinator: to open the shard, to accept its batches, to make them durable.

``shard.py`` makes these calls for every source, in the order that each shard needs. A source itself asks only which shards there are
(``know``, ``seen``), where nobody assigns them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from mldserver.records import Sequence

if TYPE_CHECKING:
    from mldserver.runtime.interface import BatchOutcome


@dataclass(frozen=True, slots=True)
class ShardOpening:
    """A source has a shard and says where its records will start."""

    shard_id: str
    start: Sequence | str | None
    """A sequence (records after it follow), a sentinel such as ``TRIM_HORIZON``, or None when it is not known (V1)."""
    tells_lag: bool
    """Whether batches say how far behind the stream's tip they are (not in V1)."""
    within_aggregates: bool = True
    """Whether a checkpoint may lie between the user records of one KPL aggregate (not in V1)."""
    parents: tuple[str, ...] = ()
    """Parents, where the source knows them."""
    polled: bool = False
    """Whether this server polls the stream itself: empty batches come at the tip, with the time at which the request began."""


class KnownShard(NamedTuple):
    """What the ledger says of a shard."""

    position: Sequence | None
    """Everything at or before it is durable; None when nothing is yet."""
    ended: bool
    """It is read to its end, durably."""
    owner: str | None
    """The server that has it; None: nobody."""


class Seen(NamedTuple):
    """The ledger, as this server looked at it last: at most a flush interval ago, while it is in reach."""

    server_id: str
    """This server."""
    servers: frozenset[str]
    """Those that take shards, this one among them, and those that died and are not expired yet."""
    shards: Mapping[str, KnownShard]


class ShardIntake(Protocol):
    """One shard under one connection. It is dead once the shard is opened again; calls on a dead one do nothing."""

    @property
    def alive(self) -> bool:
        """Whether the shard is its: it has not ended, was not let go, and no other server has opened it since."""

    @property
    def after(self) -> Sequence | None:
        """Everything at or before it was accepted earlier and must be dropped unseen."""

    @property
    def parked(self) -> Mapping[str, Sequence]:
        """The partition keys that had dead letters when the shard was opened (under ``on_key_failure = park``)."""

    def began(self, received_ms: int | None = None) -> None:
        """Note that the work on a batch begins: the shard is not silent until it is answered.

        ``received_ms``: steady time at which its first bytes came; None: now. A batch that waits behind others came before.
        """

    def busy(self) -> None:
        """Note that a request comes in, or that the daemon is asked for a checkpoint: until ``answered`` it is not silent.

        After ``end``: that the daemon is asked to store the end. Children that are not known yet come after that.
        """

    def answered(self) -> None:
        """Note that the daemon was answered: what made the shard ``busy`` is over."""

    def take(self, outcome: BatchOutcome, now_ms: int, received_ms: int | None = None) -> bool:
        """Take a batch's rows; return whether the daemon may be answered, or is to wait until the shard is ``admitted``.

        ``now_ms``: steady time; ``received_ms``: when it came, where ``began`` was not told of it.
        """

    @property
    def paused(self) -> bool:
        """Whether an operator holds the shard's answers."""

    async def admitted(
        self, *, answered: bool = False, checkpoint: Callable[[], Awaitable[object]] | None = None
    ) -> None:
        """Return when the shard is not held back any more.

        ``answered``: its daemon waits for nothing, so that a pause has nothing to hold. ``checkpoint`` asks the daemon for
        one, meanwhile: an operator may want to have the shard elsewhere, and nothing of it delivered there again.
        """

    def advance(self, position: Sequence) -> None:
        """Note that a handler which keeps its position has checkpointed so far in a hook; the next flush moves it."""

    def begin(self, position: Sequence) -> None:
        """Note where a shard begins of which the ledger has no position: all at or before it counts as done."""

    def checkpoint_due(self) -> Sequence | None:
        """Return the durable position when it is ahead of the last checkpoint, else None."""

    def checkpointed(self, position: Sequence) -> None:
        """Note that the daemon stored a checkpoint."""

    async def drain(self) -> None:
        """Flush what was accepted; on return the durable position covers it (unless the shard is owned elsewhere)."""

    async def end(self) -> bool:
        """The shard is read to its end: flush, and mark it ended durably.

        True: everything accepted is durable, the end may be checkpointed. False: the shard is owned elsewhere.
        """

    async def lost(self) -> None:
        """The lease went elsewhere: flush what was accepted, then let go."""

    def disconnected(self) -> None:
        """The connection is gone without an ending."""

    async def finish(self) -> None:
        """The server stops, and no batch follows: be held back no more."""


class Intake(Protocol):
    """The coordinator, as sources see it."""

    def know(self, listing: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
        """Learn the shards that the stream lists, with their parents; return the new ones. Those hold the watermark."""

    def seen(self) -> Seen:
        """Return what the ledger held when this server looked last."""

    async def check(self, opening: ShardOpening) -> None:
        """Raise GapRefused where it is known already that ``open_shard`` will: nobody shall lose the shard to that."""

    def abandon(self, shard_id: str) -> None:
        """Note that whoever took a shard from its connection could not open it: nobody has it now."""

    async def open_shard(self, opening: ShardOpening) -> ShardIntake:
        """Take a shard in. Raises GapRefused when it starts beyond the ledger's position."""
