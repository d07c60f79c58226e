"""The watermark's rules, one sentence each, over time that is passed in."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from mldserver.coordinator.core.lineage import Lineage
from mldserver.coordinator.core.open_windows import CoordinatorRules
from mldserver.coordinator.core.watermark import PREFETCH, Holder, View, Watermark
from mldserver.ledger.contract import ServerState

pytestmark = [pytest.mark.quick, pytest.mark.core]

IDLE, QUIET, SETTLE = 30_000, 60_000, 10_000


@dataclass
class Stream:
    """A watermark with the lineage it goes by, and a clock."""

    on_arrival: bool = True
    disorder_ms: int = 0
    now: int = 1_000_000
    lineage: Lineage = field(default_factory=Lineage)

    def __post_init__(self) -> None:
        rules = CoordinatorRules(
            on_arrival=self.on_arrival,
            disorder_ms=self.disorder_ms,
            idle_time_ms=IDLE,
            quiet_time_ms=QUIET,
            settle_time_ms=SETTLE,
        )
        self.watermark = Watermark(rules, self.lineage, self.now)

    def connect(
        self, *shards: str, tells_lag: bool = True, event_ms: int | None = None, polled: bool = False
    ) -> Stream:
        for shard in shards:
            self.lineage.add(shard, self.now)
            self.lineage.connect(shard, self.now)
            self.watermark.connect(shard, self.now, tells_lag=tells_lag, event_ms=event_ms, polled=polled)
        return self

    def settled(self) -> Stream:
        return self.wait(SETTLE)

    def wait(self, ms: int) -> Stream:
        self.now += ms
        return self

    def arrived(self, aws_ms: int | None = None) -> Stream:
        """A record is known whose arrival AWS's clock stamped just now; that clock shows what this one does, or more."""
        self.watermark.arrived(self.now if aws_ms is None else aws_ms, self.now)
        return self

    def batch(
        self,
        shard: str,
        event_ms: int | None = None,
        *,
        records: int = 1,
        lag_ms: int | None = 5,
        arrival_ms: int | None = None,
        takes_ms: int = 0,
    ) -> Stream:
        self.watermark.began(shard, self.now)
        self.now += takes_ms
        self.watermark.observed(
            shard,
            self.now,
            records=records,
            lag_ms=lag_ms,
            event_ms=event_ms,
            arrival_ms=arrival_ms,
            reported_ms=arrival_ms,
        )
        self.watermark.answered(shard, self.now)
        return self

    def empty(self, shard: str, times: int = 1, *, every: int = 1000) -> Stream:
        for _ in range(times):
            self.wait(every).batch(shard, records=0, lag_ms=0)
        return self

    def disconnect(self, shard: str) -> Stream:
        self.lineage.disconnect(shard, self.now)
        self.watermark.disconnect(shard)
        return self

    def end(self, shard: str) -> Stream:
        self.lineage.end(shard, self.now)
        self.watermark.disconnect(shard)
        self.watermark.restart_settling(self.now)
        return self

    def look(self) -> View:
        return self.watermark.begin_view(self.now)

    def still(self, seen: View) -> View:
        return self.watermark.still(seen, self.now)

    @property
    def view(self) -> View:
        return self.watermark.view(self.now)

    @property
    def ms(self) -> int | None:
        return self.view.watermark_ms

    def aws(self, ago_ms: int, *, known_ms: int = 0) -> int:
        """Return what AWS's clock showed at least some time ago, when it was known some time ago to show what this does."""
        return self.now - ago_ms - -(-abs(known_ms - ago_ms) // 1000)


def test_a_batch_that_is_told_of_when_it_is_taken_counts_from_when_it_came() -> None:
    views: list[list[View]] = []
    for told_before in (True, False):
        stream, seen = Stream().connect("a").settled().arrived(), []
        for _ in range(PREFETCH + 2):
            received_ms = stream.now
            if told_before:
                stream.watermark.began("a", received_ms)
            stream.wait(300).watermark.observed(
                *("a", stream.now),
                records=0,
                lag_ms=0,
                event_ms=None,
                arrival_ms=None,
                received_ms=None if told_before else received_ms,
            )
            seen.append(stream.view)
            stream.watermark.answered("a", stream.wait(700).now)
        views.append(seen)
    assert views[0] == views[1]
    assert views[0][-1].watermark_ms is not None


def test_the_least_shard_holds_the_watermark() -> None:
    stream = Stream().connect("a", "b").batch("a", 500).batch("b", 300).settled()
    assert stream.view == View(300, Holder("b", "behind"))


def test_the_allowed_disorder_is_taken_off() -> None:
    assert Stream(disorder_ms=50).connect("a").batch("a", 500).settled().ms == 450


def test_a_later_batch_with_an_earlier_time_does_not_take_the_shard_back() -> None:
    assert Stream().connect("a").batch("a", 500).batch("a", 300).settled().ms == 500


def test_a_batch_without_rows_says_nothing_of_the_event_time() -> None:
    assert Stream().connect("a").batch("a", 500).batch("a", None).settled().ms == 500


def test_a_shard_that_has_shown_nothing_rules_no_row_out() -> None:
    stream = Stream().connect("a", "b").batch("a", 500).settled()
    assert stream.view == View(None, Holder("b", "nothing seen"))
    assert stream.watermark.reached_ms()["b"] is None
    assert stream.watermark.reached_ms()["a"] == 500
    assert stream.watermark.reached_ms().get("unknown") is None


def test_a_shard_goes_on_from_where_the_ledger_has_it() -> None:
    assert Stream().connect("a", event_ms=200).settled().ms == 200


def test_of_a_look_stays_what_was_seen_whatever_came_since() -> None:
    stream = Stream().connect("a", "b").batch("a", 500).batch("b", 400).settled()
    seen = stream.look()
    stream.batch("a", 900).batch("b", 900)
    assert stream.still(seen) == View(400, Holder("b", "behind"))


def test_a_shard_that_was_opened_again_since_counts_no_further_than_where_it_went_on() -> None:
    stream = Stream(disorder_ms=50).connect("a", "b").batch("a", 500).batch("b", 900).settled()
    seen = stream.look()
    stream.connect("b", event_ms=400).batch("b", 900)
    assert stream.still(seen) == View(350, Holder("b", "behind"))
    assert stream.still(seen).own_ms == 350
    assert stream.still(stream.look()) == View(450, Holder("a", "behind")), "that counts on all of it"
    stream.connect("b").batch("b", 900)
    assert stream.still(seen) == View(None, Holder("b", "nothing seen"))


def test_a_quiet_stream_is_not_quiet_when_a_shard_was_opened_since() -> None:
    stream = Stream(on_arrival=False).connect("a", "b").batch("a", 500).batch("b", 600).settled()
    seen = stream.wait(QUIET).empty("a").empty("b").look()
    assert seen.quiet
    stream.connect("b", event_ms=600)
    assert stream.still(seen) == View(600, Holder("b", "behind"))


def test_nothing_is_left_of_a_look_when_a_shard_is_missing_since() -> None:
    stream = Stream().connect("a", "b").batch("a", 500).batch("b", 500).settled()
    seen = stream.look()
    stream.disconnect("b")
    assert stream.still(seen) == View(None, Holder("b", "missing"))


def test_without_any_shard_there_is_no_watermark() -> None:
    assert Stream().settled().view == View(None, Holder(None, "no shards"))


def test_nothing_moves_during_the_settle_time_after_the_start() -> None:
    stream = Stream().connect("a").batch("a", 500)
    assert stream.wait(SETTLE - 1).view == View(None, Holder(None, "settling"))
    assert stream.wait(1).ms == 500


def test_nothing_moves_during_the_settle_time_after_a_new_shard() -> None:
    stream = Stream().connect("a").batch("a", 500).settled()
    stream.watermark.commit(stream.view)
    stream.connect("b").batch("b", 900).batch("a", 900)
    stream.watermark.restart_settling(stream.now)
    assert stream.view == View(500, Holder(None, "settling"))
    assert stream.settled().ms == 900


def test_a_missing_shard_holds_the_watermark() -> None:
    stream = Stream().connect("a", "b").batch("a", 500).batch("b", 900).settled()
    stream.watermark.commit(stream.view)
    stream.batch("a", 800).disconnect("b")
    assert stream.view == View(500, Holder("b", "missing"))


def test_a_missing_shard_that_is_left_out_holds_nothing() -> None:
    stream = Stream().connect("a", "b").batch("a", 500).batch("b", 300).settled().disconnect("b")
    stream.lineage.leave_out(stream.now + 1, 1)
    assert stream.view == View(500, Holder("a", "behind"))


def test_looking_binds_nothing_and_a_commit_does() -> None:
    stream = Stream().connect("a").batch("a", 500).settled()
    assert stream.ms == 500
    stream.connect("a", event_ms=100)  # opened again: what was not durable comes again
    assert stream.ms == 100
    stream.batch("a", 500)
    stream.watermark.commit(stream.view)
    stream.connect("a", event_ms=100)
    assert stream.ms == 500


def test_a_view_that_is_older_than_the_last_commit_takes_nothing_back() -> None:
    for later in (0, 700):
        stream = Stream().connect("a").batch("a", later - 200).settled()
        old = stream.view
        stream.batch("a", later)
        stream.watermark.commit(stream.view)
        stream.watermark.commit(old)
        stream.watermark.commit(View(None, Holder(None, "settling")))
        assert stream.ms == later


def test_a_caught_up_shard_moves_with_the_clock_as_far_as_the_daemons_prefetch_allows() -> None:
    stream = Stream().connect("a", "b").settled().batch("b", 10**9).arrived()
    stream.empty("a", PREFETCH - 1)
    assert stream.ms is None
    stream.empty("a", 1)
    assert stream.ms == stream.aws(SETTLE + 5000, known_ms=5000)  # the connection stands for the first fetch
    stream.empty("a", 1)
    assert stream.ms == stream.aws(5000, known_ms=6000)
    stream.empty("a", 10)
    assert stream.ms == stream.aws(5000, known_ms=16_000)


def test_how_far_time_carries_a_shard_is_told_by_the_arrival_times_and_by_no_hosts_clock() -> None:
    for aws_ms in (-(10**6), 0, 500, 10**12):
        stream = Stream().connect("a").settled().arrived(aws_ms).empty("a", PREFETCH + 1)
        assert stream.ms == aws_ms + 1000 - 1


def test_time_carries_no_shard_while_no_arrival_time_is_known() -> None:
    stream = Stream().connect("a").settled().empty("a", 2 * PREFETCH).wait(10 * IDLE)
    assert stream.view == View(None, Holder("a", "nothing seen"))
    assert stream.arrived().empty("a").ms is not None


def test_a_batch_says_what_awss_clock_showed_when_it_was_received() -> None:
    stream = Stream().connect("a", "b").settled()
    stream.watermark.began("b", stream.now)
    stream.wait(3000)
    times = {"event_ms": 10**9, "arrival_ms": stream.now, "reported_ms": stream.now}
    stream.watermark.observed("b", stream.now, records=1, lag_ms=9, **times)
    assert stream.empty("a", PREFETCH + 1).ms == stream.aws(5000, known_ms=9000) + 3000


def test_the_due_time_of_a_timer_says_nothing_of_awss_clock() -> None:
    """A record that arrived before it has its time, but the stream reports the record's own."""
    stream = Stream().connect("a").settled().arrived()
    stream.watermark.began("a", stream.now)
    due = {"arrival_ms": stream.now + 700, "reported_ms": stream.now}
    stream.watermark.observed("a", stream.now, records=1, lag_ms=9, event_ms=None, **due)
    assert stream.watermark.aws_ms(stream.now) == stream.now


def test_of_the_arrival_times_that_counts_which_says_most_of_awss_clock() -> None:
    stream = Stream().connect("a").settled().arrived().wait(5000)
    stream.arrived(10)  # of a shard that lags
    stream.watermark.arrived(None, stream.now)
    assert stream.empty("a", PREFETCH + 1).ms == stream.aws(5000, known_ms=11_000)
    stream.arrived(stream.now + 5)
    assert stream.empty("a").ms == stream.aws(5000, known_ms=1000) + 5


def test_a_steady_clock_that_runs_a_little_fast_makes_no_row_late() -> None:
    """A day without any record, on a host whose clock is mended by one in 2000 all the time."""
    stream = Stream().connect("a").settled().arrived()
    day = 86_400_000
    aws_ms = stream.now + day - day // 2000
    stream.wait(day).empty("a", PREFETCH + 1)
    assert stream.ms is not None
    assert aws_ms - day // 1000 < stream.ms < aws_ms


def test_the_clock_never_takes_a_shard_behind_its_own_rows() -> None:
    stream = Stream().connect("a").settled().arrived().batch("a", 10**9).empty("a", PREFETCH + 1)
    assert stream.ms == 10**9


def test_an_empty_batch_of_a_shard_that_lags_moves_nothing() -> None:
    stream = Stream().connect("a").settled().arrived()
    for _ in range(PREFETCH + 3):
        stream.wait(1000).batch("a", records=0, lag_ms=60_000)
    assert stream.ms is None


def test_rows_that_come_after_an_idle_time_do_not_take_the_shard_back() -> None:
    stream = Stream().connect("a").settled().arrived().empty("a", PREFETCH + 1)
    reached = stream.ms
    assert reached is not None
    assert stream.batch("a", 5).ms == reached


def test_the_allowed_disorder_is_taken_off_the_clock_too() -> None:
    plain = Stream().connect("a").settled().arrived().empty("a", PREFETCH + 1)
    with_disorder = Stream(disorder_ms=50).connect("a").settled().arrived().empty("a", PREFETCH + 1)
    assert plain.ms is not None
    assert with_disorder.ms == plain.ms - 50


def test_a_silent_shard_of_a_daemon_that_tells_no_lag_follows_the_clock_an_idle_time_behind() -> None:
    stream = Stream().arrived().connect("a", tells_lag=False).batch("a", 500, lag_ms=None).settled()
    assert stream.wait(IDLE - SETTLE - 1).ms == 500
    assert stream.wait(1).ms == stream.aws(IDLE, known_ms=IDLE)
    assert stream.wait(5000).ms == stream.aws(IDLE, known_ms=IDLE + 5000)


def test_a_silent_shard_without_lag_follows_the_clock_where_the_daemon_sends_no_empty_batches() -> None:
    stream = Stream().arrived().connect("a").batch("a", 500, lag_ms=0).wait(IDLE)
    assert stream.ms == stream.aws(IDLE, known_ms=IDLE)


def test_a_silent_shard_that_said_it_lags_is_waited_for() -> None:
    assert Stream().arrived().connect("a").batch("a", 500, lag_ms=1).wait(10 * IDLE).ms == 500


def test_a_shard_whose_batch_is_being_worked_on_is_not_silent() -> None:
    stream = Stream().arrived().connect("a", tells_lag=False).batch("a", 500, lag_ms=None)
    stream.watermark.began("a", stream.now)
    assert stream.wait(10 * IDLE).ms == 500
    stream.watermark.answered("a", stream.now)
    assert stream.ms == 500
    assert stream.wait(IDLE).ms == stream.aws(IDLE, known_ms=11 * IDLE)


def test_a_shard_whose_daemon_has_not_been_answered_yet_is_not_silent() -> None:
    stream = Stream().arrived().connect("a", tells_lag=False).batch("a", 500, lag_ms=None)
    stream.watermark.busy("a")
    assert stream.wait(10 * IDLE).ms == 500
    stream.watermark.answered("a", stream.now)
    assert stream.wait(10 * IDLE).ms == 500, "of a batch only"
    stream.watermark.free("a", stream.now)
    assert stream.ms == 500
    assert (stream.wait(IDLE).ms or 0) > 500


def test_an_end_that_the_daemon_stores_still_holds_the_watermark_and_the_settle_time_follows() -> None:
    stream = Stream().connect("a", "b").settled().batch("a", 500).batch("b", 900)
    stream.end("a").watermark.ending("a")
    assert stream.wait(10 * SETTLE).view.holder == Holder(None, "settling")
    stream.watermark.end_answered("a", stream.now)
    stream.watermark.end_answered("b", stream.now)
    assert stream.wait(SETTLE - 1).view.holder == Holder(None, "settling")
    assert stream.wait(1).ms == 900


def test_batches_that_waited_for_their_turn_carry_a_shard_no_further_than_their_bytes() -> None:
    stream = Stream().connect("a").settled().arrived()
    came_ms, known_ms = stream.now, stream.now
    stream.wait(100_000)
    for _ in range(PREFETCH + 2):
        stream.watermark.began("a", came_ms)
        stream.watermark.observed("a", stream.now, records=0, lag_ms=0, event_ms=None, arrival_ms=None)
        stream.watermark.answered("a", stream.wait(1000).now)
    assert stream.ms == came_ms == known_ms


def test_an_answer_to_a_shard_that_is_gone_is_nothing() -> None:
    stream = Stream().connect("a").disconnect("a")
    stream.watermark.answered("a", stream.now)
    assert stream.settled().view == View(None, Holder("a", "missing"))


def test_cut_on_a_column_an_idle_shard_leaves_the_minimum() -> None:
    stream = Stream(on_arrival=False).connect("a", "b").batch("a", 500).batch("b", 300).settled()
    stream.empty("b", 2, every=1000)
    assert stream.ms == 300
    stream.wait(IDLE - SETTLE - 2000).batch("a", 600)
    assert stream.view == View(600, Holder("a", "behind"))


def test_cut_on_a_column_the_clock_moves_no_shard() -> None:
    stream = (
        Stream(on_arrival=False).connect("a").arrived().batch("a", 500).settled().empty("a", PREFETCH + 2)
    )
    assert stream.ms == 500


def test_an_idle_shard_that_comes_back_does_not_take_the_watermark_back() -> None:
    stream = Stream(on_arrival=False).connect("a", "b").batch("a", 500).batch("b", 300).empty("b").wait(IDLE)
    stream.batch("a", 600)
    stream.watermark.commit(stream.view)
    stream.batch("b", 310)
    assert stream.view == View(600, Holder("b", "behind"))


def test_an_idle_stream_stands_still_until_it_is_quiet() -> None:
    stream = Stream(on_arrival=False).connect("a", "b").batch("a", 500).batch("b", 300).settled()
    stream.watermark.commit(stream.view)
    stream.wait(IDLE - SETTLE).empty("a").empty("b")
    assert stream.view == View(300, Holder(None, "idle"))
    stream.wait(QUIET)
    assert stream.view == View(300, Holder(None, "quiet"), quiet=True)


def test_one_shard_with_rows_keeps_the_stream_from_being_quiet() -> None:
    stream = Stream(on_arrival=False).connect("a", "b").batch("a", 500).batch("b", 300).wait(QUIET).empty("b")
    stream.batch("a", 700)
    assert stream.view == View(700, Holder("a", "behind"))


def test_a_missing_shard_keeps_an_idle_stream_from_being_quiet() -> None:
    stream = Stream(on_arrival=False).connect("a", "b").disconnect("b").batch("a", 500).empty("a").wait(QUIET)
    assert stream.view == View(None, Holder("b", "missing"))


def test_the_stream_is_over_when_every_shard_has_ended_and_the_settle_time_is_too() -> None:
    stream = Stream().connect("a").batch("a", 500).settled().end("a")
    assert stream.view == View(None, Holder(None, "settling"))
    assert stream.settled().view == View(None, Holder(None, "ended"), over=True)


def test_a_child_that_is_known_keeps_the_stream_from_being_over() -> None:
    stream = Stream().connect("p")
    stream.lineage.add("c", stream.now, parents=("p",))
    assert stream.end("p").settled().view == View(None, Holder("c", "missing"))


def test_what_was_committed_stays_when_the_stream_is_over() -> None:
    stream = Stream().connect("a").batch("a", 500).settled()
    stream.watermark.commit(stream.view)
    assert stream.end("a").settled().view == View(500, Holder(None, "ended"), over=True)


def test_times_before_1970_are_times_like_any_other() -> None:
    stream = Stream().arrived(-100_000).connect("a", tells_lag=False).batch("a", -99_000, lag_ms=None)
    assert stream.settled().ms == -99_000
    assert stream.wait(10 * IDLE).ms == -100_000 + SETTLE + 9 * IDLE - (SETTLE + 9 * IDLE) // 1000


# Several servers.


def other(watermark_ms: int | None = None, reason: str = "behind", *, idle: bool = False) -> ServerState:
    return ServerState("two", 1, watermark_ms, idle=idle, held_by="z" if not idle else None, reason=reason)


def combined(stream: Stream, *others: ServerState) -> View:
    return stream.watermark.combine(stream.view, others)


def test_of_several_servers_the_least_holds_and_is_named() -> None:
    stream = Stream().connect("a").settled().batch("a", 500)
    assert combined(stream) == View(500, Holder("a", "behind"))
    assert combined(stream, other(900)) == View(500, Holder("a", "behind"))
    assert combined(stream, other(900), other(300)) == View(300, Holder("z", "behind", "two"))


def test_a_server_that_knows_nothing_yet_holds_what_was_reached() -> None:
    stream = Stream().connect("a").settled().batch("a", 500)
    stream.watermark.commit(combined(stream, other(200)))
    stream.batch("a", 600)
    assert combined(stream, other(None, "settling")) == View(200, Holder("z", "settling", "two"))
    assert combined(stream, ServerState("two", 1)) == View(200, Holder(None, "nothing seen", "two"))
    assert stream.disconnect("a").view.holds
    assert combined(stream, other(900)) == View(200, Holder("a", "missing"))


def test_a_server_that_is_idle_holds_nothing() -> None:
    stream = Stream().connect("a").settled().batch("a", 500)
    assert combined(stream, other(None, "no shards", idle=True)) == View(500, Holder("a", "behind"))
    alone = Stream().settled()
    assert alone.view.idle
    assert not alone.view.holds
    assert combined(alone, other(700)) == View(700, Holder("z", "behind", "two"))


def test_a_shard_that_comes_from_elsewhere_may_lie_behind_what_was_reached() -> None:
    """The pipeline does not go back; what this server tells of its own shards does."""
    stream = Stream().connect("a").settled().batch("a", 500)
    stream.watermark.commit(stream.view)
    stream.connect("b", event_ms=100).settled()
    assert stream.view == View(500, Holder("b", "behind"))
    assert stream.view.own_ms == 100


def test_the_stream_is_over_when_no_server_has_anything_left() -> None:
    stream = Stream().connect("a").settled().batch("a", 500)
    stream.lineage.end("a", stream.now)
    stream.watermark.disconnect("a")
    assert stream.view.over
    assert not combined(stream, other(900)).over
    assert combined(stream, other(None, "no shards", idle=True)).over


def test_the_stream_is_quiet_when_every_server_says_so_or_has_nothing() -> None:
    stream = Stream(on_arrival=False).connect("a").settled().batch("a", 500, lag_ms=0).wait(QUIET)
    assert stream.view.quiet
    assert not combined(stream, other(None, "idle", idle=True)).quiet
    assert combined(stream, other(None, "quiet", idle=True)).quiet
    assert combined(stream, other(None, "no shards", idle=True)).quiet
    alone = Stream(on_arrival=False).settled()
    assert combined(alone, other(None, "quiet", idle=True)).quiet
    assert not combined(alone, other(None, "no shards", idle=True)).quiet


# The lag.


def lag(stream: Stream, shard: str = "a") -> int | None:
    return stream.watermark.lag_ms(shard, stream.now)


def test_a_shard_that_sends_empty_batches_lags_by_the_time_since_the_latest_one() -> None:
    stream = Stream().connect("a").settled().batch("a", records=0, lag_ms=0)
    assert lag(stream) == 0
    assert lag(stream.wait(IDLE * 100)) == IDLE * 100
    assert lag(stream.batch("a", lag_ms=700).wait(50)) == 750


def test_a_batch_in_hand_adds_to_the_lag_however_long_it_takes() -> None:
    stream = Stream().connect("a").settled().batch("a", lag_ms=7).wait(1000)
    stream.watermark.began("a", stream.now)
    assert lag(stream.wait(IDLE * 100)) == IDLE * 100 + 1007


def test_the_lag_counts_from_when_the_batch_came_that_told_it() -> None:
    stream = Stream().connect("a").settled()
    stream.watermark.began("a", stream.now)
    stream.wait(3000).watermark.observed("a", stream.now, records=1, lag_ms=7, event_ms=None, arrival_ms=None)
    assert lag(stream) == 3007


def test_the_lag_of_a_silent_daemon_that_sends_no_empty_batches_is_unknown() -> None:
    stream = Stream().connect("a").settled().batch("a", lag_ms=0)
    assert lag(stream.wait(IDLE - 1)) == IDLE - 1
    assert lag(stream.wait(1)) is None
    assert lag(stream.batch("a", lag_ms=0)) == 0


def test_the_lag_is_unknown_without_a_connection_or_a_word() -> None:
    stream = Stream().connect("a").settled()
    assert (lag(stream), lag(stream, "b")) == (None, None)
    assert lag(stream.batch("a", lag_ms=None)) is None


def test_a_shard_that_the_server_polls_lags_from_its_connection_on() -> None:
    stream = Stream().connect("a", polled=True).wait(5000)
    assert lag(stream) == 5000
    assert lag(stream.batch("a", records=0, lag_ms=0).wait(IDLE * 2)) == IDLE * 2


def test_a_shard_that_the_server_polls_seldom_is_carried_by_one_empty_page() -> None:
    stream = Stream().connect("a", polled=True).settled().arrived()
    stream.wait(60_000).batch("a", records=0, lag_ms=0)
    assert stream.ms == stream.aws(5000, known_ms=60_000)


def test_a_polled_shard_that_is_opened_again_without_an_answer_lags_since_its_latest_one() -> None:
    stream = Stream().connect("a", polled=True).settled().batch("a", records=0, lag_ms=0)
    stream.wait(1000).disconnect("a").wait(2000).connect("a", polled=True)
    assert lag(stream) == 3000
    stream.disconnect("a")
    assert stream.lineage.nodes["a"].read_ms == stream.now - 3000


def test_a_shard_whose_daemon_sends_no_empty_batches_is_read_until_it_is_disconnected() -> None:
    stream = Stream().connect("a").settled().batch("a", lag_ms=0).wait(1000).disconnect("a")
    assert stream.lineage.nodes["a"].read_ms == stream.now


def test_a_shard_that_another_server_read_is_read_until_then() -> None:
    stream = Stream().connect("a").disconnect("a").wait(1000)
    stream.lineage.elsewhere("a", stream.now, read=True)
    stream.wait(1000).lineage.elsewhere("a", stream.now, read=False)
    assert stream.lineage.nodes["a"].read_ms == stream.now


def test_a_shard_is_at_work_from_its_batch_to_the_answer() -> None:
    stream = Stream().connect("a", "b")
    stream.watermark.began("b", stream.now)
    assert stream.watermark.at_work() == ["b"]
    stream.watermark.answered("b", stream.now)
    assert stream.watermark.at_work() == []
