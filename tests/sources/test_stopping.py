"""The server stops: requests are finished, then all connections are closed together."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.sources.house import House

pytestmark = pytest.mark.quick

SHARD = "shardId-000000000000"


async def test_draining_lets_each_request_finish_with_its_checkpoint_and_then_closes_all(
    house: House,
) -> None:
    house.intake.prepare = lambda shard: setattr(shard, "eager", False)
    idle, busy = await house.connect(), await house.connect()
    await idle.initialize("shardId-idle")
    await busy.initialize()
    house.runtime.gate.clear()
    await busy.process(8)
    await house.runtime.reached.wait()
    draining = asyncio.create_task(house.listener.drain())
    end_of_idle = asyncio.create_task(idle.sees_the_end())
    for _ in range(10):
        await asyncio.sleep(0)
    assert not end_of_idle.done(), "closing one makes the JVM exit, which would cut the others off"
    house.runtime.gate.set()
    assert (await busy.checkpointed())["sequenceNumber"] == "8"
    await busy.answered("processRecords")
    await busy.sees_the_end()
    await end_of_idle
    await draining
    await house.running
    assert house.listener.connections == 0


async def test_a_request_that_comes_while_draining_is_left_for_the_next_start(house: House) -> None:
    one, busy = await house.connect(), await house.connect()
    await one.initialize("shardId-one")
    await busy.initialize()
    house.runtime.gate.clear()
    await busy.process(8)
    await house.runtime.reached.wait()
    draining = asyncio.create_task(house.listener.drain())
    await asyncio.sleep(0)
    await one.process(1)
    house.runtime.gate.set()
    await busy.checkpointed()
    await busy.answered("processRecords")
    await draining
    assert house.runtime.calls.count(("process", "shardId-one")) == 0


async def test_a_shard_that_is_held_back_is_not_waited_for(house: House) -> None:
    house.intake.prepare = lambda shard: shard.gate.clear()
    daemon = await house.connect()
    await daemon.initialize()
    await daemon.process(8)
    while house.intake.shards[0].calls != ["began", "accept"]:  # noqa: ASYNC110  # a fake has no event for it
        await asyncio.sleep(0)
    draining = asyncio.create_task(house.listener.drain())
    assert (await daemon.checkpointed())["sequenceNumber"] == "8"
    await daemon.answered("processRecords")
    await draining


async def test_a_shard_that_is_being_opened_is_not_waited_for(house: House) -> None:
    house.runtime.doors.clear()
    daemon = await house.connect()
    await daemon.send({"action": "initialize", "shardId": SHARD, "sequenceNumber": None})
    while not house.runtime.calls:  # noqa: ASYNC110  # a fake has no event for it
        await asyncio.sleep(0)
    await house.listener.drain()
    await daemon.sees_the_end()
    assert house.intake.shards[0].calls == ["disconnected"]


async def test_giving_up_the_drain_closes_what_is_still_busy(house: House) -> None:
    house.runtime.gate.clear()
    daemon = await house.connect()
    await daemon.initialize()
    await daemon.process(1)
    await house.runtime.reached.wait()
    assert house.listener.connections == 1
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await house.listener.drain()
    await daemon.sees_the_end()
    await house.running
    assert house.runtime.cancelled == 1


async def test_cancelling_the_listener_cuts_every_connection_and_lets_go_of_its_shard(house: House) -> None:
    house.runtime.gate.clear()
    daemon = await house.connect()
    await daemon.initialize()
    await daemon.process(1)
    await house.runtime.reached.wait()
    house.running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await house.running
    await daemon.sees_the_end()
    assert house.intake.shards[0].calls == ["began", "disconnected"]
    assert ("forget", SHARD) in house.runtime.calls
