"""The README's handler and commands, and the page of testing, run as a reader would run them."""

from __future__ import annotations

import lzma
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest
from support.pages import ROOT, examples
from support.serving import KEEP_EVERYTHING, quick, serving, until
from support.spark_classes import spark_cache

FLIGHTS = ROOT / "handlers" / "data" / "flights-2013-01.jsonl.xz"


def example(page: str, language: str, word: str) -> str:
    (found,) = (
        one.text for one in examples() if (one.page, one.language) == (page, language) and word in one.text
    )
    return found


@pytest.mark.slow
def test_the_readmes_handler_is_checked_and_played_by_the_readmes_commands(tmp_path: Path) -> None:
    (tmp_path / "departures.py").write_text(example("README.md", "python", "on_window"))
    with lzma.open(FLIGHTS) as lines:
        (tmp_path / "events.jsonl").write_bytes(b"".join(next(lines) for _ in range(120)))
    said, cache = [], str(spark_cache(tmp_path).parent)
    for line in example("README.md", "sh", "mldserver check").splitlines():
        program, command, *arguments = shlex.split(line, comments=True)
        assert program == "mldserver"
        if command in {"check", "sim"}:
            more = ["--out", "out"] if command == "sim" else []
            run = [sys.executable, "-m", "mldserver", command, *arguments, *more]
            done = subprocess.run(
                run,
                cwd=tmp_path,
                env=os.environ | {"XDG_CACHE_HOME": cache},
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, done.stdout + done.stderr
            said.append(done.stdout)
    assert "departures: it can be run" in said[0]
    assert "120 durable, 0 late, 0 dead letters" in said[1]
    flights = ds.dataset(tmp_path / "out", format="parquet").to_table().column("flights")
    assert sum(flights.to_pylist()) == 120


async def test_the_page_of_testing_plays_a_stream_to_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "keeper_of_the_page.py").write_text(KEEP_EVERYTHING)
    monkeypatch.syspath_prepend(tmp_path)
    names: dict[str, Any] = {"__name__": "example"}
    exec(example("testing.md", "python", "FakeMLD"), names)
    async with serving(quick(tmp_path / "out", "keeper_of_the_page")) as server:
        await names["play"](await server.listening())
        await until(lambda: server.status().windows_published == 1)
    kept = ds.dataset(tmp_path / "out", format="parquet").to_table()
    assert kept.num_rows == 100
