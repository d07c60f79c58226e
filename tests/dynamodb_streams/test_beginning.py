"""Where shards begin that the ledger has no position of."""

from __future__ import annotations

import pytest

from mldserver.consumer.intake import KnownShard
from mldserver.dynamodb_streams.positions import (
    Beginning,
    ReadPosition,
    Token,
    inherited,
    storable,
    stored,
)
from mldserver.dynamodb_streams.shard_tree import (
    LATEST,
    TRIM_HORIZON,
    After,
    At,
    ShardTree,
    Since,
    Start,
    StreamShard,
)
from mldserver.records import Sequence

pytestmark = pytest.mark.quick

LISTED = (
    StreamShard("grandparent", None, 1, 9),
    StreamShard("parent", "grandparent", 10, 19),
    StreamShard("child", "parent", 20),
    StreamShard("other", None, 1, 9),
)


def tree() -> ShardTree:
    made = ShardTree()
    made.add_listing(LISTED, whole=True)
    return made


def known(**positions: Sequence | None) -> dict[str, KnownShard]:
    return {name: KnownShard(position, ended=False, owner=None) for name, position in positions.items()}


def readable(beginning: Beginning) -> tuple[str, ...]:
    marked = tree()
    beginning.mark(marked)
    return marked.readable()


def test_everything_lies_behind_the_oldest_record() -> None:
    beginning = Beginning()
    assert readable(beginning) == ("grandparent", "other")
    assert beginning.start("child", found_ms=7) is TRIM_HORIZON


def test_latest_leaves_out_what_is_closed_and_of_later_shards_nothing() -> None:
    beginning = Beginning(LATEST)
    assert readable(beginning) == ("child",)
    assert beginning.start("child", found_ms=None) is LATEST
    assert beginning.start("new", found_ms=7) == Since(7)


def test_a_time_is_looked_for_in_closed_shards_too() -> None:
    beginning = Beginning(Since(5))
    assert readable(beginning) == ("grandparent", "other")
    assert beginning.start("other", found_ms=7) == Since(5)


def test_a_token_leaves_out_the_ancestors_of_its_shards_and_nothing_else() -> None:
    shards = (ReadPosition("parent", "grandparent", After(12)), ReadPosition("gone", None, At(3)))
    beginning = Beginning.of(Token("arn", shards))
    marked = tree()
    beginning.mark(marked)
    assert (marked.readable(), marked.unresolved()) == (("gone", "parent"), ("gone",))
    marked.gone("gone")
    assert marked.readable() == ("gone", "other", "parent")
    assert beginning.start("parent", found_ms=None) == After(12)
    assert beginning.start("other", found_ms=None) is TRIM_HORIZON


@pytest.mark.parametrize(
    ("start", "position"),
    [
        (TRIM_HORIZON, None),
        (LATEST, Sequence(0, 99)),
        (Since(7), Sequence(0, 7)),
        (After(12), Sequence(12)),
        (At(12), Sequence(11)),
    ],
)
def test_a_beginning_is_kept_as_a_position_that_no_record_lies_before(
    start: Start, position: Sequence | None
) -> None:
    assert storable(start, 99) == position


def test_a_kept_beginning_is_read_again_as_what_it_was() -> None:
    assert stored(Sequence(12)) == After(12)
    assert stored(Sequence(0, 7)) == Since(7)


def test_a_child_of_a_shard_that_was_read_begins_with_its_oldest_record() -> None:
    assert inherited(["parent"], known(parent=Sequence(12), other=Sequence(0, 7))) is TRIM_HORIZON
    assert inherited(["parent"], known(parent=None, other=Sequence(0, 7))) is TRIM_HORIZON


def test_a_child_of_a_shard_without_a_record_since_a_time_begins_at_that_time() -> None:
    assert inherited(["parent"], known(parent=Sequence(0, 7))) == Since(7)


def test_a_root_begins_with_its_oldest_record_unless_others_have_just_begun_at_a_time() -> None:
    assert inherited([], known(other=Sequence(12))) is TRIM_HORIZON
    assert inherited(["unknown"], known(one=Sequence(0, 9), other=Sequence(0, 7))) == Since(7)


def test_a_position_is_a_beginning_and_a_tokens_new_shards_begin_at_its_time() -> None:
    assert Beginning.of(LATEST) == Beginning(LATEST)
    shards = (ReadPosition("a", None, After(5)), ReadPosition("b", "z", At(7)))
    beginning = Beginning.of(token := Token("arn", shards))
    assert (beginning.shards, beginning.token) == ({"a": After(5), "b": At(7)}, token)
    assert beginning.start("c", found_ms=None) is TRIM_HORIZON
    assert Beginning.of(Token("arn", shards, since_ms=9)).start("c", found_ms=None) == Since(9)


def test_a_pipeline_is_ahead_until_more_is_known_than_places_and_ends_of_what_was_not_read() -> None:
    beginning = Beginning(shards={"child": After(25), "other": TRIM_HORIZON})
    unread = {"parent": KnownShard(None, ended=True, owner=None), **known(other=None)}
    assert beginning.is_ahead({})
    assert beginning.is_ahead(unread | known(child=Sequence(25)))
    assert not beginning.is_ahead(unread | known(child=Sequence(26)))
    assert not beginning.is_ahead(known(other=Sequence(3)))
    assert not Beginning(LATEST).is_ahead(known(child=Sequence(0, 7)))
