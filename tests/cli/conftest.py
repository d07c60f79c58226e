"""Commands in a folder of the test's own, and nothing set by the environment but that handlers run in the server's own
process: one for workers costs a second of the processor."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("MLDSERVER_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("MLDSERVER_WORKERS", "inline")
    monkeypatch.setenv("MLDSERVER_ADMIN", "none")
