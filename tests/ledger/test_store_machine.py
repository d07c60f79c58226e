"""Two stores on one file against the rules over a book in memory: whatever the order of calls, all hold and answer the same.

``test_rules.py`` checks the rules themselves. What a beat returns, which is read from changes, is what a fresh reading finds.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from mldserver.effects import Effects
from mldserver.errors import InternalError, PeerError, ServerExpired
from mldserver.ledger.book import Book
from mldserver.ledger.contract import (
    BatchProgress,
    BatchStep,
    Commit,
    Flush,
    LedgerState,
    PositionUpdate,
    Segment,
    SegmentKind,
    ServerState,
    ShapeChange,
    ShardState,
    StateFile,
    StoreUpdate,
    WindowEntry,
    WindowState,
)
from mldserver.records import Sequence
from mldserver.stores import KeyRange, StoreClaim
from tests.ledger.in_memory import MemoryStore
from tests.ledger.samples import letter
from tests.support.store import SqliteStore

WINDOWS = {f"w{n}": (n * 10, n * 10 + 10) for n in range(2)} | {"batch-1": (None, None)}

shards = st.sampled_from("abc")
servers = st.sampled_from([0, 1])
windows = st.sampled_from(sorted(WINDOWS))
some_windows = st.lists(windows, unique=True).map(tuple)
times = st.none() | st.integers(0, 50)
ages = st.integers(-1, 12)
# Few digits and many, so that an order of texts would differ from the order of numbers.
steps = st.sampled_from([0, 0, 1, 5, 10**30])
limits = st.sampled_from([1000, 1000, 2, 1])
few = st.sampled_from([0, 0, 1, 2])
likely = st.sampled_from([True] * 9 + [False])
claims = st.sampled_from(
    [None, StoreClaim(None), *(StoreClaim(KeyRange(*each)) for each in ((0, 9), (0, 4), (5, 9)))]
)


class Heard:
    """A server's picture of the windows, kept up by news."""

    def __init__(self) -> None:
        self.version = 0
        self.windows: dict[str, WindowEntry] = {}

    def learn(self, state: LedgerState) -> None:
        if not state.since:
            self.windows = {}
        self.version = state.version
        self.windows |= state.windows
        for window_id, entry in state.windows.items():
            if entry.state is WindowState.PUBLISHED and not entry.retained:
                del self.windows[window_id]


class LedgerMachine(RuleBasedStateMachine):
    @initialize()
    def create(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.now = self.files = 0
        self.book = Book()
        self.models = [MemoryStore(self.book, name) for name in "xy"]
        self.heard = [Heard(), Heard()]
        self.stores = [self.store(name) for name in "xy"]
        for server in (0, 1):
            self.both(server, "open", now_ms=0)
            self.hurry(server)
        self.both(0, "open_shard", "a", ())
        self.both(1, "open_shard", "b", ())

    def store(self, server_id: str) -> SqliteStore:
        return SqliteStore(Path(self.folder.name) / "ledger.sqlite", pipeline="p", server_id=server_id)

    def teardown(self) -> None:
        if hasattr(self, "stores"):
            fresh = self.store("z")
            assert fresh.peek() == self.book.state()
            for store in (*self.stores, fresh):
                store.close()
            self.folder.cleanup()

    def hurry(self, server: int) -> None:
        """Do not wait for the disk: nothing is killed here."""
        db = self.stores[server]._db
        assert db is not None
        db.execute("PRAGMA synchronous = OFF")

    def both(self, server: int, name: str, *args: Any, seen: bool | None = None, **fields: Any) -> Any:
        """Call the rules and the store; compare what comes back, errors too.

        ``seen``: whether the caller has seen the latest version, which it names then. Versions are each ledger's own.
        """
        outcomes: list[Any] = []
        for ledger in (self.models[server], self.stores[server]):
            version = {} if seen is None else {"version": ledger.peek().version - (not seen)}
            try:
                outcomes.append(getattr(ledger, name)(*args, **version, **fields))
            except (InternalError, PeerError, ServerExpired) as error:
                outcomes.append(type(error))
        assert outcomes[1] == outcomes[0], name
        return outcomes[0]

    @rule(server=servers)
    def restart(self, server: int) -> None:
        self.stores[server].close()
        self.models[server].close()
        self.both(server, "open", now_ms=self.now)
        self.hurry(server)

    @rule(server=servers, age=ages, watermark=times, idle=st.booleans())
    def sync(self, server: int, age: int, watermark: int | None, idle: bool) -> None:
        told = ServerState("xy"[server], self.now - age, watermark, idle, None if idle else "a", "so")
        if self.both(server, "sync", told) is not ServerExpired:
            heard = self.heard[server]
            heard.learn(self.stores[server].sync(told, heard.version))
            assert heard.windows == self.book.state().windows

    @rule(server=servers, window_ids=some_windows)
    def find(self, server: int, window_ids: tuple[str, ...]) -> None:
        self.both(server, "find", window_ids)

    @rule(server=servers)
    def peek(self, server: int) -> None:
        self.both(server, "peek")

    @rule(server=servers, of=st.frozensets(st.sampled_from("xyz")), since=st.sampled_from([-1, 0, 0, 1]))
    def expire_servers(self, server: int, of: frozenset[str], since: int) -> None:
        """One that has beaten since it was seen lives, also when its clock was set back."""
        beats = {each: self.book.servers[each].beat_ms for each in of if each in self.book.servers}
        self.both(server, "expire_servers", {each: beats.get(each, 0) - since for each in of})

    @rule(server=servers, really=likely)
    def leave(self, server: int, really: bool) -> None:
        if not really:
            self.both(server, "leave")

    @rule(server=servers)
    def drain(self, server: int) -> None:
        self.both(server, "drain")

    @rule(server=servers, shape=st.sampled_from("st"), over=st.frozensets(windows), data=st.data())
    def declare(self, server: int, shape: str, over: frozenset[str], data: st.DataObject) -> None:
        seen, size, forget = (
            data.draw(likely),
            data.draw(st.sampled_from([None, 7])),
            data.draw(st.booleans()),
        )
        change = ShapeChange(shape, f"text of {shape}", over, size, forget)
        self.both(server, "declare", change, seen=seen, now_ms=self.now)

    @rule(
        server=servers,
        shard_id=shards,
        parents=st.sampled_from([(), ("x",), ("x", "y"), ("a",), ("b",), ("a", "b")]),
        claim=claims,
    )
    def open_shard(
        self, server: int, shard_id: str, parents: tuple[str, ...], claim: StoreClaim | None
    ) -> None:
        parents = tuple(parent for parent in parents if parent < shard_id or parent in "xy")
        self.both(server, "open_shard", shard_id, parents, store=claim)

    @rule(server=servers, data=st.data(), shard_id=shards)
    def change_state(self, server: int, data: st.DataObject, shard_id: str) -> None:
        self.files += 1
        shard = self.book.shards.get(shard_id)
        if shard is None or not shard.store:
            return
        store = self.book.stores[shard.store]
        fence = PositionUpdate(
            shard_id, shard.epoch, shard.position, shard.effective_ms, None, previous=shard.position
        )
        serial, due_ms = store.serial - (not data.draw(likely)), data.draw(times)
        update = StoreUpdate(shard.store, serial, (shard_id,), due_ms)
        file = StateFile(f"state{self.files}", {shard.store: (store.key_range,)}, 1, 9)
        self.both(server, "register", Flush((fence,), stores=(update,), state_file=file), now_ms=self.now)

    @rule(server=servers, shard_id=shards)
    def adopt_store(self, server: int, shard_id: str) -> None:
        self.both(server, "adopt_store", shard_id)

    @rule(server=servers, data=st.data(), fresh=likely)
    def compact_state(self, server: int, data: st.DataObject, fresh: bool) -> None:
        self.files += 1
        needed = {path: self.book.state_files[path].needed for path in self.book.needed_files}
        named = sorted({store_id for each in needed.values() for store_id in each})
        chosen = data.draw(st.lists(st.sampled_from(named or ["none"]), min_size=1, unique=True))
        ranges = {each: (KeyRange(0, data.draw(st.sampled_from([9, 4]))),) for each in chosen}
        seen = needed if fresh else {path: {} for path in needed}
        self.both(
            server, "compact_state", StateFile(f"state{self.files}", ranges, 1, 9), seen, now_ms=self.now
        )

    @rule(server=servers, data=st.data())
    def forget_state_files(self, server: int, data: st.DataObject) -> None:
        paths = data.draw(st.lists(st.sampled_from(sorted(self.book.state_files) or ["none"])))
        self.both(server, "forget_state_files", tuple(paths))

    @rule(server=servers, shard_id=shards, now=st.booleans())
    def release(self, server: int, shard_id: str, now: bool) -> None:
        epoch = self.book.shards.get(shard_id, ShardState(shard_id, 1)).epoch
        self.both(server, "release_shard", shard_id, epoch if now else epoch - 1)

    @rule(server=servers, shard_ids=st.frozensets(shards))
    def end(self, server: int, shard_ids: frozenset[str]) -> None:
        self.now += 1
        self.both(server, "end_shards", shard_ids, now_ms=self.now)

    @rule(server=servers, shard_id=shards)
    def accept_gap(self, server: int, shard_id: str) -> None:
        self.both(server, "accept_gap", shard_id)

    @rule(server=servers, shard_ids=st.frozensets(shards), name=st.sampled_from(["reset", "forget_shards"]))
    def reset(self, server: int, shard_ids: frozenset[str], name: str) -> None:
        self.both(server, name, shard_ids, forget_state=self.files % 2 == 0, now_ms=self.now)

    @rule(server=servers, data=st.data(), touched=st.lists(windows, max_size=4), clock=st.integers(0, 9))
    def register(self, server: int, data: st.DataObject, touched: list[str], clock: int) -> None:
        self.now += 1
        updates = tuple(self.update(data, shard_id) for shard_id in sorted(data.draw(st.frozensets(shards))))
        segments = tuple(self.segment(each, likely=data.draw(likely)) for each in touched)
        step = data.draw(
            st.none() | st.builds(self.step, st.integers(-1, 1), st.integers(-1, 1), few, few, times)
        )
        timers: list[dict[str, Any]] = [{}, {"timer": "alarm", "due_ms": 7}]
        letters = tuple(letter(n, **timers[n]) for n in range(data.draw(st.integers(0, 2))))
        self.both(
            server,
            "register",
            Flush(updates, segments, Effects(dead_letters=letters), clock, step),
            now_ms=self.now,
        )

    def step(self, behind: int, missed: int, number: int, rows: int, opened_ms: int | None) -> BatchStep:
        """What a server puts in whose picture is about right."""
        stands = self.book.totals.batch_progress
        since = BatchProgress(
            max(0, stands.number - behind),
            max(0, stands.rows - missed),
            stands.opened_ms if missed else opened_ms,
        )
        return BatchStep(
            since, BatchProgress(since.number + number, since.rows + rows, opened_ms), max_rows=6
        )

    def update(self, data: st.DataObject, shard_id: str) -> PositionUpdate:
        shard = self.book.shards.get(shard_id, ShardState(shard_id, 1))
        base = shard.position.number if shard.position else data.draw(st.sampled_from([0, 9]))
        back = data.draw(st.sampled_from([0, 0, 0, 0, 0, 1]))
        position = Sequence(max(0, base + data.draw(steps) - back), data.draw(st.integers(0, 2)))
        return PositionUpdate(
            shard_id,
            shard.epoch if data.draw(likely) else shard.epoch - 1,
            data.draw(st.sampled_from([position, position, position, None])),
            data.draw(times),
            data.draw(times),
            ended=data.draw(st.sampled_from([False, False, True])),
            previous=shard.position if data.draw(likely) else Sequence(3),
        )

    def segment(self, window_id: str, *, likely: bool = True) -> Segment:
        """A segment of the kind that the window takes now, or, unlikely, of the other."""
        self.files += 1
        entry = self.book.windows.get(window_id)
        takes_rows = entry is None or entry.state is WindowState.OPEN
        kind = SegmentKind.WINDOW if takes_rows == likely else SegmentKind.RECOMPUTE
        if self.files % 7 == 0:
            kind = SegmentKind.LATE
        path = f"s{self.files}" if self.files % 29 else "s1"
        return Segment(path, window_id, self.files, self.files, *WINDOWS[window_id], kind=kind)

    @rule(server=servers, window_ids=some_windows)
    def cut(self, server: int, window_ids: tuple[str, ...]) -> None:
        self.both(server, "cut", window_ids)

    @rule(server=servers, window_id=windows, hops=st.integers(1, 12), retain=likely)
    def go_on(self, server: int, window_id: str, hops: int, retain: bool) -> None:
        """Take the window's likeliest next steps, so that runs reach a revision, and the end of the window's life."""
        if not self.models[server].lives:
            self.restart(server)
        for _ in range(hops):
            self.now += 1
            self.hop(server, window_id, retain=retain)

    def hop(self, server: int, window_id: str, *, retain: bool) -> None:
        entry = self.book.windows.get(window_id)
        if entry is None or (
            entry.state is WindowState.PUBLISHED
            and entry.retained
            and entry.revision == 1
            and not entry.pending
        ):
            segment = self.segment(window_id)
            self.both(server, "register", Flush((), (segment,)), now_ms=self.now)
        elif entry.state is WindowState.OPEN or (entry.state is WindowState.PUBLISHED and entry.pending):
            self.both(server, "cut", (window_id,))
        elif entry.state is WindowState.PUBLISHED and entry.retained:
            self.both(server, "expire", published_before_ms=self.now, keep_bytes=0)
        elif entry.state is WindowState.SET_ASIDE:
            self.both(server, "decide", window_id, "retry", now_ms=self.now)
        elif entry.state is WindowState.PUBLISHED:
            self.both(server, "prune", windows_before_ms=self.now, shards_before_ms=0)
        elif entry.owner != "xy"[server]:
            self.both(server, "adopt")
        elif entry.state is WindowState.CUT:
            self.both(server, "begin_attempts", (window_id,))
            self.both(server, "commit", (Commit(window_id, entry.attempt + 1, "stage", ("f",), 7),))
        else:
            shown = {window_id: entry.attempt}
            self.both(server, "published", shown, retain=retain, now_ms=self.now)

    @rule(server=servers)
    def adopt(self, server: int) -> None:
        self.both(server, "adopt")

    @rule(server=servers, window_ids=some_windows)
    def begin_attempts(self, server: int, window_ids: tuple[str, ...]) -> None:
        self.both(server, "begin_attempts", window_ids)

    @rule(server=servers, window_ids=some_windows, latest=likely, files=st.lists(st.text("ab/", min_size=1)))
    def commit(self, server: int, window_ids: tuple[str, ...], latest: bool, files: list[str]) -> None:
        outputs = (
            Commit(each, attempt, "stage", tuple(files), len(files))
            for each, attempt in self.attempts(window_ids, latest=latest).items()
        )
        self.both(server, "commit", tuple(outputs))

    def attempts(self, window_ids: tuple[str, ...], *, latest: bool) -> dict[str, int]:
        """The windows' latest attempts, or those before."""
        known = self.book.windows
        return {each: (known[each].attempt if each in known else 0) - (not latest) for each in window_ids}

    @rule(server=servers, window_ids=some_windows, latest=likely, retain=likely)
    def publish(self, server: int, window_ids: tuple[str, ...], latest: bool, retain: bool) -> None:
        self.now += 1
        attempts = self.attempts(window_ids, latest=latest)
        self.both(server, "published", attempts, retain=retain, now_ms=self.now)

    @rule(server=servers, age=ages, keep_bytes=st.sampled_from([0, 5, 50, 10**9]), limit=limits)
    def expire(self, server: int, age: int, keep_bytes: int, limit: int) -> None:
        self.both(server, "expire", published_before_ms=self.now - age, keep_bytes=keep_bytes, limit=limit)

    @rule(server=servers, window_id=windows)
    def set_aside(self, server: int, window_id: str) -> None:
        self.both(server, "set_aside", window_id, "no")

    @rule(server=servers, window_id=windows, first=likely)
    def halt(self, server: int, window_id: str, first: bool) -> None:
        self.both(server, "halt", window_id, "no", first=first)

    @rule(
        server=servers,
        window_id=windows,
        decision=st.sampled_from(["retry", "set_aside", "skip", "recompute"]),
    )
    def decide(self, server: int, window_id: str, decision: str) -> None:
        self.now += 1
        self.both(server, "decide", window_id, decision, now_ms=self.now)

    @rule(server=servers, data=st.data())
    def late_published(self, server: int, data: st.DataObject) -> None:
        visible = data.draw(st.lists(st.sampled_from(sorted(self.book.late) or ["none"])))
        self.both(server, "late_published", tuple(visible))

    @rule(server=servers, age=ages, shard_age=ages, keep=st.frozensets(shards), limit=limits)
    def prune(self, server: int, age: int, shard_age: int, keep: frozenset[str], limit: int) -> None:
        before = {"windows_before_ms": self.now - age, "shards_before_ms": self.now - shard_age}
        self.both(server, "prune", keep_shards=keep, limit=limit, **before)


LedgerMachine.TestCase.settings = settings(
    max_examples=settings().max_examples // 3,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestStoresAndModel = LedgerMachine.TestCase
