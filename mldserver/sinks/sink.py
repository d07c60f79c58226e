"""What every table sink has in common: whose a table is, the staged rows, the columns that name their window, errors.

Revisions count within one ledger, and windows of two pipelines may have the same id. So a table belongs to one pipeline
on one ledger: the first claim is stored in or next to the table, and every start and every write compares the two.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from mldserver.base.uris import redacted
from mldserver.engine_jobs import PublishJob
from mldserver.errors import OperatorError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import DataType

WINDOW: Final = "_window"
"""Column of the window's id, text."""

REVISION: Final = "_revision"
"""Column of the window's revision, INT."""

PIPELINE: Final = "mldserver.pipeline"
"""Property of a table, or of a snapshot, that holds the pipeline's name."""

LEDGER: Final = "mldserver.ledger"
"""The same of the ledger's id."""

_CONDITION = re.compile(r"\[([A-Z][A-Z0-9_]+(?:\.[A-Z0-9_]+)*)\]")
_GLOB = re.compile(r"([\[\]{}*?\\])")


@dataclass(frozen=True, slots=True, repr=False)
class SinkSpec:
    """A place that windows are published into: plain values only, since it crosses a process border."""

    format: str
    """The sink's name (``sinks/__init__.py``)."""
    target: str
    """As the sink's ``parse`` returned it; it may hold a password."""
    table: str = ""
    """Setting ``sink_table``: a name as SQL takes it."""
    options: dict[str, str] = field(default_factory=dict)
    """Setting ``sink_options``, which Spark's writer takes; may hold secrets."""

    def __str__(self) -> str:
        """Return it as the setting ``sink`` was written, without secrets: for logs and messages."""
        return redacted(f"{self.format}:{self.target}")

    __repr__ = __str__


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose a table is. The ledger's id decides; the pipeline's name may change (``--rename-from``)."""

    pipeline: str
    ledger: str
    """The ledger's random id: a new or restored ledger has another."""


def owner_of(job: PublishJob) -> Owner:
    """Return whose the table must be that an output goes into."""
    return Owner(job.window.pipeline, job.ledger)


def must_note(found: Owner | None, owner: Owner, where: str, *, new_ledger: bool) -> bool:
    """Return whether ``owner`` must be stored with the table ``where``. Raises OperatorError if the table is another owner's.

    ``found``: the stored owner; None: the table has none. ``new_ledger``: replace another owner instead of raising.
    """
    if found is None or new_ledger or found.ledger == owner.ledger:
        return found != owner
    what = f"The table {where} belongs to pipeline {found.pipeline}; this is pipeline {owner.pipeline}."
    if found.pipeline == owner.pipeline:
        what = (
            f"The table {where} was written from another ledger of pipeline {owner.pipeline} (id {found.ledger}). This "
            f"server's ledger (id {owner.ledger}) is new, or was restored."
        )
    raise OperatorError(
        what,
        did="Nothing was written to the table.",
        advice="Name another table, or give the server the ledger that the table had. To go on in this table with this "
        "ledger, start once with --new-ledger: windows that are published from then on replace those of the same id, and "
        "all other rows stay.",
    )


def own_table(
    spark: SparkSession,
    sink: SinkSpec,
    name: str,
    owner: Owner,
    load: Callable[[], DataFrame | None],
    *,
    new_ledger: bool = False,
) -> DataFrame:
    """Store ``owner`` among the properties of a table; return the table. Raises OperatorError as ``must_note``.

    A table that does not exist is created, without rows: from the first start on, each other pipeline finds an owner. It
    has the columns of window and revision only (see ``add_columns``).

    ``name``: the table's name in SQL. ``load``: returns the table; None if it does not exist.
    """
    table = load()
    if table is None:
        from pyspark.sql import functions as F  # noqa: N812, PLC0415  # its usual name; only the driver pays for pyspark

        empty = spark.createDataFrame([], f"{WINDOW} STRING, {REVISION} INT")
        writer = empty.writeTo(name).using(sink.format).partitionedBy(F.col(WINDOW))
        try:
            writer.tableProperty(PIPELINE, owner.pipeline).tableProperty(LEDGER, owner.ledger).create()
        except Exception:
            # Another server may have created it at the same moment.
            if (table := load()) is None:
                raise
        else:
            table = load()
            assert table is not None, "it was created"
    rows = spark.sql(f"SHOW TBLPROPERTIES {name}").collect()
    properties = {str(row["key"]): str(row["value"]) for row in rows}
    found = Owner(properties.get(PIPELINE, ""), properties[LEDGER]) if LEDGER in properties else None
    if must_note(found, owner, sink.target, new_ledger=new_ledger):
        pairs = ", ".join(
            f"'{key}' = {_literal(value)}"
            for key, value in ((PIPELINE, owner.pipeline), (LEDGER, owner.ledger))
        )
        spark.sql(f"ALTER TABLE {name} SET TBLPROPERTIES ({pairs})")
    return table


def add_columns(spark: SparkSession, name: str, table: DataFrame, rows: DataFrame) -> None:
    """Give a table that ``own_table`` created the columns of its first output. ``name``: its name in SQL."""
    if {*table.columns} != {WINDOW, REVISION}:
        return
    columns = (field for field in rows.schema if field.name not in {WINDOW, REVISION})
    listed = ", ".join(f"{quoted(field.name)} {_sql_type(field.dataType)}" for field in columns)
    spark.sql(f"ALTER TABLE {name} ADD COLUMNS ({listed})")


def quoted(name: str) -> str:
    """Return a name in Spark's quotation marks."""
    return f"`{name.replace('`', '``')}`"


def _sql_type(kind: DataType) -> str:
    """Return a type in SQL. Spark's own ``simpleString`` does not quote the names of a structure's fields."""
    from pyspark.sql.types import ArrayType, MapType, StructType  # noqa: PLC0415  # only the driver pays for pyspark

    match kind:
        case ArrayType():
            return f"array<{_sql_type(kind.elementType)}>"
        case MapType():
            return f"map<{_sql_type(kind.keyType)},{_sql_type(kind.valueType)}>"
        case StructType():
            return f"struct<{','.join(f'{quoted(each.name)}:{_sql_type(each.dataType)}' for each in kind)}>"
    return kind.simpleString()


def _literal(text: str) -> str:
    escaped_text = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped_text}'"


def refuse_table(sink: SinkSpec) -> None:
    """Raise ValueError where ``sink_table`` is given beside a place that names the table already."""
    if sink.table:
        raise ValueError(f"it names the table already, and sink_table = {sink.table} another one")


def escaped(path: str) -> str:
    """Return a path for Spark's reader, which takes brackets and stars for patterns."""
    return _GLOB.sub(r"\\\1", path)


def staged(spark: SparkSession, job: PublishJob) -> DataFrame:
    """Return the committed output's rows with the columns that name their window and revision."""
    from pyspark.sql import functions as F  # noqa: N812, PLC0415  # its usual name; only the driver pays for pyspark

    files = (escaped(f"{job.staging}/{file}") for file in job.files)
    # One attempt's files have one schema: Spark looks into one footer only.
    return spark.read.parquet(*files).withColumns(
        {WINDOW: F.lit(job.window.id), REVISION: F.lit(job.window.revision)}
    )


def check_result(columns: Iterable[str]) -> None:
    """Raise ValueError when ``on_window`` returns columns that a table sink adds itself."""
    taken = sorted({WINDOW, REVISION} & {name.lower() for name in columns})
    if taken:
        raise ValueError(
            f"on_window returned the column {' and '.join(taken)}, which the table sink adds itself: name it otherwise"
        )


def check_made_here(columns: Iterable[str], where: str) -> None:
    """Raise OperatorError when a table that exists has no columns for window and revision."""
    missing = sorted({WINDOW, REVISION} - {name.lower() for name in columns})
    if missing:
        raise OperatorError(
            f"The table {where} exists and has no column {' and '.join(missing)}.",
            did="Nothing is written to it: without these, rows of a window could not be replaced.",
            advice="Name a table that does not exist, and the server makes it; or add the columns "
            f"{WINDOW} (text) and {REVISION} (integer).",
        )


def existing(
    load: Callable[[], DataFrame], no_table: Collection[str], faults: Mapping[str, str], advice: str
) -> DataFrame | None:
    """Return the table that ``load`` loads; None if it does not exist.

    Spark's errors name a condition, such as ``DATA_SOURCE_NOT_FOUND``. ``no_table``: those of a missing table. ``faults``:
    by condition, what is wrong with the session; raises OperatorError with ``advice`` for these. Raises all other errors.
    """
    try:
        table = load()
        table.schema  # noqa: B018  # Spark Connect looks the table up only now
    except Exception as error:  # Java's own exceptions are of many classes
        # Only some of Java's exceptions become Python's own. The others have the condition in their text.
        get_condition = getattr(error, "getCondition", None)
        condition: str = (get_condition() if callable(get_condition) else None) or ""
        if not condition and (match := _CONDITION.search(str(error))):
            condition = match[1]
        if condition in no_table:
            return None
        if condition in faults:
            raise OperatorError(faults[condition], advice=advice) from error
        raise
    return table
