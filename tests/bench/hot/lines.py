"""Lines as a MultiLangDaemon sends them, each batch with sequence numbers of its own."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass

import numpy as np

__all__ = ["SHAPES", "Shape", "answer_to", "initialize"]

_BATCH = b"00000000"
"""Where the number of the batch stands in each sequence number."""


@dataclass(frozen=True, slots=True)
class Shape:
    """So many records of so many bytes in a batch, and how many batches a round has."""

    records: int
    size: int
    batches: int

    @property
    def name(self) -> str:
        """For example ``500 x 1 KiB``."""
        size = f"{self.size} B" if self.size < 1024 else f"{self.size // 1024} KiB"
        return f"{self.records:,} x {size}"

    @property
    def key(self) -> str:
        """The name as a word of the command line, for example ``500x1024``."""
        return f"{self.records}x{self.size}"

    @property
    def payload(self) -> int:
        """Bytes of data in a batch, before base64."""
        return self.records * self.size

    def batches_each(self, share: float, connections: int = 1) -> int:
        """Return how many batches of a round each connection has, when the round has this share of its batches."""
        return max(1, max(3, round(self.batches * share)) // connections)

    def line(self) -> bytes:
        """Return a line in which ``numbered`` finds its places."""
        dice = np.random.default_rng(self.records * self.size)
        records = [
            {
                "action": "record",
                "data": base64.b64encode(dice.bytes(self.size)).decode(),
                "partitionKey": f"key-{number % 97}",
                "sequenceNumber": f"4959033827149025660855{_BATCH.decode()}{number:026d}",
                "subSequenceNumber": 0,
                "approximateArrivalTimestamp": 1_800_000_000_000,
            }
            for number in range(self.records)
        ]
        line = {"action": "processRecords", "records": records, "millisBehindLatest": 100}
        return json.dumps(line, separators=(",", ":")).encode() + b"\n"

    @staticmethod
    def numbered(line: bytes, batch: int) -> bytes:
        """Return the line as the batch with this number."""
        return line.replace(b"855" + _BATCH, b"855%08d" % batch)


SHAPES = (Shape(1, 100, 1500), Shape(500, 100, 200), Shape(500, 1024, 80), Shape(10_000, 1024, 5))


def initialize(shard_id: str) -> bytes:
    """Return the first line of a connection."""
    first = {
        "action": "initialize",
        "shardId": shard_id,
        "sequenceNumber": "TRIM_HORIZON",
        "subSequenceNumber": 0,
    }
    return json.dumps(first).encode() + b"\n"


def answer_to(line: bytes) -> bytes | None:
    """Return what a daemon answers to a line of its client; None: nothing, the action is over.

    The client's lines are few: parsing them costs the bench, not the server.
    """
    said = json.loads(line)
    if said["action"] == "status":
        return None
    said["error"] = None
    return json.dumps(said).encode() + b"\n"
