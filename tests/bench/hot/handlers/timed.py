"""Each record sets timers of its key (``{"due": ms, "step": ms, "timers": how many}``), and each timer gives a row: how late it is."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

from mldserver import Context, Record, Timer, timer, tumbling

schema = "late_ms DOUBLE"
windows = tumbling("1 day")


def process_record(record: Record, ctx: Context) -> None:
    """Set them, each under a name of its own."""
    told = record.json()
    due, step = datetime.fromtimestamp(told["due"] / 1000, UTC), timedelta(milliseconds=told["step"])
    for number in range(told["timers"]):
        ctx.timers.set(alarm, at=due + number * step, name=str(number))


@timer
def alarm(due: Timer, _ctx: Context) -> tuple[float]:
    """Tell how late the call is, in ms."""
    return ((time.time() - due.at.timestamp()) * 1000,)
