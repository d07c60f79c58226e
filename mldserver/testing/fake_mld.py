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
from mldserver.testing.fake_stream import FakeStream, HashRange, LeaseTable, Place

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
    """The test killed the JVM as ``kill -9`` does: every connection is reset."""


class _GraceExpired(Exception):
    """The JVM received SIGTERM, and its grace period is over: it exits with connections that are still open."""


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
        self._restart_seconds = backoff_seconds
        self._grace_seconds = shutdown_grace_seconds
        self._exits_at_stream_end = stop_at_end
        self._keep_history = keep_history
        self._sessions: dict[str, DaemonSession] = {}
        self._never_restarted: set[str] = set()
        """Shards whose end was answered without a checkpoint: KCL starts neither them nor their children until the JVM restarts."""
        self._violations: list[str] = []
        self._planned_actions: list[tuple[int, Callable[[], None]]] = []
        self._leases_coming_back: list[tuple[int, str]] = []
        self._sigterm_deadline_ms: int | None = None
        self._a_request_was_answered = False
        self._exit_cause: type[_Killed | _GraceExpired] = _Killed
        self._exit_requested = asyncio.Event()

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
        """Plan a fault: call ``action`` once this many records were sent, while the last batch is unanswered."""
        self._planned_actions.append((records, action))
        self._planned_actions.sort(key=lambda planned: planned[0])

    def lose_lease(
        self, shard_id: str, *, graceful: bool = False, back_after_seconds: float | None = None
    ) -> None:
        """Give the shard's lease to another worker: checkpoints fail from now on (if ``graceful``, after ``shutdownRequested``).

        With ``back_after_seconds`` this worker gets the lease back, and reads on from the checkpoint on a new connection.
        """
        self.leases.lose(shard_id, graceful=graceful)
        if back_after_seconds is not None:
            back_at_ms = self._clock.steady_ms() + round(back_after_seconds * 1000)
            self._leases_coming_back.append((back_at_ms, shard_id))

    def drop(self, shard_id: str) -> None:
        """Cut one shard's connection, as when its bridge dies: the whole JVM exits."""
        self._sessions[shard_id].abort(reset=True)

    def kill(self) -> None:
        """Make ``run`` reset every connection and exit, as after ``kill -9``. A supervised JVM starts again."""
        self._exit_cause = _Killed
        self._exit_requested.set()

    def terminate(self) -> None:
        """Stop the JVM as SIGTERM does: each session sends ``shutdownRequested``, then ``leaseLost``, then EOF; exit 143.

        Without any grace (``shutdownGraceMillis=0``, the KCL's default) the server sees only EOF.
        """
        self._sigterm_deadline_ms = self._clock.steady_ms() + round(self._grace_seconds * 1000)
        if self._grace_seconds <= 0:
            self._exit_cause = _GraceExpired
            self._exit_requested.set()
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
            jvm_exit = await self._run_jvm_once()
            self.exits.append(jvm_exit)
            if task.cancelling():
                # A TaskGroup whose member fails at the same moment raises only that failure (Python 3.11).
                raise asyncio.CancelledError
            if jvm_exit.code in {0, EXIT_TERMINATED} or not self._supervised:
                return jvm_exit.code
            await self._clock.sleep(self._restart_seconds)

    async def _run_jvm_once(self) -> DaemonExit:
        """Serve every shard until the JVM exits; return its exit code. As in the JVM, one session's failure ends all sessions.

        Raises DaemonHangs, and NoServer if no server has ever answered and no supervisor starts the JVM again.
        """
        self.life += 1
        self._exit_requested.clear()
        self._never_restarted.clear()
        fault_exits: list[DaemonExit] = []
        to_raise: Exception | None = None
        try:
            async with asyncio.TaskGroup() as group:
                abort_watcher = group.create_task(self._abort_when_killed())
                await self._run_shards(group)
                abort_watcher.cancel()
        except* JvmExit as group_of_exits:
            fault_exits += [DaemonExit(EXIT_FAULT, str(error)) for error in group_of_exits.exceptions]
            without_server = [error for error in group_of_exits.exceptions if isinstance(error, NoServer)]
            if without_server and not (self._supervised or self._a_request_was_answered):
                to_raise = without_server[0]
        except* _Killed:
            fault_exits.insert(0, DaemonExit(EXIT_KILLED, "killed"))
        except* _GraceExpired:
            fault_exits.append(DaemonExit(EXIT_TERMINATED, "SIGTERM, its grace over"))
        except* DaemonHangs as group_of_hangs:
            to_raise = group_of_hangs.exceptions[0]
        finally:
            # A session whose task was cancelled before its first step has not removed its own entry.
            self._sessions.clear()
        if to_raise is not None:
            raise to_raise
        if fault_exits:
            return fault_exits[0]
        if self._sigterm_deadline_ms is not None:
            return DaemonExit(EXIT_TERMINATED, "SIGTERM")
        return DaemonExit(0, "finished")

    async def _abort_when_killed(self) -> None:
        """Wait for ``kill`` or ``terminate`` without grace; cut every connection, and raise the cause to end the JVM."""
        await self._exit_requested.wait()
        for session in self._sessions.values():
            session.abort(reset=self._exit_cause is _Killed)
        raise self._exit_cause

    async def _run_shards(self, group: asyncio.TaskGroup) -> None:
        """Start a session for each shard that may be read, until all shards are finished or SIGTERM has ended all sessions.

        Raises _GraceExpired when sessions are left at the end of SIGTERM's grace period.
        """
        while True:
            self._take_leases_back()
            if self._sigterm_deadline_ms is None:
                for shard in tuple(self.stream.shards.values()):
                    if self._may_start(shard):
                        session = self._sessions[shard.id] = self._new_session(shard.id)
                        group.create_task(self._run_session(session), name=shard.id)
                if self._exits_at_stream_end and self.finished and not self._sessions:
                    return
            elif not self._sessions:
                return
            elif self._clock.steady_ms() >= self._sigterm_deadline_ms:
                raise _GraceExpired
            await self._clock.sleep(self.habits.idle_seconds)

    def _take_leases_back(self) -> None:
        """Take back the leases that ``lose_lease`` gave away for a time that is over, once their sessions have ended."""
        for back_at_ms, shard_id in tuple(self._leases_coming_back):
            session_ended = self.leases.elsewhere(shard_id) and shard_id not in self._sessions
            if back_at_ms <= self._clock.steady_ms() and session_ended:
                self._leases_coming_back.remove((back_at_ms, shard_id))
                self.leases.grant(shard_id)

    def _may_start(self, shard: HashRange) -> bool:
        """Whether this worker has the shard's lease and does not serve it yet, and each parent's end is checkpointed."""
        if shard.id in self._sessions or shard.id in self._never_restarted:
            return False
        if self.leases.ended(shard.id) or self.leases.elsewhere(shard.id):
            return False
        return all(map(self.leases.ended, shard.parents))

    def _new_session(self, shard_id: str) -> DaemonSession:
        """Take the shard's lease, and return a session that continues from its checkpoint; ``_run_session`` runs it."""
        life, lease_token = self.life, self.leases.acquire(shard_id)

        def add_to_history(direction: str, text: str) -> None:
            self.history.append(Line(shard_id, life, direction, text))

        return DaemonSession(
            DaemonProtocol(
                shard_id,
                form=self.habits.form,
                start=self.leases.place(shard_id),
                store=lambda place: self.leases.store(shard_id, lease_token, place),
                on_line=add_to_history if self._keep_history else None,
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
        """Run one shard's session to its end, then keep its violations and whether the shard may start again."""
        try:
            await session.run()
        finally:
            del self._sessions[session.core.shard_id]
            self._violations += session.core.violations
            self._a_request_was_answered |= session.core.last_answered is not None
            if session.core.end_blocked:
                self._never_restarted.add(session.core.shard_id)

    def _count_batch(self, records: int) -> None:
        """Count a batch that was sent, and run the actions that ``at`` planned for this number of records."""
        self.records_sent += records
        self.batches_sent += 1
        while self._planned_actions and self._planned_actions[0][0] <= self.records_sent:
            _, action = self._planned_actions.pop(0)
            action()
