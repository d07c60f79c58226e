"""Sensor readings by columns: Arrow in, Arrow out, for much data.

Shows ``process_table``: the batch comes as one Arrow table, and no Python object is made for a record. A table of the
same length means row for row; this one leaves rows out, so its ``record`` column says which record each came from.

A record is one JSON object such as ``{"sensor": "a7", "celsius": 21.5}``; readings without a value are dropped.
Without ``windows``, rows are cut into bounded batches, and without ``on_window`` they are written as they are.
"""

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import json as pj

schema = "sensor STRING, celsius DOUBLE, arrived TIMESTAMP"

_FIELDS = pj.ParseOptions(
    explicit_schema=pa.schema([("sensor", pa.string()), ("celsius", pa.float64())]),
    unexpected_field_behavior="ignore",
)


def process_table(table: pa.Table) -> Any:
    """Parse all payloads of a batch in one go."""
    lines = b"\n".join(payload.replace(b"\n", b" ") for payload in table["data"].to_pylist())
    parsed = pj.read_json(pa.BufferReader(lines), parse_options=_FIELDS)
    if len(parsed) != len(table):
        # A payload that is blank, or holds several objects: the server finds out which by halving the batch.
        raise ValueError(f"{len(parsed)} objects in {len(table)} records")
    rows = parsed.append_column("arrived", table["approximate_arrival_timestamp"])
    rows = rows.append_column("record", pa.array(range(len(rows)), pa.int64()))
    return rows.filter(pc.is_valid(rows["celsius"]))
