"""A batch that ends worker processes is halved over many of them, and loses no record."""

from __future__ import annotations

from typing import Any

import pytest
from coordinator.outcomes import dead_letter, outcome

from mldserver.runtime.failure_policy import FailurePolicy
from mldserver.runtime.interface import BatchOutcome, Delivery
from mldserver.workers.open_stores import OpenStores
from mldserver.workers.runtime import WorkerRuntime
from mldserver.workers.worker_process import WorkerGone

pytestmark = pytest.mark.quick

POLICY = FailurePolicy(attempts=2, retry_base_seconds=0)
CASES = [
    (1, {0}),
    (2, {1}),
    (3, {0, 2}),
    (8, {7}),
    (64, {0, 31, 32, 63}),
    (65, {64}),
    (257, {3, 128, 255, 256}),
    (1000, {998, 999}),
]


class Processes(WorkerRuntime):
    """Worker processes that die of some records; no process is started."""

    def __init__(self, count: int, bad: set[int]) -> None:
        self._policy = POLICY
        self._stores = OpenStores()
        self._count = count
        self._bad = bad

    async def _with_process(self, _shard_id: str, work: Any, **_named: Any) -> Any:
        return await work(None)

    async def _sent(self, delivery: Delivery, *_given: Any) -> Any:
        part, condemned = delivery.part, delivery.condemned
        assert part is not None, "each is asked for a part"
        if condemned is None and not self._bad.isdisjoint(part):
            raise WorkerGone("signal 9", alone=True)
        records = [(index + 1, index) for index in range(self._count)]
        letters = [dead_letter("s", index + 1) for index in part] if condemned else []
        return outcome("s", records, rows=[] if condemned else [index + 1 for index in part], letters=letters)


@pytest.mark.parametrize(("count", "bad"), CASES)
async def test_every_record_has_one_row_or_one_dead_letter(count: int, bad: set[int]) -> None:
    line: Any = None
    delivery = Delivery("s", line, received_ms=0, after=None)
    found: BatchOutcome = await Processes(count, bad)._search(delivery, line, "WorkerDied")
    rows = [] if found.effects.rows is None else found.effects.rows.column("value").to_pylist()
    assert rows == [index + 1 for index in range(count) if index not in bad]
    assert [letter.sequence.number for letter in found.effects.dead_letters] == [
        index + 1 for index in sorted(bad)
    ]
