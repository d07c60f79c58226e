"""Handlers of DynamoDB changes, inline and in worker processes: every test is played on both kinds of runtime."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import pytest
import pytest_asyncio
from runtime.behaviour_kit import PLAIN, Stage, column, on_stage, over

pytestmark = pytest.mark.asyncio(loop_scope="module")

HERE = ("inline", "at once")
"""Workers run the same adapter: those tests that also look at failures are played there, too."""
AT = 1_353_581_730
TTL = {"type": "Service", "principalId": "dynamodb.amazonaws.com"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(request: Any) -> AsyncIterator[Stage]:
    async with on_stage(request.param) as stage:
        yield stage


def change(event: str, key: str, old: Any = None, new: Any = None, **more: Any) -> bytes:
    images: dict[str, Any] = {"ApproximateCreationDateTime": AT, "Keys": {"id": {"S": key}}}
    for name, n in (("OldImage", old), ("NewImage", new)):
        if n is not None:
            images[name] = {"id": {"S": key}, **({"n": {"N": n}} if n else {})}
    return json.dumps({"eventName": event, "eventID": key, "dynamodb": images, **more}).encode()


INSERT = change("INSERT", "a", new="1")
UPDATE = change("MODIFY", "a", old="1", new="2.5")
DELETE = change("REMOVE", "a", old="2.5")


@over("changes")
async def test_each_kind_of_change_goes_to_its_hook_and_an_update_may_give_rows_of_old_and_new(
    stage: Stage,
) -> None:
    shard = await stage.opened()
    outcome = await shard.process(INSERT, UPDATE, DELETE)
    assert column(outcome, "told") == ["on_insert a None 1", "-1", "+2.5"]
    assert column(outcome, "at") == [datetime.fromtimestamp(AT, UTC)] * 3
    assert not outcome.effects.dead_letters


@over("changes:Deletes")
async def test_a_class_has_one_instance_a_shard_and_its_life_cycle(stage: Stage) -> None:
    shard = await stage.opened()
    expired = change("REMOVE", "b", userIdentity=TTL)
    outcome = await shard.process(INSERT, UPDATE, DELETE, expired)
    assert column(outcome, "told") == [
        "on_delete deleted a Decimal('2.5') None",
        "on_delete expired b None None",
    ]
    assert column(outcome, "n") == [1, 1]


@over("changes:Async", kinds=HERE)
async def test_asynchronous_hooks_are_awaited_and_what_has_none_gives_no_row(stage: Stage) -> None:
    shard = await stage.opened()
    outcome = await shard.process(INSERT, UPDATE, DELETE)
    assert column(outcome, "told") == ["on_insert a None Decimal('1')", "on_delete a Decimal('2.5') None"]


@over("changes:One", "changes:OneAsync", kinds=HERE)
async def test_one_hook_may_take_changes_of_all_kinds(stage: Stage) -> None:
    shard = await stage.opened()
    outcome = await shard.process(INSERT, UPDATE, DELETE, keys=[None] * 3)
    assert column(outcome, "told") == [
        "insert a None Decimal('1')",
        "update a Decimal('1') Decimal('2.5')",
        "delete a Decimal('2.5') None",
    ]


@over("changes:Batches", "changes:BatchesAsync", kinds=HERE)
async def test_a_hook_for_batches_takes_changes_and_names_those_that_failed(stage: Stage) -> None:
    shard = await stage.opened()
    unpriced = change("INSERT", "b", new="")
    outcome = await shard.process(INSERT, unpriced, UPDATE, DELETE)
    assert column(outcome, "told") == [
        "7 insert a None Decimal('1')",
        "7 update a Decimal('1') Decimal('2.5')",
        "7 delete a Decimal('2.5') None",
    ]
    assert [(letter.sequence.number, letter.error) for letter in outcome.effects.dead_letters] == [
        (2, "Failed: no n")
    ]


@over("changes", "changes:Deletes", "changes:Batches")
async def test_what_is_no_change_is_a_dead_letter_that_says_so_and_is_not_tried_again(stage: Stage) -> None:
    shard = await stage.opened()
    outcome = await shard.process(DELETE, b'{"order": 7}', b"%", INSERT)
    letters = {
        letter.sequence.number: (letter.error, letter.attempts) for letter in outcome.effects.dead_letters
    }
    told = "NotAChange: record 2 is not a change of a DynamoDB table: its eventName is None, none of INSERT, MODIFY, REMOVE"
    assert letters[2] == (told, 1)
    assert letters[3][0].startswith(
        "NotAChange: record 3 is not a change of a DynamoDB table: its data is no JSON"
    )
    assert sorted(letters) == [2, 3]


@over("changes:Deletes", policy=PLAIN)
async def test_a_hook_of_changes_is_tried_again_and_gives_up_as_any_other(stage: Stage) -> None:
    shard = await stage.opened()
    outcome = await shard.process(change("REMOVE", "later"), DELETE)
    assert column(outcome, "told")[0].startswith("on_delete deleted later")
    assert len(column(outcome, "told")) == 2
    assert not outcome.effects.dead_letters
