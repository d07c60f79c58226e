"""What any Ledger must do with keyed state: one server registers it, the next one finds it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from mldserver.errors import InternalError, PeerError
from mldserver.ledger.contract import Flush, ShardState, StateFile, StoreState, StoreUpdate
from mldserver.ledger.operations import Ledger
from mldserver.records import Sequence
from mldserver.stores import KeyRange, StoreClaim
from tests.ledger.samples import held, move, opened, peeked

if TYPE_CHECKING:
    from tests.ledger.samples import Factory

WHOLE, LOW, HIGH = KeyRange(0, 2**127), KeyRange(0, 99), KeyRange(100, 2**127)


def state(path: str, store: str, *ranges: KeyRange) -> StateFile:
    return StateFile(path, {store: ranges}, rows=3, bytes=300)


def change(shard: ShardState, serial: int, path: str, key_range: KeyRange) -> Flush:
    """Return a flush that moves a shard's position to the serial, and changes its store."""
    previous = Sequence(serial) if serial else None
    fence = move(shard.shard_id, shard.epoch, Sequence(serial + 1), previous=previous)
    update = StoreUpdate(shard.store, serial, (shard.shard_id,))
    return Flush((fence,), stores=(update,), state_file=state(path, shard.store, key_range))


async def keep(ledger: Ledger) -> None:
    """Register two files of a shard with state, and join them."""
    shard = await ledger.open_shard("a", store=StoreClaim(WHOLE))
    for serial, path in enumerate("fg"):
        assert (await ledger.register(change(shard, serial, path, WHOLE))).registered
    files = (await ledger.peek()).state_files
    seen = {path: files[path].needed for path in "fg"}
    assert await ledger.compact_state(state("joined", "a", WHOLE), seen)
    await ledger.forget_state_files(("f", "joined"))


async def test_the_next_server_finds_what_was_registered(ledger_factory: Factory) -> None:
    async with opened(ledger_factory) as (one, _):
        await keep(one)
        seen = await one.peek()
    async with opened(ledger_factory, "two") as (two, found):
        assert found.stores == seen.stores == {"a": StoreState("a", 2, *WHOLE)}
        assert found.state_files == seen.state_files
        assert {path: bool(file.needed) for path, file in found.state_files.items()} == {
            "g": False,
            "joined": True,
        }
        assert found.paths() == {"g", "joined"}
        assert (await two.open_shard("a", store=StoreClaim(WHOLE))).store == "a"


async def test_children_divide_the_state_of_their_parent_once(ledger_factory: Factory) -> None:
    async with opened(ledger_factory) as (one, _):
        await keep(one)
        for child, part in (("low", LOW), ("high", HIGH), ("low", LOW)):
            await one.open_shard(child, ("a",), store=StoreClaim(part))
        with pytest.raises(PeerError, match="another range of keys"):
            await one.open_shard("low", ("a",), store=StoreClaim(HIGH))
    state_now = await held(ledger_factory)
    assert state_now.state_files["joined"].needed == {"low": (LOW,), "high": (HIGH,)}
    assert [state_now.stores[each].serial for each in ("low", "high")] == [3, 3]
    assert (state_now.stores["a"].closed, state_now.shards["low"].epoch) == (True, 2)


async def test_of_two_servers_that_disagree_the_later_one_registers_state(ledger_factory: Factory) -> None:
    async with opened(ledger_factory) as (one, _), opened(ledger_factory, "two") as (two, _):
        before = await one.open_shard("a", store=StoreClaim(WHOLE))
        after = await two.open_shard("a", store=StoreClaim(WHOLE))
        assert (await one.register(change(before, 0, "f", WHOLE))).lost_shards == {"a"}
        assert (await two.register(change(after, 0, "g", WHOLE))).registered
        assert (await two.register(change(after, 0, "h", WHOLE))).lost_shards == {"a"}, "an answer was lost"
        with pytest.raises(InternalError, match="not for exactly its stores"):
            await two.register(change(after, 1, "h", LOW))
    assert set((await held(ledger_factory)).state_files) == {"g"}


async def test_the_next_server_adopts_a_store_with_timers_whose_shard_has_ended(
    ledger_factory: Factory,
) -> None:
    async with opened(ledger_factory) as (one, _):
        shard = await one.open_shard("a", store=StoreClaim(WHOLE))
        fence = move("a", shard.epoch, None, ended=True)
        timers = (StoreUpdate("a", 0, ("a",), next_due_ms=70),)
        ends = Flush((fence,), stores=timers, state_file=state("f", "a", WHOLE))
        assert (await one.register(ends)).registered
        async with opened(ledger_factory, "two") as (two, found):
            assert found.stores == {"a": StoreState("a", 1, *WHOLE, next_due_ms=70)}
            assert await two.adopt_store("a") is None
            await one.leave()
            adopted = await two.adopt_store("a")
            assert (await two.peek()).shards["a"] == adopted
        assert adopted is not None
        assert (adopted.epoch, adopted.owner) == (2, "two")


async def test_a_tool_forgets_state_only_when_it_is_told_to(ledger_factory: Factory) -> None:
    async with opened(ledger_factory) as (one, _):
        await keep(one)
        await one.release_shard("a", 1)
    async with peeked(ledger_factory) as (tool, _):
        assert await tool.reset(frozenset("a")) == frozenset()
        assert await tool.forget_shards(frozenset("a")) == frozenset()
        assert await tool.reset(frozenset("a"), forget_state=True) == {"a"}
        found = await tool.peek()
    assert (found.stores, found.shards["a"].store) == ({}, "")
    assert not any(file.needed for file in found.state_files.values())


async def test_a_pipeline_keeps_its_state_under_a_new_name(ledger_factory: Factory) -> None:
    async with opened(ledger_factory) as (one, _):
        await keep(one)
        seen = await one.peek()
        await one.leave()
    renamed = ledger_factory("one", pipeline="q", rename_from="p")
    found = await renamed.open()
    assert (found.stores, found.state_files) == (seen.stores, seen.state_files)
    assert (await renamed.open_shard("a", store=StoreClaim(WHOLE))).store == "a"
    await renamed.close()
