"""The one place where a daemon is refused: when it starts beyond what the ledger has. Synchronous, no state."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mldserver.coordinator.positions import Start, judge_start
from mldserver.errors import GapRefused

if TYPE_CHECKING:
    from mldserver.records import Sequence
    from mldserver.sources.base import ShardOpening

__all__ = ["find_gap"]


def find_gap(opening: ShardOpening, position: Sequence | None, *, ended: bool) -> GapRefused | None:
    """Return why a daemon must not start where it starts, or None when no record can be skipped."""
    if judge_start(opening.start, position, ended=ended) is not Start.BEYOND:
        return None
    return GapRefused(
        f"The daemon starts shard {opening.shard_id} at {opening.start}, beyond the ledger's position "
        f"({position or 'none'}): records between the two would never be processed.",
        did="The connection was closed.",
        advice="Restore the ledger that belongs to this KCL application, or delete the application's lease table "
        "to read again, or accept the loss once with --accept-gap.",
        shard=opening.shard_id,
    )
