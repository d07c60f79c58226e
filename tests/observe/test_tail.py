from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from mldserver.errors import ConfigError
from mldserver.observe.log_lines import FileFollower, Selection, parse_event

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("line", [b"", b"plain", b"[1]", b"{}", b'{"a":1}', b"\xff", b'{"event":'])
def test_what_is_no_event_is_none(line: bytes) -> None:
    assert parse_event(line) is None


def test_an_event_is_an_object_with_a_name() -> None:
    assert parse_event(b'{"event":"x"}') == {"event": "x"}


# Selection


EVENT: dict[str, Any] = {
    "timestamp": "2026-11-21T10:00:00.000001Z",
    "level": "warning",
    "event": "checkpoint.retried",
    "shard": "shardId-000000000003",
}


@pytest.mark.parametrize(
    ("selection", "wanted"),
    [
        (Selection(), True),
        (Selection(shard="shardId-000000000003"), True),
        (Selection(shard="*3"), True),
        (Selection(shard="shardId-000000000004"), False),
        (Selection(level="warning"), True),
        (Selection(level="info"), True),
        (Selection(level="error"), False),
        (Selection(events=("batch.*", "checkpoint.*")), True),
        (Selection(events=("batch.*",)), False),
        (Selection(since=datetime(2026, 11, 21, 10, tzinfo=UTC)), True),
        (Selection(since=datetime(2026, 11, 21, 10, 0, 1, tzinfo=UTC)), False),
    ],
)
def test_all_that_is_asked_for_must_fit(selection: Selection, wanted: bool) -> None:
    assert selection.wants(EVENT) is wanted


def test_an_event_without_a_shard_belongs_to_none() -> None:
    assert not Selection(shard="s").wants({"event": "server.ready"})


def test_an_unknown_level_is_never_hidden() -> None:
    assert Selection(level="critical").wants({"event": "x", "level": "panic"})
    assert Selection(level="critical").wants({"event": "x"})


def test_a_timestamp_that_cannot_be_read_is_never_hidden() -> None:
    since = datetime(2026, 1, 1, tzinfo=UTC)
    assert Selection(since=since).wants({"event": "x", "timestamp": "now"})
    assert not Selection(since=since).wants({"event": "x", "timestamp": "2025-01-01T00:00:00"})


def test_lines_that_are_no_events_are_wanted_only_when_nothing_is_asked_for() -> None:
    assert Selection().wants(None)
    assert not Selection(level="debug").wants(None)


# Following


@pytest.fixture
def follower(tmp_path: Path) -> Iterator[FileFollower]:
    made = FileFollower(tmp_path / "m.log")
    yield made
    made.finish()


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def test_new_lines_come_with_each_reading(tmp_path: Path, follower: FileFollower) -> None:
    path = tmp_path / "m.log"
    assert list(follower.read()) == []
    assert not follower.opened
    append(path, b"one\ntw")
    assert list(follower.read()) == [b"one"]
    assert follower.opened
    assert list(follower.read()) == []
    append(path, b"o\nthree\n")
    assert list(follower.read()) == [b"two", b"three"]


def test_rename_and_create_loses_no_line(tmp_path: Path, follower: FileFollower) -> None:
    path = tmp_path / "m.log"
    append(path, b"one\n")
    assert list(follower.read()) == [b"one"]
    append(path, b"two\n")
    path.rename(tmp_path / "m.log.1")
    assert list(follower.read()) == [b"two"]
    append(tmp_path / "m.log.1", b"three\nwithout end")
    append(path, b"four\n")
    assert list(follower.read()) == [b"three", b"without end", b"four"]
    append(path, b"five\n")
    assert list(follower.read()) == [b"five"]


def test_lines_written_between_two_looks_at_the_old_file_are_not_lost(
    tmp_path: Path, follower: FileFollower
) -> None:
    path = tmp_path / "m.log"
    append(path, b"one\n")
    reading = follower.read()
    assert next(reading) == b"one"
    path.rename(tmp_path / "m.log.1")
    append(tmp_path / "m.log.1", b"two\n")
    append(path, b"three\n")
    assert list(reading) == [b"two", b"three"]


def test_copytruncate_starts_over(tmp_path: Path, follower: FileFollower) -> None:
    path = tmp_path / "m.log"
    append(path, b"one\nunfinished")
    assert list(follower.read()) == [b"one"]
    os.truncate(path, 0)
    append(path, b"two\n")
    assert list(follower.read()) == [b"unfinished", b"two"]


def test_copytruncate_is_noticed_though_the_file_has_grown_beyond_our_place(
    tmp_path: Path, follower: FileFollower
) -> None:
    path = tmp_path / "m.log"
    append(path, b"one\n")
    assert list(follower.read()) == [b"one"]
    os.truncate(path, 0)
    append(path, b"two, and a longer one\nthree\n")
    assert list(follower.read()) == [b"two, and a longer one", b"three"]


def test_a_file_longer_than_its_head_is_followed_too(tmp_path: Path, follower: FileFollower) -> None:
    path = tmp_path / "m.log"
    append(path, b"x" * 500 + b"\n")
    assert list(follower.read()) == [b"x" * 500]
    append(path, b"y\n")
    assert list(follower.read()) == [b"y"]


def test_a_file_that_was_deleted_is_read_to_its_end(tmp_path: Path, follower: FileFollower) -> None:
    path = tmp_path / "m.log"
    append(path, b"one\n")
    assert list(follower.read()) == [b"one"]
    append(path, b"two\n")
    path.unlink()
    assert list(follower.read()) == [b"two"]
    assert list(follower.read()) == []


def test_a_follower_that_found_nothing_has_nothing_to_finish(follower: FileFollower) -> None:
    assert list(follower.read()) == []
    assert follower.finish() == []


def test_a_pipe_is_read_without_looking_back(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = os.open(path, os.O_RDWR)
    os.write(writer, b"one\ntwo")
    follower = FileFollower(path)
    reading = follower.read()
    assert next(reading) == b"one"
    os.close(writer)
    assert list(reading) == []
    assert list(follower.read()) == []
    assert follower.finish() == [b"two"]


def test_a_directory_is_the_operators_error(tmp_path: Path) -> None:
    follower = FileFollower(tmp_path)
    with pytest.raises(ConfigError, match="is a directory"):
        list(follower.read())
    follower.finish()


def test_a_path_that_cannot_be_opened_is_the_operators_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="cannot be read: Not a directory"):
        list(FileFollower(tmp_path / "file" / "m.log").read())
