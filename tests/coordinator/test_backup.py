"""``mldserver ledger backup`` and ``restore``, with whole servers before, beside and after them."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import sqlite3
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from coordinator.pipeline import Crash, Faults, Pipeline, named
from support.store import SqliteStore

from mldserver import cli
from mldserver.cli.ledger import _files_named
from mldserver.coordinator.core.state_files import COLUMNS
from mldserver.ledger.contract import Flush, PositionUpdate, StateFile, StoreUpdate, WindowState
from mldserver.ledger.format import FORMAT
from mldserver.ledger.sqlite_file import copy_whole
from mldserver.output.layout import LEDGER, QUARANTINE
from mldserver.output.store import OutputStore
from mldserver.records import Sequence
from mldserver.stores import ALL_KEYS, StoreClaim
from mldserver.windows import time_window_id

pytestmark = pytest.mark.quick

FIRST, SECOND, THIRD = (time_window_id(start) for start in (0, 10_000, 20_000))


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("MLDSERVER_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def ledger(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run ``mldserver ledger``; return what it said."""

    def run(*arguments: str, out: str = "out", code: int = 0) -> str:
        assert cli.run(["ledger", *arguments, "--out", out]) == code
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        assert "Errno" not in captured.err
        return captured.err if code else captured.out

    return run


def pipeline_at(tmp_path: Path, **changes: Any) -> Pipeline:
    return Pipeline(tmp_path / "out", **changes)


async def give(pipeline: Pipeline, session: Any, *records: tuple[int, int]) -> None:
    await pipeline.give(session, list(records))
    for _ in range(3):
        await pipeline.cycle()


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*.parquet"))


async def test_a_backup_of_a_running_server_brings_everything_back_that_it_held(
    tmp_path: Path, ledger: Any
) -> None:
    """The disk is lost. What was published since is read again; no row is lost, and none is there twice."""
    pipeline = pipeline_at(tmp_path)
    async with pipeline.life():
        session = await pipeline.open("a")
        await give(pipeline, session, (1, 1000), (2, 12_000))
        told = json.loads(ledger("backup", "monday", "--json"))
        assert told == {"backup": "monday", "pipeline": "test", "files": 1}
        await give(pipeline, session, (3, 13_000), (4, 31_000))
        assert pipeline.published()[SECOND] == [2, 3]
    assert files(tmp_path / "monday") != []
    shutil.copytree(tmp_path / "out" / f"window={FIRST}", tmp_path / "kept")
    shutil.rmtree(tmp_path / "out")
    assert "restored" in ledger("restore", "monday")
    shutil.copytree(tmp_path / "kept", tmp_path / "out" / f"window={FIRST}")
    async with pipeline.life():
        session = await pipeline.open("a")
        assert session.after == Sequence(2)
        await give(pipeline, session, (3, 13_000), (4, 31_000))
        assert pipeline.published() == {FIRST: [1], SECOND: [2, 3]}


async def test_a_daemon_that_is_ahead_of_a_restored_ledger_is_told(tmp_path: Path, ledger: Any) -> None:
    pipeline = pipeline_at(tmp_path)
    async with pipeline.life():
        session = await pipeline.open("a")
        await give(pipeline, session, (1, 1000))
        ledger("backup", "monday")
        await give(pipeline, session, (2, 2000))
    ledger("restore", "monday")
    async with pipeline.life():
        with pytest.raises(Exception, match="beyond the ledger's position"):
            await pipeline.open("a", Sequence(2))


async def test_what_was_written_since_a_backup_is_set_apart_and_the_ledger_before_is_kept(
    tmp_path: Path, ledger: Any, logged: list[dict[str, Any]]
) -> None:
    pipeline = pipeline_at(tmp_path)
    async with pipeline.life():
        session = await pipeline.open("a")
        await give(pipeline, session, (1, 1000))
        ledger("backup", "monday")
        await give(pipeline, session, (2, 2000))
    before, after = files(tmp_path / "monday"), files(tmp_path / "out" / "_mldserver" / "segments")
    for number in range(2):
        told = json.loads(ledger("restore", "monday", "--json"))
        assert told["replaced"].endswith(f"ledger.sqlite.replaced{number or ''}")
        assert (tmp_path / told["replaced"]).exists()
    async with pipeline.life():
        assert pipeline.state().windows[FIRST].rows_in == 1
    assert files(tmp_path / "out" / QUARANTINE) == sorted(set(after) - set(before))
    assert files(tmp_path / "out" / "_mldserver" / "segments") == before
    assert len(named(logged, "recovery.quarantined")) == 1
    async with pipeline.life():
        pass


async def test_a_restored_ledger_has_no_servers_and_nobody_holds_its_shards(
    tmp_path: Path, ledger: Any
) -> None:
    pipeline = pipeline_at(tmp_path)
    async with pipeline.life():
        await give(pipeline, await pipeline.open("a"), (1, 1000))
        ledger("backup", "monday")
    ledger("restore", "monday")
    state = pipeline.state()
    assert (state.servers, state.shards["a"].owner) == ({}, None)


async def test_an_output_that_counts_and_is_not_visible_is_in_the_backup(tmp_path: Path, ledger: Any) -> None:
    def die(name: str, after: bool) -> None:
        if name == "rename":
            pipeline.faults.dead = True
            raise Crash(name)

    pipeline = pipeline_at(tmp_path)
    pipeline.faults = Faults(hook=die)
    try:
        async with pipeline.life():
            await give(pipeline, await pipeline.open("a"), (1, 1000), (2, 12_000))
    except* Crash:
        pass
    assert pipeline.state().windows[FIRST].state is WindowState.COMMITTED
    ledger("backup", "monday")
    shutil.rmtree(tmp_path / "out")
    ledger("restore", "monday")
    pipeline.faults = Faults()
    async with pipeline.life():
        await pipeline.cycle()
        assert pipeline.published() == {FIRST: [1]}
        assert pipeline.engine.jobs == []


async def test_files_that_go_while_they_are_copied_make_the_backup_a_later_one(
    tmp_path: Path, ledger: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = pipeline_at(tmp_path)
    async with pipeline.life():
        session = await pipeline.open("a")
        await give(pipeline, session, (1, 1000))
        stale = tmp_path / "stale.sqlite"
        copy_whole(tmp_path / "out" / LEDGER, stale)
        await give(pipeline, session, (2, 12_000))
        assert pipeline.published() == {FIRST: [1]}, "and its segment is gone"
        sources = [stale]
        monkeypatch.setattr(
            "mldserver.cli.ledger.copy_whole",
            lambda path, target: copy_whole(sources.pop() if sources else path, target),
        )
        ledger("backup", "monday")
    assert sources == []
    named_files = {Path(path).name for path in _files_named(pipeline.state())}
    assert set(files(tmp_path / "monday")) == named_files
    assert len(named_files) == 1


async def test_a_server_that_deletes_faster_than_can_be_copied_is_told(
    tmp_path: Path, ledger: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(store: OutputStore, path: str, target: Path) -> None:
        raise FileNotFoundError(errno.ENOENT, "gone", path)

    pipeline = pipeline_at(tmp_path)
    async with pipeline.life():
        await give(pipeline, await pipeline.open("a"), (1, 1000))
        monkeypatch.setattr(OutputStore, "save", gone)
        assert "faster than they can be copied" in ledger("backup", "monday", code=2)
    assert not (tmp_path / "monday" / "ledger.sqlite").exists()


async def test_a_backup_on_another_disk_is_a_copy(
    tmp_path: Path, ledger: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, target: Path) -> None:
        if not target.exists():
            raise FileNotFoundError(target)
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    pipeline = pipeline_at(tmp_path)
    async with pipeline.life():
        await give(pipeline, await pipeline.open("a"), (1, 1000))
        monkeypatch.setattr(Path, "hardlink_to", refuse)
        ledger("backup", "monday")
    (copy,) = (tmp_path / "monday").rglob("*.parquet")
    assert copy.stat().st_nlink == 1
    shutil.rmtree(tmp_path / "out")
    ledger("restore", "monday")
    assert files(tmp_path / "out") == [copy.name]


async def test_nothing_is_restored_under_a_server_that_lives(tmp_path: Path, ledger: Any) -> None:
    pipeline = pipeline_at(tmp_path, locks=True)
    async with pipeline.life():
        await give(pipeline, await pipeline.open("a"), (1, 1000))
        ledger("backup", "monday")
        assert "1 servers run on this ledger. Nothing was touched." in ledger("restore", "monday", code=2)
    ledger("restore", "monday")


def test_a_ledger_in_a_table_is_awss_to_back_up(ledger: Any) -> None:
    where = ["--ledger", "dynamodb://table?region=x", "--pipeline", "p"]
    for command in ("backup", "restore"):
        (Path("some")).mkdir(exist_ok=True)
        (Path("some") / "ledger.sqlite").touch()
        told = ledger(command, "other" if command == "backup" else "some", *where, code=2)
        assert "backed up by AWS" in told
        assert "point-in-time recovery" in told
        assert "--new-ledger" in told


def test_what_cannot_be_backed_up_or_restored_is_told_in_a_sentence(tmp_path: Path, ledger: Any) -> None:
    assert "There is no ledger" in ledger("backup", "monday", code=2)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert "full is not empty" in ledger("backup", "full", code=2)
    assert "full is not a backup of a ledger" in ledger("restore", "full", code=2)
    (tmp_path / "full" / "ledger.sqlite").write_bytes(b"no database at all, whatever its name may say of it")
    assert "damaged" in ledger("restore", "full", code=2)
    (tmp_path / "full" / "ledger.sqlite").write_bytes(b"")
    assert "There is no ledger" in ledger("restore", "full", code=2)
    assert "file/below" in ledger("backup", "full/file/below", code=2)


async def test_segments_on_an_object_store_are_copied_too(
    tmp_path: Path, ledger: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of the file system that pyarrow has in memory, and back into it."""
    remote = OutputStore("mock://bucket/out")
    remote.put("_mldserver/segments/w/1.parquet", b"rows")
    remote.save("_mldserver/segments/w/1.parquet", tmp_path / "copy" / "1.parquet")
    assert (tmp_path / "copy" / "1.parquet").read_bytes() == b"rows"
    remote.delete("_mldserver/segments/w/1.parquet")
    remote.bring_back(tmp_path / "copy" / "1.parquet", "_mldserver/segments/w/1.parquet")
    assert remote.get("_mldserver/segments/w/1.parquet") == b"rows"
    with pytest.raises(FileNotFoundError):
        remote.save("nothing", tmp_path / "copy" / "nothing")


@pytest.fixture
async def monday(tmp_path: Path, ledger: Any) -> Path:
    """A backup of an open window; the output folder is lost."""
    pipeline = pipeline_at(tmp_path)
    async with pipeline.life():
        session = await pipeline.open("a")
        await give(pipeline, session, (1, 1000), (2, 2000))
        ledger("backup", "monday")
    shutil.rmtree(tmp_path / "out")
    return tmp_path / "monday"


def changed(backup: Path, sql: str) -> None:
    with contextlib.closing(sqlite3.connect(backup / "ledger.sqlite", isolation_level=None)) as db:
        db.executescript(sql)


def only_segment(backup: Path) -> Path:
    (file,) = backup.rglob("*.parquet")
    return file


@pytest.mark.parametrize(
    ("sql", "told"),
    [
        ("UPDATE segments SET path = '../../evil.parquet'", "names '../../evil.parquet'"),
        ("UPDATE segments SET path = '/tmp/evil.parquet'", "names '/tmp/evil.parquet'"),
        ("UPDATE segments SET path = '_mldserver/../evil.parquet'", "names '_mldserver/../evil.parquet'"),
        ("UPDATE segments SET path = 'window=x/evil.parquet'", "names 'window=x/evil.parquet'"),
        (
            "UPDATE windows SET window_id = '../../evil'; UPDATE segments SET window_id = '../../evil'",
            "names '../../evil'",
        ),
        (
            """
            UPDATE windows SET state = 'committed', attempt = 1, staging = '_mldserver/staging/x/1',
                files = '["../../../../evil.parquet"]'
            """,
            "names '_mldserver/staging/x/1/../../../../evil.parquet'",
        ),
        ("UPDATE segments SET path = '_mldserver/owner.json'", "names '_mldserver/owner.json'"),
        (
            "UPDATE windows SET state = 'committed', attempt = 1, revision = 2, staging = '../../evil', files = '[]'",
            "names '../../evil'",
        ),
        ("UPDATE segments SET bytes = bytes + 1", "and the ledger expects 2 and"),
        ("UPDATE segments SET rows = 3", "has 2 rows and"),
        (
            "CREATE TRIGGER t AFTER UPDATE ON totals BEGIN DELETE FROM windows; END",
            "other tables, triggers or views",
        ),
        ("ALTER TABLE late_segments ADD x; CREATE VIEW v AS SELECT 1", "other tables, triggers or views"),
    ],
)
def test_a_backup_that_was_changed_is_refused_before_anything_is_written(
    tmp_path: Path, monday: Path, ledger: Any, sql: str, told: str
) -> None:
    changed(monday, sql)
    before = sorted(path for path in tmp_path.rglob("*") if "monday" not in path.parts)
    said = ledger("restore", "monday", code=2)
    assert told in said
    assert "Nothing was restored" in said
    assert sorted(path for path in tmp_path.rglob("*") if "monday" not in path.parts) == before


@pytest.mark.parametrize("what", ["file", "folder", "ledger", "gone", "damaged"])
def test_a_backup_with_links_or_damaged_files_is_refused(
    tmp_path: Path, monday: Path, ledger: Any, what: str
) -> None:
    segment = only_segment(monday)
    target = {"file": segment, "folder": segment.parent, "ledger": monday / "ledger.sqlite"}.get(what)
    if target is not None:
        moved = target.rename(tmp_path / "elsewhere")
        target.symlink_to(moved)
    elif what == "gone":
        segment.unlink()
    else:
        segment.write_bytes(segment.read_bytes()[:-1])
    said = ledger("restore", "monday", code=2)
    told = {"ledger": "is not a backup of a ledger", "damaged": "is no Parquet file"}
    assert told.get(what, "is missing, or a link leads there") in said
    assert not (tmp_path / "out").exists()


def test_a_backup_that_is_whole_is_restored(tmp_path: Path, monday: Path, ledger: Any) -> None:
    assert {path.stat().st_mode & 0o077 for path in (monday, monday / "files", monday / "ledger.sqlite")} == {
        0
    }
    ledger("restore", "monday")
    assert files(tmp_path / "out") == files(monday)


async def test_an_output_that_is_not_what_the_ledger_tells_of_is_refused(tmp_path: Path, ledger: Any) -> None:
    pipeline = pipeline_at(tmp_path)
    async with pipeline.life():
        session = await pipeline.open("a")
        await give(pipeline, session, (1, 1000))
        ledger("backup", "monday")
    segment, staging = only_segment(tmp_path / "monday"), "_mldserver/staging/x/0001"
    output = tmp_path / "monday" / "files" / staging / "part-0.parquet"
    output.parent.mkdir(parents=True)
    shutil.copy(segment, output)
    state = f"state = 'committed', attempt = 1, staging = '{staging}', files = '[\"part-0.parquet\"]'"
    shutil.rmtree(tmp_path / "out")
    changed(tmp_path / "monday", f"UPDATE windows SET {state}, rows_out = 2")
    assert "has 1 rows, and the ledger expects 2" in ledger("restore", "monday", code=2)
    changed(tmp_path / "monday", "UPDATE windows SET rows_out = 1")
    ledger("restore", "monday")


# Keyed state.


def state_file(out: OutputStore, number: int, *, columns: pa.Schema = COLUMNS) -> StateFile:
    """Write a file with one key's state."""
    rows = [{"store": "a", "key": b"k", "expires_ms": None, "value": b"\x80", "serial": number}]
    path = f"_mldserver/state/{number}.parquet"
    size = out.write(path, pa.Table.from_pylist(rows, columns))
    return StateFile(path, {"a": (ALL_KEYS,)}, 1, size)


@pytest.fixture
def keyed(tmp_path: Path) -> Path:
    """An output folder with a shard's state in two files, and a third that no store needs any more."""
    out = OutputStore(str(tmp_path / "out"))
    store = SqliteStore(tmp_path / "out" / LEDGER, pipeline="test", server_id="one")
    store.open(now_ms=1)
    store.open_shard("a", store=StoreClaim(None))
    for number in (1, 2):
        fence, update = PositionUpdate("a", 1, None, None, None), StoreUpdate("a", number - 1, ("a",))
        flush = Flush((fence,), stores=(update,), state_file=state_file(out, number))
        assert store.register(flush, now_ms=1).registered
    replaced = store.peek().state_files["_mldserver/state/1.parquet"]
    assert store.compact_state(state_file(out, 3), {replaced.path: replaced.needed}, now_ms=1)
    store.leave()
    store.close()
    return tmp_path


def test_a_backup_brings_keyed_state_back_except_files_that_no_store_needs(keyed: Path, ledger: Any) -> None:
    ledger("backup", "monday")
    assert files(keyed / "monday") == ["2.parquet", "3.parquet"]
    shutil.rmtree(keyed / "out")
    ledger("restore", "monday")
    assert files(keyed / "out") == ["2.parquet", "3.parquet"]
    store = SqliteStore(keyed / "out" / LEDGER, pipeline="test", server_id="two")
    state = store.open(now_ms=1)
    store.close()
    assert state.stores["a"].serial == 2
    needed = {path[-9:]: bool(file.needed) for path, file in state.state_files.items()}
    assert needed == {"1.parquet": False, "2.parquet": True, "3.parquet": True}


@pytest.mark.parametrize(
    ("sql", "told"),
    [
        ("UPDATE state_files SET path = '../../evil.parquet' WHERE rowid = 3", "names '../../evil.parquet'"),
        # The server would delete it.
        ("UPDATE state_files SET path = '/tmp/mine' WHERE needed = '{}'", "names '/tmp/mine'"),
        ("UPDATE state_files SET path = '_mldserver/owner.json' WHERE needed = '{}'", "owner.json'"),
        ("UPDATE state_files SET bytes = bytes + 1", "and the ledger expects 1 and"),
        ("UPDATE state_files SET rows = 2", "has 1 rows and"),
        ("DELETE FROM stores", "cannot be read"),
        (
            "DELETE FROM stores; UPDATE state_files SET needed = '{}'",
            "names the store 'a' of keyed state, which it does not have",
        ),
        ("UPDATE state_files SET needed = '{\"a\": 1}'", "cannot be read"),
        ("UPDATE stores SET last = 'what'", "cannot be read"),
    ],
)
def test_a_backup_whose_keyed_state_was_changed_is_refused(
    keyed: Path, ledger: Any, sql: str, told: str
) -> None:
    ledger("backup", "monday")
    shutil.rmtree(keyed / "out")
    changed(keyed / "monday", sql)
    said = ledger("restore", "monday", code=2)
    assert told in said
    assert not (keyed / "out").exists()


def test_a_state_file_of_a_backup_must_have_the_columns_of_keyed_state(keyed: Path, ledger: Any) -> None:
    ledger("backup", "monday")
    shutil.rmtree(keyed / "out")
    other = state_file(OutputStore(str(keyed / "monday" / "files")), 2, columns=COLUMNS.remove(3))
    changed(keyed / "monday", f"UPDATE state_files SET bytes = {other.bytes} WHERE path = '{other.path}'")
    assert "does not have the columns of keyed state" in ledger("restore", "monday", code=2)


@pytest.mark.parametrize("form", [6, 7])
def test_a_backup_of_a_ledger_without_timers_is_restored(tmp_path: Path, ledger: Any, form: int) -> None:
    with tarfile.open(Path(__file__).parents[1] / "formats" / f"{form}.tar.gz") as kept:
        kept.extractall(tmp_path, filter="data")
    ledger("backup", "monday")
    with contextlib.closing(sqlite3.connect(tmp_path / "monday" / "ledger.sqlite")) as db:
        assert db.execute("SELECT format FROM meta").fetchone() == (form,), "reading upgrades nothing"
    shutil.rmtree(tmp_path / "out")
    ledger("restore", "monday")
    with contextlib.closing(sqlite3.connect(tmp_path / "out" / LEDGER)) as db:
        assert db.execute("SELECT format FROM meta").fetchone() == (FORMAT,)
