"""A random model of state files: live stores, their maps, the files that they need, and what each key's state and timers must be.

The model hands ranges over as the ledger does, and uses the core for all content: changes, entries and compaction. After each
step no key is in two live maps, and all maps together are what the sequence of writes says.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pyarrow as pa

from mldserver.coordinator.core.state_files import changes, choose, compaction, entries
from mldserver.ledger.contract import StateFile, StoreState
from mldserver.stores import ALL_KEYS, KeyRange, StateChange, divide, hash_of, key_bytes, pack_changes

KEYS = tuple(key_bytes(f"key-{number}") for number in range(40))
TIMERS = ("", "", "alarm", "alarm/name")
"""Half of the changes are a key's state."""
NEVER = 1 << 62
"""A time by which all that can expire has expired."""
Entry = tuple[bytes, str]
"""A key, and a timer's id or empty text."""
PARTS = (ALL_KEYS, KeyRange(0, ALL_KEYS.last // 2), KeyRange(ALL_KEYS.last // 2 + 1, ALL_KEYS.last))


@dataclass
class Live:
    """A store that is served: its map, and the changes that no flush has written."""

    state: StoreState
    entries: dict[Entry, bytes] = field(default_factory=dict)
    blobs: list[bytes] = field(default_factory=list)


@dataclass
class Rules:
    """What the model does as the design says; a mutant overrides one."""

    def child_serial(self, parents: list[StoreState]) -> int:
        return 1 + max(parent.serial for parent in parents)

    def needed_by(self, file: StateFile, store: StoreState) -> StateFile:
        """Return the file as a snapshot of the store reads it."""
        return file

    def handed_over(self, ranges: tuple[KeyRange, ...], child: KeyRange) -> tuple[KeyRange, ...]:
        return divide(ranges, child)[0]

    def may_forget(self, whole: frozenset[str], stores: tuple[str, ...]) -> frozenset[str]:
        """Return the stores whose tombstones a compaction drops."""
        return whole


class Model:
    """One run. ``step`` raises AssertionError when the files do not give what was written."""

    def __init__(self, seed: int, rules: Rules | None = None) -> None:
        self.random = random.Random(seed)
        self.rules = rules or Rules()
        self.live = {"root": Live(StoreState("root"))}
        self.files: dict[str, tuple[StateFile, pa.Table]] = {}
        self.truth: dict[Entry, bytes] = {}
        self.names = 0

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()
        assert {store for file, _ in self.files.values() for store in file.needed} <= self.live.keys()

    def step(self) -> None:
        steps = (self.write, self.flush, self.compact, self.move, self.split, self.merge)
        self.random.choices(steps, (70, 12, 8, 4, 3, 3))[0]()
        found: dict[Entry, bytes] = {}
        for store in self.live.values():
            assert found.keys().isdisjoint(store.entries), "a key is in two stores"
            found |= store.entries
        assert found == self.truth

    def _name(self, kind: str) -> str:
        self.names += 1
        return f"{kind}-{self.names}"

    def write(self) -> None:
        key, store = self.random.choice(KEYS), None
        (store,) = (each for each in self.live.values() if hash_of(key) in each.state.key_range)
        entry = (key, self.random.choice(TIMERS))
        assert store.entries.get(entry) == self.truth.get(entry)
        value = None if self.random.random() < 0.25 else str(self._name("value")).encode()
        # All timers were due long ago.
        due_ms = self.random.randrange(1000) if value and entry[1] else None
        store.blobs.append(pack_changes([StateChange(key, value, due_ms, entry[1])]))
        for entries_ in (store.entries, self.truth):
            entries_.pop(entry, None)
            if value is not None:
                entries_[entry] = value

    def flush(self, *stores: str) -> None:
        """Write the changes of stores (default: some) as one file."""
        chosen = stores or tuple(store for store in self.live if self.random.random() < 0.5)
        changed = {store: self.live[store] for store in chosen if self.live[store].blobs}
        if not changed:
            return
        for store in changed.values():
            store.state = replace(store.state, serial=store.state.serial + 1)
        blobs = [(name, blob) for name, store in changed.items() for blob in reversed(store.blobs)]
        table = changes(blobs, {name: store.state.serial for name, store in changed.items()})
        needed = {name: (store.state.key_range,) for name, store in changed.items()}
        path = self._name("file")
        self.files[path] = (StateFile(path, needed, len(table), table.nbytes), table)
        for store in changed.values():
            store.blobs = []

    def compact(self) -> None:
        """Make one file of at least two random ones, or of those that the server would choose, for all live stores of some."""
        files = [file for file, _ in self.files.values()]
        if len(files) < 2:
            return
        stores = {store for store in self.live if self.random.random() < 0.8}
        chosen = self.random.sample(files, self.random.randint(2, len(files)))
        step = compaction(chosen, files, stores, self.random.choice(PARTS))
        if self.random.random() < 0.5:
            step = choose(files, stores) or step
        step = replace(step, whole=self.rules.may_forget(step.whole, step.stores))
        needed = step.needed
        if not needed:
            return
        states = {name: self.live[name].state for name in step.stores}
        table = step.rows(lambda file: self.files[file.path][1], states, dict.fromkeys(states, NEVER))
        assert {row.as_py() for row in table.column("store").unique()} == needed.keys()
        for file in step.files:
            left = {store: outside(ranges, needed.get(store, ())) for store, ranges in file.needed.items()}
            self._need(file, left)
        path = self._name("compacted")
        self.files[path] = (StateFile(path, needed, len(table), table.nbytes), table)

    def _need(self, file: StateFile, needed: dict[str, tuple[KeyRange, ...]]) -> None:
        needed = {store: ranges for store, ranges in needed.items() if ranges}
        _, table = self.files.pop(file.path)
        if needed:
            self.files[file.path] = (replace(file, needed=needed), table)

    def snapshot(self, store: Live, buffered: pa.Table | None = None) -> dict[Entry, bytes]:
        files = [
            (table, self.rules.needed_by(file, store.state))
            for file, table in self.files.values()
            if store.state.store_id in file.needed
        ]
        found = entries(files, store.state, buffered=buffered, expired_ms=NEVER)
        rows = [((row["key"], row["timer"] or ""), row["value"]) for row in found.to_pylist()]
        assert len(dict(rows)) == len(rows)
        return dict(rows)

    def move(self) -> None:
        """Another process takes a store: it gets a snapshot of the files, and of the changes that are not in them."""
        name = self.random.choice(list(self.live))
        store = self.live[name]
        buffered = None
        if self.random.random() < 0.5:
            self.flush(name)
        else:
            buffered = changes([(name, blob) for blob in reversed(store.blobs)], {name: (1 << 63) - 1})
        store.entries = self.snapshot(store, buffered)

    def split(self) -> None:
        name = self.random.choice(list(self.live))
        first, last = self.live[name].state.key_range
        if first == last:
            return
        at = self.random.randint(first, last - 1)
        parent = self._close(name)
        self._open([parent], KeyRange(first, at))
        if self.random.random() < 0.5:
            self.compact()
        self._open([parent], KeyRange(at + 1, last))

    def merge(self) -> None:
        ordered = sorted(self.live.values(), key=lambda store: store.state.first)
        if len(ordered) < 2:
            return
        at = self.random.randrange(len(ordered) - 1)
        left, right = (self._close(store.state.store_id) for store in ordered[at : at + 2])
        self._open([left, right], KeyRange(left.first, right.last))

    def _close(self, name: str) -> StoreState:
        """Flush a store at its end, and take it out."""
        self.flush(name)
        return self.live.pop(name).state

    def _open(self, parents: list[StoreState], key_range: KeyRange) -> None:
        """Open a child: in each file, the part of its parents' ranges that is inside its range becomes its own."""
        state = StoreState(self._name("store"), self.rules.child_serial(parents), *key_range)
        for file, _ in list(self.files.values()):
            needed = dict(file.needed)
            mine: tuple[KeyRange, ...] = ()
            for parent in parents:
                ranges = needed.pop(parent.store_id, ())
                mine += self.rules.handed_over(ranges, key_range)
                needed[parent.store_id] = outside(ranges, (key_range,))
            self._need(file, {**needed, state.store_id: mine})
        store = Live(state)
        store.entries = self.snapshot(store)
        self.live[state.store_id] = store


def outside(ranges: tuple[KeyRange, ...], parts: tuple[KeyRange, ...]) -> tuple[KeyRange, ...]:
    """Return what of ranges lies outside other ranges."""
    for part in parts:
        ranges = divide(ranges, part)[1]
    return ranges
