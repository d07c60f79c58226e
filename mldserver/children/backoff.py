"""How long to wait before a child starts again: doubling, forgotten once one was of use. A pure core."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Backoff"]


@dataclass(slots=True)
class Backoff:
    """Delays in seconds; the state is how many failures there were in a row."""

    base: float
    cap: float
    free: int = 0
    """So many failures cost no wait."""
    failures: int = 0

    def failed(self, chance: float = 1.0) -> float:
        """Count a failure and return the wait; ``chance`` (0 to 1) picks it from the upper half.

        Jitter keeps what fails on many hosts at once from coming back all at once.
        """
        self.failures += 1
        beyond = self.failures - self.free
        longest = min(self.cap, self.base * 2.0 ** min(beyond - 1, 30)) if beyond > 0 else 0.0
        return longest * (0.5 + 0.5 * chance)

    def worked(self) -> None:
        """What was before counts no more."""
        self.failures = 0
