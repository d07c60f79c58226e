"""What this process holds of the machine's memory, and what is left of it."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["available_bytes", "resident_bytes"]


def resident_bytes() -> int:
    """Return the bytes of memory that are resident now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def available_bytes() -> int:
    """Return how many bytes the machine can still give without swapping."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
