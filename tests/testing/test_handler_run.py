"""``HandlerRun``: a user's test of state and timers, without a server and without waiting."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from mldserver.errors import HandlerInvalid
from mldserver.testing import HandlerRun, VirtualClock

HANDLER = """
from mldserver import Retry, timer

schema = "key STRING, name STRING, n INT, attempt INT"

def process_record(record, ctx):
    if record.text() == "bad":
        raise ValueError("bad")
    for name, seconds in record.json().items():
        ctx.timers.set(alarm, after=seconds, name=name)

@timer
def alarm(due, ctx):
    if due.name == "never":
        raise ValueError("never")
    if due.name == "again" and due.attempt < 2:
        raise Retry("not yet", after=30)
    if due.name == "each" and ctx.state.get("n", 0) < 3:
        ctx.timers.set(alarm, after="1 hour", name="each")
    ctx.state["n"] = ctx.state.get("n", 0) + 1
    return ctx.key, due.name, ctx.state["n"], due.attempt
"""


@pytest.fixture
def handler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "alarms_under_test.py").write_text(HANDLER)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "alarms_under_test"


async def test_timers_fire_in_the_order_of_their_due_times_with_the_keys_state(
    handler: str, run_handler: Callable[..., HandlerRun]
) -> None:
    async with run_handler(handler) as run:
        assert await run.put({"b": 20, "a": 10}, key="k") == []
        assert await run.put({"c": 15}, key="other") == []
        assert run.pending == 3
        rows = await run.advance("15 seconds")
        assert [(row["key"], row["name"], row["n"]) for row in rows] == [("k", "a", 1), ("other", "c", 1)]
        rows = await run.advance(timedelta(seconds=5))
        assert [(row["name"], row["n"]) for row in rows] == [("b", 2)]
        assert run.pending == 0


async def test_a_timer_that_sets_itself_again_fires_as_often_as_time_allows(
    handler: str, run_handler: Callable[..., HandlerRun], virtual_clock: VirtualClock
) -> None:
    began_ms = virtual_clock.now_ms()
    async with run_handler(handler) as run:
        await run.put({"each": 0}, key="k")
        rows = await run.advance("100 days")
    assert [row["n"] for row in rows] == [1, 2, 3, 4]
    assert virtual_clock.now_ms() - began_ms == 100 * 86_400_000


async def test_a_failed_callback_is_called_again_later_and_what_fails_for_good_is_kept(
    handler: str, run_handler: Callable[..., HandlerRun]
) -> None:
    async with run_handler(handler, attempts=3) as run:
        await run.put({"again": 60, "never": 60}, key="k")
        assert await run.advance("119 seconds") == []
        assert [letter.timer for letter in run.dead_letters] == ["alarm/never"]
        (row,) = await run.advance("2 seconds")
        assert row["attempt"] == 2
        assert await run.put(b"bad", key="k") == []
        assert [letter.data for letter in run.dead_letters][1:] == [b"bad"]


async def test_half_a_year_takes_milliseconds(handler: str, run_handler: Callable[..., HandlerRun]) -> None:
    async with run_handler(handler) as run:
        await run.put({"a": 180 * 86_400}, key="k")
        began = time.process_time()
        assert len(await run.advance("180 days")) == 1
        assert time.process_time() - began < 1, "no time passes step by step"


def test_a_handler_that_check_refuses_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_handler: Callable[..., HandlerRun]
) -> None:
    (tmp_path / "no_hook.py").write_text("schema = 'a INT'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(HandlerInvalid):
        run_handler("no_hook")
