"""Accepted batches that are not durable yet, in the order in which they were accepted. A synchronous core."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mldserver.coordinator.core.flush import BufferedBatch
    from mldserver.records import Sequence


class Buffer:
    """An ordered multiset of batches that knows which are of which shard."""

    def __init__(self) -> None:
        """Start empty."""
        self._batches: dict[int, BufferedBatch] = {}
        self._next = 0
        self._moves: dict[str, int] = {}
        """Of each shard whose latest batch only moves its position, and that no cycle has seen yet, its number."""
        # A cycle asks for every shard what of it is durable: each must find its own without a look at the others.
        self._numbers: dict[str, dict[int, None]] = {}
        self.bytes = 0
        """Bytes of all batches."""

    def __len__(self) -> int:
        return len(self._batches)

    def add(self, batch: BufferedBatch) -> int:
        """Take a batch in; return its number.

        Of batches that only move their shard's position one is kept: each takes in what the one before it said.
        """
        number, before = self._next, self._moves.pop(batch.shard_id, None)
        if batch.moves_only:
            if before is not None and (known := self._batches[before]).epoch == batch.epoch:
                self._batches[before] = _further(known, batch)
                self._moves[batch.shard_id] = before
                return before
            self._moves[batch.shard_id] = number
        self._batches[number] = batch
        self._next += 1
        self._numbers.setdefault(batch.shard_id, {})[number] = None
        self.bytes += batch.bytes
        return number

    def __contains__(self, number: int) -> bool:
        return number in self._batches

    def snapshot(self) -> dict[int, BufferedBatch]:
        """Return what is there now, by a number that stays."""
        self._moves.clear()
        return dict(self._batches)

    def remove(self, numbers: Iterable[int]) -> None:
        """Drop batches by their numbers; those dropped meanwhile are passed over."""
        for number in numbers:
            batch = self._batches.pop(number, None)
            if batch is None:
                continue
            self.bytes -= batch.bytes
            if self._moves.get(batch.shard_id) == number:
                del self._moves[batch.shard_id]
            left = self._numbers[batch.shard_id]
            del left[number]
            if not left:
                del self._numbers[batch.shard_id]

    def drop_shard(self, shard_id: str) -> int:
        """Drop a shard's batches: it is opened again and they will be delivered again. Return how many."""
        dropped = tuple(self._numbers.get(shard_id, ()))
        self.remove(dropped)
        return len(dropped)

    def drop_durable(self, shard_id: str, epoch: int, position: Sequence) -> None:
        """Drop a connection's batches up to a position that the ledger has already; a shard's end stays."""
        of_shard = ((number, self._batches[number]) for number in self._numbers.get(shard_id, ()))
        self.remove(
            [
                number
                for number, batch in of_shard
                if batch.epoch == epoch
                and not batch.ends_shard
                and batch.last is not None
                and batch.last <= position
            ]
        )


def _further(known: BufferedBatch, batch: BufferedBatch) -> BufferedBatch:
    """Return what two batches without rows come to, one behind the other."""
    events = [ms for ms in (known.latest_event_ms, batch.latest_event_ms) if ms is not None]
    return replace(
        batch,
        last=known.last if batch.last is None else batch.last,
        effective_ms=known.effective_ms if batch.effective_ms is None else batch.effective_ms,
        latest_event_ms=max(events, default=None),
    )
