"""Snapshots in DynamoDB while others write: they always come into force, leave nothing behind, and lose nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import pytest

from mldserver.errors import LedgerError
from mldserver.records import Sequence
from tests.ledger.dynamodb_fake import FakeDynamo, beat, canceled, client_error, flush, lost_answer, start

if TYPE_CHECKING:
    from mldserver.ledger.dynamodb import DynamoLedger
    from tests.ledger.dynamodb_emulator import Emulator
    from tests.support.clocks import HandClock

    Factory = Callable[..., DynamoLedger]

PART = 300
"""Bytes of a part here."""
PAUSE_MS = 60_000
"""How long a snapshot that failed is put off."""


class BusyDynamo(FakeDynamo):
    """Where something else happens before, or after, each write of a part, and where a server may die at any call."""

    def __init__(self) -> None:
        super().__init__()
        self.before_part: Callable[[str], Awaitable[None]] | None = None
        self.before_naming: Callable[[], Awaitable[None]] | None = None
        self.before_transaction: Callable[[], Awaitable[None]] | None = None
        self.parts: list[str] = []
        self.calls_left: int | None = None
        """After so many calls nothing is answered any more."""
        self.takes_effect = False
        """Whether the last of them does all the same."""

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        operations = {"get_item", "put_item", "query", "batch_write_item", "transact_write_items"}
        return self._mortal(found) if name in operations and self.calls_left is not None else found

    def _mortal(self, call: Any) -> Any:
        async def mortal(**request: Any) -> Any:
            assert self.calls_left is not None
            self.calls_left -= 1
            if self.calls_left > 0:
                return await call(**request)
            if self.calls_left == 0 and self.takes_effect:
                await call(**request)
            raise lost_answer()

        return mortal

    async def put_item(self, **request: Any) -> dict[str, Any]:
        name = request["Item"]["item"]["S"]
        if name.startswith("blob#") and name.split("#")[1].endswith("-s"):
            self.parts.append(name)
            if self.before_part is not None:
                await self.before_part(name)
        return await super().put_item(**request)

    async def transact_write_items(self, **request: Any) -> dict[str, Any]:
        if self.before_naming is not None and "#taken" in str(request):
            await self.before_naming()
        if self.before_transaction is not None:
            await self.before_transaction()
        return await super().transact_write_items(**request)


@pytest.fixture
def dynamo(monkeypatch: pytest.MonkeyPatch) -> BusyDynamo:
    monkeypatch.setattr("mldserver.ledger.dynamodb_table.INLINE_BYTES", PART)
    monkeypatch.setattr("mldserver.ledger.dynamodb.INLINE_BYTES", PART)
    return BusyDynamo()


async def filled(ledger: DynamoLedger, flushes: int = 30) -> DynamoLedger:
    """A ledger that holds so much that its snapshot has many parts."""
    await start(ledger, "a")
    for number in range(1, flushes + 1):
        assert (await ledger.register(flush("a", number))).registered
    return ledger


def in_force(dynamo: FakeDynamo) -> str | None:
    meta = dynamo.items["p"]["meta"]
    return meta["snapshot"]["S"] if "snapshot" in meta else None


def left_over(dynamo: FakeDynamo) -> set[str]:
    """Values that have parts, and that neither an item of the log nor the snapshot in force names."""
    items = dynamo.items["p"]
    named = {item["blob"]["S"] for name, item in items.items() if "blob" in item}
    return {name.split("#")[1] for name in items if name.startswith("blob#")} - named - {in_force(dynamo)}


async def test_a_snapshot_comes_into_force_although_another_server_writes_all_the_time(
    ledger_on: Factory, dynamo: BusyDynamo
) -> None:
    ledger, other = await filled(ledger_on(compact_bytes=1_000)), await start(ledger_on("two"))

    async def write(_: str) -> None:
        await beat(other)

    dynamo.before_part = write
    state = await beat(ledger)
    assert len(dynamo.parts) > 5
    assert in_force(dynamo) is not None
    dynamo.before_part = None
    assert await ledger_on("tool").peek() == state == await other.peek()


async def test_with_two_servers_that_write_all_the_time_the_table_stays_as_large_as_it_is(
    ledger_on: Factory, dynamo: BusyDynamo
) -> None:
    servers = [
        await filled(ledger_on(compact_bytes=2_000)),
        await start(ledger_on("two", compact_bytes=2_000)),
    ]

    async def write(_: str) -> None:
        await beat(servers[len(dynamo.parts) % 2])

    dynamo.before_part = write
    sizes = set()
    for _ in range(100):
        async with asyncio.TaskGroup() as group:
            for server in servers:
                group.create_task(beat(server, 3))
        sizes.add(len(dynamo.items["p"]))
    assert max(sizes) < 100, "of more than 600 that were written"
    assert len(dynamo.parts) > 50
    dynamo.before_part = None
    assert await servers[0].peek() == await servers[1].peek() == await ledger_on("tool").peek()


async def test_the_servers_own_calls_go_on_while_a_snapshot_is_written(
    ledger_on: Factory, dynamo: BusyDynamo
) -> None:
    ledger = await filled(ledger_on(compact_bytes=1_000))
    done: list[int] = []

    async def register(_: str) -> None:
        if len(done) < 3:
            done.append(31 + len(done))
            assert (await ledger.register(flush("a", done[-1]))).registered

    dynamo.before_part = register
    async with asyncio.timeout(800):
        state = await beat(ledger)
    assert state.shards["a"].position == Sequence(33)
    assert in_force(dynamo) is not None
    assert await ledger_on("tool").peek() == state


def not_shortened(logged: list[dict[str, Any]]) -> list[str]:
    """What was told of compactions that failed."""
    return [each["what"] for each in logged if each["event"] == "ledger.not_shortened"]


async def test_what_is_written_of_a_snapshot_is_not_written_again(
    ledger_on: Factory, dynamo: BusyDynamo, clock: HandClock, logged: list[dict[str, Any]]
) -> None:
    ledger = await filled(ledger_on(compact_bytes=1_000))

    async def throttle(_: str) -> None:
        if len(dynamo.parts) > 2:
            raise client_error("ThrottlingException", "PutItem")

    dynamo.before_part = throttle
    for failed in range(1, 4):
        await beat(ledger)
        assert len(not_shortened(logged)) == failed
        clock.ms += PAUSE_MS
    dynamo.before_part = None
    state = await beat(ledger)
    assert len({name.split("#")[1] for name in dynamo.parts}) == 1
    assert dynamo.parts.count(dynamo.parts[0]) == dynamo.parts.count(dynamo.parts[-1]) == 1
    assert in_force(dynamo) == dynamo.parts[0].split("#")[1]
    assert await ledger_on("tool").peek() == state
    assert left_over(dynamo) == set()


async def test_while_a_snapshot_cannot_be_written_no_call_fails_by_it_or_tries_it_again_at_once(
    ledger_on: Factory, dynamo: BusyDynamo, clock: HandClock, logged: list[dict[str, Any]]
) -> None:
    ledger = await filled(ledger_on(compact_bytes=1_000))

    async def throttle(_: str) -> None:
        raise client_error("ThrottlingException", "PutItem")

    dynamo.before_part = throttle
    for number in range(31, 34):
        state = await beat(ledger)
        assert state.shards["a"].position == Sequence(number - 1)
        assert (await ledger.register(flush("a", number))).registered
    tried = len(dynamo.parts)
    assert [told.partition(":")[0] for told in not_shortened(logged)] == ["DynamoDB is out of reach"]
    clock.ms += PAUSE_MS - 1
    await beat(ledger)
    assert len(dynamo.parts) == tried
    clock.ms += 1
    await beat(ledger)
    assert len(dynamo.parts) == 2 * tried


async def test_a_snapshot_that_loses_every_race_is_put_in_force_by_a_later_call(
    ledger_on: Factory, dynamo: BusyDynamo
) -> None:
    ledger = await filled(ledger_on(compact_bytes=1_000))
    dynamo.before = [None, *[canceled("ConditionalCheckFailed")] * 20]
    await beat(ledger)
    written = len(dynamo.parts)
    assert (in_force(dynamo), dynamo.before) == (None, [])
    state = await beat(ledger)
    assert in_force(dynamo) is not None
    assert len(dynamo.parts) == written
    assert await ledger_on("tool").peek() == state


async def test_of_two_servers_that_write_snapshots_the_slower_one_leaves_nothing(
    ledger_on: Factory, dynamo: BusyDynamo
) -> None:
    ledger = await filled(ledger_on(compact_bytes=1_000))
    other = await start(ledger_on("two", compact_bytes=1_000))

    async def overtake(_: str) -> None:
        dynamo.before_part = None
        await beat(other)

    dynamo.before_part = overtake
    before = len(dynamo.parts)
    state = await beat(ledger)
    blobs = {name.split("#")[1] for name in dynamo.parts[before:]}
    assert len(blobs) == 2, "both wrote"
    assert in_force(dynamo) == dynamo.parts[-1].split("#")[1]
    assert left_over(dynamo) == set()
    assert "waste" not in dynamo.kinds()
    assert await ledger_on("tool").peek() == state == await other.peek()


async def test_of_two_snapshots_that_come_into_force_one_after_the_other_the_log_of_each_is_known(
    ledger_on: Factory, dynamo: BusyDynamo
) -> None:
    ledger = await filled(ledger_on(compact_bytes=1_000))
    other = await start(ledger_on("two", compact_bytes=1_000))
    begun, first_is_in_force = asyncio.Event(), asyncio.Event()
    later: list[asyncio.Task[Any]] = []

    async def begin_another() -> None:
        # No sweep that lists the waste before it will take what begins now.
        if not later:
            dynamo.before_part = wait_for_the_first
            later.append(asyncio.get_running_loop().create_task(beat(other)))
            await begun.wait()

    async def wait_for_the_first(_: str) -> None:
        begun.set()
        await first_is_in_force.wait()

    dynamo.before_naming = begin_another
    async with asyncio.timeout(800):
        await beat(ledger, 2)
        first = in_force(dynamo)
        first_is_in_force.set()
        await later[0]
    assert None is not first != in_force(dynamo)
    await beat(ledger)
    tool = ledger_on("tool")
    assert await tool.peek() == await ledger.peek() == await other.peek()
    for each in (tool, ledger, other):
        journal = each._journal
        assert journal is not None
        assert journal.snapshot.value.blob == in_force(dynamo)
        assert len(journal.tail) == journal.book.version - journal.snapshot.version
        assert journal.tail_bytes == sum(journal.tail)


async def test_a_snapshot_that_a_sweep_has_taken_is_not_named(ledger_on: Factory, dynamo: BusyDynamo) -> None:
    ledger = await filled(ledger_on(compact_bytes=1_000))
    dynamo.before = [None, *[canceled("ConditionalCheckFailed")] * 20]
    await beat(ledger)
    (waste,) = [name for name in dynamo.items["p"] if name.startswith("waste#")]
    dynamo.items["p"][waste]["taken"] = {"N": "1"}
    state = await beat(ledger)
    assert in_force(dynamo) is None
    assert await ledger_on("tool").peek() == state
    state = await beat(ledger)
    assert in_force(dynamo) is not None
    assert left_over(dynamo) == set()


async def test_a_snapshot_is_kept_when_the_answer_to_its_naming_is_lost_for_good(
    ledger_on: Factory, dynamo: BusyDynamo, clock: HandClock, logged: list[dict[str, Any]]
) -> None:
    ledger = await filled(ledger_on(compact_bytes=1_000))
    dynamo.after, dynamo.before = [None, lost_answer()], [None, None, *[lost_answer()] * 5]
    await beat(ledger)
    assert in_force(dynamo) is not None
    assert len(not_shortened(logged)) == 1
    clock.ms += PAUSE_MS
    state = await beat(ledger)
    assert await ledger_on("tool").peek() == state
    assert left_over(dynamo) == set()


async def test_closing_ends_a_snapshot_that_is_being_written(ledger_on: Factory, dynamo: BusyDynamo) -> None:
    ledger = await filled(ledger_on(compact_bytes=1_000))
    closing: list[asyncio.Task[None]] = []

    async def close(_: str) -> None:
        if not closing:
            closing.append(asyncio.get_running_loop().create_task(ledger.close()))
        await asyncio.sleep(0)

    dynamo.before_part = close
    await beat(ledger)
    await closing[0]
    assert (len(dynamo.parts), in_force(dynamo), dynamo.clients) == (1, None, 0)


async def test_a_ledger_that_is_closed_amid_a_call_begins_no_snapshot_behind_it(
    ledger_on: Factory, dynamo: BusyDynamo, logged: list[dict[str, Any]]
) -> None:
    ledger = await filled(ledger_on(compact_bytes=1_000))
    closing: list[asyncio.Task[None]] = []

    async def close() -> None:
        if not closing:
            closing.append(asyncio.get_running_loop().create_task(ledger.close()))
        await asyncio.sleep(0)

    dynamo.before_transaction = close
    state = await beat(ledger)
    await closing[0]
    dynamo.before_transaction = None
    assert (dynamo.clients, dynamo.parts, not_shortened(logged)) == (0, [], [])
    assert "waste" not in dynamo.kinds()
    assert await ledger_on("tool").peek() == state


@pytest.mark.parametrize("takes_effect", [False, True])
async def test_a_server_that_dies_anywhere_in_a_compaction_costs_nothing(
    ledger_on: Factory, dynamo: BusyDynamo, takes_effect: bool, logged: list[dict[str, Any]]
) -> None:
    writer = await filled(ledger_on("writer", compact_bytes=1 << 40), 5)
    calls, survived = 0, False
    while not survived:
        calls += 1
        dying = await start(ledger_on("dying", compact_bytes=1_000))
        await lengthen(writer, dying)
        dynamo.calls_left, dynamo.takes_effect = calls, takes_effect
        logged.clear()
        with contextlib.suppress(LedgerError):
            await beat(dying)
            survived = not not_shortened(logged)
        dynamo.calls_left = None
        await dying.close()
        assert await ledger_on("tool").peek() == await writer.peek()
        assert (await writer.register(flush("a", 5 + calls, files=0))).registered
        # Another server's compaction cleans up after it, but for the snapshot before its own.
        cleaner = await start(ledger_on("cleaner", compact_bytes=1_000))
        await lengthen(writer, cleaner)
        await beat(cleaner)
        await cleaner.close()
        assert len(left_over(dynamo)) <= 1
        assert dynamo.kinds().get("waste", 0) == len(left_over(dynamo))
    assert calls > 20
    assert (await ledger_on("tool").peek()).shards["a"].position == Sequence(5 + calls)


async def lengthen(writer: DynamoLedger, other: DynamoLedger) -> None:
    """Write until the log is too long for another server."""
    assert other._compaction is not None
    while not other._compaction._is_long():
        await beat(writer)
        await other.peek()


async def test_on_the_wire_two_servers_take_snapshots_and_sweep_what_is_left(
    dynamodb: Factory, emulator: Emulator, long: bool
) -> None:
    servers = [await start(dynamodb(f"server-{n}", compact_bytes=1_500), f"shard-{n}") for n in range(2)]
    for _ in range(15 if long else 8):
        async with asyncio.TaskGroup() as group:
            for server in servers:
                group.create_task(beat(server, 3))
    named = [told for operation, told in emulator.calls if operation == "TransactWriteItems"]
    claims = [each for told in named for each in told["TransactItems"] if "ConditionExpression" in str(each)]
    assert any("Delete" in each for each in claims)
    assert any(
        "attribute_exists" in str(told) for operation, told in emulator.calls if operation == "PutItem"
    )
    tool = dynamodb("tool")
    assert await tool.peek() == await servers[0].peek() == await servers[1].peek()
    for each in (tool, *servers):
        await each.close()
