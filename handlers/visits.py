"""Visits of users: clicks of a user that are at most half an hour apart make one row (session windows).

Shows windows whose ends depend on the data, made of keyed state and timers. The stream's partition key is the user:
``mldserver sim handlers.visits --input clicks.jsonl --key-field user --time-field at --fire-timers``.

A record is JSON such as ``{"page": "/home", "user": 7, "at": "2013-01-01T10:15:00Z"}``.
"""

from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta

from mldserver import Context, Record, Timer, timer, tumbling

GAP = timedelta(minutes=30)
"""A longer silence of a user ends a visit."""
DISORDER = timedelta(minutes=5)
"""A click that comes later than that after its time may begin a visit of its own."""

schema = "user STRING, began TIMESTAMP, ended TIMESTAMP, clicks INT"
windows = tumbling(
    "1 day", on="ended", lateness="1 hour"
)  # a visit's row comes up to GAP + DISORDER after its end

Visit = tuple[datetime, datetime, int]
"""The first click, the last one, and how many."""


def process_record(record: Record, ctx: Context) -> list[tuple[str, datetime, datetime, int]]:
    """Add a click to its visit, and make rows of the user's visits to which no click can belong any more."""
    at = datetime.fromisoformat(record.json()["at"])
    visits = list(merged([*map(tuple, ctx.state.get("visits", [])), (at, at, 1)]))
    latest = visits[-1][1]
    over = [visit for visit in visits if latest - visit[1] > GAP + DISORDER]
    ctx.state["visits"] = [list(visit) for visit in visits[len(over) :]]
    ctx.timers.set(leave, after=GAP + DISORDER)  # again with each click
    return [(str(ctx.key), *visit) for visit in over]


@timer
def leave(due: Timer, ctx: Context) -> list[tuple[str, datetime, datetime, int]]:  # noqa: ARG001  # callbacks get it
    """Make rows of the user's visits once no click has come for long enough, and forget the user."""
    return [(str(ctx.key), *visit) for visit in ctx.state.pop("visits")]


def merged(visits: Iterable[Visit]) -> Iterator[Visit]:
    """Yield visits, the earliest first; those at most ``GAP`` apart as one."""
    (began, ended, clicks), *others = sorted(visits)
    for first, last, count in others:
        if first - ended <= GAP:
            ended, clicks = max(ended, last), clicks + count
        else:
            yield began, ended, clicks
            began, ended, clicks = first, last, count
    yield began, ended, clicks
