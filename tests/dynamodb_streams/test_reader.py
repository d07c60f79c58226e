"""One shard of a DynamoDB stream, read page by page from a scripted stand-in for the four actions."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import orjson
import pytest

from mldserver.dynamodb_streams.reader import Page, ShardReader, to_record
from mldserver.dynamodb_streams.shard_tree import LATEST, TRIM_HORIZON, After, At, Since, Start
from mldserver.dynamodb_streams.streams_api import IteratorExpired, ShardGone, StreamsApi, Trimmed
from mldserver.errors import OperatorError
from mldserver.testing import FakeStreams, VirtualClock

pytestmark = pytest.mark.quick

ARN = "arn:aws:dynamodb:eu-west-1:1:table/orders/stream/2027-01-15T08:00:00.000"
SHARD = "shardId-1"
NOW_MS = 1_800_000_000_000


def raw(number: int, created_ms: int = NOW_MS) -> dict[str, Any]:
    """One record as aioboto3 gives it."""
    return {
        "eventID": f"event-{number}",
        "eventName": "INSERT",
        "eventVersion": "1.1",
        "eventSource": "aws:dynamodb",
        "awsRegion": "eu-west-1",
        "dynamodb": {
            "ApproximateCreationDateTime": datetime.fromtimestamp(created_ms / 1000, UTC),
            "Keys": {"id": {"N": str(number)}},
            "SequenceNumber": str(number),
            "SizeBytes": 10,
            "StreamViewType": "KEYS_ONLY",
        },
    }


class Script:
    """Stands in for StreamsApi: gives what it is told, and keeps what it was asked."""

    def __init__(
        self, clock: VirtualClock, *pages: list[dict[str, Any]] | Exception, closed: bool = False
    ) -> None:
        self.clock = clock
        self.pages = deque(pages)
        self.closed = closed
        self.refusals: deque[Exception] = deque()
        """Of iterators."""
        self.places: list[Start] = []
        """Where iterators were asked for."""
        self.asked_ms: list[int] = []
        """When records were asked for."""
        self.is_listed: Callable[[], bool] = lambda: False

    def now_ms(self) -> int:
        return self.clock.now_ms()

    async def lists(self, arn: str, shard_id: str) -> bool:
        assert (arn, shard_id) == (ARN, SHARD)
        return self.is_listed()

    async def iterator(self, arn: str, shard_id: str, start: Start) -> str:
        assert (arn, shard_id) == (ARN, SHARD)
        self.places.append(start)
        if self.refusals:
            raise self.refusals.popleft()
        return f"iterator {len(self.places)}"

    async def records(self, iterator: str, *, limit: int = 1000) -> tuple[list[dict[str, Any]], str | None]:
        assert iterator == f"iterator {len(self.places)}"
        self.asked_ms.append(self.clock.steady_ms())
        page = self.pages.popleft() if self.pages else []
        if isinstance(page, Exception):
            raise page
        assert len(page) <= limit
        return page, None if self.closed and not self.pages else iterator


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(NOW_MS)


def reader(
    script: Script,
    start: Start = TRIM_HORIZON,
    *,
    poll_seconds: float = 1.0,
    longest_seconds: float | None = None,
) -> ShardReader:
    return ShardReader(
        script,  # type: ignore[arg-type]  # a stand-in
        ARN,
        SHARD,
        start,
        clock=script.clock,
        random=lambda: 0.5,
        poll_seconds=poll_seconds,
        longest_seconds=longest_seconds,
    )


def most_in_a_second(script: Script) -> int:
    return max(
        sum(1 for other_ms in script.asked_ms if at_ms <= other_ms < at_ms + 1000)
        for at_ms in script.asked_ms
    )


def numbers(page: Page) -> list[int]:
    return [record.sequence_number for record in page.records]


async def read(clock: VirtualClock, shard: ShardReader, pages: int, *, step: float = 1) -> list[Page]:
    async def one_after_the_other() -> list[Page]:
        return [await shard.next() for _ in range(pages)]

    return await clock.drive(one_after_the_other(), step=step)


# The plain path


async def test_pages_come_one_after_the_other_as_fast_as_aws_allows(clock: VirtualClock) -> None:
    script = Script(clock, [raw(1), raw(2)], [raw(3)], [raw(10)])
    shard = reader(script)
    pages = await read(clock, shard, 3)
    assert [numbers(page) for page in pages] == [[1, 2], [3], [10]]
    assert not any(page.end or page.at_tip or page.gap for page in pages)
    assert (script.places, shard.after, script.asked_ms) == ([TRIM_HORIZON], 10, [0, 250, 500])


async def test_a_shard_is_asked_four_times_a_second_from_the_first_request_on(clock: VirtualClock) -> None:
    script = Script(clock, *([raw(number)] for number in range(1, 10)))
    await read(clock, reader(script), 9)
    assert script.asked_ms == list(range(0, 2001, 250))


async def test_trap_11_the_last_page_of_a_closed_shard_is_delivered_and_ends_it(clock: VirtualClock) -> None:
    script = Script(clock, [raw(1)], [raw(2)], closed=True)
    first, last, again = await read(clock, reader(script), 3)
    assert (numbers(first), first.end) == ([1], False)
    assert (numbers(last), last.end, last.at_tip, last.gap) == ([2], True, False, False)
    assert (numbers(again), again.end, again.gap) == ([], True, False)
    assert len(script.asked_ms) == 2


async def test_a_closed_shard_may_end_with_an_empty_page(clock: VirtualClock) -> None:
    pages = await read(clock, reader(Script(clock, [raw(1)], [], [], closed=True)), 2)
    assert [(numbers(page), page.end) for page in pages] == [([1], False), ([], True)]


async def test_an_end_is_no_tip(clock: VirtualClock) -> None:
    (page,) = await read(clock, reader(Script(clock, *[[]] * 5, closed=True)), 1)
    assert (page.end, page.at_tip) == (True, False)


@pytest.mark.parametrize("start", [TRIM_HORIZON, LATEST, At(7), After(7), Since(NOW_MS)])
async def test_reading_begins_where_it_is_told(clock: VirtualClock, start: Start) -> None:
    script = Script(clock, [raw(8)])
    shard = reader(script, start)
    assert shard.after == (7 if start == After(7) else None)
    assert [numbers(page) for page in await read(clock, shard, 1)] == [[8]]
    assert (script.places, shard.after) == ([start], 8)


# The tip


async def test_four_empty_pages_are_a_gap_and_the_fifth_is_the_tip(clock: VirtualClock) -> None:
    script = Script(clock, [], [], [], [], [raw(1)], [], [], [], [], [], [raw(2)])
    behind, tip, ahead = await read(clock, reader(script), 3)
    assert (numbers(behind), behind.at_tip) == ([1], False)
    assert (numbers(tip), tip.at_tip, tip.end) == ([], True, False)
    assert (numbers(ahead), ahead.at_tip) == ([2], False)


async def test_at_the_tip_a_shard_is_asked_once_in_a_poll_interval(clock: VirtualClock) -> None:
    script = Script(clock)
    pages = await read(clock, reader(script, poll_seconds=2), 4)
    assert all(page.at_tip and not page.records for page in pages)
    assert [page.began_ms for page in pages] == [1000, 3000, 5000, 7000] == script.asked_ms[4:]


async def test_at_the_tip_a_page_with_records_is_followed_by_one_empty_request(clock: VirtualClock) -> None:
    script = Script(clock)
    shard = reader(script)
    await read(clock, shard, 1)
    before = len(script.asked_ms)
    script.pages.extend([[raw(1)], [], [raw(2)], [], [], [], [], []])
    first, second, tip = await read(clock, shard, 3)
    assert (numbers(first), numbers(second), tip.at_tip) == ([1], [2], True)
    gaps = [after - now for now, after in itertools.pairwise(script.asked_ms[before:])]
    assert gaps == [250, 1000, 250, 1000, 1000, 1000, 1000]


@pytest.mark.parametrize("first_ms", [0, 2000], ids=["from the start", "from the tip"])
async def test_one_change_a_second_costs_fewer_than_two_requests_a_second(
    clock: VirtualClock, first_ms: int
) -> None:
    script, due = Script(clock), deque(range(first_ms, 62_000, 1000))
    shard = reader(script)
    if first_ms:
        await read(clock, shard, 1)

    async def follow() -> None:
        while due:
            if due[0] <= clock.steady_ms():
                script.pages.append([raw(due[0] + 1, NOW_MS + due.popleft())])
            await shard.next()

    await clock.drive(follow(), step=0.25)
    seconds = (script.asked_ms[-1] - script.asked_ms[4]) / 1000
    assert seconds > 55
    assert len(script.asked_ms[4:]) / seconds < 2
    assert most_in_a_second(script) <= 4


async def test_behind_the_tip_five_requests_cross_a_gap_without_a_pause(clock: VirtualClock) -> None:
    script = Script(clock)
    shard = reader(script)
    await read(clock, shard, 1)
    await clock.advance(61)  # nobody wanted a page: as long as this the tip may be away
    before = len(script.asked_ms)
    script.pages.extend([[raw(1)], [], [], [], [], [raw(2)]])
    assert [numbers(page) for page in await read(clock, shard, 2)] == [[1], [2]]
    gaps = [after - now for now, after in itertools.pairwise(script.asked_ms[before:])]
    assert gaps == [250] * 5


async def test_a_quiet_shard_is_asked_less_often_up_to_a_bound(clock: VirtualClock) -> None:
    script = Script(clock)
    shard = reader(script, longest_seconds=5.0)
    pages = await read(clock, shard, 60)
    waits = [after - now for now, after in itertools.pairwise(page.began_ms for page in pages)]
    assert waits == sorted(waits)
    assert (waits[0], waits[-1]) == (1000, 5000)
    assert all(
        wait <= 1000 or wait * 10 <= page.began_ms + 10 for wait, page in zip(waits, pages, strict=False)
    )
    script.pages.extend([[raw(1)], []])
    await read(clock, shard, 2)
    assert script.asked_ms[-1] - script.asked_ms[-2] == 1000


async def test_a_throttled_shard_is_not_asked_faster(clock: VirtualClock) -> None:
    fake = FakeStreams(clock=clock)
    (shard_id,) = fake.open_shards
    fake.fail("GetRecords", "LimitExceededException", times=3)
    async with StreamsApi(fake.client, clock=clock, random=lambda: 0.0) as api:
        shard = ShardReader(
            api, fake.arn, shard_id, TRIM_HORIZON, clock=clock, random=lambda: 0.0, poll_seconds=1
        )
        await read(clock, shard, 2, step=0.05)
    asked = [call.steady_ms for call in fake.calls if call.action == "GetRecords"]
    assert all(after - now >= 250 for now, after in itertools.pairwise(asked[:4]))


async def test_the_poll_interval_has_jitter(clock: VirtualClock) -> None:
    script = Script(clock)
    chances = iter([0.0, 0.25, 0.999])
    shard = reader(script, poll_seconds=2)
    shard._random = lambda: next(chances)
    await read(clock, shard, 4)
    assert script.asked_ms[4:] == [1000, 2000, 3500, 6498]


async def test_a_page_knows_when_its_request_began(clock: VirtualClock) -> None:
    script = Script(clock, *([raw(number)] for number in range(1, 4)))
    assert [page.began_ms for page in await read(clock, reader(script), 3)] == [0, 250, 500]


async def test_a_read_that_is_cancelled_loses_nothing(clock: VirtualClock) -> None:
    script = Script(clock)
    shard = reader(script, poll_seconds=60)
    await read(clock, shard, 1)
    waiting = asyncio.ensure_future(shard.next())
    await clock.advance(10)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    script.pages.append([raw(1)])
    assert numbers(await clock.drive(shard.next(), step=10)) == [1]


# Iterators that expire


async def test_an_expired_iterator_is_renewed_behind_the_last_record(clock: VirtualClock) -> None:
    script = Script(clock, [raw(1), raw(2)], IteratorExpired(), IteratorExpired(), [raw(3)])
    pages = await read(clock, reader(script), 2)
    assert [numbers(page) for page in pages] == [[1, 2], [3]]
    assert script.places == [TRIM_HORIZON, After(2), After(2)]


@pytest.mark.parametrize("start", [TRIM_HORIZON, At(7), Since(NOW_MS)])
async def test_without_a_record_reading_begins_again_where_it_began(
    clock: VirtualClock, start: Start
) -> None:
    script = Script(clock, [], IteratorExpired(), [raw(7)])
    assert [numbers(page) for page in await read(clock, reader(script, start), 1)] == [[7]]
    assert script.places == [start, start]


async def test_latest_goes_on_with_what_was_created_since_the_last_look(clock: VirtualClock) -> None:
    script = Script(clock)
    shard = reader(script, LATEST)
    await read(clock, shard, 1)
    await clock.advance(600 - clock.steady_ms() / 1000)
    await read(clock, shard, 1)
    looked_ms = NOW_MS + script.asked_ms[-1]
    await clock.advance(1000)
    old, new = raw(1, looked_ms - 60_000), raw(2, looked_ms + 60_000)
    script.pages.extend([IteratorExpired(), [old], [], [raw(3, looked_ms - 60_000), new, raw(4, NOW_MS)]])
    (page,) = await read(clock, shard, 1)
    assert numbers(page) == [2, 4]
    assert script.places == [LATEST, Since(looked_ms - 5000)]


@pytest.mark.parametrize("lost", [IteratorExpired(), Trimmed()])
async def test_latest_is_when_its_iterator_was_made(clock: VirtualClock, lost: Exception) -> None:
    script = Script(clock, lost, [raw(1, NOW_MS), raw(2, NOW_MS + 3_600_000)])
    shard = reader(script, LATEST)
    await clock.advance(3600)
    (page,) = await read(clock, shard, 1)
    assert (numbers(page), page.gap) == ([2], False)
    assert script.places == [LATEST, Since(NOW_MS + 3_595_000)]


async def test_a_reader_at_the_tip_asks_in_time_however_long_its_interval(clock: VirtualClock) -> None:
    script = Script(clock)
    shard = reader(script, LATEST, poll_seconds=3600)
    await read(clock, shard, 2, step=60)
    assert script.asked_ms[-2:] == [1000, 1000 + 12 * 60_000]


async def test_a_heartbeat_keeps_an_idle_reader_and_delivers_nothing(clock: VirtualClock) -> None:
    script = Script(clock, [], [], [raw(1)], [raw(2)])
    shard = reader(script, LATEST)
    for beat in range(5):
        await clock.drive(shard.heartbeat())
        assert len(script.asked_ms) == min(beat + 1, 3)  # it has read a record: no need of more
    assert [numbers(page) for page in await read(clock, shard, 2)] == [[1], [2]]
    await clock.drive(shard.heartbeat())
    assert len(script.asked_ms) == 4


async def test_a_heartbeat_may_meet_the_end(clock: VirtualClock) -> None:
    script = Script(clock, [], closed=True)
    shard = reader(script)
    for _ in range(2):
        await clock.drive(shard.heartbeat())
    (page,) = await read(clock, shard, 1)
    assert page.end
    await clock.drive(shard.heartbeat())
    assert len(script.asked_ms) == 1


# Records that are gone


async def test_trap_12_a_position_that_was_trimmed_in_mid_stream_goes_on_at_the_horizon(
    clock: VirtualClock, logged: list[dict[str, Any]]
) -> None:
    script = Script(clock, [raw(1)], Trimmed(), [], [raw(9)], [raw(10)])
    before, behind, after = await read(clock, reader(script), 3)
    assert [(numbers(page), page.gap) for page in (before, behind, after)] == [
        ([1], False),
        ([9], True),
        ([10], False),
    ]
    assert script.places == [TRIM_HORIZON, TRIM_HORIZON]
    (gap,) = logged
    assert (gap["event"], gap["level"], gap["shard"], gap["position"]) == ("stream.gap", "error", SHARD, "1")
    assert gap["gaps"] == 1


async def test_trap_12_a_stored_position_that_was_trimmed_goes_on_at_the_horizon(
    clock: VirtualClock, logged: list[dict[str, Any]]
) -> None:
    script = Script(clock, [], [raw(9)])
    script.refusals.append(Trimmed())
    (page,) = await read(clock, reader(script, After(5)), 1)
    assert (numbers(page), page.gap, script.places) == ([9], True, [After(5), TRIM_HORIZON])
    assert [event["event"] for event in logged] == ["stream.gap"]


async def test_a_gap_is_told_at_the_tip_when_nothing_is_left(clock: VirtualClock) -> None:
    script = Script(clock)
    script.refusals.append(Trimmed())
    tip, again = await read(clock, reader(script, At(5)), 2)
    assert (tip.at_tip, tip.gap, again.at_tip, again.gap) == (True, True, True, False)


async def test_what_was_read_before_a_gap_is_not_read_again(clock: VirtualClock) -> None:
    script = Script(clock, [raw(1), raw(2)], Trimmed(), [raw(2), raw(3)])
    pages = await read(clock, reader(script), 2)
    assert [(numbers(page), page.gap) for page in pages] == [([1, 2], False), ([3], True)]


async def test_trap_14_a_shard_that_is_gone_ends_with_a_gap(
    clock: VirtualClock, logged: list[dict[str, Any]]
) -> None:
    script = Script(clock)
    script.refusals.extend([ShardGone()] * 30)
    page, again = await read(clock, reader(script, After(5)), 2)
    assert (page.records, page.end, page.gap, again.end, again.gap) == ([], True, True, True, False)
    assert page.began_ms == 375 + 750 + 1500 + 3000 + 3 * 3750  # it was not known for 15 seconds
    assert [(event["event"], event["position"]) for event in logged] == [("stream.shard_gone", "5")]


async def test_a_shard_that_is_listed_is_asked_for_as_long_as_that_lasts(
    clock: VirtualClock, logged: list[dict[str, Any]]
) -> None:
    script = Script(clock, [raw(6)])
    script.refusals.extend([ShardGone()] * 60)
    script.is_listed = lambda: len(script.refusals) % 4 != 0  # a listing leaves it out now and then
    (page,) = await read(clock, reader(script, After(5)), 1)
    assert (numbers(page), page.end, page.gap) == ([6], False, False)
    assert clock.steady_ms() >= 200_000
    assert {event["event"] for event in logged} == {"stream.shard_unknown"}
    assert 3 <= len(logged) <= 4


async def test_a_shard_that_is_not_known_for_a_moment_is_read(
    clock: VirtualClock, logged: list[dict[str, Any]]
) -> None:
    script = Script(clock, ShardGone(), [raw(1)])
    script.refusals.append(ShardGone())
    (page,) = await read(clock, reader(script), 1)
    assert (numbers(page), page.gap, logged) == ([1], False, [])


async def test_what_a_person_must_mend_is_raised_and_nothing_lost(clock: VirtualClock) -> None:
    script = Script(clock, [raw(1)], OperatorError("The role may not."), [raw(2)])
    shard = reader(script)
    await read(clock, shard, 1)
    with pytest.raises(ExceptionGroup) as raised:
        await clock.drive(shard.next())
    assert raised.group_contains(OperatorError)
    assert [numbers(page) for page in await read(clock, shard, 1)] == [[2]]


# From a time on


async def test_trap_08_a_time_is_looked_for_inside_a_page_and_behind_many_empty_ones(
    clock: VirtualClock,
) -> None:
    since = NOW_MS + 10_000
    script = Script(
        clock,
        [raw(1, NOW_MS), raw(2, NOW_MS + 5000)],
        *[[]] * 4,
        [raw(3, NOW_MS + 6000)],
        *[[]] * 7,
        [raw(4, NOW_MS + 9000), raw(5, NOW_MS + 10_000), raw(6, NOW_MS + 9000), raw(7, NOW_MS + 11_000)],
        [raw(8, NOW_MS + 9000)],
    )
    shard = reader(script, Since(since))
    *tips, page, rest = await read(clock, shard, 5)
    assert [tip.at_tip and not tip.records for tip in tips] == [True] * 3
    # Inside a shard its order wins over times: what stands behind the first record counts as created later.
    assert (numbers(page), numbers(rest)) == ([5, 6, 7], [8])


async def test_trap_07_an_iterator_renewed_before_the_time_is_found_does_not_go_back(
    clock: VirtualClock,
) -> None:
    script = Script(clock, [raw(1), raw(2)], IteratorExpired(), [raw(3), raw(4, NOW_MS + 10_000)])
    (page,) = await read(clock, reader(script, Since(NOW_MS + 5000)), 1)
    assert (numbers(page), script.places) == ([4], [Since(NOW_MS + 5000), After(2)])


@pytest.mark.parametrize(
    ("created_ms", "wanted"),
    [(10_000, True), (9_000, False), (10_499, False), (10_500, True), (11_000, True)],
)
async def test_times_in_whole_seconds_count_as_any_part_of_theirs(
    clock: VirtualClock, created_ms: int, *, wanted: bool
) -> None:
    script = Script(clock, [raw(1, NOW_MS + created_ms)])
    (page,) = await read(clock, reader(script, Since(NOW_MS + 10_500)), 1)
    assert numbers(page) == ([1] if wanted else [])


# Several shards


async def test_trap_13_a_slow_shard_delays_no_other(clock: VirtualClock) -> None:
    class Slow(Script):
        async def records(
            self, iterator: str, *, limit: int = 1000
        ) -> tuple[list[dict[str, Any]], str | None]:
            await self.clock.sleep(3600)
            return await super().records(iterator, limit=limit)

    slow, quick = reader(Slow(clock, [raw(1)])), reader(Script(clock, *([raw(n)] for n in range(1, 9))))
    stuck = asyncio.ensure_future(slow.next())
    await read(clock, quick, 8)
    assert (quick.after, clock.steady_ms() < 3_600_000, stuck.done()) == (8, True, False)
    await clock.advance(3600)
    assert numbers(await stuck) == [1]


async def test_trap_05_a_shard_that_fails_loses_no_page_of_others(clock: VirtualClock) -> None:
    good = [reader(Script(clock, [raw(1)], [raw(2)])) for _ in range(3)]
    bad = reader(Script(clock, OperatorError("no")))
    first, refused, *others = await asyncio.gather(
        good[0].next(), bad.next(), good[1].next(), good[2].next(), return_exceptions=True
    )
    assert isinstance(refused, OperatorError)
    assert [numbers(page) for page in (first, *others) if isinstance(page, Page)] == [[1], [1], [1]]
    assert [numbers(page) for shard in good for page in await read(clock, shard, 1)] == [[2], [2], [2]]


# Records


def test_a_record_is_what_lambda_gets() -> None:
    change = raw(7, NOW_MS)
    change["userIdentity"] = {"Type": "Service", "PrincipalId": "dynamodb.amazonaws.com"}
    change["dynamodb"] |= {
        "Keys": {"b": {"B": b"\x00\xff"}, "a": {"S": "ü"}},
        "NewImage": {"set": {"BS": [b"x", b"y"]}, "deep": {"L": [{"M": {"n": {"N": "1.50"}}}]}},
    }
    record = to_record(SHARD, change)
    assert (record.shard_id, record.sequence_number, record.arrival_ms) == (SHARD, 7, NOW_MS)
    assert record.partition_key == '{"a":{"S":"ü"},"b":{"B":"AP8="}}'
    assert record.json() == {
        "eventID": "event-7",
        "eventName": "INSERT",
        "eventVersion": "1.1",
        "eventSource": "aws:dynamodb",
        "awsRegion": "eu-west-1",
        "dynamodb": {
            "ApproximateCreationDateTime": 1_800_000_000,
            "Keys": {"b": {"B": "AP8="}, "a": {"S": "ü"}},
            "NewImage": {"set": {"BS": ["eA==", "eQ=="]}, "deep": {"L": [{"M": {"n": {"N": "1.50"}}}]}},
            "SequenceNumber": "7",
            "SizeBytes": 10,
            "StreamViewType": "KEYS_ONLY",
        },
        "userIdentity": {"type": "Service", "principalId": "dynamodb.amazonaws.com"},
    }


def test_times_that_have_milliseconds_keep_them() -> None:
    record = to_record(SHARD, raw(7, NOW_MS + 250))
    assert record.arrival_ms == NOW_MS + 250
    assert record.json()["dynamodb"]["ApproximateCreationDateTime"] == 1_800_000_000.25


def test_a_record_without_a_time_has_none() -> None:
    change = raw(7)
    del change["dynamodb"]["ApproximateCreationDateTime"]
    assert to_record(SHARD, change).arrival_ms is None


def test_what_is_no_attribute_value_is_refused() -> None:
    change = raw(7)
    change["dynamodb"]["NewImage"] = {"a": {"S": object()}}
    with pytest.raises(orjson.JSONEncodeError):
        to_record(SHARD, change)
