"""Each request of a daemon over a real socket, through fakes of handler and coordinator."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from mldserver.consumer.claims import Superseded
from mldserver.errors import DecodeError, GapRefused, HandlerHalted
from mldserver.records import Sequence, Shard
from mldserver.testing.stand_ins import VirtualClock
from tests.sources.house import serving

if TYPE_CHECKING:
    from mldserver.runtime.interface import BatchOutcome, Delivery
    from tests.sources.house import House

pytestmark = pytest.mark.quick

SHARD = "shardId-000000000000"


def named(logged: list[dict[str, Any]], event: str) -> list[dict[str, Any]]:
    return [entry for entry in logged if entry["event"] == event]


async def test_initialize_opens_the_shard_and_then_the_handler(house: House) -> None:
    daemon = await house.connect()
    await daemon.initialize(start="49")
    assert house.intake.shards[0].opening.start == Sequence(49, 0)
    assert house.intake.shards[0].opening.tells_lag
    assert house.runtime.calls == [("open", SHARD, "49")]


@pytest.mark.parametrize(("told", "sub"), [(3, 3), (None, 0)])
async def test_a_start_inside_an_aggregate_is_told_to_coordinator_and_handler(
    house: House, told: int | None, sub: int
) -> None:
    daemon = await house.connect()
    await daemon.ask(
        {"action": "initialize", "shardId": SHARD, "sequenceNumber": "49", "subSequenceNumber": told}
    )
    assert house.intake.shards[0].opening.start == Sequence(49, sub)
    assert house.runtime.opened == [Shard(SHARD, "49", sub)]


@pytest.mark.parametrize("start", ["TRIM_HORIZON", "LATEST", None])
async def test_a_start_that_is_no_sequence_is_passed_on_as_it_is(house: House, start: str | None) -> None:
    daemon = await house.connect()
    await daemon.initialize(start=start)
    assert house.intake.shards[0].opening.start == start


async def test_v1_is_known_by_its_initialize_and_keeps_its_checkpoint_form(house: House) -> None:
    daemon = await house.connect()
    assert await daemon.ask({"action": "initialize", "shardId": SHARD}) == {
        "action": "status",
        "responseFor": "initialize",
    }
    opening = house.intake.shards[0].opening
    assert (opening.start, opening.tells_lag) == (None, False)
    await daemon.send(
        {"action": "processRecords", "records": [{"data": None, "partitionKey": "k", "sequenceNumber": "7"}]}
    )
    assert await daemon.checkpointed() == {"action": "checkpoint", "checkpoint": "7"}
    await daemon.answered("processRecords")


async def test_receipts_that_stand_in_for_v1s_arrival_times_go_on_when_the_clock_is_set_back() -> None:
    clock, received_ms = VirtualClock(), list[int]()
    async with serving(clock=clock) as house:
        process = house.runtime.process

        async def noted(delivery: Delivery) -> BatchOutcome:
            received_ms.append(delivery.received_ms)
            return await process(delivery)

        house.runtime.process = noted  # type: ignore[method-assign]  # what it is given is looked at
        daemon = await house.connect()
        await daemon.ask({"action": "initialize", "shardId": SHARD})
        began_ms = clock.now_ms()
        for _ in range(2):
            await daemon.ask({"action": "processRecords", "records": []})
            clock.step(-3600)
            await clock.advance(5)
    assert received_ms == [began_ms, began_ms + 5000]


async def test_a_batch_is_processed_accepted_checkpointed_and_answered_with_one_log_line(
    house: House, logged: list[dict[str, Any]]
) -> None:
    daemon = await house.connect()
    await daemon.initialize()
    await daemon.process(1, 2, behind=300)
    assert await daemon.checkpointed() == {
        "action": "checkpoint",
        "sequenceNumber": "2",
        "subSequenceNumber": 0,
    }
    await daemon.answered("processRecords")
    shard = house.intake.shards[0]
    assert shard.calls == ["began", "accept"]
    assert shard.stored == [Sequence(2)]
    (line,) = named(logged, "batch.done")
    assert line["shard"] == SHARD
    assert (line["records"], line["first"], line["last"], line["checkpoint"]) == (2, "1", "2", "2")
    assert line["millis_behind_latest"] == 300


async def test_without_a_durable_position_nothing_is_checkpointed(house: House) -> None:
    house.intake.prepare = lambda shard: setattr(shard, "eager", False)
    daemon = await house.connect()
    await daemon.initialize()
    await daemon.process(1)
    await daemon.answered("processRecords")


async def test_a_held_batch_is_answered_when_the_coordinator_lets_go(house: House) -> None:
    house.intake.prepare = lambda shard: shard.gate.clear()
    daemon = await house.connect()
    await daemon.initialize()
    await daemon.process()
    await house.runtime.reached.wait()
    answer = asyncio.create_task(daemon.receive())
    await asyncio.sleep(0)
    assert not answer.done()
    house.intake.shards[0].gate.set()
    assert (await answer)["action"] == "status"


async def test_a_refused_checkpoint_is_logged_and_tried_again_at_the_next_batch(
    house: House, logged: list[dict[str, Any]]
) -> None:
    daemon = await house.connect()
    await daemon.initialize()
    await daemon.process(1)
    await daemon.checkpointed(error="IllegalArgumentException")
    await daemon.answered("processRecords")
    (failed,) = named(logged, "checkpoint.failed")
    assert failed["error"] == "IllegalArgumentException"
    await daemon.process()
    await daemon.checkpointed()
    await daemon.answered("processRecords")
    assert house.intake.shards[0].stored == [Sequence(1)]


async def test_a_throttled_checkpoint_is_repeated_within_bounds(
    house: House, logged: list[dict[str, Any]]
) -> None:
    daemon = await house.connect()
    await daemon.initialize()
    await daemon.process(1)
    for _ in range(3):
        await daemon.checkpointed(error="ThrottlingException")
    await daemon.answered("processRecords")
    assert len(named(logged, "checkpoint.retried")) == 2
    assert len(named(logged, "checkpoint.failed")) == 1


async def test_after_shutdown_exception_nothing_is_checkpointed_any_more(
    house: House, logged: list[dict[str, Any]]
) -> None:
    daemon = await house.connect()
    await daemon.initialize()
    await daemon.process(1)
    await daemon.checkpointed(error="ShutdownException")
    await daemon.answered("processRecords")
    await daemon.process(2)
    await daemon.answered("processRecords")
    assert house.intake.shards[0].stored == []
    assert named(logged, "checkpoint.stopped")
    assert await daemon.ask({"action": "leaseLost"}) == {"action": "status", "responseFor": "leaseLost"}
    await daemon.sees_the_end()


@pytest.mark.parametrize(
    ("request_", "action"),
    [
        ({"action": "shutdownRequested"}, "shutdownRequested"),
        ({"action": "shutdown", "reason": "REQUESTED"}, "shutdown"),
    ],
)
async def test_shutdown_requested_drains_checkpoints_and_leaves_the_connection_open(
    house: House, logged: list[dict[str, Any]], request_: dict[str, Any], action: str
) -> None:
    house.intake.prepare = lambda shard: setattr(shard, "eager", False)
    daemon = await house.connect()
    await daemon.initialize()
    await daemon.process(5)
    await daemon.answered("processRecords")
    await daemon.send(request_)
    assert (await daemon.checkpointed())["sequenceNumber"] == "5"
    await daemon.answered(action)
    assert ("shutdown_requested", SHARD) in house.runtime.calls
    assert named(logged, "shard.shutdown_requested")[0]["position"] == "5"
    assert await daemon.ask({"action": "leaseLost"}) == {"action": "status", "responseFor": "leaseLost"}


async def test_what_a_handler_checkpoints_when_it_is_asked_to_stop_is_noted_before_the_drain(
    house: House,
) -> None:
    house.runtime.position = Sequence(4)
    daemon = await house.connect()
    await daemon.initialize()
    await daemon.process(5)
    await daemon.checkpointed()
    await daemon.answered("processRecords")
    await daemon.ask({"action": "shutdownRequested"})
    assert house.intake.shards[0].calls[-2:] == ["advance 4", "drain"]


@pytest.mark.parametrize(
    ("request_", "action"),
    [({"action": "leaseLost"}, "leaseLost"), ({"action": "shutdown", "reason": "ZOMBIE"}, "shutdown")],
)
async def test_a_lost_lease_is_let_go_of_and_the_output_ends_right_after_the_status(
    house: House, logged: list[dict[str, Any]], request_: dict[str, Any], action: str
) -> None:
    daemon = await house.connect()
    await daemon.initialize()
    assert await daemon.ask(request_) == {"action": "status", "responseFor": action}
    await daemon.sees_the_end()
    await daemon.close()
    await house.empty()
    assert house.intake.shards[0].calls == ["lost"]
    assert house.runtime.calls[1:] == [("lease_lost", SHARD), ("forget", SHARD)]
    assert named(logged, "connection.closed")[0]["reason"] == "finished"
    assert not named(logged, "shard.disconnected")


@pytest.mark.parametrize(
    ("request_", "action"),
    [({"action": "shardEnded"}, "shardEnded"), ({"action": "shutdown", "reason": "TERMINATE"}, "shutdown")],
)
async def test_a_shards_end_is_made_durable_and_checkpointed_before_its_status(
    house: House, request_: dict[str, Any], action: str
) -> None:
    daemon = await house.connect()
    await daemon.initialize()
    await daemon.send(request_)
    assert await daemon.checkpointed() == {
        "action": "checkpoint",
        "sequenceNumber": None,
        "subSequenceNumber": None,
    }
    await daemon.answered(action)
    await daemon.sees_the_end()
    await daemon.close()
    await house.empty()
    assert house.intake.shards[0].calls == ["end"]
    assert house.runtime.calls[1:] == [("shard_ended", SHARD), ("forget", SHARD)]


async def test_a_shards_end_that_the_daemon_cannot_store_closes_the_connection_instead_of_answering(
    house: House, logged: list[dict[str, Any]]
) -> None:
    daemon = await house.connect()
    await daemon.initialize()
    await daemon.send({"action": "shardEnded"})
    for _ in range(3):
        await daemon.checkpointed(error="RuntimeException")
    await daemon.sees_the_end()
    (failed,) = named(logged, "connection.failed")
    assert failed["level"] == "error"
    assert "RuntimeException" in failed["what"]


async def test_a_shards_end_after_the_lease_is_gone_is_answered(house: House) -> None:
    daemon = await house.connect()
    await daemon.initialize()
    await daemon.send({"action": "shardEnded"})
    await daemon.checkpointed(error="ShutdownException")
    await daemon.answered("shardEnded")


async def test_a_shards_end_that_is_owned_elsewhere_closes_the_connection_without_a_checkpoint(
    house: House, logged: list[dict[str, Any]]
) -> None:
    house.intake.prepare = lambda shard: setattr(shard, "ends", False)
    daemon = await house.connect()
    await daemon.initialize()
    await daemon.send({"action": "shardEnded"})
    await daemon.sees_the_end()
    assert "owns" in named(logged, "connection.failed")[0]["what"]


async def test_eof_between_requests_leaves_the_shard_without_a_connection(
    house: House, logged: list[dict[str, Any]]
) -> None:
    daemon = await house.connect()
    await daemon.initialize()
    await daemon.close()
    await house.empty()
    assert house.intake.shards[0].calls == ["disconnected"]
    assert ("forget", SHARD) in house.runtime.calls
    assert named(logged, "shard.disconnected")
    assert named(logged, "connection.closed")[0]["reason"] == "eof"


async def test_a_daemon_killed_in_the_middle_of_a_batch_cancels_the_handler(
    house: House, logged: list[dict[str, Any]]
) -> None:
    house.runtime.gate.clear()
    daemon = await house.connect()
    await daemon.initialize()
    await daemon.process(1)
    await house.runtime.reached.wait()
    daemon.writer.transport.abort()
    await house.empty()
    assert house.runtime.cancelled == 1
    assert house.intake.shards[0].calls == ["began", "disconnected"]
    assert named(logged, "connection.failed")[0]["reason"] == "eof_in_request"
    assert not named(logged, "batch.done")


async def test_a_daemon_that_goes_while_it_owes_a_checkpoint_reply_cancels_the_wait(house: House) -> None:
    daemon = await house.connect()
    await daemon.initialize()
    await daemon.process(1)
    assert (await daemon.receive())["action"] == "checkpoint"
    await daemon.close()
    await house.empty()
    assert house.intake.shards[0].stored == []


async def test_a_batch_that_the_runtime_cannot_decode_ends_the_connection_with_the_peers_error(
    house: House, logged: list[dict[str, Any]]
) -> None:
    house.runtime.failures["process"] = DecodeError("records[3].data must be a text.")
    daemon = await house.connect()
    await daemon.initialize()
    await daemon.process(1)
    await daemon.sees_the_end()
    (failed,) = named(logged, "connection.failed")
    assert (failed["error"], failed["level"]) == ("DecodeError", "error")


@pytest.mark.parametrize("where", ["open", "process"])
async def test_a_halted_handler_closes_the_connection_on_purpose(
    house: House, logged: list[dict[str, Any]], where: str
) -> None:
    house.runtime.failures[where] = HandlerHalted("the handler failed for good", did="closed")
    daemon = await house.connect()
    await daemon.send(
        {"action": "initialize", "shardId": SHARD, "sequenceNumber": None, "subSequenceNumber": None}
    )
    await daemon.process(1) if where == "process" and await daemon.receive() else None
    await daemon.sees_the_end()
    (failed,) = named(logged, "connection.failed")
    assert (failed["error"], failed["level"]) == ("HandlerHalted", "error")
    assert failed["what"] == "the handler failed for good"


async def test_a_refused_gap_closes_the_connection(house: House, logged: list[dict[str, Any]]) -> None:
    house.intake.refusal = GapRefused("records would be skipped")
    daemon = await house.connect()
    await daemon.send(
        {"action": "initialize", "shardId": SHARD, "sequenceNumber": "9", "subSequenceNumber": 0}
    )
    await daemon.sees_the_end()
    await house.empty()
    assert named(logged, "connection.failed")[0]["error"] == "GapRefused"
    assert not named(logged, "shard.disconnected")


async def test_an_unexpected_error_is_logged_with_its_traceback_and_ends_only_its_connection(
    house: House, logged: list[dict[str, Any]]
) -> None:
    other = await house.connect()
    await other.initialize("shardId-other")
    house.runtime.failures["process"] = ZeroDivisionError("division by zero")
    daemon = await house.connect()
    await daemon.initialize()
    await daemon.process(1)
    await daemon.sees_the_end()
    (failed,) = named(logged, "connection.failed")
    assert failed["error"] == "InternalError"
    assert "ZeroDivisionError" in failed["exception"]
    house.runtime.failures.clear()
    await other.process(1)
    await other.checkpointed()
    await other.answered("processRecords")


async def test_an_error_in_letting_go_is_logged_and_the_connection_is_gone(
    house: House, logged: list[dict[str, Any]]
) -> None:
    house.runtime.failures["forget"] = RuntimeError("stuck")
    daemon = await house.connect()
    await daemon.initialize()
    await daemon.close()
    await house.empty()
    assert "stuck" in named(logged, "connection.failed")[0]["exception"]
    assert not house.running.done()


@pytest.mark.parametrize(
    ("message", "action"),
    [
        ({"action": "leaseLost"}, "leaseLost"),
        ({"action": "shutdownRequested"}, "shutdownRequested"),
        ({"action": "shardEnded"}, "shardEnded"),
        (None, ""),
    ],
)
async def test_a_daemon_does_not_wait_for_dead_letters_that_run_between_its_batches(
    house: House, message: dict[str, Any] | None, action: str
) -> None:
    daemon = await house.connect()
    await daemon.initialize()
    claim = house.listener.parts.claims.current.get(SHARD)
    assert claim is not None

    async def redrive() -> None:
        with pytest.raises(Superseded):
            async with claim.visit():
                await asyncio.Event().wait()

    async with asyncio.timeout(800), asyncio.TaskGroup() as group:
        group.create_task(redrive())
        if message is None:
            await daemon.close()
            await house.empty()
            return
        await daemon.send(message)
        if action == "shardEnded":
            await daemon.checkpointed()
        await daemon.answered(action)


async def test_a_batch_that_waits_for_dead_letters_to_have_run_is_there_already(house: House) -> None:
    """Its shard is not silent: the clock must not carry the watermark past the rows that it has brought."""
    daemon = await house.connect()
    await daemon.initialize()
    claim, [shard] = house.listener.parts.claims.current.get(SHARD), house.intake.shards
    assert claim is not None
    async with asyncio.timeout(800):
        async with claim.visit():
            await daemon.process(1)
            while not shard.calls:  # noqa: ASYNC110  # a fake that sets no event
                await asyncio.sleep(0)
            assert shard.calls == ["began"]
        await daemon.checkpointed()
        await daemon.answered("processRecords")
    assert shard.calls == ["began", "accept"]
