"""One pipeline from the coordinator down, as ``assembly.py`` makes it, with settings of a benchmark."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from bench.deliveries import Delivered
from support.shards import accept

from mldserver.base.clock import Clock
from mldserver.config.settings import WindowSettings
from mldserver.consumer.intake import ShardOpening
from mldserver.coordinator.coordinator import Coordinator
from mldserver.coordinator.core.open_windows import CoordinatorRules
from mldserver.coordinator.core.shape import Shape
from mldserver.coordinator.shards import IntakeSession
from mldserver.jobs.engine import Engine
from mldserver.jobs.runner import WindowRunner
from mldserver.jobs.steps import WindowSteps
from mldserver.ledger.sqlite import SqliteLedger
from mldserver.output.layout import LEDGER
from mldserver.output.owner import FolderClaim
from mldserver.output.store import OutputStore
from mldserver.windows import WindowSpec

__all__ = ["Pipeline", "living"]


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A pipeline that runs."""

    coordinator: Coordinator
    runner: WindowRunner
    sessions: dict[str, IntakeSession]

    async def give(self, delivered: Delivered) -> None:
        """Deliver a batch as a source does, and return when the daemon would be answered."""
        session = self.sessions[delivered.shard_id]
        session.batch_began()
        await accept(session, delivered.outcome)


@contextlib.asynccontextmanager
async def living(
    out: Path | str,
    *,
    home: Path | None = None,
    spec: WindowSpec,
    rules: CoordinatorRules,
    engine: Engine,
    clock: Clock,
    shards: tuple[str, ...],
) -> AsyncIterator[Pipeline]:
    """Run a pipeline over ``out`` with these shards open; the engine runs already.

    ``home``: where the ledger is, if ``out`` is a URI.
    """
    names = itertools.count()
    store = OutputStore(str(out))
    ledger = SqliteLedger((home or Path(out)) / LEDGER, pipeline="bench", server_id="bench", clock=clock)
    steps = WindowSteps(
        pipeline="bench",
        ledger=ledger,
        store=store,
        engine=engine,
        clock=clock,
        retain=True,
        freed=lambda freed: coordinator.freed(freed),  # noqa: PLW0108  # made below
    )
    runner = WindowRunner(steps, WindowSettings(), random=random.Random(0).random)
    coordinator = Coordinator(
        claim=FolderClaim(store, pipeline="bench", ledger=None),
        rules=rules,
        spec=spec,
        shape=Shape.of("bench", (), spec),
        ledger=ledger,
        store=store,
        runner=runner,
        clock=clock,
        unique=lambda: f"{next(names):08d}",
    )
    try:
        await coordinator.start()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(part) for part in (coordinator.run(), runner.run())]
            sessions = {
                shard: await coordinator.shards.open_shard(
                    ShardOpening(shard, "TRIM_HORIZON", tells_lag=True)
                )
                for shard in shards
            }
            yield Pipeline(coordinator, runner, sessions)
            for task in tasks:
                task.cancel()
    finally:
        await ledger.close()
