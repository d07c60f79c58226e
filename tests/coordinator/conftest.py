from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from coordinator.pipeline import Pipeline

from mldserver.output import joined


@pytest.fixture
def pipeline(tmp_path: Path) -> Pipeline:
    return Pipeline(tmp_path)


@pytest.fixture(autouse=True)
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocking calls run on the loop, between two turns of it: scenarios are the same every time."""

    async def inline(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        await asyncio.sleep(0)
        return function(*args, **named)

    monkeypatch.setattr(asyncio, "to_thread", inline)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def joins_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every two small segments of a window are joined: short runs have no more of them."""
    monkeypatch.setattr(joined, "SEGMENTS_PER_FILE", 2)
