"""What the driver must know of a view: the published windows of a function."""

from __future__ import annotations

import msgspec

from mldserver.sinks.sink import SinkSpec  # msgspec reads it


class View(msgspec.Struct, frozen=True, array_like=True):
    """The published windows of a function, as files."""

    name: str
    """The function's."""
    paths: tuple[str, ...]
    """Files, or folders of files, as Spark takes them; the latest window's last."""
    columns: tuple[str, str] | None = None
    """The columns of a window's start and end; None: windows have none."""
    size_ms: int = 0
    """Of a window."""
    sink: SinkSpec | None = None
    """The table whose present files are the view, in place of ``paths``."""
