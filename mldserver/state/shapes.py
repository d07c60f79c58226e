"""The shapes of a pipeline's rows, as its ledger holds them: texts by fingerprint, one of which is the present one.

The ledger does not read them (``coordinator/core/shape.py`` does). It sees to it that servers which run at the same time have
the same one, and that one takes the place of another in a single step, decided on everything that the ledger held.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

__all__ = ["ShapeBook", "ShapeChange"]


@dataclass(frozen=True, slots=True)
class ShapeChange:
    """A shape that a server declares, and what becomes of the ledger when it takes the place of another."""

    fingerprint: str
    text: str
    over: frozenset[str] = frozenset()
    """Published windows whose segments it cannot read: they are not retained any more."""
    window_ms: int | None = None
    """The size of event-time windows (ms), where they were cut in another way before. The first of them begins at or
    after the end of every window that has begun: ``cut_below_ms`` rises to there. None: it stays."""
    forget_event_times: bool = False
    """Event time is another column from now on: where the shards' watermarks stood means nothing."""


class ShapeBook(Protocol):
    """The part of a ``Ledger`` that knows shapes, and the drain that comes before another."""

    async def declare(self, change: ShapeChange, *, version: int) -> bool:
        """Note this server's shape, which from now on is the pipeline's.

        False, and nothing happened: it is another than the pipeline's, and the ledger is not as it was at ``version``
        any more. So who has looked at all servers and segments of that version has decided rightly.
        Where no other server has declared one, a drain is over. A pipeline that has its former name still gets the new one.
        """
        ...

    async def drain(self) -> None:
        """Ask all servers to drain: to take nothing more in, publish what they have, and leave. Tools may call it."""
        ...
