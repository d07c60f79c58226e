"""The interface between a shard's consumer and the coordinator: open a shard, accept its batches, make them durable.

``shard.py`` makes these calls for every source. A source calls only ``add_listing`` and ``ledger_snapshot`` itself, if no daemon
assigns shards to this server.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from mldserver.records import Sequence
from mldserver.runtime.interface import BatchOutcome, BatchOutline

if TYPE_CHECKING:
    from mldserver.stores import KeyRange, SnapshotSource, StoreClaim

AT_TIP: Final = BatchOutcome(BatchOutline(0, 0, None, None, None, 0))
"""The outcome of an empty batch at the tip of a stream. No runtime has made it, so it does not count in ``Delivery.number``."""


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
    store: StoreClaim | None = None
    """The store of keyed state that the shard needs; None: the handler keeps no state."""


class ShardListing(NamedTuple):
    """What a stream's listing says of one shard."""

    parents: tuple[str, ...] = ()
    """Its parents: none, one (after a split) or two (after a merge)."""
    key_range: KeyRange | None = None
    """The MD5 hashes of the partition keys that the shard takes; None: the stream has no ranges (DynamoDB)."""


class KnownShard(NamedTuple):
    """A shard's entry in the ledger."""

    position: Sequence | None
    """Every record at or before this sequence is durable; None: no record is."""
    ended: bool
    """Whether the shard was read to its end, and this is durable."""
    owner: str | None
    """The id of the server that reads the shard; None: no server does."""
    store: str = ""
    """The store of keyed state that the shard was opened with; empty: none."""


class LedgerSnapshot(NamedTuple):
    """The ledger's content at this server's latest read: at most a flush interval old, while the ledger is in reach."""

    server_id: str
    """This server's id."""
    servers: frozenset[str]
    """Ids of the servers that take shards: this server, other live servers, and dead servers that have not expired yet."""
    shards: Mapping[str, KnownShard]


class ShardIntake(Protocol):
    """One consumer's session of one shard. Once it is no longer ``alive``, its calls do nothing."""

    @property
    def alive(self) -> bool:
        """Whether the session still owns the shard: it did not end or release the shard, and no later session opened it."""

    @property
    def after(self) -> Sequence | None:
        """Records at or before this sequence were accepted earlier: drop them before the handler sees them. None: drop none."""

    @property
    def parked(self) -> Mapping[str, Sequence]:
        """The partition keys that had dead letters when the shard was opened (under ``on_key_failure = park``)."""

    @property
    def snapshot(self) -> SnapshotSource | None:
        """Read the state of the shard's store as it is now, for a process that opens the shard. None: the handler keeps no state."""

    @property
    def next_number(self) -> int | None:
        """The ``number`` of the shard's next delivery: one more than the session has accepted outcomes. None: no state."""

    def batch_began(self, received_ms: int | None = None) -> None:
        """Report that processing of a batch begins. Until the batch is accepted, the shard does not count as idle.

        ``received_ms``: steady time at which the batch's first bytes came; None: now.
        """

    def request_began(self) -> None:
        """Report that a request or a checkpoint is in progress. Until ``request_ended`` the shard does not count as idle.

        After ``end`` it reports that the source stores the shard's end: children may become known only after that.
        """

    def request_ended(self) -> None:
        """Report that the request or the checkpoint of ``request_began`` is over."""

    def accept_batch(self, outcome: BatchOutcome, now_ms: int, received_ms: int | None = None) -> bool:
        """Accept a batch's effects. True: acknowledge the batch now; False: only after ``wait_for_room``.

        ``now_ms``: steady time. ``received_ms``: when the batch came, if ``batch_began`` was not called with it.
        """

    @property
    def paused(self) -> bool:
        """Whether an operator has paused the shard: its batches are not acknowledged."""

    async def wait_for_room(
        self, *, answered: bool = False, checkpoint: Callable[[], Awaitable[object]] | None = None
    ) -> None:
        """Wait while the shard is throttled or paused.

        ``answered``: the source does not wait for an acknowledgement, so a pause does not apply. ``checkpoint``: is called
        during a pause when an operator moves the shard to another server, so that no record is delivered there again.
        """

    def advance(self, position: Sequence) -> None:
        """Report that a handler which keeps its position has checkpointed up to ``position`` in a hook. The next flush stores it."""

    def begin(self, position: Sequence) -> None:
        """Set where a shard begins for which the ledger has no position. Records at or before ``position`` count as done."""

    def checkpoint_due(self) -> Sequence | None:
        """Return the durable position when it is ahead of the last checkpoint, else None."""

    def checkpointed(self, position: Sequence) -> None:
        """Report that the source stored a checkpoint at ``position``."""

    async def drain(self) -> None:
        """Flush the accepted batches. On return they are durable, unless another session owns the shard now."""

    async def end(self) -> bool:
        """Flush the accepted batches, and mark the shard as ended in the ledger.

        True: both are durable, and the shard's end may be checkpointed. False: another session owns the shard now.
        """

    async def lost(self) -> None:
        """Flush the accepted batches, then release the shard: the daemon has lost its lease."""

    def disconnected(self) -> None:
        """Release the shard without a flush: the connection closed before the shard ended or its lease was lost."""

    async def finish(self) -> None:
        """Stop throttling the shard: the server stops, and no batch follows."""


class Intake(Protocol):
    """What sources and consumers call of the coordinator."""

    def add_listing(self, listing: Mapping[str, ShardListing]) -> tuple[str, ...]:
        """Add the shards that the stream lists; return the new shards. They hold the watermark back."""

    def ledger_snapshot(self) -> LedgerSnapshot:
        """Return the ledger's content at this server's latest read."""

    async def check(self, opening: ShardOpening) -> None:
        """Raise GapRefused if ``open_shard`` would raise it. Called first, so that the current owner keeps the shard then."""

    def abandon(self, shard_id: str) -> None:
        """Report that no connection has the shard: a consumer took it from another connection, and then failed to open it."""

    async def open_shard(self, opening: ShardOpening) -> ShardIntake:
        """Open a session for a shard. Raises GapRefused if the shard starts after the ledger's position."""
