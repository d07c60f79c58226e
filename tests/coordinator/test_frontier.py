"""The frontier of a shard: timers that are due by then may fire, since each record that had arrived by then is accepted."""

from __future__ import annotations

import random
from collections import deque

import pytest
from coordinator.test_watermark import IDLE, Stream

from mldserver.coordinator.core.watermark import PREFETCH

pytestmark = [pytest.mark.quick, pytest.mark.core]

AHEAD = 7_000_000
"""By how much the time of day is ahead of steady time."""


def frontier(stream: Stream, shard: str = "a") -> int | None:
    """Return the frontier as a steady time."""
    found = stream.watermark.frontier_ms(shard, stream.now, stream.now + AHEAD)
    return None if found is None else found - AHEAD


def test_a_shard_without_a_connection_has_none() -> None:
    stream = Stream().connect("a").empty("a", PREFETCH + 2).disconnect("a")
    assert frontier(stream) is None
    assert frontier(stream, "never seen") is None


def test_a_shard_that_has_shown_nothing_has_none() -> None:
    assert frontier(Stream().connect("a").wait(1000)) is None


def test_a_shard_that_lags_is_as_far_as_its_last_record_whose_millisecond_others_may_share() -> None:
    stream = Stream().connect("a").wait(1000).batch("a", lag_ms=90_000, arrival_ms=50 + AHEAD)
    assert frontier(stream) == 49
    assert frontier(stream.wait(5 * IDLE)) == 49


def test_a_page_without_records_of_a_shard_that_lags_proves_nothing() -> None:
    assert frontier(Stream().connect("a").wait(1000).batch("a", records=0, lag_ms=90_000)) is None


def test_an_empty_batch_at_the_tip_after_a_pause_proves_that_all_until_its_receipt_is_delivered() -> None:
    stream = Stream().connect("a").wait(500).batch("a", records=0, lag_ms=0)
    at = stream.now
    assert frontier(stream.wait(60_000)) == at


def test_a_shard_whose_children_are_listed_proves_no_more_than_its_last_record() -> None:
    """Records of its keys that came after the split are in the children, which are not read yet."""
    stream = Stream().connect("a").wait(500).batch("a", lag_ms=0, arrival_ms=50 + AHEAD)
    stream.wait(500).batch("a", records=0, lag_ms=0)
    assert frontier(stream) == stream.now
    stream.lineage.add("b", stream.now, parents=["a"])
    assert frontier(stream.wait(5 * IDLE)) == 49


def test_an_empty_batch_right_after_an_answer_may_have_waited_in_the_daemons_queue() -> None:
    stream = Stream().connect("a").wait(499).batch("a", records=0, lag_ms=0)
    assert frontier(stream) is None


def test_then_it_proves_that_all_was_delivered_that_had_arrived_when_the_batch_prefetch_places_before_came() -> (
    None
):
    stream = Stream().connect("a")
    receipts = []
    for _ in range(PREFETCH + 1):
        stream.wait(19).batch("a", records=0, lag_ms=0)
        receipts.append(stream.now)
    assert frontier(stream) == receipts[0]


def test_a_daemon_whose_batches_all_came_a_while_after_the_answers_has_an_empty_queue() -> None:
    stream = Stream().connect("a")
    at = stream.now
    for _ in range(PREFETCH):
        stream.wait(20).batch("a", lag_ms=0)
    stream.wait(20).batch("a", records=0, lag_ms=0)
    assert frontier(stream) == stream.now == at + 20 * (PREFETCH + 1)
    stream.wait(19).batch("a", records=0, lag_ms=0)
    assert frontier(stream) == stream.now - 19, "this batch may have been in the queue"
    for _ in range(PREFETCH):
        stream.wait(20).batch("a", records=0, lag_ms=0)
        assert frontier(stream) < stream.now
    stream.wait(20).batch("a", records=0, lag_ms=0)
    assert frontier(stream) == stream.now


def test_a_gap_that_is_no_longer_than_the_work_before_it_may_be_the_way_to_a_remote_daemon() -> None:
    stream = Stream().connect("a")
    for _ in range(2 * PREFETCH):
        stream.wait(25).batch("a", records=0, lag_ms=0, takes_ms=1000)
    before = stream.now - PREFETCH * 1025 - 1000
    assert frontier(stream) == before, "the daemon may have fetched it then"
    for _ in range(PREFETCH + 1):
        stream.wait(25).batch("a", records=0, lag_ms=0, takes_ms=25)
        assert frontier(stream) < stream.now - 25
    stream.wait(25).batch("a", records=0, lag_ms=0, takes_ms=25)
    assert frontier(stream) == stream.now - 25


def test_what_was_proved_stays_proved() -> None:
    stream = Stream().connect("a").empty("a")
    at = stream.now
    for _ in range(PREFETCH + 1):
        stream.wait(1).batch("a", records=0, lag_ms=0)
    assert frontier(stream) == max(at, stream.now - PREFETCH)


def test_a_record_that_arrived_after_the_last_empty_batch_moves_the_frontier() -> None:
    stream = Stream().connect("a").empty("a")
    at = stream.now
    assert frontier(stream.wait(50).batch("a", arrival_ms=at + 20 + AHEAD)) == at + 19
    assert frontier(stream.wait(50).batch("a", arrival_ms=at + 20 + AHEAD, lag_ms=10_000)) == at + 19


def test_a_request_of_the_server_at_the_tip_proves_what_dynamodb_has_shown_for_sure() -> None:
    stream = Stream().connect("a", polled=True).wait(100).batch("a", records=0, lag_ms=0)
    assert frontier(stream) == stream.now - 5000
    assert frontier(stream.wait(5 * IDLE)) == stream.now - 5 * IDLE - 5000


@pytest.mark.parametrize("tells_lag", [True, False])
def test_a_daemon_without_empty_batches_shows_the_tip_by_its_silence(tells_lag: bool) -> None:
    stream = Stream().connect("a", tells_lag=tells_lag).batch("a", lag_ms=None, arrival_ms=5 + AHEAD)
    assert frontier(stream.wait(IDLE - 1)) == (4 if tells_lag else None)
    assert frontier(stream.wait(1)) == stream.now - IDLE


def test_the_silence_of_a_daemon_that_sends_empty_batches_shows_trouble() -> None:
    stream = Stream().connect("a").empty("a").batch("a", lag_ms=None)
    at = stream.now
    assert frontier(stream.wait(2 * IDLE)) == at


def test_the_silence_of_a_daemon_that_lagged_shows_trouble() -> None:
    stream = Stream().connect("a").batch("a", lag_ms=70, arrival_ms=5 + AHEAD)
    assert frontier(stream.wait(2 * IDLE)) == 4


class Daemon:
    """A KCL that prefetches, maybe on another host, and a server that takes its time, second by second as they come."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.takes_ms = (0, 5, 400, 2500) if seed % 2 else (0, 0, 5, 5, 5, 150)
        self.one_way_ms = (0, 12, 30)[seed % 3]
        """How long a message is on its way between the daemon and the server."""
        self.stream = Stream().connect("a")
        self.unread: deque[int] = deque()
        """Arrival times of the records in the shard that were not fetched."""
        self.unaccepted: list[int] = []
        """Arrival times of records that the server has not accepted."""
        self.queue: deque[tuple[list[int], int]] = deque()
        self.putting: tuple[list[int], int] | None = None
        self.coming: tuple[list[int], int] | None = None
        self.at_server: tuple[list[int], int] | None = None
        self.free_at = self.comes_at = 0
        self.busy_until = self.fetch_at = self.stream.now
        self.burst_until = 0
        self.moved = 0

    def tick(self) -> None:
        """Let a few milliseconds pass, and whatever happens in them."""
        dice, now = self.dice, self.stream.wait(self.dice.choice((1, 7, 40))).now
        if dice.random() < (0.5 if now < self.burst_until else 0.003):
            for _ in range(dice.choice((1, 1, 2, 5))):
                self.unread.append(now)
                self.unaccepted.append(now)
        if dice.random() < 0.0005:
            self.burst_until = now + 3000
        if self.putting is None and now >= self.fetch_at:
            batch = [self.unread.popleft() for _ in range(min(3, len(self.unread)))]
            self.putting = (batch, now - self.unread[0] if self.unread else 0)
            self.fetch_at = now + dice.choice((200, 1000))
        if self.putting is not None and len(self.queue) < PREFETCH - 1:
            self.queue.append(self.putting)
            self.putting = None
        if self.at_server is not None and now >= self.busy_until:
            self._accept(*self.at_server)
        if self.at_server is None and self.coming is None and self.queue and now >= self.free_at:
            self.coming, self.comes_at = self.queue.popleft(), now + self.one_way_ms
        if self.coming is not None and now >= self.comes_at:
            self.at_server, self.coming = self.coming, None
            self.busy_until = now + dice.choice(self.takes_ms)
            self.stream.watermark.began("a", now)

    def _accept(self, batch: list[int], lag_ms: int) -> None:
        del self.unaccepted[: len(batch)]
        arrival_ms = batch[-1] + AHEAD if batch else None
        self.stream.watermark.observed(
            "a",
            self.stream.now,
            records=len(batch),
            lag_ms=lag_ms,
            event_ms=None,
            arrival_ms=arrival_ms,
            reported_ms=arrival_ms,
        )
        self.stream.watermark.answered("a", self.stream.now)
        self.at_server, self.free_at = None, self.stream.now + self.one_way_ms

    def check(self) -> None:
        at = frontier(self.stream)
        if at is not None:
            on_the_way_ms = 500 if self.one_way_ms else 0  # promises.md allows a second
            assert not self.unaccepted or min(self.unaccepted) > at - on_the_way_ms
            self.moved += self.stream.now - at < 2500


def test_a_daemon_of_version_1_shows_the_tip_by_empty_batches_alone_for_so_long() -> None:
    stream = Stream().connect("a", tells_lag=False).batch("a", lag_ms=None, arrival_ms=AHEAD)
    stream.wait(IDLE - 1).batch("a", records=0, lag_ms=None)
    assert frontier(stream) is None
    stream.wait(1).batch("a", records=0, lag_ms=None)
    assert frontier(stream.wait(500)) == stream.now - 500 - IDLE


@pytest.mark.parametrize("seed", range(30))
def test_whatever_a_daemon_prefetches_no_record_that_arrived_by_the_frontier_is_accepted_after_it(
    seed: int,
) -> None:
    daemon = Daemon(seed)
    for _ in range(5000):
        daemon.tick()
        daemon.check()
    if seed % 2 == 0:
        assert daemon.moved > 50, "the frontier of a quick server follows the tip"
