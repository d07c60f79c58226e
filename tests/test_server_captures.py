"""Plays the requests of every capture of the real daemon at a whole server over a real socket.

The player sends what the daemon sent and answers the server's checkpoints as that daemon answered the ones it got in
the same request: the n-th checkpoint gets the n-th error. Every line that comes back must be one that the Java accepts.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.dataset as ds
import pytest
from support.serving import KEEP_EVERYTHING, connect, quick, serving, until

from mldserver.server import Server

TRANSCRIPTS = Path(__file__).parent / "transcripts"
CAPTURES = sorted(TRANSCRIPTS.glob("*.jsonl"))


class Exchange(NamedTuple):
    """One request of the daemon, and how it answered the checkpoints it got before the status."""

    request: str
    errors: list[str | None]


def exchanges(capture: Path) -> list[Exchange]:
    told: list[Exchange] = []
    for text in capture.read_text("utf-8").splitlines():
        entry = json.loads(text)
        if entry["dir"] != "in":
            continue
        message = json.loads(entry["line"])
        if message["action"] == "checkpoint":
            told[-1].errors.append(message["error"])
        else:
            told.append(Exchange(entry["line"], []))
    return told


def accepted_by_java(line: bytes) -> dict[str, Any]:
    assert line.endswith(b"\n"), line
    message: dict[str, Any] = json.loads(line)
    if message["action"] == "status":
        assert list(message) == ["action", "responseFor"], line
    else:
        assert list(message) == ["action", "sequenceNumber", "subSequenceNumber"], line
        assert message["action"] == "checkpoint", line
        number = message["sequenceNumber"]
        assert number is None or (isinstance(number, str) and number.isdigit()), line
    return message


async def play(capture: Path, address: str) -> list[tuple[str, dict[str, Any], str | None]]:
    """Return every checkpoint that the server asked for: (action it came in, message, the daemon's answer)."""
    reader, writer = await connect(address)
    checkpoints = []
    for exchange in exchanges(capture):
        action = json.loads(exchange.request)["action"]
        errors = iter(exchange.errors)
        writer.write(exchange.request.encode("utf-8", "surrogateescape") + b"\n")
        while True:
            async with asyncio.timeout(800):
                message = accepted_by_java(await reader.readline())
            if message["action"] == "status":
                assert message["responseFor"] == action
                break
            error = next(errors, None)
            checkpoints.append((action, message, error))
            reply = {**message, "error": error}
            writer.write(json.dumps(reply, separators=(",", ":")).encode() + b"\n")
    writer.write_eof()
    async with asyncio.timeout(800):
        assert await reader.read() == b"", "nothing may follow the last status"
    writer.close()
    return checkpoints


def delivered(capture: Path) -> list[tuple[str, int]]:
    return [
        (record["sequenceNumber"], record["subSequenceNumber"])
        for exchange in exchanges(capture)
        for record in json.loads(exchange.request).get("records", ())
    ]


@pytest.fixture
def handler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "keeps_everything.py").write_text(KEEP_EVERYTHING)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "keeps_everything"


async def stored(server: Server, out: Path) -> list[tuple[str, int]]:
    rows = ds.dataset(out, format="parquet", partitioning="hive").to_table()
    rows = rows.sort_by([("_time", "ascending"), ("_clock", "ascending")])
    return list(zip(rows["_sequence"].to_pylist(), rows["_sub_sequence"].to_pylist(), strict=True))


def pending(server: Server) -> int:
    status = server.status()
    return status.buffered_bytes + status.windows_open + status.windows_waiting


def started_behind(capture: Path) -> bool:
    return json.loads(exchanges(capture)[0].request)["sequenceNumber"] == "TRIM_HORIZON"


@pytest.mark.parametrize("capture", CAPTURES, ids=lambda path: path.stem)
async def test_a_capture_of_the_real_daemon_is_served_as_the_java_expects(
    capture: Path, tmp_path: Path, handler: str
) -> None:
    assert started_behind(capture)
    # A budget of one byte, while the settle time keeps anyone from holding the watermark: each batch waits until its
    # rows are durable, so that each is followed by its checkpoint.
    settings = quick(tmp_path / "out", handler, flush_bytes=1, buffer_bytes=1, settle_time_ms=3_600_000)
    async with serving(settings) as server:
        checkpoints = await play(capture, await server.listening())
        assert checkpoints, "no checkpoint was asked for"
        status = server.status()
        expected = delivered(capture)
        assert status.rows_durable == len(expected)
    gone = [i for i, (_, _, error) in enumerate(checkpoints) if error == "ShutdownException"]
    assert gone == [] or gone == [len(checkpoints) - 1], "nothing may be checkpointed after ShutdownException"
    positions = {str(number) for number, _ in expected} | {None}
    assert {message["sequenceNumber"] for _, message, _ in checkpoints} <= positions


async def test_what_the_captured_daemons_delivered_becomes_rows_exactly_once(
    tmp_path: Path, handler: str
) -> None:
    for capture in CAPTURES:
        out = tmp_path / capture.stem
        (tmp_path / "short.py").write_text(KEEP_EVERYTHING.replace("1 hour", "100 ms"))
        async with serving(quick(out, "short")) as server:
            await play(capture, await server.listening())
            async with asyncio.timeout(800):
                await until(lambda: server.status().windows_published > 0 and not pending(server))
        assert await stored(server, out) == delivered(capture)
