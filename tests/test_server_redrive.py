"""A whole server, dead letters, and a handler that was mended: redriven records come out once, as if nothing had been."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest
from support.serving import quick, serving, until
from support.store import SqliteStore

from mldserver import cli
from mldserver.config.kinds import OnKeyFailure
from mldserver.config.locations import LetterPlace
from mldserver.output.layout import DEAD_LETTERS, LEDGER
from mldserver.testing import FakeMLD, FakeStream

HANDLER = '''
"""A row for each record, unless it is poisoned and the antidote is not there."""
from pathlib import Path
from mldserver import tumbling

schema = "id BIGINT NOT NULL, at TIMESTAMP"
windows = tumbling("10 seconds", on="at")
version = "{version}"


def process_record(record):
    event = record.json()
    if event["id"] % 10 == 3 and not Path(__file__).with_name("antidote").exists():
        raise ValueError("poison")
    return event["id"], event["at"]
'''
RECORDS = 100
BAD = list(range(3, RECORDS, 10))


def fill(stream: FakeStream, first: int, last: int) -> None:
    for number in range(first, last):
        event = {"id": number, "at": f"2027-01-15T08:00:{number // 10:02d}Z"}
        stream.put(json.dumps(event).encode(), f"key-{number}")


def ids(folder: Path) -> Counter[int]:
    while True:
        if not (files := [str(path) for path in folder.glob("window=*/*.parquet")]):
            return Counter()
        try:
            return Counter(ds.dataset(files, format="parquet").to_table(columns=["id"])["id"].to_pylist())
        except FileNotFoundError:  # a revision took a file's place: a reader lists again
            continue


def stored(out: Path, *, attempts: int = 1) -> list[int]:
    """The ids of the records in the letters that the ledger holds, after so many attempts."""
    store = SqliteStore(out / LEDGER, pipeline="poisonous", server_id="tool")
    store.peek()
    found = [each.letter for each in store.letters(limit=1000) if each.letter.attempts == attempts]
    store.close()
    return [json.loads(letter.data)["id"] for letter in found]


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    (tmp_path / "poisonous.py").write_text(HANDLER.format(version="1"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return quick(tmp_path / "out", "poisonous", attempts=1)


def command(*arguments: str) -> None:
    assert cli.run(["dead-letters", *arguments, "--out", "out"]) == 0


async def test_letters_of_a_shard_that_is_read_run_between_its_batches(settings: Any, tmp_path: Path) -> None:
    stream = FakeStream(2, seed=1, start_ms=1_800_000_000_000)
    fill(stream, 0, RECORDS)
    async with serving(settings, stream=stream) as server:
        daemon = FakeMLD(stream, await server.listening())
        async with asyncio.TaskGroup() as group, asyncio.timeout(800):
            playing = group.create_task(daemon.run())
            await until(lambda: server.status().dead_letters == len(BAD))
            await asyncio.to_thread(command, "redrive", "--all")
            await until(lambda: len(stored(tmp_path / "out", attempts=2)) == len(BAD))
            assert sorted(stored(tmp_path / "out", attempts=2)) == BAD, "they have failed again"
            assert stored(tmp_path / "out") == []
            (tmp_path / "antidote").touch()
            await asyncio.to_thread(command, "redrive", "--all")
            await until(lambda: not stored(tmp_path / "out", attempts=2))
            stream.end()
            await playing
            await server.finished()
        assert daemon.violations == []
    out = tmp_path / "out"
    assert ids(out) + ids(out / "_late") == Counter(range(RECORDS))


async def test_letters_of_shards_that_have_ended_are_taken_by_the_next_server(
    settings: Any, tmp_path: Path
) -> None:
    stream = FakeStream(2, seed=2, start_ms=1_800_000_000_000)
    fill(stream, 0, RECORDS)
    stream.end()
    async with serving(settings, stream=stream) as server, asyncio.timeout(800):
        await FakeMLD(stream, await server.listening()).run()
        await server.finished()
    out = tmp_path / "out"
    assert ids(out) == Counter(set(range(RECORDS)) - set(BAD))
    await asyncio.to_thread(command, "redrive", "--all")
    (tmp_path / "antidote").touch()
    async with serving(settings, stream=stream), asyncio.timeout(800):
        await until(lambda: not stored(out))
        await until(lambda: ids(out).total() == RECORDS)
    assert ids(out) == Counter(range(RECORDS))


async def test_letters_of_a_file_that_is_named_again_count_again(settings: Any, tmp_path: Path) -> None:
    settings = replace(settings, dead_letters=LetterPlace("jsonl"))
    stream = FakeStream(2, seed=4, start_ms=1_800_000_000_000)
    fill(stream, 0, RECORDS)
    stream.end()
    async with serving(settings, stream=stream) as server, asyncio.timeout(800):
        await FakeMLD(stream, await server.listening()).run()
        await server.finished()
    out = tmp_path / "out"
    assert stored(out) == []
    (tmp_path / "antidote").touch()

    async def redriven() -> Counter[int]:
        due = ids(out).total() + len(BAD)
        await asyncio.to_thread(command, "redrive", "--from", str(out / DEAD_LETTERS / "*"))
        assert sorted(stored(out)) == BAD
        async with serving(settings, stream=stream), asyncio.timeout(800):
            await until(lambda: not stored(out))
            await until(lambda: ids(out).total() == due)
        return ids(out)

    assert await redriven() == Counter(range(RECORDS))
    assert await redriven() == Counter(range(RECORDS)) + Counter(BAD)


@pytest.mark.usefixtures("no_standby")
@pytest.mark.parametrize("workers", [None, 1], ids=["inline", "in a worker"])
async def test_parked_records_run_in_order_once_their_letters_are_redriven(
    settings: Any, tmp_path: Path, workers: int | None
) -> None:
    stream = FakeStream(1, seed=3, start_ms=1_800_000_000_000)
    parked = replace(settings, on_key_failure=OnKeyFailure.PARK, workers=workers)
    out = tmp_path / "out"

    def put(first: int, last: int) -> None:
        for number in range(first, last):
            event = {"id": number, "at": "2027-01-15T08:00:00Z"}
            stream.put(json.dumps(event).encode(), f"key-{number % 2}")

    put(0, 10)
    async with serving(parked, stream=stream) as server:
        daemon = FakeMLD(stream, await server.listening())
        async with asyncio.TaskGroup() as group, asyncio.timeout(800):
            playing = group.create_task(daemon.run())
            # 3 is poisoned; 5, 7 and 9 have its key.
            await until(lambda: server.status().dead_letters == 4)
            put(10, 12)
            await until(lambda: server.status().dead_letters == 5)
            await asyncio.to_thread((tmp_path / "antidote").touch)
            await asyncio.to_thread(command, "redrive", "--all")
            await until(lambda: not stored(out) and not stored(out, attempts=0))
            put(12, 16)
            stream.end()
            await playing
            await server.finished()
        assert server.status().dead_letters == 5, "the key goes on"
        assert daemon.violations == []
    assert ids(out) + ids(out / "_late") == Counter(range(16))


async def test_a_stop_does_not_wait_for_letters_which_are_taken_again_after_the_next_start(
    settings: Any, tmp_path: Path
) -> None:
    poisonous = (tmp_path / "poisonous.py").read_text()
    asks_again = """
        if Path(__file__).with_name("busy").exists():
            Path(__file__).with_name("asked").touch()
            raise Retry("it is busy", after=3600)
        raise ValueError"""
    mended = poisonous.replace("import tumbling", "import Retry, tumbling")
    (tmp_path / "poisonous.py").write_text(mended.replace("\n        raise ValueError", asks_again))
    settings = replace(settings, attempts=2)
    out = tmp_path / "out"
    stream = FakeStream(1, seed=5, start_ms=1_800_000_000_000)
    fill(stream, 0, 10)
    async with serving(settings, stream=stream) as server, asyncio.timeout(800):
        daemon = FakeMLD(stream, await server.listening())
        playing = asyncio.create_task(daemon.run())
        await until(lambda: server.status().dead_letters == 1)
        (tmp_path / "busy").touch()
        await asyncio.to_thread(command, "redrive", "--all")
        await until((tmp_path / "asked").exists)
        # A stop that waited for it would be forced at the end of its grace.
    playing.cancel()
    assert stored(out) == [3]
    (tmp_path / "antidote").touch()
    async with serving(settings, stream=stream), asyncio.timeout(800):
        await until(lambda: not stored(out))
