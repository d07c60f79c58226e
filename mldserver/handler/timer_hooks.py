"""Finds the callbacks of timers in a handler, what is wrong with them, and calls of ``ctx.timers`` that name no callback.

Calls nothing of the user's.
"""

from __future__ import annotations

import ast
import difflib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

from mldserver.handler.signatures import accepts
from mldserver.handler.spec import HookSpec, TimerHook
from mldserver.handler.timers import mark_of


def timer_hooks(
    target: Any, record_hook: HookSpec | None, find: Callable[[str, str], None]
) -> dict[str, TimerHook]:
    """Return the callbacks of a module or class by name; call ``find`` with each problem and the name it is about.

    ``record_hook``: the handler's, without which it cannot be run.
    """
    found = {}
    for name in dir(target):
        member = inspect.getattr_static(target, name, None)
        is_static = isinstance(member, staticmethod | classmethod)
        function = member.__func__ if isinstance(member, staticmethod | classmethod) else member
        # Other objects may answer to any attribute, or raise.
        mark = mark_of(function) if inspect.isfunction(function) else None
        if mark is None:
            continue
        called = getattr(target, name)
        if name != function.__name__:
            find(
                f"the callback {function.__name__} has another name here ({name}): write it under its own",
                name,
            )
        elif inspect.isasyncgenfunction(function):
            find(f"{name} is an async generator; return a list instead", name)
        elif not accepts(called, 2 + (not isinstance(target, ModuleType) and not is_static)):
            find(f"{name} is called as {name}(due, ctx), but is {name}{inspect.signature(called)}", name)
        found[name] = TimerHook(name, inspect.iscoroutinefunction(function), mark.max_lateness_ms)
    if found and record_hook is not None:
        last = next(reversed(found))
        if not record_hook.takes_context:
            find(
                f"{last} is never called: only a hook with ctx sets timers, such as process_record(record, ctx)",
                last,
            )
        for name, hook in found.items():
            if hook.is_async != record_hook.is_async:
                find(f"{record_hook.name} and {name}: both are `async def`, or neither", name)
    return found


def refused_calls(
    functions: Iterable[ast.FunctionDef | ast.AsyncFunctionDef],
    target: Any,
    timers: Mapping[str, TimerHook],
) -> Iterator[tuple[int, str]]:
    """Yield line and problem of each call of ``ctx.timers`` in ``functions`` that will raise NotATimer or not find its callback.

    ``target``: the module or class that defines the functions. A callback is judged if the call names it as a function of the
    module, or as a method of ``self``.
    """
    for function in functions:
        nodes = list(ast.walk(function))
        own = {node.arg for node in nodes if isinstance(node, ast.arg)}
        own |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        for node in nodes:
            match node:
                case ast.Call(
                    func=ast.Attribute(
                        value=ast.Attribute(value=ast.Name("ctx"), attr="timers"), attr=called
                    ),
                    args=[callback, *_],
                ) if called in {"set", "cancel", "get"}:
                    problem = _problem(callback, target, timers, own)
                    if problem:
                        yield node.lineno, f"ctx.timers.{called}({ast.unparse(callback):.100}, …): {problem}"


def _problem(callback: ast.expr, target: Any, timers: Mapping[str, TimerHook], own: set[str]) -> str:
    """Return why an argument is not a callback; empty if it is one, or cannot be judged. ``own``: the function's own names."""
    in_module = isinstance(target, ModuleType)
    match callback:
        case ast.Lambda() | ast.Constant():
            return "a callback is a function of the module or a method of the class, marked with @timer"
        case ast.Name(name) if name not in own and in_module:
            pass
        case ast.Attribute(value=ast.Name("self"), attr=name) if not in_module:
            pass
        case _:
            return ""
    if name in timers:
        return ""
    if hasattr(target, name):
        return f"{name} is not marked with @timer"
    close = difflib.get_close_matches(name, timers, n=1)
    return f"did you mean {close[0]}?" if close else ""
