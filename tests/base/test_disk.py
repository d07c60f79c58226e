from __future__ import annotations

import ctypes
import errno
from pathlib import Path

import pytest

from mldserver.base.disk import exchange

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
