"""Several processes on one file at the same time: from its creation on, everything counts once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.support.store import SqliteStore

CHILD = Path(__file__).with_name("hammer_child.py")
ROUNDS = 60


@contextmanager
def child(path: Path, server: str, rounds: int) -> Iterator[subprocess.Popen[str]]:
    environment = os.environ | {"PYTHONPATH": str(CHILD.parents[2])}
    command = [sys.executable, str(CHILD), str(path), server, str(rounds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def lines(told: str) -> list[list[str]]:
    return [json.loads(line) for line in told.splitlines()]


@pytest.mark.parametrize("servers", [2, 3])
def test_servers_of_one_host_share_a_file(tmp_path: Path, servers: int) -> None:
    path = tmp_path / "ledger.sqlite"
    with ExitStack() as stack:
        children = [stack.enter_context(child(path, f"s{n}", ROUNDS)) for n in range(servers)]
        told = [line for process in children for line in lines(process.communicate()[0])]
    assert [process.returncode for process in children] == [0] * servers
    store = SqliteStore(path, pipeline="p", server_id="tool")
    state = store.peek()
    store.close()
    assert (state.servers, state.clock) == ({}, ROUNDS - 1)
    # Each registration moved its shard by one: none overlapped another, none was lost, none happened twice.
    assert Counter(shard_id for _, shard_id, _, _ in told) == {
        shard.shard_id: shard.position.number for shard in state.shards.values() if shard.position
    }
    moves = [(shard_id, number) for _, shard_id, number, _ in told]
    assert len(moves) == len(set(moves))
    kept = {
        each.path: each.kind for entry in state.windows.values() for each in (*entry.segments, *entry.pending)
    } | {each.path: each.kind for each in state.late_segments}
    registered = {path: kind for path, _, _, kind in told}
    assert kept.items() <= registered.items()
    # What is not there any more belonged to windows whose retention was over.
    assert {int(path.split("-")[1]) // 5 for path in registered.keys() - kept.keys()}.isdisjoint(
        int(window_id.removeprefix("batch-")) for window_id in state.windows
    )


def test_a_server_that_is_killed_leaves_the_file_to_the_others(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    with child(path, "victim", 10**6) as victim, child(path, "other", 200) as other:
        assert victim.stdout is not None
        for _ in range(25):
            victim.stdout.readline()
        victim.send_signal(signal.SIGKILL)
        told = other.communicate()[0]
    assert other.returncode == 0
    store = SqliteStore(path, pipeline="p", server_id="heir")
    assert set(store.open(now_ms=10**6).servers) == {"victim", "heir"}
    assert store.expire_servers({"victim": store.peek().servers["victim"].beat_ms}) == {"victim"}
    owners = {entry.owner for entry in (*store.adopt(), *store.peek().windows.values())}
    assert owners <= {None, "heir"}
    assert store.peek().shards["own-other"].position is not None
    assert len([line for line in lines(told) if line[1] == "own-other"]) == 200
    store.close()
