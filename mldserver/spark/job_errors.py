"""What went wrong in a window's job, told for the person who wrote ``on_window``.

A failed call into Spark brings fifty lines of py4j and Java with it. What helps is the sentence of the innermost
error and the user's own frames; that is what is kept.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import traceback
from dataclasses import dataclass
from pathlib import Path

_LIMIT = 20_000
"""Characters of a message or a traceback: a query plan in an error can have megabytes."""

_LIBRARY = Path(os.__file__).parent


@dataclass(frozen=True, slots=True)
class Fault:
    """An error as it is told: class, sentence, the user's frames."""

    error: str
    message: str
    traceback: str


def describe(error: BaseException) -> Fault:
    """Return what to tell of ``error``; whatever code the user's exception has, it fails no one here."""
    name, said = type(error).__name__, message(error)
    try:
        frames = user_traceback(error)
    except Exception:  # noqa: BLE001  # a thousand causes in a row, say: better no frames than no answer
        frames = f"{name}: {said}"
    return Fault(name, said, frames)


def message(error: BaseException) -> str:
    """Return an error's text without the Java stack below it."""
    try:
        text = str.__str__(str(error))  # what a __str__ returns may be of a class with code of its own
    except BaseException:  # noqa: BLE001  # the user's __str__ may fail in any way; so does py4j's without its JVM
        text = "(its message cannot be printed)"
    # An exception raised in Java carries "\n\tat package.Class.method" lines, Spark's own a "JVM stacktrace:" part.
    for marker in ("\nJVM stacktrace:", "\n\tat ", "\nDriver stacktrace:"):
        text = text.partition(marker)[0]
    return _clip(text.strip() or type(error).__name__)


def lost_connection(error: BaseException) -> bool:
    """Whether an error, or one that it came from, may mean that the other end of a connection died."""
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        if isinstance(at, (OSError, EOFError)) or type(at).__name__ == "Py4JNetworkError":
            return True
        seen.add(id(at))
        at = at.__cause__ or at.__context__
    return False


@functools.cache
def _machinery() -> tuple[str, ...]:
    """Return how the file names of frames begin that are not the user's: a folder of theirs may be named as one of these."""
    specs = (importlib.util.find_spec(name) for name in ("pyspark", "py4j"))
    packages = (Path(spec.origin).parent for spec in specs if spec is not None and spec.origin)
    ours = (Path(__file__).parent, _LIBRARY / "concurrent" / "futures", _LIBRARY / "asyncio")
    return ("<frozen ", *(f"{folder}/" for folder in (*ours, *packages)))


def _lines(error: BaseException, seen: set[int]) -> list[str]:
    lines: list[str] = []
    seen.add(id(error))
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if before is not None and id(before) not in seen:
        earlier = _lines(before, seen)
        joint = "was the direct cause of" if error.__cause__ else "was being handled during"
        lines += [*earlier, f"\nThe error above {joint} the one below:\n\n"]
    stack = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in stack if not frame.filename.startswith(_machinery())]
    if frames:
        lines += ["Traceback (most recent call last):\n", *traceback.format_list(frames)]
    kind = type(error)
    prefix = "" if kind.__module__ in {"builtins", "__main__"} else f"{kind.__module__}."
    lines.append(f"{prefix}{kind.__name__}: {message(error)}\n")
    return lines


def user_traceback(error: BaseException) -> str:
    """Return the traceback with the user's frames only, causes first, as Python writes it."""
    return _clip("".join(_lines(error, set())).rstrip())


def _clip(text: str) -> str:
    return text if len(text) <= _LIMIT else f"{text[:_LIMIT]} … ({len(text)} characters)"
