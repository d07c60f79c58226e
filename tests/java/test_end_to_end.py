"""The real Java MultiLangDaemon (KCL 3.1.3) in front, committed Parquet behind, and no row lost or doubled between."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from crash.seeds import crash_seed
from support.certificates import Certificates
from support.java_stack import Stack
from support.processes import has_ended
from support.spark_classes import spark_cache

pytestmark = pytest.mark.slow

HANDLER = """
from pyspark.sql import functions as F
from mldserver import tumbling

schema = "key STRING, n BIGINT, at TIMESTAMP"
windows = tumbling("1 hour", on="at")

def process_record(record):
    order = record.json()
    assert record.partition_key == order["key"]
    return order["key"], order["n"], order["at"]

def on_window(rows, window):
    grouped = rows.groupBy("key").agg(F.count("*").alias("orders"), F.sum("n").alias("total"), F.collect_list("n").alias("ns"))
    return grouped.withColumn("start", F.lit(window.start))
"""

KEYS = ["amber", "blau", "céladon", "дуб", "elm", "fir", "灰", "hazel", "ivy", "jet", "kelp"]
START = datetime(2026, 3, 1, tzinfo=UTC)
PER_HOUR = 300
CLOSERS = len(KEYS)
"""Orders of the hour after the last, one of each key: in every shard they close the windows before them, which a silence on a
slow machine must not."""


def orders(first: int, last: int) -> list[dict[str, Any]]:
    """Make orders ``first`` to ``last - 1``; their times go up, so that none is late."""
    return [
        {
            "n": n,
            "key": KEYS[n * 7 % len(KEYS)],
            "at": (START + timedelta(seconds=3600 / PER_HOUR * n)).isoformat(),
        }
        for n in range(first, last)
    ]


def computed(rows: list[dict[str, Any]]) -> dict[tuple[datetime, str], list[int]]:
    """Group orders by hour and key, without Spark."""
    groups: dict[tuple[datetime, str], list[int]] = {}
    for row in rows:
        hour = datetime.fromisoformat(row["at"]).replace(minute=0, second=0, microsecond=0)
        groups.setdefault((hour, row["key"]), []).append(row["n"])
    return groups


def published(stack: Stack) -> dict[tuple[datetime, str], list[int]]:
    """Return what the published windows hold, in the form of ``computed``."""
    rows = stack.rows()
    assert max(Counter((row["start"], row["key"]) for row in rows).values(), default=1) == 1
    for row in rows:
        assert (row["orders"], row["total"]) == (len(row["ns"]), sum(row["ns"]))
    return {(row["start"], row["key"]): sorted(row["ns"]) for row in rows}


def all_published(stack: Stack, hours: int) -> bool:
    """Tell whether all but the window of the closers is."""
    states = [state for _, state in sorted(stack.windows().items())]
    return states == [*["published"] * hours, "open"]


@pytest.fixture
def stack(tmp_path: Path) -> Stack:
    (tmp_path / "java_handler.py").write_text(HANDLER)
    return Stack(tmp_path, "java_handler", spark_cache(tmp_path))


def no_rows(folder: Path) -> str:
    """Write a handler that gives no rows, so that no Spark starts, and return its name."""
    (folder / "no_rows.py").write_text("def process_record(record):\n    pass\n")
    return "no_rows"


def no_rows_beside(stack: Stack) -> None:
    """Check that nothing went to the late dataset or the dead letters, where a lost row could hide."""
    assert not list(stack.out.glob("_late/**/*.parquet"))
    assert stack.query("SELECT * FROM dead_letters") == []


async def test_no_row_is_lost_or_doubled_while_a_shard_splits_all_are_restarted_and_records_come_to_be_pushed(
    stack: Stack,
) -> None:
    hours = 6
    everything = orders(0, hours * PER_HOUR + CLOSERS)
    fifth = len(everything) // 5
    pieces = [everything[fifth * at : fifth * (at + 1)] for at in range(4)]
    pieces.append(everything[fifth * 4 :])
    parent = "shardId-000000000000"
    async with stack.running(shards=2):
        stack.start_server()
        stack.start_daemon()
        await stack.put(pieces[0])
        await stack.until_durable()

        # In order: the daemon's JVM exits when its connections end, and its supervisor brings it back.
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(stack.put(pieces[1]))
            assert await stack.end(stack.server) == 0
        stack.start_server()
        await stack.until_durable()

        # A shard ends, and its children go on.
        middle = str(2**126)
        await stack.kinesis.split_shard(StreamName="orders", ShardToSplit=parent, NewStartingHashKey=middle)
        await stack.put(pieces[2])
        await stack.until_durable()
        last = await stack.last_sequences()
        assert len(last) == 4
        assert min(last.values()) > 0
        await stack.until_checkpointed({parent: "SHARD_END"})
        assert stack.positions()[parent] == (last.pop(parent), True)
        await stack.until_checkpointed({shard: str(number) for shard, number in last.items()})

        # In disorder, with records on the way; then the daemon too, and from now on records are pushed.
        await stack.put(pieces[3])
        await stack.until("Spark is there", lambda: bool(stack.sparks()))
        sparks = stack.sparks()
        await stack.end(stack.server, signal.SIGKILL)
        stack.server = None
        await stack.until("no Spark survives its server", lambda: all(map(has_ended, sparks)))
        assert not list((stack.out / "_mldserver").glob("spark/**/spark-*"))
        assert await stack.end(stack.daemon) in {0, 3}
        polled = len(stack.daemon_events())
        stack.start_server()
        stack.start_daemon(retrieval="fan-out")
        await stack.put(pieces[4])
        await stack.until_durable()
        await stack.until("all windows published", lambda: all_published(stack, hours))
        last = await stack.last_sequences()
        del last[parent]
        await stack.until_checkpointed({shard: str(number) for shard, number in last.items()})
        described = await stack.kinesis.describe_stream_summary(StreamName="orders")
        arn = described["StreamDescriptionSummary"]["StreamARN"]
        assert len((await stack.kinesis.list_stream_consumers(StreamARN=arn))["Consumers"]) == 1
        assert await stack.end(stack.daemon) == 0
        assert await stack.end(stack.server) == 0
    assert published(stack) == computed(everything[:-CLOSERS])
    no_rows_beside(stack)
    assert stack.samples.taken > 20
    assert stack.samples.ahead == []
    pushed = stack.daemon_events()[polled:]
    started = next(event for event in pushed if event["event"] == "kcl.starting")
    assert (started["retrieval"], started["properties"]["retrievalMode"]) == ("fan-out", "FANOUT")
    assert [event for event in pushed if event["event"] == "kcl.fault"] == []


@pytest.mark.long
async def test_server_and_jvm_killed_again_and_again_lose_and_double_nothing(stack: Stack) -> None:
    dice = random.Random(crash_seed())
    hours = 4
    everything = orders(0, hours * PER_HOUR + CLOSERS)
    kills = ["server", "jvm"] * 3
    dice.shuffle(kills)
    pieces = len(kills) + 1
    size = -(-len(everything) // pieces)
    async with stack.running(shards=2):
        stack.start_server()
        stack.start_daemon()
        await stack.put(everything[:size])
        await stack.until_durable()
        for number, what in enumerate(kills, start=1):
            before = stack.positions()
            await stack.put(everything[number * size : (number + 1) * size])
            if dice.random() < 0.5:
                # In the middle of the work; else before anything of it has come.
                await stack.until("something is durable", lambda before=before: stack.positions() != before)
            if what == "server":
                await stack.end(stack.server, signal.SIGKILL)
                stack.start_server()
            else:
                await stack.until("there is a JVM", stack.kill_jvm)
        await stack.until_durable()
        await stack.until("all windows published", lambda: all_published(stack, hours))
        last = await stack.last_sequences()
        await stack.until_checkpointed({shard: str(number) for shard, number in last.items()})
        assert await stack.end(stack.daemon) == 0
        assert await stack.end(stack.server) == 0
    assert published(stack) == computed(everything[:-CLOSERS])
    no_rows_beside(stack)
    assert stack.samples.taken > 20
    assert stack.samples.ahead == []


@pytest.mark.long
async def test_a_host_whose_server_is_dead_leaves_its_shards_to_another_before_its_lead_expires(
    tmp_path: Path,
) -> None:
    everything = orders(0, 200)
    one = Stack(tmp_path, no_rows(tmp_path))
    async with one.running(shards=4):
        two = one.beside("two")
        one.start_server()
        two.start_server()
        # The first leads; whoever leads gives expired leases away.
        one.start_daemon(workerIdentifier="one")
        await one.put(everything[:100])
        await one.until_owned("one")
        await one.until_durable()
        two.start_daemon(workerIdentifier="two")
        await two.until("it works", lambda: any("worker loop" in str(event) for event in two.daemon_events()))
        await one.end(one.server, signal.SIGKILL)
        one.server = None
        await two.put(everything[100:])
        # The lock of a leader expires after two minutes.
        await two.until_owned("two", limit=90)
        await two.until_durable()
        assert one.jvms() == []
        assert await one.end(one.daemon) == 0
        assert await two.end(two.daemon) == 0
        assert await two.end(two.server) == 0
    assert [event for event in one.daemon_events() if "lead of the application" in str(event)] == []


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["in order", "killed"])
async def test_a_deploy_of_server_and_daemons_has_all_shards_back_within_30_s(
    tmp_path: Path, number: signal.Signals
) -> None:
    one = Stack(tmp_path, no_rows(tmp_path))
    one.properties = {"metricsLevel": "NONE"}  # the KCL's own intervals
    async with one.running(shards=4):
        two = one.beside("two")
        two.address = one.address
        hosts = {"one": one, "two": two}

        async def connected(limit: float) -> None:
            before = len(one.server_events("shard.opened"))
            for name, host in hosts.items():
                host.start_daemon(workerIdentifier=name)

            def reached() -> bool:
                return len({event["shard"] for event in one.server_events("shard.opened")[before:]}) == 4

            await one.until("all shards are connected", reached, limit=limit)

        one.start_server()
        await connected(600)
        began = time.monotonic()
        # The daemons' JVMs die with the server, the leader among them; then their supervisors are restarted too.
        await one.end(one.server, number)
        one.start_server()
        codes = await asyncio.gather(*(host.end(host.daemon, number) for host in hosts.values()))
        assert set(codes) <= {0, -signal.SIGKILL}
        await connected(30 - (time.monotonic() - began))
        print(f"all shards were back after {time.monotonic() - began:.1f} s")
        for host in hosts.values():
            assert await host.end(host.daemon) == 0
        assert await one.end(one.server) == 0


@pytest.mark.long
async def test_over_tls_every_record_comes_and_certificates_change_under_it(tmp_path: Path) -> None:
    everything, folder = orders(0, 200), tmp_path / "tls"
    folder.mkdir()
    files = Certificates(folder)
    stack = Stack(tmp_path, no_rows(tmp_path))
    stack.environment = {
        "MLDSERVER_TLS_CERTIFICATE": str(files.server),
        "MLDSERVER_TLS_CLIENT_CA": str(files.ca),
    }
    async with stack.running(shards=2):
        stack.start_server(tls_names="server", allow_shards="shardId-*")
        stack.start_daemon()
        await stack.put(everything[:100])
        await stack.until_durable()
        Certificates(folder, "next authority")
        assert stack.server is not None
        stack.server.send_signal(signal.SIGHUP)
        await stack.until(
            "there is a JVM", stack.kill_jvm
        )  # its successor's bridges show the new certificate
        await stack.put(everything[100:])
        await stack.until_durable()
        last = await stack.last_sequences()
        await stack.until_checkpointed({shard: str(number) for shard, number in last.items()})
        assert await stack.end(stack.daemon) == 0
        assert await stack.end(stack.server) == 0
