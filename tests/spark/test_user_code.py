"""What is shipped to executors, and what is said of their Python. No Spark runs here."""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest

from mldserver.config.locations import python_files
from mldserver.handler.loader import entries_of
from mldserver.spark import user_code
from mldserver.spark.driver_messages import LoadFunction, StartSession
from mldserver.spark.session import DriverSession, environment
from mldserver.spark.user_code import (
    pack,
    sources,
)


def module(name: str, file: Path | str | None) -> ModuleType:
    made = ModuleType(name)
    made.__file__ = None if file is None else str(file)
    return made


@pytest.fixture
def loaded(tmp_path: Path) -> dict[str, ModuleType]:
    """What is imported by the name of its module: the user's folder, and what is not in it."""
    files = {
        "flow": None,  # a package without an __init__
        "flow.departures": "mine/flow/departures.py",
        "flow.udfs": "mine/flow/udfs/__init__.py",
        "flow.udfs.late": "mine/flow/udfs/late.py",
        "flow.quick": "mine/flow/quick.so",
        "shared": "mine/shared.py",
        "gone": "mine/gone.py",
        "elsewhere": "yours/elsewhere.py",
    }
    for file in filter(None, files.values()):
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"NAME = {path.name!r}\n")
    (tmp_path / "mine/gone.py").unlink()
    mine = {name: module(name, file and tmp_path / file) for name, file in files.items()}
    return {**mine, "os": os, "pytest": pytest, "sys": sys}


def test_the_handlers_package_and_what_it_imports_of_its_folder_are_shipped(
    loaded: dict[str, ModuleType], tmp_path: Path
) -> None:
    files = sources("flow.departures:Flights", [str(tmp_path / "mine")], loaded, {})
    assert set(files) == {
        "flow/departures.py",
        "flow/udfs/__init__.py",
        "flow/udfs/late.py",
        "shared.py",
    }


def test_what_the_server_has_sent_is_shipped_and_not_what_lies_on_the_disk(
    loaded: dict[str, ModuleType], tmp_path: Path
) -> None:
    code = {
        name: (str(tmp_path / "mine" / file), b"KEPT = True")
        for name, file in {"shared": "shared.py", "gone": "gone.py", "flow.later": "flow/later.py"}.items()
    }
    files = sources("flow.departures:Flights", [str(tmp_path / "mine")], loaded, code)
    assert [files[name] for name in ("shared.py", "gone.py", "flow/later.py")] == [b"KEPT = True"] * 3
    assert files["flow/departures.py"] == b"NAME = 'departures.py'\n"


def test_an_installed_handlers_own_package_is_shipped(loaded: dict[str, ModuleType], tmp_path: Path) -> None:
    assert set(sources("elsewhere", [str(tmp_path / "mine/flow")], loaded, {})) == {
        "elsewhere.py",
        "flow/departures.py",
        "flow/udfs/__init__.py",
        "flow/udfs/late.py",
    }


def test_the_archive_is_named_after_its_content_and_can_be_imported_from(
    loaded: dict[str, ModuleType], tmp_path: Path
) -> None:
    files = sources("flow.departures", [str(tmp_path / "mine")], loaded, {})
    archive = pack(files, tmp_path)
    again = pack(dict(reversed(files.items())), tmp_path)
    changed = pack({**files, "shared.py": b"NAME = 'another'"}, tmp_path)
    assert archive == again != changed
    program = "import flow.departures, flow.udfs.late, shared; print(flow.udfs.late.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", program], env={"PYTHONPATH": str(archive)}, capture_output=True, check=True
    )
    assert done.stdout.decode().strip() == str(archive / "flow/udfs/late.py")


class OnACluster:
    """A session on other machines that notes what is shipped by its way."""

    def __init__(self, *, connect: bool = False) -> None:
        self.connect = connect
        self.shipped: list[Any] = []
        self.spark = self.sparkContext = self
        self.addPyFile = self.shipped.append
        self.addArtifacts = lambda path, pyfile: self.shipped.append((path, pyfile))

    def equip(self, start: StartSession) -> None:
        user_code.UserCode(start).ship(cast("DriverSession", self), LoadFunction(handler="nowhere"))


def test_files_go_by_the_way_of_their_kind_of_session(tmp_path: Path) -> None:
    start = StartSession("spark://m", str(tmp_path), py_files=("/a.zip",))
    classic, remote = OnACluster(), OnACluster(connect=True)
    classic.equip(start)
    remote.equip(start)
    (archive,) = map(str, tmp_path.iterdir())
    assert classic.shipped == ["/a.zip", archive]
    assert remote.shipped == [("/a.zip", True), (archive, True)]


def test_a_local_master_is_shipped_nothing() -> None:
    code = user_code.UserCode(StartSession("local[2]", "/scratch", py_files=("/a.py",)))
    code.ship(cast("DriverSession", SimpleNamespace()), LoadFunction(handler="flow"))


def test_the_executors_interpreter_is_in_the_drivers_environment() -> None:
    def python(start: StartSession) -> str | None:
        return environment(start, {"PYSPARK_PYTHON": "inherited"}, java_home=None).get("PYSPARK_PYTHON")

    conf = {"spark.pyspark.python": "configured"}
    assert python(StartSession("spark://m", "/s")) == "inherited"
    assert python(StartSession("spark://m", "/s", conf=conf)) == "configured"
    assert python(StartSession("local[1]", "/s", conf=conf, python="set")) == "set"


def test_python_files_can_be_imported_in_the_driver_too() -> None:
    files = ("/a/one.py", "/a/two.py", "/b/three.zip")
    assert entries_of(files) == ("/a", "/b/three.zip")
    ours = environment(StartSession("local[1]", "/s", py_files=files), {"PYTHONPATH": "/old"}, java_home=None)
    assert ours["PYTHONPATH"] == "/old:/a:/b/three.zip"


def test_python_files_are_a_list_of_files_that_are_there(tmp_path: Path) -> None:
    for name in ("a.py", "b.zip", "c.txt"):
        (tmp_path / name).touch()
    a, b = tmp_path / "a.py", tmp_path / "b.zip"
    assert python_files.parse(f"{a}, {b}") == python_files.parse([str(a), b]) == (a, b)
    assert (python_files.show((a, b)), python_files.show(())) == (f"{a}, {b}", "")
    for raw, wrong in (
        (f"{tmp_path}/c.txt", "is neither a .py nor a .zip nor an .egg file"),
        (f"{tmp_path}/d.py", "there is no file"),
        (7, "it is not a list of files"),
    ):
        with pytest.raises(ValueError, match=wrong):
            python_files.parse(raw)


def test_functions_bring_the_guard_that_lets_modules_be_imported() -> None:
    """It is there before what travels with it is unpickled, once."""
    travelling = pickle.dumps(user_code._Guarded((), ("a", importlib.import_module)))
    program = (
        "import pickle, sys\n"
        f"for _ in range(2): code = pickle.loads({travelling!r})\n"
        "print(code[0], [type(finder).__name__ for finder in sys.meta_path].count('ImportGuard'))\n"
        "from pyspark.sql.functions import col\n"
        "from pyspark.sql import SparkSession\n"
        "print(col('a') > 1)\n"
        "try: SparkSession.builder.getOrCreate()\n"
        "except Exception as error: print(type(error).__name__)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    first, _, last = done.stdout.splitlines()
    assert (first, last) == ("a 1", "SessionAtImport")


def test_on_a_local_master_functions_bring_the_modules_that_the_server_has_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark starts Python workers whenever it likes: they run what the driver runs, whatever lies on the disk by then."""
    (tmp_path / "kept_by_test.py").write_text("def name(): return 'on the disk'")
    code = {"kept_by_test": (str(tmp_path / "kept_by_test.py"), b"def name(): return 'as sent'")}
    rdd = importlib.import_module("pyspark.core.rdd")
    monkeypatch.setattr(rdd, "CloudPickleSerializer", rdd.CloudPickleSerializer)
    kept = user_code.UserCode(StartSession("local[1]", str(tmp_path)))
    kept.guard_executors()
    finders = list(sys.meta_path)
    kept.keep(LoadFunction("f", "kept_by_test", code=code))
    monkeypatch.setattr(sys, "meta_path", finders)
    monkeypatch.syspath_prepend(tmp_path)
    travelling = rdd.CloudPickleSerializer().dumps(importlib.import_module("kept_by_test").name)
    program = f"import pickle; print(pickle.loads({travelling!r})())"
    environment = {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "as sent"
