import json

import pytest

from mldserver.testing import Form, Place, StreamRecord
from mldserver.testing import daemon as java_wire
from mldserver.testing.daemon import AskCheckpoint, Ignored, NullMessage, Said, Unreadable, read_reply

PLAIN = StreamRecord("12", "é".encode(), "schlüssel", 99)
NULLS = StreamRecord("13", None, None, 100)
AGGREGATED = StreamRecord("14", b"x", "k", 101, 3, aggregated=True)


def test_v1_sends_bare_records_and_no_lag() -> None:
    assert (
        java_wire.initialize_line(Form.V1, "s", Place("TRIM_HORIZON"))
        == b'{"action":"initialize","shardId":"s"}\n'
    )
    assert java_wire.process_records_line(Form.V1, [PLAIN], 0).decode() == (
        '{"action":"processRecords","records":[{"data":"w6k=","partitionKey":"schlüssel","sequenceNumber":"12"}]}\n'
    )
    assert java_wire.checkpoint_reply(Form.V1, "12", None, None) == (
        b'{"action":"checkpoint","checkpoint":"12","error":null}\n'
    )


def test_kcl_1_numbers_only_aggregated_records() -> None:
    records = json.loads(java_wire.process_records_line(Form.V2, [PLAIN, NULLS, AGGREGATED], None))["records"]
    assert [record["subSequenceNumber"] for record in records] == [None, None, 3]
    assert [record["data"] for record in records] == ["w6k=", None, "eA=="]


def test_kcl_3_writes_action_first_in_messages_and_last_in_records() -> None:
    assert java_wire.process_records_line(Form.KCL3, [NULLS], 5) == (
        b'{"action":"processRecords","records":[{"data":null,"partitionKey":null,"sequenceNumber":"13",'
        b'"approximateArrivalTimestamp":100,"subSequenceNumber":0,"action":"record"}],"millisBehindLatest":5}\n'
    )
    assert java_wire.ending_line("leaseLost") == b'{"action":"leaseLost"}\n'
    assert java_wire.ending_line("shutdown", "ZOMBIE") == b'{"action":"shutdown","reason":"ZOMBIE"}\n'


@pytest.mark.parametrize("form", list(Form))
def test_a_status_reads_the_same_in_every_form(form: Form) -> None:
    assert read_reply(form, '{"responseFor": "x", "action": "status"}') == Said("x")
    assert read_reply(form, '{"action":"status"}') == Said(None)
    assert read_reply(form, '{"action":"status","responseFor":7}') == Said(None)


def test_a_checkpoint_may_leave_keys_out() -> None:
    assert read_reply(Form.KCL3, '{"action":"checkpoint"}') == AskCheckpoint(None, None)
    assert read_reply(Form.V2, '{"action":"checkpoint","sequenceNumber":"1","subSequenceNumber":2}') == (
        AskCheckpoint("1", 2)
    )
    assert read_reply(Form.V1, '{"action":"checkpoint","checkpoint":"1"}') == AskCheckpoint("1", None)


def test_what_follows_a_message_on_its_line_is_lost() -> None:
    assert read_reply(Form.KCL3, '{"action":"status","responseFor":"x"}{"more":1}') == Said("x", '{"more":1}')


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
