"""Which version of a handler ran: what it says, or what its source hashes to."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mldserver.handler.loader import Loaded

pytestmark = pytest.mark.quick

SOURCE = b"def process_record(record): ...\n"


def loaded(file: Path | None, version: Any = None) -> Loaded:
    module = ModuleType("h")
    if file is not None:
        module.__file__ = str(file)
    if version is not None:
        module.version = version  # type: ignore[attr-defined]  # as a user's module has it
    return Loaded("h", module, module)


def version_of(handler: Loaded) -> str:
    return handler.version(handler.target)


@pytest.mark.parametrize(("given", "said"), [("2026-11-21 ", "2026-11-21"), (7, "7"), (1.5, "1.5")])
def test_a_handler_says_its_version(tmp_path: Path, given: Any, said: str) -> None:
    assert version_of(loaded(tmp_path / "h.py", given)) == said


@pytest.mark.parametrize("given", [None, "", "  ", True, ("1", "2"), len])
def test_else_it_is_a_hash_of_the_source(tmp_path: Path, given: Any) -> None:
    file = tmp_path / "h.py"
    file.write_bytes(SOURCE)
    assert version_of(loaded(file, given)) == "sha256:" + hashlib.sha256(SOURCE).hexdigest()[:12]


def test_without_a_source_it_is_not_known(tmp_path: Path) -> None:
    assert version_of(loaded(tmp_path / "gone.py")) == ""
    assert version_of(loaded(None)) == ""
