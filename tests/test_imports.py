"""The direction of imports between rooms, as a table. A room that the table does not know fails the test."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parent.parent / "mldserver"

ABOVE_ALL = (
    "assembly",
    "admin.gather",
    "admin.acts",
    "pipeline",
    "function",
    "function_commands",
    "server",
    "testing",
    "conformance",
    "cli",
)
"""Rooms that put the others together, from the ground up: each may import all that is below it."""

_SETTINGS = ("config.settings", "config.kinds")

MAY_IMPORT: dict[str, tuple[str, ...]] = {
    # What users and all parts name.
    "": ("records", "windows", "handler.context", "handler.queries", "handler.timers"),
    "errors": (),
    "records": (),
    "windows": (),
    "effects": ("records",),
    "stores": (),
    # Each part makes its own section of it.
    "status_document": ("base.clock",),
    "change": ("records",),
    "engine_jobs": ("windows",),
    # Which commit this is: the build runs them before anything of ours can be imported.
    "version": (),
    "build_hooks": (),
    # What knows nothing of ours but errors.
    "base": ("errors",),
    "children": ("base",),
    "protocol": ("errors", "records", "base.backoff"),
    "handler": ("errors", "records", "windows", "change"),
    "runtime": (
        "errors",
        "records",
        "windows",
        "effects",
        "stores",
        "base",
        "protocol",
        "handler",
        *_SETTINGS,
    ),
    "ledger": ("errors", "records", "windows", "effects", "stores", "base"),
    "output": ("errors", "base", "ledger"),
    "jobs": (
        *("errors", "records", "windows", "status_document", "engine_jobs", "base", "output", "ledger"),
        *("handler.queries", *_SETTINGS),
    ),
    "consumer": ("errors", "records", "stores", "base", "runtime.interface"),
    "consumer.core": ("errors", "records"),
    "sources": (
        "errors",
        "records",
        "stores",
        "base",
        "config.kinds",
        "protocol",
        "runtime.interface",
        "consumer",
    ),
    "dynamodb_streams": (
        *("errors", "records", "stores", "change", "base", "runtime.interface"),
        *("consumer", "sources.source"),
    ),
    "coordinator": (
        *("errors", "records", "windows", "effects", "stores", "status_document", "base", "ledger"),
        *("output", "jobs"),
        *("runtime.interface", "consumer.intake", "consumer.claims", "sources.source"),
    ),
    # Pure: of the other rooms it knows what they say, not what they do.
    "coordinator.core": (
        *("errors", "records", "windows", "effects", "stores", "ledger.contract"),
        *("runtime.interface", "output.layout", *_SETTINGS),
    ),
    "sinks": ("errors", "base", "engine_jobs"),
    # Its sections are what parts go by; what reads them from outside is for those above. A sink's file says how its
    # setting is read, and imports pyspark only in the driver.
    "config": ("errors", "windows", "base", "engine_jobs", "sinks"),
    "deadletters": (
        *("errors", "records", "base", "protocol", "runtime", "ledger", "output"),
        *("consumer", "coordinator.redriving"),
    ),
    "observe": ("errors", "base", "config"),
    # What it knows of the server is the status document.
    "admin": ("", "status_document", "errors", "base", "children", "config", "observe"),
    # The handler's process: an inline runtime behind a socket, whose log goes to the server's.
    "workers": (
        *(
            "",
            "errors",
            "records",
            "windows",
            "effects",
            "stores",
            "status_document",
            "base",
            "children",
            "protocol",
            "handler",
            "runtime",
            "observe",
        ),
    ),
    # The driver's process imports the user's handler by the same rules as the runtime does.
    "spark": (
        "errors",
        "windows",
        "base",
        "engine_jobs",
        "children",
        "sinks",
        "handler.loader",
        "handler.kept_modules",
        "handler.queries",
        "handler.signatures",
        "handler.spark_at_import",
        "jobs.engine",
        "jobs.run_gate",
        "observe.logging",
    ),
    "kcl": ("", "errors", "base", "children", "config", "spark.java"),
    "versions": (
        *("errors", "base", "handler", "runtime", "workers", "output", "ledger.contract"),
        *("coordinator.shards", "jobs.engine"),
    ),
    "functions": ("errors", "base", "config", "ledger.contract", "handler", "runtime", "workers", "versions"),
    "__main__": ("cli",),
    **dict.fromkeys(ABOVE_ALL, ("*",)),
}
"""For each room, by the longest prefix of a module's name: what it may import beside itself. ``*``: all below."""

CORES = (
    *(
        "records",
        "errors",
        "windows",
        "effects",
        "stores",
        "change",
        "engine_jobs",
        "protocol",
        "coordinator.core",
    ),
    "consumer.core",
    "admin.history",
    "status_document",
    "conformance.judge",
    "dynamodb_streams.merge",
    "dynamodb_streams.positions",
    "dynamodb_streams.shard_tree",
)
"""Rooms without an event loop, clock or I/O."""

NOT_IN_CORES = frozenset(
    [
        "aioboto3",
        "asyncio",
        "logging",
        "multiprocessing",
        "os",
        "pyspark",
        "random",
        "selectors",
        "signal",
        "socket",
        "sqlite3",
        "structlog",
        "subprocess",
        "threading",
        "time",
        "uvloop",
    ]
)

ONLY_IN = {
    # Where a handler is imported that imports it, its session is guarded.
    "pyspark": ("spark", "sinks", "handler.spark_at_import"),
    "sqlite3": ("ledger",),
    "cyclopts": ("cli",),
    "aws_kinesis_agg": ("protocol", "testing"),
    "aiohttp": ("admin", "testing"),
    "prometheus_client": ("admin",),
    "aioboto3": ("base.aws",),
    "aiobotocore": ("base.aws",),
    "kclpy_ext": ("kcl",),
    "amazon_kclpy": ("kcl",),
}
"""Libraries that one part alone may know."""


class Import(NamedTuple):
    module: str
    """Without ``mldserver.``; empty for the package itself."""
    target: str
    """The same way when it is ours, else the name of the top-level module."""
    ours: bool
    typing_only: bool
    line: int


def imports_of(package: Path) -> list[Import]:
    """Return every import of a package's modules, wherever in the file it stands."""
    paths = {_module(path, package): path for path in sorted(package.rglob("*.py"))}
    return [
        found
        for module, path in paths.items()
        for found in _Imports(module, path, package.name, set(paths)).found
    ]


def _module(path: Path, package: Path) -> str:
    parts = path.relative_to(package).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


class _Imports(ast.NodeVisitor):
    def __init__(self, module: str, path: Path, package: str, modules: set[str]) -> None:
        self.found: list[Import] = []
        self._module, self._package, self._modules = module, package, modules
        self._folder = module if path.name == "__init__.py" else module.rpartition(".")[0]
        self._typing_only = False
        self.visit(ast.parse(path.read_text("utf-8"), str(path)))

    def visit_If(self, node: ast.If) -> None:
        typing_only = ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}
        former, self._typing_only = self._typing_only, self._typing_only or typing_only
        for each in node.body:
            self.visit(each)
        self._typing_only = former
        for each in node.orelse:
            self.visit(each)

    def visit_Import(self, node: ast.Import) -> None:
        for each in node.names:
            self._add(each.name, node.lineno)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = node.module or ""
        if node.level:
            folder = [self._package, *filter(None, self._folder.split("."))]
            base = ".".join([*folder[: len(folder) - node.level + 1], *filter(None, [base])])
        for each in node.names:
            submodule = f"{base}.{each.name}".removeprefix(f"{self._package}.")
            is_module = base.split(".")[0] == self._package and submodule in self._modules
            self._add(f"{base}.{each.name}" if is_module else base, node.lineno)

    def _add(self, name: str, line: int) -> None:
        top, _, rest = name.partition(".")
        ours = top == self._package
        self.found.append(Import(self._module, rest if ours else top, ours, self._typing_only, line))


def part_of(module: str) -> str | None:
    """Return the part a module belongs to: the longest prefix of its name in the table."""
    names = module.split(".")
    prefixes = (".".join(names[:length]) for length in range(len(names), 0, -1))
    return "" if not module else next((prefix for prefix in prefixes if prefix in MAY_IMPORT), None)


def _inside(module: str, parts: tuple[str, ...]) -> bool:
    return any(module == part or (part and module.startswith(f"{part}.")) for part in parts)


def may_import(module: str, target: str) -> bool:
    part = part_of(module)
    if part is None or part_of(target) is None:
        return False
    allowed = MAY_IMPORT[part]
    if _inside(target, (part,)) and part:
        return True
    if "*" in allowed:
        return not _inside(target, ABOVE_ALL[ABOVE_ALL.index(part) + 1 :])
    return _inside(target, allowed)


def wrong_directions(imports: list[Import]) -> list[str]:
    wrong = []
    for each in imports:
        where = f"{each.module or 'mldserver'}:{each.line} imports {each.target or 'mldserver'}"
        core = _inside(each.module, CORES)
        if each.ours and not may_import(each.module, each.target):
            wrong.append(f"{where}: against the direction")
        if not each.ours and core and each.target in NOT_IN_CORES and not each.typing_only:
            wrong.append(f"{where}: not in a core")
        if not each.ours and each.target in ONLY_IN and not _inside(each.module, ONLY_IN[each.target]):
            wrong.append(f"{where}: only in {ONLY_IN[each.target]}")
    return wrong


def folder_of(module: str) -> str:
    """Return the folder that a module is in. A module at the top counts as a folder of its own."""
    return module.partition(".")[0]


def cycle_in(imports: list[Import], unit: Callable[[str], str] = str) -> list[str]:
    """Return a cycle of imports, those for types included, or nothing; ``unit``: of what modules are part of."""
    graph: dict[str, set[str]] = {}
    for each in imports:
        if each.ours and unit(each.module) != unit(each.target):
            graph.setdefault(unit(each.module), set()).add(unit(each.target))
    done: set[str] = set()
    path: list[str] = []

    def search(module: str) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        path.append(module)
        found = next(filter(None, map(search, sorted(graph.get(module, ())))), [])
        path.pop()
        done.add(module)
        return found

    return next(filter(None, map(search, sorted(graph))), [])


def test_imports_point_one_way() -> None:
    assert wrong_directions(imports_of(PACKAGE)) == []


def test_imports_have_no_cycle() -> None:
    assert cycle_in(imports_of(PACKAGE)) == []


def test_folders_have_no_cycle() -> None:
    assert cycle_in(imports_of(PACKAGE), folder_of) == []


def test_every_room_exists() -> None:
    modules = {each.module for each in imports_of(PACKAGE)} | {
        _module(path, PACKAGE) for path in PACKAGE.rglob("*.py")
    }
    assert {room for room in MAY_IMPORT if room not in modules} == set()


# That the check can fail


def planted(folder: Path, files: dict[str, str]) -> list[Import]:
    package = folder / "mldserver"
    for name, source in files.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return imports_of(package)


@pytest.mark.parametrize(
    ("file", "source", "told"),
    [
        ("records.py", "from mldserver.errors import X", "records:1 imports errors: against the direction"),
        (
            "protocol/core.py",
            "def f():\n    import mldserver.server",
            "protocol.core:2 imports server: against",
        ),
        ("protocol/core.py", "from ..server import Server", "protocol.core:1 imports server: against"),
        ("protocol/core.py", "from .. import server", "protocol.core:1 imports server: against"),
        ("protocol/core.py", "from mldserver import server", "protocol.core:1 imports server: against"),
        ("protocol/core.py", "import mldserver", "protocol.core:1 imports mldserver: against"),
        ("protocol/core.py", "import asyncio.events", "protocol.core:1 imports asyncio: not in a core"),
        (
            "protocol/core.py",
            "try:\n    import uvloop\nexcept ImportError: pass",
            "protocol.core:2 imports uvloop",
        ),
        (
            "coordinator/core/new.py",
            "from time import time",
            "coordinator.core.new:1 imports time: not in a core",
        ),
        (
            "coordinator/core/new.py",
            "from mldserver.output.store import X",
            "coordinator.core.new:1 imports output.store: against the direction",
        ),
        ("coordinator/new.py", "from mldserver.spark.client import X", "imports spark.client: against"),
        (
            "runtime/x.py",
            "from mldserver.sources import source",
            "runtime.x:1 imports sources.source: against",
        ),
        (
            "ledger/x.py",
            "import pyspark.sql",
            "ledger.x:1 imports pyspark: only in ('spark', 'sinks', 'handler.spark_at_import')",
        ),
        ("server.py", "from mldserver import cli", "server:1 imports cli: against"),
        ("novel.py", "from mldserver import records", "novel:1 imports records: against"),
        (
            "sources/x.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from mldserver.server import Server",
            "sources.x:3 imports server: against",
        ),
    ],
)
def test_a_planted_violation_is_found(tmp_path: Path, file: str, source: str, told: str) -> None:
    others = dict.fromkeys(
        ("server.py", "sources/source.py", "output/store.py", "cli/__init__.py", "records.py"), ""
    )
    (wrong,) = wrong_directions(planted(tmp_path, others | {file: source}))
    assert told in wrong


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("output/store.py", "import os, asyncio\nfrom mldserver.ledger.contract import X"),
        ("protocol/core.py", "import re\nfrom . import other\nfrom mldserver.records import X"),
        ("protocol/core.py", "if TYPE_CHECKING:\n    import asyncio\nelse:\n    import re"),
        ("cli/x.py", "from mldserver.server import Server\nimport mldserver.testing"),
    ],
)
def test_what_is_allowed_passes(tmp_path: Path, file: str, source: str) -> None:
    others = dict.fromkeys(("protocol/other.py", "testing/__init__.py"), "")
    assert wrong_directions(planted(tmp_path, others | {file: source})) == []


def test_a_planted_cycle_is_found_also_where_only_types_make_it(tmp_path: Path) -> None:
    one = planted(
        tmp_path / "a",
        {
            "a.py": "from mldserver import b",
            "b.py": "import mldserver.c",
            "c.py": "def f():\n    from mldserver.a import x",
        },
    )
    assert cycle_in(one) == ["a", "b", "c", "a"]
    other = planted(
        tmp_path / "b",
        {"a.py": "from mldserver import b", "b.py": "if TYPE_CHECKING:\n    from mldserver.a import x"},
    )
    assert cycle_in(other) == ["a", "b", "a"]


def test_a_planted_cycle_of_folders_is_found_where_no_file_is_in_one(tmp_path: Path) -> None:
    files = {
        "a/top.py": "from mldserver.b import bottom",
        "b/bottom.py": "",
        "b/top.py": "if TYPE_CHECKING:\n    from mldserver.c.top import x",
        "c/top.py": "from mldserver.a import bottom",
        "a/bottom.py": "",
    }
    imports = planted(tmp_path, files)
    assert cycle_in(imports) == []
    assert cycle_in(imports, folder_of) == ["a", "b", "c", "a"]
