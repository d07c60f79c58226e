"""ListShards with the real client, against a small server that answers as Kinesis does."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING, Any

from mldserver.sources.shards import ShardListing, kinesis_client, list_shards

if TYPE_CHECKING:
    import pytest


def shard(number: int, *parents: str, closed: bool = False) -> dict[str, Any]:
    described: dict[str, Any] = {
        "ShardId": f"shardId-{number}",
        "HashKeyRange": {"StartingHashKey": "0", "EndingHashKey": "1"},
        "SequenceNumberRange": {"StartingSequenceNumber": "1"}
        | ({"EndingSequenceNumber": "2"} if closed else {}),
    }
    return described | dict(zip(("ParentShardId", "AdjacentParentShardId"), parents, strict=False))


PAGES = {
    None: {"Shards": [shard(0, closed=True), shard(1, closed=True)], "NextToken": "more"},
    "more": {"Shards": [shard(2, "shardId-0"), shard(3, "shardId-0", "shardId-1")]},
}
LISTING = {
    "shardId-0": ShardListing((), closed=True),
    "shardId-1": ShardListing((), closed=True),
    "shardId-2": ShardListing(("shardId-0",), closed=False),
    "shardId-3": ShardListing(("shardId-0", "shardId-1"), closed=False),
}


class FakeClient:
    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []

    async def list_shards(self, **request: Any) -> dict[str, Any]:
        self.requests.append(request)
        return PAGES[request.get("NextToken")]


async def test_all_pages_are_read_and_the_token_excludes_the_name() -> None:
    client = FakeClient()
    assert await list_shards(lambda: contextlib.nullcontext(client), "flights") == LISTING
    assert client.requests == [{"StreamName": "flights"}, {"NextToken": "more"}]


async def test_a_failure_is_logged_and_never_fatal(logged: list[dict[str, Any]]) -> None:
    def refuse() -> Any:
        raise ConnectionError("no route")

    assert await list_shards(refuse, "flights") is None
    (event,) = [entry for entry in logged if entry["event"] == "stream.unlisted"]
    assert (event["stream"], event["error"], event["what"]) == ("flights", "ConnectionError", "no route")


async def test_the_real_client_asks_the_endpoint_that_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    targets: list[str] = []

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
    port = server.sockets[0].getsockname()[1]
    async with server:
        found = await list_shards(
            lambda: kinesis_client(region="eu-central-1", endpoint_url=f"http://127.0.0.1:{port}"), "flights"
        )
    assert found == LISTING
    assert targets == ["Kinesis_20131202.ListShards"] * 2
