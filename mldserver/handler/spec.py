"""What a handler is, once it was found and checked: its hooks, its schema, its windows."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mldserver.windows import WINDOW_COLUMNS, Batches, WindowSpec, span_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mldserver.handler.schema import Schema


class HandlerKind(enum.StrEnum):
    """Whether a handler is shared or made anew for each shard."""

    MODULE = "module"
    CLASS = "class"
    PROCESSOR = "processor"
    """A record processor class of amazon_kclpy: made for each shard, and keeps its shard's position itself."""


class RecordHook(enum.StrEnum):
    """What a handler is called with; a handler has exactly one of these hooks."""

    RECORD = "process_record"
    RECORDS = "process_records"
    TABLE = "process_table"


@dataclass(frozen=True, slots=True)
class HookSpec:
    """One hook of a handler."""

    name: str
    is_async: bool


@dataclass(frozen=True, slots=True)
class Finding:
    """Something about a handler that a check found."""

    text: str
    file: str = ""
    line: int = 0
    is_error: bool = True
    """False: it runs, but probably not as meant."""

    def __str__(self) -> str:
        """Return ``file:line: sentence``."""
        place = f"{self.file}:{self.line}: " if self.line else f"{self.file}: " if self.file else ""
        return f"{place}{'' if self.is_error else 'warning: '}{self.text}"


@dataclass(frozen=True, slots=True)
class HandlerSpec:
    """A handler that can be run."""

    path: str
    """The dotted path it was found by."""
    kind: HandlerKind
    target: Any
    """The module, or the class (what makes instances: a ``ProcessorClass`` for processors)."""
    record_hook: RecordHook
    hooks: Mapping[str, HookSpec]
    """Every hook it has (record, life-cycle, ``on_window``) by name."""
    schema: Schema | None
    """None: it has only side effects."""
    windows: WindowSpec | None
    """None without a schema; ``batches()`` when it has a schema but names no windows."""
    warnings: tuple[Finding, ...] = ()
    concurrency: int = 1
    """How many records of one batch, of different partition keys, it takes at the same time."""
    window_columns: tuple[str, str] | None = WINDOW_COLUMNS
    """The columns of the output that hold its window's start and end; None: the output has none."""
    writes_for_itself: bool = False
    """Whether ``on_window`` may return None, having written its window somewhere itself."""
    blocking: bool = False
    """Whether its synchronous hooks may wait for something: then they never run on the server's event loop."""
    version: str = ""
    """What its ``version`` says; else ``sha256:`` and the beginning of its module's hash; empty without a source."""

    @property
    def on_window(self) -> bool:
        """Whether rows go through ``on_window``; otherwise they are written as they are."""
        return "on_window" in self.hooks

    @property
    def time_column(self) -> str | None:
        """The column that windows are cut on; None for the arrival time, and for batches."""
        return getattr(self.windows, "on", None)


def windows_text(windows: WindowSpec | None) -> str:
    """Return how windows are cut, for people."""
    if windows is None:
        return "none"
    if isinstance(windows, Batches):
        return f"batches of at most {windows.max_rows} rows, each open for at most {span_text(windows.max_age_ms)}"
    late = f", open for {span_text(windows.lateness_ms)} after their end" if windows.lateness_ms else ""
    return f"tumbling, {span_text(windows.size_ms)} of {windows.on or 'arrival time'}{late}"
