"""A slow handler never keeps a lease from moving: the daemon is answered, the work goes on, checkpoints wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import pytest

from mldserver.errors import HandlerHalted
from mldserver.records import Hook, Sequence
from mldserver.testing.stand_ins import VirtualClock
from tests.sources.house import serving

if TYPE_CHECKING:
    from mldserver.runtime.interface import Delivery
    from tests.sources.house import Daemon, House

pytestmark = pytest.mark.quick

DEADLINE = 20.0
END = {"action": "shardEnded"}
LOST = {"action": "leaseLost"}
STOPPING = {"action": "shutdownRequested"}


class Slow:
    """A house whose handler waits at a gate, and a daemon whose answers come when a clock says so."""

    def __init__(self, house: House, clock: VirtualClock, daemon: Daemon) -> None:
        self.house, self.clock, self.daemon = house, clock, daemon

    @property
    def shard(self) -> Any:
        return self.house.intake.shards[0]

    async def process(self, *numbers: int) -> None:
        """Send a batch, and take the answer that comes when its deadline is over."""
        await self.daemon.process(*numbers)
        await self.clock.drive(self.daemon.answered("processRecords"), step=1)

    async def accepted(self, batches: int) -> None:
        """Let the handler work, until so many batches are accepted."""
        self.house.runtime.gate.set()
        while self.shard.calls.count("accept") < batches:  # noqa: ASYNC110  # a fake has no event for it
            await asyncio.sleep(0)


@pytest.fixture
async def slow() -> AsyncIterator[Slow]:
    clock = VirtualClock()
    async with serving(clock=clock, answer_deadline=DEADLINE) as house:
        daemon = await house.connect()
        await daemon.initialize()
        house.runtime.gate.clear()
        yield Slow(house, clock, daemon)


def named(logged: list[dict[str, Any]], event: str) -> list[dict[str, Any]]:
    return [entry for entry in logged if entry["event"] == event]


async def test_a_slow_batch_is_answered_at_its_deadline_and_done_later(
    slow: Slow, logged: list[dict[str, Any]]
) -> None:
    began_ms = slow.clock.now_ms()
    await slow.process(1, 2)
    assert slow.clock.now_ms() - began_ms >= DEADLINE * 1000
    assert slow.shard.calls == ["began"]
    await slow.accepted(1)
    (early,) = named(logged, "batch.answered_early")
    assert (early["seconds"], early["batches"], early["bytes"] > 0) == (DEADLINE, 1, True)
    (done,) = named(logged, "batch.done")
    assert (done["records"], done["checkpoint"]) == (2, None)


async def test_its_checkpoint_goes_out_with_the_next_batch(slow: Slow) -> None:
    await slow.process(1, 2)
    await slow.accepted(1)
    await slow.daemon.process(3)
    assert (await slow.daemon.checkpointed())["sequenceNumber"] == "3"
    await slow.daemon.answered("processRecords")


async def test_batches_behind_a_slow_one_wait_their_turn_and_know_what_came_before(slow: Slow) -> None:
    await slow.process(1, 2)
    await slow.process(2, 3)
    assert [each[0] for each in slow.house.runtime.calls] == ["open", "process"]
    await slow.accepted(2)
    assert slow.shard.after == Sequence(3)


async def test_batches_behind_a_slow_one_count_from_when_their_bytes_came(slow: Slow) -> None:
    """A shard that is caught up advances to the receipt of an earlier batch: the wait for its turn is no part of it."""
    came_ms = []
    for number in (1, 2, 3):
        came_ms.append(slow.clock.steady_ms())
        await slow.process(number)
    await slow.clock.advance(100)
    await slow.accepted(3)
    assert slow.shard.received == came_ms


async def test_a_shard_is_not_silent_while_its_daemon_stores_a_checkpoint(slow: Slow) -> None:
    slow.house.runtime.gate.set()
    await slow.daemon.process(1)
    asked = await slow.daemon.receive()
    assert asked["action"] == "checkpoint"
    assert not slow.shard.silent
    await slow.daemon.send({**asked, "error": None})
    await slow.daemon.answered("processRecords")
    assert slow.shard.silent


async def test_nor_is_one_whose_checkpoint_is_stored_still_when_the_work_on_its_batch_ends(
    slow: Slow,
) -> None:
    slow.shard.durable = Sequence(1)
    await slow.daemon.process(2)
    asked = await slow.clock.drive(slow.daemon.receive(), step=1)
    assert asked["action"] == "checkpoint", "before the answer that is given early"
    await slow.accepted(1)
    assert not slow.shard.silent
    await slow.daemon.send({**asked, "error": None})
    await slow.daemon.answered("processRecords")
    assert slow.shard.silent


async def test_a_shards_end_is_not_over_while_its_daemon_stores_it(slow: Slow) -> None:
    """Its children come only then, and may not be known yet."""
    await slow.daemon.send(END)
    asked = await slow.daemon.receive()
    assert asked["action"] == "checkpoint"
    assert not slow.shard.silent
    await slow.daemon.send({**asked, "error": None})
    await slow.daemon.answered("shardEnded")
    assert slow.shard.silent


async def test_an_end_whose_connection_is_cut_meanwhile_holds_nothing_any_more(slow: Slow) -> None:
    await slow.daemon.send(END)
    await slow.daemon.receive()
    await slow.daemon.close()
    await slow.house.empty()
    assert slow.shard.silent


@pytest.mark.parametrize("message", [STOPPING, LOST, END])
async def test_a_shard_is_not_silent_while_a_hook_runs_for_its_daemon(
    slow: Slow, message: dict[str, Any]
) -> None:
    """The children's rows come after it, and the next owner's."""
    silent = []
    notify = slow.house.runtime.notify

    async def noted(shard_id: str, hook: Hook) -> Sequence | None:
        silent.append(slow.shard.silent)
        return await notify(shard_id, hook)

    slow.house.runtime.notify = noted  # type: ignore[method-assign]  # what it finds is looked at
    await slow.daemon.send(message)
    await slow.daemon.receive()
    assert silent == [False]


async def test_a_line_that_comes_in_parts_counts_from_its_first_bytes(slow: Slow) -> None:
    (link,) = slow.house.listener._serving
    came_ms, line = slow.clock.steady_ms(), b'{"action": "processRecords", "records": []}\n'
    for part in (line[:20], line[20:]):
        link.get_buffer(-1)[: len(part)] = part
        link.buffer_updated(len(part))
        assert not slow.shard.silent
        await slow.clock.advance(8)
    await slow.accepted(1)
    assert slow.shard.received == [came_ms]


async def test_a_lease_that_is_lost_meanwhile_is_let_go_of_at_once(
    slow: Slow, logged: list[dict[str, Any]]
) -> None:
    await slow.process(1)
    await slow.process(2)
    assert await slow.daemon.ask(LOST) == {"action": "status", "responseFor": "leaseLost"}
    assert slow.house.runtime.cancelled == 1
    assert [each[0] for each in slow.house.runtime.calls] == ["open", "process", "lease_lost"]
    assert slow.shard.calls == ["began", "lost"]
    assert named(logged, "batch.given_up")[0]["batches"] == 2


async def test_a_stop_that_is_asked_for_waits_for_a_deadline_and_checkpoints_what_is_durable(
    slow: Slow,
) -> None:
    await slow.process(1)
    slow.shard.durable, slow.shard.after = Sequence(1), Sequence(1)
    began_ms = slow.clock.now_ms()
    await slow.daemon.send(STOPPING)
    asked = await slow.clock.drive(slow.daemon.checkpointed(), step=1)
    assert slow.clock.now_ms() - began_ms >= DEADLINE * 1000
    assert asked["sequenceNumber"] == "1"
    await slow.daemon.answered("shutdownRequested")
    assert slow.shard.calls == ["began", "drain"]
    assert slow.house.runtime.cancelled == 1


async def test_a_stop_that_is_asked_for_takes_in_what_is_done_in_time(slow: Slow) -> None:
    await slow.process(1)
    await slow.daemon.send(STOPPING)
    slow.house.runtime.gate.set()
    assert (await slow.daemon.checkpointed())["sequenceNumber"] == "1"
    await slow.daemon.answered("shutdownRequested")
    assert slow.shard.calls == ["began", "accept", "drain"]


async def test_a_shards_end_waits_for_everything(slow: Slow) -> None:
    await slow.process(1)
    await slow.daemon.send(END)
    for _ in range(10):
        await slow.clock.advance(DEADLINE)
    assert "end" not in slow.shard.calls
    slow.house.runtime.gate.set()
    assert (await slow.daemon.checkpointed())["sequenceNumber"] is None
    await slow.daemon.answered("shardEnded")
    assert slow.shard.calls == ["began", "accept", "end"]


async def test_a_shards_end_behind_batches_that_were_given_up_is_not_checkpointed(
    slow: Slow, logged: list[dict[str, Any]]
) -> None:
    await slow.process(1)
    await slow.daemon.send(STOPPING)
    await slow.clock.drive(slow.daemon.answered("shutdownRequested"), step=1)
    await slow.daemon.send(END)
    await slow.daemon.sees_the_end()
    assert "end" not in slow.shard.calls
    assert ("shard_ended", slow.shard.opening.shard_id) not in slow.house.runtime.calls
    assert "were given up" in named(logged, "connection.failed")[0]["what"]


async def test_no_batch_is_taken_behind_one_that_failed_after_its_answer(slow: Slow) -> None:
    await slow.process(1)
    await slow.process(2)
    slow.house.runtime.failures["process"] = HandlerHalted("it failed for good.")
    slow.house.runtime.gate.set()
    await slow.daemon.sees_the_end()
    await slow.house.empty()
    assert [each[0] for each in slow.house.runtime.calls] == ["open", "process", "forget"]
    assert "accept" not in slow.shard.calls


async def test_eof_cancels_what_is_under_way(slow: Slow) -> None:
    await slow.process(1)
    await slow.daemon.close()
    await slow.house.empty()
    assert slow.house.runtime.cancelled == 1
    assert slow.shard.calls == ["began", "disconnected"]


async def test_a_halt_after_the_answer_closes_the_connection(
    slow: Slow, logged: list[dict[str, Any]]
) -> None:
    await slow.process(1)
    slow.house.runtime.failures["process"] = HandlerHalted("it failed for good.")
    slow.house.runtime.gate.set()
    await slow.daemon.sees_the_end()
    assert named(logged, "connection.failed")[0]["error"] == "HandlerHalted"


async def test_a_line_that_turns_out_to_be_no_batch_after_its_answer_closes_the_connection(
    slow: Slow, logged: list[dict[str, Any]]
) -> None:
    await slow.daemon.send(b'{"action":"processRecords","records":7}\n')
    await slow.clock.drive(slow.daemon.answered("processRecords"), step=1)
    slow.house.runtime.gate.set()
    await slow.daemon.sees_the_end()
    assert named(logged, "connection.failed")[0]["error"] == "DecodeError"


async def test_another_connection_that_takes_the_shard_cancels_what_is_under_way(slow: Slow) -> None:
    await slow.process(1)
    other = await slow.house.connect()
    await other.initialize()
    assert slow.house.runtime.cancelled == 1
    await slow.daemon.process(2)
    await slow.daemon.answered("processRecords")
    assert [each[0] for each in slow.house.runtime.calls] == ["open", "process", "open"]
    assert slow.house.listener._budget.held == 0, "what was read is given back, once"


async def test_a_stopping_server_finishes_what_is_under_way(slow: Slow) -> None:
    await slow.process(1)
    draining = asyncio.create_task(slow.house.listener.drain())
    await slow.clock.advance(1)
    assert not draining.done()
    await slow.accepted(1)
    await draining
    assert slow.shard.calls == ["began", "accept", "drain", "disconnected"]


async def test_without_room_for_more_lines_the_answer_waits() -> None:
    clock = VirtualClock()
    async with serving(clock=clock, answer_deadline=DEADLINE, read_bytes=10) as house:
        daemon = await house.connect()
        await daemon.initialize()
        house.runtime.gate.clear()
        await daemon.process(1)
        await house.runtime.reached.wait()
        for _ in range(5):
            await clock.advance(DEADLINE)
        house.runtime.gate.set()
        assert (await daemon.checkpointed())["sequenceNumber"] == "1"
        await daemon.answered("processRecords")


async def test_a_shard_whose_line_came_in_parts_is_not_silent_while_its_daemon_stores_a_checkpoint(
    slow: Slow,
) -> None:
    """The line is complete only when the server has asked for the checkpoint: its batch was accepted at once."""
    runtime = slow.house.runtime

    def begin(delivery: Delivery) -> object:
        with pytest.raises(StopIteration) as done:
            runtime.process(delivery).send(None)
        return done.value.value

    runtime.begin = begin  # type: ignore[method-assign]  # it has nothing to wait for
    runtime.gate.set()
    slow.shard.gate.set()
    (link,) = slow.house.listener._serving
    records = (
        b'[{"action":"record","data":"eA==","partitionKey":"k","sequenceNumber":"1","subSequenceNumber":0}]'
    )
    line = b'{"action":"processRecords","records":' + records + b',"millisBehindLatest":0}\n'
    for part in (line[:20], line[20:]):
        link.get_buffer(-1)[: len(part)] = part
        link.buffer_updated(len(part))
    asked = await slow.daemon.receive()
    assert asked["action"] == "checkpoint"
    assert not slow.shard.silent
    await slow.daemon.send({**asked, "error": None})
    await slow.daemon.answered("processRecords")
    assert slow.shard.silent
