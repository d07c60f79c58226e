"""When a worker is replaced, and how soon: a pure core. Times are milliseconds of any clock that does not run back.

Lives that come to nothing are counted, and apart from them those that end too soon. The numbers are those of Couchbase
Eventing's supervisors: the count halves every 30 s, and above five there is a pause of 15 s.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

__all__ = ["Beat", "Cause", "Deaths", "Limits", "Restarts", "judge"]


@dataclass(frozen=True, slots=True)
class Restarts:
    """How a worker's deaths are counted."""

    half_life_ms: int = 30_000
    base_ms: int = 200
    """The wait after a third death; it doubles with each further one."""
    free: int = 2
    """After so many deaths, as they count now, the next life begins at once."""
    pause_above: int = 5
    pause_ms: int = 15_000
    failed_after: int = 8
    """Lives in a row that came to nothing, after which the worker counts as failed."""


@dataclass(slots=True)
class Deaths:
    """The deaths of one worker: what they cost it when they came before it had done anything, and how many came lately."""

    rules: Restarts = field(default_factory=Restarts)
    useless: int = 0
    """Lives in a row in which no batch was done."""
    _count: float = 0.0
    _at_ms: int = 0
    _lately: float = 0.0
    _lately_at_ms: int = 0

    def died(self, now_ms: int, *, useful: bool, meant: bool = False) -> int:
        """Count a death; return how long the next life must wait.

        ``useful``: a batch was done, or a record is looked for that ends it. ``meant``: that is why it died, or it was
        replaced between batches.
        """
        if useful:
            # Another life will do some work too: to wait would only cost time.
            if not meant:
                self._lately, self._lately_at_ms = self.lately(now_ms) + 1, now_ms
            self.worked()
            return 0
        self.useless += 1
        self._count = self.count(now_ms) + 1
        self._at_ms = now_ms
        rules = self.rules
        if self.useless >= rules.failed_after or self._count > rules.pause_above:
            return rules.pause_ms
        beyond = self._count - rules.free
        return 0 if beyond <= 0 else min(rules.pause_ms, round(rules.base_ms * 2 ** (beyond - 1)))

    def worked(self) -> None:
        """A batch was done: what was before it counts no more."""
        self.useless = 0
        self._count = 0.0

    def count(self, now_ms: int) -> float:
        """Return how many deaths count now."""
        return self._decayed(self._count, now_ms - self._at_ms)

    def lately(self, now_ms: int) -> float:
        """Return how many deaths after useful lives count now."""
        return self._decayed(self._lately, now_ms - self._lately_at_ms)

    def restless(self, now_ms: int) -> bool:
        """Whether a person should look: it works, but dies too often."""
        return self.lately(now_ms) > self.rules.pause_above

    def _decayed(self, count: float, ms: int) -> float:
        return float(count * 0.5 ** (max(0, ms) / self.rules.half_life_ms))

    @property
    def failed(self) -> bool:
        """Whether a person should look: it keeps dying before it does anything."""
        return self.useless >= self.rules.failed_after


@dataclass(frozen=True, slots=True)
class Limits:
    """What a worker may do."""

    kill_after_ms: int | None
    """How long a call may run, or the loop be blocked, or beats be missing; None: any time."""
    memory_bytes: int | None
    """Beyond it the worker is replaced between batches, and killed beyond one and a half times that; None: any."""


@dataclass(frozen=True, slots=True)
class Beat:
    """What a worker says of itself twice a second, from a thread of its own: a busy worker is not a dead one."""

    running_ms: int
    """How long the present synchronous call has run; 0: there is none."""
    blocked_ms: int
    """How long its event loop has not turned."""
    resident_bytes: int


class Cause(enum.StrEnum):
    """Why a worker must go."""

    CALL = "a call of the handler takes too long"
    BLOCKED = "the handler blocks the worker's event loop"
    SILENT = "it does not beat"
    MEMORY = "it takes too much memory"
    GROWN = "it has grown beyond its memory limit"
    """It may finish what it has begun."""


def judge(beat: Beat | None, silent_ms: int, limits: Limits) -> Cause | None:
    """Return why a worker must go, None when it may stay. ``silent_ms``: since the last beat, or since the start."""
    longest = limits.kill_after_ms
    if longest is not None and silent_ms > longest:
        return Cause.SILENT
    if beat is None:
        return None
    if longest is not None and beat.running_ms > longest:
        return Cause.CALL
    if longest is not None and beat.blocked_ms > longest:
        return Cause.BLOCKED
    if limits.memory_bytes is not None and beat.resident_bytes > limits.memory_bytes:
        return Cause.MEMORY if beat.resident_bytes > limits.memory_bytes * 3 // 2 else Cause.GROWN
    return None
