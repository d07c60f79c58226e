"""The rules of a ledger over a book in memory that nothing disturbs. The stores are compared with it (``test_store_machine.py``)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mldserver.base.clock import Clock
from mldserver.ledger.book import Book, Draft
from mldserver.ledger.contract import StoredLetter
from mldserver.ledger.operations import Ledger, Transaction
from mldserver.records import Sequence
from tests.support.store import SqliteStore


class MemoryLedger(Ledger):
    """One server's ledger on a book that others share."""

    def __init__(self, book: Book, server_id: str, clock: Clock) -> None:
        super().__init__(server_id, clock)
        self._book = book

    async def _connect(self, *, create: bool) -> None:
        pass

    async def _read_book(self, read: Callable[[Book], Any]) -> Any:
        return read(self._book)

    async def _transact(self, transaction: Transaction[Any], read: Callable[[Book], Any]) -> Any:
        draft = Draft(self._book)
        told = transaction.run(draft)
        if changes := draft.changes():
            self._book.apply(changes)
        return told, read(self._book)

    async def letters(self, **_: Any) -> tuple[StoredLetter, ...]:
        raise NotImplementedError

    async def parked_keys(self, _shard_id: str) -> dict[str, Sequence]:
        raise NotImplementedError

    async def close(self) -> None:
        pass


class MemoryStore(SqliteStore):
    """The same as plain calls."""

    def __init__(self, book: Book, server_id: str) -> None:
        self._book = book
        super().__init__(Path(), pipeline="p", server_id=server_id)

    def _make(self) -> Any:
        ledger = MemoryLedger(self._book, self.server_id, self._clock)
        ledger.time_ms = self._clock.now_ms  # type: ignore[method-assign]  # the ledger's time is what calls say
        return ledger

    @property
    def lives(self) -> bool:
        """Whether the server is registered still."""
        server = self._book.servers.get(self.server_id)
        return server is not None and server.life == self.ledger._life
