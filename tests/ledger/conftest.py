"""Ledgers over durable state of a test's own, and a clock that tests move by hand."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from mldserver.ledger.dynamodb import DynamoLedger
from mldserver.ledger.operations import Ledger
from mldserver.ledger.sqlite import SqliteLedger
from tests.ledger.dynamodb_fake import FakeDynamo
from tests.support.clocks import HandClock

if TYPE_CHECKING:
    from tests.ledger.dynamodb_emulator import Emulator


@pytest.fixture
def clock() -> HandClock:
    return HandClock(1_000)


@dataclass
class PatientClock:
    """The time of another clock, on which waiting costs nothing but a turn of the loop."""

    hand: HandClock
    slept: float = 0.0

    def now_ms(self) -> int:
        return self.hand.ms

    steady_ms = now_ms

    async def sleep(self, seconds: float) -> None:
        self.slept += seconds
        await asyncio.sleep(0)


@pytest.fixture(scope="session")
def shared_emulator() -> Iterator[Emulator]:
    from tests.ledger.dynamodb_emulator import Emulator  # moto is heavy, and most tests do without

    emulator = Emulator()
    with emulator.running():
        yield emulator


@pytest.fixture
def emulator(shared_emulator: Emulator) -> Iterator[Emulator]:
    """DynamoDB without faults."""
    shared_emulator.heal()
    yield shared_emulator
    shared_emulator.heal()


@pytest.fixture(scope="session")
def aws_session() -> Any:
    """One for all: each reads botocore's models of DynamoDB, which takes a fifth of a second."""
    import aioboto3

    return aioboto3.Session("emulated", "emulated", region_name="eu-central-1")


class MakingLedger(DynamoLedger):
    """Makes its table when it is opened."""

    async def _connect(self, *, create: bool) -> None:
        if create and self._journal is None:
            await self.create_table()
        await super()._connect(create=create)


@pytest.fixture
def dynamodb(emulator: Emulator, aws_session: Any, clock: HandClock) -> Callable[..., DynamoLedger]:
    """Make ledgers, not opened yet, over one table on DynamoDB that the first to open creates."""
    table = f"ledgers-{uuid.uuid4().hex}"
    patient = PatientClock(clock)

    def make(
        server_id: str = "one", pipeline: str = "p", *, create: bool = True, **settings: Any
    ) -> DynamoLedger:
        kind = MakingLedger if create else DynamoLedger
        usual = {"pipeline": pipeline, "server_id": server_id, "clock": patient}
        return kind(table, endpoint_url=emulator.url, session=aws_session, **(usual | settings))

    return make


@pytest.fixture
def dynamo() -> FakeDynamo:
    return FakeDynamo()


@pytest.fixture
def ledger_on(dynamo: FakeDynamo, clock: Any) -> Callable[..., DynamoLedger]:
    def make(server_id: str = "one", **settings: Any) -> DynamoLedger:
        usual = {"pipeline": "p", "clock": PatientClock(clock), "session": dynamo}
        return DynamoLedger("table", server_id=server_id, **(usual | settings))

    return make


@pytest.fixture(params=["sqlite", "dynamodb", pytest.param("moto", marks=pytest.mark.long)])
def ledger_factory(request: pytest.FixtureRequest, tmp_path: Path, clock: HandClock) -> Callable[..., Ledger]:
    """Make ledgers, not opened yet, over the same durable state. Every kind of ledger is a parameter.

    DynamoDB is one in memory; in the long lane it is moto's too, over HTTP.
    """

    def sqlite(server_id: str = "one", pipeline: str = "p", **settings: Any) -> Ledger:
        file = tmp_path / "ledger.sqlite"
        return SqliteLedger(file, pipeline=pipeline, server_id=server_id, clock=clock, **settings)

    others = {"dynamodb": "ledger_on", "moto": "dynamodb"}
    return request.getfixturevalue(others[request.param]) if request.param in others else sqlite
