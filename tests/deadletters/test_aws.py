"""Queues, streams and buckets over HTTP (moto), and what AWS does to those who send too much."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aioboto3
import pytest
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from support.clocks import RecordingClock
from werkzeug.serving import make_server

from mldserver.deadletters.aws_destinations import (
    BucketDestination,
    QueueDestination,
    StreamDestination,
    batches,
)
from mldserver.deadletters.destinations import from_document, identity
from mldserver.errors import LedgerError
from tests.ledger.samples import letter

LETTERS = tuple(letter(number) for number in range(1, 24))
LARGE = letter(99, data=b"x" * 900_000)


@pytest.fixture(scope="module")
def aws() -> Iterator[str]:
    server = make_server("127.0.0.1", 0, DomainDispatcherApplication(create_backend_app), threaded=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield f"http://127.0.0.1:{server.port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def session() -> aioboto3.Session:
    return aioboto3.Session("emulated", "emulated", region_name="eu-central-1")


@contextlib.asynccontextmanager
async def sending(made: Any) -> AsyncIterator[Any]:
    try:
        yield made
    finally:
        await made.close()


def of(kind: Any, place: str, aws: str, session: Any, clock: RecordingClock | None = None) -> Any:
    return kind(
        place,
        pipeline="p",
        clock=clock or RecordingClock(),
        jitter=lambda: 0.5,
        session=session,
        region="eu-central-1",
        endpoint_url=aws,
    )


async def everything_in(queue: Any, url: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    while True:
        answer = await queue.receive_message(QueueUrl=url, MaxNumberOfMessages=10)
        if not answer.get("Messages"):
            return found
        for message in answer["Messages"]:
            found.append(json.loads(message["Body"]))
            await queue.delete_message(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"])


@pytest.mark.parametrize("fifo", [False, True], ids=["standard", "fifo"])
async def test_a_queue_takes_letters_ten_at_a_time(aws: str, session: Any, *, fifo: bool) -> None:
    async with session.client("sqs", endpoint_url=aws) as client:
        named = {"QueueName": "q.fifo", "Attributes": {"FifoQueue": "true"}} if fifo else {"QueueName": "q"}
        url = (await client.create_queue(**named))["QueueUrl"]
        async with sending(of(QueueDestination, url, aws, session)) as queue:
            assert await queue.store(LETTERS) == ()
            if fifo:
                await queue.store(LETTERS[:3])  # SQS drops what was written twice
        found = await everything_in(client, url)
    assert sorted(each["sub_sequence"] for each in found) == [each.sequence.sub for each in LETTERS]
    assert {each["id"] for each in found} == {identity(each, "p") for each in LETTERS}


async def test_what_a_queue_does_not_take_is_the_ledgers(aws: str, session: Any) -> None:
    async with session.client("sqs", endpoint_url=aws) as client:
        made = await client.create_queue(QueueName="small", Attributes={"MaximumMessageSize": "2048"})
        async with sending(of(QueueDestination, made["QueueUrl"], aws, session)) as queue:
            assert await queue.store((LETTERS[0], LARGE, LETTERS[1])) == (LARGE,)
        assert len(await everything_in(client, made["QueueUrl"])) == 2


async def test_a_stream_takes_letters_under_their_records_keys(aws: str, session: Any) -> None:
    async with session.client("kinesis", endpoint_url=aws) as client:
        await client.create_stream(StreamName="s", ShardCount=1)
        odd = letter(50, partition_key=None)
        async with sending(of(StreamDestination, "s", aws, session)) as stream:
            assert await stream.store((*LETTERS, odd, LARGE)) == (LARGE,)
        (shard,) = (await client.list_shards(StreamName="s"))["Shards"]
        iterator = await client.get_shard_iterator(
            StreamName="s", ShardId=shard["ShardId"], ShardIteratorType="TRIM_HORIZON"
        )
        records = (await client.get_records(ShardIterator=iterator["ShardIterator"]))["Records"]
    assert [from_document(json.loads(each["Data"])) for each in records] == [*LETTERS, odd]
    assert [each["PartitionKey"] for each in records][-2:] == [LETTERS[0].partition_key, "a"]


async def test_a_bucket_holds_json_lines_and_a_repeat_writes_them_over(aws: str, session: Any) -> None:
    async with session.client("s3", endpoint_url=aws) as client:
        await client.create_bucket(
            Bucket="letters", CreateBucketConfiguration={"LocationConstraint": "eu-central-1"}
        )
        async with sending(of(BucketDestination, "letters/dead", aws, session)) as bucket:
            await bucket.store(LETTERS[:2])
            assert await bucket.store(LETTERS) == ()
        (found,) = (await client.list_objects_v2(Bucket="letters"))["Contents"]
        body = await (await client.get_object(Bucket="letters", Key=found["Key"]))["Body"].read()
    assert found["Key"].startswith("dead/p/a/")
    assert [from_document(json.loads(line)) for line in body.splitlines()] == list(LETTERS)


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        (QueueDestination, "http://127.0.0.1:9/1/gone"),
        (StreamDestination, "gone"),
        (BucketDestination, "gone/x"),
    ],
)
async def test_a_place_that_is_not_there_is_told(aws: str, session: Any, kind: Any, place: str) -> None:
    async with sending(of(kind, place, aws, session)) as destination:
        with pytest.raises(LedgerError, match="Dead letters cannot be stored at") as told:
            await destination.store(LETTERS)
    assert "No position moves" in told.value.did


class Throttled:
    """A stream, or a queue, that takes every other message, or none."""

    def __init__(self, *, none: bool = False) -> None:
        self.none = none
        self.taken: list[str] = []

    def takes(self, place: int, body: str) -> bool:
        taken = not self.none and place % 2 == 0
        if taken:
            self.taken.append(json.loads(body)["id"])
        return taken

    async def put_records(self, *, StreamName: str, Records: list[Any]) -> Any:  # noqa: N803  # AWS's names
        bad = {"ErrorCode": "ProvisionedThroughputExceededException"}
        return {"Records": [{} if self.takes(at, each["Data"]) else bad for at, each in enumerate(Records)]}

    async def describe_stream_summary(self, *, StreamName: str) -> Any:  # noqa: N803  # AWS's names
        return {"StreamDescriptionSummary": {"MaxRecordSizeInKiB": 10_240}}

    async def send_message_batch(self, *, QueueUrl: str, Entries: list[Any]) -> Any:  # noqa: N803  # AWS's names
        told = [at for at, each in enumerate(Entries) if not self.takes(at, each["MessageBody"])]
        return {"Failed": [{"Id": str(at), "Code": "InternalError"} for at in told]}

    async def get_queue_attributes(self, **_: Any) -> Any:
        return {"Attributes": {"MaximumMessageSize": "1048576"}}


@pytest.mark.parametrize("kind", [QueueDestination, StreamDestination])
async def test_what_was_not_taken_is_sent_again_and_nothing_else(kind: Any) -> None:
    clock, client = RecordingClock(), Throttled()
    destination = of(kind, "place", "", None, clock)
    destination._client = client
    assert await destination.store(LETTERS[:9]) == ()
    assert sorted(client.taken) == sorted(identity(each, "p") for each in LETTERS[:9])
    assert len(clock.slept) == 3


@pytest.mark.parametrize("kind", [QueueDestination, StreamDestination])
async def test_after_some_times_the_flush_fails(kind: Any) -> None:
    clock = RecordingClock()
    destination = of(kind, "place", "", None, clock)
    destination._client = Throttled(none=True)
    with pytest.raises(LedgerError, match=r"9 letters were not taken, 5 times \(\w+\)"):
        await destination.store(LETTERS[:9])
    assert len(clock.slept) == 5


def test_calls_hold_as_many_messages_as_aws_takes() -> None:
    found = list(batches([5, 5, 1, 11, 4, 4, 4], size=int, count=2, most=10))
    assert found == [[5, 5], [1], [11], [4, 4], [4]]
    assert list(batches((), size=int, count=2, most=10)) == []
