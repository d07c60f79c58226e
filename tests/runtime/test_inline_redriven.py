"""Dead letters that run once more: parked ones too, and none is skipped, halts its shard, or overtakes."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from mldserver.records import Sequence, Shard
from mldserver.runtime.failure_policy import FailurePolicy, FailureRule, OnFailure, OnKeyFailure

SHARD = "shardId-000000000001"


async def opened(kit: Any, policy: FailurePolicy) -> tuple[Any, list[int]]:
    """Return a runtime whose handler fails for bad payloads, and what it was called with."""
    seen: list[int] = []

    def process_record(record: Any) -> tuple[int]:
        seen.append(record.sequence.number)
        if record.json() == "bad":
            raise ConnectionError("bad")
        return (record.sequence.number,)

    runtime = await kit.start(policy=policy, process_record=process_record, schema="n BIGINT")
    await runtime.open(Shard(SHARD))
    return runtime, seen


@pytest.mark.parametrize(
    "policy",
    [
        FailurePolicy(attempts=1, on_failure=OnFailure.HALT),
        FailurePolicy(attempts=1, on_failure=OnFailure.SKIP),
        FailurePolicy(attempts=1, failure_rules=(FailureRule("ConnectionError", OnFailure.HALT),)),
    ],
)
async def test_what_fails_again_is_a_dead_letter_whatever_the_policy(kit: Any, policy: FailurePolicy) -> None:
    runtime, seen = await opened(kit, policy)
    outcome = await runtime.process(replace(kit.delivery("bad", "good"), redriven=True))
    assert (kit.dead(outcome), outcome.skipped, seen) == ([1], 0, [1, 2])
    assert outcome.rows.num_rows == 1


async def test_letters_of_parked_keys_run_and_the_later_ones_wait_behind_what_fails_again(kit: Any) -> None:
    policy = FailurePolicy(attempts=1, on_key_failure=OnKeyFailure.PARK)
    runtime, seen = await opened(kit, policy)
    await runtime.park(SHARD, {"k": Sequence(1)})
    payloads = ["good", "bad", "good"]
    records = [kit.record(at, payload, partitionKey="k") for at, payload in enumerate(payloads, 1)]
    outcome = await runtime.process(replace(kit.line(records), redriven=True))
    assert seen == [1, 2]
    assert [(each.sequence.number, each.parked_behind) for each in outcome.dead_letters] == [
        (2, None),
        (3, Sequence(2)),
    ]
    later = await runtime.process(kit.line([kit.record(4, "good", partitionKey="k")]))
    assert (kit.dead(later), seen) == ([4], [1, 2]), "the key is parked until it is unparked"


async def test_letters_say_which_version_of_the_handler_it_was(kit: Any) -> None:
    def process_record(record: Any) -> int:
        raise ConnectionError(record.json())

    outcome = await kit.run("bad", process_record=process_record, schema="n BIGINT", version=7)
    assert [each.handler_version for each in outcome.dead_letters] == ["7"]
