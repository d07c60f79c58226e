"""The timers of a store: which are set, which are due, what a batch that fails leaves, and what each takes in memory."""

from __future__ import annotations

import random
from typing import Any, Final

import pytest

from mldserver.base.clock import BOUNDS_MS
from mldserver.handler.spec import TimerHook
from mldserver.records import Sequence
from mldserver.runtime.interface import TimerFilter
from mldserver.runtime.timer_table import PORTION_MS, DueTimer, TimerTable
from mldserver.stores import TimerEntry

pytestmark = [pytest.mark.quick, pytest.mark.core]

HOOKS: Final = {"alarm": TimerHook("alarm", is_async=False), "hasty": TimerHook("hasty", False, 5000)}
NIL = b"\xc0"
Change = tuple[str, str, int | None, bytes | None]


def set_(table: TimerTable, key: str, **dues: int | None) -> None:
    """Set or cancel timers of a key as one call does. ``alarm_x``: the timer ``alarm/x``."""
    table.apply(
        key, {name.replace("_", "/"): None if due is None else (due, NIL) for name, due in dues.items()}
    )


def end(table: TimerTable) -> list[Change]:
    """End the batch and begin another one; return the changes."""
    changes = table.changes()
    table.begin()
    return changes


def due(table: TimerTable, until_ms: int = 1 << 40, limit: int = 100) -> list[str]:
    return [f"{key} {timer_id}" for key, timer_id, _ in table.due(until_ms, limit)]


def fire(table: TimerTable, *, now_ms: int, limit: int = 100) -> list[str]:
    """Fire what is due as a batch does; return keys and ids of the calls."""
    called = []
    for key, timer_id, entry in table.due(now_ms, limit):
        if table.take(timer(key, timer_id, entry, now_ms)):
            called.append(f"{key} {timer_id}")
    return called


def timer(
    key: str, timer_id: str, entry: TimerEntry, now_ms: int = 0, *, is_letter: bool = False
) -> DueTimer:
    return DueTimer("shard", None, key, timer_id, entry, received_ms=now_ms, is_letter=is_letter)


@pytest.fixture
def table() -> TimerTable:
    return TimerTable(HOOKS)


def test_timers_are_due_in_the_order_of_their_times_and_then_as_they_were_set(table: TimerTable) -> None:
    set_(table, "b", alarm=30, alarm_x=-5)
    set_(table, "a", alarm=30, hasty=10)
    assert due(table, until_ms=29) == ["b alarm/x", "a hasty"]
    end(table)
    assert due(table, limit=3) == ["b alarm/x", "a hasty", "b alarm"]
    end(table)
    assert due(table) == ["b alarm/x", "a hasty", "b alarm", "a alarm"]


def test_a_timer_that_is_replaced_or_cancelled_does_not_come_at_its_earlier_time(table: TimerTable) -> None:
    set_(table, "a", alarm=10, alarm_x=10, alarm_y=10)
    set_(table, "a", alarm=20, alarm_x=None, alarm_z=None)
    assert due(table, until_ms=10) == ["a alarm/y"]
    end(table)
    assert list(table.of("a")) == ["alarm/y", "alarm"]
    assert (table.report().set, table.report().cancelled) == (0, 0)


def test_the_timers_of_a_key_are_counted(table: TimerTable) -> None:
    counts = [table.count("a")]
    for timers in ({"alarm": 1}, {"alarm_x": 1}, {"alarm": None}, {"alarm_x": None}):
        set_(table, "a", **timers)
        counts.append(table.count("a"))
    assert counts == [0, 1, 2, 1, 0]


def test_a_report_says_what_the_batch_has_done_and_what_is_set(table: TimerTable) -> None:
    assert (len(table), table.report().next_due_ms, table.report().lateness) == (0, None, ())
    set_(table, "a", alarm=10, alarm_x=20, gone=5)
    set_(table, "a", alarm_x=None, alarm_y=None)
    table.changes()
    report = table.report()
    assert (report.set, report.cancelled, report.pending, report.unknown) == (3, 1, 2, 1)
    assert (report.next_due_ms, report.next_call_ms, report.callbacks) == (5, 10, ("alarm", "gone"))
    table.begin()
    assert fire(table, now_ms=10 + BOUNDS_MS[2]) == ["a alarm"]
    table.changes()
    report = table.report()
    assert (report.fired, report.skipped, report.failed, report.lateness_sum_ms) == (1, 0, 0, BOUNDS_MS[2])
    assert [place for place, count in enumerate(report.lateness) if count] == [2]
    assert (report.pending, report.next_due_ms, report.next_call_ms) == (1, 5, None)
    assert report.callbacks == ("gone",)


def test_callbacks_that_the_handler_does_not_have_are_held_until_a_version_has_them() -> None:
    table = TimerTable(HOOKS)
    set_(table, "a", gone=1, gone_x=2, alarm=3)
    changes = end(table)
    assert due(table) == ["a alarm"]
    end(table)
    entries = [(key, timer_id, due_ms or 0, value or b"") for key, timer_id, due_ms, value in changes]
    later = TimerTable({**HOOKS, "gone": TimerHook("gone", is_async=False)}, entries)
    assert due(later) == ["a gone", "a gone/x", "a alarm"]


def test_a_timer_is_gone_when_its_call_begins_and_may_be_set_again_by_it(table: TimerTable) -> None:
    set_(table, "a", alarm=10, alarm_x=10)
    end(table)
    first, second = (timer(*each, 10) for each in table.due(10, 9))
    assert table.take(first)
    assert not table.holds("a", "alarm")
    set_(table, "a", alarm=40, alarm_x=None)
    assert not table.take(second)  # an earlier call has cancelled it
    assert [change[:3] for change in end(table)] == [("a", "alarm", 40), ("a", "alarm/x", None)]
    assert due(table) == ["a alarm"]


def test_a_timer_that_an_earlier_call_of_the_portion_has_replaced_waits_for_its_new_time(
    table: TimerTable,
) -> None:
    set_(table, "a", alarm=10)
    end(table)
    [found] = table.due(10, 9)
    set_(table, "a", alarm=10)
    assert not table.take(timer(*found, 10))
    assert [change[:3] for change in end(table)] == [("a", "alarm", 10)]
    assert due(table, until_ms=10) == ["a alarm"]


def test_a_first_call_that_is_too_late_is_skipped_and_a_later_attempt_is_not(table: TimerTable) -> None:
    set_(table, "a", hasty=10)
    end(table)
    assert fire(table, now_ms=5011) == []
    assert [change[1:] for change in table.changes()] == [("hasty", None, None)]
    assert (table.report().skipped, table.report().fired, table.report().lateness) == (1, 0, ())
    table.begin()
    set_(table, "a", hasty=10)
    end(table)
    [found] = table.due(5010, 1)
    assert table.take(timer(*found, 5010))
    table.set_again(timer(*found, 5010), 10)
    table.changes()
    assert (table.report().failed, table.report().fired) == (1, 0)
    table.begin()
    [again] = table.due(5020, 1)
    assert (again[2].attempt, again[2].due_ms) == (1, 5020)
    assert table.take(timer(*again, 99_999))


def test_a_call_before_the_due_time_is_not_late(table: TimerTable) -> None:
    """The server's clock may be corrected backwards."""
    set_(table, "a", alarm=10)
    end(table)
    [found] = table.due(10, 1)
    assert table.take(timer(*found, 3))
    table.changes()
    assert table.report().lateness_sum_ms == 0


def test_a_dead_letter_is_called_and_leaves_the_timer_that_is_set(table: TimerTable) -> None:
    set_(table, "a", alarm=10)
    end(table)
    letter = timer("a", "alarm", TimerEntry(1, NIL), is_letter=True)
    assert table.take(letter)
    assert (table.changes(), due(table)) == ([], ["a alarm"])
    assert table.report().lateness == ()


def test_what_fires_has_the_sequence_of_the_shards_last_record() -> None:
    entry = TimerEntry(1000, b"\xa1x", 2, 7)
    one = DueTimer("shard", Sequence(17, 3), "k", "alarm/n", entry, received_ms=5)
    assert (one.sequence, one.sequence_text, one.sub_sequence_number) == (Sequence(17, 3), "17", 3)
    value = one.value()
    assert (value.payload, value.name, value.attempt, value.callback) == ("x", "n", 2, "alarm")
    assert value.at.timestamp() == 1
    none = timer("k", "alarm", entry)
    assert (none.sequence, none.sequence_text, none.sub_sequence_number) == (Sequence(0), None, None)


def test_a_batch_that_does_not_come_to_its_end_leaves_every_timer_as_it_was(table: TimerTable) -> None:
    set_(table, "a", alarm=10, alarm_x=20, gone=1)
    set_(table, "b", alarm=15)
    end(table)
    before, bytes_ = table.of("a"), table.bytes
    assert fire(table, now_ms=15) == ["a alarm", "b alarm"]
    set_(table, "a", alarm=1, alarm_x=None, alarm_new=2, gone=None)
    set_(table, "c", alarm=1)
    table.begin()
    assert (table.of("a"), table.of("c"), table.bytes, len(table)) == (before, {}, bytes_, 4)
    assert fire(table, now_ms=20) == ["a alarm", "b alarm", "a alarm/x"]


@pytest.mark.parametrize(
    ("which", "cancelled"),
    [
        (TimerFilter(key="a"), {"a alarm", "a alarm/x", "a alarmed"}),
        (TimerFilter(timer_id="alarm"), {"a alarm", "a alarm/x", "b alarm"}),
        (TimerFilter(timer_id="alarm/x"), {"a alarm/x"}),
        (TimerFilter(due_before_ms=20), {"a alarm", "a alarmed"}),
        (TimerFilter(key="nobody"), set()),
        (TimerFilter(), {"a alarm", "a alarm/x", "a alarmed", "b alarm"}),
    ],
)
def test_timers_may_be_cancelled_by_key_callback_name_and_time(
    table: TimerTable, which: TimerFilter, cancelled: set[str]
) -> None:
    set_(table, "a", alarm=10, alarm_x=20, alarmed=10)
    set_(table, "b", alarm=30)
    end(table)
    table.cancel(which, 100)
    changes = table.changes()
    assert table.report().cancelled == len(cancelled)
    assert {f"{key} {timer_id}" for key, timer_id, _, value in changes if value is None} == cancelled


def test_of_many_timers_some_are_cancelled_at_a_time(table: TimerTable) -> None:
    for key in "abc":
        set_(table, key, alarm=1, alarm_x=2)
    end(table)
    for left in (3, 0, 0):
        table.cancel(TimerFilter(), 3)
        end(table)
        assert len(table) == left


def test_the_queue_does_not_keep_what_is_set_again_and_again(table: TimerTable) -> None:
    for at in range(1000):
        set_(table, "a", alarm=10_000 + at)
        end(table)
    assert len(table._callable.items) < 200  # nothing else shows them
    assert due(table) == ["a alarm"]


class Model:
    """The simplest thing that could be right: dicts that are copied before each batch."""

    def __init__(self) -> None:
        self.timers: dict[tuple[str, str], tuple[int, int]] = {}
        """Due time and number by key and id."""
        self.number = 0

    def set(self, key: str, timer_id: str, due_ms: int | None) -> None:
        self.timers.pop((key, timer_id), None)
        if due_ms is not None:
            self.number += 1
            self.timers[key, timer_id] = due_ms, self.number

    def due(self, until_ms: int, limit: int) -> list[tuple[str, str]]:
        ordered = sorted(self.timers, key=lambda each: self.timers[each])
        known = [each for each in ordered if not each[1].startswith("gone")]
        return [each for each in known if self.timers[each][0] <= until_ms][:limit]


@pytest.mark.parametrize("seed", range(40))
def test_whatever_is_set_fired_cancelled_and_taken_back_the_table_says_what_a_model_says(seed: int) -> None:
    dice = random.Random(seed)
    table, model, stored = TimerTable(HOOKS), Model(), dict[tuple[str, str], tuple[int, bytes]]()
    keys, ids, now_ms = ["a", "b", "\ud800"], ["alarm", "alarm/x", "alarm/y", "gone"], 0
    for _ in range(60):
        before = dict(model.timers)
        portion: list[Any] = []
        if dice.random() < 0.5:
            now_ms += dice.randrange(30)
            limit = dice.randrange(1, 5)
            portion = table.due(now_ms, limit)
            assert [each[:2] for each in portion] == model.due(now_ms, limit)
        numbers = {each[:2]: model.timers[each[:2]][1] for each in portion}
        for step in portion or range(dice.randrange(5)):
            if portion:
                place, one = step[:2], timer(*step, now_ms)
                is_called = model.timers.get(place, (0, 0))[1] == numbers[place] and not any(
                    due < one.due_ms
                    for (key, timer_id), (due, _) in model.timers.items()
                    if key == place[0] and timer_id != "gone"
                )
                assert table.take(one) == is_called
                if not is_called:
                    continue
                model.set(*place, None)
                if dice.random() < 0.3:
                    table.set_again(one, 7)
                    model.set(*place, now_ms + 7)
            for _ in range(dice.randrange(3)):
                key, timer_id = dice.choice(keys), dice.choice(ids)
                due_ms = None if dice.random() < 0.3 else now_ms + dice.randrange(-5, 40)
                table.apply(key, {timer_id: None if due_ms is None else (due_ms, NIL)})
                model.set(key, timer_id, due_ms)
        if dice.random() < 0.2:
            table.begin()
            model.timers = before
        else:
            for key, timer_id, due, value in end(table):
                stored.pop((key, timer_id), None)
                if due is not None and value is not None:
                    stored[key, timer_id] = due, value
        assert {place: due_ms for place, (due_ms, _) in model.timers.items()} == {
            place: due_ms for place, (due_ms, _) in stored.items()
        }
        assert table.report().next_due_ms == min(
            (due_ms for due_ms, _ in model.timers.values()), default=None
        )
        if dice.random() < 0.1:
            table = TimerTable(HOOKS, [(*place, *entry) for place, entry in stored.items()])
        assert len(table) == len(model.timers)
    for place in list(model.timers):
        table.apply(place[0], {place[1]: None})
    end(table)
    assert (table.bytes, len(table)) == (0, 0)


def test_timers_with_many_names_are_told_apart(table: TimerTable) -> None:
    for number in range(2_500):
        set_(table, "a" if number % 2 else "b", **{f"alarm_{number}": number})
    end(table)
    assert fire(table, now_ms=1 << 40, limit=3_000) == [
        f"{'a' if number % 2 else 'b'} alarm/{number}" for number in range(2_500)
    ]


def test_what_a_batch_did_not_come_to_is_still_due(table: TimerTable) -> None:
    set_(table, "a", alarm=1, alarm_x=2, alarm_y=3)
    end(table)
    first, *_ = table.due(1 << 40, 3)
    assert table.take(timer(*first))
    set_(table, "a", alarm_x=None)
    end(table)
    assert fire(table, now_ms=3) == ["a alarm/y"]


def test_a_timer_waits_for_one_of_its_key_that_a_call_before_it_has_set_to_an_earlier_time(
    table: TimerTable,
) -> None:
    set_(table, "a", alarm=1, alarm_x=5)
    set_(table, "b", alarm_y=6)
    end(table)
    called = []
    for key, timer_id, entry in table.due(10, 100):
        if table.take(timer(key, timer_id, entry)):
            called.append(f"{key} {timer_id}")
            if timer_id == "alarm":
                set_(table, key, alarm=3)
    assert called == ["a alarm", "b alarm/y"]
    end(table)
    assert fire(table, now_ms=10) == ["a alarm", "a alarm/x"]


def test_a_portion_that_takes_long_leaves_the_rest_to_the_next_but_fires_one_timer_at_least(
    table: TimerTable,
) -> None:
    set_(table, "a", alarm=1, alarm_x=2, alarm_y=3)
    end(table)
    portion = [timer(*each) for each in table.due(10, 100)]
    took_ms = [PORTION_MS + 1, PORTION_MS, PORTION_MS + 1]
    assert [table.take(one, took_ms=ms) for one, ms in zip(portion, took_ms, strict=True)] == [
        True,
        True,
        False,
    ]
    assert table.latest_ms == 2
    end(table)
    assert fire(table, now_ms=10) == ["a alarm/y"]
