"""A whole server and timers that its handler's records set: each fires once, whichever server has the shard when it is due."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest
from support.serving import quick, serving, until

from mldserver.testing import FakeMLD, FakeStream

START_MS = 1_800_000_000_000
HANDLER = '''
"""A record sets an alarm of its key, or cancels it. The alarm gives a row."""
from mldserver import batches, timer

schema = "key STRING, n BIGINT, fired BOOLEAN"
windows = batches(max_rows=1000, max_age="1 hour")


def process_record(record, ctx):
    event = record.json()
    ctx.state["n"] = event["n"]
    if event["after"] is None:
        ctx.timers.cancel(alarm)
    else:
        ctx.timers.set(alarm, after=event["after"], payload=event["n"])
    return ctx.key, event["n"], False


@timer
def alarm(due, ctx):
    assert ctx.state["n"] == due.payload
    return ctx.key, due.payload, True
'''


def put(stream: FakeStream, key: str, n: int, after: str | None) -> None:
    stream.put(json.dumps({"n": n, "after": after}).encode(), key)


def rows(out: Path) -> Counter[tuple[str, int, bool]]:
    """The rows of the segments and windows that there are."""
    files = [*out.glob("window=*/*.parquet"), *out.glob("batch=*/*.parquet")]
    if not files:
        return Counter()
    table = ds.dataset([str(path) for path in files], format="parquet").to_table(
        columns=["key", "n", "fired"]
    )
    return Counter((row["key"], row["n"], row["fired"]) for row in table.to_pylist())


@pytest.fixture(params=[None, 1], ids=["inline", "worker"])
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    (tmp_path / "alarming.py").write_text(HANDLER)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return quick(tmp_path / "out", "alarming", workers=request.param)


async def test_timers_fire_once_after_their_time_unless_they_are_cancelled_or_set_again(
    settings: Any, tmp_path: Path
) -> None:
    stream = FakeStream(1, seed=1, start_ms=START_MS)
    put(stream, "quiet", 1, "200 milliseconds")
    put(stream, "cancelled", 2, "30 seconds")
    put(stream, "again", 3, "30 seconds")
    async with serving(settings, stream=stream) as server, asyncio.timeout(60):
        async with asyncio.TaskGroup() as group:
            playing = group.create_task(FakeMLD(stream, await server.listening()).run())
            await until(lambda: server.status().rows_durable == 4)
            put(stream, "cancelled", 4, None)
            put(stream, "again", 5, "100 milliseconds")
            await until(lambda: server.status().rows_durable == 7)
            stream.end()
            await playing
        await server.finished()
    assert rows(tmp_path / "out") == Counter(
        [
            *(("quiet", 1, False), ("cancelled", 2, False), ("again", 3, False)),
            *(("quiet", 1, True), ("cancelled", 4, False), ("again", 5, False), ("again", 5, True)),
        ]
    )


async def test_a_timer_fires_on_the_server_that_has_the_shard_when_it_is_due(
    settings: Any, tmp_path: Path
) -> None:
    stream = FakeStream(1, seed=1, start_ms=START_MS)
    for n in range(20):
        put(stream, f"key-{n}", n, "1 second")
    async with (
        serving(settings, stream=stream) as server,
        asyncio.timeout(60),
        asyncio.TaskGroup() as group,
    ):
        playing = group.create_task(FakeMLD(stream, await server.listening()).run())
        await until(lambda: server.status().rows_durable == 20)
        playing.cancel()
    async with serving(settings, stream=stream) as server, asyncio.timeout(60):
        async with asyncio.TaskGroup() as group:
            playing = group.create_task(FakeMLD(stream, await server.listening()).run())
            await until(lambda: server.status().rows_durable == 20)
            stream.end()
            await playing
        await server.finished()
    fired = rows(tmp_path / "out")
    assert fired == Counter((f"key-{n}", n, each) for n in range(20) for each in (False, True))


async def test_a_record_that_arrives_later_moves_the_time_on_to_its_arrival(
    settings: Any, tmp_path: Path
) -> None:
    stream = FakeStream(1, seed=1, start_ms=START_MS)
    put(stream, "a", 1, "30 minutes")
    async with serving(settings, stream=stream) as server, asyncio.timeout(60):
        async with asyncio.TaskGroup() as group:
            playing = group.create_task(FakeMLD(stream, await server.listening()).run())
            await until(lambda: server.status().rows_durable == 1)
            stream.put(b'{"n": 2, "after": null}', "b", arrival_ms=START_MS + 1_800_000)
            await until(lambda: server.status().rows_durable == 3)
            stream.end()
            await playing
        await server.finished()
    assert rows(tmp_path / "out") == Counter([("a", 1, False), ("b", 2, False), ("a", 1, True)])
