"""The fake daemon against what KCL 3.1.3 really sent: same batches and same answers in, same lines out."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from mldserver.testing import DaemonProtocol, Form, JavaThrow, Place, StreamRecord

CAPTURES = sorted((Path(__file__).parent.parent / "transcripts").glob("*.jsonl"))
LEASE_GONE = "kcl313-moto-conn-002"
"""The one capture whose lease was lost while a batch was being worked on."""
HARMLESS = ("a checkpoint that cannot be",)
"""The capturing worker asked for impossible checkpoints on purpose."""


def test_every_capture_is_there() -> None:
    assert len(CAPTURES) == 6


def record(told: dict[str, Any]) -> StreamRecord:
    data = None if told["data"] is None else base64.b64decode(told["data"])
    return StreamRecord(
        told["sequenceNumber"],
        data,
        told["partitionKey"],
        told["approximateArrivalTimestamp"],
        told["subSequenceNumber"],
    )


def request(daemon: DaemonProtocol | None, message: dict[str, Any], *, lease_gone: bool) -> DaemonProtocol:
    def store(_place: Place) -> None:
        if lease_gone:
            raise JavaThrow("ShutdownException", "stolen")

    if daemon is None:
        start = Place(message["sequenceNumber"], message["subSequenceNumber"])
        daemon = DaemonProtocol(message["shardId"], form=Form.KCL3, start=start, store=store)
        daemon.initialize()
    elif message["action"] == "processRecords":
        daemon.process_records([record(told) for told in message["records"]], message["millisBehindLatest"])
    elif message["action"] == "leaseLost":
        daemon.lease_lost()
    elif message["action"] == "shardEnded":
        daemon.shard_ended()
    elif message["action"] == "shutdownRequested":
        daemon.shutdown_requested()
    return daemon


@pytest.mark.parametrize("capture", CAPTURES, ids=lambda path: path.stem)
def test_it_says_what_the_java_said(capture: Path) -> None:
    daemon: DaemonProtocol | None = None
    compared = 0
    for entry in map(json.loads, capture.read_text("utf-8").splitlines()):
        if entry["dir"] == "in":
            daemon = request(daemon, json.loads(entry["line"]), lease_gone=capture.stem == LEASE_GONE)
            assert daemon.data_to_send() == entry["line"].encode() + b"\n"
            compared += 1
        elif entry["dir"] == "out":
            assert daemon is not None
            daemon.receive_data(b"\n" + entry["line"].encode() + b"\n")
    assert daemon is not None
    assert compared > 10
    assert daemon.outstanding is None
    assert [text for text in daemon.violations if not any(known in text for known in HARMLESS)] == []


def test_a_list_of_cases_that_finds_none_fails(pytestconfig: pytest.Config) -> None:
    """Captures are looked for by four files: none of these may pass because the folder has moved."""
    assert pytestconfig.getini("empty_parameter_set_mark") == "fail_at_collect"
