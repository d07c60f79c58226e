"""Finds the callbacks of timers in a handler, and what is wrong with them. Calls nothing of the user's."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from mldserver.handler.kclpy.processor import accepts
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
