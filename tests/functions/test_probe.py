"""Code that is staged is loaded in a process of its own, from a folder, an archive or a package, and from nowhere else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mldserver.config.settings import Settings
from mldserver.errors import HandlerError, OperatorError
from mldserver.functions.package import Package
from mldserver.functions.probe import load_from, probe
from mldserver.versions.archive import archive
from mldserver.versions.code import pack, unpack

HANDLER = """
import lib
schema = "value BIGINT"
version = "{version}"
state_ttl = "1 day"

def process_record(record, ctx):
    return lib.value
"""
SETTINGS = Settings(handler="mine", pipeline="mine")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's working directory has another version of the handler."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    Path("mine.py").write_text(HANDLER.format(version="here"))
    Path("lib.py").write_text("value = 1")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "new"
    folder.mkdir()
    (folder / "mine.py").write_text(HANDLER.format(version="new"))
    (folder / "lib.py").write_text("value = 2")
    return folder


async def test_a_folder_comes_before_all_that_the_server_has_on_its_path(folder: Path) -> None:
    spec = await load_from(SETTINGS, folder)
    assert (spec.version, spec.state_ttl_ms) == ("new", 86_400_000)
    assert {name: text for name, (_, text) in spec.code.items()} == {
        "mine": (folder / "mine.py").read_bytes(),
        "lib": b"value = 2",
    }
    packed = pack(spec.code)
    again = await probe(SETTINGS, unpack(packed, "/code.zip"))
    assert (again.version, pack(again.code)) == ("new", packed)


async def test_an_archive_and_a_package_give_the_modules_that_are_in_them(
    folder: Path, tmp_path: Path
) -> None:
    files = {name: (folder / name).read_bytes() for name in ("mine.py", "lib.py")}
    (tmp_path / "code.zip").write_bytes(archive(files))
    (tmp_path / "mine.mldfn").write_bytes(Package("mine", "mine", "new", "", "none", {}, files).packed())
    for name in ("code.zip", "mine.mldfn"):
        spec = await load_from(SETTINGS, tmp_path / name)
        assert spec.version == "new"
        assert sorted(spec.code) == ["lib", "mine"]


async def test_a_handler_that_comes_from_elsewhere_is_refused_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    place = re.escape(
        f"{tmp_path / 'empty'} does not have the module mine: it comes from {tmp_path / 'here' / 'mine.py'}."
    )
    with pytest.raises(OperatorError, match=place):
        await load_from(SETTINGS, tmp_path / "empty")
    (tmp_path / "other.zip").write_bytes(archive({"other.py": b""}))
    with pytest.raises(OperatorError, match=r"other\.zip does not have the module mine\. Name the folder"):
        await load_from(SETTINGS, tmp_path / "other.zip")
    with pytest.raises(OperatorError, match=r"nowhere cannot be read: No such file"):
        await load_from(SETTINGS, tmp_path / "nowhere")


async def test_code_that_does_not_load_is_refused_with_its_line(folder: Path) -> None:
    (folder / "mine.py").write_text("schema = (")
    with pytest.raises(HandlerError, match=r"mine\.py:1: SyntaxError"):
        await load_from(SETTINGS, folder)
