"""A pipeline's items in a DynamoDB table: reads, transactions, big values, and what AWS answers instead of a result.

Knows nothing of what the bytes mean.

The table has the partition key ``pipeline`` and the sort key ``item`` (both strings); a pipeline is one partition:

``meta``
    ``format``, ``version`` (that of the latest transaction), ``created_ms``; ``snapshot``, ``snapshot_parts``,
    ``snapshot_bytes`` and ``snapshot_version``: the latest snapshot's value, and what version it is of; absent before
    the first.
``log#<version>``
    One transaction: ``tx`` (its unique id), ``format``, and its changes as a value. ``snapshot`` and its three
    companions as in ``meta``: only in a transaction that puts a snapshot in force.
``dead#<version>``
    The dead letters of that transaction, as a value, and their ``count``; ``keys``: their shards, keys and sequences,
    compressed, where that is not long. It stays until the last of them is deleted.
``blob#<id>#<part>``
    A part of a value that is too long for the item that names it.
``waste#<id>``
    A value (its ``parts``) that nothing may name: written before a value's parts, deleted by the transaction that names
    them, put back by the one that no longer does. ``taken``: a sweep deletes the parts, and nothing will ever name them.

A *value* of at most ``INLINE_BYTES`` is the attribute ``data``. A longer one is ``blob`` (an id) and ``parts``, written
beforehand in pieces of ``INLINE_BYTES``.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

from botocore.exceptions import ClientError

from mldserver.base.aws import RETRYABLE, error_code, is_retryable
from mldserver.base.backoff import backoff
from mldserver.base.clock import Clock
from mldserver.errors import LedgerError, LedgerUnusable

INLINE_BYTES: Final = 350_000
"""An item holds 400 KB with the names and values of its attributes (AWS limit): this leaves 50 KB for the others."""

_BATCH: Final = 25
"""Requests in one BatchWriteItem (AWS limit)."""

_SENDINGS: Final = 6
"""How often a request is sent before its failure is the caller's: the pauses come to 1.5 to 3.1 s of throttling, and
to half a minute where every sending runs into the client's time-out."""

_TAKEN: Final = "taken"

_WAITS: Final = 60
"""How often a new table is asked whether it is active."""

Item = dict[str, Any]
"""An item in DynamoDB's own notation: ``{"name": {"S": "text"}}``."""


class ErrorMeaning(enum.Enum):
    """What an error means for the request that met it."""

    AGAIN = enum.auto()
    """Throttled, out of reach, answer lost, or another transaction held an item: the same request may be sent again."""
    CONDITION = enum.auto()
    """A condition does not hold: nothing of the request was written (or an earlier sending of it was)."""
    ABSENT = enum.auto()
    """The table does not exist."""
    EXISTS = enum.auto()
    """The table is there already, or is being made."""
    FATAL = enum.auto()
    """Sending it again would not help."""


_VERDICTS: Final = {
    "ConditionalCheckFailed": ErrorMeaning.CONDITION,
    "ConditionalCheckFailedException": ErrorMeaning.CONDITION,
    "ResourceNotFoundException": ErrorMeaning.ABSENT,
    "ResourceInUseException": ErrorMeaning.EXISTS,
} | dict.fromkeys(
    (*RETRYABLE, "TransactionConflict", "TransactionConflictException", "TransactionInProgressException"),
    ErrorMeaning.AGAIN,
)
"""By the codes of errors, and of a cancelled transaction's reasons."""

_ADVICE: Final = {
    "AccessDeniedException": "Give this server's role the permissions that mldserver/ledger/dynamodb.py lists.",
    "ExpiredTokenException": "Renew the AWS credentials.",
    "UnrecognizedClientException": "Check the AWS credentials and the region.",
    "NoCredentialsError": "Give the server AWS credentials (environment, profile, or the role of its host).",
    "NoRegionError": "Set the AWS region.",
}


def judge(error: Exception) -> ErrorMeaning:
    """Return what an error of a call means."""
    if is_retryable(error):
        return ErrorMeaning.AGAIN
    if not isinstance(error, ClientError):
        return ErrorMeaning.FATAL
    reasons = {reason.get("Code", "None") for reason in error.response.get("CancellationReasons", ())}
    codes = reasons - {"None"} or {error_code(error)}
    verdicts = {_VERDICTS.get(code, ErrorMeaning.FATAL) for code in codes}
    # One failed condition decides, even together with other reasons.
    return (
        ErrorMeaning.CONDITION if ErrorMeaning.CONDITION in verdicts else max(verdicts, key=lambda v: v.value)
    )


def translate(error: Exception, table: str, *, did: str) -> LedgerError:
    """Return the ledger's own error for one that a call ended with."""
    verdict = judge(error)
    if verdict is ErrorMeaning.ABSENT:
        return LedgerError(
            f"No ledger was found: DynamoDB has no table {table}.",
            did=did,
            advice="Create it with `mldserver ledger create`, or check its name and the region.",
            table=table,
        )
    code, again = error_code(error), verdict is ErrorMeaning.AGAIN
    what = f"DynamoDB is out of reach: {error}." if again else f"DynamoDB refused: {error}."
    lasts = "It is tried again by itself; look at AWS and the network when it lasts."
    unset = code in {"NoCredentialsError", "NoRegionError"}
    return (LedgerUnusable if unset else LedgerError)(
        what, did=did, advice=lasts if again else _ADVICE.get(code, ""), table=table, aws=code
    )


@dataclass(frozen=True, slots=True)
class Value:
    """Bytes as an item holds them: themselves, or the id and number of the parts."""

    data: bytes = b""
    blob: str | None = None
    parts: int = 0

    def attributes(self) -> Item:
        """Return the attributes that hold it."""
        if self.blob is None:
            return {"data": {"B": self.data}}
        return {"blob": {"S": self.blob}, "parts": {"N": str(self.parts)}}

    @classmethod
    def of(cls, item: Item) -> Value:
        """Return the value that an item holds."""
        if "blob" in item:
            return cls(blob=item["blob"]["S"], parts=int(item["parts"]["N"]))
        return cls(bytes(item["data"]["B"]))


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything up to a version, as a value. Before the first there is an empty one, of version 0."""

    version: int = 0
    bytes: int = 0
    value: Value = Value()

    def attributes(self) -> Item:
        """Return the attributes that name it."""
        assert self.value.blob is not None, "the empty snapshot is never written, and others are kept apart"
        return {
            "snapshot": {"S": self.value.blob},
            "snapshot_parts": {"N": str(self.value.parts)},
            "snapshot_bytes": {"N": str(self.bytes)},
            "snapshot_version": {"N": str(self.version)},
        }

    @classmethod
    def of(cls, item: Item) -> Snapshot | None:
        """Return the snapshot that an item names; None when it names none."""
        if "snapshot" not in item:
            return None
        value = Value(blob=item["snapshot"]["S"], parts=int(item["snapshot_parts"]["N"]))
        return cls(int(item["snapshot_version"]["N"]), int(item["snapshot_bytes"]["N"]), value)


def version_key(prefix: str, version: int) -> str:
    """Return the sort key of a version's item: text that sorts as the number does."""
    return f"{prefix}#{version:020d}"


@dataclass(kw_only=True, eq=False, slots=True)
class Table:
    """One pipeline's partition. Every read is strongly consistent. Raises LedgerError once retrying has not helped."""

    client: Any
    """An aioboto3 DynamoDB client that does not retry by itself."""
    name: str
    partition: str
    """Of its ledger: the name that the pipeline had first."""
    clock: Clock
    jitter: Callable[[], float]
    """Gives numbers from [0, 1)."""
    unique: Callable[[], str]
    """Gives a new id (at most 36 characters) at each call."""

    async def pause(self, failures: int, *, base: float = 0.1, cap: float = 2.0) -> None:
        """Wait after so many failures (from 1): longer each time, up to ``cap`` seconds, and each time otherwise."""
        await self.clock.sleep(backoff(failures, base, cap, self.jitter()))

    async def send(
        self, operation: str, *, foreseen: ErrorMeaning | None = None, did: str = "", **request: Any
    ) -> dict[str, Any] | None:
        """Send a request, with retries of temporary errors; return the answer, or None for the ``foreseen`` error."""
        call = getattr(self.client, operation)
        failures = 0
        while True:
            try:
                answer: dict[str, Any] = await call(**request)
            except Exception as error:
                verdict = judge(error)
                if verdict is foreseen:
                    return None
                failures += 1
                if verdict is not ErrorMeaning.AGAIN or failures == _SENDINGS:
                    raise translate(error, self.name, did=did) from error
            else:
                return answer
            await self.pause(failures)

    async def create(self) -> None:
        """Create the table (on-demand billing) unless it is there, and wait until it can be used."""
        await self.send(
            "create_table",
            foreseen=ErrorMeaning.EXISTS,
            TableName=self.name,
            BillingMode="PAY_PER_REQUEST",
            AttributeDefinitions=[
                {"AttributeName": "pipeline", "AttributeType": "S"},
                {"AttributeName": "item", "AttributeType": "S"},
            ],
            KeySchema=[
                {"AttributeName": "pipeline", "KeyType": "HASH"},
                {"AttributeName": "item", "KeyType": "RANGE"},
            ],
        )
        for _ in range(_WAITS):
            # For a moment AWS does not know the table that it has just agreed to make.
            answer = await self.send("describe_table", foreseen=ErrorMeaning.ABSENT, TableName=self.name)
            if answer is not None and answer["Table"]["TableStatus"] == "ACTIVE":
                return
            await self.clock.sleep(1.0)
        raise LedgerError(
            f"The DynamoDB table {self.name} is not active after {_WAITS} s.",
            advice="Look at it in the AWS console, and try again.",
            table=self.name,
        )

    def key(self, item: str) -> Item:
        """Return an item's key."""
        return {"pipeline": {"S": self.partition}, "item": {"S": item}}

    def put(self, item: str, attributes: Item, **condition: Any) -> dict[str, Any]:
        """Return a Put of a transaction."""
        return {"Put": {"TableName": self.name, "Item": self.key(item) | attributes, **condition}}

    def delete(self, item: str, **condition: Any) -> dict[str, Any]:
        """Return a Delete of a transaction."""
        return {"Delete": {"TableName": self.name, "Key": self.key(item), **condition}}

    async def transact(self, operations: list[dict[str, Any]], *, token: str) -> bool:
        """Write all or nothing; False when a condition does not hold.

        False may also follow a sending whose answer was lost and which did write: who must know looks at the log.
        """
        answer = await self.send(
            "transact_write_items",
            foreseen=ErrorMeaning.CONDITION,
            did="It is not known whether the transaction took place; the next call finds out.",
            TransactItems=operations,
            ClientRequestToken=token,
        )
        return answer is not None

    async def get(self, item: str) -> Item | None:
        """Return an item; None when it is not there."""
        answer = await self.send("get_item", TableName=self.name, Key=self.key(item), ConsistentRead=True)
        return None if answer is None else answer.get("Item")

    async def write(self, item: str, attributes: Item, condition: str | None = None) -> bool:
        """Write an item, whole; False when the condition on the one in its place does not hold."""
        request: dict[str, Any] = {"TableName": self.name, "Item": self.key(item) | attributes}
        if condition is not None:
            request["ConditionExpression"] = condition
        return await self.send("put_item", foreseen=ErrorMeaning.CONDITION, **request) is not None

    async def between(self, first: str, last: str, *, names: Iterable[str] = ()) -> AsyncIterator[Item]:
        """Yield the items from one sort key to another, in order; ``names``: only these attributes."""
        request: dict[str, Any] = {
            "TableName": self.name,
            "KeyConditionExpression": "pipeline = :p AND #item BETWEEN :first AND :last",
            "ExpressionAttributeNames": {"#item": "item"} | {f"#{name}": name for name in names},
            "ExpressionAttributeValues": {
                ":p": {"S": self.partition},
                ":first": {"S": first},
                ":last": {"S": last},
            },
            "ConsistentRead": True,
        }
        if names:
            request["ProjectionExpression"] = ", ".join(f"#{name}" for name in names)
        while True:
            page = await self.send("query", **request)
            assert page is not None, "no error was foreseen"
            for item in page["Items"]:
                yield item
            if "LastEvaluatedKey" not in page:
                return
            request["ExclusiveStartKey"] = page["LastEvaluatedKey"]

    async def keep(self, data: bytes, blob: str) -> Value:
        """Return a value that holds ``data``. A long one's parts are written now, as waste, under the unique id."""
        if len(data) <= INLINE_BYTES:
            return Value(data)
        pieces = [data[at : at + INLINE_BYTES] for at in range(0, len(data), INLINE_BYTES)]
        value = Value(blob=blob, parts=len(pieces))
        await self.put_waste(value)
        for part, piece in enumerate(pieces):
            await self.put_part(value, part, piece)
        return value

    async def put_waste(self, value: Value) -> None:
        """Note that nothing names a value, before its first part is written."""
        await self.write(f"waste#{value.blob}", {"parts": {"N": str(value.parts)}})

    async def put_part(self, value: Value, part: int, piece: bytes) -> None:
        """Write a part of a value."""
        assert value.blob is not None, "it is kept apart"
        await self.write(_part_key(value.blob, part), {"data": {"B": piece}})

    def named(self, value: Value, *, whole: bool = False) -> list[dict[str, Any]]:
        """Return the operations of a transaction that names a value, which then is not waste any more.

        ``whole``: the transaction fails if a sweep has taken the value.
        """
        condition = {
            "ConditionExpression": "attribute_exists(pipeline) AND attribute_not_exists(#taken)",
            "ExpressionAttributeNames": {"#taken": _TAKEN},
        }
        return [self.delete(f"waste#{value.blob}", **(condition if whole else {}))] if value.blob else []

    def unnamed(self, value: Value) -> list[dict[str, Any]]:
        """Return the operations of a transaction that stops naming a value."""
        if value.blob is None:
            return []
        return [self.put(f"waste#{value.blob}", {"parts": {"N": str(value.parts)}})]

    async def bytes_of(self, value: Value) -> bytes | None:
        """Return a value's bytes; None when parts of it are gone."""
        if value.blob is None:
            return value.data
        last = _part_key(value.blob, value.parts)
        parts = [bytes(item["data"]["B"]) async for item in self.between(_part_key(value.blob, 0), last)]
        return b"".join(parts) if len(parts) == value.parts else None

    async def waste(self) -> list[Value]:
        """Return values that nothing names, among them those of transactions that are under way."""
        return [
            Value(blob=item["item"]["S"].removeprefix("waste#"), parts=int(item["parts"]["N"]))
            async for item in self.between("waste#", "waste#~", names=("item", "parts"))
        ]

    async def is_waste(self, value: Value) -> bool:
        """Whether nothing names a value, and no sweep has taken it."""
        mark = await self.get(f"waste#{value.blob}")
        return mark is not None and _TAKEN not in mark

    async def discard(self, value: Value) -> None:
        """Delete a value if it is waste. From the first step on no transaction can name it any more."""
        taken = {"parts": {"N": str(value.parts)}, _TAKEN: {"N": "1"}}
        if await self.write(f"waste#{value.blob}", taken, "attribute_exists(pipeline)"):
            await self.delete_value(value)

    async def delete_value(self, value: Value) -> None:
        """Delete a value's parts, if it has any, and then what says that it is waste."""
        parts = [_part_key(value.blob, part) for part in range(value.parts) if value.blob]
        await self.delete_items(parts)
        await self.delete_items([f"waste#{value.blob}"] if parts else [])

    async def delete_items(self, items: list[str]) -> None:
        """Delete items; those that are gone do not matter. LedgerError when some are left: nothing relies on it."""
        for at in range(0, len(items), _BATCH):
            left = [{"DeleteRequest": {"Key": self.key(item)}} for item in items[at : at + _BATCH]]
            failures = 0
            while True:
                answer = await self.send("batch_write_item", RequestItems={self.name: left})
                assert answer is not None, "no error was foreseen"
                left = answer.get("UnprocessedItems", {}).get(self.name, [])
                if not left:
                    break
                # Throttled in part.
                failures += 1
                if failures == _SENDINGS:
                    raise LedgerError(
                        f"DynamoDB does not delete items of the table {self.name}: it is throttled.",
                        did="The next sweep goes on with it.",
                        table=self.name,
                    )
                await self.pause(failures)


def _part_key(blob: str, part: int) -> str:
    return f"blob#{blob}#{part:06d}"
