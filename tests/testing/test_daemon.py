"""The fake daemon is as strict as the Java: what hangs it, what kills it, what it lets through."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mldserver.testing import DaemonProtocol, Form, Hang, JavaThrow, JvmExit, Place, StreamRecord
from mldserver.testing.daemon import Misuse

TRIM = Place("TRIM_HORIZON")
RECORDS = [StreamRecord("5", b"a", "k", 1), StreamRecord("6", b"b", "k", 2)]


def status(action: str) -> bytes:
    return json.dumps({"action": "status", "responseFor": action}).encode() + b"\n"


def ask(number: str | None = None, sub: int | None = None) -> bytes:
    told = {"action": "checkpoint", "sequenceNumber": number, "subSequenceNumber": sub}
    return json.dumps(told).encode() + b"\n"


def ready(form: Form = Form.KCL3, start: Place = TRIM, **more: Any) -> DaemonProtocol:
    daemon = DaemonProtocol("shard-0", form=form, start=start, **more)
    daemon.initialize()
    daemon.data_to_send()
    daemon.receive_data(status("initialize"))
    return daemon


def busy(form: Form = Form.KCL3, **more: Any) -> DaemonProtocol:
    daemon = ready(form, **more)
    daemon.process_records(RECORDS, 0)
    daemon.data_to_send()
    return daemon


def replies(daemon: DaemonProtocol) -> list[dict[str, Any]]:
    return [json.loads(line) for line in daemon.data_to_send().splitlines()]


def test_a_whole_life_byte_by_byte() -> None:
    daemon = DaemonProtocol("shard-0", form=Form.KCL3, start=Place("4", 1))
    daemon.initialize()
    assert replies(daemon) == [
        {"action": "initialize", "shardId": "shard-0", "sequenceNumber": "4", "subSequenceNumber": 1}
    ]
    for byte in status("initialize"):
        daemon.receive_data(bytes([byte]))
    daemon.process_records(RECORDS, 7)
    assert replies(daemon)[0]["millisBehindLatest"] == 7
    daemon.receive_data(ask("5"))
    assert replies(daemon) == [
        {"action": "checkpoint", "sequenceNumber": "5", "subSequenceNumber": None, "error": None}
    ]
    daemon.receive_data(status("processRecords"))
    daemon.shard_ended()
    daemon.receive_data(ask() + status("shardEnded"))
    assert daemon.finished
    assert daemon.checkpointer.last == Place("SHARD_END")
    daemon.receive_eof()
    assert daemon.violations == []


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b'{"action":"status","responseFor":"processRecords","extra":1}\n', "no property extra"),
        (b'{"action":"status","responsefor":"processRecords"}\n', "no property responsefor"),
        (b'\xef\xbb\xbf{"action":"status","responseFor":"processRecords"}\n', "not JSON"),
        (b'{"action":"checkpoint","checkpoint":"5"}\n', "no property checkpoint"),
        (b"\xff\xfe\n", "not JSON"),
        (b"hello\n", "not JSON"),
    ],
)
def test_an_unreadable_line_hangs_the_daemon_and_it_says_which(line: bytes, why: str) -> None:
    daemon = busy()
    daemon.receive_data(line)
    assert daemon.outstanding == "processRecords"
    assert daemon.hang is not None
    assert why in daemon.hang.reason
    assert daemon.hang.waiting_for == "processRecords"
    assert len(daemon.violations) == 1


def test_the_v2_form_hangs_a_v1_daemon() -> None:
    daemon = busy(Form.V1)
    daemon.receive_data(ask("5"))
    assert daemon.hang is not None
    assert replies(daemon) == []


def test_a_proper_line_ends_a_hang_but_not_the_violation() -> None:
    daemon = busy()
    daemon.receive_data(b"print from a handler\n" + status("processRecords"))
    assert daemon.hang is None
    assert daemon.outstanding is None
    assert len(daemon.violations) == 1


def test_blank_lines_and_line_ends_of_every_kind_are_fine() -> None:
    daemon = busy()
    daemon.receive_data(b"\n\r\n \r")
    daemon.receive_data(status("processRecords").rstrip(b"\n") + b"\r\n")
    assert daemon.outstanding is None
    assert daemon.violations == []


def test_the_second_message_on_a_line_is_lost() -> None:
    daemon = busy()
    daemon.receive_data(ask("6").rstrip(b"\n") + status("processRecords"))
    assert replies(daemon)[0]["error"] is None
    assert daemon.outstanding == "processRecords"
    assert isinstance(daemon.hang, Hang)
    assert "never sees the second" in daemon.violations[0]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"null\n", "literal null"),
        (status("initialize"), "processRecords was awaited"),
        (b'{"action":"status"}\n', "status for None"),
    ],
)
def test_a_wrong_answer_makes_the_jvm_exit(line: bytes, reason: str) -> None:
    daemon = busy()
    with pytest.raises(JvmExit, match=reason) as caught:
        daemon.receive_data(line)
    assert caught.value.line == line.decode().rstrip("\n")
    assert len(daemon.violations) == 1


def test_eof_before_the_ending_was_answered_makes_the_jvm_exit() -> None:
    with pytest.raises(JvmExit, match="waiting for the answer to processRecords"):
        busy().receive_eof()
    with pytest.raises(JvmExit, match="between two requests"):
        ready().receive_eof()


def test_a_surplus_status_acknowledges_the_next_batch_unread() -> None:
    daemon = busy()
    daemon.receive_data(status("processRecords") + b"\n" + status("processRecords"))
    assert "behind the status" in daemon.violations[0]
    daemon.process_records(RECORDS)
    assert daemon.outstanding is None
    assert json.loads(daemon.data_to_send())["action"] == "processRecords"


def test_a_line_between_two_requests_is_taken_for_the_next_answer() -> None:
    daemon = ready()
    daemon.receive_data(b"\n" + status("shardEnded"))
    assert len(daemon.violations) == 1
    with pytest.raises(JvmExit, match="a status for shardEnded"):
        daemon.process_records(RECORDS)


@pytest.mark.parametrize("action", ["initialize", "leaseLost"])
def test_checkpoints_without_a_checkpointer_are_an_invalid_state(action: str) -> None:
    daemon = DaemonProtocol("shard-0", form=Form.KCL3, start=TRIM)
    daemon.initialize()
    if action == "leaseLost":
        daemon.receive_data(status("initialize"))
        daemon.lease_lost()
    daemon.data_to_send()
    daemon.receive_data(ask())
    assert replies(daemon)[0]["error"] == "InvalidStateException"
    daemon.receive_data(status(action))
    assert len(daemon.violations) == 1


def test_an_impossible_checkpoint_is_answered_and_the_life_goes_on() -> None:
    daemon = busy()
    daemon.receive_data(ask("7") + status("processRecords"))
    assert replies(daemon) == [
        {
            "action": "checkpoint",
            "sequenceNumber": "7",
            "subSequenceNumber": None,
            "error": "IllegalArgumentException",
        }
    ]
    assert "IllegalArgumentException" in daemon.violations[0]
    daemon.process_records([], 0)


def test_a_refusing_lease_table_is_no_violation() -> None:
    def store(_place: Place) -> None:
        raise JavaThrow("ShutdownException", "stolen")

    daemon = busy(store=store)
    daemon.receive_data(ask("6"))
    assert replies(daemon)[0]["error"] == "ShutdownException"
    assert daemon.violations == []


@pytest.mark.parametrize("form", list(Form))
def test_a_shard_end_without_its_checkpoint_blocks_the_children(form: Form) -> None:
    daemon = ready(form)
    daemon.shard_ended()
    daemon.receive_data(status("shardEnded" if form is Form.KCL3 else "shutdown"))
    assert daemon.end_blocked
    assert "children are blocked" in daemon.violations[0]


def test_a_shard_end_that_cannot_be_checkpointed_without_the_lease_is_no_violation() -> None:
    def store(_place: Place) -> None:
        raise JavaThrow("ShutdownException", "stolen")

    daemon = ready(store=store)
    daemon.shard_ended()
    daemon.receive_data(ask() + status("shardEnded"))
    assert daemon.finished
    assert not daemon.end_blocked
    assert daemon.violations == []


def test_kcl_1_endings_are_shutdowns_with_a_reason() -> None:
    daemon = busy(Form.V2)
    daemon.receive_data(status("processRecords"))
    daemon.shutdown_requested()
    daemon.receive_data(ask() + status("shutdownRequested"))
    daemon.lease_lost()
    assert replies(daemon)[-1] == {"action": "shutdown", "reason": "ZOMBIE"}
    daemon.receive_data(status("shutdown"))
    assert daemon.finished
    assert daemon.violations == []


def test_v1_checkpoints_in_its_own_form_and_knows_no_shutdown_requested() -> None:
    daemon = busy(Form.V1)
    daemon.receive_data(b'{"action":"checkpoint","checkpoint":"6"}\n')
    assert replies(daemon) == [{"action": "checkpoint", "checkpoint": "6", "error": None}]
    daemon.receive_data(status("processRecords"))
    with pytest.raises(Misuse):
        daemon.shutdown_requested()


def test_the_fake_refuses_what_no_daemon_does() -> None:
    daemon = DaemonProtocol("shard-0", form=Form.KCL3, start=TRIM)
    with pytest.raises(Misuse, match="cannot follow None"):
        daemon.process_records(RECORDS)
    daemon.initialize()
    with pytest.raises(Misuse, match="never pipelines"):
        daemon.lease_lost()
    daemon.receive_data(status("initialize"))
    daemon.lease_lost()
    daemon.receive_data(status("leaseLost"))
    with pytest.raises(Misuse, match="cannot follow leaseLost"):
        daemon.process_records(RECORDS)


def test_every_line_is_shown_to_who_listens() -> None:
    lines: list[tuple[str, str]] = []
    daemon = ready(on_line=lambda direction, text: lines.append((direction, text)))
    daemon.lease_lost()
    assert [direction for direction, _ in lines] == ["in", "out", "in"]
    assert lines[-1] == ("in", '{"action":"leaseLost"}')
