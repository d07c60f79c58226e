"""The rules of a flush, of servers and of windows over a draft, where the machine comes by too seldom."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from mldserver.effects import Effects
from mldserver.errors import InternalError, ServerExpired
from mldserver.ledger import row_rules, rules
from mldserver.ledger.book import Book, Changes, Draft
from mldserver.ledger.contract import (
    BatchProgress,
    BatchStep,
    Commit,
    Flush,
    FunctionLife,
    Segment,
    SegmentKind,
    ServerState,
    ShapeChange,
    Wanted,
    WindowEntry,
    WindowState,
)
from mldserver.ledger.operations import Transaction
from mldserver.ledger.row_rules import register
from mldserver.records import Sequence
from tests.ledger.samples import BATCH, HUGE, W1, W2, W3, late, letter, more, move, seg

pytestmark = [pytest.mark.quick, pytest.mark.core]


class Steps:
    """A book, and one server that goes on with it, rule by rule."""

    def __init__(self) -> None:
        self.book = Book()
        self.life = self(rules.enter, "one", 0)

    def __call__(self, rule: Callable[..., Any], *args: Any, **fields: Any) -> Any:
        draft = Draft(self.book)
        told = rule(draft, *args, **fields)
        if draft.changes():
            self.book.apply(draft.changes())
        return told

    def to(self, state: WindowState) -> None:
        self(register, Flush((), (seg("s1"),)), 1)
        self(rules.cut, (W1,), "one")
        attempt = self(rules.begin_attempts, (W1,), "one").get(W1)
        if state is WindowState.SET_ASIDE:
            self(rules.set_aside, W1, "no", "one")
        elif state is not WindowState.CUT:
            self(rules.commit, (Commit(W1, attempt, "stage", ("f",), 1),), "one")
        if state is WindowState.PUBLISHED:
            self(rules.published, {W1: attempt}, "one", retain=True, now_ms=5)


@pytest.fixture
def steps() -> Steps:
    return Steps()


@pytest.mark.parametrize(
    ("segments", "told"),
    [
        ((seg("s0"),), "registered already"),
        ((seg("s2"), seg("s2")), "registered already"),
        ((late("l"), late("l")), "registered already"),
        ((more("s2"),), "is open"),
        ((Segment("s2", W1, 1, 1, 0, 5_000),), "other bounds"),
    ],
)
def test_what_the_contract_forbids_is_a_bug_and_changes_nothing(
    steps: Steps, segments: tuple[Segment, ...], told: str
) -> None:
    steps(register, Flush((), (seg("s0"),)), 1)
    before = steps.book.state()
    with pytest.raises(InternalError, match=told):
        steps(register, Flush((), segments), 2)
    assert steps.book.state() == before


@pytest.mark.parametrize("position", [None, Sequence(1)])
def test_a_position_that_would_go_down_is_a_bug(steps: Steps, position: Sequence | None) -> None:
    steps(rules.open_shard, "a", (), "one")
    steps(register, Flush((move(),)), 1)
    with pytest.raises(InternalError, match="go back"):
        steps(register, Flush((move(position=position, previous=HUGE),)), 1)


def test_the_times_of_a_shard_never_go_back(steps: Steps) -> None:
    steps(rules.open_shard, "a", (), "one")
    for number, (effective_ms, event_ms) in enumerate(((20, 30), (10, 40), (None, None))):
        previous = Sequence(number) if number else None
        moved = move(
            position=Sequence(number + 1), previous=previous, effective_ms=effective_ms, event_ms=event_ms
        )
        assert steps(register, Flush((moved,)), 1).registered
    assert (steps.book.shards["a"].effective_ms, steps.book.shards["a"].event_ms) == (20, 40)


def test_every_reason_to_refuse_a_flush_is_told_at_once(steps: Steps) -> None:
    steps.to(WindowState.PUBLISHED)
    steps(rules.expire, published_before_ms=9, keep_bytes=0, limit=9)
    told = steps(register, Flush((move("z"),), (seg("s2"), more("s3"))), 1)
    assert (told.lost_shards, told.cut_windows, told.expired_windows) == ({"z"}, {W1}, {W1})
    before = {"windows_before_ms": 10_000, "shards_before_ms": 0, "limit": 9}
    assert steps(rules.prune, keep_shards=frozenset(), **before) == 1
    assert steps(register, Flush((), (seg("s2"), more("s3"))), 1).cut_windows == {W1}
    assert steps(register, Flush((), (Segment("b", "batch-1", 1, 1),)), 1).registered


def test_only_a_servers_own_life_counts(steps: Steps) -> None:
    first = steps.life
    second = steps(rules.enter, "one", 1)
    with pytest.raises(ServerExpired):
        steps(Transaction(rules.drain, member=("one", first)).run)
    steps(rules.leave, "one", first)
    steps(Transaction(rules.beat, (ServerState("one", 5), "one"), member=("one", second)).run)
    assert steps(rules.expire_servers, {"one": 5, "two": 5}, "one") == {"two"}, "nobody expires itself"
    assert steps(rules.expire_servers, {"one": 4, "two": 5}, "three") == {"two"}
    assert steps(rules.expire_servers, {"one": 5, "two": 5}, "three") == {"one", "two"}
    with pytest.raises(InternalError, match="told of"):
        steps(rules.beat, ServerState("two", 1), "one")


def test_a_burial_lets_shards_and_windows_go(steps: Steps) -> None:
    steps.to(WindowState.CUT)
    for shard, server in (("a", "one"), ("b", "two")):
        steps(rules.open_shard, shard, (), server)
    assert steps(rules.reset, {"a", "z"}, 5) == frozenset()
    steps(rules.leave, "one", steps.life)
    assert {name: shard.owner for name, shard in steps.book.shards.items()} == {"a": None, "b": "two"}
    assert steps(rules.reset, {"a"}, 5) == {"a"}
    assert steps(rules.forget_shards, {"a", "b", "z"}, 5) == {"a"}
    assert set(steps.book.shards) == {"b"}
    assert [entry.owner for entry in steps(rules.adopt, "two")] == ["two"]
    assert steps(rules.adopt, "three") == ()
    steps(rules.leave, "four", steps(rules.enter, "four", 1))
    assert steps.book.windows[W1].owner == "two"
    assert steps(rules.begin_attempts, (W1,), "one") == {}
    steps(rules.set_aside, W1, "no", "one")
    steps(rules.leave, "one", steps.life)
    assert steps.book.windows[W1].state is WindowState.CUT


def test_shards_that_nobody_knows_are_noted_or_passed_over(steps: Steps) -> None:
    assert not steps(rules.accept_gap, "a")
    steps(rules.release_shard, "a", 1)
    steps(rules.end_shards, ("a",), 5)
    steps(rules.end_shards, ("a",), 6)
    assert steps.book.shards["a"].ended_ms == 5
    assert steps(rules.accept_gap, "a")
    before = {"windows_before_ms": 0, "shards_before_ms": 6, "limit": 9}
    assert steps(rules.prune, keep_shards=frozenset({"a"}), **before) == 0
    assert steps(rules.prune, keep_shards=frozenset(), **before) == 1


def test_windows_that_are_elsewhere_in_their_life_are_passed_over(steps: Steps) -> None:
    assert steps(rules.cut, ("none",), "one") == ()
    steps.to(WindowState.COMMITTED)
    assert steps(rules.cut, (W1,), "one") == ()
    assert steps(rules.commit, (Commit(W1, 1, "stage", (), 0),), "one") == frozenset()
    assert not steps(rules.decide, W1, "retry", 9)
    assert steps(rules.published, {W1: 1, "none": 1}, "one", retain=False, now_ms=1) == (
        seg("s1", revision=1),
    )
    assert steps(rules.published, {W1: 1}, "one", retain=False, now_ms=1) == ()


def test_a_window_that_was_put_aside_takes_late_rows_and_is_tried_again(steps: Steps) -> None:
    steps.to(WindowState.SET_ASIDE)
    assert steps(register, Flush((), (more("s2"), late("l"))), 1).registered
    assert steps(rules.decide, W1, "retry", 9)
    steps(rules.late_published, ("l", "never-there"))
    assert not steps.book.late
    entry = steps.book.windows[W1]
    assert (entry.state, entry.error, entry.pending) == (WindowState.CUT, None, (more("s2"),))


def test_a_halted_window_waits_for_a_decision(steps: Steps) -> None:
    assert not steps(rules.halt, W1, "no", "one", first=True)
    assert not steps(rules.decide, W1, "skip", 9)
    steps.to(WindowState.CUT)
    assert not steps(rules.halt, W1, "no", "two", first=True)
    assert not steps(rules.halt, W1, "no", "one", first=False)
    assert not steps(rules.decide, W1, "set_aside", 9)
    assert steps(rules.halt, W1, "no", "one", first=True)
    assert steps(rules.halt, W1, "no", "one", first=False)
    assert steps(rules.decide, W1, "retry", 9)
    assert steps.book.windows[W1].state is WindowState.CUT
    steps(rules.halt, W1, "no", "one", first=True)
    assert steps(rules.decide, W1, "set_aside", 9)
    assert not steps(rules.halt, W1, "no", "one", first=True)
    assert not steps(rules.decide, W1, "set_aside", 9)
    assert steps(rules.decide, W1, "skip", 9)
    entry = steps.book.windows[W1]
    assert (entry.is_skipped, entry.error, entry.published_ms) == (True, "no", 9)
    assert not steps(rules.decide, W1, "retry", 10)


def test_a_skipped_window_takes_its_late_rows_along_and_no_more_of_them(steps: Steps) -> None:
    steps.to(WindowState.SET_ASIDE)
    assert steps(register, Flush((), (more("s2"),)), 1).registered
    assert steps(rules.decide, W1, "skip", 9)
    entry = steps.book.windows[W1]
    assert (entry.segments, entry.pending) == ((seg("s1", revision=1), more("s2", revision=1)), ())
    assert entry.rows_in == 10
    assert steps(register, Flush((), (more("s3"),)), 1).expired_windows == {W1}


def test_windows_with_rows_that_wait_are_kept_and_cut_again(steps: Steps) -> None:
    steps.to(WindowState.PUBLISHED)
    assert steps(rules.expire, published_before_ms=5, keep_bytes=10**6, limit=9) == ()
    steps(register, Flush((), (more("s2"),)), 1)
    assert steps(rules.expire, published_before_ms=9, keep_bytes=0, limit=9) == ()
    (entry,) = steps(rules.cut, (W1,), "one")
    assert (entry.revision, entry.segments) == (2, (seg("s1", revision=1), more("s2", revision=2)))
    assert entry.segments[1].kind is SegmentKind.RECOMPUTE


@pytest.mark.parametrize(("keep_bytes", "kept"), [(1_500, 3), (1_499, 2), (999, 1), (0, 0)])
def test_retention_by_bytes_lets_the_oldest_go_first(steps: Steps, keep_bytes: int, kept: int) -> None:
    for ms in range(3):
        window_id = f"batch-{ms}"
        steps(register, Flush((), (Segment(f"s{ms}", window_id, 1, 500),)), 1)
        steps(rules.cut, (window_id,), "one")
        steps(rules.begin_attempts, (window_id,), "one")
        steps(rules.commit, (Commit(window_id, 1, "stage", (), 0),), "one")
        steps(rules.published, {window_id: 1}, "one", retain=True, now_ms=ms)
    gone = steps(rules.expire, published_before_ms=0, keep_bytes=keep_bytes, limit=9)
    assert [each.path for each in gone] == [f"s{ms}" for ms in range(3 - kept)]
    assert steps.book.retained_bytes == kept * 500


def test_a_batch_that_an_older_program_cut_without_raising_the_number_raises_it_when_it_is_pruned(
    steps: Steps,
) -> None:
    entry = WindowEntry(BATCH, WindowState.PUBLISHED, retained=False, published_ms=5)
    steps.book.apply(Changes(windows={BATCH: entry}))
    assert steps.book.totals.batch_progress == BatchProgress()
    assert steps(rules.prune, windows_before_ms=9, shards_before_ms=0, keep_shards=frozenset(), limit=9) == 1
    assert steps.book.totals.batch_progress == BatchProgress(2)


def test_a_server_that_enters_goes_on_with_the_ledgers_time_and_its_host_only_begins_it(steps: Steps) -> None:
    def beat_of(server_id: str, now_ms: int) -> int:
        steps(rules.enter, server_id, now_ms)
        return steps.book.servers[server_id].beat_ms

    assert steps.book.servers["one"].beat_ms == 0
    assert beat_of("two", 10**9) == 0
    assert beat_of("one", 10**9) == 1, "another beat than that of its life before"
    steps.to(WindowState.PUBLISHED)
    assert beat_of("two", 10**9) == 5
    for server_id in ("one", "two"):
        steps(rules.leave, server_id, steps.book.servers[server_id].life)
    assert beat_of("one", 10**9) == 5, "a window is retained"
    steps(register, Flush((), (more("r1"),)), 6)
    steps(rules.cut, (W1,), "one")
    assert steps.book.time_ms == 5
    steps(rules.leave, "one", steps.book.servers["one"].life)
    assert beat_of("one", 7) == 7, "none is retained: nothing can expire too early"


def test_a_window_that_the_stream_has_not_come_to_is_not_forgotten(steps: Steps) -> None:
    steps.to(WindowState.PUBLISHED)
    steps(rules.expire, published_before_ms=9, keep_bytes=0, limit=9)
    before = {"windows_before_ms": 10**9, "shards_before_ms": 0, "keep_shards": frozenset[str](), "limit": 9}
    assert steps(rules.prune, **before, ends_before_ms=9_999) == 0
    assert steps(rules.prune, **before, ends_before_ms=10_000) == 1


def declared(
    steps: Steps, fingerprint: str, version: int | None = None, now_ms: int = 0, **change: Any
) -> bool:
    seen = steps.book.version if version is None else version
    told: bool = steps(rules.declare, "one", ShapeChange(fingerprint, "text", **change), seen, now_ms)
    return told


def test_a_shape_replaces_the_pipelines_only_at_the_version_that_was_read(steps: Steps) -> None:
    assert declared(steps, "f1")
    assert not declared(steps, "f2", version=0)
    assert (steps.book.totals.shape, steps.book.servers["one"].shape) == ("f1", "f1")
    assert declared(steps, "f1", version=0), "the same shape changes nothing"


def test_a_new_shape_releases_windows_that_it_cannot_read_and_moves_the_first_window(steps: Steps) -> None:
    declared(steps, "f1")
    steps.to(WindowState.PUBLISHED)
    steps(rules.open_shard, "a", (), "one")
    steps(register, Flush((move(event_ms=5),)), 1)
    assert declared(steps, "f2", over=frozenset({W1, W2}), window_ms=7_000, forget_event_times=True)
    assert not steps.book.windows[W1].retained
    assert steps.book.totals.cut_below_ms == 14_000, "the first multiple of 7 s at or after W1's end"
    assert steps.book.shards["a"].event_ms is None


def test_a_new_size_of_windows_moves_nothing_where_no_window_has_begun(steps: Steps) -> None:
    steps(register, Flush((), (seg("s1", W2),)), 1)
    assert declared(steps, "f1", window_ms=7_000, now_ms=9_999)
    assert steps.book.totals.cut_below_ms is None


def test_a_drain_ends_once_every_server_that_ran_before_has_left(steps: Steps) -> None:
    steps(rules.enter, "two", 0)
    steps(rules.declare, "two", ShapeChange("f1", "text"), steps.book.version, 0)
    steps(rules.drain)
    assert declared(steps, "f1")
    assert steps.book.totals.draining
    steps(rules.leave, "two", steps.book.servers["two"].life)
    assert declared(steps, "f1")
    assert not steps.book.totals.draining


def test_a_claim_keeps_the_folder_unless_it_names_the_ledger_that_it_replaces(steps: Steps) -> None:
    steps(rules.enter, "two", 0)
    known = steps.book.totals.ledger_id
    steps(rules.claim, "/a", None, None)
    steps(rules.claim, "/b", "another", None)
    assert (steps.book.totals.folder, steps.book.totals.ledger_id) == ("/a", known)
    assert steps.book.totals.claims == 2
    steps(rules.claim, "/b", known, "two")
    assert steps.book.totals.folder == "/b"
    assert steps.book.totals.ledger_id != known
    assert set(steps.book.servers) == {"two"}


def test_a_shard_is_released_only_by_its_latest_opening(steps: Steps) -> None:
    first = steps(rules.open_shard, "a", (), "one").epoch
    second = steps(rules.open_shard, "a", (), "one").epoch
    steps(rules.release_shard, "a", first)
    assert steps.book.shards["a"].owner == "one"
    steps(rules.release_shard, "a", second)
    assert steps.book.shards["a"].owner is None


def test_only_the_latest_attempt_is_published(steps: Steps) -> None:
    steps.to(WindowState.COMMITTED)
    assert steps(rules.published, {W1: 2}, "one", retain=True, now_ms=5) == ()
    assert steps(rules.published, {W1: 1}, "two", retain=True, now_ms=5) == ()
    assert steps.book.windows[W1].state is WindowState.COMMITTED


def test_a_published_window_is_computed_again_with_its_late_rows(steps: Steps) -> None:
    steps.to(WindowState.PUBLISHED)
    steps(register, Flush((), (more("s2"),)), 1)
    assert steps(rules.decide, W1, "recompute", 9)
    entry = steps.book.windows[W1]
    assert (entry.state, entry.revision) == (WindowState.CUT, 2)
    assert entry.segments == (seg("s1", revision=1), more("s2", revision=2))


def test_letters_are_marked_paged_and_removed_by_their_ids(steps: Steps) -> None:
    steps(row_rules.store, ())
    steps(row_rules.store, (letter(0), letter(1), letter(2)))
    steps(row_rules.store, (letter(3),), wanted=True)
    first, second = sorted(steps.book.letters, key=int)
    ids = [f"{first}.0", f"{first}.1", f"{first}.2", f"{second}.0"]
    unknown = ["1000.0", f"{first}.x", f"{first}.3", "nothing"]
    assert steps(row_rules.mark, [ids[1], *unknown], wanted=True) == {ids[1]}

    def pages(after: str | None = None, limit: int = 9, *, wanted: bool = False) -> list[str]:
        found = row_rules.page(steps.book, after, limit, wanted=wanted)
        return [f"{version}.{place}" for version, places in found for place in places]

    assert pages() == pages("nothing") == ids
    assert (pages(limit=2), pages(ids[1]), pages(ids[2])) == (ids[:2], ids[2:], ids[3:])
    assert pages(f"{second}.0") == []
    assert pages(wanted=True) == [ids[1], ids[3]]
    assert row_rules.stored(steps.book, int(first), 1, letter(1)).wanted
    assert not row_rules.stored(steps.book, int(first), 0, letter(0)).wanted
    assert steps(row_rules.mark, [ids[1]], wanted=False) == {ids[1]}
    assert steps.book.redrives == 1
    told = steps(register, Flush((), redriven=(ids[0],)), 1)
    assert told.gone_letters == {ids[0]}, "a letter without a mark is not redriven"
    assert steps(row_rules.remove, [ids[3], ids[0], *unknown]) == {ids[0], ids[3]}
    assert steps(row_rules.remove, [ids[0], ids[3]]) == frozenset()
    assert steps(row_rules.mark, [ids[0]], wanted=True) == frozenset()
    assert pages() == ids[1:3]
    assert steps.book.totals.dead_letters == 2
    assert steps.book.redrives == 0


def test_a_server_that_enters_again_releases_the_windows_it_had(steps: Steps) -> None:
    steps.to(WindowState.COMMITTED)
    assert steps.book.time_ms == 0
    steps(rules.enter, "one", 1)
    assert steps.book.windows[W1].owner is None


def test_a_server_that_enters_has_a_life_of_its_own_and_its_reports_keep_life_and_shape(steps: Steps) -> None:
    known = steps.book.totals.ledger_id
    assert known
    second = steps(rules.enter, "two", 0)
    assert (steps.life, second) == (1, 2)
    assert steps.book.totals.ledger_id == known
    declared(steps, "f1")
    steps(rules.beat, ServerState("one", 5, reason="\ud800", held_by="\ud800"), "one")
    server = steps.book.servers["one"]
    assert (server.life, server.shape, server.beat_ms) == (steps.life, "f1", 5)
    assert server.held_by == server.reason == "\\ud800", "half a character cannot be stored"


def test_an_opening_keeps_the_parents_and_shows_an_accepted_gap_once(steps: Steps) -> None:
    assert steps(rules.open_shard, "c", ("p",), "one").parents == ("p",)
    assert steps(rules.accept_gap, "c")
    opened = steps(rules.open_shard, "c", (), "one")
    assert (opened.parents, opened.gap_accepted, opened.epoch) == (("p",), True, 2)
    assert not steps(rules.open_shard, "c", ("q",), "two").gap_accepted
    assert steps.book.shards["c"].parents == ("q",)
    assert steps.book.shards["c"].owner == "two"


def test_a_shard_that_is_reset_is_read_from_its_beginning_under_another_epoch(steps: Steps) -> None:
    steps(rules.open_shard, "a", (), "one")
    steps(register, Flush((move(effective_ms=5, event_ms=6, ended=True),)), 1)
    steps(rules.release_shard, "a", 1)
    assert steps(rules.reset, {"a"}, 5) == {"a"}
    shard = steps.book.shards["a"]
    assert (shard.epoch, shard.position, shard.ended_ms) == (2, None, None)
    assert (shard.effective_ms, shard.event_ms) == (None, None)


def test_a_window_goes_through_its_life_with_what_each_step_says(steps: Steps) -> None:
    steps.to(WindowState.COMMITTED)
    entry = steps.book.windows[W1]
    assert (entry.state, entry.owner, entry.attempt) == (WindowState.COMMITTED, "one", 1)
    assert (entry.staging, entry.files, entry.rows_out, entry.error) == ("stage", ("f",), 1, None)
    assert (entry.revision, entry.rows_in) == (1, 5)
    steps(rules.published, {W1: 1}, "one", retain=True, now_ms=5)
    entry = steps.book.windows[W1]
    assert (entry.state, entry.owner, entry.staging) == (WindowState.PUBLISHED, None, None)
    assert (entry.published_ms, entry.retained, entry.segments) == (5, True, (seg("s1", revision=1),))
    assert steps(rules.cut, (W1,), "one") == (), "no late rows wait"
    assert [each.path for each in steps(rules.expire, published_before_ms=6, keep_bytes=0, limit=1)] == ["s1"]
    entry = steps.book.windows[W1]
    assert (entry.retained, entry.segments) == (False, ())


def test_a_window_is_set_aside_with_its_error_and_without_an_owner(steps: Steps) -> None:
    steps.to(WindowState.SET_ASIDE)
    entry = steps.book.windows[W1]
    assert (entry.state, entry.owner, entry.error) == (WindowState.SET_ASIDE, None, "no")
    assert steps(rules.decide, W1, "skip", 9)
    entry = steps.book.windows[W1]
    assert (entry.state, entry.owner, entry.published_ms) == (WindowState.PUBLISHED, None, 9)


def test_a_halted_window_that_is_skipped_has_no_owner(steps: Steps) -> None:
    steps.to(WindowState.CUT)
    steps(rules.halt, W1, "no", "one", first=True)
    assert steps(rules.decide, W1, "skip", 9)
    assert steps.book.windows[W1].owner is None


def test_a_publication_clears_the_error_of_an_attempt_that_committed_after_it(steps: Steps) -> None:
    steps.to(WindowState.COMMITTED)
    steps(rules.halt, W1, "no", "one", first=True)
    assert steps.book.windows[W1].error == "no"
    steps(rules.published, {W1: 1}, "one", retain=True, now_ms=5)
    assert steps.book.windows[W1].error is None


def test_orphans_are_adopted_oldest_first_and_runs_of_rows_before_them(steps: Steps) -> None:
    for window_id in (W3, W2, BATCH, W1):
        steps(register, Flush((), (seg(window_id, window_id),)), 1)
    steps(rules.cut, (W3, W2, BATCH, W1), "one")
    steps(rules.leave, "one", steps.life)
    assert [each.window_id for each in steps(rules.adopt, "two")] == [BATCH, W1, W2, W3]


def test_the_text_of_a_shape_is_stored_once(steps: Steps) -> None:
    declared(steps, "f1")
    steps(rules.declare, "one", ShapeChange("f1", "another text"), steps.book.version, 0)
    assert steps.book.shapes["f1"] == "text"


def test_windows_are_pruned_that_were_published_before_a_time_and_not_at_it(steps: Steps) -> None:
    steps.to(WindowState.PUBLISHED)
    steps(rules.expire, published_before_ms=9, keep_bytes=0, limit=9)
    before = {"shards_before_ms": 0, "keep_shards": frozenset[str](), "limit": 9, "ends_before_ms": 10_000}
    assert steps(rules.prune, windows_before_ms=5, **before) == 0
    assert steps(rules.prune, windows_before_ms=6, **before) == 1
    assert steps.book.totals.cut_below_ms == 10_000


def test_a_batch_that_is_cut_is_behind_the_progress_of_batches(steps: Steps) -> None:
    steps(register, Flush((), (seg("s1", BATCH),)), 1)
    steps(rules.cut, (BATCH,), "one")
    assert steps.book.totals.batch_progress == BatchProgress(2)


def test_a_commit_clears_the_error_of_the_attempts_before_it(steps: Steps) -> None:
    steps.to(WindowState.CUT)
    steps(rules.halt, W1, "no", "one", first=True)
    steps(rules.commit, (Commit(W1, 1, "stage", ("f",), 1),), "one")
    assert steps.book.windows[W1].error is None


def test_a_flush_moves_the_progress_of_batches_on(steps: Steps) -> None:
    step = BatchStep(BatchProgress(), BatchProgress(1, 4, 9), max_rows=10)
    assert steps(register, Flush((), (seg("s1", BATCH),), batches=step), 1).registered
    assert steps.book.totals.batch_progress == BatchProgress(1, 4, 9)


def test_a_decision_about_a_halted_window_clears_its_error_or_takes_its_owner(steps: Steps) -> None:
    steps.to(WindowState.CUT)
    steps(rules.halt, W1, "no", "one", first=True)
    assert steps(rules.decide, W1, "retry", 9)
    assert (steps.book.windows[W1].error, steps.book.windows[W1].owner) == (None, "one")
    steps(rules.halt, W1, "no", "one", first=True)
    assert steps(rules.decide, W1, "set_aside", 9)
    assert (steps.book.windows[W1].error, steps.book.windows[W1].owner) == ("no", None)


def test_a_shard_is_pruned_that_ended_before_a_time_and_not_at_it(steps: Steps) -> None:
    steps(rules.end_shards, ("a",), 5)
    before = {"windows_before_ms": 0, "keep_shards": frozenset[str](), "limit": 9}
    assert steps(rules.prune, shards_before_ms=5, **before) == 0
    assert steps(rules.prune, shards_before_ms=6, **before) == 1


@pytest.mark.parametrize(("epoch", "previous"), [(1, None), (3, None), (2, HUGE)])
def test_a_position_moves_only_for_the_latest_opening_and_from_where_it_stands(
    steps: Steps, epoch: int, previous: Sequence | None
) -> None:
    for _ in range(2):
        steps(rules.open_shard, "a", (), "one")
    refused = Flush((move(epoch=epoch, previous=previous),), (seg("s1"),))
    assert steps(register, refused, 1).lost_shards == {"a"}
    assert (steps.book.shards["a"].position, steps.book.windows) == (None, {})
    assert steps(register, Flush((move(epoch=2),), (seg("s1"),)), 1).registered
    assert steps.book.shards["a"].position == HUGE


def test_a_flush_is_registered_whole(steps: Steps) -> None:
    steps(rules.open_shard, "a", (), "one")
    steps(row_rules.store, (letter(0), letter(1)), wanted=True)
    first = next(iter(steps.book.letters))
    flush = Flush(
        (move(ended=True),),
        (seg("s1", revision=7), seg("s2", revision=7), replace(late("l"), revision=7)),
        Effects(dead_letters=(letter(2),)),
        redriven=(f"{first}.0",),
        clock=5,
    )
    assert steps(register, flush, 9).registered
    book = steps.book
    assert (book.windows[W1].segments, book.windows[W1].rows_in) == ((seg("s1"), seg("s2")), 10)
    assert book.late["l"] == late("l")
    assert (book.shards["a"].position, book.shards["a"].ended_ms) == (HUGE, 9)
    assert (book.totals.clock, book.totals.dead_letters, book.redrives) == (5, 2, 1)
    (left, fresh) = row_rules.page(book, None, 9, wanted=False)
    assert (left, fresh[1]) == ((int(first), [1]), [0])
    again = move(previous=HUGE, ended=True)
    assert steps(register, Flush((again,), (seg("s3"),), clock=4), 10).registered
    assert steps.book.shards["a"].ended_ms == 9, "the first end stays"
    assert (steps.book.totals.clock, steps.book.windows[W1].rows_in) == (5, 15)


def test_letters_are_stored_under_the_version_of_their_transaction(steps: Steps) -> None:
    steps(row_rules.store, (letter(0),))
    assert list(steps.book.letters) == [str(steps.book.version)]


def test_what_is_wanted_changes_from_what_it_was_alone() -> None:
    steps = Steps()
    undeployed = FunctionLife(Wanted.UNDEPLOYED)
    assert not steps(rules.change_life, undeployed, FunctionLife())
    assert steps(rules.change_life, FunctionLife(), FunctionLife(Wanted.PAUSED))
    assert not steps.book.totals.draining
    assert steps(rules.change_life, FunctionLife(Wanted.PAUSED), undeployed)
    assert steps.book.totals.draining


def test_only_an_undeployed_function_without_servers_is_forgotten() -> None:
    steps = Steps()
    steps(rules.open_shard, "a", (), "one", None)
    steps(register, Flush((move(position=Sequence(7), event_ms=3),)), 5)
    undeployed, kept = FunctionLife(Wanted.UNDEPLOYED), FunctionLife(Wanted.UNDEPLOYED, keep=True)
    steps(rules.change_life, FunctionLife(), undeployed)
    assert not steps(rules.forget, 5), "a server has the shard"
    steps(rules.release_shard, "a", 1)
    for life in (FunctionLife(), FunctionLife(Wanted.PAUSED), kept):
        steps(rules.change_life, steps.book.totals.life, life)
        assert not steps(rules.forget, 5), life
    steps(rules.change_life, kept, undeployed)
    assert steps.book.shards["a"].event_ms == 3
    assert steps(rules.forget, 5)
    forgotten = steps.book.shards["a"]
    assert (forgotten.position, forgotten.event_ms, forgotten.gap_accepted) == (Sequence(7), None, True)
