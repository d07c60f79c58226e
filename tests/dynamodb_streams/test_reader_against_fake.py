"""Readers and the four actions against the scripted fake of AWS: over HTTP with aioboto3, and in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import aioboto3
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st
from support.serving import until

from mldserver.base.clock import Clock, SystemClock
from mldserver.dynamodb_streams.reader import ShardReader, to_record
from mldserver.dynamodb_streams.shard_tree import LATEST, TRIM_HORIZON, After, At, Since, Start
from mldserver.dynamodb_streams.streams_api import ShardGone, StreamsApi, streams_client
from mldserver.errors import OperatorError
from mldserver.testing import FakeStreams, VirtualClock

START_MS = 1_800_000_000_000


class Hurried(SystemClock):
    """Waits for nothing: time is the machine's."""

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)


def reader(
    api: StreamsApi, fake: FakeStreams, shard_id: str, start: Start = TRIM_HORIZON, *, clock: Clock
) -> ShardReader:
    return ShardReader(
        api, fake.arn, shard_id, start, clock=clock, random=random.Random(1).random, poll_seconds=1
    )


def written(fake: FakeStreams, shard_id: str) -> list[int]:
    return [int(record["dynamodb"]["SequenceNumber"]) for record in fake.shards[shard_id].records]


async def to_the_end(shard: ShardReader) -> list[int]:
    numbers: list[int] = []
    while True:
        page = await shard.next()
        numbers += [record.sequence_number for record in page.records]
        if page.end:
            return numbers


# Over HTTP


@contextlib.asynccontextmanager
async def over_http(fake: FakeStreams) -> AsyncIterator[StreamsApi]:
    session = aioboto3.Session("key", "secret", region_name="us-east-1")
    async with fake.serving() as url:
        make = partial(streams_client, endpoint_url=url, session=session)
        async with StreamsApi(make, clock=Hurried(), random=random.Random(1).random) as api:
            yield api


async def test_a_shard_is_read_over_http_through_all_that_passes(logged: list[dict[str, Any]]) -> None:
    fake = FakeStreams()
    for number in range(25):
        fake.put({"id": number, "raw": b"\x00\xff"})
    (shard_id,) = fake.open_shards
    fake.split(shard_id)
    fake.page_records, fake.null_iterator = 10, True
    for error in ("LimitExceededException", "InternalServerError", "disconnect", "empty"):
        fake.fail("GetRecords", error)
    fake.fail("GetShardIterator", "ThrottlingException", times=2)
    async with over_http(fake) as api:
        assert await api.resolve("orders") == fake.arn
        assert await to_the_end(reader(api, fake, shard_id, clock=Hurried())) == written(fake, shard_id)
    assert {event["event"] for event in logged} == {"stream.retried"}


async def test_the_client_itself_tries_nothing_again_and_takes_ids_of_any_length(
    logged: list[dict[str, Any]],
) -> None:
    fake = FakeStreams()
    fake.fail("GetShardIterator", "InternalServerError")
    async with over_http(fake) as api:
        with pytest.raises(ShardGone):
            await api.iterator(fake.arn, "short", TRIM_HORIZON)
    assert [(event["event"], event["attempt"]) for event in logged] == [("stream.retried", 1)]


async def test_records_are_the_same_whoever_parses_them() -> None:
    fake = FakeStreams()
    fake.put({"id": 1, "raw": b"\x00\xff", "parts": {b"x"}, "deep": [{"n": 15}]}, at_ms=START_MS)
    fake.whole_seconds = False
    fake.put({"id": 2}, at_ms=START_MS + 250)
    fake.delete({"id": 1}, expired=True)
    async with (
        over_http(fake) as http,
        StreamsApi(fake.client, clock=Hurried(), random=lambda: 0.5) as memory,
    ):
        pages = [
            (await api.records(await api.iterator(fake.arn, fake.open_shards[0], TRIM_HORIZON)))[0]
            for api in (http, memory)
        ]
    quick, parsed = ([to_record("a", raw) for raw in page] for page in pages)
    assert len(quick) == 3
    for ours, theirs in zip(quick, parsed, strict=True):
        assert ours.json() == theirs.json()
        assert (ours.arrival_ms, ours.partition_key) == (theirs.arrival_ms, theirs.partition_key)


async def test_trap_13_slow_shards_hold_up_no_other_however_many_they_are() -> None:
    slow_clock = VirtualClock()
    fake = FakeStreams(shards=40, clock=slow_clock)
    *slow, quick = fake.open_shards
    for number in range(5):
        fake.put({"id": number}, shard_id=quick)
    fake.split(quick)
    fake.slow = dict.fromkeys(slow, 3600)
    async with over_http(fake) as api:
        waiting = [
            asyncio.ensure_future(reader(api, fake, shard_id, clock=Hurried()).next()) for shard_id in slow
        ]
        await until(lambda: slow_clock.sleepers == len(slow))
        assert await to_the_end(reader(api, fake, quick, clock=Hurried())) == written(fake, quick)
        assert not any(task.done() for task in waiting)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


@pytest.mark.parametrize("broken", [b"{half", b"<html>", b"[]", b"null", b"{}", b""])
async def test_half_an_answer_is_no_end_of_a_shard_but_asked_again(
    broken: bytes, logged: list[dict[str, Any]]
) -> None:
    answers = [broken, b'{"Records": [], "NextShardIterator": "on"}']

    async def handle(request: web.Request) -> web.Response:
        return web.Response(body=answers.pop(0), content_type="application/x-amz-json-1.0")

    app = web.Application()
    app.router.add_post("/", handle)
    async with TestServer(app) as server:
        session = aioboto3.Session("key", "secret", region_name="us-east-1")
        make = partial(streams_client, endpoint_url=str(server.make_url("")), session=session)
        async with StreamsApi(make, clock=Hurried(), random=lambda: 0.5) as api:
            assert await api.records("here") == ([], "on")
    assert [event["event"] for event in logged] == ["stream.retried"]


# In virtual time


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(START_MS)


@contextlib.asynccontextmanager
async def in_memory(fake: FakeStreams) -> AsyncIterator[StreamsApi]:
    async with StreamsApi(fake.client, clock=fake.clock, random=fake.random.random) as api:
        yield api


async def test_an_idle_reader_at_latest_loses_nothing_when_it_is_forgotten_for_an_hour(
    clock: VirtualClock,
) -> None:
    fake = FakeStreams(clock=clock)
    (shard_id,) = fake.open_shards
    fake.put({"id": 1}, at_ms=START_MS - 60_000)
    async with in_memory(fake) as api:
        shard = reader(api, fake, shard_id, LATEST, clock=clock)
        assert (await clock.drive(shard.next())).at_tip
        await clock.advance(600)
        fake.put({"id": 2})
        await clock.advance(3600)
        fake.put({"id": 3})
        page = await clock.drive(shard.next())
    assert [record.sequence_number for record in page.records] == written(fake, shard_id)[1:]


async def test_with_a_heartbeat_every_twelve_minutes_no_iterator_expires(clock: VirtualClock) -> None:
    fake = FakeStreams(clock=clock)
    (shard_id,) = fake.open_shards
    async with in_memory(fake) as api:
        shard = reader(api, fake, shard_id, LATEST, clock=clock)
        for _ in range(10):
            await clock.drive(shard.heartbeat())
            await clock.advance(12 * 60)
        fake.put({"id": 1}, at_ms=START_MS)  # a slow clock at AWS hides nothing
        assert len((await clock.drive(shard.next())).records) == 1
    assert sum(call.action == "GetShardIterator" for call in fake.calls) == 1


async def test_trap_12_records_that_expire_before_they_are_read_are_a_gap(
    clock: VirtualClock, logged: list[dict[str, Any]]
) -> None:
    fake = FakeStreams(clock=clock)
    fake.page_records = 2
    (shard_id,) = fake.open_shards
    for number in range(8):
        fake.put({"id": number})
    numbers = written(fake, shard_id)
    async with in_memory(fake) as api:
        shard = reader(api, fake, shard_id, clock=clock)
        first = await clock.drive(shard.next())
        fake.trim(shard_id, through=numbers[5])
        second = await clock.drive(shard.next())
    assert [record.sequence_number for record in first.records + second.records] == numbers[:2] + numbers[6:]
    assert (first.gap, second.gap) == (False, True)
    assert [event["event"] for event in logged] == ["stream.gap"]


async def test_a_page_that_cannot_be_read_is_not_passed_over(clock: VirtualClock) -> None:
    fake = FakeStreams(clock=clock)
    (shard_id,) = fake.open_shards
    fake.put({"id": 1})
    change = fake.shards[shard_id].records[0]["dynamodb"]
    keys = change.pop("Keys")
    async with in_memory(fake) as api:
        shard = reader(api, fake, shard_id, clock=clock)
        for _ in range(2):
            with pytest.raises(ExceptionGroup):
                await clock.drive(shard.next())
        change["Keys"] = keys
        assert len((await clock.drive(shard.next())).records) == 1


async def test_trap_14_a_shard_that_was_trimmed_whole_ends(clock: VirtualClock) -> None:
    fake = FakeStreams(clock=clock)
    (shard_id,) = fake.open_shards
    fake.split(shard_id)
    fake.trim(shard_id)
    async with in_memory(fake) as api:
        page = await clock.drive(reader(api, fake, shard_id, After(7), clock=clock).next())
        assert (page.records, page.end, page.gap) == ([], True, True)
        assert len((await clock.drive(api.describe(fake.arn))).shards) == 2


async def test_trap_14_a_listing_in_pages_out_of_order_is_whole(clock: VirtualClock) -> None:
    fake = FakeStreams(clock=clock, shards=5)
    fake.page_shards, fake.shuffled = 2, True
    for shard_id in fake.open_shards:
        fake.split(shard_id)
    async with in_memory(fake) as api:
        described = await clock.drive(api.describe(fake.arn))
    assert {(shard.id, shard.parent) for shard in described.shards} == {
        (shard.id, shard.parent) for shard in fake.shards.values()
    }
    assert [shard.id for shard in described.shards if shard.last is not None] != []


async def test_a_table_whose_stream_was_enabled_again_is_read_by_its_new_one(clock: VirtualClock) -> None:
    fake = FakeStreams(clock=clock)
    old = fake.arn
    new = fake.enable()
    async with in_memory(fake) as api:
        assert await clock.drive(api.resolve("orders")) == new
        assert await clock.drive(api.resolve(old)) == old
        fake.disable()
        with pytest.raises(ExceptionGroup) as raised:
            await clock.drive(api.resolve("orders"))
    assert raised.group_contains(OperatorError, match="no enabled stream")


@given(
    seed=st.integers(0, 2**32),
    counts=st.lists(st.integers(0, 12), min_size=1, max_size=6),
    seconds=st.data(),
)
def test_whatever_passes_every_record_is_read_once_and_in_order(
    seed: int, counts: list[int], seconds: st.DataObject
) -> None:
    clock = VirtualClock(START_MS)
    fake = FakeStreams(clock=clock, seed=seed)
    fake.page_records, fake.trouble = 3, 0.3
    fake.empty_last_page, fake.null_iterator = bool(seed % 2), bool(seed % 3)
    (shard_id,) = fake.open_shards

    def write(count: int) -> None:
        for _ in range(count):
            fake.put({"id": str(fake.random.random())}, at_ms=START_MS + fake.random.randint(0, 20) * 1000)

    write(counts[0])
    numbers = written(fake, shard_id)
    starts: list[Start] = [TRIM_HORIZON, LATEST, Since(START_MS + 9500)]
    if numbers:
        starts += [At(numbers[len(numbers) // 2]), After(numbers[len(numbers) // 2])]
    start = seconds.draw(st.sampled_from(starts))

    async def run() -> list[int]:
        async with in_memory(fake) as api:
            shard = reader(api, fake, shard_id, start, clock=clock)
            found: list[int] = []
            if start is LATEST:  # its place is where its iterator was made
                await clock.drive(shard.heartbeat())
            for count in counts[1:]:
                write(count)
                page = await clock.drive(shard.next(), step=1) if count else None
                found += [record.sequence_number for record in page.records] if page else []
            fake.split(shard_id)
            return found + await clock.drive(to_the_end(shard), step=1)

    found = asyncio.run(run())
    records = fake.shards[shard_id].records
    times = [1000 * record["dynamodb"]["ApproximateCreationDateTime"] for record in records]
    everything = written(fake, shard_id)
    wanted = {
        TRIM_HORIZON: 0,
        LATEST: len(numbers),
        At(numbers[len(numbers) // 2] if numbers else 0): len(numbers) // 2,
        After(numbers[len(numbers) // 2] if numbers else 0): len(numbers) // 2 + 1,
        Since(START_MS + 9500): next(
            (place for place, ms in enumerate(times) if ms >= START_MS + 9000), len(times)
        ),
    }
    assert found == everything[wanted[start] :]
