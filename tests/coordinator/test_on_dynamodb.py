"""Two coordinators on a ledger in DynamoDB, which loses answers: nothing is lost or doubled, whoever dies."""

from __future__ import annotations

import asyncio
import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from coordinator.leases import Leases, stream
from coordinator.pipeline import RULES, Pipeline
from support.lanes import seeds

from mldserver.coordinator.shards import ShardSession
from mldserver.errors import InternalError, LedgerError, OperatorError
from mldserver.ledger.contract import LedgerState, WindowState
from mldserver.ledger.dynamodb import DynamoLedger
from mldserver.records import Sequence
from mldserver.testing import VirtualClock
from mldserver.windows import Tumbling, batches
from tests.ledger.dynamodb_fake import FakeDynamo, client_error, lost_answer

SPECS = {
    "arrival": Tumbling(10_000),
    "column": Tumbling(10_000, "at"),
    "batches": batches(max_rows=4, max_age="2 s"),
}
RATE = 0.05
"""How often AWS falls silent for some calls, which take effect or not; and how often a single one is throttled."""
SILENT = 12
"""For so many calls at most: twice as many as it takes until a call of the ledger fails."""
OPERATIONS = frozenset({"get_item", "put_item", "query", "batch_write_item", "transact_write_items"})


class ShakyDynamo(FakeDynamo):
    """Others go on between any two of its calls, and of some the answer is lost."""

    def __init__(self, choose: random.Random, rate: float) -> None:
        super().__init__()
        self.choose = choose
        self.rate = rate
        self.silent = 0

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        return self._shaken(found, name) if name in OPERATIONS else found

    def _shaken(self, operation: Any, name: str) -> Any:
        async def call(**request: Any) -> Any:
            await self._pause()
            if self.choose.random() < self.rate:
                raise client_error("ThrottlingException", name)
            if self.choose.random() < self.rate:
                self.silent = self.choose.randint(1, SILENT)
            if not self.silent:
                return await operation(**request)
            self.silent -= 1
            if self.choose.random() < 0.5:
                await operation(**request)
                await self._pause()
            raise lost_answer()

        return call

    async def _pause(self) -> None:
        for _ in range(self.choose.randint(0, 2)):
            await asyncio.sleep(0)


class OnDynamo(Pipeline):
    """Whose ledger is a table."""

    def __init__(self, out: Path, dynamo: ShakyDynamo, **values: Any) -> None:
        super().__init__(out, **values)
        self.dynamo = dynamo
        self.place = "dynamodb://table/test"
        self.letters: list[tuple[str, Sequence]] = []

    def make_ledger(self) -> DynamoLedger:
        ids = itertools.count()
        return DynamoLedger(
            "table",
            pipeline="test",
            server_id=self.server_id,
            clock=self.clock,
            session=self.dynamo,
            compact_bytes=4_000,
            jitter=self.dynamo.choose.random,
            unique=lambda: f"{self.dynamo.choose.getrandbits(64):x}-{next(ids)}",
        )

    async def close_ledger(self) -> None:
        await self.ledger.close()

    async def see_to_the_end(self) -> None:
        """Wait until the table itself says that all is published, and read the dead letters.

        What a server saw of it at its latest look may be older than what another has written since.
        """
        self.dynamo.rate, self.dynamo.silent = 0.0, 0
        reader = self.make_ledger()
        while not _published(await reader.peek()):
            await self.clock.sleep(1)
        self.letters = [(each.shard_id, each.sequence) for each in await reader.dead_letters(10_000)]
        await reader.close()

    def stored_dead_letters(self) -> list[tuple[str, Sequence]]:
        return self.letters

    def state(self) -> Any:
        """What the ledger held at this server's latest look."""
        assert self.ledger._journal is not None, "it is open"
        return self.ledger._journal.book.state()


def _published(state: LedgerState) -> bool:
    windows = state.windows.values()
    return not state.late_segments and all(
        entry.state is WindowState.PUBLISHED and not entry.pending for entry in windows
    )


class PatientLeases(Leases):
    """Workers and servers that come back when the ledger could not be reached."""

    async def one_life(self, server: Pipeline) -> None:
        try:
            await super().one_life(server)
        except* LedgerError:
            pass

    async def tenure(self, group: asyncio.TaskGroup, server: Pipeline, shard: str) -> None:
        coordinator = server.coordinator
        try:
            await super().tenure(group, server, shard)
        except LedgerError:
            coordinator.shards.abandon(shard)
        except InternalError:
            assert server not in self.alive, "whose ledger is closed"

    async def batch(
        self, server: Pipeline, session: ShardSession, left: list[tuple[int, int]]
    ) -> list[tuple[int, int]]:
        if self.choose.random() < 0.1:
            # The connection is lost while its batch is taken, or waits for room.
            taking = asyncio.create_task(super().batch(server, session, left))
            await self.clock.sleep(self.choose.choice([0, 0.1]))
            taking.cancel()
            await asyncio.wait({taking})
            session.disconnected()
            return []
        return await super().batch(server, session, left)


@pytest.mark.parametrize("seed", seeds(4))
@pytest.mark.parametrize("name", SPECS)
async def test_servers_that_die_while_answers_are_lost_lose_and_double_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, seed: int
) -> None:
    choose = random.Random(f"{name} {seed}")
    inline_bytes = choose.choice([700, 3_000])
    monkeypatch.setattr("mldserver.ledger.dynamodb_table.INLINE_BYTES", inline_bytes)
    monkeypatch.setattr("mldserver.ledger.dynamodb.INLINE_BYTES", inline_bytes)
    clock, dynamo = VirtualClock(1_000_000), ShakyDynamo(choose, RATE)
    rules = replace(RULES, server_timeout_ms=5000, buffer_bytes=3_000, flush_bytes=1_000)
    one, other = (
        OnDynamo(
            tmp_path, dynamo, spec=SPECS[name], recompute=True, rules=rules, server_id=server_id, clock=clock
        )
        for server_id in ("one", "two")
    )
    leases = stream(choose, clock)
    daemon = PatientLeases(leases.records, leases.parents, choose=choose, clock=clock)

    async def work() -> None:
        await daemon.see_out()
        await one.see_to_the_end()

    async with asyncio.timeout(800), asyncio.TaskGroup() as group:
        lives = [group.create_task(daemon.live(each, each.server_id)) for each in (one, other)]
        await clock.drive(work(), step=0.2)
        for life in lives:
            life.cancel()
    daemon.assert_all(one)
    assert daemon.deaths > 0
    assert dynamo.kinds("test")["blob"] > 0


async def test_two_hosts_with_a_local_folder_each_are_refused(tmp_path: Path) -> None:
    """Each would compute windows from the rows that it has itself, and miss the other's."""
    dynamo = ShakyDynamo(random.Random(0), rate=0.0)
    one, other = (OnDynamo(tmp_path / name, dynamo, server_id=name) for name in ("one", "other"))
    async with one.life():
        with pytest.raises(OperatorError, match=r"belongs to another output folder than .*/other"):
            async with other.life():
                pass
    async with OnDynamo(tmp_path / "one", dynamo, server_id="other").life():
        pass
