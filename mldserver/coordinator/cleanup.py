"""Clean up at a start, after a dead server, and when data is no longer retained.

The server adopts windows without a server and resumes them where they stood. It publishes registered late rows. It
deletes files that no ledger entry names, except files of live servers, which may still register them.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import structlog

from mldserver.base.clock import Clock
from mldserver.base.kill_points import kill_point
from mldserver.coordinator.core.lineage import Lineage
from mldserver.coordinator.core.watermark import Watermark
from mldserver.jobs.runner import WindowRunner
from mldserver.ledger.contract import LedgerState, Segment, WindowEntry, WindowState
from mldserver.ledger.operations import Ledger
from mldserver.output import joined
from mldserver.output.layout import (
    PRIVATE,
    QUARANTINE,
    SEGMENTS,
    STATE,
    is_joined,
    late_path,
    server_tag,
    writer_tag,
    written,
)
from mldserver.output.publish import Publisher

if TYPE_CHECKING:
    from mldserver.coordinator.core.open_windows import CoordinatorRules, CutWindows
    from mldserver.jobs.side_tables import SideTables
    from mldserver.output.store import Garbage, OutputStore

log = structlog.get_logger("mldserver")

_EXPIRE_MS: Final = 60_000
"""How often the ledger is asked for windows to expire while their segments take less than their share of the disk."""

_EXPIRED: Final = 500
"""How many windows expire at a time: a server that comes back after a day must not delete for minutes in one cycle."""

_PRUNED: Final = 5000
"""How many windows are forgotten at a time."""

_PRUNE_MS: Final = 3_600_000
"""How often the ledger is asked to forget what is old."""

_HEARD_MS: Final = 600_000
"""How long the ledger remembers a window after its retention. By then every server has read that the window is over,
so none must read the whole ledger again."""


async def recover(
    state: LedgerState, ledger: Ledger, store: OutputStore, runner: WindowRunner | None
) -> None:
    """Adopt unowned windows and clean up, at the start, before this server does anything else.

    ``runner`` is None for pipelines without rows. Raises LedgerError, OSError, and OperatorError if late rows require
    recomputation and the output cannot be replaced.
    """
    adopted: tuple[WindowEntry, ...] = ()
    if runner is not None:
        publisher = runner.steps.publisher
        if runner.steps.retain or runner.steps.has_early:
            await asyncio.to_thread(publisher.check)
        await asyncio.to_thread(publisher.drop_early)
        kill_point("recovery.opened")
        adopted = await ledger.adopt()
        kill_point("recovery.adopted")
        runner.submit(_in_order(adopted))
    side_tables = None if runner is None else runner.side_tables
    late, deleted = await _inherit(ledger, store, side_tables, own=False)
    log.info(
        "recovery.done",
        shards=len(state.shards),
        windows_published=sum(entry.state is WindowState.COMMITTED for entry in adopted),
        windows_restarted=sum(entry.state is WindowState.CUT for entry in adopted),
        late_published=late,
        files_deleted=deleted,
        clock=state.clock,
    )


async def take_over(
    under_way: Mapping[str, WindowEntry],
    working: Collection[str],
    ledger: Ledger,
    store: OutputStore,
    runner: WindowRunner,
    *,
    inherit: bool,
) -> None:
    """While the server runs: adopt windows that lost their server, and clean up after servers that are gone.

    ``under_way``: what the ledger has cut or committed. ``working``: the windows that the runner had before that was
    read. One that is this server's and not among them was cut by a call whose answer was lost. ``inherit``: whether
    servers came or went since this one last cleaned up. Raises LedgerError and OSError; repeatable.
    """
    entries = under_way.values()
    mine = [entry for entry in entries if entry.owner == ledger.server_id and entry.window_id not in working]
    if inherit or any(entry.owner is None for entry in entries):
        mine += await ledger.adopt()
        kill_point("windows.adopted")
    runner.submit(_in_order(mine))
    if inherit:
        await _inherit(ledger, store, runner.side_tables, own=True)


def _in_order(entries: Iterable[WindowEntry]) -> list[WindowEntry]:
    """What counts already comes first, then the oldest window."""
    return sorted(
        entries,
        key=lambda entry: (entry.state is not WindowState.COMMITTED, entry.start_ms or 0, entry.window_id),
    )


async def _inherit(
    ledger: Ledger, store: OutputStore, side_tables: SideTables | None, *, own: bool
) -> tuple[int, int]:
    """Publish late files and delete unnamed files of dead servers; return how many of each.

    The server also deletes its own unnamed segments and state files: a server that freed them may have died before it deleted
    them. This server writes none meanwhile. Unnamed files of another ledger are moved to quarantine, not deleted.

    ``own``: whether this server may have attempts under way. What is deleted was listed before the ledger is read: a file
    whose server is not registered then was written by one that is gone, and will never be registered. What manifests
    name is read after it: an output that was published since the listing is visible by then.
    """
    publisher = Publisher(store)
    segments = await asyncio.to_thread(
        lambda: [path for folder in (SEGMENTS, STATE) for path, _ in store.files(folder)]
    )
    attempts = await asyncio.to_thread(publisher.attempts)
    scratch = await asyncio.to_thread(store.scratch)
    state = await ledger.peek()
    servers = [server_id for server_id in state.servers if own or server_id != ledger.server_id]
    alive = {writer_tag(state.ledger_id, server_id) for server_id in servers}
    late = tuple(segment for segment in state.late_segments if written(segment.path).tag not in alive)
    await publish_late(late, ledger, store, side_tables)
    named = state.paths() | {entry.staging for entry in state.windows.values()}
    # Joined files of any server are useful until each window that lists their segments is published.
    unpublished = (entry for entry in state.windows.values() if entry.state is not WindowState.PUBLISHED)
    waiting = {segment.path.rpartition("/")[0] for entry in unpublished for segment in entry.segments}
    useful = (path for path in segments if is_joined(path) and path.rpartition("/")[0] in waiting)
    named |= {path for path in useful if written(path).ledger == state.ledger_id}

    others = alive - {writer_tag(state.ledger_id, ledger.server_id)}
    nameless = [path for path in segments if path not in named and written(path).tag not in others]
    suspects = [path for path in attempts if path not in named and written(path).tag not in alive]
    garbage = nameless + await asyncio.to_thread(publisher.unread, attempts, suspects)
    gone = [path for path in garbage if written(path).ledger == state.ledger_id]
    strangers = [path for path in garbage if written(path).ledger != state.ledger_id]
    kill_point("recovery.sweeping")
    await asyncio.to_thread(
        _sweep, store, gone, strangers, quarantine=f"{QUARANTINE}/{state.ledger_id}-{state.claims}"
    )
    running = {server_tag(server_id) for server_id in servers}
    for folder in scratch:
        if folder.name not in running:
            # Of a dead server's Spark driver; another server may be at it too.
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
    kill_point("recovery.swept")
    return len(late), len(gone)


def _sweep(store: OutputStore, gone: list[str], strangers: list[str], *, quarantine: str) -> None:
    """Delete ``gone`` with folders that are then empty; move ``strangers``, files of other ledgers, to ``quarantine``."""
    for path in gone:
        store.delete(path)
    for folder in {path.rpartition("/")[0] for path in gone} | set(store.folders(SEGMENTS)):
        store.drop_empty(folder)
    for path in strangers:
        with contextlib.suppress(FileNotFoundError):  # another server that starts has moved it
            store.move(path, f"{quarantine}{path.removeprefix(PRIVATE)}")
        store.drop_empty(path.rpartition("/")[0])
    if strangers:
        log.warning("recovery.quarantined", count=len(strangers), path=store.uri(quarantine))


async def publish_late(
    segments: tuple[Segment, ...], ledger: Ledger, store: OutputStore, side_tables: SideTables | None
) -> None:
    """Move registered files of the late dataset to where readers see them. Repeatable.

    Those with a table are handed to ``side_tables``.
    """
    if side_tables is not None:
        segments = side_tables.submit(segments)
    for segment in segments:
        await asyncio.to_thread(store.publish, segment.path, late_path(segment.path))
        await asyncio.to_thread(store.drop_empty, segment.path.rpartition("/")[0])
    if segments:
        kill_point("late.moved")
        await ledger.late_published(tuple(segment.path for segment in segments))
        kill_point("late.published")


@dataclass(kw_only=True, eq=False, slots=True)
class Retention:
    """Lets go of segments of old windows, then of the windows, then of the shards that ended: a step a cycle.

    So nothing waits long for what a server finds that comes back after a day. Nothing is forgotten within the first hour.

    A shard that ended must be remembered for as long as the stream keeps records of it (a day by default, a year at most;
    AWS limits). Whoever deletes the daemon's lease table has the shard read again from its beginning, and its rows are known
    for duplicates by its position only; a daemon that stopped before it had checkpointed the shard's end comes back where
    no position is known, and is refused; and children that are read late find no time to go on from. So where the stream is
    named its own listing decides, which names a shard for exactly that long; where it is not, a time that is set.
    """

    rules: CoordinatorRules
    ledger: Ledger
    cut_windows: CutWindows
    garbage: Garbage
    lineage: Lineage
    watermark: Watermark
    clock: Clock
    listed: frozenset[str] | None
    """The shards that the stream still lists; None before it has, and empty where it is not named."""
    _expired_ms: int = field(init=False)
    _pruned_ms: int = field(init=False)
    _expiring: bool = field(init=False, default=False)
    """Whether more windows may have to expire now."""
    _pruning: bool = field(init=False, default=False)
    """Whether more may have to be forgotten."""

    def __post_init__(self) -> None:
        self._expired_ms = self._pruned_ms = self.clock.steady_ms()

    async def step(self, held_bytes: int) -> tuple[int, tuple[str, ...], bool]:
        """Let go of what is past its retention. ``held_bytes``: what all segments take.

        Returns the bytes of files deleted, the ended shards that were forgotten, and whether the next step should follow
        at once. Raises LedgerError and OSError; repeatable.
        """
        # All servers agree on the ledger's time; what only this server remembers goes by its steady time.
        time_ms, now_ms = self.ledger.time_ms(), self.clock.steady_ms()
        deleted = await self.expire(time_ms - self.rules.retention_ms, held_bytes)
        shards: tuple[str, ...] = ()
        if self._pruning or now_ms - self._pruned_ms >= _PRUNE_MS:
            keep, ended_ms = self.listed or frozenset(), self.rules.shard_retention_ms
            window_ms, aws_ms = self.rules.retention_ms + _HEARD_MS, self.watermark.aws_ms(now_ms)
            pruned = await self.ledger.prune(
                windows_before_ms=time_ms - window_ms,
                shards_before_ms=0 if self.listed is None else time_ms - ended_ms,
                keep_shards=keep,
                limit=_PRUNED,
                # Windows that the stream has not left behind are kept, whatever the ledger's time is.
                ends_before_ms=0 if aws_ms is None else aws_ms - window_ms,
                keep_last=self.rules.in_order,
            )
            self._pruning, self._pruned_ms = pruned >= _PRUNED, now_ms
            if self.listed is not None:
                shards = self.lineage.forget_ended(now_ms - ended_ms, keep=keep)
        return deleted, shards, self._expiring or self._pruning

    async def expire(self, published_before_ms: int, held_bytes: int) -> int:
        """Stop retaining windows that are too old, or too large together; return the bytes of files deleted.

        ``held_bytes``: what all segments take. Asks the ledger only now and then while that is little.
        """
        now_ms = self.clock.steady_ms()
        # What waits for its first output must find room.
        keep_bytes = min(self.rules.retention_bytes, self.rules.segment_disk_bytes // 2)
        soon = held_bytes > keep_bytes or self._expiring
        if not soon and now_ms - self._expired_ms < _EXPIRE_MS:
            return await self.garbage.delete()
        self._expired_ms = now_ms
        free = await self.ledger.expire(
            published_before_ms=published_before_ms, keep_bytes=keep_bytes, limit=_EXPIRED
        )
        kill_point("window.expired")
        windows = dict.fromkeys(segment.window_id for segment in free)
        self._expiring = len(windows) >= _EXPIRED
        self.cut_windows.expired(windows)
        if self.rules.overlap and free:
            files = await asyncio.to_thread(joined.files, self.garbage.store, free)
            self.garbage.add_unfinished(*files)
        if free:
            log.debug("window.expired", windows=len(windows), segments=len(free))
        return await self.garbage.delete(free)
