"""Accepted batches that are not durable yet, in the order in which they were accepted. A synchronous core."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mldserver.coordinator.core.flush import moved

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
        """Take a batch in; return its number."""
        number = self._next
        self._moves.pop(batch.shard_id, None)
        self._batches[number] = batch
        self._next += 1
        self._numbers.setdefault(batch.shard_id, {})[number] = None
        self.bytes += batch.bytes
        return number

    def move(
        self,
        shard_id: str,
        epoch: int,
        position: Sequence | None,
        effective_ms: int | None = None,
        latest_event_ms: int | None = None,
    ) -> None:
        """Move a shard's position without rows (see ``moved``), and its times; None: that stays where it is.

        Until a cycle has seen it, one such batch takes in what the next ones say: thousands of quiet shards have no others.
        """
        number = self._moves.get(shard_id)
        if number is None or (batch := self._batches[number]).epoch != epoch:
            batch = moved(shard_id, epoch, position, effective_ms, latest_event_ms)
            self._moves[shard_id] = self.add(batch)
            return
        if position is not None:
            batch.last = position
        if effective_ms is not None:
            batch.effective_ms = effective_ms
        if latest_event_ms is not None and (
            batch.latest_event_ms is None or latest_event_ms > batch.latest_event_ms
        ):
            batch.latest_event_ms = latest_event_ms

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
