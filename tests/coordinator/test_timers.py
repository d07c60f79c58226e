"""When timers fire: not before their shard is read up to their due time, not while it is held, once whatever happens."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from coordinator.keyed_house import HIGH_KEY, LOW_KEY
from coordinator.pipeline import QUICK, RULES, named
from coordinator.timed_house import Alarms, TimedHouse
from msgspec import structs

from mldserver.consumer.intake import AT_TIP, ShardListing
from mldserver.coordinator import firing
from mldserver.coordinator.core.lineage import LineageNode, Presence
from mldserver.errors import HandlerError, InternalError
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


async def test_a_shard_that_takes_long_to_open_is_not_silent_before_its_first_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = TimedHouse(tmp_path)
    async with house.life():
        await house.open("parent")
        await house.put("parent", ("a", b"2"))
        await house.pipeline.cycle()
    async with house.life():
        open_handler, clock = house.runtime.open, house.pipeline.clock

        async def open_slowly(*given: Any) -> None:
            await clock.sleep(3 * RULES.idle_time_ms / 1000)
            await open_handler(*given)

        monkeypatch.setattr(house.runtime, "open", open_slowly)
        await clock.drive(house.open("parent"))
        await house.wait(1)
        assert (house.fired, house.timers.held) == ([], 1)
        await house.put("parent", ("a", b"cancel"), lag_ms=90_000)
        await house.tip("parent")
        assert house.fired == []


@pytest.mark.parametrize("hour", [3600.0, -3600.0])
async def test_a_jump_of_the_hosts_clock_moves_no_timer(tmp_path: Path, hour: float) -> None:
    house = TimedHouse(tmp_path)
    async with house.life():
        await house.open("parent")
        await house.put("parent", ("a", b"20"), ("b", b"1"))
        house.pipeline.clock.step(hour)
        await house.wait(1)
        sections = house.pipeline.coordinator.sections.__self__
        assert sections._timers_section().clock_ahead_seconds == hour
        await house.tip("parent")
        assert house.fired == [("b", START + 1000)]
        await house.wait(20)
        await house.tip("parent")
        assert house.fired == [("b", START + 1000), ("a", START + 20_000)]


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


async def test_a_failure_of_a_shard_that_another_server_has_now_is_no_trouble(tmp_path: Path) -> None:
    house = TimedHouse(tmp_path)
    async with house.life():
        consumer = await house.open("parent")
        await house.put("parent", ("a", b"1"))
        await house.wait(1)

        async def fails(_delivery: Delivery) -> BatchOutcome:
            raise InternalError("Out of order.")

        house.runtime.process = fails  # type: ignore[method-assign]  # the test's eyes
        await house.tip("parent")
        assert house.firing.trouble
        await house.pipeline.clock.drive(consumer.lose())
        await house.wait(1)
        assert house.firing.trouble is None


async def test_all_due_timers_fire_in_a_row_though_portions_are_small_and_take_long(tmp_path: Path) -> None:
    house = TimedHouse(tmp_path)
    async with house.life():
        await house.open("parent")
        limits, process = list[int](), house.runtime.process

        async def small(delivery: Delivery) -> BatchOutcome:
            assert isinstance(delivery.payload, DueTimers)
            limits.append(delivery.payload.limit)
            await house.pipeline.clock.sleep(0.06)
            return await process(
                structs.replace(delivery, payload=structs.replace(delivery.payload, limit=4))
            )

        house.runtime.process = small  # type: ignore[method-assign]  # the test's eyes
        await house.put("parent", *((f"k{number}", b"1") for number in range(20)), ("later", b"900"))
        await house.wait(1)
        await house.tip("parent")
        await house.wait(0.3)
        assert (len(house.fired), limits) == (20, [1000] * 5), (
            "none is slow by the shard's own time; none is empty"
        )


async def test_sources_read_between_two_portions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(firing, "_MOST", 4)
    house = TimedHouse(tmp_path)
    async with house.life():
        await house.open("parent")
        reads, process, loop = [0], house.runtime.process, asyncio.get_running_loop()

        async def noted(delivery: Delivery) -> BatchOutcome:
            loop.call_soon(reads.append, len(reads))
            return await process(delivery)

        house.runtime.process = noted  # type: ignore[method-assign]  # the test's eyes
        await house.put("parent", *((f"k{number}", b"1") for number in range(20)))
        await house.wait(1)
        await house.tip("parent")
        assert reads == [0, 1, 2, 3, 4, 5], "what the loop has to do is done before the next portion"


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


@pytest.mark.parametrize("how", ["lose", "drain"])
async def test_a_shard_that_moves_does_not_wait_for_a_portion(tmp_path: Path, how: str) -> None:
    house = TimedHouse(tmp_path)
    async with house.life():
        consumer = await house.open("parent")
        await house.put("parent", ("a", b"1"))
        await house.wait(1)
        visits, process = list[str](), house.runtime.process

        async def slow(delivery: Delivery) -> BatchOutcome:
            visits.append("began")
            try:
                await house.pipeline.clock.sleep(100)
            except asyncio.CancelledError:
                visits.append("evicted")
                raise
            return await process(delivery)

        house.runtime.process = slow  # type: ignore[method-assign]  # the test's eyes
        await house.tip("parent")
        assert visits == ["began"]
        began_ms = house.pipeline.clock.steady_ms()
        await house.pipeline.clock.drive(getattr(consumer, how)())
        assert visits == ["began", "evicted"]
        assert house.pipeline.clock.steady_ms() - began_ms < 1000
        assert house.fired == []


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
        assert house.firing.trouble == "timers of the store parent cannot be fired: Out of order"
        await house.wait(1)
        assert (house.fired, house.firing.trouble) == ([("a", START + 1000)], None)
    (failed,) = named(logged, "timer.failed")
    assert (failed["store"], failed["what"]) == ("parent", "Out of order.")


async def test_a_timer_that_fires_early_by_the_hosts_clock_does_not_run_awss_clock_ahead(
    tmp_path: Path,
) -> None:
    house = TimedHouse(tmp_path)
    async with house.life():
        clock, watermark = house.pipeline.clock, house.pipeline.coordinator.watermark
        house.timers.civil.arrived(clock.now_ms() + 60_000, clock.steady_ms())
        await house.open("parent")
        await house.put("parent", ("a", b"50"))
        await house.tip("parent")
        assert house.fired == [("a", START + 50_000)]
        await house.put("parent", ("a", b""))
        for _ in range(2):
            await house.pipeline.cycle()
            shown_ms = watermark.aws_ms(clock.steady_ms())
            assert shown_ms is not None
            assert shown_ms <= clock.now_ms()


async def test_an_arrival_time_shows_that_the_hosts_clock_is_behind(tmp_path: Path) -> None:
    house = TimedHouse(tmp_path)
    async with house.life():
        await house.open("parent")
        await house.put("parent", ("a", b"1"), lag_ms=-3_600_000)
        await house.wait(1)
        await house.tip("parent")
        assert house.fired == [("a", START + 3_601_000)]


async def test_receipts_of_a_daemon_that_sends_no_arrival_times_follow_the_civil_time(tmp_path: Path) -> None:
    house = TimedHouse(tmp_path)
    async with house.life():
        house.parts = house.parts._replace(civil=house.timers.civil)
        house.pipeline.clock.step(3600)
        await house.open("parent")
        house.arrival_ms = lambda _: None  # type: ignore[assignment,method-assign,return-value]  # as V1 daemons
        await house.put("parent", ("a", b"5"))
        await house.wait(5)
        await house.tip("parent")
        assert house.fired == [("a", START + 5000)]


async def test_timers_are_cancelled_for_good(tmp_path: Path) -> None:
    house = TimedHouse(tmp_path)
    async with house.life():
        await house.open("parent")
        await house.put("parent", ("a", b"1"), ("b", b"1"), ("c", b"900"))

        async def cancel(**which: Any) -> int:
            return await house.pipeline.clock.drive(house.firing.cancel(TimerFilter(**which)))

        assert (await cancel(key="a"), await cancel(key="a")) == (1, 0)
        assert await cancel(due_before_ms=START + 800_000) == 1
        assert house.pipeline.state().stores["parent"].next_due_ms == START + 900_000, "it is durable"
        await house.wait(2)
        await house.tip("parent")
        assert house.fired == []


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


async def test_letters_of_records_and_of_timers_run_apart(tmp_path: Path) -> None:
    house = TimedHouse(tmp_path)
    async with house.life():
        await house.open("parent")
        Alarms.fails = True
        await house.put("parent", ("a", b"1"), ("b", b"never"))
        await house.wait(1)
        await house.tip("parent")
        Alarms.fails, Alarms.heals = False, True
        await house.want()
        assert await house.redrive() == 0
        await house.wait(1)
        await house.tip("parent")
        assert [key for key, _ in house.fired] == ["a", "a", "b"]


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


@pytest.mark.parametrize("ended", [False, True], ids=["of a shard that is read", "of an adopted store"])
async def test_timers_wait_for_a_flush_while_memory_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: bool
) -> None:
    monkeypatch.setattr(firing, "_MOST", 24)
    house = TimedHouse(tmp_path, family=True)
    async with house.life():
        await house.open("root")
        await house.put("root", *((f"k{number:02d}", b"9") for number in range(64)))
        if ended:
            await house.end("root")
        await house.wait(8)
        pipeline = house.pipeline
        pipeline.coordinator._backpressure.rules = replace(pipeline.rules, buffer_bytes=1)
        flushes = pipeline.coordinator.status().flushes
        await house.wait(1)
        if not ended:
            await house.tip("root")
        await house.wait(5)
        assert len(house.fired) == 64
        # Of 24, 24 and 16 timers: after each portion the buffer is full until a flush empties it.
        assert pipeline.coordinator.status().flushes == flushes + 3


async def test_timers_of_a_paused_shard_are_not_cancelled_and_the_operator_learns_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(firing, "_PATIENCE_SECONDS", 0.01)
    house = TimedHouse(tmp_path)
    async with house.life():
        await house.open("low")
        await house.put("low", (LOW_KEY, b"900"))
        await house.open("high")
        await house.put("high", (HIGH_KEY, b"900"))
        paused = house.pipeline.coordinator._backpressure.paused_shards
        paused.add("high")
        waiting = asyncio.ensure_future(house.put("high", (HIGH_KEY, b"800")))
        await house.wait(1)
        with pytest.raises(ExceptionGroup) as raised:
            await house.pipeline.clock.drive(house.firing.cancel(TimerFilter()))
        (error,) = raised.value.exceptions
        assert isinstance(error, HandlerError)
        assert "timers of high" in error.what
        assert error.did == "Not all of their timers were cancelled; together with others 1 were."
        paused.clear()
        await house.pipeline.coordinator._backpressure.release()
        await waiting
        assert await house.pipeline.clock.drive(house.firing.cancel(TimerFilter())) == 1


async def test_a_store_whose_handler_stops_answering_while_timers_are_cancelled_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(firing, "_PATIENCE_SECONDS", 0.01)
    monkeypatch.setattr(firing, "_CANCELLED", 1)
    house = TimedHouse(tmp_path)
    async with house.life():
        await house.open("parent")
        await house.put("parent", ("a", b"900"), ("b", b"900"))
        process, portions = house.runtime.process, []

        async def one_portion(delivery: Delivery) -> BatchOutcome:
            if portions:
                await asyncio.Event().wait()
            portions.append(delivery)
            return await process(delivery)

        monkeypatch.setattr(house.runtime, "process", one_portion)
        with pytest.raises(ExceptionGroup) as raised:
            await house.pipeline.clock.drive(house.firing.cancel(TimerFilter()))
        (error,) = raised.value.exceptions
        assert isinstance(error, HandlerError)
        assert "timers of parent" in error.what
        assert error.did == "Not all of their timers were cancelled; together with others 1 were."


# Families of DynamoDB Streams: shards that share a store.


@pytest.mark.parametrize(("lags", "keeps_up"), [("left", "right"), ("right", "left")])
async def test_a_family_holds_its_timers_while_any_of_its_shards_lags(
    tmp_path: Path, lags: str, keeps_up: str
) -> None:
    house = TimedHouse(tmp_path, family=True)
    async with house.life():
        await house.open("root")
        await house.put("root", ("a", b"5"))
        await house.end("root")
        await house.open("left", "root")
        await house.open("right", "root")
        await house.wait(5)
        await house.put(lags, ("b", b""), lag_ms=4000)
        await house.tip(keeps_up)
        assert (house.fired, house.timers.held) == ([], 1)
        await house.tip(lags)
        assert (house.fired, house.timers.held) == ([("a", START + 5000)], 0)


async def test_a_family_holds_its_timers_while_a_shard_of_it_has_no_connection(tmp_path: Path) -> None:
    house = TimedHouse(tmp_path, family=True)
    async with house.life():
        await house.open("root")
        await house.put("root", ("a", b"5"))
        await house.end("root")
        await house.open("left", "root")
        house.pipeline.coordinator.shards.add_listing({"right": ShardListing(("root",), None)})
        await house.wait(5)
        await house.tip("left")
        assert (house.fired, house.timers.held) == ([], 1)
        await house.open("right", "root")
        await house.tip("left", "right")
        assert house.fired == [("a", START + 5000)]


async def test_a_family_whose_shard_has_just_ended_waits_for_its_child(tmp_path: Path) -> None:
    house = TimedHouse(tmp_path, family=True)
    async with house.life():
        await house.open("root")
        await house.end("root")
        await house.open("left", "root")
        await house.open("right", "root")
        await house.put("right", ("a", b"5"))
        due_ms = house.arrival_ms(0) + 5000
        await house.wait(5)
        await house.end("right")
        await house.tip("left")
        assert (house.fired, house.timers.held) == ([], 1), (
            "a child of the shard that ended may have records of the key"
        )
        await house.tip("left")
        await house.tip("left")
        assert house.fired == [("a", due_ms)], "no child has come"


async def test_a_look_reads_one_field_of_each_shard_that_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table has a thousand partitions, each of which has a new shard every few hours."""
    read: list[str] = []

    class Ended(LineageNode):
        def __getattribute__(self, name: str) -> Any:
            read.append(name)
            return super().__getattribute__(name)

    house = TimedHouse(tmp_path)
    async with house.life():
        await house.open("parent")
        await house.put("parent", ("a", b"1"))
        await house.wait(3)
        nodes = house.pipeline.coordinator.lineage.nodes
        ended = {
            f"old-{n}": Ended(f"old-{n}", presence=Presence.ENDED, children={f"old-{n + 1}"})
            for n in range(9)
        }
        with monkeypatch.context() as patch:
            for name, node in ended.items():
                patch.setitem(nodes, name, node)
            read.clear()
            assert house.timers.due() == []
            assert (house.timers.held, read) == (1, ["presence"] * len(ended))


async def test_a_firing_waits_for_the_next_look_when_another_shard_of_the_family_has_come(
    tmp_path: Path,
) -> None:
    house = TimedHouse(tmp_path, family=True)
    async with house.life():
        await house.open("root")
        await house.put("root", ("a", b"1"))
        await house.wait(1)
        await house.end("root")
        await house.open("left", "root")
        (store,) = house.timers.stores()
        await house.open("right", "root")
        due = DueTimers(START + 1000, 1)
        assert await house.firing._portion(store, due) is None
        (store,) = house.timers.stores()
        assert await house.firing._portion(store, due) is not None
        assert house.fired == [("a", START + 1000)]


# Stores that no server has.


async def test_a_store_is_adopted_only_when_its_shards_child_would_have_come(
    tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    house = TimedHouse(tmp_path, family=True)
    house.pipeline.rules = replace(RULES, settle_time_ms=5000)
    async with house.life():
        await house.open("root")
        await house.put("root", ("a", b"1"))
        await house.wait(5)
        await house.end("root")
        await house.wait(4)
        assert named(logged, "store.adopted") == []
        house.pipeline.coordinator.shards.add_listing({"child": ShardListing(("root",), None)})
        await house.wait(20)
        assert (named(logged, "store.adopted"), house.fired) == ([], [])
        await house.open("child", "root")
        await house.tip("child")
        assert house.fired == [("a", START + 1000)]


async def test_the_timers_of_a_shard_that_ended_without_a_child_fire(
    tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    house = TimedHouse(tmp_path, family=True)
    async with house.life():
        await house.open("root")
        await house.put("root", ("a", b"5"), ("b", b"7"))
        await house.end("root")
        await house.wait(3)
        assert named(logged, "store.adopted")
        await house.wait(3)
        assert house.fired == [("a", START + 5000)]
        await house.wait(6)
        assert house.fired == house.rows() == [("a", START + 5000), ("b", START + 7000)]
        assert house.parts.claims.current == {}
        state = house.pipeline.state()
        assert state.shards["root"].owner is None
        assert state.stores["root"].next_due_ms is None
    assert len(named(logged, "store.adopted")) == 1


async def test_the_next_server_adopts_what_the_last_one_left(tmp_path: Path) -> None:
    house = TimedHouse(tmp_path, family=True)
    async with house.life():
        await house.open("root")
        await house.put("root", ("a", b"60"))
        await house.end("root")
    async with house.life():
        await house.wait(70)
        assert house.fired == house.rows() == [("a", START + 60_000)]


async def test_an_adopted_store_holds_no_window(tmp_path: Path) -> None:
    house = TimedHouse(tmp_path, family=True)
    async with house.life():
        await house.open("root")
        await house.put("root", ("a", b"1"), ("b", b"900"))
        await house.end("root")
        await house.wait(20)
        status = house.pipeline.coordinator.status()
        assert (status.reason, status.stream_ended, status.windows_open) == ("ended", True, 0)


async def test_a_child_that_comes_after_all_takes_the_store_from_its_adopter(tmp_path: Path) -> None:
    house = TimedHouse(tmp_path, family=True)
    async with house.life():
        await house.open("root")
        await house.put("root", ("a", b"60"))
        await house.end("root")
        await house.wait(5)
        assert set(house.parts.claims.current) == {"root"}
        await house.open("child", "root")
        await house.wait(5)
        assert set(house.parts.claims.current) == {"child"}
        await house.put("child", ("a", b"cancel"))
        await house.wait(60)
        await house.tip("child")
        assert house.fired == []


async def test_a_connection_of_the_shard_takes_it_from_its_adopter(tmp_path: Path) -> None:
    house = TimedHouse(tmp_path, family=True)
    async with house.life():
        await house.open("root")
        await house.put("root", ("a", b"60"))
        await house.end("root")
        await house.wait(5)
        await house.open("root")
        await house.wait(5)
        await house.end("root")
        await house.wait(90)
        assert house.fired == house.rows() == [("a", START + 60_000)]
        assert house.parts.claims.current == {}


async def test_no_shard_of_a_family_goes_on_from_a_firing_that_was_not_accepted(tmp_path: Path) -> None:
    house = TimedHouse(tmp_path, family=True)
    async with house.life():
        await house.open("root")
        await house.put("root", ("a", b"5"))
        await house.end("root")
        left = await house.open("left", "root")
        await house.open("right", "root")
        await house.wait(5)
        process, batches = house.runtime.process, []

        async def evicted(delivery: Delivery) -> BatchOutcome:
            outcome = await process(delivery)
            house.runtime.process = process  # type: ignore[method-assign]  # the test's eyes
            batches.append(asyncio.ensure_future(house.put("right", ("a", b"alarms?"))))
            await asyncio.sleep(0)
            left._claim.evict()
            await asyncio.sleep(1)
            return outcome

        house.runtime.process = evicted  # type: ignore[method-assign]  # see above
        await house.tip("left", "right")
        await batches[0]
        await house.tip("left", "right")
        assert house.fired == [("a", START + 5000)] * 2
        await house.wait(2)
        assert house.rows() == [("a", 0), ("a", START + 5000)]


async def test_a_connection_that_opens_the_shard_meanwhile_keeps_it(tmp_path: Path) -> None:
    house = TimedHouse(tmp_path, family=True)
    async with house.life():
        await house.open("root")
        await house.put("root", ("a", b"1"))
        await house.end("root")
        adopt = house.timers.adopt

        async def slow(store_id: str) -> Any:
            session = await adopt(store_id)
            house.timers.adopt = adopt
            opening.append(asyncio.ensure_future(house.open("root")))
            await asyncio.sleep(0)
            return session

        opening: list[Any] = []
        house.timers.adopt = slow
        await house.wait(5)
        consumer = await opening[0]
        assert consumer.alive
        await house.tip("root")
        assert house.fired == [("a", START + 1000)]


async def test_a_claim_of_the_shard_keeps_adopters_away(tmp_path: Path, logged: list[dict[str, Any]]) -> None:
    house = TimedHouse(tmp_path, family=True)
    async with house.life():
        await house.open("root")
        await house.put("root", ("a", b"1"))
        await house.end("root")
        claim = house.parts.claims.take("root")
        await house.wait(5)
        assert named(logged, "store.adopted") == []
        house.parts.claims.release("root", claim)
        await house.wait(2)
        assert named(logged, "store.adopted")


async def test_after_a_split_each_timer_fires_on_the_shard_that_has_its_key_now(tmp_path: Path) -> None:
    house = TimedHouse(tmp_path)
    async with house.life():
        await house.open("parent")
        await house.put("parent", (LOW_KEY, b"9"), (HIGH_KEY, b"9"))
        await house.end("parent")
        await house.open("low", "parent")
        await house.wait(9)
        await house.tip("low")
        assert house.fired == [(LOW_KEY, START + 9000)]
        await house.open("high", "parent")
        await house.tip("high")
        assert house.fired == [(LOW_KEY, START + 9000), (HIGH_KEY, START + 9000)]
        await house.wait(2)
        assert house.rows() == sorted(house.fired)


async def test_another_server_adopts_the_store_once_the_one_that_ended_the_shard_is_dead(
    tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    one, two = TimedHouse(tmp_path, family=True), TimedHouse(tmp_path, family=True)
    two.pipeline.server_id, two.pipeline.clock = "two", one.pipeline.clock
    one.pipeline.rules = two.pipeline.rules = replace(QUICK, settle_time_ms=20_000)
    async with two.life():
        async with one.life():
            await one.open("root")
            await one.put("root", ("a", b"40"))
            await one.end("root")
            await one.wait(15)
        await two.wait(3)
        assert named(logged, "store.adopted") == [], (
            "the server that ended the shard may still fire its timers"
        )
        await two.wait(40)
        assert two.fired == two.rows() == [("a", START + 40_000)]
    assert len(named(logged, "store.adopted")) == 1


async def test_a_store_that_cannot_be_adopted_is_tried_again_after_a_while(tmp_path: Path) -> None:
    house = TimedHouse(tmp_path, family=True)
    async with house.life():
        await house.open("root")
        await house.put("root", ("a", b"1"))
        await house.end("root")
        adopt, tried = house.timers.adopt, []

        async def refused(store_id: str) -> None:
            tried.append(store_id)

        house.timers.adopt = refused
        await house.wait(14)
        assert tried == ["root"] * 3
        house.timers.adopt = adopt
        await house.wait(6)
        assert house.fired == [("a", START + 1000)]
