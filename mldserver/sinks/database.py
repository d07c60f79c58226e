"""One JDBC connection in the driver's JVM, and what databases have in common: names, transactions, words."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from mldserver.errors import OperatorError
from mldserver.sinks.sink import SinkSpec

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SPARK_OPTIONS: Final = frozenset(
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
"""Options of Spark's writer, lower case. They are not connection properties."""

_NO_TABLE: Final = ("42", "S0")
"""SQLSTATE prefixes for unknown names (SQL:2003 class 42; SQL Server also uses S0002)."""

_NO_RIGHT: Final = "425"
"""SQLSTATE prefix within class 42 for missing rights."""

_ADVICE: Final = (
    "Give Spark the database's driver: spark_conf spark.jars=PATH or spark.jars.packages=GROUP:NAME:VERSION, and "
    "sink_options driver=CLASS."
)


class DatabaseError(RuntimeError):
    """A database rejected a statement, or its connection failed."""

    def __init__(self, text: str, state: str) -> None:
        """Hold its words and the SQLSTATE, empty where there is none."""
        super().__init__(f"{text} (SQLSTATE {state})" if state else text)
        self.state = state


@dataclass(frozen=True, slots=True)
class Database:
    """One connection. Every statement is a separate transaction, except within ``transaction``."""

    _connection: Any
    """A ``java.sql.Connection``."""
    _dialect: Any
    """Spark's ``JdbcDialect``."""

    def quoted(self, name: str) -> str:
        """Return a column's name as Spark writes it too, when it creates a table."""
        return str(self._dialect.quoteIdentifier(name))

    def limits(self) -> tuple[bool, int]:
        """Return whether the database has transactions, and how many bytes a table's name may have (0: unknown)."""
        with _database_errors():
            about = self._connection.getMetaData()
            return bool(about.supportsTransactions()), int(about.getMaxTableNameLength())

    def change(self, statement: str, *values: str | int) -> int:
        """Run a statement that changes rows or tables, with ``values`` for its ``?``; return the number of changed rows."""
        with self._prepared(statement, *values) as prepared:
            return int(prepared.executeUpdate())

    def first(self, statement: str, *values: str | int) -> tuple[str, ...] | None:
        """Return the first row of a query as text, None when there is none."""
        with self._prepared(statement, *values) as prepared:
            rows = prepared.executeQuery()
            width = rows.getMetaData().getColumnCount()
            return tuple(str(rows.getString(place + 1)) for place in range(width)) if rows.next() else None

    def columns(self, table: str) -> dict[str, str] | None:
        """Return a table's columns, by their names in lower case; None when the table does not exist."""
        try:
            with self._prepared(f"SELECT * FROM {table} WHERE 1 = 0") as prepared:  # noqa: S608  # the operator's own name
                about = prepared.executeQuery().getMetaData()
                names = [str(about.getColumnName(place + 1)) for place in range(about.getColumnCount())]
        except DatabaseError as error:
            if error.state.startswith(_NO_TABLE) and not error.state.startswith(_NO_RIGHT):
                return None
            raise
        return {name.lower(): name for name in names}

    @contextlib.contextmanager
    def _prepared(self, statement: str, *values: str | int) -> Iterator[Any]:
        with _database_errors():
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
    def transaction(self) -> Iterator[None]:
        """Run the statements of the block as one transaction: commit at its end, roll back if it raises."""
        with _database_errors():
            self._connection.setAutoCommit(False)
        try:
            yield
            with _database_errors():
                self._connection.commit()
        except BaseException:
            # The database rolls back a lost connection's work itself. The first error explains the failure.
            with contextlib.suppress(DatabaseError), _database_errors():
                self._connection.rollback()
                self._connection.setAutoCommit(True)
            raise
        with _database_errors():
            self._connection.setAutoCommit(True)


@contextlib.contextmanager
def _database_errors() -> Iterator[None]:
    """Raise an error of Java in the block as DatabaseError: with the database's message, without Java's stack."""
    from py4j.protocol import Py4JError, Py4JJavaError  # noqa: PLC0415  # only the driver pays for pyspark

    try:
        yield
    except Py4JJavaError as error:
        state = None
        with contextlib.suppress(Py4JError):  # not every error of Java has one
            state = error.java_exception.getSQLState()
        text = " ".join(str(error.java_exception.getMessage()).split())
        raise DatabaseError(text, state or "") from error


@contextlib.contextmanager
def connected(spark: SparkSession, sink: SinkSpec) -> Iterator[Database]:
    """Open a connection in the driver's JVM. Raises OperatorError without a driver for the URL, and DatabaseError."""
    from py4j.protocol import Py4JJavaError  # noqa: PLC0415  # only the driver pays for pyspark

    # The only way to java.sql; what is called there has been the same since Java 1.4.
    jvm: Any = spark.sparkContext._jvm  # noqa: SLF001  # see above
    url = f"jdbc:{sink.target}"
    properties = jvm.java.util.Properties()
    for name, value in sink.options.items():
        if name.lower() not in _SPARK_OPTIONS:
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
    with _database_errors():
        connection = java_driver.connect(url, properties)
    if connection is None:
        raise OperatorError(
            f"The class {class_name} is not a driver for the URL of sink.", advice="Look at both settings."
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


def last_name(table: str) -> str:
    """Return a table's name without its schema, in its quotes."""
    name = re.search(r"(?:\"[^\"]*\"|`[^`]*`|\[[^\]]*\]|[^.]*)$", table)
    assert name is not None
    return name[0]
