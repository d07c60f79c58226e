"""The handler's ``on_window`` in the driver's process: found, called, its answer checked."""

from __future__ import annotations

import asyncio
import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mldserver.errors import HandlerInvalid
from mldserver.windows import WINDOW_COLUMNS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from pyspark.sql import DataFrame

    from mldserver.windows import Window

    OnWindow = Callable[[DataFrame, Window], object]


@dataclass(frozen=True, slots=True)
class Pipeline:
    """What becomes of a window's rows."""

    on_window: OnWindow | None
    """None: rows are written as they are."""
    check: Callable[[Iterable[str]], None] | None = None
    """Called with the names of the output's columns; what it raises fails the window."""
    window_columns: tuple[str, str] | None = WINDOW_COLUMNS
    """The columns of the output that hold its window's start and end; None: it gets none."""
    writes_for_itself: bool = False
    """Whether ``on_window`` may return None, having written the window somewhere itself."""

    def apply(self, rows: DataFrame, window: Window) -> DataFrame | None:
        """Return the window's result; None when the pipeline wrote for itself.

        An ``async`` hook runs on an event loop of its own in this very thread, as py4j binds threads. Raises what
        the hook raises, and HandlerInvalid when it returns anything else than a DataFrame: None too, unless the
        handler says that it writes for itself.
        """
        from pyspark.sql import DataFrame  # noqa: PLC0415  # only the driver's process pays for pyspark

        result: object = rows if self.on_window is None else self.on_window(rows, window)
        if inspect.isawaitable(result):

            async def finish(awaitable: Awaitable[object]) -> object:
                return await awaitable

            result = asyncio.run(finish(result))
        if result is None and self.writes_for_itself:
            return None
        if isinstance(result, DataFrame):
            if self.check is not None:
                self.check((*result.columns, *(self.window_columns or ())))
            return result
        name = type(result).__name__
        returned = "nothing" if result is None else f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
        raise HandlerInvalid(
            f"on_window returned {returned}, not a Spark DataFrame.",
            advice="Return a DataFrame; or, where on_window writes the window somewhere itself, say so in the handler: "
            "writes_for_itself = True.",
        )


def pipeline_of(handler: Any) -> Pipeline:
    """Return the pipeline of a loaded handler: a module, an object, or a class, which is instantiated once."""
    window_columns = getattr(handler, "window_columns", WINDOW_COLUMNS)
    if getattr(handler, "on_window", None) is None:
        return Pipeline(None, window_columns=window_columns)
    target: Any = handler() if inspect.isclass(handler) else handler
    return Pipeline(
        target.on_window,
        window_columns=window_columns,
        writes_for_itself=getattr(handler, "writes_for_itself", None) is True,
    )
