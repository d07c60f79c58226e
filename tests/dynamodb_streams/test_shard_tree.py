"""The tree of a stream's shards, from answers in any order, short ones among them."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mldserver.dynamodb_streams.shard_tree import FORGOTTEN_AFTER, ShardTree, StreamShard

pytestmark = pytest.mark.quick

ROOT = StreamShard("a", None, 1, 9)
LEFT = StreamShard("b", "a", 10)
RIGHT = StreamShard("c", "a", 10)


def tree(*shards: StreamShard) -> ShardTree:
    made = ShardTree()
    made.add_listing(shards, whole=True)
    return made


def roots(shards: ShardTree) -> tuple[str, ...]:
    return tuple(shard.id for depth, shard in shards.walk() if depth == 0)


def family(parents: Mapping[str, str | None]) -> list[StreamShard]:
    return [StreamShard(shard_id, parent) for shard_id, parent in parents.items()]


def test_children_start_when_their_parents_records_were_handed_over() -> None:
    shards = tree(ROOT, LEFT, RIGHT)
    assert shards.readable() == ("a",)
    shards.finished("a")
    assert shards.readable() == ("b", "c")
    shards.finished("b")
    assert shards.readable() == ("c",)


@pytest.mark.parametrize("order", [(ROOT, LEFT, RIGHT), (RIGHT, LEFT, ROOT), (LEFT, ROOT, RIGHT)])
def test_pages_come_in_any_order(order: tuple[StreamShard, ...]) -> None:
    shards = ShardTree()
    new = [shards.add_listing([shard], whole=False) for shard in order]
    assert new == [(shard.id,) for shard in order]
    assert shards.listing() == {"a": (), "b": ("a",), "c": ("a",)}
    assert (roots(shards), shards.children("a"), shards.parents("c")) == (("a",), ("b", "c"), ("a",))
    assert shards.readable() == ("a",)


def test_an_unknown_parent_is_resolved_before_its_child_is_read() -> None:
    shards = tree(StreamShard("b", "gone"), StreamShard("c", "b"), StreamShard("d"))
    assert (roots(shards), shards.readable(), shards.unresolved()) == (("b", "d"), ("d",), ("gone",))
    shards.gone("gone")
    assert (shards.readable(), shards.unresolved(), shards.is_finished("gone")) == (("b", "d"), (), True)
    assert shards.listing() == {"b": ("gone",), "c": ("b",), "d": ()}
    assert shards.parents("b") == ("gone",)
    assert shards.ancestors("c") == ("b", "gone")


def test_an_unknown_parent_that_exists_is_read_before_its_child() -> None:
    shards = tree(StreamShard("b", "a"))
    shards.exists("a")
    assert (shards.readable(), shards.unresolved(), shards.listing()) == (("a",), (), {"a": (), "b": ("a",)})
    shards.finished("a")
    assert shards.readable() == ("b",)


# Where reading began before: a token's shards, or the ledger's.


def test_what_lies_above_a_shard_that_was_begun_is_not_read_and_nothing_is_waited_for() -> None:
    shards = ShardTree()
    shards.begin([StreamShard("c", "b")])
    shards.add_listing([ROOT, LEFT, StreamShard("c", "b"), StreamShard("d", "c")], whole=True)
    assert (shards.readable(), shards.unresolved()) == (("c",), ())
    shards.finished("c")
    assert shards.readable() == ("d",)


def test_no_other_shard_is_read_while_it_may_be_an_ancestor_of_one_that_was_begun() -> None:
    shards = ShardTree()
    shards.begin([StreamShard("c", "b")])
    shards.add_listing([ROOT, StreamShard("c", "b"), StreamShard("other"), StreamShard("d", "c")], whole=True)
    assert (shards.readable(), shards.unresolved()) == (("c",), ("b",))
    shards.finished("c")
    assert shards.readable() == ("d",)
    shards.add_listing([LEFT], whole=False)
    assert (shards.readable(), shards.unresolved()) == (("d", "other"), ())


@pytest.mark.parametrize("resolve", ["gone", "exists"])
def test_when_the_lineage_ends_all_others_are_read(resolve: str) -> None:
    shards = ShardTree()
    shards.begin([StreamShard("c", "b"), StreamShard("unlisted")])
    shards.add_listing([StreamShard("other"), StreamShard("c", "b")], whole=True)
    assert (shards.readable(), shards.unresolved()) == (("c", "unlisted"), ("b", "unlisted"))
    for name in shards.unresolved():
        getattr(shards, resolve)(name)
    assert (shards.readable(), shards.unresolved()) == (("c", "other", "unlisted"), ())


def test_a_lineage_that_is_not_known_matters_only_where_another_shard_waits_for_it() -> None:
    shards = ShardTree()
    shards.begin([StreamShard("c", "b")])
    shards.add_listing([StreamShard("c", "b"), StreamShard("d", "c")], whole=True)
    assert shards.unresolved() == ()


def test_children_that_come_late_are_new_and_readable() -> None:
    shards = tree(ROOT)
    shards.finished("a")
    assert shards.readable() == ()
    assert shards.add_listing([RIGHT, ROOT, LEFT], whole=True) == ("b", "c")
    assert shards.readable() == ("b", "c")


def test_an_empty_or_shorter_answer_takes_nothing_away() -> None:
    shards = tree(ROOT, LEFT, RIGHT)
    shards.finished("a")
    for answer in ([], [LEFT], [StreamShard("b")]):
        assert shards.add_listing(answer, whole=True) == ()
    assert shards.listing() == {"a": (), "b": ("a",), "c": ("a",)}
    assert shards.readable() == ("b", "c")


def test_an_old_answer_does_not_open_a_closed_shard_again() -> None:
    shards = tree(ROOT)
    shards.add_listing([StreamShard("a", None, None, None)], whole=True)
    assert list(shards.walk()) == [(0, ROOT)]


def test_a_shard_that_aws_says_is_gone_lets_its_children_start() -> None:
    shards = tree(ROOT, LEFT)
    shards.finished("a")
    assert shards.readable() == ("b",)
    assert shards.add_listing([ROOT, LEFT], whole=True) == ()  # an old answer still names it
    assert shards.readable() == ("b",)


def test_a_finished_shard_is_forgotten_after_many_whole_answers_without_it() -> None:
    shards = tree(ROOT, LEFT, RIGHT)
    shards.finished("a")
    shards.finished("b")
    for _ in range(FORGOTTEN_AFTER):
        assert "a" in shards
        shards.add_listing([RIGHT], whole=False)  # pages of an answer that broke off say nothing
        shards.add_listing([], whole=True)  # nor does an empty one
        shards.add_listing([RIGHT], whole=True)
    assert shards.listing() == {"c": ("a",)}
    assert (shards.readable(), shards.unresolved()) == (("c",), ())
    shards.finished("c")
    for _ in range(FORGOTTEN_AFTER):
        shards.add_listing([StreamShard("d", "c")], whole=True)
    assert (shards.children("a"), list(shards.walk())) == ((), [(0, StreamShard("d", "c"))])
    assert shards._children == {"c": {"d"}}  # nothing grows with the shards of years


def test_an_answer_that_names_it_again_begins_the_count_anew() -> None:
    shards = tree(ROOT, LEFT)
    shards.finished("a")
    for answers in (FORGOTTEN_AFTER - 1, 1, FORGOTTEN_AFTER - 1):
        for _ in range(answers):
            shards.add_listing([ROOT] if answers == 1 else [LEFT], whole=True)
    assert "a" in shards


def test_a_shard_that_is_not_finished_is_never_forgotten() -> None:
    shards = tree(ROOT, LEFT)
    for _ in range(2 * FORGOTTEN_AFTER):
        shards.add_listing([LEFT], whole=True)
    assert shards.readable() == ("a",)


def test_a_shard_may_be_finished_before_it_is_listed() -> None:
    shards = ShardTree()
    shards.finished("a")
    assert shards.add_listing([ROOT, LEFT], whole=True) == ("b",)
    assert list(shards.walk()) == [(0, ROOT), (1, LEFT)]
    assert shards.readable() == ("b",)


def test_a_shard_named_as_its_own_parent_has_none() -> None:
    shards = tree(StreamShard("a", "a"))
    assert (shards.readable(), shards.parents("a"), list(shards.walk())) == (
        ("a",),
        (),
        [(0, StreamShard("a"))],
    )


def test_a_circle_of_parents_is_broken() -> None:
    shards = tree(*family({"a": "c", "b": "a", "c": "b"}))
    assert shards.listing() == {"a": ("c",), "b": ("a",), "c": ()}
    assert shards.readable() == ("c",)


def test_the_tree_is_walked_parents_first() -> None:
    shards = tree(*family({"e": "x", "d": "b", "b": "a", "a": None, "c": "a"}))
    assert [(depth, shard.id) for depth, shard in shards.walk()] == [
        (0, "a"),
        (1, "b"),
        (2, "d"),
        (1, "c"),
        (0, "e"),
    ]


NAMES = st.sampled_from("abcdefgh")
ANSWERS = st.lists(
    st.tuples(st.dictionaries(NAMES, st.none() | NAMES | st.just("x")), st.booleans()), max_size=8
)


@given(st.dictionaries(NAMES, st.none() | NAMES | st.just("x")), st.data())
def test_any_answers_about_one_stream_end_as_a_plain_reading_of_them_all(
    lineage: dict[str, str | None], data: st.DataObject
) -> None:
    # A real stream: a parent has the smaller name. Its answers leave out what they like, in any order.
    lineage = {name: parent if (parent or "~") < name else None for name, parent in lineage.items()}
    shards, named, finished = ShardTree(), set[str](), set[str]()
    for _ in range(data.draw(st.integers(0, 8))):
        answer = data.draw(st.lists(st.sampled_from(sorted(lineage) or ["~"]), unique=True))
        answer = [name for name in answer if name in lineage]
        new = shards.add_listing(
            [StreamShard(name, lineage[name]) for name in answer], whole=data.draw(st.booleans())
        )
        assert new == tuple(sorted(set(answer) - named - finished))
        named |= set(answer)
        if name := data.draw(st.none() | st.sampled_from(sorted(lineage) or ["a"])):
            shards.finished(name)
            finished.add(name)
        known = named | finished
        wanted = sorted(named - finished)
        assert shards.readable() == tuple(
            name for name in wanted if lineage[name] is None or lineage[name] in finished
        )
        waiting = {lineage[name] for name in wanted} - known - {None}
        assert shards.unresolved() == tuple(sorted(waiting))
        assert roots(shards) == tuple(
            name for name in sorted(known) if name not in named or lineage[name] not in known
        )
        for name in known:
            assert shards.children(name) == tuple(child for child in sorted(named) if lineage[child] == name)


@given(ANSWERS)
def test_whatever_aws_says_every_shard_is_read_once_and_none_hangs(
    answers: list[tuple[dict[str, str | None], bool]],
) -> None:
    shards, read = ShardTree(), list[str]()
    for answer, whole in answers:
        shards.add_listing(family(answer), whole=whole)
        read += (readable := shards.readable())
        for shard_id in readable:
            shards.finished(shard_id)
    while readable := shards.readable() or shards.unresolved():
        if not shards.readable():
            shards.gone(readable[0])
            continue
        read += readable
        for shard_id in readable:
            shards.finished(shard_id)
    assert sorted(read) == sorted({name for answer, _ in answers for name in answer})
    assert sorted(shards.listing()) == sorted(read)
    assert {shard.id for _, shard in shards.walk()} >= {*read}
