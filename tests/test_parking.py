"""Records behind a dead letter of their key wait, on a whole server: in its life, over lost connections and restarts."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from support.serving import quick, serving, until

from mldserver.config.resolve import ledger_file
from mldserver.testing import FakeMLD, FakeStream, Habits

HANDLER = '''
"""Notes what it was called with."""
from pathlib import Path

seen = Path(__file__).with_name("seen.txt")


def process_record(record):
    with seen.open("a") as file:
        print(record.text(), file=file)
    if record.text().startswith("bad"):
        raise ValueError(record.text())
'''


@pytest.fixture
def handler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "notes_calls.py").write_text(HANDLER)
    (tmp_path / "seen.txt").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return "notes_calls"


def letters(settings: Any) -> list[tuple[bytes, int]]:
    with sqlite3.connect(ledger_file(settings)) as db:
        found = db.execute(
            "SELECT data, attempts, error FROM dead_letters ORDER BY version, place"
        ).fetchall()
    db.close()
    assert all(error.startswith("Parked: ") == (attempts == 0) for _, attempts, error in found)
    return [(data, attempts) for data, attempts, _ in found]


@pytest.mark.usefixtures("no_standby")
@pytest.mark.parametrize(("policy", "workers"), [("park", None), ("park", 1), ("continue", None)])
async def test_no_record_overtakes_a_dead_letter_of_its_key(
    policy: Any, workers: Any, tmp_path: Path, handler: str
) -> None:
    stream = FakeStream(1)
    settings = quick(tmp_path / "out", handler, attempts=2, on_key_failure=policy, workers=workers)
    stream.put(b"bad", "a")

    def seen() -> list[str]:
        return (tmp_path / "seen.txt").read_text().split()

    daemon = FakeMLD(stream, "", habits=Habits(max_records=2), supervised=True, backoff_seconds=0.02)
    async with asyncio.TaskGroup() as group, asyncio.timeout(800):
        async with serving(settings) as first:
            daemon.address = await first.listening()
            playing = group.create_task(daemon.run())
            await until(lambda: first.status().dead_letters == 1)
            stream.put(b"a2", "a")
            stream.put(b"b1", "b")
            await until(lambda: "b1" in seen())
            # The same server, another connection: what is stored is known again.
            daemon.kill()
            stream.put(b"a3", "a")
            stream.put(b"b2", "b")
            await until(lambda: "b2" in seen())
        async with serving(settings) as second:
            daemon.address = await second.listening()
            stream.put(b"a4", "a")
            stream.put(b"b3", "b")
            stream.end()
            await playing
            await second.finished()
    if policy == "park":
        assert letters(settings) == [(b"bad", 1), (b"a2", 0), (b"a3", 0), (b"a4", 0)]
        assert [text for text in seen() if text[0] == "a"] == []
    else:
        assert letters(settings) == [(b"bad", 1)]
        assert {"a2", "a3", "a4"} < set(seen())
    assert {"b1", "b2", "b3"} < set(seen())


async def test_no_record_overtakes_a_dead_letter_that_its_key_has_in_a_parent_shard(
    tmp_path: Path, handler: str
) -> None:
    stream = FakeStream(1)
    settings = quick(tmp_path / "out", handler, attempts=1, on_key_failure="park")
    stream.put(b"bad", "a")
    async with asyncio.timeout(800), serving(settings, stream=stream) as server, asyncio.TaskGroup() as group:
        daemon = FakeMLD(stream, await server.listening())
        playing = group.create_task(daemon.run())
        await until(lambda: server.status().dead_letters == 1)
        stream.split(stream.open_shards[0])
        stream.put(b"a2", "a")
        stream.put(b"b1", "b")
        stream.end()
        await playing
        await server.finished()
    assert letters(settings) == [(b"bad", 1), (b"a2", 0)]
    assert (tmp_path / "seen.txt").read_text().split() == ["bad", "b1"]
