"""Two connections for one shard: the latest owns it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from mldserver.errors import GapRefused, LedgerError

if TYPE_CHECKING:
    from tests.sources.house import House

pytestmark = pytest.mark.quick

SHARD = "shardId-000000000000"


def named(logged: list[dict[str, Any]], event: str) -> list[dict[str, Any]]:
    return [entry for entry in logged if entry["event"] == event]


async def test_the_latest_connection_of_a_shard_owns_it_and_the_earlier_is_answered_unread(
    house: House, logged: list[dict[str, Any]]
) -> None:
    first, second = await house.connect(), await house.connect()
    await first.initialize()
    await second.initialize()
    await first.process(1)
    await first.answered("processRecords")
    assert house.intake.shards[0].calls == []
    assert ("process", SHARD) not in house.runtime.calls
    assert len(named(logged, "shard.taken_over")) == 1
    await second.process(1)
    await second.checkpointed()
    await second.answered("processRecords")
    assert await first.ask({"action": "leaseLost"}) == {"action": "status", "responseFor": "leaseLost"}
    await first.sees_the_end()
    await first.close()
    await second.process(2)
    await second.checkpointed()
    await second.answered("processRecords")
    assert ("forget", SHARD) not in house.runtime.calls


async def test_taking_a_shard_over_cancels_the_earlier_connections_batch_and_answers_it(house: House) -> None:
    house.runtime.gate.clear()
    first, second = await house.connect(), await house.connect()
    await first.initialize()
    await first.process(1)
    await house.runtime.reached.wait()
    await second.initialize()
    assert house.runtime.cancelled == 1
    await first.answered("processRecords")
    assert house.intake.shards[0].calls == ["began"]
    assert house.listener._budget.held == 0


async def test_a_connection_that_lost_its_shard_ends_while_the_new_one_is_still_being_opened(
    house: House,
) -> None:
    first, second = await house.connect(), await house.connect()
    await first.initialize()
    house.runtime.doors.clear()
    await second.send(
        {"action": "initialize", "shardId": SHARD, "sequenceNumber": None, "subSequenceNumber": None}
    )
    await house.opens(2)
    await first.close()
    async with asyncio.timeout(800):
        await house.holds_connections(1)
    house.runtime.doors.set()
    await second.answered("initialize")


async def test_a_connection_that_is_refused_takes_the_shard_from_nobody(house: House) -> None:
    first, second = await house.connect(), await house.connect()
    await first.initialize()
    house.intake.known_refusal = GapRefused("records would be skipped")
    await second.send(
        {"action": "initialize", "shardId": SHARD, "sequenceNumber": "9", "subSequenceNumber": 0}
    )
    await second.sees_the_end()
    await first.process(1)
    await first.checkpointed()
    await first.answered("processRecords")
    assert house.intake.abandoned == []


async def test_a_shard_that_was_taken_and_cannot_be_opened_is_nobodys(house: House) -> None:
    first, second = await house.connect(), await house.connect()
    await first.initialize()
    house.intake.refusal = LedgerError("the ledger is away")
    await second.send(
        {"action": "initialize", "shardId": SHARD, "sequenceNumber": "9", "subSequenceNumber": 0}
    )
    await second.sees_the_end()
    await first.sees_the_end()
    assert house.intake.abandoned == [SHARD]
    assert ("process", SHARD) not in house.runtime.calls


async def test_an_end_on_a_connection_that_lost_its_shard_is_not_checkpointed(
    house: House, logged: list[dict[str, Any]]
) -> None:
    first, second = await house.connect(), await house.connect()
    await first.initialize()
    await second.initialize()
    await first.send({"action": "shardEnded"})
    await first.sees_the_end()
    assert named(logged, "connection.failed")[0]["error"] == "PeerError"
    assert house.intake.shards[1].calls == []


async def test_when_the_newer_connection_ends_the_earlier_is_closed_so_that_its_daemon_delivers_again(
    house: House, logged: list[dict[str, Any]]
) -> None:
    daemon, other, latest = [await house.connect() for _ in range(3)]
    await daemon.initialize()
    await other.initialize()
    await daemon.process(1)
    await daemon.answered("processRecords")
    await latest.initialize()
    await other.close()
    async with asyncio.timeout(800):
        await house.holds_connections(2)
    await daemon.process(2)
    await daemon.answered("processRecords")
    await latest.close()
    await daemon.sees_the_end()
    (failed,) = named(logged, "connection.failed")
    assert (failed["error"], failed["shard"]) == ("PeerError", SHARD)
    assert "has ended before the shard did" in failed["what"]
    assert not house.listener.parts.claims.current
    assert not house.listener.parts.claims._superseded
    again = await house.connect()
    await again.initialize()
    await again.process(1)
    await again.checkpointed()
    await again.answered("processRecords")


async def test_a_lost_lease_on_the_newer_connection_closes_the_earlier_too(house: House) -> None:
    daemon, other = await house.connect(), await house.connect()
    await daemon.initialize()
    await other.initialize()
    await other.ask({"action": "leaseLost"})
    await other.close()
    await daemon.sees_the_end()


async def test_a_connection_that_waits_to_open_a_shard_is_closed_when_those_that_took_it_over_have_ended(
    house: House,
) -> None:
    house.runtime.doors.clear()
    daemon, other = await house.connect(), await house.connect()
    opening = {"action": "initialize", "shardId": SHARD, "sequenceNumber": None, "subSequenceNumber": None}
    await daemon.send(opening)
    await house.opens(1)
    await other.send(opening)
    await daemon.answered("initialize")
    await other.close()
    await daemon.sees_the_end()


async def test_a_shard_that_ended_on_the_newer_connection_leaves_the_earlier_to_its_daemon(
    house: House,
) -> None:
    daemon, other = await house.connect(), await house.connect()
    await daemon.initialize()
    await other.initialize()
    await other.send({"action": "shardEnded"})
    await other.checkpointed()
    await other.answered("shardEnded")
    await other.sees_the_end()
    await other.close()
    async with asyncio.timeout(800):
        await house.holds_connections(1)
    await daemon.process(1)
    await daemon.answered("processRecords")
    assert await daemon.ask({"action": "leaseLost"}) == {"action": "status", "responseFor": "leaseLost"}
    await daemon.close()
    async with asyncio.timeout(800):
        await house.holds_connections(0)
    assert not house.listener.parts.claims._superseded
