"""The byte budget: which shards are held back when memory or disk runs short. A synchronous core.

A shard is held by delaying its status: the daemon sends no more of it, renews its lease meanwhile, and nothing is
lost. Held are the shards furthest ahead of the watermark, since their rows are needed last; the shard that holds the
watermark never is, or the windows that would free the memory could never close.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Load", "shards_to_hold"]


class Load(NamedTuple):
    """One shard's share."""

    shard_id: str
    bytes: int
    """What its rows take."""
    ahead_ms: int | None
    """Its own watermark; None when it has shown nothing (it is then the furthest behind)."""


def shards_to_hold(loads: list[Load], *, used: int, budget: int, holder: str | None) -> frozenset[str]:
    """Return the shards whose answers must wait while ``used`` bytes are more than ``budget``.

    Shards are held from the furthest ahead until what the others use fits into the budget. ``holder`` holds the
    watermark and is never held; nor is any shard that is level with it.
    """
    if used <= budget:
        return frozenset()
    holding = next((load.ahead_ms for load in loads if load.shard_id == holder), None)
    held: set[str] = set()
    free = used
    for load in sorted(loads, key=lambda each: (each.ahead_ms is not None, each.ahead_ms or 0), reverse=True):
        level = holder is not None and (load.shard_id == holder or load.ahead_ms == holding)
        if free <= budget or level:
            break
        held.add(load.shard_id)
        free -= load.bytes
    return frozenset(held)
