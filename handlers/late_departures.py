"""Half an hour after a late departure: a row, unless the flight's next departure was on time.

Shows keyed state and timers. The stream's partition key is carrier and flight: ``mldserver sim handlers.late_departures
--key-field carrier,flight --fire-timers``.
"""

from datetime import datetime

from mldserver import Context, Record, Timer, timer, tumbling

schema = "carrier STRING, flight INT, delay DOUBLE, times INT, at TIMESTAMP"
windows = tumbling("1 day", on="at", lateness="1 hour")
state_ttl = "30 days"

LATE_MINUTES = 60


def process_record(record: Record, ctx: Context) -> None:
    """Set the alarm of a flight that departed late, and count how often it did; cancel it when the flight is on time."""
    flight = record.json()
    if (flight["dep_delay"] or 0) <= LATE_MINUTES:
        ctx.timers.cancel(alarm)
        return
    ctx.state["times"] = ctx.state.get("times", 0) + 1
    ctx.timers.set(
        alarm, after="30 minutes", payload=[flight["carrier"], flight["flight"], flight["dep_delay"]]
    )


@timer(max_lateness="6 hours")
def alarm(due: Timer, ctx: Context) -> tuple[str, int, float, int, datetime]:
    """Make a row of a flight that is still late. An alarm that would come six hours too late is skipped."""
    carrier, flight, delay = due.payload
    return carrier, flight, delay, ctx.state["times"], due.at
