"""The requests of the real Java daemon (KCL 3.1.3), played at the connection, its checkpoint replies included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mldserver.config.settings import Settings
from mldserver.protocol import events as ev
from mldserver.protocol.batch_decoder import decode_records
from mldserver.protocol.connection import ConnectionLimits, MLDConnection
from mldserver.protocol.messages import ProcessRecords, ShardEnded, Version
from mldserver.protocol.states import State
from mldserver.records import Sequence

pytestmark = pytest.mark.quick

CAPTURES = sorted((Path(__file__).parents[1] / "transcripts").glob("*.jsonl"))
KEYS = {
    "status": {"action": str, "responseFor": str},
    "checkpoint": {"action": str, "sequenceNumber": str | None, "subSequenceNumber": int | None},
}


class Player:
    """Plays one capture: the daemon's lines in, our answers out; replies come when we ask for a checkpoint."""

    def __init__(self, capture: Path, chunk: int) -> None:
        spoken = [json.loads(text) for text in capture.read_text(encoding="utf-8").splitlines()]
        self.lines = [
            each["line"].encode("utf-8", "surrogateescape") for each in spoken if each["dir"] == "in"
        ]
        self.chunk = chunk
        self.replies: list[bytes] = []
        self.connection = MLDConnection(Settings().part(ConnectionLimits), random=lambda: 0.0)
        self.delivered: Sequence | None = None
        self.records = 0
        self.timers: list[ev.ConnectionTimer] = []
        self.seen: list[ev.Event] = []
        self.written: list[dict[str, Any]] = []

    def feed(self, line: bytes) -> None:
        data = line + b"\n"
        for start in range(0, len(data), self.chunk):
            self.connection.receive_data(data[start : start + self.chunk])

    def play(self) -> None:
        requests = [line for line in self.lines if not line.startswith(b'{"action":"checkpoint"')]
        for request in requests:
            # The replies that this daemon gave under the same request, in their order; then it stores what is asked.
            place = self.lines.index(request)
            after = self.lines[place + 1 :]
            end = next(
                (i for i, line in enumerate(after) if not line.startswith(b'{"action":"checkpoint"')), None
            )
            self.replies = after[:end]
            self.lines = after
            self.feed(request)
            self.settle()
            assert self.connection.state in {State.IDLE, State.DRAINED, State.FINAL}, request[:80]

    def settle(self) -> None:
        """Carry out what the connection wants until it is the daemon's turn."""
        while True:
            events = self.connection.events_received()
            self.seen += events
            for event in events:
                self.take(event)
            if not self.write() and not events:
                return

    def take(self, event: ev.Event) -> None:
        match event:
            case ev.Request(ProcessRecords(line)):
                batch = decode_records(line, version=Version.V2, shard_id="s")
                self.records += len(batch.records)
                self.delivered = batch.records[-1].sequence if batch.records else self.delivered
                # Every reply of the capture is asked for, and at least one.
                if self.delivered is None:
                    self.connection.answer()
                else:
                    self.connection.checkpoint(self.delivered)
            case ev.Request(ShardEnded()):
                self.connection.checkpoint(None)
            case ev.Request():
                self.connection.answer()
            case ev.CheckpointsStopped():
                self.connection.answer()
            case ev.CheckpointStored() | ev.CheckpointFailed():
                if self.replies and self.connection.state is not State.ENDED:
                    self.connection.checkpoint(self.delivered)
                else:
                    self.connection.answer()
            case ev.StartTimer(ev.ConnectionTimer.CHECKPOINT_RETRY):
                self.connection.timer_fired(ev.ConnectionTimer.CHECKPOINT_RETRY)
            case _:
                assert not isinstance(event, ev.ConnectionFailed), event

    def write(self) -> bool:
        data = self.connection.data_to_send()
        for line in data:
            assert line.endswith(b"\n")
            assert line.count(b"\n") == 1
            message = json.loads(line)
            self.written.append(message)
            if message["action"] == "checkpoint":
                echo = {
                    **message,
                    "error": json.loads(self.replies.pop(0))["error"] if self.replies else None,
                }
                self.feed(json.dumps(echo, separators=(",", ":")).encode())
        return bool(data)


@pytest.mark.parametrize("chunk", [17, 65_536])
@pytest.mark.parametrize("capture", CAPTURES, ids=lambda path: path.stem)
def test_the_requests_of_a_capture_are_answered_as_the_java_accepts(capture: Path, chunk: int) -> None:
    player = Player(capture, chunk)
    wanted = [
        json.loads(line)["action"] for line in player.lines if not line.startswith(b'{"action":"checkpoint"')
    ]
    player.play()
    for message in player.written:
        keys = KEYS[message["action"]]
        assert list(message) == list(keys), "exactly the known keys, or the daemon waits for ever"
        assert all(isinstance(message[key], kind) for key, kind in keys.items())
    statuses = [message["responseFor"] for message in player.written if message["action"] == "status"]
    assert statuses == wanted
    player.connection.receive_eof()
    assert player.connection.state is State.CLOSED


def test_the_captures_hold_what_they_are_said_to_hold() -> None:
    assert len(CAPTURES) == 6
    seen: set[type[ev.Event]] = set()
    records = 0
    for capture in CAPTURES:
        player = Player(capture, 4096)
        player.play()
        seen |= {type(event) for event in player.seen}
        records += player.records
    assert {ev.CheckpointStored, ev.CheckpointFailed, ev.CheckpointsStopped, ev.CheckpointRetrying} <= seen
    assert records > 2000


def test_non_ascii_partition_keys_come_through() -> None:
    player = Player(CAPTURES[0], 1)
    batches = [line for line in player.lines if line.startswith(b'{"action":"processRecords"')]
    keys = {
        record.partition_key
        for line in batches
        for record in decode_records(line, version=Version.V2, shard_id="s").records
    }
    assert any("é" in key for key in keys if key)
