from __future__ import annotations

import ctypes
import errno
import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

from mldserver.base.disk import exchange, make_private_file

pytestmark = pytest.mark.quick


def test_two_folders_change_places(tmp_path: Path) -> None:
    one, other = tmp_path / "ön e", tmp_path / "other"
    for folder in (one, other):
        folder.mkdir()
        (folder / folder.name).touch()
    exchange(str(one), str(other))
    assert [path.name for path in one.iterdir()] == ["other"]
    assert [path.name for path in other.iterdir()] == ["ön e"]


def test_both_must_be_there(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    with pytest.raises(FileNotFoundError) as found:
        exchange(str(tmp_path / "one"), str(tmp_path / "other"))
    assert (found.value.filename, found.value.filename2) == (str(tmp_path / "one"), str(tmp_path / "other"))
    assert (tmp_path / "one").is_dir()


def test_a_system_without_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda *args, **named: object())
    with pytest.raises(OSError, match="not implemented") as found:
        exchange("one", "other")
    assert found.value.errno == errno.ENOSYS


def test_a_private_file_that_is_there_keeps_the_locks_that_this_process_has_on_it(tmp_path: Path) -> None:
    file = tmp_path / "ledger"
    make_private_file(file)
    assert file.stat().st_mode & 0o777 == 0o600
    with file.open("r+") as held:
        fcntl.lockf(held, fcntl.LOCK_EX)
        make_private_file(file)
        other = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
        tried = subprocess.run([sys.executable, "-c", other, str(file)], capture_output=True, check=False)
        assert b"BlockingIOError" in tried.stderr
