"""Kinesis's ListShards over a fake stream: what a server with ``--stream`` asks."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from email.utils import formatdate
from typing import Any, Final

from mldserver.base.clock import Clock, SystemClock
from mldserver.testing.fake_stream import FakeStream, HashRange

_PAGE: Final = 3
"""Shards a page."""


class FakeKinesis:
    """Lists a stream's shards as they are when it answers."""

    def __init__(self, stream: FakeStream, clock: Clock | None = None, *, latency: float = 0.0) -> None:
        """Answer after ``latency`` seconds of ``clock``, with its time of day; None: the machine's."""
        self.stream = stream
        self.listings = 0
        """How many were asked for."""
        self.clients = 0
        """How many clients are open."""
        self._clock = clock or SystemClock()
        self._latency = latency

    @contextlib.asynccontextmanager
    async def make(self) -> AsyncIterator[FakeKinesis]:
        """Make a client."""
        self.clients += 1
        try:
            yield self
        finally:
            self.clients -= 1

    async def list_shards(self, **request: Any) -> dict[str, Any]:
        """Return one page."""
        first = int(request.get("NextToken", 0))
        self.listings += first == 0
        await self._clock.sleep(self._latency)
        shards = list(self.stream.shards.values())
        date = formatdate(self._clock.now_ms() / 1000, usegmt=True)
        page: dict[str, Any] = {
            "Shards": [_described(each) for each in shards[first : first + _PAGE]],
            "ResponseMetadata": {"HTTPHeaders": {"date": date}},
        }
        return page if first + _PAGE >= len(shards) else page | {"NextToken": str(first + _PAGE)}


def _described(shard: HashRange) -> dict[str, Any]:
    parents = dict(zip(("ParentShardId", "AdjacentParentShardId"), shard.parents, strict=False))
    numbers = {"StartingSequenceNumber": "1"} | ({"EndingSequenceNumber": "2"} if shard.closed else {})
    first, last = map(str, shard.key_range)
    hashes = {"StartingHashKey": first, "EndingHashKey": last}
    return {"ShardId": shard.id, "HashKeyRange": hashes, "SequenceNumberRange": numbers} | parents
