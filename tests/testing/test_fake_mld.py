from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
from support.processes import held_port

from mldserver.testing import (
    DaemonHangs,
    FakeMLD,
    FakeStream,
    Form,
    Habits,
    LeaseTable,
    NoServer,
    VirtualClock,
)
from mldserver.testing.fake_stream import SHARD_END

if TYPE_CHECKING:
    from conftest import TinyServer

QUICK = Habits(seed=1, max_records=20, idle_seconds=0.002)


def filled(shards: int = 2, records: int = 200, *, seed: int = 1) -> FakeStream:
    stream = FakeStream(shards, seed=seed)
    for n in range(records):
        stream.put(b"%d" % n, f"key-{n}")
    return stream


def expected(stream: FakeStream, *, raw: bool = False) -> dict[str, list[tuple[str, int]]]:
    return {
        shard.id: [(r.sequence_number, r.sub_sequence_number) for r in (shard.raw if raw else shard.records)]
        for shard in stream.shards.values()
        if shard.records
    }


def distinct(received: dict[str, list[tuple[str, int]]]) -> dict[str, list[tuple[str, int]]]:
    return {
        shard: sorted(set(rows), key=lambda row: (int(row[0]), row[1])) for shard, rows in received.items()
    }


def actions(server: TinyServer, shard: str) -> list[str]:
    return [action for name, action in server.seen if name == shard]


@pytest.mark.parametrize("form", list(Form))
async def test_every_form_delivers_every_record_once_and_checkpoints_every_end(
    tiny_server: TinyServer, form: Form
) -> None:
    stream = filled()
    stream.put_aggregate([("a", b"0"), ("b", b"1")], shard_id=stream.open_shards[0])
    stream.end()
    mld = FakeMLD(stream, tiny_server.address, habits=Habits(form=form, max_records=30, idle_seconds=0.002))
    assert await mld.run() == 0
    assert tiny_server.received == expected(stream, raw=form is Form.V1)
    assert set(mld.checkpoints.values()) == {SHARD_END}
    assert mld.violations == []
    assert mld.finished
    assert mld.batches_sent > 5
    directions = {line.direction for line in mld.history}
    assert directions == {"in", "out"}


async def test_children_start_only_after_every_parents_end(tiny_server: TinyServer) -> None:
    stream = filled(1, 50)
    left, right = stream.split("shardId-000000000000")
    for n in range(50):
        stream.put(b"", f"child-{n}")
    last = stream.merge(left, right)
    stream.put(b"", "last")
    stream.end()
    mld = FakeMLD(stream, tiny_server.address, habits=QUICK)
    assert await mld.run() == 0
    assert tiny_server.received == expected(stream)
    ends = [n for n, (_, action) in enumerate(tiny_server.seen) if action == "shardEnded"]
    starts = {
        name: n for n, (name, action) in reversed(list(enumerate(tiny_server.seen))) if action == "initialize"
    }
    assert ends[0] < min(starts[left], starts[right])
    assert ends[2] < starts[last]


async def test_live_splits_are_picked_up(tiny_server: TinyServer) -> None:
    stream = filled(1, 10)

    def split_then_end() -> None:
        stream.split("shardId-000000000000")
        stream.put(b"", "late")
        stream.end()

    mld = FakeMLD(stream, tiny_server.address, habits=QUICK)
    mld.at(10, split_then_end)
    assert await mld.run() == 0
    assert len(mld.checkpoints) == 3


async def test_an_end_without_checkpoint_blocks_the_children_until_a_restart(
    tiny_server: TinyServer, virtual_clock: VirtualClock
) -> None:
    stream = filled(1, 5)
    left, _ = stream.split("shardId-000000000000")
    stream.end()
    mld = FakeMLD(stream, tiny_server.address, habits=QUICK, supervised=True, clock=virtual_clock)
    blunders = [b'{"action":"status","responseFor":"shardEnded"}\n']

    def answer(_shard: str, message: dict[str, Any]) -> bytes | None:
        return blunders.pop() if message["action"] == "shardEnded" and blunders else None

    tiny_server.answer = answer
    async with asyncio.TaskGroup() as group:
        run = group.create_task(mld.run())
        while mld.active_shards or not mld.violations:
            await virtual_clock.advance(0.01)
        await virtual_clock.advance(10)
        assert left not in mld.checkpoints
        mld.kill()
        while not run.done():
            await virtual_clock.advance(0.01)
    assert run.result() == 0
    assert [ended.code for ended in mld.exits] == [137, 0]


async def test_a_crash_delivers_again_from_the_last_checkpoint_with_other_borders(
    tiny_server: TinyServer,
) -> None:
    stream = filled(2, 400)
    stream.end()
    mld = FakeMLD(stream, tiny_server.address, habits=QUICK, supervised=True, backoff_seconds=0.001)
    mld.at(150, mld.kill)
    tiny_server.greedy = False
    assert await mld.run() == 0
    assert [ended.code for ended in mld.exits] == [137, 0]
    assert mld.records_sent > 400
    assert distinct(tiny_server.received) == expected(stream)
    batches = [
        [line.text for line in mld.history if line.life == life and '"records":[{' in line.text]
        for life in (1, 2)
    ]
    assert batches[0]
    assert not set(batches[0]) <= set(batches[1])


async def test_a_dropped_connection_takes_the_whole_jvm_down(tiny_server: TinyServer) -> None:
    stream = filled(2, 400)
    stream.end()
    mld = FakeMLD(stream, tiny_server.address, habits=QUICK)
    mld.at(50, lambda: mld.drop(mld.active_shards[0]))
    assert await mld.run() == 1
    assert "EOF" in mld.exits[0].reason
    assert mld.active_shards == ()


async def test_at_a_closed_port_it_says_where_it_found_no_server() -> None:
    with held_port() as nobodys:
        mld = FakeMLD(filled(), f"127.0.0.1:{nobodys}", habits=QUICK)
        with pytest.raises(NoServer, match=f"found no server at 127.0.0.1:{nobodys}"):
            await mld.run()


async def test_a_server_that_is_gone_later_makes_the_jvm_exit(tiny_server: TinyServer) -> None:
    stream = filled(1, 5)
    stream.split(stream.open_shards[0])
    mld = FakeMLD(stream, tiny_server.address, habits=QUICK)
    with held_port() as nobodys:
        mld.at(5, lambda: setattr(mld, "address", f"127.0.0.1:{nobodys}"))
        assert await mld.run() == 1
    assert "found no server" in mld.exits[0].reason


@pytest.mark.parametrize("form", list(Form))
async def test_a_lost_lease_refuses_checkpoints_at_once_and_comes_back_on_a_new_connection(
    tiny_server: TinyServer, form: Form
) -> None:
    stream = filled(1, 100)
    stream.end()
    shard = "shardId-000000000000"
    mld = FakeMLD(stream, tiny_server.address, habits=Habits(form=form, max_records=20, idle_seconds=0.002))
    mld.at(30, lambda: mld.lose_lease(shard, back_after_seconds=0.01))
    assert await mld.run() == 0
    assert tiny_server.errors == ["ShutdownException"]
    assert actions(tiny_server, shard).count("initialize") == 2
    assert ("leaseLost" if form is Form.KCL3 else "shutdown") in actions(tiny_server, shard)
    assert distinct(tiny_server.received) == expected(stream)
    assert mld.records_sent > 100
    assert mld.violations == []


async def test_a_graceful_hand_over_asks_for_a_last_checkpoint_first(tiny_server: TinyServer) -> None:
    stream = filled(1, 100)
    stream.end()
    shard = "shardId-000000000000"
    mld = FakeMLD(stream, tiny_server.address, habits=QUICK)
    mld.at(30, lambda: mld.lose_lease(shard, graceful=True, back_after_seconds=0.01))
    assert await mld.run() == 0
    seen = actions(tiny_server, shard)
    at = seen.index("shutdownRequested")
    assert seen[at : at + 3] == ["shutdownRequested", "leaseLost", "initialize"]
    assert tiny_server.errors == []
    assert tiny_server.received == expected(stream)


async def test_throttled_checkpoints_are_refused_and_the_rest_goes_on(tiny_server: TinyServer) -> None:
    stream = filled(2, 100)
    stream.end()
    leases = LeaseTable(seed=4, throttle=0.3)
    mld = FakeMLD(stream, tiny_server.address, habits=QUICK, leases=leases)
    leases.refuse(stream.shards["shardId-000000000000"].id, times=2)
    assert await mld.run() == 0
    assert len(tiny_server.errors) >= 2
    assert set(tiny_server.errors) == {"ThrottlingException"}
    assert leases.refused["ThrottlingException"] == len(tiny_server.errors)
    assert mld.violations == []


@pytest.mark.parametrize("form", list(Form))
async def test_sigterm_asks_every_shard_and_exits_with_143(tiny_server: TinyServer, form: Form) -> None:
    stream = filled(2, 100)
    mld = FakeMLD(stream, tiny_server.address, habits=Habits(form=form, max_records=20, idle_seconds=0.002))
    mld.at(100, mld.terminate)
    assert await mld.run() == 143
    for shard in stream.shards:
        wanted = {
            Form.V1: ["shutdown"],
            Form.V2: ["shutdownRequested", "shutdown"],
            Form.KCL3: ["shutdownRequested", "leaseLost"],
        }[form]
        assert actions(tiny_server, shard)[-len(wanted) :] == wanted
    assert mld.violations == []


async def test_sigterm_without_grace_ends_with_eof_only(tiny_server: TinyServer) -> None:
    stream = filled(2, 100)
    mld = FakeMLD(stream, tiny_server.address, habits=QUICK, shutdown_grace_seconds=0)
    mld.at(50, mld.terminate)
    assert await mld.run() == 143
    assert "shutdownRequested" not in [action for _, action in tiny_server.seen]


@pytest.mark.parametrize("call_with_empty", [True, False])
async def test_idle_shards_get_empty_batches_unless_told_otherwise(
    tiny_server: TinyServer, virtual_clock: VirtualClock, call_with_empty: bool
) -> None:
    stream = FakeStream(1)
    habits = Habits(idle_seconds=0.01, call_with_empty=call_with_empty)
    mld = FakeMLD(stream, tiny_server.address, habits=habits, clock=virtual_clock)
    async with asyncio.TaskGroup() as group:
        run = group.create_task(mld.run())
        while len(mld.history) < 2:  # initialize and its answer
            await virtual_clock.advance(0.01)
        await virtual_clock.advance(1)
        stream.end()
        while not run.done():
            await virtual_clock.advance(0.01)
    batches = [line.text for line in mld.history if line.text.startswith('{"action":"processRecords"')]
    assert bool(batches) is call_with_empty
    assert all(json.loads(batch)["millisBehindLatest"] == 0 for batch in batches)


async def test_it_hangs_where_the_java_hangs_and_says_why(tiny_server: TinyServer) -> None:
    tiny_server.answer = lambda _shard, message: (
        b'{"action":"status","responseFor":"processRecords","took":3}\n'
        if message["action"] == "processRecords"
        else None
    )
    mld = FakeMLD(filled(1, 5), tiny_server.address, habits=QUICK)
    with pytest.raises(DaemonHangs, match=r'no property took.*"took":3'):
        await mld.run()
    assert len(mld.violations) == 1


@pytest.mark.parametrize("stays_open", [True, False])
async def test_a_server_that_stays_open_after_the_ending_is_a_violation(
    tiny_server: TinyServer, virtual_clock: VirtualClock, stays_open: bool
) -> None:
    tiny_server.close_after_ending = False
    tiny_server.stay_open = asyncio.Event() if stays_open else None
    stream = FakeStream(1)
    stream.end()
    habits = Habits(idle_seconds=0.01, close_patience_seconds=30)
    mld = FakeMLD(stream, tiny_server.address, habits=habits, clock=virtual_clock)
    assert await virtual_clock.drive(mld.run(), step=0.2 if stays_open else 0.001) == 0
    assert ["did not close within 30 s" in text for text in mld.violations] == [True] * stays_open
    if tiny_server.stay_open:
        tiny_server.stay_open.set()


async def test_unix_sockets_work_too(tiny_server: TinyServer, tmp_path: Any) -> None:
    path = tmp_path / "s"
    listener = await asyncio.start_unix_server(tiny_server.serve, path, limit=1 << 26)
    stream = filled(1, 10)
    stream.end()
    try:
        assert await FakeMLD(stream, f"unix:{path}", habits=QUICK).run() == 0
    finally:
        listener.close()
        await listener.wait_closed()


async def test_without_history_nothing_is_kept(tiny_server: TinyServer) -> None:
    stream = filled(1, 10)
    stream.end()
    mld = FakeMLD(stream, tiny_server.address, habits=QUICK, keep_history=False)
    assert await mld.run() == 0
    assert mld.history == []


async def test_the_same_seed_cuts_the_same_batches(tiny_server: TinyServer) -> None:
    cuts = []
    for _ in range(2):
        stream = filled(1, 100)
        stream.end()
        mld = FakeMLD(stream, tiny_server.address, habits=QUICK)
        await mld.run()
        cuts.append([line.text for line in mld.history if line.direction == "in"])
    assert cuts[0] == cuts[1]


async def test_a_granted_lease_that_nobody_took_stays_where_it_is(virtual_clock: VirtualClock) -> None:
    calm = Habits(idle_seconds=1)
    mld = FakeMLD(filled(1, 1), "127.0.0.1:1", habits=calm, clock=virtual_clock, supervised=True)
    mld.lose_lease("shardId-000000000000", back_after_seconds=60)
    async with asyncio.TaskGroup() as group:
        run = group.create_task(mld.run())
        await virtual_clock.advance(50)
        assert mld.exits == []
        await virtual_clock.advance(20)
        assert {ended.code for ended in mld.exits} == {1}  # granted, and no server there
        run.cancel()


async def test_a_grace_that_is_over_ends_a_server_that_does_not_answer(
    tiny_server: TinyServer, virtual_clock: VirtualClock
) -> None:
    tiny_server.answer = lambda _shard, message: b"" if message["action"] == "shutdownRequested" else None
    mld = FakeMLD(
        filled(1, 5), tiny_server.address, habits=QUICK, clock=virtual_clock, shutdown_grace_seconds=7
    )
    mld.at(5, mld.terminate)
    assert await virtual_clock.drive(mld.run(), step=0.1) == 143
    assert mld.exits[0].reason == "SIGTERM, its grace over"


async def test_as_silent_as_the_java_it_waits_when_told_not_to_raise(
    tiny_server: TinyServer, virtual_clock: VirtualClock
) -> None:
    tiny_server.answer = lambda _shard, message: b"oops\n" if message["action"] == "processRecords" else None
    mld = FakeMLD(
        filled(1, 5),
        tiny_server.address,
        habits=Habits(idle_seconds=0.01, raise_on_hang=False),
        clock=virtual_clock,
    )
    async with asyncio.TaskGroup() as group:
        run = group.create_task(mld.run())
        while not mld.violations:
            await virtual_clock.advance(0.01)
        await virtual_clock.advance(20)
        assert not run.done()
        mld.kill()
    assert run.result() == 137


async def test_a_shard_whose_start_falls_into_the_death_of_the_jvm_starts_again_with_the_next_one(
    tiny_server: TinyServer,
) -> None:
    stream = filled(1, 10)
    stream.end()
    mld = FakeMLD(stream, tiny_server.address, habits=QUICK, supervised=True, backoff_seconds=0.0)

    class Dying(asyncio.TaskGroup):
        def create_task(self, *args: Any, **kwargs: Any) -> asyncio.Task[Any]:
            task = super().create_task(*args, **kwargs)
            if mld.life == 1 and kwargs.get("name"):
                # Another shard's connection failed in the same turn of the loop: this task never gets to run.
                mld.kill()
                task.cancel()
            return task

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mldserver.testing.fake_mld.asyncio.TaskGroup", Dying)
        async with asyncio.timeout(800):
            assert await mld.run() == 0
    assert mld.exits[0].reason == "killed"
    assert tiny_server.received == expected(stream)


@pytest.mark.parametrize("turns", range(6))
async def test_a_test_that_gives_up_ends_it_even_as_the_jvm_dies(tiny_server: TinyServer, turns: int) -> None:
    mld = FakeMLD(filled(), tiny_server.address, supervised=True, backoff_seconds=0.0)
    running = asyncio.create_task(mld.run())
    while not mld.records_sent:  # noqa: ASYNC110  # there is no event for it
        await asyncio.sleep(0.001)
    mld.kill()
    for _ in range(turns):
        await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait({running}, timeout=120)
    assert running.cancelled()


async def test_a_shard_ends_only_when_its_last_record_has_arrived(
    tiny_server: TinyServer, virtual_clock: VirtualClock
) -> None:
    stream = FakeStream(1)
    began = virtual_clock.steady_ms()
    for at in (0, 60_000):
        stream.put(b"x", "k", arrival_ms=at)
    stream.end()
    stream.tip_ms = lambda: virtual_clock.steady_ms() - began
    mld = FakeMLD(stream, tiny_server.address, habits=Habits(idle_seconds=1), clock=virtual_clock)
    assert await virtual_clock.drive(mld.run(), step=1) == 0
    assert tiny_server.received == expected(stream)
    assert virtual_clock.steady_ms() - began >= 60_000
