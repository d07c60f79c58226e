"""What a ledger is, said naively: plain dictionaries, no efficiency. The stores are compared with it.

Times are passed in, as to ``SqliteStore``; ``ModelServer`` has the same methods.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mldserver.errors import InternalError, ServerExpired
from mldserver.ledger.contract import (
    BatchProgress,
    Commit,
    Decision,
    Flush,
    FlushResult,
    LedgerState,
    PositionUpdate,
    Segment,
    SegmentKind,
    ServerState,
    ShapeChange,
    ShardState,
    WindowEntry,
    WindowState,
)

OPEN, CUT, COMMITTED, PUBLISHED, SET_ASIDE = WindowState


@dataclass
class Content:
    servers: dict[str, ServerState] = field(default_factory=dict)
    lives: dict[str, int] = field(default_factory=dict)
    shards: dict[str, ShardState] = field(default_factory=dict)
    windows: dict[str, WindowEntry] = field(default_factory=dict)
    late: list[Segment] = field(default_factory=list)
    paths: set[str] = field(default_factory=set)
    letters: int = 0
    clock: int = 0
    progress: BatchProgress = field(default_factory=BatchProgress)
    cut_below: int | None = None
    shape: str = ""
    shapes: dict[str, str] = field(default_factory=dict)
    draining: bool = False
    version: int = 0
    """Told by the machine, before it declares a shape."""

    def state(self) -> LedgerState:
        return LedgerState(
            dict(self.shards),
            {
                each.window_id: each
                for each in self.windows.values()
                if each.state != PUBLISHED or each.retained
            },
            tuple(self.late),
            self.clock,
            self.progress,
            self.letters,
            servers=dict(self.servers),
            cut_below_ms=self.cut_below,
            shape=self.shape,
            shapes=dict(self.shapes),
            draining=self.draining,
        )

    def shard(self, shard_id: str, **changes: Any) -> None:
        known = self.shards.get(shard_id, ShardState(shard_id, 0))
        self.shards[shard_id] = dataclasses.replace(known, **changes)

    def window(self, window_id: str, **changes: Any) -> None:
        self.windows[window_id] = dataclasses.replace(self.windows[window_id], **changes)

    def in_state(self, window_id: str, *states: WindowState) -> bool:
        return window_id in self.windows and self.windows[window_id].state in states

    def release(self, server_id: str) -> None:
        for shard in list(self.shards.values()):
            if shard.owner == server_id:
                self.shard(shard.shard_id, owner=None)
        for entry in list(self.windows.values()):
            if entry.owner == server_id:
                self.window(entry.window_id, owner=None)

    def know(self, shard_id: str, parents: tuple[str, ...]) -> None:
        self.shard(shard_id, **({"parents": parents} if parents else {}))

    def end(self, shard_id: str, now_ms: int) -> None:
        if shard_id not in self.shards or not self.shards[shard_id].ended:
            self.shard(shard_id, ended_ms=now_ms)


class ModelServer:
    """One server on a model that others share."""

    def __init__(self, shared: list[Content], server_id: str) -> None:
        self._shared = shared
        self.server_id = server_id
        self.life = 0

    @property
    def content(self) -> Content:
        return self._shared[0]

    def call(self, name: str, *args: Any, **fields: Any) -> Any:
        """Do it wholly or not at all."""
        before = copy.deepcopy(self.content)
        try:
            return getattr(self, name)(*args, **fields)
        except InternalError:
            self._shared[0] = before
            raise

    def lives(self) -> bool:
        return self.content.lives.get(self.server_id) == self.life

    def serving(self) -> Content:
        if not self.lives():
            raise ServerExpired("expired")
        return self.content

    def open(self, *, now_ms: int) -> LedgerState:
        content = self.content
        times = [each.beat_ms for each in content.servers.values()]
        shown = [each for each in content.windows.values() if each.state in {PUBLISHED, CUT, COMMITTED}]
        times += [each.published_ms for each in shown if each.published_ms is not None]
        if times:
            alone = not content.servers and not any(
                each.retained for each in shown if each.state is PUBLISHED
            )
            before = content.servers.get(self.server_id)
            now_ms = max(*times, now_ms if alone else 0, before.beat_ms + 1 if before else 0)
        content.release(self.server_id)
        self.life += 1
        content.lives[self.server_id] = self.life
        content.servers[self.server_id] = ServerState(self.server_id, now_ms)
        return content.state()

    def peek(self) -> LedgerState:
        return self.content.state()

    def sync(self, told: ServerState) -> LedgerState:
        """Tell everything: what the news come to is the callers' to compare."""
        servers = self.serving().servers
        servers[self.server_id] = dataclasses.replace(told, shape=servers[self.server_id].shape)
        return self.content.state()

    def expire_servers(self, seen: Mapping[str, int]) -> frozenset[str]:
        content = self.serving()
        for server_id in seen.keys() - {self.server_id}:
            if server_id in content.servers and content.servers[server_id].beat_ms == seen[server_id]:
                self.remove(server_id)
        return frozenset(seen.keys() - content.servers.keys())

    def remove(self, server_id: str) -> None:
        del self.content.servers[server_id], self.content.lives[server_id]
        self.content.release(server_id)

    def leave(self) -> None:
        if self.lives():
            self.remove(self.server_id)

    def drain(self) -> None:
        self.content.draining = True

    def declare(self, change: ShapeChange, *, version: int, now_ms: int) -> bool:
        content = self.serving()
        if change.fingerprint != content.shape and version != content.version:
            return False
        servers = content.servers
        servers[self.server_id] = dataclasses.replace(servers[self.server_id], shape=change.fingerprint)
        content.shapes.setdefault(change.fingerprint, change.text)
        known, content.shape = content.shape == change.fingerprint, change.fingerprint
        content.draining &= any(each.shape for name, each in servers.items() if name != self.server_id)
        if known:
            return True
        self.let_go(each for each in change.over if content.in_state(each, PUBLISHED))
        if change.window_ms is not None:
            begun = [
                w.end_ms for w in content.windows.values() if w.start_ms is not None and w.start_ms <= now_ms
            ]
            ends = [end for end in (*begun, content.cut_below) if end is not None]
            content.cut_below = min(
                (n for n in range(0, 1000, change.window_ms) if ends and n >= max(ends)), default=None
            )
        if change.forget_event_times:
            for shard_id in content.shards:
                content.shard(shard_id, event_ms=None)
        return True

    def open_shard(self, shard_id: str, parents: tuple[str, ...]) -> ShardState:
        content = self.serving()
        content.know(shard_id, parents)
        content.shard(shard_id, epoch=content.shards[shard_id].epoch + 1, owner=self.server_id)
        opened = content.shards[shard_id]
        content.shard(shard_id, gap_accepted=False)
        return opened

    def release_shard(self, shard_id: str, epoch: int) -> None:
        content = self.serving()
        if shard_id in content.shards and content.shards[shard_id].epoch == epoch:
            content.shard(shard_id, owner=None)

    def end_shards(self, shard_ids: frozenset[str], *, now_ms: int) -> None:
        for shard_id in shard_ids:
            self.content.end(shard_id, now_ms)

    def accept_gap(self, shard_id: str) -> bool:
        if shard_id in self.content.shards:
            self.content.shard(shard_id, gap_accepted=True)
        return shard_id in self.content.shards

    def reset(self, shard_ids: frozenset[str]) -> frozenset[str]:
        content = self.content
        gone = frozenset(
            each for each in shard_ids if each in content.shards and not content.shards[each].owner
        )
        for shard_id in gone:
            epoch = content.shards[shard_id].epoch + 1
            content.shard(
                shard_id, epoch=epoch, position=None, effective_ms=None, event_ms=None, ended_ms=None
            )
        return gone

    def register(self, flush: Flush, *, now_ms: int) -> FlushResult:
        content = self.serving()
        result = FlushResult(
            frozenset(u.shard_id for u in flush.positions if not self.goes_on(u)),
            frozenset(s.window_id for s in flush.segments if s.kind == "window" and self.closed(s)),
            frozenset(s.window_id for s in flush.segments if s.kind == "recompute" and not self.retained(s)),
        )
        if result.registered:
            for update in flush.positions:
                self.move(update, now_ms)
            for segment in flush.segments:
                self.add(segment)
            content.letters += len(flush.effects.dead_letters)
            content.clock = max(content.clock, flush.clock)
            self.put_in(flush)
        return result

    def put_in(self, flush: Flush) -> None:
        step, stands = flush.batches, self.content.progress
        if step is None or step.since == step.until:
            return
        progress = max(stands, step.until, key=lambda each: each.number)
        if stands.number == step.until.number:
            rows = stands.rows + step.until.rows
            rows -= step.since.rows if step.since.number == stands.number else 0
            progress = BatchProgress(
                stands.number, rows, stands.opened_ms if stands.rows else step.until.opened_ms
            )
            if rows >= step.max_rows:
                progress = BatchProgress(stands.number + 1)
        self.content.progress = progress

    def goes_on(self, update: PositionUpdate) -> bool:
        shard = self.content.shards.get(update.shard_id)
        return shard is not None and (shard.epoch, shard.position) == (update.epoch, update.previous)

    def closed(self, segment: Segment) -> bool:
        content = self.content
        if segment.window_id in content.windows:
            return content.windows[segment.window_id].state != OPEN
        end_ms, cut_below = segment.end_ms, content.cut_below
        return end_ms is not None and cut_below is not None and end_ms <= cut_below

    def retained(self, segment: Segment) -> bool:
        entry = self.content.windows.get(segment.window_id)
        return entry is not None and entry.retained and (entry.state is not PUBLISHED or entry.error is None)

    def move(self, update: PositionUpdate, now_ms: int) -> None:
        stored = self.content.shards[update.shard_id]
        if stored.position is not None and (update.position is None or update.position < stored.position):
            raise InternalError("back")
        latest = {
            name: max(
                (t for t in (getattr(stored, name), getattr(update, name)) if t is not None), default=None
            )
            for name in ("effective_ms", "event_ms")
        }
        self.content.shard(update.shard_id, position=update.position, **latest)
        if update.ended:
            self.content.end(update.shard_id, now_ms)

    def add(self, segment: Segment) -> None:
        content = self.content
        if segment.kind is SegmentKind.LATE:
            if any(each.path == segment.path for each in content.late):
                raise InternalError("twice")
            content.late.append(segment)
            return
        if segment.path in content.paths:
            raise InternalError("twice")
        content.paths.add(segment.path)
        entry = content.windows.setdefault(
            segment.window_id, WindowEntry(segment.window_id, OPEN, segment.start_ms, segment.end_ms)
        )
        if segment.kind is SegmentKind.WINDOW:
            content.window(
                segment.window_id, segments=(*entry.segments, segment), rows_in=entry.rows_in + segment.rows
            )
        elif entry.state is OPEN:
            raise InternalError("open")
        else:
            content.window(segment.window_id, pending=(*entry.pending, segment))

    def late_published(self, paths: tuple[str, ...]) -> None:
        self.serving().late = [each for each in self.content.late if each.path not in paths]

    def cut(self, window_ids: tuple[str, ...]) -> tuple[WindowEntry, ...]:
        content, entries = self.serving(), []
        for window_id in window_ids:
            if not (content.in_state(window_id, OPEN) or self.waits(window_id)):
                continue
            entry = content.windows[window_id]
            revision = entry.revision + (entry.state is not OPEN)
            fresh = entry.segments if entry.state is OPEN else entry.pending
            kept = () if entry.state is OPEN else entry.segments
            content.window(
                window_id, state=CUT, owner=self.server_id, revision=revision, segments=kept, pending=()
            )
            self.take_in(window_id, fresh)
            self.go_behind(content.windows[window_id])
            entries.append(content.windows[window_id])
        return tuple(entries)

    def take_in(self, window_id: str, fresh: tuple[Segment, ...]) -> None:
        entry = self.content.windows[window_id]
        segments = (*entry.segments, *(dataclasses.replace(each, revision=entry.revision) for each in fresh))
        self.content.window(
            window_id, segments=segments, pending=(), rows_in=sum(each.rows for each in segments)
        )

    def go_behind(self, entry: WindowEntry) -> None:
        number = int(entry.window_id.removeprefix("batch-")) if entry.end_ms is None else -1
        if number >= self.content.progress.number:
            self.content.progress = BatchProgress(number + 1)

    def waits(self, window_id: str) -> bool:
        return self.content.in_state(window_id, PUBLISHED) and bool(self.content.windows[window_id].pending)

    def adopt(self) -> tuple[WindowEntry, ...]:
        content = self.serving()
        orphans = [
            each for each in content.windows.values() if each.state in {CUT, COMMITTED} and not each.owner
        ]
        orphans.sort(key=lambda each: (each.start_ms is not None, each.start_ms, each.window_id))
        for each in orphans:
            content.window(each.window_id, owner=self.server_id)
        return tuple(content.windows[each.window_id] for each in orphans)

    def ours(self, window_id: str) -> bool:
        content = self.serving()
        return content.in_state(window_id, CUT) and content.windows[window_id].owner == self.server_id

    def begin_attempts(self, window_ids: tuple[str, ...]) -> dict[str, int]:
        self.serving()
        begun: dict[str, int] = {}
        for window_id in window_ids:
            if self.ours(window_id):
                begun[window_id] = self.content.windows[window_id].attempt + 1
                self.content.window(window_id, attempt=begun[window_id])
        return begun

    def commit(self, commits: tuple[Commit, ...]) -> frozenset[str]:
        self.serving()
        done = [
            each
            for each in commits
            if self.ours(each.window_id) and self.content.windows[each.window_id].attempt == each.attempt
        ]
        for each in done:
            self.content.window(
                each.window_id,
                state=COMMITTED,
                staging=each.staging,
                files=each.files,
                rows_out=each.rows_out,
                error=None,
            )
        return frozenset(each.window_id for each in done)

    def published(self, attempts: dict[str, int], *, retain: bool, now_ms: int) -> tuple[Segment, ...]:
        content = self.serving()
        done = [
            each
            for each, attempt in attempts.items()
            if content.in_state(each, COMMITTED)
            and content.windows[each].owner == self.server_id
            and content.windows[each].attempt == attempt
        ]
        for window_id in done:
            content.window(
                window_id, state=PUBLISHED, owner=None, staging=None, error=None, published_ms=now_ms
            )
        return () if retain else self.let_go(done)

    def let_go(self, window_ids: Iterable[str]) -> tuple[Segment, ...]:
        free: list[Segment] = []
        for window_id in window_ids:
            if not self.content.windows[window_id].pending:
                gone = self.content.windows[window_id].segments
                free.extend(gone)
                self.content.paths.difference_update(each.path for each in gone)
                self.content.window(window_id, retained=False, segments=())
        return tuple(free)

    def find(self, window_ids: tuple[str, ...]) -> tuple[WindowEntry, ...]:
        return tuple(self.content.windows[each] for each in window_ids if each in self.content.windows)

    def expire(self, *, published_before_ms: int, keep_bytes: int, limit: int = 1000) -> tuple[Segment, ...]:
        content, free = self.serving(), list[Segment]()
        for _ in range(limit):
            published = [each for each in content.windows.values() if each.state is PUBLISHED]
            total = sum(s.bytes for each in published for s in (*each.segments, *each.pending))
            oldest = min(
                (each for each in published if each.retained and not each.pending),
                key=lambda each: (each.published_ms, each.window_id),
                default=None,
            )
            if oldest is None or (oldest.published_ms >= published_before_ms and total <= keep_bytes):
                return tuple(free)
            free += self.let_go([oldest.window_id])
        return tuple(free)

    def set_aside(self, window_id: str, error: str) -> None:
        if self.ours(window_id):
            self.content.window(window_id, state=SET_ASIDE, owner=None, error=error)

    def halt(self, window_id: str, error: str, *, first: bool) -> bool:
        content = self.serving()
        if not content.in_state(window_id, CUT, COMMITTED):
            return False
        entry = content.windows[window_id]
        found = entry.owner == self.server_id and (first or entry.error is not None)
        if found:
            content.window(window_id, error=error)
        return found

    def decide(self, window_id: str, decision: Decision, *, now_ms: int) -> bool:
        content = self.content
        if decision == "recompute":
            entry = content.windows.get(window_id)
            if entry is None or entry.state is not PUBLISHED or entry.error is not None or not entry.segments:
                return False
            content.window(window_id, state=CUT, revision=entry.revision + 1, pending=())
            self.take_in(window_id, entry.pending)
            return True
        possible = {
            "retry": (CUT, COMMITTED, SET_ASIDE),
            "set_aside": (CUT,),
            "skip": (CUT, SET_ASIDE),
        }[decision]
        if not content.in_state(window_id, *possible) or content.windows[window_id].error is None:
            return False
        if decision == "set_aside":
            content.window(window_id, state=SET_ASIDE, owner=None)
        elif decision == "skip":
            content.window(window_id, state=PUBLISHED, owner=None, published_ms=now_ms)
            self.take_in(window_id, content.windows[window_id].pending)
        else:
            state = content.windows[window_id].state
            content.window(window_id, error=None, state=COMMITTED if state is COMMITTED else CUT)
        return True

    def prune(
        self,
        *,
        windows_before_ms: int,
        shards_before_ms: int,
        keep_shards: frozenset[str] = frozenset(),
        limit: int = 10_000,
    ) -> int:
        content = self.serving()
        old = [
            each
            for each in content.windows.values()
            if each.state is PUBLISHED
            and not each.retained
            and each.published_ms < windows_before_ms
            and (each.end_ms is None or each.end_ms <= windows_before_ms)
        ]
        old = sorted(old, key=lambda each: (each.published_ms, each.window_id))[:limit]
        ended = {
            each.shard_id: each.ended_ms for each in content.shards.values() if each.ended_ms is not None
        }
        gone = {each for each, ms in ended.items() if ms < shards_before_ms} - keep_shards
        for each in old:
            del content.windows[each.window_id]
            self.go_behind(each)
            if each.end_ms is not None:
                content.cut_below = max(content.cut_below or 0, each.end_ms)
        for shard_id in gone:
            del content.shards[shard_id]
        return len(old) + len(gone)
