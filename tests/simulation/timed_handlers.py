"""Handlers of simulated pipelines whose records set, replace and cancel timers (``"timers"``: ``support.timed.Act``).

Calls with records and with timers count in the state of their key alike.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import msgspec
from simulation.handlers import COUNTS, EPOCH, Arrival, Column, Runs, Slowly, count, failed
from support.timed import Act, Firing, shown

from mldserver import Context, Record, Timer, timer

TIMED = COUNTS + ", seen STRING, timer STRING, link BIGINT, due TIMESTAMP, attempt BIGINT"
watch: Any = None
"""The loop of the world: hooks may run in threads."""
fired: list[tuple[Firing, int, float]] = []
"""Each call of a timer's callback: when it was due (ms), and the loop's time."""


def seen(ctx: Context) -> str:
    """Name the timers that a call finds."""
    told = (each.payload for each in ctx.timers)
    return " ".join(shown(each["timer"], each["n"], each["link"]) for each in told)


class Timers:
    """What records do with timers, and what a callback does: it counts too, may set its timer again, and may fail."""

    schema = TIMED

    def set_timers(self, record: Record, ctx: Context) -> tuple[object, ...] | None:
        found = seen(ctx)
        for act in msgspec.convert(record.json().get("timers", ()), tuple[Act, ...]):
            callback, _, name = act.timer.partition("/")
            if act.cancels:
                ctx.timers.cancel(getattr(self, callback), name)
                continue
            after = timedelta(milliseconds=act.after or 0)
            due = ctx.now + after if act.due is None else EPOCH + timedelta(milliseconds=act.due)
            when: dict[str, Any] = {"after": after} if act.due is None else {"at": due}
            payload = {
                "timer": act.timer,
                "n": record.json()["n"],
                "link": 0,
                "due": due,
                "fails": act.fails,
                "again": act.again,
                "drops": act.drops,
            }
            ctx.timers.set(getattr(self, callback), name=name, payload=payload, **when)
        row = count(record, ctx)
        return row and (*row, found, None, None, None, None)

    def fire(self, callback: str, due: Timer, ctx: Context) -> object:
        told, name = due.payload, f"{callback}/{due.name}" if due.name else callback
        firing = Firing(ctx.key, name, told["n"], told["link"])
        fired.append((firing, (due.at - EPOCH) // timedelta(milliseconds=1), watch.time()))
        assert ctx.now == due.at, f"{firing}: now is {ctx.now}, due at {due.at}"
        found = seen(ctx)
        ctx.state["n"] = counted = ctx.state.get("n", 0) + 1
        if told["drops"]:
            dropped, _, its_name = told["drops"].partition("/")
            ctx.timers.cancel(getattr(self, dropped), its_name)
        if told["again"]:
            step, *rest = told["again"]
            at = told["due"] + timedelta(milliseconds=step)
            again = {**told, "link": told["link"] + 1, "due": at, "again": rest}
            ctx.timers.set(getattr(self, callback), at=at, name=due.name, payload=again)
        if told["fails"] < 0 or failed[firing] < told["fails"]:
            failed[firing] += 1
            raise ConnectionError(f"{firing} is not to be had now")
        return told["n"], due.at, ctx.key, counted, found, name, told["link"], due.at, due.attempt


class Sets(Timers):
    def process_record(self, record: Record, ctx: Context) -> object:
        return self.set_timers(record, ctx)

    @timer
    def alarm(self, due: Timer, ctx: Context) -> object:
        return self.fire("alarm", due, ctx)

    @timer
    def chime(self, due: Timer, ctx: Context) -> object:
        return self.fire("chime", due, ctx)

    @timer(max_lateness="2 s")
    def brief(self, due: Timer, ctx: Context) -> object:
        return self.fire("brief", due, ctx)


class SetsSlowly(Timers):
    async def process_record(self, record: Record, ctx: Context) -> object:
        await asyncio.sleep(record.json()["slow"])
        return self.set_timers(record, ctx)

    @timer
    async def alarm(self, due: Timer, ctx: Context) -> object:
        return self.fire("alarm", due, ctx)

    @timer
    async def chime(self, due: Timer, ctx: Context) -> object:
        before = seen(ctx), ctx.state.get("n")
        await asyncio.sleep(0.3)
        assert before == (seen(ctx), ctx.state.get("n")), "calls for one key overlap"
        return self.fire("chime", due, ctx)

    @timer(max_lateness="2 s")
    async def brief(self, due: Timer, ctx: Context) -> object:
        return self.fire("brief", due, ctx)


class TimedArrival(Sets, Arrival):  # type: ignore[misc]  # its hook takes a context
    pass


class TimedSlowly(SetsSlowly, Slowly):  # type: ignore[misc]  # see above
    pass


class TimedColumn(SetsSlowly, Column):  # type: ignore[misc]  # see above
    pass


class TimedRuns(Sets, Runs):  # type: ignore[misc]  # see above
    pass


class TimedForgetful(TimedArrival):
    state_ttl = "3 s"
