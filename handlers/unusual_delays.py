"""Half an hour after a departure that is unusually late for its carrier: a row, with how many the carrier had that day.

Shows a lookup, a query, keyed state and a timer together. The stream's partition key is carrier and flight: ``mldserver sim
handlers.unusual_delays --key-field carrier,flight --fire-timers``.
"""

from datetime import datetime

from mldserver import Context, Lookup, Record, Timer, timer, tumbling

schema = "carrier STRING, flight INT, delay DOUBLE, usual DOUBLE, earlier BIGINT, at TIMESTAMP"
windows = tumbling("1 hour", on="at", lateness="1 hour")
state_ttl = "2 days"

UNUSUAL_MINUTES = 60
usual = Lookup(
    """SELECT * FROM VALUES ('9E', 16.0), ('AA', 9.0), ('AS', 6.0), ('B6', 13.0), ('DL', 9.0), ('EV', 20.0), ('F9', 20.0),
    ('FL', 19.0), ('HA', 5.0), ('MQ', 11.0), ('OO', 13.0), ('UA', 12.0), ('US', 4.0), ('VX', 13.0), ('WN', 18.0), ('YV', 19.0)
    AS usual(carrier, minutes)""",
    key="carrier",
    every="1 day",
)


def process_record(record: Record, ctx: Context) -> None:
    """Keep the longest delay of a flight that is unusually late, and set its timer; cancel it when the flight is not late."""
    flight = record.json()
    carrier, delay = usual.get(flight["carrier"]), flight["dep_delay"]
    if carrier is None or delay is None or delay < carrier.minutes + UNUSUAL_MINUTES:
        ctx.timers.cancel(report)
        return
    ctx.state["longest"] = max(delay, ctx.state.get("longest", 0.0))
    ctx.timers.set(report, after="30 minutes", payload=[flight["carrier"], flight["flight"]])


@timer(max_lateness="6 hours")
def report(due: Timer, ctx: Context) -> tuple[str, int, float, float, int, datetime]:
    """Make a row of a flight that is still late, with the rows of its carrier in windows of that day that are published."""
    carrier, flight = due.payload
    earlier = ctx.sql(
        "SELECT count(*) AS rows FROM unusual_delays WHERE carrier = :carrier AND window_start >= :today",
        carrier=carrier,
        today=due.at.replace(hour=0, minute=0, second=0, microsecond=0),
        cache="10 minutes",
    ).one()
    return carrier, flight, ctx.state.pop("longest"), usual.get(carrier).minutes, earlier.rows, due.at
