"""Failures, and how a pipeline's policy ends them. Pure: no clock, no randomness, no I/O.

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
from dataclasses import dataclass, replace
from typing import Final

from mldserver.base.backoff import backoff
from mldserver.config.kinds import FailureRule, OnFailure, OnKeyFailure, failure_rule
from mldserver.config.settings import FailureSettings
from mldserver.handler.failure import Failure, Requested

__all__ = ["FailureRule", "OnFailure", "OnKeyFailure", "failure_rule"]  # what a policy is made of

REPEATING: Final = frozenset(
    {
        *(
            f"builtins.{name}"
            for name in ("ArithmeticError", "AssertionError", "AttributeError", "LookupError")
        ),
        *(f"builtins.{name}" for name in ("NameError", "NotImplementedError", "TypeError", "ValueError")),
        # Decoding errors that are not ValueErrors (those of UTF-8, base64, JSON and Arrow are).
        *("builtins.SyntaxError", "_csv.Error", "struct.error", "zlib.error", "gzip.BadGzipFile"),
        *("_pickle.UnpicklingError", "msgspec.MsgspecError", "google.protobuf.message.DecodeError"),
        *("BadRow", "BadRows"),
        # Of StateFull there may be less later.
        *(f"mldserver.errors.{name}" for name in ("KeyElsewhere", "NoKey", "NotATimer", "StateTooLarge")),
    }
)
"""Errors that the same record raises again: of data and of code. A call that raises one of them, or of a class
derived from them, is not repeated unless a rule says so. An ``OSError`` never counts, even if it has such a base: a
service that answers with an error page instead of JSON (``requests.JSONDecodeError``) may succeed next time."""

_OSERROR: Final = "builtins.OSError"

_LONGEST_WAIT_SECONDS: Final = 10.0
"""Between two calls, unless ``retry_base`` is longer: the shard waits meanwhile, and a lease must not expire."""


class Ending(enum.StrEnum):
    """How a record can end that has no rows."""

    DEAD_LETTER = "dead_letter"
    SKIP = "skip"
    HALT = "halt"
    DISCARD = "discard"
    AGAIN = "again"
    """A timer that is set again, after a back-off; never an end that a policy names."""


@dataclass(frozen=True, kw_only=True)
class FailurePolicy(FailureSettings):
    """How often, how fast, and what then. Plain values only: it travels to worker processes."""

    max_ahead_ms: int | None = None
    """A row whose time runs further ahead of its record's arrival is a bad one; None: none is because of that."""
    log_error_messages: bool = True
    """Whether logs quote what the handler's errors say (``LogSettings``)."""

    @property
    def parks(self) -> bool:
        """Whether records wait behind dead letters of their key."""
        return self.on_key_failure is OnKeyFailure.PARK

    def redriving(self) -> FailurePolicy:
        """Return the policy for dead letters that run once more: none is skipped, and none stops its shard."""
        return self._keeping(OnFailure.SKIP, OnFailure.HALT)

    def firing(self) -> FailurePolicy:
        """Return the policy for timers: none stops its shard."""
        return self._keeping(OnFailure.HALT)

    def _keeping(self, *ends: OnFailure) -> FailurePolicy:
        """Return the policy with dead letters instead of these ends."""
        rules = tuple(
            replace(rule, on_failure=OnFailure.DEAD_LETTER) if rule.on_failure in ends else rule
            for rule in self.failure_rules
        )
        on_failure = OnFailure.DEAD_LETTER if self.on_failure in ends else self.on_failure
        return replace(self, on_failure=on_failure, failure_rules=rules)

    def delay(self, failures: int, random: float) -> float:
        """Return the seconds to wait after so many ``failures`` in a row; ``random`` lies in [0, 1)."""
        base = self.retry_base_seconds
        return backoff(failures, base, max(base, _LONGEST_WAIT_SECONDS), random)

    def ending(self, failure: Failure, *, calls: int, age_ms: int) -> Ending | None:
        """Return how a record ends whose ``calls`` so far have all failed, now with ``failure``; None: call it again."""
        if failure.requested is Requested.DISCARD:
            return Ending.DISCARD
        rule = None
        for dotted in failure.names if self.failure_rules else ():
            # The nearest class; of two rules that name the same class, the one with the longer dotted name.
            about = [each for each in self.failure_rules if each.matches(dotted)]
            if about:
                rule = max(about, key=lambda each: each.name.count("."))
                break
        if rule is not None and rule.on_failure is not None:
            return Ending(rule.on_failure)
        if rule is not None and rule.attempts is not None:
            attempts = rule.attempts
        else:
            nearest = next(
                (name for name in failure.names if name in REPEATING or name == _OSERROR), _OSERROR
            )
            hopeless = rule is None and failure.requested is None and nearest != _OSERROR
            attempts = 1 if hopeless else self.attempts
        too_old = self.max_age_ms is not None and age_ms >= self.max_age_ms
        if failure.requested is Requested.FATAL or calls >= attempts or too_old:
            return Ending(self.on_failure)
        return None
