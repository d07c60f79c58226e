"""Servers that look at the same ledger share a stream's shards: each is read by one, and nothing moves for nothing."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mldserver.dynamodb_streams.sharing import Plan, Unread, share

pytestmark = pytest.mark.quick

SERVERS = st.sets(st.sampled_from(["ann", "ben", "cleo", "dan", "eve"]), min_size=1)
OWNERS = st.dictionaries(
    st.integers(0, 30).map("shard-{:02d}".format),
    st.sampled_from([None, "ann", "ben", "cleo", "dan", "eve"]),
    max_size=12,
)


def living(owners: dict[str, str | None], servers: set[str]) -> dict[str, str | None]:
    """Return the shards as they are once dead servers are expired."""
    return {shard: owner if owner in servers else None for shard, owner in owners.items()}


def test_one_server_takes_everything_that_nobody_has() -> None:
    assert share({"a": None, "b": "me", "c": None}, {"me"}, "me") == Plan(("a", "c"), ())


def test_a_server_that_comes_gets_its_fair_share_from_those_that_have_more() -> None:
    owners = dict.fromkeys("abcd", "old")
    assert share(owners, {"old", "new"}, "new") == Plan((), ())
    assert share(owners, {"old", "new"}, "old") == Plan((), ("a", "b"))
    assert share(owners | {"a": None, "b": None}, {"old", "new"}, "new") == Plan(("a", "b"), ())
    assert share(owners | {"a": None, "b": None}, {"old", "new"}, "old") == Plan((), ())


def test_what_is_being_given_up_counts_until_it_is_gone() -> None:
    owners = dict.fromkeys("abcd", "old")
    assert share(owners, {"old", "new"}, "old", leaving={"c", "d"}) == Plan((), ("c", "d"))


def test_a_server_that_is_dead_keeps_its_shards_until_it_is_expired() -> None:
    assert share({"a": "dead", "b": None}, {"me", "dead"}, "me") == Plan(("b",), ())
    assert share({"a": None, "b": "me"}, {"me"}, "me") == Plan(("a",), ())


def test_what_a_server_leaves_lying_is_taken_by_the_others() -> None:
    owners = {"a": "me", "b": None}
    assert share(owners, {"me", "stopping"}, "me") == Plan((), ())
    assert share(owners, {"me", "stopping"}, "me", unclaimed={"b"}) == Plan(("b",), ())


@given(OWNERS, SERVERS)
def test_of_one_view_each_free_shard_is_taken_once_and_no_other(
    owners: dict[str, str | None], servers: set[str]
) -> None:
    taken = Counter(shard for server in servers for shard in share(owners, servers, server).take)
    assert taken == Counter(shard for shard, owner in owners.items() if owner is None)


@given(OWNERS, SERVERS)
def test_shares_become_fair_and_then_nothing_moves(owners: dict[str, str | None], servers: set[str]) -> None:
    now = living(owners, servers)
    for _ in range(2):
        plans = {server: share(now, servers, server) for server in servers}
        for server, plan in plans.items():
            assert all(now[shard] == server for shard in plan.give_up)
            now |= dict.fromkeys(plan.give_up)
        for server, plan in plans.items():
            now |= dict.fromkeys(plan.take, server)
    settled = now | {shard: server for server in servers for shard in share(now, servers, server).take}
    assert None not in settled.values()
    sizes = [sum(owner == server for owner in settled.values()) for server in servers]
    assert max(sizes) - min(sizes) <= 1
    assert all(share(settled, servers, server) == Plan((), ()) for server in servers)


@given(OWNERS, SERVERS)
def test_what_is_shared_fairly_already_stays(owners: dict[str, str | None], servers: set[str]) -> None:
    fair: dict[str, str | None] = {
        shard: sorted(servers)[place % len(servers)] for place, shard in enumerate(owners)
    }
    assert all(share(fair, servers, server) == Plan((), ()) for server in servers)


def test_a_shard_that_no_server_reads_is_unclaimed_after_a_while_and_then_kept_for_longer() -> None:
    unread = Unread(1000)
    assert unread.update({"s1", "s2"}, 0) == frozenset()
    assert (unread.update({"s1"}, 900), unread.kept_until_ms) == (frozenset(), {})
    assert unread.update({"s1", "s2"}, 1000) == {"s1"}, "that which somebody read meanwhile begins anew"
    assert unread.update(set(), 2000) == frozenset()
    assert unread.kept_until_ms == {"s1": 11_000}
    unread.update(set(), 11_000)
    assert unread.kept_until_ms == {}
