"""Each metric moves when that happens which it counts: whole servers, with one daemon's child that is played by hand."""

from __future__ import annotations

import ast
import asyncio
import base64
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse_text
from spark.bench import FAKE, job
from support.serving import connect, no_aws, quick, serving, until

from mldserver.admin.endpoint import AdminEndpoint
from mldserver.admin.gather import EventTally
from mldserver.admin.metrics import METRICS, PREFIX, TEXT, exposed
from mldserver.base.clock import SystemClock
from mldserver.config.kinds import TcpAddress
from mldserver.config.settings import Settings
from mldserver.coordinator.store_files import StateFiles
from mldserver.errors import DriverLost, LedgerError, WindowFailed
from mldserver.observe.logging import logging_to
from mldserver.server import Server
from mldserver.spark.client import make_engine
from mldserver.testing import FakeStream, FakeStreams, LocalEngine

HANDLER = '''
"""A row for each record, and what some of them ask for beside that."""
import asyncio
import os
import time

from mldserver import Discard, tumbling

schema = "id BIGINT NOT NULL, at TIMESTAMP"
windows = tumbling("10 seconds", on="at")
gate = asyncio.Event()
failed = set()


async def process_record(record):
    event = record.json()
    match event.get("wish"):
        case "poison":
            raise ValueError("poison")
        case "discard":
            raise Discard("not wanted")
        case "again" if event["id"] not in failed:
            failed.add(event["id"])
            raise OSError("not now")
        case "wait":
            await gate.wait()
        case "hang":
            time.sleep(0.02)
        case "hang long":
            while not os.path.exists("let go"):
                time.sleep(0.01)
        case "die" if os.getppid() != 1:
            os._exit(9)
        case "grow":
            failed.add(b"x" * (180 << 20))
        case "print":
            for number in range(5000):
                print(number)
    return event["id"], event["at"]
'''
AT = 1_700_000_000
"""Seconds since the epoch: a window begins."""
STILL = {"start_time_seconds", "budget_limit_bytes", "open_files_limit", "function_state"}
"""What stays as it is for as long as a server runs, and nobody undeploys a function."""


COUNTS = """
from mldserver import Context

def process_record(record, ctx: Context):
    ctx.state["n"] = ctx.state.get("n", 0) + 1
"""


TIMED = """
from mldserver import timer

schema = "n INT"
has_more = False

def process_record(record, ctx):
    ctx.timers.set(globals()[record.json()["wish"]], after="1 minute")
    if has_more:
        ctx.timers.set(globals()["later"], after="3650 days")

@timer
def alarm(due, ctx):
    if has_more:
        ctx.timers.cancel(globals()["later"])
    return (1,)

@timer(max_lateness="1 hour")
def punctual(due, ctx): ...

@timer
def fails(due, ctx):
    raise OSError("not now") if not due.attempt else ValueError("never")
"""
MORE = """
has_more = True

@timer
def later(due, ctx): ...
"""


@pytest.fixture
def handler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "wishing.py").write_text(HANDLER)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return "wishing"


class Watch:
    """A server's metrics, each compared with how it was when the watch began."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.before = self.now()

    def now(self) -> dict[str, dict[tuple[str, ...], float]]:
        found: dict[str, dict[tuple[str, ...], float]] = {}
        for family in parse_text(exposed(self.server.document(), TEXT).decode()):
            name = family.name + "_total" * (family.type == "counter")
            found[name.removeprefix(PREFIX)] = {
                (sample.name, *sample.labels.values()): sample.value for sample in family.samples
            }
        return found

    async def moved(self, *names: str) -> None:
        """Return once each of these is not as it was."""
        missing = names
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(240):
                while missing:
                    now = self.now()
                    missing = tuple(name for name in missing if now.get(name) == self.before.get(name))
                    await asyncio.sleep(0.05)
        assert not missing


class Child:
    """One shard's connection, played by hand."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.refusals: list[str] = []
        """How the next checkpoints are refused."""
        self.last = 0

    def send(self, action: str, **fields: Any) -> None:
        self.writer.write(json.dumps({"action": action, **fields}).encode() + b"\n")

    async def done(self) -> None:
        """Answer checkpoints until the status comes."""
        while (said := json.loads(await self.reader.readline()))["action"] == "checkpoint":
            error = self.refusals.pop(0) if self.refusals else None
            self.send("checkpoint", sequenceNumber=said["sequenceNumber"], subSequenceNumber=0, error=error)

    def records(self, *events: dict[str, Any], lag_ms: int = 0, again: bool = False) -> None:
        """Send a batch; events without a time are of the first window."""
        self.last -= len(events) if again else 0
        records = []
        for event in events:
            self.last += 1
            second = AT + event.pop("second", 1)
            row = {"id": self.last, "at": time.strftime("%FT%TZ", time.gmtime(second)), **event}
            records.append(
                {
                    "data": base64.b64encode(json.dumps(row).encode()).decode(),
                    "partitionKey": str(self.last),
                    "sequenceNumber": str(self.last),
                    "subSequenceNumber": 0,
                    "approximateArrivalTimestamp": AT * 1000 + 60_000,
                }
            )
        self.send("processRecords", records=records, millisBehindLatest=lag_ms)

    async def is_at_tip(self) -> None:
        """Send empty batches, more than a daemon may have read ahead."""
        for _ in range(20):
            await self.batch()

    async def batch(self, *events: dict[str, Any], **more: Any) -> None:
        self.records(*events, **more)
        await self.done()


@contextlib.asynccontextmanager
async def watched(
    settings: Settings, engine: Any = None, stream: FakeStream | None = None
) -> AsyncIterator[Watch]:
    """Run a server whose log is counted."""
    tally = EventTally()
    with logging_to(replace(settings, log_file=Path("log")), observers=[tally]):
        async with serving(settings, engine=engine, stream=stream, tally=tally) as server:
            yield Watch(server)


@contextlib.asynccontextmanager
async def child(watch: Watch, shard_id: str = "s") -> AsyncIterator[Child]:
    one = Child(*await connect(await watch.server.listening()))
    try:
        one.send("initialize", shardId=shard_id, sequenceNumber="TRIM_HORIZON", subSequenceNumber=0)
        await one.done()
        yield one
    finally:
        one.writer.transport.abort()


async def test_what_a_shard_brings_moves_from_its_connection_to_the_published_window(
    tmp_path: Path, handler: str
) -> None:
    async with watched(quick(tmp_path / "out", handler, attempts=2)) as watch, child(watch) as one:
        await watch.moved("status_timestamp_seconds", "connections", "connections_accepted_total", "shards")
        await watch.moved("cpu_seconds_total", "open_files")
        await one.batch(*({"wish": wish} for wish in ("poison", "discard", "again", "hang", "")), lag_ms=5000)
        await watch.moved(
            "batches_total", "records_total", "received_bytes_total", "rows_total", "shard_lag_seconds"
        )
        await watch.moved(
            "handler_retries_total", "batch_seconds", "handler_seconds_total", "failed_records_total"
        )
        await watch.moved(
            "durable_rows_total", "flushes_total", "segments_total", "segment_bytes_total", "windows"
        )
        await watch.moved("dead_letters_waiting", "dead_letter_errors_total", "budget_used_bytes")
        await watch.moved(
            "ledger_calls_total", "ledger_seconds_total", "watermark_holder", "shard_checkpoint_age_seconds"
        )
        one.refusals = ["ThrottlingException", "IllegalArgumentException"]
        await one.batch(lag_ms=0)
        await watch.moved("checkpoint_retries_total", "checkpoint_failures_total")
        await one.batch(lag_ms=0)
        await watch.moved("checkpoints_total")
        await one.batch({}, {}, again=True)
        await watch.moved("duplicate_records_total")
        await one.batch({"second": 25})
        await watch.moved("watermark_timestamp_seconds", "watermark_lag_seconds", "windows_published_total")
        await watch.moved("window_rows_total", "window_seconds")
        await one.batch({"second": 2})
        await watch.moved("late_rows_total")
        await one.batch({"second": 10 * 365 * 86_400})
        await watch.moved("ahead_rows_total")
        one.send("shardEnded")
        await one.done()
        await watch.moved("stream_ended")


async def test_what_goes_wrong_around_a_shard_moves_too(
    tmp_path: Path, handler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = quick(
        tmp_path / "out", handler, answer_deadline=0.05, handler_timeout=600.0, buffer_bytes="1 KiB"
    )
    async with watched(settings) as watch, child(watch) as one:
        one.records({"wish": "wait"})
        await watch.moved("shard_durable_age_seconds")
        await one.done()
        await watch.moved("early_answers_total")
        sys.modules[handler].gate.set()
        parts = watch.server.only.pipeline.parts
        assert parts is not None
        transact = parts.ledger._transact
        away = [True]

        async def fails(*given: Any) -> Any:
            if away[0]:
                raise LedgerError("The ledger is away.")
            return await transact(*given)

        monkeypatch.setattr(parts.ledger, "_transact", fails)
        await watch.moved("flush_failures_total", "ledger_faults_total")
        one.records(*({} for _ in range(200)))
        await watch.moved("budget_used_bytes")
        away[0] = False
        await one.done()
        await watch.moved("held_seconds_total")
        await watch.server.carry_out("pause", "")
        await watch.moved("paused")
        await watch.server.carry_out("resume", "")
        one.writer.write(b"GET / HTTP/1.1\r\n\r\n")
        await watch.moved("connection_failures_total")
        grown = b"x" * (100 << 20)
        await watch.moved("resident_memory_bytes")
        del grown


async def test_windows_that_fail_and_letters_that_run_again_move(tmp_path: Path, handler: str) -> None:
    engine = LocalEngine(fail=lambda _: WindowFailed("No."))
    settings = quick(
        tmp_path / "out",
        handler,
        window_attempts=2,
        retry_seconds=(0.5, 0.5),
        window_on_failure="dead_letter",
    )
    async with watched(settings, engine) as watch, child(watch) as one:
        await one.batch({"wish": "poison"}, {}, {"second": 25})
        await watch.moved("window_oldest_age_seconds")
        await watch.moved("window_failures_total", "windows_set_aside_total", "dead_letters_waiting")
        parts = watch.server.only.pipeline.parts
        assert parts is not None
        async with parts.source.parts.claims.current["s"].work():  # type: ignore[attr-defined]  # nobody redrives meanwhile
            (letter,) = await parts.ledger.letters()
            await parts.ledger.redrive((letter.id,))
            await watch.moved("dead_letters_redriving")


async def test_early_results_move_when_they_are_shown_and_when_they_fail(
    tmp_path: Path, handler: str
) -> None:
    early = HANDLER.replace('on="at")', 'on="at", early="1 s")')
    (tmp_path / "early_wishing.py").write_text(early)
    engine = LocalEngine()
    async with watched(quick(tmp_path / "out", "early_wishing"), engine) as watch, child(watch) as one:
        await one.batch({})
        await watch.moved("early_results_total")
        engine.fail = lambda _: WindowFailed("No.")
        await one.batch({})
        await watch.moved("early_result_failures_total")


async def test_a_stream_that_is_throttled_and_trimmed_moves(
    tmp_path: Path, handler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_aws(monkeypatch, tmp_path)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    fake = FakeStreams()
    (shard_id,) = fake.open_shards
    async with fake.serving() as url:
        source = f"dynamodb://orders?endpoint_url={url}&region=us-east-1"
        async with watched(quick(tmp_path / "out", handler, source=source, poll_seconds=0.05)) as watch:
            fake.fail("GetRecords", "ThrottlingException")
            await watch.moved("stream_retries_total")
            fake.fail("GetRecords", "TrimmedDataAccessException", shard_id=shard_id)
            await watch.moved("stream_gaps_total")


async def test_a_shard_without_a_row_sticks_the_watermark_and_another_server_is_counted(
    tmp_path: Path, handler: str
) -> None:
    settings = quick(tmp_path / "out", handler, missing_limit=0.2, idle_time=0.2, server_id="one")
    async with watched(settings) as watch, child(watch) as one, child(watch, "silent"):
        await one.batch({"second": 25}, lag_ms=1000)
        await watch.moved("watermark_stuck")
        async with serving(replace(settings, server_id="two")):
            await watch.moved("servers")


async def test_a_shard_that_has_lost_its_daemon_moves(tmp_path: Path, handler: str) -> None:
    async with watched(quick(tmp_path / "out", handler, missing_limit=0.2)) as watch:
        async with child(watch) as one:
            await one.batch({"second": 25})
        await watch.moved("unread_shards")


async def test_workers_that_die_grow_hang_and_flood_the_log_move(tmp_path: Path, handler: str) -> None:
    settings = quick(tmp_path / "out", handler, workers=1, attempts=1, worker_memory="250 MiB")
    async with watched(settings) as watch, child(watch) as one:
        await watch.moved("worker_shards", "worker_resident_memory_bytes")
        await one.batch({"wish": "print"})
        await watch.moved("log_lines_lost_total")
        one.records({"wish": "hang long"})
        await watch.moved("worker_running_seconds")
        (tmp_path / "let go").touch()
        await one.done()
        await one.batch({"wish": "die"})
        await watch.moved("workers_lost_total", "worker_restarts_total")
        await one.batch({"wish": "grow"})
        await watch.moved("workers_replaced_total")


async def test_keyed_state_moves_from_its_first_key_to_the_compaction_of_its_files(
    tmp_path: Path, handler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "counting.py").write_text(COUNTS)
    entries = StateFiles._entries

    def slow(*given: Any) -> Any:
        time.sleep(0.005)  # in a thread: a snapshot that takes less than a millisecond adds no time
        return entries(*given)

    monkeypatch.setattr(StateFiles, "_entries", slow)
    stream = FakeStream(1)
    (shard_id,) = stream.shards
    settings = quick(tmp_path / "out", "counting", state_bytes="1 MiB")
    async with watched(settings, stream=stream) as watch, child(watch, shard_id) as one:
        await watch.moved("state_snapshots_total", "state_snapshot_seconds_total")
        await one.batch({"second": 1})
        await watch.moved("state_keys", "state_files", "state_file_bytes")
        status = watch.server.document()
        (store,) = status.state.stores if status.state is not None else ()
        assert (store.id, store.keys, store.files, store.serial) == (shard_id, 1, 1, 1)

        def flushed(serial: int) -> bool:
            state = watch.server.document().state
            return state is not None and state.stores[0].serial >= serial

        used = status.budgets["state"]
        assert (used.used_bytes, used.limit_bytes) == (store.bytes, 1 << 20)
        for serial in range(2, 30):
            await one.batch({"second": 1})
            async with asyncio.timeout(240):
                await until(partial(flushed, serial))
        await watch.moved("state_compactions_total")


async def test_timers_move_when_they_are_set_held_fired_and_left_without_a_callback(
    tmp_path: Path, handler: str
) -> None:
    (tmp_path / "timed.py").write_text(TIMED + MORE)
    (tmp_path / "changed.py").write_text(TIMED)
    stream = FakeStream(1)
    (shard_id,) = stream.shards
    settings = quick(tmp_path / "out", "timed", pipeline="p")
    async with watched(settings, stream=stream) as watch, child(watch, shard_id) as one:
        await one.batch({"wish": "alarm"}, lag_ms=5000)
        await watch.moved("timers_set_total", "timers_pending", "timers_held", "timers_held_seconds")
        document = watch.server.document()
        assert document.timers is not None
        assert document.timers.held_by == shard_id
        await one.is_at_tip()
        await watch.moved("timers_fired_total", "timer_lateness_seconds", "timers_cancelled_total")
        await one.batch({"wish": "punctual"}, {"wish": "fails"})
        await one.is_at_tip()
        await watch.moved("timers_skipped_total", "timers_failed_total")
        await one.is_at_tip()
        await watch.moved("dead_letter_errors_total", "failed_records_total")
        totals = watch.server.document().totals
        assert (totals.rows, totals.dead_letters) == (1, 1), "of callbacks too"
    settings = replace(settings, handler="changed")
    async with watched(settings, stream=stream) as watch, child(watch, shard_id) as one:
        watch.before["timers_unknown"] = {("mldserver_timers_unknown",): 0.0}
        one.last = 3
        await one.batch({"wish": "alarm"})
        await watch.moved("timers_unknown")


async def test_reloads_move_by_what_became_of_them(tmp_path: Path, handler: str) -> None:
    settings = quick(tmp_path / "out", handler, workers=1)
    endpoint = AdminEndpoint(replace(settings, admin=TcpAddress("127.0.0.1", 0)), SystemClock())
    async with watched(settings) as watch, endpoint.serving(lambda _: None, watch.server.carry_out):
        (tmp_path / "wishing.py").write_text("this is no Python")
        assert not (await endpoint._carry_out_shielded("reload", "", "", "somebody"))[0]
        await watch.moved("reloads_refused_total")
        (tmp_path / "wishing.py").write_text(HANDLER + "# mended")
        assert (await endpoint._carry_out_shielded("reload", "", "", "somebody"))[0]
        await watch.moved("reloads_total", "info")


async def test_spark_moves_when_it_starts_works_and_dies(tmp_path: Path, handler: str) -> None:
    command = [sys.executable, str(FAKE), "good", str(tmp_path / "lives")]
    engine = make_engine(
        handler, "id BIGINT", master="sc://nowhere", work_dir=tmp_path / "work", command=command
    )
    async with watched(quick(tmp_path / "out", handler), engine) as watch:
        await watch.server.ready()
        # Two starts may take the same time, to the millisecond.
        await watch.moved("spark_jvm_resident_memory_bytes", "spark_start_seconds")
        watch.before = watch.now()
        computing = asyncio.create_task(engine.compute(job("hangs")))
        await watch.moved("spark_jobs")
        computing.cancel()
        with pytest.raises(DriverLost):
            await engine.compute(job("dies"))
        await watch.moved("ready", "spark_ready", "spark_lost_total")
        await watch.moved("spark_starts_total")


async def test_an_event_loop_that_stands_still_moves(tmp_path: Path, handler: str) -> None:
    async with watched(quick(tmp_path / "out", handler)) as watch:
        loop = asyncio.get_running_loop()
        loop.call_soon(lambda: until_ns(time.monotonic_ns() + 300_000_000))
        await watch.server._gatherer.pause(0.1)
        await watch.moved("event_loop_lag_seconds")


def until_ns(end_ns: int) -> None:
    while time.monotonic_ns() < end_ns:
        pass


def test_no_metric_is_left_out() -> None:
    called = (
        node for node in ast.walk(ast.parse(Path(__file__).read_text("utf-8"))) if isinstance(node, ast.Call)
    )
    moved = {
        each.value
        for call in called
        if isinstance(call.func, ast.Attribute) and call.func.attr == "moved"
        for each in call.args
        if isinstance(each, ast.Constant)
    }
    assert {f"{PREFIX}{name}" for name in moved | STILL} == METRICS.keys()
    assert not moved & STILL
