"""What any Ledger must do with the life of a function: what is wanted, its versions, and the end of an undeploy."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from mldserver.ledger.contract import (
    CodeVersion,
    Flush,
    FunctionLife,
    ShapeChange,
    StateFile,
    StoreUpdate,
    Wanted,
)
from mldserver.records import Sequence
from mldserver.stores import KeyRange, StoreClaim
from tests.ledger.samples import letter, move, opened

if TYPE_CHECKING:
    from tests.ledger.samples import Factory

WHOLE = KeyRange(0, 99)
ONE = CodeVersion("1", "_mldserver/code/one.zip", 5)
TWO = CodeVersion("2", "_mldserver/code/two.zip", 6)
PAUSED = FunctionLife(Wanted.PAUSED, ONE, TWO, other_is_previous=True)
UNDEPLOYED = FunctionLife(Wanted.UNDEPLOYED)
SHAPE = ShapeChange("f1", "{}")


async def test_the_next_server_finds_what_is_wanted(ledger_factory: Factory) -> None:
    async with opened(ledger_factory) as (one, found):
        assert found.life == FunctionLife()
        assert await one.change_life(FunctionLife(), PAUSED)
        assert (await one.peek()).life == PAUSED
    async with opened(ledger_factory, "two") as (two, found):
        assert found.life == PAUSED
        staged = FunctionLife(Wanted.DEPLOYED, ONE, TWO, keep=True)
        assert await two.change_life(PAUSED, staged)
        await two.open_shard("a")
    async with opened(ledger_factory, "three") as (three, found):
        assert found.life == staged
        assert await three.change_life(staged, FunctionLife())
    async with opened(ledger_factory, "four") as (_, found):
        assert found.life == FunctionLife()


async def test_of_two_changes_at_once_one_counts(ledger_factory: Factory) -> None:
    async with opened(ledger_factory) as (one, _), opened(ledger_factory, "two") as (two, _):
        assert await one.change_life(FunctionLife(), PAUSED)
        assert not await two.change_life(FunctionLife(), UNDEPLOYED)
        assert (await two.peek()).life == PAUSED


async def test_an_undeploy_drains_until_a_deployed_server_declares_its_shape(ledger_factory: Factory) -> None:
    async with opened(ledger_factory) as (one, _):
        await one.change_life(FunctionLife(), UNDEPLOYED)
        assert (await one.peek()).draining
        await one.change_life(UNDEPLOYED, replace(UNDEPLOYED, other=TWO))
        assert (await one.peek()).draining, "a version is staged meanwhile"
        assert await one.declare(SHAPE, version=(await one.peek()).version)
        assert (await one.peek()).draining, "a server that started before the undeploy drains too"
        await one.leave()
    async with opened(ledger_factory, "two") as (two, _):
        assert await two.change_life(replace(UNDEPLOYED, other=TWO), FunctionLife())
        assert (await two.peek()).draining, "no server runs: the first one may still change the shape"
        assert await two.declare(SHAPE, version=(await two.peek()).version)
        assert not (await two.peek()).draining


async def test_a_deploy_ends_the_drain_of_an_undeploy_where_servers_still_run(
    ledger_factory: Factory,
) -> None:
    async with opened(ledger_factory) as (one, _):
        assert await one.declare(SHAPE, version=(await one.peek()).version)
        await one.change_life(FunctionLife(), UNDEPLOYED)
        await one.change_life(UNDEPLOYED, FunctionLife())
        assert not (await one.peek()).draining
        await one.drain()
        await one.change_life(FunctionLife(), PAUSED)
        assert (await one.peek()).draining, "that was another drain"


async def test_the_end_of_an_undeploy_forgets_all_but_where_it_was(ledger_factory: Factory) -> None:
    async with opened(ledger_factory) as (one, _):
        await one.open_shard("b")
        shard = await one.open_shard("a", store=StoreClaim(WHOLE))
        flush = Flush(
            (move("a", shard.epoch, Sequence(7)),),
            stores=(StoreUpdate("a", 0, ("a",)),),
            state_file=StateFile("f", {"a": (WHOLE,)}, 1, 9),
        )
        assert (await one.register(flush)).registered
        await one.add_letters(tuple(letter(number) for number in range(1, 100)))
        assert not await one.forget(), "it is deployed"
        await one.change_life(FunctionLife(), replace(UNDEPLOYED, keep=True))
        assert not await one.forget(), "it keeps all"
        assert len(await one.letters()) == 99
        await one.change_life(replace(UNDEPLOYED, keep=True), UNDEPLOYED)
        assert not await one.forget(), "a server has shards"
        assert len(await one.letters()) == 99
        for each in (await one.peek()).shards.values():
            await one.release_shard(each.shard_id, each.epoch)
        assert await one.forget()
        state = await one.peek()
        assert (state.dead_letters, state.stores, await one.letters()) == (0, {}, ())
        assert not any(file.needed for file in state.state_files.values())
        assert {name: each.position for name, each in state.shards.items()} == {"a": Sequence(7), "b": None}
        assert await one.forget(), "it may be repeated"
        assert await one.change_life(UNDEPLOYED, FunctionLife())
        again = await one.open_shard("a", store=StoreClaim(WHOLE))
        assert (again.position, again.gap_accepted) == (Sequence(7), True)
        assert again.epoch > shard.epoch


async def test_a_gap_that_was_accepted_is_none_for_the_next_server_either(ledger_factory: Factory) -> None:
    async with opened(ledger_factory) as (one, _):
        shard = await one.open_shard("a")
        assert (await one.register(Flush((move("a", shard.epoch, Sequence(7)),)))).registered
        assert await one.accept_gap("a")
        again = await one.open_shard("a", start=Sequence(9))
        assert (again.position, again.gap_accepted) == (Sequence(7), True)
    async with opened(ledger_factory, "two") as (two, _):
        after = await two.open_shard("a", start=Sequence(9))
        assert (after.position, after.gap_accepted) == (Sequence(9), False)
        assert await two.accept_gap("a")
        await two.open_shard("a", start=Sequence(8))
        assert (await two.open_shard("a")).position == Sequence(9), "no position goes down"
        assert await two.accept_gap("a")
        await two.end_shards(frozenset({"a"}))
        await two.open_shard("a", start=Sequence(11))
        assert (await two.open_shard("a")).position == Sequence(9), (
            "nothing is left to skip in an ended shard"
        )


async def test_a_reset_takes_an_accepted_gap_back(ledger_factory: Factory) -> None:
    async with opened(ledger_factory) as (one, _):
        shard = await one.open_shard("a")
        await one.accept_gap("a")
        await one.release_shard("a", shard.epoch)
        assert await one.reset(frozenset({"a"})) == {"a"}
        assert not (await one.open_shard("a")).gap_accepted
