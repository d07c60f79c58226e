"""``--function``: which of a server's functions a command means."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.admin_endpoint import endpoint
from support.store import SqliteStore

from mldserver import cli
from mldserver.config.settings import Settings
from mldserver.output.layout import LEDGER

FUNCTIONS = """\
[functions.orders]
handler = "a.orders"
listen = ":7001"

[functions.trips]
handler = "a.trips"
"""
SEVERAL = "The settings have several functions: orders, trips. Name one with --function.\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a settings file with two functions, each with a ledger; return its folder, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mldserver.toml").write_text(FUNCTIONS)
    for name in ("orders", "trips"):
        store = SqliteStore(tmp_path / "out" / name / LEDGER, pipeline=name, server_id="one")
        store.open(now_ms=0)
        store.open_shard(f"shard-of-{name}")
        store.close()
    return tmp_path


def told(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert cli.run(list(words)) == code
    captured = capsys.readouterr()
    return captured.err if code else captured.out


@pytest.mark.parametrize("words", [["--function", "trips"], ["--pipeline", "trips"], ["--out", "out/trips"]])
def test_a_ledger_is_found_by_its_function_or_by_its_folder(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    document = json.loads(told(capsys, "ledger", "show", *words, "--json"))
    assert [shard["shard_id"] for shard in document["shards"]] == ["shard-of-trips"]


@pytest.mark.parametrize(
    "command",
    [
        ["ledger", "show"],
        ["windows", "list"],
        ["dead-letters", "list"],
        ["state", "show"],
        ["timers", "list"],
        ["streams", "describe"],
        ["drain"],
    ],
)
def test_a_command_for_one_function_asks_which(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert told(capsys, *command, code=2) == f"mldserver: {SEVERAL}"


def test_a_function_that_does_not_exist_is_refused_with_those_that_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    expected = "mldserver: There is no function 'shop'. The settings have: orders, trips.\n"
    assert told(capsys, "ledger", "show", "--function", "shop", code=2) == expected


@pytest.mark.parametrize("command", [["state", "show"], ["timers", "list"]])
def test_the_name_of_a_pipeline_is_that_of_a_function(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert json.loads(told(capsys, *command, "orders", "--json"))["pipeline"] == "orders"


def test_a_server_of_several_functions_is_found_without_naming_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("MLDSERVER_ADMIN", raising=False)
    with endpoint(path=folder / "admin.sock") as server:
        address = folder / "out" / "orders" / "_mldserver" / "admin.address"
        address.write_text(server.address)
        assert "handlers.trips" in told(capsys, "status")
        server.answers["/act/log-level"] = 200, {"done": True, "text": "It is done."}
        assert told(capsys, "log-level", "debug") == "It is done.\n"


def test_a_server_must_run_the_function_that_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with endpoint(path=folder / "admin.sock") as server:
        assert cli.run(["status", "--function", "orders", "--admin", server.address]) == 3
        assert "is of the pipeline trips, not of orders" in capsys.readouterr().out
        assert cli.run(["status", "--function", "trips", "--admin", server.address]) == 0


def test_a_drain_takes_the_settings_of_its_function(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drained: list[Settings] = []

    def run_server(settings: Settings, *, drain: bool) -> int:
        assert drain
        drained.append(settings)
        return 0

    monkeypatch.setattr("mldserver.cli.serve.run_server", run_server)
    assert cli.run(["drain", "--function", "trips", "--grace", "3"]) == 0
    assert [(each.pipeline, each.handler, each.grace_seconds) for each in drained] == [
        ("trips", "a.trips", 3.0)
    ]
    assert told(capsys, "drain", "--function", "shop", code=2).startswith(
        "mldserver: There is no function 'shop'"
    )


def test_the_ledger_in_a_functions_folder_must_be_the_functions(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "mldserver.toml").write_text(
        f'{FUNCTIONS}\n[functions.shop]\nhandler = "a.b"\nout = "out/trips"\n'
    )
    assert "trips" in told(capsys, "ledger", "show", "--function", "shop", code=2)


def test_tables_are_created_for_all_functions_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert "A ledger in SQLite needs no table." in told(capsys, "ledger", "create", code=2)
