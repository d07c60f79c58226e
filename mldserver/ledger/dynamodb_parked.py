"""Which keys of a shard are parked (``on_key_failure = park``), read from DynamoDB beside the ledger's transactions.

An item of letters tells their keys in an attribute of its own, so that a page of a query tells those of a thousand items
without their payloads. Only where that would be too long are the letters themselves read.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final

from mldserver.ledger.format import keys_of, unpack_keys

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping

    from mldserver.ledger.book import LetterItem
    from mldserver.ledger.dynamodb_table import Table
    from mldserver.ledger.format import LetterKeys
    from mldserver.records import DeadLetter, Sequence

__all__ = ["parked_keys"]

_AT_ONCE: Final = 200
"""Items whose keys one visit to a thread unpacks."""


async def parked_keys(
    table: Table,
    told: Mapping[str, LetterItem],
    shard_id: str,
    letters_of: Callable[[int], Awaitable[tuple[DeadLetter, ...] | None]],
) -> dict[str, Sequence]:
    """Return the keys of a shard's letters, each with the sequence of the first.

    ``told``: what the ledger says of its letters; those that are deleted meanwhile are passed over. ``letters_of`` reads
    an item's letters, None when it is gone. Raises LedgerError, and ValueError for keys that cannot be read.
    """
    parked: dict[str, Sequence] = {}
    if not told:
        return parked
    async with contextlib.aclosing(_keys(table, told, letters_of)) as items:
        async for version, keys in items:
            gone = told[version].gone
            for place, each in enumerate(keys):
                if each is not None and each[0] == shard_id and not gone >> place & 1:
                    parked[each[1]] = min(each[2], parked.get(each[1], each[2]))
    return parked


async def _keys(
    table: Table,
    told: Mapping[str, LetterItem],
    letters_of: Callable[[int], Awaitable[tuple[DeadLetter, ...] | None]],
) -> AsyncGenerator[tuple[str, LetterKeys], None]:
    """Yield the keys of each item that was told of, by its version, in order of storage."""
    packed: list[tuple[str, bytes]] = []
    async for item in table.between("dead#", "dead#~", names=("item", "keys")):
        number = int(item["item"]["S"].removeprefix("dead#"))
        version = str(number)
        if version not in told:
            continue
        if "keys" in item:
            packed.append((version, bytes(item["keys"]["B"])))
        if "keys" not in item or len(packed) == _AT_ONCE:
            for each in await asyncio.to_thread(_unpacked, packed):
                yield each
            packed = []
        if "keys" not in item:
            yield version, keys_of(await letters_of(number) or ())
    for each in await asyncio.to_thread(_unpacked, packed):
        yield each


def _unpacked(packed: list[tuple[str, bytes]]) -> list[tuple[str, LetterKeys]]:
    return [(version, unpack_keys(each)) for version, each in packed]
