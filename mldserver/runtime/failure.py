"""What a failure is, and what a pipeline's policy makes of it. Pure: no clock, no randomness, no I/O.

Of each failed call the policy says whether the record is called again, and if not, how it ends. In this order:

1. ``Discard`` was raised: no row, no dead letter.
2. A rule for the error's class (or the nearest of its bases that has one) names an end: that end, at once.
3. ``Fatal`` was raised: the end that ``on_failure`` names, at once.
4. The record is older than ``max_age``, or was called ``attempts`` times (a rule may give another number): likewise.
5. Otherwise it is called again, after the back-off, or after what ``Retry(after=…)`` says.
"""

from __future__ import annotations

import enum
import math
import re
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mldserver.runtime.control import Discard, Fatal, Retry, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType

__all__ = [
    "Ending",
    "Failure",
    "FailurePolicy",
    "FailureRule",
    "OnFailure",
    "OnKeyFailure",
    "Wish",
    "bad_row",
    "describe",
    "failure_rule",
    "printed",
]

_MESSAGE_LIMIT = 10_000
_TRACEBACK_LIMIT = 20_000
_OWN_FOLDER = str(Path(__file__).parent)
_IDENTIFIER: Final = r"[^\W\d]\w*"
_CLASS_NAME = re.compile(rf"{_IDENTIFIER}(\.{_IDENTIFIER})*")
_RETRY = re.compile(r"retry(?::(?P<attempts>[1-9]\d{0,8}))?")


class OnFailure(enum.StrEnum):
    """What becomes of a record that failed for good."""

    DEAD_LETTER = "dead_letter"
    """It is stored with its error, and the shard goes on."""
    SKIP = "skip"
    """It is counted and logged, nothing of it is kept, and the shard goes on."""
    HALT = "halt"
    """The shard's connection is closed on purpose."""


class OnKeyFailure(enum.StrEnum):
    """What becomes of the later records of a partition key, once one of its records is a dead letter."""

    CONTINUE = "continue"
    """They are processed."""
    PARK = "park"
    """They become dead letters too, without a call, so that none overtakes."""


class Ending(enum.StrEnum):
    """How a record can end that has no rows."""

    DEAD_LETTER = "dead_letter"
    SKIP = "skip"
    HALT = "halt"
    DISCARD = "discard"


class Wish(enum.StrEnum):
    """What the handler asked for, by the exception that it raised."""

    RETRY = "retry"
    DISCARD = "discard"
    FATAL = "fatal"


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a call failed."""

    error: str
    """``ExceptionType: message``."""
    traceback: str = ""
    """The user's part of it; empty when the server refused what was returned."""
    names: tuple[str, ...] = ()
    """The dotted names of the error's class and of its bases, nearest first: what rules are held against."""
    wish: Wish | None = None
    after_seconds: float | None = None
    """With RETRY: how long to wait; None: as long as the back-off says."""
    records: tuple[Any, ...] | None = None
    """With DISCARD and FATAL: the records that are meant, as the handler named them; None: all of the call."""


def bad_row(text: str) -> Failure:
    """Return the failure of a record whose row the schema refuses."""
    return Failure(f"BadRow: {text}", names=("BadRow",))


@dataclass(frozen=True, slots=True)
class FailureRule:
    """What to do about errors of one class."""

    name: str
    """A class's name (``KeyError``), or a dotted one (``requests.Timeout``): its name and how its module begins."""
    on_failure: OnFailure | None = None
    """How the record ends, without further attempts; None: it is called again."""
    attempts: int | None = None
    """Calls in all; None: as many as the policy says."""

    def __post_init__(self) -> None:
        """Refuse with ValueError what no class can be named, and impossible numbers."""
        if not _CLASS_NAME.fullmatch(self.name):
            raise ValueError(f"{self.name!r} is no name of a class")
        if self.attempts is not None and (self.attempts < 1 or self.on_failure is not None):
            raise ValueError("attempts must be at least 1, and are only for errors that are tried again")

    def __str__(self) -> str:
        """Return the rule as ``failure_rule`` reads it: ``name=action``."""
        retry = "retry" if self.attempts is None else f"retry:{self.attempts}"
        return f"{self.name}={self.on_failure or retry}"

    def matches(self, dotted: str) -> bool:
        """Whether the rule is about a class of this full dotted name."""
        prefix, _, last = self.name.rpartition(".")
        return dotted.rpartition(".")[2] == last and (not prefix or dotted.startswith(f"{prefix}."))


def failure_rule(text: str) -> FailureRule:
    """Read ``CLASS=dead_letter | skip | halt | retry | retry:N``. Raises ValueError."""
    name, equals, action = (part.strip() for part in text.partition("="))
    retry = _RETRY.fullmatch(action)
    if not equals or (retry is None and action not in list(OnFailure)):
        raise ValueError(f"{text.strip()!r} is not CLASS=dead_letter, skip, halt, retry or retry:N")
    if retry is None:
        return FailureRule(name, OnFailure(action))
    return FailureRule(name, attempts=int(retry["attempts"]) if retry["attempts"] else None)


@dataclass(frozen=True, slots=True)
class FailurePolicy:
    """How often, how fast, and what then. Plain values only: it travels to worker processes."""

    attempts: int = 3
    """Calls in all, at least 1."""
    base_seconds: float = 0.1
    cap_seconds: float = 10.0
    on_failure: OnFailure = OnFailure.DEAD_LETTER
    max_age_ms: int | None = None
    """A failed record that arrived (``approximateArrivalTimestamp``; in V1 its receipt) so long ago is not called
    again. Every record is called once, however old it is."""
    rules: tuple[FailureRule, ...] = ()
    on_key_failure: OnKeyFailure = OnKeyFailure.CONTINUE
    max_ahead_ms: int | None = None
    """A row whose time runs further ahead of its record's arrival is a bad one; None: none is because of that."""

    def __post_init__(self) -> None:
        """Refuse impossible values with ValueError."""
        if self.attempts < 1:
            raise ValueError("attempts must be at least 1")
        if not 0 <= self.base_seconds <= self.cap_seconds:
            raise ValueError("the back-off's base must lie between 0 and its cap")
        if self.max_age_ms is not None and self.max_age_ms < 1:
            raise ValueError("the maximal age must be at least 1 ms")
        if len({rule.name for rule in self.rules}) < len(self.rules):
            raise ValueError("a class must not have two rules")

    @property
    def parks(self) -> bool:
        """Whether records wait behind dead letters of their key."""
        return self.on_key_failure is OnKeyFailure.PARK

    def redriving(self) -> FailurePolicy:
        """Return the policy for dead letters that run once more: none is skipped, and none stops its shard."""
        kept = (OnFailure.SKIP, OnFailure.HALT)
        rules = tuple(
            replace(rule, on_failure=OnFailure.DEAD_LETTER) if rule.on_failure in kept else rule
            for rule in self.rules
        )
        return replace(self, on_failure=OnFailure.DEAD_LETTER, rules=rules)

    def delay(self, failures: int, random: float) -> float:
        """Return the seconds to wait after so many ``failures`` in a row; ``random`` lies in [0, 1).

        Doubles from the base to the cap; jitter takes away up to half, so that shards do not retry in step.
        """
        span = min(self.cap_seconds, self.base_seconds * 2.0 ** min(failures - 1, 60))
        return span * (0.5 + random / 2)

    def ending(self, failure: Failure, *, calls: int, age_ms: int) -> Ending | None:
        """Return how a record ends whose ``calls`` so far have all failed, now with ``failure``; None: call it again."""
        if failure.wish is Wish.DISCARD:
            return Ending.DISCARD
        rule = self.rule_for(failure.names)
        if rule is not None and rule.on_failure is not None:
            return Ending(rule.on_failure)
        attempts = self.attempts if rule is None or rule.attempts is None else rule.attempts
        too_old = self.max_age_ms is not None and age_ms >= self.max_age_ms
        if failure.wish is Wish.FATAL or calls >= attempts or too_old:
            return Ending(self.on_failure)
        return None

    def rule_for(self, names: Iterable[str]) -> FailureRule | None:
        """Return the rule of the nearest class; of two that name the same class, the one that says more of it."""
        for dotted in names:
            found = [rule for rule in self.rules if rule.matches(dotted)]
            if found:
                return max(found, key=lambda rule: rule.name.count("."))
        return None


def describe(error: BaseException) -> Failure:
    """Return an error of the user's code as text: its own frames only, bounded. Never fails, whatever the error's code does."""
    name = _of_class(type(error), "__qualname__")
    message = printed(error)
    told = f"{name}: {message}" if message else name
    try:
        rendered = traceback.TracebackException(
            type(error), error, _users_part(error.__traceback__), compact=True
        )
        text = _middle_cut("".join(map(_middle_cut, rendered.format())))
    except BaseException:  # noqa: BLE001  # the user's exception may fail in any way; its name is better than nothing
        text = f"{told}\n"
    names = tuple(
        f"{_of_class(cls, '__module__')}.{_of_class(cls, '__qualname__')}"
        for cls in type.mro(type(error))[:-1]
    )
    if not isinstance(error, Verdict):
        return Failure(told, text, names)
    return Failure(told, text, names, _wish(error), _after(error), _records(error))


def printed(value: object) -> str:
    """Return ``str`` of anything of the user's, bounded, even of what fails to print itself."""
    try:
        text = str.__str__(str(value))  # what a __str__ returns may be of a class with code of its own
    except BaseException:  # noqa: BLE001  # it may fail in any way
        return "(its message cannot be printed)"
    cut = len(text) - _MESSAGE_LIMIT
    return text if cut <= 0 else f"{text[:_MESSAGE_LIMIT]}… ({cut} more characters)"


def _middle_cut(text: str) -> str:
    half = _TRACEBACK_LIMIT // 2
    return text if len(text) <= _TRACEBACK_LIMIT else f"{text[:half]}\n…\n{text[-half:]}"


def _of_class(cls: type, name: str) -> str:
    try:
        return str(getattr(cls, name))
    except BaseException:  # noqa: BLE001  # metaclasses have code too
        return "(a class without a name)"


def _wish(error: Verdict) -> Wish | None:
    for kind, wish in ((Retry, Wish.RETRY), (Discard, Wish.DISCARD), (Fatal, Wish.FATAL)):
        if isinstance(error, kind):
            return wish
    return None


def _after(error: Verdict) -> float | None:
    """Return how long to wait; None when a subclass holds something else than a number of seconds there."""
    try:
        after = error.after if isinstance(error, Retry) else None
        return None if after is None or not 0 <= after < math.inf else float(after)
    except BaseException:  # noqa: BLE001  # subclasses have code too
        return None


def _records(error: Verdict) -> tuple[Any, ...] | None:
    """Return which records are meant; None when a subclass holds something else than some of them there."""
    try:
        records = error.records
        return None if records is None else tuple(records)
    except BaseException:  # noqa: BLE001  # see above
        return None


def _users_part(tb: TracebackType | None) -> TracebackType | None:
    """Skip the server's own frames at the top; keep all when there are no others."""
    place = tb
    while place is not None:
        if not place.tb_frame.f_code.co_filename.startswith(_OWN_FOLDER):
            return place
        place = place.tb_next
    return tb
