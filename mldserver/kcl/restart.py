"""How long to wait before the daemon starts again: doubling, jittered, forgotten after a healthy run."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Backoff"]


@dataclass(slots=True)
class Backoff:
    """Delays in seconds; the state is the number of failures in a row."""

    base: float = 1.0
    cap: float = 60.0
    healthy: float = 120.0
    """A run of this length counts as good: a start takes the KCL up to a minute, so shorter ones say little."""
    failures: int = 0

    def delay(self, *, ran: float, chance: float) -> float:
        """Return the wait after a run of ``ran`` seconds; ``chance`` (0 to 1) picks it from the upper half.

        Jitter keeps the daemons of many hosts from coming back to a restarted server all at once.
        """
        if ran >= self.healthy:
            self.failures = 0
        longest = min(self.cap, self.base * 2.0 ** min(self.failures, 30))
        self.failures += 1
        return longest * (0.5 + 0.5 * chance)
