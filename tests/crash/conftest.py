"""What crash tests share."""

from __future__ import annotations

import pytest
from crash.seeds import crash_seed


@pytest.fixture
def seed() -> int:
    """Return what decides every death of a test, and its stories."""
    return crash_seed()
