from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from pyarrow import fs

from mldserver.output.manifest import Manifest, current_files, latest, manifest_path

pytestmark = pytest.mark.quick

ONE = Manifest("w1", 1, ("_mldserver/outputs/w1/0001-aa/part-0.parquet",), 3)


def test_a_manifest_says_which_files_a_revision_has() -> None:
    assert Manifest.decode(ONE.encode()) == ONE
    assert json.loads(ONE.encode()) == {
        "format": 1,
        "window": "w1",
        "revision": 1,
        "rows": 3,
        "files": ["_mldserver/outputs/w1/0001-aa/part-0.parquet"],
    }


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"7", b'{"format": 1}', b'{"format": 1, "window": "w"}'])
def test_what_is_no_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"manifest|Expecting"):
        Manifest.decode(data)


def test_a_manifest_of_a_newer_format_is_refused() -> None:
    with pytest.raises(ValueError, match="format 2; this program knows format 1"):
        Manifest.decode(ONE.encode().replace(b'"format": 1', b'"format": 2'))


def test_the_highest_revision_of_each_window_counts() -> None:
    paths = [
        manifest_path(window, revision) for window, revision in (("a", 9), ("a", 10), ("b", 1), ("a", 2))
    ]
    found = latest([*paths, "m/a/000099.json.tmp", "m/a/x.json", "m/a/README"])
    assert found == {"a": manifest_path("a", 10), "b": manifest_path("b", 1)}


def test_files_that_were_published_by_renaming_are_listed(tmp_path: Path) -> None:
    rows = pa.table({"v": [1]})
    for name in ("window=b/part-1.parquet", "window=a/x=1/part-2.parquet", "_late/window=a/part-3.parquet"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(rows, tmp_path / name)
    (tmp_path / "window=a" / "_SUCCESS").touch()
    (tmp_path / "notes.txt").touch()
    found = current_files(str(tmp_path))
    assert found.paths == tuple(
        str(tmp_path / name) for name in ("window=a/x=1/part-2.parquet", "window=b/part-1.parquet")
    )
    assert ds.dataset(list(found.paths), filesystem=found.filesystem).count_rows() == 2


def bucket(tmp_path: Path) -> fs.FileSystem:
    (tmp_path / "out").mkdir()
    return fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem())


def put(tmp_path: Path, manifest: Manifest) -> Path:
    path = tmp_path / "out" / manifest_path(manifest.window, manifest.revision)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(manifest.encode())
    return path


def test_files_that_manifests_name_are_listed_in_their_latest_revision(tmp_path: Path) -> None:
    store = bucket(tmp_path)
    for manifest in (ONE, Manifest("w1", 2, ("x.parquet", "y.parquet"), 5), Manifest("w2", 1, (), 0)):
        put(tmp_path, manifest)
    assert current_files("out/", store).paths == ("out/x.parquet", "out/y.parquet")


def test_a_folder_without_output_has_no_files(tmp_path: Path) -> None:
    assert current_files("out", bucket(tmp_path)).paths == ()
    assert current_files(f"file://{tmp_path}/out").paths == ()


class Moving:
    """A store in which the manifest that was listed is replaced before it can be read."""

    def __init__(self, inner: fs.FileSystem, tmp_path: Path, times: int) -> None:
        self._inner = inner
        self._folder = tmp_path
        self._left = times

    def get_file_info(self, selector: fs.FileSelector) -> list[fs.FileInfo]:
        found: list[fs.FileInfo] = self._inner.get_file_info(selector)
        if self._left and any(info.extension == "json" for info in found):
            self._left -= 1
            revision = 100 - self._left
            put(self._folder, Manifest("w1", revision, (f"{revision}.parquet",), 1))
            put(self._folder, Manifest("w1", revision - 1, (), 1)).unlink()
        return found

    def open_input_stream(self, path: str) -> pa.NativeFile:
        return self._inner.open_input_stream(path)


def test_a_revision_that_is_replaced_while_it_is_read_is_looked_for_again(tmp_path: Path) -> None:
    store = bucket(tmp_path)
    put(tmp_path, Manifest("w1", 97, ("97.parquet",), 1))
    assert current_files("out", Moving(store, tmp_path, 3)).paths == ("out/100.parquet",)


def test_a_manifest_that_never_comes_is_an_error_in_the_end(tmp_path: Path) -> None:
    store = bucket(tmp_path)
    put(tmp_path, Manifest("w1", 50, ("50.parquet",), 1))
    with pytest.raises(FileNotFoundError):
        current_files("out", Moving(store, tmp_path, 50))
