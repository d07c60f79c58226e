"""Which endings may follow what."""

from __future__ import annotations

from typing import Any

import pytest

from mldserver.errors import DecodeError, ProtocolViolation
from mldserver.protocol import events as ev
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
    line,
    reply,
    status,
)

pytestmark = [pytest.mark.quick, pytest.mark.core]


@pytest.mark.parametrize("ending", [LOST, ENDED, ZOMBIE, TERMINATE])
def test_every_ending_may_follow_a_requested_shutdown(ending: dict[str, Any]) -> None:
    wire = Wire(V2, STOP)
    assert isinstance(wire.says(ending)[0], ev.Request)


@pytest.mark.parametrize("message", [BATCH, STOP, V2, REQUESTED])
def test_nothing_else_may_follow_a_requested_shutdown(message: dict[str, Any]) -> None:
    wire = Wire(V2, STOP)
    wire.connection.receive_data(line(message))
    wire.fails_with(ProtocolViolation)


def test_a_v1_shards_end_has_the_v1_form() -> None:
    wire = Wire(V1)
    wire.says(TERMINATE)
    wire.connection.checkpoint(None)
    assert wire.sent() == b'{"action":"checkpoint","checkpoint":null}\n'


@pytest.mark.parametrize("tries", [0, 1])
def test_a_lease_that_went_during_a_batch_lets_the_shards_end_be_answered(tries: int) -> None:
    wire = Wire(V2)
    wire.says(BATCH)
    wire.connection.checkpoint(Sequence(5))
    wire.says(reply("ShutdownException"))
    wire.connection.answer()
    wire.says(ENDED)
    wire.sent()
    for _ in range(tries):
        wire.connection.checkpoint(None)
    wire.connection.answer()
    assert wire.sent() == status("shardEnded")


def test_a_line_that_is_too_long_behind_the_one_that_ended_the_connection_is_not_told_too() -> None:
    wire = Wire(V2)
    wire.connection.receive_data(b"nonsense\n" + b"x" * 2 * LIMITS.line_limit)
    wire.fails_with(DecodeError)
