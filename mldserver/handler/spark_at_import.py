"""Spark while a user's module is imported: one session, the driver's, or none at all.

A module that makes another session is refused: it would start a JVM in each process that imports it, or change the
existing session. Without a session (in the server, its workers, ``mldserver check`` and Spark's own Python workers)
``@udf("int")``, ``F.col("delay") > 15`` and the like would fail at module level, though those processes never call
the results: a stand-in answers for Spark while the module is imported.

This file imports nothing of ours: its text goes ahead of what executors unpickle (``spark/user_code.py``).
"""

from __future__ import annotations

import importlib.machinery
import re
import sys
import threading
from typing import Any


class SessionAtImport(Exception):
    """A module makes a SparkSession while it is imported."""


def _useless(*_: object) -> Any:
    raise RuntimeError(
        "A function or column was made without a Spark session, and cannot be used in a later session: "
        "import its module again"
    )


class NoSpark:
    """Stands in for the context and its JVM: every attribute and call returns the stand-in.

    Objects made from it cannot be used.
    """

    def __getattr__(self, name: str) -> Any:
        """Answer, but not to a JVM."""
        if name.startswith("__"):
            raise AttributeError(name)
        return _useless() if name == "_get_object_id" else self

    def __call__(self, *_: object, **__: object) -> Any:
        """Answer."""
        return self

    def __setitem__(self, key: object, value: object) -> None:
        """Take an element of what would be Java's array."""

    def __bool__(self) -> bool:
        """Return False: no session is active."""
        return False

    def _parse_ddl(self, ddl: str) -> Any:
        """Return a placeholder type for a UDF's result; refuse to invent a schema for any other use."""
        from pyspark.sql.types import DecimalType, StructType  # noqa: PLC0415  # its callers have imported it

        if not sys._getframe(2).f_code.co_filename.endswith(("udf.py", "udtf.py")):  # noqa: SLF001  # the public way costs every frame
            self._to_ddl()
        is_struct = re.match(r"\s*(struct\s*<|[\w`]+\s*[:\s]\s*\w)", ddl, re.IGNORECASE)
        passing: Any = StructType() if is_struct else DecimalType()
        passing.json = _useless
        return passing

    def _to_ddl(self, *_: object) -> Any:
        from pyspark.errors import PySparkRuntimeError  # noqa: PLC0415  # see above

        raise PySparkRuntimeError(errorClass="SESSION_OR_CONTEXT_NOT_EXISTS", messageParameters={})


_NO_SPARK = NoSpark()


def _refusing(owner: Any, name: str, thread: int | None) -> Any:
    """Return what raises SessionAtImport in place of a method; in other threads than ``thread``, it calls the method."""
    found = vars(owner)[name]
    call = found.__get__(None, owner) if isinstance(found, classmethod) else found

    def refuse(*arguments: Any, **named: Any) -> Any:
        if thread is not None and thread != threading.get_ident():
            return call(*arguments, **named)
        raise SessionAtImport(
            "the module makes a Spark session while it is imported. The server makes the only one: "
            "take rows.sparkSession in on_window"
        )

    return staticmethod(refuse) if isinstance(found, classmethod) else refuse


_GUARDED: dict[str, tuple[str, ...]] = {
    "pyspark.core.context": ("SparkContext.__init__", "SparkContext.getOrCreate"),
    "pyspark.sql.session": ("SparkSession.Builder.getOrCreate", "SparkSession.Builder.create"),
    "pyspark.sql.connect.session": ("SparkSession.Builder.getOrCreate", "SparkSession.Builder.create"),
    # A UDF that is called on a column makes its Java object, for which it would make a session.
    "pyspark.sql.udf": ("UserDefinedFunction._create_judf",),
}
"""What makes a session, by the module that it comes with: pyspark is not imported for a handler that does not use it."""


class ImportGuard:
    """Refuses sessions, and stands in for a missing one, from ``begin`` to ``end``."""

    def __init__(self, thread: int | None = None) -> None:
        """Do nothing yet. ``thread``: the only one in which sessions are refused; None: all are."""
        self._thread = thread
        self._before: list[tuple[Any, str, Any]] = []
        self._is_here = False

    def begin(self) -> None:
        """Guard what of pyspark is imported, and what will be."""
        for name in _GUARDED:
            if name in sys.modules:
                self._guard(sys.modules[name])
        sys.meta_path.insert(0, self)

    def end(self) -> None:
        """Put everything back."""
        sys.meta_path.remove(self)
        for owner, name, value in reversed(self._before):
            setattr(owner, name, value)
        self._before.clear()

    def find_spec(self, name: str, path: Any = None, _target: object = None) -> Any:
        """Find a module of pyspark as ever, to guard it once it is there."""
        if name not in _GUARDED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_guard(module: Any) -> None:
                execute(module)
                self._guard(module)

            spec.loader.exec_module = execute_and_guard  # type: ignore[method-assign]  # the loader is this module's alone
        return spec

    def _guard(self, module: Any) -> None:
        for path in _GUARDED[module.__name__]:
            *owners, name = path.split(".")
            owner = module
            for part in owners:
                owner = getattr(owner, part, None)
            if name not in getattr(owner, "__dict__", {}):
                continue  # executors may have another version of pyspark
            values: dict[str, object] = {}
            if name == "__init__":
                self._is_here = owner._active_spark_context is not None  # noqa: SLF001  # where pyspark itself looks for it
                if not self._is_here:
                    values["_active_spark_context"] = _NO_SPARK
            if name != "_create_judf":
                values[name] = _refusing(owner, name, self._thread)
            elif not self._is_here:
                values[name] = _NO_SPARK
            for attribute, value in values.items():
                self._before.append((owner, attribute, vars(owner)[attribute]))
                setattr(owner, attribute, value)
