"""Which shards are held back when memory or disk runs short. A synchronous core.

A shard is held by delaying its status: the daemon sends no more of it, renews its lease meanwhile, and nothing is
lost. Held are the shards ahead of the watermark, since their rows are needed last; the shard that holds the watermark
goes on, or the windows that would free the disk could never close. All are where going on would free nothing (``backpressure.py``).
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Load", "shards_to_hold"]


class Load(NamedTuple):
    """How far a shard is."""

    shard_id: str
    ahead_ms: int | None
    """Its own watermark; None when it has shown nothing (it is then the furthest behind)."""


def shards_to_hold(loads: list[Load], *, holder: str | None) -> frozenset[str]:
    """Return the shards that are ahead of ``holder``, which holds the watermark; without one, all.

    Shards that are level with the holder, or behind it, are not held.
    """
    if holder is None:
        return frozenset(load.shard_id for load in loads)
    reached = next((load.ahead_ms for load in loads if load.shard_id == holder), None)
    return frozenset(
        load.shard_id for load in loads if load.shard_id != holder and _is_ahead(load.ahead_ms, reached)
    )


def _is_ahead(ahead_ms: int | None, reached_ms: int | None) -> bool:
    return ahead_ms is not None and (reached_ms is None or ahead_ms > reached_ms)
