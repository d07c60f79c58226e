"""What code does, counted in operations: the same on every machine, however busy it is."""

from __future__ import annotations

import contextlib
import gc
import sqlite3
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

__all__ = ["Operations", "counting_python", "counting_sqlite"]


@dataclass
class Operations:
    """A count that rises while it is taken."""

    count: int = 0


@contextlib.contextmanager
def counting_python() -> Iterator[Operations]:
    """Count the bytecode instructions of this thread. What one call into C does counts once."""
    told = Operations()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        told.count += event == "opcode"
        return trace

    before = sys.gettrace()
    gc.disable()  # what ends other tests' garbage is no part of it
    sys.settrace(trace)
    try:
        yield told
    finally:
        sys.settrace(before)
        gc.enable()


@contextlib.contextmanager
def counting_sqlite(db: sqlite3.Connection) -> Iterator[Operations]:
    """Count the instructions of SQLite's virtual machine: a row that is looked at costs some."""
    told = Operations()

    def step() -> int:
        told.count += 1
        return 0

    db.set_progress_handler(step, 1)
    try:
        yield told
    finally:
        db.set_progress_handler(None, 1)
