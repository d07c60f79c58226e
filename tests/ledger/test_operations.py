"""A new operation of the ledger is a rule and a method: no store knows of it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from mldserver.errors import InternalError
from mldserver.ledger.book import Draft
from mldserver.ledger.contract import ServerState
from mldserver.ledger.operations import Ledger
from tests.ledger.samples import opened, peeked

if TYPE_CHECKING:
    from tests.ledger.samples import Factory


def excuse(draft: Draft, shard_ids: tuple[str, ...], owner: str) -> frozenset[str]:
    """A toy rule: end this server's shards; return those."""
    known = {each: draft.shards.get(each) for each in shard_ids}
    mine = {each: row for each, row in known.items() if row is not None and row.owner == owner}
    for shard_id, row in mine.items():
        draft.shards.put(shard_id, replace(row, ended_ms=7))
    return frozenset(mine)


async def excuse_shards(ledger: Ledger, shard_ids: tuple[str, ...]) -> frozenset[str]:
    """A toy operation: its method."""
    return await ledger._member(excuse, shard_ids, ledger.server_id)


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ledger, "excuse_shards", excuse_shards, raising=False)


async def test_an_operation_that_is_added_from_outside_works_in_every_store_and_for_every_server(
    ledger_factory: Factory,
) -> None:
    async with opened(ledger_factory) as (one, _), opened(ledger_factory, "two") as (two, _):
        await one.open_shard("a")
        await two.open_shard("b")
        assert await one.excuse_shards(("a", "b", "c")) == {"a"}
        assert [each.ended for each in (await two.sync(ServerState("two", 9))).shards.values()] == [
            True,
            False,
        ]
        async with peeked(ledger_factory) as (tool, state):
            assert state.shards["a"].ended
            with pytest.raises(InternalError, match="not opened by a server"):
                await tool.excuse_shards(("b",))


async def test_a_rule_that_changes_nothing_writes_nothing(ledger_factory: Factory) -> None:
    async with opened(ledger_factory) as (ledger, state):
        assert await ledger.excuse_shards(("a",)) == frozenset()
        assert (await ledger.peek()).version == state.version


async def test_a_rule_that_fails_leaves_the_ledger_as_it_was(ledger_factory: Factory) -> None:
    def fails(draft: Draft) -> None:
        draft.totals = replace(draft.totals, clock=5)
        raise InternalError("The rule fails.")

    async with opened(ledger_factory) as (ledger, state):
        with pytest.raises(InternalError, match="The rule fails"):
            await ledger._member(fails)
        assert await ledger.peek() == state
