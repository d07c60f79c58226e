"""The changes of a DynamoDB table: keys, and the item before and after, as JSON.

Shows records of DynamoDB Streams, which the KCL's adapter hands over as JSON (``eventName``, ``dynamodb``: ``Keys``,
``OldImage``, ``NewImage``, ``ApproximateCreationDateTime`` …) with attribute values in DynamoDB's own notation. Their
partition keys are always null. Windows are cut on the time of the change.
"""

import json
from base64 import b64decode
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from mldserver import Record, tumbling

schema = """
    event STRING NOT NULL COMMENT 'INSERT, MODIFY or REMOVE',
    keys STRING NOT NULL,
    old STRING,
    new STRING,
    at TIMESTAMP NOT NULL
"""
windows = tumbling("15 minutes", on="at", lateness="1 minute")

_MILLISECONDS_FROM = 10**11
"""Epoch numbers from here on are milliseconds (as seconds they would lie beyond the year 5000)."""


def process_record(record: Record) -> tuple[str, str, str | None, str | None, datetime]:
    """Make one row of a change."""
    change = record.json()
    images = change["dynamodb"]
    return (
        change["eventName"],
        _text(images["Keys"]),
        _text(images["OldImage"]) if images.get("OldImage") else None,
        _text(images["NewImage"]) if images.get("NewImage") else None,
        _time(images["ApproximateCreationDateTime"]),
    )


def _text(item: dict[str, Any]) -> str:
    return json.dumps({name: plain(value) for name, value in item.items()}, sort_keys=True, default=str)


def plain(value: dict[str, Any]) -> Any:
    """Return a value out of DynamoDB's notation: ``{"N": "7"}`` is 7, ``{"S": "a"}`` is ``"a"``.

    Numbers that a double cannot hold stay text, binaries become hexadecimal text.
    """
    ((kind, held),) = value.items()
    return _PLAIN[kind](held)


def _number(text: str) -> int | float | str:
    number = Decimal(text)
    if number == number.to_integral_value():
        return int(number)
    return float(text) if Decimal(repr(float(text))) == number else text


def _time(value: float | str) -> datetime:
    """Read the three forms in circulation: epoch seconds, epoch milliseconds, ISO-8601 text."""
    if isinstance(value, str):
        return datetime.fromisoformat(value)
    return datetime.fromtimestamp(value / 1000 if value >= _MILLISECONDS_FROM else value, UTC)


_PLAIN: dict[str, Callable[[Any], Any]] = {
    "S": str,
    "SS": list,
    "BOOL": bool,
    "NULL": lambda _: None,
    "N": _number,
    "NS": lambda held: [_number(number) for number in held],
    "B": lambda held: b64decode(held).hex(),
    "BS": lambda held: [b64decode(part).hex() for part in held],
    "L": lambda held: [plain(part) for part in held],
    "M": lambda held: {name: plain(part) for name, part in held.items()},
}
"""DynamoDB's kinds of values, and what each becomes."""
