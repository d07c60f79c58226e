from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mldserver.output.layout import SPARK
from mldserver.output.store import OutputStore

pytestmark = pytest.mark.quick

ROWS = pa.table({"value": [1, 2, 3]})


def identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


@pytest.fixture
def store(tmp_path: Path) -> OutputStore:
    return OutputStore(str(tmp_path / "out"))


def test_a_path_and_a_file_uri_are_the_same_local_folder(tmp_path: Path) -> None:
    for out in (str(tmp_path), f"file://{tmp_path}"):
        store = OutputStore(out)
        assert store.local
        assert store.uri() == str(tmp_path)
        assert store.uri("a/b") == str(tmp_path / "a" / "b")


def test_a_relative_path_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert OutputStore("out").uri("x") == str(tmp_path / "out" / "x")


def test_a_remote_folder_keeps_its_scheme_and_is_not_synced() -> None:
    store = OutputStore("mock://base")
    assert not store.local
    assert store.uri("x").startswith("mock://")
    store.write("window=1/a.parquet", ROWS)
    store.publish("window=1/a.parquet", "window=2/a.parquet")
    assert [path for path, _ in store.files("")] == ["window=2/a.parquet"]
    store.drop_empty("window=1")
    store.sync("window=2")


def test_spark_gets_names_without_the_options_that_pyarrow_needs(tmp_path: Path) -> None:
    out = "s3://key:secret@lake/my%20rows/?region=us-east-1&endpoint_override=127.0.0.1:1"
    store = OutputStore(out, home=tmp_path)
    assert store.uri("window=1/x") == "s3://lake/my rows/window=1/x"
    assert store.uri() == "s3://lake/my rows"
    assert store.place == out
    assert OutputStore(str(tmp_path)).place == ""


def test_scratch_space_is_found_on_the_hosts_own_disk(tmp_path: Path) -> None:
    assert OutputStore("mock://base").scratch() == []
    assert OutputStore(str(tmp_path)).scratch() == []
    (tmp_path / SPARK / "12345678").mkdir(parents=True)
    (tmp_path / SPARK / "file").touch()
    for store in (OutputStore(str(tmp_path)), OutputStore("mock://base", home=tmp_path)):
        assert store.scratch() == [tmp_path / SPARK / "12345678"]


def test_preparing_makes_the_folders_and_may_be_repeated(store: OutputStore, tmp_path: Path) -> None:
    for _ in range(2):
        store.prepare("a", "b/c")
    assert (tmp_path / "out" / "b" / "c").is_dir()


def test_a_new_output_folder_is_on_disk_with_every_entry_that_leads_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(identity(os.fstat(descriptor))))
    OutputStore(str(tmp_path / "new" / "out")).prepare("_mldserver/segments", durable=True)
    out = tmp_path / "new" / "out"
    for folder in (out / "_mldserver" / "segments", out / "_mldserver", out, tmp_path / "new", tmp_path):
        assert identity(folder.stat()) in synced


def test_folders_above_that_nobody_may_read_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []

    def closed(path: Path, flags: int) -> int:
        asked.append(path)
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "open", closed)
    OutputStore(str(tmp_path / "out")).prepare("_mldserver", durable=True)
    assert asked == [tmp_path / "out" / "_mldserver"]


def test_rows_are_written_with_their_size_told(store: OutputStore, tmp_path: Path) -> None:
    size = store.write("seg/w/one.parquet", ROWS)
    path = tmp_path / "out" / "seg" / "w" / "one.parquet"
    assert size == path.stat().st_size
    assert pq.read_table(path).equals(ROWS)


def test_positions_and_times_are_written_as_differences(store: OutputStore, tmp_path: Path) -> None:
    rows = pa.table(
        {
            "name": pa.array(["a", "b"]),
            "_time": pa.array([1, 2], pa.int64()),
            "_sequence": pa.array(["4959033827149025660", "4959033827149025661"]),
        }
    )
    store.write("segments/w/1.parquet", rows)
    file = pq.ParquetFile(tmp_path / "out" / "segments" / "w" / "1.parquet")
    assert file.read().equals(rows)
    columns = [file.metadata.row_group(0).column(number) for number in range(3)]
    assert "RLE_DICTIONARY" in columns[0].encodings
    assert "DELTA_BINARY_PACKED" in columns[1].encodings
    assert "DELTA_BYTE_ARRAY" in columns[2].encodings


def test_a_large_file_has_dictionaries_of_what_repeats_only(store: OutputStore, tmp_path: Path) -> None:
    count = 20_000
    rows = pa.table(
        {
            "kind": pa.array(["a", "b"] * (count // 2)),
            "ready": pa.array([True, False] * (count // 2)),
            "seat": pa.array(range(count), pa.int32()).cast(pa.int64()),
            "delay": pa.array([number / 3 for number in range(count)]),
            "id": pa.array([f"{number:08d}" for number in range(count)]),
            "at": pa.array(range(count), pa.timestamp("us", tz="UTC")),
            "tags": pa.array([[number] for number in range(count)]),
        }
    )
    encodings = {}
    for path, written in {"large": rows, "small": rows.slice(1)}.items():
        store.write(path, written)
        file = pq.ParquetFile(tmp_path / "out" / path)
        assert file.read().equals(written)
        group = file.metadata.row_group(0)
        encodings[path] = [set(group.column(number).encodings) for number in range(6)]
    assert ["RLE_DICTIONARY" in each for each in encodings["large"]] == [True] + [False] * 5
    assert ["DELTA_BINARY_PACKED" in each for each in encodings["large"]] == [
        False,
        False,
        True,
        False,
        False,
        True,
    ]
    assert ["RLE_DICTIONARY" in each for each in encodings["small"]] == [True, False] + [True] * 4


def test_a_file_and_every_folder_above_it_are_on_disk_before_write_returns(
    store: OutputStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(identity(os.fstat(fd))))
    store.write("seg/w/one.parquet", ROWS)
    base = tmp_path / "out"
    parts = ("seg/w/one.parquet", "seg/w", "seg", "")
    assert synced == [identity((base / part).stat()) for part in parts]


def test_syncing_a_folder_covers_all_that_is_in_it(
    store: OutputStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.write("stage/sub/one.parquet", ROWS)
    synced: set[tuple[int, int]] = set()
    monkeypatch.setattr(os, "fsync", lambda fd: synced.add(identity(os.fstat(fd))))
    store.sync("stage")
    base = tmp_path / "out"
    parts = ("stage/sub/one.parquet", "stage/sub", "stage", "")
    assert synced == {identity((base / part).stat()) for part in parts}


def test_a_folder_that_vanishes_before_the_file_is_opened_is_made_again(
    store: OutputStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = store._fs, []

    class Vanishing:
        def __getattr__(self, name: str) -> object:
            return getattr(real, name)

        def open_output_stream(self, path: str) -> object:
            calls.append(path)
            if len(calls) == 1:
                store.drop_empty("seg/w")
            return real.open_output_stream(path)

    monkeypatch.setattr(store, "_fs", Vanishing())
    store.write("seg/w/one.parquet", ROWS)
    assert len(calls) == 2
    assert store.exists("seg/w/one.parquet")


def test_a_file_that_another_server_takes_away_as_it_is_written_is_no_file(
    store: OutputStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "sync", lambda path: (tmp_path / "out" / path).unlink())
    with pytest.raises(FileNotFoundError, match="gone as soon as it was written"):
        store.write("segments/w/1.parquet", pa.table({"v": [1]}))


def test_publishing_renames_files_and_folders_and_may_be_repeated(store: OutputStore, tmp_path: Path) -> None:
    store.write("staging/w/1/part.parquet", ROWS)
    assert store.publish("staging/w/1", "window=w")
    assert not store.publish("staging/w/1", "window=w")
    assert pq.read_table(tmp_path / "out" / "window=w" / "part.parquet").equals(ROWS)
    store.write("seg/late.parquet", ROWS)
    assert store.publish("seg/late.parquet", "_late/window=w/late.parquet")
    assert not store.publish("seg/late.parquet", "_late/window=w/late.parquet")


def test_publishing_what_was_never_there_is_an_error(store: OutputStore) -> None:
    store.prepare()
    with pytest.raises(FileNotFoundError, match=r"neither .*/a nor .*/b exists"):
        store.publish("a", "b")


def test_publishing_never_writes_over_output_that_is_there(store: OutputStore) -> None:
    store.write("staging/w/1/part.parquet", ROWS)
    store.write("window=w/other.parquet", ROWS)
    with pytest.raises(OSError, match="not empty"):
        store.publish("staging/w/1", "window=w")
    assert store.exists("staging/w/1/part.parquet")
    assert store.exists("window=w/other.parquet")


def test_deleting_takes_files_folders_and_what_is_gone_already(store: OutputStore) -> None:
    store.write("a/one.parquet", ROWS)
    store.write("b/two.parquet", ROWS)
    for path in ("a", "b/two.parquet", "b/two.parquet", "c"):
        store.delete(path)
    assert [path for path, _ in store.files("")] == []


def test_only_empty_folders_are_dropped(store: OutputStore) -> None:
    store.prepare("empty")
    store.write("full/one.parquet", ROWS)
    for folder in ("empty", "full", "never"):
        store.drop_empty(folder)
    assert not store.exists("empty")
    assert store.exists("full/one.parquet")


def test_files_are_listed_at_any_depth_and_folders_at_the_first(store: OutputStore) -> None:
    sizes = {path: store.write(path, ROWS) for path in ("a/one.parquet", "a/b/two.parquet")}
    assert dict(store.files("a")) == sizes
    assert list(store.folders("a")) == ["a/b"]
    assert list(store.files("none")) == []
    assert list(store.folders("none")) == []


def test_what_cannot_be_written_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match="file"):
        OutputStore(str(tmp_path / "file")).write("a/one.parquet", ROWS)


class Deleting:
    """The store's file system, but for how it deletes folders."""

    def __init__(self, store: OutputStore, delete: Callable[[str], None]) -> None:
        self._fs, self.delete_dir = store._fs, delete

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fs, name)


def test_a_folder_that_another_server_deletes_at_the_same_time_is_gone_for_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = OutputStore(str(tmp_path))
    store.prepare("doomed")
    delete, overtaken = store._fs.delete_dir, []

    def overtake(target: str) -> None:
        overtaken.append(target)
        delete(target)
        raise FileNotFoundError(target)

    monkeypatch.setattr(store, "_fs", Deleting(store, overtake))
    store.delete("doomed")
    assert not store.exists("doomed")
    assert len(overtaken) == 1


def test_what_cannot_be_deleted_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_target: str) -> None:
        raise PermissionError("no")

    store = OutputStore(str(tmp_path))
    store.prepare("x")
    monkeypatch.setattr(store, "_fs", Deleting(store, refuse))
    with pytest.raises(PermissionError):
        store.delete("x")
