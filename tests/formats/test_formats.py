"""What a released version has left behind goes on under this one; what a newer one has left is refused in a sentence.

``<format>.tar.gz`` holds the output folder of a server that was stopped in the midst of a stream: windows published and
open, positions, dead letters; and ``<format>.table.json`` what a ledger in DynamoDB holds. The ledger's format is that of its
segments too, which nothing else names. When it rises, the next ones are made by
``PYTHONPATH=tests:. python3 -m formats.test_formats FOLDER``, in an empty folder.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import sqlite3
import sys
import tarfile
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from support.serving import quick, serving, until
from support.store import SqliteStore

from mldserver import cli
from mldserver.base.clock import SystemClock
from mldserver.config.settings import Settings
from mldserver.errors import EXIT_OPERATOR, LedgerVersionError
from mldserver.ledger.contract import (
    CodeVersion,
    Flush,
    FunctionLife,
    PositionUpdate,
    StateFile,
    StoreState,
    StoreUpdate,
    Wanted,
)
from mldserver.ledger.dynamodb import DynamoLedger
from mldserver.ledger.format import FORMAT
from mldserver.output.layout import LEDGER, OWNER, SEGMENTS
from mldserver.records import Sequence
from mldserver.stores import KeyRange, StoreClaim
from mldserver.testing import FakeMLD, FakeStream
from tests.ledger.dynamodb_fake import FakeDynamo, flush, start
from tests.ledger.samples import letter

HERE = Path(__file__).parent
KEPT, TABLES = (
    sorted(HERE.glob(pattern), key=lambda path: int(path.name.partition(".")[0]))
    for pattern in ("*.tar.gz", "*.table.json")
)
HANDLER = '''
"""A row for each record, which is counted by its key; some are poison."""
from mldserver import tumbling

schema = "id BIGINT NOT NULL, at TIMESTAMP"
windows = tumbling("10 seconds", on="at")


def process_record(record, ctx):
    event = record.json()
    if event["id"] % 10 == 3:
        raise ValueError("poison")
    ctx.state["n"] = ctx.state.get("n", 0) + 1
    return event["id"], event["at"]
'''
LIFE = FunctionLife(
    Wanted.PAUSED, CodeVersion("1", "one.zip", 5), CodeVersion("2", "two.zip", 6), other_is_previous=True
)
"""What is wanted in a table of format 8; older ones say nothing."""
BEFORE, RECORDS = 40, 60
"""Records that came before the server was stopped, and all."""


def stream_of(records: int) -> FakeStream:
    """Return the stream as far as it has come, which is always the same."""
    stream = FakeStream(2, seed=1, start_ms=1_800_000_000_000)
    for number in range(records):
        event = {"id": number, "at": f"2027-01-15T08:00:{number:02d}Z"}
        stream.put(json.dumps(event).encode(), f"key-{number}")
    return stream


def settings_of(out: Path) -> Settings:
    """Return settings in which no host's name and no path comes into what is kept."""
    return replace(quick(out, "story", attempts=1), server_id="server-1")


async def write(out: Path) -> None:
    """Leave an output folder as a server leaves it that is stopped in the midst of a stream."""
    stream = stream_of(BEFORE)
    async with serving(settings_of(out), stream=stream) as server:
        daemon = FakeMLD(stream, await server.listening())
        async with asyncio.TaskGroup() as group:
            playing = group.create_task(daemon.run())
            await until(lambda: len(list(out.glob("window=*"))) == 3 and not server.status().buffered_bytes)
            playing.cancel()


async def write_table() -> dict[str, Any]:
    """Return the items of a ledger in DynamoDB: two flushes with segments and a letter each, and two with keyed state."""
    dynamo = FakeDynamo()
    ledger = await start(ledger_in(dynamo), "a")
    for number in (1, 2):
        await ledger.register(flush("a", number, letters=(letter(number),)))
    for shard, parents, key_range in (("p", (), KeyRange(0, 99)), ("c", ("p",), KeyRange(0, 9))):
        opened = await ledger.open_shard(shard, parents, store=StoreClaim(key_range))
        serial = (await ledger.peek()).stores[shard].serial
        await ledger.register(
            Flush(
                (PositionUpdate(shard, opened.epoch, None, None, None),),
                stores=(StoreUpdate(shard, serial, (shard,)),),
                state_file=StateFile(f"state {shard}", {shard: (key_range,)}, 1, 9),
            )
        )
    assert await ledger.change_life(FunctionLife(), LIFE)
    await ledger.leave()
    await ledger.close()
    return dynamo.items


def ledger_in(dynamo: FakeDynamo) -> DynamoLedger:
    return DynamoLedger("table", pipeline="p", server_id="server-1", clock=SystemClock(), session=dynamo)


def table_of(kept: Path) -> FakeDynamo:
    """Return a table with the items that were kept."""
    dynamo = FakeDynamo()
    dynamo.items = json.loads(kept.read_text("ascii"), object_hook=_bytes)
    return dynamo


def _bytes(value: dict[str, Any]) -> Any:
    return {"B": base64.b64decode(value["B"])} if value.keys() == {"B"} else value


def ids(out: Path) -> Counter[int]:
    files = [str(path) for path in out.glob("window=*/*.parquet")]
    return Counter(ds.dataset(files, format="parquet").to_table(columns=["id"])["id"].to_pylist())


def keys_with_state(out: Path) -> set[bytes]:
    """Return the keys in the state files that a store needs, each of which was counted once."""
    store = SqliteStore(out / LEDGER, pipeline="story", server_id="tool")
    files = [out / path for path, file in store.peek().state_files.items() if file.needed]
    store.close()
    rows = [row for file in files for row in pq.read_table(file).to_pylist()]
    assert all(msgspec.msgpack.decode(row["value"]) == {"n": 1} for row in rows)
    return {row["key"] for row in rows}


def segments(out: Path) -> list[Path]:
    return sorted((out / SEGMENTS).rglob("*.parquet"))


@pytest.fixture
def out(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What was kept of a version; by default that of this format."""
    with tarfile.open(getattr(request, "param", KEPT[-1])) as kept:
        kept.extractall(tmp_path, filter="data")
    (tmp_path / "story.py").write_text(HANDLER)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "out"


def test_what_this_version_leaves_is_kept_for_those_to_come() -> None:
    kept = (KEPT[-1].name, TABLES[-1].name)
    assert kept == (f"{FORMAT}.tar.gz", f"{FORMAT}.table.json"), (
        "the format has risen: see the head of this file"
    )


@pytest.mark.parametrize("out", KEPT, indirect=True, ids=lambda path: path.name)
async def test_what_a_version_has_left_goes_on_as_if_nothing_had_been(out: Path) -> None:
    assert len(set(ids(out))) == 27, "three windows were published"
    # Format 6 had no keyed state.
    first = 0 if keys_with_state(out) else BEFORE
    stream = stream_of(RECORDS)
    async with serving(settings_of(out), stream=stream) as server, asyncio.timeout(800):
        daemon = FakeMLD(stream, await server.listening())
        stream.end()
        await daemon.run()
        await server.finished()
        assert daemon.violations == []
    assert ids(out) == Counter(number for number in range(RECORDS) if number % 10 != 3)
    store = SqliteStore(out / LEDGER, pipeline="story", server_id="tool")
    store.peek()
    letters = [each.letter for each in store.letters(limit=RECORDS)]
    store.close()
    assert sorted(json.loads(letter.data)["id"] for letter in letters) == list(range(3, RECORDS, 10))
    assert keys_with_state(out) == {
        b"key-%d" % number for number in range(first, RECORDS) if number % 10 != 3
    }


async def test_segments_have_the_columns_of_those_that_were_kept(out: Path, tmp_path: Path) -> None:
    """Or the format must rise: a segment has no number of its own."""
    await write(tmp_path / "now")
    kept, now = (pq.read_schema(segments(folder)[0]) for folder in (out, tmp_path / "now"))
    assert now.equals(kept)


@pytest.mark.parametrize("kept", TABLES, ids=lambda path: path.name)
async def test_what_a_version_has_left_in_a_table_goes_on(kept: Path) -> None:
    dynamo = table_of(kept)
    ledger = ledger_in(dynamo)
    state = await ledger.open()
    assert state.shards["a"].position == Sequence(2)
    assert [len(window.segments) for window in state.windows.values()] == [2]
    assert [each.letter for each in await ledger.letters(limit=10)] == [letter(1), letter(2)]
    if state.stores:
        assert state.stores == {
            "p": StoreState("p", 1, 0, 99, closed=True),
            "c": StoreState("c", 3, 0, 9),
        }
        needed = {path: dict(file.needed) for path, file in state.state_files.items()}
        assert needed == {
            "state p": {"p": (KeyRange(10, 99),), "c": (KeyRange(0, 9),)},
            "state c": {"c": (KeyRange(0, 9),)},
        }
    assert state.life == (LIFE if kept.name >= "8" else FunctionLife())
    assert (await ledger.register(flush("a", 3))).registered, "and it goes on"
    assert (await ledger.peek()).life == state.life
    assert (await ledger.open_shard("b", store=StoreClaim(None))).store == "b", "also with keyed state"
    assert dynamo.items["p"]["meta"]["format"] == {"N": str(FORMAT)}, "which an older version refuses"
    await ledger.close()


async def test_a_table_of_a_newer_version_is_refused_in_a_sentence() -> None:
    dynamo = table_of(TABLES[-1])
    for item in dynamo.items["p"].values():
        if "format" in item:
            item["format"] = {"N": str(FORMAT + 1)}
    with pytest.raises(LedgerVersionError, match=f"has format {FORMAT + 1}; this program knows {FORMAT}"):
        await ledger_in(dynamo).open()


def newer_ledger(out: Path) -> str:
    with closing(sqlite3.connect(out / LEDGER)) as ledger, ledger:
        ledger.execute("UPDATE meta SET format = format + 1")
    return f"The ledger has format {FORMAT + 1}; this program knows format {FORMAT}."


def newer_folder(out: Path) -> str:
    owner = json.loads((out / OWNER).read_bytes())
    (out / OWNER).write_text(json.dumps(owner | {"format": owner["format"] + 1}))
    return "out has format 3; this program knows format 2."


@pytest.mark.parametrize("age", [newer_ledger, newer_folder])
def test_what_a_newer_version_has_left_is_refused_in_a_sentence(
    age: object, out: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert callable(age)
    sentence = age(out)
    # A handler with state needs a stream in AWS.
    without = HANDLER.replace(", ctx", "").replace('    ctx.state["n"] = ctx.state.get("n", 0) + 1\n', "")
    (out.parent / "story.py").write_text(without)
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*.parquet")}
    options = ["--out", str(out), "--listen", "127.0.0.1:0", "--workers", "inline"]
    assert cli.run(["serve", "story", *options]) == EXIT_OPERATOR
    assert sentence in capfd.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*.parquet")} == before


if __name__ == "__main__":
    os.chdir(sys.argv[1])
    Path("story.py").write_text(HANDLER)
    sys.path.insert(0, "")
    asyncio.run(write(Path("out").absolute()))
    with tarfile.open(HERE / f"{FORMAT}.tar.gz", "w:gz") as new:
        new.add("out")
    table = json.dumps(
        asyncio.run(write_table()), default=lambda data: base64.b64encode(data).decode(), indent=1
    )
    (HERE / f"{FORMAT}.table.json").write_text(f"{table}\n")
