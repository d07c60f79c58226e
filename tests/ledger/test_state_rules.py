"""The rules of keyed state: fences of flushes, stores of shards that open, files that stores need, what may be forgotten."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from mldserver.errors import InternalError, PeerError
from mldserver.ledger import rules, state_rules
from mldserver.ledger.book import Book, Draft
from mldserver.ledger.contract import Flush, FlushResult, ShardState, StateFile, StoreState, StoreUpdate
from mldserver.ledger.row_rules import register
from mldserver.records import Sequence
from mldserver.stores import ALL_KEYS, KeyRange, StoreClaim, divide
from tests.ledger.samples import move

pytestmark = [pytest.mark.quick, pytest.mark.core]

LOW, HIGH = KeyRange(0, 99), KeyRange(100, 199)
WHOLE = KeyRange(0, 199)
FAMILY = StoreClaim(None)
NOW = 1_000


class Stores:
    """A ledger's book, and the steps of servers that go on with it."""

    def __init__(self) -> None:
        self.book = Book()
        self(rules.enter, "one", 0)

    def __call__(self, rule: Callable[..., Any], *args: Any, **fields: Any) -> Any:
        draft = Draft(self.book)
        told = rule(draft, *args, **fields)
        if draft.changes():
            self.book.apply(draft.changes())
        return told

    def open(self, shard: str, key_range: KeyRange | None = WHOLE, *parents: str) -> ShardState:
        opened = self(rules.open_shard, shard, parents, "one", StoreClaim(key_range))
        assert isinstance(opened, ShardState)
        return opened

    def flush(self, *shards: str, file: str = "f", **fields: Any) -> FlushResult:
        """Register a flush that changes the stores of shards, as the ledger has them."""
        known = [self.book.shards[shard] for shard in shards]
        stores = {shard.store: self.book.stores[shard.store] for shard in known}
        positions = [
            move(shard.shard_id, shard.epoch, Sequence(1), previous=shard.position) for shard in known
        ]
        updates = [
            StoreUpdate(
                store.store_id,
                store.serial,
                tuple(each.shard_id for each in known if each.store == store.store_id),
            )
            for store in stores.values()
        ]
        state_file = state(file, {store.store_id: (store.key_range,) for store in stores.values()})
        usual = {"positions": tuple(positions), "stores": tuple(updates), "state_file": state_file}
        result = self(register, Flush(**(usual | fields)), NOW)
        assert isinstance(result, FlushResult)
        return result

    def flush_timers(
        self, shard: str, *, due_ms: int | None, file: str = "f", serial: int | None = None
    ) -> FlushResult:
        """Register a flush that changes the timers of a shard's store: no position moves."""
        known = self.book.shards[shard]
        at = self.book.stores[known.store].serial if serial is None else serial
        return self.flush(
            shard,
            file=file,
            positions=(move(shard, known.epoch, known.position, previous=known.position),),
            stores=(StoreUpdate(known.store, at, (shard,), due_ms),),
        )

    def adopt(self, store: str, server: str = "one") -> Any:
        return self(state_rules.adopt, store, server)

    def needed(self) -> dict[str, Mapping[str, tuple[KeyRange, ...]]]:
        return {path: file.needed for path, file in self.book.state_files.items()}

    def end(self, *shards: str) -> None:
        self(rules.end_shards, shards, NOW)

    def prune(self) -> int:
        forgotten = self(
            rules.prune,
            windows_before_ms=0,
            shards_before_ms=NOW + 1,
            keep_shards=frozenset(),
            limit=10,
        )
        assert isinstance(forgotten, int)
        return forgotten


@pytest.fixture
def stores() -> Stores:
    return Stores()


def state(path: str, needed: Mapping[str, tuple[KeyRange, ...]]) -> StateFile:
    return StateFile(path, needed, rows=3, bytes=300)


# Ranges.


@pytest.mark.parametrize(
    ("ranges", "inside", "outside"),
    [
        ([WHOLE], [LOW], [HIGH]),
        ([LOW], [LOW], []),
        ([HIGH], [], [HIGH]),
        ([KeyRange(0, 0), KeyRange(99, 100)], [KeyRange(0, 0), KeyRange(99, 99)], [KeyRange(100, 100)]),
    ],
)
def test_ranges_are_divided_without_a_gap_and_without_an_overlap(
    ranges: list[KeyRange], inside: list[KeyRange], outside: list[KeyRange]
) -> None:
    assert divide(ranges, LOW) == (tuple(inside), tuple(outside))


def test_a_range_is_divided_on_both_sides_of_another() -> None:
    assert divide([WHOLE], KeyRange(50, 60)) == ((KeyRange(50, 60),), (KeyRange(0, 49), KeyRange(61, 199)))


# Flushes.


def test_a_flush_names_its_state_file_and_raises_the_serial_of_its_store(stores: Stores) -> None:
    assert stores.open("a").store == "a"
    assert stores.flush("a").registered
    assert stores.book.stores == {"a": StoreState("a", 1, *WHOLE)}
    assert stores.book.state_files == {"f": state("f", {"a": (WHOLE,)})}
    assert stores.book.shards["a"].store == "a", "the moved shard keeps its store"
    assert stores.book.state().paths() == {"f"}


def test_a_registration_that_is_repeated_is_refused_although_no_position_moves(stores: Stores) -> None:
    stores.open("a")
    stays = {"positions": (move("a", position=None),)}
    assert stores.flush("a", **stays).registered
    again = stores.flush("a", file="g", stores=(StoreUpdate("a", 0, ("a",)),), **stays)
    assert again.lost_shards == {"a"}
    assert set(stores.book.state_files) == {"f"}, "the refused flush writes nothing"


def test_a_flush_of_an_older_epoch_changes_no_state(stores: Stores) -> None:
    stores.open("a")
    stores.open("a")
    assert stores.flush("a", positions=(move("a", epoch=1, position=None),)).lost_shards == {"a"}
    assert stores.book.stores["a"].serial == 0


def test_a_store_whose_child_is_open_takes_no_more_changes(stores: Stores) -> None:
    stores.open("a")
    stores.open("b", LOW, "a")
    assert stores.flush("a").lost_shards == {"a"}


def test_a_store_that_is_refused_costs_every_shard_that_shares_it(stores: Stores) -> None:
    stores.open("root", None)
    stores.open("left", None, "root")
    stores.open("right", None, "root")
    stale = (StoreUpdate("root", 7, ("left", "right")),)
    assert stores.flush("left", stores=stale).lost_shards == {"left", "right"}


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"state_file": None}, "not for exactly its stores"),
        ({"state_file": state("f", {"a": (LOW,)})}, "not for exactly its stores"),
        ({"state_file": state("f", {"a": (WHOLE,), "b": (WHOLE,)})}, "not for exactly its stores"),
        ({"stores": ()}, "not for exactly its stores"),
        ({"positions": ()}, "the epoch of none of its shards"),
        ({"stores": (StoreUpdate("a", 1, ()),)}, "names no shard"),
        ({"state_file": state("there", {"a": (WHOLE,)})}, "registered already"),
    ],
)
def test_a_flush_whose_parts_contradict_each_other_is_a_bug_and_changes_nothing(
    stores: Stores, wrong: dict[str, Any], told: str
) -> None:
    stores.open("a")
    stores.flush("a", file="there")
    stores.book.stores["a"] = StoreState("a", 0, *WHOLE)
    before = stores.book.state()
    with pytest.raises(InternalError, match=told):
        stores.flush("a", **wrong)
    assert stores.book.state() == before


def test_a_flush_without_state_writes_nothing_of_it(stores: Stores) -> None:
    stores(rules.open_shard, "a", (), "one")
    draft = Draft(stores.book)
    assert register(draft, Flush((move("a"),)), NOW).registered
    assert not draft.changes().stores
    assert not draft.changes().state_files


def test_a_flush_says_when_the_first_timer_of_its_store_is_due(stores: Stores) -> None:
    stores.open("a")
    stores.flush_timers("a", due_ms=70)
    assert stores.book.stores["a"] == StoreState("a", 1, *WHOLE, next_due_ms=70)
    stores.flush_timers("a", file="g", due_ms=None)
    assert stores.book.stores["a"].next_due_ms is None


# Timers without a server.


def test_a_server_adopts_a_store_whose_shard_has_ended_once_no_other_server_has_it(stores: Stores) -> None:
    stores.open("a")
    stores.flush_timers("a", due_ms=70)
    assert stores.adopt("a") is None, "its records may cancel timers"
    stores.end("a")
    assert stores.adopt("a", "two") is None, "the server that read it is alive"
    assert stores.adopt("a").epoch == 2
    stores(rules.leave, "one", 1)
    adopted = stores.adopt("a", "two")
    assert (adopted.epoch, adopted.owner) == (3, "two")
    assert stores.book.shards["a"] == adopted


@pytest.mark.parametrize("store", ["a", "low", "unknown"])
def test_a_store_without_timers_or_with_a_child_is_not_adopted(stores: Stores, store: str) -> None:
    stores.open("a")
    stores.flush_timers("a", due_ms=70)
    stores.open("low", LOW, "a")
    stores.flush_timers("low", file="g", due_ms=None)
    stores.end("a", "low")
    assert stores.adopt(store) is None


def test_a_store_of_which_no_shard_is_left_is_not_adopted(stores: Stores) -> None:
    stores.book.stores["a"] = StoreState("a", next_due_ms=70)
    assert stores.adopt("a") is None


def test_a_child_that_comes_after_all_refuses_the_flushes_of_the_adopter(stores: Stores) -> None:
    stores.open("a")
    stores.flush_timers("a", due_ms=70)
    stores.end("a")
    adopted = stores.adopt("a")
    assert stores.flush_timers("a", file="g", due_ms=80).registered
    stores.open("low", LOW, "a")
    assert stores.flush_timers("a", file="h", due_ms=90, serial=2).lost_shards == {adopted.shard_id}


def test_a_family_is_adopted_once_all_of_its_shards_have_ended(stores: Stores) -> None:
    stores.open("root", None)
    stores.flush_timers("root", due_ms=70)
    stores.end("root")
    stores.open("child", None, "root")
    assert stores.adopt("root") is None
    stores(rules.end_shards, ["child"], NOW + 1)
    assert stores.adopt("root").shard_id == "child", "the one that ended last"


def test_a_child_in_an_adopted_family_refuses_the_flushes_of_the_adopter(stores: Stores) -> None:
    stores.open("root", None)
    stores.flush_timers("root", due_ms=70)
    stores.end("root")
    stores.adopt("root")
    stores.open("child", None, "root")
    assert stores.book.stores["root"].serial == 2
    assert stores.flush_timers("root", file="g", due_ms=80, serial=1).lost_shards == {"root"}
    stores.open("child", None, "root")
    stores.open("other child", None, "root")
    assert stores.book.stores["root"].serial == 2, "the child's own flushes are not refused"


def test_a_child_begins_with_the_earliest_timer_of_its_parents(stores: Stores) -> None:
    for shard, part, due_ms in (("low", LOW, 80), ("high", HIGH, 70)):
        stores.open(shard, part)
        stores.flush_timers(shard, file=shard, due_ms=due_ms)
    stores.open("child", WHOLE, "low", "high")
    assert stores.book.stores["child"].next_due_ms == 70
    stores.open("half", LOW, "child")
    stores.open("other half", HIGH, "child")
    assert [stores.book.stores[half].next_due_ms for half in ("half", "other half")] == [70, 70]


def test_a_shard_whose_store_has_timers_is_not_pruned(stores: Stores) -> None:
    stores.open("a")
    stores.flush_timers("a", due_ms=70)
    stores.end("a")
    assert stores.prune() == 0
    assert stores.adopt("a") is not None


# Opening.


def test_the_children_of_a_split_divide_what_their_parent_needed(stores: Stores) -> None:
    stores.open("a")
    stores.open("other")
    stores.flush("a")
    stores.flush("other", file="g")
    stores.open("low", LOW, "a")
    assert stores.needed() == {"f": {"low": (LOW,), "a": (HIGH,)}, "g": {"other": (WHOLE,)}}
    stores.open("high", HIGH, "a")
    assert stores.needed()["f"] == {"low": (LOW,), "high": (HIGH,)}
    assert stores.book.stores["low"] == StoreState("low", 2, *LOW)
    assert stores.book.stores["a"].closed


def test_the_child_of_a_merge_begins_above_both_parents(stores: Stores) -> None:
    stores.open("low", LOW)
    stores.open("high", HIGH)
    stores.flush("low", "high", file="f")
    stores.flush("high", file="g")
    stores.open("child", WHOLE, "low", "high")
    assert stores.book.stores["child"].serial == 3
    assert {path: set(needed["child"]) for path, needed in stores.needed().items()} == {
        "f": {LOW, HIGH},
        "g": {HIGH},
    }
    assert [stores.book.stores[parent].closed for parent in ("low", "high")] == [True, True]


def test_a_shard_that_is_opened_again_takes_nothing_over_twice(stores: Stores) -> None:
    stores.open("a")
    stores.flush("a")
    stores.open("low", LOW, "a")
    stores.flush("low", file="g")
    before = stores.book.stores, stores.needed()
    assert stores.open("low", LOW, "a").epoch == 2
    assert (stores.book.stores, stores.needed()) == before


def test_a_child_takes_the_state_of_an_ancestor_whose_child_was_never_opened(stores: Stores) -> None:
    stores.open("a")
    stores.flush("a")
    stores.end("a", "unread")
    stores.open("low", LOW, "unread", "unknown")
    assert stores.needed()["f"] == {"low": (LOW,), "a": (HIGH,)}
    assert stores.book.stores["low"].serial == 2
    assert stores.book.stores["a"].closed


def test_an_ancestor_without_state_takes_no_more_changes_either(stores: Stores) -> None:
    """A server may have changes of it that it has not registered."""
    stores.open("a")
    stores.open("low", LOW, "unread")
    assert stores.flush("a").lost_shards == {"a"}


def test_a_merge_takes_the_state_that_a_half_of_a_split_never_took(stores: Stores) -> None:
    stores.open("a")
    stores.flush("a")
    stores.open("low", LOW, "a")
    stores.flush("low", file="g")
    stores.open("next", KeyRange(200, 299))
    stores.flush("next", file="h")
    stores.open("child", KeyRange(0, 299), "low", "high")
    assert stores.needed() == {
        "f": {"child": (LOW, HIGH)},
        "g": {"child": (LOW,)},
        "h": {"child": (KeyRange(200, 299),)},
    }
    assert stores.book.stores["child"].serial == 4


def test_a_shard_takes_nothing_from_its_descendants(stores: Stores) -> None:
    stores.open("a")
    stores.open("low", LOW, "a")
    stores.flush("low")
    stores(rules.release_shard, "a", 1)
    stores(rules.reset, ["a"], NOW, forget_state=True)
    stores.open("a", WHOLE, "unknown")
    assert stores.needed()["f"] == {"low": (LOW,)}


def test_a_shard_with_another_range_than_before_is_refused(stores: Stores) -> None:
    stores.open("a")
    with pytest.raises(PeerError, match="another range of keys"):
        stores.open("a", LOW)
    assert stores.book.shards["a"].epoch == 1


def test_a_pipeline_that_becomes_keyed_begins_with_empty_stores(stores: Stores) -> None:
    stores(rules.open_shard, "a", (), "one")
    assert stores.open("a").store == "a"
    assert stores.open("b", LOW, "a").store == "b"
    assert stores.book.stores["b"].serial == 1


def test_all_descendants_of_a_root_shard_share_its_store(stores: Stores) -> None:
    assert stores.open("root", None).store == "root"
    assert [stores.open(child, None, "root").store for child in ("left", "right")] == ["root", "root"]
    assert stores.open("grandchild", None, "left").store == "root"
    assert stores.open("other", None, "unknown").store == "other"
    assert stores.open("left", None, "root").store == "root", "it keeps its store when it is opened again"
    assert not stores.book.stores["root"].closed
    assert stores.book.stores["root"].key_range == ALL_KEYS


# Files.


def compacted(stores: Stores, file: StateFile, *paths: str) -> bool:
    seen = {path: stores.book.state_files[path].needed for path in paths}
    done = stores(state_rules.compact, file, seen, NOW)
    assert isinstance(done, bool)
    return done


def test_a_compaction_takes_its_stores_out_of_the_files_that_it_replaces(stores: Stores) -> None:
    stores.open("a", LOW)
    stores.open("b", HIGH)
    stores.flush("a", "b", file="f")
    stores.flush("a", file="g")
    assert compacted(stores, state("c", {"a": (LOW,)}), "f", "g")
    assert stores.needed() == {"f": {"b": (HIGH,)}, "g": {}, "c": {"a": (LOW,)}}
    assert [stores.book.state_files[path].gone_ms for path in "fgc"] == [None, NOW, None]
    assert set(stores.book.needed_files) == {"f", "c"}
    stores(state_rules.forget_files, ("f", "g", "unknown"))
    assert set(stores.book.state_files) == {"f", "c"}, "the file that a store needs stays"


def test_a_compaction_of_a_part_of_a_store_leaves_the_files_needed_for_the_rest(stores: Stores) -> None:
    stores.open("a")
    stores.flush("a")
    assert compacted(stores, state("c", {"a": (LOW,)}), "f")
    assert stores.needed() == {"f": {"a": (HIGH,)}, "c": {"a": (LOW,)}}


def test_a_compaction_whose_answer_was_lost_can_be_repeated(stores: Stores) -> None:
    stores.open("a")
    stores.flush("a")
    seen = {"f": stores.book.state_files["f"].needed}
    for _ in range(2):
        assert stores(state_rules.compact, state("c", {"a": (WHOLE,)}), seen, NOW)


def test_a_compaction_is_refused_after_a_child_was_opened(stores: Stores) -> None:
    stores.open("a")
    stores.flush("a")
    seen = {"f": stores.book.state_files["f"].needed}
    stores.open("low", LOW, "a")
    before = stores.book.state()
    assert not stores(state_rules.compact, state("c", {"a": (WHOLE,)}), seen, NOW)
    assert not compacted(stores, state("c", {"a": (WHOLE,)}), "f"), "and so is one of a closed store"
    assert not stores(state_rules.compact, state("c", {"a": (WHOLE,)}), {"unknown": {}}, NOW)
    assert stores.book.state() == before


def test_of_two_compactions_of_the_same_files_one_is_refused(stores: Stores) -> None:
    stores.open("a")
    stores.flush("a")
    seen = {"f": stores.book.state_files["f"].needed}
    assert stores(state_rules.compact, state("c", {"a": (WHOLE,)}), seen, NOW)
    assert not stores(state_rules.compact, state("d", {"a": (WHOLE,)}), seen, NOW)
    assert stores.needed() == {"f": {}, "c": {"a": (WHOLE,)}}


# Forgetting.


def test_a_shard_with_state_is_not_reset_unless_its_state_is_forgotten(stores: Stores) -> None:
    stores.open("a")
    stores.flush("a")
    stores(rules.release_shard, "a", 1)
    assert state_rules.shards_with_state(stores.book) == {"a"}
    assert stores(rules.reset, ["a", "unknown"], NOW) == frozenset()
    assert stores(rules.reset, ["a", "unknown"], NOW, forget_state=True) == {"a"}
    shard = stores.book.shards["a"]
    assert (shard.position, shard.store, shard.epoch > 1) == (None, "", True)
    assert (stores.book.stores, stores.needed()) == ({}, {"f": {}})
    assert stores.book.state_files["f"].gone_ms == NOW


def test_a_parent_is_not_reset_after_it_passed_its_state_on(stores: Stores) -> None:
    stores.open("a")
    stores.open("low", LOW, "a")
    stores(rules.release_shard, "a", 1)
    stores(rules.release_shard, "low", 1)
    assert stores(rules.reset, ["a", "low"], NOW) == {"low"}


def test_state_is_not_forgotten_while_a_server_holds_a_shard_of_its_family(stores: Stores) -> None:
    stores.open("root", None)
    stores.open("left", None, "root")
    stores.flush("left")
    stores.open("unkeyed", None)
    stores(rules.release_shard, "root", 1)
    assert stores(rules.reset, ["root"], NOW, forget_state=True) == frozenset()
    stores(rules.release_shard, "left", 1)
    assert stores(rules.reset, ["root"], NOW, forget_state=True) == {"root"}
    assert stores.book.shards["left"].store == "", "the family's other shards have no store any more"
    assert stores.book.shards["left"].epoch == 2, "and their flushes under way are refused"
    assert set(stores.book.stores) == {"unkeyed"}


def test_a_shard_that_was_reset_with_its_state_takes_over_again(stores: Stores) -> None:
    """Its parent, which was reset too, has a new state by then."""
    stores.open("a")
    stores.flush("a")
    stores.open("low", LOW, "a")
    for shard in ("a", "low"):
        stores(rules.release_shard, shard, 1)
    assert stores(rules.reset, ["a", "low"], NOW, forget_state=True) == {"a", "low"}
    stores.open("a")
    assert stores.flush("a", file="g").registered
    stores.open("low", LOW, "a")
    assert stores.needed()["g"] == {"a": (HIGH,), "low": (LOW,)}


def test_a_name_that_is_no_shard_is_forgotten_with_its_store(stores: Stores) -> None:
    stores.open("a")
    stores.open("b")
    stores.flush("b")
    for shard in ("a", "b"):
        stores(rules.release_shard, shard, 1)
    assert stores(rules.forget_shards, ["a", "b"], NOW) == {"a"}, "b has state"
    assert set(stores.book.stores) == {"b"}
    assert stores(rules.forget_shards, ["b"], NOW, forget_state=True) == {"b"}
    assert stores.book.stores == {}


def test_an_ended_shard_is_remembered_until_its_children_have_its_state(stores: Stores) -> None:
    stores.open("a")
    stores.flush("a")
    stores.end("a")
    stores.open("low", LOW, "a")
    assert stores.prune() == 0, "the other child is not open yet"
    stores.open("high", HIGH, "a")
    assert stores.prune() == 1
    assert set(stores.book.stores) == {"low", "high"}


def test_of_a_family_the_youngest_ended_shard_is_remembered(stores: Stores) -> None:
    stores.open("root", None)
    stores.open("left", None, "root")
    stores.flush("left")
    stores.end("root", "left")
    assert stores.prune() == 1
    assert set(stores.book.shards) == {"left"}
    assert set(stores.book.stores) == {"root"}
    assert stores.open("grandchild", None, "left").store == "root"


def test_a_shard_without_state_is_forgotten_with_its_store(stores: Stores) -> None:
    stores.open("a")
    stores.end("a")
    assert stores.prune() == 1
    assert stores.book.stores == {}
