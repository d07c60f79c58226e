"""What any Ledger must do with the shapes of rows, and with a drain."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import pytest

from mldserver.errors import InternalError, LedgerError, LedgerVersionError, ServerExpired
from mldserver.ledger.contract import Flush, ServerState, ShapeChange, WindowState
from mldserver.ledger.operations import Ledger
from tests.ledger.samples import W1, W2, bring_to, move, opened, peeked, seg

if TYPE_CHECKING:
    from tests.ledger.samples import Factory

OLD, NEW = ShapeChange("f1", "old"), ShapeChange("f2", "new")


async def test_the_first_shape_is_the_pipelines_and_its_servers(ledger_factory: Factory) -> None:
    async with opened(ledger_factory) as (one, state):
        assert (state.shape, state.shapes, state.servers["one"].shape) == ("", {}, "")
        assert await one.declare(OLD, version=state.version)
        told = await one.sync(ServerState("one", 5))
        assert (told.shape, told.shapes, told.servers["one"].shape) == ("f1", {"f1": "old"}, "f1")
    async with peeked(ledger_factory) as (_, found):
        assert (found.shape, found.shapes) == ("f1", {"f1": "old"})


async def test_only_servers_that_live_declare_a_shape(ledger_factory: Factory) -> None:
    async with opened(ledger_factory) as (one, state):
        async with peeked(ledger_factory) as (tool, _):
            with pytest.raises(InternalError):
                await tool.declare(OLD, version=state.version)
        await one.leave()
        with pytest.raises(ServerExpired):
            await one.declare(OLD, version=(await one.peek()).version)


async def test_a_drain_is_asked_for_by_a_tool_and_over_at_the_next_start(ledger_factory: Factory) -> None:
    async with opened(ledger_factory, "one") as (one, state):
        assert await one.declare(OLD, version=state.version)
        async with peeked(ledger_factory) as (tool, found):
            assert not found.draining
            await tool.drain()
        assert (await one.sync(ServerState("one", 5))).draining
        async with opened(ledger_factory, "two") as (other, found):
            # While somebody still drains, who comes has to drain as well.
            assert await other.declare(OLD, version=0)
            assert (await other.peek()).draining
            await one.leave()
            await other.leave()
    async with opened(ledger_factory, "three") as (third, found):
        assert found.draining
        assert await third.declare(OLD, version=0)
        assert not (await third.peek()).draining


@contextlib.asynccontextmanager
async def under(factory: Factory, pipeline: str, rename_from: str | None = None) -> AsyncIterator[Ledger]:
    """A server's ledger, opened under a pipeline's name; it leaves at the end."""
    ledger = factory("one", pipeline=pipeline, rename_from=rename_from)
    await ledger.open()
    try:
        yield ledger
        await ledger.leave()
    finally:
        await ledger.close()


async def declares(ledger: Ledger, change: ShapeChange) -> bool:
    return await ledger.declare(change, version=(await ledger.peek()).version)


async def test_a_pipeline_gets_another_name_when_its_server_declares_its_shape(
    ledger_factory: Factory,
) -> None:
    async with under(ledger_factory, "p") as first:
        await first.open_shard("a")
        await first.register(Flush((move("a"),), (seg("s1"),)))
    async with under(ledger_factory, "q", rename_from="p"):
        pass  # It has not declared anything: the name stays.
    async with under(ledger_factory, "p"):
        pass
    async with under(ledger_factory, "q", rename_from="p") as renamed:
        assert await declares(renamed, NEW)
        await renamed.register(Flush((), (seg("s2", W2),)))
    with pytest.raises(LedgerVersionError):
        async with under(ledger_factory, "p"):
            pass
    # The setting may stay where it is, and may go.
    async with under(ledger_factory, "q", rename_from="p") as again:
        assert (await again.peek()).shards["a"].position == move("a").position
    async with under(ledger_factory, "q") as again:
        assert set((await again.peek()).windows) == {W1, W2}


async def test_a_pipeline_may_get_its_first_name_again(ledger_factory: Factory) -> None:
    async with under(ledger_factory, "p") as ledger:
        await bring_to(ledger, WindowState.OPEN)
    for name, former in (("q", "p"), ("p", "q"), ("q", "p"), ("r", "q")):
        async with under(ledger_factory, name, rename_from=former) as ledger:
            assert await declares(ledger, dataclasses.replace(NEW, fingerprint=f"{former} to {name}"))
    async with under(ledger_factory, "r") as ledger:
        assert set((await ledger.peek()).windows) == {W1}
    for other in "pq":
        with pytest.raises(LedgerVersionError):
            async with under(ledger_factory, other):
                pass


async def test_nothing_is_begun_where_the_former_name_has_no_ledger(ledger_factory: Factory) -> None:
    if ledger_factory.__name__ == "make":
        async with under(ledger_factory, "other"):
            pass  # DynamoDB's table
    for _ in range(2):
        with pytest.raises(LedgerError, match="no ledger"):
            async with under(ledger_factory, "q", rename_from="p"):
                pass
