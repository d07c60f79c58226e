"""Halving loses no record, however many there are and wherever the bad ones lie: in one process, and over many.

That the check can fail is shown by bugs that are planted, and that it finds.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from coordinator.outcomes import dead_letter, outcome

from mldserver.handler.failure import Failure
from mldserver.records import Sequence
from mldserver.runtime.failure_policy import FailurePolicy
from mldserver.runtime.interface import BatchOutcome, Delivery
from mldserver.runtime.plan import BatchPlan, Step
from mldserver.workers import runtime as workers
from mldserver.workers.runtime import WorkerRuntime
from mldserver.workers.worker_process import WorkerGone

pytestmark = pytest.mark.quick

BOOM = Failure("ValueError: boom")
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


def in_one_process(count: int, bad: set[int]) -> None:
    """Every record is processed once, or has one end; the bad ones have."""
    fresh: list[Any] = [
        SimpleNamespace(partition_key=str(index), sequence=Sequence(index + 1)) for index in range(count)
    ]
    plan = BatchPlan(range(count), POLICY, fresh, [0] * count)
    done: list[int] = []
    while (step := plan.step()) is not None:
        if bad.isdisjoint(step.indices):
            done += step.indices
        else:
            plan.failed(step, BOOM, 0)
    assert sorted(done) == sorted(set(range(count)) - bad)
    assert set(plan.ends) == bad


class Processes(WorkerRuntime):
    """Worker processes that die of some records; no process is started."""

    def __init__(self, count: int, bad: set[int]) -> None:
        self._policy = POLICY
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


async def over_processes(count: int, bad: set[int]) -> None:
    """Every record has one row or one dead letter, rows in their order; the bad ones have letters."""
    line: Any = None
    delivery = Delivery("s", line, received_ms=0, after=None)
    found: BatchOutcome = await Processes(count, bad)._search(delivery, line, "WorkerDied")
    rows = [] if found.effects.rows is None else found.effects.rows.column("value").to_pylist()
    assert rows == [index + 1 for index in range(count) if index not in bad]
    assert [letter.sequence.number for letter in found.effects.dead_letters] == [
        index + 1 for index in sorted(bad)
    ]


def all_in_one_process() -> None:
    for count, bad in CASES:
        in_one_process(count, bad)


async def all_over_processes() -> None:
    for count, bad in CASES:
        await over_processes(count, bad)


async def test_every_record_is_decided_once() -> None:
    all_in_one_process()
    await all_over_processes()


def the_last_record_is_dropped(patch: pytest.MonkeyPatch) -> None:
    """Of a long batch the right half ends one record too early."""

    def halve(plan: BatchPlan, step: Step) -> None:
        middle = len(step.indices) // 2
        stop = len(step.indices) - (len(step.indices) > 500)
        plan._suspect = Step(step.indices[middle:stop], halved=True)
        plan.todo += [plan._suspect, Step(step.indices[:middle], halved=True)]

    patch.setattr(BatchPlan, "_halve", halve)


def the_last_end_is_dropped(patch: pytest.MonkeyPatch) -> None:
    """What ended last is forgotten when another part is halved."""
    halve: Callable[[BatchPlan, Step], None] = BatchPlan._halve

    def forgetful(plan: BatchPlan, step: Step) -> None:
        if len(plan.ends) > 1:
            plan.ends.popitem()
        halve(plan, step)

    patch.setattr(BatchPlan, "_halve", forgetful)


@pytest.mark.parametrize("plant", [the_last_record_is_dropped, the_last_end_is_dropped])
def test_a_record_that_halving_drops_in_one_process_is_found(
    monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        all_in_one_process()


async def test_a_part_that_is_lost_when_many_are_joined_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    join: Callable[[list[BatchOutcome]], BatchOutcome] = workers.wire.joined
    monkeypatch.setattr(workers.wire, "joined", lambda parts: join(parts[:-1] if len(parts) > 10 else parts))
    with pytest.raises(AssertionError):
        await all_over_processes()


async def test_a_record_that_halving_drops_over_many_processes_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replace: Callable[..., Delivery] = workers.replace

    def short(delivery: Delivery, **fields: Any) -> Delivery:
        whole = fields.get("part", range(0))
        if len(whole) > 200 and whole.start:
            fields["part"] = whole[:-1]
        return replace(delivery, **fields)

    monkeypatch.setattr(workers, "replace", short)
    with pytest.raises(AssertionError):
        await all_over_processes()
