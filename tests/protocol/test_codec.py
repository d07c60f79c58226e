"""Single lines to messages, and messages to lines."""

from __future__ import annotations

import json

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mldserver.errors import DecodeError
from mldserver.protocol.codec import CONTROL_LIMIT, decode, encode, encode_status
from mldserver.protocol.messages import (
    CheckpointReply,
    CheckpointRequest,
    Initialize,
    LeaseLost,
    PeerMessage,
    ProcessRecords,
    ShardEnded,
    Shutdown,
    ShutdownReason,
    ShutdownRequested,
    Version,
)

pytestmark = [pytest.mark.quick, pytest.mark.core]

MESSAGES: dict[bytes, PeerMessage] = {
    b'{"action":"initialize","shardId":"s"}': Initialize("s", Version.V1),
    b'{"action":"initialize","shardId":"s","sequenceNumber":null,"subSequenceNumber":null}': Initialize(
        "s", Version.V2
    ),
    b'{"action":"initialize","shardId":"s","sequenceNumber":"495","subSequenceNumber":7}': Initialize(
        "s", Version.V2, "495", 7
    ),
    b'{"action":"initialize","shardId":"s","sequenceNumber":"LATEST","subSequenceNumber":0,"new":{"a":[1]}}': Initialize(
        "s", Version.V2, "LATEST", 0
    ),
    b'{"action":"checkpoint","sequenceNumber":"5","subSequenceNumber":0,"error":null}': CheckpointReply(
        "5", 0, None
    ),
    b'{"action":"checkpoint","sequenceNumber":null,"subSequenceNumber":null,"error":"ShutdownException"}': (
        CheckpointReply(None, None, "ShutdownException")
    ),
    b'{"action":"checkpoint","checkpoint":"5","error":null}': CheckpointReply("5", None, None),
    b'{"action":"leaseLost"}': LeaseLost(),
    b'{"action":"shardEnded","checkpoint":null}': ShardEnded(),
    b' { "action" : "shutdownRequested" } ': ShutdownRequested(),
    b'{"action":"shutdown","reason":"TERMINATE"}': Shutdown(ShutdownReason.TERMINATE),
    b'{"reason":"ZOMBIE","action":"shutdown"}': Shutdown(ShutdownReason.ZOMBIE),
    b'{"action":"shutdown","reason":"REQUESTED"}': Shutdown(ShutdownReason.REQUESTED),
}


@pytest.mark.parametrize("line", MESSAGES)
def test_every_message_of_every_version_is_understood(line: bytes) -> None:
    assert decode(line) == MESSAGES[line]


@pytest.mark.parametrize(
    "line",
    [
        b'{"action":"processRecords", this is not even JSON',
        b'  {  "action" : "processRecords","records":[]}',
        b'{"records":[],"action":"processRecords"}',
    ],
)
def test_a_batch_is_passed_on_as_it_came(line: bytes) -> None:
    assert decode(line) == ProcessRecords(line)


@pytest.mark.parametrize(
    "line",
    [
        b"null",
        b"[]",
        b"1",
        b"{",
        b"{}",
        b'{"action":null}',
        b'{"action":["initialize"]}',
        b'{"action":"Initialize","shardId":"s"}',
        b'{"action":"status","responseFor":"initialize"}',
        b'{"action":"initialize"}',
        b'{"action":"initialize","shardId":null}',
        b'{"action":"initialize","shardId":""}',
        b'{"action":"initialize","shardId":"a\\u0000b"}',
        b'{"action":"initialize","shardId":"' + b"s" * 129 + b'"}',
        b'{"action":"initialize","shardId":"s","sequenceNumber":495}',
        b'{"action":"initialize","shardId":"s","sequenceNumber":"49x"}',
        b'{"action":"initialize","shardId":"s","sequenceNumber":null,"subSequenceNumber":"0"}',
        b'{"action":"checkpoint","sequenceNumber":"5","subSequenceNumber":0}',
        b'{"action":"checkpoint","sequenceNumber":5,"subSequenceNumber":0,"error":null}',
        b'{"action":"checkpoint","sequenceNumber":"5","subSequenceNumber":0,"error":false}',
        b'{"action":"shutdown"}',
        b'{"action":"shutdown","reason":"BORED"}',
        b'{"action":"shutdown","reason":{}}',
        b'{"action":"initialize","shardId":"\xff"}',
        b'{"action":"initialize","shardId":"\\ud800"}',
        b"\xef\xbb\xbf" + b'{"action":"leaseLost"}',
        b"[" * 50_000,
        b'{"a":' * 10_000,
        b'{"action":"leaseLost","n":' + b"1" * 5_000 + b"}{",
        b'"' + b"x" * CONTROL_LIMIT,
    ],
    ids=lambda line: line[:60].decode("ascii", "replace"),
)
def test_what_is_no_message_is_a_decode_error_with_an_excerpt_that_is_short(line: bytes) -> None:
    with pytest.raises(DecodeError) as caught:
        decode(line)
    assert len(str(caught.value)) < 400
    assert len(str(caught.value.told())) < 1000


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_but_a_decode_error(line: bytes) -> None:
    try:
        decode(line)
    except DecodeError:
        return
    assert line


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
actions = st.sampled_from(
    ["initialize", "checkpoint", "leaseLost", "shardEnded", "shutdown", "shutdownRequested", "x"]
)
keys = st.sampled_from(["shardId", "sequenceNumber", "subSequenceNumber", "error", "reason", "checkpoint"])


@given(actions, st.dictionaries(keys, json_values))
def test_no_values_raise_anything_but_a_decode_error(action: str, fields: dict[str, object]) -> None:
    line = json.dumps({"action": action, **fields}).encode()
    try:
        message = decode(line)
    except DecodeError:
        return
    assert action != "x"
    assert isinstance(message, PeerMessage)


@pytest.mark.parametrize("action", ["initialize", "processRecords", "shutdown"])
def test_a_status_has_exactly_its_two_keys_in_compact_json(action: str) -> None:
    assert encode_status(action) == b'{"action":"status","responseFor":"%s"}\n' % action.encode()


def test_a_checkpoint_has_the_keys_of_its_version() -> None:
    v2 = CheckpointRequest("495", 3, Version.V2)
    assert encode(v2) == b'{"action":"checkpoint","sequenceNumber":"495","subSequenceNumber":3}\n'
    null = CheckpointRequest(None, None, Version.V2)
    assert encode(null) == b'{"action":"checkpoint","sequenceNumber":null,"subSequenceNumber":null}\n'
    v1 = CheckpointRequest("495", 3, Version.V1)
    assert encode(v1) == b'{"action":"checkpoint","checkpoint":"495"}\n'
    assert orjson.loads(encode(CheckpointRequest(None, None, Version.V1))) == {
        "action": "checkpoint",
        "checkpoint": None,
    }
