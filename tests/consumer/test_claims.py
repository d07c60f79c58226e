"""Which connection owns a shard."""

from __future__ import annotations

import asyncio

import pytest

from mldserver.consumer import claims as claims_module
from mldserver.consumer.claims import Claim, Claims, Superseded, visiting_all

pytestmark = pytest.mark.quick


async def test_a_claim_is_current_until_the_next_one() -> None:
    claims = Claims()
    first = claims.take("s")
    second = claims.take("s")
    assert (first.current, second.current) == (False, True)
    with pytest.raises(Superseded):
        async with first.work():
            raise AssertionError("work of a claim that is not current")


async def test_claims_of_different_shards_know_nothing_of_each_other() -> None:
    claims = Claims()
    first = claims.take("a")
    claims.take("b")
    assert first.current


async def test_a_new_claim_cancels_the_work_and_waits_for_its_end() -> None:
    claims = Claims()
    first = claims.take("s")
    order: list[str] = []

    async def long_work() -> None:
        async with first.work():
            order.append("first works")
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)
                order.append("first has left")

    working = asyncio.create_task(long_work())
    await asyncio.sleep(0)
    second = claims.take("s")
    async with second.work():
        order.append("second works")
    with pytest.raises(Superseded):
        await working
    assert order == ["first works", "first has left", "second works"]


async def test_a_claim_that_waits_for_its_turn_is_superseded_too() -> None:
    claims = Claims()
    first = claims.take("s")
    leave = asyncio.Event()

    async def leaves_late() -> None:
        async with first.work():
            try:
                await asyncio.Event().wait()
            finally:
                await leave.wait()

    async def stubborn() -> None:
        with pytest.raises(Superseded):
            await leaves_late()

    async def waiting(claim: Claim) -> None:
        with pytest.raises(Superseded):
            async with claim.work():
                raise AssertionError("a claim that never was its turn")

    async with asyncio.TaskGroup() as group:
        group.create_task(stubborn())
        await asyncio.sleep(0)
        group.create_task(waiting(claims.take("s")))
        await asyncio.sleep(0)
        third = claims.take("s")
        await asyncio.sleep(0)
        leave.set()
    async with third.work():
        assert third.current


async def test_a_claim_that_is_not_current_does_not_wait_for_the_work_of_the_one_that_is() -> None:
    claims = Claims()
    first, second = claims.take("s"), claims.take("s")
    async with second.work():
        for scope in (first.work(), first.visit()):
            with pytest.raises(Superseded):
                async with asyncio.timeout(800), scope:
                    raise AssertionError("work of a claim that is not current")


async def test_who_visits_goes_when_the_owner_cannot_wait_and_the_owners_work_goes_on() -> None:
    claim = Claims().take("s")
    order: list[str] = []
    leave = asyncio.Event()

    async def stays(name: str) -> None:
        async with claim.visit():
            order.append(name)
            try:
                await asyncio.Event().wait()
            finally:
                await leave.wait()

    async def visit(name: str) -> None:
        with pytest.raises(Superseded):
            await stays(name)

    async with asyncio.timeout(800), asyncio.TaskGroup() as group:
        group.create_task(visit("visitor"))
        group.create_task(visit("waits for the lock"))
        await asyncio.sleep(0)
        claim.evict()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        claim.evict()  # again, while it is on its way out
        working = group.create_task(_worked(claim, order))
        await asyncio.sleep(0)
        leave.set()
        await asyncio.wait({working})
        claim.evict()
    assert order == ["visitor", "owner"]
    assert claim.current
    async with claim.visit():
        order.append("another time")
    claim.supersede()
    with pytest.raises(Superseded):
        async with claim.visit():
            raise AssertionError("a visit at a claim that is not current")


async def _worked(claim: Claim, order: list[str]) -> None:
    async with claim.work():
        claim.evict()
        await asyncio.sleep(0)
        order.append("owner")


async def test_a_time_out_inside_the_work_is_its_own() -> None:
    claim = Claims().take("s")
    with pytest.raises(TimeoutError):
        async with claim.work():
            raise TimeoutError


async def test_releasing_forgets_the_shard_but_not_the_claim_of_another() -> None:
    claims = Claims()
    first = claims.take("s")
    second = claims.take("s")
    claims.release("s", first)
    assert second.current
    claims.release("s", second)
    assert not second.current
    assert claims.take("s").current


def opened(claims: Claims, *shard_ids: str) -> list[Claim]:
    found = [claims.take(shard_id) for shard_id in shard_ids]
    for claim in found:
        claim.opened = True
    return found


async def test_a_visitor_of_several_shards_has_all_handlers_or_none() -> None:
    claims = Claims()
    one, two = opened(claims, "one", "two")
    async with visiting_all(claims, ["two", "one"]) as possible:
        assert possible
        assert one.lock.locked()
        assert two.lock.locked()
    two.opened = False
    async with visiting_all(claims, ["one", "two"]) as possible:
        assert not possible
        assert not one.lock.locked()
    async with visiting_all(claims, ["one", "unknown"]) as possible:
        assert not possible


async def test_a_visitor_of_several_shards_does_not_hold_the_others_while_one_works_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(claims_module, "_TURN_SECONDS", 0.01)
    claims = Claims()
    one, two = opened(claims, "one", "two")
    async with two.work():
        async with visiting_all(claims, ["one", "two"]) as possible:
            assert not possible
            assert not one.lock.locked()
            assert not one.visits | two.visits
        assert two.lock.locked()


@pytest.mark.parametrize("which", [0, 1])
async def test_a_visitor_of_several_shards_leaves_when_one_of_the_owners_wants_its_own(which: int) -> None:
    claims = Claims()
    both = opened(claims, "one", "two")

    async def visit() -> None:
        async with visiting_all(claims, ["one", "two"]):
            both[which].evict()
            await asyncio.sleep(1)

    with pytest.raises(Superseded):
        await visit()
    assert not any(claim.lock.locked() or claim.visits for claim in both)
