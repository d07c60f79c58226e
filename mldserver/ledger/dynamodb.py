"""The ledger on DynamoDB, for servers on several hosts: ``Ledger`` over one partition of a table.

Every transaction is one ``TransactWriteItems`` on condition of the version that it was decided on. Its changes are
one item of a log (``dynamodb_journal.py``), which every server reads into its own book. Pipelines may share a table.

Limits (AWS: 100 items and 4 MB a transaction, 400 KB an item, no item twice). A flush is never split: its segments
belong to several shards at once. Whatever it holds, its transaction has at most 5 items and 0.8 MB: ``meta``, its
changes (compressed), its dead letters (compressed), and the marks of what is kept apart. Of changes, or dead letters,
that take more than 350 KB compressed, all is written before the transaction in items of 350 KB under its unique id, and
named by it; what no transaction names is swept later. A segment in a separate window takes some 37 bytes: a flush is
kept apart from some 9,000 files on. A store of keyed state that a flush changes takes some 20 bytes.

Cost: a transaction writes 2 or 3 items, each 2 write units while it takes less than 1 KB (a flush of ten shards and ten
files: 0.6 KB), and reads the news first. A partition takes 1,000 write units a second: some 200 transactions.

Throttling, lost connections and conflicts are retried with jittered pauses on the injected clock; then LedgerError. One
request is sent at most 6 times (1.5 to 3.1 s of refusals; half a minute of silence), one decision is taken at most 40
times. After a LedgerError, and after a cancellation, a transaction may have taken place: epochs, ``previous`` and
attempts keep a repetition from counting twice.

Permissions on the table: ``dynamodb:GetItem``, ``Query``, ``PutItem``, ``UpdateItem``, ``DeleteItem``,
``BatchWriteItem`` (may be narrowed to pipelines by ``dynamodb:LeadingKeys``); to create it also ``CreateTable`` and
``DescribeTable``. Point-in-time recovery is worth turning on: a ledger cannot be made again from the output.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import uuid
import zlib
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import structlog

from mldserver.base.aws import aws_client
from mldserver.base.clock import Clock
from mldserver.errors import InternalError, LedgerError, LedgerMissing
from mldserver.ledger import row_rules
from mldserver.ledger.book import Book, Draft
from mldserver.ledger.contract import LedgerState, ServerState, StoredLetter, with_ancestors
from mldserver.ledger.dynamodb_journal import Journal
from mldserver.ledger.dynamodb_table import INLINE_BYTES, Snapshot, Table, Value, version_key
from mldserver.ledger.format import pack_changes
from mldserver.ledger.operations import Ledger, Transaction
from mldserver.records import Sequence

_T = TypeVar("_T")
_S = TypeVar("_S")

log = structlog.get_logger("mldserver")

_JITTER: Final = random.SystemRandom().random

_DECISIONS: Final = 40
"""The most decisions of one transaction: it is decided again when another was faster."""

_NAMINGS: Final = 20
"""How often one call tries to put a snapshot in force while others are faster; the next call goes on."""

_SPREAD: Final = 0.5
"""How much longer than for another the log may be for a server, as a share."""

_PAUSE_MS: Final = 60_000
"""The pause after a snapshot could not be written, so that not every call waits for another failure."""


class DynamoLedger(Ledger):
    """The ``Ledger`` of one server, in a table that servers of other hosts share. Calls take turns."""

    def __init__(
        self,
        table: str,
        *,
        pipeline: str,
        server_id: str,
        clock: Clock,
        rename_from: str | None = None,
        region: str | None = None,
        endpoint_url: str | None = None,
        session: Any = None,
        compact_bytes: int = 1_000_000,
        jitter: Callable[[], float] = _JITTER,
        unique: Callable[[], str] = lambda: uuid.uuid4().hex,
    ) -> None:
        """Name the table, the pipeline and this server; ``open`` reaches for them.

        ``rename_from``: the name that the pipeline may have still. ``session``: an aioboto3 session; None: credentials and
        region come from where boto3 finds them. ``compact_bytes``: the log is never shortened below it.
        """
        super().__init__(server_id, clock)
        self._name = table
        self._pipeline, self._former = pipeline, rename_from
        self._where: dict[str, Any] = {"region": region, "endpoint_url": endpoint_url, "session": session}
        self._compact_bytes = compact_bytes
        self._jitter = jitter
        self._unique = unique
        self._turn = asyncio.Lock()
        self._resources = contextlib.AsyncExitStack()
        self._table: Table | None = None
        self._journal: Journal | None = None
        self._compaction: Compaction | None = None
        self._readers = 0
        """Calls that read while others take their turns."""
        self._read = asyncio.Event()
        """Set when one of them has ended."""
        self._closed = False

    async def create_table(self) -> None:
        """Create the table unless it is there, and wait until it can be used (at most a minute)."""
        async with self._taking_turns():
            await (await self._reach()).create()

    async def _connect(self, *, create: bool) -> None:
        async with self._taking_turns():
            if self._journal is not None:
                return
            table = await self._reach()
            journal = Journal(table, self._pipeline, self._former)
            if not await journal.load(self._clock.now_ms() if create and self._former is None else None):
                name = self._former or self._pipeline
                missing = f"The table {self._name} holds no ledger of the pipeline {name}."
                raise LedgerMissing(
                    missing, advice="Name a pipeline that ran, and its table.", table=self._name
                )
            self._journal = journal
            self._compaction = Compaction(
                journal=journal,
                table=table,
                server_id=self.server_id,
                at_least=self._compact_bytes,
                turn=self._turn,
                clock=self._clock,
            )

    async def _reach(self) -> Table:
        if self._table is None:
            # One sending a call: ``Table.send`` knows which errors pass, and pauses on the injected clock.
            once = {"total_max_attempts": 1}
            client = await self._resources.enter_async_context(
                aws_client("dynamodb", connect_timeout=3, read_timeout=5, retries=once, **self._where)
            )
            self._table = Table(
                client=client,
                name=self._name,
                partition=self._pipeline,
                clock=self._clock,
                jitter=self._jitter,
                unique=self._unique,
            )
        return self._table

    @contextlib.asynccontextmanager
    async def _taking_turns(self) -> AsyncIterator[None]:
        if self._closed:
            raise InternalError("The ledger is closed.", table=self._name)
        async with self._turn:
            yield

    @contextlib.asynccontextmanager
    async def _up_to_date(self) -> AsyncIterator[Journal]:
        async with self._taking_turns():
            if self._journal is None:
                raise InternalError("The ledger is not open.", table=self._name)
            await self._journal.refresh()
            yield self._journal

    async def _read_book(self, read: Callable[[Book], _T]) -> _T:
        async with self._up_to_date() as journal:
            return read(journal.book)

    async def _transact(self, transaction: Transaction[_T], read: Callable[[Book], _S]) -> tuple[_T, _S]:
        """Decide on the latest version and write the changes, again while other servers are faster."""
        async with self._up_to_date() as journal:
            for failures in range(_DECISIONS):
                if failures:
                    await journal.table.pause(failures, base=0.02, cap=0.5)
                    await journal.refresh()
                draft = Draft(journal.book)
                result = transaction.run(draft)
                if not draft.changes() or await journal.append(draft):
                    return result, read(journal.book)
        raise LedgerError(
            f"Other servers were faster {_DECISIONS} times.",
            did="Nothing was written.",
            advice="Flush less often (--flush-interval), or run fewer servers on one pipeline.",
            table=self._name,
        )

    async def sync(self, own: ServerState, since: int = 0) -> LedgerState:
        """Beat, and return what the ledger holds now. Shortens the log when it is long, while others take turns."""
        state, compaction = await super().sync(own, since), self._compaction
        if compaction is None or not await compaction.run():
            return state
        async with self._turn:
            return compaction.journal.book.state(since)

    async def letters(
        self, *, after: str | None = None, limit: int = 100, wanted: bool = False
    ) -> tuple[StoredLetter, ...]:
        """Return a page of letters in order of storage."""
        letters: list[StoredLetter] = []
        async with self._up_to_date() as journal:
            for version, places in tuple(row_rules.page(journal.book, after, limit, wanted=wanted)):
                if (item := await journal.letters(version)) is not None:
                    letters += [row_rules.stored(journal.book, version, n, item[n]) for n in places]
        return tuple(letters)

    async def parked_keys(self, shard_id: str) -> dict[str, Sequence]:
        """Return the keys of the dead letters of a shard and its ancestors, each with the sequence of the first."""
        async with self._up_to_date() as journal:
            letters, line = journal.book.letters.copy(), with_ancestors(journal.book.shards, shard_id)
            self._readers += 1
        try:
            # Beside the turns of others: there may be many letters, and each shard that is opened asks.
            return await journal.parked_keys(letters, line) if letters else {}
        finally:
            self._readers -= 1
            self._read.set()

    async def close(self) -> None:
        """Close after every call that was made before. Closing again does nothing."""
        if self._closed:
            return
        self._closed = True
        if self._compaction is not None:
            await self._compaction.close()
        async with self._turn:
            while self._readers:
                self._read.clear()
                await self._read.wait()
            await self._resources.aclose()


@dataclass(kw_only=True, eq=False, slots=True)
class Compaction:
    """Keeps the log of one pipeline short, for one server: writes snapshots while transactions of all servers go on.

    A snapshot of version v may be put in force by any later transaction: readers load it, and then the log behind v, which is
    there because only what lies before the snapshot that was in force last is ever deleted. So other servers may
    write meanwhile, for any time. If a call fails, the written parts of a snapshot stay, and the next call continues
    it.

        copy the book ─▶ write the parts, as waste ─▶ name them in a transaction ─▶ sweep

    Until it is named a snapshot is waste that another server's sweep may take, once that one's own snapshot is in
    force. Both claim it with its ``waste`` item, in one conditional write: the second server leaves it alone.

    Servers wait for logs of different lengths, by their names, so that two of them seldom write a snapshot at a time.
    """

    journal: Journal
    table: Table
    server_id: str
    at_least: int
    """Bytes of log that are never worth a snapshot."""
    turn: asyncio.Lock
    """Transactions take it; a compaction does so only now and then."""
    clock: Clock
    _busy: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)
    _closing: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    _copy: Snapshot | None = field(init=False, default=None)
    """One that is on its way into the table."""
    _left: deque[tuple[int, bytes]] = field(init=False, default_factory=deque)
    """Its parts that are not written yet."""
    _not_before_ms: int = field(init=False, default=0)

    def _is_long(self) -> bool:
        patience = 1.0 + _SPREAD * (zlib.crc32(self.server_id.encode()) % 1000) / 1000
        return self.journal.tail_bytes > max(self.at_least, self.journal.snapshot.bytes) * patience

    async def run(self) -> bool:
        """Write a snapshot, or the rest of one, put it in force, and delete what no reader needs any more.

        False: the log is short, another call is writing, or the ledger failed, which is logged. The next call
        continues with what was written.
        """
        if self._busy.locked() or self.clock.steady_ms() < self._not_before_ms:
            return False
        if self._copy is None and not self._is_long():
            return False
        try:
            async with self._busy:
                if (copy := await self._written()) is not None:
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
        self._closing.set()
        async with self._busy:
            pass

    async def _written(self) -> Snapshot | None:
        """Return a snapshot once all of it is written.

        None: the log is short after all, a sweep took the snapshot, or the ledger is being closed.
        """
        async with self.turn:
            if self._closing.is_set():
                return None
            await self.journal.refresh()
            if (copy := self._copy) is None:
                if not self._is_long():
                    return None
                version, everything = self.journal.book.version, self.journal.book.everything()
        if copy is None:
            data = await asyncio.to_thread(pack_changes, everything, {})
            pieces = (data[at : at + INLINE_BYTES] for at in range(0, len(data), INLINE_BYTES))
            self._left = deque(enumerate(pieces))
            value = Value(blob=f"{self.table.unique()}-s", parts=len(self._left))
            await self.table.put_waste(value)
            copy = self._copy = Snapshot(version, len(data), value)
        while self._left and not self._closing.is_set():
            if not await self.table.is_waste(copy.value):
                await self._give_up(copy)
                return None
            await self.table.put_part(copy.value, *self._left[0])
            self._left.popleft()
        return None if self._closing.is_set() else copy

    async def _put_in_force(self, copy: Snapshot) -> Snapshot | None:
        """Put a snapshot in force; return the one before it, or None when it is not in force yet or never will be."""
        for failures in range(1, _NAMINGS + 1):
            if self._closing.is_set():
                break
            async with self.turn:
                await self.journal.refresh()
                before = self.journal.snapshot
                if before.version < copy.version and await self.journal.put_in_force(copy):
                    self._copy = None
                    return before
            if before.version >= copy.version or not await self.table.is_waste(copy.value):
                await self._give_up(copy)
                return None
            await self.table.pause(failures, base=0.02, cap=0.5)
        return None

    async def _give_up(self, copy: Snapshot) -> None:
        """Delete an unneeded snapshot: another is in force, or a sweep has taken it. No other server can name it."""
        async with self.turn:
            await self.journal.refresh()
            in_force = self.journal.snapshot.value
        self._copy = None
        # It is in force itself when the answer to that transaction was lost.
        if in_force.blob != copy.value.blob:
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
