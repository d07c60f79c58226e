"""The user's modules as they were loaded, and as another process imports them later."""

from __future__ import annotations

import importlib
import itertools
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mldserver.handler.inspection import load_spec
from mldserver.handler.kept_modules import KeptModules
from mldserver.handler.loader import load

pytestmark = pytest.mark.quick

_NUMBERS = itertools.count()

HANDLER = """
import os
import json as text
from . import beside
from .beside import helper, absent
from .beside import *
from {name}.deep.down import thing

schema = "a INT"

def process_record(record):
    return {{"a": 1}}

def on_window(rows, window):
    import msgspec, nowhere.at_all
    from .later import compute
    from ....... import beyond
    import ready_{name}
    import space_{name}.inner.deepest
    import ready_{name}.nothing
    return compute(rows)
"""


@pytest.fixture
def name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package's name that no other test has; its modules are forgotten."""
    name = f"kept{next(_NUMBERS)}"
    (tmp_path / name).mkdir()
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    yield name
    for module in set(sys.modules) - before:
        if name in module:
            del sys.modules[module]


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str], Path]:
    def write(file: str, text: str) -> Path:
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write


def test_what_a_handler_imports_now_or_later_is_its_code_and_nothing_installed(
    name: str, write: Callable[[str, str], Path], tmp_path: Path
) -> None:
    write(f"{name}/main.py", HANDLER.format(name=name))
    write(
        f"{name}/beside.py",
        "helper = 1\nabsent = 2\nimport importlib as i\ni.import_module('by_" + name + "')",
    )
    write(f"by_{name}.py", "")
    write(f"{name}/deep/__init__.py", "from .down import thing")
    write(f"{name}/deep/down.py", "thing = 3")
    write(f"{name}/later.py", "from .broken import compute")
    write(f"{name}/broken.py", "def compute(:")
    write(f"ready_{name}.py", "")
    write(f"never_{name}.py", "")
    write(f"space_{name}/inner/deepest.py", "")
    spec = load_spec(f"{name}.main", directory=tmp_path)
    own = {f"{name}.{module}" for module in ("main", "beside", "deep", "deep.down", "later", "broken")}
    assert set(spec.code) == {*own, f"by_{name}", f"ready_{name}", f"space_{name}.inner.deepest"}
    assert spec.code[f"{name}.deep"] == (
        str(tmp_path / name / "deep/__init__.py"),
        b"from .down import thing",
    )
    assert f"{name}.broken" not in sys.modules


def test_a_module_that_exists_compiled_only_is_not_kept(
    name: str, write: Callable[[str, str], Path], tmp_path: Path
) -> None:
    loaded = load(f"{name}", directory=write(f"{name}/__init__.py", "").parents[1])
    Path(str(loaded.module.__file__)).unlink()
    assert loaded.code() == {}
    loaded.module.__file__ = None
    assert loaded.code() == {}


def test_kept_modules_are_imported_whatever_lies_on_the_disk(
    name: str, write: Callable[[str, str], Path], tmp_path: Path
) -> None:
    write(f"{name}/__init__.py", "")
    write(
        f"{name}/main.py",
        "from . import other, gone, new\nfrom pathlib import Path\nHERE = Path(__file__).parent",
    )
    write(f"{name}/other.py", "def value():\n    raise ValueError('as it was')")
    write(f"{name}/gone.py", "")
    write(f"{name}/new.py", "")
    code = load(f"{name}.main", directory=tmp_path).code()
    for module in [module for module in sys.modules if name in module]:
        del sys.modules[module]
    del code[f"{name}.new"]
    write(f"{name}/other.py", "something = 'else'\nthat = 'is longer'")
    write(f"{name}/gone.py", "").unlink()
    importlib.invalidate_caches()
    kept = KeptModules(code)
    kept.begin()
    try:
        main = load(f"{name}.main", directory=tmp_path).module
    finally:
        kept.end()
    assert tmp_path / name == main.HERE
    with pytest.raises(ValueError, match="as it was") as caught:
        main.other.value()
    assert "raise ValueError('as it was')" in traceback.format_exception(caught.value)[-2]
    assert main.other.__loader__.get_data(str(tmp_path / name / "other.py")).startswith(b"def value")
    assert main.other.__loader__.get_data(str(tmp_path / name / "new.py")) == b""
    assert Path(main.new.__file__).is_file()
    assert kept not in sys.meta_path
