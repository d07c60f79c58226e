"""AWS on loopback, as far as the KCL needs it: moto's Kinesis, DynamoDB and CloudWatch over h2c.

Run as ``python emulator.py FD``, where FD is a listening socket. Five things that moto does differently from AWS are
put right here, because the KCL (or a test that counts rows) depends on them:

* a closed shard keeps its records (moto moves them to the children under new sequence numbers);
* records go to open shards only;
* the last GetRecords of a closed shard has no ``NextShardIterator`` and names the ``ChildShards``: without them the
  KCL never ends the parent;
* SubscribeToShard, which moto does not have, pushes records in AWS's event stream encoding;
* requests are answered one at a time (moto's stores are not safe under concurrency).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from hashlib import md5
from io import BytesIO
from typing import Any
from zlib import crc32

from hypercorn.asyncio import serve
from hypercorn.config import Config
from moto.kinesis.models import Shard, Stream, kinesis_backends
from moto.kinesis.utils import decompose_shard_iterator
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

ACCOUNT = "123456789012"
REGION = "us-east-1"
LARGEST_BODY = 64 * 1024 * 1024
PUSHED_RECORDS = 1000
PUSH_SECONDS = 0.25
SUBSCRIPTION_PUSHES = 40

_moto_split = Stream.split_shard
_moto_merge = Stream.merge_shards


def _split_keeping_records(self: Stream, shard_to_split: str, new_starting_hash_key: str) -> None:
    """Split as AWS does."""
    with _keeping_records(self, shard_to_split):
        _moto_split(self, shard_to_split, new_starting_hash_key)


def _merge_keeping_records(self: Stream, shard_to_merge: str, adjacent_shard_to_merge: str) -> None:
    """Merge as AWS does."""
    with _keeping_records(self, shard_to_merge, adjacent_shard_to_merge):
        _moto_merge(self, shard_to_merge, adjacent_shard_to_merge)


@contextlib.contextmanager
def _keeping_records(stream: Stream, *parents: str) -> Iterator[None]:
    """Leave the parents their records while children are made; the children begin empty."""
    known = set(stream.shards)
    kept = {name: stream.shards[name].records for name in parents}
    for name in parents:
        stream.shards[name].records = {}
    yield
    for name, records in kept.items():
        stream.shards[name].records = records
    assert all(not stream.shards[name].records for name in set(stream.shards) - known)


def _open_shard_for_key(self: Stream, partition_key: str, explicit_hash_key: str) -> Shard | None:
    """Route a record as AWS does: by the key's MD5, to an open shard."""
    digest = md5(partition_key.encode(), usedforsecurity=False).digest()
    key = int(explicit_hash_key) if explicit_hash_key else int.from_bytes(digest)
    owners = (
        shard
        for shard in self.shards.values()
        if shard.is_open and shard.starting_hash <= key <= shard.ending_hash
    )
    return next(owners, None)


def with_children(answer: dict[str, Any], stream: Stream, shard: Shard, after: int) -> dict[str, Any]:
    """Return a GetRecords answer as AWS ends a closed shard: no next iterator, but the children."""
    records = answer["Records"]
    last = int(records[-1]["SequenceNumber"]) if records else after
    if shard.is_open or last < shard.get_max_sequence_number():
        return answer
    answer["NextShardIterator"] = None
    answer["MillisBehindLatest"] = 0
    answer["ChildShards"] = [
        {
            "ShardId": child.shard_id,
            "ParentShards": [parent for parent in (child.parent, child.adjacent_parent) if parent],
            "HashKeyRange": {
                "StartingHashKey": str(child.starting_hash),
                "EndingHashKey": str(child.ending_hash),
            },
        }
        for child in stream.shards.values()
        if shard.shard_id in {child.parent, child.adjacent_parent}
    ]
    return answer


def framed(kind: str, payload: dict[str, Any]) -> bytes:
    """Return an event in the encoding ``application/vnd.amazon.eventstream``: lengths, headers, payload, checksums."""
    told = {":message-type": "event", ":event-type": kind, ":content-type": "application/json"}
    headers = b"".join(
        bytes([len(name)]) + name.encode() + b"\x07" + len(value).to_bytes(2) + value.encode()
        for name, value in told.items()
    )
    body = json.dumps(payload).encode()
    prelude = (16 + len(headers) + len(body)).to_bytes(4) + len(headers).to_bytes(4)
    message = prelude + crc32(prelude).to_bytes(4) + headers + body
    return message + crc32(message).to_bytes(4)


def found_shard(request: dict[str, Any]) -> tuple[Stream, Shard]:
    """Return the shard that SubscribeToShard names, by its consumer's ARN."""
    stream_name = request["ConsumerARN"].split("/")[1]
    stream = kinesis_backends[ACCOUNT][REGION].streams[stream_name]
    return stream, stream.shards[request["ShardId"]]


class Emulator:
    """A WSGI application: moto, one request at a time, with the ends of shards put right."""

    def __init__(self) -> None:
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._one_at_a_time = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ.get("HTTP_X_AMZ_TARGET", "").endswith(".SubscribeToShard"):
            start_response("200 OK", [("Content-Type", "application/vnd.amazon.eventstream")])
            return self._subscription(json.loads(environ["wsgi.input"].read()))
        with self._one_at_a_time:
            if not environ.get("HTTP_X_AMZ_TARGET", "").endswith(".GetRecords"):
                return list(self._moto(environ, start_response))
            return self._get_records(environ, start_response)

    def _subscription(self, request: dict[str, Any]) -> Iterator[bytes]:
        """Push what comes for some seconds (AWS: five minutes); the consumer then subscribes again."""
        yield framed("initial-response", {})
        position = request["StartingPosition"]
        after = int(position.get("SequenceNumber", 0)) - (position["Type"] == "AT_SEQUENCE_NUMBER")
        stream, shard = found_shard(request)
        for _ in range(SUBSCRIPTION_PUSHES):
            with self._one_at_a_time:
                records, last, behind = shard.get_records(str(after), PUSHED_RECORDS)
                told = [
                    {
                        "Data": record.data,
                        "PartitionKey": record.partition_key,
                        "SequenceNumber": str(record.sequence_number),
                        "ApproximateArrivalTimestamp": record.created_at,
                    }
                    for record in records
                ]
                answer = {"Records": told, "NextShardIterator": "", "MillisBehindLatest": behind}
                event = with_children(answer, stream, shard, after)
            after = last
            ended = event.pop("NextShardIterator") is None
            yield framed(
                "SubscribeToShardEvent", event | {"ContinuationSequenceNumber": None if ended else str(after)}
            )
            if ended:
                return
            time.sleep(PUSH_SECONDS)

    def _get_records(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        request = environ["wsgi.input"].read()
        environ["wsgi.input"] = BytesIO(request)
        started: list[Any] = []
        body = b"".join(self._moto(environ, lambda *head, **_: started.extend(head)))
        status, headers, *_ = started
        if status.startswith("200"):
            stream_name, shard_id, after = decompose_shard_iterator(json.loads(request)["ShardIterator"])
            stream = kinesis_backends[ACCOUNT][REGION].streams[stream_name]
            answer = with_children(json.loads(body), stream, stream.shards[shard_id], int(after))
            body = json.dumps(answer).encode()
        kept = [(name, value) for name, value in headers if name.lower() != "content-length"]
        start_response(status, [*kept, ("Content-Length", str(len(body)))])
        return [body]


async def main(listener: int) -> None:
    """Serve on a listening socket until killed."""
    Stream.split_shard = _split_keeping_records  # type: ignore[method-assign]  # this is what is put right
    Stream.merge_shards = _merge_keeping_records  # type: ignore[method-assign]  # see above
    Stream.get_shard_for_key = _open_shard_for_key  # type: ignore[method-assign]  # see above
    config = Config()
    config.bind = [f"fd://{listener}"]
    config.accesslog = None
    config.wsgi_max_body_size = LARGEST_BODY
    await serve(Emulator(), config, mode="wsgi")


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
