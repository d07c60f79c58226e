from __future__ import annotations

import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import pytest

from mldserver.config.locations import SqlitePlace
from mldserver.config.settings import Settings, specs
from mldserver.errors import ConfigError
from mldserver.spark.client import SparkEngine
from mldserver.testing.playground import (
    arrival_times,
    fresh_folder,
    logged_failures,
    partition_keys,
    play_settings,
    quick_spark,
    read_lines,
)


def test_without_a_file_the_bundled_departures_are_read() -> None:
    lines = read_lines(None)
    assert len(lines) == 27_004
    assert json.loads(lines[0])["carrier"] == "UA"


def test_blank_lines_do_not_count_and_what_is_packed_is_unpacked(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"1\n\n2\r\n  \n3")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b"1\n2\n3\n"))
    (tmp_path / "a.jsonl.xz").write_bytes(lzma.compress(b"1\n2\n3\n"))
    for name in ("a.jsonl", "a.jsonl.gz", "a.jsonl.xz"):
        assert read_lines(tmp_path / name) == [b"1", b"2", b"3"]
        assert read_lines(tmp_path / name, limit=2) == [b"1", b"2"]


DAMAGED = gzip.compress(b"", mtime=0)[:10] + b"\xff" * 20
"""A whole header, and then nothing that could be deflated."""


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(("x", None), ("x", b""), ("x.gz", b"no gzip"), ("x.gz", DAMAGED)),
        *(
            ("x.gz", gzip.compress(b"cut off", mtime=0)[:-3]),
            ("x.xz", b"no xz"),
            ("x.xz", lzma.compress(b"1")[:-3]),
        ),
    ],
)
def test_input_that_cannot_be_used_is_the_operators_error(
    tmp_path: Path, name: str, content: bytes | None
) -> None:
    path = tmp_path / name
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
    with pytest.raises(ConfigError, match="cannot be used: ftp: is not a file system"):
        fresh_folder("ftp://host/x", "demo")


def test_the_users_settings_count_but_not_for_address_output_and_stream(tmp_path: Path) -> None:
    (tmp_path / "mldserver.toml").write_text('stream = "real"\nattempts = 7\nlisten = "0.0.0.0:1"\n')
    settings = play_settings("a.b", tmp_path, environ={"MLDSERVER_RETRY_BASE": "1 s"}, folder=tmp_path)
    assert (settings.attempts, settings.retry_base_seconds, settings.stream) == (7, 1.0, None)
    assert str(settings.listen) == "127.0.0.1:0"
    assert settings.log_file == tmp_path / "_server.log"


OUTWARD: dict[str, Any] = {
    "ledger": "dynamodb://production?region=eu-central-1",
    "pipeline": "production",
    "rename_from": "older",
    "server_id": "production-1",
    "sink": "jdbc:postgresql://db/production",
    "late_sink": "delta:/lake/production",
    "sink_table": "departures",
    "sink_options": {"user": "mldserver"},
    "dead_letters": "sqs:https://sqs.eu-central-1.amazonaws.com/1/production",
    "stream": "production",
    "region": "eu-central-1",
    "endpoint_url": "http://localhost:4566",
    "allow_shards": "production-*",
    "listen_secret": "/etc/mldserver/secret",
    "tls_certificate": "/etc/mldserver/server.pem",
    "tls_key": "/etc/mldserver/server.key",
    "tls_client_ca": "/etc/mldserver/clients-ca.pem",
    "tls_names": "*.example",
    "insecure": "true",
    "admin": "0.0.0.0:7071",
    "metrics_listen": "127.0.0.1:9464",
    "spark_master": "spark://cluster:7077",
    "source": "dynamodb://orders?region=eu-central-1",
    "from": "latest",
}
FIXED = {"handler", "out", "listen", "flush_interval"} | {
    *("log_error_messages", "log_file", "log_format"),
}
THE_USERS = {
    # How the handler is run, and how long what may take and how much it may be.
    *("on_failure", "on_key_failure", "failure_rules", "attempts", "max_age", "retry_base"),
    *(
        "answer_deadline",
        "handler_timeout",
        "handler_settings",
        "concurrency",
        "workers",
        "worker_memory",
        "worker_kill_after",
    ),
    *("window_on_failure", "window_attempts", "window_deadline"),
    *("window_concurrency", "flush_bytes", "buffer_bytes", "state_bytes", "segment_disk_bytes", "late"),
    *("recompute_delay", "retention", "keep_segments", "retention_bytes", "shard_retention"),
    *("query_concurrency", "query_timeout", "query_spill_bytes"),
    *("idle_time", "quiet_time", "missing_limit", "max_ahead", "on_ahead"),
    *("connection_limit", "line_limit", "initialize_timeout"),
    *(
        "server_timeout",
        "grace",
        "accept_gap",
        "new_ledger",
        "log_level",
        "spark_conf",
        "spark_py_files",
        "spark_python",
        "java_home",
    ),
    # It lies elsewhere, and only saves time.
    "cache_dir",
}


def named_all(how: str, tmp_path: Path) -> dict[str, str]:
    """Name every setting that reaches outward, in a file or in variables; return the environment."""
    if how == "file":
        lines = [
            f"{name} = {json.dumps(value)}\n" for name, value in OUTWARD.items() if name != "sink_options"
        ]
        (tmp_path / "mldserver.toml").write_text("".join(lines) + '[sink_options]\nuser = "mldserver"\n')
        return {}
    return {specs()[name].variable: value for name, value in OUTWARD.items() if isinstance(value, str)} | {
        "MLDSERVER_SINK_OPTIONS": "user=mldserver"
    }


@pytest.mark.parametrize("how", ["file", "variables"])
def test_what_is_played_never_leaves_its_folder(tmp_path: Path, how: str) -> None:
    out, environ = tmp_path / "out", named_all(how, tmp_path)
    settings = play_settings("handlers.departures", out, environ=environ, folder=tmp_path)
    usual = Settings(handler="handlers.departures")
    fields = [specs()[name].field for name in OUTWARD]
    assert [getattr(settings, field) for field in fields] == [getattr(usual, field) for field in fields]
    assert (settings.out, settings.ledger, settings.pipeline) == (out, SqlitePlace(), "departures")


@pytest.mark.parametrize(
    "told",
    ['sink_table = "x"', 'dead_letters = "jsonl"\non_key_failure = "park"', "[sink_options]\na = 1"],
    ids=["a table without its sink", "parked keys without a ledger", "options without a sink"],
)
def test_what_is_left_out_cannot_be_wrong_together(tmp_path: Path, told: str) -> None:
    (tmp_path / "mldserver.toml").write_text(told)
    assert play_settings("a.b", tmp_path / "out", environ={}, folder=tmp_path).sink is None


def test_every_setting_is_known_to_stay_inside_or_is_left_out() -> None:
    decided = [*OUTWARD, *FIXED, *THE_USERS]
    assert sorted(decided) == sorted(specs()), "a new setting: may it count in `sim` and `demo`?"


def test_a_spark_of_this_machines_own_is_the_users(tmp_path: Path) -> None:
    environ = {"MLDSERVER_SPARK_MASTER": "local[2]", "MLDSERVER_LEDGER": "sqlite:/elsewhere"}
    settings = play_settings("a.b", tmp_path, environ=environ, folder=tmp_path)
    assert (settings.spark_master, settings.ledger) == ("local[2]", SqlitePlace())


def test_a_cluster_is_used_where_it_is_named_for_the_run_alone(tmp_path: Path) -> None:
    environ = {"MLDSERVER_SPARK_MASTER": "spark://cluster:7077"}
    used = []
    for named in (None, "spark://other:7077"):
        settings = play_settings(
            "handlers.departures", tmp_path, environ=environ, folder=tmp_path, spark_master=named
        )
        engine = quick_spark(settings)
        assert isinstance(engine, SparkEngine)
        used.append(engine.driver.setup.master)
    assert used == ["local[*]", "spark://other:7077"]


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
    assert logged_failures(log) == [
        "It broke. Mend it.",
        "ValueError: no",
        "server.unready: no Spark",
        "bare",
    ]
    assert logged_failures(log, most=1) == ["bare"]
    assert logged_failures(tmp_path / "none") == []
    assert logged_failures(None) == []


def test_records_arrive_by_the_latest_time_that_a_field_has_had() -> None:
    lines = [
        b"no json",
        b'{"at": 5000}',
        b'{"at": "1970-01-01T00:00:09Z"}',
        b'{"at": "1970-01-01"}',
        b'{"at": 1}',
    ]
    assert arrival_times([*lines, b'{"at": "1970-01-01T00:00:10"}'], "at") == [
        5000,
        5000,
        9000,
        9000,
        9000,
        10_000,
    ]
    with pytest.raises(ConfigError, match="No record has a time in when"):
        arrival_times(lines, "when")


def test_partition_keys_are_the_text_of_a_field_or_the_json_of_several() -> None:
    lines = [b'{"carrier": "UA", "flight": 15}', b'{"carrier": "B6"}', b"no json"]
    assert partition_keys(lines, "carrier") == ["UA", "B6", "null"]
    assert partition_keys(lines, "flight") == ["15", "null", "null"]
    assert partition_keys(lines, "carrier, flight") == ['["UA",15]', '["B6",null]', "[null,null]"]
    with pytest.raises(ConfigError, match="No record has a field 'tail'"):
        partition_keys(lines, "carrier,tail")
