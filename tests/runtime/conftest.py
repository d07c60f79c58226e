"""Small pieces that the runtime's tests share: handlers out of thin air, lines as the daemon writes them."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Mapping
from types import ModuleType
from typing import Any

import pytest
from support.clocks import RecordingClock

from mldserver.handler.context import NO_SETTINGS
from mldserver.handler.inspection import inspect_handler
from mldserver.handler.loader import Loaded
from mldserver.handler.spec import HandlerSpec
from mldserver.protocol.messages import Version
from mldserver.records import Sequence, Shard
from mldserver.runtime.failure_policy import FailurePolicy
from mldserver.runtime.inline import InlineRuntime
from mldserver.runtime.interface import BatchOutcome, Delivery, MLDLine

SHARD = "shardId-000000000001"


class Kit:
    """What a test needs to run a handler."""

    shard = SHARD

    def __init__(self) -> None:
        self.clock = RecordingClock(5_000)
        self.runtimes: list[InlineRuntime] = []
        self.tasks: list[asyncio.Task[None]] = []

    def spec(self, target: type | None = None, **names: Any) -> HandlerSpec:
        """Return the spec of a class, or of a module that holds ``names``."""
        module = ModuleType("mine")
        vars(module).update(names)
        path, name = ("mine", "") if target is None else (f"mine:{target.__name__}", target.__name__)
        spec, findings = inspect_handler(Loaded(path, module, target or module, name))
        assert spec is not None, findings
        return spec

    async def start(
        self,
        target: type | None = None,
        *,
        policy: FailurePolicy | None = None,
        deadline: float | None = None,
        clock: Any = None,
        at_once: bool = False,
        settings: Mapping[str, str] = NO_SETTINGS,
        **names: Any,
    ) -> InlineRuntime:
        """Return a started runtime; it is closed at the test's end."""
        runtime = InlineRuntime(
            self.spec(target, **names),
            policy=policy or FailurePolicy(),
            clock=clock or self.clock,
            random=lambda: 1.0,
            deadline_seconds=deadline,
            at_once=at_once,
            settings=settings,
        )
        await runtime.start()
        self.runtimes.append(runtime)
        self.tasks.append(asyncio.create_task(runtime.run()))
        return runtime

    async def run(self, *payloads: Any, after: int | None = None, **options: Any) -> BatchOutcome:
        """Start a runtime, open the shard, and return what became of a batch of ``payloads``."""
        runtime = await self.start(**options)
        await runtime.open(Shard(SHARD))
        return await runtime.process(self.delivery(*payloads, after=after))

    def dead(self, outcome: BatchOutcome) -> list[int]:
        """Return the sequence numbers of the dead letters."""
        return [letter.sequence.number for letter in outcome.effects.dead_letters]

    def delivery(
        self, *payloads: Any, after: int | None = None, version: Version = Version.V2, **more: Any
    ) -> Delivery:
        """Return a batch of payloads (bytes as they are, else JSON) with the sequences 1, 2, 3 …"""
        records = [self.record(number, payload) for number, payload in enumerate(payloads, 1)]
        return self.line(records, after=after, version=version, **more)

    def record(self, number: int, payload: Any, **more: Any) -> dict[str, Any]:
        data = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
        return {
            "data": base64.b64encode(data).decode(),
            "partitionKey": f"key-{number}",
            "sequenceNumber": str(number),
            "approximateArrivalTimestamp": 1_000 + number,
            "subSequenceNumber": 0,
            "action": "record",
            **more,
        }

    def line(
        self,
        records: list[dict[str, Any]],
        *,
        after: int | None = None,
        version: Version = Version.V2,
        shard: str = SHARD,
        behind: int | None = 7,
    ) -> Delivery:
        message = {"action": "processRecords", "records": records, "millisBehindLatest": behind}
        position = None if after is None else Sequence(after)
        return Delivery(shard, MLDLine(json.dumps(message).encode(), version), 9_000, position)


def values(outcome: BatchOutcome, column: str) -> list[Any]:
    """Return one column of an outcome's rows."""
    return [] if outcome.effects.rows is None else outcome.effects.rows.column(column).to_pylist()


@pytest.fixture
async def kit() -> AsyncIterator[Kit]:
    kit = Kit()
    yield kit
    for task in kit.tasks:
        task.cancel()
        await asyncio.wait({task})
    for runtime in kit.runtimes:
        await runtime.close()


@pytest.fixture(scope="session")
def kit_class() -> Any:
    """For tests with examples, each of which needs a kit of its own."""
    return Kit


@pytest.fixture
def column() -> Any:
    return values


@pytest.fixture
def shard() -> Shard:
    return Shard(SHARD, "TRIM_HORIZON")
