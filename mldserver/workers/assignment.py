"""Which worker runs which shard: a pure plan.

A shard stays with its worker for as long as that can work, because its handler's state is there. So nothing is moved
to even out what was closed; new shards go where there are fewest, and only what a worker left behind is spread anew.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping


def place(plan: Mapping[str, int], workers: Collection[int]) -> int:
    """Return the worker for one more shard: one with the fewest. Raises ValueError when there is no worker."""
    if not workers:
        raise ValueError("there is no worker")
    loads = Counter(plan.values())
    return min(workers, key=lambda worker: (loads[worker], worker))


def spread(plan: Mapping[str, int], workers: Collection[int]) -> dict[str, int]:
    """Return the plan for another set of workers: what has none of them goes, one by one, where there are fewest.

    What has one stays there. So a plan that is balanced within one is so again. Raises ValueError when there is no
    worker.
    """
    if not workers:
        raise ValueError("there is no worker")
    made = {shard: worker for shard, worker in plan.items() if worker in workers}
    for shard in sorted(plan.keys() - made.keys()):
        made[shard] = place(made, workers)
    return made
