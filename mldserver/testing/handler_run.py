"""A handler under test: one shard in this process, and time that moves only when the test says so.

::

    async with HandlerRun("readings", clock=VirtualClock()) as run:
        await run.put({"celsius": 21.5}, key="a7")
        rows = await run.advance("10 minutes")

The handler runs as in a server with ``workers = inline``: with its state, timers and schema, and without windows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any, Final, Self

import orjson

from mldserver.handler.inspection import load_spec
from mldserver.handler.queries import CannedAnswers
from mldserver.records import DeadLetter, Record, Sequence, Shard
from mldserver.runtime.failure_policy import FailurePolicy
from mldserver.runtime.inline import InlineRuntime
from mldserver.runtime.interface import BatchOutcome, Delivery, DueTimers, Payload, Records
from mldserver.testing.stand_ins import VirtualClock
from mldserver.windows import duration_ms

_SHARD: Final = "shardId-000000000000"
_PORTION: Final = 100
"""At most so many timers fire in a batch."""
_STEP_SECONDS: Final = 0.05
"""How far time moves while a call waits, for example for its next attempt."""


class HandlerRun:
    """Gives a handler single records, and fires its timers. Use it as an asynchronous context manager."""

    def __init__(
        self,
        handler: str,
        *,
        clock: VirtualClock,
        attempts: int = 1,
        sql: Callable[..., Iterable[Mapping[str, Any]]] | None = None,
    ) -> None:
        """Load a handler by its dotted path, as ``mldserver check`` does. ``attempts``: as the setting.

        ``sql`` answers queries, also those of lookups: called with the text, and with the values as keywords, it returns the
        rows as dicts.

        Raises HandlerInvalid for a handler that ``check`` refuses.
        """
        self.dead_letters: list[DeadLetter] = []
        """Records and timers that failed for good, the oldest first."""
        self.pending = 0
        """Timers that are set now."""
        self._clock = clock
        self._spec = load_spec(handler)
        self._answers = None if sql is None else CannedAnswers(sql)
        self._runtime = InlineRuntime(
            self._spec,
            policy=FailurePolicy(attempts=attempts),
            clock=clock,
            random=lambda: 0.0,
            at_once=True,
            queries=self._answers,
        )
        self._records = 0
        self._next_ms: int | None = None

    async def __aenter__(self) -> Self:
        await self._runtime.start()
        if self._answers is not None:
            for lookup in self._spec.lookups:
                await self._runtime.fill_lookup(lookup.name, self._answers.submit(lookup.query).result())
        await self._runtime.open(Shard(_SHARD))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runtime.close()

    async def put(self, data: Any, key: str | None = None) -> list[dict[str, Any]]:
        """Process a record that arrives now; return its rows. ``data``: bytes, or a value that becomes JSON."""
        self._records += 1
        record = Record(
            shard_id=_SHARD,
            sequence_number=str(self._records),
            data=data if isinstance(data, bytes) else orjson.dumps(data),
            partition_key=key,
            arrival_ms=self._clock.now_ms(),
        )
        return await self._rows(Records([record]), after=self._records - 1)

    async def advance(self, duration: str | float | timedelta) -> list[dict[str, Any]]:
        """Move time on, firing each timer when it is due; return the callbacks' rows.

        ``duration``: text as windows take it ("10 minutes"), seconds, or a timedelta.
        """
        until_ms = self._clock.now_ms() + duration_ms(duration)
        rows = []
        while self._next_ms is not None and self._next_ms <= until_ms:
            await self._move_to(self._next_ms)
            rows += await self._rows(DueTimers(self._clock.now_ms(), _PORTION), after=self._records)
        await self._move_to(until_ms)
        return rows

    async def _move_to(self, ms: int) -> None:
        await self._clock.advance(max(0, ms - self._clock.now_ms()) / 1000)

    async def _rows(self, payload: Payload, after: int) -> list[dict[str, Any]]:
        """Process a batch and return its rows, without the server's own columns."""
        position = Sequence(after) if after else None
        work = asyncio.ensure_future(
            self._runtime.process(Delivery(_SHARD, payload, self._clock.now_ms(), position))
        )
        await self._clock.advance(0)
        while not work.done():
            await self._clock.advance(_STEP_SECONDS)
        outcome: BatchOutcome = work.result()
        self.dead_letters += outcome.effects.dead_letters
        if outcome.timers is not None:
            self.pending, self._next_ms = outcome.timers.pending, outcome.timers.next_call_ms
        table = outcome.effects.rows
        if table is None:
            return []
        own = [name for name in table.column_names if not name.startswith("_")]
        found: list[dict[str, Any]] = table.select(own).to_pylist()
        return found
