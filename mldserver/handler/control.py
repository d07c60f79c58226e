"""What a handler may say about its own failures, instead of letting an error speak: exported from ``mldserver``.

Raised in any record hook, synchronous or not::

    raise Retry("the service is busy", after=5)     # again, in 5 seconds
    raise Discard("a test record")                  # no row, no dead letter
    raise Fatal("no such account")                  # no more attempts

A hook that takes a whole batch says which records it means: by ``records=`` of ``Discard`` and ``Fatal``, or by
returning a ``BatchResult``. What it does not name is looked for by halving, as with any other error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from mldserver.records import Record

__all__ = ["BatchResult", "Discard", "Fatal", "Retry", "Verdict"]


class Verdict(Exception):
    """The root of what a handler may raise to say what is to become of its records.

    The attributes have defaults: a subclass need not call ``super().__init__``.
    """

    reason: str = ""
    records: tuple[int | Record, ...] | None = None

    def __init__(self, reason: str = "", *, records: Iterable[int | Record] | None = None) -> None:
        """Give a ``reason`` for the log and the dead letter.

        ``records``: those that are meant, as records or as their places in the batch (from 0); the others are called
        again at once, and that counts as no attempt of theirs. None: all records of the call.
        """
        super().__init__(*([reason] if reason else []))
        self.reason = reason
        self.records = None if records is None else tuple(records)


class Discard(Verdict):
    """The record is to give no row and no dead letter; it is counted (``discarded`` of ``batch.done``)."""


class Fatal(Verdict):
    """The record cannot succeed: no more attempts, what ``on_failure`` says happens at once."""


class Retry(Verdict):
    """The call is to be made again, after so many seconds; it counts as an attempt like any other."""

    after: float | None = None

    def __init__(self, reason: str = "", *, after: float | None = None) -> None:
        """Wait ``after`` seconds (None: the back-off). Raises ValueError when that is no finite number from 0 on."""
        if after is not None and not (math.isfinite(after) and after >= 0):
            raise ValueError(f"Retry(after={after!r}): it must be a number of seconds from 0 on")
        super().__init__(reason)
        self.after = after


@dataclass(frozen=True, slots=True)
class BatchResult:
    """What ``process_records`` or ``process_table`` may return to name the records that failed; the others are done."""

    rows: Any = None
    """What the hook would return without failures; rows of records that failed are left out."""
    failed: Iterable[int | Record] | Mapping[int | Record, str | BaseException] = ()
    """Records, or their places in the batch (from 0); as a mapping with why: a text, or an exception (also ``Retry``,
    ``Discard``, ``Fatal``), which is then treated as if the record had raised it."""
