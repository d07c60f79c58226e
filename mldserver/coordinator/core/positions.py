"""Positions: how far one shard is accepted, durable and checkpointed. A synchronous core.

Always: checkpointed <= durable <= accepted. What is checkpointed is also never beyond what this connection delivered:
after a lost lease or a replay the ledger is ahead of the daemon, which refuses a checkpoint at a record that it has not
delivered yet (KCL 3.1.3: IllegalArgumentException). A position covers a complete prefix of the shard's records: batches are
accepted in shard order, and a batch is accepted only when every record of it has its rows buffered or its dead letter
made.
"""

from __future__ import annotations

import enum
from collections import deque
from itertools import islice
from typing import Final

from mldserver.errors import InternalError
from mldserver.records import Sequence

__all__ = ["ShardPosition", "Start", "judge_start"]

_MOST_ENDS: Final = 1024
"""Of batches that are remembered where aggregates must be whole; an even number."""


class Start(enum.Enum):
    """How the place where a daemon starts relates to the ledger's position."""

    FRESH = "fresh"
    """Neither side knows anything of the shard."""
    BEHIND = "behind"
    """At or before the position, or at the horizon: what was accepted is delivered again and dropped."""
    BEYOND = "beyond"
    """After the position: records were skipped."""
    UNKNOWN = "unknown"
    """A time, or a daemon that does not say (V1): nothing can be told."""


def judge_start(start: Sequence | str | None, position: Sequence | None, *, ended: bool = False) -> Start:
    """Compare where a daemon starts with the ledger's position of the shard.

    ``start``: the sequence after which records follow, one of the KCL's sentinels, or None. ``ended``: the ledger has
    the shard's end, so that nothing can be skipped any more. ``LATEST`` with a position is BEYOND: the daemon has no
    checkpoint and skips to the stream's tip.
    """
    if ended:
        return Start.BEHIND
    if isinstance(start, Sequence):
        return Start.BEHIND if position is not None and start <= position else Start.BEYOND
    if start == "SHARD_END":
        return Start.BEYOND
    if start in {None, "AT_TIMESTAMP"}:
        return Start.UNKNOWN
    if position is None:
        return Start.FRESH
    return Start.BEYOND if start == "LATEST" else Start.BEHIND


class ShardPosition:
    """One shard's progress under one connection."""

    __slots__ = ("_ends", "_whole", "accepted", "checkpointed", "claimed", "delivered", "durable")

    def __init__(self, durable: Sequence | None, *, within_aggregates: bool = True) -> None:
        """Start from the ledger's position: all before it was accepted in an earlier life.

        ``within_aggregates``: whether a checkpoint says how far it goes into a KPL aggregate. V1's says its sequence
        number only, and covers all of it: there only the ends of batches are checkpointed, which no aggregate crosses.
        """
        self.accepted = durable
        self.claimed = durable
        self.delivered: Sequence | None = None
        self.durable = durable
        self.checkpointed: Sequence | None = None
        self._whole: Sequence | None = None
        """The last end of a batch that was passed; all aggregates are whole there."""
        self._ends: deque[Sequence] | None = None if within_aggregates else deque()
        """The ends of the batches behind it."""

    def deliver(self, last: Sequence | None) -> None:
        """Note that the daemon delivered every record up to ``last``, perhaps again; None: an empty batch."""
        if last is None or (self.delivered is not None and last <= self.delivered):
            return
        self.delivered = last
        if self._ends is not None:
            self._ends.append(last)
            if len(self._ends) > _MOST_ENDS:
                # A handler that does not checkpoint. Every other one will do; of an odd number that is the last one too.
                self._ends = deque(islice(self._ends, 0, None, 2))

    def accept(self, last: Sequence | None) -> None:
        """Note that every record up to ``last`` is taken care of; None (an empty batch) changes nothing."""
        if last is not None and (self.accepted is None or last > self.accepted):
            self.accepted = last

    def claim(self, position: Sequence | None) -> Sequence | None:
        """Return how far the durable position is to move, now that a handler is done with all up to ``position``.

        For handlers that keep their position: accepted records wait in no buffer here, but are not done before the
        handler says so. Never beyond what was accepted; None: no further than what was claimed before.
        """
        if position is None or self.accepted is None:
            return None
        position = min(position, self.accepted)
        if self.claimed is not None and position <= self.claimed:
            return None
        self.claimed = position
        return position

    def register(self, position: Sequence | None) -> None:
        """Note that the ledger moved the position. Raises InternalError when it is beyond what was accepted."""
        if position is None or (self.durable is not None and position <= self.durable):
            return
        if self.accepted is None or position > self.accepted:
            raise InternalError(f"position {position} would pass what was accepted, {self.accepted}")
        self.durable = position

    def due(self) -> Sequence | None:
        """Return what may be checkpointed now: the durable prefix of what was delivered, unless it is stored."""
        if self.durable is None or self.delivered is None:
            return None
        position = self._rounded(min(self.durable, self.delivered))
        if position is None or (self.checkpointed is not None and position <= self.checkpointed):
            return None
        return position

    def _rounded(self, position: Sequence) -> Sequence | None:
        """Return the last place up to there that may be checkpointed; None: there is none yet."""
        if self._ends is None:
            return position
        while self._ends and self._ends[0] <= position:
            self._whole = self._ends.popleft()
        return self._whole

    def store(self, position: Sequence) -> None:
        """Note that the daemon stored a checkpoint. Raises InternalError when it is beyond the durable position."""
        if self.durable is None or position > self.durable:
            raise InternalError(f"checkpoint {position} is ahead of the durable position {self.durable}")
        if self.checkpointed is None or position > self.checkpointed:
            self.checkpointed = position
