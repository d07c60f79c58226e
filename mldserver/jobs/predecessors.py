"""The functions whose windows a function's own come after (``after`` in its handler)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from mldserver.engine_jobs import FunctionView
from mldserver.errors import OperatorError
from mldserver.jobs.published import PublishedWindows
from mldserver.ledger.contract import WindowEntry


@dataclass(frozen=True, kw_only=True, eq=False)
class Predecessors:
    """Says which windows must wait, and gives the views that their jobs read."""

    names: tuple[str, ...]
    published: Mapping[str, PublishedWindows]
    """Of the functions that run in this server."""

    def missing(self, entry: WindowEntry) -> str | None:
        """Return a function that has not published all of its windows up to the end of this one; None: there is none."""
        end_ms = math.inf if entry.end_ms is None else entry.end_ms
        return next((name for name in self.names if self._until_ms(name) < end_ms), None)

    def _until_ms(self, name: str) -> float:
        found = self.published.get(name)
        return -math.inf if found is None else found.until_ms()

    async def views(self) -> tuple[FunctionView, ...]:
        """Return the views as they are now. Raises LedgerError, OSError and OperatorError."""
        try:
            found = [
                await self.published[name].view(fresh=True) for name in self.names if name in self.published
            ]
        except ValueError as error:
            raise OperatorError(
                f"A published window of {', '.join(self.names)} cannot be found: {error}."
            ) from error
        return tuple(view for view in found if view is not None)


def check(
    name: str, after: tuple[str, ...], functions: frozenset[str], published: Mapping[str, PublishedWindows]
) -> None:
    """Raise OperatorError if the function ``name`` cannot come after these.

    ``functions``: the server's. ``published``: of those that were started before.
    """
    if missing := [each for each in after if each not in functions]:
        raise OperatorError(
            f"The handler of {name} says after = {list(after)}, and this server has no function {missing[0]}.",
            advice=f"Its functions are {', '.join(sorted(functions))}: name one of these, or serve {missing[0]} here, too. To "
            f"drain {name}, run `mldserver functions undeploy {name}` where both run.",
            pipeline=name,
        )
    ahead, seen = list(after), set(after)
    while ahead:
        found = published.get(ahead.pop())
        further = () if found is None else found.after
        if name in further or name in seen:
            raise OperatorError(
                f"The functions {name} and {', '.join(sorted(seen - {name}) or after)} would wait for each other.",
                advice="Their handlers say after in a circle: take one of the names out.",
                pipeline=name,
            )
        ahead += [each for each in further if each not in seen]
        seen.update(further)
