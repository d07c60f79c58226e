"""The page about functions: its first five minutes, as a new user follows them."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from support.pages import examples
from support.serving import CONSTANTS, until

from mldserver.config.kinds import TcpAddress
from mldserver.config.resolve import resolve_functions
from mldserver.server import Server
from mldserver.testing import LocalEngine

FILES = ("carriers.py", "late.py", "mldserver.toml", "play.py")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, with the files that the page lists."""
    texts = [
        one.text for one in examples() if one.page == "functions.md" and one.language in {"python", "toml"}
    ]
    for name, text in zip(FILES, texts, strict=False):
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "two").mkdir()
    changed = (tmp_path / "late.py").read_text().replace('"1"', '"2"').replace("> 0", "> 15")
    (tmp_path / "two" / "late.py").write_text(changed)
    return tmp_path


def delays(folder: Path) -> list[float]:
    """The delays that are in the published windows of ``late``, in order."""
    files = sorted((folder / "out" / "late").glob("window=*/*.parquet"))
    return [delay for file in files for delay in pq.ParquetFile(file).read()["delay"].to_pylist()]


async def test_two_functions_run_and_one_of_them_gets_a_new_version(folder: Path) -> None:
    settings = resolve_functions({}, environ={}, folder=folder)
    assert [f"{each.listen}" for each in settings] == ["127.0.0.1:7070", "127.0.0.1:7080"]
    free = TcpAddress("127.0.0.1", 0)
    settings = tuple(replace(each, listen=free, constants=CONSTANTS, workers=1) for each in settings)
    server = Server(settings, engine=LocalEngine(), seed=1)

    async def command(name: str, **options: object) -> None:
        done, said = await server.carry_out(f"functions.{name}", json.dumps(options), "late")
        assert done, said

    async with asyncio.TaskGroup() as group, asyncio.timeout(60):
        life = group.create_task(server.run())
        await server.ready()
        parts = [each.parts for each in server.functions.values()]
        addresses = [await part.source.listening() for part in parts if part is not None]
        module = {"__name__": "play"}
        exec(compile((folder / "play.py").read_text(), "play.py", "exec"), module)  # the page's own file
        playing = group.create_task(module["play"](*addresses))  # type: ignore[operator]  # a coroutine function
        await until(lambda: len(list((folder / "out" / "carriers").glob("window=*"))) > 0)
        await until(lambda: len(delays(folder)) > 0)
        assert min(delays(folder)) == 1.0
        await command("stage", path=str(folder / "two"))
        await command("deploy")
        before = len(delays(folder))
        await until(lambda: 16.0 in delays(folder)[before:])
        await command("rollback")
        await command("pause")
        await command("resume")
        playing.cancel()
        await command("undeploy")
        server.stop("the test is over")
    assert life.result() == 0
