"""The handler's ``on_window`` in the driver's process: found, called, its answer checked."""

from __future__ import annotations

import asyncio
import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mldserver.errors import HandlerInvalid

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from pyspark.sql import DataFrame

    from mldserver.coordinator.windows import Window

    OnWindow = Callable[[DataFrame, Window], object]

__all__ = ["Pipeline", "pipeline_of"]


async def _finish(awaitable: Awaitable[object]) -> object:
    return await awaitable


@dataclass(frozen=True, slots=True)
class Pipeline:
    """What becomes of a window's rows."""

    on_window: OnWindow | None
    """None: rows are written as they are."""
    check: Callable[[Iterable[str]], None] | None = None
    """Called with the names of the result's columns; what it raises fails the window."""

    def apply(self, rows: DataFrame, window: Window) -> DataFrame | None:
        """Return the window's result; None when the pipeline wrote for itself.

        An ``async`` hook runs on an event loop of its own in this very thread, as py4j binds threads. Raises what
        the hook raises, and HandlerInvalid when it returns anything else than a DataFrame or None.
        """
        from pyspark.sql import DataFrame  # noqa: PLC0415  # only the driver's process pays for pyspark

        result: object = rows if self.on_window is None else self.on_window(rows, window)
        if inspect.isawaitable(result):
            result = asyncio.run(_finish(result))
        if result is None:
            return None
        if isinstance(result, DataFrame):
            if self.check is not None:
                self.check(result.columns)
            return result
        raise HandlerInvalid(
            f"on_window returned {_article(type(result).__name__)}, not a Spark DataFrame.",
            advice="Return a DataFrame, or None when the window is written somewhere else.",
        )


def _article(name: str) -> str:
    return f"an {name}" if name[0] in "aeiouAEIOU" else f"a {name}"


def pipeline_of(handler: Any) -> Pipeline:
    """Return the pipeline of a loaded handler: a module, an object, or a class, which is instantiated once."""
    if not hasattr(handler, "on_window"):
        return Pipeline(None)
    target: Any = handler() if inspect.isclass(handler) else handler
    return Pipeline(target.on_window)
