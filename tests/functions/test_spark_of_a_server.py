"""One Spark driver for the functions of a server: what one function does to it, and what the others have of that."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest
from functions.test_functions_of_a_server import RECORDS, ROWS, deliver, reasons, told
from support.serving import quick, until

from mldserver.base.clock import SystemClock
from mldserver.server import Server
from mldserver.spark.driver_messages import StartSession

DRIVER = Path(__file__).parents[1] / "support" / "failing_driver.py"


class Impatient(SystemClock):
    """The back-off of the driver is over at once."""

    async def sleep(self, seconds: float) -> None:
        await super().sleep(min(seconds, 0.1))


@contextlib.asynccontextmanager
async def hosting(folder: Path, plan: str, *names: str) -> AsyncIterator[Server]:
    """Run a server with these functions on a driver that fails by plan."""
    for name in names:
        (folder / f"{name}.py").write_text(ROWS)
    settings = [quick(folder / "out" / name, name, window_attempts=5) for name in names]
    server = Server(settings, seed=1, clock=Impatient())
    assert server._driver is not None
    server._driver.command = [sys.executable, str(DRIVER), plan, str(folder / "plan")]
    server._driver.setup = StartSession("sc://nowhere")
    async with asyncio.TaskGroup() as group, asyncio.timeout(60):
        life = group.create_task(server.run())
        yield server
        server.stop("the test is over")
    assert life.result() == 0


def ids(folder: Path) -> Counter[int]:
    files = [str(path) for path in folder.glob("window=*/*.parquet")]
    return Counter(ds.dataset(files, format="parquet").to_table()["id"].to_pylist() if files else [])


@pytest.mark.parametrize(("plan", "lost"), [("ok", 0), ("die", 1), ("jvm,fail,die", 2), ("full", 0)])
async def test_the_rows_of_two_functions_come_out_once_whatever_their_driver_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[dict[str, Any]], plan: str, lost: int
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    async with hosting(tmp_path, plan, "one", "two") as server:
        async with asyncio.TaskGroup() as group:
            for function in server.functions.values():
                group.create_task(deliver(function))
        await server.finished()
    for name in ("one", "two"):
        assert ids(tmp_path / "out" / name) == Counter(range(RECORDS))
    assert len(told(logged, "spark.lost")) == lost
    assert len(told(logged, "spark.starting")) == lost + 1
    assert all("pipeline" not in event for event in told(logged, "spark.starting"))
    assert not list((tmp_path / "out").glob("*/_mldserver/drivers/*"))


async def test_a_function_that_the_driver_cannot_load_is_failed_and_the_other_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[dict[str, Any]]
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    async with hosting(tmp_path, "ok", "one", "two_refused") as server:
        await until(lambda: bool(told(logged, "function.failed")))
        await deliver(server.functions["one"])
        await server.functions["one"].pipeline.finished()
        assert any(reason.startswith("two_refused: ") for reason in reasons(server))
    assert ids(tmp_path / "out" / "one") == Counter(range(RECORDS))
    (failed,) = told(logged, "function.failed")
    assert (failed["pipeline"], failed["lasting"]) == ("two_refused", True)
    assert "the driver cannot import it" in failed["what"]
    assert len(told(logged, "spark.starting")) == 1
    assert told(logged, "spark.lost") == []
