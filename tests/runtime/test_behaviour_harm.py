"""What no handler should do, inline and in worker processes: it is a failure of the record, and no other notices."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from runtime.behaviour_kit import BY_RECORD, PARK, Stage, column, dead, on_stage, over

pytestmark = pytest.mark.asyncio(loop_scope="module")

LANES = 2


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(request: Any) -> AsyncIterator[Stage]:
    async with on_stage(request.param) as stage:
        yield stage


# Whoever cancels the task that the hook runs in, and is not the server.


@pytest.mark.parametrize(
    ("payload", "error"),
    [
        ("cancels", "CancelledError"),
        ("cancels and waits", "CancelledError"),
        ("cancels and fails", "RuntimeError: no good"),
        ("times out", "TimeoutError: old"),
    ],
)
@over("harmful:Cancelling")
async def test_a_hook_that_cancels_its_task_has_failed_and_no_record_is_lost(
    stage: Stage, payload: str, error: str
) -> None:
    shard = await stage.opened()
    outcome = await shard.process("row", payload, "waits well", "row")
    assert (column(outcome, "n"), dead(outcome)) == ([1, 3, 4], [2])
    assert outcome.effects.dead_letters[0].error == error
    assert outcome.effects.dead_letters[0].attempts == 3


@over("harmful:Cancelling", concurrency=LANES)
@pytest.mark.parametrize("payload", ["cancels", "cancels and waits", "times out"])
async def test_nor_is_one_of_its_lane(stage: Stage, payload: str) -> None:
    shard = await stage.opened()
    outcome = await shard.process("row", payload, *["row"] * 8)
    assert (column(outcome, "n"), dead(outcome)) == ([1, *range(3, 11)], [2])


@over("harmful:Cancelling")
async def test_a_hook_that_copes_with_its_own_cancellation_has_not_failed(stage: Stage) -> None:
    shard = await stage.opened()
    outcome = await shard.process("times out and knows", "waits well", "cancels later", "waits well")
    assert (column(outcome, "n"), outcome.effects.dead_letters) == ([1, 2, 3, 4], ())


# Errors and rows with code of their own.

harmful = over("harmful:Harmful", "harmful:HarmfulAsync")
harmful_batch = over("harmful:HarmfulBatch", "harmful:HarmfulBatchAsync")


@harmful
@pytest.mark.parametrize(
    ("payload", "error"),
    [
        ("busy", "Busy: 3"),
        ("changes", "AttributeError: immutable type: 'Record'"),
        ("shouts", f"ValueError: {'x' * 10_000}… (990000 more characters)"),
        ("a row that exits", "SystemExit: no"),
    ],
)
async def test_whatever_errors_and_rows_do_is_the_failure_of_their_record(
    stage: Stage, payload: str, error: str
) -> None:
    shard = await stage.opened()
    outcome = await shard.process("row", payload, "row")
    (letter,) = outcome.effects.dead_letters
    assert (column(outcome, "n"), letter.sequence, letter.error) == ([1, 3], (2, 0), error)


@harmful_batch
async def test_a_row_of_a_batch_that_would_end_the_process_is_found(stage: Stage) -> None:
    shard = await stage.opened()
    outcome = await shard.process("a row that is good", "a row that exits", "a row that is good")
    assert (column(outcome, "_sequence"), dead(outcome)) == (["1", "3"], [2])
    assert outcome.effects.dead_letters[0].error == "SystemExit: no"


@harmful_batch
async def test_so_are_names_of_failed_records_that_have_code(stage: Stage) -> None:
    shard = await stage.opened()
    outcome = await shard.process("row", "names with code", "row")
    assert (column(outcome, "n"), dead(outcome)) == ([1, 3], [2])
    assert outcome.effects.dead_letters[0].error == "SystemExit: no"
    outcome = await shard.process("row", "fatal with code", "row")
    assert (column(outcome, "n"), dead(outcome)) == ([4, 6], [5])
    assert "is none of the 1 records" in outcome.effects.dead_letters[0].error


@over("harmful:HarmfulBatchAsync", kinds=("workers",), policy=PARK)
async def test_a_row_that_ends_its_worker_is_found_like_a_call_that_does(stage: Stage) -> None:
    shard = await stage.opened()
    outcome = await shard.process("a row that is good", "a row that kills", "a row that is good")
    assert (column(outcome, "_sequence"), dead(outcome)) == (["1", "3"], [2])


@over("harmful:HarmfulTable")
async def test_a_table_whose_memory_is_damaged_is_refused(stage: Stage) -> None:
    shard = await stage.opened()
    outcome = await shard.process("row", "damaged", "row")
    assert (column(outcome, "n"), dead(outcome)) == ([1, 3], [2])
    assert outcome.effects.dead_letters[0].error.startswith("TableMismatch: the table is damaged: ")


# Rows of one call each.


@over("harmful:Reusing")
async def test_a_row_that_is_used_again_and_again_is_another_one_each_time(stage: Stage) -> None:
    shard = await stage.opened()
    outcome = await shard.process("row", "twice", "other")
    assert column(outcome, "n") == [1, 2, 2, 3]
    assert column(outcome, "told") == ["row", "twice", "twice", "other"]


@over(*BY_RECORD, policy=PARK)
async def test_when_keys_are_parked_no_later_record_is_called_before_a_bad_row_is_decided(
    stage: Stage,
) -> None:
    shard = await stage.opened()
    outcome = await shard.process("row", "wrong", "row", "row", keys=["a", "b", "b", "c"])
    assert (column(outcome, "n"), dead(outcome)) == ([1, 4], [2, 3])
    assert outcome.effects.dead_letters[0].error == "BadRow: column n: 'x' is not BIGINT"
    assert outcome.effects.dead_letters[0].attempts == 1
    assert outcome.effects.dead_letters[1].parked_behind == (2, 0)
    assert (await shard.calls())[1:] == [1, 2, 4]
