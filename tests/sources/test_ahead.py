"""Behind a batch that a worker has soon done, the next ones are answered ahead: in order, bounded, and taken as any other."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import pytest

from mldserver.consumer import core
from mldserver.errors import PeerError
from mldserver.records import Sequence
from mldserver.runtime.interface import BatchOutcome, BatchOutline, Delivery
from mldserver.sources.link import Link
from mldserver.testing import VirtualClock
from tests.coordinator.pipeline import named
from tests.sources.house import House, serving

if TYPE_CHECKING:
    from tests.sources.house import Daemon, FakeShard

pytestmark = pytest.mark.quick

SHARD = "shardId-000000000000"
DONE = ["began", "accept"]


def outcome_of(first: int, last: int | None = None) -> BatchOutcome:
    places = Sequence(first), Sequence(first if last is None else last)
    return BatchOutcome(BatchOutline(1, 0, *places, None, 0))


def line_of(*numbers: int) -> bytes:
    records = [
        {
            "action": "record",
            "data": "eA==",
            "partitionKey": "k",
            "sequenceNumber": str(number),
            "approximateArrivalTimestamp": 1_700_000_000_000,
            "subSequenceNumber": 0,
        }
        for number in numbers
    ]
    return json.dumps({"action": "processRecords", "records": records}).encode() + b"\n"


class Stream:
    """A daemon whose first batch was soon done, and what the runtime was given by it."""

    def __init__(self, house: House, clock: VirtualClock) -> None:
        self.house = house
        self.clock = clock
        self.daemon: Daemon
        self.given: list[Delivery] = []
        self.begun: list[asyncio.Future[Any]] = []
        house.runtime.begin = self.begin  # type: ignore[method-assign]  # the double of the double

    def begin(self, delivery: Delivery) -> asyncio.Future[Any]:
        self.given.append(delivery)
        self.begun.append(asyncio.get_running_loop().create_future())
        return self.begun[-1]

    @property
    def shard(self) -> FakeShard:
        return self.house.intake.shards[0]

    async def warm_up(self, *, milliseconds: int = 0) -> None:
        self.daemon = await self.house.connect()
        await self.daemon.initialize()
        await self.send(1)
        await self.clock.advance(milliseconds / 1000)
        self.begun[0].set_result(outcome_of(1))
        await self.daemon.answered("processRecords")
        assert self.shard.calls == DONE

    async def send(self, number: int) -> None:
        """Send a batch, and wait until the runtime has it."""
        await self.daemon.process(number)
        while len(self.given) < number:  # noqa: ASYNC110  # the double has no event for it
            await asyncio.sleep(0)

    def receive(self, data: bytes) -> None:
        """Let the connection have bytes at this very moment."""
        (link,) = self.house.listener._serving
        link.get_buffer(-1)[: len(data)] = data
        link.buffer_updated(len(data))

    async def ahead(self, *numbers: int) -> None:
        """Send batches, each of which is answered before it is done."""
        for number in numbers:
            await self.send(number)
            await self.daemon.answered("processRecords")
            assert not self.begun[number - 1].done()

    async def silence(self) -> None:
        """Check that the daemon is not answered."""
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(self.daemon.receive(), 0.02)

    def accepted(self) -> int:
        return self.shard.calls.count("accept")

    async def accepts(self, count: int) -> None:
        while self.accepted() < count:  # noqa: ASYNC110  # see above
            await asyncio.sleep(0)


@pytest.fixture
async def stream() -> AsyncIterator[Stream]:
    """Nothing is durable by itself, so that no checkpoint is due."""
    clock = VirtualClock()
    async with serving(clock=clock, answer_deadline=20) as house:
        house.intake.prepare = lambda shard: setattr(shard, "eager", False)
        yield Stream(house, clock)


async def test_batches_are_answered_ahead_and_taken_in_order(stream: Stream) -> None:
    await stream.warm_up()
    await stream.ahead(2, 3, 4)
    for number in (3, 4):
        stream.begun[number - 1].set_result(outcome_of(number))
    await asyncio.sleep(0.01)
    assert stream.accepted() == 1
    stream.begun[1].set_result(outcome_of(2))
    await stream.accepts(4)
    # The shard is not silent while any of them is worked on.
    assert stream.shard.calls == DONE * 4
    assert stream.house.listener._budget.held == 0
    assert not stream.house.listener.parts.claims.current[SHARD].lock.locked()


async def test_the_runtime_is_told_for_which_the_daemon_does_not_wait(stream: Stream) -> None:
    await stream.warm_up()
    await stream.ahead(2, 3)
    assert [delivery.behind for delivery in stream.given] == [False, True, True]


async def test_behind_a_batch_that_took_long_the_next_is_answered_when_it_is_done(stream: Stream) -> None:
    await stream.warm_up(milliseconds=60)
    await stream.send(2)
    await stream.silence()


async def test_where_no_batch_may_be_answered_early_none_is_ahead() -> None:
    clock = VirtualClock()
    async with serving(clock=clock) as house:
        house.intake.prepare = lambda shard: setattr(shard, "eager", False)
        stream = Stream(house, clock)
        await stream.warm_up()
        await stream.send(2)
        await stream.silence()


@pytest.mark.parametrize(("bound", "most"), [("MOST_AHEAD", 3), ("MOST_AHEAD_BYTES", 650)])
async def test_what_is_ahead_is_bounded_and_goes_on_with_each_that_is_done(
    stream: Stream, monkeypatch: pytest.MonkeyPatch, bound: str, most: int
) -> None:
    monkeypatch.setattr(core, bound, most)
    await stream.warm_up()
    await stream.ahead(2, 3, 4)
    await stream.send(5)
    await stream.silence()
    stream.begun[1].set_result(outcome_of(2))
    await stream.daemon.answered("processRecords")
    await stream.send(6)
    await stream.silence()
    for number in (3, 4, 5, 6):
        stream.begun[number - 1].set_result(outcome_of(number))
    await stream.daemon.answered("processRecords")
    await stream.accepts(6)


async def test_without_room_in_memory_none_is_ahead() -> None:
    clock = VirtualClock()
    async with serving(clock=clock, answer_deadline=20, read_bytes=10) as house:
        house.intake.prepare = lambda shard: setattr(shard, "eager", False)
        stream = Stream(house, clock)
        await stream.warm_up()
        await stream.ahead(2)
        await stream.send(3)
        await stream.silence()


async def test_a_checkpoint_that_is_due_is_stored_before_the_next_answer(stream: Stream) -> None:
    await stream.warm_up()
    await stream.ahead(2)
    stream.shard.durable = Sequence(1)
    await stream.send(3)
    await stream.silence()
    for number in (2, 3):
        stream.begun[number - 1].set_result(outcome_of(number))
    assert (await stream.daemon.checkpointed())["sequenceNumber"] == "1"
    await stream.daemon.answered("processRecords")
    assert stream.shard.calls == DONE * 3


async def test_while_the_shard_is_held_back_none_is_ahead(stream: Stream) -> None:
    await stream.warm_up()
    await stream.ahead(2, 3)
    stream.shard.gate.clear()
    stream.begun[1].set_result(outcome_of(2))
    stream.begun[2].set_result(outcome_of(3))
    await stream.accepts(2)
    await stream.daemon.process(4)
    await stream.silence()
    assert (len(stream.given), stream.accepted()) == (3, 2)
    stream.shard.gate.set()
    await stream.daemon.answered("processRecords")
    assert stream.shard.calls == DONE * 4


async def test_what_is_left_of_one_is_awaited_before_the_next_is_taken(stream: Stream) -> None:
    await stream.warm_up()
    await stream.ahead(2, 3)
    go_on = asyncio.Event()

    async def rest() -> BatchOutcome:
        await go_on.wait()
        return outcome_of(2)

    stream.begun[2].set_result(outcome_of(3))
    stream.begun[1].set_result(rest())
    await stream.daemon.process(4)
    await asyncio.sleep(0.01)
    assert stream.accepted() == 1
    go_on.set()
    await stream.daemon.answered("processRecords")
    assert stream.shard.calls == DONE * 4


async def test_records_that_come_again_meanwhile_are_told_from_fresh_ones(stream: Stream) -> None:
    await stream.warm_up()
    await stream.ahead(2, 3)
    stream.begun[1].set_result(outcome_of(2, 3))
    stream.begun[2].set_result(outcome_of(3))
    await stream.accepts(3)
    # Worked on once more, by what was accepted by then.
    assert stream.house.runtime.calls.count(("process", SHARD)) == 1
    assert stream.shard.after == Sequence(3)


async def test_a_long_one_that_has_records_of_those_before_it_is_worked_on_once(stream: Stream) -> None:
    await stream.warm_up()
    await stream.ahead(2)
    runtime = stream.house.runtime
    # Its bytes are gone once they are passed on: it cannot be worked on again.
    runtime.empties, runtime.begin = True, runtime.process  # type: ignore[method-assign]  # the double of the double
    # What comes in parts is a bytearray, as long lines are.
    line = line_of(2, 3)
    stream.receive(line[:50])
    stream.receive(line[50:])
    stream.begun[1].set_result(outcome_of(2))
    await stream.daemon.answered("processRecords")
    assert stream.shard.calls == DONE * 3
    assert runtime.calls.count(("process", SHARD)) == 1


@pytest.mark.parametrize("error", [PeerError("no batch"), RuntimeError("no good")])
async def test_behind_one_that_fails_nothing_is_taken(
    stream: Stream, logged: list[dict[str, Any]], error: Exception
) -> None:
    await stream.warm_up()
    await stream.ahead(2, 3)
    stream.begun[2].set_result(outcome_of(3))
    stream.begun[1].set_exception(error)
    await stream.daemon.sees_the_end()
    assert str(error) in named(logged, "connection.failed")[-1]["what"]
    await stream.house.empty()
    assert (stream.accepted(), stream.house.listener._budget.held) == (1, 0)


async def test_behind_one_that_cannot_be_taken_nothing_is(
    stream: Stream, logged: list[dict[str, Any]]
) -> None:
    await stream.warm_up()
    await stream.ahead(2, 3)
    take, tried = stream.shard.accept_batch, []

    def fails_once(outcome: BatchOutcome, now_ms: int, received_ms: int | None = None) -> bool:
        tried.append(outcome.outline.last)
        if len(tried) == 1:
            raise MemoryError("no room")
        return take(outcome, now_ms, received_ms)

    stream.shard.accept_batch = fails_once  # type: ignore[method-assign]  # the double of the double
    for number in (2, 3):
        stream.begun[number - 1].set_result(outcome_of(number))
    await stream.daemon.sees_the_end()
    await stream.house.empty()
    assert "no room" in named(logged, "connection.failed")[-1]["what"]
    assert (tried, stream.accepted()) == ([Sequence(2)], 1)


async def test_one_that_fails_ends_the_connection_whose_daemon_waits(stream: Stream) -> None:
    await stream.warm_up()
    await stream.ahead(2)
    stream.shard.durable = Sequence(1)
    await stream.send(3)
    stream.begun[1].set_exception(PeerError("no batch"))
    await stream.daemon.sees_the_end()
    await stream.house.empty()
    assert stream.begun[2].cancelled()


async def test_a_connection_that_goes_away_wants_none_of_them(stream: Stream) -> None:
    await stream.warm_up()
    await stream.ahead(2, 3)
    await stream.daemon.close()
    await stream.house.empty()
    assert [future.cancelled() for future in stream.begun] == [False, True, True]


async def test_a_new_connection_gets_the_shard_and_is_given_them_again(stream: Stream) -> None:
    await stream.warm_up()
    await stream.ahead(2, 3)
    new = await stream.house.connect()
    await new.initialize()
    assert [future.cancelled() for future in stream.begun] == [False, True, True]
    await stream.daemon.process(4)
    await stream.daemon.answered("processRecords")
    assert (len(stream.given), stream.accepted()) == (3, 1)


async def test_what_comes_with_the_new_connection_leaves_the_call_of_the_old_to_its_cancellation(
    stream: Stream, logged: list[dict[str, Any]]
) -> None:
    await stream.warm_up()
    await stream.ahead(2)
    inside, cancelled = asyncio.Event(), asyncio.Event()

    async def rest() -> BatchOutcome:
        inside.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return outcome_of(2)

    stream.begun[1].set_result(rest())
    await inside.wait()
    stream.house.listener.parts.claims.take(SHARD)
    stream.receive(line_of(3))
    await stream.daemon.answered("processRecords")
    await cancelled.wait()
    await stream.daemon.process(4)
    await stream.daemon.answered("processRecords")
    assert named(logged, "connection.failed") == []
    assert (stream.accepted(), stream.house.listener._budget.held) == (1, 0)


@pytest.mark.parametrize(
    ("request_", "calls"), [("shutdownRequested", ["drain"]), ("shardEnded", ["end"])], ids=["lease", "end"]
)
async def test_what_the_daemon_asks_for_next_waits_for_all_that_is_ahead(
    stream: Stream, request_: str, calls: list[str]
) -> None:
    await stream.warm_up()
    await stream.ahead(2, 3)
    await stream.daemon.send({"action": request_})
    await stream.silence()
    assert stream.shard.calls == [*DONE, "began"]
    for number in (2, 3):
        stream.begun[number - 1].set_result(outcome_of(number))
    await stream.daemon.checkpointed()
    await stream.daemon.answered(request_)
    assert stream.shard.calls[: 6 + len(calls)] == DONE * 3 + calls


async def test_a_lease_that_is_lost_gives_up_what_is_ahead(
    stream: Stream, logged: list[dict[str, Any]]
) -> None:
    await stream.warm_up()
    await stream.ahead(2, 3)
    assert (await stream.daemon.ask({"action": "leaseLost"}))["responseFor"] == "leaseLost"
    assert [line["batches"] for line in named(logged, "batch.given_up")] == [2]
    assert (stream.begun[2].cancelled(), stream.accepted()) == (True, 1)


async def test_a_stop_takes_what_is_ahead(stream: Stream) -> None:
    await stream.warm_up()
    await stream.ahead(2, 3)
    drained = asyncio.create_task(stream.house.listener.drain())
    await asyncio.sleep(0.01)
    assert not drained.done()
    for number in (2, 3):
        stream.begun[number - 1].set_result(outcome_of(number))
    await drained
    assert stream.accepted() == 3
    # What all of them brought is made durable at once: a stop has a deadline.
    assert stream.shard.calls == [*DONE * 3, "drain", "disconnected"]


async def test_one_that_takes_long_is_answered_after_its_deadline(
    stream: Stream, logged: list[dict[str, Any]]
) -> None:
    await stream.warm_up()
    await stream.ahead(2)
    stream.shard.durable = Sequence(1)
    await stream.send(3)
    await stream.clock.advance(22)
    assert (await stream.daemon.checkpointed())["sequenceNumber"] == "1"
    await stream.daemon.answered("processRecords")
    assert [line["batches"] for line in named(logged, "batch.answered_early")] == [2]
    for number in (2, 3):
        stream.begun[number - 1].set_result(outcome_of(number))
    await stream.accepts(3)


async def test_a_bug_at_the_deadline_of_one_shard_ends_only_its_connection(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    await stream.warm_up()
    await stream.ahead(2)
    stream.shard.durable = Sequence(1)
    await stream.send(3)

    def checkpoint(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(Link, "checkpoint", checkpoint)
    await stream.clock.advance(22)
    assert not stream.house.running.done()
    await stream.daemon.sees_the_end()


async def test_a_bug_behind_a_stored_checkpoint_ends_its_connection(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    await stream.warm_up()
    stream.shard.durable = Sequence(1)
    await stream.send(2)

    def checkpointed(_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(core.Consumption, "checkpointed", checkpointed)
    stream.begun[1].set_result(outcome_of(2))
    await stream.daemon.checkpointed()
    await stream.daemon.sees_the_end()


async def test_a_bug_of_a_superseded_connection_does_not_reach_the_one_that_claims_its_shard(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    await stream.warm_up()
    await stream.ahead(2)

    def superseded(_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(core.Consumption, "superseded", superseded)
    other = await stream.house.connect()
    await other.initialize()
    await stream.daemon.sees_the_end()


async def test_a_visitor_comes_between_two_batches(stream: Stream) -> None:
    await stream.warm_up()
    await stream.ahead(2, 3)
    claim = stream.house.listener.parts.claims.current.get(SHARD)
    assert claim is not None
    seen: list[int] = []

    async def visit() -> None:
        async with claim.visit():
            seen.append(stream.accepted())

    visitor = asyncio.create_task(visit())
    await asyncio.sleep(0)
    await stream.daemon.process(4)
    await asyncio.sleep(0.01)
    assert (len(stream.given), seen) == (3, [])
    for number in (2, 3):
        stream.begun[number - 1].set_result(outcome_of(number))
    await stream.daemon.answered("processRecords")
    await visitor
    assert seen == [2]
    assert stream.shard.calls == DONE * 4


@pytest.mark.parametrize("seed", range(12))
async def test_whatever_becomes_of_them_each_is_taken_once_and_in_order(stream: Stream, seed: int) -> None:
    dice = random.Random(seed)
    await stream.warm_up()
    last, taken, shard = 40, [1], stream.shard
    take = shard.accept_batch

    def noted(outcome: BatchOutcome, now_ms: int, received_ms: int | None = None) -> bool:
        assert outcome.outline.last is not None
        taken.append(outcome.outline.last.number)
        if dice.random() < 0.1:
            shard.durable = shard.after  # a checkpoint is due
        return take(outcome, now_ms, received_ms)

    shard.accept_batch = noted  # type: ignore[method-assign]  # the double of the double
    numbers = iter(range(2, last + 1))
    of_future: dict[int, int] = {0: 1}

    async def play() -> None:
        for number in numbers:
            of_future[len(stream.begun)] = number
            await stream.daemon.process(number)
            while (said := await stream.daemon.receive())["action"] == "checkpoint":
                await stream.daemon.send({**said, "error": None})

    async def rest(number: int) -> BatchOutcome:
        await asyncio.sleep(dice.random() / 500)
        return outcome_of(number)

    playing = asyncio.create_task(play())
    while len(taken) < last:
        await asyncio.sleep(dice.random() / 500)
        if dice.random() < 0.1:
            (shard.gate.clear if shard.gate.is_set() else shard.gate.set)()
        for place, future in enumerate(stream.begun):
            if not future.done() and dice.random() < 0.5:
                number = of_future[place]
                future.set_result(rest(number) if dice.random() < 0.2 else outcome_of(number))
    shard.gate.set()
    await playing
    assert taken == list(range(1, last + 1))
