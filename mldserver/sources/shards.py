"""ListShards: which shards a Kinesis stream has, so that a shard without a connection is known to be missing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import structlog

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable

__all__ = ["KinesisClient", "ShardListing", "kinesis_client", "list_shards"]

log = structlog.get_logger("mldserver")


@dataclass(frozen=True, slots=True)
class ShardListing:
    """What the stream says of one shard."""

    parents: tuple[str, ...]
    """None, one (after a split) or two (after a merge); a parent may have left the listing with its records."""
    closed: bool
    """Whether the shard takes no more records; it may still hold some."""


class KinesisClient(Protocol):
    """The one call that is needed."""

    async def list_shards(self, **request: Any) -> dict[str, Any]:
        """Kinesis ListShards."""
        ...


def kinesis_client(
    *, region: str | None = None, endpoint_url: str | None = None
) -> contextlib.AbstractAsyncContextManager[KinesisClient]:
    """Return an aioboto3 client, to be entered; credentials come from where boto3 finds them."""
    import aioboto3  # noqa: PLC0415  # half a second that only servers with --stream pay

    client: contextlib.AbstractAsyncContextManager[KinesisClient] = aioboto3.Session().client(
        "kinesis", region_name=region, endpoint_url=endpoint_url
    )
    return client


async def list_shards(
    open_client: Callable[[], contextlib.AbstractAsyncContextManager[KinesisClient]], stream: str
) -> dict[str, ShardListing] | None:
    """Return every shard of the stream by its id, all pages; None when AWS does not say.

    Never fatal: a failure is logged, and shards are known from the ledger and from connections meanwhile.
    """
    listing: dict[str, ShardListing] = {}
    request: dict[str, Any] = {"StreamName": stream}
    try:
        async with open_client() as client:
            while request:
                page = await client.list_shards(**request)
                listing |= {shard["ShardId"]: _listing(shard) for shard in page["Shards"]}
                token = page.get("NextToken")
                # AWS: NextToken excludes StreamName.
                request = {"NextToken": token} if token else {}
    except Exception as error:  # noqa: BLE001  # credentials, network, throttling, emulators: none may stop the server
        log.warning("stream.unlisted", stream=stream, error=type(error).__name__, what=str(error))
        return None
    return listing


def _listing(shard: dict[str, Any]) -> ShardListing:
    names = (shard.get("ParentShardId"), shard.get("AdjacentParentShardId"))
    closed = shard.get("SequenceNumberRange", {}).get("EndingSequenceNumber") is not None
    return ShardListing(tuple(name for name in names if name), closed)
