"""``mldserver windows replay``: other code over windows that are published, over a small engine, and once over Spark."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from mldserver import assembly
from mldserver.cli import run
from mldserver.testing import LocalEngine

Replay = Callable[..., Any]
SIM = ("sim", "handlers.departures_daily", "--limit", "1500", "--out", "out")


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert run([*SIM, "--engine", "local"]) == 0
    return folder


@pytest.fixture
def replay(
    published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Replay:
    """Runs the command with a function in place of Spark; returns the exit code, and what it printed."""
    shutil.copytree(published / "out", tmp_path / "out")
    monkeypatch.chdir(tmp_path)
    asked: list[dict[str, Any]] = []

    def replayed(
        *arguments: str, to: str = "new", handler: str = "handlers.departures_daily", on_table: Any = None
    ) -> tuple[int, str]:
        def engine(settings: Any, spec: Any, **options: Any) -> LocalEngine:
            assert (settings.sink, settings.out) == (None, tmp_path / "new")
            assert options["work_dir"].is_dir()
            asked.append(options)
            return LocalEngine(on_table)

        monkeypatch.setattr(assembly, "spark_of", engine)
        code = run(["windows", "replay", "--out", "out", "--to", to, "--handler", handler, *arguments])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return replayed


def test_the_same_rows_are_equal_and_the_new_output_is_a_folder_like_the_old_one(
    replay: Replay, tmp_path: Path
) -> None:
    code, text = replay()
    assert code == 0
    assert "2 windows: 2 equal, 0 failed; the new output is in new" in text
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        "window=2013-01-01T00-00-00Z",
        "window=2013-01-02T00-00-00Z",
    ]


def test_differences_are_a_row_for_each_window_also_as_json(replay: Replay) -> None:
    def on_table(rows: pa.Table, _window: object) -> pa.Table:
        return rows.slice(3).rename_columns({"delay": "minutes"})

    since = ("--since", "2013-01-02", "--until", "2013-01-03")
    code, text = replay(*since, "--json", on_table=on_table)
    (row,) = json.loads(text)
    assert (code, row["window"], row["columns"]) == (0, "2013-01-02T00-00-00Z", "-delay +minutes")
    assert row["rows_before"] - row["rows"] == row["only_before"] == 3
    code, text = replay()
    assert code == 2
    assert "The folder new is not empty" in text


def test_a_window_that_fails_is_the_commands_failure(replay: Replay) -> None:
    def on_table(rows: pa.Table, window: Any) -> pa.Table:
        if window.id.startswith("2013-01-02"):
            raise ValueError("no such carrier")
        return rows

    code, text = replay(on_table=on_table)
    assert code == 1
    assert "no such carrier" in text
    assert "1 equal, 1 failed" in text


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("--since", "2013-01-09"), "No window of that time can be computed again."),
        ({"handler": "handlers.audit"}, "has no rows, so it computes no windows"),
        (
            {"handler": "handlers.departures"},
            "there were windows of 1 d of scheduled, and are windows of 1 h",
        ),
        ({"to": "s3://bucket/new"}, "is not where"),
        ({"to": "out/new"}, "lie in each other"),
        ({"to": "."}, "lie in each other"),
        (("--since", "never"), "--since 'never' is neither a time nor a duration"),
    ],
)
def test_what_cannot_be_replayed_is_refused_before_anything_is_computed(
    replay: Replay, tmp_path: Path, arguments: Any, what: str
) -> None:
    code, text = replay(**arguments) if isinstance(arguments, dict) else replay(*arguments)
    assert code == 2
    assert what in text
    assert not (tmp_path / "new").exists()


def test_without_a_handler_in_the_settings_one_must_be_named(
    replay: Replay, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["windows", "replay", "--out", "out", "--to", "new"]) == 2
    assert "No handler was named." in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.slow
def test_new_code_runs_on_spark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run([*SIM]) == 0
    (tmp_path / "mine.py").write_text(
        "from handlers.departures_daily import *\n\n\ndef on_window(rows, window):\n"
        "    return rows.where(\"carrier <> 'UA'\").groupBy('carrier').count()\n"
    )
    capsys.readouterr()
    assert run(["windows", "replay", "--out", "out", "--to", "new", "--handler", "mine", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["rows"] - row["rows_before"] for row in rows] == [-1, -1]
    assert {row["columns"] for row in rows} == {"-flights -mean_delay +count"}
