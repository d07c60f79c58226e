"""Two servers that keep state, against counters: whatever the order of flushes, splits, merges, compactions and lost answers.

The rules run over a book in memory. A world, drawn from a seed, plays what is around them in the plainest way: sessions with a map, files as
lists of rows, snapshots as the ledger's files give them. After each step the stores' snapshots together are the counters of what
was registered, and no key is in two of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest

from mldserver.ledger import rules, state_rules
from mldserver.ledger.book import Book, Draft
from mldserver.ledger.contract import Flush, FlushResult, PositionUpdate, StateFile, StoreUpdate
from mldserver.ledger.row_rules import register
from mldserver.stores import ALL_KEYS, KeyRange, StoreClaim, hash_of
from tests.support.lanes import seeds

KEYS = tuple(f"key {n}".encode() for n in range(8))
HASHES = {key: hash_of(key) for key in KEYS}
NOW = 1_000

STEPS = 300


class Row(NamedTuple):
    """A row of a state file."""

    store: str
    key: bytes
    value: int | None
    serial: int


@dataclass
class Shard:
    """A shard of the stream."""

    key_range: KeyRange | None
    keys: frozenset[bytes]
    parents: tuple[str, ...] = ()
    ended: bool = False


@dataclass
class Session:
    """A shard that a server has open, as the server sees it."""

    shard_id: str
    epoch: int
    store: str
    adopted: bool = False


class Change(NamedTuple):
    """The outcome of a record that no flush has registered yet."""

    shard: str
    key: bytes
    value: int | None


@dataclass
class StoreAt:
    """What a server has of a store: its map, and the changes that are not registered."""

    serial: int
    values: dict[bytes, int]
    changes: list[Change] = field(default_factory=list)


@dataclass
class Planned:
    """A compaction whose file is written, and not named yet."""

    file: StateFile
    rows: list[Row]
    seen: Mapping[str, Mapping[str, tuple[KeyRange, ...]]]


class World:
    """A stream whose shards have ranges, and its readers."""

    weights: Mapping[str, int] = {
        "process": 30,
        "flush": 25,
        "open_shard": 12,
        "split": 3,
        "merge": 3,
        "plan_compaction": 8,
        "compact": 8,
        "sweep": 3,
        "prune": 3,
        "reset": 1,
        "crash": 2,
        "adopt": 12,
        "fire": 4,
    }

    gaps = True
    """Whether some shards end without having been opened."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.book = Book()
        self.files: dict[str, list[Row]] = {}
        self.counters: dict[bytes, int] = {}
        self.stream: dict[str, Shard] = {}
        self.sessions: dict[str, dict[str, Session]] = {"x": {}, "y": {}}
        self.stores: dict[str, dict[str, StoreAt]] = {"x": {}, "y": {}}
        self.plans: list[Planned] = []
        self.names = self.adopted = self.fired = 0
        for server in "xy":
            self.run(rules.enter, server, 0)
        self.begin()

    def begin(self) -> None:
        """Make the stream's first shards."""
        middle = 1 << 127
        for key_range in (KeyRange(0, middle - 1), KeyRange(middle, ALL_KEYS.last)):
            self.add(key_range, frozenset(key for key in KEYS if HASHES[key] in key_range))

    def run(self, rule_: Callable[..., Any], *args: Any, **fields: Any) -> Any:
        draft = Draft(self.book)
        result = rule_(draft, *args, **fields)
        if changes := draft.changes():
            self.book.apply(changes)
        return result

    def name(self, kind: str) -> str:
        self.names += 1
        return f"{kind}{self.names}"

    def add(self, key_range: KeyRange | None, keys: frozenset[bytes], *parents: str) -> None:
        self.stream[self.name("shard")] = Shard(key_range, keys, parents)

    def live(self, steps: int) -> None:
        for step in self.random.choices(tuple(self.weights), tuple(self.weights.values()), k=steps):
            getattr(self, step)()
            self.all_state_is_there_once()

    def leaf(self) -> str:
        return self.random.choice([shard_id for shard_id, shard in self.stream.items() if not shard.ended])

    def server(self) -> str:
        return self.random.choice("xy")

    def likely(self) -> bool:
        return self.random.random() < 0.8

    def some(self, names: list[str]) -> list[str]:
        return self.random.sample(names, self.random.randint(1, len(names)))

    # What a reader finds.

    def snapshot(self, store_id: str) -> dict[bytes, int]:
        """Return a store's state as the ledger's files give it."""
        newest: dict[bytes, Row] = {}
        for path, file in self.book.state_files.items():
            for row in self.files[path] if store_id in file.needed else ():
                inside = any(HASHES[row.key] in each for each in file.needed[store_id])
                known = newest.get(row.key)
                if inside and self.is_of(row, store_id) and (known is None or known.serial < row.serial):
                    newest[row.key] = row
        return {key: row.value for key, row in newest.items() if row.value is not None}

    def is_of(self, row: Row, store_id: str) -> bool:  # of families, only one
        """Whether a row in the range may be the store's: it may be of any ancestor."""
        return True

    def all_state_is_there_once(self) -> None:
        found: dict[bytes, int] = {}
        for store_id in self.book.stores:
            snapshot = self.snapshot(store_id)
            assert not snapshot.keys() & found.keys(), "no key is in two stores"
            found |= snapshot
        assert found == self.counters

    # Servers.

    def open_shard(self) -> None:
        self.open(self.server(), self.leaf())

    def open(self, server: str, shard_id: str) -> Session:
        shard = self.stream[shard_id]
        opened = self.run(rules.open_shard, shard_id, shard.parents, server, StoreClaim(shard.key_range))
        session = Session(shard_id, opened.epoch, opened.store)
        self.give_up(server, opened.store)
        for held in self.stores[server].values():
            # What the shard's former session has not registered is delivered again.
            held.changes = [change for change in held.changes if change.shard != shard_id]
        before = self.stores[server].get(opened.store)
        changes = before.changes if before else []
        # A flush of changes that are there already may be registered: they go on from the serial that they went on from.
        serial = before.serial if before and changes else self.book.stores[opened.store].serial
        values = self.snapshot(opened.store)
        for change in changes:
            _apply(values, change)
        self.stores[server][opened.store] = StoreAt(serial, values, changes)
        self.sessions[server][shard_id] = session
        return session

    def adopt(self) -> None:
        """Fire the timers of a store from now on whose shards have ended, if no server has it, and no child."""
        server = self.server()
        for store_id in sorted(self.book.stores):
            self.adopt_store(server, store_id)
            self.fire()

    def adopt_store(self, server: str, store_id: str) -> None:
        sessions = self.sessions[server]
        over = [name for name, each in sessions.items() if each.store == store_id]
        if over and (
            self.stores[server][store_id].changes or not all(self.stream[name].ended for name in over)
        ):
            return
        shard = self.run(state_rules.adopt, store_id, server)
        if shard is not None:
            assert self.stream[shard.shard_id].ended
            self.adopted += 1
            sessions[shard.shard_id] = Session(shard.shard_id, shard.epoch, store_id, adopted=True)
            serial = self.book.stores[store_id].serial
            self.stores[server][store_id] = StoreAt(serial, self.snapshot(store_id))

    def give_up(self, server: str, store_id: str) -> None:
        """End the adoption of a store: a child is opened here. What its timers gave is dropped, and they fire again."""
        sessions = self.sessions[server]
        for shard_id in [name for name, each in sessions.items() if each.store == store_id and each.adopted]:
            del sessions[shard_id]
            held = self.stores[server][store_id]
            held.changes = [change for change in held.changes if change.shard != shard_id]

    def fire(self) -> None:
        """Fire timers of an adopted store, which count their keys on."""
        server = self.server()
        for shard_id, session in self.sessions[server].items():
            for key in sorted(self.stream[shard_id].keys) if session.adopted else ():
                held = self.stores[server][session.store]
                change = Change(shard_id, key, held.values.get(key, 0) + 1)
                _apply(held.values, change)
                held.changes.append(change)
                self.fired += 1

    def process(self) -> None:
        """Process records of one shard: each counts its key on, or forgets it."""
        server, shard_id, count = self.server(), self.leaf(), self.likely()
        keys = sorted(self.stream[shard_id].keys)
        session = self.sessions[server].get(shard_id)
        if session is None:
            session = self.open(server, shard_id)
        held = self.stores[server][session.store]
        for key in self.random.choices(keys, k=3) if keys else ():
            change = Change(shard_id, key, held.values.get(key, 0) + 1 if count else None)
            _apply(held.values, change)
            held.changes.append(change)

    def flush(self) -> None:
        """Register all that some of the server's stores have. Without the answer it will do so again."""
        server = self.server()
        mine = sorted(store_id for store_id, held in self.stores[server].items() if held.changes)
        if mine:
            self.flush_stores(server, self.some(mine), answered=self.likely())

    def flush_stores(self, server: str, store_ids: list[str], *, answered: bool) -> None:
        held = {store_id: self.stores[server][store_id] for store_id in store_ids}
        sessions = [each for each in self.sessions[server].values() if each.store in held]
        changed = {change.shard for each in held.values() for change in each.changes}
        flush = Flush(
            # No position moves, as when a timer fires: only epochs and serials tell a repetition.
            tuple(
                PositionUpdate(each.shard_id, each.epoch, None, None, None)
                for each in sessions
                if each.shard_id in changed
            ),
            stores=tuple(
                StoreUpdate(
                    store_id,
                    each.serial,
                    tuple(session.shard_id for session in sessions if session.store == store_id),
                    70 if self.likely() else None,
                )
                for store_id, each in held.items()
            ),
            state_file=StateFile(
                self.name("file"), {store_id: (self.range_of(store_id),) for store_id in held}, 1, 1
            ),
        )
        result = self.run(register, flush, NOW)
        assert isinstance(result, FlushResult)
        if result.registered:
            self.write(flush.state_file, held)
        if not answered:
            return
        for store_id, each in held.items():
            if result.registered:
                each.serial += 1
                each.changes.clear()
            elif any(
                session.shard_id in result.lost_shards for session in sessions if session.store == store_id
            ):
                self.lose(server, store_id)

    def range_of(self, store_id: str) -> KeyRange:
        store = self.book.stores.get(store_id)
        return ALL_KEYS if store is None else store.key_range

    def write(self, file: StateFile | None, held: Mapping[str, StoreAt]) -> None:
        """Write a registered file, and count what it registers: what it says must be what a counter says."""
        assert file is not None
        rows: dict[bytes, Row] = {}
        for store_id, each in held.items():
            for change in each.changes:
                if change.value is None:
                    self.counters.pop(change.key, None)
                else:
                    self.counters[change.key] = self.counters.get(change.key, 0) + 1
                rows[change.key] = Row(store_id, change.key, change.value, each.serial + 1)
        for key, row in rows.items():
            assert row.value == self.counters.get(key), (
                "a registered change counts on from all registered before"
            )
        self.files[file.path] = list(rows.values())

    def lose(self, server: str, store_id: str) -> None:
        """Give up a store that another server has, or a child."""
        del self.stores[server][store_id]
        sessions = self.sessions[server]
        for shard_id in [shard_id for shard_id, each in sessions.items() if each.store == store_id]:
            del sessions[shard_id]

    def crash(self) -> None:
        server = self.server()
        self.sessions[server].clear()
        self.stores[server].clear()
        self.run(rules.enter, server, 0)

    # The stream.

    def split(self) -> None:
        """Split a shard at the hash of one of its keys, or right behind it."""
        shard = self.stream[self.leaf()]
        assert shard.key_range is not None
        first, last = shard.key_range
        if first == last:
            return
        at = self.random.choice([HASHES[key] for key in sorted(shard.keys)] or [(first + last) // 2])
        at = min(max(at + self.random.choice((0, 1)), first + 1), last)
        parent = self.end(shard)
        for part in (KeyRange(first, at - 1), KeyRange(at, last)):
            self.add(part, frozenset(key for key in shard.keys if HASHES[key] in part), parent)

    def merge(self) -> None:
        leaves = sorted((shard for shard in self.stream.values() if not shard.ended), key=_first)
        if len(leaves) > 1:
            place = self.random.randrange(len(leaves) - 1)
            low, high = leaves[place : place + 2]
            assert low.key_range is not None
            assert high.key_range is not None
            self.add(
                KeyRange(low.key_range.first, high.key_range.last),
                low.keys | high.keys,
                self.end(low),
                self.end(high),
            )

    def end(self, shard: Shard) -> str:
        """End a shard. Daemons open every shard that the stream lists, but a server may be down until it is listed no more."""
        (shard_id,) = (name for name, each in self.stream.items() if each is shard)
        if shard_id not in self.book.shards and not (self.gaps and self.random.random() < 0.5):
            self.open("x", shard_id)
        shard.ended = True
        self.run(rules.end_shards, [shard_id], NOW)
        return shard_id

    # Files.

    def plan_compaction(self) -> None:
        """Write a file in place of some that a store needs, or all; for its whole range, or a part."""
        stores = sorted(store_id for store_id, store in self.book.stores.items() if not store.closed)
        if not stores:
            return
        store_id = self.random.choice(stores)
        needing = sorted(path for path in self.book.needed_files if store_id in self._needed(path))
        if not needing:
            return
        paths = self.some(needing) if self.random.random() < 0.5 else needing
        full = self.range_of(store_id)
        key_range = full if self.likely() else KeyRange(full.first, (full.first + full.last) // 2)
        newest: dict[bytes, Row] = {}
        for path in paths:
            for row in self.files[path]:
                ranges = [each for each in self._needed(path)[store_id] if HASHES[row.key] in each]
                known = newest.get(row.key)
                if (
                    ranges
                    and HASHES[row.key] in key_range
                    and self.is_of(row, store_id)
                    and (known is None or known.serial < row.serial)
                ):
                    newest[row.key] = row
        rows = [
            row._replace(store=store_id)
            for row in newest.values()
            if row.value is not None or len(paths) < len(needing)
        ]
        file = StateFile(self.name("compacted"), {store_id: (key_range,)}, 1, 1)
        self.plans.append(Planned(file, rows, {path: self._needed(path) for path in paths}))

    def _needed(self, path: str) -> Mapping[str, tuple[KeyRange, ...]]:
        return self.book.state_files[path].needed

    def compact(self) -> None:
        """Name the file of the oldest plan, whatever has happened since."""
        if self.plans:
            plan = self.plans.pop(0)
            for _ in range(self.random.choice((1, 2))):
                if self.run(state_rules.compact, plan.file, plan.seen, NOW):
                    self.files[plan.file.path] = plan.rows

    def sweep(self) -> None:
        gone = [path for path, file in self.book.state_files.items() if not file.needed]
        self.run(state_rules.forget_files, gone)
        for path in gone:
            del self.files[path]

    def prune(self) -> None:
        ages = {"windows_before_ms": 0, "shards_before_ms": NOW + 1}
        self.run(rules.prune, keep_shards=self.listed(), limit=9, **ages)

    def listed(self) -> frozenset[str]:
        """Return the shards that the stream still lists."""
        return frozenset()

    def reset(self) -> None:
        """An operator has a shard read again, and forgets its state."""
        shard_id = self.leaf()
        shard = self.book.shards.get(shard_id)
        if shard is None:
            return
        self.run(rules.release_shard, shard_id, shard.epoch)
        before = self.snapshot(shard.store)
        if self.run(rules.reset, [shard_id], NOW, forget_state=not before):
            assert not before, "state is not forgotten unless that is wanted"


def _apply(values: dict[bytes, int], change: Change) -> None:
    if change.value is None:
        values.pop(change.key, None)
    else:
        values[change.key] = change.value


def _first(shard: Shard) -> int:
    assert shard.key_range is not None
    return shard.key_range.first


class FamilyWorld(World):
    """Shards without ranges: all descendants of a root share a store. Shards roll over, and split."""

    weights: Mapping[str, int] = {**World.weights, "merge": 0}
    gaps = False

    def begin(self) -> None:
        for keys in (KEYS[::2], KEYS[1::2]):
            self.add(None, frozenset(keys))

    def is_of(self, row: Row, store_id: str) -> bool:
        return row.store == store_id

    def listed(self) -> frozenset[str]:
        """A shard is listed at least until its children are read."""
        unread = (shard for shard_id, shard in self.stream.items() if shard_id not in self.book.shards)
        return frozenset(parent for shard in unread for parent in shard.parents)

    def end(self, shard: Shard) -> str:
        """A shard ends when the server that has it has registered all of it."""
        shard_id = super().end(shard)
        for server in "xy":
            session = self.sessions[server].pop(shard_id, None)
            if session is None:
                continue
            held = self.stores[server][session.store]
            held.changes = [change for change in held.changes if change.shard != shard_id]
        return shard_id

    def split(self) -> None:
        """A shard's keys go on in one child, or in two."""
        shard = self.stream[self.leaf()]
        keys = sorted(shard.keys)
        parent = self.end(shard)
        cut = self.random.choice((len(keys) // 2, len(keys)))
        for part in (keys[:cut], keys[cut:]):
            if part or not keys:
                self.add(None, frozenset(part), parent)


@pytest.mark.parametrize("seed", seeds(60))
@pytest.mark.parametrize("world", [World, FamilyWorld])
def test_state_is_what_was_registered(world: type[World], seed: int) -> None:
    world(seed).live(STEPS)


@pytest.mark.parametrize("world", [World, FamilyWorld])
def test_the_worlds_fire_timers_of_stores_that_were_adopted(world: type[World]) -> None:
    lived = [world(seed) for seed in range(5)]
    for each in lived:
        each.live(STEPS)
    assert min(sum(each.adopted for each in lived), sum(each.fired for each in lived)) > 0
