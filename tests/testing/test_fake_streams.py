"""The fake of DynamoDB Streams answers what AWS answers: to aioboto3 over HTTP, and in memory."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import aioboto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError, ConnectionClosedError

from mldserver.testing import FakeStreams, VirtualClock

START_MS = 1_800_000_000_000


def fake(shards: int = 1, **more: Any) -> FakeStreams:
    return FakeStreams(shards=shards, clock=VirtualClock(START_MS), **more)


async def read(
    client: Any, streams: FakeStreams, shard_id: str, kind: str = "TRIM_HORIZON", **start: str
) -> list[dict[str, Any]]:
    """Return the pages of a shard: to its end, or to the first empty one."""
    answer = await client.get_shard_iterator(
        StreamArn=streams.arn, ShardId=shard_id, ShardIteratorType=kind, **start
    )
    pages, iterator = [], answer["ShardIterator"]
    while iterator:
        pages.append(await client.get_records(ShardIterator=iterator))
        iterator = pages[-1].get("NextShardIterator") if pages[-1]["Records"] else None
    return pages


def ids(pages: list[dict[str, Any]]) -> list[str]:
    return [record["dynamodb"]["Keys"]["id"]["N"] for page in pages for record in page["Records"]]


def number(record: dict[str, Any] | None) -> str:
    assert record is not None
    text: str = record["dynamodb"]["SequenceNumber"]
    return text


async def listed(client: Any, streams: FakeStreams, **request: Any) -> list[str]:
    answer = await client.describe_stream(StreamArn=streams.arn, **request)
    return [shard["ShardId"] for shard in answer["StreamDescription"]["Shards"]]


async def code(request: Any) -> str:
    with pytest.raises(ClientError) as refused:
        await request
    text: str = refused.value.response["Error"]["Code"]
    return text


async def test_aioboto3_reads_it_over_http_as_it_would_read_aws() -> None:
    streams = fake()
    streams.put({"id": 1, "name": "pen", "price": Decimal("1.50"), "raw": b"\x00\x01"})
    streams.put({"id": 1, "name": "pencil"})
    streams.delete({"id": 1}, expired=True)
    session = aioboto3.Session("key", "secret", region_name="us-east-1")
    async with (
        streams.serving() as url,
        session.client(
            "dynamodbstreams", endpoint_url=url, config=Config(retries={"total_max_attempts": 1})
        ) as client,
    ):
        assert [each["StreamArn"] for each in (await client.list_streams(TableName="orders"))["Streams"]] == [
            streams.arn
        ]
        assert (await client.list_streams(TableName="other"))["Streams"] == []
        (page,) = [page for page in await read(client, streams, streams.open_shards[0]) if page["Records"]]
        streams.fail("DescribeStream", "LimitExceededException")
        assert await code(client.describe_stream(StreamArn=streams.arn)) == "LimitExceededException"
        streams.fail("DescribeStream", "disconnect")
        with pytest.raises(ConnectionClosedError):
            await client.describe_stream(StreamArn=streams.arn)
    inserted, changed, expired = page["Records"]
    assert [record["eventName"] for record in page["Records"]] == ["INSERT", "MODIFY", "REMOVE"]
    assert inserted["dynamodb"]["NewImage"]["raw"] == {"B": b"\x00\x01"}
    assert inserted["dynamodb"]["ApproximateCreationDateTime"].timestamp() == START_MS / 1000
    assert changed["dynamodb"]["OldImage"]["price"] == {"N": "1.50"}
    assert expired["userIdentity"] == {"PrincipalId": "dynamodb.amazonaws.com", "Type": "Service"}


async def test_the_client_in_memory_gives_the_same_as_the_one_over_http() -> None:
    streams = fake()
    streams.put({"id": 1, "raw": b"\xff"})
    session = aioboto3.Session("key", "secret", region_name="us-east-1")
    async with (
        streams.serving() as url,
        session.client("dynamodbstreams", endpoint_url=url) as real,
        streams.client() as memory,
    ):
        for call in ("list_streams", "describe_stream"):
            request = {"StreamArn": streams.arn} if call == "describe_stream" else {}
            one, two = await getattr(real, call)(**request), await getattr(memory, call)(**request)
            del one["ResponseMetadata"], two["ResponseMetadata"]
            assert one == two
        shard = streams.open_shards[0]
        assert (await read(real, streams, shard))[0]["Records"] == (await read(memory, streams, shard))[0][
            "Records"
        ]
        with pytest.raises(AttributeError):
            memory.list_tables  # noqa: B018  # asked for on purpose


async def test_a_put_that_changes_nothing_and_a_delete_of_nothing_make_no_record() -> None:
    streams = fake(view="KEYS_ONLY")
    record = streams.put({"id": 1, "name": "pen"})
    assert record is not None
    assert not {"NewImage", "OldImage"} & set(record["dynamodb"])
    assert streams.put({"id": 1, "name": "pen"}) is None
    assert streams.delete({"id": 2}) is None


async def test_a_key_stays_in_its_lineage_and_children_have_their_parent() -> None:
    streams = fake(2)
    first = streams.open_shards
    for id_ in range(20):
        streams.put({"id": id_})
    children = streams.split(first[0])
    (rolled,) = streams.split(first[1], children=1)
    for id_ in range(20):
        streams.put({"id": id_, "again": True})
    async with streams.client() as client:
        before = [set(ids(await read(client, streams, shard))) for shard in first]
        after = [set(ids(await read(client, streams, shard))) for shard in (*children, rolled)]
        description = (await client.describe_stream(StreamArn=streams.arn))["StreamDescription"]
    assert before == [after[0] | after[1], after[2]]
    parents = {shard["ShardId"]: shard.get("ParentShardId") for shard in description["Shards"]}
    assert parents == dict.fromkeys(first) | dict.fromkeys(children, first[0]) | {rolled: first[1]}
    closed = [
        shard["ShardId"]
        for shard in description["Shards"]
        if "EndingSequenceNumber" in shard["SequenceNumberRange"]
    ]
    assert closed == list(first)


@pytest.mark.parametrize("quirk", ["", "null_iterator", "empty_last_page"])
async def test_a_closed_shard_ends_with_its_last_records_or_right_behind_them(quirk: str) -> None:
    streams = fake()
    shard = streams.open_shards[0]
    for id_ in range(5):
        streams.put({"id": id_})
    streams.disable()
    streams.page_records = 2
    if quirk:
        setattr(streams, quirk, True)
    async with streams.client() as client:
        pages = await read(client, streams, shard)
    assert [len(page["Records"]) for page in pages] == [2, 2, 1] + [0] * (quirk == "empty_last_page")
    assert [bool(page.get("NextShardIterator")) for page in pages[-2:]] == [True, False]


async def test_positions_begin_where_they_say() -> None:
    streams = fake()
    shard = streams.open_shards[0]
    records = [streams.put({"id": id_}) for id_ in range(4)]
    async with streams.client() as client:
        after = await read(client, streams, shard, "AFTER_SEQUENCE_NUMBER", SequenceNumber=number(records[1]))
        at = await read(client, streams, shard, "AT_SEQUENCE_NUMBER", SequenceNumber=number(records[1]))
        assert (ids(after), ids(at)) == (["2", "3"], ["1", "2", "3"])
        latest = await client.get_shard_iterator(
            StreamArn=streams.arn, ShardId=shard, ShardIteratorType="LATEST"
        )
        streams.put({"id": 9})
        assert ids([await client.get_records(ShardIterator=latest["ShardIterator"])]) == ["9"]
        wrong = read(client, streams, shard, "AFTER_SEQUENCE_NUMBER", SequenceNumber="7")
        assert await code(wrong) == "ValidationException"


async def test_what_is_trimmed_is_refused_and_a_shard_that_is_gone_is_unknown() -> None:
    streams = fake(2)
    shard, other = streams.open_shards
    records = [streams.put({"id": id_}, shard_id=shard) for id_ in range(4)]
    async with streams.client() as client:
        old = await client.get_shard_iterator(
            StreamArn=streams.arn, ShardId=shard, ShardIteratorType="TRIM_HORIZON"
        )
        streams.trim(shard, through=int(number(records[1])))
        assert (
            await code(client.get_records(ShardIterator=old["ShardIterator"])) == "TrimmedDataAccessException"
        )
        behind = read(client, streams, shard, "AFTER_SEQUENCE_NUMBER", SequenceNumber=number(records[1]))
        assert await code(behind) == "TrimmedDataAccessException"
        assert ids(await read(client, streams, shard)) == ["2", "3"]
        streams.trim(shard)
        assert await code(read(client, streams, shard)) == "ResourceNotFoundException"
        assert await listed(client, streams) == [other]


async def test_iterators_expire_after_fifteen_minutes_of_its_clock() -> None:
    clock = VirtualClock(START_MS)
    streams = FakeStreams(clock=clock)
    async with streams.client() as client:
        made = await client.get_shard_iterator(
            StreamArn=streams.arn, ShardId=streams.open_shards[0], ShardIteratorType="LATEST"
        )
        await clock.advance(14 * 60)
        page = await client.get_records(ShardIterator=made["ShardIterator"])
        await clock.advance(14 * 60)
        assert (await client.get_records(ShardIterator=page["NextShardIterator"]))["Records"] == []
        assert (
            await code(client.get_records(ShardIterator=made["ShardIterator"])) == "ExpiredIteratorException"
        )


async def test_listings_are_paged_shuffled_late_short_and_empty_as_told() -> None:
    clock = VirtualClock(START_MS)
    streams = FakeStreams(shards=8, clock=clock)
    streams.shuffled, streams.page_shards = True, 3
    async with streams.client() as client:
        pages: list[str] = []
        more: dict[str, str] = {}
        while True:
            answer = (await client.describe_stream(StreamArn=streams.arn, **more))["StreamDescription"]
            pages += [shard["ShardId"] for shard in answer["Shards"]]
            if "LastEvaluatedShardId" not in answer:
                break
            more = {"ExclusiveStartShardId": answer["LastEvaluatedShardId"]}
        assert sorted(pages) == list(streams.open_shards) != pages
        streams.page_shards = 100
        streams.fail("DescribeStream", "empty")
        streams.fail("DescribeStream", "short")
        assert [len(await listed(client, streams)) for _ in range(3)] == [0, 4, 8]
        parent = streams.open_shards[0]
        children = streams.split(parent, visible_after=2)
        assert len(await listed(client, streams)) == 8
        await clock.advance(2)
        assert {*await listed(client, streams)} > {*children}
        assert await code(client.describe_stream(StreamArn=streams.arn, Limit=101)) == "ValidationException"


async def test_a_stream_that_is_enabled_again_is_another_one_and_the_old_one_can_still_be_read() -> None:
    streams = fake()
    old, shard = streams.arn, streams.open_shards[0]
    streams.put({"id": 1})
    new = streams.enable(shards=2)
    async with streams.client() as client:
        found = await client.list_streams(TableName="orders", Limit=1)
        assert (found["Streams"][0]["StreamArn"], found["LastEvaluatedStreamArn"]) == (old, old)
        rest = await client.list_streams(TableName="orders", ExclusiveStartStreamArn=old)
        assert [each["StreamArn"] for each in rest["Streams"]] == [new]
        description = (await client.describe_stream(StreamArn=old))["StreamDescription"]
        assert (description["StreamStatus"], len(description["Shards"])) == ("DISABLED", 1)
        start = await client.get_shard_iterator(
            StreamArn=old, ShardId=shard, ShardIteratorType="TRIM_HORIZON"
        )
        assert len((await client.get_records(ShardIterator=start["ShardIterator"]))["Records"]) == 1
        unknown = client.describe_stream(StreamArn=old.replace("orders", "others"))
        assert await code(unknown) == "ResourceNotFoundException"
    streams.disable()
    with pytest.raises(ValueError, match="closed"):
        streams.split(next(iter(streams.shards)))


async def test_a_slow_shard_is_slow_on_its_clock_and_calls_are_kept() -> None:
    clock = VirtualClock(START_MS)
    streams = FakeStreams(clock=clock)
    shard = streams.open_shards[0]
    streams.slow[shard] = 5
    async with streams.client() as client:
        await clock.drive(read(client, streams, shard), step=1)
    assert clock.steady_ms() >= 5000
    assert [(call.action, call.shard_id) for call in streams.calls] == [
        ("GetShardIterator", shard),
        ("GetRecords", shard),
    ]


async def test_trouble_passes_and_is_the_same_for_the_same_seed() -> None:
    async def told(seed: int) -> list[str]:
        streams = fake(seed=seed)
        streams.trouble = 0.5
        streams.put({"id": 1})
        seen: list[str] = []
        async with streams.client() as client:
            for _ in range(200):
                try:
                    seen.append(str(len(ids(await read(client, streams, streams.open_shards[0])))))
                except ClientError as error:
                    seen.append(error.response["Error"]["Code"])
                except ConnectionClosedError:
                    seen.append("disconnect")
        return seen

    seen = await told(1)
    assert {"0", "1", "disconnect", "ExpiredIteratorException", "InternalServerError"} <= set(seen)
    assert seen == await told(1) != await told(2)
