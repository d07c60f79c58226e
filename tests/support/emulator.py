"""AWS on loopback, as far as the KCL needs it: moto's Kinesis, DynamoDB and CloudWatch over h2c.

Run as ``python emulator.py FD``, where FD is a listening socket. Four things that moto does differently from AWS are
put right here, because the KCL (or a test that counts rows) depends on them:

* a closed shard keeps its records (moto moves them to the children under new sequence numbers);
* records go to open shards only;
* the last GetRecords of a closed shard has no ``NextShardIterator`` and names the ``ChildShards``: without them the
  KCL never ends the parent;
* requests are answered one at a time (moto's stores are not safe under concurrency).
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from hashlib import md5
from io import BytesIO
from typing import TYPE_CHECKING, Any

from hypercorn.asyncio import serve
from hypercorn.config import Config
from moto.kinesis.models import Shard, Stream, kinesis_backends
from moto.kinesis.utils import decompose_shard_iterator
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

ACCOUNT = "123456789012"
REGION = "us-east-1"
LARGEST_BODY = 64 * 1024 * 1024

_moto_split = Stream.split_shard


def _split_keeping_records(self: Stream, shard_to_split: str, new_starting_hash_key: str) -> None:
    """Split as AWS does: what was in the parent stays there, the children begin empty."""
    parent = self.shards[shard_to_split]
    kept = parent.records
    known = set(self.shards)
    parent.records = {}
    _moto_split(self, shard_to_split, new_starting_hash_key)
    parent.records = kept
    assert all(not self.shards[name].records for name in set(self.shards) - known)


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


class Emulator:
    """A WSGI application: moto, one request at a time, with the ends of shards put right."""

    def __init__(self) -> None:
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._one_at_a_time = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        with self._one_at_a_time:
            if not environ.get("HTTP_X_AMZ_TARGET", "").endswith(".GetRecords"):
                return list(self._moto(environ, start_response))
            return self._get_records(environ, start_response)

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
    Stream.get_shard_for_key = _open_shard_for_key  # type: ignore[method-assign]  # see above
    config = Config()
    config.bind = [f"fd://{listener}"]
    config.accesslog = None
    config.wsgi_max_body_size = LARGEST_BODY
    await serve(Emulator(), config, mode="wsgi")


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
