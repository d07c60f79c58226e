"""Where ``batches`` windows stand: their ids, and what a cut makes of it. Pure; every kind of ledger uses it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from mldserver.state.ledger import BatchProgress

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["batch_id", "batch_number", "behind"]

_BATCH = re.compile(r"batch-(\d+)")


def batch_id(number: int) -> str:
    """Return the id of the ``batches`` window with this number."""
    return f"batch-{number:012d}"


def batch_number(window_id: str) -> int | None:
    """Return the number in a ``batches`` window's id; None when it is no such id."""
    found = _BATCH.fullmatch(window_id)
    return int(found[1]) if found else None


def behind(progress: BatchProgress, window_ids: Iterable[str]) -> BatchProgress:
    """Return where ``batches`` windows go on once these are cut: no number is given again.

    A window that is cut for its age is not full, so that no flush has moved the number.
    """
    numbers = (batch_number(each) for each in window_ids)
    last = max((number for number in numbers if number is not None), default=-1)
    return BatchProgress(last + 1) if last >= progress.number else progress
