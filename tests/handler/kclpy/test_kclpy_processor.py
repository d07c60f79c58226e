"""What a processor of each version is called with, and what its records look like."""

from __future__ import annotations

import base64
import json
from datetime import datetime
from typing import Any

import pytest

from mldserver.handler.kclpy.amazon_kclpy import CheckpointError, DictRecord
from mldserver.handler.kclpy.processor import Processor, ProcessorClass
from mldserver.records import Batch, Record, Sequence, Shard

pytestmark = pytest.mark.quick

SHARD = Shard("shardId-000000000007", "41", start_sub=2)
FIELDS = {
    "data": "AAEC",
    "partitionKey": "key",
    "sequenceNumber": "42",
    "subSequenceNumber": 3,
    "approximateArrivalTimestamp": 1_500,
    "action": "record",
}


class Spy:
    """Takes every call down, whatever its name and arguments."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self.calls.append((name, *arguments))


def record(number: int = 42, **more: Any) -> Record:
    values: dict[str, Any] = {"data": "AAEC", "partition_key": "key", "arrival_ms": 1_500} | more
    return Record(shard_id=SHARD.id, sequence_number=str(number), **values)


def batch(*numbers: int, **more: Any) -> Batch:
    return Batch([record(number, **more) for number in numbers], shard_id=SHARD.id, millis_behind_latest=9)


def made(version: int) -> tuple[Processor, Spy]:
    spy = Spy()
    processor = Processor(spy, version, CheckpointError)
    processor.initialize(SHARD)
    return processor, spy


def test_version_1_gets_plain_arguments_and_dicts() -> None:
    processor, spy = made(1)
    processor.process_records(batch(42, sub_sequence_number=3))
    processor.shutdown_requested(SHARD)
    processor.shard_ended(SHARD)
    (_, shard_id), (_, records, checkpointer), requested, ended = spy.calls
    assert shard_id == SHARD.id
    assert [json.loads(json.dumps(each)) for each in records] == [FIELDS]
    assert records[0].get("no such field") is None
    assert records[0].binary_data == bytes([0, 1, 2])
    checkpointer.checkpoint("42", 3)
    assert processor.progress.position == Sequence(42, 3)
    assert requested == ("shutdown_requested", checkpointer)
    assert ended == ("shutdown", checkpointer, "TERMINATE")


@pytest.mark.parametrize("version", [2, 3])
def test_later_versions_get_one_object_for_each_call(version: int) -> None:
    processor, spy = made(version)
    processor.process_records(batch(42, sub_sequence_number=3))
    processor.shutdown_requested(SHARD)
    (_, initialize), (_, process), (_, requested) = spy.calls
    assert (initialize.shard_id, initialize.sequence_number, initialize.sub_sequence_number) == (
        SHARD.id,
        "41",
        2,
    )
    assert [each.action for _, each in spy.calls] == ["initialize", "processRecords", "shutdownRequested"]
    assert process.millis_behind_latest == 9
    (each,) = process.records
    assert {name: each.get(name) for name in FIELDS} == FIELDS
    assert each["partitionKey"] == "key"
    with pytest.raises(KeyError):
        each.get("no such field")
    assert (each.sequence_number, each.sub_sequence_number, each.partition_key) == ("42", 3, "key")
    assert (each.binary_data, each.data) == (bytes([0, 1, 2]), "AAEC")
    assert each.timestamp_millis == 1_500
    assert each.approximate_arrival_timestamp == datetime.fromtimestamp(1.5)  # noqa: DTZ006  # as amazon_kclpy has it
    requested.checkpointer.checkpoint()
    assert processor.progress.position == Sequence(42, 3)


def test_data_is_base64_again_after_it_was_read_and_null_stays_null() -> None:
    processor, spy = made(2)
    processor.process_records(
        Batch([record(1), record(2, data=None, arrival_ms=None), record(3, data=b"plain")], shard_id=SHARD.id)
    )
    first, empty, plain = spy.calls[-1][1].records
    assert first.binary_data == bytes([0, 1, 2])
    assert first.data == "AAEC"
    assert (empty.data, empty.binary_data, empty.approximate_arrival_timestamp) == (None, b"", None)
    assert base64.b64decode(plain.data) == plain.binary_data == b"plain"


def test_version_2_has_one_end_with_a_reason() -> None:
    processor, spy = made(2)
    processor.process_records(batch(1))
    processor.shard_ended(SHARD)
    _, ended = spy.calls[-1]
    assert (spy.calls[-1][0], ended.reason, ended.action) == ("shutdown", "TERMINATE", "shutdown")
    ended.checkpointer.checkpoint()
    assert processor.progress.end_checkpointed


def test_version_3_has_an_end_for_each_reason() -> None:
    processor, spy = made(3)
    processor.process_records(batch(1))
    processor.shard_ended(SHARD)
    processor.lease_lost(SHARD)
    (name, ended), (lost_name, lost) = spy.calls[-2:]
    assert (name, ended.action, lost_name, lost.action) == (
        "shard_ended",
        "shardEnded",
        "lease_lost",
        "leaseLost",
    )
    assert not hasattr(lost, "checkpointer")


@pytest.mark.parametrize("version", [1, 2])
def test_a_lost_lease_is_a_zombies_end_in_which_nothing_can_be_checkpointed(version: int) -> None:
    processor, spy = made(version)
    processor.process_records(batch(1))
    processor.lease_lost(SHARD)
    name, *told = spy.calls[-1]
    checkpointer, reason = told if version == 1 else (told[0].checkpointer, told[0].reason)
    assert (name, reason) == ("shutdown", "ZOMBIE")
    with pytest.raises(CheckpointError) as refusal:
        checkpointer.checkpoint()
    assert refusal.value.value == "ShutdownException"


def test_a_call_that_is_made_again_leaves_out_what_was_checkpointed_before_it_failed() -> None:
    processor, spy = made(3)
    processor.process_records(batch(42, 43, 44))
    spy.calls[-1][1].checkpointer.checkpoint("43")
    processor.process_records(batch(42, 43, 44))
    assert [each.sequence_number for each in spy.calls[-1][1].records] == ["44"]
    calls = len(spy.calls)
    processor.process_records(batch(42, 43))
    assert len(spy.calls) == calls


def test_a_processor_is_made_for_each_shard_and_called_without_records_when_there_are_none() -> None:
    factory = ProcessorClass(Spy, 1, CheckpointError)
    assert factory()._delegate is not factory()._delegate
    processor, spy = made(1)
    processor.process_records(batch())
    assert spy.calls[-1][1] == []


def test_a_record_of_version_1_can_be_copied_as_the_dict_that_it_is() -> None:
    assert dict(DictRecord(record(sub_sequence_number=3))) == FIELDS
