"""The connection under any chunking and any garbage: nothing raises, each request has at most one status, EOF closes."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from mldserver.protocol import events as ev
from mldserver.protocol.connection import MLDConnection
from mldserver.protocol.events import ConnectionTimer
from mldserver.protocol.states import State
from mldserver.records import Sequence
from tests.protocol.wire import BATCH, ENDED, LIMITS, LOST, STOP, TERMINATE, V1, V2, line, reply

LIFE = [V2, BATCH, BATCH, STOP, ENDED]


def drive(connection: MLDConnection, log: list[Any]) -> None:
    """Answer what comes: a checkpoint for each request that allows one, then the status."""
    while events := connection.events_received():
        for event in events:
            match event:
                case ev.Request(message):
                    log.append(message)
                    respond(connection)
                case ev.CheckpointStored() | ev.CheckpointFailed() | ev.CheckpointsStopped():
                    if connection.state is not State.CLOSED:
                        connection.answer()
                case ev.ConnectionFailed():
                    log.append(event)
                case _:
                    pass
    log.extend(json.loads(data) for data in connection.data_to_send())


def respond(connection: MLDConnection) -> None:
    if connection.state is State.ENDING:
        connection.checkpoint(None)
    elif connection.state in {State.PROCESSING, State.DRAINING}:
        connection.checkpoint(Sequence(5))
    elif connection.state is not State.CLOSED:  # a second message came in the same piece
        connection.answer()


def test_a_whole_life_fed_byte_by_byte_is_the_same_as_fed_line_by_line() -> None:
    logs: list[list[Any]] = []
    for size in (1, 7, 10_000):
        connection, log = MLDConnection(LIMITS, random=lambda: 1.0), []
        for message in LIFE:
            messages = [message, reply()] if message in (BATCH, STOP, ENDED) else [message]
            for data in map(line, messages):
                for start in range(0, len(data), size):
                    connection.receive_data(data[start : start + size])
                    drive(connection, log)
        logs.append(log)
        assert connection.state is State.FINAL
    assert logs[0] == logs[1] == logs[2]


garbage = st.lists(
    st.one_of(
        st.binary(max_size=30),
        st.sampled_from(
            [line(message) for message in (V1, V2, BATCH, STOP, ENDED, LOST, TERMINATE, reply())]
        ),
        st.sampled_from(
            [line(reply(error)) for error in ("ThrottlingException", "ShutdownException", "Other")]
        ),
        st.sampled_from([b"\n", b"\r\n", b"x" * 1001, b'{"action":"processRecords"', b"[" * 500 + b"\n"]),
        st.sampled_from(list(ConnectionTimer)),
    ),
    max_size=20,
)


@settings(max_examples=300)
@given(garbage)
def test_whatever_the_peer_sends_nothing_raises_and_eof_closes(pieces: list[bytes | ConnectionTimer]) -> None:
    connection, log = MLDConnection(LIMITS, random=lambda: 1.0), []
    for piece in [line(V2), *pieces]:
        if isinstance(piece, ConnectionTimer):
            connection.timer_fired(piece)
        else:
            connection.receive_data(piece)
        drive(connection, log)
    connection.receive_eof()
    assert connection.state is State.CLOSED
    statuses = [entry for entry in log if isinstance(entry, dict) and entry["action"] == "status"]
    requests = [entry for entry in log if not isinstance(entry, dict | ev.ConnectionFailed)]
    assert len(requests) - 1 <= len(statuses) <= len(requests)
    assert all(KEYS[entry["action"]] == set(entry) for entry in log if isinstance(entry, dict))
    assert sum(isinstance(entry, ev.ConnectionFailed) for entry in log) <= 1


KEYS = {
    "status": {"action", "responseFor"},
    "checkpoint": {"action", "sequenceNumber", "subSequenceNumber"},
}
