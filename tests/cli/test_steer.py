"""``mldserver pause`` and its like: what the server is asked, and what its answer means."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from support.admin_endpoint import DOCUMENT, Endpoint, endpoint
from support.statuses import function
from support.statuses import server as several

from mldserver import cli


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Endpoint]:
    with endpoint(path=tmp_path / "admin.sock") as served:
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
    server.answers[f"/act/{act}"] = 200, {"done": True, "text": "It is done."}
    assert cli.run([*words, "--admin", server.address]) == 0
    assert capsys.readouterr().out == "It is done.\n"
    assert server.asked[-1] == (f"/act/{act}", {"argument": argument})


def test_the_socket_is_found_in_the_output_folder_by_the_endpoints_port(
    server: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "out" / "_mldserver"
    folder.mkdir(parents=True)
    (folder / "admin-7071.sock").symlink_to(tmp_path / "admin.sock")
    monkeypatch.setenv("MLDSERVER_ADMIN", "0.0.0.0:7071")
    monkeypatch.setenv("MLDSERVER_PIPELINE", "trips")
    monkeypatch.setenv("MLDSERVER_INSECURE", "true")
    server.answers["/act/pause"] = 200, {"done": True, "text": "It is paused."}
    assert cli.run(["pause", "--out", "out"]) == 0
    assert server.asked[-1] == ("/act/pause", {"argument": ""})
    capsys.readouterr()
    assert cli.run(["pause", "--out", "elsewhere"]) == 1, "a server may come"
    told = capsys.readouterr().err
    assert (
        "elsewhere/_mldserver/admin-7071.sock does not exist. Start the server, or run the command on" in told
    )


def test_a_server_with_several_functions_hears_which_one_is_meant(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with endpoint(path=tmp_path / "admin.sock") as served:
        served.document = several(function("trips"), function("stops"))
        served.answers["/act/flush"] = 200, {"done": True, "text": "It is durable."}
        assert cli.run(["flush", "--admin", served.address, "--pipeline", "stops"]) == 0
        assert served.asked[-1] == ("/act/flush", {"argument": "", "function": "stops"})
        capsys.readouterr()
        assert cli.run(["flush", "--admin", served.address, "--pipeline", "taxis"]) == 1
        assert "is of the pipeline trips, stops, not of taxis." in capsys.readouterr().err


def test_an_act_that_is_not_done_is_the_operators_affair(
    server: Endpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--admin", server.address]
    server.answers["/act/reload"] = 409, {"done": False, "text": "It does not load: line 3."}
    assert cli.run(["reload", *where]) == 2
    assert capsys.readouterr().err == "mldserver: It does not load: line 3.\n"
    assert cli.run(["reload", *where, "--json"]) == 2
    assert json.loads(capsys.readouterr().out) == {"done": False, "text": "It does not load: line 3."}


def test_what_the_server_says_is_text_and_neither_markup_nor_control(
    server: Endpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--admin", server.address]
    for done in (True, False):
        server.answers["/act/pause"] = 200, {"done": done, "text": "[red]a\x1b[0m\nb"}
        assert cli.run(["pause", *where]) == (0 if done else 2)
        captured = capsys.readouterr()
        assert "[red]a\\x1b[0m\nb\n" in captured.out + captured.err


def test_a_server_of_another_pipeline_is_left_alone(
    server: Endpoint,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MLDSERVER_ADMIN", server.address)
    monkeypatch.setenv("MLDSERVER_PIPELINE", "trips")
    server.document = msgspec.structs.replace(DOCUMENT, pipeline="orders")
    assert cli.run(["pause", "--out", "out"]) == 1
    assert "is of the pipeline orders, not of trips." in capsys.readouterr().err
    assert [path for path, _ in server.asked] == ["/status"]


def test_without_a_server_nothing_is_steered(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["flush", "--admin", "unix:nowhere"]) == 1
    assert "No server answers at unix:nowhere: No such file or directory." in capsys.readouterr().err
