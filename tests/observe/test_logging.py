from __future__ import annotations

import asyncio
import logging
import os
import pty
import re
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
import structlog

from mldserver.config.settings import Settings
from mldserver.errors import OperatorError
from mldserver.observe.log_events import EVENTS
from mldserver.observe.logging import LibraryHandler, configure, logging_to, reopen
from mldserver.observe.writer import LogOutput

log = structlog.get_logger("mldserver")


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(handler="a.b", log_file=tmp_path / "m.log")


@pytest.fixture
def output(tmp_path: Path) -> Iterator[LogOutput]:
    made = LogOutput(tmp_path / "m.log")
    yield made
    made.close()


def test_an_event_is_one_line_of_json(tmp_path: Path, output: LogOutput) -> None:
    writer = configure(output)
    with structlog.contextvars.bound_contextvars(shard="s1"):
        log.info("batch.done", records=3)
    writer.close()
    (event,) = lines_of(tmp_path / "m.log")
    assert list(event)[:3] == ["timestamp", "level", "event"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", event.pop("timestamp"))
    assert event == {"level": "info", "event": "batch.done", "records": 3, "shard": "s1"}


def test_a_metric_from_outside_sees_events_as_declared_from_info_on_and_below_it_what_is_logged(
    settings: Settings,
) -> None:
    records: Counter[str] = Counter()
    seen: list[tuple[str, str]] = []

    def metric(event: Mapping[str, Any]) -> None:
        seen.append((event["level"], event["event"]))
        if event["event"] == "batch.done":
            records[event["shard"]] += event["records"]

    with logging_to(replace(settings, log_level="warning"), observers=[metric]):
        for number in range(3):
            with structlog.contextvars.bound_contextvars(shard=f"s{number % 2}"):
                log.info("batch.done", records=10)
        log.debug("handler.discarded")
        assert not log.is_enabled_for(logging.DEBUG)
        log.error("connection.failed", exc_info=ValueError("x"))
    assert records == {"s0": 20, "s1": 10}
    assert seen[-2:] == [("info", "batch.done"), ("error", "connection.failed")]
    assert {event for _, event in seen} <= EVENTS.keys()
    assert settings.log_file is not None
    (line,) = lines_of(settings.log_file)
    assert (line["event"], line["level"]) == ("connection.failed", "error")
    with logging_to(replace(settings, log_level="debug"), observers=[metric]):
        log.debug("handler.discarded")
    assert seen[-1] == ("debug", "handler.discarded")


def test_exceptions_are_a_field(tmp_path: Path, output: LogOutput) -> None:
    writer = configure(output)
    try:
        int("broken")
    except ValueError:
        log.exception("flush.failed", attempt=1)
    writer.close()
    (event,) = lines_of(tmp_path / "m.log")
    assert event["level"] == "error"
    assert event["exception"].startswith("Traceback")
    assert event["exception"].endswith("'broken'")


def test_lower_levels_are_not_logged(tmp_path: Path, output: LogOutput) -> None:
    writer = configure(output, level="warning")
    log.info("server.ready")
    log.warning("shard.disconnected")
    writer.close()
    assert [event["event"] for event in lines_of(tmp_path / "m.log")] == ["shard.disconnected"]


def test_pretty_is_for_people(tmp_path: Path, output: LogOutput) -> None:
    writer = configure(output, log_format="pretty")
    log.info("server.ready", seconds=1.5)
    writer.close()
    assert (tmp_path / "m.log").read_text().endswith("info     server.ready           seconds=1.5\n")


@pytest.mark.parametrize(("no_color", "coloured"), [("", True), ("1", False)])
def test_auto_is_pretty_on_a_terminal(monkeypatch: pytest.MonkeyPatch, no_color: str, coloured: bool) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    master, slave = pty.openpty()
    output = LogOutput(slave)
    writer = configure(output)
    log.info("server.ready")
    shown = os.read(master, 1000)
    writer.close()
    os.close(master)
    assert b"server.ready" in shown
    assert not shown.startswith(b"{")
    assert (b"\x1b[" in shown) is coloured


def test_lost_lines_are_told_of_once_lines_can_be_written_again(tmp_path: Path) -> None:
    refused: list[bytes] = []

    def write(fd: int, data: memoryview) -> int:
        if len(refused) < 3:
            refused.append(bytes(data))
            raise OSError(28, "No space left on device")
        return os.write(fd, data)

    fd = os.open(tmp_path / "m.log", os.O_WRONLY | os.O_CREAT)
    writer = configure(LogOutput(fd, write=write))  # type: ignore[arg-type]  # it is called with memoryviews only
    for _ in range(3):
        log.info("server.ready")
    log.info("server.stopped")
    log.info("server.stopped")
    writer.close()
    lost, *others = lines_of(tmp_path / "m.log")
    assert (lost["event"], lost["level"], lost["lines"]) == ("log.lost", "warning", 3)
    assert lost["timestamp"] == others[0]["timestamp"]
    assert [event["event"] for event in others] == ["server.stopped", "server.stopped"]


def test_prints_library_logs_and_warnings_become_events(tmp_path: Path, settings: Settings) -> None:
    root = logging.getLogger()
    former = root.handlers[:], root.level
    with logging_to(settings):
        print("hello from a handler")
        print("oops", file=sys.stderr)
        logging.getLogger("botocore.x").warning("slow %s", "down")
        logging.getLogger("botocore.x").info("not this")
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("old thing", stacklevel=1)
    assert (root.handlers, root.level) == former
    first, second, third, fourth = lines_of(tmp_path / "m.log")
    assert (first["event"], first["stream"], first["text"]) == (
        "handler.output",
        "stdout",
        "hello from a handler",
    )
    assert (second["event"], second["stream"], second["text"]) == ("handler.output", "stderr", "oops")
    assert (third["event"], third["level"], third["logger"], third["text"]) == (
        "library.log",
        "warning",
        "botocore.x",
        "slow down",
    )
    assert fourth["logger"] == "py.warnings"
    assert "old thing" in fourth["text"]


def test_a_library_with_wrong_arguments_does_not_lose_its_message(logged: list[dict[str, Any]]) -> None:
    record = logging.LogRecord("lib", logging.ERROR, "", 0, "%d items", ("many",), None)
    LibraryHandler().emit(record)
    assert logged == [
        {"level": "error", "event": "library.log", "logger": "lib", "text": "%d items ('many',)"}
    ]


@pytest.mark.parametrize(
    ("number", "level"),
    [(5, "debug"), (10, "debug"), (25, "info"), (35, "warning"), (50, "critical"), (99, "critical")],
)
def test_library_levels_are_rounded_down(logged: list[dict[str, Any]], number: int, level: str) -> None:
    LibraryHandler().emit(logging.LogRecord("lib", number, "", 0, "x", (), None))
    assert logged[0]["level"] == level


def test_an_error_that_a_task_left_behind_is_logged_with_its_traceback(
    tmp_path: Path, settings: Settings
) -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_soon(lambda: 1 // 0)
        await asyncio.sleep(0)

    with logging_to(settings):
        asyncio.run(main())
    (event,) = lines_of(tmp_path / "m.log")
    assert (event["event"], event["logger"], event["level"]) == ("library.log", "asyncio", "error")
    assert "ZeroDivisionError" in event["exception"]


def test_sighup_opens_the_file_again(tmp_path: Path, settings: Settings) -> None:
    path = tmp_path / "m.log"
    with logging_to(settings):
        log.info("server.ready")
        rotated = path.rename(tmp_path / "m.log.1")
        reopen()
        log.info("server.stopped")
    assert [event["event"] for event in lines_of(rotated)] == ["server.ready"]
    assert [event["event"] for event in lines_of(path)] == ["log.reopened", "server.stopped"]


def test_a_file_that_cannot_be_opened_again_is_told_of_in_the_old_one(
    tmp_path: Path, settings: Settings
) -> None:
    with logging_to(settings):
        rotated = (tmp_path / "m.log").rename(tmp_path / "m.log.1")
        (tmp_path / "m.log").mkdir()
        reopen()
    (event,) = lines_of(rotated)
    assert (event["event"], event["error"]) == ("log.reopen_failed", "OperatorError")


def test_without_a_log_there_is_nothing_to_open_again(logged: list[dict[str, Any]]) -> None:
    reopen()
    assert logged == []


def test_a_log_file_that_cannot_be_opened_is_the_operators_error(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match="cannot be opened"), logging_to(Settings(log_file=tmp_path)):
        pytest.fail("it was opened")


def test_secrets_of_every_function_are_hidden(tmp_path: Path) -> None:
    orders, trips = (
        Settings(
            handler="a.b",
            log_file=tmp_path / "m.log",
            sink_options={"password": f"hush-{number}"},
            origins={"sink_options": "mldserver.toml"},
        )
        for number in range(2)
    )
    with logging_to(orders, trips):
        print("hush-0 and hush-1")
    (event,) = lines_of(tmp_path / "m.log")
    assert event["text"] == "… and …"


def test_without_a_file_the_log_is_standard_output(capfd: pytest.CaptureFixture[str]) -> None:
    with logging_to(Settings(handler="a.b")):
        os.write(1, b"from a library in C\n")
        reopen()
        log.info("server.ready")
    out, err = capfd.readouterr()
    assert orjson.loads(out)["event"] == "server.ready"
    assert err == "from a library in C\n"


SCRIPT = """
import os, sys, structlog
from mldserver.config.settings import Settings
from mldserver.observe.logging import logging_to, reopen
log = structlog.get_logger("mldserver")
with logging_to(Settings(handler="a.b")):
    log.info("server.ready", seconds=1)
    print("printed")
    sys.stdout.buffer.write(b"bytes\\n")
    os.system("echo from a subprocess")
    os.write(1, b"from a library in C\\n")
    reopen()
    log.info("server.stopped", exit_code=0)
print("afterwards")
"""


def test_standard_output_stays_pure_whoever_writes_to_it() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    *lines, last = done.stdout.splitlines()
    assert last == "afterwards"
    assert [(event["event"], event.get("text")) for event in map(orjson.loads, lines)] == [
        ("server.ready", None),
        ("handler.output", "printed"),
        ("handler.output", "bytes"),
        ("server.stopped", None),
    ]
    assert done.stderr.splitlines() == ["from a subprocess", "from a library in C"]


STALLED = """
import asyncio, os, sys, time, structlog
from mldserver.config.settings import Settings
from mldserver.observe.logging import logging_to
from mldserver.observe.writer import LogWriter
log = structlog.get_logger("mldserver")
if len(sys.argv) == 1:
    LogWriter.close.__defaults__ = (600.0,)  # until it is read, however slow the reader is

async def main():
    longest = 0.0
    for number in range(20_000):
        began = time.monotonic()
        log.info("handler.output", stream="stdout", text="x" * 500)
        await asyncio.sleep(0)
        longest = max(longest, time.monotonic() - began)
    log.warning("server.beat_failed")
    return longest

with logging_to(Settings(handler="a.b")):
    longest = asyncio.run(main())
    sys.__stderr__.write(f"{longest}\\n")
    sys.__stderr__.flush()
    if len(sys.argv) == 1:
        sys.__stdin__.readline()
"""


def test_a_log_that_nobody_reads_does_not_hold_the_event_loop_and_tells_what_it_lost() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STALLED],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin
        assert process.stdout
        assert process.stderr
        # It was never held, which would have been for ever: what is left is the machine's own noise.
        assert float(process.stderr.readline()) < 60
        process.stdin.write("\n")
        process.stdin.close()
        told = [orjson.loads(line) for line in process.stdout]
        assert process.wait() == 0
    kinds = [event["event"] for event in told]
    # At more than one place where the queue is full before the writing thread has filled the pipe.
    lost = [event["lines"] for event in told if event["event"] == "log.lost"]
    assert sum(lost) + kinds.count("handler.output") == 20_000
    assert kinds[-2:] == ["log.lost", "server.beat_failed"]
    stamps = [event["timestamp"] for event in told]
    assert stamps == sorted(stamps)


def test_a_server_whose_log_nobody_reads_still_exits() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STALLED, "at once"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.wait() == 0
