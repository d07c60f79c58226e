"""How long to wait: before something is tried again, doubling up to a cap, with jitter; or to keep a rate. A pure core."""

from __future__ import annotations

from dataclasses import dataclass


def backoff(failures: int, base: float, cap: float, chance: float = 1.0) -> float:
    """Return the seconds to wait after so many ``failures`` in a row, from 1 on; ``chance`` is from 0 to 1.

    Doubles from ``base`` to ``cap``; jitter takes away up to half, so that what fails in many places at once does not come
    back all at once.
    """
    # The exponent is bounded so that no number of failures overflows a float.
    return min(cap, base * 2.0 ** min(failures - 1, 60)) * (0.5 + chance / 2)


@dataclass(slots=True)
class Backoff:
    """Counts failures in a row, and is forgotten once something was of use."""

    base: float
    cap: float
    free: int = 0
    """So many failures cost no wait."""
    failures: int = 0

    def failed(self, chance: float = 1.0) -> float:
        """Count a failure and return the wait."""
        self.failures += 1
        beyond = self.failures - self.free
        return backoff(beyond, self.base, self.cap, chance) if beyond > 0 else 0.0

    def worked(self) -> None:
        """What was before counts no more."""
        self.failures = 0


class TokenBucket:
    """Keeps a rate: so many calls a second on average, and a few at once after a pause."""

    def __init__(self, per_second: float, *, burst: int = 1) -> None:
        """Start full. ``burst``: how many calls may be made at once."""
        self._interval_ms = 1000 / per_second
        self._slack_ms = self._interval_ms * (burst - 1)
        self._due_ms = float("-inf")
        """When the next call would be, had there been no pause."""

    def reserve(self, now_ms: int) -> float:
        """Take a token and return the seconds to wait until it may be used. ``now_ms``: steady time."""
        due_ms = max(self._due_ms, now_ms - self._slack_ms)
        self._due_ms = due_ms + self._interval_ms
        return max(0.0, due_ms - now_ms) / 1000
