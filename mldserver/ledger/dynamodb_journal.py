"""The log of a pipeline's transactions in DynamoDB, and the book that it comes to: read, appended to, kept short.

A transaction is one ``TransactWriteItems``: ``meta`` goes from version v to v + 1 on condition that it is at v, and
``log#<v+1>`` (and ``dead#<v+1>``) is put. A server that decided on an older version fails, reads the newer log and
decides again. If the answer is lost, the log says, by the transaction's unique id, whose version v + 1 is.

When the log is longer than the snapshot before it, the book is written as a new snapshot (``dynamodb.py``), so
that a start reads at most some three times what the ledger holds. The log's end always stays, so that a reader knows news
from none: one that finds the first of its news gone reads everything again.

What is too long for an item is written before the transaction that names it, and is waste until then. A sweep lists the
waste, moves the version, and deletes what is waste still: whatever was written for an older version cannot be named any
more, so that no clock and no time-out is part of the argument. (Snapshots can; so a sweep takes them first.)
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any, Final

from mldserver.base.kill_points import kill_point
from mldserver.errors import LedgerError, LedgerUnusable, LedgerVersionError
from mldserver.ledger.book import Book, Changes, Draft, LetterItem
from mldserver.ledger.contract import WindowEntry
from mldserver.ledger.dynamodb_table import Item, Snapshot, Table, Value, version_key
from mldserver.ledger.format import (
    FORMAT,
    OLDEST_FORMAT,
    pack_changes,
    pack_keys,
    pack_letters,
    unpack_changes,
    unpack_keys,
    unpack_letters,
)
from mldserver.records import DeadLetter, Sequence

_READINGS: Final = 20
"""How often a ledger is read that changes under the reader, before it counts as damaged."""

_ITEM_BYTES: Final = 200
"""Approximate size of a log item without its data."""

_KEY_BYTES: Final = 30_000
"""The most bytes of keys stored with an item of letters: some 500 letters' keys, if they compress badly."""

_AT_ONCE: Final = 200
"""Items whose keys one visit to a thread unpacks."""

_LARGE: Final = 64
"""Rows of a transaction from which on packing them is not the event loop's work."""


class Journal:
    """One pipeline's log and its book. One call at a time; ``book`` is read between calls only."""

    def __init__(self, table: Table, pipeline: str, former: str | None) -> None:
        """Start with an empty book. ``former``: the name that the pipeline may have still."""
        self.book = Book()
        self.table = table
        self._pipeline, self._former = pipeline, former
        self._name = pipeline
        self.snapshot = Snapshot()
        """What readers begin with now."""
        self.tail = array("L")
        """What the log behind it takes, version by version (bytes)."""
        self.tail_bytes = 0
        self._letters: tuple[DeadLetter, ...] = ()
        """What was packed last, into ``_dead`` and ``_keys``."""
        self._dead = self._keys = b""
        self._doubtful = False
        """A condition on the book's version has failed: no news is bad news."""

    async def load(self, created_ms: int | None = None) -> bool:
        """Read everything; False when no ledger exists.

        ``created_ms``: creation time of a new ledger; None: create none. It stays in the partition of the name that
        the pipeline had first; under later names an item says which. Raises LedgerVersionError for one of another
        format, or another name, now; LedgerError for a damaged one.
        """
        table = self.table
        if created_ms is not None:
            numbers = {"format": FORMAT, "version": 0, "created_ms": created_ms}
            fields = {name: {"N": str(number)} for name, number in numbers.items()}
            await table.write("meta", fields, "attribute_not_exists(pipeline)")
        for failures in range(1, _READINGS + 1):
            meta = await table.get("meta")
            if meta is None and self._former is not None:
                table.partition = self._former
                meta = await table.get("meta")
            if meta is not None and "partition" in meta:
                table.partition = meta["partition"]["S"]
                meta = await table.get("meta")
            if meta is None:
                return False
            self._name = meta["name"]["S"] if "name" in meta else table.partition
            if self._name not in {self._pipeline, self._former}:
                raise LedgerVersionError(
                    f"The pipeline {table.partition} is called {self._name} now.",
                    advice=f"Give that name, or rename it back with --rename-from {self._name}.",
                    pipeline=self._pipeline,
                )
            self._require_format(meta)
            if await self._load(Snapshot.of(meta) or Snapshot(), int(meta["version"]["N"])):
                self._doubtful = False
                return True
            # A snapshot was put in force, or a transaction is half visible, between two reads.
            await table.pause(failures)
        raise self._damaged("its snapshot or its log has holes")

    async def _load(self, snapshot: Snapshot, version: int) -> bool:
        book = Book()
        if snapshot.value.blob:
            if (read := await self._changes(snapshot.value, {})) is None:
                return False
            book.apply(read[0])
        known = self.book, self.snapshot, self.tail, self.tail_bytes
        before = self.book.version
        book.restored(snapshot.version)
        self.book, self.snapshot, self.tail, self.tail_bytes = book, snapshot, array("L"), 0
        whole = False
        try:
            whole = await self._read_news() and book.version >= version
        finally:
            # Also when the reading failed, or was cancelled: half a book would hide that the ledger went back.
            if not whole or book.version < before:
                self.book, self.snapshot, self.tail, self.tail_bytes = known
        if whole and book.version < before:
            raise self._damaged(f"it went back from version {before} to {book.version}")
        return whole

    async def refresh(self) -> None:
        """Bring the book up to date. Raises as ``load``, and LedgerError when the ledger is gone or went back."""
        before = self.book.version
        whole = await self._read_news() and not (self._doubtful and self.book.version == before)
        if not whole and not await self.load():
            raise self._damaged("it is gone")
        self._doubtful = False

    async def _read_news(self) -> bool:
        """Apply the log's items after the book's version; False when some are gone."""
        first = version_key("log", self.book.version + 1)
        async for item in self.table.between(first, "log#~"):
            self._require_format(item)
            if item["item"]["S"] != version_key("log", self.book.version + 1):
                return False
            if (read := await self._changes(Value.of(item), self.book.windows)) is None:
                return False
            self._applied(*read, Snapshot.of(item))
        return True

    def _applied(self, changes: Changes, size: int, snapshot: Snapshot | None = None) -> None:
        self.book.apply(changes)
        self.tail.append(size + _ITEM_BYTES)
        self.tail_bytes += size + _ITEM_BYTES
        if snapshot is not None and snapshot.version > self.snapshot.version:
            covered = snapshot.version - self.snapshot.version
            self.tail_bytes -= sum(self.tail[:covered])
            del self.tail[:covered]
            self.snapshot = snapshot

    async def _changes(self, value: Value, windows: Mapping[str, WindowEntry]) -> tuple[Changes, int] | None:
        """Return the changes that a value holds, and how many bytes they are; None when parts of it are gone."""
        data = await self.table.bytes_of(value)
        if data is None:
            return None
        try:
            if value.blob is None:
                return unpack_changes(data, windows), len(data)
            return await asyncio.to_thread(unpack_changes, data, windows), len(data)
        except ValueError as error:
            raise self._damaged(f"its content cannot be read ({error})") from error

    async def append(self, draft: Draft) -> bool:
        """Write a draft of the book's next version, which the book then is; False: another was faster.

        Raises LedgerError when it is not known whether it was written; ``refresh`` finds out.
        """
        changes, letters = draft.changes(), draft.dead_letters
        data, dead, keys = await self._packed(changes, letters)
        tx, version = self.table.unique(), self.book.version + 1
        log = await self.table.keep(data, f"{tx}-c")
        operations = self.table.named(log)
        if dead is not None:
            value = await self.table.keep(dead, f"{tx}-d")
            fields = value.attributes() | {"count": {"N": str(len(letters))}}
            if len(keys) <= _KEY_BYTES:
                fields["keys"] = {"B": keys}
            operations += [self.table.put(version_key("dead", version), fields), *self.table.named(value)]
        for spent in draft.spent:
            # If the item is gone another server was faster, and the whole transaction fails.
            if (item := await self.table.get(version_key("dead", spent))) is not None:
                operations.append(self.table.delete(version_key("dead", spent)))
                operations += self.table.unnamed(Value.of(item))
        renames = draft.declares and self._name != self._pipeline
        if renames and self.table.partition != self._pipeline:
            # So that the ledger is found under the pipeline's new name.
            put = self.table.put(
                "meta",
                {"partition": {"S": self.table.partition}},
                ConditionExpression="attribute_not_exists(pipeline) OR attribute_exists(#partition)",
                ExpressionAttributeNames={"#partition": "partition"},
            )
            put["Put"]["Item"]["pipeline"] = {"S": self._pipeline}
            operations.append(put)
        meta = {"name": {"S": self._pipeline}} if renames else {}
        if not await self._transact(tx, log.attributes(), operations, meta):
            return False
        if renames:
            self._name = self._pipeline
        self._applied(changes, len(data))
        return True

    async def _packed(
        self, changes: Changes, letters: tuple[DeadLetter, ...]
    ) -> tuple[bytes, bytes | None, bytes]:
        windows, dead = self.book.windows, None
        if letters:
            # Not again when the transaction is tried again: others, who have none, would always be faster.
            if self._letters != letters:
                self._dead, self._keys = await asyncio.to_thread(
                    lambda: (pack_letters(letters), pack_keys(letters))
                )
                self._letters = letters
            dead = self._dead
        small = len(changes.windows) + len(changes.shards) < _LARGE
        pack = partial(pack_changes, changes, windows)
        return pack() if small else await asyncio.to_thread(pack), dead, self._keys if letters else b""

    async def _transact(self, tx: str, log: Item, operations: list[dict[str, Any]], meta: Item) -> bool:
        """Move ``meta`` to the next version, log it, and do ``operations``; False: another transaction was faster.

        ``log``, ``meta``: their attributes in addition to the version.
        """
        table, version, form = self.table, self.book.version + 1, {"N": str(FORMAT)}
        name, fields = version_key("log", version), {"version": {"N": str(version)}, "format": form} | meta
        update = {
            "TableName": table.name,
            "Key": table.key("meta"),
            "UpdateExpression": "SET " + ", ".join(f"#{field} = :{field}" for field in fields),
            "ConditionExpression": "#version = :before AND #format <= :format",
            "ExpressionAttributeNames": {f"#{field}": field for field in fields},
            "ExpressionAttributeValues": {f":{field}": value for field, value in fields.items()}
            | {":before": {"N": str(version - 1)}},
        }
        logged = table.put(name, {"tx": {"S": tx}, "format": form} | log)
        kill_point("ledger.written")
        done = await table.transact([{"Update": update}, logged, *operations], token=tx)
        if not done:
            # The condition also fails for a second sending of what the first, whose answer was lost, has written.
            item = await table.get(name)
            done = item is not None and item["tx"]["S"] == tx
        self._doubtful = not done
        if done:
            kill_point("ledger.committed")
        return done

    async def put_in_force(self, snapshot: Snapshot) -> bool:
        """Let readers begin with a snapshot that is written and waste; False: another transaction was faster.

        Raises as ``append``. The book must be up to date.
        """
        tx, named, nothing = self.table.unique(), snapshot.attributes(), Value(pack_changes(Changes(), {}))
        operations = self.table.named(snapshot.value, whole=True) + self.table.unnamed(self.snapshot.value)
        done = await self._transact(tx, nothing.attributes() | named, operations, named)
        if done:
            self._applied(Changes(), len(nothing.data), snapshot)
        return done

    async def parked_keys(
        self, letters: Mapping[str, LetterItem], shard_ids: AbstractSet[str]
    ) -> dict[str, Sequence]:
        """Return the parked keys of shards among these letters.

        May run during other calls. ``letters``: from the book; letters deleted meanwhile are skipped. Keys are a
        separate attribute: a page of a query returns the keys of a thousand items without their payloads. Only if the
        keys were too long to store are the letters themselves read.
        """
        parked: dict[str, Sequence] = {}
        packed: list[tuple[str, bytes]] = []

        def unpack() -> None:
            for version, keys in packed:
                gone = letters[version].gone
                for place, key in enumerate(unpack_keys(keys)):
                    if key is not None and key[0] in shard_ids and not gone >> place & 1:
                        parked[key[1]] = min(key[2], parked.get(key[1], key[2]))
            packed.clear()

        try:
            async for item in self.table.between("dead#", "dead#~", names=("item", "keys")):
                number = int(item["item"]["S"].removeprefix("dead#"))
                if str(number) not in letters:
                    continue
                if "keys" in item:
                    keys = bytes(item["keys"]["B"])
                else:
                    keys = pack_keys(await self._letters_if_there(number) or ())
                packed.append((str(number), keys))
                if len(packed) == _AT_ONCE:
                    await asyncio.to_thread(unpack)
            await asyncio.to_thread(unpack)
        except ValueError as error:
            raise self._damaged(f"dead letters cannot be read ({error})") from error
        return parked

    async def letters(self, version: int) -> tuple[DeadLetter, ...] | None:
        """Return the letters that a version stored, those that are gone too; None: another transaction took the last."""
        letters = await self._letters_if_there(version)
        if letters is None:
            await self.refresh()
            if str(version) in self.book.letters:
                raise self._damaged("dead letters are gone")
        return letters

    async def _letters_if_there(self, version: int) -> tuple[DeadLetter, ...] | None:
        """Return an item's letters; None when the item does not exist."""
        name = version_key("dead", version)
        item = await self.table.get(name)
        if item is None:
            return None
        data = await self.table.bytes_of(Value.of(item))
        if data is None:
            if await self.table.get(name) is None:
                return None
            raise self._damaged("dead letters are gone")
        try:
            return await asyncio.to_thread(unpack_letters, data)
        except ValueError as error:
            raise self._damaged(f"dead letters cannot be read ({error})") from error

    def _require_format(self, item: Item) -> None:
        form = int(item["format"]["N"])
        if not OLDEST_FORMAT <= form <= FORMAT:
            raise LedgerVersionError(
                f"The ledger of the pipeline {self._pipeline} has format {form}; this program knows {FORMAT}.",
                advice="Run the version of mldserver that wrote it, or a later one.",
                pipeline=self._pipeline,
            )

    def _damaged(self, fault: str) -> LedgerError:
        return LedgerUnusable(
            f"The ledger of the pipeline {self._pipeline} in DynamoDB is damaged: {fault}.",
            advice="It is never repaired silently: restore the table and the output folder together, from a backup.",
            pipeline=self._pipeline,
        )
