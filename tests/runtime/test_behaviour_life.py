"""What a shard goes through, inline and in worker processes: every test is played on both kinds of runtime."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from runtime.behaviour_kit import (
    BY_RECORD,
    HALT,
    PARK,
    SKIP,
    Gate,
    Stage,
    column,
    dead,
    on_stage,
    over_waiting,
    told,
)
from support.serving import until

from mldserver.errors import HandlerHalted, InternalError
from mldserver.records import Hook, Sequence
from mldserver.runtime.interface import BatchOutcome
from mldserver.runtime.work import lane_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

BEGUN = "initialize TRIM_HORIZON"
LANES = 3
DEADLINE = 0.05
KEY_OF_LANE = {lane_of(key, LANES): key for key in "abcdefgh"}
by_record = over_waiting(*BY_RECORD)
parking = over_waiting(*BY_RECORD, "ByBatch", "ByTableAsync", policy=PARK)
in_lanes = over_waiting(*BY_RECORD, concurrency=LANES)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(request: Any) -> AsyncIterator[Stage]:
    async with on_stage(request.param) as stage:
        yield stage


def waiting(outcome: BatchOutcome) -> list[tuple[int, int | None]]:
    """Return for each dead letter its sequence, and that of the one that it waits behind."""
    return [
        (letter.sequence.number, letter.parked_behind and letter.parked_behind.number)
        for letter in outcome.effects.dead_letters
    ]


# Shards, and the hooks of their lives.


@by_record
async def test_each_shard_has_an_instance_of_its_own_which_is_initialized_once_and_kept(stage: Stage) -> None:
    one, two = await stage.opened("LATEST"), await stage.opened("12345")
    for shard in (one, two, one):
        assert len(column(await shard.process("row", "row"), "n")) == 2
    assert await one.calls() == ["initialize LATEST", 1, 2, 3, 4]
    assert await two.calls() == ["initialize 12345", 1, 2]


@by_record
async def test_batches_of_many_shards_may_be_in_hand_at_the_same_time(stage: Stage) -> None:
    shards = [await stage.opened() for _ in range(5)]
    async with asyncio.TaskGroup() as group:
        for shard in shards:
            group.create_task(shard.process(*["row", "fails 1"] * 10))
    for shard in shards:
        calls = (await shard.calls())[1:]
        assert calls == sorted(calls)
        assert len(calls) == 30


@by_record
async def test_a_shard_that_is_opened_again_gets_a_fresh_instance(stage: Stage) -> None:
    shard = await stage.opened()
    await shard.process("row")
    await shard.open("1")
    assert await shard.calls() == ["initialize 1"]


@by_record
async def test_a_forgotten_shard_is_closed_and_gets_a_fresh_instance_when_it_comes_back(stage: Stage) -> None:
    shard = await stage.opened()
    await shard.process("row")
    await shard.forget()
    await shard.forget()
    with pytest.raises(InternalError, match="not open"):
        await shard.process("row")
    with pytest.raises(InternalError, match="not open"):
        await shard.notify(Hook.LEASE_LOST)
    await shard.open("1")
    assert await shard.calls() == ["initialize 1"]


@by_record
async def test_opening_is_tried_until_it_succeeds_with_a_fresh_instance_each_time(
    stage: Stage, logged: list[dict[str, Any]]
) -> None:
    shard = await stage.opened("fails 4")
    assert await shard.calls() == ["initialize fails 4"]
    failed = told(logged, shard, "hook", "attempt", "level", "what")
    assert failed == [
        ("failed", "initialize", attempt, level, "ConnectionError: away")
        for attempt, level in enumerate(["warning", "debug", "error", "debug"], 1)
    ], "from the policy's attempts on a person is called, once a minute"


@over_waiting(*BY_RECORD, policy=HALT)
async def test_under_halt_opening_is_given_up_after_the_attempts(
    stage: Stage, logged: list[dict[str, Any]]
) -> None:
    shard = await stage.opened()
    with pytest.raises(HandlerHalted, match="initialize failed for good: ConnectionError: away") as caught:
        await shard.open("fails 9")
    assert caught.value.where["attempts"] == 2
    assert told(logged, shard, "level") == [("failed", "warning"), ("halted", "critical")]
    await shard.open("LATEST")
    assert await shard.calls() == ["initialize LATEST"]


@by_record
@pytest.mark.parametrize("hook", [Hook.SHARD_ENDED, Hook.LEASE_LOST])
async def test_the_hook_of_an_ending_is_called_behind_the_shards_records(stage: Stage, hook: Hook) -> None:
    shard = await stage.opened()
    await shard.process("row")
    assert await shard.notify(hook) is None
    assert await shard.calls() == [BEGUN, 1, str(hook)]


@by_record
async def test_a_failing_hook_is_tried_again_then_logged_and_never_raised(
    stage: Stage, logged: list[dict[str, Any]]
) -> None:
    shard = await stage.opened()
    assert await shard.notify(Hook.SHUTDOWN_REQUESTED) is None
    assert told(logged, shard, "level", "hook", "what") == [
        ("failed", "warning", "shutdown_requested", "OSError: always away"),
        ("failed", "debug", "shutdown_requested", "OSError: always away"),
        ("hook_failed", "error", "shutdown_requested", "OSError: always away"),
    ]
    assert await shard.calls() == [BEGUN, *["shutdown_requested"] * 3]


@over_waiting("shared")
async def test_hooks_that_a_handler_does_not_have_are_not_missed(
    stage: Stage, logged: list[dict[str, Any]]
) -> None:
    shard = await stage.opened()
    for hook in (Hook.SHUTDOWN_REQUESTED, Hook.LEASE_LOST, Hook.SHARD_ENDED):
        assert await shard.notify(hook) is None
    assert told(logged, shard) == []


# Keys that wait.


@parking
async def test_no_record_overtakes_a_dead_letter_of_its_key(stage: Stage) -> None:
    shard = await stage.opened()
    outcome = await shard.process("raise ValueError", "row", "row", "row", keys=["a", "b", "a", None])
    assert (column(outcome, "n"), waiting(outcome)) == ([2, 4], [(1, None), (3, 1)])
    later = await shard.process("row", "row", keys="ab")
    assert (column(later, "n"), waiting(later), later.attempts) == ([6], [(5, 1)], 1)
    (letter,) = later.effects.dead_letters
    assert letter.error == "Parked: it waits behind 1, a dead letter of its partition key"
    assert (letter.attempts, letter.data) == (0, b'"row"')


@parking
async def test_a_key_whose_dead_letters_are_gone_is_processed_again(stage: Stage) -> None:
    shard = await stage.opened()
    await shard.process("raise Fatal", "raise Fatal", keys="ab")
    await shard.runtime.unpark(shard.id, "a")
    await shard.runtime.unpark(shard.id, "never parked")
    await shard.runtime.unpark("a shard that is not open", "a")
    outcome = await shard.process("row", "row", keys="ab")
    assert (column(outcome, "n"), waiting(outcome)) == ([3], [(4, 2)])


@parking
async def test_keys_are_parked_from_what_was_stored_until_the_shard_is_opened_again(stage: Stage) -> None:
    shard = await stage.opened()
    await shard.runtime.park(shard.id, {"a": Sequence(77, 3)})
    outcome = await shard.process("row", "row", keys="ab")
    assert (column(outcome, "n"), waiting(outcome)) == ([2], [(1, 77)])
    assert outcome.effects.dead_letters[0].parked_behind == Sequence(77, 3)
    await shard.open()
    assert column(await shard.process("row", keys="a"), "n") == [3]


@parking
async def test_no_key_is_parked_of_a_shard_that_is_not_open(stage: Stage) -> None:
    with pytest.raises(InternalError, match="not open"):
        await stage.runtime.park("never opened", {"a": Sequence(77)})
    await stage.runtime.unpark("never opened", "a")


@by_record
async def test_without_the_policy_nothing_is_parked(stage: Stage) -> None:
    await stage.runtime.park("never opened", {"a": Sequence(77)})
    shard = await stage.opened()
    await shard.runtime.park(shard.id, {"a": Sequence(77)})
    outcome = await shard.process("raise Fatal", "row", keys="aa")
    assert (column(outcome, "n"), waiting(outcome)) == ([2], [(1, None)])


# Dead letters that run once more, and parts of batches.


@parking
async def test_redriven_letters_of_parked_keys_run_and_wait_behind_what_fails_again(stage: Stage) -> None:
    shard = await stage.opened()
    await shard.runtime.park(shard.id, {"k": Sequence(1)})
    outcome = await shard.process("row", "raise Fatal", "row", keys="kkk", redriven=True)
    assert (column(outcome, "n"), waiting(outcome)) == ([1], [(2, None), (3, 2)])
    later = await shard.process("row", keys="k")
    assert waiting(later) == [(4, 2)], "the key is parked until it is unparked"


@pytest.mark.parametrize("payload", ["raise ValueError", "raise LookupError", "raise ZeroDivisionError"])
@by_record
async def test_a_redriven_letter_that_fails_again_is_a_letter_again_whatever_the_rules_say(
    stage: Stage, payload: str
) -> None:
    shard = await stage.opened()
    outcome = await shard.process(payload, "row", redriven=True)
    assert (column(outcome, "n"), dead(outcome), outcome.skipped) == ([2], [1], 0)


@over_waiting("ByRecord", policy=HALT)
async def test_a_redriven_letter_that_fails_again_does_not_halt_its_shard(stage: Stage) -> None:
    shard = await stage.opened()
    outcome = await shard.process("raise ValueError", "row", redriven=True)
    assert (column(outcome, "n"), dead(outcome)) == ([2], [1])


@over_waiting("ByRecord", policy=SKIP)
async def test_a_redriven_letter_that_fails_again_is_not_skipped(stage: Stage) -> None:
    shard = await stage.opened()
    outcome = await shard.process("raise ValueError", "row", redriven=True)
    assert (column(outcome, "n"), dead(outcome), outcome.skipped) == ([2], [1], 0)


@over_waiting(*BY_RECORD, "ByBatch", "ByTable")
async def test_of_a_part_of_a_batch_only_these_records_are_processed(stage: Stage) -> None:
    shard = await stage.opened()
    outcome = await shard.process(*["row"] * 6, after=1, part=range(1, 3))
    assert column(outcome, "n") == [3, 4]
    outline = outcome.outline
    assert (outline.records, outline.duplicates, outline.first, outline.last) == (6, 1, (1, 0), (6, 0))
    nothing = await shard.process(*["row"] * 6, first=1, part=range(0))
    assert (nothing.effects.rows, nothing.outline.records) == (None, 6)


@over_waiting(*BY_RECORD, "ByBatch", "ByTable")
async def test_condemned_records_are_dead_letters_without_a_call(stage: Stage) -> None:
    shard = await stage.opened()
    outcome = await shard.process(*["row"] * 3, part=range(1, 3), condemned="WorkerDied: of this")
    assert (outcome.effects.rows, dead(outcome)) == (None, [2, 3])
    assert {letter.error for letter in outcome.effects.dead_letters} == {"WorkerDied: of this"}
    assert await shard.calls() == [BEGUN]


# Lanes.


@in_lanes
async def test_records_of_different_keys_are_processed_at_the_same_time(stage: Stage) -> None:
    shard = await stage.opened()
    outcome = await shard.process("meets", "meets", "meets", keys=KEY_OF_LANE.values())
    assert (column(outcome, "n"), outcome.effects.dead_letters) == ([1, 2, 3], ())


@in_lanes
async def test_lanes_keep_the_order_of_each_key_whatever_fails(stage: Stage) -> None:
    shard = await stage.opened()
    payloads = ["row", "fails 2", "rows", "raise Fatal", "nothing"] * 8
    keys = ("abcdefg" * 6)[: len(payloads)]
    outcome = await shard.process(*payloads, keys=keys)
    sequences = [int(text) for text in column(outcome, "_sequence")]
    assert sequences == sorted(sequences)
    assert dead(outcome) == [number for number, payload in enumerate(payloads, 1) if "Fatal" in payload]
    calls = (await shard.calls())[1:]
    for key in set(keys):
        of_key = [number for number in calls if keys[number - 1] == key]
        assert of_key == sorted(of_key)
    assert len(calls) == len(payloads) + 8 * 2


@over_waiting(*BY_RECORD, concurrency=LANES, policy=HALT)
async def test_a_lane_that_halts_stops_the_shard(stage: Stage) -> None:
    shard = await stage.opened()
    with pytest.raises(HandlerHalted, match="ValueError: no good"):
        await shard.process(*["row", "raise ValueError"] * 5)
    assert column(await shard.process("row"), "n") == [11]


# Calls that take long.


@by_record
async def test_a_cancelled_batch_leaves_its_shard_usable(stage: Stage) -> None:
    shard = await stage.opened()
    async with Gate() as gate:
        running = asyncio.create_task(shard.process(f"waits {gate.port}"))
        _, call = await gate.reached()
        await cancelled(running)
        following = asyncio.create_task(shard.process("row", first=1))
        call.close()
        assert column(await following, "n") == [1]
    assert await shard.calls() == [BEGUN, 1, 1]


@by_record
async def test_a_shard_whose_batch_was_cancelled_can_be_forgotten_and_opened_again(stage: Stage) -> None:
    shard = await stage.opened()
    async with Gate() as gate:
        running = asyncio.create_task(shard.process(f"waits {gate.port}"))
        _, call = await gate.reached()
        await cancelled(running)
        await shard.forget()
        opening = asyncio.create_task(shard.open("1"))
        call.close()
        await opening
    assert column(await shard.process("row", first=1), "n") == [1]
    assert await shard.calls() == ["initialize 1", 1]


@by_record
async def test_a_batch_that_is_cancelled_while_it_backs_off_leaves_its_shard_usable(
    stage: Stage, logged: list[dict[str, Any]]
) -> None:
    shard = await stage.opened()
    running = asyncio.create_task(shard.process("retry 3600", "row"))
    await until(lambda: bool(told(logged, shard)))
    await cancelled(running)
    assert column(await shard.process("row", "row", first=1), "n") == [1, 2]
    assert await shard.calls() == [BEGUN, 1, 1, 2]


@over_waiting("ByRecordAsync")
async def test_an_asynchronous_call_is_cancelled_with_its_batch(stage: Stage) -> None:
    shard = await stage.opened()
    async with Gate() as gate:
        running = asyncio.create_task(shard.process(f"waits {gate.port}"))
        until_the_end, call = await gate.reached()
        await cancelled(running)
        assert await until_the_end.read() == b""
        call.close()


@over_waiting("ByRecordAsync", deadline=DEADLINE)
async def test_an_asynchronous_call_beyond_its_deadline_is_cancelled_and_has_failed(stage: Stage) -> None:
    shard = await stage.opened()
    outcome = await shard.process("row", "hangs", "row")
    assert (column(outcome, "n"), dead(outcome)) == ([1, 3], [2])
    (letter,) = outcome.effects.dead_letters
    assert (letter.error, letter.attempts) == (f"TimeoutError: it took longer than {DEADLINE} s", 3)
    assert "obedient.py" in letter.traceback


@over_waiting("ByRecordAsync", deadline=DEADLINE)
async def test_a_hook_beyond_its_deadline_is_tried_again(stage: Stage, logged: list[dict[str, Any]]) -> None:
    shard = await stage.opened("hangs")
    assert await shard.calls() == ["initialize hangs"]
    assert told(logged, shard, "hook", "what") == [
        ("failed", "initialize", f"TimeoutError: it took longer than {DEADLINE} s")
    ]


@over_waiting("ByRecord", deadline=DEADLINE)
async def test_a_synchronous_call_beyond_its_deadline_is_told_and_waited_for(
    stage: Stage, logged: list[dict[str, Any]]
) -> None:
    shard = await stage.opened()
    async with Gate() as gate:
        running = asyncio.create_task(shard.process(f"waits {gate.port}", "row"))
        _, call = await gate.reached()
        await until(lambda: ("slow", "process_record") in told(logged, shard, "hook"))
        call.close()
        outcome = await running
    assert (column(outcome, "n"), outcome.effects.dead_letters) == ([1, 2], ())


async def cancelled(running: asyncio.Task[Any]) -> None:
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
