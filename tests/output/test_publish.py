"""Outputs become visible, are replaced, and are left alone, however often and by whomever it is tried."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.s3 import bucket

from mldserver.errors import OperatorError
from mldserver.ledger.contract import Commit
from mldserver.output.layout import attempt_path, window_path, writer_tag
from mldserver.output.manifest import current_files
from mldserver.output.publish import Publisher, shown_files
from mldserver.output.store import OutputStore

TAG = writer_tag("0" * 8, "one")


class Shop:
    """One output folder; ``make`` does what a committed attempt has done."""

    def __init__(self, out: str) -> None:
        self.store = OutputStore(out)
        self.store.prepare("_mldserver/staging")
        self.publisher = Publisher(self.store)

    def make(self, window: str, revision: int, *values: int, attempt: int | None = None) -> Commit:
        staging = attempt_path(self.publisher.root, window, attempt or revision, TAG)
        files = tuple(f"part-{n}-{attempt or revision}.parquet" for n in range(len(values)))
        for file, value in zip(files, values, strict=True):
            self.store.write(f"{staging}/{file}", pa.table({"v": [value]}))
        self.store.prepare(staging)
        return Commit(window, attempt or revision, staging, files, len(values), revision)

    def shown(self) -> list[int]:
        base = self.store._absolute("")
        found = current_files(base, self.store._fs)
        return sorted(
            value
            for path in found.paths
            for value in pq.read_table(path, filesystem=found.filesystem)["v"].to_pylist()
        )

    def replace(self, output: Commit) -> None:
        self.publisher.publish([output])
        self.publisher.clean(output)

    def attempts(self) -> list[str]:
        """What nobody reads, were all that wrote here dead."""
        found = self.publisher.attempts()
        return [folder.rpartition("/")[2] for folder in sorted(self.publisher.unread(found, found))]


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with bucket("output") as query:
        yield query


@pytest.fixture(params=["local", "memory", "s3"])
def shop(request: pytest.FixtureRequest, tmp_path: Path) -> Shop:
    if request.param == "s3":
        query = request.getfixturevalue("s3")
        return Shop(f"s3://key:secret@output/{tmp_path.name}?{query}")
    return Shop(str(tmp_path / "out") if request.param == "local" else "mock://bucket/out")


@pytest.fixture
def local(tmp_path: Path) -> Shop:
    return Shop(str(tmp_path / "out"))


@pytest.fixture
def remote() -> Shop:
    return Shop("mock://bucket/out")


def test_first_revisions_appear_together(shop: Shop) -> None:
    outputs = [shop.make("a", 1, 1, 2), shop.make("b", 1, 3)]
    assert shop.shown() == []
    shop.publisher.publish(outputs)
    shop.store.for_each(shop.publisher.clean, outputs)
    assert shop.shown() == [1, 2, 3]
    assert shop.attempts() == []


def test_a_next_revision_takes_the_place_of_the_one_before(shop: Shop) -> None:
    shop.replace(shop.make("a", 1, 1, 2))
    shop.replace(shop.make("b", 1, 5))
    shop.replace(shop.make("a", 2, 3))
    assert shop.shown() == [3, 5]
    assert shop.attempts() == []


def test_the_files_of_a_window_are_those_of_its_present_revision(shop: Shop) -> None:
    assert shown_files(shop.store, "a") == ()
    shop.replace(shop.make("a", 1, 1, 2))
    shop.replace(shop.make("b", 1, 5))
    first = shown_files(shop.store, "a")
    shop.replace(shop.make("a", 2, 3))
    second = shown_files(shop.store, "a")
    assert (len(first), len(second), set(first) & set(second)) == (2, 1, set())
    assert shop.store.exists(second[0])
    shop.replace(shop.make("a", 3))
    assert shown_files(shop.store, "a") == ()


def test_a_revision_without_output_takes_the_one_before_away(shop: Shop) -> None:
    shop.replace(shop.make("a", 1, 1, 2))
    shop.replace(shop.make("a", 2))
    assert shop.shown() == []
    shop.replace(shop.make("a", 3, 7))
    assert shop.shown() == [7]


def test_a_first_revision_without_output_shows_nothing(shop: Shop) -> None:
    shop.replace(shop.make("a", 1))
    assert shop.shown() == []
    shop.replace(shop.make("a", 2, 4))
    assert shop.shown() == [4]


@pytest.mark.parametrize("values", [(), (3,), (3, 4)])
@pytest.mark.parametrize("revision", [1, 2])
def test_publishing_may_be_repeated_before_and_after_cleaning(
    shop: Shop, revision: int, values: tuple[int, ...]
) -> None:
    if revision > 1:
        shop.replace(shop.make("a", 1, 1, 2))
    output = shop.make("a", revision, *values)
    for _ in range(3):
        shop.publisher.publish([output])
        assert shop.shown() == list(values)
    for _ in range(2):
        shop.publisher.clean(output)
        shop.publisher.publish([output])
        assert shop.shown() == list(values)


@pytest.mark.parametrize("values", [(), (3,)])
def test_who_comes_late_with_an_older_revision_changes_nothing(shop: Shop, values: tuple[int, ...]) -> None:
    """A server that was taken for dead wakes up between its commit and its publishing."""
    shop.replace(shop.make("a", 1, 1))
    old = shop.make("a", 2, *values)
    shop.replace(old)
    shop.replace(shop.make("a", 3, 9))
    try:
        shop.publisher.publish([old])
    except FileNotFoundError:
        assert shop.store.local
    assert shop.shown() == [9]


def test_output_that_is_nowhere_is_an_error(local: Shop) -> None:
    output = local.make("a", 1, 1)
    local.store.delete(output.staging)
    with pytest.raises(FileNotFoundError, match="holds the window's output"):
        local.publisher.publish([output])


def test_a_first_revision_never_takes_a_place_that_is_taken(local: Shop) -> None:
    local.store.write(f"{window_path('a')}/other.parquet", pa.table({"v": [8]}))
    with pytest.raises(OperatorError, match="window=a is there already, and this ledger did not publish it"):
        local.publisher.publish([local.make("a", 1, 1)])
    assert local.shown() == [8]


def test_cleaning_leaves_attempts_that_came_after(shop: Shop) -> None:
    shop.make("a", 1, 1, attempt=1)
    output = shop.make("a", 1, 2, attempt=2)
    shop.make("a", 2, 3, attempt=3)
    shop.publisher.publish([output])
    shop.publisher.clean(output)
    assert shop.attempts() == [f"0003-{TAG}"]
    assert shop.shown() == [2]


def test_what_readers_read_is_no_attempt_to_be_cleaned_up(shop: Shop) -> None:
    shop.replace(shop.make("a", 1, 1))
    shop.make("b", 1, 2)
    assert shop.attempts() == [f"0001-{TAG}"]
    (left,) = shop.publisher.unread(shop.publisher.attempts(), shop.publisher.attempts())
    assert left.split("/")[-2] == "b"


def test_an_attempt_beside_a_revision_without_output_is_to_be_cleaned_up(shop: Shop) -> None:
    shop.make("a", 1, 1, attempt=1)
    shop.publisher.publish([shop.make("a", 1, attempt=2)])
    assert f"0001-{TAG}" in shop.attempts()
    assert shop.shown() == []


def test_a_start_reads_no_manifest_of_a_window_whose_only_attempt_it_is(
    remote: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(10):
        remote.replace(remote.make(f"w{number}", 1, number))
    again = remote.make("w3", 2, 33)
    remote.publisher.publish([again])
    asked: list[str] = []
    get = remote.store.get

    def counted(path: str) -> bytes:
        asked.append(path)
        return get(path)

    monkeypatch.setattr(remote.store, "get", counted)
    assert remote.attempts() == [f"0001-{TAG}"]
    assert [path.rpartition("/")[2] for path in asked] == ["000002.json"]


def test_what_is_published_after_the_listing_is_read(remote: Shop) -> None:
    outputs = [remote.make(name, 1, 1) for name in ("a", "b")]
    listed = remote.publisher.attempts()
    assert [each.staging for each in outputs] == sorted(listed)
    remote.publisher.publish(outputs[:1])
    assert remote.publisher.unread(listed, listed) == [outputs[1].staging]
    assert remote.publisher.unread(listed, []) == []


@pytest.mark.parametrize("times", [1, 99])
def test_a_manifest_that_is_replaced_while_it_is_read_is_looked_for_again(
    remote: Shop, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    remote.replace(remote.make("a", 1, 1))
    failed, second = remote.make("a", 2, 2, attempt=2), remote.make("a", 2, 2, attempt=3)
    get, left = remote.store.get, [times]

    def replaced(path: str) -> bytes:
        if left[0]:
            left[0] -= 1
            remote.publisher.publish([second])
            remote.store.delete(path)
            remote.publisher.publish([second])
            raise FileNotFoundError(path)
        return get(path)

    monkeypatch.setattr(remote.store, "get", replaced)
    listed = remote.publisher.attempts()
    # What is replaced again and again is left to the next start.
    first = f"_mldserver/outputs/a/0001-{TAG}"
    assert remote.publisher.unread(listed, listed) == ([first, failed.staging] if times == 1 else [])


def test_it_is_told_where_readers_find_a_window(local: Shop) -> None:
    assert local.publisher.shown("a") == local.store.uri("window=a")
    assert Shop("mock://bucket/out").publisher.shown("a").endswith("out/_mldserver/manifest/a")


def test_a_late_file_is_moved_once(shop: Shop) -> None:
    shop.store.write("segments/late.parquet", pa.table({"v": [1]}))
    assert shop.store.publish("segments/late.parquet", "_late/late.parquet")
    assert not shop.store.publish("segments/late.parquet", "_late/late.parquet")
    assert [path for path, _ in shop.store.files("_late")] == ["_late/late.parquet"]
    with pytest.raises(FileNotFoundError):
        shop.store.publish("segments/other.parquet", "_late/other.parquet")


# Where folders cannot change places.


def test_a_folder_where_outputs_can_be_replaced_passes_and_keeps_nothing(shop: Shop) -> None:
    shop.publisher.check()
    assert [path for path, _ in shop.store.files("") if "exchange" in path] == []


def test_servers_that_try_a_folder_at_the_same_time_do_not_take_each_other_s_away(local: Shop) -> None:
    def check(_: int) -> None:
        for _ in range(20):
            local.publisher.check()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(check, range(4)))


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EINVAL])
def test_a_file_system_that_cannot_exchange_folders_is_told_at_the_start(
    local: Shop, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(one: str, other: str) -> None:
        raise OSError(code, "no")

    monkeypatch.setattr(local.store, "exchange", refuse)
    with pytest.raises(OperatorError, match="late = separate"):
        local.publisher.check()
    assert local.attempts() == []


def test_other_errors_are_not_taken_for_that(local: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(one: str, other: str) -> None:
        raise OSError(errno.EIO, "I/O error")

    monkeypatch.setattr(local.store, "exchange", fail)
    with pytest.raises(OSError, match="I/O error"):
        local.publisher.check()


# Readers while a revision replaces another.


def read_once(out: Path) -> list[tuple[int, int]] | None:
    """Read a window as a plain reader does: list, then open. None: a listed file was gone, so list again."""
    try:
        paths = sorted((out / "window=a").glob("*.parquet"))
        tables = [pq.read_table(path) for path in paths]
    except FileNotFoundError:
        return None
    return [(row["revision"], row["part"]) for table in tables for row in table.to_pylist()]


def test_readers_see_one_whole_revision_or_are_told_to_list_again(local: Shop, tmp_path: Path) -> None:
    parts, revisions = 3, 60
    seen: list[list[tuple[int, int]]] = []
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            rows = read_once(tmp_path / "out")
            if rows is not None:
                seen.append(rows)

    def make(revision: int) -> Commit:
        output = local.make("a", revision, *range(parts))
        for part, file in enumerate(output.files):
            rows = pa.table({"revision": [revision], "part": [part]})
            local.store.write(f"{output.staging}/{file}", rows)
        return output

    local.replace(make(1))
    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    try:
        for revision in range(2, revisions + 1):
            # Not cleaned up meanwhile: the server gives readers that have the old folder open time to list it.
            local.publisher.publish([output := make(revision)])
            count = len(seen)
            while (
                revision % 10 == 0
                and len(seen) <= count + len(readers)  # one of them began after it
                and any(reader.is_alive() for reader in readers)
            ):
                time.sleep(0.001)
    finally:
        stop.set()
        for reader in readers:
            reader.join()
    local.publisher.clean(output)
    assert local.attempts() == []
    assert len({rows[0][0] for rows in seen}) >= revisions // 10, "readers saw revisions come"
    for rows in seen:
        assert rows == [(rows[0][0], part) for part in range(parts)]


def test_two_that_publish_the_same_output_at_once_publish_it_once(local: Shop) -> None:
    """A server that is taken for dead, and the one that took its window over."""
    local.replace(local.make("a", 1, 1))
    other = Publisher(OutputStore(local.store.uri()))
    for revision in range(2, 30):
        output = local.make("a", revision, revision)
        threads = [
            threading.Thread(target=each.publish, args=([output],)) for each in (local.publisher, other)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert local.shown() == [revision]
        local.publisher.clean(output)
