"""What a handler does with timers: marks callbacks, sets, cancels and reads the timers of a key."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from functools import partial, wraps
from typing import Any

import pytest

from mldserver import Context, Timer, Timers, timer
from mldserver.errors import NoKey, NotATimer
from mldserver.handler.timers import TimerMark, mark_of

pytestmark = [pytest.mark.quick, pytest.mark.core]

NOON = datetime(2026, 7, 1, 12, tzinfo=UTC)


@timer
def alarm(due: Timer, ctx: Context) -> None: ...


@timer(max_lateness="6 hours")
def report(due: Timer, ctx: Context) -> None: ...


def unmarked(due: Timer, ctx: Context) -> None: ...


class Reminders:
    @timer
    async def unpaid(self, due: Timer, ctx: Context) -> None: ...


@pytest.fixture
def ctx() -> Context:
    return Context("a key", now=NOON)


def test_a_mark_says_how_late_a_first_call_may_be() -> None:
    assert mark_of(alarm) == TimerMark(None)
    assert mark_of(report) == TimerMark(6 * 3600 * 1000)
    assert mark_of(Reminders().unpaid) == mark_of(Reminders.unpaid) == TimerMark(None)
    assert mark_of(unmarked) is None


def test_a_mark_survives_a_decorator_that_wraps() -> None:
    @wraps(report)
    def around(due: Timer, ctx: Context) -> None: ...

    assert mark_of(around) == TimerMark(6 * 3600 * 1000)


def test_only_what_a_later_version_finds_by_name_can_be_a_callback() -> None:
    def inside(due: Timer, ctx: Context) -> None: ...

    for callback in (lambda *_: None, partial(unmarked, ctx=None), inside, len, "alarm"):
        with pytest.raises(NotATimer, match="is not a callback of timers"):
            timer(callback)  # type: ignore[call-overload]  # what is refused is not always a function
    with pytest.raises(ValueError, match="not a duration"):
        timer(max_lateness="soon")


def test_a_timer_is_due_after_a_while_or_at_a_time(ctx: Context) -> None:
    ctx.timers.set(alarm, after="30 minutes", payload=[1, "x"])
    ctx.timers.set(alarm, at=NOON + timedelta(hours=1), name="later")
    ctx.timers.set(report, after=timedelta(seconds=90))
    ctx.timers.set(Reminders().unpaid, after=0.5)
    assert list(ctx.timers) == [
        Timer(NOON + timedelta(milliseconds=500), callback="unpaid"),
        Timer(NOON + timedelta(seconds=90), callback="report"),
        Timer(NOON + timedelta(minutes=30), [1, "x"], callback="alarm"),
        Timer(NOON + timedelta(hours=1), None, "later", callback="alarm"),
    ]
    assert len(ctx.timers) == 4


def test_a_time_is_rounded_up_to_milliseconds_and_comes_back_in_utc(ctx: Context) -> None:
    ctx.timers.set(alarm, at=datetime(2026, 7, 1, 14, 0, 0, 1, timezone(timedelta(hours=2))))
    due = ctx.timers.get(alarm)
    assert due is not None
    assert due.at == NOON + timedelta(milliseconds=1)
    assert due.at.tzinfo is UTC


def test_timers_due_together_come_in_the_order_they_were_set(ctx: Context) -> None:
    for name in ("b", "a", "c", "b"):
        ctx.timers.set(alarm, at=NOON, name=name)
    assert [each.name for each in ctx.timers] == ["a", "c", "b"]


def test_setting_a_timer_again_replaces_it(ctx: Context) -> None:
    ctx.timers.set(alarm, after="1 hour", payload=1)
    ctx.timers.set(alarm, after="1 min", payload=2)
    assert [(each.at, each.payload) for each in ctx.timers] == [(NOON + timedelta(minutes=1), 2)]


def test_cancel_says_whether_the_timer_was_set(ctx: Context) -> None:
    ctx.timers.set(alarm, after="1 hour", name="x")
    assert ctx.timers.cancel(alarm) is False
    assert ctx.timers.get(alarm, "x") is not None
    assert ctx.timers.cancel(alarm, name="x") is True
    assert ctx.timers.get(alarm, "x") is None
    assert not len(ctx.timers)


@pytest.mark.parametrize(
    ("times", "error"),
    [
        ({}, "either at=… or after=…"),
        ({"at": NOON, "after": "1 min"}, "either at=… or after=…"),
        ({"at": NOON.replace(tzinfo=None)}, "a datetime with a time zone, not datetime"),
        ({"at": "noon"}, "a datetime with a time zone, not 'noon'"),
        ({"after": "soon"}, "not a duration: 'soon'"),
        ({"after": "-1 min"}, "not a duration"),
        ({"after": timedelta(days=3_000_000)}, "after the year 9999"),
        ({"at": datetime.max.replace(tzinfo=timezone(-timedelta(hours=1)))}, "after the year 9999"),
    ],
)
def test_a_time_that_is_none_is_refused(ctx: Context, times: Any, error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        ctx.timers.set(alarm, **times)
    assert not list(ctx.timers)


@pytest.mark.parametrize("name", ["a/b", "a\0"])
def test_a_name_has_neither_slash_nor_nul(ctx: Context, name: str) -> None:
    with pytest.raises(ValueError, match="neither '/' nor NUL"):
        ctx.timers.set(alarm, after=1, name=name)


@pytest.mark.parametrize("name", [0, 17, None, b"x"])
def test_a_name_is_text_and_not_for_example_a_number_of_the_record(ctx: Context, name: Any) -> None:
    with pytest.raises(TypeError, match="the name of a timer is text, not "):
        ctx.timers.set(alarm, after=1, name=name)
    with pytest.raises(TypeError, match="the name of a timer is text, not "):
        ctx.timers.cancel(alarm, name)


def test_what_is_not_a_callback_of_this_handler_is_refused(ctx: Context) -> None:
    others = Timers(lambda: 0, callbacks={"report"})
    others.set(report, after=1)
    for timers, callback in ((ctx.timers, unmarked), (ctx.timers, "alarm"), (others, alarm)):
        with pytest.raises(NotATimer, match="with @timer"):
            timers.set(callback, after=1)  # type: ignore[arg-type]  # the error is about that
        with pytest.raises(NotATimer):
            timers.cancel(callback)  # type: ignore[arg-type]  # see above


def test_a_record_without_a_key_has_no_timers() -> None:
    with pytest.raises(NoKey, match="no partition key"):
        _ = Context().timers
