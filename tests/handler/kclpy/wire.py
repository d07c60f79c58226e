"""What the runtime is given in tests of processors: batches as the daemon writes them, and a clock that never waits."""

from __future__ import annotations

import base64
import json

from mldserver.protocol.messages import Version
from mldserver.records import Sequence, Shard
from mldserver.runtime.interface import Delivery, MLDLine

SHARD = Shard("shardId-000000000001", "TRIM_HORIZON")


def delivery(*numbers: int, after: int | None = None) -> Delivery:
    records = [
        {
            "data": base64.b64encode(str(number).encode()).decode(),
            "partitionKey": "key",
            "sequenceNumber": str(number),
            "approximateArrivalTimestamp": 1_000,
            "subSequenceNumber": 0,
            "action": "record",
        }
        for number in numbers
    ]
    message = {"action": "processRecords", "records": records, "millisBehindLatest": 0}
    position = None if after is None else Sequence(after)
    return Delivery(SHARD.id, MLDLine(json.dumps(message).encode(), Version.V2), 9_000, position)
