"""Accepted batches that are not durable yet, in the order in which they were accepted. A synchronous core."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mldserver.coordinator.flush import BufferedBatch
    from mldserver.records import Sequence

__all__ = ["Buffer"]


class Buffer:
    """An ordered multiset of batches that knows its size by shard."""

    def __init__(self) -> None:
        """Start empty."""
        self._batches: dict[int, BufferedBatch] = {}
        self._next = 0
        self._bytes: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def bytes(self) -> int:
        """Bytes of all batches."""
        return sum(self._bytes.values())

    def shard_bytes(self, shard_id: str) -> int:
        """Bytes of one shard's batches."""
        return self._bytes.get(shard_id, 0)

    def add(self, batch: BufferedBatch) -> int:
        """Take a batch in; return its number."""
        number = self._next
        self._batches[number] = batch
        self._next += 1
        self._bytes[batch.shard_id] = self._bytes.get(batch.shard_id, 0) + batch.bytes
        return number

    def __contains__(self, number: int) -> bool:
        return number in self._batches

    def snapshot(self) -> dict[int, BufferedBatch]:
        """Return what is there now, by a number that stays."""
        return dict(self._batches)

    def remove(self, numbers: dict[int, BufferedBatch]) -> None:
        """Drop batches of a snapshot; those dropped meanwhile are passed over."""
        for number in numbers:
            batch = self._batches.pop(number, None)
            if batch is not None:
                left = self._bytes.get(batch.shard_id, 0) - batch.bytes
                if left:
                    self._bytes[batch.shard_id] = left
                else:
                    self._bytes.pop(batch.shard_id, None)

    def drop_shard(self, shard_id: str) -> int:
        """Drop a shard's batches: it is opened again and they will be delivered again. Return how many."""
        dropped = {number: batch for number, batch in self._batches.items() if batch.shard_id == shard_id}
        self.remove(dropped)
        return len(dropped)

    def drop_durable(self, shard_id: str, epoch: int, position: Sequence) -> None:
        """Drop a connection's batches up to a position that the ledger has already; a shard's end stays."""
        self.remove(
            {
                number: batch
                for number, batch in self._batches.items()
                if (batch.shard_id, batch.epoch) == (shard_id, epoch)
                and not batch.ends_shard
                and batch.last is not None
                and batch.last <= position
            }
        )
