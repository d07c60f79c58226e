"""What becomes of records, inline and in worker processes: every test is played on both kinds of runtime."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio
from runtime.behaviour_kit import (
    BY_BATCH,
    BY_RECORD,
    DAMAGED,
    HALT,
    SKIP,
    Stage,
    column,
    dead,
    on_stage,
    over,
    records_of,
    told,
)

from mldserver.errors import DecodeError, HandlerHalted, ProtocolViolation
from mldserver.protocol.messages import Version
from mldserver.records import Record, Sequence
from mldserver.runtime.interface import Delivery, Records

pytestmark = pytest.mark.asyncio(loop_scope="module")

any_hook = over(*BY_RECORD, *BY_BATCH)
by_record = over(*BY_RECORD)
by_batch = over(*BY_BATCH)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(request: Any) -> AsyncIterator[Stage]:
    async with on_stage(request.param) as stage:
        yield stage


# Rows.


@any_hook
async def test_each_record_becomes_a_row_that_says_where_it_comes_from(stage: Stage) -> None:
    shard = await stage.opened()
    outcome = await shard.process("row", "row")
    assert outcome.effects.rows is not None
    assert [dict(row, _arrival=row["_arrival"].timestamp()) for row in outcome.effects.rows.to_pylist()] == [
        {
            "n": n,
            "told": "row",
            "_time": 1_000 + n,
            "_shard": shard.id,
            "_sequence": str(n),
            "_sub_sequence": 0,
            "_arrival": 1 + n / 1000,
        }
        for n in (1, 2)
    ]
    outline = outcome.outline
    assert (outline.records, outline.duplicates, outline.first, outline.last) == (2, 0, (1, 0), (2, 0))
    assert (outline.latest_arrival_ms, outline.millis_behind_latest) == (1_002, 7)
    assert (outcome.effects.dead_letters, outcome.attempts, outcome.skipped, outcome.discarded) == (
        (),
        1,
        0,
        0,
    )
    assert (outcome.keeps_position, outcome.position, outcome.owes) == (False, None, False)


@any_hook
async def test_duplicates_are_counted_and_never_seen(stage: Stage) -> None:
    shard = await stage.opened()
    outcome = await shard.process("row", "raise ValueError", "row", after=2)
    assert column(outcome, "n") == [3]
    assert (outcome.outline.records, outcome.outline.duplicates, outcome.outline.first) == (3, 2, (1, 0))
    again = await shard.process("row", "raise ValueError", "row", first=1, after=3)
    assert (again.effects.rows, again.outline.duplicates, again.outline.last) == (None, 3, (3, 0))
    assert 2 not in records_of(await shard.calls())


@any_hook
async def test_an_empty_batch_calls_nothing(stage: Stage) -> None:
    shard = await stage.opened()
    outcome = await shard.process()
    assert (outcome.effects.rows, outcome.outline.records, outcome.attempts) == (None, 0, 1)
    assert (outcome.outline.first, outcome.outline.last, outcome.outline.latest_arrival_ms) == (None,) * 3


@any_hook
async def test_a_record_gives_one_row_or_none_or_several_and_they_stand_in_shard_order(stage: Stage) -> None:
    shard = await stage.opened()
    outcome = await shard.process("rows", "nothing", "row", "rows")
    assert column(outcome, "_sequence") == ["1", "1", "3", "4", "4"]
    assert column(outcome, "told") == ["first", "second", "row", "first", "second"]
    assert (await shard.process("nothing", "nothing")).effects.rows is None


@any_hook
async def test_rows_of_records_that_were_called_again_stand_in_shard_order_too(stage: Stage) -> None:
    shard = await stage.opened()
    outcome = await shard.process("rows", "wrong", "row", "fails 1", "rows")
    assert column(outcome, "_sequence") == ["1", "1", "3", "4", "5", "5"]
    assert dead(outcome) == [2]


@any_hook
async def test_the_time_of_receipt_stands_in_where_the_daemon_tells_no_arrival(stage: Stage) -> None:
    shard = await stage.opened()
    record = {**shard.record(1, "row", "k"), "approximateArrivalTimestamp": None}
    line = json.dumps({"action": "processRecords", "records": [record]}).encode()
    outcome = await shard.line(line, version=Version.V1)
    assert (column(outcome, "_time"), column(outcome, "_arrival")) == ([9_000], [None])
    assert (outcome.outline.latest_arrival_ms, outcome.outline.millis_behind_latest) == (9_000, None)


@any_hook
@pytest.mark.parametrize("count", [3, 300], ids=["inside the message", "in shared memory"])
async def test_records_that_need_no_decoding_end_as_those_of_a_line_do(stage: Stage, count: int) -> None:
    shard = await stage.opened()
    payloads = ["row", "raise Fatal", *["row"] * (count - 2)]
    line = await shard.process(*payloads, after=1)
    records = [
        Record(
            shard_id=shard.id,
            sequence_number=str(number),
            data=json.dumps(payload).encode(),
            partition_key=f"key-{number}",
            arrival_ms=1_000 + number % 1_000,
        )
        for number, payload in enumerate(payloads, 1)
    ]
    await shard.open()
    handed = await stage.runtime.process(Delivery(shard.id, Records(records, 7), 9_000, Sequence(1)))
    assert handed.effects.rows is not None
    assert handed.effects.rows.equals(line.effects.rows)
    assert handed.outline == line.outline
    assert [replace(each, at_ms=0) for each in handed.effects.dead_letters] == [
        replace(each, at_ms=0) for each in line.effects.dead_letters
    ]


@by_record
async def test_handed_records_keep_what_a_line_s_would(stage: Stage) -> None:
    shard = await stage.opened()
    records = [
        Record(shard_id=shard.id, sequence_number="1", sub_sequence_number=2, data=b'"row"'),
        Record(shard_id=shard.id, sequence_number="9", data="%%%", arrival_ms=5),
    ]
    outcome = await stage.runtime.process(Delivery(shard.id, Records(records), 9_000, None))
    assert (column(outcome, "_sub_sequence"), column(outcome, "_arrival")) == ([2], [None])
    assert outcome.outline.millis_behind_latest is None
    (letter,) = outcome.effects.dead_letters
    assert (letter.sequence, letter.data, letter.partition_key) == (Sequence(9), b"%%%", None)


@any_hook
async def test_sequences_keep_all_of_their_digits(stage: Stage) -> None:
    shard = await stage.opened()
    number = 49_590_338_271_490_256_608_559_692_538_361_571_095_921_575_989_136_588_898
    outcome = await shard.process("nothing", "raise Fatal", "nothing", first=number, after=number)
    assert outcome.outline.last == Sequence(number + 2)
    assert (outcome.outline.duplicates, dead(outcome)) == (1, [number + 1])


@over("shared")
async def test_a_module_is_one_handler_for_all_shards(stage: Stage) -> None:
    one, two = await stage.opened(), await stage.opened()
    await one.process("")
    (seen,) = column(await two.process(""), "seen")
    assert seen.endswith(f"opened {one.id} opened {two.id} {one.id} {two.id}")


@over("Effects")
async def test_a_handler_without_a_schema_has_side_effects_only(stage: Stage) -> None:
    shard = await stage.opened()
    outcome = await shard.process("nothing", "row")
    assert outcome.effects.rows is None
    (letter,) = outcome.effects.dead_letters
    assert letter.error == "BadRow: returned (2, 'row'), but the handler declares no schema"


# Failures.


@by_record
async def test_a_record_that_fails_for_a_while_is_tried_again_in_its_place(
    stage: Stage, logged: list[dict[str, Any]]
) -> None:
    shard = await stage.opened()
    outcome = await shard.process("row", "fails 2", "row")
    assert (column(outcome, "n"), outcome.effects.dead_letters, outcome.attempts) == ([1, 2, 3], (), 3)
    assert told(logged, shard, "sequence", "attempt", "level", "what") == [
        ("failed", "2", 1, "warning", "ConnectionError: away"),
        ("failed", "2", 2, "debug", "ConnectionError: away"),
    ]
    assert await shard.calls() == ["initialize TRIM_HORIZON", 1, 2, 2, 2, 3]


@by_batch
async def test_a_batch_that_fails_for_a_while_is_tried_again(
    stage: Stage, logged: list[dict[str, Any]]
) -> None:
    shard = await stage.opened()
    outcome = await shard.process("fails 2", "row")
    assert (column(outcome, "n"), outcome.effects.dead_letters, outcome.attempts) == ([1, 2], (), 3)
    assert told(logged, shard, "attempt", "what") == [
        ("failed", 1, "ConnectionError: away"),
        ("failed", 2, "ConnectionError: away"),
    ]
    assert await shard.calls() == ["initialize TRIM_HORIZON", [1, 2], [1, 2], [1, 2]]


@any_hook
async def test_a_record_that_keeps_failing_is_a_dead_letter_with_all_that_is_needed_to_look_at_it(
    stage: Stage, logged: list[dict[str, Any]]
) -> None:
    shard = await stage.opened()
    outcome = await shard.process("raise ConnectionError")
    (letter,) = outcome.effects.dead_letters
    assert (letter.shard_id, letter.sequence, letter.partition_key) == (shard.id, (1, 0), "key-1")
    assert (letter.data, letter.arrival_ms, letter.attempts) == (b'"raise ConnectionError"', 1_001, 3)
    assert letter.error == "ConnectionError: no good"
    assert "obedient.py" in letter.traceback
    assert "in obey" in letter.traceback
    assert "/work.py" not in letter.traceback, "the server's own frames are nobody's concern"
    assert letter.handler == f"runtime.behaviour_handlers.{stage.cast.handler}"
    assert (letter.handler_version, letter.parked_behind) == ("7", None)
    assert letter.at_ms > 1_700_000_000_000
    assert outcome.attempts == 3
    assert told(logged, shard, "level") == [
        ("failed", "warning"),
        ("failed", "debug"),
        ("dead_letter", "error"),
    ]


@any_hook
async def test_an_error_that_repeats_by_its_nature_is_not_tried_again(
    stage: Stage, logged: list[dict[str, Any]]
) -> None:
    shard = await stage.opened()
    outcome = await shard.process(*["raise ValueError"] * 3)
    assert dead(outcome) == [1, 2, 3]
    assert len(records_of(await shard.calls())) <= 1 + 3 + 3 + 3
    letters = [event for event in told(logged, shard, "level", "sequence") if event[0] == "dead_letter"]
    assert letters == [
        ("dead_letter", "error", "1"),
        ("dead_letter", "debug", "2"),
        ("dead_letter", "debug", "3"),
    ]


@any_hook
async def test_the_records_around_a_dead_letter_keep_their_rows(stage: Stage) -> None:
    shard = await stage.opened()
    outcome = await shard.process("row", "raise ValueError", "row", b"{", "row")
    assert (column(outcome, "n"), dead(outcome)) == ([1, 3, 5], [2, 4])
    assert "JSONDecodeError" in outcome.effects.dead_letters[1].error


@by_batch
async def test_one_bad_record_among_many_is_found_in_few_calls_and_the_others_are_done_once(
    stage: Stage,
) -> None:
    shard = await stage.opened()
    payloads = ["row"] * 1_000
    payloads[776] = "raise ValueError"
    outcome = await shard.process(*payloads)
    assert dead(outcome) == [777]
    others = [number for number in range(1, 1_001) if number != 777]
    assert column(outcome, "n") == others
    calls = (await shard.calls())[1:]
    assert len(calls) <= 3 + 10 + 1 + 1
    assert sorted(number for call in calls if 777 not in call for number in call) == others


@by_record
async def test_a_row_that_does_not_fit_is_a_dead_letter_with_its_column_named(stage: Stage) -> None:
    shard = await stage.opened()
    outcome = await shard.process("row", "wrong", "row")
    (letter,) = outcome.effects.dead_letters
    assert column(outcome, "n") == [1, 3]
    assert (letter.sequence, letter.attempts, letter.traceback) == ((2, 0), 3, "")
    assert letter.error == "BadRow: column n: 'x' is not BIGINT"


@by_batch
async def test_only_the_records_of_rows_that_do_not_fit_are_called_again(stage: Stage) -> None:
    shard = await stage.opened()
    outcome = await shard.process("row", "wrong", "row")
    assert (column(outcome, "n"), dead(outcome)) == ([1, 3], [2])
    assert outcome.effects.dead_letters[0].error == "BadRow: column n: 'x' is not BIGINT"
    assert await shard.calls() == ["initialize TRIM_HORIZON", [1, 2, 3], [2], [2]]


@any_hook
async def test_damaged_base64_is_a_dead_letter_that_keeps_what_came(stage: Stage) -> None:
    shard = await stage.opened()
    outcome = await shard.process("row", DAMAGED, "row")
    (letter,) = outcome.effects.dead_letters
    assert (column(outcome, "n"), letter.sequence, letter.data) == ([1, 3], (2, 0), b"%%%")
    assert letter.error.startswith("ValueError: record 2: data is not base64")


@any_hook
@pytest.mark.parametrize(
    ("line", "error"),
    [
        (b"{", DecodeError),
        (b"[1]", DecodeError),
        (b'{"action":"processRecords","records":[{"sequenceNumber":5}]}', DecodeError),
        (
            b'{"action":"processRecords","records":[{"sequenceNumber":"2","data":""},{"sequenceNumber":"1","data":""}]}',
            ProtocolViolation,
        ),
    ],
    ids=["no JSON", "no message", "no sequence", "down"],
)
async def test_a_line_that_is_no_batch_is_raised_and_the_handler_not_called(
    stage: Stage, line: bytes, error: type[Exception]
) -> None:
    shard = await stage.opened()
    with pytest.raises(error) as caught:
        await shard.line(line)
    assert type(caught.value) is error
    assert await shard.calls() == ["initialize TRIM_HORIZON"]


@any_hook
@pytest.mark.parametrize(
    "error", ["SystemExit", "StopIteration", "GeneratorExit", "CancelledError", "KeyboardInterrupt"]
)
async def test_what_would_end_the_server_is_a_failure_like_any_other(stage: Stage, error: str) -> None:
    shard = await stage.opened()
    outcome = await shard.process("row", f"raise {error}", "row")
    assert (column(outcome, "n"), dead(outcome)) == ([1, 3], [2])
    assert error in outcome.effects.dead_letters[0].error


@any_hook
async def test_an_error_may_say_what_no_text_can_hold(stage: Stage) -> None:
    shard = await stage.opened()
    (letter,) = (await shard.process("mumbles", "row")).effects.dead_letters
    assert letter.error.encode(errors="backslashreplace") == rb"ValueError: \udc80 is no text"


# What handlers say about their own failures.


@any_hook
async def test_a_handler_may_say_when_it_is_to_be_called_again(
    stage: Stage, logged: list[dict[str, Any]]
) -> None:
    shard = await stage.opened()
    outcome = await shard.process("retry 0.002", "row")
    assert (column(outcome, "n"), outcome.attempts) == ([1, 2], 2)
    assert told(logged, shard, "what", "delay_seconds") == [("failed", "Retry: busy", 0.002)]


@any_hook
async def test_a_discarded_record_leaves_no_row_and_no_letter_and_is_counted(
    stage: Stage, logged: list[dict[str, Any]]
) -> None:
    shard = await stage.opened()
    outcome = await shard.process("row", "raise Discard", "row")
    assert (column(outcome, "n"), outcome.effects.dead_letters, outcome.discarded) == ([1, 3], (), 1)
    assert told(logged, shard, "sequence", "what")[-1] == ("discarded", "2", "Discard: no good")


@by_record
async def test_a_fatal_record_has_no_more_attempts(stage: Stage) -> None:
    shard = await stage.opened()
    outcome = await shard.process("row", "raise Fatal", "row")
    (letter,) = outcome.effects.dead_letters
    assert (column(outcome, "n"), letter.error, letter.attempts) == ([1, 3], "Fatal: no good", 1)
    assert await shard.calls() == ["initialize TRIM_HORIZON", 1, 2, 3]


@by_batch
async def test_only_the_records_that_a_batch_names_are_called_again(stage: Stage) -> None:
    shard = await stage.opened()
    outcome = await shard.process("row", "odd 2", "row", "odd 1")
    assert (column(outcome, "n"), outcome.effects.dead_letters, outcome.attempts) == ([1, 2, 3, 4], (), 3)
    assert await shard.calls() == ["initialize TRIM_HORIZON", [1, 2, 3, 4], [2, 4], [2]]


@by_batch
async def test_records_that_a_batch_keeps_naming_are_dead_letters(stage: Stage) -> None:
    shard = await stage.opened()
    outcome = await shard.process("row", "odd 9", "row")
    (letter,) = outcome.effects.dead_letters
    assert (column(outcome, "n"), letter.sequence) == ([1, 3], (2, 0))
    assert (letter.error, letter.attempts, letter.traceback) == ("Failed: it is odd", 3, "")


# What the policy says.


@any_hook
async def test_a_rule_for_the_error_says_how_a_record_ends(
    stage: Stage, logged: list[dict[str, Any]]
) -> None:
    shard = await stage.opened()
    outcome = await shard.process("row", "raise LookupError", "row")
    assert (column(outcome, "n"), outcome.effects.dead_letters, outcome.skipped) == ([1, 3], (), 1)
    with pytest.raises(HandlerHalted, match="ZeroDivisionError: no good"):
        await shard.process("raise ZeroDivisionError")
    assert [event for event in told(logged, shard, "level") if event[0] != "failed"] == [
        ("skipped", "warning"),
        ("halted", "critical"),
    ]


@over("ByRecord", "ByBatchAsync", policy=SKIP)
async def test_under_skip_nothing_is_kept_of_a_record_that_failed_for_good(
    stage: Stage, logged: list[dict[str, Any]]
) -> None:
    shard = await stage.opened()
    outcome = await shard.process("row", "raise ValueError", "wrong", "row")
    assert (column(outcome, "n"), outcome.effects.dead_letters, outcome.skipped) == ([1, 4], (), 2)
    skipped = [event for event in told(logged, shard, "sequence", "level") if event[0] == "skipped"]
    assert skipped == [("skipped", "2", "warning"), ("skipped", "3", "warning")]


@over(*BY_RECORD, policy=HALT)
async def test_under_halt_the_first_record_that_fails_for_good_stops_the_shard(
    stage: Stage, logged: list[dict[str, Any]]
) -> None:
    shard = await stage.opened()
    with pytest.raises(
        HandlerHalted, match="process_record failed for good: ConnectionError: no good"
    ) as caught:
        await shard.process("row", "raise ConnectionError", "row")
    where = caught.value.where
    assert "obedient.py" in where.pop("traceback")
    assert where == {
        "shard": shard.id,
        "handler": f"runtime.behaviour_handlers.{stage.cast.handler}",
        "hook": "process_record",
        "sequence": "2",
        "attempts": 2,
    }
    assert told(logged, shard, "level") == [("failed", "warning"), ("halted", "critical")]
    assert await shard.calls() == ["initialize TRIM_HORIZON", 1, 2, 2], "the shard can be used all the same"


@over("ByBatch", "ByTableAsync", policy=HALT)
async def test_under_halt_a_failing_batch_is_not_searched(stage: Stage) -> None:
    shard = await stage.opened()
    with pytest.raises(HandlerHalted, match="ConnectionError: no good"):
        await shard.process("row", "raise ConnectionError", "row")
    assert await shard.calls() == ["initialize TRIM_HORIZON", [1, 2, 3], [1, 2, 3]]
