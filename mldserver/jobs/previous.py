"""The results of the windows before a window, for handlers whose ``on_window`` takes ``previous``."""

from __future__ import annotations

from dataclasses import dataclass

from mldserver.engine_jobs import FunctionView
from mldserver.errors import OperatorError
from mldserver.jobs.published import PublishedWindows
from mldserver.ledger.contract import WindowEntry
from mldserver.ledger.operations import Ledger


@dataclass(frozen=True, kw_only=True, eq=False)
class PreviousResults:
    """Finds the result of the window that comes before another one in event time, whichever server published it.

    Windows are cut in this order, and rows for a window before one that was cut are late. So once nothing that comes before a
    window is cut or committed, nothing will be.
    """

    ledger: Ledger
    published: PublishedWindows

    async def is_missing(self, entry: WindowEntry) -> bool:
        """Return whether a window before this one must be published first. Raises LedgerError."""
        _, waits = await self.ledger.preceding(entry.window_id)
        return waits

    async def find(self, entry: WindowEntry) -> FunctionView | None:
        """Return the result of the window before this one; None if there is none, or it has no output.

        Raises LedgerError and OSError, and OperatorError for an output that cannot be found.
        """
        before, _ = await self.ledger.preceding(entry.window_id)
        if before is None:
            return None
        try:
            return await self.published.view_of(before)
        except ValueError as error:
            raise OperatorError(
                f"The result of window {before.window_id} cannot be found: {error}.",
                did=f"Window {entry.window_id}, which comes next, waits.",
                pipeline=self.published.shape.name,
            ) from error
