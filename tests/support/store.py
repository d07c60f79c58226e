"""The ledger on SQLite as plain calls: no event loop, no thread, and the time is passed in."""

from __future__ import annotations

import inspect
import sqlite3
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from mldserver.base.clock import Clock
from mldserver.ledger.sqlite import SqliteLedger
from tests.support.clocks import HandClock


class InlineLedger(SqliteLedger):
    """A ledger whose calls run where they are made."""

    async def _call(self, method: Callable[..., Any], *args: Any, **fields: Any) -> Any:
        return method(*args, **fields)

    async def close(self) -> None:
        self._store.close()


class SqliteStore:
    """One server's ledger, or a tool's. It may be opened again after it was closed."""

    def __init__(
        self, path: Path, *, pipeline: str, server_id: str, clock: Clock | None = None, **more: Any
    ) -> None:
        """``clock``: None where calls say what time it is."""
        self._clock = HandClock()
        self.server_id = server_id
        self._more = {"pipeline": pipeline, "server_id": server_id, "clock": clock or self._clock, **more}
        self._path, self._told = path, clock is None
        self.ledger = self._make()

    def _make(self) -> InlineLedger:
        ledger = InlineLedger(self._path, **self._more)
        if self._told:
            ledger.time_ms = self._clock.now_ms  # type: ignore[method-assign]  # the ledger's time is what calls say
        return ledger

    @property
    def _db(self) -> sqlite3.Connection | None:
        return self.ledger._store._db

    def close(self) -> None:
        run(self.ledger.close())
        self.ledger = self._make()


def run(call: Coroutine[Any, Any, Any]) -> Any:
    """Run what never waits."""
    try:
        call.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("an inline ledger never waits")


def _as_a_call(name: str) -> Callable[..., Any]:
    def call(self: SqliteStore, *args: Any, now_ms: int | None = None, **fields: Any) -> Any:
        if now_ms is not None:
            self._clock.ms = now_ms
        return run(getattr(self.ledger, name)(*args, **fields))

    call.__name__ = name
    return call


for _name, _method in inspect.getmembers(SqliteLedger, inspect.iscoroutinefunction):
    if not _name.startswith("_") and _name != "close":
        setattr(SqliteStore, _name, _as_a_call(_name))
