"""A Java that only says its version."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def java(tmp_path: Path) -> Path:
    (tmp_path / "java" / "bin").mkdir(parents=True)
    file = tmp_path / "java" / "bin" / "java"
    file.write_text("#!/bin/sh\necho 'openjdk version \"17.0.1\"'\n")
    file.chmod(0o755)
    return tmp_path / "java"
