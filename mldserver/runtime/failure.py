"""What a failure is, and what a pipeline's policy makes of it. Pure: no clock, no randomness, no I/O.

Of each failed call the policy says whether the record is called again, and if not, how it ends. In this order:

1. ``Discard`` was raised: no row, no dead letter.
2. A rule for the error's class (or the nearest of its bases that has one) names an end: that end, at once.
3. ``Fatal`` was raised: the end that ``on_failure`` names, at once.
4. The error repeats by its nature (``REPEATING``) and no rule is about it: likewise.
5. The record is older than ``max_age``, or was called ``attempts`` times (a rule may give another number): likewise.
6. Otherwise it is called again, after the back-off, or after what ``Retry(after=…)`` says.
"""

from __future__ import annotations

import enum
import functools
import math
import re
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from mldserver.runtime.control import Discard, Fatal, Retry, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator
    from types import CodeType, TracebackType

__all__ = [
    "REPEATING",
    "Ending",
    "Failure",
    "FailurePolicy",
    "FailureRule",
    "OnFailure",
    "OnKeyFailure",
    "Told",
    "Wish",
    "bad_row",
    "describe",
    "failure_rule",
    "printed",
]

REPEATING: Final = frozenset(
    {
        *(
            f"builtins.{name}"
            for name in ("ArithmeticError", "AssertionError", "AttributeError", "LookupError")
        ),
        *(f"builtins.{name}" for name in ("NameError", "NotImplementedError", "TypeError", "ValueError")),
        # Decoding errors, where they are no ValueError as those of UTF-8, base64, JSON and Arrow are.
        *("builtins.SyntaxError", "_csv.Error", "struct.error", "zlib.error", "gzip.BadGzipFile"),
        *("_pickle.UnpicklingError", "msgspec.MsgspecError", "google.protobuf.message.DecodeError"),
        *("BadRow", "BadRows"),
    }
)
"""Errors that the same record raises again: of data and of code. A call that ends with one of them, or of a class
derived from them, is not made again unless a rule says so. An ``OSError`` is none, whatever else it is: a service that
answers with an error page instead of JSON (``requests.JSONDecodeError``) may do better next time."""

_OSERROR: Final = "builtins.OSError"
_MESSAGE_LIMIT = 10_000
_TRACEBACK_LIMIT = 20_000
_REMEMBERED: Final = 1_000
"""Classes, places and failures that are remembered, each; what is beyond costs time or a line, nothing else."""
_TOLD_EVERY_MS: Final = 60_000
_VALUES: Final = re.compile(r"""'[^']*'|"[^"]*"|\d+""")
"""What differs from one refused row to the next."""
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


class Failure(msgspec.Struct, frozen=True):
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
    frames: str = ""
    """The part of the traceback that is the same whenever the error is raised in the same place."""

    @property
    def fingerprint(self) -> Hashable:
        """What failures have in common that a person would call the same."""
        return self.names[:1], self.frames or _VALUES.sub("", self.error)

    @property
    def logged(self) -> dict[str, str]:
        """Return it as fields of the log; what was raised on purpose (``Retry``, ``Discard``) has no traceback there."""
        shown = self.traceback and self.wish not in {Wish.RETRY, Wish.DISCARD}
        return {"what": self.error, **({"traceback": self.traceback} if shown else {})}


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
        if rule is not None and rule.attempts is not None:
            attempts = rule.attempts
        else:
            hopeless = rule is None and failure.wish is None and _repeats(failure.names)
            attempts = 1 if hopeless else self.attempts
        too_old = self.max_age_ms is not None and age_ms >= self.max_age_ms
        if failure.wish is Wish.FATAL or calls >= attempts or too_old:
            return Ending(self.on_failure)
        return None

    def rule_for(self, names: Iterable[str]) -> FailureRule | None:
        """Return the rule of the nearest class; of two that name the same class, the one that says more of it."""
        for dotted in names if self.rules else ():
            found = [rule for rule in self.rules if rule.matches(dotted)]
            if found:
                return max(found, key=lambda rule: rule.name.count("."))
        return None


@functools.lru_cache(maxsize=256)
def _repeats(names: tuple[str, ...]) -> bool:
    nearest = next((name for name in names if name in REPEATING or name == _OSERROR), _OSERROR)
    return nearest != _OSERROR


class Told:
    """Which failures the log has told of: the same one is told once a minute, and counted meanwhile."""

    def __init__(self, now_ms: Callable[[], int], *, most: int = _REMEMBERED) -> None:
        """Measure time by ``now_ms``; beyond ``most`` failures the one that was not seen for longest is forgotten."""
        self._now_ms = now_ms
        self._most = most
        self._seen: dict[Hashable, tuple[int, int]] = {}
        """Of each failure: when it was told, and how often it has come since."""

    def times(self, failure: Hashable) -> int:
        """Return how often it has come since it was last told, now included; 0: it is not to be told yet."""
        now_ms = self._now_ms()
        told_ms, since = self._seen.pop(failure, (now_ms - _TOLD_EVERY_MS, 0))
        due = now_ms - told_ms >= _TOLD_EVERY_MS
        self._seen[failure] = (now_ms, 0) if due else (told_ms, since + 1)
        if len(self._seen) > self._most:
            del self._seen[next(iter(self._seen))]
        return since + 1 if due else 0


class _Class(NamedTuple):
    """What is told of a class of errors. It keeps the class alive, so that its id stays its own."""

    cls: type
    name: str
    shown: str
    """As in a traceback's last line."""
    names: tuple[str, ...]


_classes: dict[int, _Class] = {}
_frames: dict[tuple[int, ...], tuple[str, list[CodeType]]] = {}
"""Tracebacks without their last line, by the ids of their code (kept alive here) and the places in it. To render one takes
longer than most handlers do: under a stream of errors nothing else would happen."""


def describe(error: BaseException) -> Failure:
    """Return an error of the user's code as text: its own frames only, bounded. Never fails, whatever the error's code does."""
    cls, frames = _class_of(error), ""
    message = printed(error)
    told = f"{cls.name}: {message}" if message else cls.name
    try:
        place = _users_part(error.__traceback__)
        frames = _frames_of(place)
        if _is_plain(error):
            text = _middle_cut(frames + _last_line(cls, message))
        else:
            text = _middle_cut("".join(map(_middle_cut, _rendered(error, place, frames))))
    except BaseException:  # noqa: BLE001  # the user's exception may fail in any way; its name is better than nothing
        text = f"{told}\n"
    if not isinstance(error, Verdict):
        return Failure(told, text, cls.names, frames=frames)
    return Failure(told, text, cls.names, _wish(error), _after(error), _records(error), frames)


def _class_of(error: BaseException) -> _Class:
    cls = type(error)
    known = _classes.get(id(cls))
    if known is None:
        names = tuple(
            f"{_of_class(base, '__module__')}.{_of_class(base, '__qualname__')}"
            for base in type.mro(cls)[:-1]
        )
        shown = names[0].removeprefix("builtins.").removeprefix("__main__.")
        known = _Class(cls, _of_class(cls, "__qualname__"), shown, names)
        if len(_classes) >= _REMEMBERED:
            _classes.clear()
        _classes[id(cls)] = known
    return known


def _rendered(error: BaseException, place: TracebackType | None, frames: str) -> Iterator[str]:
    """Yield what ``traceback`` would, causes first, but from what is remembered of places."""
    chain: list[tuple[BaseException, TracebackType | None, str, str]] = []
    seen: set[int] = set()
    link = ""
    while True:
        seen.add(id(error))
        chain.append((error, place, frames, link))
        if _is_special(error):
            break  # it is rendered with what caused it
        if (cause := error.__cause__) is not None:
            link = _CAUSE
        elif (cause := error.__context__) is not None and not error.__suppress_context__:
            link = _CONTEXT
        else:
            break
        if id(cause) in seen:
            break
        error, place = cause, cause.__traceback__
        frames = _frames_of(place)
    for error, place, frames, link in reversed(chain):
        if _is_special(error):
            yield from traceback.TracebackException(type(error), error, place, compact=True).format()
        else:
            yield frames
            yield _last_line(_class_of(error), printed(error))
        yield link


_CAUSE: Final = "\nThe above exception was the direct cause of the following exception:\n\n"
_CONTEXT: Final = "\nDuring handling of the above exception, another exception occurred:\n\n"


def _last_line(cls: _Class, message: str) -> str:
    return f"{cls.shown}: {message}\n" if message else f"{cls.shown}\n"


def _is_plain(error: BaseException) -> bool:
    """Whether frames and a message are all that is to be told of an error."""
    caused = error.__cause__ or (error.__context__ and not error.__suppress_context__)
    return not caused and not _is_special(error)


def _is_special(error: BaseException) -> bool:
    """Whether there is more to tell of an error than its frames and its message."""
    return isinstance(error, SyntaxError | BaseExceptionGroup) or hasattr(error, "__notes__")


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
