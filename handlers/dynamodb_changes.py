"""The changes of a DynamoDB table: keys, and the item before and after, as JSON.

Shows a ``process_record`` that is given changes (``changes = True``) instead of records, whichever way they came: from the
table's stream, through the KCL's adapter for DynamoDB Streams, or from Kinesis Data Streams for DynamoDB. Windows are cut
on the time of the change.
"""

import json
from datetime import datetime
from decimal import Decimal
from typing import Any

from mldserver import tumbling
from mldserver.dynamodb_streams import Change

changes = True
schema = """
    event STRING NOT NULL COMMENT 'insert, update or delete',
    keys STRING NOT NULL,
    old STRING,
    new STRING,
    at TIMESTAMP NOT NULL
"""
windows = tumbling("15 minutes", on="at", lateness="1 minute")


def process_record(change: Change) -> tuple[str, str, str | None, str | None, datetime]:
    """Make one row of a change."""
    return change.kind, text(change.keys) or "", text(change.old), text(change.new), change.created_at


def text(item: dict[str, Any] | None) -> str | None:
    """Return an item as JSON, in which sets are lists and binaries are hexadecimal text."""
    return None if item is None else json.dumps(item, sort_keys=True, default=_plain)


def _plain(value: Any) -> Any:
    """Return what JSON can say; a number that a float cannot hold becomes text."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, set):
        return sorted(value)
    assert isinstance(value, Decimal), "there is nothing else in DynamoDB"
    if value == value.to_integral_value():
        return int(value)
    return float(value) if Decimal(repr(float(value))) == value else str(value)
