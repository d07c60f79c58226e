"""The commands beside a server that lives: ``status``, the acts, and what is shown when it is gone."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
from support.processes import group_members

from mldserver import cli

HANDLER = "def process_record(record): pass"
INITIALIZE = (
    b'{"action":"initialize","shardId":"s-1","sequenceNumber":"TRIM_HORIZON","subSequenceNumber":0}\n'
)
EVENTS = ("admin.listening", "server.listening")


def test_a_server_is_seen_and_steered_from_its_start_to_its_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "watched.py").write_text(HANDLER)
    log_file = tmp_path / "log"
    options = [
        "--listen",
        "127.0.0.1:0",
        "--out",
        "out",
        "--admin",
        "127.0.0.1:0",
        "--log-file",
        str(log_file),
    ]
    server = subprocess.Popen(
        [sys.executable, "-m", "mldserver", "serve", "watched", *options],
        env=os.environ | {"PYTHONPATH": str(Path(cli.__file__).parents[2])},
        stderr=subprocess.DEVNULL,
    )

    def until(condition: Callable[[], object]) -> None:
        while not condition():
            assert server.poll() is None, log_file.read_text()
            time.sleep(0.05)

    def entries(event: str) -> list[dict[str, Any]]:
        lines = map(json.loads, log_file.read_text().splitlines() if log_file.exists() else [])
        return [entry for entry in lines if entry["event"] == event]

    def told(*words: str, code: int = 0) -> str:
        assert cli.run([*words, "--out", "out", "--admin", admin]) == code
        captured = capsys.readouterr()
        return captured.err if code == 2 else captured.out

    def document() -> dict[str, Any]:
        cli.run(["status", "--json", "--out", "out", "--admin", admin])
        seen: dict[str, Any] = json.loads(capsys.readouterr().out)
        return seen

    try:
        until(lambda: all(map(entries, EVENTS)))
        admin, listening = (entries(event)[0]["address"] for event in EVENTS)
        until(lambda: document()["ready"])
        host, port = listening.split(":")
        daemon = socket.create_connection((host, int(port)))
        daemon.sendall(INITIALIZE)
        until(lambda: [shard["id"] for shard in document()["shards"]] == ["s-1"])
        assert "s-1   connected" in told("status")

        assert "every shard waits" in told("pause")
        until(lambda: document()["paused"])
        assert told("resume") == "All shards go on.\n"
        assert "durable: 0 rows" in told("flush")
        assert "There are s-1." in told("drain-shard", "s-2", code=2)
        assert "debug or above" in told("log-level", "debug")
        until(lambda: document()["log_level"] == "debug")
        acts = [(entry["act"], entry["argument"], entry["done"]) for entry in entries("admin.act")]
        assert acts == [
            ("pause", "", True),
            ("resume", "", True),
            ("flush", "", True),
            ("drain-shard", "s-2", False),
            ("log-level", "debug", True),
        ]

        daemon.close()
        server.send_signal(signal.SIGTERM)
        assert server.wait() == 0
        gone = told("status", code=3)
        assert gone.startswith(
            f"No server answers at {admin}: Connection refused. This is what the ledger holds:"
        )
        assert "s-1" in gone
    finally:
        server.kill()
        server.wait()


CANARY = "canary-in-the-mine"


def test_no_secret_of_a_setting_is_seen_in_log_status_metrics_page_or_process_list(tmp_path: Path) -> None:
    (tmp_path / "watched.py").write_text(f"print('I was given {CANARY}')\ndef process_record(record): pass\n")
    log_file = tmp_path / "log"
    places = {
        "listen": "127.0.0.1:0",
        "admin": "127.0.0.1:0",
        "out": "out",
        "log-file": str(log_file),
        "log-level": "debug",
        "stream": "orders",
        "region": "eu-central-1",
        "endpoint-url": f"http://user:{CANARY}@127.0.0.1:1",
        "dead-letters": f"jsonl:s3://KEY:{CANARY}@bucket/x?region=r&scheme=http&endpoint_override=127.0.0.1:1",
        "spark-conf": f"spark.hadoop.some.secret.key={CANARY}",
        "sink": "delta:s3://bucket/table",
        "sink-options": f"url=https://user:{CANARY}@host",
    }
    server = subprocess.Popen(
        [sys.executable, "-m", "mldserver", "serve", "watched", *(f"--{name}={of}" for name, of in places.items())],
        env=os.environ
        | {"PYTHONPATH": str(Path(cli.__file__).parents[2]), "AWS_EC2_METADATA_DISABLED": "true"}
        | {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"},
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip

    def entries(event: str) -> list[dict[str, Any]]:
        lines = map(json.loads, log_file.read_text().splitlines() if log_file.exists() else [])
        return [entry for entry in lines if entry["event"] == event]

    try:
        for event in ("handler.output", "stream.unlisted", "admin.listening", "server.ready"):
            while not entries(event):
                assert server.poll() is None, log_file.read_text()
                time.sleep(0.05)
        admin = entries("admin.listening")[0]["address"]
        seen = {}
        for path in ("/status", "/metrics", "/"):
            while path not in seen:
                with contextlib.suppress(HTTPError):  # 503 until the server has made its first document
                    seen[path] = urllib.request.urlopen(f"http://{admin}{path}", timeout=10).read().decode()
        for process in group_members(server.pid):
            seen[f"process {process}"] = Path(f"/proc/{process}/cmdline").read_text()
        seen["log"] = log_file.read_text()
        assert [name for name, text in seen.items() if CANARY in text] == []
        assert "I was given …" in seen["log"]
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
