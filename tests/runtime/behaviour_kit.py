"""Runtimes of both kinds, of which the tests of behaviour must not tell one from the other."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import random
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, Self

import pytest
from workers.kit import without_standby

from mldserver.base.clock import SystemClock
from mldserver.handler.inspection import load_spec
from mldserver.protocol.messages import Version
from mldserver.records import Hook, Sequence, Shard
from mldserver.runtime.failure_policy import FailurePolicy, OnFailure, OnKeyFailure, failure_rule
from mldserver.runtime.inline import InlineRuntime
from mldserver.runtime.interface import BatchOutcome, Delivery, MLDLine, Runtime, outcome_of
from mldserver.workers.runtime import WorkerRuntime
from mldserver.workers.worker import Limits

KINDS: Final = ("inline", "at once", "workers")
BY_RECORD: Final = ("ByRecord", "ByRecordAsync")
BY_BATCH: Final = ("ByBatch", "ByBatchAsync", "ByTable", "ByTableAsync")
IN_LONG: Final = {"ByRecordAsync", "ByBatchAsync", "ByTable"}
"""Of a synchronous and an asynchronous hook, worker processes run one by day.

By record it is the synchronous one, which they run on their loop: of ``over_waiting`` nothing else does.
"""
DELAY: Final = 0.001
PLAIN: Final = FailurePolicy(
    attempts=3,
    retry_base_seconds=DELAY,
    failure_rules=tuple(map(failure_rule, ("LookupError=skip", "ZeroDivisionError=halt", "BadRow=retry"))),
)
HALT: Final = replace(PLAIN, attempts=2, failure_rules=(), on_failure=OnFailure.HALT)
SKIP: Final = replace(HALT, on_failure=OnFailure.SKIP)
PARK: Final = replace(HALT, on_failure=OnFailure.DEAD_LETTER, on_key_failure=OnKeyFailure.PARK)
DAMAGED: Final = object()
"""A payload that is no base64."""
shard_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Cast:
    """A kind of runtime, and what it runs."""

    kind: str
    handler: str
    policy: FailurePolicy
    deadline: float | None
    concurrency: int | None

    def runtime(self) -> InlineRuntime | WorkerRuntime:
        common: dict[str, Any] = {
            "policy": self.policy,
            "deadline_seconds": self.deadline,
            "concurrency": self.concurrency,
        }
        path = f"runtime.behaviour_handlers.{self.handler}"
        if self.kind != "workers":
            at_once = self.kind == "at once"
            spec = load_spec(path)
            return InlineRuntime(spec, clock=SystemClock(), random=random.random, at_once=at_once, **common)
        return WorkerRuntime(path, workers=1, limits=Limits(None, None), log_level=10, **common)


def twin(handler: str) -> str:
    """Return the name of the asynchronous one for a synchronous one, and the other way round."""
    return handler.removesuffix("Async") if handler.endswith("Async") else f"{handler}Async"


def over_waiting(*handlers: str, **options: Any) -> pytest.MarkDecorator:
    """As ``over``, for hooks that wait for what the event loop is to do: synchronous ones cannot run on it."""
    return over(*handlers, kinds=("inline", "workers"), **options)


def over(
    *handlers: str,
    policy: FailurePolicy = PLAIN,
    deadline: float | None = None,
    concurrency: int | None = None,
    kinds: tuple[str, ...] = KINDS,
) -> pytest.MarkDecorator:
    """Run a test over all kinds of runtime (or those of ``kinds``), with each of these handlers.

    They are of ``obedient.py``, unless they name their module.
    """
    casts = [
        pytest.param(
            Cast(
                kind,
                handler if handler.islower() or ":" in handler else f"obedient:{handler}",
                policy,
                deadline,
                concurrency,
            ),
            id=f"{kind}-{handler}",
            marks=pytest.mark.long
            if kind == "workers" and handler in IN_LONG & {*map(twin, handlers)}
            else (),
        )
        for kind in kinds
        for handler in handlers
        if kind != "at once" or not handler.endswith("Async")
    ]
    return pytest.mark.parametrize("stage", casts, indirect=True)


class Stage:
    """A runtime that runs."""

    def __init__(self, runtime: Runtime, cast: Cast) -> None:
        self.runtime = runtime
        self.cast = cast

    async def opened(self, start: str = "TRIM_HORIZON") -> Played:
        """Return a shard that no other test has."""
        shard = Played(self.runtime, f"shardId-{next(shard_numbers):012d}")
        await shard.open(start)
        return shard


@asynccontextmanager
async def on_stage(cast: Cast) -> AsyncIterator[Stage]:
    """Start a runtime, let it run, and close it."""
    runtime = cast.runtime()
    if isinstance(runtime, WorkerRuntime):
        if "harm" not in cast.handler:
            without_standby(runtime)
        await runtime.load()
    await runtime.start()
    running = asyncio.create_task(runtime.run())
    yield Stage(runtime, cast)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await runtime.close()


class Played:
    """A shard, and the records that the daemon has sent of it: 1, 2, 3 …"""

    def __init__(self, runtime: Runtime, shard_id: str) -> None:
        self.runtime = runtime
        self.id = shard_id
        self.sent = 0

    async def open(self, start: str = "TRIM_HORIZON") -> None:
        await self.runtime.open(Shard(self.id, start))

    async def process(
        self, *payloads: Any, keys: Iterable[str | None] | None = None, first: int | None = None, **more: Any
    ) -> BatchOutcome:
        """Deliver a batch of payloads (bytes as they are, else JSON).

        ``keys``: one a record (else all differ); ``first``: the sequence of the first, if it is not the next one.
        """
        first = self.sent + 1 if first is None else first
        names = keys or [f"key-{number}" for number in range(first, first + len(payloads))]
        records = [
            self.record(number, payload, key)
            for number, (payload, key) in enumerate(zip(payloads, names, strict=True), first)
        ]
        self.sent = max(self.sent, first + len(payloads) - 1)
        message = {"action": "processRecords", "records": records, "millisBehindLatest": 7}
        return await self.line(json.dumps(message).encode(), **more)

    async def line(
        self, line: bytes, *, after: int | None = None, version: Version = Version.V2, **more: Any
    ) -> BatchOutcome:
        position = None if after is None else Sequence(after)
        delivery = Delivery(self.id, MLDLine(line, version), 9_000, position, **more)
        return await outcome_of(self.runtime.begin(delivery))

    def record(self, number: int, payload: Any, key: str | None) -> dict[str, Any]:
        data = payload if isinstance(payload, bytes) else json.dumps(str(payload)).encode()
        return {
            "data": "%%%" if payload is DAMAGED else base64.b64encode(data).decode(),
            "partitionKey": key,
            "sequenceNumber": str(number),
            "approximateArrivalTimestamp": 1_000 + number % 1_000,
            "subSequenceNumber": 0,
            "action": "record",
        }

    async def notify(self, hook: Hook) -> Sequence | None:
        return await self.runtime.notify(self.id, hook)

    async def forget(self) -> None:
        await self.runtime.forget(self.id)

    async def calls(self) -> list[Any]:
        """Return which calls the handler has had since it was opened."""
        (told,) = column(await self.process("tell"), "told")
        calls: list[Any] = json.loads(told)
        return calls


class Gate:
    """What a call that waits connects to."""

    def __init__(self) -> None:
        self._connected: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()

    async def __aenter__(self) -> Self:
        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._connected.put_nowait((reader, writer))

        self._server = await asyncio.start_server(connected, "127.0.0.1", 0)
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def reached(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return, once the call has begun, what reads to an end with it, and what lets it go on by its ``close``."""
        return await self._connected.get()


def column(outcome: BatchOutcome, name: str) -> list[Any]:
    """Return one column of an outcome's rows."""
    return [] if outcome.effects.rows is None else outcome.effects.rows.column(name).to_pylist()


def dead(outcome: BatchOutcome) -> list[int]:
    """Return the sequence numbers of the dead letters."""
    return [letter.sequence.number for letter in outcome.effects.dead_letters]


def records_of(calls: list[Any]) -> list[Any]:
    """Return the records of all calls, one after the other."""
    return [number for call in calls for number in (call if isinstance(call, list) else [call])]


def told(logged: list[dict[str, Any]], shard: Played, *fields: str) -> list[tuple[Any, ...]]:
    """Return these fields of what was logged of a shard's handler; the event's name without ``handler.`` is the first."""
    return [
        (event["event"].removeprefix("handler."), *(event.get(field) for field in fields))
        for event in logged
        if event["event"].startswith("handler.") and event.get("shard") == shard.id
    ]
