"""Modules as another process has loaded them: their text is imported, whatever lies on the disk by now.

A deployment may replace the handler's files while a server runs. A process that starts later (Spark's driver, a Python worker
of Spark) must run the code that the server's other processes run.

This file imports nothing of ours: its text is run in Spark's Python workers (``spark/user_code.py``).
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import linecache
import sys
from typing import Any


class KeptLoader(importlib.machinery.SourceFileLoader):
    """Loads one module from its text. It keeps the file's name, so that the module finds data files in its folder."""

    def __init__(self, name: str, file: str, source: bytes) -> None:
        """Keep the text."""
        super().__init__(name, file)
        self._source = source

    def get_code(self, _name: str) -> Any:
        """Compile the text: a cached file may be that of another one. Tracebacks quote the text, too."""
        lines = importlib.util.decode_source(self._source).splitlines(keepends=True)
        linecache.cache[self.path] = len(self._source), None, lines, self.path
        return self.source_to_code(self._source, self.path)

    def get_data(self, path: str) -> bytes:
        """Return the text, or the content of another file."""
        return self._source if path == self.path else super().get_data(path)


class KeptModules:
    """Finds modules by name in what was kept, ahead of all other finders; they find the rest."""

    def __init__(self, code: dict[str, tuple[str, bytes]], *, origin: str = "") -> None:
        """``code``: file and text of each module by its name. ``origin``: the file that this call is in, if it was written for it."""
        self._code = code
        self.origin = origin

    def begin(self) -> None:
        """Find what is imported from now on."""
        sys.meta_path.insert(0, self)

    def end(self) -> None:
        """Find nothing any more."""
        sys.meta_path.remove(self)

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> Any:
        """Return where a kept module comes from."""
        if name not in self._code:
            return None
        file, source = self._code[name]
        return importlib.util.spec_from_file_location(name, file, loader=KeptLoader(name, file, source))
