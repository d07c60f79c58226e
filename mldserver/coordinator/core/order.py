"""The order of rows: effective times inside a shard, and the merge across shards. A synchronous core.

Why effective times: arrival times are approximate, so a shard's later record may carry an earlier time, yet the order
inside a shard always wins. A record's effective time is the running maximum of arrival times in its shard, floored by
the last effective time of its parents. Ordering by (effective time, clock) is then a total order that keeps shards in
order and parents before children, and equals what a heap over single records gives (Bloop's rules) at a fraction of
its cost: a running maximum and one stable sort for each flush.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["effective_times", "merge_order"]


def effective_times(times_ms: NDArray[np.int64], floor_ms: int | None) -> NDArray[np.int64]:
    """Return the running maximum of ``times_ms`` (one shard, in shard order), never below ``floor_ms``."""
    running = np.maximum.accumulate(times_ms) if len(times_ms) else times_ms
    return running if floor_ms is None else np.maximum(running, np.int64(floor_ms))


def merge_order(runs: Sequence[NDArray[np.int64]]) -> NDArray[np.intp] | None:
    """Return the permutation that merges ``runs`` by effective time; ties keep the order of the runs.

    Each run holds the effective times of one batch, and runs stand in the order in which they were accepted, so that
    the runs of one shard are in its order and never go down. None: the concatenated runs are in order already.
    """
    times = np.concatenate(runs) if runs else np.empty(0, np.int64)
    if len(times) < 2 or bool((times[1:] >= times[:-1]).all()):  # noqa: PLR2004  # fewer than two are in order
        return None
    return np.argsort(times, kind="stable")
