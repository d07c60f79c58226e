"""The live copy of a store: the state of its keys, and the changes of the batch that runs. Pure.

A call reads the state of its record's key, and changes it when it succeeds (``CallContext``). The changes of a batch count
together: ``effects`` returns them when the batch is done, and ``begin`` takes back what an earlier batch left unfinished.

Expiry is compared with the running maximum of the shard's arrival times, never with a clock, so that a replay of the same
records finds the same state.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from datetime import datetime
from itertools import starmap
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import pyarrow.compute as pc

from mldserver.errors import KeyElsewhere, StateFull, StateTooLarge
from mldserver.handler.context import NO_SETTINGS, Context, no_key, replace_state
from mldserver.handler.queries import Queries
from mldserver.handler.timers import Timer, Timers, time_at
from mldserver.runtime.state_values import (
    MAX_ID_BYTES,
    MAX_PAYLOAD_BYTES,
    MAX_STATE_BYTES,
    MAX_TIMERS,
    decode_state,
    encode_payload,
    encode_state,
)
from mldserver.runtime.timer_table import DueTimer, TimerTable, timer_of
from mldserver.stores import (
    ALL_KEYS,
    ChangeColumns,
    KeyRange,
    StateSnapshot,
    TimerEntry,
    hash_of,
    key_bytes,
    key_text,
    pack_columns,
)

if TYPE_CHECKING:
    import pyarrow as pa

    from mldserver.handler.spec import TimerHook
    from mldserver.records import RecordMethods

STATE_BYTES: Final = 256 * 1024 * 1024
"""The default limit of the memory that state takes."""

_ENTRY_BYTES: Final = 240
"""What an entry takes in memory in addition to its key and value: three objects and its place in the dict."""
_DAY_MS: Final = 24 * 3600 * 1000
_SWEEPS: Final = 8
"""Expired entries are searched so often within ``state_ttl``: they add at most an eighth to the memory."""

NO_TIMERS: Final[Mapping[str, TimerHook]] = MappingProxyType({})

_Entry = tuple[bytes, int | None]
"""A key's value, and when it expires (ms)."""


class KeyedState:
    """The state of one store, in the process that runs its handler."""

    def __init__(
        self,
        store_id: str,
        *,
        key_range: KeyRange = ALL_KEYS,
        ttl_ms: int | None = None,
        entries: Iterable[tuple[bytes, bytes, int | None]] = (),
        timers: TimerTable | None = None,
    ) -> None:
        """Create a store's copy from entries: key (``key_bytes``), value in MessagePack, expiry in ms or None.

        ``timers``: None for a handler without callbacks of timers.
        """
        self.store_id = store_id
        self.key_range = key_range
        self.applied: dict[str, int] = {}
        """By open shard, how many outcomes of its session are in here."""
        self.clocks: dict[str, int] = {}
        """By open shard, the latest arrival time (ms) of its records; without shards that had none."""
        self.room = STATE_BYTES
        """How many bytes state and timers may take (``memory``)."""
        self.batch: object = None
        """The batch that ``begin`` was called for last."""
        self.timers = timers
        self._ranged = key_range != ALL_KEYS
        self._ttl_ms = ttl_ms
        self._entries: dict[str, _Entry] = {
            key_text(key): (value, expires_ms) for key, value, expires_ms in entries
        }
        self._bytes = sum(_ENTRY_BYTES + len(key) + len(value) for key, (value, _) in self._entries.items())
        self.timed = ttl_ms is not None or any(expires for _, expires in self._entries.values())
        """Whether entries may expire, so that the times of calls matter."""
        self._before: dict[str, _Entry | None] = {}
        """The entries that the batch has changed, as they were before it."""
        self._shard_id = ""
        self._clock_ms = 0
        self._swept_ms = 0

    @classmethod
    def loaded(
        cls,
        snapshot: StateSnapshot,
        shard_id: str,
        *,
        ttl_ms: int | None,
        clocks: Mapping[str, int],
        hooks: Mapping[str, TimerHook] = NO_TIMERS,
    ) -> KeyedState:
        """Return the copy of a snapshot that was read for a shard.

        ``clocks``: those of the store's other open shards. ``hooks``: the handler's callbacks of timers. Without any, timers are
        left out.
        """
        entries, timers = snapshot.entries, None
        if "timer" in entries.column_names:
            is_state = entries["timer"].is_null()
            if hooks:
                columns = _columns(entries.filter(pc.invert(is_state)), "key", "timer", "expires_ms", "value")
                timers = TimerTable(hooks, zip(map(key_text, columns[0]), *columns[1:], strict=True))
            entries = entries.filter(is_state)
        state = cls(
            snapshot.store_id,
            key_range=snapshot.key_range,
            ttl_ms=ttl_ms,
            entries=zip(*_columns(entries, "key", "value", "expires_ms"), strict=True),
            timers=timers or (TimerTable(hooks) if hooks else None),
        )
        state.applied = {**snapshot.siblings, shard_id: snapshot.accepted}
        own = {} if snapshot.clock_ms is None else {shard_id: snapshot.clock_ms}
        state.clocks = {**clocks, **own}
        return state

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def memory(self) -> int:
        """About how many bytes of memory state and timers take."""
        return self._bytes + (0 if self.timers is None else self.timers.bytes)

    def stands_at(self, shard_id: str, number: int | None) -> bool:
        """Return whether this is the copy that a shard's batch with this number needs; None: any will do."""
        return number is None or self.applied.get(shard_id, 0) + 1 == number

    def begin(self, shard_id: str, batch: object) -> None:
        """Begin a batch of a shard. Changes of a batch that did not come to its end are taken back."""
        for key, entry in self._before.items():
            self._put(key, self._entries.get(key), entry)
        self._before.clear()
        if self.timers is not None:
            self.timers.begin()
        self.batch = batch
        self._shard_id = shard_id
        self._clock_ms = self.clocks.get(shard_id, 0)

    def read(self, key: str, at_ms: int) -> dict[str, Any]:
        """Return the state of a key at the effective time ``at_ms`` of a record; the caller may change the dict.

        Raises KeyElsewhere.
        """
        entry = self._entries.get(key)
        if entry is not None:
            return {} if self._expired(entry, at_ms) else decode_state(entry[0])
        self.admit(key)
        return {}

    def admit(self, key: str) -> None:
        """Raise KeyElsewhere for a key that does not belong to the store."""
        if self._ranged and key not in self._entries and hash_of(key_bytes(key)) not in self.key_range:
            raise KeyElsewhere(
                f"The partition key {key!r:.100} hashes outside the range of its shard ({self.store_id}).",
                did="The call failed: another shard has the state of this key.",
                advice="Do not put records with explicit hash keys; for aggregates see `mldserver help handlers`.",
            )

    def write(self, key: str, state: dict[str, Any], at_ms: int) -> None:
        """Take the state of a key from a call that succeeded. Raises TypeError, StateTooLarge and StateFull."""
        held = self._entries.get(key)
        before = None if held is None or self._expired(held, at_ms) else held[0]
        entry: _Entry | None = None
        if state:
            value = encode_state(state, before)
            if value is before:
                return
            if len(value) > MAX_STATE_BYTES:
                raise StateTooLarge(
                    f"The state of the key {key!r:.100} takes {len(value):,} bytes; the limit is {MAX_STATE_BYTES:,}.",
                    did="The call failed, and the state is as before it.",
                    advice="Keep less in it, or choose smaller partition keys.",
                )
            if held is None:
                self.demand_room()
            entry = value, None if self._ttl_ms is None else max(at_ms, self._clock_ms) + self._ttl_ms
        elif before is None:
            return
        if key not in self._before:
            self._before[key] = held
        self._put(key, held, entry)

    def demand_room(self) -> None:
        """Raise StateFull if there is no room for a new key or timer."""
        if self.memory >= self.room:
            timers = "" if self.timers is None else f" and of {len(self.timers):,} timers"
            raise StateFull(
                f"The state of {len(self._entries):,} keys{timers} in the store {self.store_id} takes {self.memory:,} bytes.",
                did="The call failed: new keys and timers have no room.",
                advice="Raise state_bytes, or let keys expire sooner with state_ttl.",
            )

    def effects(self, *, latest_ms: int | None, counts: bool, moves: bool) -> tuple[bytes, ...]:
        """End the batch; return its changes as at most one blob.

        ``latest_ms``: the latest arrival time of its records. ``counts``: whether it is an outcome of the shard's session
        (and not a part of one). ``moves``: whether its records come in the shard's order, so that they move its clock.
        """
        changed = [
            (key, now or (None, None))
            for key, before in self._before.items()
            if (now := self._entries.get(key)) != before
        ]
        self._before.clear()
        if counts:
            self.applied[self._shard_id] = self.applied.get(self._shard_id, 0) + 1
        if moves and latest_ms is not None:
            self.clocks[self._shard_id] = max(self._clock_ms, latest_ms)
            self._sweep()
        of_timers = [] if self.timers is None else self.timers.changes()
        if not changed and not of_timers:
            return ()
        keys, values = [key_bytes(key) for key, _ in changed], [entry[0] for _, entry in changed]
        columns = ChangeColumns(keys, values, [entry[1] for _, entry in changed])
        if of_timers:
            columns = columns._replace(
                timers=[""] * len(changed) + [timer_id for _, timer_id, _, _ in of_timers]
            )
            columns.keys.extend([key_bytes(key) for key, _, _, _ in of_timers])
            columns.expiries.extend([due_ms for _, _, due_ms, _ in of_timers])
            columns.values.extend([value for _, _, _, value in of_timers])
        return (pack_columns(columns),)

    def forget(self, shard_id: str) -> None:
        """Forget a shard that is not open any more."""
        self.applied.pop(shard_id, None)
        self.clocks.pop(shard_id, None)

    def _expired(self, entry: _Entry, at_ms: int) -> bool:
        expires_ms = entry[1]
        return expires_ms is not None and (expires_ms <= at_ms or expires_ms <= self._clock_ms)

    def _put(self, key: str, held: _Entry | None, entry: _Entry | None) -> None:
        """Replace the entry of a key (``held``) by another; None: there is none."""
        if held is not None and entry is not None:
            self._bytes += len(entry[0]) - len(held[0])
            self._entries[key] = entry
        elif entry is not None:
            self._bytes += _ENTRY_BYTES + len(key) + len(entry[0])
            self._entries[key] = entry
        elif held is not None:
            self._bytes -= _ENTRY_BYTES + len(key) + len(held[0])
            del self._entries[key]

    def _sweep(self) -> None:
        """Remove entries that have expired for every record that may come; now and then, since it looks at all of them.

        A store for all keys may have shards that lag behind, or are not open yet. Their records are at most a day older:
        DynamoDB Streams keep records for a day.
        """
        if not self.timed or len(self.clocks) < len(self.applied):
            return
        now_ms = min(self.clocks.values()) - (0 if self._ranged else _DAY_MS)
        if now_ms < self._swept_ms + (self._ttl_ms or _DAY_MS) // _SWEEPS:
            return
        self._swept_ms = now_ms
        gone = [key for key, (_, expires_ms) in self._entries.items() if (expires_ms or now_ms + 1) <= now_ms]
        for key in gone:
            self._put(key, self._entries[key], None)


def _columns(table: pa.Table, *names: str) -> list[list[Any]]:
    return [table.column(name).to_pylist() for name in names]


class CallTimers(Timers):
    """The timers of a call's key: those of the store, after what the call has asked for so far."""

    __slots__ = ("_context",)

    def __init__(self, context: CallContext, hooks: Container[str]) -> None:
        """Create the timers of all calls with a context."""
        super().__init__(lambda: context.now_ms, hooks)
        self._context = context

    def _put(self, timer_id: str, due_ms: int, payload: Any) -> None:
        store, key, pending = self._context.store, self._context.key, self._pending()
        data = encode_payload(payload)
        if len(data) > MAX_PAYLOAD_BYTES or len(timer_id.encode()) > MAX_ID_BYTES:
            raise StateTooLarge(
                f"The timer {timer_id:.100} of the key {key!r:.100} has a payload of {len(data):,} bytes; the limit is "
                f"{MAX_PAYLOAD_BYTES:,}, and for its id {MAX_ID_BYTES:,}.",
                did="The call failed.",
                advice="Keep the data in ctx.state, where up to 256 KiB have room.",
            )
        held = self._table.count(key)
        if pending.pop(timer_id, None) is None and not (held and self._table.holds(key, timer_id)):
            store.demand_room()
            if held + len(pending) >= MAX_TIMERS and len(self._timers()) >= MAX_TIMERS:
                raise StateTooLarge(
                    f"The key {key!r:.100} has {MAX_TIMERS:,} timers, which is the limit.",
                    did="The call failed: no timer was added.",
                    advice="Cancel timers, or give a timer that replaces another one the same name.",
                )
        pending[timer_id] = due_ms, data

    def _remove(self, timer_id: str) -> bool:
        pending, held = self._pending(), self._table.holds(self._context.key, timer_id)
        was_set = held if timer_id not in pending else pending[timer_id] is not None
        pending.pop(timer_id, None)
        if held:
            pending[timer_id] = None
        return was_set

    def _get(self, timer_id: str) -> Timer | None:
        entry = self._timers().get(timer_id)
        return None if entry is None else timer_of(timer_id, entry)

    def _all(self) -> list[Timer]:
        return list(starmap(timer_of, self._timers().items()))

    def _pending(self) -> dict[str, tuple[int, bytes] | None]:
        if self._context.pending is None:
            self._context.pending = {}
        pending: dict[str, tuple[int, bytes] | None] = self._context.pending
        return pending

    def _timers(self) -> dict[str, TimerEntry]:
        """Return the timers that are set, by id, in the order they were set."""
        table = self._context.store.timers
        timers = {} if table is None else table.of(self._context.key)
        for timer_id, change in (self._context.pending or {}).items():
            timers.pop(timer_id, None)
            if change is not None:
                timers[timer_id] = TimerEntry(*change)
        return timers

    @property
    def _table(self) -> TimerTable:
        table = self._context.store.timers
        assert table is not None, "a handler without callbacks has nothing to set"
        return table


class CallContext(Context):
    """The context of one shard's calls, one after the other."""

    __slots__ = ("at_ms", "began_ms", "live", "pending", "received_ms", "record", "shard_id", "store")

    record: RecordMethods
    """The record of the present call."""
    at_ms: int
    """Its effective time."""
    live: Any
    """The state of its key (a dict), once the handler has asked for it; else None."""
    pending: Any
    """The timers (a dict) that it has set (due time in ms, payload) or cancelled (None), by id; None: it has asked for nothing."""
    began_ms: int
    """When its batch began (steady clock)."""
    received_ms: int
    """When its batch was received: the time of records without an arrival time. For a timer, when it was due."""

    def __init__(
        self,
        store: KeyedState,
        shard_id: str,
        settings: Mapping[str, str] = NO_SETTINGS,
        hooks: Mapping[str, TimerHook] = NO_TIMERS,
        queries: Queries | None = None,
    ) -> None:
        """Create the context of a shard that has its state in ``store``. ``hooks``: the handler's callbacks of timers."""
        super().__init__(settings=settings)
        self._queries = queries
        self.store = store
        self.shard_id = shard_id
        self.began_ms = 0
        self._timers = CallTimers(self, hooks)

    @property
    def key(self) -> str:
        """See ``Context.key``."""
        key = self.record.partition_key
        if key is None:
            raise no_key()
        return key

    @property
    def now(self) -> datetime:
        """See ``Context.now``."""
        return time_at(self.now_ms)

    @property
    def now_ms(self) -> int:
        """``now`` in milliseconds since the Unix epoch."""
        arrival_ms = self.record.arrival_ms
        return self.received_ms if arrival_ms is None else arrival_ms

    @property
    def state(self) -> dict[str, Any]:
        """See ``Context.state``."""
        if self.live is None:
            key = self.record.partition_key
            self.live = self.store.read(self.key if key is None else key, self.at_ms)
        live: dict[str, Any] = self.live
        return live

    @state.setter
    def state(self, state: Mapping[str, Any]) -> None:
        replace_state(self.state, state)

    @property
    def timers(self) -> Timers:
        """See ``Context.timers``."""
        self.store.admit(self.key)
        return self._timers

    def begin(self, record: RecordMethods, at_ms: int) -> RecordMethods:
        """Begin a call with a record, whose effective time is ``at_ms``; return the record."""
        self.record, self.at_ms, self.live, self.pending = record, at_ms, None, None
        return record

    def take(self, due: DueTimer, steady_ms: int) -> bool:
        """Begin the call of a timer after ``begin``. Return whether to make it (see ``TimerTable.take``)."""
        self.received_ms = due.due_ms
        table = self.store.timers
        return table is not None and table.take(due, took_ms=steady_ms - self.began_ms)

    def join(self) -> None:
        """Keep what the call has changed: it succeeded. Raises as ``KeyedState.write`` does; then nothing of it is kept."""
        if self.live is not None:
            self.store.write(self.key, self.live, self.at_ms)
        if self.pending and self.store.timers is not None:
            self.store.timers.apply(self.key, self.pending)
