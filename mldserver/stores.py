"""Keyed state as plain values: what a handler keeps for each partition key, on its way between worker, coordinator and files.

A *store* holds the state of many keys. On Kinesis each shard has a store, for the range of MD5 hashes that the shard covers. On
DynamoDB Streams, which names no ranges, all descendants of a root shard share one store.

A key's state is a dict. It travels and is stored as MessagePack. A key may also have timers, each under its id
(``callback`` or ``callback/name``). A batch's changes are one blob (``pack_changes``): the last value of each key, and of each
timer, that the batch changed. A later blob of the same store replaces the values of an earlier one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import msgspec

if TYPE_CHECKING:
    import pyarrow as pa

_SHOWN: Final = 20


class KeyRange(NamedTuple):
    """A range of MD5 hashes of partition keys, both bounds inclusive (ListShards: HashKeyRange)."""

    first: int
    last: int

    def __contains__(self, hashed: object) -> bool:
        return isinstance(hashed, int) and self.first <= hashed <= self.last


def divide(ranges: Iterable[KeyRange], at: KeyRange) -> tuple[tuple[KeyRange, ...], tuple[KeyRange, ...]]:
    """Return the parts of ranges that lie inside another range, and the parts outside."""
    inside, outside = [], []
    for each in ranges:
        inside.append(KeyRange(max(each.first, at.first), min(each.last, at.last)))
        outside.append(KeyRange(each.first, min(each.last, at.first - 1)))
        outside.append(KeyRange(max(each.first, at.last + 1), each.last))
    return _not_empty(inside), _not_empty(outside)


def _not_empty(ranges: Iterable[KeyRange]) -> tuple[KeyRange, ...]:
    return tuple(each for each in ranges if each.first <= each.last)


ALL_KEYS: Final = KeyRange(0, (1 << 128) - 1)
"""The range of a store whose shards have no ranges."""


def key_bytes(key: str) -> bytes:
    """Return a partition key as state files hold it: UTF-8, where lone surrogates stand as they are."""
    return key.encode("utf-8", "surrogatepass")


def key_text(key: bytes) -> str:
    """Return the partition key that ``key_bytes`` made bytes of."""
    return str(key, "utf-8", "surrogatepass")


def hash_of(key: bytes) -> int:
    """Return the hash by which Kinesis places a key (``key_bytes``) in a shard: MD5 as an unsigned number of 128 bits."""
    return int.from_bytes(hashlib.md5(key, usedforsecurity=False).digest(), "big")


class StoreClaim(NamedTuple):
    """A shard that is opened needs a store. Its source says which part of the keys the store holds."""

    key_range: KeyRange | None
    """The shard's range of hashes (Kinesis): it has a store for that range. None: it shares the store of its parent, or, without a
    parent, has one for all keys (DynamoDB Streams)."""


class StateChange(NamedTuple):
    """The new state of one key, or one of its timers."""

    key: bytes
    """See ``key_bytes``."""
    value: bytes | None
    """The dict in MessagePack, or of a timer ``[number, attempt, payload]``; None: it is gone."""
    expires_ms: int | None = None
    """From this time on the state counts as absent (``state_ttl``); None: it stays. Of a timer, when it is due: it never expires."""
    timer: str = ""
    """The timer's id, ``callback`` or ``callback/name``; empty: it is the key's state."""


class ChangeColumns(NamedTuple):
    """The changes of a batch, at most one for each key and timer. The lists are parallel: they take a third of the time of tuples."""

    keys: list[bytes]
    values: list[bytes | None]
    expiries: list[int | None]
    timers: Sequence[str] = ()
    """Ids of timers; empty text: the key's state. Without items there are no timers."""


class TimerEntry(NamedTuple):
    """A timer that is set."""

    due_ms: int
    payload: bytes
    """In MessagePack."""
    attempt: int = 0
    """How many of its calls have failed."""
    number: int = 0
    """Of the timers of a store, one that was set later has a higher number. Those of a key that are due together fire in this order."""


_COLUMNS: Final = msgspec.msgpack.Decoder(ChangeColumns)
_TIMER: Final = msgspec.msgpack.Decoder(tuple[int, int, msgspec.Raw])
_encode: Final = msgspec.msgpack.Encoder().encode


def pack_columns(columns: ChangeColumns) -> bytes:
    """Return changes as one blob."""
    return msgspec.msgpack.encode(columns)


def unpack_columns(blob: bytes) -> ChangeColumns:
    """Return the changes in a blob. Raises msgspec.DecodeError for other bytes."""
    return _COLUMNS.decode(blob)


def pack_changes(changes: Iterable[StateChange]) -> bytes:
    """Return changes, at most one for each key and timer, as one blob."""
    rows = list(changes)
    keys, values, timers = [row.key for row in rows], [row.value for row in rows], [row.timer for row in rows]
    return pack_columns(
        ChangeColumns(keys, values, [row.expires_ms for row in rows], timers if any(timers) else ())
    )


def unpack_changes(blob: bytes) -> list[StateChange]:
    """Return the changes in a blob one by one. Raises msgspec.DecodeError for other bytes."""
    keys, values, expiries, timers = unpack_columns(blob)
    return list(map(StateChange, keys, values, expiries, timers or repeat("")))


def pack_timer(entry: TimerEntry) -> bytes:
    """Return a timer's value as state files hold it; its due time has a column of its own."""
    return _encode((entry.number, entry.attempt, msgspec.Raw(entry.payload)))


def unpack_timer(due_ms: int, value: bytes) -> TimerEntry:
    """Return the timer with this due time and value. Raises msgspec.MsgspecError for other bytes."""
    number, attempt, payload = _TIMER.decode(value)
    return TimerEntry(due_ms, bytes(payload), attempt, number)


class StateSnapshot(msgspec.Struct, frozen=True):
    """The state of a store at one moment, with which a process begins."""

    store_id: str
    key_range: KeyRange
    """Keys outside this range belong to other stores."""
    accepted: int
    """The number of the last outcome that it contains of the shard's present session: the next delivery's ``number`` is one more."""
    clock_ms: int | None
    """The effective time of the shard's last record in it; None: it has none. State that expires at or before it is left out."""
    entries: pa.Table
    """``key`` binary, ``value`` binary, ``expires_ms`` int64 (null: never), ``timer`` string (null: the key's state; without the
    column there are no timers). One row for each key and timer, in any order; see ``StateChange``."""
    siblings: dict[str, int] = {}
    """``accepted`` of each other shard of the store that has a session, at the same moment (families of DynamoDB Streams).

    A runtime that loads the snapshot replaces its copy of the whole store, whichever shard the snapshot was read for. It counts on
    from these numbers for the other shards that it has open.
    """


class StoreSize(NamedTuple):
    """How much state a process holds of one store."""

    store_id: str
    """Empty: of several stores together."""
    keys: int
    bytes: int
    """About how much memory they take."""


def largest(sizes: Iterable[StoreSize]) -> tuple[StoreSize, ...]:
    """Return the largest stores, the largest first; beyond 20 the others count together."""
    ordered = sorted(sizes, key=lambda size: (not size.store_id, -size.bytes, size.store_id))
    shown, others = ordered[:_SHOWN], ordered[_SHOWN:]
    if others:
        shown.append(StoreSize("", sum(size.keys for size in others), sum(size.bytes for size in others)))
    return tuple(shown)


def nearly_full(sizes: Iterable[StoreSize], state_bytes: int) -> str | None:
    """Return why a server needs an operator whose state takes 90 % of its limit or more, as a clause; None below that."""
    sizes = tuple(sizes)
    used = sum(size.bytes for size in sizes)
    if 10 * used < 9 * state_bytes:
        return None
    most = max(sizes, key=lambda size: (size.store_id != "", size.bytes))
    return (
        f"keyed state takes {used / 2**20:,.0f} of {state_bytes / 2**20:,.0f} MiB (state_bytes), most of it in the store "
        f"{most.store_id} with {most.keys:,} keys: raise state_bytes, or let keys expire sooner with state_ttl"
    )


SnapshotSource: TypeAlias = "Callable[[], Awaitable[StateSnapshot]]"
"""Reads a shard's store as it is now: the ledger's files, and the accepted batches that are not durable yet."""
