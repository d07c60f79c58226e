"""The timers that are set in a store: those of a key, and those that are due. Pure.

A million timers are held, so each takes little: a bytes value for the timer and one for its place in the queue. A key with a single
timer has no dict. An entry of the queue stays when its timer is cancelled or replaced; it is skipped when it comes up.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Any, Final

from mldserver.base.clock import Durations
from mldserver.handler.timers import Timer, split_id, time_at
from mldserver.records import Record, Sequence
from mldserver.runtime.interface import TimerFilter, TimerReport
from mldserver.runtime.state_values import decode_payload
from mldserver.stores import TimerEntry, key_bytes, key_text, pack_timer, unpack_timer

if TYPE_CHECKING:
    from mldserver.handler.spec import TimerHook

_HEAD: Final = struct.Struct(">QQ")
"""How a timer begins, in its entry and in the queue: due time and number. Items of the queue are compared as bytes."""
_LENGTH: Final = struct.Struct(">H")
"""Then follows the timer's id, after its length."""
_PLACE: Final = _HEAD.size
_DUE: Final = 1 << 63
"""Is added to due times, which may lie before 1970."""
_TIMER_BYTES: Final = 220
"""What a timer takes in memory in addition to twice its id and key, and its value."""
_KNOWN_IDS: Final = 1_000
"""The ids of so many timers are remembered as bytes: usually they are the names of the callbacks."""
PORTION_MS: Final = 50
"""After so many milliseconds of calls no other timer fires in the batch: records of the shard wait meanwhile."""
_FEW: Final = 64
"""So many entries without a timer may always stay in the queue."""


class DueTimer(Record):
    """A timer to be fired, as a record of its shard."""

    __slots__ = ("callback", "due_ms", "is_letter", "received_ms", "timer", "timer_id")

    partition_key: str
    sequence_text: Any
    sub_sequence_number: Any
    timer_id: str
    callback: str
    due_ms: int
    timer: TimerEntry
    received_ms: int
    """The time of the firing."""
    is_letter: bool
    """It is a dead letter: no timer of the store."""

    def __init__(
        self,
        shard_id: str,
        after: Sequence | None,
        key: str,
        timer_id: str,
        timer: TimerEntry,
        *,
        received_ms: int,
        is_letter: bool = False,
    ) -> None:
        """Create it. ``after``: the sequence of the shard's last record; without one the record's sequence is null."""
        number, sub = after or (None, None)
        self.shard_id = shard_id
        self.sequence_text = None if number is None else str(number)
        self.sub_sequence_number = sub
        self._data = timer.payload
        self.partition_key = key
        self.arrival_ms = None
        self.timer_id = timer_id
        self.callback = split_id(timer_id)[0]
        self.due_ms = timer.due_ms
        self.timer = timer
        self.received_ms = received_ms
        self.is_letter = is_letter

    __setattr__ = object.__setattr__  # no handler gets one, so none can change it

    @property
    def sequence(self) -> Sequence:
        """That of the shard's last record; 0 without one."""
        return Sequence(int(self.sequence_text or 0), self.sub_sequence_number or 0)

    def value(self) -> Timer:
        """Return what its callback receives."""
        return timer_of(self.timer_id, self.timer)


def timer_of(timer_id: str, entry: TimerEntry) -> Timer:
    """Return a timer as handlers see it."""
    callback, name = split_id(timer_id)
    return Timer(time_at(entry.due_ms), decode_payload(entry.payload), name, entry.attempt, callback)


class _Queue:
    """Timers by their due times, and for the same time by their numbers."""

    __slots__ = ("callbacks", "items", "taken")

    def __init__(self) -> None:
        self.items: list[bytes] = []
        """A heap: the head of each timer, its id and its key."""
        self.taken: list[bytes] = []
        """Items that the present batch has taken out."""
        self.callbacks: dict[str, int] = {}
        """How many timers are set for each callback."""

    def __len__(self) -> int:
        return sum(self.callbacks.values())


class TimerTable:
    """The timers of one store, and what the present batch has done with them."""

    def __init__(
        self, hooks: Mapping[str, TimerHook], entries: Iterable[tuple[str, str, int, bytes]] = ()
    ) -> None:
        """Create a table from keys, ids, due times (ms) and values. ``hooks``: the callbacks that the handler has."""
        self._hooks = hooks
        self._of: dict[str, bytes | dict[str, bytes]] = {}
        """The entries of each key: one, or several by id. An entry has a head, the timer's id, and its value."""
        self._callable, self._unknown = _Queue(), _Queue()
        self._tags: dict[str, tuple[bytes, str, _Queue]] = {}
        """Of some ids, the length and the id as bytes, the callback, and the queue of their timers."""
        self.bytes = 0
        """About how much memory the timers take."""
        self._number = 0
        """The highest number of a timer."""
        self._before: dict[tuple[str, str], bytes | None] = {}
        """The entries that the batch has changed, as they were before it."""
        for key, timer_id, due_ms, value in entries:
            timer = unpack_timer(due_ms, value)
            self._number = max(self._number, timer.number)
            self._put(key, timer_id, None, self._entry(timer_id, due_ms, timer.number, value))
        self.begin()

    def __len__(self) -> int:
        return len(self._callable) + len(self._unknown)

    def begin(self) -> None:
        """Begin a batch. Changes of a batch that did not come to its end are taken back."""
        for (key, timer_id), entry in self._before.items():
            # The queue still has an item for each timer that was set before the batch.
            self._put(key, timer_id, self._get(key, timer_id), entry, queued=True)
        self._end()
        self._set = self._cancelled = self._called = self._skipped = self._failed = self._taken = 0
        self.latest_ms: int | None = None
        """The latest due time of the timers that the batch has called."""
        self._late = Durations()
        self._set_ms: dict[str, int] = {}
        """When the first timer is due that a call of the portion has set, by key."""

    def changes(self) -> list[tuple[str, str, int | None, bytes | None]]:
        """End the batch. Return key, id, due time (ms) and value of each timer that it changed; None: the timer is gone."""
        changed: list[tuple[str, str, int | None, bytes | None]] = []
        for (key, timer_id), before in self._before.items():
            entry = self._get(key, timer_id)
            if entry is not None:
                changed.append((key, timer_id, _due_ms(entry), _value(entry)))
            elif before is not None:
                changed.append((key, timer_id, None, None))
        if self._taken == len(self._callable.taken):
            self._callable.taken.clear()  # each was fired, or is not set any more
        self._end()
        return changed

    def report(self) -> TimerReport:
        """Return what the batch has done that ended last, and what is set now."""
        due = [self._first_due_ms(queue) for queue in (self._callable, self._unknown)]
        return TimerReport(
            set=self._set,
            cancelled=self._cancelled,
            fired=self._called - self._failed,
            skipped=self._skipped,
            failed=self._failed,
            lateness=tuple(self._late.counts) if any(self._late.counts) else (),
            lateness_sum_ms=self._late.sum_ms,
            pending=len(self),
            unknown=len(self._unknown),
            callbacks=(*self._callable.callbacks, *self._unknown.callbacks),
            next_due_ms=min((due_ms for due_ms in due if due_ms is not None), default=None),
            next_call_ms=due[0],
        )

    def count(self, key: str) -> int:
        """Return how many timers a key has."""
        held = self._of.get(key)
        return len(held) if type(held) is dict else int(held is not None)

    def of(self, key: str) -> dict[str, TimerEntry]:
        """Return the timers of a key by id, in the order they were set."""
        timers = {timer_id: _timer(entry) for timer_id, entry in self._entries(key)}
        return dict(sorted(timers.items(), key=lambda item: item[1].number))

    def holds(self, key: str, timer_id: str) -> bool:
        """Return whether a timer is set."""
        return self._get(key, timer_id) is not None

    def apply(self, key: str, changes: Mapping[str, tuple[int, bytes] | None]) -> None:
        """Do what a call has asked for, which succeeded: set timers (due time in ms, payload), or cancel them (None), by id."""
        for timer_id, change in changes.items():
            if change is not None:
                self._set += 1
                self._set_timer(key, timer_id, *change)
            elif self._change(key, timer_id, None):
                self._cancelled += 1

    def due(self, until_ms: int, limit: int) -> list[tuple[str, str, TimerEntry]]:
        """Return the timers that are due at or before ``until_ms``, at most ``limit``, in the order in which they fire.

        They stay set until ``take``. Timers whose callback the handler does not have are left out.
        """
        queue, found = self._callable, list[tuple[str, str, TimerEntry]]()
        while len(found) < limit and queue.items and _due_ms(queue.items[0]) <= until_ms:
            item = heappop(queue.items)
            if (timer := self._find(item)) is not None:
                queue.taken.append(item)
                found.append((timer[0], timer[1], _timer(timer[2])))
        return found

    def take(self, due: DueTimer, *, took_ms: int = 0) -> bool:
        """Remove a timer whose call begins. Return whether to call it.

        It is not called if an earlier call of the batch has cancelled or replaced it, or if it is too late for its callback's
        ``max_lateness``. It stays set, for the next batch, if an earlier call has set a timer of its key that is due before it, or
        if the calls of this batch took longer than ``PORTION_MS`` so far (``took_ms``).
        """
        if not due.is_letter:
            key, timer_id = due.partition_key, due.timer_id
            if took_ms > PORTION_MS and self._taken:
                return False
            if self._set_ms.get(key, due.due_ms) < due.due_ms and self._comes_after(key, due.due_ms):
                return False
            self._taken += 1
            entry = self._get(key, timer_id)
            if entry is None or _HEAD.unpack_from(entry)[1] != due.timer.number:
                return False
            self._before.setdefault((key, timer_id), entry)
            self._put(key, timer_id, entry, None)
            if due.timer.attempt == 0:
                late_ms = due.received_ms - due.due_ms
                most_ms = self._hooks[due.callback].max_lateness_ms
                if most_ms is not None and late_ms > most_ms:
                    self._skipped += 1
                    return False
                self._late.add(max(0, late_ms))
        self._called += 1
        self.latest_ms = max(due.due_ms, self.latest_ms or due.due_ms)
        return True

    def _comes_after(self, key: str, due_ms: int) -> bool:
        """Return whether another timer of the key, which fires, is due before this time."""
        return any(
            _due_ms(entry) < due_ms and self._tag(timer_id)[2] is self._callable
            for timer_id, entry in self._entries(key)
        )

    def set_again(self, due: DueTimer, after_ms: int) -> None:
        """Set a timer again whose call has failed: it is due so many milliseconds after this firing."""
        self._failed += 1
        due_ms, timer = due.received_ms + after_ms, due.timer
        self._set_timer(due.partition_key, due.timer_id, due_ms, timer.payload, timer.attempt + 1)

    def cancel(self, which: TimerFilter, limit: int) -> None:
        """Cancel the timers that match, at most ``limit``."""
        matching = []
        for key in self._of if which.key is None else (which.key,):
            matching += [
                (key, timer_id) for timer_id, entry in self._entries(key) if _matches(which, timer_id, entry)
            ]
            if len(matching) >= limit:
                break
        for key, timer_id in matching[:limit]:
            self._change(key, timer_id, None)
            self._cancelled += 1

    def _set_timer(self, key: str, timer_id: str, due_ms: int, payload: bytes, attempt: int = 0) -> None:
        number = self._number = self._number + 1
        if self._callable.taken:
            self._set_ms[key] = min(due_ms, self._set_ms.get(key, due_ms))
        value = pack_timer(TimerEntry(due_ms, payload, attempt, number))
        self._change(key, timer_id, self._entry(timer_id, due_ms, number, value))

    def _change(self, key: str, timer_id: str, entry: bytes | None) -> bool:
        """Replace a timer's entry in this batch; None: remove it. Return whether there was one."""
        before = self._get(key, timer_id)
        self._before.setdefault((key, timer_id), before)
        self._put(key, timer_id, before, entry)
        return before is not None

    def _get(self, key: str, timer_id: str) -> bytes | None:
        held = self._of.get(key)
        if isinstance(held, bytes):
            return held if held.startswith(self._tag(timer_id)[0], _PLACE) else None
        return None if held is None else held.get(timer_id)

    def _tag(self, timer_id: str) -> tuple[bytes, str, _Queue]:
        """Return what follows the head in the entries of an id, its callback, and the queue of its timers."""
        tag = self._tags.get(timer_id)
        if tag is None:
            if len(self._tags) >= _KNOWN_IDS:
                self._tags.clear()
            id_, callback = timer_id.encode(), split_id(timer_id)[0]
            queue = self._callable if callback in self._hooks else self._unknown
            tag = self._tags[timer_id] = _LENGTH.pack(len(id_)) + id_, callback, queue
        return tag

    def _entry(self, timer_id: str, due_ms: int, number: int, value: bytes) -> bytes:
        return _HEAD.pack(due_ms + _DUE, number) + self._tag(timer_id)[0] + value

    def _entries(self, key: str) -> Iterator[tuple[str, bytes]]:
        held = self._of.get(key)
        if isinstance(held, bytes):
            yield _id(held), held
        elif held is not None:
            yield from held.items()

    def _put(
        self, key: str, timer_id: str, before: bytes | None, entry: bytes | None, *, queued: bool = False
    ) -> None:
        """Replace the entry of a timer (``before``) by another; None: there is none. ``queued``: the queue has an item for it."""
        tag, callback, queue = self._tag(timer_id)
        fixed, timers = _TIMER_BYTES + 2 * len(key) + len(tag), queue.callbacks.pop(callback, 0)
        if before is not None:
            timers -= 1
            self.bytes -= fixed + len(before)
        if entry is not None:
            timers += 1
            self.bytes += fixed + len(entry)
            if not queued:
                heappush(queue.items, entry[:_PLACE] + tag + key_bytes(key))
        if timers:
            queue.callbacks[callback] = timers
        held = self._of.get(key)
        if entry is None:
            if isinstance(held, dict):
                held.pop(timer_id, None)
            if before is not None and (not isinstance(held, dict) or not held):
                del self._of[key]
        elif isinstance(held, dict):
            held[timer_id] = entry
        elif held is None or before is not None:
            self._of[key] = entry
        else:
            self._of[key] = {_id(held): held, timer_id: entry}

    def _find(self, item: bytes) -> tuple[str, str, bytes] | None:
        """Return key, id and entry of the timer of an item of the queue; None if it is not set any more."""
        start, end = _PLACE + _LENGTH.size, _id_end(item)
        key = key_text(item[end:])
        held = self._of.get(key)
        if held is None:
            return None
        timer_id = item[start:end].decode()
        entry = held if isinstance(held, bytes) else held.get(timer_id, b"")
        return (key, timer_id, entry) if entry.startswith(item[:end]) else None

    def _first_due_ms(self, queue: _Queue) -> int | None:
        """Return when the first timer of a queue is due; None if it has none."""
        while queue.items:
            if self._find(queue.items[0]) is not None:
                return _due_ms(queue.items[0])
            heappop(queue.items)
        return None

    def _end(self) -> None:
        """Forget how things were before the batch; put back what is due but was not fired."""
        self._before.clear()
        for queue in (self._callable, self._unknown):
            for item in queue.taken:
                if self._find(item) is not None:
                    heappush(queue.items, item)
            queue.taken.clear()
            if len(queue.items) > 2 * len(queue) + _FEW:
                queue.items = [item for item in queue.items if self._find(item) is not None]
                heapify(queue.items)


def _due_ms(entry: bytes) -> int:
    due_ms: int = _HEAD.unpack_from(entry)[0] - _DUE
    return due_ms


def _id_end(entry: bytes) -> int:
    length: int = _LENGTH.unpack_from(entry, _PLACE)[0]
    return _PLACE + _LENGTH.size + length


def _id(entry: bytes) -> str:
    return entry[_PLACE + _LENGTH.size : _id_end(entry)].decode()


def _value(entry: bytes) -> bytes:
    return entry[_id_end(entry) :]


def _timer(entry: bytes) -> TimerEntry:
    return unpack_timer(_due_ms(entry), _value(entry))


def _matches(which: TimerFilter, timer_id: str, entry: bytes) -> bool:
    if which.due_before_ms is not None and _due_ms(entry) >= which.due_before_ms:
        return False
    return which.timer_id is None or timer_id == which.timer_id or timer_id.startswith(f"{which.timer_id}/")
