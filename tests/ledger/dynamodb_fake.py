"""DynamoDB in memory, as far as the ledger uses it, with AWS's limits as assertions and faults on request.

It stands in for an aioboto3 session: fast enough for thousands of transactions, where moto over HTTP proves the wire.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from botocore.exceptions import ClientError, ReadTimeoutError

from mldserver.effects import Effects
from mldserver.ledger.contract import Flush, PositionUpdate, Segment, ServerState
from mldserver.ledger.dynamodb import DynamoLedger
from mldserver.records import Sequence

if TYPE_CHECKING:
    Item = dict[str, Any]

PAGE_BYTES = 1_000_000


def client_error(code: str, operation: str, status: int = 400, **more: Any) -> ClientError:
    answer = {"Error": {"Code": code, "Message": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return ClientError(answer | more, operation)


def canceled(*codes: str) -> ClientError:
    reasons = [{"Code": code} for code in codes]
    return client_error("TransactionCanceledException", "TransactWriteItems", CancellationReasons=reasons)


def lost_answer() -> ReadTimeoutError:
    return ReadTimeoutError(endpoint_url="fake")


def size_of(item: Item) -> int:
    """Bytes of an item as AWS counts them: names and values."""
    return sum(len(name) + len(next(iter(value.values()))) for name, value in item.items())


class FakeDynamo:
    """A session and its client in one; every table is there."""

    def __init__(self) -> None:
        self.items: dict[str, dict[str, Item]] = {}
        self.before: list[Exception | None] = []
        """Errors that answer the next transactions, which do not happen; None: this one does."""
        self.after: list[Exception | None] = []
        """Errors in place of the answers to the next transactions that did happen."""
        self.clients = 0
        self.deletes_nothing = False

    @contextlib.asynccontextmanager
    async def client(self, *_: Any, **__: Any) -> AsyncIterator[FakeDynamo]:
        self.clients += 1
        try:
            yield self
        finally:
            self.clients -= 1

    def kinds(self, pipeline: str = "p") -> dict[str, int]:
        """How many items there are of each kind."""
        found: dict[str, int] = {}
        for name in self.items[pipeline]:
            kind = name.partition("#")[0]
            found[kind] = found.get(kind, 0) + 1
        return found

    def _place(self, key: Item) -> tuple[dict[str, Item], str]:
        return self.items.setdefault(key["pipeline"]["S"], {}), key["item"]["S"]

    async def get_item(self, **request: Any) -> dict[str, Any]:
        assert request["ConsistentRead"]
        partition, name = self._place(request["Key"])
        return {"Item": copy.deepcopy(partition[name])} if name in partition else {}

    async def put_item(self, **request: Any) -> dict[str, Any]:
        partition, name = self._place(request["Item"])
        if "ConditionExpression" in request:
            there = {"attribute_not_exists(pipeline)": False, "attribute_exists(pipeline)": True}
            if (name in partition) is not there[request["ConditionExpression"]]:
                raise client_error("ConditionalCheckFailedException", "PutItem")
        self._put(request["Item"])
        return {}

    def _put(self, item: Item) -> None:
        partition, name = self._place(item)
        assert size_of(item) <= 400 * 1024
        partition[name] = copy.deepcopy(item)

    async def query(self, **request: Any) -> dict[str, Any]:
        assert request["ConsistentRead"]
        assert request["KeyConditionExpression"] == "pipeline = :p AND #item BETWEEN :first AND :last"
        values = request["ExpressionAttributeValues"]
        partition = self.items.get(values[":p"]["S"], {})
        after = request.get("ExclusiveStartKey", {"item": {"S": ""}})["item"]["S"]
        names = request.get("ProjectionExpression", "").replace("#", "").split(", ")
        page: list[Item] = []
        size = 0
        for name in sorted(partition):
            if not (values[":first"]["S"] <= name <= values[":last"]["S"] and name > after):
                continue
            if size > PAGE_BYTES:
                return {"Items": page, "LastEvaluatedKey": page[-1]}
            item = partition[name]
            size += size_of(item)
            page.append({each: item[each] for each in item if names == [""] or each in names})
        return {"Items": page}

    async def batch_write_item(self, **request: Any) -> dict[str, Any]:
        ((table, requests),) = request["RequestItems"].items()
        assert len(requests) <= 25
        # Half of it, as under load, but always some.
        done = [] if self.deletes_nothing else requests[: (len(requests) + 1) // 2]
        for each in done:
            partition, name = self._place(each["DeleteRequest"]["Key"])
            partition.pop(name, None)
        left = requests[len(done) :]
        return {"UnprocessedItems": {table: left} if left else {}}

    async def transact_write_items(self, **request: Any) -> dict[str, Any]:
        assert 1 <= len(request["ClientRequestToken"]) <= 36
        operations = request["TransactItems"]
        self._within_limits(operations)
        if self.before and (error := self.before.pop(0)):
            raise error
        for operation in operations:
            ((_, told),) = operation.items()
            if "ConditionExpression" in told and not self._holds(told):
                raise canceled("None", "ConditionalCheckFailed")
        for operation in operations:
            ((kind, told),) = operation.items()
            getattr(self, f"_do_{kind.lower()}")(told)
        if self.after and (error := self.after.pop(0)):
            raise error
        return {}

    def _within_limits(self, operations: list[dict[str, Any]]) -> None:
        # Letters that run again end in it too: the last of an item deletes it, and what it named is waste.
        gone = [each["Delete"]["Key"]["item"]["S"] for each in operations if "Delete" in each]
        assert len(operations) <= min(100, 5 + 2 * sum(name.startswith("dead#") for name in gone))
        keys = []
        size = 0
        for operation in operations:
            ((kind, told),) = operation.items()
            key = told["Item"] if kind == "Put" else told["Key"]
            keys.append((key["pipeline"]["S"], key["item"]["S"]))
            size += size_of(told.get("Item", {}))
        assert len(set(keys)) == len(keys)
        assert size < 800_000

    def _holds(self, told: dict[str, Any]) -> bool:
        if told["ConditionExpression"] == "attribute_exists(pipeline) AND attribute_not_exists(#taken)":
            partition, name = self._place(told["Key"])
            return name in partition and told["ExpressionAttributeNames"]["#taken"] not in partition[name]
        if told["ConditionExpression"] == "attribute_not_exists(pipeline) OR attribute_exists(#partition)":
            partition, name = self._place(told["Item"])
            return told["ExpressionAttributeNames"]["#partition"] in partition.get(name, {"partition": None})
        assert told["ConditionExpression"] == "#version = :before AND #format <= :format"
        partition, name = self._place(told["Key"])
        values = told["ExpressionAttributeValues"]
        item = partition.get(name, {})
        return item.get("version") == values[":before"] and item["format"]["N"] <= values[":format"]["N"]

    def _do_put(self, told: dict[str, Any]) -> None:
        self._put(told["Item"])

    def _do_delete(self, told: dict[str, Any]) -> None:
        partition, name = self._place(told["Key"])
        partition.pop(name, None)

    def _do_update(self, told: dict[str, Any]) -> None:
        partition, name = self._place(told["Key"])
        for assignment in told["UpdateExpression"].removeprefix("SET ").split(", "):
            field, value = assignment.split(" = ")
            attribute = told["ExpressionAttributeNames"][field]
            partition[name][attribute] = told["ExpressionAttributeValues"][value]


def flush(shard: str, number: int, *, files: int = 1, letters: tuple[Any, ...] = ()) -> Flush:
    """The number-th flush of a shard (from 1), into one open window."""
    before = Sequence(number - 1) if number > 1 else None
    update = PositionUpdate(shard, 1, Sequence(number), None, None, previous=before)
    # Random names: what is registered cannot be compressed away.
    names = (f"{shard}/{number}/{n}-{os.urandom(40).hex()}" for n in range(files))
    return Flush(
        (update,), tuple(Segment(name, "w", 1, 9, 0, 10) for name in names), Effects(dead_letters=letters)
    )


async def start(ledger: DynamoLedger, *shards: str) -> DynamoLedger:
    await ledger.open()
    for shard in shards:
        await ledger.open_shard(shard)
    return ledger


async def beat(ledger: DynamoLedger, times: int = 1) -> Any:
    for ms in range(times):
        state = await ledger.sync(ServerState(ledger.server_id, ms, reason=os.urandom(50).hex()))
    return state
