"""The inline runtime with ``process_records`` and ``process_table``: rows, halving, faults."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest

from mldserver import tumbling
from mldserver.effects import NOTHING, Effects
from mldserver.errors import HandlerHalted, InternalError
from mldserver.protocol.batch_decoder import BatchDecoder
from mldserver.records import Batch, BatchResult
from mldserver.runtime import work
from mldserver.runtime.failure_policy import FailurePolicy, OnFailure, failure_rule

pytestmark = pytest.mark.quick

HALT = FailurePolicy(on_failure=OnFailure.HALT)
SCHEMA = "n INT"


def number(record: Any) -> Any:
    return (record.json(),)


async def test_a_batch_gives_one_item_a_record(kit: Any, shard: Any, column: Any) -> None:
    batches = []

    def process_records(batch: Any) -> Any:
        batches.append(batch)
        return [None, (2,), [(3,), {"n": 33}]]

    outcome = await kit.run(1, 2, 3, schema=SCHEMA, process_records=process_records)
    assert (column(outcome, "n"), column(outcome, "_sequence")) == ([2, 3, 33], ["2", "3", "3"])
    (batch,) = batches
    assert isinstance(batch, Batch)
    assert (len(batch), batch.shard_id, batch.millis_behind_latest) == (3, kit.shard, 7)


async def test_a_batch_may_give_no_rows_at_all(kit: Any) -> None:
    outcome = await kit.run(1, 2, schema=SCHEMA, process_records=lambda batch: None)
    assert (outcome.effects.rows, outcome.effects.dead_letters) == (None, ())


WRONG_LENGTHS: dict[str, Any] = {
    "an empty list": lambda batch: [],
    "an empty tuple": lambda batch: (),
    "all but the last": lambda batch: [number(record) for record in batch][:-1],
    "one too many": lambda batch: [number(record) for record in [*batch, batch[0]]],
    "a filter": lambda batch: [number(record) for record in batch if record.json() % 2],
    "a generator that filters": lambda batch: (number(record) for record in batch if record.json() % 2),
    "rows beside named failures": lambda batch: BatchResult([number(batch[0])], failed=[1]),
    "no list": lambda batch: {"n": 1},
}


@pytest.mark.parametrize("returns", WRONG_LENGTHS.values(), ids=WRONG_LENGTHS)
@pytest.mark.parametrize("hook", ["sync", "async"])
@pytest.mark.parametrize("schema", [SCHEMA, None])
async def test_items_of_another_number_than_records_fail_the_call_as_a_whole(
    kit: Any, returns: Any, hook: Any, schema: Any
) -> None:
    calls = []

    def process_records(batch: Any) -> Any:
        calls.append(len(batch))
        return returns(batch)

    async def process_records_async(batch: Any) -> Any:
        return process_records(batch)

    hook = process_records if hook == "sync" else process_records_async
    outcome = await kit.run(*range(8), schema=schema, process_records=hook)
    assert calls == [8]
    assert (outcome.effects.rows, len(outcome.effects.dead_letters), kit.clock.slept) == (None, 8, [])
    assert {letter.error.partition(":")[0] for letter in outcome.effects.dead_letters} == {"BadRows"}
    with pytest.raises(HandlerHalted):
        await kit.run(*range(8), policy=HALT, schema=schema, process_records=hook)
    skipping = FailurePolicy(on_failure=OnFailure.SKIP)
    assert (await kit.run(*range(8), policy=skipping, schema=schema, process_records=hook)).skipped == 8
    assert calls == [8, 8, 8]


async def test_a_rule_may_have_a_wrong_length_called_again(kit: Any, column: Any) -> None:
    calls = []

    def process_records(batch: Any) -> Any:
        calls.append(len(batch))
        return [] if len(calls) < 3 else [number(record) for record in batch]

    policy = FailurePolicy(attempts=3, failure_rules=(failure_rule("BadRows=retry"),))
    outcome = await kit.run(1, 2, policy=policy, schema=SCHEMA, process_records=process_records)
    assert (calls, column(outcome, "n"), outcome.effects.dead_letters) == ([2, 2, 2], [1, 2], ())


WRONG_TABLES: dict[str, Any] = {
    "a filter": lambda table: pa.table({"n": [1]}),
    "no rows": lambda table: pa.table({"n": pa.array([], pa.int32())}),
    "no table": lambda table: [(1,)],
    "places of no record": lambda table: pa.table({"n": [1], "record": [table.num_rows]}),
    "places that are no numbers": lambda table: pa.table({"n": [1], "record": ["0"]}),
}


@pytest.mark.parametrize("returns", WRONG_TABLES.values(), ids=WRONG_TABLES)
async def test_a_table_whose_rows_are_no_records_fails_the_call_as_a_whole(kit: Any, returns: Any) -> None:
    calls = []

    def process_table(table: Any) -> Any:
        calls.append(table.num_rows)
        return returns(table)

    outcome = await kit.run(*range(8), schema=SCHEMA, process_table=process_table)
    assert (calls, outcome.effects.rows, len(outcome.effects.dead_letters)) == ([8], None, 8)
    assert {letter.error.partition(":")[0] for letter in outcome.effects.dead_letters} == {"TableMismatch"}


async def test_a_generator_may_give_the_items(kit: Any, column: Any) -> None:
    def process_records(batch: Any) -> Any:
        for record in batch:
            yield number(record)

    assert column(await kit.run(1, 2, schema=SCHEMA, process_records=process_records), "n") == [1, 2]


@pytest.mark.parametrize("hook", ["sync", "async"])
async def test_what_nobody_foresaw_is_a_failure_of_the_batch(
    kit: Any, column: Any, hook: Any, monkeypatch: Any, logged: Any
) -> None:
    tries: list[int] = []

    def fail_once(parts: Any, *_: Any, **more: Any) -> Any:
        tries.append(len(parts))
        if len(tries) == 1:
            raise pa.ArrowCapacityError("too much")
        return original(parts, *_, **more)

    def process_records(batch: Any) -> Any:
        return [number(record) for record in batch]

    async def process_records_async(batch: Any) -> Any:
        return process_records(batch)

    original = work.join_rows
    monkeypatch.setattr(work, "join_rows", fail_once)
    outcome = await kit.run(
        1, 2, schema=SCHEMA, process_records=process_records if hook == "sync" else process_records_async
    )
    assert (column(outcome, "n"), outcome.effects.dead_letters) == ([1, 2], ())
    (failed,) = (event for event in logged if event["event"] == "handler.failed")
    assert (failed["what"], failed["attempt"]) == ("ArrowCapacityError: too much", 1)
    assert kit.clock.slept == [failed["delay_seconds"]]


@pytest.mark.parametrize("error", [pa.ArrowCapacityError("too much"), SystemExit("too much")])
async def test_when_it_does_not_end_no_record_of_the_batch_counts(
    kit: Any, monkeypatch: Any, error: Any
) -> None:
    async def process_record(record: Any) -> Any:
        return number(record)

    def fail(parts: Any, *_: Any, **__: Any) -> Effects:
        if parts:
            raise error
        return NOTHING

    monkeypatch.setattr(work, "join_rows", fail)
    outcome = await kit.run(1, 2, schema=SCHEMA, process_record=process_record)
    assert (outcome.effects.rows, kit.dead(outcome), len(kit.clock.slept)) == (None, [1, 2], 2)
    assert {letter.error for letter in outcome.effects.dead_letters} == {f"{type(error).__name__}: too much"}
    with pytest.raises(HandlerHalted, match="too much"):
        await kit.run(1, 2, policy=HALT, schema=SCHEMA, process_record=number)


async def test_a_line_that_the_decoder_fails_on_is_none_of_the_handlers_doing(
    kit: Any, monkeypatch: Any
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("odd")

    monkeypatch.setattr(BatchDecoder, "decode", fail)
    with pytest.raises(InternalError, match="RuntimeError: odd"):
        await kit.run(1, schema=SCHEMA, process_record=number)


DATED = {"schema": "n BIGINT, at TIMESTAMP", "windows": tumbling("1 s", on="at")}


def dated(record: Any) -> Any:
    """A row whose event lies so many milliseconds after the record's arrival, or several such rows."""
    times = [record.json()] if isinstance(record.json(), int) else record.json()
    arrival_ms = 1_000 + record.sequence_number
    return [(ms, datetime.fromtimestamp((arrival_ms + ms) / 1000, UTC)) for ms in times]


def dated_table(table: Any) -> Any:
    rows = [(place, *row) for place, data in enumerate(table["data"]) for row in dated(Told(place, data))]
    record, n, at = zip(*rows, strict=True)
    return pa.table({"record": record, "n": n, "at": at})


class Told:
    """A record of a table."""

    def __init__(self, place: int, data: Any) -> None:
        self.sequence_number, self._data = place + 1, data

    def json(self) -> Any:
        return json.loads(self._data.as_py())


@pytest.mark.parametrize(
    "hook",
    [
        {"process_record": dated},
        {"process_records": lambda batch: [dated(record) for record in batch]},
        {"process_table": dated_table},
    ],
)
async def test_where_a_row_that_runs_too_far_ahead_is_to_fail_its_record_does_and_no_other(
    kit: Any, column: Any, hook: Any
) -> None:
    policy = FailurePolicy(attempts=1, max_ahead_ms=500)
    outcome = await kit.run(-9, 500, [501, 0], 10**12, 7, policy=policy, **DATED, **hook)
    assert column(outcome, "n") == [-9, 500, 7]
    assert kit.dead(outcome) == [3, 4]
    assert [letter.error for letter in outcome.effects.dead_letters] == [
        "BadRow: column at: it lies 0:00:00.501000 after the record's arrival",
        "BadRow: column at: it lies 11574 days, 1:46:40 after the record's arrival",
    ]
    outcome = await kit.run(10**12, policy=policy, **DATED, **hook)
    assert (outcome.effects.rows, kit.dead(outcome)) == (None, [1])
    outcome = await kit.run(10**12, policy=FailurePolicy(attempts=1), **DATED, **hook)
    assert column(outcome, "n") == [10**12], "it is kept"
