"""The shape of a pipeline's rows: their columns, how they are cut into windows, where those go. A synchronous core.

Every segment's name contains the shape of its rows, and the ledger keeps all shapes. So the server compares a changed
handler with the stored older rows before the handler runs. What keeps their meaning goes on: a column added that may
be
NULL, a number widened, NOT NULL dropped, another order. Then old segments are read as they were written. Other
changes are refused while older segments exist: read by name, a renamed column would be NULL in each.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, replace
from typing import Final

from mldserver.errors import NotThereYet, OperatorError
from mldserver.ledger.contract import LedgerState, ShapeChange, WindowEntry, WindowState
from mldserver.output.layout import written
from mldserver.windows import TimeWindows, WindowSpec, span_text

_DIGITS: Final = {"TINYINT": 3, "SMALLINT": 5, "INT": 10, "BIGINT": 19}
"""Decimal digits of whole numbers, narrow to wide."""
_EXACT: Final = {"FLOAT": ("TINYINT", "SMALLINT"), "DOUBLE": ("TINYINT", "SMALLINT", "INT", "FLOAT")}
"""What each of them holds without loss."""
_DECIMAL: Final = re.compile(r"DECIMAL\((\d+),(\d+)\)")


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the handler's rows."""

    name: str
    type: str
    """As Spark writes it."""
    nullable: bool = True

    def __str__(self) -> str:
        return f"{self.name} {self.type}{'' if self.nullable else ' NOT NULL'}"


@dataclass(frozen=True, slots=True)
class Shape:
    """What rows are like, and how they are cut."""

    pipeline: str
    columns: tuple[Column, ...] = ()
    windows: str = ""
    """For people, and equal where rows are cut alike; empty for a handler without rows."""
    size_ms: int | None = None
    """Of event-time windows; of sliding ones, of their panes."""
    on: str | None = None
    """The column of the event time; None for the arrival time, and for batches."""
    table: str | None = None
    """What windows are published into; None for files."""

    @classmethod
    def of(
        cls, pipeline: str, columns: tuple[Column, ...], spec: WindowSpec | None, table: str | None = None
    ) -> Shape:
        """Return the shape of a handler's rows; ``spec`` is None for a handler without rows."""
        if not isinstance(spec, TimeWindows):
            return cls(pipeline, columns, "batches" if spec else "", table=table)
        every = f" every {span_text(spec.every_ms)}" if spec.every_ms else ""
        of = f"windows of {span_text(spec.size_ms)}{every} of {spec.on or 'arrival time'}"
        return cls(pipeline, columns, of, spec.pane_ms, spec.on, table)

    @classmethod
    def read(cls, text: str) -> Shape:
        """Return the shape that ``text`` was made of."""
        fields = json.loads(text)
        return cls(**{**fields, "columns": tuple(Column(*column) for column in fields["columns"])})

    @property
    def text(self) -> str:
        """The shape for the ledger."""
        names = ("pipeline", "windows", "size_ms", "on", "table")
        columns = [[column.name, column.type, column.nullable] for column in self.columns]
        return json.dumps({name: getattr(self, name) for name in names} | {"columns": columns})

    @property
    def fingerprint(self) -> str:
        """Twelve hexadecimal digits that stand for it; the order of columns does not count."""
        ordered = replace(self, columns=tuple(sorted(self.columns, key=lambda column: column.name)))
        return hashlib.sha256(ordered.text.encode()).hexdigest()[:12]

    @property
    def ddl(self) -> str:
        """The columns as Spark DDL, their names quoted."""
        quoted = [replace(column, name=f"`{column.name.replace('`', '``')}`") for column in self.columns]
        return ", ".join(map(str, quoted))

    def older(self, state: LedgerState) -> dict[str, str]:
        """Return the DDL of each shape with other columns that segments may have, by fingerprint."""
        own = {(column.name, column.type) for column in self.columns}
        shapes = {fingerprint: Shape.read(text) for fingerprint, text in state.shapes.items()}
        return {
            fingerprint: shape.ddl
            for fingerprint, shape in shapes.items()
            if {(column.name, column.type) for column in shape.columns} != own
        }

    def change(self, state: LedgerState) -> ShapeChange:
        """Return what becomes of a ledger whose rows are of this shape from now on.

        Raises OperatorError when it holds rows whose meaning the change would not keep, unless the pipeline was drained:
        then their windows are published, and are over.
        """
        shapes = {fingerprint: Shape.read(text) for fingerprint, text in state.shapes.items()}
        faults = {fingerprint: self.faults(shape) for fingerprint, shape in shapes.items()}
        unfit = {
            entry.window_id: (entry, faults[shape])
            for entry in state.windows.values()
            for shape in {written(segment.path).shape for segment in (*entry.segments, *entry.pending)}
            if faults.get(shape)
        }
        for entry, reasons in unfit.values():
            if not state.draining:
                raise OperatorError(
                    f"The handler does not go with the rows that the ledger holds: {'; '.join(reasons)}.",
                    did="Nothing was touched.",
                    advice="Run the handler as it was, or change it in order: `mldserver drain` with the handler as it"
                    " was, then start it as it is now (`mldserver help operations`). Or start again in a separate folder"
                    " (--out).",
                    pipeline=self.pipeline,
                )
            if entry.state is not WindowState.PUBLISHED or entry.pending:
                raise self._unfinished(entry, reasons)
        before = shapes.get(state.shape, self)
        return ShapeChange(
            self.fingerprint,
            self.text,
            over=frozenset(unfit),
            window_ms=self.size_ms if before.windows != self.windows else None,
            forget_event_times=before.on != self.on,
        )

    def rival(self, state: LedgerState, server_id: str) -> OperatorError | None:
        """Return an error that names a server with another shape; None if all servers have this shape."""
        for server in state.servers.values():
            if server.server_id != server_id and server.shape not in {"", self.fingerprint}:
                other = Shape.read(state.shapes[server.shape])
                reasons = self.faults(other) or [f"it has {other.ddl}, and this one {self.ddl}"]
                return NotThereYet(
                    f"The server {server.server_id} runs with another handler: {'; '.join(reasons)}.",
                    did="This server did not start.",
                    advice="Stop that one first, or give this one the same handler: all servers of a pipeline have one.",
                    pipeline=self.pipeline,
                    server=server.server_id,
                )
        return None

    def faults(self, before: Shape) -> list[str]:
        """Return why rows of the shape ``before`` would not keep their meaning, one part of a sentence each."""
        if not before.windows:
            return []
        faults = []
        now, then = ({column.name: column for column in shape.columns} for shape in (self, before))
        gone = [f"column {column} is gone" for name, column in then.items() if name not in now]
        for name, column in now.items():
            old = then.get(name)
            if old is None and (gone or not column.nullable):
                faults.append(f"column {column} is new")
            elif old is not None and not (_holds(column.type, old.type) and column.nullable >= old.nullable):
                null = "" if column.nullable else " NOT NULL"
                faults.append(f"column {old} has become {column.type}{null}")
        faults = gone + faults
        if before.windows != self.windows:
            faults.append(f"there were {before.windows}, and are {self.windows or 'no windows'}")
        if before.pipeline != self.pipeline:
            faults.append(f"the pipeline was {before.pipeline}, and is {self.pipeline}")
        if before.table != self.table:
            faults.append(f"windows went into {before.table or 'files'}, and go into {self.table or 'files'}")
        return faults

    def _unfinished(self, entry: WindowEntry, reasons: list[str]) -> OperatorError:
        return OperatorError(
            f"Window {entry.window_id} is {entry.state.replace('_', ' ')}, and has rows that do not go with the handler:"
            f" {'; '.join(reasons)}.",
            did="Nothing was touched.",
            advice="Run `mldserver drain` with the handler as it was until it ends with exit code 0; what was set aside is"
            f" computed again after `mldserver windows retry {entry.window_id}` (`mldserver help operations`).",
            pipeline=self.pipeline,
            window=entry.window_id,
        )


def _holds(wide: str, narrow: str) -> bool:
    """Whether every value of a type is the same value of another."""
    if wide == narrow or narrow in _EXACT.get(wide, ()):
        return True
    if wide in _DIGITS and narrow in _DIGITS:
        return _DIGITS[wide] > _DIGITS[narrow]
    now = _DECIMAL.fullmatch(wide)
    then = _DECIMAL.fullmatch(f"DECIMAL({_DIGITS[narrow]},0)" if narrow in _DIGITS else narrow)
    if now is None or then is None:
        return False
    # Digits before and behind the point.
    return int(now[1]) - int(now[2]) >= int(then[1]) - int(then[2]) and int(now[2]) >= int(then[2])
