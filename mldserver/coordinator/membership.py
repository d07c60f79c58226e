"""This server among the servers on its ledger: what it reports, what it learns, and how it expires dead servers.

A server may report a watermark only after all rows that it depends on are registered. So the next heartbeat reports a
cycle's view, if the cycle's flush was complete and no shard was opened since: a new shard may be far behind the view.

Each server also locks a separate file until its process ends. So another server can expire a crashed server at once,
before the timeout of its heartbeats. Where the lock shows nothing (the file is on another host's disk, or the file
system has no locks), the heartbeats decide.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import structlog

from mldserver.base.clock import Clock
from mldserver.base.kill_points import kill_point
from mldserver.coordinator.core.ledger_view import LedgerView
from mldserver.coordinator.core.lineage import Lineage, Peers, Presence
from mldserver.coordinator.core.shape import Shape
from mldserver.coordinator.core.watermark import View, Watermark
from mldserver.errors import LedgerError, NotThereYet, ServerExpired
from mldserver.ledger.contract import LedgerState, ServerState, ShardState
from mldserver.ledger.operations import Ledger
from mldserver.output.layout import server_tag

log = structlog.get_logger("mldserver")

_LOCK_TRIES: Final = 20


@dataclass(kw_only=True, eq=False, slots=True)
class Membership:
    """The servers on one ledger, as this server sees them."""

    ledger: Ledger
    view: LedgerView
    """Heartbeats ask for the changes since it was read."""
    lineage: Lineage
    watermark: Watermark
    clock: Clock
    timeout_ms: int
    """How long a server may be silent."""
    locks: ServerLocks | None
    """Show at once which servers are dead, where they can."""
    peers: Peers = field(init=False)
    _statement: View | None = field(init=False, default=None)
    """The view that heartbeats report."""
    _opening: int = field(init=False, default=0)
    """How many shards are being opened."""
    _counted: bool = field(init=False, default=False)
    """Whether the latest view counts on every shard, none having been opened since."""
    _beat_ms: int = field(init=False, default=0)
    """The latest beat, as others see it."""
    beat_at_ms: int = field(init=False)
    """When that was, by the steady clock."""
    _joined: bool = field(init=False, default=False)
    released: dict[str, int] = field(init=False, default_factory=dict)
    """The epochs of shards whose lease or connection is gone; ``release`` removes them from the ledger."""

    def __post_init__(self) -> None:
        self.peers = Peers(self.ledger.server_id, timeout_ms=self.timeout_ms)
        self.beat_at_ms = self.clock.steady_ms()

    # What others learn.

    @contextlib.contextmanager
    def opening(self) -> Iterator[None]:
        """Withdraw the reported view while a shard is being opened: that view does not include the shard."""
        self._opening += 1
        self._counted, self._statement = False, None
        try:
            yield
        finally:
            self._opening -= 1

    def mark(self) -> None:
        """Note that a view was taken, which ``report`` may report."""
        self._counted = not self._opening

    def report(self, view: View) -> None:
        """Report a view with the next heartbeats. All rows that it depends on must be registered."""
        self._statement = view if self._counted else None

    def _state(self) -> ServerState:
        # Two beats are never the same: by that others see that this server lives.
        self._beat_ms = max(self.ledger.time_ms(), self._beat_ms + 1)
        self.beat_at_ms = self.clock.steady_ms()
        server_id = self.peers.server_id
        view = self._statement
        if view is None:
            return ServerState(server_id, self._beat_ms, reason="settling")
        held_by, reason = view.holder.shard_id, view.holder.reason
        return ServerState(
            server_id, self._beat_ms, view.own_ms, idle=view.idle, held_by=held_by, reason=reason
        )

    async def join(self) -> LedgerState:
        """Open the ledger, expire dead servers, return the state. Raises LedgerError, and OSError for the lock."""
        if self.locks is not None:
            # Lock first: otherwise another server could find this one in the ledger without its lock, and expire it.
            await asyncio.to_thread(self.locks.hold, self.peers.server_id)
        state = await self.ledger.open()
        self._joined = True
        kill_point("server.joined")
        self.follow(state)
        if await self.expire_servers():
            state = await self.ledger.sync(self._state())
            self.follow(state)
        return state

    async def declare(self, shape: Shape, state: LedgerState) -> LedgerState:
        """Make the shape of this server's rows the pipeline's; return the ledger's new state.

        A server with another shape forbids it. That server may be dead or about to stop, so this one waits until the other
        would have expired. If servers start together, the ledger's version decides. Raises OperatorError,
        LedgerError.
        """
        until_ms = self.clock.steady_ms() + self.timeout_ms + self.timeout_ms // 4
        while True:
            change, rival = shape.change(state), shape.rival(state, self.peers.server_id)
            if rival is None:
                declared = await self.ledger.declare(change, version=state.version)
                state = await self.ledger.peek()
                if declared:
                    self.follow(state)
                    return state
                continue
            if self.clock.steady_ms() >= until_ms:
                raise rival
            await self.clock.sleep(self.timeout_ms / 4000)
            # Idle: this server holds nothing up meanwhile.
            self.follow(await self.ledger.sync(replace(self._state(), idle=True)))
            await self.expire_servers()
            state = await self.ledger.peek()

    async def sync(self) -> LedgerState:
        """Send a heartbeat and return the ledger's state, with only the windows that changed since ``view``.

        Raises LedgerError, and ServerExpired if this server has expired.
        """
        return await self.ledger.sync(self._state(), self.view.state.version)

    async def beat(self) -> None:
        """Beat for ever whenever nothing else has for a while: a cycle may take long. Raises ServerExpired."""
        while True:
            await self.clock.sleep(self.timeout_ms / 4000)
            if self.clock.steady_ms() - self.beat_at_ms < self.timeout_ms // 4:
                continue
            try:
                await self.sync()
            except ServerExpired:
                raise
            except LedgerError as error:
                # The next beat comes soon; if none gets through for long, the others must take this server for dead.
                log.warning("server.beat_failed", **error.told())

    @contextlib.asynccontextmanager
    async def beating(self) -> AsyncIterator[None]:
        """Beat while the body runs. Raises what it raises, and ServerExpired."""
        try:
            async with asyncio.TaskGroup() as group:
                beats = group.create_task(self.beat(), name="beats")
                yield
                beats.cancel()
        except BaseExceptionGroup as group_of_one:
            raise group_of_one.exceptions[0] from None

    async def leave(self) -> None:
        """Take this server out of the ledger, if it can be reached: others need not wait for its beats to stop."""
        try:
            if self._joined:
                async with asyncio.timeout(self.timeout_ms / 1000):
                    await self.ledger.leave()
                    kill_point("server.left")
        except (LedgerError, TimeoutError) as error:
            fields = (
                error.told() if isinstance(error, LedgerError) else {"what": "The ledger did not answer."}
            )
            log.warning("server.beat_failed", **fields)
        finally:
            if self.locks is not None:
                await asyncio.to_thread(self.locks.release)

    # What is learned of others.

    def follow(self, state: LedgerState) -> bool:
        """Take in the shards and servers of a ledger; True when it named a shard, or a shard's end, that is news."""
        now_ms = self.clock.steady_ms()
        self.peers.update(state.servers, state.shards, now_ms)
        news = [self._follow_shard(shard, now_ms) for shard in state.shards.values()]
        for shard_id, shard in state.shards.items():
            node = self.lineage.nodes[shard_id]
            # A shard that this server reads reports its own arrival times; the ledger's may be the due time of a timer.
            if node.presence is not Presence.CONNECTED and not node.adopted:
                self.watermark.arrived(shard.effective_ms, now_ms)
            self.lineage.elsewhere(shard_id, now_ms, read=self.peers.counts(shard_id))
        if any(news):
            self.watermark.restart_settling(now_ms)
        return any(news)

    def _follow_shard(self, shard: ShardState, now_ms: int) -> bool:
        shard_id = shard.shard_id
        new = self.lineage.add(
            shard_id, now_ms, parents=shard.parents, ended=shard.ended, effective_ms=shard.effective_ms
        )
        if new or self.lineage.nodes[shard_id].presence is Presence.CONNECTED:
            return new and not shard.ended
        self.lineage.reach(shard_id, shard.effective_ms)
        ends = shard.ended and self.lineage.nodes[shard_id].presence is not Presence.ENDED
        if ends:
            self.lineage.end(shard_id, now_ms)
        return ends

    async def read_ancestors(self, shard: ShardState) -> None:
        """Learn how far the ancestors of a shard that was never read have come: its records come no earlier.

        Others may have read and ended them since the last look at the ledger, also servers that came since.
        """
        if shard.effective_ms is not None or not shard.parents:
            return
        state, now_ms = await self.sync(), self.clock.steady_ms()
        seen, queue = set(shard.parents), list(shard.parents)
        while queue:
            ancestor = state.shards.get(queue.pop())
            if ancestor is None:
                continue
            self._follow_shard(ancestor, now_ms)
            # Also of one whose connection here is dead, which this server has not heard yet.
            self.lineage.reach(ancestor.shard_id, ancestor.effective_ms)
            if ancestor.effective_ms is None:
                queue.extend(parent for parent in ancestor.parents if parent not in seen)
                seen.update(ancestor.parents)

    # What is done about others.

    async def expire_servers(self) -> frozenset[str]:
        """Expire the servers that are dead, or silent for too long, and return them. Raises LedgerError."""
        expired: frozenset[str] = frozenset()
        dead = {peer.server_id: peer for peer in self.peers.overdue()}
        peers, locks = self.peers.states(), self.locks
        if locks is not None and peers:
            dead |= await asyncio.to_thread(
                lambda: {peer.server_id: peer for peer in peers if locks.is_dead(peer.server_id)}
            )
        for server_id, peer in dead.items():
            kill_point("server.expiring")
            gone = await self.ledger.expire_servers({server_id: peer.beat_ms})
            kill_point("server.expired")
            expired |= gone
            if gone:
                log.warning(
                    "server.expired", server=server_id, seconds=self.peers.silent_ms[server_id] / 1000
                )
            if gone and locks is not None:
                await asyncio.to_thread(locks.forget, server_id)
        return expired

    async def release(self) -> None:
        """Give up the shards that were let go, in the ledger too. Raises LedgerError; repeatable."""
        for shard_id, epoch in tuple(self.released.items()):
            await self.ledger.release_shard(shard_id, epoch)
            kill_point("shard.released")
            if self.released.get(shard_id) == epoch:
                del self.released[shard_id]


@dataclass(eq=False, slots=True)
class ServerLocks:
    """Which servers are dead for sure: a folder with a locked file for each that lives. Blocking, for moments."""

    folder: Path
    _held: tuple[Path, int] | None = field(init=False, default=None)

    def _path(self, server_id: str) -> Path:
        return self.folder / f"{server_tag(server_id)}.lock"

    def hold(self, server_id: str) -> None:
        """Show that a server lives, until ``release`` or the process's end.

        Raises OperatorError when another process shows it of this name, OSError when the folder cannot be written.
        Where the file system knows no locks, nothing is shown.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self._path(server_id)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        for _ in range(_LOCK_TRIES):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                # Another server may just be looking whether this one is dead.
                time.sleep(0.01)
                continue
            except OSError:
                pass  # a file system that knows no locks
            self._held = (path, descriptor)
            return
        os.close(descriptor)
        raise NotThereYet(
            f"Another server runs under the name {server_id}.",
            advice="Stop it first, or give each server on the ledger another server_id.",
            server=server_id,
        )

    def is_dead(self, server_id: str) -> bool:
        """Whether a server no longer holds its existing lock file. False also if this cannot be determined."""
        return self._is_free(self._path(server_id))

    def held(self) -> tuple[Path, ...]:
        """Return the files of servers that are live or whose state cannot be determined."""
        return tuple(path for path in sorted(self.folder.glob("*.lock")) if not self._is_free(path))

    def forget(self, server_id: str) -> None:
        """Delete the lock file of an expired server."""
        self._path(server_id).unlink(missing_ok=True)

    def release(self) -> None:
        """Delete and unlock this server's file: the server has left the ledger."""
        if self._held is not None:
            path, descriptor = self._held
            path.unlink(missing_ok=True)
            os.close(descriptor)
            self._held = None

    @staticmethod
    def _is_free(path: Path) -> bool:
        try:
            descriptor = os.open(path, os.O_RDWR)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        finally:
            os.close(descriptor)
        return True
