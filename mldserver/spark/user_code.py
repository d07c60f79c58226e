"""The user's code on executors: what is shipped to them. Runs in the driver.

Executors on other machines do not see the handler's folder, and a function of an importable module travels by its name.
So the handler's module goes to them, with the modules of its folders that it imports, as one archive that is named after its
content; what ``spark_py_files`` names goes as it is. On a local master they have the driver's path, and import the modules that
the server has sent from a file beside Spark's temporary files: what lies on that path may be another version by then.
"""

from __future__ import annotations

import hashlib
import operator
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any, Final
from zipfile import ZipFile

from mldserver.handler import kept_modules, spark_at_import
from mldserver.handler.kept_modules import KeptModules
from mldserver.handler.loader import is_library
from mldserver.spark.driver_messages import LoadFunction, StartSession
from mldserver.spark.session import DriverSession, is_connect, is_local

_DIGITS: Final = 12
"""Of the hash: enough to distinguish a handler's versions."""


def sources(
    handler: str, folders: Sequence[str], modules: Mapping[str, Any], code: Mapping[str, tuple[str, bytes]]
) -> dict[str, bytes]:
    """Return what is shipped, as paths in an archive and their text: modules of the handler's package and of the user's folders.

    ``modules``: what is imported. ``code``: what the server has sent, which comes before files. What is installed stays where it
    is, except the handler's own package.
    """
    package = handler.partition(":")[0].partition(".")[0]
    roots = [Path(folder).resolve() for folder in folders]
    found = {}
    for name in {**modules, **code}:
        path, text = code.get(name, (getattr(modules.get(name), "__file__", None) or "", None))
        file = Path(path)
        is_users = any(map(file.resolve().is_relative_to, roots)) and not is_library(path)
        is_wanted = text is not None or ((is_users or name.partition(".")[0] == package) and file.is_file())
        if is_wanted and file.suffix == ".py":
            path_in_archive = name.replace(".", "/") + ("/__init__" if file.name == "__init__.py" else "")
            found[f"{path_in_archive}.py"] = file.read_bytes() if text is None else text
    return found


def pack(files: Mapping[str, bytes], folder: Path) -> Path:
    """Write the files into an archive that is named after their content."""
    digest = hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()[:_DIGITS]
    path = folder / f"handler-{digest}.zip"
    with ZipFile(path, "w") as archive:
        # Packages without an __init__.py are found by their folder's entry.
        for parent in sorted(
            {str(parent) for name in files for parent in PurePosixPath(name).parents} - {"."}
        ):
            archive.mkdir(parent)
        for name, data in files.items():
            archive.writestr(name, data)
    return path


_GUARD: Final = """\
import sys
loaded = {finder.origin for finder in sys.meta_path if type(finder).__name__ == "KeptModules"}
for file in kept:
    if file not in loaded:
        exec(open(file, encoding="utf-8").read())
if not any(type(finder).__name__ == "ImportGuard" for finder in sys.meta_path):
    exec(source)
    ImportGuard().begin()
"""
"""A Python worker runs many tasks; only the first has to compile the guard, and the finders of the users' modules."""

_AT_IMPORT: Final = Path(spark_at_import.__file__).read_text("utf-8")
_KEPT: Final = Path(kept_modules.__file__).read_text("utf-8")


@dataclass(frozen=True, slots=True)
class _GuardCode:
    """Pickled, it is the code that guards imports where it is unpickled."""

    kept: tuple[str, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (_GUARD, {"source": _AT_IMPORT, "kept": self.kept, "__name__": "mldserver_guard"})


@dataclass(frozen=True, slots=True)
class _Guarded:
    """Pickled, it is ``code``, with the guard ahead of it: a tuple is unpickled in its order."""

    kept: tuple[str, ...]
    code: object

    def __reduce__(self) -> tuple[Any, ...]:
        return operator.getitem, ((_GuardCode(self.kept), self.code), 1)


@dataclass(slots=True)
class UserCode:
    """The code of the functions that are loaded into a session: how the driver and the executors find it."""

    start: StartSession
    _kept: dict[str, str] = field(default_factory=dict)
    """By function: the file from which Spark's Python workers on this machine import its modules."""
    _texts: dict[str, tuple[str, bytes]] = field(default_factory=dict)
    """File and text of all functions' modules. No two functions have different modules of one name."""

    def guard_executors(self) -> None:
        """Make pyspark pickle each user function together with code that prepares the executor's Python for its modules.

        That code makes modules importable that create Spark objects at import, without a session there. On a local
        master it also imports the users' modules from the texts that the server has sent, not from their files.
        """
        from pyspark.serializers import CloudPickleSerializer  # noqa: PLC0415  # the server imports this module

        functions = self

        class Guarding(CloudPickleSerializer):
            def dumps(self, obj: object) -> bytes:
                guarded = _Guarded(
                    tuple(functions._kept.values()), obj
                )  # the call's, not the definition's: functions are added
                text: bytes = super().dumps(guarded)  # type: ignore[no-untyped-call]  # pyspark's own
                return text

        # Replace the serializer only in the modules of pyspark that pickle functions.
        connect = is_connect(self.start.master)
        names = ("sql.connect.expressions", "sql.connect.plan") if connect else ("core.rdd",)
        for name in names:
            setattr(import_module(f"pyspark.{name}"), "CloudPickleSerializer", Guarding)  # noqa: B010  # it is no attribute to mypy

    def keep(self, load: LoadFunction) -> None:
        """Import a function's modules from the texts that the server has sent: in this process, and in local Python workers."""
        self._texts |= load.code
        KeptModules(load.code).begin()
        if is_local(self.start.master) and load.code:
            file = Path(self.start.scratch) / f"handler-{len(self._kept)}.py"
            text = f"{_KEPT}\nKeptModules({load.code!r}, origin={str(file)!r}).begin()\n"
            file.write_text(text, "utf-8")
            self._kept = {**self._kept, load.name: str(file)}

    def ship(self, session: DriverSession, load: LoadFunction) -> None:
        """Bring a handler's code to the executors of this session.

        On a local master there is nothing to bring: its Python workers have the driver's path and interpreter.
        """
        if is_local(self.start.master):
            return
        files = sources(load.handler, self.start.python_path, sys.modules, self._texts)
        for path in (*self.start.py_files, str(pack(files, Path(self.start.scratch)))):
            if session.connect:
                session.spark.addArtifacts(path, pyfile=True)
            else:
                session.spark.sparkContext.addPyFile(path)
