from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pytest
from rich.console import Console
from support.spark_classes import spark_cache

from mldserver import Window
from mldserver.cli import demo
from mldserver.cli.demo import Departures, ShopDemo, Source, play, windows_table
from mldserver.testing import LocalEngine, VirtualClock, playground, shop
from mldserver.testing.simulation import ServerRun


def summed(rows: pa.Table, _window: Window) -> pa.Table:
    grouped = rows.group_by("carrier").aggregate([("carrier", "count"), ("delay", "mean")])
    return grouped.rename_columns(["carrier", "flights", "mean_delay"])


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let only the flights of the first days leave: all of them go through Spark below."""
    lines = playground.read_lines(None)[:2000]
    monkeypatch.setattr(playground, "read_lines", lambda _file: lines)


def summed_orders(rows: pa.Table, _window: Window) -> pa.Table:
    grouped = rows.group_by("product").aggregate([("orders", "sum"), ("revenue", "sum")])
    return grouped.rename_columns(["product", "orders", "revenue"])


def flights(out: Path) -> object:
    """How many any reader of the folder sees."""
    return pc.sum(ds.dataset(out, format="parquet").to_table()["flights"]).as_py()


def played(out: Path, *, on_table: object = summed, source: Source = "mld") -> tuple[int, str]:
    console = Console(file=io.StringIO(), width=120, highlight=False)
    engine = LocalEngine(on_table=on_table)  # type: ignore[arg-type]  # tests pass odd ones
    code = play(console, out, source=source, engine=engine)
    return code, console.file.getvalue()  # type: ignore[attr-defined]  # it is a StringIO


@pytest.mark.usefixtures("few")
def test_it_counts_every_departure_and_says_where_the_output_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLDSERVER_WORKERS")  # while they start, it can be seen to wait
    code, told = played(tmp_path / "out")
    assert code == 0, told
    assert "2,000 of 2,000 flights" in told
    assert len(re.findall(r"2013-\d\d-\d\d", told)) == 3
    assert str(tmp_path / "out") in told.replace("\n", "")
    assert "delivering records" in told
    progress = [line for line in told.splitlines() if re.match(r" *[\d.]+ s  ", line)]
    assert "every window is published  2,000 rows durable, 3 windows" in progress[-1]
    assert flights(tmp_path / "out") == 2_000


@pytest.mark.parametrize(
    ("known", "words"),
    [
        ({"windows_waiting": 2, "stream_ended": False}, "waiting for the engine to start"),
        ({"windows_halted": ("w",), "windows_waiting": 1}, "stopped: a window has failed for good"),
        ({"stream_ended": False}, "waiting for other shards"),
        ({}, "every window is published"),
    ],
)
def test_its_progress_waits_only_for_what_is_missing(known: dict[str, object], words: str) -> None:
    class Stopped(ServerRun):
        delivered = True
        halted = bool(known.get("windows_halted"))
        status = SimpleNamespace(
            **({"windows_halted": (), "windows_waiting": 0, "stream_ended": True} | known)
        )
        server = SimpleNamespace(is_ready=False)

        async def _play_records(self) -> None:
            pass

    assert words in Stopped(VirtualClock()).phase


@pytest.mark.usefixtures("few")
def test_output_that_lacks_flights_is_no_success(tmp_path: Path) -> None:
    code, told = played(tmp_path / "out", on_table=lambda rows, window: summed(rows[:10], window))
    assert code == 1
    assert "of 2,000 flights" in told


@pytest.mark.usefixtures("few")
def test_a_failure_tells_why_and_where_the_log_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLDSERVER_WINDOW_ATTEMPTS", "1")
    code, told = played(tmp_path / "out", on_table=lambda rows, _window: rows.nonsense)
    assert code == 1
    assert "The demonstration failed" in told
    assert "nonsense" in told


def test_a_day_without_a_flight_that_left_has_no_delay() -> None:
    rows = pa.table(
        {
            "window_start": [datetime(2013, 1, 1, tzinfo=UTC)],
            "carrier": ["UA"],
            "flights": [2],
            "mean_delay": pa.array([None], pa.float64()),
        }
    )
    console = Console(file=io.StringIO(), width=120)
    console.print(windows_table(Departures(), rows))
    assert "2013-01-01" in console.file.getvalue()  # type: ignore[attr-defined]  # a StringIO
    assert "every flight was cancelled" in console.file.getvalue()  # type: ignore[attr-defined]  # a StringIO


def test_a_shops_changes_come_to_what_is_left_in_its_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "ORDERS", 300)
    monkeypatch.setattr(shop, "DAY_SECONDS", 0.3)
    code, told = played(tmp_path / "out", on_table=summed_orders, source="dynamodb")
    assert code == 0, told
    assert "300 placed" in told
    assert "cancelled" in told
    (counted,) = re.findall(r"([\d,]+ orders of [\d,.]+) in the windows", told)
    assert f"{counted.replace('orders ', '')} in the table" in told
    assert len(re.findall(r"\d\d-\d\d \d\d:00 ", told)) == 8
    log = (tmp_path / "out" / "_server.log").read_text()
    assert log.count('"event":"shard.ended"') == 4  # two, and the children of one


def test_windows_that_do_not_come_to_what_is_in_the_table_are_no_success(tmp_path: Path) -> None:
    show = ShopDemo()
    settings = playground.play_settings(show.handler, tmp_path, environ={}, folder=tmp_path)
    show.prepare(settings, LocalEngine()).table.put({"id": "a", "total": Decimal("2.40")})
    right = pa.table({"orders": [2, -1], "revenue": [Decimal("4.80"), Decimal("-2.40")]})
    assert show.check_result(right) == ("1 orders of 2.40 in the windows, 1 of 2.40 in the table", True)
    assert show.check_result(right.slice(0, 1))[1] is False


@pytest.mark.long
@pytest.mark.skipif(shutil.which("java") is None, reason="Spark needs Java")
def test_the_shop_with_spark(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mldserver", "demo", "--source", "dynamodb", "--out", str(tmp_path / "out")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"2,700 orders of ([\d,.]+) in the windows, 2,700 of \1 in the table", done.stdout)
    assert done.stderr == ""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("java") is None, reason="Spark needs Java")
def test_the_command_itself_with_spark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLDSERVER_WORKERS")
    monkeypatch.setenv("XDG_CACHE_HOME", str(spark_cache(tmp_path).parent))
    out = tmp_path / "out"
    done = subprocess.run(
        [sys.executable, "-m", "mldserver", "demo", "--out", str(out)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "27,004 of 27,004 flights" in done.stdout
    assert len(re.findall(r"2013-\d\d-\d\d", done.stdout)) == 32
    assert done.stderr == ""
    assert flights(out) == 27_004
