"""Stands in for amazon_kclpy where it is not installed, while a handler is imported.

What a processor's module takes from it are base classes, ``CheckpointError``, and names for annotations. An installed
amazon_kclpy is always preferred: its base classes are used as they are.
"""

from __future__ import annotations

import contextlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, Any

from mldserver.handler.kclpy import inputs
from mldserver.handler.kclpy.progress import Checkpointer, CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import ModuleType

PACKAGE = "amazon_kclpy"


class _Base:
    """What all versions share: hooks that a processor must have, and this one may leave out."""

    def shutdown_requested(self, *_: Any) -> None:
        """Do nothing."""


def _record_processor(module: str, version: int) -> type:
    return type("RecordProcessorBase", (_Base,), {"__module__": f"{PACKAGE}.{module}", "version": version})


class _KCLProcess:
    """``amazon_kclpy.kcl.KCLProcess``: there is no such process here, the server runs the processor."""

    __module__ = f"{PACKAGE}.kcl"

    def __init__(self, record_processor: Any, *_: Any, **__: Any) -> None:
        """Take what amazon_kclpy's takes."""
        self.record_processor = record_processor

    def run(self) -> None:
        """Refuse to run: it would read the server's standard input."""
        raise RuntimeError(
            "KCLProcess.run() is called while the module is imported; put it under if __name__ == '__main__'"
        )


_MODULES: dict[str, dict[str, Any]] = {
    PACKAGE: {},
    f"{PACKAGE}.checkpoint_error": {"CheckpointError": CheckpointError},
    f"{PACKAGE}.messages": {
        **{name: getattr(inputs, name) for name in inputs.__all__},
        "CheckpointError": CheckpointError,
    },
    f"{PACKAGE}.kcl": {
        "RecordProcessorBase": _record_processor("kcl", 1),
        "KCLProcess": _KCLProcess,
        "Checkpointer": Checkpointer,
        "CheckpointError": CheckpointError,
    },
    f"{PACKAGE}.v2": {},
    f"{PACKAGE}.v2.processor": {"RecordProcessorBase": _record_processor("v2.processor", 2)},
    f"{PACKAGE}.v3": {},
    f"{PACKAGE}.v3.processor": {"RecordProcessorBase": _record_processor("v3.processor", 3)},
}
_PACKAGES = frozenset({PACKAGE, f"{PACKAGE}.v2", f"{PACKAGE}.v3"})


class _Finder(MetaPathFinder):
    """Finds the stand-in's modules behind everything that is installed."""

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a module's spec when it is ours to give: never a part of an installed amazon_kclpy."""
        if fullname not in _MODULES or (fullname != PACKAGE and not _is_ours(sys.modules.get(PACKAGE))):
            return None
        return ModuleSpec(fullname, _FILLER, origin="mldserver", is_package=fullname in _PACKAGES)


class _Filler(Loader):
    """Fills a module with its names."""

    def exec_module(self, module: ModuleType) -> None:
        """Fill a module."""
        vars(module).update(_MODULES[module.__name__])


_FILLER = _Filler()


@contextlib.contextmanager
def standing_in() -> Iterator[None]:
    """Import what amazon_kclpy lacks from here meanwhile; what was imported stays.

    A processor that imports more of it later, in one of its hooks, finds all of it: the modules come together.
    """
    finder = _Finder()
    sys.meta_path.append(finder)
    try:
        yield
        if _is_ours(sys.modules.get(PACKAGE)):
            for name in _MODULES:
                __import__(name)
    finally:
        sys.meta_path.remove(finder)


def checkpoint_error() -> type[Exception]:
    """Return the ``CheckpointError`` that an imported processor knows: amazon_kclpy's, where it was imported."""
    for name in (f"{PACKAGE}.checkpoint_error", f"{PACKAGE}.kcl"):
        error = getattr(sys.modules.get(name), "CheckpointError", None)
        if isinstance(error, type) and issubclass(error, Exception):
            return error
    return CheckpointError


def _is_ours(module: ModuleType | None) -> bool:
    return getattr(getattr(module, "__spec__", None), "loader", None) is _FILLER
