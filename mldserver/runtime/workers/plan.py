"""Which worker runs which shard: a pure plan.

A shard stays with its worker for as long as that can work, because its handler's state is there. So nothing is moved
to even out what was closed; new shards go where there are fewest, and only what a worker left behind is spread anew.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

__all__ = ["place", "spread"]


def place(plan: Mapping[str, int], workers: Collection[int]) -> int:
    """Return the worker for one more shard: one with the fewest. Raises ValueError when there is no worker."""
    if not workers:
        raise ValueError("there is no worker")
    loads = Counter(plan.values())
    return min(workers, key=lambda worker: (loads[worker], worker))


def spread(plan: Mapping[str, int], workers: Collection[int]) -> dict[str, int]:
    """Return the plan for another set of workers: balanced within one, with as few moves as that takes.

    Raises ValueError when there is no worker.
    """
    if not workers:
        raise ValueError("there is no worker")
    held: dict[int, list[str]] = {worker: [] for worker in sorted(workers)}
    homeless: list[str] = []
    for shard in sorted(plan):
        held.get(plan[shard], homeless).append(shard)
    share, more = divmod(len(plan), len(held))
    # Who holds most may keep one more than the others: nobody gives away what another must then be given.
    fullest = sorted(held, key=lambda worker: (-len(held[worker]), worker))
    room = {worker: share + (place < more) for place, worker in enumerate(fullest)}
    for worker, shards in held.items():
        homeless += shards[room[worker] :]
        del shards[room[worker] :]
    for worker, shards in held.items():
        while len(shards) < room[worker]:
            shards.append(homeless.pop())
    return {shard: worker for worker, shards in held.items() for shard in shards}
