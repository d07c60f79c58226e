"""A ledger in DynamoDB that is newer, damaged, emptied or rolled back is refused, at the start and while running."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from mldserver.errors import LedgerError, LedgerVersionError
from mldserver.ledger.format import FORMAT
from tests.ledger.dynamodb_fake import FakeDynamo, beat, flush, lost_answer, start
from tests.ledger.samples import letter

if TYPE_CHECKING:
    from mldserver.ledger.dynamodb import DynamoLedger

    Factory = Callable[..., DynamoLedger]

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("where", ["meta", "log#00000000000000000003"])
async def test_a_newer_format_is_refused_at_the_start_and_while_running(
    ledger_on: Factory, dynamo: FakeDynamo, where: str
) -> None:
    ledger = await start(ledger_on(), "a")
    other = await start(ledger_on("two"))
    dynamo.items["p"][where]["format"] = {"N": f"{FORMAT + 1}"}
    for call in (ledger.open_shard("b"), ledger_on("three").open(), ledger_on("tool").peek()):
        with pytest.raises(LedgerVersionError, match=f"has format {FORMAT + 1}"):
            await call
    await other.close()


async def test_a_table_that_was_rolled_back_is_refused(ledger_on: Factory, dynamo: FakeDynamo) -> None:
    ledger = await start(ledger_on(), "a")
    backup = {name: dict(item) for name, item in dynamo.items["p"].items()}
    await ledger.register(flush("a", 1))
    dynamo.items["p"] = backup
    for _ in range(2):
        with pytest.raises(LedgerError, match="went back from version 3 to 2"):
            await ledger.register(flush("a", 2))


async def test_a_table_that_was_rolled_back_is_refused_also_when_it_could_not_be_read_at_once(
    ledger_on: Factory, dynamo: FakeDynamo, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = await start(ledger_on(), "a")
    backup = {name: dict(item) for name, item in dynamo.items["p"].items()}
    await ledger.register(flush("a", 1))
    dynamo.items["p"] = backup
    query = dynamo.query

    async def lose_the_beginning(**request: Any) -> dict[str, Any]:
        if request["ExpressionAttributeValues"][":first"]["S"] == "log#00000000000000000001":
            raise lost_answer()
        return await query(**request)

    with monkeypatch.context() as patch:
        patch.setattr(dynamo, "query", lose_the_beginning)
        with pytest.raises(LedgerError, match="out of reach"):
            await ledger.register(flush("a", 2))
    for _ in range(2):
        with pytest.raises(LedgerError, match="went back from version 3 to 2"):
            await ledger.register(flush("a", 2))


async def test_a_table_that_was_emptied_is_refused(ledger_on: Factory, dynamo: FakeDynamo) -> None:
    ledger = await start(ledger_on(), "a")
    dynamo.items["p"].clear()
    with pytest.raises(LedgerError, match="it is gone"):
        await ledger.register(flush("a", 1))


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda items: items.pop("log#00000000000000000001"), "holes"),
        (lambda items: items["log#00000000000000000001"].update(data={"B": b"x"}), "cannot be read"),
        (lambda items: items["meta"].update(version={"N": "9"}), "holes"),
    ],
)
async def test_a_damaged_ledger_is_refused(
    ledger_on: Factory, dynamo: FakeDynamo, damage: Callable[[Any], Any], told: str
) -> None:
    await start(ledger_on(), "a")
    damage(dynamo.items["p"])
    with pytest.raises(LedgerError, match=f"damaged.*{told}"):
        await ledger_on("two").open()


@pytest.mark.parametrize("lost", ["blob", "data"])
async def test_damaged_dead_letters_are_told(ledger_on: Factory, dynamo: FakeDynamo, lost: str) -> None:
    ledger = await start(ledger_on(), "a")
    size = 1_000_000 if lost == "blob" else 1
    await ledger.register(flush("a", 1, letters=(letter(1, data=os.urandom(size)),)))
    items = dynamo.items["p"]
    if lost == "blob":
        items.pop(max(name for name in items if name.startswith("blob#")))
    else:
        items["dead#00000000000000000003"]["data"] = {"B": b"x"}
    with pytest.raises(LedgerError, match="damaged: dead letters"):
        await ledger.dead_letters()
    assert await ledger.dead_letters(0) == ()


async def test_a_transaction_whose_parts_are_gone_is_damage(
    ledger_on: Factory, dynamo: FakeDynamo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mldserver.ledger.dynamodb_table.INLINE_BYTES", 500)
    reader, ledger = await start(ledger_on("reader")), await start(ledger_on(), "a")
    await ledger.register(flush("a", 1, files=20))
    dynamo.items["p"].pop(max(name for name in dynamo.items["p"] if name.startswith("blob#")))
    for _ in range(2):
        with pytest.raises(LedgerError, match="holes"):
            await reader.adopt()


async def test_the_log_of_a_snapshot_whose_parts_are_gone_is_no_ledger(
    ledger_on: Factory, dynamo: FakeDynamo
) -> None:
    ledger = await start(ledger_on(compact_bytes=1_000))
    await beat(ledger, 30)
    for name in [each for each in dynamo.items["p"] if each.startswith("blob#")]:
        del dynamo.items["p"][name]
    with pytest.raises(LedgerError, match="holes"):
        await ledger_on("tool").peek()
