"""The watermark: up to which event time no more rows are expected. A synchronous core; steady time is passed in.

Each connected shard has a watermark of its own: the latest event time it has shown, minus the allowed disorder. The
pipeline's is the least of them and never goes back: ``view`` and ``begin_view`` only look, ``commit`` makes a view binding,
which the caller does once every row that the view counted on is durable (``still``). Shards that say nothing must not
stall it, and shards that are only late to connect must not be overtaken:

* A shard that is *caught up* (an empty batch with ``millisBehindLatest`` 0, or silence where the daemon sends no empty
  batches) advances with time when windows are cut on arrival time, and leaves the minimum after ``idle_time`` when
  they are cut on a column.
* A shard whose records give no rows (a filter, dead letters) is as silent as one without records. Cut on a column, it
  leaves the minimum after ``idle_time`` too, if it keeps up: its lag is 0, or never reported, and its batch in
  progress was fetched less than ``idle_time`` ago.
* One that lags (after an outage, say) may have rows before it that are older than those of others. It goes on as its
  arrival times do, once these have gone on by ``idle_time`` without a row: it counts as being as far, by event time, as
  the shards that give rows were when they were there, less ``idle_time``. However fast others catch up, they close no
  window before it, unless the delay from event to arrival changes by more than that.
* A shard that is *missing* (known, expected, not connected) holds it; so does the *settle* time after the start and
  after every shard that appears or ends, since children may not be known yet.
* When every known shard has ended and the settle time is over, the stream is over. When all are caught up and silent
  for ``quiet_time``, a stream cut on a column is quiet. Both close every open window.

A row whose time lies further ahead of its arrival than a clock can be wrong counts for none of these rules
(``flush.py``).

How far time may carry a caught-up shard: the daemon prefetches up to four batches a shard (KCL 3.1.3), so the batch in
hand was fetched, at the earliest, when the fifth before it was taken. The shard advances to the receipt of that one:
everything that had arrived by then is delivered. A server that polls the stream itself (DynamoDB) has no such queue: an
empty page shows that everything is delivered that was visible when its request began.

Arrival times are AWS's, so receipt must be in AWS's time too, and no host's time of day is used. AWS's
clock shows at least the latest arrival time known (of any shard, from here or from the ledger), plus the steady time
since then, less a thousandth of that: a steady clock, too, runs fast while its host's clock is corrected. Records
still to come can only have arrived later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mldserver.coordinator.core.lineage import Lineage
from mldserver.ledger.contract import ServerState

if TYPE_CHECKING:
    from mldserver.coordinator.core.open_windows import CoordinatorRules

PREFETCH = 5
"""Four batches in the daemon's queue and one being put there."""

_VISIBLE_MS = 5000
"""By then DynamoDB has shown each record of an arrival time: it cuts these to whole seconds, and shows records a bit later."""

_EMPTY_QUEUE_MS = 500
"""A daemon that sends nothing for so long after an answer has no batch in its queue: it fetched the next one after that."""

_WAITED_MS = 20
"""A batch that was in the daemon's queue comes sooner after the answer to the batch before it, unless the daemon has just stopped."""

_DRIFT = 1000
"""Steady time is trusted to one part in so many (Linux mends clocks by one in 2000)."""

_FINISHED = frozenset({"quiet", "no shards", "ended"})
_IDLE = _FINISHED | {"idle"}
"""What servers say when they hold nothing."""


@dataclass(slots=True)
class _ReadClock:
    """What one connected shard has shown."""

    tells_lag: bool
    event_ms: int | None
    advanced_ms: int | None = None
    """Up to where everything that had arrived is delivered, by AWS's clock."""
    received: list[int] = field(default_factory=list)
    """When its latest batches came, PREFETCH + 1 of them at most. (A deque takes 760 bytes, however short it is.)"""
    arrival_ms: int | None = None
    """Latest arrival time of its records."""
    rowless_since_ms: int | None = None
    """Arrival time of its last row; while it has given none, of its first record."""
    in_request: bool = False
    """Whether a batch is being processed."""
    asked: bool = False
    """Whether its daemon stores a checkpoint, or has a request pending that is not a batch."""
    answered_ms: int = 0
    last_row_ms: int = 0
    """When its last row came, by this server's clock."""
    lag_ms: int | None = None
    """What the latest batch said of the lag; None when it said nothing."""
    empty: bool = False
    """Whether the latest batch was empty."""
    polled: bool = False
    sends_empty: bool = False
    """Whether the daemon sends empty batches."""
    told_ms: int = 0
    """When the batch came that said ``lag_ms``; before the first one, the shard's ``read_ms``."""
    waited: int = 0
    """How many batches in a row, to the latest one, came ``_WAITED_MS`` or more after the answer to the one before, and no
    sooner than the server took for that one."""
    delivered_ms: int | None = None
    """Steady time up to which everything that had arrived is delivered; None: that is not known."""
    reported_ms: int | None = None
    """Latest arrival time of its records that the stream itself gave; it is not raised to that of parents, or of timers."""
    filled_ms: int = 0
    """When the latest batch with records came; before the first one, when the shard was connected."""

    def advance(self, reached_ms: int | None) -> None:
        """Everything that had arrived by then is delivered; None: that is not known."""
        if reached_ms is not None and (self.advanced_ms is None or reached_ms > self.advanced_ms):
            self.advanced_ms = reached_ms


@dataclass(frozen=True, slots=True)
class Holder:
    """What holds the watermark."""

    shard_id: str | None
    reason: str
    """``behind``, ``nothing seen``, ``missing``, ``settling``, ``idle``, ``quiet``, ``no shards`` or ``ended``; of another
    server also ``silent``: it was idle, and has missed its beats."""
    server_id: str | None = None
    """The other server that holds it; None: this one."""


@dataclass(frozen=True, slots=True)
class View:
    """The watermark at one moment."""

    watermark_ms: int | None
    """None: no row may be ruled out yet."""
    holder: Holder
    over: bool = False
    """Every known shard has ended: every window closes."""
    quiet: bool = False
    """Every shard is caught up and silent for long: the open windows close."""
    own_ms: int | None = field(default=None, compare=False)
    """The least of this server's own shards, which may lie below what the pipeline has reached; None: unknown."""

    @property
    def idle(self) -> bool:
        """Whether no shard of this server counts."""
        return self.holder.reason in _IDLE

    @property
    def holds(self) -> bool:
        """Whether this server holds the pipeline's watermark where it is: a shard of it is anywhere."""
        return self.own_ms is None and not self.idle


class Watermark:
    """The pipeline's watermark, asked with ``view``."""

    def __init__(self, rules: CoordinatorRules, lineage: Lineage, now_ms: int) -> None:
        """Start at ``now_ms``; shards are learned from ``lineage`` and the calls below."""
        self.rules = rules
        self._lineage = lineage
        self._shards: dict[str, _ReadClock] = {}
        self._settle_until_ms = now_ms + rules.settle_time_ms
        self._ending: set[str] = set()
        """Shards whose ends their daemons store just now."""
        self._watermark_ms: int | None = None
        self._arrival: tuple[int, int] | None = None
        """The arrival time that says most of AWS's clock, and the steady time at which it was known."""
        self.reopened: dict[str, int | None] = {}
        """Shards that were connected since the last ``begin_view``, and the watermark with which each went on."""

    def lag_ms(self, shard_id: str, now_ms: int) -> int | None:
        """Return how far a shard with a connection is behind the stream's tip; None: that is unknown.

        This is the lag that its latest batch reported, plus the time since that batch came. A daemon that sends no empty
        batches is silent both at the tip and in trouble: its shard's lag is unknown after ``idle_time`` of silence.
        """
        clock = self._shards.get(shard_id)
        if clock is None or (clock.lag_ms is None and not clock.polled):
            return None
        silent = not clock.in_request and now_ms - clock.answered_ms >= self.rules.idle_time_ms
        if silent and not clock.sends_empty:
            return None
        return (clock.lag_ms or 0) + now_ms - clock.told_ms

    def restart_settling(self, now_ms: int) -> None:
        """Start the settle time again: a shard appeared, or ended."""
        self._settle_until_ms = now_ms + self.rules.settle_time_ms

    def is_settling(self, now_ms: int) -> bool:
        """Whether shards that are not known yet may still come."""
        return now_ms < self._settle_until_ms or bool(self._ending)

    def ending(self, shard_id: str) -> None:
        """The daemon stores a shard's end: its children, which may not be known yet, come no earlier than it is answered."""
        self._ending.add(shard_id)

    def end_answered(self, shard_id: str, now_ms: int) -> None:
        """The daemon was answered for a shard's end, or is gone: from now on the settle time counts."""
        if shard_id in self._ending:
            self._ending.remove(shard_id)
            self.restart_settling(now_ms)

    def connect(
        self,
        shard_id: str,
        now_ms: int,
        *,
        tells_lag: bool,
        event_ms: int | None,
        arrival_ms: int | None = None,
        polled: bool = False,
    ) -> None:
        """A shard has a connection; up to which event and arrival time it is known to have come.

        ``polled``: this server polls the stream itself.
        """
        clock = _ReadClock(
            tells_lag, event_ms, received=[now_ms], answered_ms=now_ms, last_row_ms=now_ms, filled_ms=now_ms
        )
        clock.polled = clock.sends_empty = polled
        # A shard that the server opens again and again, without an answer from AWS, lags since its latest answer.
        clock.told_ms = self._lineage.nodes[shard_id].read_ms
        clock.arrival_ms = clock.rowless_since_ms = arrival_ms
        self._shards[shard_id] = clock
        self.reopened[shard_id] = self._value(clock)

    def arrived(self, arrival_ms: int | None, now_ms: int) -> None:
        """A record is known, at a steady time, that had arrived at ``arrival_ms``; None: none is."""
        if arrival_ms is None:
            return
        shown_ms = self.aws_ms(now_ms)
        if shown_ms is None or arrival_ms > shown_ms:
            self._arrival = (arrival_ms, now_ms)

    def aws_ms(self, at_ms: int) -> int | None:
        """Return what AWS's clock showed at least at a steady time; None while no arrival time is known."""
        if self._arrival is None:
            return None
        arrival_ms, known_ms = self._arrival
        since = at_ms - known_ms
        return arrival_ms + since - -(-abs(since) // _DRIFT)

    def disconnect(self, shard_id: str) -> None:
        """A shard's connection is gone, or the shard has ended."""
        clock = self._shards.pop(shard_id, None)
        if clock is not None and clock.sends_empty:
            self._lineage.nodes[shard_id].read_ms = clock.told_ms - (clock.lag_ms or 0)

    def began(self, shard_id: str, received_ms: int) -> None:
        """Note that the work on a batch begins: until it is answered the shard does not count as silent.

        ``received_ms``: when its first bytes came. A batch may have waited behind others since then, so this time, not the
        present one, shows how current its records are. An empty batch at the stream's tip proves that the shard was delivered up
        to the moment at which the daemon fetched it; that was after the batch ``PREFETCH`` places before it had come.
        """
        clock = self._shards[shard_id]
        clock.in_request = True
        clock.received.append(received_ms)
        del clock.received[: -PREFETCH - 1]

    def busy(self, shard_id: str) -> None:
        """A request without records comes, or the daemon is asked for a checkpoint: until ``free`` it is not silent."""
        self._shards[shard_id].asked = True

    def free(self, shard_id: str, now_ms: int) -> None:
        """Note that the daemon was answered, even during a batch's processing: its silence counts from now on."""
        clock = self._shards[shard_id]
        clock.asked, clock.answered_ms = False, now_ms

    def observed(
        self,
        shard_id: str,
        now_ms: int,
        *,
        records: int,
        lag_ms: int | None,
        event_ms: int | None,
        arrival_ms: int | None,
        reported_ms: int | None = None,
        received_ms: int | None = None,
    ) -> None:
        """Note that a batch is accepted.

        ``event_ms``: the latest event time among its rows; ``arrival_ms``: the latest effective arrival time among its
        records; ``reported_ms``: the latest that the stream reports. None when it has none. ``received_ms``: when the batch
        came; None if ``began`` has recorded it.
        """
        clock = self._shards[shard_id]
        if received_ms is not None:
            self.began(shard_id, received_ms)
        # An effective time may be a timer's due time, and that says nothing of AWS's clock.
        self.arrived(reported_ms, clock.received[-1])
        clock.lag_ms, clock.empty, clock.told_ms = lag_ms, records == 0, clock.received[-1]
        clock.sends_empty = clock.sends_empty or records == 0
        # If the server takes longer for a batch than it waits for the next one, the daemon may fetch batches meanwhile and
        # keep its queue full; the gap is then the way to another host and back.
        took_ms = clock.answered_ms - clock.received[-2:][0]
        waited = clock.told_ms - clock.answered_ms >= max(_WAITED_MS, took_ms)
        clock.waited = clock.waited + 1 if waited else 0
        if arrival_ms is not None:
            clock.arrival_ms = arrival_ms
            if event_ms is not None or clock.rowless_since_ms is None:
                clock.rowless_since_ms = arrival_ms
        if event_ms is not None:
            clock.last_row_ms = now_ms
            clock.event_ms = event_ms if clock.event_ms is None else max(event_ms, clock.event_ms)
        if records:
            clock.filled_ms, clock.reported_ms = clock.told_ms, reported_ms
        elif not lag_ms:
            self._delivered(clock)

    def _delivered(self, clock: _ReadClock) -> None:
        """Note what an empty batch proves, at the tip or without a lag: up to when everything that had arrived is delivered."""
        received, idle_ms = clock.received, self.rules.idle_time_ms
        if clock.lag_ms == 0 and len(received) > PREFETCH:
            clock.advance(self.aws_ms(received[0]))
        if clock.lag_ms == 0 and clock.polled:
            clock.advance(self.aws_ms(received[-1] - _VISIBLE_MS))
        if clock.lag_ms is None:
            # Kinesis sends pages without records before the tip too, but not for long.
            if not clock.tells_lag and received[-1] - clock.filled_ms >= idle_ms:
                clock.delivered_ms = received[-1] - idle_ms
        elif clock.polled:
            clock.delivered_ms = received[-1] - _VISIBLE_MS
        elif received[-1] - clock.answered_ms >= _EMPTY_QUEUE_MS or clock.waited > PREFETCH:
            clock.delivered_ms = received[-1]
        elif len(received) > PREFETCH:
            clock.delivered_ms = max(received[0], clock.delivered_ms or received[0])

    def frontier_ms(self, shard_id: str, now_ms: int, civil_ms: int) -> int | None:
        """Return the time up to which each record that had arrived in a shard is accepted; timers that are due by then may fire.

        ``civil_ms``: the time of day at the steady time ``now_ms``. None: nothing is known, or the shard has no connection.
        """
        clock = self._shards.get(shard_id)
        if clock is None:
            return None
        delivered_ms = clock.delivered_ms
        if not clock.sends_empty and self._caught_up(clock, now_ms):
            delivered_ms = now_ms - self.rules.idle_time_ms
        if self._lineage.nodes[shard_id].children:
            delivered_ms = None  # since the shard was closed, records of its keys arrive in its children
        times = [] if delivered_ms is None else [delivered_ms + civil_ms - now_ms]
        if clock.reported_ms is not None and clock.tells_lag:  # version 1 reports times of receipt
            times.append(clock.reported_ms - 1)  # the next record may have arrived in the same millisecond
        return max(times, default=None)

    def answered(self, shard_id: str, now_ms: int) -> None:
        """The work on a batch is over: from now on the shard's silence counts, unless it is ``busy``."""
        clock = self._shards.get(shard_id)
        if clock is not None:
            clock.in_request, clock.answered_ms = False, now_ms

    def at_work(self) -> list[str]:
        """Return the shards that have a batch which is not acknowledged yet."""
        return [shard_id for shard_id, clock in self._shards.items() if clock.in_request]

    def reached_ms(self) -> dict[str, int | None]:
        """Return the own watermark of each shard that has a connection, also of those known to have ended.

        None: it has shown nothing yet.
        """
        return {shard_id: self._value(clock) for shard_id, clock in self._shards.items()}

    def begin_view(self, now_ms: int) -> View:
        """Return the watermark now. Later, ``still`` returns the part of this view that is still valid."""
        self.reopened.clear()
        return self.view(now_ms)

    def still(self, view: View, now_ms: int) -> View:
        """Return the valid part of a ``begin_view``, now that its rows are durable, except rows of shards opened again since.

        A reopened shard delivers again the rows that were not durable. So it counts only as far as where it resumed.
        If a shard has become known that no server includes yet, the view holds the watermark.
        """
        now = self.view(now_ms)
        if now.holds:
            return now
        if view.holds or not self.reopened:
            return view
        values = [(value, _holder(shard_id, value)) for shard_id, value in self.reopened.items()]
        return self._least(values if view.idle else [(view.own_ms, view.holder), *values])

    def view(self, now_ms: int) -> View:
        """Return the watermark now, never less than what was committed."""
        values: list[tuple[int | None, Holder]] = [
            (None, Holder(node.id, "missing")) for node in self._lineage.missing()
        ]
        idle = 0
        delay_ms = None if self.rules.on_arrival else self._delay()
        for shard_id, clock in self._shards.items():
            if not (clock.empty and clock.lag_ms == 0) and self._caught_up(clock, now_ms):
                # Without empty batches it is carried with time, an idle time behind it.
                clock.advance(self.aws_ms(now_ms - self.rules.idle_time_ms))
            if not self.rules.on_arrival and self._idle(clock, now_ms, delay_ms):
                idle += 1
                continue
            value = self._value(clock)
            if delay_ms is not None and clock.arrival_ms is not None and self._rowless(clock):
                # As far as arrival times without rows carry it.
                carried = clock.arrival_ms - delay_ms - self.rules.idle_time_ms
                value = carried if value is None else max(value, carried)
            values.append((value, _holder(shard_id, value)))
        if self.is_settling(now_ms):
            return View(self._watermark_ms, Holder(None, "settling"))
        if values:
            return self._least(values)
        if idle:
            last_ms = max(clock.last_row_ms for clock in self._shards.values())
            quiet = now_ms - last_ms >= self.rules.quiet_time_ms
            return View(self._watermark_ms, Holder(None, "quiet" if quiet else "idle"), quiet=quiet)
        if self._lineage.all_ended():
            return View(self._watermark_ms, Holder(None, "ended"), over=True)
        return View(self._watermark_ms, Holder(None, "no shards"))

    def commit(self, view: View) -> None:
        """Make a view binding: later ones are never less."""
        if view.watermark_ms is not None:
            self._watermark_ms = self._reached(view.watermark_ms)

    def _least(self, values: Sequence[tuple[int | None, Holder]]) -> View:
        unknown = next((holder for value, holder in values if value is None), None)
        if unknown is not None:
            return View(self._watermark_ms, unknown)
        value, holder = min(((v, h) for v, h in values if v is not None), key=lambda pair: pair[0])
        return View(self._reached(value), holder, own_ms=value)

    def _reached(self, value: int) -> int:
        return value if self._watermark_ms is None else max(value, self._watermark_ms)

    def combine(self, view: View, others: Sequence[ServerState]) -> View:
        """Return the pipeline's view: the least of this server's and of what the others told.

        Over, and quiet, it is only when all servers are.
        """
        if not others:
            return view
        held = [(view.own_ms, view.holder)] if not view.idle else []
        held += [
            (other.watermark_ms, Holder(other.held_by, other.reason or "nothing seen", other.server_id))
            for other in others
            if not other.idle
        ]
        if held:
            return self._least(held)
        reasons = {view.holder.reason, *(other.reason for other in others)}
        quiet = reasons <= _FINISHED and "quiet" in reasons
        return View(self._watermark_ms, view.holder, over=view.over, quiet=quiet)

    def _value(self, clock: _ReadClock) -> int | None:
        event = None if clock.event_ms is None else clock.event_ms - self.rules.disorder_ms
        if not self.rules.on_arrival or clock.advanced_ms is None:
            return event
        advanced = clock.advanced_ms - self.rules.disorder_ms
        return advanced if event is None else max(event, advanced)

    def _caught_up(self, clock: _ReadClock, now_ms: int) -> bool:
        if clock.empty and clock.lag_ms == 0:
            return True
        # V1 daemons, and daemons that are not asked for empty batches: an idle shard just falls silent. One that said
        # that it lags is not idle, its next fetch is only slow.
        silent_ms = 0 if clock.in_request or clock.asked else now_ms - clock.answered_ms
        return not (clock.tells_lag and clock.lag_ms) and silent_ms >= self.rules.idle_time_ms

    def _idle(self, clock: _ReadClock, now_ms: int, delay_ms: int | None) -> bool:
        """Whether a shard that keeps up has given no row for the idle time."""
        # What is in progress may give a row, unless the shard's records give none and no delay is known.
        may_give = (clock.in_request or clock.asked) and not (delay_ms is None and self._rowless(clock))
        if may_give or now_ms - clock.last_row_ms < self.rules.idle_time_ms:
            return False
        lags = clock.tells_lag if clock.lag_ms is None else clock.lag_ms > 0
        fetched_lately = now_ms - clock.received[0] <= self.rules.idle_time_ms
        return (fetched_lately and not lags) or self._caught_up(clock, now_ms)

    def _rowless(self, clock: _ReadClock) -> bool:
        """Whether its records have arrived over more than the idle time without a row."""
        if clock.arrival_ms is None or clock.rowless_since_ms is None:
            return False
        return clock.arrival_ms - clock.rowless_since_ms >= self.rules.idle_time_ms

    def _delay(self) -> int | None:
        """Return by how much the watermarks of shards with rows lie behind their arrival times, at most."""
        shown = [
            (self._rowless(clock), clock.rowless_since_ms - value)
            for clock in self._shards.values()
            if (value := self._value(clock)) is not None and clock.rowless_since_ms is not None
        ]
        now = [delay_ms for rowless, delay_ms in shown if not rowless]
        return max(now or [delay_ms for _, delay_ms in shown], default=None)


def _holder(shard_id: str, value: int | None) -> Holder:
    return Holder(shard_id, "nothing seen" if value is None else "behind")
