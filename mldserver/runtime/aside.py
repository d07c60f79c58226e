"""One blocking call beside the event loop that may hang for ever without holding up anything but its caller."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from mldserver.runtime.thread import WorkerThread

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["aside"]

_T = TypeVar("_T")


async def aside(function: Callable[[], _T], *, name: str) -> _T:
    """Return what ``function`` returns (or raise what it raises), called on a daemon thread of its own, called ``name``.

    Unlike a thread of the loop's executor, which the loop joins when it ends, one that hangs is left behind: when the
    caller is cancelled, the loop and the process can end. For calls that are made once, and whose effects may come late.
    """
    worker = WorkerThread(name)
    worker.start()
    try:
        return await worker.run(function)
    finally:
        await worker.close(0)
