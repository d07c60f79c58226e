"""What a process may be started without: a place for its output, an input, a working directory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.store import SqliteStore

from mldserver.output.layout import LEDGER

MLDSERVER = f'exec "{sys.executable}" -m mldserver'
FULL = "mldserver: Standard output cannot be written: No space left on device."


def shell(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["sh", "-c", script], cwd=folder, capture_output=True, text=True, check=False)


@pytest.fixture
def small_input(tmp_path: Path) -> Path:
    row = {"carrier": "UA", "dep_delay": 1.0, "scheduled": "2013-01-01T10:00:00Z"}
    (tmp_path / "in.jsonl").write_text(json.dumps(row) + "\n")
    return tmp_path


@pytest.mark.parametrize(
    "arguments",
    [
        "--version",
        pytest.param("serve --help", marks=pytest.mark.long),
        "check handlers.departures",
        pytest.param("logs in.jsonl", marks=pytest.mark.long),
        "logs in.jsonl -n 1",
        "sim handlers.departures --input in.jsonl --engine local --out out",
    ],
)
def test_a_full_disk_is_told_in_a_sentence(small_input: Path, arguments: str) -> None:
    done = shell(f"{MLDSERVER} {arguments} > /dev/full", small_input)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(FULL)
    assert done.stderr.count("\n") == 1


def test_a_full_disk_is_told_by_the_tools_too(small_input: Path) -> None:
    store = SqliteStore(small_input / "out" / LEDGER, pipeline="departures", server_id="one")
    store.open(now_ms=0)
    store.close()
    done = shell(f"{MLDSERVER} ledger show --out out > /dev/full", small_input)
    assert (done.returncode, done.stderr.startswith(FULL)) == (2, True), done.stderr
    assert shell(f"{MLDSERVER} ledger show --out out >&-", small_input).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ("check handlers.departures", 141),
        ("sim handlers.departures --input in.jsonl --engine local --out out", 141),
        ("logs -f in.jsonl", 0),
    ],
)
def test_a_reader_that_is_gone_is_told_by_the_exit_code_at_most(
    small_input: Path, arguments: str, code: int
) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "mldserver", *arguments.split()]
    done = subprocess.run(
        command, stdout=write, stderr=subprocess.PIPE, text=True, cwd=small_input, check=False
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (code, "")


def test_a_process_without_any_standard_stream_works_and_so_do_its_workers(small_input: Path) -> None:
    done = shell(
        f"export MLDSERVER_WORKERS=1; {MLDSERVER} sim handlers.departures --input in.jsonl --engine local --out out "
        "<&- >&- 2>&-",
        small_input,
    )
    assert done.returncode == 0
    assert list((small_input / "out").glob("window=*/*.parquet"))


@pytest.mark.parametrize("stream", ["2>&-", "2>/dev/full"])
def test_an_error_that_nobody_can_be_told_is_in_the_exit_code_all_the_same(
    tmp_path: Path, stream: str
) -> None:
    done = shell(f"{MLDSERVER} logs /no/such/file {stream}", tmp_path)
    assert (done.returncode, done.stderr) == (2, "")


def test_what_the_encoding_of_the_output_does_not_have_is_escaped(tmp_path: Path) -> None:
    check = "check \"$(printf 'caf\\303\\251\\377')\""
    done = shell(f"export PYTHONIOENCODING=ascii:strict; {MLDSERVER} {check}", tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.endswith("udcff: 1 problem\n")


def test_input_that_is_closed_is_told_in_a_sentence(tmp_path: Path) -> None:
    done = shell(f"{MLDSERVER} logs - <&-", tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "mldserver: Standard input is closed. Name a log file, or pipe a log in.\n"


def test_input_that_cannot_be_read_is_told_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "m.log").write_text("one\n")
    done = shell(f"{MLDSERVER} logs - 0> m.log", tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("mldserver: Standard input cannot be read: Bad file descriptor.")


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        ("--help", 0, ""),
        ("logs /no/such/file", 2, "mldserver: There is no file /no/such/file"),
        ("serve handlers.departures", 2, "mldserver: There is no working directory: No such file"),
        ("check handlers.departures", 2, "mldserver: There is no working directory: No such file"),
        ("windows list", 2, "mldserver: There is no working directory: No such file"),
        ("sim handlers.departures --limit 1", 2, "mldserver: There is no working directory: No such file"),
    ],
)
def test_a_working_directory_that_is_gone_hinders_only_those_who_need_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, code: int, told: str
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (tmp_path / "gone").mkdir()
    done: Any = shell(f"cd gone; rmdir ../gone; {MLDSERVER} {arguments}", tmp_path)
    assert done.returncode == code, done.stderr
    assert done.stderr.startswith(told)
    assert done.stderr.count("\n") == (1 if told else 0)
