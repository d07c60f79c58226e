"""Ledgers over durable state of a test's own, and a clock that tests move by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from mldserver.state.sqlite import SqliteLedger

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from mldserver.state.ledger import Ledger


@dataclass
class HandClock:
    ms: int = 1_000

    def now_ms(self) -> int:
        return self.ms

    async def sleep(self, seconds: float) -> None:
        raise AssertionError("a ledger never waits for time to pass")


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture(params=["sqlite"])
def ledger_factory(request: pytest.FixtureRequest, tmp_path: Path, clock: HandClock) -> Callable[..., Ledger]:
    """Make ledgers, not opened yet, over the same durable state. Every kind of ledger is a parameter."""

    def sqlite(server_id: str = "one", pipeline: str = "p") -> Ledger:
        return SqliteLedger(tmp_path / "ledger.sqlite", pipeline=pipeline, server_id=server_id, clock=clock)

    return {"sqlite": sqlite}[request.param]
