"""The store against a naive model: whatever the order of calls, both hold the same, also after a restart.

Invariant: a row counts once. Each call changes the model wholly or not at all, and the store's whole content is
compared with the model's after every restart.
"""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from mldserver.errors import InternalError
from mldserver.records import Sequence
from mldserver.state.ledger import (
    BatchProgress,
    Flush,
    FlushResult,
    LedgerState,
    PositionUpdate,
    Segment,
    ShardState,
    WindowEntry,
    WindowState,
)
from mldserver.state.store import SqliteStore

SHARDS = ("a", "b", "c")
WINDOWS = {f"w{n}": (n * 10, n * 10 + 10) for n in range(2)} | {"batch-1": (None, None)}

shards = st.sampled_from(SHARDS)
windows = st.sampled_from(sorted(WINDOWS))
times = st.none() | st.integers(0, 50)
# Few digits and many, so that an order of texts would differ from the order of numbers.
steps = st.sampled_from([0, 0, 1, 5, 10**30])


@dataclasses.dataclass
class Model:
    shards: dict[str, ShardState] = dataclasses.field(default_factory=dict)
    ended_ms: dict[str, int] = dataclasses.field(default_factory=dict)
    windows: dict[str, WindowEntry] = dataclasses.field(default_factory=dict)
    published_ms: dict[str, int] = dataclasses.field(default_factory=dict)
    late: list[Segment] = dataclasses.field(default_factory=list)
    clock: int = 0
    progress: BatchProgress = dataclasses.field(default_factory=BatchProgress)
    cut_below: int | None = None

    def state(self) -> LedgerState:
        return LedgerState(
            dict(self.shards),
            dict(self.windows),
            tuple(self.late),
            self.clock,
            self.progress,
            0,
            self.cut_below,
        )

    def closed(self, segment: Segment) -> bool:
        if segment.window_id in self.windows:
            return self.windows[segment.window_id].state != "open"
        return None not in {segment.end_ms, self.cut_below} and segment.end_ms <= self.cut_below  # type: ignore[operator]  # neither is None

    def shard(self, shard_id: str, **changes: Any) -> None:
        self.shards[shard_id] = dataclasses.replace(
            self.shards.get(shard_id, ShardState(shard_id, 0)), **changes
        )

    def window(self, window_id: str, **changes: Any) -> None:
        self.windows[window_id] = dataclasses.replace(self.windows[window_id], **changes)

    def in_state(self, window_id: str, *states: str) -> bool:
        return window_id in self.windows and self.windows[window_id].state in states


class LedgerMachine(RuleBasedStateMachine):
    @initialize()
    def create(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.model = Model()
        self.now = 0
        self.files = 0
        self.store = SqliteStore(Path(self.folder.name) / "ledger.sqlite", pipeline="p")
        assert self.store.open(now_ms=0) == LedgerState()
        self.hurry()
        for shard_id in ("a", "b"):
            self.open_shard(shard_id, ())

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.reopen()
            self.store.close()
            self.folder.cleanup()

    @rule()
    def reopen(self) -> None:
        self.store.close()
        assert self.store.open(now_ms=self.now) == self.model.state()
        self.hurry()

    def hurry(self) -> None:
        """Do not wait for the disk: nothing is killed here."""
        assert self.store._db is not None
        self.store._db.execute("PRAGMA synchronous = OFF")

    @rule(shard_id=shards, parents=st.sampled_from([(), ("x",), ("x", "y")]))
    def open_shard(self, shard_id: str, parents: tuple[str, ...]) -> None:
        self.know(shard_id, parents, in_store=False)
        self.model.shard(shard_id, epoch=self.model.shards[shard_id].epoch + 1)
        assert self.store.open_shard(shard_id, parents) == self.model.shards[shard_id]

    @rule(shard_id=shards, parents=st.sampled_from([(), ("z",)]))
    def know(self, shard_id: str, parents: tuple[str, ...], *, in_store: bool = True) -> None:
        self.model.shard(shard_id, **({"parents": parents} if parents else {}))
        if in_store:
            self.store.know_shards({shard_id: parents})

    @rule(shard_ids=st.frozensets(shards))
    def end(self, shard_ids: frozenset[str]) -> None:
        self.now += 1
        self.store.end_shards(shard_ids, now_ms=self.now)
        for shard_id in shard_ids:
            self.ended(shard_id)

    def ended(self, shard_id: str) -> None:
        self.model.shard(shard_id, ended=True)
        self.model.ended_ms.setdefault(shard_id, self.now)

    @rule(data=st.data(), touched=st.lists(windows, max_size=4), late=st.booleans(), clock=st.integers(0, 9))
    def register(self, data: st.DataObject, touched: list[str], late: bool, clock: int) -> None:
        self.now += 1
        updates = tuple(self.update(data, shard_id) for shard_id in sorted(data.draw(st.frozensets(shards))))
        segments = tuple(self.segment(window_id, late=late and n == 0) for n, window_id in enumerate(touched))
        progress = data.draw(
            st.none() | st.builds(BatchProgress, st.integers(0, 9), st.integers(0, 9), times)
        )
        flush = Flush(updates, segments, (), clock, progress)
        known = self.model.shards
        expected = FlushResult(
            frozenset(
                u.shard_id for u in updates if u.shard_id not in known or known[u.shard_id].epoch != u.epoch
            ),
            frozenset(s.window_id for s in segments if not s.late and self.model.closed(s)),
        )
        if expected.registered and any(self.goes_back(update) for update in updates):
            with pytest.raises(InternalError, match="would go back"):
                self.store.register(flush, now_ms=self.now)
            return
        assert self.store.register(flush, now_ms=self.now) == expected
        if expected.registered:
            self.apply(flush)

    def update(self, data: st.DataObject, shard_id: str) -> PositionUpdate:
        shard = self.model.shards.get(shard_id, ShardState(shard_id, 1))
        base = shard.position.number if shard.position else data.draw(st.sampled_from([0, 9]))
        back = data.draw(st.sampled_from([0, 0, 0, 0, 0, 1]))
        position = Sequence(max(0, base + data.draw(steps) - back), data.draw(st.integers(0, 2)))
        return PositionUpdate(
            shard_id,
            shard.epoch + data.draw(st.sampled_from([0] * 9 + [-1])),
            data.draw(st.sampled_from([position, position, position, None])),
            data.draw(times),
            data.draw(times),
            ended=data.draw(st.sampled_from([False, False, True])),
        )

    def segment(self, window_id: str, *, late: bool) -> Segment:
        self.files += 1
        return Segment(f"s{self.files}", window_id, self.files, 1, *WINDOWS[window_id], late=late)

    def goes_back(self, update: PositionUpdate) -> bool:
        stored = self.model.shards[update.shard_id].position
        return stored is not None and (update.position is None or update.position < stored)

    def apply(self, flush: Flush) -> None:
        model = self.model
        for update in flush.positions:
            stored = model.shards[update.shard_id]
            later = {
                name: max(
                    (t for t in (getattr(stored, name), getattr(update, name)) if t is not None), default=None
                )
                for name in ("effective_ms", "event_ms")
            }
            model.shard(update.shard_id, position=update.position, **later)
            if update.ended:
                self.ended(update.shard_id)
        for segment in flush.segments:
            if segment.late:
                model.late.append(segment)
                continue
            fresh = WindowEntry(segment.window_id, WindowState.OPEN, *WINDOWS[segment.window_id])
            entry = model.windows.setdefault(segment.window_id, fresh)
            model.window(
                segment.window_id, segments=(*entry.segments, segment), rows_in=entry.rows_in + segment.rows
            )
        model.clock = max(model.clock, flush.clock)
        model.progress = flush.batch_progress or model.progress

    @rule(window_ids=st.lists(windows, unique=True))
    def cut(self, window_ids: list[str]) -> None:
        opened = [window_id for window_id in window_ids if self.model.in_state(window_id, "open")]
        for window_id in opened:
            self.model.window(window_id, state=WindowState.CUT)
        assert self.store.cut(tuple(window_ids)) == tuple(self.model.windows[each] for each in opened)

    @rule(window_id=windows)
    def go_on(self, window_id: str) -> None:
        """Take the window's likeliest next step, so that runs reach the end of its life."""
        if window_id not in self.model.windows:
            segment = self.segment(window_id, late=False)
            if not self.model.closed(segment):
                flush = Flush((), (segment,))
                assert self.store.register(flush, now_ms=self.now).registered
                self.apply(flush)
        elif self.model.in_state(window_id, "open"):
            self.cut([window_id])
        elif self.model.in_state(window_id, "cut", "set_aside"):
            self.begin_attempt(window_id)
            self.commit(window_id, 0, ["f"])
        elif self.model.in_state(window_id, "committed"):
            self.publish(window_id)
        else:
            self.prune(self.now - self.model.published_ms[window_id] - 1, 0)

    @rule(window_id=windows)
    def begin_attempt(self, window_id: str) -> None:
        if not self.model.in_state(window_id, "cut", "set_aside"):
            with pytest.raises(InternalError):
                self.store.begin_attempt(window_id)
            return
        attempt = self.model.windows[window_id].attempt + 1
        self.model.window(window_id, state=WindowState.CUT, attempt=attempt, error=None)
        assert self.store.begin_attempt(window_id) == attempt

    @rule(window_id=windows, stale=st.sampled_from([0, 0, 1]), files=st.lists(st.text("ab/", min_size=1)))
    def commit(self, window_id: str, stale: int, files: list[str]) -> None:
        attempt = (self.model.windows[window_id].attempt if window_id in self.model.windows else 0) - stale
        committed = self.store.commit(
            window_id, attempt=attempt, staging="stage", files=tuple(files), rows_out=len(files)
        )
        assert committed == (self.model.in_state(window_id, "cut") and not stale)
        if committed:
            self.model.window(
                window_id,
                state=WindowState.COMMITTED,
                staging="stage",
                files=tuple(files),
                rows_out=len(files),
            )

    @rule(window_id=windows)
    def publish(self, window_id: str) -> None:
        self.now += 1
        if not self.model.in_state(window_id, "committed", "published"):
            with pytest.raises(InternalError):
                self.store.published(window_id, now_ms=self.now)
            return
        assert self.store.published(window_id, now_ms=self.now) == self.model.windows[window_id].segments
        self.model.window(window_id, state=WindowState.PUBLISHED, staging=None, segments=())
        self.model.published_ms.setdefault(window_id, self.now)

    @rule(window_id=windows)
    def set_aside(self, window_id: str) -> None:
        if not self.model.in_state(window_id, "cut"):
            with pytest.raises(InternalError):
                self.store.set_aside(window_id, "no")
            return
        self.store.set_aside(window_id, "no")
        self.model.window(window_id, state=WindowState.SET_ASIDE, error="no")

    @precondition(lambda self: self.model.late)
    @rule(data=st.data())
    def late_published(self, data: st.DataObject) -> None:
        visible = data.draw(st.lists(st.sampled_from(self.model.late), unique=True))
        self.store.late_published(tuple(segment.path for segment in visible))
        self.model.late = [segment for segment in self.model.late if segment not in visible]

    @rule(age=st.integers(0, 10), shard_age=st.integers(0, 10))
    def prune(self, age: int, shard_age: int) -> None:
        model, before, ended_before = self.model, self.now - age, self.now - shard_age
        old = [window_id for window_id, ms in model.published_ms.items() if ms < before]
        gone = [shard_id for shard_id, ms in model.ended_ms.items() if ms < ended_before]
        assert self.store.prune(windows_before_ms=before, shards_before_ms=ended_before) == len(old) + len(
            gone
        )
        for window_id in old:
            end_ms = model.windows.pop(window_id).end_ms
            del model.published_ms[window_id]
            if end_ms is not None:
                model.cut_below = max(model.cut_below or 0, end_ms)
        for shard_id in gone:
            del model.shards[shard_id], model.ended_ms[shard_id]


LedgerMachine.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestStoreAndModel = LedgerMachine.TestCase
