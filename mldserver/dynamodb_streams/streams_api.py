"""The four actions of DynamoDB Streams: kept below AWS's limits, tried again where that helps, with errors of our own.

The client itself tries nothing again: one mechanism decides. A request that is throttled, cut off, or failed by AWS
is sent again after a wait, for ever unless a patience is given. What is wrong with a shard's position is an exception that
``reader.py`` deals with; what a person must mend is an OperatorError.

Permissions: dynamodb:ListStreams, DescribeStream, GetShardIterator and GetRecords, on the table's streams.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from types import TracebackType
from typing import Any, Final, NamedTuple, Self, TypeAlias

import orjson
import structlog
from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError

from mldserver.base.aws import aws_client, date_of, error_code, is_retryable
from mldserver.base.backoff import Backoff, TokenBucket
from mldserver.base.clock import CivilClock, Clock
from mldserver.dynamodb_streams.shard_tree import After, At, Sentinel, Since, Start, StreamShard
from mldserver.errors import NotThereYet, OperatorError

log = structlog.get_logger("mldserver")

_DESCRIBES_PER_SECOND: Final = 10
"""DescribeStream (AWS limit)."""
_PAGE: Final = 1000
"""Records of one GetRecords (AWS limit)."""
_BASE_SECONDS: Final = 0.25
_CAP_SECONDS: Final = 10.0
_PAGE_SECONDS: Final = 0.25
"""Shortest wait before GetRecords is repeated: retries of a shard keep to four requests a second, too."""
_RETRIES_LOGGED_MS: Final = 60_000
_TEXT: Final = 400
"""Characters of an error."""
_CONNECTIONS: Final = 1000
"""A shard that answers slowly holds one, and must not keep the others from theirs."""
_OK: Final = 200
READABLE: Final = frozenset({"ENABLED", "ENABLING"})
"""States of a stream that takes changes."""

_ADVICE: Final = {
    "AccessDeniedException": (
        "Allow this role dynamodb:ListStreams, DescribeStream, GetShardIterator and GetRecords on the table's streams."
    ),
    "ExpiredTokenException": "Renew the AWS credentials.",
    "InvalidSignatureException": "Check the AWS credentials, and the clock of this host.",
    "NoCredentialsError": "Give AWS credentials (environment, profile, or the role of this host).",
    "NoRegionError": "Set the AWS region.",
    "UnrecognizedClientException": "Check the AWS credentials and the region.",
}

_ANSWERS: Final = {
    "describe_stream": "StreamDescription",
    "get_records": "Records",
    "get_shard_iterator": "ShardIterator",
    "list_streams": "Streams",
}
"""A key that every complete answer to an action has."""

MakeClient: TypeAlias = "Callable[[], contextlib.AbstractAsyncContextManager[Any]]"
"""Makes an aioboto3 client ``dynamodbstreams``, which is closed when its context ends."""


class Trimmed(Exception):
    """The position is older than what the shard still holds."""


class ShardGone(Exception):
    """AWS knows no such shard (any more), or no such stream."""


class NoStream(OperatorError):
    """AWS knows no such stream (any more)."""


class IteratorExpired(Exception):
    """The iterator was not used for 15 minutes."""


_SHARD_ERRORS: Final[dict[str, type[Exception]]] = {
    "TrimmedDataAccessException": Trimmed,
    "ResourceNotFoundException": ShardGone,
    "ExpiredIteratorException": IteratorExpired,
}


class Description(NamedTuple):
    """A stream, as DescribeStream has it."""

    arn: str
    status: str
    """``ENABLED``, ``ENABLING``, ``DISABLING`` or ``DISABLED``."""
    view_type: str
    """``KEYS_ONLY``, ``NEW_IMAGE``, ``OLD_IMAGE`` or ``NEW_AND_OLD_IMAGES``."""
    table: str
    shards: list[StreamShard]


@contextlib.asynccontextmanager
async def streams_client(
    *, region: str | None = None, endpoint_url: str | None = None, session: Any = None
) -> AsyncIterator[Any]:
    """Make a client for StreamsApi, which retries by itself: botocore must not. ``session``: in place of aioboto3's own."""
    async with aws_client(
        "dynamodbstreams",
        region=region,
        endpoint_url=endpoint_url,
        session=session,
        connect_timeout=5,
        read_timeout=20,
        retries={"total_max_attempts": 1},
        max_pool_connections=_CONNECTIONS,
        # Emulators have shorter ids than AWS.
        parameter_validation=False,
    ) as client:
        client.meta.events.register("before-parse.dynamodb-streams.GetRecords", _parse_records)
        yield client


def _parse_records(
    *, response_dict: dict[str, Any], customized_response_dict: dict[str, Any], **_: object
) -> None:
    """Parse a page of records as plain JSON, in place of botocore: its parser takes ten times as long, on the event loop.

    botocore then parses the empty object ``{}``, and merges its result with ``customized_response_dict``.
    """
    if response_dict["status_code"] == _OK:
        body, response_dict["body"] = response_dict["body"], b"{}"
        with contextlib.suppress(ValueError, TypeError):  # not a JSON object: the page has no records then
            customized_response_dict.update(orjson.loads(body))


@dataclass(slots=True)
class _AwsTime:
    """AWS's time of day, as the ``Date`` of its latest answer has it."""

    date: str | None = None
    received_ms: int = 0
    """When that answer was here (steady time)."""


class StreamsApi:
    """DynamoDB Streams through one client, which is made when the context is entered."""

    def __init__(
        self,
        make_client: MakeClient,
        *,
        clock: Clock,
        random: Callable[[], float],
        patience_seconds: float | None = None,
        civil: CivilClock | None = None,
    ) -> None:
        """``patience_seconds``: how long a call is retried; None: without limit. The dates of answers correct ``civil``."""
        self._make_client = make_client
        self._clock = clock
        self._civil = civil
        self._random = random
        self.patience_seconds = patience_seconds
        self._describes = TokenBucket(_DESCRIBES_PER_SECOND)
        self._aws_time = _AwsTime()
        self._listing = asyncio.Lock()
        """Held while a stream is listed."""
        self._listed: Description | None = None
        """The latest listing."""
        self._listings_begun = 0
        self._resources = contextlib.AsyncExitStack()
        self._client: Any = None
        self.retries = 0
        """Requests that were repeated."""
        self._retries_logged = 0
        self._logged_ms: int | None = None

    async def __aenter__(self) -> Self:
        """Make the client. Raises OperatorError without a region."""
        try:
            self._client = await self._resources.enter_async_context(self._make_client())
        except BotoCoreError as error:
            raise self._refused("The client", error) from error
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._resources.__aexit__(kind, error, trace)

    def within(self, seconds: float) -> StreamsApi:
        """Return a copy whose calls raise NotThereYet after about ``seconds`` without an answer."""
        api = copy.copy(self)
        api.patience_seconds = seconds
        api._listing = asyncio.Lock()  # noqa: SLF001  # a listing of the original may take any time
        return api

    def now_ms(self) -> int:
        """Return AWS's time of day, which stamps the records, at most about a second late.

        Until AWS has answered, or if an emulator sends no date, return this host's time of day.
        """
        with contextlib.suppress(TypeError, ValueError):
            date = parsedate_to_datetime(self._aws_time.date)  # type: ignore[arg-type]  # None raises TypeError
            return round(date.timestamp() * 1000) + self._clock.steady_ms() - self._aws_time.received_ms
        return self._clock.now_ms()

    async def resolve(self, name: str) -> str:
        """Return the ARN of the stream to read. ``name``: a table's name or ARN, or a stream's ARN.

        For a table, return its newest enabled stream. Return a stream's ARN unchanged: also a disabled stream can be
        read to its end. Raises NotThereYet if the table has no enabled stream, OperatorError if the stream does not exist.
        """
        if name.startswith("arn:") and "/stream/" in name:
            described = await self._describe_page(name, Limit=1)
            if described["StreamStatus"] not in READABLE:
                newest = next(iter(await self._streams(described["TableName"])), name)
                log.warning(
                    "stream.disabled",
                    stream=name,
                    status=described["StreamStatus"],
                    newest="" if newest == name else newest,
                    did="What is left of it is read.",
                    advice="Name the table instead of the ARN to read its newest stream.",
                )
            return name
        table = name.rpartition("/")[2]  # a table's ARN ends with its name
        disabled = []
        for arn in await self._streams(table):
            status = (await self._describe_page(arn, Limit=1))["StreamStatus"]
            if status in READABLE:
                return arn
            disabled.append(arn)
        rest = (
            f" What is left of the disabled one can be read for 24 hours by its ARN, {disabled[0]}."
            if disabled
            else ""
        )
        raise NotThereYet(
            f"The table {table} has no enabled stream.",
            advice="Check the table's name and the region, or enable a stream: `aws dynamodb update-table --table-name "
            f"{table} --stream-specification StreamEnabled=true,StreamViewType=NEW_AND_OLD_IMAGES`.{rest}",
            table=table,
        )

    async def successor(self, arn: str) -> str | None:
        """Return the ARN of the enabled stream that the table of a stream has now; None when it has none.

        Raises OperatorError.
        """
        try:
            return await self.resolve(arn.split("/")[1])
        except NotThereYet:
            return None

    async def describe(self, arn: str) -> Description:
        """Return a stream with all its shards, of all pages. Raises OperatorError if the stream does not exist.

        Callers that wait at the same time share one listing, which began after their calls.
        """
        begun_before = self._listings_begun
        async with self._listing:
            if self._listed is None or self._listed.arn != arn or self._listings_begun <= begun_before:
                self._listings_begun += 1
                self._listed = None
                self._listed = await self._list(arn)
            return self._listed

    async def _list(self, arn: str) -> Description:
        """Request all pages of DescribeStream; return their shards together."""
        shards: list[StreamShard] = []
        request: dict[str, Any] = {}
        while True:
            page = await self._describe_page(arn, **request)
            for shard in page.get("Shards", ()):
                numbers = shard.get("SequenceNumberRange") or {}
                start, end = numbers.get("StartingSequenceNumber"), numbers.get("EndingSequenceNumber")
                bounds = int(start) if start else None, int(end) if end else None
                shards.append(StreamShard(shard["ShardId"], shard.get("ParentShardId") or None, *bounds))
            last = page.get("LastEvaluatedShardId")
            if not last or last == request.get(
                "ExclusiveStartShardId"
            ):  # some emulators repeat the last page
                break
            request["ExclusiveStartShardId"] = last
        status, view_type = page["StreamStatus"], page.get("StreamViewType", "")
        return Description(arn, status, view_type, page.get("TableName", ""), shards)

    async def lists(self, arn: str, shard_id: str) -> bool:
        """Return whether DescribeStream lists a shard now. An answer without any shard says nothing: then return True.

        Raises OperatorError if the stream does not exist.
        """
        names = [shard.id for shard in (await self.describe(arn)).shards]
        return not names or shard_id in names

    async def iterator(self, arn: str, shard_id: str, start: Start) -> str:
        """Return an iterator that begins at ``start``. For ``Since`` it begins at the oldest record, since AWS knows no times.

        Raises Trimmed, ShardGone.
        """
        request: dict[str, Any] = {"StreamArn": arn, "ShardId": shard_id}
        match start:
            case At(number):
                request |= {"ShardIteratorType": "AT_SEQUENCE_NUMBER", "SequenceNumber": str(number)}
            case After(number):
                request |= {"ShardIteratorType": "AFTER_SEQUENCE_NUMBER", "SequenceNumber": str(number)}
            case Since():
                request |= {"ShardIteratorType": "TRIM_HORIZON"}
            case Sentinel():
                request |= {"ShardIteratorType": start.value}
        answer = await self._call("get_shard_iterator", **request)
        return str(answer["ShardIterator"])

    async def records(self, iterator: str, *, limit: int = _PAGE) -> tuple[list[dict[str, Any]], str | None]:
        """Return a page of records, and the iterator behind it: None when the shard is closed and read to its end.

        The records are as on the wire, or as botocore parses them; ``to_record`` accepts both. Raises IteratorExpired, Trimmed, ShardGone.
        """
        answer = await self._call("get_records", ShardIterator=iterator, Limit=limit)
        return answer["Records"], answer.get("NextShardIterator") or None

    async def _streams(self, table: str) -> list[str]:
        """Return the ARNs of a table's streams, the newest first."""
        streams: list[dict[str, Any]] = []
        request: dict[str, Any] = {"TableName": table}
        while request:
            try:
                page = await self._call("list_streams", **request)
            except ShardGone:
                break
            streams += page["Streams"]
            last = page.get("LastEvaluatedStreamArn")
            request = {"TableName": table, "ExclusiveStartStreamArn": last} if last else {}
        newest_first = sorted(streams, key=lambda stream: str(stream["StreamLabel"]), reverse=True)
        return [stream["StreamArn"] for stream in newest_first if stream["TableName"] == table]

    async def _describe_page(self, arn: str, **request: Any) -> dict[str, Any]:
        """Return one page of DescribeStream. Raises NoStream if the stream does not exist."""
        try:
            answer = await self._call("describe_stream", StreamArn=arn, **request)
        except ShardGone as error:
            raise NoStream(
                f"There is no stream {arn}.",
                did="The server reads nothing more from it.",
                advice="A stream goes 24 hours after it was disabled, or its table deleted; enabled again, a table has a "
                "new one. Name the table instead of the ARN to read its newest stream.",
                stream=arn,
            ) from error
        described: dict[str, Any] = answer["StreamDescription"]
        return described

    async def _call(self, action: str, **request: Any) -> dict[str, Any]:
        """Send a request; retry it after throttling, network errors and failures of AWS. Return the answer.

        Raises the exceptions of ``_SHARD_ERRORS``, NotThereYet when the patience is over, and OperatorError for any error that
        a retry cannot cure.
        """
        failures, began_ms = Backoff(_BASE_SECONDS, _CAP_SECONDS), self._clock.steady_ms()
        while True:
            if action == "describe_stream":
                await self._clock.sleep(self._describes.reserve(self._clock.steady_ms()))
            try:
                answer: dict[str, Any] = await getattr(self._client, action)(**request)
                self._aws_time.date = date_of(answer)
                self._aws_time.received_ms = self._clock.steady_ms()
                if self._civil is not None and action == "describe_stream":
                    self._civil.dated(self._aws_time.date)
                if _ANSWERS[action] in answer:
                    return answer
                # Without this check, an incomplete answer would look like the end of a shard.
                raise ResponseParserError(f"an answer without {_ANSWERS[action]}")  # noqa: TRY301  # tried again below
            except (BotoCoreError, ClientError, ResponseParserError) as error:
                code = error_code(error)
                if code in _SHARD_ERRORS:  # the caller decides what they mean for the shard
                    raise _SHARD_ERRORS[code](str(error)) from error
                if not is_retryable(error):
                    raise self._refused(action, error) from error
                delay = failures.failed(self._random())
                if action == "get_records":
                    delay = max(delay, _PAGE_SECONDS)
                waited = (self._clock.steady_ms() - began_ms) / 1000
                if self.patience_seconds is not None and waited + delay > self.patience_seconds:
                    raise NotThereYet(
                        f"DynamoDB Streams is out of reach: {_text(error)}.",
                        did=f"It was asked for {waited:.0f} seconds ({action}).",
                        advice="Look at AWS, the network and the endpoint.",
                        aws=code,
                    ) from error
                self._log_retry(action, error, failures.failures, delay)
                await self._clock.sleep(delay)

    def _log_retry(self, action: str, error: Exception, attempt: int, delay: float) -> None:
        """Count a retry. Log at most one a minute, with the number of retries since the last log line."""
        self.retries += 1
        now_ms = self._clock.steady_ms()
        if self._logged_ms is None or now_ms - self._logged_ms >= _RETRIES_LOGGED_MS:
            log.warning(
                "stream.retried",
                action=action,
                error=error_code(error),
                what=_text(error),
                attempt=attempt,
                delay_seconds=round(delay, 3),
                times=self.retries - self._retries_logged,
            )
            self._logged_ms, self._retries_logged = now_ms, self.retries

    def _refused(self, action: str, error: Exception) -> OperatorError:
        """Return the error for a request that AWS refused, with advice by AWS's error code."""
        code = error_code(error)
        return OperatorError(
            f"DynamoDB Streams cannot be read: {_text(error)}.",
            did=f"{action} was refused; it is not tried again.",
            advice=_ADVICE.get(code, "Look at what AWS says, and at the settings."),
            aws=code,
        )


def _text(error: Exception) -> str:
    """Return an error's text on one line, shortened: a proxy or an emulator may answer with a whole page."""
    return " ".join(str(error).split())[:_TEXT].rstrip(".")
