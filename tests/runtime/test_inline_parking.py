"""Records that wait behind a dead letter of their key, through the inline runtime."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from mldserver import BatchResult, Fatal
from mldserver.errors import HandlerHalted, InternalError
from mldserver.records import Sequence, Shard
from mldserver.runtime.failure_policy import FailurePolicy, OnFailure, OnKeyFailure, failure_rule

SCHEMA = "n INT"
PARK = FailurePolicy(attempts=2, on_key_failure=OnKeyFailure.PARK)


class Called:
    """Fails for payloads below zero, in each kind of hook."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def process_record(self, record: Any) -> Any:
        n = record.json()
        self.calls.append(n)
        if n < 0:
            raise ConnectionError(n)
        return (n,)

    def process_records(self, batch: Any) -> Any:
        return [self.process_record(record) for record in batch]

    def process_table(self, table: Any) -> Any:
        numbers = [int(data) for data in table["data"].to_pylist()]
        self.calls += numbers
        if min(numbers) < 0:
            raise ConnectionError(numbers)
        return pa.table({"n": numbers})


def line(kit: Any, *records: Any, start: int = 1) -> Any:
    """Return a batch of (key, payload)."""
    return kit.line(
        [kit.record(n, payload, partitionKey=key) for n, (key, payload) in enumerate(records, start)]
    )


def told(outcome: Any) -> Any:
    return [
        (letter.sequence.number, letter.attempts, letter.parked_behind) for letter in outcome.dead_letters
    ]


async def opened(kit: Any, hook: str, **options: Any) -> Any:
    called = Called()
    runtime = await kit.start(schema=SCHEMA, **{"policy": PARK} | options, **{hook: getattr(called, hook)})
    await runtime.open(Shard(kit.shard))
    return runtime, called


@pytest.mark.parametrize("hook", ["process_record", "process_records", "process_table"])
async def test_no_record_overtakes_a_dead_letter_of_its_key(kit: Any, column: Any, hook: Any) -> None:
    runtime, called = await opened(kit, hook)
    outcome = await runtime.process(line(kit, ("a", -1), ("b", 2), ("a", 3), (None, 4)))
    assert column(outcome, "n") == [2, 4]
    (dead, parked) = told(outcome)
    assert (dead[0], dead[2]) == (1, None)
    assert (parked[0], parked[2]) == (3, Sequence(1))
    called.calls.clear()
    later = await runtime.process(line(kit, ("a", 5), ("b", 6), start=5))
    assert (told(later), column(later, "n"), called.calls) == ([(5, 0, Sequence(1))], [6], [6])
    assert later.dead_letters[0].error == "Parked: it waits behind 1, a dead letter of its partition key"
    assert later.attempts == 1


async def test_a_key_whose_dead_letters_are_gone_is_processed_again(kit: Any, column: Any) -> None:
    runtime, _ = await opened(kit, "process_record")
    await runtime.process(line(kit, ("a", -1), ("b", -2)))
    await runtime.unpark(kit.shard, "a")
    await runtime.unpark(kit.shard, "never parked")
    await runtime.unpark("a shard that is not open", "a")
    outcome = await runtime.process(line(kit, ("a", 3), ("b", 4), start=3))
    assert (column(outcome, "n"), told(outcome)) == ([3], [(4, 0, Sequence(2))])


async def test_keys_are_parked_from_what_was_stored_when_a_shard_is_opened(kit: Any, column: Any) -> None:
    runtime, _ = await opened(kit, "process_record")
    await runtime.park(kit.shard, {"a": Sequence(77)})
    outcome = await runtime.process(line(kit, ("a", 1), ("b", 2)))
    assert (told(outcome), column(outcome, "n")) == ([(1, 0, Sequence(77))], [2])
    await runtime.open(Shard(kit.shard))
    assert column(await runtime.process(line(kit, ("a", 1))), "n") == [1]
    with pytest.raises(InternalError):
        await runtime.park("a shard that is not open", {"a": Sequence(1)})


async def test_without_the_policy_nothing_is_parked(kit: Any, column: Any) -> None:
    runtime, _ = await opened(kit, "process_record", policy=FailurePolicy(attempts=1))
    await runtime.park(kit.shard, {"a": Sequence(77)})
    outcome = await runtime.process(line(kit, ("a", -1), ("a", 2)))
    assert (told(outcome), column(outcome, "n")) == ([(1, 1, None)], [2])


async def test_a_batch_that_stopped_its_shard_parks_nothing(kit: Any) -> None:
    policy = FailurePolicy(
        attempts=1, failure_rules=(failure_rule("Fatal=halt"),), on_key_failure=OnKeyFailure.PARK
    )
    calls = []

    def process_record(record: Any) -> None:
        calls.append(record.json())
        if record.json() == 2:
            raise Fatal("stop")
        raise ConnectionError("no")

    runtime = await kit.start(policy=policy, process_record=process_record)
    await runtime.open(Shard(kit.shard))
    for _ in range(2):
        with pytest.raises(HandlerHalted):
            await runtime.process(line(kit, ("a", 1), ("b", 2)))
    assert calls == [1, 2, 1, 2]


async def test_records_that_one_call_has_taken_together_do_not_wait_for_each_other(
    kit: Any, column: Any
) -> None:
    def process_records(batch: Any) -> Any:
        return BatchResult([(record.json(),) for record in batch], failed={0: Fatal("this one")})

    runtime = await kit.start(schema=SCHEMA, policy=PARK, process_records=process_records)
    await runtime.open(Shard(kit.shard))
    outcome = await runtime.process(line(kit, ("a", 1), ("a", 2)))
    assert (column(outcome, "n"), told(outcome)) == ([2], [(1, 1, None)])
    assert told(await runtime.process(line(kit, ("a", 3), start=3))) == [(3, 0, Sequence(1))]


async def test_a_skipped_record_parks_nothing(kit: Any, column: Any) -> None:
    policy = FailurePolicy(attempts=1, on_failure=OnFailure.SKIP, on_key_failure=OnKeyFailure.PARK)
    runtime, _ = await opened(kit, "process_record", policy=policy)
    outcome = await runtime.process(line(kit, ("a", -1), ("a", 2)))
    assert (column(outcome, "n"), outcome.skipped) == ([2], 1)
