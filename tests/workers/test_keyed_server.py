"""A whole server whose handler counts the records of each key, while its workers die: the rows of each key count from 1 on."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest
from support.serving import quick, serving, until
from workers.kit import named
from workers.test_hurt import play

from mldserver.testing import FakeStream

HANDLER = """
import os
from mldserver import Context, batches

schema = "key STRING, n BIGINT, id BIGINT"
windows = batches(max_rows=1000, max_age="1 hour")

def process_record(record, ctx: Context):
    ctx.state["n"] = ctx.state.get("n", 0) + 1
    number = record.text()
    if number.endswith("!"):
        os._exit(3)
    return ctx.key, ctx.state["n"], int(number)
"""
KEYS, POISON = 25, 500


def rows_of(out: Path) -> dict[str, list[tuple[int, int]]]:
    """Return the id and the number in each row, by key, in the order of the ids."""
    files = [str(path) for path in out.glob("window=*/*.parquet")]
    rows: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for row in ds.dataset(files, format="parquet").to_table().to_pylist():
        rows[row["key"]].append((row["id"], row["n"]))
    return {key: sorted(pairs) for key, pairs in rows.items()}


async def test_workers_that_are_killed_lose_and_double_no_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[dict[str, Any]], long: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "counts.py").write_text(HANDLER)
    stream, dice = FakeStream(4, seed=1, start_ms=1_800_000_000_000), random.Random(7)
    kills, killed, expected = 20 if long else 3, list[int](), Counter[str]()
    for number in range(400 * kills):
        key = f"key-{dice.randrange(KEYS)}"
        stream.put((f"{number}!" if number == POISON else str(number)).encode(), key)
        expected[key] += 1
    stream.end()

    async def kill_now_and_then() -> None:
        for turn in range(kills):
            done = len(named(logged, "batch.done"))
            await until(lambda done=done: len(named(logged, "batch.done")) > done + 10)  # type: ignore[misc]  # a lambda's default
            pids = [each["pid"] for each in named(logged, "worker.started") if each["worker"] == turn % 2]
            lost = {each["pid"] for each in named(logged, "worker.lost")}
            if pids[-1] not in lost:
                killed.append(pids[-1])
                os.kill(pids[-1], signal.SIGKILL)

    settings = quick(tmp_path / "out", "counts", workers=2, attempts=2)
    async with serving(settings, stream=stream) as server:
        killing = asyncio.create_task(kill_now_and_then())
        await play(server, stream, max_records=5)
        killing.cancel()
        await asyncio.wait({killing})
    rows = rows_of(tmp_path / "out")
    letters = [each["partition_key"] for each in named(logged, "handler.dead_letter")]
    # A record that is in hand alone when its process is killed, as often as it may be tried, is taken for the cause.
    assert 1 <= len(letters) <= (4 if long else 1)
    assert Counter({key: len(pairs) for key, pairs in rows.items()}) + Counter(letters) == expected
    assert all([n for _, n in pairs] == list(range(1, len(pairs) + 1)) for pairs in rows.values()), rows
    assert len(killed) >= kills // 2
    assert {each["pid"] for each in named(logged, "worker.lost")} > set(killed), "and those of the record"
    assert named(logged, "connection.failed") == []
