"""Dead letters in AWS: a queue, a stream, or a bucket, through aioboto3.

SQS and Kinesis take many at a call and may take some of them only: those that were not taken are sent again, a few
times, then the flush fails and all are sent again by the next one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar, Final

import structlog
from botocore.exceptions import BotoCoreError, ClientError

from mldserver.base.aws import aws_client
from mldserver.base.backoff import backoff
from mldserver.base.clock import Clock
from mldserver.deadletters.destinations import batches, document, files, identity
from mldserver.errors import LedgerError
from mldserver.records import DeadLetter

log = structlog.get_logger("mldserver")

_MIB: Final = 1024 * 1024
_SEND_ATTEMPTS: Final = 5
"""Of what was not taken, before the flush fails."""
_SQS_BATCH: Final = 10
"""Messages a call (AWS limit)."""
_SQS_BYTES: Final = _MIB
"""A message, and all of a call (AWS limit; 256 KiB before August 2025, and still where a queue's own limit says so)."""
_KINESIS_BATCH: Final = 500
"""Records a call (AWS limit)."""
_KINESIS_BYTES: Final = _MIB
"""A record with its key (AWS limit), unless the stream says more (``MaxRecordSizeInKiB``)."""
_KINESIS_CALL_BYTES: Final = 5 * _MIB
"""All of a call (AWS limit), unless one record alone is larger."""
_KEY_LENGTH: Final = 256
"""Characters of a partition key (AWS limit)."""


@dataclass(frozen=True, slots=True)
class OutgoingLetter:
    """A letter on its way."""

    letter: DeadLetter
    body: str
    """ASCII only: SQS refuses some characters that JSON allows."""
    bytes: int
    """Size in bytes, including the fields that count in addition to the body."""


@dataclass
class AwsDestination(ABC):
    """Base of destinations in AWS: creates the client at its first use, and translates errors."""

    service: ClassVar[str]

    place: str
    """As AWS calls it."""
    _: KW_ONLY
    pipeline: str
    clock: Clock
    jitter: Callable[[], float]
    """Gives numbers from [0, 1)."""
    session: Any = None
    """aioboto3's, for tests."""
    region: str | None = None
    endpoint_url: str | None = None
    _resources: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)
    _client: Any = None

    async def store(self, letters: tuple[DeadLetter, ...]) -> tuple[DeadLetter, ...]:
        """Send letters; return those that are too large. Raises LedgerError when the place is out of reach."""
        try:
            if self._client is None:
                client = aws_client(
                    self.service,
                    connect_timeout=3,
                    read_timeout=20,
                    retries={"mode": "standard"},
                    region=self.region,
                    endpoint_url=self.endpoint_url,
                    session=self.session,
                )
                self._client = await self._resources.enter_async_context(client)
            return await self._store(self._client, letters)
        except (BotoCoreError, ClientError, OSError) as error:
            raise self._out_of_reach(f"{type(error).__name__}: {error}") from error

    @abstractmethod
    async def _store(self, client: Any, letters: tuple[DeadLetter, ...]) -> tuple[DeadLetter, ...]: ...

    def _out_of_reach(self, why: str) -> LedgerError:
        return LedgerError(
            f"Dead letters cannot be stored at {self.place}: {why}.",
            did="No position moves, rows and letters stay in memory, and all is tried again.",
            advice="Look whether it is there, and whether this server may write to it.",
            path=self.place,
        )

    async def close(self) -> None:
        """Close the client."""
        self._client = None
        await self._resources.aclose()


class _MessageDestination(AwsDestination):
    """A service that takes messages in batches, and may take only some messages of a batch."""

    count: int
    """The most messages of a request."""
    call_bytes: int
    """The most bytes of a request."""

    _message_bytes: int | None = None
    """The most bytes of a message; None: not requested yet."""

    async def _store(self, client: Any, letters: tuple[DeadLetter, ...]) -> tuple[DeadLetter, ...]:
        """Send letters in batches; send again what was not taken, up to five times; return those too large for a message."""
        limit = self._message_bytes = self._message_bytes or await self._message_limit(client)
        bodies = [json.dumps(document(letter, self.pipeline)) for letter in letters]
        messages = [
            OutgoingLetter(letter, body, len(body) + _KEY_LENGTH)
            for letter, body in zip(letters, bodies, strict=True)
        ]
        too_large = tuple(message.letter for message in messages if message.bytes > limit)
        for letter in too_large:
            log.warning(
                "letter.too_large",
                shard=letter.shard_id,
                sequence=str(letter.sequence),
                bytes=len(letter.data),
                limit_bytes=limit,
                did="The ledger keeps it.",
            )
        fitting = (message for message in messages if message.bytes <= limit)
        for batch in batches(
            fitting, size=lambda message: message.bytes, count=self.count, most=self.call_bytes
        ):
            not_taken = batch
            for attempt in range(1, _SEND_ATTEMPTS + 1):
                not_taken, why = await self._send(client, not_taken)
                if not not_taken:
                    break
                await self.clock.sleep(backoff(attempt, 0.1, 2.0, self.jitter()))
            else:
                raise self._out_of_reach(
                    f"{len(not_taken)} letters were not taken, {_SEND_ATTEMPTS} times ({why})"
                )
        return too_large

    @abstractmethod
    async def _message_limit(self, client: Any) -> int: ...

    @abstractmethod
    async def _send(self, client: Any, batch: list[OutgoingLetter]) -> tuple[list[OutgoingLetter], str]:
        """Send a batch in one request; return the messages that the service did not take, and its error codes."""


class QueueDestination(_MessageDestination):
    """A queue of SQS. In a FIFO queue letters of a shard stay in order, and one written twice is dropped by SQS."""

    service = "sqs"
    count = _SQS_BATCH
    call_bytes = _SQS_BYTES

    async def _message_limit(self, client: Any) -> int:
        answer = await client.get_queue_attributes(QueueUrl=self.place, AttributeNames=["MaximumMessageSize"])
        limit = min(int(answer["Attributes"]["MaximumMessageSize"]), _SQS_BYTES)
        self.call_bytes = limit
        return limit

    async def _send(self, client: Any, batch: list[OutgoingLetter]) -> tuple[list[OutgoingLetter], str]:
        entries: list[dict[str, Any]] = []
        for index, message in enumerate(batch):
            entries.append({"Id": str(index), "MessageBody": message.body})
            if self.place.endswith(".fifo"):
                name = identity(message.letter, self.pipeline)
                entries[-1]["MessageGroupId"] = message.letter.shard_id
                entries[-1]["MessageDeduplicationId"] = hashlib.sha256(name.encode()).hexdigest()
        answer = await client.send_message_batch(QueueUrl=self.place, Entries=entries)
        failed = {int(entry["Id"]): entry for entry in answer.get("Failed", ())}
        why = ", ".join(sorted({str(entry.get("Code")) for entry in failed.values()}))
        return [batch[index] for index in sorted(failed)], why


class StreamDestination(_MessageDestination):
    """A stream of Kinesis, under the partition keys that the records had."""

    service = "kinesis"
    count = _KINESIS_BATCH
    call_bytes = _KINESIS_CALL_BYTES

    async def _message_limit(self, client: Any) -> int:
        answer = await client.describe_stream_summary(StreamName=self.place)
        kib = answer["StreamDescriptionSummary"].get("MaxRecordSizeInKiB")
        return int(kib) * 1024 if kib else _KINESIS_BYTES

    async def _send(self, client: Any, batch: list[OutgoingLetter]) -> tuple[list[OutgoingLetter], str]:
        records = []
        for message in batch:
            key = message.letter.partition_key or message.letter.shard_id
            key = key.encode("utf-8", "backslashreplace").decode()[:_KEY_LENGTH]
            records.append({"Data": message.body.encode(), "PartitionKey": key})
        answer = await client.put_records(StreamName=self.place, Records=records)
        codes = [record.get("ErrorCode") for record in answer["Records"]]
        not_taken = [message for message, code in zip(batch, codes, strict=True) if code]
        return not_taken, ", ".join(sorted({code for code in codes if code}))


class BucketDestination(AwsDestination):
    """A bucket of S3: JSON lines, one object for each shard of a flush, below the pipeline's name.

    Another pipeline on the same stream has shards and sequences of the same names.
    """

    service = "s3"

    async def _store(self, client: Any, letters: tuple[DeadLetter, ...]) -> tuple[DeadLetter, ...]:
        bucket, _, prefix = self.place.partition("/")
        for path, data in files(letters, self.pipeline, "jsonl"):
            name = f"{self.pipeline}/{path}"
            await client.put_object(Bucket=bucket, Key=f"{prefix}/{name}" if prefix else name, Body=data)
        return ()


DESTINATIONS: Final[Mapping[str, type[AwsDestination]]] = {
    "sqs": QueueDestination,
    "s3": BucketDestination,
    "kinesis": StreamDestination,
}
"""By the word in the setting (``config/locations.py``)."""
