"""The seed of a crash test: chosen by chance, printed, and given again to make the same deaths happen."""

from __future__ import annotations

import os
import random
from typing import Final

SEED_VARIABLE: Final = "CRASH_SEED"
"""Not ``MLDSERVER_...``: a server that these tests start takes such variables for its own settings."""


def crash_seed() -> int:
    """Return the seed in the environment, or a new one, and print it as it is to be given."""
    seed = int(os.environ.get(SEED_VARIABLE) or random.SystemRandom().randrange(1_000_000))
    print(f"{SEED_VARIABLE}={seed}")
    return seed
