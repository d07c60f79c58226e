from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson
import pytest

from mldserver.cli import logs, run
from mldserver.errors import ConfigError
from mldserver.observe.log_lines import Selection

EVENTS: list[dict[str, Any]] = [
    {"timestamp": "2026-11-21T10:00:00.000000Z", "level": "info", "event": "batch.done", "shard": "s1"},
    {
        "timestamp": "2026-11-21T10:00:01.000000Z",
        "level": "warning",
        "event": "handler.failed",
        "shard": "s2",
    },
    {
        "timestamp": "2026-11-21T10:00:02.000000Z",
        "level": "error",
        "event": "window.halted",
        "traceback": "T\n  x",
    },
]


def as_lines(*events: dict[str, Any]) -> bytes:
    return b"".join(orjson.dumps(event) + b"\n" for event in events)


@pytest.fixture
def log_file(tmp_path: Path) -> Path:
    path = tmp_path / "m.log"
    path.write_bytes(as_lines(*EVENTS[:2]) + b"not JSON\n" + as_lines(EVENTS[2]))
    return path


def shown(capfdbinary: pytest.CaptureFixture[bytes], *arguments: object) -> list[str]:
    assert run(["logs", *map(str, arguments)]) == 0
    return capfdbinary.readouterr().out.decode().splitlines()


def test_a_log_is_shown_as_text(log_file: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert shown(capfdbinary, log_file) == [
        "2026-11-21T10:00:00.000000Z info     batch.done             shard=s1",
        "2026-11-21T10:00:01.000000Z warning  handler.failed         shard=s2",
        "not JSON",
        "2026-11-21T10:00:02.000000Z error    window.halted",
        "    T",
        "      x",
    ]


@pytest.mark.parametrize(
    ("asked", "events"),
    [
        (["--shard", "s1"], ["batch.done"]),
        (["--shard", "s*"], ["batch.done", "handler.failed"]),
        (["--level", "warning"], ["handler.failed", "window.halted"]),
        (["--event", "batch.*", "--event", "window.*"], ["batch.done", "window.halted"]),
        (["--since", "2026-11-21T10:00:01"], ["handler.failed", "window.halted"]),
        (["--level", "info", "-n", "1"], ["window.halted"]),
        (["--level", "info", "-n", "0"], []),
    ],
)
def test_only_what_is_asked_for_is_shown(
    log_file: Path, capfdbinary: pytest.CaptureFixture[bytes], asked: list[str], events: list[str]
) -> None:
    lines = shown(capfdbinary, log_file, "--json", *asked)
    assert [orjson.loads(line)["event"] for line in lines] == events


def test_json_is_passed_on_untouched(log_file: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert run(["logs", str(log_file), "--json"]) == 0
    assert capfdbinary.readouterr().out == log_file.read_bytes()


def test_a_last_line_without_an_end_is_shown(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    (tmp_path / "m.log").write_bytes(b"one\ntwo")
    assert shown(capfdbinary, tmp_path / "m.log") == ["one", "two"]


def test_the_last_lines_include_one_without_an_end(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    (tmp_path / "m.log").write_bytes(b"one\ntwo\nthree")
    assert shown(capfdbinary, tmp_path / "m.log", "-n", 2) == ["two", "three"]


def test_a_missing_file_is_the_operators_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["logs", str(tmp_path / "none.log")]) == 2
    assert (
        capsys.readouterr().err
        == f"mldserver: There is no file {tmp_path}/none.log. Name the server's log_file.\n"
    )


def test_standard_input_is_read_as_it_comes() -> None:
    command = [sys.executable, "-m", "mldserver", "logs", "-", "--level", "error"]
    done = subprocess.run(command, input=as_lines(*EVENTS) + b"x", capture_output=True, check=True)
    assert done.stdout.startswith(b"2026-11-21T10:00:02.000000Z error    window.halted")
    assert done.stderr == b""


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "m.log").write_bytes(as_lines(EVENTS[0]) * 20_000)
    command = [sys.executable, "-m", "mldserver", "logs", str(tmp_path / "m.log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert b"batch.done" in process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 0


def test_following_goes_on_across_rotation(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    path = tmp_path / "m.log"

    def create() -> None:
        path.write_bytes(as_lines(EVENTS[0], EVENTS[1]))

    def rotate() -> None:
        path.rename(tmp_path / "m.log.1")
        path.write_bytes(as_lines(EVENTS[2])[:-1])

    def interrupt() -> None:
        raise KeyboardInterrupt

    steps = iter([create, rotate, interrupt])

    def wait(_seconds: float) -> None:
        next(steps)()

    view = logs.LineView(Selection(), raw=True, terminal=False, colours=False)
    with pytest.raises(KeyboardInterrupt):
        logs.show_file(path, view, last=1, follow=True, wait=wait)
    lines = capfdbinary.readouterr().out.splitlines()
    assert [orjson.loads(line) for line in lines] == EVENTS


def test_lines_from_elsewhere_cannot_move_a_terminals_cursor() -> None:
    view = logs.LineView(Selection(), raw=False, terminal=True, colours=False)
    assert view.shown(b"\x1b[2Jx\xff") == b"\\x1b[2Jx\\xff"
    raw = logs.LineView(Selection(), raw=True, terminal=False, colours=False)
    assert raw.shown(b"\x1b[2Jx") == b"\x1b[2Jx"


@pytest.mark.parametrize(("no_color", "coloured"), [("", True), ("1", False)])
def test_colours_are_for_terminals(log_file: Path, no_color: str, coloured: bool) -> None:
    master, slave = pty.openpty()
    environ = os.environ | {"NO_COLOR": no_color}
    command = [sys.executable, "-m", "mldserver", "logs", str(log_file), "-n", "1"]
    subprocess.run(command, stdout=slave, env=environ, check=True)
    os.close(slave)
    out = os.read(master, 10_000)
    os.close(master)
    assert b"window.halted" in out
    assert (b"\x1b[" in out) is coloured


NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10 minutes", datetime(2026, 11, 21, 11, 50, tzinfo=UTC)),
        ("2026-11-21", datetime(2026, 11, 21, tzinfo=UTC)),
        ("2026-11-21T10:00", datetime(2026, 11, 21, 10, tzinfo=UTC)),
        ("2026-11-21T10:00+02:00", datetime(2026, 11, 21, 8, tzinfo=UTC)),
    ],
)
def test_since_is_a_time_or_a_duration_ago(text: str, expected: datetime) -> None:
    assert logs.since_time(text, NOW) == expected


@pytest.mark.parametrize("text", ["yesterday", "99999999999 days"])
def test_any_other_since_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="neither a time nor a duration"):
        logs.since_time(text, NOW)


def test_a_wrong_level_is_refused(
    log_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert run(["logs", str(log_file), "--level", "loud"]) == 2
    assert "critical" in capsys.readouterr().err


def test_a_number_of_last_lines_may_be_any_but_negative(
    log_file: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert shown(capfdbinary, log_file, "-n", 0) == []
    assert shown(capfdbinary, log_file, "-n", 10**30) == shown(capfdbinary, log_file)
    assert run(["logs", str(log_file), "-n", "-5"]) == 2
    assert b"Must be >= 0" in capfdbinary.readouterr().err
