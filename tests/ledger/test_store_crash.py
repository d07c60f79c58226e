"""kill -9 at any instant: after it, each transaction has happened wholly or not at all."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mldserver.ledger.contract import LedgerState
from tests.ledger.samples import play
from tests.support.store import SqliteStore

CHILD = Path(__file__).with_name("crash_child.py")
ROOT = CHILD.parents[2]


@contextmanager
def child(path: Path, kill_at: int) -> Iterator[subprocess.Popen[bytes]]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(CHILD), str(path), str(kill_at)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


def state_of(path: Path) -> LedgerState:
    store = SqliteStore(path, pipeline="p", server_id="tool")
    try:
        return store.peek()
    finally:
        store.close()


def expected(steps: int) -> LedgerState:
    """What a store holds after so many steps that nothing disturbed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.sqlite"
        store = SqliteStore(path, pipeline="p", server_id="one")
        store.open(now_ms=0)
        endless = (None for number in itertools.count() for _ in play(store, number))
        assert len(list(itertools.islice(endless, steps))) == steps
        store.close()
        return state_of(path)


def statements_by_step(path: Path) -> list[list[int]]:
    """The numbers of the statements of each step, found by playing the scenario once."""
    store = SqliteStore(path, pipeline="p", server_id="one")
    store.open(now_ms=0)
    assert store._db is not None
    numbers = itertools.count(1)
    store._db.set_trace_callback(lambda _: steps[-1].append(next(numbers)))
    steps: list[list[int]] = [[]]
    steps.extend([] for _ in play(store))
    store.close()
    return steps[:-1]


def test_a_transaction_that_is_killed_before_its_commit_has_not_happened(tmp_path: Path, long: bool) -> None:
    steps = statements_by_step(tmp_path / "counted.sqlite")
    assert len(steps) == 14
    flush, second_cut, expiry = steps[1], steps[7], steps[11]
    # In the long transactions the middle and the last instant (COMMIT begins); in the others, by day in some, the last.
    points = {
        (1, flush[len(flush) // 2]),
        (7, second_cut[len(second_cut) // 2]),
        (11, expiry[-2]),
    } | {(n, step[-1]) for n, step in enumerate(steps) if long or n % 3 == 1}
    for done, kill_at in sorted(points):
        path = tmp_path / f"killed-{kill_at}.sqlite"
        with child(path, kill_at) as process:
            told, _ = process.communicate()
        assert process.returncode == -signal.SIGKILL
        assert len(told) == done
        assert state_of(path) == expected(done), f"killed at statement {kill_at}"


@pytest.mark.parametrize("steps", [20, 67])
def test_a_kill_from_outside_leaves_whole_transactions(tmp_path: Path, steps: int) -> None:
    path = tmp_path / "killed.sqlite"
    with child(path, 0) as process:
        assert process.stdout is not None
        told = process.stdout.read(steps)
        process.send_signal(signal.SIGKILL)
        told += process.stdout.read()
    # The step after the last one that was told may have been committed when the signal came.
    assert state_of(path) in (expected(len(told)), expected(len(told) + 1))
