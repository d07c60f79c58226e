"""What any Ledger must do for several servers, and for the operator's tools."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any

import pytest

from mldserver.effects import Effects
from mldserver.errors import InternalError, LedgerError, ServerExpired
from mldserver.ledger.contract import Flush, LedgerState, ServerState, WindowState
from mldserver.ledger.operations import Ledger
from tests.ledger.samples import (
    BATCH,
    W1,
    W2,
    attempted,
    bring_to,
    late,
    letter,
    more,
    move,
    opened,
    peeked,
    seg,
    take_to,
)

if TYPE_CHECKING:
    from tests.ledger.samples import Factory


@contextlib.asynccontextmanager
async def two(factory: Factory) -> AsyncIterator[tuple[Ledger, Ledger]]:
    async with opened(factory, "one") as (one, _), opened(factory, "two") as (other, _):
        yield one, other


async def servers(factory: Factory) -> dict[str, ServerState]:
    async with peeked(factory) as (_, state):
        return state.servers


async def test_a_server_is_known_from_its_opening_on(ledger_factory: Factory) -> None:
    async with opened(ledger_factory, "one") as (one, state):
        assert one.server_id == "one"
        assert state.servers == {"one": ServerState("one", 1_000)}
        async with opened(ledger_factory, "two") as (_, both):
            assert both.servers == {"one": ServerState("one", 1_000), "two": ServerState("two", 1_000)}


async def test_a_ledger_keeps_its_identity_and_the_folder_that_claimed_it_first(
    ledger_factory: Factory,
) -> None:
    async with two(ledger_factory) as (one, other):
        new = await one.peek()
        assert (len(new.ledger_id), new.folder, new.claims) == (8, None, 0)
        claimed = await one.claim("folder")
        assert (claimed.ledger_id, claimed.folder, claimed.claims) == (new.ledger_id, "folder", 1)
        for claimed in (
            await other.claim("elsewhere"),
            await other.claim("elsewhere", instead_of="deadbeef"),
        ):
            assert (claimed.ledger_id, claimed.folder) == (new.ledger_id, "folder")
    async with opened(ledger_factory, "one") as (_, state):
        assert (state.ledger_id, state.folder, state.claims) == (new.ledger_id, "folder", 3)


async def test_a_ledger_that_goes_on_from_an_older_state_gets_another_identity_once(
    ledger_factory: Factory,
) -> None:
    async with opened(ledger_factory, "one") as (one, _):
        old = (await one.claim("folder")).ledger_id
        anew = await one.claim("restored", instead_of=old)
        assert (anew.ledger_id != old, anew.folder) == (True, "restored")
        async with opened(ledger_factory, "two") as (other, _):
            late_comer = await other.claim("restored", instead_of=old)
            assert (late_comer.ledger_id, late_comer.folder) == (anew.ledger_id, "restored")
            await one.sync(ServerState("one", 2_000))


async def test_another_identity_ends_all_other_servers_and_frees_what_they_held(
    ledger_factory: Factory,
) -> None:
    async with two(ledger_factory) as (one, other):
        await other.open_shard("a")
        old = (await other.claim("folder")).ledger_id
        anew = await one.claim("folder", instead_of=old)
        assert (list(anew.servers), anew.shards["a"].owner) == (["one"], None)
        with pytest.raises(ServerExpired, match=r"or has claimed the ledger again \(--new-ledger\)"):
            await other.claim("folder", instead_of=anew.ledger_id)
        assert (await one.peek()).ledger_id == anew.ledger_id


async def test_only_a_server_claims_a_folder(ledger_factory: Factory) -> None:
    async with opened(ledger_factory, "one"):
        pass
    async with peeked(ledger_factory) as (ledger, _):
        with pytest.raises(InternalError):
            await ledger.claim("folder")


async def test_servers_tell_each_other_where_they_stand(ledger_factory: Factory) -> None:
    told = ServerState("one", 5_000, 77, idle=True, held_by="shard-3", reason="behind")
    other = ServerState("two", 6_000, None)
    async with two(ledger_factory) as (one, two_):
        assert (await one.sync(told)).servers == {"one": told, "two": ServerState("two", 1_000)}
        assert (await two_.sync(other)).servers == {"one": told, "two": other}


async def test_a_server_tells_of_itself_only(ledger_factory: Factory) -> None:
    async with two(ledger_factory) as (one, _):
        with pytest.raises(InternalError):
            await one.sync(ServerState("two", 9))
        assert (await servers(ledger_factory))["two"].beat_ms == 1_000


async def test_a_beat_returns_all_that_others_did_since_the_last(ledger_factory: Factory, clock: Any) -> None:
    async with two(ledger_factory) as (one, other):

        async def beat() -> LedgerState:
            state = await other.sync(ServerState("two", clock.ms))
            async with peeked(ledger_factory) as (_, fresh):
                assert state == fresh
            return state

        await beat()
        await one.open_shard("a", ("p",))
        await one.register(
            Flush(
                (move(),), (seg("s1"), seg("s2", W2), late("l1")), Effects(dead_letters=(letter(1),)), clock=3
            )
        )
        assert (await beat()).windows[W1].segments == (seg("s1"),)
        await take_to(one, WindowState.CUT)
        assert (await beat()).windows[W1].owner == "one"
        await one.register(Flush((), (more("r1"),)))
        await beat()
        await one.commit((await attempted(one),))
        await one.published({W1: 1})
        await beat()
        await take_to(one, WindowState.PUBLISHED)
        assert (await beat()).windows[W1].revision == 2
        await take_to(one, WindowState.SET_ASIDE, W2)
        await beat()
        await one.decide(W2, "retry")
        await beat()
        assert await one.expire(published_before_ms=10**9, keep_bytes=0)
        assert set((await beat()).windows) == {W2}
        await one.late_published(("l1",))
        await one.leave()
        assert set((await beat()).servers) == {"two"}


async def test_a_beat_does_not_miss_a_window_that_came_and_went(ledger_factory: Factory, clock: Any) -> None:
    async with two(ledger_factory) as (one, other):
        await bring_to(one, WindowState.COMMITTED)
        assert set((await other.sync(ServerState("two", 1))).windows) == {W1}
        await one.published({W1: 1}, retain=False)
        await one.prune(windows_before_ms=clock.ms + 10_000, shards_before_ms=0)
        assert (await other.sync(ServerState("two", 2))).windows == {}


async def test_a_state_that_was_returned_stays_as_it_was(ledger_factory: Factory) -> None:
    async with opened(ledger_factory) as (ledger, first):
        await bring_to(ledger, WindowState.OPEN)
        second = await ledger.sync(ServerState("one", 1))
        assert (set(first.windows), set(second.windows)) == (set(), {W1})


def writing_calls(ledger: Ledger) -> dict[str, Callable[[], Awaitable[Any]]]:
    """Every call of a server that would write something."""
    return {
        "sync": lambda: ledger.sync(ServerState("one", 9)),
        "expire_servers": lambda: ledger.expire_servers({"two": 1_000}),
        "open_shard": lambda: ledger.open_shard("a"),
        "release_shard": lambda: ledger.release_shard("a", 1),
        "register": lambda: ledger.register(Flush((move(),), (seg("s9", W2),), clock=9)),
        "cut": lambda: ledger.cut((W1,)),
        "adopt": ledger.adopt,
        "begin_attempts": lambda: ledger.begin_attempts((W1,)),
        "commit": lambda: ledger.commit(()),
        "published": lambda: ledger.published({BATCH: 1}),
        "expire": lambda: ledger.expire(published_before_ms=10**9, keep_bytes=0),
        "late_published": lambda: ledger.late_published(("l1",)),
        "set_aside": lambda: ledger.set_aside(W1, "no"),
        "halt": lambda: ledger.halt(W1, "no", first=True),
        "prune": lambda: ledger.prune(windows_before_ms=10**9, shards_before_ms=10**9),
    }


async def test_nothing_that_an_expired_server_tries_counts(ledger_factory: Factory) -> None:
    async with two(ledger_factory) as (one, other):
        await one.open_shard("a")
        await one.register(Flush((), (late("l1"),)))
        await bring_to(one, WindowState.CUT, W1, "s1")
        await bring_to(other, WindowState.COMMITTED, BATCH, "s2")
        assert await other.expire_servers({"one": 1_000}) == {"one"}
        async with peeked(ledger_factory) as (_, before):
            for name, call in writing_calls(one).items():
                with pytest.raises(ServerExpired):
                    pytest.fail(f"{name} returned {await call()}")
            await one.leave()
        async with peeked(ledger_factory) as (_, after):
            assert after == before


async def test_a_tool_looks_without_being_a_server(ledger_factory: Factory) -> None:
    async with opened(ledger_factory) as (one, _):
        await bring_to(one, WindowState.CUT)
        async with peeked(ledger_factory) as (tool, state):
            assert set(state.servers) == {"one"}
            assert state.windows[W1].owner == "one"
            await one.begin_attempts((W1,))
            assert (await tool.peek()).windows[W1].attempt == 1
            with pytest.raises(InternalError):
                await tool.register(Flush((), (seg("s2", W2),)))
            with pytest.raises(InternalError):
                await tool.leave()
        assert (await one.peek()).windows[W1].attempt == 1


async def test_a_tool_creates_nothing(ledger_factory: Factory) -> None:
    for _ in range(2):
        ledger = ledger_factory("tool")
        with pytest.raises(LedgerError, match=r"[Nn]o ledger"):
            await ledger.peek()
        await ledger.close()


async def test_tools_act_beside_a_running_server(ledger_factory: Factory) -> None:
    async with opened(ledger_factory) as (one, _), peeked(ledger_factory) as (tool, _):
        await one.open_shard("a")
        await bring_to(one, WindowState.SET_ASIDE)
        await one.register(Flush((), effects=Effects(dead_letters=(letter(1),))))
        assert await tool.decide(W1, "retry")
        assert [each.window_id for each in await one.adopt()] == [W1]
        assert await tool.dead_letters() == (letter(1),)
        await tool.end_shards(frozenset({"a"}))
        assert (await one.peek()).shards["a"].ended
