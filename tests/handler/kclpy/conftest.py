"""The sample applications, and an interpreter in which amazon_kclpy seems not to be installed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from handler.kclpy.sampling import APPLICATIONS, VERSIONS, Sample


class Hiding:
    """A finder that finds what another one finds, but amazon_kclpy."""

    def __init__(self, finder: Any) -> None:
        self._finder = finder

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return None if name.startswith("amazon_kclpy") else self._finder.find_spec(name, path, target)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._finder, name)


def imported() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == "amazon_kclpy"]


@pytest.fixture
def without_amazon_kclpy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in imported():
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Hiding(finder) for finder in sys.meta_path])
    yield
    for name in imported():
        del sys.modules[name]


@pytest.fixture
def sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sample:
    file = tmp_path / "sample.jsonl"
    file.touch()
    monkeypatch.setenv("KCLPY_SAMPLE", str(file))
    monkeypatch.syspath_prepend(str(APPLICATIONS))
    for name in VERSIONS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    return Sample(file)
