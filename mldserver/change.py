"""A change of a DynamoDB table: a record whose payload describes how one item changed. Pure; boto3 decodes the values.

The payload is JSON. Its shape is the same from all sources, except for times and numbers:

* from DynamoDB Streams, as Lambda gets it, too: times in seconds;
* through KCL 1.x and its adapter for DynamoDB Streams: times in milliseconds, partition keys null;
* from Kinesis Data Streams for DynamoDB: times in milliseconds or microseconds, no sequence number inside.

Binaries are base64 in all three.
"""

from __future__ import annotations

import contextlib
from base64 import b64decode
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any, Final, Literal

import orjson

from mldserver.records import Fatal, Record, RecordMethods

Kind = Literal["insert", "update", "delete"]

KINDS: Final[dict[str, Kind]] = {"INSERT": "insert", "MODIFY": "update", "REMOVE": "delete"}
"""DynamoDB's names of events, and ours."""
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_UNITS: Final = ((10**11, "seconds"), (10**14, "milliseconds"), (10**17, "microseconds"))
"""Upper limits of a number since the epoch, and its unit if it is below that limit and not below the one before.

So each unit covers times from 1973 to 5138, and seconds also those before. The payload's own field for the precision is not
used, because older payloads do not have it.
"""
_TTL: Final = "dynamodb.amazonaws.com"


class NotAChange(Fatal):
    """The payload of a record is not a change of a DynamoDB table. The server does not retry it: a retry cannot succeed."""


class Change(RecordMethods):
    """One change of an item of a DynamoDB table. It has all attributes of its record, too.

    The payload is decoded when an attribute first needs it. These attributes raise NotAChange if the payload is not a
    change: ``kind``, ``event_id``, ``keys``, ``old``, ``new``, ``created_at``, ``expired``.
    """

    record: Any
    """The record whose payload holds the change."""

    def __init__(self, record: Record, *, plain_numbers: bool = False) -> None:
        """Create a change from ``record``, for example in a test.

        Numbers are Decimal. With ``plain_numbers`` a whole number is an int, and any other a float. A float holds 15
        digits, a DynamoDB number 38.
        """
        self.record = record
        self.plain_numbers = plain_numbers

    if not TYPE_CHECKING:  # a type checker would take any name for an attribute

        def __getattr__(self, name: str) -> Any:
            """Return the attribute of the record."""
            return getattr(self.record, name)

    @property
    def kind(self) -> Kind:
        """The kind of change: ``insert``, ``update`` or ``delete``."""
        return KINDS[self._event["eventName"]]

    @property
    def event_id(self) -> str:
        """DynamoDB's id of the change, the same at each delivery; empty if the payload has none."""
        return str(self._event.get("eventID") or "")

    @cached_property
    def keys(self) -> dict[str, Any]:
        """The item's key attributes, by name."""
        return self._item("Keys") or {}

    @cached_property
    def old(self) -> dict[str, Any] | None:
        """The item before the change; None after an insert, or if the stream's view type omits it."""
        return self._item("OldImage")

    @cached_property
    def new(self) -> dict[str, Any] | None:
        """The item after the change; None after a delete, or if the stream's view type omits it."""
        return self._item("NewImage")

    @cached_property
    def created_at(self) -> datetime:
        """When the table changed: an aware UTC datetime. DynamoDB Streams give whole seconds.

        The payload has it as ISO text, or as a number since the epoch whose size tells its unit.
        """
        time = self._event["dynamodb"].get("ApproximateCreationDateTime")
        if isinstance(time, str):
            with contextlib.suppress(ValueError):
                parsed = datetime.fromisoformat(time)
                # Text without a time zone is UTC.
                return (parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).astimezone(UTC)
        elif isinstance(time, int | float) and not isinstance(time, bool) and time >= 0:
            for limit, unit in _UNITS:
                if time < limit:
                    return _EPOCH + timedelta(**{unit: time})
        raise self._bad(f"its ApproximateCreationDateTime is {time!r}, no time")

    @property
    def expired(self) -> bool:
        """Whether DynamoDB deleted the item because its time to live had passed."""
        identity = self._event.get("userIdentity")
        if self.kind != "delete" or not isinstance(identity, dict):
            return False
        return _TTL in (identity.get("principalId"), identity.get("PrincipalId"))

    @property
    def raw_data(self) -> str | bytes | None:
        """The payload as received (base64 text), or its bytes once it was decoded."""
        return self.record.raw_data  # type: ignore[no-any-return]  # a record is of several classes

    def __repr__(self) -> str:
        """Name the change without its payload."""
        return f"<Change {self.shard_id} {self.sequence}>"

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle as a change that is not decoded yet."""
        return partial(Change, plain_numbers=self.plain_numbers), (self.record,)

    @cached_property
    def _event(self) -> dict[str, Any]:
        try:
            event = orjson.loads(self.record.data)
        except orjson.JSONDecodeError as error:
            raise self._bad(f"its data is no JSON ({error})") from None
        if not isinstance(event, dict):
            raise self._bad(f"its data is {type(event).__name__} in JSON, no object")
        name, images = event.get("eventName"), event.get("dynamodb")
        if not isinstance(name, str) or name not in KINDS:
            raise self._bad(f"its eventName is {name!r}, none of {', '.join(KINDS)}")
        if not isinstance(images, dict) or not isinstance(images.get("Keys"), dict):
            raise self._bad("it has no dynamodb.Keys")
        return event

    def _item(self, name: str) -> dict[str, Any] | None:
        image = self._event["dynamodb"].get(name)
        if image is None:
            return None
        deserialize = deserializer(plain_numbers=self.plain_numbers)
        try:
            return {attribute: deserialize(value) for attribute, value in image.items()}
        # See ``deserializer``: what boto3 raises for malformed values.
        except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise self._bad(f"its {name} is not in DynamoDB's notation: {error}") from error

    def _bad(self, why: str) -> NotAChange:
        """Return the error to raise. It names the record, so that a hook for a whole batch fails for this record alone."""
        return NotAChange(
            f"record {self.sequence} is not a change of a DynamoDB table: {why}", records=[self.record]
        )


# What users hold is a Record for ``isinstance`` too.
Record.register(Change)


@cache
def deserializer(*, plain_numbers: bool) -> Any:
    """Return a function that decodes one DynamoDB value in JSON, such as ``{"N": "1"}``, to a Python value.

    It is boto3's, with two differences: binaries, which are base64 text in JSON, become bytes; and with ``plain_numbers`` a
    whole number becomes an int and any other a float, instead of Decimal.

    For a malformed value the function raises TypeError, ValueError, AttributeError or ArithmeticError. A number that has
    more than 38 digits, or is out of DynamoDB's range, raises decimal.Inexact, an ArithmeticError.
    """
    from boto3.dynamodb.types import TypeDeserializer  # noqa: PLC0415  # only programs with changes load it

    class Deserializer(TypeDeserializer):  # type: ignore[misc]  # boto3 has no types
        def _deserialize_b(self, value: str) -> bytes:
            return b64decode(value, validate=True)

        def _deserialize_n(self, value: str) -> int | float | Decimal:
            number: Decimal = super()._deserialize_n(value)
            if not number.is_finite():  # boto3 returns NaN for text that is not a number
                raise ValueError(f"{value!r} is no number")
            if not plain_numbers:
                return number
            return int(number) if number == number.to_integral_value() else float(number)

    return Deserializer().deserialize
