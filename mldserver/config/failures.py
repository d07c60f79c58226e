"""What becomes of records by the class of their error, as the setting ``failure_rules`` says it."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from mldserver.config import kinds

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


@kinds.kind(
    "CLASS=dead_letter | skip | halt | retry | retry:N, repeated or with commas between, or a TOML table",
    lambda rules: ", ".join(map(str, rules)),
    many=True,
    metavar="CLASS=ACTION",
)
def failure_rules(raw: object) -> tuple[FailureRule, ...]:
    """``CLASS=ACTION``, repeated or with commas between them, or a TOML table."""
    if isinstance(raw, Mapping):
        items = [f"{name}={action}" for name, action in kinds.pairs.parse(raw).items()]
    elif isinstance(raw, str | list | tuple):
        texts = [raw] if isinstance(raw, str) else raw
        items = [item for text in texts for item in re.split("[,;]", str(text))]
    else:
        raise ValueError("it is no list of CLASS=ACTION")  # noqa: TRY004  # kinds promise ValueError
    rules = tuple(failure_rule(item) for item in items if item.strip())
    names = [rule.name for rule in rules]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name} has two rules")
    return rules
