"""A handler that counts the records of each key, behind the real Java MultiLangDaemon: a shard splits, two neighbours merge, and
the server and its workers are killed in between.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from datetime import UTC, datetime, timedelta
from hashlib import md5
from pathlib import Path
from typing import Any

import pytest
from crash.held import in_sqlite
from crash.seeds import crash_seed
from support.counted import Run, check_counts, check_stored
from support.java_stack import STREAM, Stack

pytestmark = [pytest.mark.slow, pytest.mark.long]

HANDLER = """
import os
import time
from pathlib import Path

from mldserver import tumbling

schema = "key STRING, n BIGINT, counted BIGINT, at TIMESTAMP"
windows = tumbling("1 hour", on="at")
IN_HAND = Path("in-hand")


def process_record(record, ctx):
    order = record.json()
    n = ctx.state.get("n", 0) + 1
    ctx.state["n"] = n
    IN_HAND.write_text(str(os.getpid()))
    time.sleep(0.002)  # so that a kill finds records in hand
    return ctx.key, order["n"], n, order["at"]
"""
KEYS = [f"ключ-{number}" for number in range(60)]
LAST = "shardId-000000000004"
"""The shard that the merge makes."""
HOURS, PER_HOUR, PIECES = 5, 480, 8
START = datetime(2026, 3, 1, tzinfo=UTC)
SPLIT = 2**126
"""Half of the first shard's hashes."""


class Orders:
    """The producer: puts orders of random keys, and keeps the log that tells what must come out."""

    def __init__(self, stack: Stack, dice: random.Random) -> None:
        self._stack, self._dice = stack, dice
        self.log: list[tuple[str, int]] = []
        """Key and number of each order, in the order of the puts."""
        self.closing: list[str] = []
        """Keys of the orders of the hour after the last."""

    async def put(self) -> None:
        """Put the next piece."""
        size = HOURS * PER_HOUR // PIECES
        rows = [self._order(self._dice.choice(KEYS), len(self.log) + at) for at in range(size)]
        self.log += [(row["key"], row["n"]) for row in rows]
        await self._stack.put(rows)

    async def close_windows(self) -> None:
        """Put one order of each key an hour later, so that the watermark of every shard passes the windows before."""
        assert len(self.log) == HOURS * PER_HOUR
        self.closing = KEYS
        await self._stack.put([self._order(key, len(self.log)) for key in KEYS])

    @property
    def by_key(self) -> dict[str, list[int]]:
        """The numbers of each key's orders, without those that close windows."""
        return {key: [n for name, n in self.log if name == key] for key in KEYS}

    @property
    def counts(self) -> dict[str, int]:
        """How many orders each key has."""
        return dict(Counter([*(key for key, _ in self.log), *self.closing]))

    @staticmethod
    def _order(key: str, n: int) -> dict[str, Any]:
        return {"key": key, "n": n, "at": (START + timedelta(seconds=3600 / PER_HOUR * n)).isoformat()}


def shown(stack: Stack) -> dict[str, tuple[str, Any]]:
    """Return the store and the value of each key, as ``mldserver state show`` prints them."""
    command = [
        sys.executable,
        "-m",
        "mldserver",
        "state",
        "show",
        "--out",
        str(stack.out),
        "--limit",
        "1000",
        "--json",
    ]
    document = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    entries = document["entries"]
    assert document["keys"] == len(entries) == len({entry["key"] for entry in entries})
    return {entry["key"]: (entry["store"], entry["value"]) for entry in entries}


def owner(key: str) -> str:
    """Return the open shard that has a key in the end."""
    hashed = int.from_bytes(md5(key.encode()).digest())
    return LAST if hashed >= SPLIT else "shardId-000000000002"


class Host:
    """The server with its workers, and what kills them."""

    def __init__(self, stack: Stack, dice: random.Random) -> None:
        self._stack, self._dice = stack, dice
        self._before: dict[str, tuple[int, bool]] = {}

    def look(self) -> None:
        """Note what is durable now: before the puts that ``under_way`` is about."""
        self._before = self._stack.positions()
        (self._stack.folder / "in-hand").unlink(missing_ok=True)

    def in_hand(self) -> int:
        """Return the worker that has handled a record since ``look``; 0 for none."""
        file = self._stack.folder / "in-hand"
        return int(file.read_text() or 0) if file.exists() else 0

    async def under_way(self) -> None:
        """Wait until a worker handles records, or until a part of them is durable."""
        if self._dice.random() < 0.5:
            await self._stack.until("records are in hand", lambda: self.in_hand() > 0)
        else:
            await self._stack.until("a part is durable", lambda: self._stack.positions() != self._before)

    async def opened(self, shard: str) -> None:
        """Wait until a shard was opened, by this server or one before."""
        events = self._stack.server_events
        await self._stack.until(
            f"{shard} is open", lambda: any(event["shard"] == shard for event in events("shard.opened"))
        )

    def start(self) -> None:
        """Start the server."""
        self._stack.start_server(workers="2")

    async def kill(self) -> None:
        """Kill the server, and start the next."""
        await self._stack.end(self._stack.server, signal.SIGKILL)
        self.start()

    async def kill_worker(self) -> None:
        """Kill the worker that handles records."""
        await self._stack.until("records are in hand", lambda: self.in_hand() > 0)
        os.kill(self.in_hand(), signal.SIGKILL)


async def test_each_key_is_counted_once_through_a_split_and_a_merge_while_server_and_workers_are_killed(
    tmp_path: Path,
) -> None:
    dice = random.Random(crash_seed())
    (tmp_path / "java_counting.py").write_text(HANDLER)
    stack = Stack(tmp_path, "java_counting")
    orders, host = Orders(stack, dice), Host(stack, dice)
    async with stack.running(shards=2):
        host.start()
        stack.start_daemon()
        await orders.put()
        await stack.until_durable()

        # The server dies with records of the parent and of its children to read, and again while a child is young.
        host.look()
        await orders.put()
        await stack.kinesis.split_shard(
            StreamName=STREAM, ShardToSplit="shardId-000000000000", NewStartingHashKey=str(SPLIT)
        )
        await orders.put()
        await host.under_way()
        await host.kill()
        await host.opened("shardId-000000000003")
        await host.kill()
        await stack.until_durable()

        # A worker dies with records in hand.
        host.look()
        await orders.put()
        await host.kill_worker()
        await stack.until_durable()

        # Two neighbours merge, of which one is a child of the split. The merged shard waits for the end of both.
        host.look()
        await orders.put()
        await stack.kinesis.merge_shards(
            StreamName=STREAM,
            ShardToMerge="shardId-000000000003",
            AdjacentShardToMerge="shardId-000000000001",
        )
        await orders.put()
        await host.under_way()
        await host.kill()
        await host.opened(LAST)
        await host.kill()
        await stack.until_durable()
        host.look()
        await orders.put()
        await host.kill_worker()
        await stack.until_durable()

        await orders.put()
        await orders.close_windows()
        await stack.until_durable()
        published = [*["published"] * HOURS, "open"]
        await stack.until(
            "all windows are published",
            lambda: [state for _, state in sorted(stack.windows().items())] == published,
        )
        assert await stack.end(stack.daemon) == 0
        assert await stack.end(stack.server) == 0
    rows = stack.rows()
    runs = [Run(key, numbers) for key, numbers in orders.by_key.items()]
    assert check_counts(runs, [(row["n"], row["counted"]) for row in rows]) == []
    assert {row["n"]: row["key"] for row in rows} == {n: key for key, n in orders.log}
    assert not list(stack.out.glob("_late/**/*.parquet"))
    assert stack.query("SELECT * FROM dead_letters") == []
    assert check_stored(stack.out, in_sqlite(stack.out).state, orders.counts) == []
    assert shown(stack) == {key: (owner(key), {"n": count}) for key, count in orders.counts.items()}
    lost = [event["batches"] for event in stack.server_events("worker.lost")]
    assert len(lost) == 2
    assert sum(lost) > 0
    assert stack.samples.taken > 20
    assert stack.samples.ahead == []
