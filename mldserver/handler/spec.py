"""What a handler is, once it was found and checked: its hooks, its schema, its windows. Synchronous.

The schema is Spark DDL, made into columns and Arrow types without Spark or Java. sqlglot's Spark dialect parses the text
as the columns of a table; plain names with simple types are read without it, since its import is a fifth of the start of
every server, worker and driver. What cannot be carried from a Python value through Parquet to Spark without a change of
meaning is refused here, by name:

* CHAR and VARCHAR: their lengths are enforced nowhere on the way; STRING says what really happens.
* NOT NULL inside STRUCTs: only whole columns are checked.
* INTERVAL, VARIANT, DEFAULT values, generated columns, keys: they have no meaning for rows that a handler returns.
"""

from __future__ import annotations

import difflib
import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa

from mldserver.handler.changes import ChangeHooks
from mldserver.handler.queries import Lookup, LookupSpec
from mldserver.windows import WINDOW_COLUMNS, Batches, WindowSpec, span_text

RECORD_COLUMN = "record"
"""The column of a returned table that says which record of the input each row comes from."""


class HandlerKind(enum.StrEnum):
    """Whether shards share a handler, or each shard gets a new one."""

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
    takes_context: bool = False
    """Whether it is called with a ``Context``, too."""
    takes_previous: bool = False
    """Whether ``on_window`` is called with the result of the window before, too."""


@dataclass(frozen=True, slots=True)
class TimerHook:
    """A callback of timers."""

    name: str
    is_async: bool
    max_lateness_ms: int | None = None
    """A timer whose first call would be later than this after its due time is skipped; None: it is called however late."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something about a handler that a check found."""

    text: str
    file: str = ""
    line: int = 0
    is_error: bool = True
    """False: it runs, but probably not as meant."""

    def __str__(self) -> str:
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
    changes: ChangeHooks | None = None
    """Which hooks take DynamoDB changes, if they do: ``target`` then stands around the module or class."""
    keyed: bool = False
    """Whether its record hook takes a ``Context``: it has state by partition key."""
    state_ttl_ms: int | None = None
    """How long a key's state stays after its last write (``state_ttl``); None: until the handler deletes it."""
    timers: Mapping[str, TimerHook] = field(default_factory=dict)
    """The callbacks of timers by name (``timer``)."""
    lookups: tuple[LookupSpec, ...] = ()
    """Its lookup tables."""
    after: tuple[str, ...] = ()
    """The functions of the server whose windows must be published first."""
    tables: Mapping[str, Lookup] = field(default_factory=dict)
    """Their objects by name, in a process that runs the handler."""
    code: dict[str, tuple[str, bytes]] = field(default_factory=dict, repr=False)
    """File and text of the user's modules by name, as they were loaded: what runs later runs the same (``Loaded.code``)."""

    @property
    def takes_previous(self) -> bool:
        """Whether its windows are computed one after the other, each with the result of the one before."""
        hook = self.hooks.get("on_window")
        return hook is not None and hook.takes_previous

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
    every = f" every {span_text(windows.every_ms)}" if windows.every_ms else ""
    kind = "sliding" if windows.every_ms else "tumbling"
    early = f", computed early every {span_text(windows.early_ms)}" if windows.early_ms else ""
    return f"{kind}, {span_text(windows.size_ms)}{every} of {windows.on or 'arrival time'}{late}{early}"


_SIMPLE: Final[dict[str, Any]] = {
    "BOOLEAN": pa.bool_(),
    "TINYINT": pa.int8(),
    "SMALLINT": pa.int16(),
    "INT": pa.int32(),
    "BIGINT": pa.int64(),
    "FLOAT": pa.float32(),
    "DOUBLE": pa.float64(),
    "STRING": pa.string(),
    "BINARY": pa.binary(),
    "DATE": pa.date32(),
    "TIMESTAMP": pa.timestamp("us", tz="UTC"),
    "TIMESTAMP_NTZ": pa.timestamp("us"),
}
_KNOWN: Final = (*_SIMPLE, "DECIMAL", "ARRAY", "MAP", "STRUCT")
_PLAIN: Final = re.compile(
    rf"\s*(?:([A-Za-z_]\w*)|`([\w -]+)`)\s+({'|'.join(_SIMPLE)})(\s+NOT\s+NULL)?\s*", re.ASCII | re.IGNORECASE
)
_SQLGLOT_NAMES: Final = {
    "TEXT": "STRING",
    # Spark's TIMESTAMP is a point in time: sqlglot says so by TIMESTAMPTZ.
    "TIMESTAMPTZ": "TIMESTAMP",
    "TIMESTAMPLTZ": "TIMESTAMP",
    "TIMESTAMPNTZ": "TIMESTAMP_NTZ",
}
"""What sqlglot calls otherwise than Spark."""
_DEFAULT_PRECISION: Final = 10
_MAX_PRECISION: Final = 38
_PAIR: Final = 2


class SchemaError(ValueError):
    """A schema cannot be used; ``problems`` lists every reason found, one sentence each."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = tuple(problems)


@dataclass(frozen=True, slots=True)
class SchemaColumn:
    """One column of a handler's rows."""

    name: str
    sql: str
    """Its type as Spark writes it, e.g. ``DECIMAL(10,2)``."""
    type: Any
    """Its Arrow type (``pyarrow.DataType``)."""
    nullable: bool = True
    comment: str | None = None


@dataclass(frozen=True, slots=True)
class Schema:
    """The columns of a handler's rows, in order."""

    columns: tuple[SchemaColumn, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The columns' names, in order."""
        return tuple(column.name for column in self.columns)

    @property
    def arrow(self) -> Any:
        """The Arrow schema (``pyarrow.Schema``) of the handler's own columns."""
        return pa.schema([pa.field(c.name, c.type, nullable=c.nullable) for c in self.columns])

    @property
    def ddl(self) -> str:
        """The schema as DDL that Spark reads back as the same columns, names quoted."""
        definitions = []
        for column in self.columns:
            not_null, comment = "" if column.nullable else " NOT NULL", ""
            if column.comment is not None:
                from sqlglot import exp  # noqa: PLC0415  # read by it, so imported

                comment = " COMMENT " + exp.Literal.string(column.comment).sql("spark")
            definitions.append(f"{_quoted(column.name)} {column.sql}{not_null}{comment}")
        return ", ".join(definitions)

    def column(self, name: str) -> SchemaColumn | None:
        """Return the column called exactly ``name``, or None."""
        return next((column for column in self.columns if column.name == name), None)


def parse_schema(ddl: str) -> Schema:
    """Parse Spark DDL such as ``"carrier STRING NOT NULL, delay DOUBLE"``.

    Raises SchemaError with every problem found.
    """
    problems: list[str] = []
    # Plain names with simple types; else all of it is read by sqlglot.
    plain = [_PLAIN.fullmatch(text) for text in ddl.split(",")]
    columns = [
        SchemaColumn(one[1] or one[2], sql := one[3].upper(), _SIMPLE[sql], nullable=not one[4])
        for one in (plain if all(plain) else ())
        if one
    ]
    for definition in [] if columns else _definitions(ddl):
        try:
            columns.append(_column(definition))
        except SchemaError as error:
            problems += error.problems
    names = [column.name for column in columns]
    reserved = "names that begin with an underscore are the server's own"
    problems += [f"column {name}: {reserved}" for name in names if name.startswith("_")]
    twice = "is there twice (Spark ignores case)"
    problems += [f"column {name} {twice}" for name in _twice(names)]
    if problems:
        raise SchemaError(problems)
    return Schema(tuple(columns))


def _definitions(ddl: str) -> list[Any]:
    """Parse the columns. Callers distinguish nodes by their ``key``, so that they do not need sqlglot's classes."""
    if not ddl.strip():
        raise SchemaError(["it is empty; a schema has at least one column, as in 'carrier STRING'"])
    from sqlglot import parse_one  # noqa: PLC0415  # see above
    from sqlglot.errors import SqlglotError  # noqa: PLC0415  # see above

    try:
        create = parse_one(f"CREATE TABLE t ({ddl}\n)", dialect="spark")
    except SqlglotError as error:
        word = (getattr(error, "errors", None) or [{}])[0].get("highlight") or ""
        if not word:
            raise SchemaError(["it is not Spark DDL such as 'carrier STRING, delay DOUBLE'"]) from None
        close = difflib.get_close_matches(word.upper(), _KNOWN, n=1)
        hint = f"; did you mean {close[0]}?" if close else f"; types are {', '.join(_KNOWN)}"
        hint = hint if word.isidentifier() else ""
        raise SchemaError([f"it cannot be read at {word!r}{hint}"]) from None
    except RecursionError:
        raise SchemaError(["its types are nested too deeply"]) from None
    extra = [key for key, value in create.args.items() if value and key not in {"this", "kind"}]
    if create.key != "create" or extra or create.this.key != "schema":
        raise SchemaError(["it is not a list of columns such as 'carrier STRING, delay DOUBLE'"])
    return list(create.this.expressions)


def _column(definition: Any) -> SchemaColumn:
    if definition.key == "identifier":
        raise SchemaError([f"column {definition.name} has no type (write: {definition.name} STRING)"])
    if definition.key != "columndef" or definition.this.key != "identifier":
        raise SchemaError([f"{definition.sql('spark')!r} is not a column (write: name TYPE)"])
    name = definition.name
    try:
        sql, type_ = _type(definition.args.get("kind"))
        nullable, comment = True, None
        for constraint in definition.args.get("constraints") or ():
            kind = constraint.kind
            if kind.key == "notnullcolumnconstraint":
                nullable = bool(kind.args.get("allow_null"))
            elif kind.key == "commentcolumnconstraint":
                comment = kind.name
            else:
                raise SchemaError([f"{constraint.sql('spark')} has no meaning in a handler's schema"])  # noqa: TRY301  # told with its column
    except SchemaError as error:
        raise SchemaError([f"column {name}: {problem}" for problem in error.problems]) from None
    return SchemaColumn(name, sql, type_, nullable, comment)


def _type(kind: Any) -> tuple[str, Any]:
    """Return a type as (Spark's text, Arrow's type)."""
    if kind is None or kind.key != "datatype":
        raise SchemaError(["it has no type"])
    name = getattr(kind.this, "name", "")
    name = _SQLGLOT_NAMES.get(name, name)
    if name in _SIMPLE:
        return name, _SIMPLE[name]
    parameters, text = kind.expressions, kind.sql("spark")
    match name:
        case "DECIMAL":
            return _decimal(parameters)
        case "STRUCT":
            return _struct(parameters)
        case "ARRAY":
            if len(parameters) != 1:
                raise SchemaError(["ARRAY needs one element type, as in ARRAY<STRING>"])
            sql, element = _type(parameters[0])
            return f"ARRAY<{sql}>", pa.list_(element)
        case "MAP":
            if len(parameters) != _PAIR:
                raise SchemaError(["MAP needs a key type and a value type, as in MAP<STRING, DOUBLE>"])
            (key_sql, key), (value_sql, value) = map(_type, parameters)
            return f"MAP<{key_sql}, {value_sql}>", pa.map_(key, value)
        case "CHAR" | "VARCHAR":
            raise SchemaError([f"{text}: lengths are not enforced, write STRING"])
    raise SchemaError([f"{text} is not supported; types are {', '.join(_KNOWN)}"])


def _decimal(parameters: list[Any]) -> tuple[str, Any]:
    texts = [parameter.name for parameter in parameters]
    if not all(text.isdecimal() for text in texts) or len(texts) > _PAIR:
        raise SchemaError([f"DECIMAL({', '.join(texts)}) is not DECIMAL(precision, scale)"])
    numbers = [int(text) for text in texts]
    precision, scale = [*numbers, *(_DEFAULT_PRECISION, 0)[len(numbers) :]]
    if not 1 <= precision <= _MAX_PRECISION or scale > precision:
        raise SchemaError(
            [f"DECIMAL({precision},{scale}): precision is 1 to 38, scale at most the precision"]
        )
    return f"DECIMAL({precision},{scale})", pa.decimal128(precision, scale)


def _struct(parameters: list[Any]) -> tuple[str, Any]:
    fields = [_column(parameter) for parameter in parameters]
    problems = [f"field {f.name}: only whole columns can be NOT NULL" for f in fields if not f.nullable]
    problems += [f"field {name} is there twice" for name in _twice([f.name for f in fields])]
    if not fields:
        problems = ["STRUCT needs fields, as in STRUCT<street: STRING, number: INT>"]
    if problems:
        raise SchemaError(problems)
    sql = ", ".join(f"{_quoted(f.name)}: {f.sql}" for f in fields)
    return f"STRUCT<{sql}>", pa.struct([pa.field(f.name, f.type) for f in fields])


def _twice(names: list[str]) -> list[str]:
    folded = [name.casefold() for name in names]
    return [name for place, name in enumerate(names) if name.casefold() in folded[:place]]


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"
