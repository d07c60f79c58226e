"""A server with a real Spark whose handler is reloaded under load: what has seen each row, and what computed its window."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest
from support.serving import quick, until
from workers.kit import named

from mldserver.server import Server
from mldserver.testing import FakeMLD, FakeStream, Habits

pytestmark = [pytest.mark.slow, pytest.mark.long]

HANDLER = '''
"""{note}"""
from mldserver import batches

schema = "id BIGINT NOT NULL, seen_by BIGINT"
windows = batches(max_rows=100, max_age="1 hour")
version = {version}

def process_record(record):
    return record.json()["id"], {version}

def on_window(rows, window):
    from pyspark.sql.functions import lit, udf
    return rows.withColumn("computed_by", lit({version})).withColumn("called", udf(lambda: {version}, "int")())
'''


async def test_each_window_is_computed_by_one_version_and_each_row_is_there_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[dict[str, Any]]
) -> None:
    monkeypatch.chdir(tmp_path)

    def write(version: int) -> None:
        (tmp_path / "mine.py").write_text(HANDLER.format(note="." * version, version=version))

    write(1)
    conf = {
        "spark.sql.shuffle.partitions": "2",
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    }
    settings = quick(tmp_path / "out", "mine", workers=2, spark_conf=conf, spark_master="local[2]")
    given = FakeStream(2, seed=1, start_ms=1_800_000_000_000)
    numbers = itertools.count()

    def put() -> None:
        for number in itertools.islice(numbers, 60):
            given.put(json.dumps({"id": number}).encode(), f"key-{number}")

    async def told(event: str, times: int) -> None:
        await until(lambda: len(named(logged, event)) >= times)

    server = Server(settings, seed=1)
    async with asyncio.timeout(800), asyncio.TaskGroup() as group:
        life = group.create_task(server.run())
        put()
        daemon = FakeMLD(given, await server.listening(), habits=Habits(max_records=4))
        playing = group.create_task(daemon.run())
        for version in (2, 3):
            for _ in range(6):
                await until(lambda: daemon.records_sent >= given.records)
                put()
            await told("window.done", 2 * version - 1)
            write(version)
            done, text = await server.carry_out("reload", "")
            assert done, text
            put()
            await told("spark.ready", version)
        given.end()
        await playing
        await server.finished()
        server.stop("the test is over")
        assert await life == 0
    assert (daemon.violations, daemon.life, daemon.finished) == ([], 1, True)
    assert named(logged, "spark.lost", "window.failed", "connection.failed", "worker.lost") == []
    seen: Counter[int] = Counter()
    computed = set()
    for window in (tmp_path / "out").glob("window=*"):
        rows = ds.dataset(sorted(map(str, window.glob("*.parquet"))), format="parquet").to_table().to_pylist()
        seen.update(row["id"] for row in rows)
        (version,) = {(row["computed_by"], row["called"]) for row in rows}
        computed.add(version)
    assert seen == Counter(range(given.records))
    assert computed == {(1, 1), (2, 2), (3, 3)}
