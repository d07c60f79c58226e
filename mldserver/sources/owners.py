"""Which connection a shard belongs to, when two claim it.

It happens: a lease moves to another host, whose daemon connects here too while the first one still works on a batch;
or a host died and its connection has not noticed. The latest claim owns the shard. The earlier one is not closed, as
that would make its whole JVM exit; its work is cancelled, and what still comes is answered unread (its checkpoints
do not move any more).
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

__all__ = ["Claim", "ShardOwners", "Superseded"]


class Superseded(Exception):
    """The shard was claimed anew."""


class Claim:
    """One connection's claim of a shard."""

    def __init__(self, lock: asyncio.Lock) -> None:
        """Begin as the current one; ``lock`` is shared by all claims of the shard."""
        self._lock = lock
        self._scopes: set[asyncio.Timeout] = set()
        self.current = True
        self.opened = False
        """Whether the runtime has the shard open for it."""

    @contextlib.asynccontextmanager
    async def work(self) -> AsyncIterator[None]:
        """Do work that only the owner may do, never at the same time as another claim's.

        Raises Superseded when the claim is no longer current, also in the middle of the work, which is cancelled.
        """
        try:
            async with asyncio.timeout(None) as scope:
                self._scopes.add(scope)
                try:
                    async with self._lock:
                        if not self.current:
                            raise Superseded
                        yield
                finally:
                    self._scopes.discard(scope)
        except TimeoutError:
            if not scope.expired():
                raise
            raise Superseded from None

    def supersede(self) -> None:
        """Cancel the work: another claim has come."""
        self.current = False
        for scope in self._scopes:
            scope.reschedule(asyncio.get_running_loop().time())


class ShardOwners:
    """The current claim of each shard."""

    def __init__(self) -> None:
        """Begin without any."""
        self._claims: dict[str, tuple[Claim, asyncio.Lock]] = {}

    def take(self, shard_id: str) -> Claim:
        """Claim a shard; an earlier claim of it is superseded."""
        before = self._claims.get(shard_id)
        lock = asyncio.Lock() if before is None else before[1]
        claim = Claim(lock)
        self._claims[shard_id] = (claim, lock)
        if before is not None:
            before[0].supersede()
        return claim

    def current(self, shard_id: str) -> Claim | None:
        """Return who has the shard; None: nobody."""
        found = self._claims.get(shard_id)
        return None if found is None else found[0]

    def release(self, shard_id: str, claim: Claim) -> None:
        """Let go of a claim; one that is not current changes nothing."""
        if claim.current:
            claim.current = False
            del self._claims[shard_id]
