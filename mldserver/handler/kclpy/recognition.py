"""Which classes are record processors of amazon_kclpy, and what is wrong with them. Calls nothing of the user's."""

from __future__ import annotations

import inspect
import sys
from typing import Any, Final

from mldserver.handler.kclpy.processor import ProcessorClass
from mldserver.handler.kclpy.standin import PACKAGE, checkpoint_error

__all__ = ["HOOKS", "problems", "processor_class", "recognised", "written"]

HOOKS: Final = ("initialize", "process_records", "lease_lost", "shard_ended", "shutdown_requested")
"""The hooks of ``Processor``, which are the server's own."""
_METHODS: Final = {
    1: {"initialize": 1, "process_records": 2, "shutdown": 2, "shutdown_requested": 1},
    2: {"initialize": 1, "process_records": 1, "shutdown": 1, "shutdown_requested": 1},
    3: {
        "initialize": 1,
        "process_records": 1,
        "lease_lost": 1,
        "shard_ended": 1,
        "shutdown_requested": 1,
    },
}
"""For each version its methods, and how many arguments they are called with beside the instance."""
_BEFORE_V3: Final = {"lease_lost": "shutdown", "shard_ended": "shutdown"}


def recognised(target: object) -> int | None:
    """Return the version (1, 2 or 3) of a class of record processors; None for all else.

    It derives from a class of amazon_kclpy's; or it says its version, as amazon_kclpy demands of all others, in a module
    that uses amazon_kclpy.
    """
    if not isinstance(target, type):
        return None
    version = getattr(target, "version", None)
    if type(version) is not int or version not in _METHODS:
        return None
    derived = any(_is_of_kclpy(base) for base in target.__mro__[1:])
    return version if not _is_of_kclpy(target) and (derived or _mentions(target)) else None


def _is_of_kclpy(value: object) -> bool:
    name = value.__name__ if inspect.ismodule(value) else getattr(value, "__module__", None)
    return isinstance(name, str) and (name == PACKAGE or name.startswith(f"{PACKAGE}."))


def _mentions(cls: type) -> bool:
    module = sys.modules.get(cls.__module__)
    return module is not None and any(map(_is_of_kclpy, list(vars(module).values())))


def written(cls: type, version: int) -> tuple[str, ...]:
    """Return those of ``HOOKS`` that the class has an own method for; the base classes' are only placeholders."""
    names = {hook: hook if version >= 3 else _BEFORE_V3.get(hook, hook) for hook in HOOKS}  # noqa: PLR2004  # see METHODS
    return tuple(hook for hook, name in names.items() if _own(cls, name) is not None)


def _own(cls: type, name: str) -> Any:
    owner = next((base for base in cls.__mro__ if name in vars(base)), None)
    return None if owner is None or _is_of_kclpy(owner) else getattr(cls, name)


def problems(cls: type, version: int) -> list[tuple[str, str, bool]]:
    """Return what is wrong with a processor: (sentence, the method concerned, whether it prevents it from running)."""
    found = []
    for name, count in _METHODS[version].items():
        method = _own(cls, name)
        if method is None:
            if name == "process_records":
                found.append((f"it has no {name}", "", True))
            elif name != "shutdown_requested":
                found.append((f"it has no {name}: nothing is called then", "", False))
        elif inspect.iscoroutinefunction(method):
            found.append((f"{name} is async, which amazon_kclpy never awaits", name, True))
        elif not _accepts(method, count + (not _is_static(cls, name))):
            told = f"{name} is called with {count} argument{'s' * (count > 1)} by version {version} of amazon_kclpy"
            found.append((f"{told}, but is {name}{inspect.signature(method)}", name, True))
    return found


def _is_static(cls: type, name: str) -> bool:
    return isinstance(inspect.getattr_static(cls, name), staticmethod | classmethod)


def _accepts(function: Any, count: int) -> bool:
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError:
        return False
    return True


def processor_class(cls: type, version: int) -> ProcessorClass:
    """Return what makes the processors of a class, which is imported by now."""
    return ProcessorClass(cls, version, checkpoint_error())
