"""Two functions in one server: the windows of one come after those of the other, in each state of a life cycle."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from functions.test_functions_of_a_server import ROWS, deliver, hosting, told
from support.serving import quick, until

from mldserver.config.settings import Settings
from mldserver.errors import EXIT_OPERATOR
from mldserver.server import Server
from mldserver.testing import LocalEngine


@pytest.fixture
def both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Settings, Settings]:
    """Settings of the functions ``rows``, and ``joins``, whose windows come after."""
    (tmp_path / "rows.py").write_text(ROWS)
    (tmp_path / "joins.py").write_text(f"{ROWS}\nafter = ['rows']\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return quick(tmp_path / "out" / "rows", "rows"), quick(tmp_path / "out" / "joins", "joins")


def windows(settings: Settings) -> list[str]:
    assert isinstance(settings.out, Path)
    return sorted(path.name for path in settings.out.glob("window=*"))


@pytest.mark.parametrize("workers", [None, 1], ids=["inline", "in a worker process"])
async def test_windows_wait_for_the_function_that_comes_first(
    both: tuple[Settings, Settings], logged: list[dict[str, Any]], workers: int | None
) -> None:
    async with hosting(*(replace(each, workers=workers) for each in both)) as server:
        await deliver(server.functions["joins"])
        await until(lambda: len(told(logged, "window.waiting")) == 4)
        assert windows(both[1]) == []
        await deliver(server.functions["rows"])
        await server.finished()
    assert len(windows(both[1])) == 4
    done = [(event["pipeline"], event["window"]) for event in told(logged, "window.done")]
    for place, (pipeline, window) in enumerate(done):
        assert pipeline == "rows" or ("rows", window) in done[:place]


async def test_an_undeploy_publishes_what_waits_once_the_other_function_has(
    both: tuple[Settings, Settings], logged: list[dict[str, Any]]
) -> None:
    async with hosting(*both) as server:
        joins = server.functions["joins"]
        await deliver(joins)
        await until(lambda: len(told(logged, "window.waiting")) >= 4)
        assert await joins.command("undeploy")
        await deliver(server.functions["rows"])
        await until(lambda: server.document().functions["joins"].lifecycle == "undeployed")
        assert len(windows(both[1])) == 4


async def test_a_server_without_the_function_that_comes_first_refuses_to_start(
    both: tuple[Settings, Settings], logged: list[dict[str, Any]]
) -> None:
    assert await Server(both[1], engine=LocalEngine(), drain=True).run() == EXIT_OPERATOR
    (failed,) = told(logged, "server.failed")
    assert "this server has no function rows" in failed["what"]
    assert "`mldserver functions undeploy joins`" in failed["advice"]
