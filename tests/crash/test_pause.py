"""A server is killed right after the ledger says that its function is paused: the next one is paused from its start, and nothing is lost."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest
from support.serving import quick, serving, until

from mldserver.base.kill_points import arm
from mldserver.server import Server
from mldserver.testing import FakeMLD, FakeStream

RECORDS = 60
HANDLER = '''
"""A row for each record."""
from mldserver import batches

schema = "n BIGINT NOT NULL"
windows = batches(max_rows=1000, max_age="1 hour")


def process_record(record):
    return (int(record.data),)
'''


def _die_in_a_pause(out: Path, settings: dict[str, Any]) -> None:
    sys.path.insert(0, str(out.parent))
    os.chdir(out.parent)

    async def die() -> None:
        server = Server(quick(out, "plain", **settings))
        running = asyncio.create_task(server.run())
        await server.listening()
        await until(lambda: server.only.pipeline.parts is not None)
        arm("function.wanted")
        await server.carry_out("pause", "")
        await running

    asyncio.run(die())


@pytest.mark.usefixtures("no_standby")
async def test_a_server_killed_before_it_follows_a_pause_comes_back_paused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "plain.py").write_text(HANDLER)
    out, stream = tmp_path / "out", FakeStream(2, seed=1, start_ms=1_800_000_000_000)
    for number in range(RECORDS):
        stream.put(str(number).encode(), f"key-{number}")
    stream.end()
    killed = multiprocessing.get_context("spawn").Process(target=_die_in_a_pause, args=(out, {}))
    killed.start()
    await asyncio.to_thread(killed.join, 60)
    assert killed.exitcode == -signal.SIGKILL
    async with serving(quick(out, "plain")) as server, asyncio.timeout(60):
        daemon = FakeMLD(stream, await server.listening())
        playing = asyncio.create_task(daemon.run())
        parts = server.only.pipeline.parts
        assert parts is not None
        await until(
            lambda: len(parts.coordinator.shards.backpressure.settled) == len(daemon.active_shards) > 0
        )
        assert parts.coordinator.is_paused
        sent = daemon.records_sent
        assert await server.carry_out("pause", "")
        assert daemon.records_sent == sent
        assert await server.carry_out("resume", "") == (True, "All shards go on.")
        await playing
        await server.finished()
    found = ds.dataset([str(path) for path in out.glob("window=*/*.parquet")], format="parquet").to_table()
    assert sorted(found["n"].to_pylist()) == list(range(RECORDS))
