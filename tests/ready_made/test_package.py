"""The folder ``handlers``: the user's own may stand beside it, and comes first."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def run(folder: Any, code: Any) -> Any:
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.stdout.strip(), done.stderr


@pytest.mark.parametrize("init", [True, False], ids=["package", "folder"])
def test_the_users_handlers_and_the_ready_made_ones_are_both_found(tmp_path: Path, init: Any) -> None:
    folder = tmp_path / "handlers"
    folder.mkdir()
    (folder / "mine.py").write_text("def process_record(record): ...\n")
    (folder / "raw.py").write_text("def process_record(record): ...\n")
    if init:
        (folder / "__init__.py").write_text("")
    code = (
        "from mldserver.handler.inspection import load_spec\n"
        "print([load_spec('handlers.' + name).schema is None for name in ('mine', 'raw', 'departures_daily')])"
    )
    assert run(tmp_path, code) == ("[True, True, False]", "")


def test_the_ready_made_handlers_run_from_any_folder(tmp_path: Path) -> None:
    code = "from mldserver.handler.inspection import load_spec\nprint(load_spec('handlers.raw').path)"
    assert run(tmp_path, code) == ("handlers.raw", "")
