"""What a flush asks of the place where dead letters go when that is not the ledger."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from mldserver.runtime.base import DeadLetter

__all__ = ["Destination"]


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
