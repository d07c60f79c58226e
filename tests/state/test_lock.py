"""The lock beside the ledger."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from mldserver.errors import OperatorError
from mldserver.state.lock import ProcessLock

if TYPE_CHECKING:
    from pathlib import Path

HOLD = """
import sys
from pathlib import Path
from mldserver.state.lock import ProcessLock
ProcessLock(Path(sys.argv[1])).acquire()
print(flush=True)
sys.stdin.read()
"""


def test_the_lock_is_held_once_until_it_is_released(tmp_path: Path) -> None:
    first, second = ProcessLock(tmp_path / "x.lock"), ProcessLock(tmp_path / "x.lock")
    first.acquire()
    with pytest.raises(OperatorError, match=f"process {os.getpid()}"):
        second.acquire()
    first.release()
    first.release()
    second.acquire()
    second.release()


def test_an_owner_that_has_not_written_its_id_is_unknown(tmp_path: Path) -> None:
    lock = ProcessLock(tmp_path / "x.lock")
    lock.acquire()
    (tmp_path / "x.lock").write_bytes(b"")
    with pytest.raises(OperatorError, match="process unknown"):
        ProcessLock(tmp_path / "x.lock").acquire()
    lock.release()


def test_the_lock_dies_with_its_process(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as owner:
        assert owner.stdout is not None
        owner.stdout.readline()
        with pytest.raises(OperatorError, match=f"process {owner.pid}") as caught:
            ProcessLock(path).acquire()
        assert caught.value.where["pid"] == str(owner.pid)
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    lock = ProcessLock(path)
    lock.acquire()
    assert path.read_text() == f"{os.getpid()}\n"
    lock.release()


def test_a_lock_file_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "x.lock").mkdir()
    lock = ProcessLock(tmp_path / "x.lock")
    with pytest.raises(OperatorError, match="cannot be written: Is a directory"):
        lock.acquire()
    lock.release()
