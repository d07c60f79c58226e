"""Dead letters beside the shards: where a flush puts them when that is not the ledger, and how those that ran again come in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from mldserver.coordinator.core.flush import redriven

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from mldserver.coordinator.core.buffer import Buffer
    from mldserver.ledger.contract import LedgerState
    from mldserver.records import DeadLetter
    from mldserver.runtime.interface import BatchOutcome
    from mldserver.windows import WindowSpec

__all__ = ["Destination", "RedriveIntake"]


class RedriveIntake:
    """Takes outcomes of dead letters in beside those of shards."""

    def __init__(
        self,
        server_id: str,
        spec: WindowSpec | None,
        buffer: Buffer,
        flush: Callable[[str], Awaitable[None]],
    ) -> None:
        """``flush`` returns when a whole cycle that began after the call is done."""
        self.wanted = 0
        """How many letters the ledger says are to be redriven."""
        self._server_id = server_id
        self._spec = spec
        self._buffer = buffer
        self._flush = flush
        self._elsewhere: frozenset[str] = frozenset()

    def learn(self, state: LedgerState) -> None:
        """Take over what the ledger holds now."""
        self.wanted = state.redrives
        self._elsewhere = frozenset(
            shard.shard_id
            for shard in state.shards.values()
            if shard.owner not in {None, self._server_id} and not shard.ended
        )

    def is_elsewhere(self, shard_id: str) -> bool:
        """Whether another server has the shard: its letters are taken there."""
        return shard_id in self._elsewhere

    async def register(self, shard_id: str, outcome: BatchOutcome, ids: tuple[str, ...]) -> None:
        """Return when what letters gave is registered together with their end, or is left out: they were gone already.

        Whatever a shard had accepted before is durable too by then.
        """
        batch = redriven(shard_id, outcome, ids, spec=self._spec)
        number = self._buffer.add(batch)
        try:
            await self._flush("redrive")
        finally:
            # Given up: the letters are taken again, and must not be in one flush twice.
            self._buffer.remove({number: batch})


class Destination(Protocol):
    """Keeps letters durably, before the positions of their records move.

    A server that dies between the two has written them, and writes them again when their records come again: the id
    of a letter's document (``document.py``) is the same both times.
    """

    async def store(self, letters: tuple[DeadLetter, ...]) -> tuple[DeadLetter, ...]:
        """Return when the letters are durable; return those that are too large for the place: the ledger keeps them.

        Raises OSError or LedgerError when the place is out of reach, also after some were written: all are given again.
        """
        ...

    async def close(self) -> None:
        """Let go of connections; no call may follow."""
        ...
