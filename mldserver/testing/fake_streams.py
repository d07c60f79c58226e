"""DynamoDB Streams in memory: the streams of one table, answered as AWS answers them, faults included.

Items are put and deleted, shards split, roll over and are trimmed only when a test says so. ``FakeStreams.answer`` is
the synchronous core. ``client`` gives it the shape of an aioboto3 client, without a socket, for virtual time;
``serving`` puts it behind HTTP on loopback, for ``endpoint_url``.
"""

from __future__ import annotations

import asyncio
import base64
import bisect
import contextlib
import functools
import hashlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from email.utils import formatdate
from types import SimpleNamespace
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import orjson
from aiohttp import web
from botocore import parsers, session, xform_name
from botocore.exceptions import ClientError, ConnectionClosedError

from mldserver.testing.fake_table import FakeShard, FakeTable, TableStream, as_json

Action: TypeAlias = Literal["DescribeStream", "GetShardIterator", "GetRecords", "ListStreams"]

_ITERATOR_MS: Final = 15 * 60 * 1000
"""How long an iterator lives."""
_HIGHEST_LIMITS: Final = {"DescribeStream": 100, "GetRecords": 1000, "ListStreams": 100}
_EMPTY_PAGES: Final = 4
"""``trouble`` puts at most so many empty pages in a row before a record: about five cross any gap."""
_TRANSIENT_FAULTS: Final = (
    "LimitExceededException",
    "ThrottlingException",
    "InternalServerError",
    "disconnect",
)
_TRANSIENT_FAULTS_BY_ACTION: Final[dict[str, tuple[str, ...]]] = {
    "DescribeStream": ("empty", "short"),
    "GetRecords": ("empty", "ExpiredIteratorException"),
}


_TARGET: Final = "DynamoDBStreams_20120810."


class HTTPAnswer(NamedTuple):
    """The answer to a request; status 0: the connection breaks instead."""

    status: int
    body: dict[str, Any]
    seconds: float = 0.0
    """How long the answer takes."""


class Call(NamedTuple):
    """A request that was received."""

    action: str
    shard_id: str | None
    steady_ms: int


class RequestRejected(Exception):
    """An error that AWS answers with."""


@dataclass(slots=True)
class _PlantedFault:
    action: str
    error: str
    shard_id: str | None
    times: int


class FakeStreams(FakeTable):
    """The streams of one table, and the four actions over them."""

    def __init__(self, table: str = "orders", **options: Any) -> None:
        """``options``: those of ``FakeTable``."""
        super().__init__(table, **options)
        self.page_records = _HIGHEST_LIMITS["GetRecords"]
        """The most records of a page."""
        self.page_shards = _HIGHEST_LIMITS["DescribeStream"]
        """The most shards of a page."""
        self.shuffled = False
        """Whether DescribeStream lists shards in an arbitrary order, the same for every page."""
        self.null_iterator = False
        """Whether a closed shard's last page says ``NextShardIterator: null``, rather than nothing."""
        self.empty_last_page = False
        """Whether a closed shard has one more, empty page, which reports its end."""
        self.slow: dict[str, float] = {}
        """How many seconds each GetRecords of a shard takes."""
        self.trouble = 0.0
        """The probability of a transient fault of a request: throttling, 5xx, a broken connection, an empty answer."""
        self.calls: list[Call] = []
        """All requests, in order."""
        self._faults: list[_PlantedFault] = []

    # What goes wrong.

    def fail(self, action: Action, error: str, *, shard_id: str | None = None, times: int = 1) -> None:
        """Make the next ``times`` requests of an action (for a shard) fail, in the order of the calls.

        ``error``: AWS's code, such as ``LimitExceededException`` or ``InternalServerError``; ``disconnect``; ``empty``
        (no shards, no records); ``short`` (half of the shards, and no word of more).
        """
        self._faults.append(_PlantedFault(action, error, shard_id, times))

    def fail_no_more(self) -> None:
        """Forget the failures that ``fail`` has scripted and that have not come yet."""
        self._faults.clear()

    def _fault_of_request(self, action: str, shard_id: str | None, state: Mapping[str, Any]) -> str:
        """Return the fault of a request: one that ``fail`` planned, else by chance one of ``trouble``; empty for none."""
        for fault in self._faults:
            if fault.action == action and fault.shard_id in {None, shard_id} and fault.times:
                fault.times -= 1
                return fault.error
        if self.trouble and self.random.random() < self.trouble:
            error = self.random.choice(_TRANSIENT_FAULTS + _TRANSIENT_FAULTS_BY_ACTION.get(action, ()))
            # A fault that no reader can survive is not transient.
            survivable = {
                "empty": state.get("empty", 0) < _EMPTY_PAGES,
                "ExpiredIteratorException": state.get("type") != "LATEST",
            }
            return error if survivable.get(error, True) else ""
        return ""

    # What is asked.

    def answer(self, action: str, request: Mapping[str, Any]) -> HTTPAnswer:
        """Return AWS's answer to a request; both are JSON values."""
        state = request
        if action == "GetRecords":  # the iterator holds the state: see ``_make_iterator``
            state = orjson.loads(base64.b64decode(request["ShardIterator"]))
        shard_id: str | None = state.get("shard") or state.get("ShardId")
        self.calls.append(Call(action, shard_id, self.clock.steady_ms()))
        seconds = self.slow.get(shard_id or "", 0.0) if action == "GetRecords" else 0.0
        fault = self._fault_of_request(action, shard_id, state)
        if fault == "disconnect":
            return HTTPAnswer(0, {}, seconds)
        body: dict[str, Any] = {}
        code: str | None = None
        try:
            match action if fault in {"", "empty", "short"} else fault:
                case "ListStreams":
                    body = self._list_streams(request)
                case "DescribeStream":
                    body = self._describe(request, fault)
                case "GetShardIterator":
                    body = self._get_shard_iterator(request)
                case "GetRecords":
                    body = self._get_records(state, request, empty=fault == "empty")
                case other:
                    code, message = other, "scripted by the test, or an unknown action"
        except RequestRejected as refused:
            code, message = refused.args
        if code is not None:
            body = {"__type": f"com.amazonaws.dynamodb.v20120810#{code}", "message": message}
            return HTTPAnswer(500 if code == "InternalServerError" else 400, body, seconds)
        return HTTPAnswer(200, body, seconds)

    def _list_streams(self, request: Mapping[str, Any]) -> dict[str, Any]:
        streams = self.streams if request.get("TableName", self.table) == self.table else []
        entries = [
            {"StreamArn": each.arn, "TableName": self.table, "StreamLabel": each.label} for each in streams
        ]
        limit = _limit("ListStreams", request)
        page, last = _page(entries, "StreamArn", request.get("ExclusiveStartStreamArn"), limit)
        return {"Streams": page} | ({"LastEvaluatedStreamArn": last} if last else {})

    def _describe(self, request: Mapping[str, Any], fault: str) -> dict[str, Any]:
        """Answer DescribeStream with a page of the shards that are visible now. ``fault``: ``empty``, ``short``, or none."""
        stream, steady_ms = self._stream(request["StreamArn"]), self.clock.steady_ms()
        shards = [each for each in stream.shards.values() if not each.gone and each.visible_ms <= steady_ms]
        if self.shuffled:
            shards.sort(key=lambda shard: hashlib.sha256(shard.id.encode()).digest())
        if fault:
            shards = [] if fault == "empty" else shards[: len(shards) // 2]
        limit = min(self.page_shards, _limit("DescribeStream", request))
        entries: list[dict[str, Any]] = []
        for shard in shards:
            numbers = {"StartingSequenceNumber": str(shard.first)}
            if shard.closed:
                numbers["EndingSequenceNumber"] = str(shard.number)
            parent = {} if shard.parent is None else {"ParentShardId": shard.parent}
            entries.append({"ShardId": shard.id, "SequenceNumberRange": numbers, **parent})
        page, last = _page(entries, "ShardId", request.get("ExclusiveStartShardId"), limit)
        description = {
            "StreamArn": stream.arn,
            "StreamLabel": stream.label,
            "StreamStatus": stream.status,
            "StreamViewType": self.view,
            "CreationRequestDateTime": stream.created_ms / 1000,
            "TableName": self.table,
            "KeySchema": [
                {"AttributeName": name, "KeyType": kind}
                for name, kind in zip(self.keys, ("HASH", "RANGE"), strict=False)
            ],
            "Shards": page,
        }
        return {"StreamDescription": description | ({"LastEvaluatedShardId": last} if last else {})}

    def _get_shard_iterator(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Answer GetShardIterator. Raises RequestRejected for a trimmed or impossible sequence number."""
        shard = self._shard(request["StreamArn"], request["ShardId"])
        kind = request["ShardIteratorType"]
        if kind == "TRIM_HORIZON":
            after = max(shard.trimmed, shard.first - 1)
        elif kind == "LATEST":
            after = shard.number
        else:
            number = int(request["SequenceNumber"])
            if number <= shard.trimmed:
                raise RequestRejected("TrimmedDataAccessException", f"{number} is beyond the trim horizon")
            if not shard.first <= number <= shard.number:
                raise RequestRejected(
                    "ValidationException", f"Invalid SequenceNumber {number} for {shard.id}"
                )
            after = number - (kind == "AT_SEQUENCE_NUMBER")
        return {"ShardIterator": self._make_iterator(request["StreamArn"], shard, after, kind)}

    def _make_iterator(self, arn: str, shard: FakeShard, after: int, kind: str, empty: int = 0) -> str:
        """Return an iterator behind the sequence number ``after``: base64 of its state. ``empty``: empty pages in a row before it."""
        state = {"stream": arn, "shard": shard.id, "after": str(after), "type": kind, "empty": empty}
        return base64.b64encode(orjson.dumps(state | {"made": self.clock.steady_ms()})).decode()

    def _get_records(
        self, state: Mapping[str, Any], request: Mapping[str, Any], *, empty: bool
    ) -> dict[str, Any]:
        """Answer GetRecords from the iterator's ``state``; with ``empty``, as if the page had no records."""
        shard = self._shard(state["stream"], state["shard"])
        after = int(state["after"])
        if self.clock.steady_ms() - state["made"] >= _ITERATOR_MS:
            raise RequestRejected("ExpiredIteratorException", "The iterator is older than 15 minutes")
        if after < shard.trimmed:
            raise RequestRejected("TrimmedDataAccessException", f"{after} is beyond the trim horizon")
        first = bisect.bisect_right(shard.records, after, key=_number)
        limit = 0 if empty else min(self.page_records, _limit("GetRecords", request))
        records = shard.records[first : first + limit]
        if records:
            after = _number(records[-1])
        read_to_end = not empty and first + limit >= len(shard.records)
        if shard.closed and read_to_end and not (records and self.empty_last_page):
            return {"Records": records} | ({"NextShardIterator": None} if self.null_iterator else {})
        empty_pages = 0 if records else state["empty"] + 1
        kind = state["type"] if not records else "AFTER_SEQUENCE_NUMBER"
        following = self._make_iterator(state["stream"], shard, after, kind, empty_pages)
        return {"Records": records, "NextShardIterator": following}

    def _stream(self, arn: str) -> TableStream:
        """Return the stream of this ARN. Raises RequestRejected as AWS does if there is none."""
        for stream in self.streams:
            if stream.arn == arn:
                return stream
        raise RequestRejected(
            "ResourceNotFoundException", f"Requested resource not found: Stream: {arn} not found"
        )

    def _shard(self, arn: str, shard_id: str) -> FakeShard:
        shard = self._stream(arn).shards.get(shard_id)
        if shard is None or shard.gone:
            raise RequestRejected(
                "ResourceNotFoundException", f"Requested resource not found: Shard: {shard_id} not found"
            )
        return shard

    def _headers(self) -> dict[str, str]:
        return {"date": formatdate(self.now_ms() // 1000, usegmt=True)}

    # How it is reached.

    def client(self) -> contextlib.AbstractAsyncContextManager[Any]:
        """Return what stands for an aioboto3 client ``dynamodbstreams``, for an ``async with``: no socket, no thread.

        Botocore's own parser reads the answers, so they have botocore's types.
        """
        parser = parsers.create_parser("json")
        model = session.get_session().get_service_model("dynamodbstreams")

        async def call(action: str, **request: Any) -> dict[str, Any]:
            answer = self.answer(action, request)
            if answer.seconds:
                await self.clock.sleep(answer.seconds)
            else:
                await asyncio.sleep(0)
            if not answer.status:
                raise ConnectionClosedError(endpoint_url="memory")
            body = orjson.dumps(answer.body, default=as_json)
            response = {"body": body, "headers": self._headers(), "status_code": answer.status}
            parsed: dict[str, Any] = parser.parse(response, model.operation_model(action).output_shape)
            if answer.status >= 300:  # noqa: PLR2004  # as in HTTP
                raise ClientError(parsed, action)
            return parsed

        calls = {xform_name(action): functools.partial(call, action) for action in model.operation_names}
        return contextlib.nullcontext(SimpleNamespace(**calls))

    @contextlib.asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator[str]:
        """Answer on loopback while an ``async with`` runs, which gives the ``endpoint_url``. Port 0: a free one."""

        async def handle(request: web.Request) -> web.Response:
            action = request.headers.get("X-Amz-Target", "").removeprefix(_TARGET)
            answer = self.answer(action, orjson.loads(await request.read()))
            if answer.seconds:
                await self.clock.sleep(answer.seconds)
            if not answer.status and request.transport is not None:
                request.transport.abort()
            return web.Response(
                status=answer.status or 500,
                body=orjson.dumps(answer.body, default=as_json),
                content_type="application/x-amz-json-1.0",
                headers=self._headers(),
            )

        application = web.Application()
        application.router.add_post("/", handle)
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", port).start()
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


def _number(record: Mapping[str, Any]) -> int:
    return int(record["dynamodb"]["SequenceNumber"])


def _limit(action: str, request: Mapping[str, Any]) -> int:
    highest = _HIGHEST_LIMITS[action]
    limit: int = request.get("Limit", highest)
    if not 1 <= limit <= highest:
        raise RequestRejected("ValidationException", f"Limit must be between 1 and {highest}")
    return limit


def _page(
    entries: list[dict[str, Any]], name: str, after: str | None, limit: int
) -> tuple[list[dict[str, Any]], str | None]:
    """Return the entries after the entry named ``after``, and the last name if more follow."""
    names = [entry[name] for entry in entries]
    first = names.index(after) + 1 if after in names else 0
    page = entries[first : first + limit]
    return page, page[-1][name] if first + limit < len(entries) else None
