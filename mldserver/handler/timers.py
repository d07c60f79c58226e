"""Durable timers, as handlers set and receive them.

``timer`` marks a function of the handler's module, or a method of its class, as a callback::

    @timer
    def unpaid(due: Timer, ctx: Context):
        return ctx.key, due.payload, due.at

A record hook or another callback sets the timers of its key (``ctx.timers``). When a timer is due, the server calls its
callback between two batches of the key's shard.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from inspect import isfunction
from typing import Any, Final, TypeVar, overload

import msgspec

from mldserver.errors import NotATimer
from mldserver.windows import duration_ms

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MS: Final = timedelta(milliseconds=1)
_LAST_MS: Final = (datetime.max.replace(tzinfo=UTC) - _EPOCH) // _MS
"""The latest due time: the last millisecond that a datetime can hold."""
_MARK: Final = "__mldserver_timer__"
"""The attribute of a marked function."""
_F = TypeVar("_F", bound=Callable[..., Any])
_span_ms: Final = lru_cache(maxsize=256)(duration_ms)


def time_at(ms: int) -> datetime:
    """Return milliseconds since the Unix epoch as an aware UTC datetime."""
    return _EPOCH + timedelta(milliseconds=ms)


def ms_at(time: datetime) -> int:
    """Return an aware datetime as whole milliseconds since the Unix epoch, rounded up."""
    return -((_EPOCH - time) // _MS)


class Timer(msgspec.Struct, frozen=True):
    """A timer that was set, and what its callback receives when it is due."""

    at: datetime
    """When it is due: an aware UTC datetime in whole milliseconds."""
    payload: Any = None
    """The value that it was set with. A tuple comes back as a list."""
    name: str = ""
    """Distinguishes the timers of one key and callback."""
    attempt: int = 0
    """How many calls of this timer have failed before."""
    callback: str = ""
    """The name of the callback that it calls."""


@dataclass(frozen=True, slots=True)
class TimerMark:
    """What ``timer`` writes on a callback."""

    max_lateness_ms: int | None = None
    """A timer whose first call would be later than this after its due time is skipped; None: it is called however late."""


@overload
def timer(function: _F, /) -> _F: ...
@overload
def timer(*, max_lateness: str | float | timedelta | None = None) -> Callable[[_F], _F]: ...
def timer(
    function: Callable[..., Any] | None = None,
    /,
    *,
    max_lateness: str | float | timedelta | None = None,
) -> Callable[..., Any]:
    """Mark a function or method as a callback of timers: it is called or awaited with ``(due: Timer, ctx: Context)``.

    It returns what ``process_record`` returns. The server skips and counts a timer whose first call would come more than
    ``max_lateness`` after its due time: text (``"6 hours"``), seconds or a timedelta; None: it calls however late.

    Stored timers name their callback, so the server must find it by name. Raises NotATimer for a lambda, a
    ``functools.partial`` and a function inside another one.
    """
    mark = TimerMark(None if max_lateness is None else duration_ms(max_lateness))

    def marked(function: Callable[..., Any]) -> Callable[..., Any]:
        outer, _, name = getattr(function, "__qualname__", "").rpartition(".")
        if not isfunction(function) or name == "<lambda>" or outer.endswith("<locals>"):
            raise not_a_timer(function)
        setattr(function, _MARK, mark)
        return function

    return marked if function is None else marked(function)


def not_a_timer(callback: Any) -> NotATimer:
    """Return the error for something that cannot be a callback."""
    shown = getattr(callback, "__qualname__", None) or f"{callback!r:.100}"
    return NotATimer(
        f"{shown} is not a callback of timers.",
        advice="Mark a function of the handler's module, or a method of its class, with @timer.",
    )


def mark_of(callback: Any) -> TimerMark | None:
    """Return the mark of a function or method; None if it has none."""
    mark = getattr(callback, _MARK, None)
    return mark if isinstance(mark, TimerMark) else None


def split_id(timer_id: str) -> tuple[str, str]:
    """Return the callback and the name in the id of a timer, ``callback`` or ``callback/name``."""
    callback, _, name = timer_id.partition("/")
    return callback, name


class Timers:
    """The timers of the call's key, the earliest first; of those due at the same time, in the order they were set.

    ``set`` and ``cancel`` count when the call succeeds. This class keeps the timers of a ``Context`` that was made by hand, for
    tests of a handler. The server's contexts replace the methods whose names begin with an underscore.
    """

    __slots__ = ("_callbacks", "_held", "_now_ms")

    def __init__(self, now_ms: Callable[[], int], callbacks: Container[str] | None = None) -> None:
        """Create the timers of a call at ``now_ms()``. ``callbacks``: those that the handler has; None: unknown."""
        self._now_ms = now_ms
        self._callbacks = callbacks
        self._held: dict[str, Timer] = {}
        """By id, in the order they were set."""

    def set(
        self,
        callback: Callable[..., Any],
        *,
        at: datetime | None = None,
        after: str | float | timedelta | None = None,
        name: str = "",
        payload: Any = None,
    ) -> None:
        """Set the timer of this key, callback and name. It replaces the one that was set before.

        Give either ``at``, an aware datetime, or ``after``, a duration from ``ctx.now``: text (``"30 minutes"``), seconds or a
        timedelta. A time in the past is due at once. ``name`` has neither "/" nor NUL. ``payload`` is a value as ``ctx.state``
        takes it, at most 16 KiB.

        Raises NotATimer, TypeError and ValueError, and in the server StateTooLarge for a longer payload or more than 1,000
        timers of the key. These errors fail the call.
        """
        timer_id = self._id(callback, name)
        if (at is None) == (after is None):
            raise TypeError("ctx.timers.set takes either at=… or after=…")
        if after is not None:
            due_ms = self._now_ms() + _span_ms(after)
        elif not isinstance(at, datetime) or at.utcoffset() is None:
            raise TypeError(f"ctx.timers.set takes at=… as a datetime with a time zone, not {at!r:.100}")
        else:
            due_ms = ms_at(at)
        if due_ms > _LAST_MS:
            raise ValueError(f"a timer cannot be due after the year 9999: {at or after!r:.100}")
        self._put(timer_id, due_ms, payload)

    def cancel(self, callback: Callable[..., Any], name: str = "") -> bool:
        """Remove a timer. Return whether it was set. Raises NotATimer."""
        return self._remove(self._id(callback, name))

    def get(self, callback: Callable[..., Any], name: str = "") -> Timer | None:
        """Return the timer that is set for a callback and name, if there is one. Raises NotATimer."""
        return self._get(self._id(callback, name))

    def __iter__(self) -> Iterator[Timer]:
        return iter(sorted(self._all(), key=lambda timer: timer.at))

    def __len__(self) -> int:
        return len(self._all())

    def _id(self, callback: Any, name: str) -> str:
        """Return the id of a timer: ``callback`` or ``callback/name``."""
        if mark_of(callback) is None or (
            self._callbacks is not None and callback.__name__ not in self._callbacks
        ):
            raise not_a_timer(callback)
        called: str = callback.__name__
        if not isinstance(name, str):
            raise TypeError(f"the name of a timer is text, not {name!r:.100}")
        if not name:
            return called
        if "/" in name or "\0" in name:
            raise ValueError(f"the name of a timer has neither '/' nor NUL: {name!r:.100}")
        return f"{called}/{name}"

    def _put(self, timer_id: str, due_ms: int, payload: Any) -> None:
        """Set a timer, after those that are set."""
        callback, name = split_id(timer_id)
        self._held.pop(timer_id, None)
        self._held[timer_id] = Timer(time_at(due_ms), payload, name, callback=callback)

    def _remove(self, timer_id: str) -> bool:
        """Remove a timer; return whether it was set."""
        return self._held.pop(timer_id, None) is not None

    def _get(self, timer_id: str) -> Timer | None:
        """Return a timer that is set."""
        return self._held.get(timer_id)

    def _all(self) -> list[Timer]:
        """Return the timers in the order they were set."""
        return list(self._held.values())
