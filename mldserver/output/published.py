"""The published windows of a function, as a view for queries of handlers (``spark/view.py``)."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Final

from mldserver.base.clock import Clock
from mldserver.handler.spec import HandlerSpec
from mldserver.ledger.contract import LedgerState, WindowState
from mldserver.ledger.operations import Ledger
from mldserver.output.layout import OUTPUTS, window_path
from mldserver.output.manifest import MANIFESTS, Manifest, latest
from mldserver.output.store import OutputStore
from mldserver.sinks import find
from mldserver.sinks.sink import SinkSpec
from mldserver.spark.view import View
from mldserver.windows import WINDOW_COLUMNS, Tumbling

_FRESH_MS: Final = 1000
"""For how long a view is taken for the present one."""


@dataclass(kw_only=True, eq=False)
class PublishedWindows:
    """The published windows of one function, each in its present revision, as far as the ledger remembers them."""

    name: str
    """The function's."""
    spec: HandlerSpec
    sink: SinkSpec | None
    ledger: Ledger
    store: OutputStore
    clock: Clock
    _view: View | None = None
    _read_ms: int | None = None
    _manifests: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Of an output on an object store: the files of each manifest that was read. Manifests never change."""

    async def view(self, *, fresh: bool = False) -> View | None:
        """Return the view; None: there is nothing to see. Without ``fresh`` it may be a second old.

        Raises LedgerError and OSError.
        """
        now_ms = self.clock.steady_ms()
        if fresh or self._read_ms is None or now_ms - self._read_ms >= _FRESH_MS:
            if self.sink is not None:
                has_files = hasattr(find(self.sink.format), "files")  # a database's table has none
                self._view = View(self.name, (), sink=self.sink) if has_files else None
            else:
                state = await self.ledger.peek()
                self._view = await asyncio.to_thread(self._view_of, state)
            self._read_ms = now_ms
        return self._view

    def _view_of(self, state: LedgerState) -> View | None:
        """Return the view of what the ledger holds. Blocking."""
        shown = sorted(
            (entry.start_ms or 0, entry.window_id)
            for entry in state.windows.values()
            if entry.state is WindowState.PUBLISHED or entry.revision > 1
        )
        windows = [window for _, window in shown]
        paths = self._folders(windows) if self.store.local else self._files(windows)
        if not paths:
            return None
        tumbling = self.spec.windows if isinstance(self.spec.windows, Tumbling) else None
        columns = None if tumbling is None else self.spec.window_columns or WINDOW_COLUMNS
        return View(
            self.name, tuple(map(self.store.uri, paths)), columns, 0 if tumbling is None else tumbling.size_ms
        )

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
