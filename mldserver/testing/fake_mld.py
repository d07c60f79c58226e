"""A MultiLangDaemon for tests: a KCL worker over a ``FakeStream`` that speaks the real protocol on real sockets.

::

    stream = FakeStream(shards=2, seed=1)
    for n in range(100):
        stream.put(b"...", f"key-{n}")
    stream.end()
    mld = FakeMLD(stream, "127.0.0.1:7070")
    assert await mld.run() == 0
    assert mld.violations == []

It starts a child shard only when the end of each of its parents is checkpointed, restarts shards from their
checkpoints, and goes down as a whole (as the JVM does) when one answer is wrong. Faults come on request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, NamedTuple

from mldserver.base.clock import Clock, SystemClock
from mldserver.testing.daemon import DaemonProtocol, JvmExit, NoServer
from mldserver.testing.daemon_session import DaemonHangs, DaemonSession, Habits
from mldserver.testing.fake_stream import FakeStream, LeaseTable, Place

EXIT_FAULT: Final = 1
"""``System.exit(1)``: one shard's child failed."""
EXIT_KILLED: Final = 137
EXIT_TERMINATED: Final = 143
"""SIGTERM, as the JVM reports it."""


class Line(NamedTuple):
    """One line of a conversation."""

    shard_id: str
    life: int
    """Which run of the JVM, counted from 1."""
    direction: str
    """``in``: from the daemon into the server; ``out``: from the server."""
    text: str


class DaemonExit(NamedTuple):
    """One exit of the JVM."""

    code: int
    reason: str


class _Killed(Exception):
    """kill -9: every connection is reset."""


class _Stopped(Exception):
    """SIGTERM, and the grace period is over."""


class FakeMLD:
    """One worker (one JVM) of a KCL application: a connection per leased shard."""

    def __init__(
        self,
        stream: FakeStream,
        address: str,
        *,
        habits: Habits | None = None,
        leases: LeaseTable | None = None,
        clock: Clock | None = None,
        supervised: bool = False,
        backoff_seconds: float = 1.0,
        shutdown_grace_seconds: float = 30.0,
        stop_at_end: bool = True,
        keep_history: bool = True,
    ) -> None:
        """Play ``stream`` to the server at ``address`` (``host:port`` or ``unix:/path``).

        ``supervised``: start again, ``backoff_seconds`` after each exit with a fault. ``stop_at_end``: ``run`` returns
        when the end of every shard is checkpointed. A ``LeaseTable`` may be shared by several workers.
        """
        self.stream = stream
        self.address = address
        self.habits = habits or Habits()
        self.leases = leases or LeaseTable(seed=self.habits.seed)
        self.history: list[Line] = []
        self.exits: list[DaemonExit] = []
        self.life = 0
        self.records_sent = 0
        """Records delivered, each delivery counted."""
        self.batches_sent = 0
        """Batches with records."""
        self._clock = clock or SystemClock()
        self._supervised = supervised
        self._backoff = backoff_seconds
        self._grace = shutdown_grace_seconds
        self._stop_at_end = stop_at_end
        self._keep_history = keep_history
        self._sessions: dict[str, DaemonSession] = {}
        self._blocked: set[str] = set()
        self._violations: list[str] = []
        self._plans: list[tuple[int, Callable[[], None]]] = []
        self._grants: list[tuple[int, str]] = []
        self._stop_at_ms: int | None = None
        self._was_answered = False
        self._death: type[_Killed | _Stopped] = _Killed
        self._die = asyncio.Event()

    @property
    def checkpoints(self) -> dict[str, Place]:
        """Return the stored checkpoint of every shard that was ever leased."""
        return self.leases.checkpoints

    @property
    def violations(self) -> list[str]:
        """Return every mistake of the server so far, each with its shard and line."""
        live = [text for session in self._sessions.values() for text in session.core.violations]
        return self._violations + live

    @property
    def finished(self) -> bool:
        """Whether the stream is over and the end of every shard is checkpointed."""
        return self.stream.ended and all(self.leases.ended(shard_id) for shard_id in self.stream.shards)

    @property
    def active_shards(self) -> tuple[str, ...]:
        """Shards that have a connection now."""
        return tuple(self._sessions)

    def at(self, records: int, action: Callable[[], None]) -> None:
        """Call ``action`` once this many records were delivered, before the last batch is answered."""
        self._plans.append((records, action))
        self._plans.sort(key=lambda plan: plan[0])

    def lose_lease(
        self, shard_id: str, *, graceful: bool = False, back_after_seconds: float | None = None
    ) -> None:
        """Give the shard to another worker; checkpoints fail from now on (after the hand-over when graceful).

        With ``back_after_seconds`` this worker gets the shard back, on a new connection, from its checkpoint.
        """
        self.leases.lose(shard_id, graceful=graceful)
        if back_after_seconds is not None:
            self._grants.append((self._clock.steady_ms() + round(back_after_seconds * 1000), shard_id))

    def drop(self, shard_id: str) -> None:
        """Cut one shard's connection, as when its bridge dies: the whole JVM exits."""
        self._sessions[shard_id].abort(reset=True)

    def kill(self) -> None:
        """Kill the JVM: every connection is reset. A supervised JVM starts again."""
        self._death = _Killed
        self._die.set()

    def terminate(self) -> None:
        """Send SIGTERM: ``shutdownRequested`` to every shard, then the lease is lost, then EOF; exit 143.

        Without any grace (``shutdownGraceMillis=0``, the KCL's default) every shard just sees EOF.
        """
        self._stop_at_ms = self._clock.steady_ms() + round(self._grace * 1000)
        if self._grace <= 0:
            self._death = _Stopped
            self._die.set()
            return
        for session in self._sessions.values():
            session.stopping = True

    async def run(self) -> int:
        """Run until the stream is over, SIGTERM, or a fault without a supervisor; return the exit code.

        Raises DaemonHangs where the real one would never return, and NoServer if no server ever listened at the address and
        no supervisor tries again.
        """
        task = asyncio.current_task()
        assert task is not None
        while True:
            ended = await self._live()
            self.exits.append(ended)
            if task.cancelling():
                # A TaskGroup whose member fails at the same moment raises only that failure (Python 3.11).
                raise asyncio.CancelledError
            if ended.code in {0, EXIT_TERMINATED} or not self._supervised:
                return ended.code
            await self._clock.sleep(self._backoff)

    async def _live(self) -> DaemonExit:
        self.life += 1
        self._die.clear()
        self._blocked.clear()
        faults: list[DaemonExit] = []
        to_raise: Exception | None = None
        try:
            async with asyncio.TaskGroup() as group:
                killer = group.create_task(self._die_on_request())
                await self._manage(group)
                killer.cancel()
        except* JvmExit as group_of_exits:
            faults += [DaemonExit(EXIT_FAULT, str(error)) for error in group_of_exits.exceptions]
            stranded = [error for error in group_of_exits.exceptions if isinstance(error, NoServer)]
            if stranded and not (self._supervised or self._was_answered):
                to_raise = stranded[0]
        except* _Killed:
            faults.insert(0, DaemonExit(EXIT_KILLED, "killed"))
        except* _Stopped:
            faults.append(DaemonExit(EXIT_TERMINATED, "SIGTERM, its grace over"))
        except* DaemonHangs as group_of_hangs:
            to_raise = group_of_hangs.exceptions[0]
        finally:
            # A session whose task was cancelled before it first ran could not take itself out.
            self._sessions.clear()
        if to_raise is not None:
            raise to_raise
        if faults:
            return faults[0]
        return (
            DaemonExit(0, "finished") if self._stop_at_ms is None else DaemonExit(EXIT_TERMINATED, "SIGTERM")
        )

    async def _die_on_request(self) -> None:
        await self._die.wait()
        for session in self._sessions.values():
            session.abort(reset=self._death is _Killed)
        raise self._death

    async def _manage(self, group: asyncio.TaskGroup) -> None:
        """Start each shard once its parents are checkpointed to their ends, until no shard is left."""
        while True:
            for due, shard_id in tuple(self._grants):
                # The lease comes back only after this worker has released the shard.
                let_go = self.leases.elsewhere(shard_id) and shard_id not in self._sessions
                if due <= self._clock.steady_ms() and let_go:
                    self._grants.remove((due, shard_id))
                    self.leases.grant(shard_id)
            if self._stop_at_ms is None:
                for shard in tuple(self.stream.shards.values()):
                    begun = shard.id in self._sessions or shard.id in self._blocked
                    ended, elsewhere = self.leases.ended(shard.id), self.leases.elsewhere(shard.id)
                    if not (begun or ended or elsewhere) and all(map(self.leases.ended, shard.parents)):
                        session = self._sessions[shard.id] = self._new_session(shard.id)
                        group.create_task(self._run_session(session), name=shard.id)
                if self._stop_at_end and self.finished and not self._sessions:
                    return
            elif not self._sessions:
                return
            elif self._clock.steady_ms() >= self._stop_at_ms:
                raise _Stopped
            await self._clock.sleep(self.habits.idle_seconds)

    def _new_session(self, shard_id: str) -> DaemonSession:
        life, token = self.life, self.leases.acquire(shard_id)

        def note(direction: str, text: str) -> None:
            self.history.append(Line(shard_id, life, direction, text))

        return DaemonSession(
            DaemonProtocol(
                shard_id,
                form=self.habits.form,
                start=self.leases.place(shard_id),
                store=lambda place: self.leases.store(shard_id, token, place),
                on_line=note if self._keep_history else None,
            ),
            life=life,
            address=self.address,
            stream=self.stream,
            leases=self.leases,
            clock=self._clock,
            habits=self.habits,
            on_batch=self._count_batch,
        )

    async def _run_session(self, session: DaemonSession) -> None:
        try:
            await session.run()
        finally:
            del self._sessions[session.core.shard_id]
            self._violations += session.core.violations
            self._was_answered |= session.core.last_answered is not None
            if session.core.end_blocked:
                self._blocked.add(session.core.shard_id)

    def _count_batch(self, records: int) -> None:
        self.records_sent += records
        self.batches_sent += 1
        while self._plans and self._plans[0][0] <= self.records_sent:
            self._plans.pop(0)[1]()
