"""``mldserver functions``: what each command asks of the server, what it prints, and its exit code."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.admin_endpoint import Endpoint, endpoint
from support.statuses import function
from support.statuses import server as several
from support.store import SqliteStore

from mldserver import cli
from mldserver.functions.package import Package
from mldserver.ledger.contract import FunctionLife, Wanted
from mldserver.output.layout import LEDGER
from mldserver.status_document import VersionRow

PACKAGE = Package(
    name="trips",
    handler="trips",
    version="2",
    schema="id BIGINT",
    windows="tumbling, 1 h of at",
    settings={"sink": "${TRIPS_SINK}"},
    code={"trips.py": b"version = '2'\n"},
)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Endpoint]:
    with endpoint(path=tmp_path / "admin.sock") as served:
        served.document = several(function("trips"), function("stops"))
        yield served


@pytest.fixture
def at(server: Endpoint) -> list[str]:
    return ["--admin", server.address]


def exports(server: Endpoint, package: Package = PACKAGE) -> None:
    """Let the server export a package."""
    text = base64.b64encode(package.packed()).decode()
    server.answers["/act/functions.export"] = 200, {"done": True, "text": text}


@pytest.mark.parametrize(
    ("words", "name", "options"),
    [
        (["stage", "trips", "--code", "/srv/trips-2"], "stage", {"path": "/srv/trips-2", "yes": False}),
        (["deploy", "trips", "--yes"], "deploy", {"yes": True}),
        (["rollback", "trips"], "rollback", {"yes": False}),
        (["pause", "trips"], "pause", {}),
        (["resume", "trips"], "resume", {}),
        (["undeploy", "trips", "--keep"], "undeploy", {"keep": True}),
    ],
)
def test_a_command_is_one_request_about_its_function(
    words: list[str],
    name: str,
    options: dict[str, Any],
    server: Endpoint,
    at: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    server.answers[f"/act/functions.{name}"] = 200, {"done": True, "text": "It is done."}
    assert cli.run(["functions", *words, *at]) == 0
    assert capsys.readouterr().out == "It is done.\n"
    path, asked = server.asked[-1]
    assert (path, asked["function"]) == (f"/act/functions.{name}", "trips")
    assert json.loads(asked["argument"]) == options


def test_a_relative_path_is_that_of_the_callers_folder(
    server: Endpoint, at: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    server.answers["/act/functions.import"] = 200, {"done": True, "text": "It is here."}
    assert cli.run(["functions", "import", "trips.zip", *at]) == 0
    path, asked = server.asked[-1]
    assert path == "/act/functions.import"
    assert "function" not in asked, "the package names its function"
    assert json.loads(asked["argument"]) == {"path": str(tmp_path / "trips.zip"), "yes": False}


def test_what_the_server_refuses_is_printed_with_exit_code_2(
    server: Endpoint, at: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("deploy", "export"):
        server.answers[f"/act/functions.{name}"] = 200, {"done": False, "text": "The schema is another."}
    assert cli.run(["functions", "deploy", "trips", *at]) == 2
    assert cli.run(["functions", "export", "trips", "-o", "trips.zip", *at]) == 2
    assert capsys.readouterr().err == "mldserver: The schema is another.\n" * 2


def test_the_list_shows_states_and_versions(
    server: Endpoint, at: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = (VersionRow(id="1", role="deployed"), VersionRow(id="2", role="staged", staged_ms=1))
    server.document = several(function("trips", versions=rows), function("stops", lifecycle="paused"))
    assert cli.run(["functions", "list", *at]) == 0
    printed = capsys.readouterr().out
    assert [line.split()[0] for line in printed.splitlines()[-2:]] == ["trips", "stops"]
    assert "staged" in printed
    assert "paused" in printed
    assert cli.run(["functions", "list", "--json", *at]) == 0
    listed = json.loads(capsys.readouterr().out)["functions"]
    assert [(row["function"], row["state"]) for row in listed] == [
        ("trips", "deployed"),
        ("stops", "paused"),
    ]
    server.document = msgspec.structs.replace(server.document, ready=False)
    assert cli.run(["functions", "list", *at]) == 3


def test_without_a_server_the_list_is_what_the_ledgers_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mldserver.toml").write_text(
        '[functions.trips]\nhandler = "trips"\n[functions.stops]\nhandler = "stops"\n'
        'listen = "127.0.0.1:7081"\n'
    )
    store = SqliteStore(tmp_path / "out" / "trips" / LEDGER, pipeline="trips", server_id="one")
    store.open()
    assert store.change_life(FunctionLife(), FunctionLife(Wanted.PAUSED))
    store.close()
    assert cli.run(["functions", "list", "--admin", "unix:nowhere", "--json"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert "No server answers" in found["note"]
    assert [(row["function"], row["wanted"]) for row in found["functions"]] == [
        ("trips", "paused"),
        ("stops", None),
    ]


def test_one_function_is_shown(server: Endpoint, at: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["functions", "show", "stops", *at]) == 0
    printed = capsys.readouterr().out
    assert "stops" in printed
    assert "trips" not in printed


def test_an_export_writes_the_package_and_names_the_variables_that_it_needs(
    server: Endpoint, at: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exports(server)
    file = tmp_path / "trips.zip"
    assert cli.run(["functions", "export", "trips", "-o", str(file), *at]) == 0
    assert file.read_bytes() == PACKAGE.packed()
    assert capsys.readouterr().out.endswith("Its secrets are variables of the environment: TRIPS_SINK.\n")
    assert cli.run(["functions", "export", "trips", "-o", str(tmp_path / "no" / "trips.zip"), *at]) == 2


def test_a_difference_is_printed_as_a_diff_with_exit_code_3(
    server: Endpoint, at: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exports(server)
    file = tmp_path / "trips.zip"
    file.write_bytes(PACKAGE.packed())
    assert cli.run(["functions", "diff", "trips", str(file), *at]) == 0
    assert capsys.readouterr().out == ""
    file.write_bytes(replace(PACKAGE, code={"trips.py": b"version = '3'\n"}).packed())
    assert cli.run(["functions", "diff", "trips", str(file), *at]) == 3
    assert "-version = '2'\n+version = '3'\n" in capsys.readouterr().out


def test_without_a_server_nothing_is_changed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["functions", "pause", "trips", "--admin", "unix:nowhere"]) == 1
    assert "No server answers at unix:nowhere" in capsys.readouterr().err
