"""What a failure of the user's code is: the error as text, and what it asks for. Pure."""

from __future__ import annotations

import enum
import math
import os
import re
import traceback
from collections.abc import Callable, Hashable
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any, Final, TypeVar

import msgspec

from mldserver.errors import without_messages
from mldserver.records import Discard, Fatal, Retry, Verdict

T = TypeVar("T")

_MESSAGE_LIMIT = 10_000
_TRACEBACK_LIMIT = 20_000
_REMEMBERED: Final = 1_000
"""How many tracebacks are remembered. Rendering others takes longer."""
_VALUES: Final = re.compile(r"""'[^']*'|"[^"]*"|\d+""")
"""The parts of a message that differ between refused rows."""
_OWN_FOLDER = f"{Path(__file__).parents[1]}{os.sep}"


class Requested(enum.StrEnum):
    """What the handler asked for, by the exception that it raised."""

    RETRY = "retry"
    DISCARD = "discard"
    FATAL = "fatal"


_REQUESTED: Final = {Retry: Requested.RETRY, Discard: Requested.DISCARD, Fatal: Requested.FATAL}


class Failure(msgspec.Struct, frozen=True):
    """Why a call failed."""

    error: str
    """``ExceptionType: message``."""
    traceback: str = ""
    """The user's frames only; empty when the server refused the returned value."""
    names: tuple[str, ...] = ()
    """The dotted names of the error's class and of its bases, nearest first: failure rules match them."""
    requested: Requested | None = None
    after_seconds: float | None = None
    """With RETRY: seconds to wait; None: as long as the back-off."""
    records: tuple[Any, ...] | None = None
    """With DISCARD and FATAL: the affected records, as the handler named them; None: all of the call."""
    frames: str = ""
    """The part of the traceback that is the same whenever the error is raised in the same place."""
    whole_call: bool = False
    """The handler's code is at fault, not a record: every record of the call fails with it, and none is searched."""
    quotes_nothing: bool = False
    """``error`` is the server's own sentence, without values of records: it is always logged."""

    @property
    def fingerprint(self) -> Hashable:
        """Equal for failures of one class in one place, or with one message apart from values."""
        return self.names[:1], self.frames or _VALUES.sub("", self.error)

    def logged(self, *, messages: bool) -> dict[str, str]:
        """Return the failure as fields of the log.

        ``Retry`` and ``Discard`` are raised on purpose: they have no traceback there. ``messages``: whether the log may
        quote error messages.
        """
        shown = self.traceback and self.requested not in {Requested.RETRY, Requested.DISCARD}
        told = {"what": self.error, **({"traceback": self.traceback} if shown else {})}
        if messages:
            return told
        return {
            name: text if self.quotes_nothing and name == "what" else without_messages(text)
            for name, text in told.items()
        }


def bad_row(text: str) -> Failure:
    """Return the failure of a record whose row the schema refuses."""
    return Failure(f"BadRow: {text}", names=("BadRow",))


_frames: dict[tuple[int, ...], tuple[str, list[CodeType]]] = {}
"""Tracebacks without their last line, by the ids of their code (kept alive here) and the places in it. To render one takes
longer than most handlers do: a stream of errors would take all the time."""


def describe(error: BaseException) -> Failure:
    """Return an error of the user's code as text: its own frames only, bounded. Never fails, whatever the error's code does."""
    cls, frames = type(error), ""
    names = tuple(
        f"{_of_class(base, '__module__')}.{_of_class(base, '__qualname__')}" for base in type.mro(cls)[:-1]
    )
    message = printed(error)
    summary = ": ".join(filter(None, (_of_class(cls, "__qualname__"), message)))
    try:
        # Skip the server's frames at the top, unless all frames are the server's.
        place = error.__traceback__
        while place is not None and place.tb_frame.f_code.co_filename.startswith(_OWN_FOLDER):
            place = place.tb_next
        place = place or error.__traceback__
        frames = _frames_of(place)
        caused = error.__cause__ or (error.__context__ and not error.__suppress_context__)
        if caused or isinstance(error, SyntaxError | BaseExceptionGroup) or hasattr(error, "__notes__"):
            lines = traceback.TracebackException(cls, error, place, compact=True).format()
            text = _middle_cut("".join(map(_middle_cut, lines)))
        else:
            shown = names[0].removeprefix("builtins.").removeprefix("__main__.")
            text = _middle_cut(f"{frames}{': '.join(filter(None, (shown, message)))}\n")
    except BaseException:  # noqa: BLE001  # the user's exception may fail in any way; its name is better than nothing
        text = f"{summary}\n"
    if not isinstance(error, Verdict):
        return Failure(summary, text, names, frames=frames)
    requested = next((each for kind, each in _REQUESTED.items() if isinstance(error, kind)), None)
    # A subclass may hold something else there than a number of seconds, or some of the records.
    after = _safely(lambda: _after(error), None)
    records = _safely(lambda: None if error.records is None else tuple(error.records), None)
    return Failure(summary, text, names, requested, after, records, frames)


def _frames_of(place: TracebackType | None) -> str:
    key, codes = [], []
    entry = place
    while entry is not None:
        code = entry.tb_frame.f_code
        codes.append(code)
        key += [id(code), entry.tb_lasti]
        entry = entry.tb_next
    if not codes:
        return ""
    known = _frames.get(tuple(key))
    if known is None:
        text = "Traceback (most recent call last):\n" + "".join(traceback.format_tb(place))
        if len(_frames) >= _REMEMBERED:
            _frames.clear()
        known = _frames[tuple(key)] = (_middle_cut(text), codes)
    return known[0]


def printed(value: object) -> str:
    """Return ``str`` of a user's value, bounded, even if its ``__str__`` fails."""
    # __str__ may return an instance of a str subclass, which may override methods.
    text = _safely(lambda: str.__str__(str(value)), "(its message cannot be printed)")
    cut = len(text) - _MESSAGE_LIMIT
    return text if cut <= 0 else f"{text[:_MESSAGE_LIMIT]}… ({cut} more characters)"


def _middle_cut(text: str) -> str:
    half = _TRACEBACK_LIMIT // 2
    return text if len(text) <= _TRACEBACK_LIMIT else f"{text[:half]}\n…\n{text[-half:]}"


def _of_class(cls: type, name: str) -> str:
    return _safely(lambda: str(getattr(cls, name)), "(a class without a name)")


def _after(error: Verdict) -> float | None:
    after = error.after if isinstance(error, Retry) else None
    return None if after is None or not 0 <= after < math.inf else float(after)


def _safely(read: Callable[[], T], otherwise: T) -> T:
    """Return ``read()``, or ``otherwise`` if it raises.

    It reads a user's object, whose class (and metaclass) may have code that fails in any way.
    """
    try:
        return read()
    except BaseException:  # noqa: BLE001  # see above
        return otherwise
