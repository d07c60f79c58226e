from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mldserver.coordinator.core.lineage import Lineage, Presence

pytestmark = [pytest.mark.quick, pytest.mark.core]


def family(**parents: str) -> Lineage:
    """Know shards in the order given; each value names its parents, one letter each."""
    lineage = Lineage()
    for shard, names in parents.items():
        lineage.add(shard, 0, parents=tuple(names))
    return lineage


def missing(lineage: Lineage) -> set[str]:
    return {node.id for node in lineage.missing()}


def test_a_shard_is_new_once() -> None:
    lineage = Lineage()
    assert lineage.add("a", 1)
    assert not lineage.add("a", 2)
    assert "a" in lineage.nodes
    assert "b" not in lineage.nodes
    assert len(lineage.nodes) == 1
    assert lineage.nodes["a"].since_ms == 1


def test_a_known_shard_is_missing_until_it_connects() -> None:
    lineage = family(a="")
    assert missing(lineage) == {"a"}
    lineage.connect("a", 5)
    assert missing(lineage) == set()
    assert [node.id for node in lineage.connected()] == ["a"]
    lineage.disconnect("a", 9)
    assert missing(lineage) == {"a"}
    assert lineage.nodes["a"].since_ms == 9


def test_a_shard_that_had_ended_when_the_ledger_was_read_is_not_missing() -> None:
    lineage = Lineage()
    lineage.add("a", 0, ended=True, effective_ms=7)
    assert missing(lineage) == set()
    assert lineage.floor_ms("a") == 7


def test_a_disconnect_after_the_end_leaves_the_shard_ended() -> None:
    lineage = family(a="")
    lineage.connect("a", 1)
    lineage.end("a", 2)
    lineage.disconnect("a", 3)
    assert lineage.nodes["a"].presence is Presence.ENDED


def test_a_child_is_expected_only_once_every_parent_has_ended() -> None:
    lineage = family(a="", b="", m="ab")
    assert missing(lineage) == {"a", "b"}
    lineage.end("a", 10)
    assert missing(lineage) == {"b"}
    lineage.end("b", 20)
    assert missing(lineage) == {"m"}
    assert lineage.nodes["m"].since_ms == 20


def test_an_unknown_parent_counts_as_finished() -> None:
    assert missing(family(c="p")) == {"c"}


def test_a_child_that_connects_proves_that_its_ancestors_have_ended() -> None:
    lineage = family(a="", b="a", c="a", d="bc")
    assert set(lineage.proved_ended("d")) == {"a", "b", "c"}
    assert lineage.nodes["a"].presence is Presence.MISSING
    lineage.connect("d", 5)
    assert {lineage.nodes[s].presence for s in "abc"} == {Presence.ENDED}
    assert lineage.proved_ended("d") == ()


def test_the_other_child_is_expected_from_that_moment_on() -> None:
    lineage = family(a="", b="a", c="a")
    lineage.connect("b", 5)
    assert missing(lineage) == {"c"}
    assert lineage.nodes["c"].since_ms == 5


def test_a_parent_that_is_listed_after_its_child_connected_has_ended() -> None:
    lineage = family(c="")
    lineage.connect("c", 1)
    lineage.add("p", 2)
    lineage.add("c", 2, parents=("p",))
    assert lineage.nodes["p"].presence is Presence.ENDED
    lineage = family(c="p")
    lineage.connect("c", 1)
    lineage.add("p", 2, parents=("g",))
    lineage.add("g", 2)
    assert {lineage.nodes[s].presence for s in "pg"} == {Presence.ENDED}


def test_a_list_that_says_nothing_new_moves_nobody() -> None:
    lineage = family(p="", c="p")
    lineage.connect("c", 1)
    lineage.connect("p", 2)  # a daemon with a fresh lease table reads again
    assert not lineage.add("c", 3, parents=("p", "p"))
    assert lineage.nodes["p"].presence is Presence.CONNECTED


def test_a_shard_that_is_missing_for_too_long_is_left_out_once() -> None:
    lineage = family(a="", b="")
    lineage.connect("b", 0)
    assert lineage.leave_out(99, 100) == ()
    assert lineage.leave_out(100, 100) == ("a",)
    assert lineage.leave_out(200, 100) == ()
    assert missing(lineage) == set()


def test_a_shard_that_was_left_out_comes_back() -> None:
    lineage = family(a="")
    lineage.leave_out(100, 100)
    lineage.connect("a", 101)
    assert lineage.nodes["a"].presence is Presence.CONNECTED


def test_a_child_that_was_left_out_with_its_parent_is_waited_for_when_the_parent_came_back_and_ended() -> (
    None
):
    lineage = family(p="", c="p")
    lineage.leave_out(100, 100)
    lineage.leave_out(200, 100)
    assert lineage.nodes["c"].presence is Presence.LEFT_OUT
    lineage.connect("p", 300)
    lineage.end("p", 400)
    assert missing(lineage) == {"c"}
    assert lineage.nodes["c"].since_ms == 400
    assert not lineage.all_ended()


def test_an_end_does_not_touch_children_that_are_there_or_ended() -> None:
    lineage = family(p="", a="p", b="p")
    lineage.connect("a", 1)
    lineage.end("a", 2)
    lineage.connect("p", 3)
    lineage.end("p", 4)
    assert lineage.nodes["a"].presence is Presence.ENDED
    assert lineage.nodes["a"].since_ms == 2


def test_the_stream_can_be_over_when_all_have_ended_or_were_left_out() -> None:
    assert not Lineage().all_ended()
    lineage = family(a="", b="")
    lineage.end("a", 1)
    assert not lineage.all_ended()
    lineage.leave_out(100, 100)
    assert lineage.all_ended()


def test_shards_that_were_only_left_out_are_no_end_of_the_stream() -> None:
    lineage = family(a="")
    lineage.leave_out(100, 100)
    assert not lineage.all_ended()


def test_a_childs_first_record_is_floored_by_the_latest_of_its_parents() -> None:
    lineage = family(a="", b="", m="ab", n="m")
    assert lineage.floor_ms("n") is None
    lineage.nodes["a"].effective_ms = 5
    lineage.nodes["b"].effective_ms = 9
    assert lineage.floor_ms("m") == 9
    assert lineage.floor_ms("n") == 9
    lineage.nodes["m"].effective_ms = 12
    assert lineage.floor_ms("n") == 12


def test_shards_that_were_split_and_merged_again_and_again_are_floored_at_once() -> None:
    # Each round doubles the ways to the first shard: 2**400 of them would never be walked.
    lineage = Lineage()
    lineage.add("merged-0", 0, effective_ms=7)
    for number in range(400):
        halves = (f"low-{number}", f"high-{number}")
        for half in halves:
            lineage.add(half, 0, parents=(f"merged-{number}",))
        lineage.add(f"merged-{number + 1}", 0, parents=halves)
    assert lineage.floor_ms("merged-400") == 7
    lineage.reach("high-200", 9)
    assert lineage.floor_ms("merged-400") == 9


def test_an_unknown_parent_is_no_floor() -> None:
    lineage = family(c="p")
    assert lineage.floor_ms("c") is None


def test_shards_that_ended_long_ago_are_forgotten_and_their_children_go_on() -> None:
    lineage = family(p="", c="p")
    lineage.end("p", 10)
    lineage.connect("c", 20)
    assert lineage.forget_ended(10) == ()
    assert lineage.forget_ended(11, keep={"p"}) == ()
    assert lineage.forget_ended(11) == ("p",)
    assert "p" not in lineage.nodes
    lineage.disconnect("c", 30)
    assert missing(lineage) == {"c"}


def test_a_forgotten_child_is_no_child_any_more() -> None:
    lineage = family(p="", c="p")
    lineage.connect("c", 1)
    lineage.end("c", 2)
    lineage.nodes["p"].presence = Presence.CONNECTED
    assert lineage.forget_ended(3) == ("c",)
    assert lineage.nodes["p"].children == set()
    lineage.end("p", 4)


def test_a_parent_that_becomes_known_after_its_child_waits_for_its_own_end() -> None:
    lineage = family(c="p", p="")
    assert missing(lineage) == {"p"}
    assert lineage.nodes["p"].children == {"c"}


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["connect", "disconnect", "end", "leave_out"]),
            st.integers(0, 6),
            st.integers(0, 9),
        ),
        max_size=30,
    )
)
def test_a_missing_shard_is_never_one_whose_parent_may_still_be_read(
    steps: list[tuple[str, int, int]],
) -> None:
    lineage = family(a="", b="", c="a", d="a", m="bc", x="m", y="m")
    now = 0
    for step, place, wait in steps:
        now += wait
        shard = "abcdmxy"[place]
        if step == "leave_out":
            lineage.leave_out(now, 20)
        else:
            getattr(lineage, step)(shard, now)
        open_now = {n.id for n in lineage.connected()} | missing(lineage)
        for shard_id in missing(lineage):
            assert not open_now & set(lineage.nodes[shard_id].parents)
        for node in lineage.connected():
            if step == "connect" and node.id == shard:
                assert all(lineage.nodes[p].presence is Presence.ENDED for p in node.parents)
        assert all(lineage.nodes[s].since_ms <= now for s in "abcdmxy")


# Other servers.


def test_a_shard_that_another_server_reads_is_not_missing_and_proves_that_its_parents_ended() -> None:
    lineage = family(p="", a="p")
    lineage.elsewhere("a", 5, read=True)
    assert missing(lineage) == set()
    assert lineage.nodes["p"].presence is Presence.ENDED
    assert lineage.nodes["a"].presence is Presence.ELSEWHERE
    assert not lineage.all_ended()


def test_a_shard_that_no_server_reads_any_more_is_missing_from_then_on() -> None:
    lineage = family(a="")
    lineage.elsewhere("a", 5, read=True)
    lineage.elsewhere("a", 9, read=False)
    assert missing(lineage) == {"a"}
    assert lineage.nodes["a"].since_ms == 9
    lineage.elsewhere("a", 12, read=False)
    assert lineage.nodes["a"].since_ms == 9


def test_a_shard_that_was_left_out_counts_again_when_another_server_reads_it() -> None:
    lineage = family(a="")
    assert lineage.leave_out(100, 50) == ("a",)
    lineage.elsewhere("a", 101, read=False)
    assert lineage.nodes["a"].presence is Presence.LEFT_OUT
    lineage.elsewhere("a", 102, read=True)
    assert lineage.nodes["a"].presence is Presence.ELSEWHERE


def test_a_shard_that_is_connected_here_or_has_ended_stays_what_it_is() -> None:
    lineage = family(a="", b="")
    lineage.connect("a", 1)
    lineage.end("b", 1)
    for shard in "ab":
        lineage.elsewhere(shard, 5, read=True)
        lineage.elsewhere(shard, 5, read=False)
    assert lineage.nodes["a"].presence is Presence.CONNECTED
    assert lineage.nodes["b"].presence is Presence.ENDED


def test_how_far_another_server_has_read_is_a_floor_for_the_children() -> None:
    lineage = family(p="", a="p")
    lineage.reach("p", None)
    assert lineage.floor_ms("a") is None
    lineage.reach("p", 700)
    lineage.reach("p", 300)
    lineage.reach("p", None)
    assert lineage.floor_ms("a") == 700


def test_shards_are_unread_where_no_server_reads_one_and_some_have_not_ended() -> None:
    assert Lineage().unread() == 0
    lineage = family(p="", c="p", d="")
    assert lineage.unread() == 3
    lineage.connect("p", 1)
    assert lineage.unread() == 0
    lineage.end("p", 2)
    assert lineage.unread() == 2
    lineage.leave_out(200, 100)
    assert lineage.unread() == 2
    lineage.elsewhere("c", 300, read=True)
    assert lineage.unread() == 0
    lineage.elsewhere("c", 400, read=False)
    lineage.end("c", 500)
    lineage.end("d", 500)
    assert lineage.unread() == 0


def test_a_name_that_is_no_shard_is_forgotten_unless_it_is_read() -> None:
    lineage = family(p="", c="p", x="")
    lineage.forget("unknown")
    lineage.connect("p", 1)
    lineage.forget("p")
    lineage.forget("x")
    lineage.forget("c")
    assert set(lineage.nodes) == {"p"}
    assert lineage.nodes["p"].children == set()
    lineage.end("p", 2)
    lineage.forget("p")
    assert set(lineage.nodes) == {"p"}
