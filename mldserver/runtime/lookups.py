"""Which lookups keep shards from being opened."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from mldserver.handler.queries import LookupSpec


class RequiredLookups:
    """The required lookups of a handler that have no table yet."""

    def __init__(self, specs: Iterable[LookupSpec]) -> None:
        """Wait for those of ``specs`` that are required."""
        self._missing = {each.name for each in specs if each.required}
        self._complete = asyncio.Event()
        self.note("")

    def note(self, name: str) -> None:
        """Note that a lookup has a table."""
        self._missing.discard(name)
        if not self._missing:
            self._complete.set()

    async def wait(self) -> None:
        """Wait until each has a table."""
        await self._complete.wait()
