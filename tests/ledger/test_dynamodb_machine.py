"""Two DynamoDB ledgers on one table against the rules over a book in memory, with snapshots, throttling and lost answers.

The same machine as for SQLite: whatever the order of calls, all hold and answer the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from mldserver.ledger.dynamodb import DynamoLedger
from tests.ledger.conftest import PatientClock
from tests.ledger.dynamodb_fake import FakeDynamo, canceled, client_error, lost_answer
from tests.ledger.test_store_machine import LedgerMachine
from tests.support.clocks import HandClock

MISFORTUNES: dict[str, Callable[[FakeDynamo], None]] = {
    "throttled": lambda dynamo: dynamo.before.append(client_error("ThrottlingException", "x")),
    "in the way": lambda dynamo: dynamo.before.append(canceled("None", "TransactionConflict")),
    "unreachable": lambda dynamo: dynamo.before.append(lost_answer()),
    "answer lost": lambda dynamo: dynamo.after.append(lost_answer()),
    "answered by a broken proxy": lambda dynamo: dynamo.after.append(client_error("", "x", 502)),
}


class Blocking:
    """A ledger that can be called as a store is, and opened again."""

    def __init__(self, dynamo: FakeDynamo, server_id: str, runner: asyncio.Runner) -> None:
        self._dynamo = dynamo
        self._server_id = server_id
        self._runner = runner
        self._clock = HandClock()
        self._ledger = self._make()

    def _make(self) -> DynamoLedger:
        ledger = DynamoLedger(
            "table",
            pipeline="p",
            server_id=self._server_id,
            clock=PatientClock(self._clock),
            session=self._dynamo,
            compact_bytes=2_000,
        )
        ledger.time_ms = self._clock.now_ms  # type: ignore[method-assign]  # the ledger's time is what calls say
        return ledger

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, now_ms: int = 0, **fields: Any) -> Any:
            self._clock.ms = now_ms
            return self._runner.run(getattr(self._ledger, name)(*args, **fields))

        return call

    def close(self) -> None:
        self._runner.run(self._ledger.close())
        self._ledger = self._make()


class DynamoMachine(LedgerMachine):
    def __init__(self) -> None:
        super().__init__()
        self.dynamo = FakeDynamo()
        self.runner = asyncio.Runner()

    def store(self, server_id: str) -> Any:
        return Blocking(self.dynamo, server_id, self.runner)

    def hurry(self, server: int) -> None:
        pass

    def teardown(self) -> None:
        with self.runner:
            super().teardown()

    # A request is sent six times at most: with as many failures in a row a call may fail, and the model knows no such calls.
    @precondition(lambda self: len(self.dynamo.before) + len(self.dynamo.after) < 5)
    @rule(kind=st.sampled_from(sorted(MISFORTUNES)))
    def misfortune(self, kind: str) -> None:
        MISFORTUNES[kind](self.dynamo)

    @rule()
    def letters(self) -> None:
        if self.models[0].lives:
            assert len(self.stores[0].dead_letters(10**6)) == self.book.totals.dead_letters


DynamoMachine.TestCase.settings = LedgerMachine.TestCase.settings
TestLedgersAndModel = DynamoMachine.TestCase
