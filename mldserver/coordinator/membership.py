"""This server among those that share its ledger: what it tells them, what it learns, and how it buries the dead.

What a server tells holds for others only once everything that it counted on is registered. So a cycle's own view is
told with the next beat, if its flush was complete and no shard was opened since: a shard that came meanwhile may stand
far behind what the view says.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING

import structlog

from mldserver.base.kill_points import kill_point
from mldserver.coordinator.core.lineage import Presence
from mldserver.coordinator.core.peers import Peers
from mldserver.errors import LedgerError, ServerBuried
from mldserver.ledger.contract import ServerState

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from mldserver.base.clock import Clock
    from mldserver.coordinator.core.lineage import Lineage
    from mldserver.coordinator.core.shape import Shape
    from mldserver.coordinator.core.watermark import View, Watermark
    from mldserver.coordinator.server_locks import ServerLocks
    from mldserver.ledger.contract import LedgerState, ShardState
    from mldserver.ledger.operations import Ledger

__all__ = ["Membership"]

log = structlog.get_logger("mldserver")


class Membership:
    """The servers on one ledger, seen from one of them."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        lineage: Lineage,
        watermark: Watermark,
        clock: Clock,
        timeout_ms: int,
        locks: ServerLocks | None,
    ) -> None:
        """``timeout_ms``: how long a server may be silent; ``locks`` show at once which are dead, where they can."""
        self.peers = Peers(ledger.server_id, timeout_ms=timeout_ms)
        self._ledger = ledger
        self._lineage = lineage
        self._watermark = watermark
        self._clock = clock
        self._timeout_ms = timeout_ms
        self._locks = locks
        self._statement: tuple[View, int] | None = None
        """The view that beats tell, and how many openings it counted on."""
        self._openings = 0
        self._opening = 0
        self._beat_ms = 0
        """The latest beat, as others see it."""
        self._beat_at_ms = clock.steady_ms()
        self._joined = False
        self._version = 0
        """Of the ledger's state that was learned last: beats ask for what happened since."""
        self._released: dict[str, int] = {}

    # What others learn.

    @contextlib.contextmanager
    def opening(self) -> Iterator[None]:
        """A shard is being opened: what was told so far says nothing of it."""
        self._openings += 1
        self._opening += 1
        try:
            yield
        finally:
            self._opening -= 1

    def mark(self) -> int | None:
        """Return a mark to ``tell`` with, taken together with a view; None while a shard is being opened."""
        return None if self._opening else self._openings

    def tell(self, view: View, mark: int | None) -> None:
        """Let the next beats tell a view, everything that it counted on being registered."""
        self._statement = None if mark is None else (view, mark)

    def _state(self) -> ServerState:
        # Two beats are never the same, whatever the clock does: by that others see that this server lives.
        self._beat_ms = max(self._clock.now_ms(), self._beat_ms + 1)
        self._beat_at_ms = self._clock.steady_ms()
        server_id = self.peers.server_id
        if self._statement is None or self._statement[1] != self._openings:
            return ServerState(server_id, self._beat_ms, reason="settling")
        view = self._statement[0]
        held_by, reason = view.holder.shard_id, view.holder.reason
        return ServerState(
            server_id, self._beat_ms, view.own_ms, idle=view.idle, held_by=held_by, reason=reason
        )

    async def join(self) -> LedgerState:
        """Open the ledger, bury the dead, and return what it holds. Raises LedgerError, and OSError for the lock."""
        if self._locks is not None:
            # Before the ledger knows this server: nobody may take it for dead.
            await asyncio.to_thread(self._locks.hold, self.peers.server_id)
        state = await self._ledger.open()
        self._joined = True
        kill_point("server.joined")
        self.learn(state)
        if await self.bury():
            state = await self._ledger.sync(self._state())
            self.learn(state)
        return state

    async def declare(self, shape: Shape, state: LedgerState) -> LedgerState:
        """Make the shape of this server's rows the pipeline's; return what the ledger holds then.

        A server that runs with another forbids it. It may be dead, or about to stop: it is waited for until it would be
        buried. Between servers that come together the ledger's version decides. Raises OperatorError, LedgerError.
        """
        until_ms = self._clock.steady_ms() + self._timeout_ms + self._timeout_ms // 4
        while True:
            change, rival = shape.change(state), shape.rival(state, self.peers.server_id)
            if rival is None:
                declared = await self._ledger.declare(change, version=state.version)
                state = await self._ledger.peek()
                if declared:
                    self.learn(state)
                    return state
                continue
            if self._clock.steady_ms() >= until_ms:
                raise rival
            await self._clock.sleep(self._timeout_ms / 4000)
            # Idle: this server holds nothing up meanwhile.
            self.learn(await self._ledger.sync(replace(self._state(), idle=True)))
            await self.bury()
            state = await self._ledger.peek()

    async def sync(self) -> LedgerState:
        """Beat, and return what the ledger holds; of windows the news since the state that was learned last.

        Raises LedgerError, and ServerBuried when this server was buried.
        """
        return await self._ledger.sync(self._state(), self._version)

    async def beat(self) -> None:
        """Beat for ever whenever nothing else has for a while: a cycle may take long. Raises ServerBuried."""
        while True:
            await self._clock.sleep(self._timeout_ms / 4000)
            if self._clock.steady_ms() - self._beat_at_ms < self._timeout_ms // 4:
                continue
            try:
                await self.sync()
            except ServerBuried:
                raise
            except LedgerError as error:
                # The next beat comes soon; if none gets through for long, the others must take this server for dead.
                log.warning("server.beat_failed", **error.told())

    @contextlib.asynccontextmanager
    async def beating(self) -> AsyncIterator[None]:
        """Beat while the body runs. Raises what it raises, and ServerBuried."""
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
                async with asyncio.timeout(self._timeout_ms / 1000):
                    await self._ledger.leave()
                    kill_point("server.left")
        except (LedgerError, TimeoutError) as error:
            fields = (
                error.told() if isinstance(error, LedgerError) else {"what": "The ledger did not answer."}
            )
            log.warning("server.beat_failed", **fields)
        finally:
            if self._locks is not None:
                await asyncio.to_thread(self._locks.release)

    # What is learned of others.

    def learn(self, state: LedgerState) -> bool:
        """Take in the shards and servers of a ledger; True when it named a shard, or a shard's end, that is news."""
        now_ms = self._clock.steady_ms()
        self._version = state.version
        self.peers.learn(state.servers, state.shards, now_ms)
        news = [self._learn_shard(shard, now_ms) for shard in state.shards.values()]
        for shard_id, shard in state.shards.items():
            self._watermark.arrived(shard.effective_ms, now_ms)
            self._lineage.elsewhere(shard_id, now_ms, read=self.peers.counts(shard_id))
        if any(news):
            self._watermark.settle(now_ms)
        return any(news)

    def _learn_shard(self, shard: ShardState, now_ms: int) -> bool:
        shard_id = shard.shard_id
        new = self._lineage.know(
            shard_id, now_ms, parents=shard.parents, ended=shard.ended, effective_ms=shard.effective_ms
        )
        if new or self._lineage[shard_id].presence is Presence.CONNECTED:
            return new and not shard.ended
        self._lineage.reach(shard_id, shard.effective_ms)
        ends = shard.ended and self._lineage[shard_id].presence is not Presence.ENDED
        if ends:
            self._lineage.end(shard_id, now_ms)
        return ends

    async def learn_ancestors(self, shard: ShardState) -> None:
        """Learn how far the ancestors of a shard that was never read have come: its records come no earlier.

        Others may have read and ended them since the last look at the ledger, also servers that came since.
        """
        if shard.effective_ms is not None or not shard.parents:
            return
        state, now_ms = await self.sync(), self._clock.steady_ms()
        seen, queue = set(shard.parents), list(shard.parents)
        while queue:
            ancestor = state.shards.get(queue.pop())
            if ancestor is None:
                continue
            self._learn_shard(ancestor, now_ms)
            # Also of one whose connection here is dead, which this server has not heard yet.
            self._lineage.reach(ancestor.shard_id, ancestor.effective_ms)
            if ancestor.effective_ms is None:
                queue.extend(parent for parent in ancestor.parents if parent not in seen)
                seen.update(ancestor.parents)

    # What is done about others.

    async def bury(self) -> frozenset[str]:
        """Bury the servers that are dead, or silent for too long, and return them. Raises LedgerError."""
        buried: frozenset[str] = frozenset()
        dead = {peer.server_id: peer for peer in self.peers.overdue()}
        if (locks := self._locks) is not None and self.peers:
            dead |= await asyncio.to_thread(
                lambda: {
                    peer.server_id: peer for peer in self.peers.states() if locks.is_dead(peer.server_id)
                }
            )
        for server_id, peer in dead.items():
            kill_point("server.burying")
            gone = await self._ledger.bury({server_id: peer.beat_ms})
            kill_point("server.buried")
            buried |= gone
            if gone:
                log.warning("server.buried", server=server_id, seconds=self.peers.silent_ms(server_id) / 1000)
            if gone and self._locks is not None:
                await asyncio.to_thread(self._locks.forget, server_id)
        return buried

    def let_go(self, shard_id: str, epoch: int) -> None:
        """Note a shard whose lease or connection is gone; ``release`` tells the ledger."""
        self._released[shard_id] = epoch

    async def release(self) -> None:
        """Give up the shards that were let go, in the ledger too. Raises LedgerError; repeatable."""
        for shard_id, epoch in tuple(self._released.items()):
            await self._ledger.release_shard(shard_id, epoch)
            kill_point("shard.released")
            if self._released.get(shard_id) == epoch:
                del self._released[shard_id]
