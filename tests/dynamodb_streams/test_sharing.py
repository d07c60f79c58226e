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


# Families.


def naive(
    owners: dict[str, str | None], servers: set[str], me: str, families: dict[str, str]
) -> tuple[set[str], set[str]]:
    """Share families as if each were one shard, held by the smallest of the servers that live and have a shard of it."""
    holders: dict[str, str | None] = {}
    for family in set(families.values()):
        names = [owner for shard, owner in owners.items() if families[shard] == family and owner is not None]
        holders[family] = min([name for name in names if name in servers] or names, default=None)
    plan = share(holders, servers, me)
    mine = {family for family, holder in holders.items() if holder == me} | set(plan.take)
    mine -= set(plan.give_up)
    take = {shard for shard, owner in owners.items() if owner is None and families[shard] in mine}
    return take, {shard for shard, owner in owners.items() if owner == me and families[shard] not in mine}


@st.composite
def family_trees(draw: st.DrawFn) -> tuple[dict[str, str | None], dict[str, str]]:
    owners = draw(OWNERS)
    return owners, {shard: draw(st.sampled_from(["f", "g", "h", "i", shard])) for shard in owners}


@given(family_trees(), SERVERS)
def test_families_are_shared_as_single_shards_are(
    drawn: tuple[dict[str, str | None], dict[str, str]], servers: set[str]
) -> None:
    owners, families = drawn
    for me in servers:
        plan = share(owners, servers, me, families=families)
        assert (set(plan.take), set(plan.give_up)) == naive(owners, servers, me, families)


@given(family_trees(), SERVERS, st.data())
def test_whatever_servers_have_seen_each_family_comes_to_one_of_them_and_stays(
    drawn: tuple[dict[str, str | None], dict[str, str]], servers: set[str], data: st.DataObject
) -> None:
    """Servers act by old views, so that several take shards of one family; then by present ones."""
    owners, families = drawn
    views = [living(owners, servers)]
    for _ in range(data.draw(st.integers(0, 12))):
        server, view = data.draw(st.sampled_from(sorted(servers))), data.draw(st.sampled_from(views[-3:]))
        views.append(acted(views[-1], view, server, servers, families))
    now = views[-1]
    for _ in range(4):
        view = now
        for server in sorted(servers):
            now = acted(now, view, server, servers, families)
    assert all(share(now, servers, server, families=families) == Plan((), ()) for server in servers)
    held: dict[str, set[str | None]] = {}
    for shard, owner in now.items():
        held.setdefault(families[shard], set()).add(owner)
    assert all(len(holders) == 1 and None not in holders for holders in held.values())
    sizes = Counter(holder for holders in held.values() for holder in holders)
    assert max((sizes[server] for server in servers), default=0) - min(sizes[each] for each in servers) <= 1


def acted(
    now: dict[str, str | None],
    view: dict[str, str | None],
    server: str,
    servers: set[str],
    families: dict[str, str],
) -> dict[str, str | None]:
    """Return the owners after a server has acted on what it saw: who opens a shard last has it."""
    plan = share(view, servers, server, families=families)
    given_up = {shard: None for shard in plan.give_up if now[shard] == server}
    return now | given_up | dict.fromkeys(plan.take, server)


def test_of_two_servers_that_took_siblings_at_once_the_smallest_keeps_the_family() -> None:
    owners, families = (
        {"left": "ben", "right": "ann", "new": None},
        dict.fromkeys(["left", "right", "new"], "root"),
    )
    servers = {"ann", "ben"}
    assert share(owners, servers, "ann", families=families) == Plan(("new",), ())
    assert share(owners, servers, "ben", families=families, kept={"left"}) == Plan((), ("left",))


def test_a_dead_server_keeps_no_family_that_a_living_one_has() -> None:
    owners, families = {"left": "dead", "right": "me"}, {"left": "root", "right": "root"}
    assert share(owners, {"me"}, "me", families=families) == Plan((), ())


def test_a_family_is_given_up_whole_and_its_new_shards_are_left_alone_meanwhile() -> None:
    owners: dict[str, str | None] = {"a": "me", "b": "me", "b2": None, "c": "me"}
    families = {"a": "a", "b": "b", "b2": "b", "c": "c"}
    plan = share(owners, {"me", "new"}, "me", families=families, leaving={"b"})
    assert plan == Plan((), ("b",))
    assert share(owners | {"b": None}, {"me", "new"}, "new", families=families) == Plan(("b", "b2"), ())


def test_a_shard_that_the_holder_of_its_family_does_not_read_is_left_to_the_holder() -> None:
    owners, families = {"a": "other", "b": None, "c": "me"}, {"a": "root", "b": "root", "c": "c"}
    assert share(owners, {"me", "other"}, "me", families=families, unclaimed={"b"}) == Plan((), ())
    plan = share({"b": None, "c": "me"}, {"me", "other"}, "me", families=families, unclaimed={"b"})
    assert plan == Plan(("b",), ())


def test_a_family_with_a_shard_that_is_kept_stays_whole() -> None:
    owners, families = dict.fromkeys("abc", "me"), {"a": "a", "b": "a", "c": "c"}
    assert share(owners, {"me", "new"}, "me", families=families, kept={"b"}) == Plan((), ())
    assert share(owners, {"me", "new"}, "me", families=families) == Plan((), ("a", "b"))


def test_a_shard_that_no_server_reads_is_unclaimed_after_a_while_and_then_kept_for_longer() -> None:
    unread = Unread(1000)
    assert unread.update({"s1", "s2"}, 0) == frozenset()
    assert (unread.update({"s1"}, 900), unread.kept_until_ms) == (frozenset(), {})
    assert unread.update({"s1", "s2"}, 1000) == {"s1"}, "that which somebody read meanwhile begins anew"
    assert unread.update(set(), 2000) == frozenset()
    assert unread.kept_until_ms == {"s1": 11_000}
    unread.update(set(), 11_000)
    assert unread.kept_until_ms == {}
