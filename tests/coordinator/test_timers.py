"""When timers fire: not before their shard is read up to their due time, not while it is held, once whatever happens."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from coordinator.pipeline import named
from coordinator.timed_house import Alarms, TimedHouse

from mldserver.consumer.intake import AT_TIP
from mldserver.errors import InternalError
from mldserver.runtime.interface import BatchOutcome, Delivery, DueTimers, TimerFilter

pytestmark = pytest.mark.quick

START = 1_000_000


async def test_a_timer_fires_once_when_its_shard_is_read_up_to_its_due_time(tmp_path: Path) -> None:
    house = TimedHouse(tmp_path)
    async with house.life():
        await house.open("parent")
        await house.put("parent", ("a", b"2"))
        await house.tip("parent")
        assert house.fired == [], "it is not due"
        await house.wait(2)
        assert (house.fired, house.timers.held) == ([], 1), "a record that cancels it may have arrived"
        await house.tip("parent")
        assert (house.fired, house.timers.held) == ([("a", START + 2000)], 0)
        await house.tip("parent")
        await house.wait(2)
        assert house.rows() == [("a", START + 2000)]


async def test_a_shard_that_lags_holds_its_timers_for_the_records_that_cancel_them(tmp_path: Path) -> None:
    house = TimedHouse(tmp_path)
    async with house.life():
        await house.open("parent")
        await house.wait(100)
        await house.put("parent", ("a", b"2"), ("b", b"2"), lag_ms=90_000)
        await house.wait(50)
        assert (house.fired, house.timers.held) == ([], 1)
        await house.put("parent", ("a", b"cancel"), lag_ms=139_000)
        await house.wait(1)
        assert house.fired == []
        await house.put("parent", ("c", b""), lag_ms=130_000)
        await house.wait(1)
        assert house.fired == [("b", START + 12_000)]


@pytest.mark.parametrize("hour", [3600.0, -3600.0])
async def test_a_jump_of_the_hosts_clock_moves_no_timer(
    tmp_path: Path, hour: float, logged: list[dict[str, Any]]
) -> None:
    house = TimedHouse(tmp_path)
    async with house.life():
        await house.open("parent")
        await house.put("parent", ("a", b"20"), ("b", b"1"))
        house.pipeline.clock.step(hour)
        await house.wait(1)
        await house.tip("parent")
        assert house.fired == [("b", START + 1000)]
        await house.wait(20)
        await house.tip("parent")
        assert house.fired == [("b", START + 1000), ("a", START + 20_000)]
    (differs,) = named(logged, "clock.differs")
    assert differs["seconds"] == hour


async def test_a_paused_shard_holds_its_timers(tmp_path: Path) -> None:
    house = TimedHouse(tmp_path)
    async with house.life():
        await house.open("parent")
        await house.put("parent", ("a", b"1"))
        await house.wait(1)
        paused = house.pipeline.coordinator._backpressure.paused_shards
        paused.add("parent")
        now_ms = house.pipeline.clock.steady_ms()
        house.consumers["parent"].intake.accept_batch(AT_TIP, now_ms, now_ms)
        await house.wait(1)
        assert (house.fired, house.timers.held) == ([], 1)
        paused.clear()
        await house.wait(0.2)
        assert (house.fired, house.timers.held) == ([("a", START + 1000)], 0)


async def test_a_portion_grows_while_it_is_quick_and_shrinks_when_it_is_slow(tmp_path: Path) -> None:
    house = TimedHouse(tmp_path)
    async with house.life():
        await house.open("parent")
        sizes, process, took = [], house.runtime.process, [0.01, 0.01, 0.06, 0.03]

        async def timed(delivery: Delivery) -> BatchOutcome:
            assert isinstance(delivery.payload, DueTimers)
            sizes.append(delivery.payload.limit)
            await house.pipeline.clock.sleep(took[len(sizes) - 1] if len(sizes) <= len(took) else 0.0)
            return await process(delivery)

        house.runtime.process = timed  # type: ignore[method-assign]  # the test's eyes
        await house.put("parent", *((f"k{number}", b"1") for number in range(100)))
        await house.wait(1)
        await house.tip("parent")
        await house.wait(1)
        assert sizes == [16, 32, 64]
        assert len(house.fired) == 100


async def test_a_visit_that_is_cancelled_when_the_handler_has_run_fires_again(tmp_path: Path) -> None:
    house = TimedHouse(tmp_path)
    async with house.life():
        consumer = await house.open("parent")
        await house.put("parent", ("a", b"1"))
        await house.wait(1)
        process = house.runtime.process

        async def evicted(delivery: Delivery) -> BatchOutcome:
            outcome = await process(delivery)
            house.runtime.process = process  # type: ignore[method-assign]  # the test's eyes
            consumer._claim.evict()
            await asyncio.sleep(1)
            return outcome

        house.runtime.process = evicted  # type: ignore[method-assign]  # see above
        await house.tip("parent")
        await house.wait(1)
        assert house.fired == [("a", START + 1000)] * 2
        await house.wait(2)
        assert house.rows() == [("a", START + 1000)]


async def test_after_a_failure_the_timers_of_a_store_wait_a_while(
    tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    house = TimedHouse(tmp_path)
    async with house.life():
        await house.open("parent")
        await house.put("parent", ("a", b"1"))
        await house.wait(1)
        process = house.runtime.process

        async def fails(_delivery: Delivery) -> BatchOutcome:
            house.runtime.process = process  # type: ignore[method-assign]  # the test's eyes
            raise InternalError("Out of order.")

        house.runtime.process = fails  # type: ignore[method-assign]  # see above
        await house.tip("parent")
        await house.wait(4)
        assert house.fired == []
        await house.wait(1)
        assert house.fired == [("a", START + 1000)]
    (failed,) = named(logged, "timer.failed")
    assert (failed["store"], failed["what"]) == ("parent", "Out of order.")


async def test_timers_are_cancelled_for_good(tmp_path: Path) -> None:
    house = TimedHouse(tmp_path)
    async with house.life():
        await house.open("parent")
        await house.put("parent", ("a", b"1"), ("b", b"1"), ("c", b"900"))
        assert await house.pipeline.clock.drive(house.firing.cancel(TimerFilter(key="a"))) == 1
        assert await house.pipeline.clock.drive(house.firing.cancel(TimerFilter(key="a"))) == 0
        before_ms = START + 800_000
        assert (
            await house.pipeline.clock.drive(house.firing.cancel(TimerFilter(due_before_ms=before_ms))) == 1
        )
        await house.wait(2)
        await house.tip("parent")
        assert house.fired == []
        assert house.pipeline.state().stores["parent"].next_due_ms == START + 900_000


async def test_letters_of_timers_run_once_more_where_their_key_is(tmp_path: Path) -> None:
    house = TimedHouse(tmp_path)
    async with house.life():
        await house.open("parent")
        Alarms.fails = True
        await house.put("parent", *((key, b"1") for key in "abc"))
        await house.wait(1)
        await house.tip("parent")
        assert len(house.fired) == 3
        await house.want()
        assert await house.redrive() == 3, "they have failed again"
        letters = [stored.letter for stored in await house.pipeline.ledger.letters(limit=10)]
        assert [(each.partition_key, each.timer, each.due_ms, each.attempts) for each in letters] == [
            (key, "alarm", START + 1000, 2) for key in "abc"
        ]
        Alarms.fails = False
        next_ms = house.arrival_ms(0) + 900_000
        await house.put("parent", ("b", b"900"))
        await house.want()
        assert await house.redrive() == 0
        await house.wait(2)
        assert house.rows() == [(key, START + 1000) for key in "abc"]
        assert house.pipeline.state().stores["parent"].next_due_ms == next_ms, "b's next timer stays"


async def test_a_timer_that_a_redriven_letter_sets_fires(tmp_path: Path) -> None:
    house = TimedHouse(tmp_path)
    async with house.life():
        await house.open("parent")
        await house.put("parent", ("a", b"never"))
        Alarms.heals = True
        await house.want()
        assert await house.redrive() == 0
        await house.tip("parent")
        await house.wait(1)
        await house.tip("parent")
        assert [key for key, _ in house.fired] == ["a"]
