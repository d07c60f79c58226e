"""Snapshots of a book in DynamoDB, written beside the log while the transactions of all servers go on.

A snapshot of version v may be put in force by any later transaction: readers load it, and then the log behind v, which is
there because only what lies before the snapshot that was in force last is ever deleted. So it does not matter who writes
meanwhile, nor for how long; what is written of a snapshot stays written when a call fails, and the next goes on with it.

    copy the book ─▶ write the parts, as waste ─▶ name them in a transaction ─▶ sweep

Until it is named a snapshot is waste that another server's sweep may take, once that one's own snapshot is in force. Both
claim it with its ``waste`` item, in one write on condition of what the other has done: who comes second leaves it alone.

Servers wait for a log of different lengths, by their names, so that seldom two of them write a snapshot at a time.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import structlog

from mldserver.errors import LedgerError
from mldserver.ledger.dynamodb_table import INLINE_BYTES, Snapshot, Value, version_key
from mldserver.ledger.format import pack_changes

if TYPE_CHECKING:
    from mldserver.base.clock import Clock
    from mldserver.ledger.dynamodb_journal import Journal
    from mldserver.ledger.dynamodb_table import Table

log = structlog.get_logger("mldserver")

_NAMINGS: Final = 20
"""How often one call tries to put a snapshot in force while others are faster; the next call goes on."""

_SPREAD: Final = 0.5
"""How much longer than for another the log may be for a server, as a share."""

_PAUSE_MS: Final = 60_000
"""How long a snapshot that could not be written is put off: calls must not each wait for it in vain."""


class _Copy:
    """A snapshot on its way into the table."""

    def __init__(self, version: int, data: bytes, blob: str) -> None:
        pieces = (data[at : at + INLINE_BYTES] for at in range(0, len(data), INLINE_BYTES))
        self.left = deque(enumerate(pieces))
        """Its parts that are not written yet."""
        self.value = Value(blob=blob, parts=len(self.left))
        self.snapshot = Snapshot(version, len(data), self.value)


@dataclass(kw_only=True, eq=False, slots=True)
class Compaction:
    """Keeps the log of one pipeline short, for one server."""

    journal: Journal
    table: Table
    server_id: str
    at_least: int
    """Bytes of log that are never worth a snapshot."""
    turn: asyncio.Lock
    """Transactions take it; a compaction does so only now and then."""
    clock: Clock
    _busy: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)
    _closing: bool = field(init=False, default=False)
    _copy: _Copy | None = field(init=False, default=None)
    _not_before_ms: int = field(init=False, default=0)

    def due(self) -> bool:
        """Whether there is something to do, and nobody does it."""
        if self._busy.locked() or self.clock.steady_ms() < self._not_before_ms:
            return False
        return self._copy is not None or self._is_long()

    def _is_long(self) -> bool:
        patience = 1.0 + _SPREAD * (zlib.crc32(self.server_id.encode()) % 1000) / 1000
        return self.journal.tail.bytes > max(self.at_least, self.journal.snapshot.bytes) * patience

    async def run(self) -> bool:
        """Write a snapshot, or the rest of one, put it in force, and delete what no reader needs any more.

        False: the ledger failed, which is told. What is written by then is of use to the next call.
        """
        try:
            async with self._busy:
                copy = await self._begin()
                if copy is not None and await self._write(copy):
                    waste = {value.blob for value in await self.table.waste()} - {copy.value.blob}
                    before = await self._put_in_force(copy)
                    if before is not None:
                        await self._sweep(waste, before.version)
        except LedgerError as error:
            # A long log costs the next start time, and nothing else: no row waits for it.
            self._not_before_ms = self.clock.steady_ms() + _PAUSE_MS
            log.warning("ledger.not_shortened", **error.told())
            return False
        return True

    async def close(self) -> None:
        """End what is under way, soon. What is not in force by then is waste."""
        self._closing = True
        async with self._busy:
            pass

    async def _begin(self) -> _Copy | None:
        """Return what is to be written; None when the log is short after all, or the ledger is being closed."""
        async with self.turn:
            if self._closing:
                return None
            await self.journal.refresh()
            if self._copy is not None or not self._is_long():
                return self._copy
            version, everything = self.journal.book.version, self.journal.book.everything()
        data = await asyncio.to_thread(pack_changes, everything, {})
        copy = _Copy(version, data, f"{self.table.unique()}-s")
        await self.table.put_waste(copy.value)
        self._copy = copy
        return copy

    async def _write(self, copy: _Copy) -> bool:
        """Write the parts that are left; False when that was ended, or is in vain."""
        while copy.left and not self._closing:
            if not await self.table.is_waste(copy.value):
                await self._give_up(copy)
                return False
            await self.table.put_part(copy.value, *copy.left[0])
            copy.left.popleft()
        return not self._closing

    async def _put_in_force(self, copy: _Copy) -> Snapshot | None:
        """Return the snapshot before it; None when it is not in force, be it not yet or never."""
        for failures in range(1, _NAMINGS + 1):
            if self._closing:
                break
            async with self.turn:
                await self.journal.refresh()
                before = self.journal.snapshot
                if before.version < copy.snapshot.version and await self.journal.put_in_force(copy.snapshot):
                    self._copy = None
                    return before
            if before.version >= copy.snapshot.version or not await self.table.is_waste(copy.value):
                await self._give_up(copy)
                return None
            await self.table.pause(failures, base=0.02, cap=0.5)
        return None

    async def _give_up(self, copy: _Copy) -> None:
        """Delete a snapshot that nobody needs: another is in force, or a sweep has taken it. Nobody else can name it."""
        async with self.turn:
            await self.journal.refresh()
            in_force = self.journal.snapshot.value
        self._copy = None
        # It is in force itself when the answer to that transaction was lost.
        if in_force is None or in_force.blob != copy.value.blob:
            await self.table.delete_value(copy.value)

    async def _sweep(self, listed: set[str | None], before: int) -> None:
        """Delete what was waste before the version moved and is waste still, and the log before the last snapshot."""
        for value in await self.table.waste():
            if value.blob in listed:
                await self.table.discard(value)
        last = version_key("log", max(before - 1, 0))
        old = [item async for item in self.table.between("log#", last, names=("item", "blob", "parts"))]
        for value in (Value.of(item) for item in old if "blob" in item):
            await self.table.delete_value(value)
        await self.table.delete_items([item["item"]["S"] for item in old])
