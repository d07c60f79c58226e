"""Where ``batches`` windows stand: their ids, and what flushes and cuts make of it. Pure; every kind of ledger uses it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["BatchProgress", "BatchStep", "batch_id", "batch_number", "behind", "moved_on"]

_BATCH = re.compile(r"batch-(\d+)")


@dataclass(frozen=True, slots=True)
class BatchProgress:
    """Where ``batches`` windows stand: the open one's number, its rows so far, and when its first row came."""

    number: int = 0
    rows: int = 0
    opened_ms: int | None = None


@dataclass(frozen=True, slots=True)
class BatchStep:
    """How a flush moves ``batches`` windows on: what lies between the two is what it puts in."""

    since: BatchProgress
    """Where its plan went on from."""
    until: BatchProgress
    max_rows: int
    """The most rows that a window may have."""


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


def moved_on(stands: BatchProgress, step: BatchStep) -> BatchProgress | None:
    """Return where ``batches`` windows stand after a step; None when it has no room there any more.

    A step that was planned while other servers put rows in counts on from those, as long as it stays in the same
    window. One that fills it, or goes beyond, is planned anew: which rows go where is another matter then.
    """
    since, until = step.since, step.until
    if until == since:
        return stands
    if stands == since or stands.number < since.number:
        return until
    if not stands.number == since.number == until.number:
        return None
    rows = stands.rows + until.rows - since.rows
    if rows > step.max_rows:
        return None
    if rows == step.max_rows:
        return BatchProgress(stands.number + 1)
    return BatchProgress(stands.number, rows, stands.opened_ms if stands.rows else until.opened_ms)
