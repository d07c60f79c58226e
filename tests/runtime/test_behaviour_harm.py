"""What no handler should do, inline and in worker processes: it is a failure of the record, and no other notices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio
from runtime.behaviour_kit import Stage, column, dead, on_stage, over

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

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
        ("cancels and fails", "ValueError: no good"),
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
    assert outcome.dead_letters[0].error == error
    assert outcome.dead_letters[0].attempts == 3


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
    assert (column(outcome, "n"), outcome.dead_letters) == ([1, 2, 3, 4], ())
