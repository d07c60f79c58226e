"""How long, and how often, a checkpoint that the daemon could not store is asked for again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from mldserver.base.backoff import backoff
from mldserver.protocol.states import Input

CHECKPOINT_ERRORS: Final = {
    "ShutdownException": Input.GONE,
    "ThrottlingException": Input.BUSY,
    "KinesisClientLibDependencyException": Input.BUSY,
}
"""What the simple class name of the Java exception means; any other name is REFUSED."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Exponential back-off with jitter: attempt n fails, then a pause of half to all of ``base * 2**(n-1)``."""

    attempts: int
    """In all, the first one included."""
    base_seconds: float
    cap_seconds: float

    def delay(self, failed: int, chance: float) -> float:
        """Return the pause in seconds after ``failed`` attempts; ``chance`` is from 0 to 1."""
        return backoff(failed, self.base_seconds, self.cap_seconds, chance)


BATCH_RETRIES: Final = RetryPolicy(attempts=6, base_seconds=0.25, cap_seconds=8.0)
"""Under a batch, which waits meanwhile: up to about eight seconds; the next batch is the next chance."""
END_RETRIES: Final = RetryPolicy(attempts=20, base_seconds=0.25, cap_seconds=10.0)
"""At a shard's end, where there is one chance: up to about two and a half minutes."""
