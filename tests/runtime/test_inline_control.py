"""What handlers say about their own failures, through the inline runtime: sync and async, each kind of hook."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from mldserver import BatchResult, Discard, Fatal, Retry
from mldserver.errors import WITHHELD, HandlerHalted
from mldserver.records import Record, Sequence, Shard
from mldserver.runtime.failure_policy import FailurePolicy, OnFailure, OnKeyFailure, failure_rule
from mldserver.runtime.rows import RowBuilder

pytestmark = pytest.mark.quick

ONE = FailurePolicy(attempts=1)
SKIP = FailurePolicy(on_failure=OnFailure.SKIP)
HALT = FailurePolicy(on_failure=OnFailure.HALT)
PARK = FailurePolicy(attempts=2, on_key_failure=OnKeyFailure.PARK)
SCHEMA = "n INT"


@pytest.fixture(params=["sync", "async"])
def kind(request: Any) -> Any:
    """Return what makes a hook of a function: itself, or a coroutine function."""

    def of(function: Any) -> Any:
        async def coroutine(argument: Any) -> Any:
            return function(argument)

        return function if request.param == "sync" else coroutine

    return of


def events(logged: Any, name: str) -> Any:
    return [event for event in logged if event["event"] == name]


class Once:
    """Raises for a record the first time."""

    def __init__(self, number: int, error: Any) -> None:
        self.number, self.error, self.calls = number, error, []

    def __call__(self, record: Any) -> Any:
        n = record.json()
        self.calls.append(n)
        if n == self.number and self.error is not None:
            error, self.error = self.error, None
            raise error
        return (n,)


async def test_rules_hold_for_the_rows_that_the_server_refuses_too(kit: Any) -> None:
    policy = FailurePolicy(
        failure_rules=(failure_rule("BadRow=dead_letter"), failure_rule("BadRows=dead_letter"))
    )
    outcome = await kit.run("x", policy=policy, schema=SCHEMA, process_record=lambda record: ("x",))
    assert [letter.attempts for letter in outcome.effects.dead_letters] == [1]
    outcome = await kit.run("x", policy=policy, schema=SCHEMA, process_records=lambda batch: 5)
    assert [letter.attempts for letter in outcome.effects.dead_letters] == [1]


def result(rows: Any, failed: Any) -> Any:
    """Return a hook that returns this the first time, then rows for all."""
    calls: list[Any] = []

    def process_records(batch: Any) -> Any:
        calls.append([record.sequence_number for record in batch])
        if len(calls) > 1:
            return [(record.json(),) for record in batch]
        return BatchResult(rows=rows, failed=failed(batch))

    return process_records, calls


async def test_places_may_be_numbers_of_numpy(kit: Any, column: Any, kind: Any) -> None:
    hook, calls = result([(1,), None, (3,)], lambda batch: np.flatnonzero([0, 1, 0]))
    outcome = await kit.run(1, 2, 3, schema=SCHEMA, process_records=kind(hook))
    assert (calls, column(outcome, "n"), outcome.effects.dead_letters) == ([[1, 2, 3], [2]], [1, 2, 3], ())


async def test_a_batch_may_say_why_each_record_failed(kit: Any, column: Any, kind: Any) -> None:
    why = {0: "odd", 1: Discard(), 2: Fatal("never"), 3: KeyError("k")}
    hook, calls = result([(9,)] * 5, lambda batch: why)
    outcome = await kit.run(1, 2, 3, 4, 5, policy=ONE, schema=SCHEMA, process_records=kind(hook))
    assert (calls, column(outcome, "n"), outcome.discarded) == ([[1, 2, 3, 4, 5]], [9], 1)
    assert [letter.error for letter in outcome.effects.dead_letters] == [
        "Failed: odd",
        "Fatal: never",
        "KeyError: 'k'",
    ]


async def test_a_record_is_found_by_its_sequence_when_it_is_a_copy(kit: Any) -> None:
    copy = Record(shard_id="s", sequence_number="2")
    hook, calls = result(None, lambda batch: [copy])
    await kit.run(1, 2, 3, schema=SCHEMA, process_records=hook)
    assert calls == [[1, 2, 3], [2]]


@pytest.mark.parametrize("wrong", [5, -1, True, "1", Record(shard_id="s", sequence_number="77")])
async def test_names_of_no_record_of_the_call_fail_it(kit: Any, wrong: Any, logged: Any) -> None:
    hook, calls = result(None, lambda batch: [wrong])
    outcome = await kit.run(1, 2, schema=SCHEMA, process_records=hook)
    assert (calls, outcome.effects.dead_letters) == ([[1, 2], [1], [2]], ())
    (failed,) = events(logged, "handler.failed")
    assert failed["what"].startswith("BadRows: ")
    assert failed["what"].endswith("was named as failed, but is none of the 2 records")


async def test_names_that_cannot_be_read_fail_the_call(kit: Any, logged: Any) -> None:
    hook, calls = result(None, lambda batch: 7)
    await kit.run(1, 2, schema=SCHEMA, process_records=hook)
    assert len(calls) == 3
    assert events(logged, "handler.failed")[0]["what"].startswith("BadRows: 'int' object is not iterable")


@pytest.mark.parametrize("error", [Fatal, Discard])
async def test_an_error_that_names_records_ends_these_and_the_others_are_called_again(
    kit: Any, column: Any, kind: Any, error: Any
) -> None:
    calls = []

    def process_records(batch: Any) -> Any:
        calls.append(len(batch))
        if len(batch) == 3:
            raise error("these", records=[batch[0], 2])
        return [(record.json(),) for record in batch]

    outcome = await kit.run(1, 2, 3, schema=SCHEMA, process_records=kind(process_records))
    assert (calls, column(outcome, "n"), kit.clock.slept) == ([3, 1], [2], [])
    assert (len(outcome.effects.dead_letters), outcome.discarded) == ((2, 0) if error is Fatal else (0, 2))


async def test_an_error_that_names_no_record_of_the_call_is_searched(kit: Any, column: Any) -> None:
    def process_records(batch: Any) -> Any:
        if any(record.json() == 2 for record in batch):
            raise Fatal("that one", records=[99])
        return [(record.json(),) for record in batch]

    outcome = await kit.run(1, 2, schema=SCHEMA, process_records=process_records)
    assert (column(outcome, "n"), kit.dead(outcome)) == ([1], [2])
    assert "99 was named as failed" in outcome.effects.dead_letters[0].error


@pytest.mark.parametrize("how", ["same length", "record column"])
async def test_a_table_may_come_with_the_places_that_failed(
    kit: Any, column: Any, kind: Any, how: Any
) -> None:
    calls = []

    def process_table(table: Any) -> Any:
        calls.append(table.num_rows)
        numbers = [int(data) for data in table["data"].to_pylist()]
        if table.num_rows == 1:
            return pa.table({"n": numbers})
        if how == "same length":
            return BatchResult(pa.table({"n": [1, None, 3]}), failed=[1])
        return BatchResult(pa.table({"n": [3, 1], "record": [2, 0]}), failed={1: "odd"})

    outcome = await kit.run(1, 2, 3, schema=SCHEMA, process_table=kind(process_table))
    assert (calls, column(outcome, "n")) == ([3, 1], [1, 2, 3])


async def test_values_of_records_that_a_table_names_as_failed_do_not_matter(kit: Any, column: Any) -> None:
    def process_table(table: Any) -> Any:
        return BatchResult(pa.table({"n": [None, 2]}), failed={0: Discard()})

    outcome = await kit.run(1, 2, schema="n INT NOT NULL", process_table=process_table)
    assert (column(outcome, "n"), outcome.discarded, outcome.effects.dead_letters) == ([2], 1, ())


async def test_a_batch_result_of_a_hook_for_one_record_is_no_row(kit: Any) -> None:
    outcome = await kit.run(1, policy=ONE, schema=SCHEMA, process_record=lambda record: BatchResult())
    assert "is not a row" in outcome.effects.dead_letters[0].error


async def test_a_stream_of_poison_is_called_once_a_record_waits_for_nothing_and_is_told_once(
    kit: Any, logged: Any, kind: Any
) -> None:
    calls = []

    def process_record(record: Any) -> Any:
        calls.append(record.sequence_number)
        return record.json()["carrier"]

    outcome = await kit.run(
        *[{"n": n} for n in range(300)], schema=SCHEMA, process_record=kind(process_record)
    )
    assert (len(outcome.effects.dead_letters), calls, kit.clock.slept) == (300, list(range(1, 301)), [])
    assert len({letter.traceback for letter in outcome.effects.dead_letters}) == 1
    dead = events(logged, "handler.dead_letter")
    assert [event["level"] for event in dead] == ["error"] + ["debug"] * 299
    assert [("traceback" in event, "times" in event) for event in dead[:2]] == [(True, False), (False, False)]


async def test_a_failure_is_told_again_after_a_minute_with_its_count(
    kit: Any, shard: Any, logged: Any
) -> None:
    runtime = await kit.start(schema=SCHEMA, process_record=lambda record: record.json()["carrier"])
    await runtime.open(shard)
    await runtime.process(kit.delivery({}, {}, {}))
    kit.clock.ms += 60_000
    await runtime.process(kit.delivery({}, {}))
    told = [event for event in events(logged, "handler.dead_letter") if event["level"] == "error"]
    assert [event.get("times") for event in told] == [None, 3]
    assert all("KeyError" in event["traceback"] for event in told)


async def test_a_retry_on_purpose_logs_no_traceback(kit: Any, logged: Any) -> None:
    await kit.run(1, schema=SCHEMA, process_record=Once(1, Retry("busy", after=1)).__call__)
    assert [event.get("traceback") for event in events(logged, "handler.failed")] == [None]


async def test_rows_between_failures_are_built_at_once_and_stand_in_order(
    kit: Any, column: Any, kind: Any, monkeypatch: Any
) -> None:
    built, build = [], RowBuilder.build
    monkeypatch.setattr(RowBuilder, "build", lambda self, pairs: built.append(1) or build(self, pairs))
    payloads = [n if n % 2 else {} for n in range(40)]
    outcome = await kit.run(
        *payloads, schema=SCHEMA, process_record=kind(lambda record: (record.json() + 0,))
    )
    assert column(outcome, "n") == [n for n in range(40) if n % 2]
    assert (len(outcome.effects.dead_letters), built) == (20, [1])


# Records that wait behind a dead letter of their key.


def keyed(kit: Any, *records: Any, start: int = 1) -> Any:
    """Return a batch of (key, payload)."""
    return kit.line(
        [kit.record(n, payload, partitionKey=key) for n, (key, payload) in enumerate(records, start)]
    )


def parked(outcome: Any) -> Any:
    return [
        (letter.sequence.number, letter.attempts, letter.parked_behind)
        for letter in outcome.effects.dead_letters
    ]


def below_zero(record: Any) -> Any:
    if record.json() < 0:
        raise ConnectionError(record.json())
    return (record.json(),)


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
            await runtime.process(keyed(kit, ("a", 1), ("b", 2)))
    assert calls == [1, 2, 1, 2]


async def test_records_that_one_call_has_taken_together_do_not_wait_for_each_other(
    kit: Any, column: Any
) -> None:
    def process_records(batch: Any) -> Any:
        return BatchResult([(record.json(),) for record in batch], failed={0: Fatal("this one")})

    runtime = await kit.start(schema=SCHEMA, policy=PARK, process_records=process_records)
    await runtime.open(Shard(kit.shard))
    outcome = await runtime.process(keyed(kit, ("a", 1), ("a", 2)))
    assert (column(outcome, "n"), parked(outcome)) == ([2], [(1, 1, None)])
    assert parked(await runtime.process(keyed(kit, ("a", 3), start=3))) == [(3, 0, Sequence(1))]


async def test_a_skipped_record_parks_nothing(kit: Any, column: Any) -> None:
    policy = FailurePolicy(attempts=1, on_failure=OnFailure.SKIP, on_key_failure=OnKeyFailure.PARK)
    runtime = await kit.start(schema=SCHEMA, policy=policy, process_record=below_zero)
    await runtime.open(Shard(kit.shard))
    outcome = await runtime.process(keyed(kit, ("a", -1), ("a", 2)))
    assert (column(outcome, "n"), outcome.skipped) == ([2], 1)


SECRET = "4711-0815"


def quoting(record: Any) -> Any:
    raise ValueError(f"no such customer: {record.json()}")


def quoting_on_the_way(record: Any) -> Any:
    try:
        quoting(record)
    except ValueError as error:
        raise OSError(record.json()) from error


async def quoting_async(record: Any) -> Any:
    quoting(record)


QUOTING: dict[str, dict[str, Any]] = {
    "a hook raises": {"process_record": quoting},
    "an asynchronous hook raises": {"process_record": quoting_async},
    "a hook raises and is called again": {"process_record": quoting_on_the_way},
    "a row does not fit": {"process_record": lambda record: (record.json(),)},
    "no row is returned": {"process_record": lambda record: record.json()},
    "no list is returned": {"process_records": lambda batch: {"n": batch[0].json()}},
    "a batch names its records": {"process_records": lambda batch: BatchResult(failed={0: batch[0].json()})},
    "a table does not fit": {"process_table": lambda table: pa.table({"n": [SECRET]})},
}


@pytest.mark.parametrize("hooks", QUOTING.values(), ids=QUOTING)
@pytest.mark.parametrize("on_failure", OnFailure)
async def test_a_log_without_messages_quotes_no_record(
    kit: Any, hooks: Any, on_failure: OnFailure, logged: Any
) -> None:
    policy = FailurePolicy(attempts=2, on_failure=on_failure, log_error_messages=False)
    run = kit.run(SECRET, policy=policy, schema=SCHEMA, **hooks)
    if on_failure is OnFailure.HALT:
        with pytest.raises(HandlerHalted) as halted:
            await run
        assert SECRET not in f"{halted.value} {halted.value.where}"
    else:
        letters = (await run).effects.dead_letters
        assert all(SECRET in letter.error for letter in letters), "those who ask for it see it"
    assert SECRET not in str(logged)
    failed = [event for event in logged if event["event"].startswith("handler.") and "what" in event]
    assert failed
    assert all(event["what"].endswith(f": {WITHHELD}") for event in failed)
    for hook in hooks.values():
        assert ("test_inline_control.py" in str(logged)) is ("quoting" in hook.__name__)


async def test_a_log_without_messages_says_what_the_server_found(kit: Any, logged: Any) -> None:
    policy = FailurePolicy(log_error_messages=False)
    await kit.run(1, 2, policy=policy, schema=SCHEMA, process_records=lambda batch: [])
    assert "returned 0 items for 2 records" in str(logged)
