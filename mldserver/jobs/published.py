"""The published windows of a function, as a view for queries of handlers (``FunctionView``)."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Final

from mldserver.base.clock import Clock
from mldserver.engine_jobs import FunctionView
from mldserver.ledger.contract import WindowEntry
from mldserver.ledger.operations import Ledger
from mldserver.output.layout import OUTPUTS, window_path
from mldserver.output.manifest import MANIFESTS, Manifest, latest
from mldserver.output.publish import shown_files
from mldserver.output.store import OutputStore

_SERIALS: Final = itertools.count(1)
"""Of all functions of the process."""

_FRESH_MS: Final = 1000
"""For how long a view is taken for the present one."""


@dataclass(kw_only=True, eq=False)
class PublishedWindows:
    """The published windows of one function, each in its present revision, as far as the ledger remembers them."""

    shape: FunctionView
    """The view without paths."""
    has_view: bool
    """Whether queries can see the windows: those in a database's table they cannot."""
    ledger: Ledger
    store: OutputStore
    clock: Clock
    after: tuple[str, ...] = ()
    """The functions that this one's windows come after."""
    until_ms: Callable[[], float] = lambda: -math.inf
    """Returns the event time up to which every window is published: those that end later may not be."""
    _view: FunctionView | None = None
    _read_ms: int | None = None
    _manifests: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Of an output on an object store: the files of each manifest that was read. Manifests never change."""

    async def view(self, *, fresh: bool = False) -> FunctionView | None:
        """Return the view; None: there is nothing to see. Without ``fresh`` it may be a second old.

        Raises LedgerError and OSError.
        """
        now_ms = self.clock.steady_ms()
        if fresh or self._read_ms is None or now_ms - self._read_ms >= _FRESH_MS:
            shape = replace(self.shape, serial=next(_SERIALS))  # before the look
            if self.shape.is_table:
                self._view = shape
            elif self.has_view:
                entries = await self.ledger.visible_windows()
                self._view = await asyncio.to_thread(self._view_of, shape, entries)
            self._read_ms = now_ms
        return self._view

    async def view_of(self, entry: WindowEntry) -> FunctionView | None:
        """Return the view of one published window; None if it has no output. Raises OSError, and ValueError as ``Manifest.decode``."""
        view = replace(self.shape, window=entry.window_id, columns=None, schema="")
        if view.is_table:
            return view
        files = await asyncio.to_thread(shown_files, self.store, entry.window_id)
        return replace(view, paths=tuple(map(self.store.uri, files))) if files else None

    def _view_of(self, shape: FunctionView, entries: Iterable[WindowEntry]) -> FunctionView | None:
        """Return the view of published windows. Blocking."""
        shown = sorted((entry.start_ms or 0, entry.window_id) for entry in entries)
        windows = [window for _, window in shown]
        paths = self._folders(windows) if self.store.local else self._files(windows)
        if not (paths or shape.schema):
            return None
        return replace(shape, paths=tuple(map(self.store.uri, paths)))

    def _folders(self, windows: list[str]) -> list[str]:
        """Return the folders of windows that have an output."""
        return [path for path in map(window_path, windows) if self.store.exists(path)]

    def _files(self, windows: list[str]) -> list[str]:
        """Return the folders of outputs that the windows' latest manifests name."""
        manifests = latest(path for path, _ in self.store.files(MANIFESTS))
        wanted = [manifests[window] for window in windows if window in manifests]
        unread = [path for path in wanted if path not in self._manifests]
        read = self.store.for_each(lambda path: Manifest.decode(self.store.get(path)).files, unread)
        self._manifests |= dict(zip(unread, read, strict=True))
        depth = OUTPUTS.count("/") + 3
        files = (file for path in wanted for file in self._manifests[path][:1])
        return ["/".join(file.split("/")[:depth]) for file in files]
