"""A server in a process of its own that works on a ledger together with others, as fast as it can.

``hammer_child.py PATH SERVER ROUNDS``: moves its own shard and one that all fight for, fills windows that all fill,
cuts, computes and publishes what it gets, and prints what was registered: one JSON line a flush.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from mldserver.ledger import sqlite_file
from mldserver.ledger.contract import Commit, Flush, PositionUpdate, Segment, SegmentKind, ServerState
from mldserver.records import Sequence
from tests.support.store import SqliteStore


def main() -> None:
    path, server, rounds = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    sqlite_file.BUSY_TIMEOUT_MS = 30_000  # type: ignore[misc]  # the machine may be busy, too
    store = SqliteStore(path, pipeline="p", server_id=server)
    store.open(now_ms=0)
    for n in range(rounds):
        flush(store, f"own-{server}", f"{server}-{n}-own", n)
        flush(store, "fought-for", f"{server}-{n}-fought", n)
        publish(store, f"batch-{n // 5 - 1}")
        if n % 10 == 9:
            store.sync(ServerState(server, n))
            store.expire(published_before_ms=n // 2, keep_bytes=10**6)
            store.prune(windows_before_ms=n // 4, shards_before_ms=0)
    store.leave()
    store.close()


def flush(store: SqliteStore, shard_id: str, path: str, n: int) -> None:
    """Register one file under a fresh opening of a shard, into whatever takes it."""
    shard = store.open_shard(shard_id)
    number = shard.position.number + 1 if shard.position else 1
    update = PositionUpdate(shard_id, shard.epoch, Sequence(number), None, None, previous=shard.position)
    for kind in SegmentKind:
        segment = Segment(path, f"batch-{n // 5}", 1, 1, kind=kind)
        result = store.register(Flush((update,), (segment,), clock=n), now_ms=n)
        if result.registered:
            print(json.dumps([path, shard_id, number, kind]), flush=True)
        if result.registered or result.lost_shards:
            return


def publish(store: SqliteStore, window_id: str) -> None:
    for entry in store.cut((window_id,)):
        attempt = store.begin_attempts((entry.window_id,))[entry.window_id]
        assert store.commit((Commit(entry.window_id, attempt, "stage", ("f",), 1),)) == {entry.window_id}
        store.published({entry.window_id: attempt}, now_ms=int(window_id.removeprefix("batch-")) * 5)


main()
