"""A flusher over the real ledger and folder."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from coordinator.outcomes import outcome
from coordinator.pipeline import Faults, FaultyStore, InlineLedger
from support.store import SqliteStore

from mldserver.coordinator.cleanup import Retention
from mldserver.coordinator.core.flush import BufferedBatch, buffered
from mldserver.coordinator.core.ledger_view import LedgerView
from mldserver.coordinator.core.lineage import Lineage
from mldserver.coordinator.core.open_windows import CoordinatorRules
from mldserver.coordinator.core.watermark import Watermark
from mldserver.coordinator.flusher import Flushed, Flusher
from mldserver.ledger.contract import (
    Commit,
    LedgerState,
    ShardState,
)
from mldserver.records import Sequence
from mldserver.testing import VirtualClock
from mldserver.windows import WindowSpec, time_window_id

W = [time_window_id(start) for start in range(0, 40_000, 10_000)]


@dataclass
class Writing:
    out: Path
    spec: WindowSpec | None
    clock: VirtualClock
    faults: Faults
    ledger: InlineLedger
    flusher: Flusher
    retention: Retention
    durable: dict[str, Sequence | None] = field(default_factory=dict)

    @classmethod
    async def begin(cls, out: Path, spec: WindowSpec | None, *, recompute: bool = False) -> Writing:
        clock, faults = VirtualClock(1_000_000), Faults()
        ledger = InlineLedger(out / "ledger.sqlite", clock, faults)
        store = FaultyStore(str(out), faults)
        names = itertools.count()
        rules = CoordinatorRules(
            late="recompute" if recompute else "separate", recompute_delay_ms=5000, retention_bytes=1_000_000
        )
        flusher = Flusher(
            spec=spec,
            shape="0" * 12,
            ledger=ledger,
            view=LedgerView(ledger.server_id),
            store=store,
            clock=clock,
            unique=lambda: f"u{next(names)}",
            rules=rules,
        )
        lineage = Lineage()
        retention = Retention(
            rules=rules,
            ledger=ledger,
            cut_windows=flusher.cut_windows,
            garbage=flusher.garbage,
            lineage=lineage,
            watermark=Watermark(rules, lineage, clock.steady_ms()),
            clock=clock,
            listed=frozenset(),
        )
        writing = cls(out, spec, clock, faults, ledger, flusher, retention)
        writing.restore(await ledger.open())
        return writing

    def restore(self, state: LedgerState) -> None:
        self.flusher.view.state = state
        self.flusher.follow_ledger()

    async def flush(self, batches: list[BufferedBatch], reason: str = "interval") -> Flushed:
        flushed = await self.flusher.flush(dict(enumerate(batches)), reason, self.durable, {})
        self.durable |= {update.shard_id: update.position for update in flushed.positions}
        return flushed

    def batch(self, shard: ShardState, *records: tuple[int, int], **changes: Any) -> BufferedBatch:
        made = outcome(shard.shard_id, list(records), **changes)
        return buffered(shard.shard_id, shard.epoch, made, floor_ms=None, spec=self.spec)

    def files(self) -> dict[str, list[int]]:
        """Return the values in each segment file by the name of its window and its own, up to the unique part."""
        found = sorted(self.out.glob("_mldserver/segments/*/*.parquet"))
        return {
            f"{path.parent.name}/{path.name.rsplit('-', 3)[0]}": pq.read_table(path)["value"].to_pylist()
            for path in found
        }

    def registered(self) -> LedgerState:
        """Return what the ledger holds, as another server would find it."""
        reader = SqliteStore(self.out / "ledger.sqlite", pipeline="test", server_id="reader")
        try:
            return reader.peek()
        finally:
            reader.close()


def zero(clock: int) -> str:
    return f"{clock:016d}"


async def publish(writing: Writing, window_id: str, *, retain: bool = False) -> None:
    """See a cut window through, without any output."""
    attempt = (await writing.ledger.begin_attempts((window_id,)))[window_id]
    await writing.ledger.commit((Commit(window_id, attempt, "s", (), 0),))
    await writing.ledger.published({window_id: attempt}, retain=retain)
