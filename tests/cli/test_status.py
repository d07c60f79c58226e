"""``mldserver status``: a server's, or what the ledger holds when none answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.admin_endpoint import DOCUMENT, Endpoint, endpoint
from support.statuses import function
from support.statuses import server as several
from support.store import SqliteStore

from mldserver import cli
from mldserver.cli.render import format_duration, format_size
from mldserver.ledger.contract import Flush, PositionUpdate
from mldserver.output.layout import LEDGER
from mldserver.records import Sequence
from mldserver.status_document import SCHEMA, ShardRow

NOBODY = "127.0.0.1:1"


@pytest.fixture
def server() -> Iterator[Endpoint]:
    with endpoint() as served:
        yield served


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[SqliteStore]:
    store = SqliteStore(tmp_path / "out" / LEDGER, pipeline="trips", server_id="one")
    store.open(now_ms=0)
    store.open_shard("shardId-7")
    store.register(Flush((PositionUpdate("shardId-7", 1, Sequence(10**50, 2), 5, 5),), (), clock=9), now_ms=1)
    yield store
    store.close()


def told(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert cli.run(["status", *arguments]) == code
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return captured.err if code == 2 else captured.out


def line(text: str, beginning: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(beginning))


def test_one_look_shows_everything_that_a_person_on_call_asks_for(
    server: Endpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    text = told(capsys, "--admin", server.address)
    assert line(text, "pipeline").split(None, 1)[1] == "trips, handlers.trips"
    assert line(text, "server ").endswith("one on here, process 4711, 1.2.3, up 3 h 2 min")
    assert line(text, "state").split() == ["state", "ready"]
    assert line(text, "records").endswith("123,456 in 789 batches, 5.0 MiB")
    assert line(text, "rows ").endswith("99,999, 88,888 durable, 0 late")
    assert line(text, "failures").endswith("dead letters 2, ValueError 2")
    held = "at 1970-01-01T09:00:00Z, held by shardId-1, server two, reason it lags, stuck"
    assert line(text, "watermark").endswith(held)
    assert line(text, "windows  ").endswith("open 3, published 7")
    assert line(text, "Spark").endswith("version 4.0.1, master local[2], trouble no executor")
    assert line(text, "dead letters").endswith("waiting 2")
    assert line(text, "budgets").endswith("buffer 12 MiB of 256 MiB")
    assert line(text, "keyed state").endswith("keys here 1,234, files 3, size 2.0 MiB, snapshots 2")
    assert line(text, "timers").endswith(
        "pending 4,000, set 5,000, cancelled 600, fired 390, skipped 10, held 1 shard, shardId-1 for 1 min 30 s"
    )
    assert line(text, "shardId-0").split()[1:4] == ["connected", "1.5", "s"]
    assert "495:2" in line(text, "shardId-0")
    assert "1 min 30 s" in line(text, "shardId-1")
    assert "4.2 s" in line(text, "shardId-1")
    assert "KeyError: 'x'" in line(text, "1970-01-01T01")
    assert line(text, "two").split()[:3] == ["two", "1.0", "s"]
    assert line(text, "1970-01-01T01:00:00Z").endswith("496:0      ValueError: bad")


def test_of_windows_the_latest_are_shown_and_all_that_are_not_done(
    server: Endpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    text = told(capsys, "--admin", server.address)
    shown = [
        row.split()[0] for row in text.splitlines() if row.startswith("1970-01-01T0") and "-00-00Z" in row
    ]
    assert shown == [f"1970-01-01T0{n}-00-00Z" for n in (1, 3, 4, 5, 6, 7)]


def test_what_others_have_named_is_text_and_neither_markup_nor_control(
    server: Endpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    text = told(capsys, "--admin", server.address)
    assert "shardId-[red]" in text
    assert "\x1b" not in text


def test_the_exit_code_tells_ready_from_not_and_the_reasons_are_shown(
    server: Endpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    server.document = msgspec.structs.replace(
        DOCUMENT, ready=False, paused=True, reasons=("No worker has loaded it.",)
    )
    text = told(capsys, "--admin", server.address, code=3)
    assert line(text, "state").split(None, 1)[1] == "NOT READY, paused"
    assert "No worker has loaded it." in text


def test_as_json_it_is_the_document_with_what_this_program_does_not_know_of(
    server: Endpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    document = json.loads(msgspec.json.encode(DOCUMENT)) | {"novel": 1}
    server.document = document
    assert json.loads(told(capsys, "--admin", server.address, "--json")) == document


def test_where_the_server_is_may_stand_in_the_settings(
    server: Endpoint, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLDSERVER_ADMIN", server.address)
    assert "trips" in told(capsys)


def test_a_server_of_another_pipeline_is_none(
    server: Endpoint,
    ledger: SqliteStore,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MLDSERVER_ADMIN", server.address)
    assert "4711" in told(capsys, "--out", "out")
    server.document = msgspec.structs.replace(DOCUMENT, pipeline="orders")
    text = told(capsys, "--out", "out", code=3)
    assert "is of the pipeline orders, not of trips." in text
    assert "shardId-7" in text
    # Also where the settings alone name it; an address alone is what is meant.
    monkeypatch.setenv("MLDSERVER_OUT", "out")
    assert "shardId-7" in told(capsys, code=3)
    assert "4711" in told(capsys, "--admin", server.address)
    monkeypatch.delenv("MLDSERVER_OUT")
    assert "4711" in told(capsys)
    monkeypatch.setenv("MLDSERVER_HANDLER", "handlers.trips")
    assert "not of trips" in told(capsys, code=2)
    assert "not of rides" in told(capsys, "--admin", server.address, "--pipeline", "rides", code=2)


# Without a server


def test_without_a_server_the_ledger_is_shown_and_that_is_said(
    ledger: SqliteStore, capsys: pytest.CaptureFixture[str]
) -> None:
    text = told(capsys, "--admin", NOBODY, "--out", "out", code=3)
    first, *_ = text.splitlines()
    assert first == f"No server answers at {NOBODY}: Connection refused. This is what the ledger holds:"
    assert "shardId-7" in text


def test_as_json_the_ledger_has_readiness_in_the_same_words(
    ledger: SqliteStore, capsys: pytest.CaptureFixture[str]
) -> None:
    document: Any = json.loads(told(capsys, "--admin", NOBODY, "--out", "out", "--json", code=3))
    assert document["ready"] is False
    assert document["reasons"] == [f"No server answers at {NOBODY}: Connection refused."]
    assert [shard["shard_id"] for shard in document["ledger"]["shards"]] == ["shardId-7"]


def test_without_a_server_and_a_ledger_both_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys, "--admin", NOBODY, "--out", "nowhere", code=2)
    assert f"No server answers at {NOBODY}: Connection refused. Nor can the ledger be read: " in text


@pytest.mark.parametrize(
    ("status", "body", "why"),
    [
        (503, {"error": "Nothing has come yet."}, "has no status to show: Nothing has come yet."),
        (200, b"<html>", "The answer is not a status of mldserver"),
        (200, {"schema": 1}, "The answer is not a status of mldserver"),
    ],
)
def test_what_has_no_status_to_show_is_no_server(
    status: int,
    body: Any,
    why: str,
    server: Endpoint,
    ledger: SqliteStore,
    capsys: pytest.CaptureFixture[str],
) -> None:
    server.answers["/status"] = status, body
    assert why in told(capsys, "--admin", server.address, "--out", "out", code=3)


# What is wrong


def test_a_server_that_refuses_is_not_passed_over_for_the_ledger(
    server: Endpoint, ledger: SqliteStore, capsys: pytest.CaptureFixture[str]
) -> None:
    server.answers["/status"] = 403, {"error": "This needs a client certificate."}
    text = told(capsys, "--admin", server.address, "--out", "out", code=2)
    assert f"The server at {server.address} refuses: This needs a client certificate." in text


def test_a_newer_servers_status_is_told_of(server: Endpoint, capsys: pytest.CaptureFixture[str]) -> None:
    server.document = {"schema": SCHEMA + 1}
    assert f"has schema {SCHEMA + 1}, and this program knows {SCHEMA}" in told(
        capsys, "--admin", server.address, code=2
    )


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--admin", "none"], "there is no endpoint to ask"),
        (["--admin", "7071"], "it does not end in a port"),
        (
            ["--admin", "192.0.2.1:7071", "--ca", "mldserver.toml"],
            "The certificate mldserver.toml cannot be used",
        ),
        (["--admin", "192.0.2.1:7071", "--ca", "missing.pem"], "missing.pem cannot be used: No such file"),
    ],
)
def test_what_cannot_be_meant_is_told_before_anybody_is_asked(
    arguments: list[str], why: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "mldserver.toml").touch()
    assert why in told(capsys, *arguments, code=2)


def test_an_endpoint_that_the_settings_deny_is_not_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no endpoint to ask" in told(capsys, code=2)


# Words


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 ms"),
        (0.25, "250 ms"),
        (4.24, "4.2 s"),
        (59.7, "1 min"),
        (90, "1 min 30 s"),
        (7260, "2 h 1 min"),
        (90_000, "1 d 1 h"),
        (86_400, "1 d"),
    ],
)
def test_a_time_is_said_in_one_or_two_units(seconds: float | None, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (12 << 20, "12 MiB"),
        (5 << 30, "5.0 GiB"),
        (3 << 50, "3,072.0 TiB"),
    ],
)
def test_a_size_is_a_short_number(amount: int, text: str) -> None:
    assert format_size(amount) == text


def test_a_server_with_several_functions_shows_each_in_a_line(
    server: Endpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = function("stops", ready=False, lifecycle="failed", reasons=("line 3 is wrong",))
    lags = (
        ShardRow(id="a", state="connected", lag_ms=400),
        ShardRow(id="b", state="connected", lag_ms=9_000),
    )
    trips = function("trips", handler_version="9f2c41d8", shards=lags)
    gone = function("taxis", ready=False, lifecycle="undeployed")
    server.document = several(trips, broken, gone)
    shown = told(capsys, "--admin", server.address, code=3)
    assert not [name for name in ("pipeline", "watermark", "windows", "failures") if name in shown]
    assert line(shown, "state").split(None, 1)[1] == "NOT READY"
    assert line(shown, "reasons").split(None, 1)[1] == "stops: line 3 is wrong"
    assert line(shown, "trips").split() == [
        "trips",
        "deployed",
        "yes",
        "2",
        "9.0",
        "s",
        "10",
        "0",
        "9f2c41d8",
        "-",
        "-",
        "-",
    ]
    assert line(shown, "taxis").split()[:3] == ["taxis", "undeployed", "-"], "nobody waits for it"
    row = next(each for each in shown.splitlines() if each.startswith("stops "))
    assert row.split()[:3] == ["stops", "failed", "no"]
    assert row.endswith("line 3 is wrong")


def test_one_of_several_functions_is_shown_as_the_only_one_would_be(
    server: Endpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = function("stops", ready=False, lifecycle="failed", reasons=("line 3 is wrong",))
    server.document = several(function("trips"), broken)
    where = ["--admin", server.address, "--function"]
    shown = told(capsys, *where, "trips")
    assert line(shown, "pipeline").split(None, 1)[1] == "trips, handlers.trips"
    assert line(shown, "state").split(None, 1)[1] == "ready"
    shown = told(capsys, *where, "stops", code=3)
    assert line(shown, "state").split(None, 1)[1] == "NOT READY, failed"
    assert line(shown, "reasons").split(None, 1)[1] == "line 3 is wrong"
    document = json.loads(told(capsys, *where, "stops", "--json", code=3))
    assert (document["pipeline"], document["host"], document["ready"]) == ("stops", "here", False)
    assert "functions" not in document
