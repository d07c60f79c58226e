"""The shards of one stream, listed again and again into a tree; and what becomes of shards that no answer names.

An answer of DescribeStream can be incomplete for a while, and a parent that it leaves out is either trimmed or only left
out. AWS is asked for that parent by its name: only a shard that AWS neither lists nor knows counts as gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from mldserver.base.backoff import backoff
from mldserver.base.clock import Clock
from mldserver.dynamodb_streams.shard_tree import TRIM_HORIZON, ShardTree
from mldserver.dynamodb_streams.streams_api import ShardGone, StreamsApi, Trimmed
from mldserver.errors import MldserverError, OperatorError

_GONE_SECONDS: Final = 5.0
"""For how long every answer must lack a shard before AWS is asked for it by its name."""
_EXISTS_SECONDS: Final = 120.0
"""For how long a shard that AWS knows by its name is expected in an answer, before it is read without a parent."""
_NO_SUCH_ID: Final = "ValidationException"
"""What emulators answer for a shard that they do not know."""
AGAIN_SECONDS: Final = 1.0
"""Between two listings while a shard is unresolved."""
_CHILD_LISTINGS: Final = 10
_CHILD_SECONDS: Final = (0.05, 1.0)
"""The first and the longest wait between listings that look for children."""


class StreamListing:
    """Keeps the tree of a stream's shards."""

    def __init__(self, api: StreamsApi, arn: str, *, clock: Clock) -> None:
        self.arn = arn
        self.tree = ShardTree()
        self.status = ""
        """The stream's status in the latest answer; empty before the first."""
        self._api = api
        self._clock = clock
        self._missing_ms: dict[str, int] = {}
        """Steady time since which each unresolved shard (a parent that no answer names) is known."""

    async def refresh(self, *, within: float | None = None) -> tuple[str, ...]:
        """Ask for all shards; return those that are new. Raises OperatorError, also if the stream does not exist.

        ``within``: see ``StreamsApi.within``; None: however long it takes.
        """
        api = self._api if within is None else self._api.within(within)
        described = await api.describe(self.arn)
        self.status = described.status
        new = self.tree.add_listing(described.shards, whole=True)
        if described.shards:
            await self._resolve(api)
        return new

    async def find_children(
        self, shard_id: str, failed: Callable[[MldserverError], object], *, leave: Callable[[], bool] = bool
    ) -> None:
        """List the stream until it names children of a shard that has ended, or ``leave`` returns True.

        They may be named a moment after the shard's end. After ten listings this returns: ``refresh`` finds them later.
        ``failed`` is called with the error of a listing, which is then tried again.
        """
        for attempt in range(1, _CHILD_LISTINGS + 1):
            if self.tree.children(shard_id) or leave():
                return
            try:
                described = await self._api.describe(self.arn)
            except MldserverError as error:
                failed(error)
            else:
                # ``whole=False``: these frequent listings must not count for forgetting finished shards.
                self.tree.add_listing(described.shards, whole=False)
            if not self.tree.children(shard_id):
                await self._clock.sleep(backoff(attempt, *_CHILD_SECONDS))

    async def _resolve(self, api: StreamsApi) -> None:
        """Decide about parent shards that DescribeStream does not list: ask AWS for each by its id, after 5 seconds.

        If AWS does not know it, it is gone. If AWS still knows it after two minutes, it is read as a shard without a parent.
        """
        now_ms = self._clock.steady_ms()
        self._missing_ms = {name: self._missing_ms.get(name, now_ms) for name in self.tree.unresolved()}
        waited = {name: (now_ms - since_ms) / 1000 for name, since_ms in self._missing_ms.items()}
        due = [name for name, seconds in waited.items() if seconds >= _GONE_SECONDS]
        async with asyncio.TaskGroup() as group:
            asked = {name: group.create_task(self._is_known(api, name)) for name in due}
        for name, known in asked.items():
            if not known.result():
                self.tree.gone(name)
            elif waited[name] >= _EXISTS_SECONDS:
                self.tree.exists(name)

    async def _is_known(self, api: StreamsApi, shard_id: str) -> bool:
        """Return whether a shard may exist: False only if AWS says that it does not. Other errors prove nothing."""
        try:
            await api.iterator(self.arn, shard_id, TRIM_HORIZON)
        except (ShardGone, Trimmed):
            return False
        except OperatorError as error:
            return error.where.get("aws") != _NO_SUCH_ID
        return True
