"""Which connection a shard belongs to, when two claim it.

Two connections claim one shard when a lease moves to another host, whose daemon connects here while the first one still works on a
batch, or when a host died and its connection has not noticed. The latest claim owns the shard. The earlier connection is not closed,
since that would make its whole JVM exit: its work is cancelled, and what its daemon still sends is acknowledged unread.

If the latest connection ends before the shard does, no connection reads the shard. Then the earlier ones are closed, and their daemons
deliver again from the checkpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Final

from mldserver.records import Shard
from mldserver.runtime.interface import Runtime

_TURN_SECONDS: Final = 10.0
"""For how long a visitor of several shards holds the handlers of some while it waits for the others."""


class Superseded(Exception):
    """Another connection has claimed the shard, or the owner of the shard does not wait for a visitor."""


class Loss(enum.Enum):
    """What happened to a claim."""

    SUPERSEDED = enum.auto()
    """Another connection has claimed the shard."""
    ABANDONED = enum.auto()
    """It was superseded, and the later claim was released before the shard's end."""


class Claim:
    """One connection's claim of a shard."""

    def __init__(self, lock: asyncio.Lock) -> None:
        """Begin as the current one; ``lock`` is shared by all claims of the shard."""
        self.lock = lock
        self.scopes: set[asyncio.Timeout] = set()
        """Of the owner's work that goes on, or waits for the lock."""
        self.visits: set[asyncio.Timeout] = set()
        """Of visitors' work that goes on, or waits for the lock."""
        self.current = True
        self.opened = False
        """Whether the runtime has the shard open for it."""
        self.holds = False
        """Whether its next work has the lock already."""
        self.on_loss: Callable[[Loss], None] = lambda _: None

    def work(self) -> AbstractAsyncContextManager[None]:
        """Do work that only the owner may do, never at the same time as another claim's.

        Raises Superseded if the claim is not current any more, or is interrupted, also in the middle of the work, which is cancelled.
        """
        return _ClaimWork(self, self.scopes)

    def hold(self) -> None:
        """Take the lock for the next work, if it is free: part of that work is done, and no visitor may come between."""
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
        """Undo ``hold``: no work follows."""
        if self.holds:
            self.holds = False
            self.lock.release()

    def visit(self) -> AbstractAsyncContextManager[None]:
        """Do work for others between two pieces of the owner's; likewise, and raise Superseded after ``evict`` too."""
        return _ClaimWork(self, self.visits)

    def evict(self) -> None:
        """Cancel the work of visitors: the owner has something to do that cannot wait."""
        _cancel(self.visits)

    def interrupt(self) -> None:
        """Cancel the owner's work."""
        _cancel(self.scopes)

    def supersede(self) -> None:
        """Cancel all work: another claim has come."""
        self.current = False
        self.on_loss(Loss.SUPERSEDED)
        self.let_go()
        self.interrupt()
        self.evict()


def _cancel(scopes: set[asyncio.Timeout]) -> None:
    for scope in scopes:
        if not scope.expired():
            scope.reschedule(asyncio.get_running_loop().time())


class _ClaimWork:
    """The work of a claim: a class, since a generator would cost three times as much."""

    __slots__ = ("_claim", "_scope", "_scopes")

    def __init__(self, claim: Claim, scopes: set[asyncio.Timeout]) -> None:
        self._claim = claim
        self._scope = asyncio.timeout(None)
        self._scopes = scopes

    async def __aenter__(self) -> None:
        if not self._claim.current:
            raise Superseded  # before waiting for the lock: its holder may open the shard for hours
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
            # The work has turned its cancellation into a time-out.
            raise Superseded from None


class Claims:
    """The current claim of each shard."""

    def __init__(self) -> None:
        """Begin without claims."""
        self.current: dict[str, Claim] = {}
        """The current one of each shard; read only."""
        self._superseded: defaultdict[str, list[Claim]] = defaultdict(list)
        """Earlier claims whose connections still live."""

    def take(self, shard_id: str) -> Claim:
        """Claim a shard; an earlier claim of it is superseded."""
        before = self.current.get(shard_id)
        claim = self.current[shard_id] = Claim(asyncio.Lock() if before is None else before.lock)
        if before is not None:
            self._superseded[shard_id].append(before)
            before.supersede()
        return claim

    def release(self, shard_id: str, claim: Claim, *, ended: bool = False) -> None:
        """Release a claim. If it was current and the shard has not ``ended``, the earlier claims are abandoned."""
        if claim.current:
            claim.current = False
            del self.current[shard_id]
            for earlier in self._superseded.pop(shard_id, ()):
                if not ended:
                    earlier.on_loss(Loss.ABANDONED)
        elif claim in self._superseded[shard_id]:
            self._superseded[shard_id].remove(claim)
        if not self._superseded[shard_id]:
            del self._superseded[shard_id]


@contextlib.asynccontextmanager
async def visiting_all(claims: Claims, shard_ids: Iterable[str]) -> AsyncGenerator[bool, None]:
    """Have the handlers of several open shards at once, each between two batches; give whether that is possible now.

    It is not if one of them is not open here, or works for so long that the others should not wait for it. Raises Superseded, also
    within the block, when a consumer does not wait for visitors.
    """
    found = [claims.current.get(shard_id) for shard_id in sorted(shard_ids)]
    opened = [claim for claim in found if claim is not None and claim.opened]
    async with contextlib.AsyncExitStack() as stack:
        possible = False
        if opened and len(opened) == len(found):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TURN_SECONDS if len(opened) > 1 else None):
                    for claim in opened:
                        await stack.enter_async_context(claim.visit())
                possible = True
        if not possible:
            await stack.aclose()
        yield possible


@contextlib.asynccontextmanager
async def visiting(
    runtime: Runtime, claims: Claims, shard_id: str, *, may_open: bool
) -> AsyncGenerator[bool, None]:
    """Have a shard's handler between two batches; give whether that is possible now.

    ``may_open``: if no consumer of this server has the shard, open a handler for the visit. Raises Superseded, also within the block,
    when the consumer does not wait for visitors, or when a connection claims a shard whose handler was opened for the visit.
    """
    claim = claims.current.get(shard_id)
    if claim is not None and claim.opened:
        async with claim.visit():
            yield True
    elif claim is not None or not may_open:
        yield False
    else:
        claim = claims.take(shard_id)
        try:
            async with claim.work():
                await runtime.open(Shard(shard_id, None))
                try:
                    yield True
                finally:
                    await runtime.forget(shard_id)
        finally:
            claims.release(shard_id, claim)
