"""What the functions of a handler take."""

from __future__ import annotations

import inspect
from typing import Any


def accepts(function: Any, count: int) -> bool:
    """Return whether a function accepts ``count`` arguments. Functions written in C may not say: then True."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return True
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True


def takes_also(function: Any, count: int, name: str, annotation: type | None = None) -> bool:
    """Return whether a function takes, behind ``count`` arguments, one with this name or this annotation."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return False
    if len(parameters) <= count or not accepts(function, count + 1):
        return False
    parameter = parameters[count]
    if parameter.kind not in {parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD}:
        return False
    named = getattr(parameter.annotation, "__name__", None) or str(parameter.annotation)
    return parameter.name == name or (
        annotation is not None and named.rpartition(".")[2] == annotation.__name__
    )
