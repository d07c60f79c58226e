"""ListShards with the real client, against a small server that answers as Kinesis does."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import pytest
from botocore.exceptions import ClientError, HTTPClientError

from mldserver.base.aws import aws_client
from mldserver.base.clock import CivilClock
from mldserver.consumer.intake import ShardListing
from mldserver.sources import listing
from mldserver.sources.listing import StreamLister
from mldserver.stores import KeyRange
from mldserver.testing import VirtualClock

pytestmark = pytest.mark.quick


LARGEST = (1 << 128) - 1


def shard(number: int, *parents: str, closed: bool = False) -> dict[str, Any]:
    described: dict[str, Any] = {
        "ShardId": f"shardId-{number}",
        "HashKeyRange": {"StartingHashKey": str(number), "EndingHashKey": str(LARGEST)},
        "SequenceNumberRange": {"StartingSequenceNumber": "1"}
        | ({"EndingSequenceNumber": "2"} if closed else {}),
    }
    return described | dict(zip(("ParentShardId", "AdjacentParentShardId"), parents, strict=False))


PAGES: dict[str | None, dict[str, Any]] = {
    None: {"Shards": [shard(0, closed=True), shard(1, closed=True)], "NextToken": "more"},
    "more": {"Shards": [shard(2, "shardId-0"), shard(3, "shardId-0", "shardId-1")]},
}
LISTING = {
    "shardId-0": ShardListing((), KeyRange(0, LARGEST)),
    "shardId-1": ShardListing((), KeyRange(1, LARGEST)),
    "shardId-2": ShardListing(("shardId-0",), KeyRange(2, LARGEST)),
    "shardId-3": ShardListing(("shardId-0", "shardId-1"), KeyRange(3, LARGEST)),
}


class FakeClient:
    """Answers as Kinesis does, but for the ``failures`` that come first."""

    def __init__(self, failures: int = 0) -> None:
        self.requests: list[dict[str, Any]] = []
        self.failures = failures
        self.made = 0
        self.open = False
        self.date: str | None = None

    @contextlib.asynccontextmanager
    async def make(self) -> AsyncIterator[FakeClient]:
        self.made += 1
        self.open = True
        try:
            yield self
        finally:
            self.open = False

    async def list_shards(self, **request: Any) -> dict[str, Any]:
        self.requests.append(request)
        if self.failures:
            self.failures -= 1
            raise ConnectionError("no route")
        return PAGES[request.get("NextToken")] | {"ResponseMetadata": {"HTTPHeaders": {"date": self.date}}}


@contextlib.asynccontextmanager
async def polling(
    make: Callable[[], Any], tell: Callable[[Any], object]
) -> AsyncIterator[tuple[StreamLister, VirtualClock]]:
    clock = VirtualClock()
    polls = StreamLister("flights", make, clock=clock)
    task = asyncio.create_task(polls.run(tell))
    await clock.advance(0)
    try:
        yield polls, clock
    finally:
        task.cancel()
        await asyncio.wait({task})


async def test_all_pages_are_read_and_the_token_excludes_the_name() -> None:
    client, told = FakeClient(), []
    async with polling(client.make, told.append):
        pass
    assert told == [LISTING]
    assert client.requests == [{"StreamName": "flights"}, {"NextToken": "more"}]


async def test_a_failure_is_logged_and_the_same_client_is_asked_again(logged: list[dict[str, Any]]) -> None:
    client, told_of = FakeClient(failures=2), []
    async with polling(client.make, told_of.append) as (_, clock):
        await clock.advance(95)
        assert client.open
    assert (len(client.requests), told_of) == (6, [LISTING, LISTING])
    assert (client.made, client.open) == (1, False)
    told = [entry for entry in logged if entry["event"] == "stream.unlisted"]
    expected = ("flights", "ConnectionError", "no route")
    assert [(event["stream"], event["error"], event["what"]) for event in told] == [expected] * 2


async def test_a_stream_that_does_not_exist_is_named(logged: list[dict[str, Any]]) -> None:
    def make() -> Any:
        raise ClientError({"Error": {"Code": "ResourceNotFoundException", "Message": "gone"}}, "ListShards")

    async with polling(make, lambda _listing: None):
        pass
    (told,) = [entry for entry in logged if entry["event"] == "stream.unlisted"]
    assert told["what"] == "There is no stream flights in this account and region."
    assert "region" in told["advice"]


async def test_a_failure_without_an_answer_is_never_fatal(logged: list[dict[str, Any]]) -> None:
    def make() -> Any:
        raise HTTPClientError(error="no route")

    async with polling(make, lambda _listing: None):
        pass
    (told,) = [entry for entry in logged if entry["event"] == "stream.unlisted"]
    assert told["error"] == "HTTPClientError"


async def test_a_client_that_cannot_be_made_is_tried_again_and_never_fatal(
    logged: list[dict[str, Any]],
) -> None:
    client = FakeClient()
    tries = iter([True, False])

    def make() -> Any:
        if next(tries):
            raise ValueError("no region")
        return client.make()

    told: list[Any] = []
    async with polling(make, told.append) as (_, clock):
        assert told == []
        await clock.advance(31)
        assert told == [LISTING]
    assert [entry["what"] for entry in logged if entry["event"] == "stream.unlisted"] == ["no region"]


class Listings(FakeClient):
    """A stream whose listings are numbered, and end only when a gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()

    async def list_shards(self, **request: Any) -> dict[str, Any]:
        await super().list_shards(**request)
        number = len(self.requests)
        await self.gate.wait()
        return {"Shards": [shard(number)]}


async def test_a_stream_is_listed_every_so_often() -> None:
    listings, told = Listings(), []
    listings.gate.set()
    async with polling(listings.make, told.extend) as (_, clock):
        await clock.advance(61)
        assert listings.open
    assert told == ["shardId-1", "shardId-2", "shardId-3"]
    assert not listings.open


async def test_whoever_asks_waits_for_a_listing_that_begins_afterwards() -> None:
    listings, told = Listings(), []
    async with polling(listings.make, told.extend) as (polls, clock):
        asking = [asyncio.create_task(polls.ask()) for _ in range(3)]
        await clock.advance(0)
        assert len(listings.requests) == 1
        listings.gate.set()
        assert await asyncio.gather(*asking) == [True] * 3
        assert told == ["shardId-1", "shardId-2"]


async def test_whoever_asks_before_the_first_listing_waits_for_that() -> None:
    listings, told = Listings(), []
    listings.gate.set()
    polls = StreamLister("flights", listings.make, clock=VirtualClock())
    asking = asyncio.create_task(polls.ask())
    await asyncio.sleep(0)
    running = asyncio.create_task(polls.run(told.extend))
    await asking
    assert told == ["shardId-1"]
    running.cancel()
    await asyncio.wait({running})


async def test_whoever_asks_goes_on_when_the_listing_fails() -> None:
    listings, told = Listings(), []
    listings.failures = 2
    listings.gate.set()
    async with polling(listings.make, told.extend) as (polls, _):
        assert not await polls.ask()
        assert told == []


async def test_whoever_asks_does_not_wait_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "_PATIENCE_SECONDS", 0)
    told: list[str] = []
    async with polling(Listings().make, told.extend) as (polls, _):
        assert not await polls.ask()
        assert told == []


@contextlib.asynccontextmanager
async def kinesis(targets: list[str]) -> AsyncIterator[str]:
    """Serve the pages; note in ``targets`` what is called, and give the address."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                fields = {k.lower(): v for k, _, v in (line.partition(": ") for line in head.split("\r\n"))}
                asked = json.loads(await reader.readexactly(int(fields["content-length"])))
                targets.append(fields["x-amz-target"])
                body = json.dumps(PAGES[asked.get("NextToken")]).encode()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/x-amz-json-1.1\r\n")
                writer.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.fixture
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")


@pytest.mark.usefixtures("credentials")
async def test_the_real_client_asks_the_endpoint_that_it_was_given() -> None:
    targets: list[str] = []
    async with kinesis(targets) as address:
        make = partial(aws_client, "kinesis", region="eu-central-1", endpoint_url=address)
        told: asyncio.Queue[Any] = asyncio.Queue()
        async with polling(make, told.put_nowait) as (polls, _), asyncio.TaskGroup() as group:
            assert await told.get() == LISTING
            group.create_task(polls.ask())
            assert await told.get() == LISTING
    assert targets == ["Kinesis_20131202.ListShards"] * 4


async def test_the_date_of_a_listing_corrects_the_civil_time() -> None:
    client, clock = FakeClient(), VirtualClock()
    civil = CivilClock(clock)
    client.date = "Wed, 21 Oct 2015 07:28:00 GMT"
    polls = StreamLister("flights", client.make, clock=clock, civil=civil)
    task = asyncio.create_task(polls.run(lambda _: None))
    await clock.advance(1)
    assert civil.now_ms() == 1_445_412_480_000 + 999 + 1000
    task.cancel()
    await asyncio.wait({task})
