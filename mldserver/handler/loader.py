"""From a dotted path to the user's module or class.

``package.module`` or ``package.module:Name`` (``Name`` may be nested: ``Outer.Inner``). The working directory comes
first on ``sys.path``, as users of other Python servers expect. A path that leads nowhere is HandlerNotFound, with
different sentences for a module and for an attribute that is missing; whatever the module itself raises while it is
imported is shown as it is, with the place in the user's file.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import hashlib
import importlib
import importlib.machinery
import importlib.util
import os
import pkgutil
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from socket import gaierror
from types import ModuleType
from typing import Any, Final

import structlog

from mldserver.errors import HandlerInvalid, HandlerNotFound, HandlerUnready
from mldserver.handler import spark_at_import
from mldserver.handler.failure import describe
from mldserver.handler.kclpy.amazon_kclpy import standing_in
from mldserver.handler.kept_modules import KeptLoader

IMPORT_SECONDS: Final = 120.0
"""How long importing the handler's module may take: an import that hangs would block its process for ever, without a
log entry."""
_DIGITS: Final = 12
"""Length of the hash: enough to distinguish a handler's versions, short enough for a table."""
_WANT_A_SESSION: Final = ("[SESSION_OR_CONTEXT_NOT_EXISTS]", "[NO_ACTIVE_OR_DEFAULT_SESSION]")
_NO_SESSION: Final = (
    "Only Spark's driver has a session. Write the type as an object, such as IntegerType() or StructType([...]), "
    "or make it inside on_window."
)
_LIBRARIES: Final = (
    *{sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")},
    f"{Path(__file__).parents[1]}{os.sep}",
)


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a dotted path leads to."""

    path: str
    module: ModuleType
    target: Any
    """The module itself, or the class (or other object) that the path names in it."""
    name: str = ""
    """The part of the path after the colon."""

    def version(self, target: Any) -> str:
        """Return which version of the handler this is: ``target``'s ``version`` (text or a number), else a hash of the source.

        Empty when there is neither, as for a module that only exists compiled. What the module imports does not count.
        """
        version = getattr(target, "version", None)
        if isinstance(version, str | int | float) and not isinstance(version, bool) and str(version).strip():
            return str(version).strip()
        try:
            source = self.source()
        except OSError:
            return ""
        return f"sha256:{hashlib.sha256(source).hexdigest()[:_DIGITS]}"

    def source(self) -> bytes:
        """Return the module's text as it was loaded, if that was kept, else from its file. Raises OSError."""
        return _text_of(self.module, _file_of(self.module))

    def code(self) -> dict[str, tuple[str, bytes]]:
        """Return file and text of the user's modules that the handler needs, by name (``kept_modules.py``).

        These are its own module, what is imported from the same folder, and what import statements name, also those inside
        functions that have not run yet. Installed packages are left out, except the handler's own. A module that is imported
        by a computed name is known only once that has happened.
        """
        package, _, rest = self.module.__name__.partition(".")
        if not _file_of(self.module):
            return {}
        file = Path(_file_of(self.module)).absolute()
        home = f"{file.parents[rest.count('.') + 1 if rest else 0]}{os.sep}"
        names = [name for name, module in list(sys.modules.items()) if _file_of(module).startswith(home)]
        names.append(self.module.__name__)
        found: dict[str, tuple[str, bytes]] = {}
        seen: set[str] = set()
        while names:
            name = names.pop()
            if name in seen:
                continue
            seen.add(name)
            place = _file_of(sys.modules[name]) if name in sys.modules else _place(name)
            if place.endswith(".py") and (name.partition(".")[0] == package or not is_library(place)):
                with contextlib.suppress(OSError):
                    found[name] = place, _text_of(sys.modules.get(name), place)
                    names += _imports(name, *found[name])
        return found


def load(path: str, *, directory: str | Path | None = None, seconds: float | None = IMPORT_SECONDS) -> Loaded:
    """Import the handler at ``path``; ``directory`` (default: the working directory) is searched first.

    The import runs in a thread and may take ``seconds``; None: any time, in this thread.

    Raises HandlerNotFound when the path leads nowhere, HandlerInvalid when the module raises while it is imported,
    HandlerUnready when it is not imported in time.
    """
    module_name, _, name = path.partition(":")
    folder = str(Path(directory or Path.cwd()).resolve())
    is_file = path.endswith(".py") and Path(folder, path).is_file()
    is_dotted = all(part.isidentifier() for part in module_name.split("."))
    if is_file or not is_dotted or (":" in path and not name):
        advice = "Write package.module or package.module:Name."
        if path.endswith(".py") or "/" in path:
            dotted = path.removesuffix(".py").replace("/", ".").strip(".")
            advice = f"Write it as a module, not as a file: {dotted}"
        raise HandlerNotFound(f"{path!r} is not a dotted path.", advice=advice, handler=path)
    if sys.path[:1] not in ([folder], [""]):
        sys.path.insert(0, folder)
        importlib.invalidate_caches()
    module = _import(module_name, path, seconds)
    target: Any = module
    reached = module_name
    for part in filter(None, name.split(".")):
        if not hasattr(target, part):
            public = [known for known in dir(target) if not known.startswith("_")]
            raise HandlerNotFound(
                f"The module {module_name} is there, but {reached} has no attribute {part!r}.",
                advice=_suggestion(part, public),
                handler=path,
            )
        target = getattr(target, part)
        reached = f"{reached}.{part}"
    return Loaded(path, module, target, name)


def entries_of(files: Iterable[str | Path]) -> tuple[str, ...]:
    """Return the entries of Python's path that make files of code importable: .py files by their folder, archives as they are."""
    paths = map(Path, files)
    return tuple(dict.fromkeys(str(path.parent if path.suffix == ".py" else path) for path in paths))


def relative(file: str) -> str:
    """Return a file's path from the working directory when it lies below it, else as it is."""
    try:
        return str(Path(file).relative_to(Path.cwd()))
    except ValueError:
        return file


def is_library(file: str) -> bool:
    """Whether a file is the standard library's, an installed package's or this one's."""
    return file.startswith(_LIBRARIES) or "/site-packages/" in file or "/dist-packages/" in file


def _file_of(module: ModuleType | None) -> str:
    """Return a module's file, or an empty string if it has none, or is not a module at all."""
    file = getattr(module, "__file__", None)
    return file if isinstance(file, str) else ""


def _text_of(module: ModuleType | None, file: str) -> bytes:
    """Return a module's text as it was loaded, if that was kept, else from its file. Raises OSError."""
    loader = getattr(module, "__loader__", None)
    return loader.get_data(file) if isinstance(loader, KeptLoader) else Path(file).read_bytes()


def _place(name: str) -> str:
    """Return the file that a module would be imported from. Imports nothing, not even its package."""
    path: list[str] | None = None
    origin = None
    parts = name.split(".")
    if parts[0] in sys.stdlib_module_names:
        return ""
    for part in parts:
        # By its last name alone: a namespace package within another one asks for its parent, which is not imported.
        spec = importlib.machinery.PathFinder.find_spec(part, path)
        if spec is None:
            return ""
        origin, path = spec.origin, list(spec.submodule_search_locations or ())
    return origin or ""


def _imports(name: str, file: str, source: bytes) -> list[str]:
    """Return the modules that a module's import statements name, their packages, and names that may be modules."""
    package = name if Path(file).name == "__init__.py" else name.rpartition(".")[0]
    named: list[str] = []
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError, RecursionError):
        return named
    for node in nodes:
        if isinstance(node, ast.Import):
            named += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                with contextlib.suppress(ImportError):  # beyond the top: it fails when it runs
                    base = importlib.util.resolve_name(f"{'.' * node.level}{base}", package)
            named += [f"{base}.{alias.name}" for alias in node.names if alias.name != "*"] or [base]
    parts = [one.split(".") for one in named]
    return [".".join(each[:end]) for each in parts for end in range(1, len(each) + 1)]


def _imported(module_name: str, path: str, seconds: float | None) -> ModuleType:
    """Import the module in time. Raises HandlerUnready, and whatever the module raises."""
    if seconds is None:
        return importlib.import_module(module_name)
    done = threading.Event()
    came: list[ModuleType] = []
    failed: list[BaseException] = []

    def work() -> None:
        try:
            came.append(importlib.import_module(module_name))
        except BaseException as error:  # noqa: BLE001  # it is raised where it is waited for
            failed.append(error)
        finally:
            done.set()

    # Nothing can end a thread that hangs: it is left behind, and ends with the process.
    thread = threading.Thread(target=work, name="mldserver-import", daemon=True)
    thread.start()
    if not done.wait(seconds):
        frame, file, line = sys._current_frames().get(thread.ident or 0), "", 0  # noqa: SLF001  # the module says it is for that
        while frame is not None and not file:
            name = frame.f_code.co_filename
            file, line = ("", 0) if name.startswith("<") or is_library(name) else (name, frame.f_lineno)
            frame = frame.f_back
        raise HandlerUnready(
            (f"{relative(file)}:{line}: " if file else "")
            + f"importing the handler takes longer than {seconds:g} s.",
            advice="Move slow or blocking code into `initialize`, with time-outs.",
            handler=path,
            file=file,
            line=line,
        )
    if failed:
        raise failed[0]
    return came[0]


def _import(module_name: str, path: str, seconds: float | None) -> ModuleType:
    """Import the module, then restore what it must not change.

    That is pyspark's ways to a session, and structlog's configuration, which must not be missing even for a moment,
    because the loop logs meanwhile.
    """
    # In Spark's driver, where imports have no time limit, hooks of other functions use the session in other threads.
    guard = spark_at_import.ImportGuard(threading.get_ident() if seconds is None else None)
    configured = structlog.get_config() if structlog.is_configured() else None
    if configured is not None:
        configured["processors"] = list(configured["processors"])  # the module might change the list itself
    try:
        with standing_in():
            guard.begin()
            try:
                return _imported(module_name, path, seconds)
            finally:
                guard.end()
                if configured is None:
                    structlog.reset_defaults()
                elif structlog.get_config() != configured:
                    structlog.configure(**configured)
    except (KeyboardInterrupt, HandlerUnready):
        raise
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_name != missing and not module_name.startswith(f"{missing}."):
            raise _broken(error, path) from error
        if _extend_parent_package(missing):
            return _import(module_name, path, seconds)
        raise HandlerNotFound(
            f"There is no module {missing!r}.", advice=_module_advice(missing), handler=path
        ) from None
    except BaseException as error:  # the user's module may raise anything, SystemExit included
        raise _broken(error, path) from error


def _extend_parent_package(missing: str) -> bool:
    """Extend the parent package of module ``missing`` by same-named folders elsewhere on the path.

    Return whether there were any; False if the module has no parent package. A user's own package ``handlers`` hides the
    ready-made package ``handlers``: after this, modules of both can be imported.
    """
    parent = sys.modules.get(missing.rpartition(".")[0])
    folders = list(getattr(parent, "__path__", ()))
    if parent is None or not folders:
        return False
    all_folders = pkgutil.extend_path(folders, parent.__name__)
    if len(all_folders) == len(folders):
        return False
    parent.__path__ = all_folders
    return True


def _broken(error: BaseException, path: str) -> HandlerInvalid:
    """Return the error for an exception that the user's module raised, with its place."""
    # Neither the import machinery's frames nor ours.
    skipped = (__file__, importlib.__file__, spark_at_import.__file__)
    stack = traceback.extract_tb(error.__traceback__)
    frames = [f for f in stack if not f.filename.startswith("<frozen ") and f.filename not in skipped]
    file, line = "", 0
    if isinstance(error, SyntaxError) and error.filename:
        file, line = error.filename, error.lineno or 0
    elif frames:
        # An error inside a library is placed where the user's code called it.
        *_, frame = [frame for frame in frames if not is_library(frame.filename)] or frames
        file, line = frame.filename, frame.lineno or 0
    what = f"SyntaxError: {error.msg}" if isinstance(error, SyntaxError) else describe(error).error
    if isinstance(error, SystemExit):
        what = f"it ends the process while it is imported (sys.exit({error.code!r}))"
    where = f"{relative(file)}:{line}: " if file else ""
    text = "".join(traceback.format_list(frames) + traceback.format_exception_only(error))
    kind = HandlerUnready if isinstance(error, ConnectionError | TimeoutError | gaierror) else HandlerInvalid
    advice = _NO_SESSION if any(condition in what for condition in _WANT_A_SESSION) else ""
    return kind(f"{where}{what}", advice=advice, handler=path, file=file, line=line, traceback=text)


def _module_advice(missing: str) -> str:
    parent, _, last = missing.rpartition(".")
    try:
        folders: Iterable[str] | None = importlib.import_module(parent).__path__ if parent else sys.path[:1]
    except (ImportError, AttributeError):
        folders = None
    names = [module.name for module in pkgutil.iter_modules(folders)] if folders else []
    searched = (
        f"in the package {parent}" if parent else f"in {sys.path[0] or '.'} and among what is installed"
    )
    return f"It was searched {searched}. {_suggestion(last, names, parent)}".strip()


def _suggestion(name: str, known: list[str], parent: str = "") -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"Did you mean {parent + '.' if parent else ''}{close[0]}?" if close else ""
