"""The four actions: paged, kept below the limits, tried again, and their errors told to people."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError, NoCredentialsError, NoRegionError

from mldserver.base.clock import CivilClock
from mldserver.dynamodb_streams.shard_tree import LATEST, TRIM_HORIZON, After, At, Since, Start, StreamShard
from mldserver.dynamodb_streams.streams_api import (
    Description,
    IteratorExpired,
    ShardGone,
    StreamsApi,
    Trimmed,
)
from mldserver.errors import NotThereYet, OperatorError
from mldserver.testing import VirtualClock

pytestmark = pytest.mark.quick

OLD = "arn:aws:dynamodb:eu-west-1:1:table/orders/stream/2026-01-01T00:00:00.000"
NEW = "arn:aws:dynamodb:eu-west-1:1:table/orders/stream/2027-01-01T00:00:00.000"


def refused(code: str, status: int = 400) -> ClientError:
    said = {"Error": {"Code": code, "Message": "so it is"}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return ClientError(said, "Action")  # type: ignore[arg-type]  # the parts that matter


class Client:
    """Answers from a script, and keeps what it was asked."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.answers: dict[str, deque[Any]] = {}
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.asked_ms: list[int] = []
        self.closed = False

    def script(self, action: str, *answers: Any) -> None:
        self.answers.setdefault(action, deque()).extend(answers)

    def __getattr__(self, action: str) -> Any:
        async def answer(**request: Any) -> Any:
            self.asked.append((action, request))
            self.asked_ms.append(self.clock.steady_ms())
            said = self.answers[action].popleft()
            if isinstance(said, Exception):
                raise said
            return said

        return answer


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def client(clock: VirtualClock) -> Client:
    return Client(clock)


@pytest.fixture
async def api(client: Client) -> AsyncIterator[StreamsApi]:
    async with made(client) as api:
        yield api
    assert client.closed


def made(
    client: Client, *, patience_seconds: float | None = None, civil: CivilClock | None = None
) -> StreamsApi:
    @contextlib.asynccontextmanager
    async def make() -> AsyncIterator[Client]:
        yield client
        client.closed = True

    return StreamsApi(
        make, clock=client.clock, random=lambda: 1.0, patience_seconds=patience_seconds, civil=civil
    )


async def test_the_time_is_that_of_aws_as_soon_as_it_has_answered(
    api: StreamsApi, client: Client, clock: VirtualClock
) -> None:
    assert api.now_ms() == clock.now_ms()
    for date, ms in (
        ("Sun, 06 Nov 1994 08:49:37 GMT", 784_111_777_000),
        (None, None),
        ("soon", None),
        ("Sun, 06 Nov 1994 08:49:39 GMT", 784_111_779_000),
    ):
        headers = {} if date is None else {"date": date}
        client.script(
            "get_shard_iterator", {"ShardIterator": "x", "ResponseMetadata": {"HTTPHeaders": headers}}
        )
        await api.within(1).iterator(NEW, "a", LATEST)
        await clock.advance(1.5)
        assert api.now_ms() == (clock.now_ms() if ms is None else ms + 1500)


def stream(
    arn: str = NEW, status: str = "ENABLED", *shards: dict[str, Any], last: str = ""
) -> dict[str, Any]:
    described: dict[str, Any] = {
        "StreamArn": arn,
        "StreamStatus": status,
        "StreamViewType": "NEW_IMAGE",
        "StreamLabel": arn.rpartition("/")[2],
        "TableName": "orders",
        "Shards": list(shards),
    }
    return {"StreamDescription": described | ({"LastEvaluatedShardId": last} if last else {})}


def shard(
    shard_id: str, parent: str | None = None, first: int = 1, last: int | None = None
) -> dict[str, Any]:
    ending = {} if last is None else {"EndingSequenceNumber": str(last)}
    named = {} if parent is None else {"ParentShardId": parent}
    return {
        "ShardId": shard_id,
        "SequenceNumberRange": {"StartingSequenceNumber": str(first), **ending},
        **named,
    }


# The actions


async def test_a_listing_is_paged_to_its_end(client: Client, api: StreamsApi) -> None:
    client.script(
        "describe_stream",
        stream(NEW, "ENABLED", shard("a", None, 1, 9), last="a"),
        stream(NEW, "ENABLED", last="x"),
        stream(NEW, "ENABLED", shard("b", "a", 10)),
    )
    assert await client.clock.drive(api.describe(NEW)) == Description(
        NEW,
        "ENABLED",
        "NEW_IMAGE",
        "orders",
        [StreamShard("a", None, 1, 9), StreamShard("b", "a", 10, None)],
    )
    asked = [request.get("ExclusiveStartShardId") for _, request in client.asked]
    assert asked == [None, "a", "x"]


async def test_describe_stream_is_asked_ten_times_a_second(client: Client, api: StreamsApi) -> None:
    client.script("describe_stream", *(stream(NEW, "ENABLED", last=str(page)) for page in range(4)), stream())
    await client.clock.drive(api.describe(NEW))
    assert client.asked_ms == [0, 100, 200, 300, 400]


async def test_a_listing_whose_pages_do_not_move_on_ends(client: Client, api: StreamsApi) -> None:
    client.script("describe_stream", *[stream(NEW, "ENABLED", shard("a"), last="a")] * 2)
    assert len((await client.clock.drive(api.describe(NEW))).shards) == 2


async def test_callers_at_the_same_time_share_a_listing_that_began_after_their_calls(
    client: Client, api: StreamsApi
) -> None:
    client.script("describe_stream", *(stream(NEW, "ENABLED", shard(name)) for name in "abcd"))
    await client.clock.drive(api.describe(NEW))  # so that the next one waits for its turn
    first, second = (asyncio.ensure_future(api.describe(NEW)) for _ in range(2))
    third = asyncio.ensure_future(api.lists(NEW, "c"))
    await client.clock.drive(asyncio.wait({first, second, third}))
    assert [[each.id for each in one.result().shards] for one in (first, second)] == [["b"], ["c"]]
    assert third.result()
    assert [each.id for each in (await client.clock.drive(api.describe(NEW))).shards] == ["d"]


@pytest.mark.parametrize(
    ("start", "asked"),
    [
        (TRIM_HORIZON, {"ShardIteratorType": "TRIM_HORIZON"}),
        (LATEST, {"ShardIteratorType": "LATEST"}),
        (Since(5), {"ShardIteratorType": "TRIM_HORIZON"}),
        (At(10**30), {"ShardIteratorType": "AT_SEQUENCE_NUMBER", "SequenceNumber": "1" + "0" * 30}),
        (After(7), {"ShardIteratorType": "AFTER_SEQUENCE_NUMBER", "SequenceNumber": "7"}),
    ],
)
async def test_an_iterator_begins_where_it_is_told(
    client: Client, api: StreamsApi, start: Start, asked: dict[str, Any]
) -> None:
    client.script("get_shard_iterator", {"ShardIterator": "here"})
    assert await api.iterator(NEW, "a", start) == "here"
    assert client.asked == [("get_shard_iterator", {"StreamArn": NEW, "ShardId": "a"} | asked)]


@pytest.mark.parametrize(
    ("answer", "page"),
    [
        ({"Records": [{"eventID": "1"}], "NextShardIterator": "on"}, ([{"eventID": "1"}], "on")),
        ({"Records": [{"eventID": "1"}], "NextShardIterator": None}, ([{"eventID": "1"}], None)),
        ({"Records": [{"eventID": "1"}]}, ([{"eventID": "1"}], None)),
    ],
)
async def test_trap_11_no_next_iterator_and_null_are_the_same(
    client: Client, api: StreamsApi, answer: dict[str, Any], page: tuple[list[dict[str, Any]], str | None]
) -> None:
    client.script("get_records", answer)
    assert await api.records("here", limit=10) == page
    assert client.asked == [("get_records", {"ShardIterator": "here", "Limit": 10})]


# Which stream


async def test_a_tables_stream_is_its_newest_that_is_enabled(client: Client, api: StreamsApi) -> None:
    def named(arn: str, table: str = "orders") -> dict[str, Any]:
        return {"StreamArn": arn, "TableName": table, "StreamLabel": arn.rpartition("/")[2]}

    for name in ("orders", "arn:aws:dynamodb:eu-west-1:1:table/orders"):
        client.script(
            "list_streams",
            {"Streams": [named(OLD)], "LastEvaluatedStreamArn": OLD},
            {"Streams": [named(f"{NEW}9", "others"), named(NEW)]},
        )
        client.script("describe_stream", stream(NEW, "ENABLING"))
        assert await client.clock.drive(api.resolve(name)) == NEW
        assert client.asked[-2][1] == {"TableName": "orders", "ExclusiveStartStreamArn": OLD}


@pytest.mark.parametrize("listed", [{"Streams": []}, refused("ResourceNotFoundException")])
async def test_a_table_without_a_stream_is_explained(client: Client, api: StreamsApi, listed: Any) -> None:
    client.script("list_streams", listed)
    with pytest.raises(NotThereYet, match="orders has no enabled stream") as raised:
        await api.resolve("orders")
    assert "update-table --table-name orders" in raised.value.advice


async def test_a_table_whose_stream_is_disabled_is_explained(client: Client, api: StreamsApi) -> None:
    client.script(
        "list_streams",
        {"Streams": [{"StreamArn": OLD, "TableName": "orders", "StreamLabel": "2026"}]},
    )
    client.script("describe_stream", stream(OLD, "DISABLED"))
    with pytest.raises(NotThereYet) as raised:
        await api.resolve("orders")
    assert OLD in raised.value.advice


async def test_the_arn_of_an_enabled_stream_is_taken(client: Client, api: StreamsApi) -> None:
    client.script("describe_stream", stream(NEW))
    assert await api.resolve(NEW) == NEW
    assert client.asked == [("describe_stream", {"StreamArn": NEW, "Limit": 1})]


async def test_a_stream_that_was_enabled_again_has_another_arn_and_is_explained(
    client: Client, api: StreamsApi, logged: list[dict[str, Any]]
) -> None:
    client.script("describe_stream", stream(OLD, "DISABLED"))
    client.script(
        "list_streams",
        {
            "Streams": [
                {"StreamArn": arn, "TableName": "orders", "StreamLabel": arn[-23:]} for arn in (OLD, NEW)
            ]
        },
    )
    assert await client.clock.drive(api.resolve(OLD)) == OLD
    (told,) = logged
    assert (told["event"], told["status"], told["newest"]) == ("stream.disabled", "DISABLED", NEW)


async def test_a_stream_that_is_gone_is_explained(client: Client, api: StreamsApi) -> None:
    client.script("describe_stream", *[refused("ResourceNotFoundException")] * 2)
    for question in (api.resolve(OLD), api.describe(OLD)):
        with pytest.raises(ExceptionGroup) as raised:
            await client.clock.drive(question)
        (error,) = raised.value.exceptions
        assert isinstance(error, OperatorError)
        assert "24 hours" in error.advice


# What fails


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("TrimmedDataAccessException", Trimmed),
        ("ResourceNotFoundException", ShardGone),
        ("ExpiredIteratorException", IteratorExpired),
    ],
)
async def test_what_is_wrong_with_a_position_is_the_readers(
    client: Client, api: StreamsApi, code: str, error: type[Exception]
) -> None:
    client.script("get_shard_iterator", refused(code))
    client.script("get_records", refused(code))
    with pytest.raises(error, match="so it is"):
        await api.iterator(NEW, "a", TRIM_HORIZON)
    with pytest.raises(error, match="so it is"):
        await api.records("here")


@pytest.mark.parametrize(
    "fault",
    [
        refused("LimitExceededException"),
        refused("ThrottlingException"),
        refused("ProvisionedThroughputExceededException"),
        refused("InternalServerError", 500),
        refused("Unheard", 503),
        EndpointConnectionError(endpoint_url="http://nowhere"),
        {"NextShardIterator": None},
    ],
)
async def test_what_passes_is_asked_again_with_a_back_off(
    client: Client, api: StreamsApi, fault: Any, logged: list[dict[str, Any]]
) -> None:
    client.script("get_records", *[fault] * 8, {"Records": [], "NextShardIterator": "on"})
    assert await client.clock.drive(api.records("here"), step=5) == ([], "on")
    assert client.asked_ms == [0, 250, 750, 1750, 3750, 7750, 15_750, 25_750, 35_750]
    (told,) = logged
    assert (told["event"], told["action"], told["attempt"], told["times"]) == (
        "stream.retried",
        "get_records",
        1,
        1,
    )


async def test_retries_are_told_once_a_minute_with_how_many_there_were(
    client: Client, api: StreamsApi, logged: list[dict[str, Any]]
) -> None:
    client.script("get_records", *[refused("LimitExceededException")] * 12, {"Records": []})
    await client.clock.drive(api.records("here"), step=5)
    assert [(told["times"], told["attempt"]) for told in logged] == [(1, 1), (11, 12)]


async def test_a_whole_page_of_an_error_is_told_as_a_line(
    client: Client, api: StreamsApi, logged: list[dict[str, Any]]
) -> None:
    page = ClientError({"Error": {"Code": "500", "Message": "<html>\n" * 200}}, "Action")
    page.response["ResponseMetadata"] = {"HTTPStatusCode": 500}  # type: ignore[typeddict-item]  # the part that matters
    client.script("get_records", page, {"Records": []})
    await client.clock.drive(api.records("here"), step=1)
    assert len(logged[0]["what"]) <= 400
    assert "\n" not in logged[0]["what"]


async def test_a_patience_ends_the_asking(client: Client) -> None:
    client.script("get_records", *[EndpointConnectionError(endpoint_url="http://nowhere")] * 5)
    async with made(client, patience_seconds=3) as api:
        with pytest.raises(ExceptionGroup) as raised:
            await client.clock.drive(api.records("here"), step=5)
    (error,) = raised.value.exceptions
    assert isinstance(error, NotThereYet)
    assert "out of reach" in error.what
    assert len(client.asked) == 4


@pytest.mark.parametrize(
    ("fault", "advice"),
    [
        (refused("AccessDeniedException"), "dynamodb:ListStreams"),
        (refused("ExpiredTokenException"), "Renew"),
        (refused("UnrecognizedClientException"), "region"),
        (NoCredentialsError(), "credentials"),
        (refused("ValidationException"), "what AWS says"),
    ],
)
async def test_what_a_person_must_mend_says_what_to_do(
    client: Client, api: StreamsApi, fault: Exception, advice: str
) -> None:
    client.script("get_records", fault)
    with pytest.raises(OperatorError) as raised:
        await api.records("here")
    assert advice in raised.value.advice
    assert raised.value.lasting
    assert len(client.asked) == 1


async def test_a_missing_region_says_what_to_do() -> None:
    @contextlib.asynccontextmanager
    async def make() -> AsyncIterator[Client]:
        raise NoRegionError
        yield

    with pytest.raises(OperatorError, match="region") as raised:
        async with StreamsApi(make, clock=VirtualClock(), random=lambda: 0.0):
            pass
    assert raised.value.advice == "Set the AWS region."


async def test_the_date_of_a_listing_corrects_the_civil_time(client: Client, clock: VirtualClock) -> None:
    civil = CivilClock(clock)
    dated = {"ResponseMetadata": {"HTTPHeaders": {"date": "Wed, 21 Oct 2015 07:28:00 GMT"}}}
    client.script("describe_stream", stream() | dated)
    async with made(client, civil=civil) as api:
        await api.describe(NEW)
    assert civil.now_ms() == 1_445_412_480_000 + 999
