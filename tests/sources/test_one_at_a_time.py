"""With a handler that keeps state, the runtime has one batch of a shard at a time, and each says which outcome it follows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from mldserver.consumer.claims import visiting
from mldserver.records import Sequence
from mldserver.runtime.interface import BatchOutcome, Delivery
from mldserver.stores import StateSnapshot
from mldserver.testing import VirtualClock
from tests.sources.house import FakeShard, serving
from tests.sources.test_ahead import DONE, SHARD, Stream, outcome_of

pytestmark = pytest.mark.quick


async def snapshot() -> StateSnapshot:
    raise NotImplementedError


def keyed(shard: FakeShard) -> None:
    shard.eager, shard.next_number, shard.snapshot = False, 1, snapshot


@pytest.fixture
async def stream() -> AsyncIterator[Stream]:
    clock = VirtualClock()
    async with serving(clock=clock, answer_deadline=20, keyed=True) as house:
        house.intake.prepare = keyed
        yield Stream(house, clock)


def numbers(stream: Stream) -> list[int | None]:
    return [delivery.number for delivery in stream.given]


async def test_batches_are_acknowledged_ahead_but_given_to_the_runtime_one_at_a_time(stream: Stream) -> None:
    await stream.warm_up()
    for number in (2, 3, 4):
        await stream.daemon.process(number)
        await stream.daemon.answered("processRecords")
    assert len(stream.given) == 2
    for number in (2, 3, 4):
        stream.begun[number - 1].set_result(outcome_of(number))
        await stream.accepts(number)
    assert (len(stream.given), stream.shard.calls) == (4, DONE * 4)
    assert numbers(stream) == [1, 2, 3, 4]
    assert [delivery.after for delivery in stream.given] == [None, Sequence(1), Sequence(2), Sequence(3)]
    # The worker's process does not wait for others of the shard: none can follow.
    assert not any(delivery.behind for delivery in stream.given)
    assert not stream.house.listener.parts.claims.current[SHARD].lock.locked()


async def test_the_handler_opens_with_the_sessions_snapshot(stream: Stream) -> None:
    await stream.warm_up()
    assert stream.house.runtime.snapshots == [snapshot]


async def test_a_visitor_has_the_handler_alone_and_the_batches_behind_it_follow(stream: Stream) -> None:
    await stream.warm_up()
    await stream.send(2)
    house, leave = stream.house, asyncio.Event()
    inside = False

    async def visit() -> None:
        nonlocal inside
        async with visiting(house.runtime, house.listener.parts.claims, SHARD, may_open=False):  # type: ignore[arg-type]  # a fake
            inside = True
            await leave.wait()
            inside = False

    async with asyncio.TaskGroup() as group:
        group.create_task(visit())
        await asyncio.sleep(0.01)
        await stream.daemon.process(3)
        assert not inside
        stream.begun[1].set_result(outcome_of(2))
        await asyncio.sleep(0.01)
        assert (inside, len(stream.given)) == (True, 2)
        leave.set()
        await stream.accepts(3)
    assert house.runtime.calls.count(("process", SHARD)) == 1


async def test_a_batch_that_runs_again_has_the_number_of_the_outcome_that_was_not_accepted(
    stream: Stream,
) -> None:
    """The runtime has applied the discarded outcome, so its map stands one further: it answers StateMoved and loads again."""
    await stream.warm_up()
    house = stream.house
    processed: list[int | None] = []
    process = house.runtime.process

    async def again(delivery: Delivery) -> BatchOutcome:
        processed.append(delivery.number)
        return await process(delivery)

    house.runtime.process = again  # type: ignore[method-assign]  # the double of the double
    await stream.send(2)
    stream.shard.after = Sequence(
        2
    )  # what no path does today: the position moves while the runtime has a batch
    stream.begun[1].set_result(outcome_of(2))
    await stream.accepts(2)
    assert (numbers(stream), processed) == ([1, 2], [2])
