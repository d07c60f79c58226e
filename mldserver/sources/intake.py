"""The seam between sources and the rest: what the server asks of a source, and what a source asks of the coordinator.

A source opens shards, hands batches in, and learns what may be checkpointed. For each shard, in this order:

    intake.know, seen        where nobody assigns shards: what the stream lists, and what the ledger says of them
    intake.check             it would begin where the ledger lets it
    owners.take              the claim under which all that follows is done (``claim.work``)
    intake.open_shard        from there on the shard counts for the watermark
    runtime.open, park       its handler; then ``claim.opened = True``
    runtime.process, take    one batch after the other: its payload, and what became of it; ``admitted``
    checkpoint_due           what is durable; the source stores it, and says so (``checkpointed``), unless the ledger's
                             position is all that it goes by (``after``, ``begin``)
    end, lost, disconnected  how it ended; then ``runtime.forget`` and ``owners.release``
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from mldserver.base.clock import Clock
from mldserver.records import Sequence
from mldserver.sources.progress_log import ProgressLog
from mldserver.sources.shard_claims import ShardOwners

if TYPE_CHECKING:
    from mldserver.runtime.interface import BatchOutcome, Runtime


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

    runtime: Runtime
    intake: Intake
    owners: ShardOwners
    """Shared with whoever else works on shards: dead letters that run again."""
    clock: Clock
    random: Callable[[], float]
    """Floats in [0, 1), for jitter."""


MakeSource: TypeAlias = "Callable[[SourceParts], Source]"
