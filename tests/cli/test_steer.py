"""``mldserver pause`` and its like: what the server is asked, and what its answer means."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from support.admin_endpoint import DOCUMENT, Endpoint, endpoint
from support.certificates import Certificates

from mldserver import cli
from mldserver.admin.access import make_token, read_token
from mldserver.base.tls import ServerTLS
from mldserver.cli.status import ServerOptions
from mldserver.errors import OperatorError


@pytest.fixture
def server() -> Iterator[Endpoint]:
    with endpoint() as served:
        yield served


@pytest.mark.parametrize(
    ("words", "act", "argument"),
    [
        (["pause"], "pause", ""),
        (["pause", "shardId-0"], "pause", "shardId-0"),
        (["resume"], "resume", ""),
        (["resume", "shardId-0"], "resume", "shardId-0"),
        (["flush"], "flush", ""),
        (["drain-shard", "shardId-0"], "drain-shard", "shardId-0"),
        (["log-level", "debug"], "log-level", "debug"),
        (["reload"], "reload", ""),
    ],
)
def test_a_command_is_one_act(
    words: list[str],
    act: str,
    argument: str,
    server: Endpoint,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_token(tmp_path / "token")
    server.answers[f"/act/{act}"] = 200, {"done": True, "text": "It is done."}
    assert cli.run([*words, "--admin", server.address, "--admin-token-file", "token"]) == 0
    assert capsys.readouterr().out == "It is done.\n"
    token = f"Bearer {read_token(tmp_path / 'token')}"
    assert server.asked[-1] == (f"/act/{act}", {"argument": argument}, token)


def test_the_token_that_the_server_has_made_is_found_in_its_output_folder(
    server: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out" / "_mldserver" / "admin.token"
    make_token(file)
    monkeypatch.setenv("MLDSERVER_ADMIN", server.address)
    monkeypatch.setenv("MLDSERVER_PIPELINE", "trips")
    server.answers["/act/pause"] = 200, {"done": True, "text": "It is paused."}
    assert cli.run(["pause", "--out", "out"]) == 0
    assert server.asked[-1][2] == f"Bearer {read_token(file)}"
    assert cli.run(["pause", "--out", "elsewhere"]) == 2
    assert "Give --out as the server has it" in capsys.readouterr().err


def test_an_act_that_is_not_done_is_the_operators_affair(
    server: Endpoint, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    make_token(tmp_path / "token")
    where = ["--admin", server.address, "--admin-token-file", "token"]
    server.answers["/act/reload"] = 409, {"done": False, "text": "It does not load: line 3."}
    assert cli.run(["reload", *where]) == 2
    assert capsys.readouterr().err == "mldserver: It does not load: line 3.\n"
    assert cli.run(["reload", *where, "--json"]) == 2
    assert json.loads(capsys.readouterr().out) == {"done": False, "text": "It does not load: line 3."}


def test_what_the_server_says_is_text_and_neither_markup_nor_control(
    server: Endpoint, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    make_token(tmp_path / "token")
    where = ["--admin", server.address, "--admin-token-file", "token"]
    for done in (True, False):
        server.answers["/act/pause"] = 200, {"done": done, "text": "[red]a\x1b[0m\nb"}
        assert cli.run(["pause", *where]) == (0 if done else 2)
        captured = capsys.readouterr()
        assert "[red]a\\x1b[0m\nb\n" in captured.out + captured.err


def test_a_server_of_another_pipeline_is_left_alone(
    server: Endpoint,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_token(tmp_path / "out" / "_mldserver" / "admin.token")
    monkeypatch.setenv("MLDSERVER_ADMIN", server.address)
    monkeypatch.setenv("MLDSERVER_PIPELINE", "trips")
    server.document = msgspec.structs.replace(DOCUMENT, pipeline="orders")
    assert cli.run(["pause", "--out", "out"]) == 1
    assert "is of the pipeline orders, not of trips." in capsys.readouterr().err
    assert [path for path, *_ in server.asked] == ["/status"]


def test_a_server_that_hangs_is_not_waited_for(
    server: Endpoint, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    make_token(tmp_path / "token")
    server.answers["/livez"] = 503, {"live": False, "reason": "The event loop has not turned for 9 s."}
    assert cli.run(["flush", "--admin", server.address, "--admin-token-file", "token"]) == 1
    assert "cannot act: The event loop has not turned for 9 s." in capsys.readouterr().err
    assert "/act/flush" not in [path for path, *_ in server.asked]


def test_without_a_server_nothing_is_steered(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    make_token(tmp_path / "token")
    assert cli.run(["flush", "--admin", "127.0.0.1:1", "--admin-token-file", "token"]) == 1
    assert "No server answers at 127.0.0.1:1: Connection refused." in capsys.readouterr().err


def test_a_token_that_cannot_be_read_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "token").touch(mode=0o644)
    assert cli.run(["flush", "--admin", "127.0.0.1:1", "--admin-token-file", "token"]) == 2
    assert "may be read by others (mode 644)" in capsys.readouterr().err
    assert cli.run(["flush", "--admin", "127.0.0.1:1", "--out", "out"]) == 2
    assert "There is no token of a server at " in capsys.readouterr().err


def test_the_token_that_a_server_has_made_for_loopback_goes_nowhere_else(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(OperatorError, match="There is no token of a server at"):
        ServerOptions(admin="127.0.0.1:7071", out=str(out)).client(steers=True)
    for place, insecure in (("192.0.2.1:7071", True), ("unix:admin", False)):
        ServerOptions(admin=place, insecure=insecure, out=str(out)).client(steers=True)  # it looks for none


def test_a_client_certificate_needs_no_token(tmp_path: Path) -> None:
    files = Certificates(tmp_path)
    with endpoint(tls=ServerTLS(files.server, client_ca=files.ca).context) as server:
        server.answers["/act/flush"] = 200, {"done": True, "text": "It is done."}
        own = ["--ca", str(files.ca), "--certificate", str(files.client)]
        assert cli.run(["flush", "--admin", server.address, *own]) == 0
        assert server.asked[-1] == ("/act/flush", {"argument": ""}, None)
