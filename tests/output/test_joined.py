from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mldserver.ledger.contract import Segment
from mldserver.output import joined
from mldserver.output.layout import SEGMENTS, is_joined, segment_path, written
from mldserver.output.store import OutputStore

pytestmark = pytest.mark.quick

TAG, SHAPE = "0123456789abcdef", "0123456789ab"


@pytest.fixture(params=["local", "mock://bucket/out"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> OutputStore:
    return OutputStore(str(tmp_path) if request.param == "local" else request.param)


def segments(store: OutputStore, count: int, *, begin: int = 0) -> list[Segment]:
    """Write segments of two rows each."""
    made = []
    for number in range(begin, begin + count):
        name = f"{number:04d}"
        kind = Segment("", "w", 0, 0).kind
        path = segment_path("w", number * 2, name, kind=kind, tag=TAG, shape=SHAPE)
        at = pa.array([number, number], pa.timestamp("ms", tz="UTC"))
        rows = pa.table({"name": [name] * 2, "_clock": [number * 2, number * 2 + 1], "_arrival": at})
        made.append(Segment(path, "w", 2, store.write(path, rows)))
    return made


def paths(several: list[Segment]) -> list[str]:
    return [segment.path for segment in several]


def read(store: OutputStore, path: str) -> pa.Table:
    with store.parquet(path) as file:
        return file.read()


def test_a_window_of_many_segments_is_read_from_few_files_with_the_same_rows(store: OutputStore) -> None:
    own = segments(store, 2 * joined.SEGMENTS_PER_FILE + 5)
    assert joined.to_read(store, own) == {segment.path: segment.bytes for segment in own}
    for begin in (0, joined.SEGMENTS_PER_FILE):
        joined.join(store, paths(own[begin : begin + joined.SEGMENTS_PER_FILE]))
    files = joined.to_read(store, own)
    assert len(files) == 2 + 5
    assert files == {path: store._fs.get_file_info(store._absolute(path)).size for path in files}
    rows = pa.concat_tables(read(store, path) for path in files)
    assert rows.schema.remove_metadata() == read(store, own[0].path).schema.remove_metadata()
    assert rows["_clock"].to_pylist() == list(range(2 * len(own)))


def test_a_joined_file_is_told_from_others_as_its_first_segment_is(store: OutputStore) -> None:
    own = segments(store, 3)
    joined.join(store, paths(own))
    (path,) = joined.files(store, own)
    assert is_joined(path)
    assert not any(is_joined(segment.path) for segment in own)
    assert written(path) == written(own[0].path)


def test_rows_that_an_attempt_is_not_to_read_are_not_read(store: OutputStore) -> None:
    own = segments(store, joined.SEGMENTS_PER_FILE + 1)
    joined.join(store, paths(own)[1:])
    without_last = own[:-1]
    assert list(joined.to_read(store, without_last)) == paths(without_last)
    assert len(joined.to_read(store, own)) == 2


def test_rows_are_read_once_though_two_joined_files_hold_them(store: OutputStore) -> None:
    own = segments(store, joined.SEGMENTS_PER_FILE)
    joined.join(store, paths(own)[:40])
    joined.join(store, paths(own)[20:])
    files = joined.to_read(store, own)
    assert sorted(pa.concat_tables(read(store, path) for path in files)["_clock"].to_pylist()) == list(
        range(2 * joined.SEGMENTS_PER_FILE)
    )


def test_a_joined_file_has_its_name_only_once_it_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = OutputStore(str(tmp_path))
    own = segments(store, joined.SEGMENTS_PER_FILE)

    def dies(_store: OutputStore, *_paths: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(OutputStore, "sync", dies)
    with pytest.raises(KeyboardInterrupt):
        joined.join(store, paths(own))
    (left,) = (path for path, _ in store.files(SEGMENTS) if path not in paths(own))
    assert not is_joined(left)
    assert written(left) == written(own[0].path), "a later start does not know whose it is"
    assert list(joined.to_read(store, own)) == paths(own)


@pytest.mark.parametrize("left", [0, 4, 700])
def test_a_joined_file_that_was_never_finished_is_not_read(store: OutputStore, left: int) -> None:
    own = segments(store, joined.SEGMENTS_PER_FILE)
    joined.join(store, paths(own))
    (path,) = joined.files(store, own)
    with store._fs.open_input_stream(store._absolute(path)) as stream:
        begin = stream.read()[:left]
    store.put(path, begin)
    assert list(joined.to_read(store, own)) == paths(own)


def test_a_file_that_names_no_segments_is_not_read(store: OutputStore) -> None:
    own = segments(store, joined.SEGMENTS_PER_FILE)
    store.write(f"{SEGMENTS}/w/joined-x.parquet", pa.table({"name": ["a"]}))
    assert list(joined.to_read(store, own)) == paths(own)


def test_nothing_is_left_of_a_joined_file_that_the_disk_has_no_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = OutputStore(str(tmp_path))
    own = segments(store, 3)

    def full(rows: pa.Table, stream: pa.NativeFile, **_: object) -> None:
        stream.write(b"PAR1")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq, "write_table", full)
    with pytest.raises(OSError, match="No space left"):
        joined.join(store, paths(own))
    assert sorted(name for name, _ in store.files(SEGMENTS)) == paths(own)
