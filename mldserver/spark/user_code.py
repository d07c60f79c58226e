"""The user's code on executors: what is shipped to them, and whether their Python is the driver's. Runs in the driver.

Executors on other machines do not see the handler's folder, and a function of an importable module travels by its name.
So the handler's module goes to them, with the modules of its folders that it imports, as one archive that is named after its
content; what ``spark_py_files`` names goes as it is. On a local master they have the driver's path, and import the modules that
the server has sent from a file beside Spark's temporary files: what lies on that path may be another version by then.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import operator
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from zipfile import ZipFile

from mldserver.errors import OperatorError
from mldserver.handler import kept_modules, spark_at_import
from mldserver.handler.loader import is_library
from mldserver.spark.driver_messages import StartSession
from mldserver.spark.session import DriverSession, is_connect, is_local

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_DIGITS: Final = 12
"""Of the hash: enough to distinguish a handler's versions."""

_MOST_TASKS: Final = 64
"""Of the job that checks executors' Python: Spark Connect does not report the number of cores."""

_PYTHON_FUNCTIONS: Final = re.compile(
    rb"\b(\w*ud(t?f|af)|\w+In(Pandas|Arrow)\w*|rdd|foreach|foreachPartition|dataSource)\b|pyspark\.pandas"
)
"""What of Spark runs the user's Python on executors."""


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
        place, kept = code.get(name, (getattr(modules.get(name), "__file__", None) or "", None))
        file = Path(place)
        users = any(map(file.resolve().is_relative_to, roots)) and not is_library(place)
        there = kept is not None or file.is_file()
        if (users or name.partition(".")[0] == package) and file.suffix == ".py" and there:
            inside = name.replace(".", "/") + ("/__init__" if file.name == "__init__.py" else "")
            found[f"{inside}.py"] = file.read_bytes() if kept is None else kept
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
if not any(type(finder).__name__ == "ImportGuard" for finder in sys.meta_path):
    if kept:
        exec(open(kept, encoding="utf-8").read())
    exec(source)
    ImportGuard().begin()
"""
"""A Python worker runs many tasks; only the first has to compile the guard, and the finder of the user's modules."""

_AT_IMPORT: Final = Path(spark_at_import.__file__).read_text("utf-8")
_KEPT: Final = Path(kept_modules.__file__).read_text("utf-8")


@dataclass(frozen=True, slots=True)
class _GuardCode:
    """Pickled, it is the code that guards imports where it is unpickled."""

    kept: str

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (_GUARD, {"source": _AT_IMPORT, "kept": self.kept, "__name__": "mldserver_guard"})


@dataclass(frozen=True, slots=True)
class _Guarded:
    """Pickled, it is ``code``, with the guard ahead of it: a tuple is unpickled in its order."""

    kept: str
    code: object

    def __reduce__(self) -> tuple[Any, ...]:
        return operator.getitem, ((_GuardCode(self.kept), self.code), 1)


def guard_executors(start: StartSession) -> None:
    """Pickle functions with the guard that makes the modules they name importable without a session.

    On a local master these modules are those that the server has sent.
    """
    from pyspark.serializers import CloudPickleSerializer  # noqa: PLC0415  # the server imports this module

    kept = ""
    if is_local(start.master) and start.code:
        file = Path(start.scratch) / "handler.py"
        file.write_text(f"{_KEPT}\nKeptModules({start.code!r}).begin()\n", "utf-8")
        kept = str(file)

    class Guarding(CloudPickleSerializer):
        def dumps(self, obj: object) -> bytes:
            text: bytes = super().dumps(_Guarded(kept, obj))  # type: ignore[no-untyped-call]  # pyspark's own
            return text

    # Where functions are pickled, and nothing else.
    connect = is_connect(start.master)
    names = ("sql.connect.expressions", "sql.connect.plan") if connect else ("core.rdd",)
    for name in names:
        setattr(import_module(f"pyspark.{name}"), "CloudPickleSerializer", Guarding)  # noqa: B010  # it is no attribute to mypy


class Interpreter(NamedTuple):
    """A Python as it is found in the driver, or by a task."""

    host: str
    python: str
    versions: dict[str, str]
    """Of pandas and pyarrow; empty where there is none."""
    error: str = ""
    """Why the handler's module cannot be imported there."""


def find_interpreters(spark: SparkSession, handler: str, tasks: int) -> tuple[Interpreter, list[Interpreter]]:
    """Return the driver's interpreter, and those of executors by a job of ``tasks`` tasks. Raises what Spark raises."""
    from pyspark.sql import functions as F  # noqa: N812, PLC0415  # the server imports this module
    from pyspark.sql.types import StringType  # noqa: PLC0415  # see above

    module = handler.partition(":")[0]

    def task(_: int) -> str:
        # A function inside another travels whole: nothing of ours is on an executor.
        versions, error = {"pandas": "", "pyarrow": ""}, ""
        for name in versions:
            with contextlib.suppress(metadata.PackageNotFoundError):
                versions[name] = metadata.version(name)
        try:
            import_module(module)
        except BaseException as raised:  # noqa: BLE001  # the user's module may raise anything
            error = f"{type(raised).__name__}: {raised}"
        return json.dumps([platform.node(), platform.python_version(), versions, error])

    tasks = min(tasks, _MOST_TASKS)
    column = F.udf(task, StringType(), useArrow=False)("id")
    rows = spark.range(0, tasks, 1, tasks).select(column).collect()
    driver, *executors = (Interpreter(*json.loads(told)) for told in (task(0), *(row[0] for row in rows)))
    return driver, executors


def check(session: DriverSession, handler: str, tasks: int) -> list[str]:
    """Return what differs between the driver's Python and executors', one sentence each, with what to do.

    Raises OperatorError where executors cannot run the driver's functions at all: no Python, or of another minor version.
    """
    try:
        driver, executors = find_interpreters(session.spark, handler, tasks)
    except Exception as error:
        ours = ".".join(map(str, sys.version_info[:2]))
        if other := re.search(r"different version: (\S+) than", str(error)):
            what = f"Python {other[1]} runs on the executors, {ours} in the driver"
        elif missing := re.search(r'Cannot run program "([^"]*)"', str(error)):
            what = f"The executors cannot run {missing[1]}"
        else:
            raise
        raise OperatorError(
            f"{what}: Spark could run none of the handler's functions there. Set spark_python (on Spark Connect: "
            f"PYSPARK_PYTHON in its server's environment) to an interpreter of Python {ours} that is there."
        ) from error
    told = {}
    for one in executors:
        for name, version in driver.versions.items():
            its = one.versions[name]
            if version and its.split(".")[:2] != version.split(".")[:2]:
                held = f"{name} {its}" if its else f"no {name}"
                told[name] = (
                    f"The executors' Python (on {one.host}) has {held}, the driver's {name} {version}. Functions on "
                    "pandas or Arrow may fail there or compute otherwise: install the same version, or set spark_python."
                )
        if one.error:
            told["import"] = (
                f"The handler's module {handler.partition(':')[0]} cannot be imported on executors (on {one.host}): "
                f"{one.error}. Functions that need it fail there: install what it imports, or name it in spark_py_files."
            )
    return list(told.values())


def equip(session: DriverSession, start: StartSession) -> list[str]:
    """Bring the handler's code to the executors of this session; return what to warn of there. Raises as ``check``.

    On a local master there is nothing to bring: its Python workers have the driver's path and interpreter.
    """
    if is_local(start.master):
        return []
    files = sources(start.handler, start.python_path, sys.modules, start.code)
    for path in (*start.py_files, str(pack(files, Path(start.scratch)))):
        if session.connect:
            session.spark.addArtifacts(path, pyfile=True)
        else:
            session.spark.sparkContext.addPyFile(path)
    # An executor may lack Python as long as none runs there.
    if start.python is not None or start.py_files or any(map(_PYTHON_FUNCTIONS.search, files.values())):
        return check(session, start.handler, session.slots())
    return []
