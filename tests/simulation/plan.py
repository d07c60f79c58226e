"""What chance decides about one simulated world: its stream, its settings, its faults. All follows from the seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from mldserver.testing.daemon import Form

HANDLERS = ("Arrival", "Column", "Runs")
DISK = 50 << 30
TTL_MS = 3000
"""Of handlers whose state expires (``handlers.py``)."""
KEYED = 1_000_000
"""From this seed on, handlers keep state by key,"""
TIMED = 2_000_000
"""and from this one on their records set timers too."""
SLIDING = 3_000_000
"""From this seed on, windows overlap; no state, no timers."""
ORDERED = 5_000_000
"""From this seed on, each window is computed with the result of the one before."""
EARLY = 4_000_000
"""From this seed on, windows have early results; those of every other world overlap, too."""


@dataclass(frozen=True)
class Plan:
    """One world. Rates are probabilities of each call, counts are how often in the troubled time."""

    seed: int
    servers: int
    fixed_name: bool
    """Whether a server comes back under the name that it had, or under a new one."""
    handler: str
    late: str
    retention: str
    form: Form
    shards: int
    records: int
    seconds: float
    """How long records keep coming; faults stop with them."""
    digits: int
    """Digits behind the point of a second at which records arrive: with few, many share their time."""
    splits: int
    merges: int
    max_records: int
    latency: float
    """Typical latency of the network and of blocking calls, in seconds."""
    flush_seconds: float
    buffer_bytes: int
    poison: float
    flaky: float
    throttle: float
    ledger_before: float
    ledger_after: float
    store_fails: float
    engine_fails: float
    engine_seconds: float
    windows_a_job: int
    jobs: int
    """How many at a time."""
    aggregates: float
    """The share of KPL aggregates among the records."""
    kills: int
    """Of the server, at a moment of its own."""
    deaths: int
    """Of the server, right before or after a blocking call."""
    jvm_kills: int
    drops: int
    lost_leases: int
    stalls: int
    """How often a server's blocking calls hang, some for longer than it may be silent."""
    restarts: int
    """How often a server is stopped in order and started again."""
    listed: bool
    """Whether servers know the stream's shards and their parents, as from ListShards."""
    steps_back: float
    """The share of records whose arrival time is earlier than that of records before them."""
    pause: float
    """For how many seconds no record comes, amid all others."""
    table: bool
    """Whether the ledger is in a table of DynamoDB."""
    on_failure: str
    parks: bool
    """Whether records wait behind the dead letters of their key."""
    keys: int
    """How many partition keys there are; 0: one for each record, or aggregate."""
    rowless: float
    """The share of records that give no row."""
    future: float
    """The share of records whose rows are dated in the future."""
    stubborn: float
    """The share of records that fail more often than they are tried, and not for ever."""
    redrives: float
    """How often an operator who comes by has dead letters run again,"""
    purges: float
    """and deletes some."""
    window_on_failure: str
    cursed: float
    """The share of windows whose jobs fail until an operator comes by."""
    moves_fail: float
    """Of renames, exchanges and deletions in the output folder."""
    ahead: float
    """How far the first server's time of day is ahead of AWS's at the beginning, in seconds."""
    clock_steps: int
    """How often somebody sets a server's time of day."""

    checkpoint_seconds: float
    """How long the daemon takes to store a checkpoint."""
    slowest: float
    """For how many seconds a call of the handler takes, at most."""
    disk_bytes: int
    """What segments may take."""
    days: bool
    """Whether somebody who sets a clock may set it by days."""
    outage: float
    """For how many seconds no daemon runs; longer than shards may be missing."""
    keyed: bool = False
    """Whether the handler counts the records of each key in its state."""
    ttl_ms: int | None = None
    """How long state stays without a write; None: for ever."""
    resets: float = 0.0
    """The share of records that delete the state of their key."""
    timed: bool = False
    """Whether records set timers."""
    holds: int = 0
    """How often an operator pauses a server for some seconds."""
    prefetch_ms: int | None = None
    """How often the daemon fetches a batch while its queue has room; None: it has no queue."""

    @property
    def handler_class(self) -> str:
        """The name of the handler's class in ``handlers.py``."""
        if not self.keyed:
            return self.handler
        if self.timed:
            return "TimedForgetful" if self.ttl_ms is not None else f"Timed{self.handler}"
        return f"Counting{self.handler}" if self.ttl_ms is None else f"Forgetful{self.handler}"

    @property
    def on_column(self) -> bool:
        """Whether windows are cut on a column."""
        return self.handler in {"Column", "Sliding", "Early", "EarlySliding", "Ordered"}

    @property
    def slides(self) -> bool:
        """Whether windows overlap."""
        return self.handler in {"Sliding", "EarlySliding"}

    @property
    def early(self) -> bool:
        """Whether windows have early results."""
        return self.handler in {"Early", "EarlySliding"}

    @property
    def by_arrival(self) -> bool:
        """Whether windows are cut on arrival times."""
        return self.handler in {"Arrival", "Slowly"}

    @property
    def calm(self) -> bool:
        """Every tenth world has no faults: there the daemon has nothing at all to complain of."""
        return self.seed % 10 == 0

    @property
    def clocks_differ(self) -> bool:
        """Whether servers' time of day may be another than AWS's."""
        return bool(self.ahead or self.clock_steps)

    @property
    def troubled(self) -> bool:
        """Whether a connection may end under the daemon."""
        return not self.calm


def make_plan(seed: int) -> Plan:
    dice = random.Random(f"{seed}/plan")

    calm = seed % 10 == 0

    def some(most: int, odds: float = 0.5) -> int:
        return dice.randint(1, most) if dice.random() < odds else 0

    def rate(most: float, odds: float = 0.4) -> float:
        return dice.uniform(0, most) if dice.random() < odds else 0.0

    trouble = 0.0 if calm else 1.0
    listed = seed % 3 > 0
    latency = dice.choice((0.0005, 0.005, 0.05, 0.2))
    form = dice.choice((Form.KCL3, Form.KCL3, Form.V2, Form.V1))
    on_failure = dice.choice(("dead_letter",) * 6 + (("skip",) if calm else ("skip", "halt")))
    parks = on_failure == "dead_letter" and dice.random() < 0.3
    # By dice of their own: what came later leaves the worlds before as they were.
    more = random.Random(f"{seed}/more")
    plan = Plan(
        seed=seed,
        servers=dice.choice((1, 1, 1, 1, 1, 2, 2, 2, 3)),
        fixed_name=dice.random() < 0.5,
        late=dice.choice(("recompute", "recompute", "separate")),
        retention=dice.choice(("1 day", "10 s")),
        handler=dice.choice(HANDLERS),
        form=form,
        shards=dice.randint(1, 4),
        records=dice.randint(20, 120),
        seconds=dice.uniform(10, 40),
        digits=dice.choice((0, 1, 3)),
        splits=some(2),
        merges=some(1, 0.3),
        max_records=dice.choice((1, 5, 20)),
        latency=latency,
        flush_seconds=dice.choice((0.5, 1.0, 3.0)),
        buffer_bytes=dice.choice((500, 3_000, 512 << 20)),
        # Whoever halts comes to a record that never goes through again and again.
        poison=0.0 if on_failure == "halt" else rate(0.1),
        flaky=rate(0.2),
        throttle=trouble * rate(0.3),
        ledger_before=trouble * rate(0.12, 0.5),
        ledger_after=trouble * rate(0.12, 0.5),
        store_fails=trouble * rate(0.15, 0.5),
        engine_fails=trouble * rate(0.5),
        engine_seconds=dice.choice((0.0, 0.5, 4.0)),
        windows_a_job=dice.choice((1, 4)),
        jobs=dice.choice((1, 2)),
        aggregates=rate(0.3),
        kills=round(trouble * some(2, 0.4)),
        deaths=round(trouble * some(3, 0.5)),
        jvm_kills=round(trouble * some(2, 0.4)),
        drops=round(trouble * some(2, 0.3)),
        lost_leases=round(trouble * some(3, 0.5)),
        stalls=round(trouble * some(2, 0.3)),
        restarts=round(trouble * some(2, 0.3)),
        listed=listed,
        # Servers that know no parents cannot put children behind them. Where nothing goes wrong nothing may be late:
        # what steps behind a clock that has gone on rightly is.
        steps_back=trouble * listed * rate(0.6, 0.7),
        pause=dice.choice((0.0, 0.0, 12.0)),
        # A transaction there is several requests: with the longest latencies they take longer than a server may be silent.
        table=dice.random() < 0.2 and latency < 0.1,
        on_failure=on_failure,
        parks=parks,
        keys=dice.choice((3, 12)) if parks else 0,
        rowless=rate(0.5),
        future=rate(0.1),
        stubborn=rate(0.03 if on_failure == "halt" else 0.1, 0.6),
        redrives=rate(1.0, 0.6),
        purges=rate(0.7),
        window_on_failure=dice.choice(("halt", "dead_letter")),
        cursed=trouble * rate(0.4, 0.5),
        # In V1 that is what rows are stamped with: children that nobody knows as such could come before their parents.
        ahead=dice.choice((0.0, 0.0, 10.0, -3600.0)) if listed or form is not Form.V1 else 0.0,
        clock_steps=some(3, 0.4) if listed or form is not Form.V1 else 0,
        moves_fail=trouble * rate(0.15, 0.5),
        checkpoint_seconds=more.choice((0.0, 0.0, 2.0, 9.0)),
        slowest=3.0,
        disk_bytes=DISK,
        days=False,
        outage=0.0,
    )
    if plan.handler == "Arrival" and more.random() < (0.7 if calm else 0.3):
        # Batches wait behind others, for longer than it takes a shard to be idle.
        plan = replace(plan, handler="Slowly", slowest=more.choice((3.0, 15.0)))
    if plan.handler == "Column" and more.random() < 0.3:
        plan = replace(plan, future=more.uniform(0.2, 0.6), disk_bytes=more.choice((150_000, DISK)))
    if plan.form is not Form.V1 and plan.clocks_differ and more.random() < 0.5:
        # By days: retention is longer.
        plan = replace(plan, days=True, ahead=more.choice((plan.ahead, 172_800.0)))
    if not calm and more.random() < 0.15:
        plan = replace(plan, outage=30.0)
    if seed >= ORDERED:
        # A window that was set aside, or is far ahead, is computed when later ones have been.
        ordered = {"servers": 1, "late": "separate", "window_on_failure": "halt", "future": 0.0}
        return replace(plan, handler="Ordered", disk_bytes=DISK, **ordered)
    if seed >= SLIDING:
        early = ("Early", "EarlySliding")[seed % 2]
        return replace(plan, handler=early if seed >= EARLY else "Sliding", disk_bytes=DISK)
    if seed < KEYED:
        return plan
    return _counting(plan) if seed < TIMED else _timed(_counting(plan))


def _counting(plan: Plan) -> Plan:
    """Give a plan a handler that keeps state, and more of what moves state from one process to another."""
    dice = random.Random(f"{plan.seed}/keyed")
    trouble = 0 if plan.calm else 1
    plan = replace(
        plan,
        keyed=True,
        listed=True,
        servers=max(plan.servers, dice.choice((1, 2, 3))),
        keys=plan.keys or dice.choice((3, 12, 40)),
        splits=dice.randint(0, 4),
        merges=dice.randint(0, 3),
        lost_leases=plan.lost_leases + trouble * dice.randint(0, 2),
        kills=plan.kills + trouble * dice.randint(0, 1),
        table=plan.latency < 0.1 and dice.random() < 0.4,
        # Of a parked record nobody can see from outside whether it has counted, unless it gives a row.
        rowless=0.0 if plan.parks else plan.rowless,
    )
    # Where a redriven record counts does not follow from the stream, so that nothing else may begin the numbers again.
    if plan.form is not Form.V1 and not plan.parks and dice.random() < 0.3:
        plan = replace(plan, ttl_ms=TTL_MS, redrives=0.0)
    return plan if plan.redrives else replace(plan, resets=dice.choice((0.0, 0.1, 0.4)))


def _timed(plan: Plan) -> Plan:
    """Give a plan a handler that sets timers, and more of what may hold them or let them come too early."""
    dice = random.Random(f"{plan.seed}/timed")
    trouble = 0 if plan.calm else 1
    ttl_ms = (
        TTL_MS if plan.handler == "Arrival" and plan.form is not Form.V1 and dice.random() < 0.4 else None
    )
    return replace(
        plan,
        timed=True,
        # Without a row nobody can see from outside when a record was called.
        parks=False,
        rowless=0.0,
        resets=0.0,
        ttl_ms=ttl_ms,
        # There rows are in the order of their times, and redriven ones come with their own.
        redrives=0.0 if ttl_ms else plan.redrives,
        keys=dice.choice((2, 5, 20)),
        clock_steps=plan.clock_steps + trouble * dice.choice((0, 0, 1, 2)),
        restarts=plan.restarts + trouble * dice.choice((0, 1)),
        holds=trouble * dice.choice((0, 1, 2)),
        prefetch_ms=dice.choice((None, 200, 700)),
    )
