"""The ledger of a world, in a file or in a table of DynamoDB: its requests are blocking calls of whoever sends them."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import random
import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from functools import partial
from typing import Any
from unittest import mock

from ledger.dynamodb_fake import FakeDynamo

import mldserver.ledger.dynamodb
from mldserver.ledger.contract import Flush, FlushResult, Segment, WindowEntry
from mldserver.ledger.dynamodb import DynamoLedger

Deed = tuple[str, Any]
"""A call to a ledger that oracles look at, and its first argument."""

_deed: contextvars.ContextVar[Deed | None] = contextvars.ContextVar("deed", default=None)


class VirtualTable:
    """A client of DynamoDB that any process may use; it dies, stalls and fails as other blocking calls do."""

    def __init__(self) -> None:
        """Begin without items."""
        self._fake = FakeDynamo()

    def __getattr__(self, operation: str) -> Any:
        """Return an operation as a client has it."""
        return partial(self._send, operation)

    async def _send(self, operation: str, **request: Any) -> Any:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(None, self.send, operation, request)

    def send(self, operation: str, request: dict[str, Any]) -> Any:
        """Carry out a request at once."""
        work = getattr(self._fake, operation)(**request)
        try:
            work.send(None)
        except StopIteration as done:
            return done.value
        raise AssertionError("the fake answers at once")

    @property
    def deed(self) -> Deed | None:
        """Of which call the present request is a part, when oracles look at it."""
        return _deed.get()


@contextlib.contextmanager
def _doing(call: str, argument: Any) -> Iterator[None]:
    token = _deed.set((call, argument))
    try:
        yield
    finally:
        _deed.reset(token)


class WatchedLedger(DynamoLedger):
    """A ledger whose requests tell what they are for: only the table knows whether a transaction took place."""

    async def register(self, flush: Flush) -> FlushResult:
        with _doing("register", flush):
            return await super().register(flush)

    async def cut(
        self, window_ids: tuple[str, ...], *, all_until_ms: int | None = None
    ) -> tuple[WindowEntry, ...]:
        with _doing("cut", window_ids):
            return await super().cut(window_ids, all_until_ms=all_until_ms)

    async def published(self, attempts: Mapping[str, int], *, retain: bool = True) -> tuple[Segment, ...]:
        with _doing("published", attempts):
            return await super().published(attempts, retain=retain)


@contextlib.contextmanager
def in_memory(dice: random.Random) -> Iterator[None]:
    """Let ledgers in DynamoDB lie in one table of this process; chance is ``dice``."""
    table = VirtualTable()

    @contextlib.asynccontextmanager
    async def client(*_: Any, **__: Any) -> AsyncIterator[VirtualTable]:
        yield table

    def packed(data: bytes, compress: Callable[[bytes, int], bytes] = zlib.compress) -> bytes:
        """Leave it as long as it is: the name of the world's folder is in it, and how well that packs is chance."""
        return compress(data, 0)

    module = mldserver.ledger.dynamodb
    # A log that is soon long: it is shortened while servers run.
    made = partial(WatchedLedger, jitter=dice.random, compact_bytes=30_000)
    with (
        mock.patch.object(module, "aws_client", client),
        mock.patch.object(module, "DynamoLedger", made),
        mock.patch.object(zlib, "compress", packed),
    ):
        yield
