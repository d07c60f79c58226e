"""A normal batch is one synchronous call. What needs a wait in the middle goes on in the connection's task, from there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import pytest

from mldserver.consumer.claims import Superseded
from mldserver.errors import PeerError
from mldserver.records import Sequence
from mldserver.runtime.interface import BatchOutcome, BatchOutline, Delivery
from mldserver.testing import VirtualClock
from tests.coordinator.pipeline import named
from tests.sources.house import serving

if TYPE_CHECKING:
    from tests.sources.house import House

pytestmark = pytest.mark.quick

SHARD = "shardId-000000000000"


def outcome_of(last: int, **more: Any) -> BatchOutcome:
    place = Sequence(last)
    return BatchOutcome(BatchOutline(1, 0, place, place, None, 0), **more)


class AtOnce:
    """What ``begin`` returns: an outcome, or what is to be awaited; an exception is raised."""

    def __init__(self, house: House) -> None:
        self.results: list[Any] = []
        self.begun = 0
        self.closed = 0
        self.reached = asyncio.Event()
        self.go_on = asyncio.Event()
        house.runtime.begin = self.begin  # type: ignore[method-assign]  # the double of the double

    def begin(self, _delivery: Delivery) -> Any:
        self.begun += 1
        self.reached.set()
        result = self.results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    async def rest(self, last: int) -> BatchOutcome:
        try:
            await self.go_on.wait()
            return outcome_of(last)
        except (GeneratorExit, asyncio.CancelledError):
            self.closed += 1
            raise


@pytest.fixture
async def lazily() -> AsyncIterator[House]:
    """Nothing is durable by itself, so that no checkpoint is due."""
    async with serving() as house:
        house.intake.prepare = lambda shard: setattr(shard, "eager", False)
        yield house


async def test_a_normal_batch_is_taken_and_answered_without_the_connections_task(lazily: House) -> None:
    runtime = AtOnce(lazily)
    runtime.results = [outcome_of(1), outcome_of(2)]
    daemon = await lazily.connect()
    await daemon.initialize()
    for number in (1, 2):
        await daemon.process(number)
        await daemon.answered("processRecords")
    assert (lazily.intake.shards[0].calls, lazily.intake.shards[0].after) == (["accept"] * 2, Sequence(2))
    assert ("process", SHARD) not in lazily.runtime.calls


async def test_a_checkpoint_that_is_due_comes_before_the_answer(house: House) -> None:
    runtime = AtOnce(house)
    runtime.results = [outcome_of(1)]
    daemon = await house.connect()
    await daemon.initialize()
    await daemon.process(1)
    assert (await daemon.checkpointed())["sequenceNumber"] == "1"
    await daemon.answered("processRecords")
    assert (runtime.begun, house.intake.shards[0].calls) == (1, ["accept"])


async def test_a_shard_that_is_held_back_is_answered_when_it_is_let_go(lazily: House) -> None:
    prepare = lazily.intake.prepare
    lazily.intake.prepare = lambda shard: (prepare(shard), shard.gate.clear())[0]
    runtime = AtOnce(lazily)
    runtime.results = [outcome_of(1)]
    daemon = await lazily.connect()
    await daemon.initialize()
    await daemon.process(1)
    answer = asyncio.create_task(daemon.receive())
    await asyncio.sleep(0.01)
    assert (runtime.begun, answer.done()) == (1, False)
    lazily.intake.shards[0].gate.set()
    assert (await answer)["action"] == "status"
    assert lazily.intake.shards[0].calls == ["accept"]


async def test_what_the_runtime_has_left_to_do_is_done_and_the_batch_not_begun_again(lazily: House) -> None:
    runtime = AtOnce(lazily)
    runtime.results = [runtime.rest(1), outcome_of(2)]
    daemon = await lazily.connect()
    await daemon.initialize()
    await daemon.process(1)
    runtime.go_on.set()
    await daemon.answered("processRecords")
    await daemon.process(2)
    await daemon.answered("processRecords")
    assert (runtime.begun, lazily.intake.shards[0].calls) == (2, ["began", "accept", "accept"])


async def test_a_stop_waits_for_a_batch_that_was_begun(lazily: House) -> None:
    runtime = AtOnce(lazily)
    runtime.results = [runtime.rest(1)]
    daemon = await lazily.connect()
    await daemon.initialize()
    await daemon.process(1)
    await runtime.reached.wait()
    drained = asyncio.create_task(lazily.listener.drain())
    await asyncio.sleep(0.01)
    assert not drained.done()
    runtime.go_on.set()
    assert (await daemon.checkpointed())["sequenceNumber"] == "1"
    await daemon.answered("processRecords")
    await drained


async def test_a_connection_that_goes_away_lets_go_of_what_it_had_begun(lazily: House) -> None:
    runtime = AtOnce(lazily)
    runtime.results = [runtime.rest(1), outcome_of(1)]
    daemon = await lazily.connect()
    await daemon.initialize()
    await daemon.process(1)
    await runtime.reached.wait()
    await daemon.close()
    again = await lazily.connect()
    await again.initialize()
    await again.process(1)
    await again.answered("processRecords")
    assert [len(shard.calls) for shard in lazily.intake.shards] == [2, 1]


async def test_a_new_connection_gets_a_shard_whose_batch_is_begun(lazily: House) -> None:
    runtime = AtOnce(lazily)
    runtime.results = [runtime.rest(1), outcome_of(1)]
    old = await lazily.connect()
    await old.initialize()
    await old.process(1)
    await runtime.reached.wait()
    new = await lazily.connect()
    await new.initialize()
    await old.answered("processRecords")
    await new.process(1)
    await new.answered("processRecords")
    assert "accept" not in lazily.intake.shards[0].calls
    assert lazily.intake.shards[1].calls == ["accept"]


async def posted(house: House, runtime: AtOnce) -> tuple[Any, asyncio.Future[Any]]:
    """Return a daemon whose batch the runtime works on by itself, and what will hold what becomes of it."""
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    runtime.results.insert(0, future)
    daemon = await house.connect()
    await daemon.initialize()
    await daemon.process(1)
    await runtime.reached.wait()
    return daemon, future


async def test_a_batch_that_the_runtime_works_on_by_itself_is_answered_when_it_is_done(lazily: House) -> None:
    runtime = AtOnce(lazily)
    runtime.results = [outcome_of(2)]
    daemon, future = await posted(lazily, runtime)
    future.set_result(outcome_of(1))
    await daemon.answered("processRecords")
    await daemon.process(2)
    await daemon.answered("processRecords")
    assert lazily.intake.shards[0].calls == ["began", "accept", "accept"]
    assert not lazily.listener.parts.claims.current[SHARD].lock.locked()


async def test_its_checkpoint_comes_before_its_answer(house: House) -> None:
    daemon, future = await posted(house, AtOnce(house))
    future.set_result(outcome_of(1))
    assert (await daemon.checkpointed())["sequenceNumber"] == "1"
    await daemon.answered("processRecords")


async def test_what_is_left_of_it_is_awaited(lazily: House) -> None:
    runtime = AtOnce(lazily)
    daemon, future = await posted(lazily, runtime)
    future.set_result(runtime.rest(1))
    runtime.go_on.set()
    await daemon.answered("processRecords")
    assert lazily.intake.shards[0].calls == ["began", "accept"]


async def test_its_error_ends_the_connection(lazily: House, logged: list[dict[str, Any]]) -> None:
    for error in (PeerError("no batch"), RuntimeError("no good")):
        runtime = AtOnce(lazily)
        daemon, future = await posted(lazily, runtime)
        future.set_exception(error)
        assert await daemon.reader.read() == b""
        assert str(error) in named(logged, "connection.failed")[-1]["what"]


async def test_a_batch_that_takes_long_is_answered_early_and_taken_later() -> None:
    clock = VirtualClock()
    async with serving(clock=clock, answer_deadline=20) as house:
        house.intake.prepare = lambda shard: setattr(shard, "eager", False)
        runtime = AtOnce(house)
        runtime.results = [outcome_of(2)]
        daemon, future = await posted(house, runtime)
        await clock.advance(22)
        await daemon.answered("processRecords")
        assert house.intake.shards[0].calls == ["began"]
        future.set_result(outcome_of(1))
        await daemon.process(2)
        await daemon.answered("processRecords")
        assert house.intake.shards[0].calls == ["began", "accept", "accept"]


async def test_a_stop_waits_for_a_batch_that_the_runtime_works_on(lazily: House) -> None:
    daemon, future = await posted(lazily, AtOnce(lazily))
    drained = asyncio.create_task(lazily.listener.drain())
    await asyncio.sleep(0.01)
    assert not drained.done()
    future.set_result(outcome_of(1))
    assert (await daemon.checkpointed())["sequenceNumber"] == "1"
    await daemon.answered("processRecords")
    await drained


async def test_a_connection_that_goes_away_wants_its_batch_no_more(lazily: House) -> None:
    daemon, future = await posted(lazily, AtOnce(lazily))
    await daemon.close()
    await lazily.listener.drain()
    assert future.cancelled()


async def test_a_new_connection_gets_a_shard_whose_batch_the_runtime_works_on(lazily: House) -> None:
    runtime = AtOnce(lazily)
    runtime.results = [outcome_of(1)]
    old, future = await posted(lazily, runtime)
    new = await lazily.connect()
    await new.initialize()
    await old.answered("processRecords")
    assert future.cancelled()
    await new.process(1)
    await new.answered("processRecords")
    assert [shard.calls for shard in lazily.intake.shards] == [["began"], ["accept"]]


async def test_a_shard_that_is_claimed_before_the_task_goes_on_is_free_at_once(lazily: House) -> None:
    claim = lazily.listener.parts.claims.take("shard")
    claim.hold()
    assert claim.lock.locked()
    later = lazily.listener.parts.claims.take("shard")
    assert not claim.lock.locked()
    async with later.work():
        assert claim.lock.locked()
    with pytest.raises(Superseded):
        async with claim.work():
            pass


async def test_who_holds_a_lock_does_not_wait_for_it_and_visitors_do(lazily: House) -> None:
    claim = lazily.listener.parts.claims.take("shard")
    claim.hold()
    visited: list[str] = []

    async def visit() -> None:
        async with claim.visit():
            visited.append("visitor")

    visitor = asyncio.create_task(visit())
    await asyncio.sleep(0)
    async with claim.work():
        visited.append("owner")
    await visitor
    assert visited == ["owner", "visitor"]


async def test_a_lock_that_another_has_is_not_held(lazily: House) -> None:
    claim = lazily.listener.parts.claims.take("shard")
    async with claim.work():
        claim.hold()
        assert not claim.holds


@pytest.mark.parametrize("error", [PeerError("no batch"), RuntimeError("no good")])
async def test_an_error_ends_the_connection_and_no_more(
    lazily: House, error: Exception, logged: list[dict[str, Any]]
) -> None:
    runtime = AtOnce(lazily)
    runtime.results = [error]
    daemon = await lazily.connect()
    await daemon.initialize()
    await daemon.process(1)
    assert await daemon.reader.read() == b""
    assert str(error) in named(logged, "connection.failed")[0]["what"]
    assert (await (await lazily.connect()).initialize()) is None


async def test_batches_are_told_together_and_unusual_ones_by_themselves(
    lazily: House, logged: list[dict[str, Any]]
) -> None:
    runtime = AtOnce(lazily)
    runtime.results = [outcome_of(1), outcome_of(2, attempts=3), outcome_of(3)]
    daemon = await lazily.connect()
    await daemon.initialize()
    for number in (1, 2, 3):
        await daemon.process(number)
        await daemon.answered("processRecords")
    await daemon.close()
    await lazily.listener.drain()
    (line,) = named(logged, "batches.done")
    told = {name: line[name] for name in ("level", "shard", "batches", "records", "first", "last")}
    assert told == {
        "level": "info",
        "shard": SHARD,
        "batches": 3,
        "records": 3,
        "first": "1",
        "last": "3",
    }
    assert "rows" not in line
    levels = [(each["level"], each["attempts"]) for each in named(logged, "batch.done")]
    assert levels == [("debug", 1), ("info", 3), ("debug", 1)]


@pytest.mark.parametrize("behind", [b"x", b'{"action":"leaseLost"}\n'])
async def test_what_comes_behind_a_batch_that_is_not_answered_ends_the_connection(
    lazily: House, behind: bytes
) -> None:
    runtime = AtOnce(lazily)
    daemon = await lazily.connect()
    await daemon.initialize()
    await daemon.send(b'{"action":"processRecords","records":[],"millisBehindLatest":0}\n' + behind)
    assert await daemon.reader.read() == b""
    await daemon.close()
    await lazily.listener.drain()
    assert (runtime.begun, lazily.listener.connections) == (0, 0)
    assert lazily.intake.shards[0].calls == ["disconnected"]


async def test_a_visitor_whose_turn_has_come_is_not_overtaken_by_a_batch(lazily: House) -> None:
    claim = lazily.listener.parts.claims.take("shard")
    claim.hold()

    async def visit() -> None:
        async with claim.visit():
            assert claim.visits

    visitor = asyncio.create_task(visit())
    await asyncio.sleep(0)
    claim.let_go()
    assert not claim.lock.locked()
    assert claim.visits
    await visitor
    assert not claim.visits


async def test_its_deadline_goes_on_when_it_goes_over_to_the_connections_task() -> None:
    clock = VirtualClock()
    async with serving(clock=clock, answer_deadline=20) as house:
        house.intake.prepare = lambda shard: setattr(shard, "eager", False)
        runtime = AtOnce(house)
        daemon, future = await posted(house, runtime)
        await clock.advance(19)
        future.set_result(runtime.rest(1))
        await asyncio.sleep(0.01)
        await clock.advance(2)
        await daemon.answered("processRecords")
        assert house.intake.shards[0].calls == ["began"]
        runtime.go_on.set()
