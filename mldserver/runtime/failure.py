"""What happens when a handler fails: a synchronous core that only decides.

The shell asks the plan for the next call (``BatchPlan.step``), makes it, and tells what came of it. The rules:

* One record a call (``process_record``): the failing record alone is called again, up to ``attempts`` times; then it
  is a dead letter and the plan goes on behind it. The handler never sees a later record before that is decided.
* A whole batch a call (``process_records``, ``process_table``): the batch is called again up to ``attempts`` times,
  then halved and halved again until the failing records stand alone. A part that succeeds is done: no record is
  processed successfully twice because of another one, once the halving has begun.
* Rows that cannot be taken (a value of a wrong type) name their records: the others are done at once, only the
  records at fault are called again, then they are dead letters.
* Under the policy ``halt`` nothing is halved and nothing becomes a dead letter: the first failure that would,
  stops the shard.
"""

from __future__ import annotations

import enum
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

__all__ = ["BatchPlan", "Dead", "Failure", "FailurePolicy", "OnFailure", "Retry", "Step", "describe"]

_TRACEBACK_LIMIT = 20_000
_OWN_FOLDER = str(Path(__file__).parent)


class OnFailure(enum.StrEnum):
    """What becomes of a record that failed for good."""

    DEAD_LETTER = "dead_letter"
    """It is stored with its error, and the shard goes on."""
    HALT = "halt"
    """The shard's connection is closed on purpose."""


@dataclass(frozen=True, slots=True)
class FailurePolicy:
    """How often, how fast, and what then."""

    attempts: int = 3
    """Calls in all, at least 1."""
    base_seconds: float = 0.1
    cap_seconds: float = 10.0
    on_failure: OnFailure = OnFailure.DEAD_LETTER

    def __post_init__(self) -> None:
        """Refuse impossible numbers with ValueError."""
        if self.attempts < 1:
            raise ValueError("attempts must be at least 1")
        if not 0 <= self.base_seconds <= self.cap_seconds:
            raise ValueError("the back-off's base must lie between 0 and its cap")

    def delay(self, failures: int, random: float) -> float:
        """Return the seconds to wait after so many ``failures`` in a row; ``random`` lies in [0, 1).

        Doubles from the base to the cap; jitter takes away up to half, so that shards do not retry in step.
        """
        span = min(self.cap_seconds, self.base_seconds * 2.0 ** min(failures - 1, 60))
        return span * (0.5 + random / 2)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a call failed."""

    error: str
    """``ExceptionType: message``."""
    traceback: str = ""
    """The user's part of it; empty when the server refused what was returned."""


@dataclass(frozen=True, slots=True)
class Step:
    """The next call: for these records of the batch, in this order."""

    indices: Sequence[int]
    failures: int = 0
    """How often the call has failed before."""
    delayed: bool = False
    """True when the call is to wait for the back-off of ``failures``."""
    halved: bool = False


@dataclass(frozen=True, slots=True)
class Retry:
    """A failure that will be tried again."""

    index: int
    """The failing record, or the first of the failing part."""
    failure: Failure
    attempt: int
    """Which call failed, from 1."""


@dataclass(frozen=True, slots=True)
class Dead:
    """A record that failed for good."""

    failure: Failure
    attempts: int
    """Calls that it was part of and that failed."""


@dataclass(slots=True)
class BatchPlan:
    """Decides, for one batch, what is called next and what becomes of failures."""

    count: int
    policy: FailurePolicy
    dead: dict[int, Dead] = field(default_factory=dict)
    halted: Retry | None = None
    """Under ``halt``: the failure that ends it all."""
    _todo: list[Step] = field(default_factory=list)
    _calls: dict[int, int] = field(default_factory=dict)
    """Failed calls of each record that has any."""

    def __post_init__(self) -> None:
        """Begin with one call for all records."""
        if self.count:
            self._todo.append(Step(range(self.count)))

    @property
    def attempts(self) -> int:
        """The most calls that any record took: its failed ones, and the one that succeeded unless it is dead."""
        return max((calls + (index not in self.dead) for index, calls in self._calls.items()), default=1)

    def step(self) -> Step | None:
        """Take the next call out of the plan; None when every record is decided, or the policy stops."""
        return self._todo.pop() if self._todo and self.halted is None else None

    def condemn(self, faults: Mapping[int, Failure]) -> None:
        """Records that cannot be called at all are dead (or halt) before the first call."""
        self._todo = [Step([index for index in range(self.count) if index not in faults])]
        if len(faults) == self.count:
            self._todo.clear()
        for index, failure in faults.items():
            self._count((index,))
            self._give_up(index, failure)

    def failed_at(self, step: Step, place: int, failure: Failure) -> Retry | None:
        """The call for one record of a step failed; those before it are done, those behind it were not called.

        Returns what will be tried again, or None when the record is dead (or the policy halts).
        """
        rest = step.indices[place + 1 :]
        if rest:
            self._todo.append(Step(rest, step.failures))
        return self.failed(Step(step.indices[place : place + 1], step.failures), failure)

    def failed(self, step: Step, failure: Failure) -> Retry | None:
        """A call for all records of a step failed as a whole.

        Returns what will be tried again (the step, or its halves), or None when its one record is dead (or the
        policy halts).
        """
        self._count(step.indices)
        first, failures = step.indices[0], step.failures + 1
        retry = Retry(first, failure, self._calls[first])
        if not step.halved and failures < self.policy.attempts:
            self._todo.append(Step(step.indices, failures, delayed=True))
            return retry
        if len(step.indices) == 1 or self.policy.on_failure is OnFailure.HALT:
            self._give_up(first, failure)
            return None
        middle = len(step.indices) // 2
        self._todo.append(Step(step.indices[middle:], halved=True))
        self._todo.append(Step(step.indices[:middle], halved=True))
        return retry

    def faulty(self, step: Step, faults: Mapping[int, Failure]) -> list[Retry]:
        """A call succeeded, but what it returned for some records cannot be taken; the others are done.

        Returns what will be tried again.
        """
        indices = sorted(faults)
        self._count(indices)
        if not step.halved and step.failures + 1 < self.policy.attempts:
            self._todo.append(Step(indices, step.failures + 1, delayed=True))
            return [Retry(index, faults[index], self._calls[index]) for index in indices]
        for index in indices:
            self._give_up(index, faults[index])
        return []

    def _count(self, indices: Sequence[int]) -> None:
        for index in indices:
            self._calls[index] = self._calls.get(index, 0) + 1

    def _give_up(self, index: int, failure: Failure) -> None:
        if self.policy.on_failure is OnFailure.HALT:
            self.halted = self.halted or Retry(index, failure, self._calls[index])
        else:
            self.dead[index] = Dead(failure, self._calls[index])


def describe(error: BaseException) -> Failure:
    """Return an error of the user's code as text: its own frames only, bounded, whatever its ``str`` does."""
    try:
        message = str(error)
    except Exception:  # noqa: BLE001  # the user's exception may fail to print itself
        message = "(its message cannot be printed)"
    name = type(error).__qualname__
    try:
        lines = traceback.format_exception(type(error), error, _users_part(error.__traceback__))
        text = "".join(lines)
    except Exception:  # noqa: BLE001  # see above; the name is better than nothing
        text = f"{name}: {message}\n"
    if len(text) > _TRACEBACK_LIMIT:
        half = _TRACEBACK_LIMIT // 2
        text = f"{text[:half]}\n…\n{text[-half:]}"
    return Failure(f"{name}: {message}" if message else name, text)


def _users_part(tb: TracebackType | None) -> TracebackType | None:
    """Skip the server's own frames at the top; keep all when there are no others."""
    place = tb
    while place is not None:
        if not place.tb_frame.f_code.co_filename.startswith(_OWN_FOLDER):
            return place
        place = place.tb_next
    return tb
