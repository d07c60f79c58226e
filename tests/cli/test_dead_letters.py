"""``mldserver dead-letters`` beside a server that lives."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
from support.store import SqliteStore

from mldserver import cli
from mldserver.deadletters.destinations import files
from mldserver.effects import Effects
from mldserver.ledger.contract import Flush, PositionUpdate
from mldserver.output.layout import LEDGER
from mldserver.records import DeadLetter, Sequence

HOUR = 3_600_000
MANY = 50


def letter(number: int, **fields: Any) -> DeadLetter:
    shown = DeadLetter(
        "shard-1",
        Sequence(10**50 + number),
        "k",
        b'{"n": 1}',
        5,
        3,
        "ValueError: [red]no\x1b[0m\nsecond line",
        'Traceback …\n  File "h.py", line 3\n',
        "handlers.trips",
        number * HOUR,
        handler_version="7",
    )
    return replace(shown, **fields)


LETTERS = (
    letter(1),
    letter(2, error="KeyError: 'x'", data=b"\xff\x00" * 2000),
    letter(3, shard_id="shard-2", partition_key=None, parked_behind=Sequence(7)),
)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SqliteStore]:
    store = SqliteStore(tmp_path / "out" / LEDGER, pipeline="trips", server_id="one")
    store.open(now_ms=0)
    store.register(Flush((), effects=Effects(dead_letters=LETTERS)), now_ms=1)
    yield store
    store.close()


def content(letters: tuple[DeadLetter, ...], pipeline: str, kind: Literal["jsonl", "parquet"]) -> bytes:
    return b"".join(data for _, data in files(letters, pipeline, kind))


def told(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert cli.run(["dead-letters", *arguments, "--out", "out"]) == code
    captured = capsys.readouterr()
    assert "Traceback (most" not in captured.err
    return captured.err if code else captured.out


def documents(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    return json.loads(told(capsys, *arguments, "--json"))


def listed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    return [each["letter"] for each in documents(capsys, "list", *arguments)]


def test_the_list_shows_letters_in_order_and_counts_them(
    server: SqliteStore, capsys: pytest.CaptureFixture[str]
) -> None:
    server.redrive(("2.1",))
    text = told(capsys, "list")
    assert "ValueError: [red]no" in text
    assert "second line" not in text
    assert "\x1b" not in text
    assert [line.split()[:2] for line in text.splitlines() if "shard-" in line] == [
        ["2.0", "-"],
        ["2.1", "yes"],
        ["2.2", "-"],
    ]
    assert text.splitlines()[-1] == "3 dead letters, 1 of them to be redriven"
    assert told(capsys, "list", "--limit", "1").splitlines()[-1].endswith("(2 more match; --limit)")


@pytest.mark.parametrize(
    ("conditions", "chosen"),
    [
        ([], ["2.0", "2.1", "2.2"]),
        (["--shard", "shard-1"], ["2.0", "2.1"]),
        (["--key", "k", "--error", "KeyError"], ["2.1"]),
        (["--since", "1970-01-01T02:00:00Z"], ["2.1", "2.2"]),
        (["--since", "2 hours"], []),
        (["--shard", "shard-9"], []),
    ],
)
def test_conditions_choose_letters(
    server: SqliteStore, capsys: pytest.CaptureFixture[str], conditions: list[str], chosen: list[str]
) -> None:
    assert listed(capsys, *conditions) == chosen


def test_every_page_of_a_long_list_is_read(server: SqliteStore, capsys: pytest.CaptureFixture[str]) -> None:
    server.register(
        Flush((), effects=Effects(dead_letters=tuple(letter(n) for n in range(1000, 2100)))), now_ms=2
    )
    assert len(listed(capsys, "--limit", "5000")) == len(LETTERS) + 1100
    assert len(listed(capsys)) == len(LETTERS) + 1100, "what a program reads is whole"


def test_a_list_as_json_that_is_not_whole_says_so(
    server: SqliteStore, capsys: pytest.CaptureFixture[str]
) -> None:
    for limit, said in (("1", "mldserver: 2 more letters match; this list is cut by --limit.\n"), ("3", "")):
        assert cli.run(["dead-letters", "list", "--out", "out", "--json", "--limit", limit]) == 0
        captured = capsys.readouterr()
        assert len(json.loads(captured.out)) == int(limit)
        assert captured.err == said


def test_every_id_that_a_list_prints_names_the_letter(
    server: SqliteStore, capsys: pytest.CaptureFixture[str]
) -> None:
    for each in documents(capsys, "list"):
        for name in (each["letter"], each["id"]):
            assert documents(capsys, "show", name) == each
    ids = [each["id"] for each in documents(capsys, "list")[:2]]
    assert documents(capsys, "redrive", *ids) == {"redriving": ["2.0", "2.1"]}
    assert documents(capsys, "purge", "--yes", *ids) == {"purged": ["2.0", "2.1"]}


def test_a_letter_is_shown_with_all_that_is_known(
    server: SqliteStore, capsys: pytest.CaptureFixture[str]
) -> None:
    text = told(capsys, "show", "2.0")
    for part in ('{"n": 1}', "handlers.trips", "second line", "line 3"):
        assert part in text
    assert "ff 00" in told(capsys, "show", "2.1")
    assert "parked behind" in told(capsys, "show", LETTERS[2].record)
    found = documents(capsys, "show", "2.0")
    assert (found["id"], found["pipeline"], found["letter"]) == (
        f"trips/shard-1/{10**50 + 1}/0",
        "trips",
        "2.0",
    )


LONG = letter(
    4,
    shard_id="shardId-000000000004",
    data=json.dumps({str(n): ":100: " * 5 for n in range(30)}, separators=(",", ":")).encode(),
    error="ValueError: " + "w" * 1500 + " words " * 300 + "end",
    traceback="Traceback …\n" + "v" * 1500 + "\n",
)


def test_nothing_is_cut_or_wrapped_where_no_terminal_bounds_it(
    server: SqliteStore, capsys: pytest.CaptureFixture[str]
) -> None:
    server.register(Flush((), effects=Effects(dead_letters=(LONG,))), now_ms=2)
    lines = told(capsys, "show", "3.0").splitlines()
    for whole in (LONG.record, LONG.error, LONG.data.decode(), "v" * 1500):
        assert sum(line.endswith(whole) for line in lines) == 1
    (listed_line,) = [line for line in told(capsys, "list").splitlines() if LONG.shard_id in line]
    assert listed_line.endswith(LONG.error)


def test_a_terminal_shows_all_of_a_letter_in_its_width(server: SqliteStore) -> None:
    server.register(Flush((), effects=Effects(dead_letters=(LONG,))), now_ms=2)
    text = on_terminal("show", "3.0", columns=80)
    assert max(map(len, text.splitlines())) <= 80
    packed = "".join(text.split())
    for whole in (LONG.record, LONG.error, LONG.data.decode(), "v" * 1500):
        assert "".join(whole.split()) in packed


def on_terminal(*arguments: str, columns: int) -> str:
    """Run the command in a terminal that is so many columns wide; return what it shows."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    command = [sys.executable, "-m", "mldserver", "dead-letters", *arguments, "--out", "out"]
    environ = {name: value for name, value in os.environ.items() if name not in {"COLUMNS", "LINES"}}
    shown = b""
    with subprocess.Popen(command, stdin=slave, stdout=slave, env=environ | {"TERM": "xterm"}) as process:
        os.close(slave)
        try:
            while data := os.read(master, 65_536):
                shown += data
        except OSError:  # Linux's end of a terminal that nobody holds any more
            pass
    os.close(master)
    assert process.returncode == 0
    return shown.decode().replace("\r\n", "\n")


def test_a_payload_is_written_as_it_is(
    server: SqliteStore, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert cli.run(["dead-letters", "show", "2.1", "--payload", "--out", "out"]) == 0
    assert capfdbinary.readouterr().out == LETTERS[1].data


def test_letters_are_marked_and_the_mark_is_taken_away(
    server: SqliteStore, capsys: pytest.CaptureFixture[str]
) -> None:
    assert documents(capsys, "redrive", "--shard", "shard-1") == {"redriving": ["2.0", "2.1"]}
    assert "1 letters are marked for redrive" in told(capsys, "redrive", "2.2")
    assert documents(capsys, "redrive", "2.0", "--cancel") == {"cancelled": ["2.0"]}
    assert [each.id for each in server.letters(wanted=True)] == ["2.1", "2.2"]
    assert "0 letters" in told(capsys, "redrive", "--key", "nobody")


def test_letters_are_deleted_only_at_a_second_word(
    server: SqliteStore, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = told(capsys, "purge", "--all", code=2)
    assert "3 letters would be deleted" in refused
    assert len(server.letters()) == len(LETTERS)
    server.register(
        Flush((), effects=Effects(dead_letters=tuple(letter(n) for n in range(100, 100 + MANY)))), now_ms=2
    )
    assert "1 letters are deleted" in told(capsys, "purge", "2.1", "--yes")
    assert len(documents(capsys, "purge", "--all", "--yes")["purged"]) == MANY + 2
    assert server.letters() == ()


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["redrive"], "not clear which"),
        (["purge", "2.0", "--all"], "not clear which"),
        (["redrive", "2.0", "--key", "k"], "not clear which"),
        (["show", "77"], "no dead letter 77"),
        (["redrive", "2.0", "77"], "no dead letter 77"),
        (["redrive", "--from", "x.jsonl", "--all"], "all letters of the files"),
        (["redrive", "--from", "x.jsonl"], "no files of dead letters"),
        (["list", "--since", "noon"], "neither a time nor a duration"),
        (["list", "--limit", "-1"], "Must be >= 0"),
    ],
)
def test_what_is_not_meant_is_refused_and_changes_nothing(
    server: SqliteStore, capsys: pytest.CaptureFixture[str], arguments: list[str], why: str
) -> None:
    assert why in told(capsys, *arguments, code=2)
    assert server.letters(wanted=True) == ()


def test_letters_of_files_are_put_into_the_ledger_once(
    server: SqliteStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fresh = (letter(9), letter(8), LETTERS[0])
    (tmp_path / "a.jsonl").write_bytes(content(fresh, "trips", "jsonl") * 2)
    (tmp_path / "b.parquet").write_bytes(content((letter(9, attempts=4),), "trips", "parquet"))
    both = ("--from", str(tmp_path / "*.jsonl"), "--from", str(tmp_path / "b.parquet"))
    assert documents(capsys, "redrive", *both) == {"redriving": 2, "delivered_again": 0}
    assert [each.letter for each in server.letters(wanted=True)] == [letter(8), letter(9, attempts=4)]
    assert "0 letters are in the ledger" in told(capsys, "redrive", *both)


def test_letters_whose_records_come_again_are_left_out(
    server: SqliteStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.open_shard("shard-1")
    server.open_shard("shard-2")
    server.register(Flush((PositionUpdate("shard-1", 1, Sequence(10**50 + 8), 5, 5),)), now_ms=3)
    ahead = (letter(8), letter(9), letter(7, shard_id="shard-2"), letter(5, shard_id="pruned"))
    (tmp_path / "a.jsonl").write_bytes(content(ahead, "trips", "jsonl"))
    told_so = told(capsys, "redrive", "--from", "a.jsonl")
    assert "2 letters are in the ledger" in told_so
    assert "2 are left out: their records are delivered again" in told_so
    assert [each.letter for each in server.letters(wanted=True)] == [ahead[3], ahead[0]]


def test_letters_of_another_pipeline_are_refused(
    server: SqliteStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_bytes(content((letter(9),), "others", "jsonl"))
    assert "of the pipeline 'others'" in told(capsys, "redrive", "--from", str(tmp_path / "a.jsonl"), code=2)
    (tmp_path / "a.jsonl").write_text("[]\n")
    assert "list is no dead letter" in told(capsys, "redrive", "--from", "a.jsonl", code=2)
