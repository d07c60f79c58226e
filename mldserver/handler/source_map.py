"""What the user's source shows: where a name is defined, what a function returns. Reads source, never runs it."""

from __future__ import annotations

import ast
import inspect
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mldserver.handler.loader import relative

if TYPE_CHECKING:
    from mldserver.handler.loader import Loaded

__all__ = ["SourceMap", "never_returns_a_value"]


class SourceMap:
    """The lines of one handler's file at which its names are defined."""

    def __init__(self, loaded: Loaded) -> None:
        """Read the module's source; without one, every place is unknown."""
        self._file = getattr(loaded.module, "__file__", None) or ""
        self._whole = 0
        self._lines: dict[str, int] = {}
        try:
            body: list[ast.stmt] = ast.parse(Path(self._file).read_bytes()).body
        except (OSError, SyntaxError, ValueError):
            return
        self._whole = 1
        for part in filter(None, loaded.name.split(".")):
            found = next((s for s in body if isinstance(s, ast.ClassDef) and s.name == part), None)
            if found is None:
                return
            body, self._whole = found.body, found.lineno
        for statement in body:
            for name in _defined(statement):
                self._lines[name] = statement.lineno

    def names(self) -> list[str]:
        """Return the names that the module or class itself defines, in order."""
        return list(self._lines)

    def place(self, name: str | None = None, value: Any = None) -> tuple[str, int]:
        """Return (file, line) of a name, or of the module or class itself; line 0 when it is not known.

        A function that came from elsewhere (an import, a base class) is found by its code.
        """
        if name in self._lines:
            return relative(self._file), self._lines[name]
        code = getattr(inspect.unwrap(value) if callable(value) else value, "__code__", None)
        if code is not None:
            return relative(code.co_filename), code.co_firstlineno
        return relative(self._file), self._whole


def never_returns_a_value(function: Any) -> bool:
    """Tell whether a function's source has no ``return`` with a value, so that it can return nothing but None.

    False where there is no source to read, for what is no ``def``, and for what a decorator has wrapped.
    """
    if hasattr(function, "__wrapped__"):
        return False  # its source is that of the function inside
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return False
    if not (tree.body and isinstance(tree.body[0], ast.FunctionDef | ast.AsyncFunctionDef)):
        return False
    nodes: list[ast.AST] = list(tree.body[0].body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Return) and not (
            node.value is None or (isinstance(node.value, ast.Constant) and node.value.value is None)
        ):
            return False
        # What a function inside returns is not what this one returns.
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            nodes += ast.iter_child_nodes(node)
    return True


def _defined(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [statement.name]
    targets: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]
