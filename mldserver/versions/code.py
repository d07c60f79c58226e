"""Versions of a function's code: the user's modules as one archive in the output store, for every server of the function.

    <out>/_mldserver/code/<sha>.zip    <sha>: the first 12 digits of the SHA-256 of the archive

The ledger names the archive (``Version.path``). Workers, Spark's driver and its executors import the modules from the
text in it (``handler/kept_modules.py``). An empty path stands for the modules that are on the Python path.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Final, TypeAlias

from mldserver.errors import OperatorError
from mldserver.output.layout import CODE
from mldserver.output.store import OutputStore
from mldserver.versions.archive import archive, unarchived

Code: TypeAlias = dict[str, tuple[str, bytes]]
"""File and text of modules by name, as in ``HandlerSpec.code``."""

_DIGITS: Final = 12
_PACKAGE: Final = "__init__.py"
_NAMESPACE: Final = b"__path__ = __import__('pkgutil').extend_path(__path__, __name__)\n"
"""The text of a package that has no ``__init__.py``: other folders on the path may have parts of the package, too."""


def pack(code: Mapping[str, tuple[str, bytes]]) -> bytes:
    """Return modules as an archive. Equal modules give equal bytes, wherever their files are."""
    files = {}
    for name, (file, text) in code.items():
        path = name.replace(".", "/")
        files[f"{path}/{_PACKAGE}" if Path(file).name == _PACKAGE else f"{path}.py"] = text
    for parent in {str(parent) for path in files for parent in PurePosixPath(path).parents} - {"."}:
        files.setdefault(f"{parent}/{_PACKAGE}", _NAMESPACE)
    return archive(files)


def unpack(data: bytes, root: str) -> Code:
    """Return the modules of an archive. ``root``: the absolute path that tracebacks show for the archive.

    Files that are not modules are left out. Raises OperatorError if the archive cannot be read.
    """
    code = {}
    for path, text in unarchived(data, root).items():
        parts = path.removesuffix(".py").split("/")
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        if path.endswith(".py") and parts and all(part.isidentifier() for part in parts):
            code[".".join(parts)] = f"{root}/{path}", text
    return code


def code_path(data: bytes) -> str:
    """Return the path of an archive in the output store."""
    return f"{CODE}/{hashlib.sha256(data).hexdigest()[:_DIGITS]}.zip"


def store_code(store: OutputStore, data: bytes) -> str:
    """Write an archive into the output store and return its path there. Blocking. Raises OSError.

    When it returns, a power cut does not take the archive away.
    """
    path = code_path(data)
    store.replace(path, data)
    return path


def read_archive(store: OutputStore, path: str) -> bytes:
    """Return the bytes of an archive in the output store. Blocking. Raises OperatorError if it is missing or damaged."""
    place = store.uri(path)
    advice = "Stage the code again with `mldserver functions stage`, or go back with `mldserver functions rollback`."
    try:
        data = store.get(path)
    except OSError as error:
        raise OperatorError(f"The code {place} cannot be read: {error}.", advice=advice) from error
    if code_path(data) != path:
        raise OperatorError(f"The code {place} is damaged: its content has another hash.", advice=advice)
    return data


def read_code(store: OutputStore, path: str) -> Code:
    """Return the modules of the archive that a version names (``Version.path``); none for an empty path.

    Blocking. Raises OperatorError if the archive is missing or damaged.
    """
    if not path:
        return {}
    # Python makes the file of a module absolute, and ``__file__`` must stay what the module was given.
    return unpack(read_archive(store, path), store.uri(path) if store.local else f"/{path}")
