"""``mldserver windows`` beside a server that lives."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.store import SqliteStore

from mldserver import cli
from mldserver.cli.render import format_time
from mldserver.ledger.contract import Commit, Flush, PositionUpdate, Segment, SegmentKind, WindowState
from mldserver.ledger.sqlite import SqliteLedger
from mldserver.ledger.sqlite_file import pipeline_of
from mldserver.output.layout import LEDGER
from mldserver.records import Sequence
from mldserver.status_document import Spark, WindowRow

HOUR = 3_600_000
IDS = [f"1970-01-01T0{hour}-00-00Z" for hour in range(4)]
SET_ASIDE, PUBLISHED, CUT, OPEN = IDS


def segment(hour: int, *, kind: SegmentKind = SegmentKind.WINDOW) -> Segment:
    name = f"_mldserver/segments/{IDS[hour]}/{kind}.parquet"
    return Segment(name, IDS[hour], 1000 + hour, 5000, hour * HOUR, (hour + 1) * HOUR, kind)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SqliteStore]:
    """A server that has four windows, one in each state that matters."""
    store = SqliteStore(tmp_path / "out" / LEDGER, pipeline="trips", server_id="one")
    store.open(now_ms=0)
    store.open_shard("a")
    move = PositionUpdate("a", 1, Sequence(10**50, 2), 5, 5)
    store.register(Flush((move,), tuple(segment(hour) for hour in range(4)), clock=9), now_ms=1)
    store.cut((SET_ASIDE, PUBLISHED, CUT))
    store.begin_attempts((SET_ASIDE,))
    store.set_aside(SET_ASIDE, "ValueError: [red]no\x1b[0m\n  at line 3")
    attempt = store.begin_attempts((PUBLISHED,))[PUBLISHED]
    store.commit((Commit(PUBLISHED, attempt, "staging/x", ("part-0.parquet",), 7),))
    store.published({PUBLISHED: attempt}, retain=True, now_ms=3 * HOUR)
    store.register(Flush((), (segment(1, kind=SegmentKind.RECOMPUTE),)), now_ms=4)
    yield store
    store.close()


def told(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert cli.run(["windows", *arguments]) == code
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return captured.err if code else captured.out


def documents(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    return json.loads(told(capsys, *arguments, "--json"))


def test_the_version_of_the_table_is_shown_or_why_it_cannot_be_read(
    server: SqliteStore, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    where, versions = ("--out", "out"), {PUBLISHED: "41", "another": "42"}
    assert {row["table_version"] for row in documents(capsys, "list", *where)} == {None}
    monkeypatch.setenv("MLDSERVER_SINK", "delta:lake")
    monkeypatch.setattr("mldserver.sinks.delta.versions", lambda _: versions)
    found = {row["window"]: row["table_version"] for row in documents(capsys, "list", *where)}
    assert found == dict.fromkeys(IDS) | {PUBLISHED: "41"}
    assert documents(capsys, "show", PUBLISHED, *where)["table_version"] == "41"
    text = told(capsys, "list", "--all", *where)
    assert "table version" in text

    def away(_: object) -> None:
        raise OSError("s3://key:secret@lake is away")

    monkeypatch.setattr("mldserver.sinks.delta.versions", away)
    text = told(capsys, "list", *where)
    assert "The table delta:" in text
    assert "cannot be read: " in text
    assert "secret" not in text


def test_the_list_shows_what_is_not_published_oldest_first(
    server: SqliteStore, capsys: pytest.CaptureFixture[str]
) -> None:
    text = told(capsys, "list", "--out", "out")
    lines = [line for line in text.splitlines() if line.startswith("1970")]
    assert [line.split()[0] for line in lines] == [SET_ASIDE, CUT, OPEN]
    assert "set_aside" in lines[0]
    assert "1,000" in lines[0]
    assert text.splitlines()[-1] == "1 open, 1 cut, 1 published, 1 set aside (1 not shown)"


def test_what_handlers_have_written_is_text_and_neither_markup_nor_control(
    server: SqliteStore, capsys: pytest.CaptureFixture[str]
) -> None:
    text = told(capsys, "list", "--out", "out")
    assert "ValueError: [red]no" in text
    assert "\x1b" not in text
    assert "at line 3" not in text
    shown = told(capsys, "show", SET_ASIDE, "--out", "out")
    assert "ValueError: [red]no" in shown
    assert "at line 3" in shown
    assert "\x1b" not in shown


def test_all_shows_retained_ones_too(server: SqliteStore, capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys, "list", "--out", "out", "--all")
    assert [line.split()[0] for line in text.splitlines() if line.startswith("1970")] == IDS
    assert "not shown" not in text


def test_a_state_selects_in_either_form(server: SqliteStore, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("set_aside", "set-aside"):
        chosen = documents(capsys, "list", "--out", "out", "--state", name, "--state", "cut")
        assert [each["window"] for each in chosen] == [SET_ASIDE, CUT]


def test_the_list_as_json_has_every_window(server: SqliteStore, capsys: pytest.CaptureFixture[str]) -> None:
    listed = documents(capsys, "list", "--out", "out")
    assert [each["window"] for each in listed] == IDS
    assert listed[1] == {
        "window": PUBLISHED,
        "state": "published",
        "halted": False,
        "skipped": False,
        "revision": 1,
        "attempts": 1,
        "owner": None,
        "start_ms": HOUR,
        "end_ms": 2 * HOUR,
        "segments": 2,
        "rows": 2002,
        "bytes": 10_000,
        "rows_waiting": 1001,
        "rows_out": 7,
        "retained": True,
        "published_ms": 3 * HOUR,
        "error": None,
        "table_version": None,
    }


def test_show_tells_all_of_one_window(server: SqliteStore, capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys, "show", PUBLISHED, "--out", "out")
    lines = [line.split() for line in text.splitlines()]
    for shown in (["start", "1970-01-01T01:00:00Z"], ["rows", "out", "7"], ["files", "part-0.parquet"]):
        assert shown in lines
    assert "\nwaiting\n" in text
    found = documents(capsys, "show", PUBLISHED, "--out", "out")
    assert [each["kind"] for each in (*found["segments"], *found["waiting"])] == ["window", "recompute"]
    assert found["files"] == ["part-0.parquet"]


def test_a_retry_sets_the_window_back_and_the_server_adopts_it(
    server: SqliteStore, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"{SET_ASIDE}  is tried again" in told(capsys, "retry", SET_ASIDE, "--out", "out")
    assert [entry.window_id for entry in server.adopt()] == [SET_ASIDE]
    assert told(capsys, "retry", SET_ASIDE, "--out", "out", code=2) == (
        f"mldserver: Nothing of the kind can be done with window {SET_ASIDE}: it is cut. "
        "`mldserver windows list` shows which are halted or set aside.\n"
    )


def test_a_published_window_is_computed_again_or_the_reason_is_told(
    server: SqliteStore, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = told(capsys, "retry", "--published", PUBLISHED, CUT, "--out", "out", code=2)
    assert f"Window {CUT} cannot be computed again: it is cut, not published" in refused
    assert documents(capsys, "retry", "--published", PUBLISHED, "--out", "out") == {"retried": [PUBLISHED]}
    assert [(entry.window_id, entry.revision) for entry in server.adopt()] == [(PUBLISHED, 2)]
    attempt = server.begin_attempts((PUBLISHED,))[PUBLISHED]
    server.commit((Commit(PUBLISHED, attempt, "staging/y", ("part-1.parquet",), 7),))
    server.published({PUBLISHED: attempt}, retain=True, now_ms=4 * HOUR)
    assert server.expire(published_before_ms=2**60, keep_bytes=0)
    refused = told(capsys, "retry", "--published", PUBLISHED, "--out", "out", code=2)
    assert "its segments are deleted. They are kept for `retention`" in refused


def test_a_skipped_window_is_not_computed_again(
    server: SqliteStore, capsys: pytest.CaptureFixture[str]
) -> None:
    told(capsys, "skip", SET_ASIDE, "--out", "out")
    refused = told(capsys, "retry", "--published", SET_ASIDE, "--out", "out", code=2)
    assert "it was skipped, and stays as it is" in refused


def test_a_halted_window_is_shown_with_its_error_and_what_is_decided_reaches_the_ledger(
    server: SqliteStore, capsys: pytest.CaptureFixture[str]
) -> None:
    server.halt(CUT, "OSError: no space left\nmore", first=True)
    text = told(capsys, "list", "--out", "out")
    (line,) = (line for line in text.splitlines() if line.startswith(CUT))
    assert line.split()[1:3] == ["cut", "yes"]
    assert line.endswith("OSError: no space left")
    assert text.splitlines()[-1].startswith("1 open, 1 cut, 1 published, 1 set aside; 1 halted")
    assert "more" in told(capsys, "show", CUT, "--out", "out")
    found = documents(capsys, "show", CUT, "--out", "out")
    assert (found["halted"], found["error"]) == (True, "OSError: no space left\nmore")
    # What `list` names, the next command takes.
    halted = [each["window"] for each in documents(capsys, "list", "--out", "out") if each["halted"]]
    assert documents(capsys, "retry", *halted, "--out", "out") == {"retried": [CUT]}
    assert server.peek().windows[CUT].error is None
    server.halt(CUT, "no", first=True)
    assert "is set aside with its rows" in told(capsys, "set-aside", CUT, "--out", "out")
    assert server.peek().windows[CUT].state is WindowState.SET_ASIDE
    server.register(Flush((), (segment(2, kind=SegmentKind.RECOMPUTE),)), now_ms=5)
    text = told(capsys, "skip", CUT, SET_ASIDE, "--out", "out")
    assert (
        f"{CUT}  is skipped: it counts as published, without new output, and 2,004 rows are given up." in text
    )
    assert "and 1,000 rows are given up." in text
    entry = server.peek().windows[CUT]
    assert (entry.state, entry.files, entry.error) == (WindowState.PUBLISHED, (), "no")
    shown = told(capsys, "show", CUT, "--out", "out")
    assert ["skipped", "yes"] in [line.split() for line in shown.splitlines()]
    assert documents(capsys, "list", "--out", "out")[2]["halted"] is False


def test_what_cannot_be_decided_about_a_window_names_what_can(
    server: SqliteStore, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = told(capsys, "set-aside", SET_ASIDE, "--out", "out", code=2)
    assert "it is set aside. What can be done is `retry`, `skip`." in refused
    assert "shows which are halted" in told(capsys, "skip", CUT, "--out", "out", code=2)
    attempt = server.begin_attempts((CUT,))[CUT]
    server.commit((Commit(CUT, attempt, "staging/y", (), 0),))
    server.halt(CUT, "the table is away", first=True)
    refused = told(capsys, "skip", CUT, "--out", "out", code=2)
    assert "it is committed, halted. What can be done is `retry`." in refused
    assert documents(capsys, "retry", CUT, "--out", "out") == {"retried": [CUT]}


def test_a_retry_with_a_wrong_name_among_several_changes_nothing(
    server: SqliteStore, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "no window nope" in told(capsys, "retry", SET_ASIDE, "nope", "--out", "out", code=2)
    assert server.peek().windows[SET_ASIDE].state is WindowState.SET_ASIDE
    assert documents(capsys, "retry", SET_ASIDE, SET_ASIDE, "--out", "out") == {"retried": [SET_ASIDE]}


def test_a_window_that_is_not_there_is_one_sentence_and_exit_code_2(
    server: SqliteStore, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told(capsys, "show", "nope", "--out", "out", code=2).startswith(
        "mldserver: The ledger has no window nope."
    )
    assert "No window was named" in told(capsys, "retry", "--out", "out", code=2)


def test_looking_leaves_the_servers_as_they_are(
    server: SqliteStore, capsys: pytest.CaptureFixture[str]
) -> None:
    before = server.peek()
    told(capsys, "list", "--out", "out")
    told(capsys, "show", CUT, "--out", "out")
    assert server.peek() == before
    assert list(before.servers) == ["one"]


def test_a_server_in_the_middle_of_a_transaction_is_looked_past(
    server: SqliteStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = sqlite3.connect(tmp_path / "out" / LEDGER, isolation_level=None)
    writer.execute("BEGIN IMMEDIATE")
    writer.execute("DELETE FROM segments")
    assert [each["segments"] for each in documents(capsys, "list", "--out", "out")] == [1, 2, 1, 1]
    writer.execute("ROLLBACK")
    writer.close()


def test_where_there_is_no_ledger_none_is_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = told(capsys, "list", "--out", "none", code=2)
    assert message.startswith(f"mldserver: There is no ledger at none/{LEDGER}.")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        ("UPDATE meta SET format = 99", "The ledger has format 99; this program knows format"),
        ("PRAGMA application_id = 1", "is an SQLite database, but no ledger"),
    ],
)
def test_a_newer_or_foreign_ledger_is_one_sentence_and_exit_code_2(
    server: SqliteStore, tmp_path: Path, capsys: pytest.CaptureFixture[str], harm: str, said: str
) -> None:
    server.close()
    other = sqlite3.connect(tmp_path / "out" / LEDGER, isolation_level=None)
    other.execute(harm)
    other.close()
    message = told(capsys, "list", "--out", "out", code=2)
    assert said in message
    assert message.count("\n") == 1


def test_a_damaged_ledger_is_one_sentence_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out" / LEDGER
    path.parent.mkdir(parents=True)
    path.write_bytes(b"no database" * 1000)
    assert pipeline_of(path) is None
    message = told(capsys, "list", "--out", "out", code=2)
    assert message.startswith("mldserver: The ledger is damaged")
    assert message.count("\n") == 1
    assert path.read_bytes() == b"no database" * 1000


def test_the_settings_file_names_the_ledger(
    server: SqliteStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mldserver.toml").write_text('handler = "mine.other"\nout = "out"\n')
    assert len(documents(capsys, "list")) == 4
    assert "The ledger belongs to the pipeline 'trips', not to 'x'" in told(
        capsys, "list", "--pipeline", "x", code=2
    )
    assert "no ledger at" in told(capsys, "list", "--out", "nowhere", code=2)


def test_a_table_needs_the_name_of_the_pipeline(capsys: pytest.CaptureFixture[str]) -> None:
    message = told(capsys, "list", "--ledger", "dynamodb://table", code=2)
    assert message.endswith("Name the one with --pipeline.\n")
    assert "it names no table" in told(capsys, "list", "--ledger", "dynamodb://", code=2)


def test_a_reader_that_has_seen_enough_is_no_error(server: SqliteStore, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "mldserver", "windows", "list", "--out", "out"]
    done = subprocess.run(command, cwd=tmp_path, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


def test_on_a_terminal_tables_fit_its_width(
    server: SqliteStore, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("NO_COLOR", "1")
    text = told(capsys, "list", "--out", "out")
    assert max(len(line) for line in text.splitlines() if "\x1b" not in line) <= 60


def test_a_window_that_another_tool_was_faster_with_is_told(
    server: SqliteStore, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def too_late(*_: object) -> bool:
        return False

    monkeypatch.setattr(SqliteLedger, "decide", too_late)
    assert "somebody else was faster" in told(capsys, "retry", SET_ASIDE, "--out", "out", code=2)


def test_moments_are_told_in_utc_whatever_they_are() -> None:
    assert format_time(None) == "-"
    assert format_time(1_500) == "1970-01-01T00:00:01.500Z"
    assert format_time(-(2**62)) == f"{-(2**62)} ms"


def test_show_names_what_spark_did_if_a_server_knows(
    server: SqliteStore, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = (
        WindowRow(id=PUBLISHED, state="done", spark_jobs=(3, 4), stage_seconds={5: 0.25, 6: 1.0}),
        WindowRow(id=PUBLISHED, state="computing", revision=2),
    )
    spark = Spark(ready=True, ui="http://host:4040", application="local-1")
    status = SimpleNamespace(windows=SimpleNamespace(latest=rows), spark=spark)
    monkeypatch.setenv("MLDSERVER_ADMIN", "127.0.0.1:1")
    monkeypatch.setattr("mldserver.cli.status.fetch_status", lambda *_: ({}, status))
    found = documents(capsys, "show", PUBLISHED, "--out", "out")
    assert {name: value for name, value in found.items() if name.startswith("spark_")} == {
        "spark_application": "local-1",
        "spark_ui": "http://host:4040",
        "spark_jobs": [3, 4],
        "spark_stages": ["5: 0.250 s", "6: 1.000 s"],
    }
    other = documents(capsys, "show", CUT, "--out", "out")
    assert not [name for name in other if name.startswith("spark_")]
