"""Locks that show which servers live."""

from __future__ import annotations

import errno
import fcntl
import subprocess
import sys
from pathlib import Path

import pytest
from coordinator.pipeline import let_die

from mldserver.coordinator.membership import ServerLocks
from mldserver.errors import OperatorError

pytestmark = pytest.mark.quick

CHILD = """
import sys
from pathlib import Path
from mldserver.coordinator.membership import ServerLocks
ServerLocks(Path(sys.argv[1])).hold("child")
print("held", flush=True)
sys.stdin.read()
"""


def test_a_server_is_dead_once_its_lock_is_free(tmp_path: Path) -> None:
    own, other = ServerLocks(tmp_path), ServerLocks(tmp_path)
    own.hold("one")
    assert not other.is_dead("one")
    let_die(own)
    assert other.is_dead("one")
    let_die(own)


def test_of_a_server_without_a_file_nothing_can_be_told(tmp_path: Path) -> None:
    own, other = ServerLocks(tmp_path / "servers"), ServerLocks(tmp_path / "servers")
    assert not other.is_dead("elsewhere")
    own.hold("one")
    own.release()
    own.release()
    assert not other.is_dead("one"), "it has left"
    assert list((tmp_path / "servers").iterdir()) == []


def test_the_file_of_a_dead_server_can_be_taken_away_again_and_again(tmp_path: Path) -> None:
    own, other = ServerLocks(tmp_path), ServerLocks(tmp_path)
    own.hold("one")
    let_die(own)
    other.forget("one")
    other.forget("one")
    assert list(tmp_path.iterdir()) == []


def test_two_servers_cannot_have_one_name(tmp_path: Path) -> None:
    own, other = ServerLocks(tmp_path), ServerLocks(tmp_path)
    own.hold("one")
    with pytest.raises(OperatorError, match="Another server runs under the name one"):
        other.hold("one")
    own.release()
    other.hold("one")
    other.release()


def test_a_lock_dies_with_its_process_however_that_ends(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        locks = ServerLocks(tmp_path)
        assert not locks.is_dead("child")
        child.kill()
        child.wait()
        assert locks.is_dead("child")


def test_where_no_locks_are_known_nobody_is_taken_for_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    own = ServerLocks(tmp_path)
    own.hold("one")
    assert not ServerLocks(tmp_path).is_dead("one")
    own.release()
