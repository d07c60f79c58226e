"""The watermark where records give no rows, and against a naive oracle."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from coordinator.test_watermark import IDLE, QUIET, SETTLE, Stream
from hypothesis import given
from hypothesis import strategies as st

from mldserver.coordinator.core.watermark import PREFETCH, Holder, View

pytestmark = [pytest.mark.quick, pytest.mark.core]

SHARDS = ("s0", "s1", "s2")


def column(*shards: str, event_ms: int | None = None, tells_lag: bool = True) -> Stream:
    return Stream(on_arrival=False).connect(*shards, event_ms=event_ms, tells_lag=tells_lag).settled()


def busy(
    stream: Stream, shard: str, ms: int, *, lag_ms: int | None = 0, since_ms: int | None = None
) -> Stream:
    """A batch of records without rows comes every second; ``since_ms``: the arrival times go on from there."""
    first = stream.now if since_ms is None else since_ms
    for second in range(0, ms, 1000):
        stream.wait(1000).batch(shard, lag_ms=lag_ms, arrival_ms=first + second)
    return stream


def test_a_busy_shard_without_rows_leaves_the_minimum_after_the_idle_time_as_an_idle_one_does() -> None:
    stream = column("a", "b")
    stream.batch("a", 500, arrival_ms=stream.now).batch("b", 300, arrival_ms=stream.now)
    busy(stream, "b", IDLE - 1000)
    assert stream.view == View(300, Holder("b", "behind"))
    busy(stream, "b", 1000).batch("a", 700, arrival_ms=stream.now)
    assert stream.view == View(700, Holder("a", "behind"))
    stream.batch("b", 310)
    assert stream.view == View(310, Holder("b", "behind")), "a row counts it in again"


def test_a_shard_that_never_gave_a_row_does_too() -> None:
    stream = busy(column("a", "b"), "b", IDLE + 1000).batch("a", 500)
    assert stream.view == View(500, Holder("a", "behind"))


def test_one_whose_daemon_never_tells_the_lag_does_too() -> None:
    stream = busy(column("a", "b", tells_lag=False), "b", IDLE + 1000, lag_ms=None).batch("a", 500)
    assert stream.view == View(500, Holder("a", "behind"))


def test_one_that_must_tell_the_lag_and_has_not_yet_is_waited_for() -> None:
    stream = busy(column("a", "b"), "b", IDLE + 1000, lag_ms=None, since_ms=5).batch("a", 500)
    assert stream.view == View(None, Holder("b", "nothing seen"))


def test_a_stream_of_nothing_but_rowless_records_is_quiet_after_the_quiet_time() -> None:
    stream = busy(column("a").batch("a", 500), "a", IDLE + 1000)
    assert stream.view == View(None, Holder(None, "idle"))
    assert busy(stream, "a", QUIET).view == View(None, Holder(None, "quiet"), quiet=True)
    assert not stream.batch("a", 600).view.quiet


@pytest.mark.parametrize("given", [None, 300])
def test_a_batch_that_was_fetched_long_ago_does_not_say_that_its_shard_keeps_up(given: int | None) -> None:
    """A slow handler: behind each batch the daemon holds four more that it fetched since."""
    stream = column("a", "b").batch("a", 500)
    stream.batch("b", given)
    for _ in range(10):
        stream.wait(IDLE // PREFETCH + 1).batch("b", lag_ms=0)
    assert stream.batch("a", 900).view == View(given, Holder("b", "behind" if given else "nothing seen"))


def test_what_a_busy_shard_is_at_may_be_a_row_unless_it_has_only_ever_had_others() -> None:
    stream = busy(column("a", "b").batch("b", 300, arrival_ms=300), "a", IDLE + 2000)
    stream.watermark.began("a", stream.now)
    assert stream.view.holder == Holder("b", "behind"), (
        "where rows come from others, these tell how far it is"
    )
    alone = busy(column("a"), "a", IDLE + 2000)
    alone.watermark.began("a", alone.now)
    assert alone.view == View(None, Holder(None, "idle"))
    waking = column("a").empty("a", IDLE // 1000)
    waking.watermark.began("a", waking.now)
    assert waking.view == View(None, Holder("a", "nothing seen"))


def test_a_lagging_shard_goes_on_as_its_arrival_times_do_an_idle_time_behind() -> None:
    """Of old records that are read after an outage: those of the shard ahead count for nothing."""
    stream = column("a", "b").batch("a", 10_000, arrival_ms=10_400).batch("b", 10_100, arrival_ms=10_400)
    stream.batch("a", 10**6, arrival_ms=10**6 + 400)
    stream.batch("b", arrival_ms=10_400 + IDLE - 1)
    assert stream.view == View(10_100, Holder("b", "behind"))
    stream.batch("b", arrival_ms=10_400 + IDLE)
    assert stream.view == View(10_100, Holder("b", "behind"))
    stream.batch("b", arrival_ms=10_400 + IDLE + 2000)
    assert stream.view == View(10_000 + 2000, Holder("b", "behind"))
    assert stream.view.own_ms == 12_000
    stream.batch("b", arrival_ms=2 * 10**6)
    assert stream.view == View(10**6, Holder("a", "behind"))


def test_where_none_gives_rows_now_those_that_it_gave_tell_the_delay() -> None:
    stream = column("a").batch("a", 500, arrival_ms=900)
    stream.batch("a", arrival_ms=900 + 3 * IDLE)
    assert stream.view == View(500 + 2 * IDLE, Holder("a", "behind"))


def test_the_greatest_delay_counts_of_the_shards_that_give_rows_now() -> None:
    stream = column("a", "b", "c").batch("a", 5000, arrival_ms=5000).batch("b", 1000, arrival_ms=5000)
    stream.batch("b", 10**6, arrival_ms=10**6 + 700).batch("a", 10**6, arrival_ms=10**6)
    stream.batch("c", arrival_ms=0).batch("c", arrival_ms=IDLE + 9000)
    assert stream.view == View(9000 - 700, Holder("c", "behind"))


def test_a_lagging_shard_that_has_given_nothing_holds_where_nobody_else_has() -> None:
    stream = column("a").batch("a", arrival_ms=0).batch("a", arrival_ms=10 * IDLE)
    assert stream.view == View(None, Holder("a", "nothing seen"))


def test_a_shard_goes_on_from_the_arrival_time_that_the_ledger_has() -> None:
    stream = Stream(on_arrival=False)
    stream.lineage.add("a", stream.now)
    stream.lineage.connect("a", stream.now)
    stream.watermark.connect("a", stream.now, tells_lag=True, event_ms=500, arrival_ms=900)
    stream.settled().batch("a", arrival_ms=900 + IDLE + 50)
    assert stream.view == View(550, Holder("a", "behind"))


def test_cut_on_arrival_time_records_without_rows_count_as_any() -> None:
    stream = Stream().connect("a").settled().batch("a", 500, arrival_ms=500)
    stream.batch("a", 10**6, arrival_ms=10**6)
    assert stream.view == View(10**6, Holder("a", "behind"))


reading = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 2 * IDLE), st.booleans(), st.integers(0, IDLE)), max_size=40
)


@given(reading, st.integers(0, 10**7))
def test_a_catch_up_in_any_order_passes_no_row_while_the_delay_changes_by_less_than_the_idle_time(
    script: list[tuple[int, int, bool, int]], delay_ms: int
) -> None:
    """Each step reads one shard's next record: so long after its last one it had arrived, with a row or none."""
    stream = Stream(on_arrival=False, disorder_ms=IDLE, now=0).connect(*SHARDS).settled()
    arrival = dict.fromkeys(SHARDS, 0)
    for place, after_ms, gives, jitter_ms in script:
        shard = SHARDS[place]
        arrival[shard] += after_ms
        event_ms = arrival[shard] - delay_ms - jitter_ms if gives else None
        passed = stream.ms
        assert event_ms is None or passed is None or event_ms >= passed
        stream.batch(shard, event_ms, arrival_ms=arrival[shard])
        stream.watermark.commit(stream.view)


@dataclass
class Naive:
    """One shard's story, by the words of the rules."""

    connected: bool = True
    ended: bool = False
    event_ms: int = 0
    row_ms: int = 0
    answered_ms: int = 0
    arrival_ms: int | None = None
    row_arrival_ms: int | None = None
    received: list[int] = field(default_factory=lambda: [0])
    lag_ms: int | None = None
    empty: bool = False

    def idle(self, now: int) -> bool:
        keeps_up = self.lag_ms == 0 and now - self.received[-6:][0] <= IDLE
        told = self.lag_ms == 0 and self.empty
        silent = not self.lag_ms and now - self.answered_ms >= IDLE
        return now - self.row_ms >= IDLE and (keeps_up or told or silent)

    @property
    def rowless_ms(self) -> int:
        """Over how long its records have arrived without a row."""
        if self.arrival_ms is None or self.row_arrival_ms is None:
            return 0
        return self.arrival_ms - self.row_arrival_ms

    @property
    def delay_ms(self) -> int | None:
        return None if self.row_arrival_ms is None else self.row_arrival_ms - self.event_ms


def expected(shards: dict[str, Naive], committed: int | None, now: int, settled_ms: int) -> int | None:
    """Return the watermark that the rules give."""
    live = [each for each in shards.values() if each.connected]
    missing = any(not (each.connected or each.ended) for each in shards.values())
    if missing or now < settled_ms or not live or all(each.idle(now) for each in live):
        return committed
    known = [each for each in live if each.delay_ms is not None]
    speaking = [each for each in known if each.rowless_ms < IDLE] or known
    values = []
    for each in live:
        if each.idle(now):
            continue
        values.append(each.event_ms)
        if each.rowless_ms >= IDLE and each.arrival_ms is not None:
            delay = max(other.delay_ms for other in speaking if other.delay_ms is not None)
            values[-1] = max(each.arrival_ms - delay - IDLE, each.event_ms)
    least = min(values)
    return least if committed is None else max(least, committed)


steps = st.lists(
    st.one_of(
        st.tuples(st.just("rows"), st.integers(0, 2), st.integers(0, 2 * IDLE), st.sampled_from([0, 5])),
        st.tuples(st.just("rowless"), st.integers(0, 2), st.integers(0, 2 * IDLE), st.sampled_from([0, 5])),
        st.tuples(st.just("empty"), st.integers(0, 2), st.integers(0, 500), st.sampled_from([0, 0, 5])),
        st.tuples(st.just("wait"), st.just(0), st.integers(0, IDLE), st.just(0)),
        st.tuples(st.sampled_from(["lose", "return", "end"]), st.integers(0, 2), st.just(0), st.just(0)),
    ),
    max_size=40,
)


@given(steps)
def test_it_is_what_the_rules_say_and_never_goes_back(script: list[tuple[str, int, int, int]]) -> None:
    """The oracle keeps each shard's story and knows nothing of the code; it decides itself what silence is."""
    stream = Stream(on_arrival=False, now=0).connect(*SHARDS, event_ms=0).settled()
    shards = {shard: Naive() for shard in SHARDS}
    settled_ms, committed = SETTLE, None
    for step, place, amount, lag_ms in script:
        shard = SHARDS[place]
        naive = shards[shard]
        if step == "wait":
            stream.wait(amount)
        elif step == "return" and not (naive.connected or naive.ended):
            stream.connect(shard, event_ms=naive.event_ms)
            shards[shard] = Naive(
                event_ms=naive.event_ms, row_ms=stream.now, answered_ms=stream.now, received=[stream.now]
            )
        elif naive.connected and step in {"lose", "end"}:
            naive.connected, naive.ended = False, step == "end"
            if step == "end":
                stream.end(shard)
                settled_ms = stream.now + SETTLE
            else:
                stream.disconnect(shard)
        elif naive.connected and step != "return":
            read(stream, shard, naive, step, amount, lag_ms)
        view = stream.view
        assert view.watermark_ms == expected(shards, committed, stream.now, settled_ms)
        stream.watermark.commit(view)
        committed = view.watermark_ms


def read(stream: Stream, shard: str, naive: Naive, step: str, amount: int, lag_ms: int) -> None:
    """Deliver one batch, and tell the shard's story on."""
    naive.lag_ms, naive.empty = lag_ms, step == "empty"
    if step == "empty":
        stream.wait(amount).batch(shard, records=0, lag_ms=lag_ms)
    else:
        arrival = (naive.arrival_ms or 0) + amount
        event = naive.event_ms + amount // 2 if step == "rows" else None
        stream.batch(shard, event, lag_ms=lag_ms, arrival_ms=arrival)
        naive.arrival_ms = arrival
        if event is not None:
            naive.event_ms, naive.row_ms = event, stream.now
        if event is not None or naive.row_arrival_ms is None:
            naive.row_arrival_ms = arrival
    naive.received.append(stream.now)
    naive.answered_ms = stream.now
