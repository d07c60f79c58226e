import json
from collections.abc import Sequence

import pytest

from mldserver.testing import DaemonProtocol, Form, Place, StreamRecord
from mldserver.testing.daemon import (
    AskCheckpoint,
    Ignored,
    NullMessage,
    StatusReply,
    Unreadable,
    checkpoint_reply,
    read_reply,
)

PLAIN = StreamRecord("12", "é".encode(), "schlüssel", 99)
NULLS = StreamRecord("13", None, None, 100)
AGGREGATED = StreamRecord("14", b"x", "k", 101, 3, aggregated=True)


def begun(form: Form) -> tuple[DaemonProtocol, bytes]:
    """Return a shard whose ``initialize`` was answered, and what that was."""
    shard = DaemonProtocol("s", form=form, start=Place("TRIM_HORIZON"))
    shard.initialize()
    line = shard.data_to_send()
    shard.receive_data(b'{"action":"status","responseFor":"initialize"}\n')
    return shard, line


def batch(form: Form, records: Sequence[StreamRecord], millis_behind: int | None) -> bytes:
    shard, _ = begun(form)
    shard.process_records(records, millis_behind)
    return shard.data_to_send()


def lease_lost(form: Form) -> bytes:
    shard, _ = begun(form)
    shard.lease_lost()
    return shard.data_to_send()


def test_v1_sends_bare_records_and_no_lag() -> None:
    assert begun(Form.V1)[1] == b'{"action":"initialize","shardId":"s"}\n'
    assert batch(Form.V1, [PLAIN], 0).decode() == (
        '{"action":"processRecords","records":[{"data":"w6k=","partitionKey":"schlüssel","sequenceNumber":"12"}]}\n'
    )
    assert checkpoint_reply(Form.V1, "12", None, None) == (
        b'{"action":"checkpoint","checkpoint":"12","error":null}\n'
    )


def test_kcl_1_numbers_only_aggregated_records() -> None:
    records = json.loads(batch(Form.V2, [PLAIN, NULLS, AGGREGATED], None))["records"]
    assert [record["subSequenceNumber"] for record in records] == [None, None, 3]
    assert [record["data"] for record in records] == ["w6k=", None, "eA=="]


def test_kcl_3_writes_action_first_in_messages_and_last_in_records() -> None:
    assert begun(Form.KCL3)[1] == (
        b'{"action":"initialize","shardId":"s","sequenceNumber":"TRIM_HORIZON","subSequenceNumber":0}\n'
    )
    assert batch(Form.KCL3, [NULLS], 5) == (
        b'{"action":"processRecords","records":[{"data":null,"partitionKey":null,"sequenceNumber":"13",'
        b'"approximateArrivalTimestamp":100,"subSequenceNumber":0,"action":"record"}],"millisBehindLatest":5}\n'
    )
    assert lease_lost(Form.KCL3) == b'{"action":"leaseLost"}\n'
    assert lease_lost(Form.V2) == b'{"action":"shutdown","reason":"ZOMBIE"}\n'


@pytest.mark.parametrize("form", list(Form))
def test_a_status_reads_the_same_in_every_form(form: Form) -> None:
    assert read_reply(form, '{"responseFor": "x", "action": "status"}') == StatusReply("x")
    assert read_reply(form, '{"action":"status"}') == StatusReply(None)
    assert read_reply(form, '{"action":"status","responseFor":7}') == StatusReply(None)


def test_a_checkpoint_may_leave_keys_out() -> None:
    assert read_reply(Form.KCL3, '{"action":"checkpoint"}') == AskCheckpoint(None, None)
    assert read_reply(Form.V2, '{"action":"checkpoint","sequenceNumber":"1","subSequenceNumber":2}') == (
        AskCheckpoint("1", 2)
    )
    assert read_reply(Form.V1, '{"action":"checkpoint","checkpoint":"1"}') == AskCheckpoint("1", None)


def test_what_follows_a_message_on_its_line_is_lost() -> None:
    assert read_reply(Form.KCL3, '{"action":"status","responseFor":"x"}{"more":1}') == StatusReply(
        "x", '{"more":1}'
    )


@pytest.mark.parametrize("line", ["", "  ", "\r", "\t"])
def test_blank_lines_are_ignored(line: str) -> None:
    assert read_reply(Form.KCL3, line) == Ignored()


def test_a_literal_null_is_a_message_of_its_own() -> None:
    assert read_reply(Form.KCL3, " null ") == NullMessage()


@pytest.mark.parametrize(
    ("form", "line"),
    [
        (Form.KCL3, '{"action":"status","responseFor":"x","extra":1}'),
        (Form.KCL3, '{"action":"status","ResponseFor":"x"}'),
        (Form.KCL3, '{"Action":"status","responseFor":"x"}'),
        (Form.KCL3, '\ufeff{"action":"status","responseFor":"x"}'),
        (Form.KCL3, '{"action":"checkpoint","checkpoint":"1"}'),
        (Form.V1, '{"action":"checkpoint","sequenceNumber":"1","subSequenceNumber":0}'),
        (Form.KCL3, '{"action":"checkpoint","sequenceNumber":1}'),
        (Form.KCL3, '{"action":"checkpoint","sequenceNumber":"1","subSequenceNumber":true}'),
        (Form.KCL3, '{"action":"processRecords"}'),
        (Form.KCL3, '{"action":["status"]}'),
        (Form.KCL3, "[]"),
        (Form.KCL3, '"status"'),
        (Form.KCL3, "NaN"),
        (Form.KCL3, "Traceback (most recent call last):"),
        (Form.KCL3, "[" * 100_000),
    ],
)
def test_what_jackson_refuses_is_unreadable(form: Form, line: str) -> None:
    assert isinstance(read_reply(form, line), Unreadable)
