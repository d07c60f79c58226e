"""Versions of a function's code as archives: equal code gives equal bytes, and a worker runs what was packed."""

from __future__ import annotations

import io
import random
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from mldserver.errors import OperatorError
from mldserver.output.store import OutputStore
from mldserver.versions import archive as archives
from mldserver.versions.archive import archive, unarchived
from mldserver.versions.code import Code, code_path, pack, read_code, store_code, unpack

pytestmark = pytest.mark.quick

CODE: Code = {
    "handlers.departures": ("/srv/app/handlers/departures.py", b"from handlers.lib import delay\n"),
    "handlers.lib": ("/srv/app/handlers/lib/__init__.py", b"delay = 1\n"),
    "beside": ("/srv/app/beside.py", b"x = 'caf\xc3\xa9'\n"),
}


@pytest.fixture
def store(tmp_path: Path) -> OutputStore:
    return OutputStore(str(tmp_path / "out"))


def test_equal_modules_give_equal_bytes_in_any_order_and_from_any_folder() -> None:
    names = list(CODE)
    random.Random(1).shuffle(names)
    moved: Code = {name: (CODE[name][0].replace("/srv/app", "/home/other"), CODE[name][1]) for name in names}
    assert pack(moved) == pack(CODE)
    assert pack(CODE | {"beside": (CODE["beside"][0], b"x = 2\n")}) != pack(CODE)


def test_an_archive_holds_modules_by_their_paths_and_packages_without_a_file_get_one() -> None:
    with zipfile.ZipFile(io.BytesIO(pack(CODE))) as found:
        assert found.namelist() == [
            "beside.py",
            "handlers/__init__.py",
            "handlers/departures.py",
            "handlers/lib/__init__.py",
        ]
        assert {entry.date_time for entry in found.infolist()} == {(1980, 1, 1, 0, 0, 0)}
        assert {entry.compress_type for entry in found.infolist()} == {zipfile.ZIP_STORED}


def test_what_was_packed_is_unpacked_and_packed_again_to_the_same_bytes() -> None:
    data = pack(CODE)
    code = unpack(data, "/out/_mldserver/code/abc.zip")
    assert code["handlers.departures"] == (
        "/out/_mldserver/code/abc.zip/handlers/departures.py",
        CODE["handlers.departures"][1],
    )
    assert {name: text for name, (_, text) in code.items() if name != "handlers"} == {
        name: text for name, (_, text) in CODE.items()
    }
    assert pack(code) == data


def test_what_is_not_a_module_is_left_out_of_an_archive_from_elsewhere() -> None:
    files = {
        "mine.py": b"a",
        "mine-1.0.dist-info/METADATA": b"b",
        "not-a-module.py": b"c",
        "../outside.py": b"d",
        "__init__.py": b"e",
    }
    assert unpack(archive(files), "/x.zip") == {"mine": ("/x.zip/mine.py", b"a")}


@pytest.mark.parametrize(
    "data", [b"", b"no archive", pack(CODE)[:-30], pack(CODE).replace(b"delay = 1", b"delay = 2")]
)
def test_what_is_no_archive_or_is_damaged_is_refused_by_name(data: bytes) -> None:
    with pytest.raises(OperatorError, match=r"The package is not a zip archive that can be read"):
        unarchived(data, "The package")


def test_an_archive_that_is_too_large_is_refused_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "LIMIT_BYTES", 10)
    with pytest.raises(OperatorError, match=r"The package holds 11 bytes; 10 are allowed\. Leave data files"):
        unarchived(archive({"a.py": b"12345", "b.py": b"123456"}), "The package")


def test_code_is_stored_under_its_hash_and_read_again(store: OutputStore) -> None:
    data = pack(CODE)
    path = store_code(store, data)
    assert path == code_path(data)
    assert path.startswith("_mldserver/code/")
    assert store_code(store, data) == path, "the same again"
    assert read_code(store, path) == unpack(data, store.uri(path))
    assert read_code(store, "") == {}


def test_code_that_is_gone_or_damaged_is_named_with_the_next_step(store: OutputStore) -> None:
    path = store_code(store, pack(CODE))
    store.put(path, pack({}))
    with pytest.raises(OperatorError, match=r"code/\w+\.zip is damaged.*mldserver functions stage"):
        read_code(store, path)
    store.delete(path)
    with pytest.raises(OperatorError, match=r"code/\w+\.zip cannot be read.*functions rollback"):
        read_code(store, path)


IMPORTS = """
import sys
sys.path.insert(0, sys.argv[2])
from mldserver.versions.code import read_code
from mldserver.handler.kept_modules import KeptModules
from mldserver.output.store import OutputStore
KeptModules(read_code(OutputStore(sys.argv[1]), sys.argv[3])).begin()
import spread.mine, spread.other
print(spread.mine.a + spread.other.b, spread.mine.__file__)
"""


def test_another_process_imports_a_package_of_which_a_part_lies_on_its_path(
    store: OutputStore, tmp_path: Path
) -> None:
    (tmp_path / "path" / "spread").mkdir(parents=True)
    (tmp_path / "path" / "spread" / "other.py").write_text("b = 2")
    path = store_code(store, pack({"spread.mine": ("/elsewhere/spread/mine.py", b"a = 1")}))
    arguments = [sys.executable, "-c", IMPORTS, store.uri(), str(tmp_path / "path"), path]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)  # our own
    assert done.stdout.split() == ["3", store.uri(f"{path}/spread/mine.py")], done.stderr
