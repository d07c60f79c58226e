"""List the shards of a Kinesis stream (ListShards), so that the server knows which shards have no connection.

The stream is listed at an interval, and at once when a shard is opened that no listing has named: a child of a split may
connect before the next poll, and its rows belong after those of its parents, which only the listing names.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol, TypeAlias

import structlog

from mldserver.base.aws import date_of
from mldserver.base.clock import CivilClock, Clock, first_of
from mldserver.consumer.intake import ShardListing
from mldserver.stores import KeyRange

log = structlog.get_logger("mldserver")

_LIST_SECONDS: Final = 30.0
"""Between two listings. AWS allows 1,000 a second for a stream; a shard that connects unlisted is asked for at once."""

_PATIENCE_SECONDS: Final = 10.0
"""How long the opening of a shard waits for AWS to name it."""


class KinesisClient(Protocol):
    """The one call that is needed."""

    async def list_shards(self, **request: Any) -> dict[str, Any]:
        """Kinesis ListShards."""


MakeKinesis: TypeAlias = "Callable[[], contextlib.AbstractAsyncContextManager[KinesisClient]]"
"""Makes a client, which is closed when its context ends."""


class StreamLister:
    """Lists a stream's shards at an interval, and whenever ``ask`` is called."""

    def __init__(
        self,
        stream: str,
        make_client: MakeKinesis,
        *,
        clock: Clock,
        civil: CivilClock | None = None,
        list_seconds: float = _LIST_SECONDS,
    ) -> None:
        """List once ``run`` is called, then every ``list_seconds``. The dates of AWS's responses correct ``civil``.

        The client is made at the first listing, and again only when that failed.
        """
        self._stream = stream
        self._make_client = make_client
        self._list_seconds = list_seconds
        self._clock = clock
        self._civil = civil
        self._client: KinesisClient | None = None
        self._resources = contextlib.AsyncExitStack()
        self._asked: list[asyncio.Future[bool]] = []
        self._wake = asyncio.Event()

    async def run(self, on_listing: Callable[[Mapping[str, ShardListing]], object]) -> None:
        """List until cancelled; call ``on_listing`` with each listing (by shard id) that did not fail."""
        async with self._resources:
            while True:
                self._wake.clear()
                callers_of_ask, self._asked = self._asked, []
                listing = await self._list()
                if listing is not None:
                    on_listing(listing)
                for waiting in callers_of_ask:
                    if not waiting.done():
                        waiting.set_result(listing is not None)
                await first_of(self._wake.wait(), self._clock.sleep(self._list_seconds))

    async def ask(self) -> bool:
        """List now. Return True once ``on_listing`` got a listing that began after this call, False if it fails or takes too long."""
        listed: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._asked.append(listed)
        self._wake.set()
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                return await listed
        except TimeoutError:
            return False

    async def _list(self) -> dict[str, ShardListing] | None:
        """Return every shard of the stream, by the shard's id; None if the listing failed, which is logged.

        A shard has no parent, one (after a split) or two (after a merge). A parent whose records have expired is not
        listed itself.
        """
        try:
            if self._client is None:
                self._client = await self._resources.enter_async_context(self._make_client())
            listing: dict[str, ShardListing] = {}
            request: dict[str, Any] = {"StreamName": self._stream}
            while request:
                page = await self._client.list_shards(**request)
                if self._civil is not None:
                    self._civil.dated(date_of(page))
                for shard in page["Shards"]:
                    names = (shard.get("ParentShardId"), shard.get("AdjacentParentShardId"))
                    bounds = shard["HashKeyRange"]
                    key_range = KeyRange(int(bounds["StartingHashKey"]), int(bounds["EndingHashKey"]))
                    listing[shard["ShardId"]] = ShardListing(tuple(filter(None, names)), key_range)
                token = page.get("NextToken")
                # AWS: NextToken excludes StreamName.
                request = {"NextToken": token} if token else {}
        except Exception as error:  # noqa: BLE001  # credentials, network, throttling, emulators: none may stop the server
            name, what, advice = type(error).__name__, str(error), {}
            # Recognized by its text: botocore makes the exception's class at run time, as an attribute of the client.
            if "(ResourceNotFoundException)" in what:
                what = f"There is no stream {self._stream} in this account and region."
                advice = {"advice": "Check the settings stream and region, and the credentials' account."}
            log.warning("stream.unlisted", stream=self._stream, error=name, what=what, **advice)
            return None
        return listing
