"""The one place where a daemon is refused: when it starts beyond what the ledger has. No state."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from mldserver.coordinator.core.positions import Start, judge_start
from mldserver.errors import GapRefused

if TYPE_CHECKING:
    from mldserver.records import Sequence
    from mldserver.sources.intake import ShardOpening

__all__ = ["is_gap", "refuse_gap"]

log = structlog.get_logger("mldserver")


def is_gap(opening: ShardOpening, position: Sequence | None, *, ended: bool = False) -> bool:
    """Tell whether a daemon that starts so would skip records behind a position."""
    return judge_start(opening.start, position, ended=ended) is Start.BEYOND


def refuse_gap(opening: ShardOpening, position: Sequence | None, *, ended: bool, accepted: bool) -> None:
    """Raise GapRefused when a daemon starts where records would be skipped; log it when that is accepted."""
    if not is_gap(opening, position, ended=ended):
        return
    if accepted:
        log.error(
            "shard.gap_accepted",
            shard=opening.shard_id,
            start=str(opening.start),
            position=str(position) if position else None,
        )
        return
    raise GapRefused(
        f"The daemon starts shard {opening.shard_id} at {opening.start}, beyond the ledger's position "
        f"({position or 'none'}): records between the two would never be processed.",
        did="The connection was closed.",
        advice="Restore the ledger that belongs to this KCL application, or delete the application's lease table "
        "to read again, or accept the loss once with --accept-gap.",
        shard=opening.shard_id,
    )
