"""Checks a loaded handler: every problem as a finding with its place. Calls nothing of the user's but ``import``."""

from __future__ import annotations

import ast
import difflib
import inspect
import textwrap
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from mldserver.errors import HandlerInvalid
from mldserver.handler.changes import HOOKS as CHANGE_HOOKS
from mldserver.handler.changes import ChangeHandler, ChangeHooks
from mldserver.handler.context import Context
from mldserver.handler.kclpy.amazon_kclpy import PACKAGE, checkpoint_error
from mldserver.handler.kclpy.processor import ProcessorClass, problems, recognised, written
from mldserver.handler.kept_modules import KeptModules
from mldserver.handler.loader import Loaded, load, relative
from mldserver.handler.queries import lookups_of, spec_of
from mldserver.handler.signatures import accepts, takes_also
from mldserver.handler.spec import (
    RECORD_COLUMN,
    Finding,
    HandlerKind,
    HandlerSpec,
    HookSpec,
    RecordHook,
    Schema,
    SchemaError,
    parse_schema,
)
from mldserver.handler.timer_hooks import refused_calls, timer_hooks
from mldserver.records import Hook
from mldserver.windows import (
    WINDOW_COLUMNS,
    Batches,
    TimeWindows,
    WindowSpec,
    batches,
    duration_ms,
    span_text,
)

_RECORD_HOOKS: Final = tuple(hook.value for hook in RecordHook)
_ANY_RECORD_HOOK: Final = (*_RECORD_HOOKS, *CHANGE_HOOKS)
_ARGUMENTS: Final = {
    "process_record": ("record",),
    "process_records": ("batch",),
    "process_table": ("table",),
    **dict.fromkeys(CHANGE_HOOKS, ("change",)),
    **{hook.value: ("shard",) for hook in Hook},
    "on_window": ("rows", "window"),
}
"""Every hook with the arguments it is called with."""
_KEYED: Final = frozenset({"process_record", *CHANGE_HOOKS})
"""The hooks that may take a context, too."""
_NAMES: Final = (
    *_ARGUMENTS,
    *("schema", "windows", "concurrency", "window_columns", "writes_for_itself", "blocking", "plain_numbers"),
    *("state_ttl", "after"),
)


def load_spec(
    path: str,
    *,
    directory: str | Path | None = None,
    retention_ms: int | None = None,
    code: dict[str, tuple[str, bytes]] | None = None,
) -> HandlerSpec:
    """Import the handler at a dotted path and check it; ``retention_ms`` is the stream's, when it is known.

    ``code``: modules that this process imports from now on, whatever is on its path (``HandlerSpec.code``).

    Raises HandlerNotFound when the path leads nowhere, and HandlerInvalid with every problem found.
    """
    if code:
        KeptModules(code).begin()
    loaded = load(path, directory=directory)
    spec, findings = inspect_handler(loaded, retention_ms=retention_ms)
    if spec is None:
        errors = [str(finding) for finding in findings if finding.is_error]
        raise HandlerInvalid("\n".join(errors), handler=path)
    return replace(spec, code=code or loaded.code())


def inspect_handler(
    loaded: Loaded, *, retention_ms: int | None = None
) -> tuple[HandlerSpec | None, tuple[Finding, ...]]:
    """Return the handler's spec (None when it cannot be run) and all findings, warnings included."""
    inspection = _Inspection(loaded, _SourceMap(loaded))
    spec = inspection.run(retention_ms)
    return spec, tuple(inspection.findings)


@dataclass(slots=True)
class _Inspection:
    loaded: Loaded
    source: _SourceMap
    findings: list[Finding] = field(default_factory=list)

    def run(self, retention_ms: int | None) -> HandlerSpec | None:
        target = self.loaded.target
        if not isinstance(target, ModuleType | type):
            self._find(f"{self.loaded.path} is {_a(target)}; a handler is a module or a class")
            return None
        kind = HandlerKind.CLASS if isinstance(target, type) else HandlerKind.MODULE
        if isinstance(target, type):
            self._check_constructor(target)
            version = recognised(target)
            if version is not None:
                return self._processor(target, version)
        hooks = {name: hook for name in _ARGUMENTS if (hook := self._hook(name)) is not None}
        record_hook = self._record_hook(hooks)
        changes = self._changes(hooks, record_hook)
        schema = self._schema(hooks)
        windows = self._windows(schema, retention_ms)
        concurrency, blocking = self._concurrency(record_hook)
        keyed, state_ttl_ms = self._state(hooks, record_hook, concurrency)
        timers = timer_hooks(target, hooks.get(record_hook or ""), self._find)
        for line, text in refused_calls(self.source.functions, target, timers):
            self.findings.append(Finding(text, self.source.file, line))
        window_columns, writes_for_itself = self._output(hooks)
        after = self._after(windows)
        self._early(windows, hooks.get("on_window"), writes=writes_for_itself)
        if (
            "on_window" in hooks
            and hooks["on_window"].takes_previous
            and not isinstance(windows, TimeWindows)
        ):
            self._find("previous is for windows of time: windows = tumbling(…) or sliding(…)", "on_window")
        tables = lookups_of(target)
        if tables and schema is None:
            self._find(
                "a Lookup needs Spark, which the server starts for handlers with a schema", next(iter(tables))
            )
        self._check_spelling()
        if record_hook is None or any(finding.is_error for finding in self.findings):
            return None
        called: Any = target
        if changes is not None:
            called = changes if kind is HandlerKind.CLASS else ChangeHandler(target, changes)
        return HandlerSpec(
            self.loaded.path,
            kind,
            called,
            record_hook,
            hooks,
            schema,
            windows,
            tuple(self.findings),
            concurrency,
            window_columns,
            writes_for_itself,
            blocking,
            self.loaded.version(target),
            changes,
            keyed,
            state_ttl_ms,
            timers,
            tuple(spec_of(name, table) for name, table in tables.items()),
            after,
            tables,
        )

    def _processor(self, cls: type, version: int) -> HandlerSpec | None:
        """Return the spec of a record processor of amazon_kclpy, whose hooks are not the server's own."""
        for text, name, is_error in problems(cls, version):
            self._find(text, name or None, is_error=is_error)
        if self._attribute("state_ttl") is not None:
            self._find(
                "state_ttl is for process_record(record, ctx): a record processor keeps no state", "state_ttl"
            )
        for name in timer_hooks(cls, None, self._find):
            self._find(
                f"{name} is never called: a record processor has no timers, process_record(record, ctx) has",
                name,
            )
        if any(finding.is_error for finding in self.findings):
            return None
        return HandlerSpec(
            self.loaded.path,
            HandlerKind.PROCESSOR,
            ProcessorClass(cls, version, checkpoint_error()),
            RecordHook.RECORDS,
            {name: HookSpec(name, is_async=False) for name in written(cls, version)},
            schema=None,
            windows=None,
            warnings=tuple(self.findings),
            # The class's own ``version`` says which of amazon_kclpy's interfaces it has.
            version=self.loaded.version(self.loaded.module),
        )

    def _find(self, text: str, name: str | None = None, *, is_error: bool = True) -> None:
        file, line = self.source.place(name, self._attribute(name) if name else None)
        self.findings.append(Finding(text, file, line, is_error))

    def _attribute(self, name: str) -> Any:
        """Return what the handler has under a name; None when it has nothing, or None."""
        return getattr(self.loaded.target, name, None)

    def _check_constructor(self, target: type) -> None:
        if inspect.isabstract(target):
            missing = ", ".join(sorted(getattr(target, "__abstractmethods__", ())))
            self._find(f"class {target.__name__} is abstract: it lacks {missing}")
        elif not accepts(target, 0):
            self._find(
                f"class {target.__name__} is made once per shard, without arguments; its __init__ wants some",
                "__init__",
            )

    def _hook(self, name: str) -> HookSpec | None:
        function = self._attribute(name)
        if function is None:
            return None
        arguments = _ARGUMENTS[name]
        if not callable(function):
            self._find(f"{name} is {_a(function)}, not a function", name)
            return None
        if inspect.isasyncgenfunction(function):
            self._find(f"{name} is an async generator; return a list instead", name)
        # Static and class methods and plain callable objects of a class are called without the instance.
        bound = isinstance(self.loaded.target, ModuleType)
        if not bound:
            member = inspect.getattr_static(self.loaded.target, name)
            bound = isinstance(member, staticmethod | classmethod) or not hasattr(type(member), "__get__")
        count = len(arguments) + (not bound)
        takes_context = takes_also(function, count, "ctx", Context)
        takes_previous = name == "on_window" and takes_also(function, count, "previous")
        if takes_context and name not in _KEYED:
            self._find(
                f"{name} takes ctx, but it has no key: process_record and the hooks of changes have one", name
            )
        elif not takes_context and not takes_previous and not accepts(function, count):
            names, given = ", ".join(arguments), inspect.signature(function)
            more = "ctx" if name in _KEYED else "previous" if name == "on_window" else None
            also = f" or {name}({names}, {more})" if more else ""
            self._find(f"{name} is called as {name}({names}){also}, but is {name}{given}", name)
        call = getattr(function, "__call__", None)  # noqa: B004  # objects with an `async def __call__` are hooks too
        is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)
        return HookSpec(name, is_async, takes_context, takes_previous)

    def _record_hook(self, hooks: dict[str, HookSpec]) -> RecordHook | None:
        """Return what the handler is called with; for hooks of changes, the one that stands in their place."""
        present = [name for name in _RECORD_HOOKS if self._attribute(name) is not None]
        of_changes = [name for name in CHANGE_HOOKS if self._attribute(name) is not None]
        if len(present) > 1:
            self._find(f"it has {' and '.join(present)}; exactly one is needed", present[1])
        elif present and of_changes:
            self._find(f"it has {present[0]} and {of_changes[0]}; write the one or the others", of_changes[0])
        elif not present and not of_changes:
            self._find(f"it has no record hook ({', '.join(_ANY_RECORD_HOOK)}){self._elsewhere()}")
        found = [hooks[name] for name in of_changes if name in hooks]
        if len({hook.is_async for hook in found}) > 1:
            self._find(
                f"{' and '.join(hook.name for hook in found)}: all are `async def`, or none", found[-1].name
            )
        if found and not present:
            takes_context = any(hook.takes_context for hook in found)
            hooks[RecordHook.RECORD] = HookSpec(RecordHook.RECORD, found[0].is_async, takes_context)
            return RecordHook.RECORD
        return RecordHook(present[0]) if len(present) == 1 and present[0] in hooks else None

    def _changes(self, hooks: dict[str, HookSpec], record_hook: RecordHook | None) -> ChangeHooks | None:
        """Return which hooks take DynamoDB changes; None when they take records."""
        names = tuple(name for name in CHANGE_HOOKS if name in hooks)
        declared, plain = self._attribute("changes"), self._attribute("plain_numbers")
        for name, value in (("changes", declared), ("plain_numbers", plain)):
            if not isinstance(value, bool | None):
                self._find(f"{name} is {value!r}; write True or False", name)
        if declared is True and record_hook is RecordHook.TABLE:
            self._find("changes are for process_record and process_records: a table has payloads", "changes")
        if not names and declared is not True:
            if plain is True:
                self._find("plain_numbers is for changes: say changes = True, too", "plain_numbers")
            return None
        if record_hook is None:
            return None
        is_async, names = hooks[record_hook].is_async, names or (record_hook,)
        with_context = frozenset(name for name in names if hooks[name].takes_context)
        return ChangeHooks(self.loaded.target, names, is_async, plain is True, with_context)

    def _elsewhere(self) -> str:
        """Suggest the class that was meant when only the module was named."""
        members = vars(self.loaded.target) if isinstance(self.loaded.target, ModuleType) else {}
        for name, value in members.items():
            # The base classes of amazon_kclpy look like handlers.
            if not isinstance(value, type) or value.__module__.partition(".")[0] == PACKAGE:
                continue
            if any(hasattr(value, hook) for hook in _ANY_RECORD_HOOK):
                return f", but its class {name} has one: write {self.loaded.path}:{name}"
        return ""

    def _schema(self, hooks: dict[str, HookSpec]) -> Schema | None:
        ddl = self._attribute("schema")
        if ddl is None:
            for name in ("windows", "on_window"):
                if self._attribute(name) is not None:
                    self._find(
                        f"{name} needs rows, but the handler has no schema (such as schema = 'n INT')", name
                    )
            return None
        if not isinstance(ddl, str):
            self._find(f"schema is {_a(ddl)}, not Spark DDL as text", "schema")
            return None
        try:
            schema = parse_schema(ddl)
        except SchemaError as error:
            for problem in error.problems:
                self._find(f"schema: {problem}", "schema")
            return None
        if "process_table" in hooks and schema.column(RECORD_COLUMN):
            self._find(
                f"schema: column {RECORD_COLUMN}: with process_table it names each row's record", "schema"
            )
        return schema

    def _early(self, windows: WindowSpec | None, hook: HookSpec | None, *, writes: bool) -> None:
        """Find what early results cannot go with."""
        if isinstance(windows, TimeWindows) and windows.early_ms is not None:
            if writes:
                self._find(
                    "early is not for writes_for_itself: nothing could take back what was written early",
                    "windows",
                )
            if hook is not None and hook.takes_previous:
                self._find(
                    "early is not for an on_window with previous: the window before may be open, too",
                    "windows",
                )

    def _windows(self, schema: Schema | None, retention_ms: int | None) -> WindowSpec | None:
        windows = self._attribute("windows")
        if windows is None:
            return batches() if schema is not None else None
        if isinstance(windows, Batches):
            return windows
        if not isinstance(windows, TimeWindows):
            self._find(
                f"windows is {_a(windows)}; write tumbling('1 hour'), sliding('1 hour', every='5 minutes') or batches(max_rows=100_000)",
                "windows",
            )
            return None
        span = windows.size_ms + windows.lateness_ms
        if retention_ms is not None and span > retention_ms:
            self._find(
                f"windows of {span_text(windows.size_ms)} with a lateness of {span_text(windows.lateness_ms)} are longer "
                f"than the stream keeps its records ({span_text(retention_ms)})",
                "windows",
            )
        if windows.on is None or schema is None:
            return windows
        column = schema.column(windows.on)
        if column is None:
            close = difflib.get_close_matches(windows.on, schema.names, n=1)
            hint = f"did you mean {close[0]}?" if close else ", ".join(schema.names)
            self._find(
                f"windows are cut on {windows.on!r}, which is not a column of the schema ({hint})", "windows"
            )
        elif column.sql != "TIMESTAMP":
            self._find(
                f"windows are cut on {windows.on!r}, which is {column.sql}; it must be a TIMESTAMP", "windows"
            )
        return windows

    def _concurrency(self, record_hook: RecordHook | None) -> tuple[int, bool]:
        """Return how many records it takes at the same time, and whether its hooks may wait for something."""
        concurrency, blocking = self._attribute("concurrency"), self._attribute("blocking")
        if type(blocking) not in {bool, type(None)}:
            self._find(f"blocking is {blocking!r}; write True or False", "blocking")
        if concurrency is None:
            concurrency = 1
        elif type(concurrency) is not int or concurrency < 1:
            self._find(f"concurrency is {concurrency!r}; it must be a number from 1 on", "concurrency")
            concurrency = 1
        elif concurrency > 1 and record_hook not in {RecordHook.RECORD, None}:
            self._find(
                f"concurrency is for process_record: {record_hook} takes all records of a batch at once",
                "concurrency",
            )
        return concurrency, blocking is True

    def _state(
        self, hooks: dict[str, HookSpec], record_hook: RecordHook | None, concurrency: int
    ) -> tuple[bool, int | None]:
        """Return whether it keeps state by key, and how long a key's state stays after its last change (ms)."""
        keyed = record_hook is RecordHook.RECORD and hooks[record_hook].takes_context
        if keyed and concurrency > 1:
            self._find(
                "concurrency is for handlers without ctx: calls with state follow one another", "concurrency"
            )
        declared, ttl_ms = self._attribute("state_ttl"), None
        if declared is None:
            return keyed, None
        try:
            ttl_ms = duration_ms(declared)
        except (TypeError, ValueError, OverflowError):
            ttl_ms = 0
        if not ttl_ms:
            self._find(f"state_ttl is {declared!r}; write a duration such as '1 day'", "state_ttl")
        if not keyed:
            self._find("state_ttl is for handlers with ctx: process_record(record, ctx)", "state_ttl")
        return keyed, ttl_ms

    def _after(self, windows: WindowSpec | None) -> tuple[str, ...]:
        """Return the functions whose windows must be published first."""
        declared = self._attribute("after")
        if declared is None:
            return ()
        names = (declared,) if isinstance(declared, str) else declared
        if not isinstance(names, list | tuple) or not all(isinstance(name, str) and name for name in names):
            self._find(f"after is {declared!r}; write the names of functions, such as ['payments']", "after")
            return ()
        if not isinstance(windows, TimeWindows):
            self._find("after is for windows of time: windows = tumbling(…) or sliding(…)", "after")
        return tuple(dict.fromkeys(names))

    def _output(self, hooks: dict[str, HookSpec]) -> tuple[tuple[str, str] | None, bool]:
        """Return the output's columns of its window, and whether ``on_window`` writes for itself."""
        names = getattr(self.loaded.target, "window_columns", WINDOW_COLUMNS)
        window_columns, writes = None, self._attribute("writes_for_itself")
        match names:
            case None:
                pass
            case (str(start), str(end)) if start and end and start.lower() != end.lower():
                window_columns = start, end
            case _:
                self._find(
                    f"window_columns is {names!r}; write two names, such as {WINDOW_COLUMNS}, or None for no such columns",
                    "window_columns",
                )
        if not isinstance(writes, bool | None):
            self._find(f"writes_for_itself is {writes!r}; it is True or False", "writes_for_itself")
        elif writes and "on_window" not in hooks:
            self._find("writes_for_itself needs an on_window that writes", "writes_for_itself")
        elif not writes and "on_window" in hooks and _never_returns_a_value(self._attribute("on_window")):
            self._find(
                "on_window has no return with a value, so its windows would be empty; return a DataFrame, or say "
                "writes_for_itself = True if it writes them somewhere itself",
                "on_window",
            )
        return window_columns, writes is True

    def _check_spelling(self) -> None:
        """Tell of names that the handler itself defines and that are nearly, but not quite, the server's."""
        absent = [name for name in _NAMES if not hasattr(self.loaded.target, name)]
        has_record_hook = any(name in _ANY_RECORD_HOOK for name in _NAMES if name not in absent)
        for name in self.source.lines:
            if name in _NAMES or name.startswith("_"):
                continue
            for close in difflib.get_close_matches(name, absent, n=1, cutoff=0.85):
                if close in _RECORD_HOOKS and has_record_hook:
                    continue
                self._find(f"{name} is never called or read; did you mean {close}?", name, is_error=False)


def _a(value: object) -> str:
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


class _SourceMap:
    """The lines of one handler's file at which its names are defined."""

    def __init__(self, loaded: Loaded) -> None:
        """Read the module's source; without one, every place is unknown."""
        self._file = getattr(loaded.module, "__file__", None) or ""
        self.file = relative(self._file)
        self.functions: list[ast.FunctionDef | ast.AsyncFunctionDef] = []
        """The functions that the module or class itself defines."""
        self._whole = 0
        self.lines: dict[str, int] = {}
        """Of the names that the module or class itself defines, in order."""
        try:
            body: list[ast.stmt] = ast.parse(loaded.source()).body
        except (OSError, SyntaxError, ValueError):
            return
        self._whole = 1
        for part in filter(None, loaded.name.split(".")):
            inner = next((s for s in body if isinstance(s, ast.ClassDef) and s.name == part), None)
            if inner is None:
                return
            body, self._whole = inner.body, inner.lineno
        for statement in body:
            if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
                self.functions.append(statement)
            if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                self.lines[statement.name] = statement.lineno
            targets: list[ast.expr] = []
            if isinstance(statement, ast.Assign):
                targets = statement.targets
            elif isinstance(statement, ast.AnnAssign):
                targets = [statement.target]
            names = (target.id for target in targets if isinstance(target, ast.Name))
            self.lines |= dict.fromkeys(names, statement.lineno)

    def place(self, name: str | None = None, value: Any = None) -> tuple[str, int]:
        """Return (file, line) of a name, or of the module or class itself; line 0 when it is not known.

        A function that came from elsewhere (an import, a base class) is found by its code.
        """
        if name in self.lines:
            return self.file, self.lines[name]
        code = getattr(inspect.unwrap(value) if callable(value) else value, "__code__", None)
        if code is not None:
            return relative(code.co_filename), code.co_firstlineno
        return self.file, self._whole


def _never_returns_a_value(function: Any) -> bool:
    """Return whether a function's source has no ``return`` with a value, so that it can only return None.

    False if the source cannot be read, is not a ``def``, or is wrapped by a decorator.
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
