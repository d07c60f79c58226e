"""The real Java MultiLangDaemon and a handler that keeps state: through a split, a merge and kills each record counts once."""

from __future__ import annotations

import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from crash.held import in_sqlite
from crash.seeds import crash_seed
from support.counted import check_stored
from support.java_stack import Stack

pytestmark = [pytest.mark.slow, pytest.mark.long]

Pieces = list[list[dict[str, Any]]]

HANDLER = """
state_ttl = "1 day"


def process_record(record, ctx):
    order = record.json()
    seen = ctx.state.get("seen", 0)
    if seen != order["nth"]:
        raise ValueError(f"{ctx.key} has counted {seen} records, and this is its number {order['nth']}")
    ctx.state["seen"] = seen + 1
"""
"""A record that counts at the wrong place becomes a dead letter."""
KEYS = [f"key-{number}" for number in range(29)]
PIECE = 150


def orders(dice: random.Random, pieces: int) -> tuple[Pieces, Counter[str]]:
    """Make pieces of orders, each with its number among those of its key; return also how many each key has."""
    counts: Counter[str] = Counter()
    made = []
    for _ in range(pieces):
        piece = []
        for key in dice.choices(KEYS, k=PIECE):
            piece.append({"key": key, "nth": counts[key]})
            counts[key] += 1
        made.append(piece)
    return made, counts


async def journey(stack: Stack, dice: random.Random, pieces: Pieces) -> None:
    """Put pieces of orders, while the stream splits and merges and the server and the JVM are killed, until all are durable."""

    async def kill_server() -> None:
        await stack.end(stack.server, signal.SIGKILL)
        stack.start_server()

    async def kill_jvm() -> None:
        await stack.until("there is a JVM", stack.kill_jvm)

    async def put_and_kill(piece: list[dict[str, Any]], *kills: Any) -> None:
        for place, kill in enumerate(kills):
            size = PIECE // len(kills)
            await stack.put(piece[place * size : (place + 1) * size])
            if dice.random() < 0.6:
                before = stack.positions()
                await stack.until("something is durable", lambda before=before: stack.positions() != before)
            await kill()
        await stack.put(piece[PIECE // len(kills) * len(kills) :] if kills else piece)

    stack.start_server()
    stack.start_daemon()
    await put_and_kill(pieces[0])
    await stack.until_durable()
    first, second = sorted(stack.positions())
    await put_and_kill(pieces[1], kill_server)
    middle = dice.randrange(2**125, 3 * 2**125)
    await stack.kinesis.split_shard(StreamName="orders", ShardToSplit=first, NewStartingHashKey=str(middle))
    await put_and_kill(pieces[2], kill_jvm, kill_server)
    await stack.until_durable()
    await put_and_kill(pieces[3])
    upper = "shardId-000000000003"
    await stack.kinesis.merge_shards(StreamName="orders", ShardToMerge=upper, AdjacentShardToMerge=second)
    await put_and_kill(pieces[4], kill_server, kill_jvm)
    await stack.until_durable()
    for piece in pieces[5:]:
        await put_and_kill(piece, dice.choice((kill_server, kill_jvm)))
    await stack.until_durable()
    last = await stack.last_sequences()
    assert len(last) == 5
    ends = dict.fromkeys((first, second, upper), "SHARD_END")
    await stack.until_checkpointed({shard: str(number) for shard, number in last.items() if number} | ends)


async def test_each_record_counts_once_through_a_split_a_merge_and_kills_of_server_and_jvm(
    tmp_path: Path,
) -> None:
    dice = random.Random(crash_seed())
    pieces, counts = orders(dice, 8)
    (tmp_path / "counts_orders.py").write_text(HANDLER)
    stack = Stack(tmp_path, "counts_orders")
    async with stack.running(shards=2):
        await journey(stack, dice, pieces)
        assert await stack.end(stack.daemon) == 0
        assert await stack.end(stack.server) == 0
    assert stack.query("SELECT * FROM dead_letters") == []
    assert check_stored(stack.out, in_sqlite(stack.out).state, counts) == []
    assert stack.samples.ahead == []
