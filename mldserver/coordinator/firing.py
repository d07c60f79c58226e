"""Fires timers: between two batches of a shard, its handler gets the timers that are due.

To the runtime and the coordinator, a firing is a batch whose records are timers (``DueTimers``). Every 100 ms this task looks at
the stores that have timers. It visits the claim of each store whose next timer may fire, and releases the claim after each
portion, so that batches and timers take turns. While the server has no room for more effects, the store's timers wait.

A store whose shard ended without a child belongs to no server. A server adopts it, and fires its timers, until the store has none
left or a child of the shard takes it over.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Final

import structlog

from mldserver.base.clock import Clock
from mldserver.base.kill_points import kill_point
from mldserver.consumer.claims import Claims, Superseded, visiting_all
from mldserver.coordinator.shards import IntakeSession
from mldserver.coordinator.timed_stores import TimedStore, TimerIntake
from mldserver.errors import HandlerError, MldserverError
from mldserver.records import Shard
from mldserver.runtime.interface import Delivery, DueTimers, Runtime, TimerFilter, TimerReport

log = structlog.get_logger("mldserver")

_LOOK_SECONDS: Final = 0.1
_LOOKS_AT_ORPHANS: Final = 10
"""One look in so many is also for stores that no server has."""
_AGAIN_SECONDS: Final = 5.0
"""After a firing failed, the store's timers wait for so long."""
_PATIENCE_SECONDS: Final = 5.0
"""For how long ``cancel`` waits for a store's handler, each time."""
_CANCELLED: Final = 100_000
"""Timers that a portion cancels at most: each portion looks at all timers of the store."""
_MOST: Final = 1000
"""Timers of a portion at most. The runtime ends a portion whose callbacks take long."""
_ROUNDS: Final = 10
"""``fire_all`` fires at most so many times the timers that were pending."""


@dataclass(kw_only=True, eq=False, slots=True)
class Firing:
    """Fires the timers of the stores that this server has."""

    runtime: Runtime
    claims: Claims
    timers: TimerIntake
    clock: Clock
    _busy: set[str] = field(init=False, default_factory=set)
    """The stores whose timers fire now, or which wait after a failure."""
    _adopted: set[str] = field(init=False, default_factory=set)
    """The stores that are being adopted, or are adopted."""
    _failing: dict[str, str] = field(init=False, default_factory=dict)
    """By store, why the latest portion failed."""

    @property
    def trouble(self) -> str | None:
        """What an operator should look at, as a clause for ``server.unready``; None while timers can be fired."""
        for store_id, why in self._failing.items():
            return f"timers of the store {store_id} cannot be fired: {why}"
        return None

    async def run(self) -> None:
        """Fire timers when they are due, until cancelled."""
        looks = 0
        async with asyncio.TaskGroup() as group:
            while True:
                await self.clock.sleep(_LOOK_SECONDS)
                for store in self.timers.due():
                    if store.store_id not in self._busy:
                        self._busy.add(store.store_id)
                        group.create_task(self._fire(store), name="firing")
                looks += 1
                if looks % _LOOKS_AT_ORPHANS == 0:
                    here = {store.store_id for store in self.timers.stores()} if self._failing else ()
                    self._failing = {
                        store_id: why for store_id, why in self._failing.items() if store_id in here
                    }
                    for store_id, shard_ids in self.timers.orphans().items():
                        # A connection that opens one of the shards just now needs no adopter.
                        if store_id not in self._adopted and self.claims.current.keys().isdisjoint(shard_ids):
                            self._adopted.add(store_id)
                            group.create_task(self._adopt(store_id), name="adoption")

    async def cancel(self, which: TimerFilter) -> int:
        """Cancel timers of the stores that this server has; return how many. They stay cancelled, whatever happens next.

        Raises LedgerError, and HandlerError if the handler of a store cannot be had within some seconds.
        """
        cancelled, missed = 0, []
        for store in self.timers.stores():
            has_more = True
            while has_more:
                report = None
                with contextlib.suppress(Superseded, TimeoutError):
                    async with asyncio.timeout(_PATIENCE_SECONDS):
                        report = await self._portion(store, DueTimers(0, _CANCELLED, cancel=which))
                if report is None:
                    missed.append(store.store_id)
                else:
                    cancelled += report.cancelled
                has_more = report is not None and report.cancelled == _CANCELLED
        await self.timers.flush("timers")
        if missed:
            raise HandlerError(
                f"The handler could not be asked for timers of {', '.join(missed)}: it works on a batch, or the shard is paused.",
                did=f"Not all of their timers were cancelled; together with others {cancelled:,} were.",
                advice="Try again later, or resume the shard.",
            )
        return cancelled

    async def fire_all(self) -> None:
        """Fire pending timers in the order of their due times without waiting for these: for simulations.

        The time of day moves on to each due time. Timers that callbacks set fire too, until ten times as many have fired as were
        pending. Raises MldserverError.
        """
        timers, sessions = self.timers, self.timers.sessions
        pending = sum(report.pending for report in timers.counts.latest(sessions.live_stores()))
        left = _ROUNDS * pending
        while left > 0:
            known = {store.store_id: store for store in timers.stores()}
            dues = [(ms, name) for name in known if (ms := sessions.next_due_ms.get(name)) is not None]
            if not dues:
                return
            due_ms, store_id = min(dues)
            until_ms = due_ms + round(_LOOK_SECONDS * 1000)  # as many at a time as ``run`` finds
            timers.civil.arrived(until_ms, self.clock.steady_ms())
            try:
                report = await self._portion(known[store_id], DueTimers(until_ms, min(left, _MOST)))
            except Superseded:
                report = None
            if report is None:  # the shard is opened again
                await self.clock.sleep(_LOOK_SECONDS)
            else:
                left -= report.fired + report.skipped + report.failed

    async def _fire(self, store: TimedStore) -> None:
        """Fire the timers of a store that may fire, in portions."""
        store_id = store.store_id
        try:
            due: TimedStore | None = store
            while due is not None and due.until_ms is not None:
                kill_point("timers.firing")
                report = await self._portion(due, DueTimers(due.until_ms, _MOST))
                if report is None:
                    return
                kill_point("timers.fired")
                self._failing.pop(store_id, None)
                if report.next_call_ms is None or report.next_call_ms > due.until_ms:
                    return  # no more were due; a look at all stores costs much
                await asyncio.sleep(0)  # a handler in this process may have kept the sources from reading
                due = next((each for each in self.timers.due() if each.store_id == store_id), None)
        except Superseded:
            pass  # the next look tries again, if the shard is still here
        except MldserverError as error:
            log.error("timer.failed", store=store_id, **error.told())
            self._failing[store_id] = error.what.rstrip(".")
            await self.clock.sleep(_AGAIN_SECONDS)
        finally:
            self._busy.discard(store_id)

    async def _portion(self, store: TimedStore, payload: DueTimers) -> TimerReport | None:
        """Have the handler process a portion; None: the store's handler cannot be had now. Raises Superseded, MldserverError."""
        shard_ids = [session.shard_id for session in store.sessions]
        async with visiting_all(self.claims, shard_ids) as are_open:
            if not are_open or not self.timers.is_whole(store):
                return None
            return await self._process(store, payload)

    async def _process(self, store: TimedStore, payload: DueTimers) -> TimerReport | None:
        session, accepted = store.sessions[0], False
        delivery = Delivery(
            session.shard_id,
            payload,
            received_ms=self.timers.civil.now_ms(),
            after=session.after,
            number=session.next_number,
        )
        self.timers.running += 1
        try:
            outcome = await self.runtime.process(delivery)
            if session.alive:
                session.accept_firing(outcome)
                accepted = True
        finally:
            self.timers.running -= 1
            if not accepted:
                self.timers.not_accepted(store)
        return outcome.timers if accepted else None

    async def _adopt(self, store_id: str) -> None:
        """Have a store that no server has, until it needs none or another has it."""
        try:
            session = await self.timers.adopt(store_id)
            if session is None:  # AWS may be out of reach, and is asked for children each time
                await self.clock.sleep(_AGAIN_SECONDS)
            else:
                async with self._opened(session):
                    while not self.timers.is_abandoned(session):
                        await self.clock.sleep(_LOOKS_AT_ORPHANS * _LOOK_SECONDS)
        except Superseded:
            pass  # a connection claims the shard
        except MldserverError as error:
            log.error("timer.failed", store=store_id, **error.told())
            await self.clock.sleep(_AGAIN_SECONDS)
        finally:
            self._adopted.discard(store_id)

    @contextlib.asynccontextmanager
    async def _opened(self, session: IntakeSession) -> AsyncGenerator[None, None]:
        """Open the handler of a shard that has no connection, and claim the shard for it. Raises Superseded."""
        shard_id = session.shard_id
        if shard_id in self.claims.current:  # its opening raises the epoch again
            session.disconnected()
            raise Superseded
        claim = self.claims.take(shard_id)
        try:
            async with claim.work():
                await self.runtime.open(Shard(shard_id, None), session.snapshot)
                claim.opened = True
            yield
        finally:
            session.disconnected()
            claim.evict()
            with contextlib.suppress(Superseded):
                async with claim.work():
                    await self.runtime.forget(shard_id)
            self.claims.release(shard_id, claim)
