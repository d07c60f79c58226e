"""A connection with both ends of its wire, and the daemon's lines."""

from __future__ import annotations

import json
from typing import Any

from mldserver.errors import MldserverError
from mldserver.protocol import events as ev
from mldserver.protocol.connection import ConnectionLimits, MLDConnection, RetryPolicy
from mldserver.protocol.events import CloseReason
from mldserver.protocol.states import State

LIMITS = ConnectionLimits(
    line_limit=1000,
    initialize_timeout_seconds=60,
    partial_line_timeout_seconds=20,
    close_timeout_seconds=5,
    retries=RetryPolicy(attempts=3, base_seconds=1, cap_seconds=60),
    end_retries=RetryPolicy(attempts=4, base_seconds=1, cap_seconds=60),
)
V2 = {"action": "initialize", "shardId": "s", "sequenceNumber": "TRIM_HORIZON", "subSequenceNumber": 0}
V1 = {"action": "initialize", "shardId": "s"}
BATCH = {"action": "processRecords", "records": [], "millisBehindLatest": 0}
TERMINATE, ZOMBIE, REQUESTED = (
    {"action": "shutdown", "reason": reason} for reason in ("TERMINATE", "ZOMBIE", "REQUESTED")
)
ENDED, LOST, STOP = ({"action": name} for name in ("shardEnded", "leaseLost", "shutdownRequested"))


def line(message: dict[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def status(action: str) -> bytes:
    return line({"action": "status", "responseFor": action})


def asked(number: str | None, sub: int | None = 0) -> bytes:
    sub = None if number is None else sub
    return line({"action": "checkpoint", "sequenceNumber": number, "subSequenceNumber": sub})


def reply(error: str | None = None) -> dict[str, Any]:
    return {"action": "checkpoint", "sequenceNumber": "5", "subSequenceNumber": 0, "error": error}


class Wire:
    """A connection and the two ends of its wire; state changes are left out of what happened."""

    def __init__(self, *messages: dict[str, Any], limits: ConnectionLimits = LIMITS) -> None:
        self.connection = MLDConnection(limits, random=lambda: 1.0)
        for message in messages:
            self.says(message)
            self.connection.answer()
        self.happened()
        self.sent()

    def says(self, message: dict[str, Any]) -> list[ev.Event]:
        self.connection.receive_data(line(message))
        return self.happened()

    def happened(self) -> list[ev.Event]:
        return [
            event for event in self.connection.events_received() if not isinstance(event, ev.StateChanged)
        ]

    def sent(self) -> bytes:
        return b"".join(self.connection.data_to_send())

    @property
    def state(self) -> State:
        return self.connection.state

    def fails_with(self, error: type[MldserverError]) -> MldserverError:
        """Assert that the connection has just failed and closed, and return why."""
        told = [event for event in self.happened() if not isinstance(event, ev.StartTimer | ev.CancelTimer)]
        failed, closed = told[-2:]
        assert isinstance(failed, ev.ConnectionFailed)
        assert type(failed.error) is error
        assert isinstance(closed, ev.Closed)
        assert closed.reason is CloseReason.FAILED
        assert self.state is State.CLOSED
        return failed.error
