"""The DynamoDB ledger where it differs from others: racing servers, faults of the network, limits, snapshots, damage."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from werkzeug.wrappers import Response

from mldserver.errors import InternalError, LedgerError, LedgerVersionError
from mldserver.ledger.book import Draft
from mldserver.ledger.contract import Flush, ServerState, ShapeChange
from mldserver.ledger.format import pack_letters
from mldserver.records import DeadLetter, Sequence
from tests.ledger.dynamodb_emulator import CutConnection, refusal
from tests.ledger.dynamodb_fake import FakeDynamo, beat, canceled, client_error, flush, lost_answer, start
from tests.ledger.samples import letter

if TYPE_CHECKING:
    from mldserver.ledger.dynamodb import DynamoLedger
    from tests.ledger.dynamodb_emulator import Emulator
    from tests.support.clocks import HandClock

    Factory = Callable[..., DynamoLedger]


async def hammer(ledger: DynamoLedger, shard: str, flushes: int) -> None:
    """Register flushes as a server does: after an error the same again, after a refusal go on from the ledger."""
    number = 1
    while number <= flushes:
        try:
            result = await ledger.register(flush(shard, number))
        except LedgerError:
            continue
        if not result.registered:
            position = (await ledger.peek()).shards[shard].position
            assert position == Sequence(number), "only what was registered under a lost answer is refused"
        number += 1


async def state_after_hammering(ledgers: dict[str, DynamoLedger], flushes: int) -> Any:
    async with asyncio.TaskGroup() as group:
        for shard, ledger in ledgers.items():
            group.create_task(hammer(ledger, shard, flushes))
    return await ledgers["a"].peek()


def assert_each_flush_counts_once(state: Any, shards: str, flushes: int) -> None:
    assert {shard: state.shards[shard].position for shard in shards} == dict.fromkeys(
        shards, Sequence(flushes)
    )
    kept = sorted(each.path.rpartition("/")[0] for each in state.windows["w"].segments)
    assert kept == sorted(f"{shard}/{n}" for shard in shards for n in range(1, flushes + 1))


async def test_two_servers_hammering_one_table_lose_and_double_nothing(dynamodb: Factory) -> None:
    ledgers = {shard: dynamodb(f"server-{shard}") for shard in "ab"}
    for shard, ledger in ledgers.items():
        await ledger.open()
        await ledger.open_shard(shard)
    state = await state_after_hammering(ledgers, 15)
    assert_each_flush_counts_once(state, "ab", 15)
    for ledger in ledgers.values():
        await ledger.close()


class Trouble:
    """Every third transaction meets something else on the wire."""

    def __init__(self) -> None:
        self.count = 0

    def before(self, operation: str, _: Any) -> Any:
        if operation != "TransactWriteItems":
            return None
        self.count += 1
        kinds = {3: "throttle", 6: "cut", 9: "conflict", 12: "broken"}
        match kinds.get(self.count % 15):
            case "throttle":
                return refusal("ThrottlingException")
            case "cut":
                raise CutConnection
            case "conflict":
                return refusal(
                    "TransactionCanceledException",
                    CancellationReasons=[{"Code": "TransactionConflict"}, {"Code": "None"}],
                )
            case "broken":
                return refusal("InternalServerError", 500)
        return None

    def after(self, operation: str, _: Any) -> None:
        if operation == "TransactWriteItems" and self.count % 4 == 0:
            raise CutConnection


async def test_throttling_cut_connections_and_lost_answers_neither_lose_nor_double(
    dynamodb: Factory, emulator: Emulator
) -> None:
    ledgers = {shard: dynamodb(f"server-{shard}") for shard in "ab"}
    for shard, ledger in ledgers.items():
        await ledger.open()
        await ledger.open_shard(shard)
    trouble = Trouble()
    emulator.before, emulator.after = trouble.before, trouble.after
    state = await state_after_hammering(ledgers, 15)
    assert trouble.count > 40
    assert_each_flush_counts_once(state, "ab", 15)
    for ledger in ledgers.values():
        await ledger.close()


async def test_an_outage_is_told_after_bounded_retries_while_the_loop_goes_on(
    dynamodb: Factory, emulator: Emulator
) -> None:
    ledger = dynamodb()
    await ledger.open()
    emulator.calls.clear()
    emulator.before = lambda *_: refusal("ServiceUnavailable", 503)
    turns = 0

    async def tick() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        ticking = group.create_task(tick())
        with pytest.raises(LedgerError, match="out of reach"):
            await ledger.open_shard("a")
        ticking.cancel()
    assert len(emulator.calls) == 6
    assert turns > 20
    emulator.before = None
    assert (await ledger.open_shard("a")).epoch == 1
    await ledger.close()


async def test_a_table_that_is_not_there_is_named_and_not_made_unasked(dynamodb: Factory) -> None:
    for call in ("open", "peek"):
        ledger = dynamodb(create=False)
        with pytest.raises(LedgerError, match=r"no table ledgers-.*mldserver ledger create"):
            await getattr(ledger, call)()
        await ledger.close()


async def test_the_table_is_made_on_request_and_once(dynamodb: Factory, emulator: Emulator) -> None:
    ledger = dynamodb(create=False)
    await ledger.create_table()
    await ledger.create_table()
    made = [told for operation, told in emulator.calls if operation == "CreateTable"]
    assert [told["BillingMode"] for told in made] == ["PAY_PER_REQUEST"] * 2
    with pytest.raises(LedgerError, match="holds no ledger of the pipeline p"):
        await ledger.peek()
    await ledger.close()


async def test_on_the_wire_a_pipeline_gets_another_name_and_its_first_again(dynamodb: Factory) -> None:
    for name, former in (("p", None), ("q", "p"), ("p", "q"), ("q", "p")):
        ledger = dynamodb(pipeline=name, rename_from=former)
        state = await ledger.open()
        assert await ledger.declare(ShapeChange(f"{former} to {name}", name), version=state.version)
        await ledger.leave()
        await ledger.close()
    with pytest.raises(LedgerVersionError):
        await dynamodb(pipeline="p").open()


async def test_a_new_table_is_waited_for_but_not_for_ever(dynamodb: Factory, emulator: Emulator) -> None:
    creating = Response(json.dumps({"Table": {"TableStatus": "CREATING"}}))
    answers = [refusal("ResourceNotFoundException"), creating]
    emulator.before = lambda operation, _: (
        answers.pop(0) if operation == "DescribeTable" and answers else None
    )
    ledger = dynamodb()
    await ledger.create_table()
    assert not answers
    answers[:] = [creating] * 60
    with pytest.raises(LedgerError, match="not active after 60 s"):
        await ledger.create_table()
    await ledger.close()


async def test_credentials_that_may_not_write_are_told(dynamodb: Factory, emulator: Emulator) -> None:
    ledger = dynamodb()
    await ledger.open()
    emulator.before = lambda operation, _: (
        refusal("AccessDeniedException") if operation == "TransactWriteItems" else None
    )
    with pytest.raises(LedgerError, match=r"AccessDenied.*permissions"):
        await ledger.open_shard("a")
    await ledger.close()


async def test_a_flush_beyond_every_limit_of_a_transaction_is_registered_whole(dynamodb: Factory) -> None:
    payloads = [os.urandom(3_000_000), os.urandom(2_000_000), b"small"]
    letters = tuple(letter(n, data=data) for n, data in enumerate(payloads))
    ledger = dynamodb()
    await ledger.open()
    await ledger.open_shard("a")
    assert (await ledger.register(flush("a", 1, files=12_000, letters=letters))).registered
    assert await ledger.dead_letters() == letters
    await ledger.close()
    fresh = dynamodb("tool")
    state = await fresh.peek()
    assert len(state.windows["w"].segments) == 12_000
    assert state.dead_letters == 3
    assert await fresh.dead_letters(1) == letters[:1]
    await fresh.close()


async def test_the_table_stays_small_whatever_is_written(ledger_on: Factory, dynamo: FakeDynamo) -> None:
    ledger = await start(ledger_on(compact_bytes=5_000), "a")
    sizes = set()
    for number in range(1, 300):
        await ledger.register(Flush(flush("a", number).positions))
        await beat(ledger)
        sizes.add(len(dynamo.items["p"]))
    assert max(sizes) < 60
    assert (await ledger_on("tool").peek()).shards["a"].position == Sequence(299)


async def test_what_nothing_names_is_swept_and_nothing_else(
    ledger_on: Factory, dynamo: FakeDynamo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mldserver.ledger.dynamodb_table.INLINE_BYTES", 500)
    ledger = await start(ledger_on(compact_bytes=2_000), "a")
    letters = (letter(1, data=os.urandom(2_000)),)
    await ledger.register(flush("a", 1, files=20, letters=letters))
    dynamo.before = [client_error("ValidationException", "TransactWriteItems")]
    with pytest.raises(LedgerError, match="Validation"):
        await ledger.register(flush("a", 2, files=20, letters=letters))
    ids = blob_ids(dynamo)
    assert sorted(each[-1] for each in ids) == ["c", "c", "d", "d"]
    assert dynamo.kinds()["waste"] == 2
    state = await beat(ledger, 100)
    # The first flush's letters stay, with the last snapshot and the one before it, which is waste now.
    assert blob_ids(dynamo) & ids == {next(item["blob"]["S"] for item in dead_items(dynamo))}
    assert sorted(each[-1] for each in blob_ids(dynamo)) == ["d", "s", "s"]
    assert dynamo.kinds()["waste"] == 1
    assert await ledger_on("tool").peek() == state
    assert await ledger.dead_letters() == letters


def blob_ids(dynamo: FakeDynamo) -> set[str]:
    return {name.split("#")[1] for name in dynamo.items["p"] if name.startswith("blob#")}


def dead_items(dynamo: FakeDynamo) -> list[Any]:
    return [item for name, item in dynamo.items["p"].items() if name.startswith("dead#")]


async def test_a_sweep_that_is_throttled_is_told_and_made_good_by_the_next(
    ledger_on: Factory, dynamo: FakeDynamo, clock: HandClock, logged: list[dict[str, Any]]
) -> None:
    ledger = await start(ledger_on(compact_bytes=2_000))
    dynamo.deletes_nothing = True
    await beat(ledger, 100)
    (told,) = [each["what"] for each in logged if each["event"] == "ledger.not_shortened"]
    assert "throttled" in told
    size = len(dynamo.items["p"])
    dynamo.deletes_nothing = False
    clock.ms += 60_000
    assert (await beat(ledger, 100)) == await ledger_on("tool").peek()
    assert len(dynamo.items["p"]) < size


async def test_a_server_that_slept_through_two_snapshots_reads_everything_again(
    ledger_on: Factory, dynamo: FakeDynamo
) -> None:
    sleeper = await start(ledger_on("sleeper"))
    ledger = await start(ledger_on(compact_bytes=2_000), "a")
    await beat(ledger, 100)
    assert min(item for item in dynamo.items["p"] if item.startswith("log#")) > "log#00000000000000000010"
    state = await beat(sleeper)
    assert state.shards["a"].epoch == 1
    assert state == await ledger.peek()


async def test_an_answer_that_is_lost_for_good_is_found_by_the_next_call(
    ledger_on: Factory, dynamo: FakeDynamo
) -> None:
    ledger = await start(ledger_on(), "a")
    dynamo.after, dynamo.before = [lost_answer()], [None, *[lost_answer()] * 5]
    with pytest.raises(LedgerError, match="not known whether"):
        await ledger.register(flush("a", 1))
    assert (await ledger.register(flush("a", 1))).lost_shards == {"a"}
    assert (await ledger.peek()).shards["a"].position == Sequence(1)


async def test_a_ledger_that_loses_every_race_says_so(ledger_on: Factory, dynamo: FakeDynamo) -> None:
    ledger = await start(ledger_on(), "a")
    dynamo.before = [canceled("ConditionalCheckFailed")] * 40
    with pytest.raises(LedgerError, match="faster 40 times"):
        await ledger.register(flush("a", 1))
    assert (await ledger.register(flush("a", 1))).registered


async def test_who_loses_a_race_decides_anew_on_what_the_other_has_written(
    ledger_on: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, other = await start(ledger_on(), "a"), await start(ledger_on("two"))
    append, races = ledger._journal.append, 0

    async def outrun(draft: Draft) -> bool:
        nonlocal races
        races += 1
        if races == 1:
            await other.open_shard("b")
        return await append(draft)

    monkeypatch.setattr(ledger._journal, "append", outrun)
    assert (await ledger.register(flush("a", 1))).registered
    assert races == 2
    assert (await other.peek()).shards.keys() == {"a", "b"}


async def test_letters_are_packed_once_however_many_races_their_transaction_loses(
    ledger_on: Factory, dynamo: FakeDynamo, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed: list[int] = []

    def pack(letters: tuple[DeadLetter, ...]) -> bytes:
        packed.append(len(letters))
        return pack_letters(letters)

    monkeypatch.setattr("mldserver.ledger.dynamodb_journal.pack_letters", pack)
    ledger = await start(ledger_on(), "a")
    dynamo.before = [canceled("ConditionalCheckFailed")] * 5
    assert (await ledger.register(flush("a", 1, letters=(letter(1),)))).registered
    assert (await ledger.register(flush("a", 2, letters=(letter(2),)))).registered
    assert packed == [1, 1]
    assert sorted(each.sequence for each in await ledger.dead_letters(9)) == [
        letter(1).sequence,
        letter(2).sequence,
    ]


async def test_letters_that_another_server_takes_away_while_they_are_listed_are_no_damage(
    ledger_on: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, other = await start(ledger_on(), "a"), await start(ledger_on("two"))
    for number in (1, 2):
        await ledger.register(flush("a", number, letters=(letter(number),)))
    first, second = await other.letters()
    read = ledger._journal._letters_if_there

    async def after_a_purge(version: int) -> tuple[DeadLetter, ...] | None:
        await other.purge((first.id,))
        return await read(version)

    monkeypatch.setattr(ledger._journal, "_letters_if_there", after_a_purge)
    assert await ledger.letters() == (second,)


async def test_a_call_before_the_opening_or_a_second_opening_is_a_bug(ledger_on: Factory) -> None:
    ledger = ledger_on()
    for call in (
        ledger.cut(("w",)),
        ledger.sync(ServerState("one", 0)),
        ledger.leave(),
        ledger.decide("w", "retry"),
    ):
        with pytest.raises(InternalError, match="not open"):
            await call
    await ledger.open()
    with pytest.raises(InternalError, match="open already"):
        await ledger.open()
    with pytest.raises(InternalError, match="closed"):
        await ledger.peek()


async def test_closing_waits_for_the_calls_that_were_made_before(ledger_on: Factory) -> None:
    ledger = await start(ledger_on(), "a")
    async with asyncio.TaskGroup() as group:
        calls = [group.create_task(ledger.open_shard("a")) for _ in range(5)]
        await asyncio.sleep(0)
        await ledger.close()
    assert [call.result().epoch for call in calls] == [2, 3, 4, 5, 6]


async def test_an_opening_that_is_cancelled_lets_the_client_go(
    ledger_on: Factory, dynamo: FakeDynamo
) -> None:
    ledger = ledger_on()
    opening = asyncio.create_task(ledger.open())
    dynamo.before = [lost_answer()]
    await asyncio.sleep(0)
    assert dynamo.clients == 1
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert dynamo.clients == 0
    with pytest.raises(InternalError, match="closed"):
        await ledger.peek()
