"""Where settings may say that ledger and output lie, and what is made of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from mldserver.assembly import _locks, ledger_of
from mldserver.config.locations import (
    LEDGER_FILE,
    DynamoPlace,
    LedgerPlace,
    OutPlace,
    RemoteOut,
    SqlitePlace,
    ledger,
    out,
)
from mldserver.config.resolve import home, ledger_file, resolve
from mldserver.config.settings import Settings
from mldserver.errors import ConfigError
from mldserver.ledger.sqlite import SqliteLedger
from mldserver.output.layout import LEDGER, SERVERS
from mldserver.testing import VirtualClock

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("sqlite", SqlitePlace()),
        (" SQLite ", SqlitePlace()),
        ("sqlite:ledgers/x.sqlite", SqlitePlace(Path("ledgers/x.sqlite"))),
        ("SQLite:/var/x y", SqlitePlace(Path("/var/x y"))),
        ("dynamodb://My_Table-1.x", DynamoPlace("My_Table-1.x")),
        ("dynamodb://Ledger/?region=eu-central-1", DynamoPlace("Ledger", "eu-central-1")),
        (
            "dynamodb://Ledger?region=r&endpoint_url=http://127.0.0.1:8000",
            DynamoPlace("Ledger", "r", "http://127.0.0.1:8000"),
        ),
    ],
)
def test_a_place_is_read_and_shown_so_that_it_is_read_again(text: str, place: LedgerPlace) -> None:
    kind = ledger
    assert kind.parse(text) == place
    assert kind.parse(kind.show(place)) == place


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (5, "not text"),
        ("postgres://x", "neither sqlite nor dynamodb"),
        ("sqlite:", "names no file"),
        ("sqlite:folder/", "names no file"),
        ("sqlite:///x", "it is a URL"),
        ("dynamodb://", "no table"),
        ("dynamodb://ab", "no table"),
        ("dynamodb://table/path", "no table"),
        ("dynamodb://table?zone=x", "only endpoint_url and region"),
        ("dynamodb://table?region=", "only endpoint_url and region"),
    ],
)
def test_what_is_no_place_is_refused_with_a_reason(raw: object, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        ledger.parse(raw)


async def test_a_ledger_in_a_file_is_known_under_the_servers_name(tmp_path: Path) -> None:
    made = ledger_of(Settings(handler="h", out=tmp_path), server_id="me", clock=VirtualClock())
    assert isinstance(made, SqliteLedger)
    assert made.server_id == "me"
    await made.close()


@pytest.mark.parametrize(
    ("raw", "place"),
    [
        ("out/x", Path("out/x")),
        ("~/x", Path.home() / "x"),
        (Path("a"), Path("a")),
        ("file:///a%20b", Path("/a b")),
        ("file://localhost/a", Path("/a")),
        (" s3://bucket/x?region=r ", RemoteOut("s3://bucket/x?region=r")),
        ("hdfs:///x", RemoteOut("hdfs:///x")),
    ],
)
def test_an_output_folder_is_a_path_or_a_uri(raw: object, place: OutPlace) -> None:
    assert out.parse(raw) == place


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (5, "not text"),
        (" ", "empty"),
        ("file://host/a", "absolute path"),
        ("file://", "absolute path"),
        ("file:///a?b=c", "absolute path"),
        ("https://host/x", "not a file system that pyarrow knows"),
        ("s3://", "names no folder"),
        ("s3://bucket/x#y", "names no folder"),
    ],
)
def test_what_is_no_output_folder_is_refused_with_a_reason(raw: object, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        out.parse(raw)


def remote(**more: object) -> Settings:
    values = {"handler": "h", "out": "s3://key:hush@bucket/x", **more}
    return resolve(values, environ={}, folder=Path("/nowhere"))


def test_a_remote_output_needs_a_ledger_elsewhere_and_the_refusal_names_both() -> None:
    with pytest.raises(ConfigError) as refused:
        remote()
    assert "s3://…@bucket/x is not a local one" in refused.value.what
    assert "dynamodb://TABLE" in refused.value.advice
    assert "sqlite:PATH" in refused.value.advice


def test_credentials_in_an_output_folder_stay_out_of_the_log() -> None:
    told = remote(ledger="sqlite:x").given()
    assert told["out"].startswith("s3://…@bucket/x (")
    assert "hush" not in repr(remote(ledger="sqlite:x"))


def test_a_servers_own_files_lie_on_its_own_disk(tmp_path: Path) -> None:
    local = Settings(handler="h", out=tmp_path)
    assert home(local) == tmp_path
    assert ledger_file(local) == tmp_path / LEDGER_FILE == tmp_path / LEDGER
    beside = remote(ledger=f"sqlite:{tmp_path}/l.sqlite")
    assert ledger_file(beside) == tmp_path / "l.sqlite"
    assert home(beside) == tmp_path / "l.sqlite.home"
    homes = {
        home(remote(ledger=f"dynamodb://{table}", pipeline=pipeline, cache_dir=str(tmp_path)))
        for table in ("one", "two")
        for pipeline in ("a", "b")
    }
    assert {each.parent for each in homes} == {tmp_path / "pipelines"}
    assert len(homes) == 4


def test_locks_show_lives_only_where_a_free_one_proves_a_death(tmp_path: Path) -> None:
    table = {"ledger": "dynamodb://table", "cache_dir": str(tmp_path)}
    assert _locks(Settings(handler="h", out=tmp_path / "out", server_id="me")) is not None
    assert _locks(remote(ledger=f"sqlite:{tmp_path}/l", server_id="me")) is not None
    made_up = _locks(remote(**table))
    assert made_up is not None
    made_up.hold("me")
    assert list((home(remote(**table)) / SERVERS).iterdir())
    made_up.release()
    assert _locks(remote(**table, server_id="me")) is None
    assert not made_up.is_dead("a server on another host")
