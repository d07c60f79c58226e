"""The connection, fed with bytes and commands, compared by lists of what comes out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mldserver.errors import (
    DecodeError,
    FramingError,
    HandlerHalted,
    InternalError,
    PeerError,
    PeerTimeout,
    ProtocolViolation,
)
from mldserver.protocol import events as ev
from mldserver.protocol.connection import MLDConnection
from mldserver.protocol.events import CloseReason, ConnectionTimer
from mldserver.protocol.messages import Initialize, LeaseLost, ProcessRecords, Shutdown, Version
from mldserver.protocol.states import State
from mldserver.records import Sequence
from tests.protocol.wire import (
    BATCH,
    ENDED,
    LIMITS,
    LOST,
    REQUESTED,
    STOP,
    TERMINATE,
    V1,
    V2,
    ZOMBIE,
    Wire,
    asked,
    line,
    reply,
    status,
)

pytestmark = [pytest.mark.quick, pytest.mark.core]

# Initialize.


def test_a_new_connection_waits_for_initialize_for_a_limited_time() -> None:
    connection = MLDConnection(LIMITS, random=lambda: 1.0)
    assert connection.events_received() == [ev.StartTimer(ConnectionTimer.INITIALIZE, 60)]
    assert connection.data_to_send() == []


def test_initialize_is_delivered_and_answered() -> None:
    wire = Wire()
    assert wire.says(V2) == [
        ev.CancelTimer(ConnectionTimer.INITIALIZE),
        ev.Request(Initialize("s", Version.V2, "TRIM_HORIZON", 0)),
    ]
    wire.connection.answer()
    assert (wire.sent(), wire.state) == (status("initialize"), State.IDLE)


def test_no_initialize_in_time_is_the_peers_error() -> None:
    wire = Wire()
    wire.connection.timer_fired(ConnectionTimer.INITIALIZE)
    wire.fails_with(PeerTimeout)


def test_a_time_out_that_was_cancelled_meanwhile_is_ignored() -> None:
    wire = Wire(V2)
    wire.connection.timer_fired(ConnectionTimer.INITIALIZE)
    assert (wire.happened(), wire.state) == ([], State.IDLE)


def test_a_checkpoint_during_initialize_is_our_error_since_the_daemon_refuses_it() -> None:
    wire = Wire()
    wire.says(V2)
    with pytest.raises(InternalError):
        wire.connection.checkpoint(Sequence(5))
    assert (wire.state, wire.sent()) == (State.INITIALIZING, b"")


# Batches and checkpoints.


def test_a_batch_is_delivered_undecoded_and_answered_once() -> None:
    wire = Wire(V2)
    assert wire.says(BATCH) == [ev.Request(ProcessRecords(line(BATCH)[:-1]))]
    wire.connection.answer()
    assert wire.sent() == status("processRecords")
    with pytest.raises(InternalError, match="answer is not possible in state idle"):
        wire.connection.answer()
    assert (wire.state, wire.sent()) == (State.IDLE, b"")


def test_state_changes_are_told_for_the_log() -> None:
    wire = Wire(V2)
    wire.connection.receive_data(line(BATCH))
    changed = wire.connection.events_received()[0]
    assert isinstance(changed, ev.StateChanged)
    assert (changed.from_state, changed.to_state, changed.on) == ("idle", "processing", "process_records")


def test_a_checkpoint_is_asked_for_in_the_form_of_v2() -> None:
    wire = Wire(V2)
    wire.says(BATCH)
    wire.connection.checkpoint(Sequence(5, 2))
    assert wire.sent() == asked("5", 2)
    assert wire.says(reply()) == [ev.CheckpointStored(Sequence(5, 2), attempts=1)]
    wire.connection.answer()
    assert wire.sent() == status("processRecords")


def test_a_checkpoint_is_asked_for_in_the_form_of_v1_when_initialize_had_no_sequence() -> None:
    wire = Wire(V1)
    wire.says(BATCH)
    wire.connection.checkpoint(Sequence(5, 2))
    assert wire.sent() == b'{"action":"checkpoint","checkpoint":"5"}\n'
    assert wire.says({"action": "checkpoint", "checkpoint": "5", "error": None}) == [
        ev.CheckpointStored(Sequence(5, 2), attempts=1)
    ]


def test_several_checkpoints_may_follow_one_another_but_one_is_outstanding() -> None:
    wire = Wire(V2)
    wire.says(BATCH)
    wire.connection.checkpoint(Sequence(5))
    for illegal in (lambda: wire.connection.checkpoint(Sequence(6)), wire.connection.answer):
        with pytest.raises(InternalError):
            illegal()
    assert wire.sent() == asked("5")
    wire.says(reply())
    wire.connection.checkpoint(None)
    assert wire.sent() == asked(None)
    assert wire.says(reply()) == [ev.CheckpointStored(None, attempts=1)]


@pytest.mark.parametrize("error", ["ThrottlingException", "KinesisClientLibDependencyException"])
def test_errors_that_pass_by_themselves_are_repeated_with_growing_pauses(error: str) -> None:
    wire = Wire(V2)
    wire.says(BATCH)
    wire.connection.checkpoint(Sequence(5))
    assert wire.says(reply(error)) == [
        ev.CheckpointRetrying(Sequence(5), error, attempt=1, delay_seconds=1),
        ev.StartTimer(ConnectionTimer.CHECKPOINT_RETRY, 1),
    ]
    assert wire.sent() == asked("5")
    wire.connection.timer_fired(ConnectionTimer.CHECKPOINT_RETRY)
    assert wire.sent() == asked("5")
    assert wire.says(reply(error)) == [
        ev.CheckpointRetrying(Sequence(5), error, attempt=2, delay_seconds=2),
        ev.StartTimer(ConnectionTimer.CHECKPOINT_RETRY, 2),
    ]
    wire.connection.timer_fired(ConnectionTimer.CHECKPOINT_RETRY)
    assert wire.says(reply()) == [ev.CheckpointStored(Sequence(5), attempts=3)]


def test_repetitions_are_bounded_and_the_batch_goes_on() -> None:
    wire = Wire(V2)
    wire.says(BATCH)
    wire.connection.checkpoint(Sequence(5))
    for _ in range(2):
        wire.says(reply("ThrottlingException"))
        wire.connection.timer_fired(ConnectionTimer.CHECKPOINT_RETRY)
    assert wire.says(reply("ThrottlingException")) == [
        ev.CheckpointFailed(Sequence(5), "ThrottlingException", attempts=3)
    ]
    wire.connection.checkpoint(Sequence(5))
    assert wire.says(reply("ThrottlingException"))[0] == ev.CheckpointRetrying(
        Sequence(5), "ThrottlingException", attempt=1, delay_seconds=1
    )


@pytest.mark.parametrize(
    "error", ["IllegalArgumentException", "InvalidStateException", "NullPointerException", ""]
)
def test_any_other_error_is_told_and_the_batch_goes_on(error: str) -> None:
    wire = Wire(V2)
    wire.says(BATCH)
    wire.connection.checkpoint(Sequence(5))
    assert wire.says(reply(error)) == [ev.CheckpointFailed(Sequence(5), error, attempts=1)]
    wire.connection.answer()
    assert wire.sent().endswith(status("processRecords"))


def test_after_shutdown_exception_no_checkpoint_is_sent_on_this_connection() -> None:
    wire = Wire(V2)
    wire.says(BATCH)
    assert not wire.connection.checkpoints_stopped
    wire.connection.checkpoint(Sequence(5))
    assert wire.says(reply("ShutdownException")) == [ev.CheckpointsStopped(Sequence(5))]
    assert wire.connection.checkpoints_stopped
    wire.sent()
    wire.connection.checkpoint(Sequence(6))
    assert (wire.happened(), wire.sent()) == ([ev.CheckpointsStopped(Sequence(6))], b"")
    wire.connection.answer()
    assert wire.sent() == status("processRecords")
    wire.says(LOST)
    wire.connection.answer()
    assert wire.sent() == status("leaseLost")


def test_a_batch_that_our_side_cannot_decode_is_the_peers_error() -> None:
    wire = Wire(V2)
    wire.says(BATCH)
    error = DecodeError("records[0].data")
    wire.connection.abort(error)
    assert wire.fails_with(DecodeError) is error
    assert wire.sent() == b""


# Endings.


@pytest.mark.parametrize(("request_", "action"), [(STOP, "shutdownRequested"), (REQUESTED, "shutdown")])
def test_a_requested_shutdown_may_be_checkpointed_and_an_ending_or_eof_follows(
    request_: dict[str, Any], action: str
) -> None:
    wire = Wire(V2)
    wire.says(request_)
    wire.connection.checkpoint(Sequence(5))
    wire.says(reply("ThrottlingException"))
    wire.connection.timer_fired(ConnectionTimer.CHECKPOINT_RETRY)
    wire.says(reply())
    wire.connection.answer()
    assert wire.sent() == asked("5") * 2 + status(action)
    assert (wire.state, wire.happened()) == (State.DRAINED, [])
    wire.connection.receive_eof()
    assert wire.happened() == [ev.Closed(CloseReason.EOF)]


@pytest.mark.parametrize(
    ("request_", "message", "action"),
    [(LOST, LeaseLost(), "leaseLost"), (ZOMBIE, Shutdown("ZOMBIE"), "shutdown")],  # type: ignore[arg-type]  # equal
)
def test_a_lost_lease_is_answered_and_our_output_ends(
    request_: dict[str, Any], message: Any, action: str
) -> None:
    wire = Wire(V2)
    assert wire.says(request_) == [ev.Request(message)]
    with pytest.raises(InternalError):
        wire.connection.checkpoint(Sequence(5))
    wire.connection.answer()
    assert wire.sent() == status(action)
    assert wire.happened() == [ev.OutputEnded(), ev.StartTimer(ConnectionTimer.CLOSE, 5)]
    wire.connection.receive_eof()
    assert wire.happened() == [ev.CancelTimer(ConnectionTimer.CLOSE), ev.Closed(CloseReason.FINISHED)]


def test_a_peer_that_does_not_close_after_the_last_status_is_closed() -> None:
    wire = Wire(V2, LOST)
    wire.connection.timer_fired(ConnectionTimer.CLOSE)
    assert wire.happened() == [ev.Closed(CloseReason.CLOSE_TIMEOUT)]


@pytest.mark.parametrize(("request_", "action"), [(ENDED, "shardEnded"), (TERMINATE, "shutdown")])
def test_a_shards_end_is_checkpointed_with_null_before_its_status(
    request_: dict[str, Any], action: str
) -> None:
    wire = Wire(V2)
    wire.says(request_)
    for illegal in (wire.connection.answer, lambda: wire.connection.checkpoint(Sequence(5))):
        with pytest.raises(InternalError):
            illegal()
    wire.connection.checkpoint(None)
    assert wire.says(reply()) == [ev.CheckpointStored(None, attempts=1)]
    wire.connection.answer()
    assert wire.sent() == asked(None) + status(action)
    assert wire.happened() == [ev.OutputEnded(), ev.StartTimer(ConnectionTimer.CLOSE, 5)]


def test_every_error_at_a_shards_end_is_repeated_and_then_the_connection_is_closed_on_purpose() -> None:
    wire = Wire(V2)
    wire.says(ENDED)
    wire.connection.checkpoint(None)
    for error in ("IllegalArgumentException", "ThrottlingException", "RuntimeException"):
        assert isinstance(wire.says(reply(error))[0], ev.CheckpointRetrying)
        wire.connection.timer_fired(ConnectionTimer.CHECKPOINT_RETRY)
    wire.sent()
    wire.connection.receive_data(line(reply("RuntimeException")))
    failed = wire.fails_with(PeerError)
    assert "RuntimeException, 4 times" in failed.what
    assert wire.sent() == b"", "a status would block the shard's children until the JVM restarts"


def test_a_shards_end_without_a_lease_is_answered_without_a_checkpoint() -> None:
    wire = Wire(V2)
    wire.says(ENDED)
    wire.connection.checkpoint(None)
    wire.says(reply("ShutdownException"))
    wire.connection.answer()
    assert wire.sent() == asked(None) + status("shardEnded")


# What the peer does wrong.


@pytest.mark.parametrize("first", [BATCH, STOP, ENDED, LOST, TERMINATE, reply()])
def test_nothing_comes_before_initialize(first: dict[str, Any]) -> None:
    wire = Wire()
    wire.connection.receive_data(line(first))
    assert "awaiting_initialize" in wire.fails_with(ProtocolViolation).what


@pytest.mark.parametrize("second", [BATCH, LOST, reply()])
def test_a_message_while_a_request_is_not_answered_breaks_the_protocol(second: dict[str, Any]) -> None:
    wire = Wire(V2)
    wire.says(BATCH)
    wire.connection.receive_data(line(second))
    assert "processRecords was not answered" in wire.fails_with(ProtocolViolation).what


def test_a_request_instead_of_a_checkpoint_reply_breaks_the_protocol() -> None:
    wire = Wire(V2)
    wire.says(BATCH)
    wire.connection.checkpoint(Sequence(5))
    wire.connection.receive_data(line(LOST))
    wire.fails_with(ProtocolViolation)


def test_two_requests_in_one_piece_break_the_protocol_and_the_rest_is_not_looked_at() -> None:
    wire = Wire(V2)
    wire.connection.receive_data(line(BATCH) * 2 + b"garbage\n")
    assert wire.happened()[0] == ev.Request(ProcessRecords(line(BATCH)[:-1]))
    assert wire.state is State.CLOSED


def test_the_first_byte_out_of_turn_is_enough() -> None:
    wire = Wire(V2)
    wire.says(BATCH)
    wire.connection.receive_data(b'{"act')
    assert wire.fails_with(ProtocolViolation).where["excerpt"] == '{"act'


def test_blank_lines_are_never_out_of_turn() -> None:
    wire = Wire(V2)
    wire.says(BATCH)
    wire.connection.receive_data(b"\r")
    wire.connection.receive_data(b"\n\n")
    wire.connection.answer()
    assert wire.sent() == status("processRecords")


@pytest.mark.parametrize(
    ("data", "error"),
    [(b"garbage\n", DecodeError), (b"x" * 1001, FramingError), (b"x" * 1001 + b"\n", FramingError)],
)
def test_what_is_no_line_or_no_message_ends_the_connection(data: bytes, error: type[PeerError]) -> None:
    wire = Wire(V2)
    wire.connection.receive_data(data)
    wire.fails_with(error)


def test_an_incomplete_line_is_waited_for_from_its_first_byte_on() -> None:
    wire = Wire(V2)
    wire.connection.receive_data(b'{"action":')
    assert wire.happened() == [ev.StartTimer(ConnectionTimer.PARTIAL_LINE, 20)]
    assert wire.connection.receive_data(b"") == 10
    wire.connection.receive_data(b'"lease')
    assert wire.happened() == []
    wire.connection.receive_data(b'Lost"}\n')
    assert wire.happened() == [ev.CancelTimer(ConnectionTimer.PARTIAL_LINE), ev.Request(LeaseLost())]


def test_blank_lines_end_the_wait_too() -> None:
    wire = Wire(V2)
    wire.connection.receive_data(b" ")
    wire.connection.receive_data(b"\n")
    assert wire.happened() == [
        ev.StartTimer(ConnectionTimer.PARTIAL_LINE, 20),
        ev.CancelTimer(ConnectionTimer.PARTIAL_LINE),
    ]


def test_a_line_that_stops_arriving_ends_the_connection() -> None:
    wire = Wire(V2)
    wire.connection.receive_data(b'{"action":')
    wire.connection.timer_fired(ConnectionTimer.PARTIAL_LINE)
    failed = wire.fails_with(PeerTimeout)
    assert "nothing more of it came for 20 seconds" in failed.what
    assert failed.where["excerpt"] == '{"action":'


def test_a_line_that_goes_on_arriving_is_waited_for_however_long_it_takes() -> None:
    wire = Wire(V2)
    wire.connection.receive_data(b"{")
    wire.happened()
    for piece in b'"action":':
        wire.connection.receive_data(bytes([piece]))
        assert wire.happened() == [], "a piece costs no timer"
        wire.connection.timer_fired(ConnectionTimer.PARTIAL_LINE)
        assert wire.happened() == [ev.StartTimer(ConnectionTimer.PARTIAL_LINE, 20)]
    wire.connection.timer_fired(ConnectionTimer.PARTIAL_LINE)
    wire.fails_with(PeerTimeout)


def test_what_came_of_an_earlier_line_does_not_count_for_the_next() -> None:
    wire = Wire(V2)
    wire.connection.receive_data(b" " * 30)
    wire.connection.receive_data(b"\n{")
    wire.connection.timer_fired(ConnectionTimer.PARTIAL_LINE)
    wire.fails_with(PeerTimeout)


def test_a_line_that_others_wait_for_must_end_in_time_however_it_arrives() -> None:
    wire = Wire(V2)
    wire.connection.receive_data(b'{"action":')
    wire.connection.receive_data(b'"')
    wire.connection.timer_fired(ConnectionTimer.PARTIAL_LINE, patient=False)
    assert "while others waited" in wire.fails_with(PeerTimeout).what


# EOF and our own closing.


def test_eof_between_requests_is_a_plain_end_and_in_a_request_it_is_told() -> None:
    wire = Wire(V2)
    wire.connection.receive_eof()
    assert wire.happened() == [ev.Closed(CloseReason.EOF)]
    wire = Wire(V2)
    wire.says(BATCH)
    wire.connection.checkpoint(Sequence(5))
    wire.says(reply("ThrottlingException"))
    wire.connection.receive_eof()
    assert wire.happened() == [
        ev.CancelTimer(ConnectionTimer.CHECKPOINT_RETRY),
        ev.Closed(CloseReason.EOF_IN_REQUEST),
    ]


def test_a_line_that_eof_cut_off_is_reported_and_dropped() -> None:
    wire = Wire(V2)
    wire.connection.receive_data(b'{"action":"leaseLost"}')
    wire.connection.receive_eof()
    assert wire.happened()[-1] == ev.Closed(CloseReason.EOF, cut_off=22)


def test_our_side_may_close_with_an_error_or_without() -> None:
    wire = Wire(V2)
    wire.connection.close()
    assert wire.happened() == [ev.Closed(CloseReason.CLOSED)]
    wire = Wire(V2)
    wire.says(BATCH)
    wire.connection.abort(HandlerHalted("on purpose"))
    wire.fails_with(HandlerHalted)


def test_a_closed_connection_ignores_the_peer_and_refuses_commands() -> None:
    wire = Wire(V2)
    wire.connection.close()
    wire.happened()
    wire.connection.receive_data(line(LOST))
    wire.connection.receive_eof()
    assert wire.happened() == []
    commands: list[Callable[[], None]] = [
        wire.connection.answer,
        wire.connection.close,
        lambda: wire.connection.abort(HandlerHalted("late")),
        lambda: wire.connection.checkpoint(None),
    ]
    for command in commands:
        with pytest.raises(InternalError):
            command()
    assert (wire.sent(), wire.happened()) == (b"", [])
