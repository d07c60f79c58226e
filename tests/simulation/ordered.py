"""Tasks in an order of their own: a world is the same whatever was played before it in the process.

Task groups cancel in the order of a set, which goes by hashes, and a task's is where it lies in memory.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from typing import Any


class NumberedTask(asyncio.Task[Any]):
    """A task whose hash is its number."""

    def __init__(self, number: int, work: Coroutine[Any, Any, Any], **options: Any) -> None:
        self._number = number  # first: to be made is to be put into a set
        super().__init__(work, **options)

    def __hash__(self) -> int:
        return self._number


def numbered() -> Callable[..., NumberedTask]:
    """Return a task factory that counts."""
    numbers = itertools.count()

    def make(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], **options: Any) -> NumberedTask:
        return NumberedTask(next(numbers), work, loop=loop, **options)

    return make
