"""A DynamoDB table in memory, with its streams: the contents behind ``FakeStreams``."""

from __future__ import annotations

import base64
import hashlib
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from mldserver.base.clock import Clock, SystemClock

_HASH_KEYS: Final = 2**128
_DIGIT_BORDER: Final = 10**24
"""Sequence numbers begin below it and grow a digit: compared as texts they would be out of order."""
_STEP: Final = 10**20
_IMAGE_IN_VIEW: Final = {"NewImage": "NEW", "OldImage": "OLD"}
"""An image is in the records if the view type's name contains this."""


@dataclass(slots=True)
class FakeShard:
    """One shard of a stream; closed once it was split, rolled over, or its stream disabled."""

    id: str
    parent: str | None
    low: int
    high: int
    number: int
    """The last sequence number that the shard has used; the first record's is greater."""
    first: int
    visible_ms: int
    """Steady time from which DescribeStream lists it."""
    closed: bool = False
    gone: bool = False
    """The whole shard was trimmed: AWS no longer knows it."""
    trimmed: int = -1
    """The last sequence number that was trimmed."""
    records: list[dict[str, Any]] = field(default_factory=list)
    """The records as GetRecords returns them, including trimmed ones."""


@dataclass(slots=True)
class TableStream:
    """One stream of the table; enabling the stream again creates another."""

    arn: str
    label: str
    created_ms: int
    status: str = "ENABLED"
    shards: dict[str, FakeShard] = field(default_factory=dict)


class FakeTable:
    """A table's items, and the shards of its streams. Items and shards change only through calls of the test."""

    def __init__(
        self,
        table: str = "orders",
        *,
        shards: int = 1,
        keys: tuple[str, ...] = ("id",),
        view: str = "NEW_AND_OLD_IMAGES",
        region: str = "us-east-1",
        clock: Clock | None = None,
        seed: int = 0,
    ) -> None:
        """Enable a stream of ``shards`` root shards; ``keys``: the table's hash key, and its range key if it has one."""
        self.table = table
        self.keys = keys
        self.view = view
        self.region = region
        self.clock: Clock = clock or SystemClock()
        self.whole_seconds = True
        """Whether creation times are cut to seconds, as AWS does."""
        self.ahead_ms = 0
        """How far AWS's clock is ahead of ``clock``, this host's clock."""
        self.items: dict[bytes, dict[str, Any]] = {}
        """The table's items on the wire, by their keys."""
        self.random = random.Random(seed)  # noqa: S311  # a script that repeats, not secrets
        self.streams: list[TableStream] = []
        """The newest is the last."""
        self.enable(shards=shards)

    @property
    def arn(self) -> str:
        """The newest stream's ARN."""
        return self.streams[-1].arn

    @property
    def shards(self) -> dict[str, FakeShard]:
        """The newest stream's shards, including those that are trimmed or not visible yet."""
        return self.streams[-1].shards

    @property
    def open_shards(self) -> tuple[str, ...]:
        """Ids of the shards that take records, oldest first."""
        return tuple(shard.id for shard in self.shards.values() if not shard.closed)

    def now_ms(self) -> int:
        """Return the time of day by AWS's clock."""
        return self.clock.now_ms() + self.ahead_ms

    def enable(self, *, shards: int = 1) -> str:
        """Enable a new stream, and return its ARN."""
        now_ms = self.now_ms() + len(self.streams)
        label = f"stream-{now_ms}"
        arn = f"arn:aws:dynamodb:{self.region}:123456789012:table/{self.table}/stream/{label}"
        if self.streams:
            self.disable()
        self.streams.append(TableStream(arn, label, now_ms))
        borders = [_HASH_KEYS * index // shards for index in range(shards + 1)]
        for index in range(shards):
            self._add_shard(None, borders[index], borders[index + 1] - 1)
        return arn

    def disable(self) -> None:
        """Disable the newest stream: its shards close, and can be read to their ends."""
        self.streams[-1].status = "DISABLED"
        for shard in self.shards.values():
            shard.closed = True

    def forget(self, arn: str) -> None:
        """Delete a stream, as DynamoDB does a day after it was disabled."""
        self.streams[:] = [stream for stream in self.streams if stream.arn != arn]

    def put(
        self, item: Mapping[str, Any], *, shard_id: str | None = None, at_ms: int | None = None
    ) -> dict[str, Any] | None:
        """Put an item of Python values (numbers as Decimal or int); return its record, None when nothing changed.

        ``shard_id``: another shard than that of its key; ``at_ms``: another creation time than now. Raises ValueError
        for a closed shard.
        """
        new = _serialized(item)
        key = {name: new[name] for name in self.keys}
        old = self.items.get(_canonical_json(key))
        if old == new:
            return None
        self.items[_canonical_json(key)] = new
        images = {"NewImage": new} if old is None else {"NewImage": new, "OldImage": old}
        return self._add_record("INSERT" if old is None else "MODIFY", key, images, shard_id, at_ms)

    def delete(
        self,
        key: Mapping[str, Any],
        *,
        expired: bool = False,
        shard_id: str | None = None,
        at_ms: int | None = None,
    ) -> dict[str, Any] | None:
        """Delete or expire (TTL) an item by its key; return the stream's record, None if the item did not exist."""
        given = _serialized(key)
        wire = {name: given[name] for name in self.keys}
        old = self.items.pop(_canonical_json(wire), None)
        if old is None:
            return None
        record = self._add_record("REMOVE", wire, {"OldImage": old}, shard_id, at_ms)
        if expired:
            record["userIdentity"] = {"PrincipalId": "dynamodb.amazonaws.com", "Type": "Service"}
        return record

    def split(self, shard_id: str, *, children: int = 2, visible_after: float = 0.0) -> tuple[str, ...]:
        """Close a shard and open its children (one: it rolls over); return their ids.

        They take records at once, but are listed only ``visible_after`` seconds later. Raises ValueError when closed.
        """
        parent = self._open_shard(shard_id)
        parent.closed = True
        width = parent.high - parent.low + 1
        borders = [parent.low + width * index // children for index in range(children + 1)]
        return tuple(
            self._add_shard(parent, borders[index], borders[index + 1] - 1, visible_after)
            for index in range(children)
        )

    def add_root(self, *, visible_after: float = 0.0) -> str:
        """Open a shard without a parent, which takes only what is put there by name; return its id."""
        return self._add_shard(None, 0, -1, visible_after)

    def trim(self, shard_id: str, *, through: int | None = None) -> None:
        """Drop a shard's records up to a sequence number; None: the whole shard, which AWS then no longer knows."""
        shard = self.shards[shard_id]
        shard.trimmed = shard.number if through is None else through
        shard.gone = through is None

    def _add_shard(self, parent: FakeShard | None, low: int, high: int, visible_after: float = 0.0) -> str:
        """Open a shard of the newest stream for the hash keys from ``low`` to ``high``; return its id."""
        shards, stream = self.shards, self.streams[-1]
        shard_id = f"shardId-{stream.created_ms:020d}-{len(shards):08x}"
        # Numbers of unrelated shards say nothing about each other.
        last = _DIGIT_BORDER - self.random.randint(2, 40) * _STEP if parent is None else parent.number
        visible_ms = self.clock.steady_ms() + round(visible_after * 1000)
        if parent is not None:
            visible_ms = max(visible_ms, parent.visible_ms)
        name = None if parent is None else parent.id
        shards[shard_id] = FakeShard(shard_id, name, low, high, last + 1, last + 1, visible_ms)
        return shard_id

    def _open_shard(self, shard_id: str) -> FakeShard:
        shard = self.shards[shard_id]
        if shard.closed:
            raise ValueError(f"{shard_id} is closed")
        return shard

    def _add_record(
        self, event: str, key: dict[str, Any], images: dict[str, Any], shard_id: str | None, at_ms: int | None
    ) -> dict[str, Any]:
        """Add a record of a change to the shard of its key's hash, or to ``shard_id``; return it as GetRecords does."""
        if shard_id is None:
            hash_key = int.from_bytes(
                hashlib.md5(_canonical_json(key[self.keys[0]]), usedforsecurity=False).digest(), "big"
            )
            shard = next(
                each for each in self.shards.values() if not each.closed and each.low <= hash_key <= each.high
            )
        else:
            shard = self._open_shard(shard_id)
        shard.number += self.random.randint(1, _STEP)
        milliseconds = self.now_ms() if at_ms is None else at_ms
        created = milliseconds // 1000 if self.whole_seconds else milliseconds / 1000
        images_in_view = {name: image for name, image in images.items() if _IMAGE_IN_VIEW[name] in self.view}
        content = {
            "ApproximateCreationDateTime": created,
            "Keys": key,
            **images_in_view,
            "SequenceNumber": str(shard.number),
            "SizeBytes": sum([len(_canonical_json(each)) for each in (key, *images_in_view.values())]),
            "StreamViewType": self.view,
        }
        record = {
            "eventID": hashlib.md5(f"{shard.id}{shard.number}".encode(), usedforsecurity=False).hexdigest(),
            "eventName": event,
            "eventVersion": "1.1",
            "eventSource": "aws:dynamodb",
            "awsRegion": self.region,
            "dynamodb": content,
        }
        shard.records.append(record)
        return record


def _serialized(item: Mapping[str, Any]) -> dict[str, Any]:
    from boto3.dynamodb.types import TypeSerializer  # noqa: PLC0415  # it is slow to import

    serialize = TypeSerializer().serialize
    return {name: serialize(value) for name, value in item.items()}


def as_json(value: Any) -> str:
    """Return bytes in the wire's JSON form (base64): the default of ``orjson.dumps``."""
    return base64.b64encode(value).decode()


def _canonical_json(value: Mapping[str, Any]) -> bytes:
    return orjson.dumps(value, default=as_json, option=orjson.OPT_SORT_KEYS)
