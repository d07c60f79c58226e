"""The page ``api.md``: what a handler imports, from signatures and docstrings."""

from __future__ import annotations

import ast
import enum
import inspect
import re
import textwrap
from collections.abc import Callable
from typing import Any, Final

from mldserver import (
    Batch,
    BatchResult,
    Context,
    Discard,
    Fatal,
    Lookup,
    Record,
    Retry,
    Rows,
    RowStream,
    Sequence,
    Shard,
    Timer,
    Timers,
    Window,
    batches,
    sliding,
    timer,
    tumbling,
)
from mldserver.dynamodb_streams import Change, NotAChange

__all__ = ["SECTIONS", "member_docs", "page"]

_INTRODUCTION: Final = """\
# API reference

The classes and functions that a handler imports, with types, units and errors.

A handler imports `Change` and `NotAChange` from `mldserver.dynamodb_streams`, and all other names from `mldserver`.
[Handlers](handlers.md) describes the hooks that receive these objects, and what a hook returns.
"""

SECTIONS: Final[dict[str, tuple[Any, ...]]] = {
    "Records": (Record, Batch, Shard, Sequence),
    "State": (Context,),
    "Timers": (timer, Timer, Timers),
    "Queries and lookups": (Lookup, Rows, RowStream),
    "Failures": (Retry, Discard, Fatal, BatchResult),
    "Windows": (tumbling, sliding, batches, Window),
    "Changes of a DynamoDB table": (Change, NotAChange),
}
"""The public names by section, in the order of the page."""


def page() -> str:
    """Return the reference as Markdown: a section for each subject, a table of members for each class."""
    lines = [_INTRODUCTION]
    for title, objects in SECTIONS.items():
        lines.append(f"## {title}\n")
        for each in objects:
            lines += [
                f"### {each.__name__}\n",
                f"```\n{_signature(each)}\n```\n",
                _prose(each.__doc__),
                "",
            ]
            if not inspect.isclass(each):
                continue
            members = _members(each)
            if "__init__" in members:
                lines += [_prose(each.__init__.__doc__), ""]
            lines += ["| member | type | meaning |", "|---|---|---|"]
            for name, (call, kind, meaning) in members.items():
                if not name.startswith("_"):
                    lines.append(f"| `{call}` | `{kind}` | {meaning} |".replace(" | None`", " \\\\| None`"))
            lines.append("")
    return "\n".join(lines)


def _signature(described: Callable[..., Any]) -> str:
    parameters = inspect.signature(described).parameters.values()
    untyped = [each.replace(annotation=inspect.Parameter.empty) for each in parameters]
    return f"{described.__name__}{inspect.Signature(untyped)}"


def _prose(docstring: str | None) -> str:
    return inspect.cleandoc(docstring or "").replace("``", "`")


def _cell(text: str | None) -> str:
    """Return text as the cell of a table, in one line."""
    return re.sub(r"\s+", " ", _prose(text)).replace("|", "\\|")


def _members(described: type) -> dict[str, tuple[str, str, str]]:
    """Return the attributes, properties and methods of a class, then those of its bases: how to use each, type, meaning.

    Their source is read: Python keeps no docstrings of attributes.
    """
    found: dict[str, tuple[str, str, str]] = {}
    for owner in described.__mro__:
        if not owner.__module__.startswith("mldserver."):
            continue
        [definition] = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
        assert isinstance(definition, ast.ClassDef)
        for statement, following in zip(definition.body, [*definition.body[1:], None], strict=True):
            match statement, following:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found.setdefault(name, (name, _cell(ast.unparse(statement.annotation)), _cell(text)))
                case ast.Assign(targets=[ast.Name(id=name)]), ast.Expr(value=ast.Constant(value=str(text))):
                    found.setdefault(name, (name, "", _cell(text)))
                case ast.FunctionDef(name=name), _ if ast.get_docstring(statement):
                    found.setdefault(name, _function(statement))
    return found


def member_docs(described: type[enum.StrEnum]) -> dict[str, str]:
    """Return what each member of an enumeration means."""
    return {described[name]: meaning for name, (_, _, meaning) in _members(described).items()}


def _function(definition: ast.FunctionDef) -> tuple[str, str, str]:
    is_property = any("property" in ast.unparse(each) for each in definition.decorator_list)
    for argument in (*definition.args.args, *definition.args.kwonlyargs):
        argument.annotation = None
    arguments = ast.unparse(definition.args).removeprefix("self").removeprefix(", ")
    call = definition.name if is_property else f"{definition.name}({arguments})"
    return (
        call,
        _cell(ast.unparse(definition.returns or ast.Name("None"))),
        _cell(ast.get_docstring(definition)),
    )
