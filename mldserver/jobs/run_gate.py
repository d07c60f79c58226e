"""The lock that the windows of one engine share: attempts run side by side, or one attempt runs alone.

All functions of a server share one Spark driver. A window that may have killed it runs alone there: without windows of
its own function, and without those of others, which might be the cause as well.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterable

from mldserver.base.clock import Flag

WindowKey = tuple[str, str]
"""A window: its function and its id."""


class RunGate:
    """A lock: attempts at windows run side by side, or one attempt runs alone. Those that must run alone go first."""

    def __init__(self) -> None:
        """Create a lock that no attempt holds."""
        self._changed = Flag()
        self._inside: dict[frozenset[WindowKey], bool] = {}
        """By the windows of each attempt that holds the lock: whether it must run alone."""
        self._waiting_alone = 0
        """How many attempts wait to run alone."""

    @contextlib.asynccontextmanager
    async def enter(self, windows: Iterable[WindowKey], *, alone: bool) -> AsyncIterator[None]:
        """Wait until an attempt at ``windows`` may run, and hold the lock while the context lasts."""
        key = frozenset(windows)
        self._waiting_alone += alone
        try:
            while self._inside if alone else (self._waiting_alone or any(self._inside.values())):
                await self._changed.wait()
        finally:
            self._waiting_alone -= alone
            self._wake()
        self._inside[key] = alone
        try:
            yield
        finally:
            self._inside.pop(key, None)
            self._wake()

    def release(self, window: WindowKey) -> None:
        """Release the lock of the attempt at a window before it ends, so that other attempts run beside it."""
        for key in [key for key in self._inside if window in key]:
            del self._inside[key]
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed.clear()
