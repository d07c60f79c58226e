"""The coordinator's async shell: takes batches in from shards, and turns the cycle that makes them durable.

One cycle does everything that changes the ledger, in this order and never two at once:

    look at the watermark ─▶ sync with the ledger ─▶ flush what was buffered ─▶ commit the watermark
        ─▶ cut the windows it has passed

A window is cut only after a flush that covered every row the watermark counted on. A shard that was opened again
meanwhile delivers rows again: it holds the cut where it goes on. When the flush lost other rows, nothing is cut.

The order is what makes several servers on one ledger sound. What is flushed was buffered before the sync, so that the
merge clock that the sync brings lies behind every row that those shards have from other servers. And what an earlier
cycle did without hearing of it (the ledger's answer was lost) is seen by the sync, before it would be done again.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

import structlog

from mldserver.base.backoff import backoff
from mldserver.base.clock import CivilClock, Clock
from mldserver.base.kill_points import kill_point
from mldserver.coordinator.backpressure import Backpressure
from mldserver.coordinator.cleanup import Retention, recover, take_over
from mldserver.coordinator.core.flush import Buffer, BufferedBatch, flush_at
from mldserver.coordinator.core.ledger_view import LedgerView
from mldserver.coordinator.core.lineage import Lineage
from mldserver.coordinator.core.open_windows import CoordinatorRules
from mldserver.coordinator.core.sessions import Session, Sessions
from mldserver.coordinator.core.shape import Shape
from mldserver.coordinator.core.state_files import pending_timers
from mldserver.coordinator.core.watermark import View, Watermark
from mldserver.coordinator.flusher import Destination, Flusher
from mldserver.coordinator.membership import Membership, ServerLocks
from mldserver.coordinator.progress import CoordinatorStatus, Reports
from mldserver.coordinator.redriving import RedriveIntake
from mldserver.coordinator.sections import Sections
from mldserver.coordinator.shards import CoordinatorIntake
from mldserver.coordinator.store_claims import StoreClaims
from mldserver.coordinator.store_files import StateFiles
from mldserver.coordinator.timed_stores import TimerIntake
from mldserver.errors import LedgerError, ServerExpired, told_of
from mldserver.jobs.runner import WindowRunner
from mldserver.ledger.contract import LedgerState, Wanted
from mldserver.ledger.operations import Ledger
from mldserver.output.layout import PRIVATE, SEGMENTS, STAGING
from mldserver.output.owner import FolderClaim
from mldserver.output.store import OutputStore
from mldserver.stores import StateSnapshot
from mldserver.windows import TimeWindows, WindowSpec

log = structlog.get_logger("mldserver")

_LONGEST_SECONDS: Final = 30.0
"""The longest pause before a cycle that keeps failing is tried again."""


class Coordinator:
    """One pipeline's coordinator: its shards, a cycle, and a snapshot of its state."""

    def __init__(
        self,
        *,
        rules: CoordinatorRules,
        spec: WindowSpec | None,
        shape: Shape,
        ledger: Ledger,
        store: OutputStore,
        runner: WindowRunner | None,
        clock: Clock,
        unique: Callable[[], str],
        claim: FolderClaim,
        locks: ServerLocks | None = None,
        letters: Destination | None = None,
        ask_stream: Callable[[], Awaitable[bool]] | None = None,
        keyed: bool = False,
        civil: CivilClock | None = None,
    ) -> None:
        """``spec`` and ``runner`` are None for handlers without rows; ``shape`` is their rows'; ``unique`` names files apart.

        ``claim``: on the output folder. ``locks`` show which other servers are dead, where the file system allows it.
        ``letters``: see
        ``Flusher``. ``ask_stream`` returns True once ``know`` has received the stream's current shards, and False if
        AWS does not list them; it is None if no stream is named. ``keyed``: whether the handler keeps state.
        ``civil``: decides when timers are due (default: a new one).
        """
        now_ms = clock.steady_ms()
        self.rules = rules
        self.clock = clock
        self.buffer = Buffer()
        self.lineage = Lineage()
        self.watermark = Watermark(rules, self.lineage, now_ms)
        self._spec = spec
        self._shape = shape
        self._ledger = ledger
        self._store = store
        self._claim = claim
        self._runner = runner
        self.ledger_view = view = LedgerView(ledger.server_id)
        self._sessions = Sessions(lineage=self.lineage, watermark=self.watermark, buffer=self.buffer)
        self._flusher = Flusher(
            spec=spec,
            shape=shape.fingerprint,
            ledger=ledger,
            view=view,
            store=store,
            clock=clock,
            unique=unique,
            rules=rules,
            letters=letters,
            side_tables=None if runner is None else runner.side_tables,
        )
        self._view = self.watermark.view(now_ms)
        self._retention = Retention(
            rules=rules,
            ledger=ledger,
            cut_windows=self._flusher.cut_windows,
            garbage=self._flusher.garbage,
            lineage=self.lineage,
            watermark=self.watermark,
            clock=clock,
            listed=frozenset() if ask_stream is None else None,
        )
        self._membership = Membership(
            ledger=ledger,
            view=view,
            lineage=self.lineage,
            watermark=self.watermark,
            clock=clock,
            timeout_ms=rules.server_timeout_ms,
            locks=locks,
        )
        self._reports = Reports(
            self._view, now_ms, rules=rules, lineage=self.lineage, owned=self._membership.peers.owns
        )
        self._backpressure = Backpressure(
            rules=rules, buffer=self.buffer, watermark=self.watermark, clock=clock
        )
        self._cycle = Cycle(
            self._run_cycle,
            after=self._backpressure.release,
            interval_ms=rules.flush_interval_ms,
            clock=clock,
        )
        self.flush = self._cycle.whole
        """Returns when a whole cycle that began after the call is done."""
        self.leave = self._membership.leave
        """Takes this server out of the ledger at its end, whether orderly or not. Never raises for the ledger."""
        self.redriving = RedriveIntake(view, spec, self.buffer, self.flush, self._sessions)
        self.state_files = StateFiles(
            ledger=ledger,
            view=view,
            store=store,
            garbage=self._flusher.garbage,
            buffer=self.buffer,
            sessions=self._sessions,
            lineage=self.lineage,
            clock=clock,
            unique=unique,
            retention_ms=rules.retention_ms,
        )
        self._company: tuple[int, frozenset[str]] = (0, frozenset())
        """How often servers have started, and which were there, when this one last cleaned up behind others."""
        self._ended = asyncio.Event()
        """Set while the stream is over, as the latest cycle found it; wakes those who wait for that."""
        self.shards = CoordinatorIntake(
            rules=rules,
            spec=spec,
            ledger=ledger,
            view=view,
            clock=clock,
            buffer=self.buffer,
            lineage=self.lineage,
            watermark=self.watermark,
            sessions=self._sessions,
            backpressure=self._backpressure,
            membership=self._membership,
            retention=self._retention,
            reports=self._reports,
            flush=self.flush,
            soon=self._cycle.soon,
            snapshot=self._snapshot,
            ask_stream=ask_stream,
            timer_counts=self.redriving.timer_counts,
            claims=StoreClaims(view=view, clock=clock, ask_stream=ask_stream, keyed=keyed),
        )
        self.timers = TimerIntake(
            view=view,
            clock=clock,
            civil=civil or CivilClock(clock),
            lineage=self.lineage,
            watermark=self.watermark,
            sessions=self._sessions,
            counts=self.shards.timer_counts,
            adopt=self.shards.adopt,
            flush=self.flush,
        )
        self.sections = Sections(self.shards, view, self.state_files, self.redriving, self.timers).all
        """Makes the coordinator's sections of the status document."""
        self.draining = asyncio.Event()  # set once the ledger asks all servers to drain
        self.cuts_all = False  # whether cycles cut every open window, due or not

    async def _snapshot(self, session: Session) -> StateSnapshot:
        assert session.store is not None, "only sessions of handlers that keep state are asked"
        await self.redriving.settle(session.store.store_id)
        snapshot = await self.state_files.snapshot(session)
        # There may be a million: the event loop does not wait for that.
        pending = await asyncio.to_thread(pending_timers, snapshot.entries)
        self.shards.timer_counts.loaded(snapshot.store_id, *pending)
        return snapshot

    async def start(self) -> None:
        """Open the ledger, finish what dead servers left, and learn the shards it knew.

        Raises LedgerError, OSError (the folder is out of reach), OperatorError (it, ledger and handler do not fit).
        """
        folders = (PRIVATE, SEGMENTS, STAGING) if self._spec else (PRIVATE,)
        await asyncio.to_thread(self._store.prepare, *folders, durable=True)
        await asyncio.to_thread(self._claim.inspect)
        state = await self._membership.join()
        # Much that dead servers left, or a slow disk: others must not take this one for dead meanwhile.
        async with self._membership.beating():
            state = await self._claim.acquire(state, self._ledger)
            state = await self._membership.declare(self._shape, state)
            await self._claim.renamed()
            if self._runner is not None:
                steps = self._runner.steps
                steps.ledger_id, steps.older = state.ledger_id, self._shape.older(state)
                steps.engine.ledger_id = state.ledger_id
            self._follow(state)
            await recover(state, self._ledger, self._store, self._runner)
            self._company = (state.claims, frozenset(state.servers))

    async def run(self) -> None:
        """Turn the cycle until cancelled: at every interval, and at once when something asks for it.

        Raises ServerExpired when another server took this one for dead: nothing that is not registered counts any
        more, and the process must start afresh.
        """
        async with asyncio.TaskGroup() as group:
            group.create_task(self._cycle.tick(), name="ticks")
            group.create_task(self._cycle.run(), name="cycles")
            group.create_task(self._membership.beat(), name="beats")

    async def _run_cycle(self, reason: str) -> None:
        now_ms = self.clock.steady_ms()
        self._reports.log_ahead(now_ms)
        view = self.watermark.begin_view(now_ms)
        self._membership.mark()
        batches = self.buffer.snapshot()
        await self._sync()
        self._reports.log_missing(now_ms)
        self._reports.count_unread(now_ms, had_shards=bool(self.ledger_view.state.shards))
        complete = await self._flush(batches, reason)
        await self._flusher.publish_late()
        await self._membership.release()
        if not complete:
            return
        view = self.watermark.still(view, now_ms)
        self._membership.report(view)
        view = self.watermark.combine(view, self._membership.peers.states())
        self.watermark.commit(view)
        self._view = view
        pressure, windows = self._backpressure, self._flusher.open_windows
        pressure.holder = view.holder.shard_id
        # Rows wait where a window is overdue, or shards are held until one closes that is not due yet.
        disk_is_full = pressure.segment_bytes > self.rules.segment_disk_bytes
        waiting = disk_is_full and bool(pressure.held) and pressure.holder is not None
        waiting |= windows is not None and windows.overdue(self.clock.now_ms())
        self._reports.report_view(view, now_ms, waiting=waiting)
        await self._cut(view)
        passed = 0.0 if windows is None else windows.passed(view.watermark_ms)
        self.shards.flush_at = flush_at(self.rules.flush_bytes, self._flusher.uncut_bytes, passed)
        await self._flusher.join_small()
        if self.state_files.view.state.state_files:
            await self.state_files.compact()
            await self.state_files.drop()
        freed, shards, more = await self._retention.step(pressure.segment_bytes)
        pressure.segment_bytes -= freed
        self._sessions.forget(shards)
        if more:
            self._cycle.soon()

    async def _sync(self) -> None:
        """Beat, learn what the ledger holds, and take over what dead servers left."""
        working = (
            frozenset() if self._runner is None else {window_id for window_id, _ in self._runner.unfinished}
        )
        state = await self._membership.sync()
        self._sessions.catch_up(state, *self._flusher.recovered(state))
        self._membership.follow(state)
        self._follow(state)
        if state.draining:
            self.draining.set()
        company = (state.claims, frozenset(state.servers) - await self._membership.expire_servers())
        inherit = company != self._company
        if self._runner is not None:
            self._runner.apply_decisions(state)
            await take_over(
                state.under_way, working, self._ledger, self._store, self._runner, inherit=inherit
            )
        self._company = company

    def _follow(self, state: LedgerState) -> None:
        """Replace the view, and continue from what it shows."""
        removed = self.ledger_view.state.shards.keys() - state.shards.keys()
        before, wanted = self.ledger_view.state.life.wanted, state.life.wanted
        if wanted is not before:
            log.info("function.wanted", wanted=wanted, before=before)
        self.ledger_view.state = state
        self._flusher.follow_ledger()
        self.shards.forget_removed(removed)
        # Count again: other servers write and delete segments too.
        pressure = self._backpressure
        pressure.paused = wanted is Wanted.PAUSED
        pressure.segment_bytes = state.segment_bytes + self._flusher.garbage_bytes
        pressure.segment_bytes += 0 if self._runner is None else self._runner.steps.garbage.bytes
        pressure.settled_bytes = pressure.segment_bytes - state.open_bytes
        pressure.computing = bool(state.under_way)

    async def _flush(self, batches: dict[int, BufferedBatch], reason: str) -> bool:
        """Make what is buffered durable. False: rows were left out that the watermark may still count on."""
        batches = {number: batch for number, batch in batches.items() if number in self.buffer}
        if not batches:
            return True
        durable, stores = self._sessions.durable(), self._sessions.stores()
        result = await self._flusher.flush(batches, reason, durable, stores)
        # No await from here on: what is registered must leave the buffer, or it would be registered twice.
        self.buffer.remove(batches)
        kill_point("flush.done")
        self._backpressure.segment_bytes += result.bytes
        self._sessions.registered(result.positions, result.stores)
        if result.redriven:
            self.redriving.registered(result.redriven)
        self._sessions.left_out(batches.values(), result.lost_shards)
        return result.lost_shards <= self.watermark.reopened.keys()

    async def _cut(self, view: View) -> None:
        if self._runner is not None:
            close_all = view.over or view.quiet or self.cuts_all
            gather = view.quiet and not self.cuts_all
            entries = await self._flusher.cut(view.watermark_ms, close_all=close_all, gather=gather)
            self._runner.submit(entries)
            self._backpressure.computing |= bool(entries)
            if entries and view.quiet:
                log.info("stream.quiet", seconds=self.rules.quiet_time_ms / 1000)
        if not self.is_over:
            self._ended.clear()
        elif not self._ended.is_set():
            log.info("stream.ended", shards=len(self.lineage.nodes))
            self._ended.set()

    def published_until_ms(self) -> float:
        """Return the event time up to which every window is published, of all servers; windows that end later may not be.

        Infinite while the stream is over or quiet and no window waits. Windows that were set aside do not count.
        """
        view, windows = self._view, self._flusher.open_windows
        if windows is None or not isinstance(windows.spec, TimeWindows):
            return -math.inf
        until = (
            -math.inf if view.watermark_ms is None else float(view.watermark_ms - windows.spec.lateness_ms)
        )
        if view.over or view.quiet or self.cuts_all:
            until = math.inf
        entries = [*self.ledger_view.state.under_way.values()]
        if self._runner is not None:
            entries += [life.entry for life in self._runner.unfinished.values()]
        waiting = [*windows.ends_ms(), *(entry.end_ms for entry in entries if entry.end_ms is not None)]
        return min([until, *(end_ms - 1 for end_ms in waiting)])

    @property
    def is_paused(self) -> bool:
        """Whether the pause of all shards is complete here: no batch and no timer is worked on, and everything is durable.

        Every daemon that waits for an answer was asked to checkpoint. A silent one is asked with its next batch.
        """
        pressure = self._backpressure
        works = self.timers.running or not pressure.settled.issuperset(self.watermark.at_work())
        return pressure.paused and not works and not self.buffer

    def freed(self, freed_bytes: int) -> None:
        """Note that segments were deleted."""
        self._backpressure.segment_bytes -= freed_bytes
        self._cycle.soon()

    @property
    def is_over(self) -> bool:
        """Whether every known shard has ended and every window is cut: no more when a shard comes, or rows."""
        is_drained = not self._flusher.open_windows and not self._flusher.cut_windows.due_ms
        return self._view.over and self.lineage.all_ended() and not self.buffer and is_drained

    async def over(self) -> None:
        """Return when the stream is over, however often it seemed to be before."""
        while not self.is_over:
            self._ended.clear()
            await self._ended.wait()

    def status(self) -> CoordinatorStatus:
        """Return a snapshot."""
        flusher, runner, view = self._flusher, self._runner, self._view
        here = view.holder.shard_id if view.holder.server_id is None else None
        paused = here is not None and self._backpressure.is_paused(here)
        return CoordinatorStatus(
            rows_accepted=self.shards.rows_accepted,
            rows_durable=flusher.rows_durable,
            rows_late=flusher.rows_late,
            rows_ahead=self._reports.rows_ahead,
            dead_letters=flusher.dead_letters,
            buffered_bytes=self.buffer.bytes,
            segment_bytes=self._backpressure.segment_bytes,
            windows_open=len(flusher.open_windows or ()),
            windows_waiting=len(runner.unfinished) if runner else 0,
            windows_published=runner.published if runner else 0,
            windows_set_aside=runner.set_aside if runner else 0,
            windows_halted=tuple(sorted(runner.halted)) if runner else (),
            watermark_ms=view.watermark_ms,
            held_by=view.holder.shard_id,
            held_by_server=view.holder.server_id,
            reason="paused" if paused else view.holder.reason,
            stuck=self._reports.stuck,
            unread_shards=self._reports.unread_shards,
            servers=1 + self._membership.peers.serving,
            stream_ended=self.is_over,
            flush_failing=self._cycle.failing,
            flushes=flusher.flushes,
            segments=flusher.segments,
            segment_bytes_written=flusher.segment_bytes,
            latest_letters=tuple(flusher.latest_letters),
            letters_elsewhere=flusher.letters is not None or flusher.letter_rows is not None,
            late_by_window=flusher.late_by_window,
        )


@dataclass(eq=False, slots=True)
class Cycle:
    """When the cycle runs: at every interval, at once when something asks for it, and after a while when it failed."""

    cycle: Callable[[str], Awaitable[None]]
    """Takes the reason for which it runs. Never called twice at once."""
    after: Callable[[], Awaitable[None]]
    """Awaited after each, whether or not it failed."""
    interval_ms: int
    clock: Clock
    failing: str = ""
    """Why the latest has failed; empty: it has not."""
    _asked: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    _waiters: list[tuple[str, asyncio.Future[None]]] = field(init=False, default_factory=list)

    def soon(self) -> None:
        """Request a cycle without waiting for the interval."""
        self._asked.set()

    async def whole(self, reason: str) -> None:
        """Return when a whole cycle that began after this call is done."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((reason, waiter))
        self._asked.set()
        await waiter

    async def tick(self) -> None:
        """Ask at every interval until cancelled."""
        while True:
            await self.clock.sleep(self.interval_ms / 1000)
            self._asked.set()

    async def run(self) -> None:
        """Run requested cycles until cancelled. Raises ServerExpired, and any cycle error that is not retried."""
        failures = 0
        while True:
            await self._asked.wait()
            self._asked.clear()
            waiters, self._waiters = self._waiters, []
            try:
                await self.cycle(waiters[0][0] if waiters else "interval")
            except ServerExpired:
                raise
            except (LedgerError, OSError) as error:
                # Rows stay in memory, positions stay where they are: nothing is lost while this is tried again.
                failures, told = failures + 1, told_of(error)
                self.failing = told.get("what") or told["error"]
                self._waiters = waiters + self._waiters
                delay = backoff(failures, 1.0, _LONGEST_SECONDS)
                log.error("flush.failed", attempt=failures, delay_seconds=delay, **told)
                await self.after()
                await self.clock.sleep(delay)
                self._asked.set()
                continue
            failures, self.failing = 0, ""
            for _, waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)
            await self.after()
