"""What this process holds of the machine's memory."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["resident_bytes"]


def resident_bytes() -> int:
    """Return the bytes of memory that are resident now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
