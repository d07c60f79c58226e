from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING

import pytest

from mldserver.errors import ConfigError
from mldserver.spark.client import SparkEngine
from mldserver.testing.playground import fresh_folder, play_settings, quick_spark, read_lines, told_failures

if TYPE_CHECKING:
    from pathlib import Path


def test_without_a_file_the_bundled_departures_are_read() -> None:
    lines = read_lines(None)
    assert len(lines) == 27_004
    assert json.loads(lines[0])["carrier"] == "UA"


def test_blank_lines_do_not_count_and_gzip_is_unpacked(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"1\n\n2\r\n  \n3")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b"1\n2\n3\n"))
    for name in ("a.jsonl", "a.jsonl.gz"):
        assert read_lines(tmp_path / name) == [b"1", b"2", b"3"]
        assert read_lines(tmp_path / name, limit=2) == [b"1", b"2"]


@pytest.mark.parametrize("content", [None, b"", b"no gzip"])
def test_input_that_cannot_be_used_is_the_operators_error(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / ("x.gz" if content else "x")
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=str(path)):
        read_lines(path)


def test_missing_examples_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mldserver.testing.playground.find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match="departures were not found"):
        read_lines(None)


def test_a_run_needs_a_folder_of_its_own(tmp_path: Path) -> None:
    made = fresh_folder(tmp_path / "new" / "deep", "x")
    assert made.is_dir()
    (made / "file").touch()
    with pytest.raises(ConfigError, match="not empty"):
        fresh_folder(made, "x")
    with pytest.raises(ConfigError, match="cannot be used"):
        fresh_folder(made / "file", "x")


def test_a_temporary_folder_is_named_after_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert fresh_folder(None, "sim").name.startswith("mldserver-sim-")


def test_a_playground_is_on_this_machine(tmp_path: Path) -> None:
    assert fresh_folder(f"file://{tmp_path}/x", "sim") == tmp_path / "x"
    with pytest.raises(ConfigError, match="`mldserver demo` keeps ledger, log and output in one folder"):
        fresh_folder("s3://bucket/x", "demo")
    with pytest.raises(ConfigError, match="cannot be used: ftp: is no file system"):
        fresh_folder("ftp://host/x", "demo")


def test_the_users_settings_count_but_not_for_address_output_and_stream(tmp_path: Path) -> None:
    (tmp_path / "mldserver.toml").write_text('stream = "real"\nattempts = 7\nlisten = "0.0.0.0:1"\n')
    settings = play_settings("a.b", tmp_path, environ={"MLDSERVER_RETRY_BASE": "1 s"}, folder=tmp_path)
    assert (settings.attempts, settings.retry_base, settings.stream) == (7, 1.0, None)
    assert str(settings.listen) == "127.0.0.1:0"
    assert settings.log_file == tmp_path / "_server.log"


def test_spark_stands_ready_for_handlers_with_rows(tmp_path: Path) -> None:
    settings = play_settings("handlers.departures", tmp_path, environ={}, folder=tmp_path)
    assert isinstance(quick_spark(settings), SparkEngine)


def test_handlers_without_rows_need_no_spark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "side_effects_only.py").write_text("def process_record(record):\n    return None\n")
    monkeypatch.syspath_prepend(tmp_path)
    settings = play_settings("side_effects_only", tmp_path, environ={}, folder=tmp_path)
    assert quick_spark(settings) is None


def test_failures_are_read_out_of_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    events: list[object] = [
        {"level": "info", "event": "fine"},
        {"level": "error", "event": "bad", "what": "It broke.", "advice": "Mend it."},
        {"level": "error", "event": "bad", "what": "It broke.", "advice": "Mend it."},
        {"level": "critical", "event": "worse", "exception": "Traceback\nValueError: no"},
        {"level": "error", "event": "server.unready", "reason": "no Spark"},
        {"level": "error", "event": "bare"},
        7,
    ]
    log.write_text("\n".join([*map(json.dumps, events), '{"cut of']))
    assert told_failures(log) == ["It broke. Mend it.", "ValueError: no", "server.unready: no Spark", "bare"]
    assert told_failures(log, most=1) == ["bare"]
    assert told_failures(tmp_path / "none") == []
    assert told_failures(None) == []
