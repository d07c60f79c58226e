"""Which connection a shard belongs to, when two claim it.

It happens: a lease moves to another host, whose daemon connects here too while the first one still works on a batch;
or a host died and its connection has not noticed. The latest claim owns the shard. The earlier one is not closed, as
that would make its whole JVM exit; its work is cancelled, and what still comes is answered unread (its checkpoints
do not move any more).

If the latest connection ends before the shard does, no connection reads the shard. Then the earlier ones are closed: their
daemons deliver again from the checkpoint. So a connection that names a shard of another daemon keeps it for as long as it lives,
and no longer.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from types import TracebackType


class Superseded(Exception):
    """The shard was claimed anew."""


class Claim:
    """One connection's claim of a shard."""

    def __init__(self, lock: asyncio.Lock) -> None:
        """Begin as the current one; ``lock`` is shared by all claims of the shard."""
        self.lock = lock
        self.scopes: set[asyncio.Timeout] = set()
        """Of the owner's work that is done, or waits for the lock."""
        self._visits: set[asyncio.Timeout] = set()
        """Of what visitors do, or wait for."""
        self.current = True
        self.opened = False
        """Whether the runtime has the shard open for it."""
        self.holds = False
        """Whether its next work has the lock already."""
        self.superseded: Callable[[], None] = lambda: None
        """Called when another claim has come while it ``holds`` the lock."""
        self.abandoned: Callable[[], None] = lambda: None
        """Called when it was superseded and the claim that took its place was released before the shard's end."""

    def work(self) -> AbstractAsyncContextManager[None]:
        """Do work that only the owner may do, never at the same time as another claim's.

        Raises Superseded when the claim is no longer current, also in the middle of the work, which is cancelled.
        """
        return _ClaimWork(self, self.scopes)

    @property
    def free(self) -> bool:
        """Whether it is current, and nobody else works on the shard or waits for that."""
        return self.current and not self._visits and (self.holds or not self.lock.locked())

    def hold(self) -> None:
        """Take the lock for the next work, where it is free: part of that is done, and nobody may come between."""
        if self.holds:
            return
        attempt = self.lock.acquire()
        try:
            attempt.send(None)
        except StopIteration:
            self.holds = True
        finally:
            attempt.close()

    def let_go(self) -> None:
        """Take back ``hold``: no work is to follow."""
        if self.holds:
            self.holds = False
            self.lock.release()

    def visit(self) -> AbstractAsyncContextManager[None]:
        """Do work for somebody else between two pieces of the owner's; likewise, and Superseded after ``evict`` too."""
        return _ClaimWork(self, self._visits)

    def evict(self) -> None:
        """Cancel what visitors do: the owner has something to do that cannot wait."""
        _cancel(self._visits)

    def supersede(self) -> None:
        """Cancel the work: another claim has come."""
        self.current = False
        if self.holds:
            self.superseded()
            self.let_go()
        _cancel(self.scopes)
        self.evict()


def _cancel(scopes: set[asyncio.Timeout]) -> None:
    for scope in scopes:
        if not scope.expired():
            scope.reschedule(asyncio.get_running_loop().time())


class _ClaimWork:
    """The work of a claim. Written out, since every batch comes through here: a generator would cost thrice as much."""

    __slots__ = ("_claim", "_scope", "_scopes")

    def __init__(self, claim: Claim, scopes: set[asyncio.Timeout]) -> None:
        self._claim = claim
        self._scope = asyncio.timeout(None)
        self._scopes = scopes

    async def __aenter__(self) -> None:
        if not self._claim.current:
            raise Superseded  # not only once the lock is free: whoever has it may open the shard for hours
        claim = self._claim
        await self._scope.__aenter__()
        self._scopes.add(self._scope)
        try:
            if claim.holds and self._scopes is claim.scopes:
                claim.holds = False
            else:
                await claim.lock.acquire()
        except BaseException as error:
            await self._leave(error)
            raise
        if not claim.current:
            late = Superseded()
            await self.__aexit__(Superseded, late, None)
            raise late

    async def __aexit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._claim.lock.release()
        await self._leave(error)

    async def _leave(self, error: BaseException | None) -> None:
        scope = self._scope
        self._scopes.discard(scope)
        kind = None if error is None else type(error)
        try:
            await scope.__aexit__(kind, error, None)
        except TimeoutError:
            raise Superseded from None
        if isinstance(error, TimeoutError) and scope.expired():
            # The work made a time-out of its cancellation.
            raise Superseded from None


class ShardOwners:
    """The current claim of each shard."""

    def __init__(self) -> None:
        """Begin without any."""
        self.claims: dict[str, Claim] = {}
        """Of shards that somebody has; read only."""
        self._superseded: defaultdict[str, list[Claim]] = defaultdict(list)
        """Earlier claims whose connections still live."""

    def take(self, shard_id: str) -> Claim:
        """Claim a shard; an earlier claim of it is superseded."""
        before = self.claims.get(shard_id)
        claim = self.claims[shard_id] = Claim(asyncio.Lock() if before is None else before.lock)
        if before is not None:
            self._superseded[shard_id].append(before)
            before.supersede()
        return claim

    def release(self, shard_id: str, claim: Claim, *, ended: bool = False) -> None:
        """Let go of a claim. If it was current and the shard has not ``ended``, call ``abandoned`` of the earlier claims."""
        if claim.current:
            claim.current = False
            del self.claims[shard_id]
            for earlier in self._superseded.pop(shard_id, ()):
                if not ended:
                    earlier.abandoned()
        elif claim in self._superseded[shard_id]:
            self._superseded[shard_id].remove(claim)
        if not self._superseded[shard_id]:
            del self._superseded[shard_id]
