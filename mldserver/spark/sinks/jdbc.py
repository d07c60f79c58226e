"""JDBC: Spark writes a window into a stage table, one transaction moves it into the table.

Beside the table lie ``<table>__windows``, with the revision of each window that the table holds, and for a while
``<table>__stage_<random>``, one for each try: Spark's tasks commit one by one, so nobody may read what they write.
The steps, each of which may be the last of a process:

    claim     the window's line names this try's stage (and the stage of a try that died is dropped)
    fill      Spark writes the stage
    move      one transaction: the line takes the revision, if it still names this stage; the window's rows go, the
              stage's come
    clear     the stage is dropped, the line names none

Whoever claims later, on this server or another, wins: the transaction of the earlier one finds its stage named no more.
Classic Spark only: Spark Connect gives no access to ``java.sql``.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from mldserver.errors import OperatorError
from mldserver.spark.sinks.sink import WINDOW, check_made_here, staged

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import DataFrame, SparkSession

    from mldserver.jobs.engine import PublishJob
    from mldserver.spark.sinks.sink import SinkSpec

_URL = re.compile(r"[A-Za-z0-9]+:\S.*")
_NONE: Final = "none"
"""Stage of a window that has none. (Not an empty text: Oracle takes that for NULL.)"""

_COLUMN_TYPES: Final = f"`{WINDOW}` VARCHAR(64)"
"""Databases make strings large objects, which cannot be compared, unless they are told a length."""


@dataclass(frozen=True, slots=True)
class Try:
    """One try to write one output."""

    job: PublishJob
    table: str
    stage: str

    @property
    def windows(self) -> str:
        """The table of windows and revisions."""
        return suffixed(self.table, "__windows")

    @property
    def key(self) -> tuple[str, str]:
        """What a line of it is found by."""
        return self.job.window.pipeline, self.job.window.id


def parse(target: str) -> str:
    """Return the URL without its ``jdbc:``. Raises ValueError."""
    if not _URL.fullmatch(target):
        raise ValueError("it is no JDBC URL")
    return target


def check_settings(sink: SinkSpec) -> None:
    """Raise ValueError where no table is named."""
    if not sink.table:
        raise ValueError("it names a database, and no table in it: set sink_table")


def check(spark: SparkSession, sink: SinkSpec) -> None:
    """Raise OperatorError where there is no driver, are no transactions, or the table is not one of ours."""
    if type(spark).__module__.startswith("pyspark.sql.connect"):
        raise OperatorError(
            "Spark Connect gives no access to JDBC transactions.",
            advice="Set spark_master to a Spark of the server's own, such as local[*], or choose another sink.",
        )
    with connected(spark, sink) as database:
        if not database.has_transactions():
            raise OperatorError("The database of sink has no transactions.", advice="Choose another sink.")
        columns = database.columns(sink.table)
    if columns is not None:
        check_made_here(columns, sink.table)


def publish(spark: SparkSession, sink: SinkSpec, job: PublishJob) -> None:
    """Replace the window's rows in the table by those of its revision, unless it has them, or later ones, already."""
    attempt = Try(job, sink.table, suffixed(sink.table, f"__stage_{secrets.token_hex(6)}"))
    with connected(spark, sink) as database:
        if not claim(database, attempt):
            return
        create = database.columns(sink.table) is None
    if job.files:
        fill(staged(spark, job), sink, attempt, create=create)
    with connected(spark, sink) as database:
        try:
            move(database, attempt)
        finally:
            clear(database, attempt)


def claim(database: Database, attempt: Try) -> bool:
    """Name this try's stage as the window's, and drop that of a try that died. False: the table has the revision."""
    windows, revision = attempt.windows, attempt.job.window.revision
    if database.columns(windows) is None:
        database.change(
            f"CREATE TABLE {windows} (pipeline VARCHAR(255) NOT NULL, window_id VARCHAR(64) NOT NULL,"
            " revision INTEGER NOT NULL, stage VARCHAR(255) NOT NULL, PRIMARY KEY (pipeline, window_id))"
        )
    line = database.first(
        f"SELECT revision, stage FROM {windows} WHERE pipeline = ? AND window_id = ?",  # noqa: S608  # the operator's own name
        *attempt.key,
    )
    if line is None:
        database.change(f"INSERT INTO {windows} VALUES (?, ?, 0, ?)", *attempt.key, attempt.stage)  # noqa: S608  # see above
        return True
    noted, left = int(line[0]), line[1]
    due = noted < revision
    changed = database.change(
        f"UPDATE {windows} SET stage = ? WHERE pipeline = ? AND window_id = ? AND revision = ? AND stage = ?",  # noqa: S608  # see above
        attempt.stage if due else left,
        *attempt.key,
        noted,
        left,
    )
    if not changed:
        raise RuntimeError(f"another server writes window {attempt.job.window.id} at the same time")
    if left != _NONE:
        database.drop(left)
        if not due:
            _name_none(database, attempt, left)
    return due


def fill(rows: DataFrame, sink: SinkSpec, attempt: Try, *, create: bool) -> None:
    """Let Spark write the stage; and the table, without rows, when it is to ``create`` it."""
    lower = {name.lower(): value for name, value in sink.options.items()}
    types = ", ".join(filter(None, [lower.get("createtablecolumntypes"), _COLUMN_TYPES]))
    options = sink.options | {"url": f"jdbc:{sink.target}", "createTableColumnTypes": types}
    if create:
        # Appended, since another server may have made it meanwhile.
        table = rows.limit(0).write.format("jdbc").options(**options).option("dbtable", attempt.table)
        table.mode("append").save()
    # Spark's default mode is wanted: a table of this name is none of this try's.
    rows.write.format("jdbc").options(**options).option("dbtable", attempt.stage).save()


def move(database: Database, attempt: Try) -> None:
    """Replace the window's rows by the stage's, in one transaction.

    Raises RuntimeError when another try has claimed the window, or a task's rows are missing or there twice.
    """
    job, table = attempt.job, attempt.table
    columns = database.columns(table)
    stage = database.columns(attempt.stage) if job.files else {}
    if stage is None or (columns is None and job.files):
        raise RuntimeError(f"the stage of window {job.window.id} is gone: another server writes the window")
    with database.together():
        # First, so that whoever else writes this window waits here.
        changed = database.change(
            f"UPDATE {attempt.windows} SET revision = ? WHERE pipeline = ? AND window_id = ? AND stage = ?"  # noqa: S608  # the operator's own name
            " AND revision < ?",
            job.window.revision,
            *attempt.key,
            attempt.stage,
            job.window.revision,
        )
        if not changed:
            raise RuntimeError(f"another server has claimed window {job.window.id}")
        if columns is not None:
            window = database.quoted(columns[WINDOW])
            database.change(f"DELETE FROM {table} WHERE {window} = ?", job.window.id)  # noqa: S608  # see above
        if columns is not None and stage:
            _insert(database, attempt, columns, stage)


def _insert(database: Database, attempt: Try, columns: dict[str, str], stage: dict[str, str]) -> None:
    foreign = sorted(stage.keys() - columns.keys())
    if foreign:
        raise RuntimeError(f"the table {attempt.table} has no column {', '.join(foreign)}")
    into = ", ".join(database.quoted(columns[name]) for name in stage)
    source = ", ".join(database.quoted(name) for name in stage.values())
    inserted = database.change(
        f"INSERT INTO {attempt.table} ({into}) SELECT {source} FROM {attempt.stage}"  # noqa: S608  # the operator's own names
    )
    # A task that ran twice on a cluster may have written twice (Spark's JDBC writer commits each task for itself).
    if inserted != attempt.job.rows:
        raise RuntimeError(
            f"the stage of window {attempt.job.window.id} holds {inserted} rows, not {attempt.job.rows}"
        )


def clear(database: Database, attempt: Try) -> None:
    """Drop this try's stage, and name none. Repeatable."""
    database.drop(attempt.stage)
    _name_none(database, attempt, attempt.stage)


def _name_none(database: Database, attempt: Try, stage: str) -> None:
    database.change(
        f"UPDATE {attempt.windows} SET stage = ? WHERE pipeline = ? AND window_id = ? AND stage = ?",  # noqa: S608  # the operator's own name
        _NONE,
        *attempt.key,
        stage,
    )


_OF_SPARK: Final = frozenset(
    {
        "batchsize",
        "cascadetruncate",
        "createtablecolumntypes",
        "createtableoptions",
        "driver",
        "isolationlevel",
        "numpartitions",
        "querytimeout",
        "sessioninitstatement",
        "truncate",
    }
)
"""Options of Spark's writer, lower case: they are no properties of a connection."""

_NO_TABLE: Final = ("42", "S0")
"""How SQLSTATEs begin that tell of names that are not there (SQL:2003 class 42; SQL Server says S0002 too)."""

_ADVICE: Final = (
    "Give Spark the database's driver: spark_conf spark.jars=PATH or spark.jars.packages=GROUP:NAME:VERSION, and "
    "sink_options driver=CLASS."
)


class Database:
    """One connection. Every statement is a transaction of its own, but for those within ``together``."""

    def __init__(self, connection: Any, dialect: Any) -> None:
        """Hold a ``java.sql.Connection`` and Spark's ``JdbcDialect``."""
        self._connection = connection
        self._dialect = dialect

    def quoted(self, name: str) -> str:
        """Return a column's name as Spark writes it too, when it creates a table."""
        return str(self._dialect.quoteIdentifier(name))

    def has_transactions(self) -> bool:
        """Whether several statements can be made one."""
        return bool(self._connection.getMetaData().supportsTransactions())

    def change(self, statement: str, *values: str | int) -> int:
        """Run a statement that changes something; return how many rows it did."""
        with self._prepared(statement, *values) as prepared:
            return int(prepared.executeUpdate())

    def first(self, statement: str, *values: str | int) -> tuple[str, ...] | None:
        """Return the first row of a query as text, None when there is none."""
        with self._prepared(statement, *values) as prepared:
            rows = prepared.executeQuery()
            width = rows.getMetaData().getColumnCount()
            return tuple(str(rows.getString(place + 1)) for place in range(width)) if rows.next() else None

    def columns(self, table: str) -> dict[str, str] | None:
        """Return a table's columns, by their names in lower case; None when there is no such table."""
        from py4j.protocol import Py4JJavaError  # noqa: PLC0415  # only the driver pays for pyspark

        try:
            with self._prepared(f"SELECT * FROM {table} WHERE 1 = 0") as prepared:  # noqa: S608  # the operator's own name
                about = prepared.executeQuery().getMetaData()
                names = [str(about.getColumnName(place + 1)) for place in range(about.getColumnCount())]
        except Py4JJavaError as error:
            if str(error.java_exception.getSQLState()).startswith(_NO_TABLE):
                return None
            raise
        return {name.lower(): name for name in names}

    @contextlib.contextmanager
    def _prepared(self, statement: str, *values: str | int) -> Iterator[Any]:
        prepared = self._connection.prepareStatement(statement)
        try:
            for place, value in enumerate(values, 1):
                prepared.setObject(place, value)
            yield prepared
        finally:
            prepared.close()

    def drop(self, table: str) -> None:
        """Drop a table, if it exists."""
        if self.columns(table) is not None:
            self.change(f"DROP TABLE {table}")

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Make the statements within one transaction: all count at its end, none when it raises."""
        self._connection.setAutoCommit(False)
        try:
            yield
            self._connection.commit()
        except BaseException:
            self._connection.rollback()
            raise
        finally:
            self._connection.setAutoCommit(True)


@contextlib.contextmanager
def connected(spark: SparkSession, sink: SinkSpec) -> Iterator[Database]:
    """Open a connection in the driver's JVM. Raises OperatorError without a driver for the URL, and Py4JJavaError."""
    from py4j.protocol import Py4JJavaError  # noqa: PLC0415  # only the driver pays for pyspark

    # The only way to java.sql; what is called there has been the same since Java 1.4.
    jvm: Any = spark.sparkContext._jvm  # noqa: SLF001  # see above
    url = f"jdbc:{sink.target}"
    properties = jvm.java.util.Properties()
    for name, value in sink.options.items():
        if name.lower() not in _OF_SPARK:
            properties.setProperty(name, value)
    class_name = sink.options.get("driver")
    try:
        if class_name is None:
            java_driver = jvm.java.sql.DriverManager.getDriver(url)
        else:
            # As Spark does: jars of spark.jars are known to this loader only.
            loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
            java_driver = jvm.java.lang.Class.forName(class_name, True, loader).newInstance()
    except Py4JJavaError as error:
        what = "no driver for the URL of sink" if class_name is None else f"no class {class_name}"
        raise OperatorError(f"Java has {what}.", advice=_ADVICE) from error
    connection = java_driver.connect(url, properties)
    if connection is None:
        raise OperatorError(
            f"The class {class_name} is no driver for the URL of sink.", advice="Look at both settings."
        )
    try:
        yield Database(connection, jvm.org.apache.spark.sql.jdbc.JdbcDialects.get(url))
    finally:
        connection.close()


def suffixed(table: str, suffix: str) -> str:
    """Return the name of a table beside ``table``, in its schema and in its quotes."""
    closing = re.search(r"[\"`\]]?$", table)
    assert closing is not None
    return f"{table[: closing.start()]}{suffix}{closing[0]}"
