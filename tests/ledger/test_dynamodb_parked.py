"""The parked keys of a shard in DynamoDB: read without the letters where that can be, and beside all other calls."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from mldserver.errors import LedgerError
from mldserver.ledger.format import pack_keys, unpack_keys
from mldserver.records import Sequence
from tests.ledger.dynamodb_fake import FakeDynamo, beat, flush, start
from tests.ledger.samples import letter

if TYPE_CHECKING:
    from mldserver.ledger.dynamodb import DynamoLedger

    Factory = Callable[..., DynamoLedger]

pytestmark = pytest.mark.quick

SHARD = letter(1).shard_id


class CountingDynamo(FakeDynamo):
    """Counts the reads of single items, and lets queries for letters wait."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []
        self.asked = asyncio.Event()
        self.answer = asyncio.Event()
        self.answer.set()

    async def get_item(self, **request: Any) -> dict[str, Any]:
        self.reads.append(request["Key"]["item"]["S"])
        return await super().get_item(**request)

    async def query(self, **request: Any) -> dict[str, Any]:
        answer = await super().query(**request)
        if request["ExpressionAttributeValues"][":first"]["S"] == "dead#":
            self.asked.set()
            await self.answer.wait()
        return answer

    def letter_reads(self) -> list[str]:
        return [name for name in self.reads if name.startswith("dead#")]


@pytest.fixture
def dynamo() -> CountingDynamo:
    return CountingDynamo()


async def with_letters(ledger: DynamoLedger, items: int, *, more: int = 0) -> DynamoLedger:
    """Store letters of one key each, item by item; in the last ``more`` others of keys that are nothing alike."""
    await start(ledger, "a")
    for number in range(1, items + 1):
        others = tuple(letter(10_000 + n, partition_key=os.urandom(40).hex()) for n in range(more))
        letters = (letter(number, partition_key=f"key-{number % 7}"), *(others if number == items else ()))
        assert (await ledger.register(flush("a", number, files=0, letters=letters))).registered
    return ledger


async def test_no_letter_is_read_to_tell_which_keys_are_parked(
    ledger_on: Factory, dynamo: CountingDynamo
) -> None:
    ledger = await with_letters(ledger_on(), 500)
    assert await ledger.parked_keys("another") == {}
    parked = await ledger.parked_keys(SHARD)
    assert parked == {f"key-{n % 7}": letter(n).sequence for n in range(1, 8)}
    assert dynamo.letter_reads() == []


async def test_letters_that_are_gone_park_nothing(ledger_on: Factory, dynamo: CountingDynamo) -> None:
    ledger = await with_letters(ledger_on(), 9)
    first = await ledger.letters(limit=2)
    await ledger.purge(tuple(each.id for each in first))
    parked = await ledger.parked_keys(SHARD)
    assert parked == {
        f"key-{n % 7}": letter(n).sequence for n in range(3, 10) if n % 7 not in {1, 2} or n > 7
    }


@pytest.mark.parametrize("older", [False, True])
async def test_where_keys_are_not_told_beside_them_the_letters_are_read(
    ledger_on: Factory, dynamo: CountingDynamo, older: bool
) -> None:
    ledger = await with_letters(ledger_on(), 3, more=0 if older else 1000)
    items = {name: item for name, item in dynamo.items["p"].items() if name.startswith("dead#")}
    if older:
        for item in items.values():
            del item["keys"]
    without = [name for name, item in items.items() if "keys" not in item]
    assert len(without) == (3 if older else 1)
    parked = await ledger.parked_keys(SHARD)
    assert {key: parked[key] for key in ("key-1", "key-2", "key-3")} == {
        f"key-{n}": letter(n).sequence for n in range(1, 4)
    }
    assert len(parked) == (3 if older else 1003)
    assert dynamo.letter_reads() == without


async def test_other_calls_go_on_while_parked_keys_are_read(
    ledger_on: Factory, dynamo: CountingDynamo
) -> None:
    ledger = await with_letters(ledger_on(), 3)
    dynamo.answer.clear()
    async with asyncio.timeout(800), asyncio.TaskGroup() as group:
        asking = group.create_task(ledger.parked_keys(SHARD))
        await dynamo.asked.wait()
        await beat(ledger, 3)
        assert (await ledger.register(flush("a", 4))).registered
        closing = group.create_task(ledger.close())
        for _ in range(5):
            await asyncio.sleep(0)
        assert not closing.done()
        assert dynamo.clients == 1
        dynamo.answer.set()
    assert len(asking.result()) == 3
    assert dynamo.clients == 0


async def test_letters_that_are_deleted_while_keys_are_read_are_passed_over(
    ledger_on: Factory, dynamo: CountingDynamo
) -> None:
    ledger = await with_letters(ledger_on(), 2)
    for name, item in dynamo.items["p"].items():
        if name.startswith("dead#"):
            del item["keys"]
    dynamo.answer.clear()
    async with asyncio.timeout(800), asyncio.TaskGroup() as group:
        asking = group.create_task(ledger.parked_keys(SHARD))
        await dynamo.asked.wait()
        (first,) = await ledger.letters(limit=1)
        await ledger.purge((first.id,))
        dynamo.answer.set()
    assert asking.result() == {"key-2": letter(2).sequence}


async def test_keys_that_cannot_be_read_are_told(ledger_on: Factory, dynamo: CountingDynamo) -> None:
    ledger = await with_letters(ledger_on(), 1)
    (name,) = [name for name in dynamo.items["p"] if name.startswith("dead#")]
    dynamo.items["p"][name]["keys"] = {"B": b"x"}
    with pytest.raises(LedgerError, match="damaged: dead letters cannot be read"):
        await ledger.parked_keys(SHARD)


def test_keys_come_back_as_they_went_in() -> None:
    letters = (letter(1), letter(2, partition_key=None), letter(3, partition_key="k"))
    first, *others = unpack_keys(pack_keys(letters))
    assert first == (SHARD, letters[0].partition_key, letters[0].sequence)
    assert others == [None, (SHARD, "k", letters[2].sequence)]
    assert isinstance(first[2], Sequence)
    for wrong in (b"", b"x", pack_keys(letters)[:-1]):
        with pytest.raises(ValueError, match="error"):
            unpack_keys(wrong)
