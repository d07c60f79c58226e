"""What a start deletes on an object store while other servers are at work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from support.store import SqliteStore

from mldserver.coordinator.cleanup import recover
from mldserver.ledger.contract import Commit, Flush, LedgerState, Segment
from mldserver.output.layout import QUARANTINE, attempt_path, writer_tag
from mldserver.output.manifest import current_files
from mldserver.output.publish import Publisher
from mldserver.output.store import OutputStore

pytestmark = pytest.mark.quick


class Asked:
    """The ledger of a server that starts; something happens just before it is read."""

    def __init__(self, store: SqliteStore, before: Callable[[], None]) -> None:
        self.server_id = store.server_id
        self._store = store
        self._before = before

    async def peek(self) -> LedgerState:
        self._before()
        return self._store.peek()


def opened(folder: Path, server_id: str) -> SqliteStore:
    store = SqliteStore(folder / "ledger.sqlite", pipeline="p", server_id=server_id)
    store.open(now_ms=1)
    return store


async def start(ledger: SqliteStore, store: OutputStore, before: Callable[[], None]) -> None:
    asked: Any = Asked(ledger, before)
    await recover(LedgerState(), asked, store, None)


async def test_an_output_that_is_published_while_a_start_lists_stays(tmp_path: Path) -> None:
    store = OutputStore("mock://bucket/out")
    publisher = Publisher(store)
    leaving, starting = opened(tmp_path, "leaving"), opened(tmp_path, "starting")
    segment = Segment("_mldserver/segments/w/s", "w", 1, 1, 0, 1000)
    leaving.register(Flush((), (segment,)), now_ms=1)
    leaving.cut(("w",))
    leaving.begin_attempts(("w",))
    failed, staging = (
        attempt_path(publisher.root, "w", n, writer_tag(leaving.peek().ledger_id, "leaving")) for n in (0, 1)
    )
    for folder in (failed, staging):
        store.write(f"{folder}/part-0.parquet", pa.table({"v": [1]}))

    def publish_and_leave() -> None:
        output = Commit("w", 1, staging, ("part-0.parquet",), 1)
        assert leaving.commit((output,)) == {"w"}
        publisher.publish([output])
        leaving.published({"w": 1}, now_ms=2)
        leaving.leave()

    await start(starting, store, publish_and_leave)
    assert store.exists(f"{staging}/part-0.parquet")
    found = current_files(store._absolute(""), store._fs)
    assert found.paths == (store._absolute(f"{staging}/part-0.parquet"),)
    assert not store.exists(failed), "a failed attempt is deleted"
    leaving.close()
    starting.close()


async def test_outputs_of_another_ledger_are_set_apart_but_for_those_that_readers_read(
    tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    store = OutputStore("mock://bucket/out")
    publisher = Publisher(store)
    starting = opened(tmp_path, "starting")
    stranger = writer_tag("0" * 8, "stranger")
    shown, failed = (attempt_path(publisher.root, window, 1, stranger) for window in ("shown", "failed"))
    for folder in (shown, failed):
        for part in range(2):
            store.write(f"{folder}/part-{part}.parquet", pa.table({"v": [part]}))
    publisher.publish([Commit("shown", 1, shown, ("part-0.parquet", "part-1.parquet"), 2)])
    await start(starting, store, lambda: None)
    assert len(current_files(store._absolute(""), store._fs).paths) == 2
    assert publisher.attempts() == [shown]
    (told,) = [event for event in logged if event["event"] == "recovery.quarantined"]
    assert told["count"] == 1
    assert sorted(path for path, _ in store.files(QUARANTINE)) == [
        f"{QUARANTINE}/{starting.peek().ledger_id}-0/outputs/failed/0001-{stranger}/part-{part}.parquet"
        for part in range(2)
    ]
    starting.close()


async def test_what_counts_and_is_not_visible_stays(tmp_path: Path) -> None:
    store = OutputStore("mock://bucket/out")
    leaving, starting = opened(tmp_path, "leaving"), opened(tmp_path, "starting")
    segment = Segment("_mldserver/segments/w/s", "w", 1, 1, 0, 1000)
    leaving.register(Flush((), (segment,)), now_ms=1)
    leaving.cut(("w",))
    leaving.begin_attempts(("w",))
    staging = attempt_path(Publisher(store).root, "w", 1, writer_tag(leaving.peek().ledger_id, "leaving"))
    store.write(f"{staging}/part-0.parquet", pa.table({"v": [1]}))

    def commit_and_leave() -> None:
        leaving.commit((Commit("w", 1, staging, ("part-0.parquet",), 1),))
        leaving.leave()

    await start(starting, store, commit_and_leave)
    assert store.exists(f"{staging}/part-0.parquet")
    leaving.close()
    starting.close()
