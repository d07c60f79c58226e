"""A Java that only says its version."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def java(tmp_path: Path) -> Path:
    (tmp_path / "java" / "bin").mkdir(parents=True)
    file = tmp_path / "java" / "bin" / "java"
    file.write_text("#!/bin/sh\necho 'openjdk version \"17.0.1\"'\n")
    file.chmod(0o755)
    return tmp_path / "java"
