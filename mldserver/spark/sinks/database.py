"""A database over ``java.sql``, through py4j: statements and transactions that Spark's own writer does not offer."""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, Any, Final

from mldserver.errors import OperatorError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

    from mldserver.spark.sinks.sink import SinkSpec

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
    # The only way to java.sql; what is called there has been the same since Java 1.4.
    jvm = spark.sparkContext._jvm  # noqa: SLF001  # see above
    url = f"jdbc:{sink.target}"
    properties = jvm.java.util.Properties()  # type: ignore[union-attr]  # there in classic mode
    for name, value in sink.options.items():
        if name.lower() not in _OF_SPARK:
            properties.setProperty(name, value)
    connection = _driver(jvm, url, sink.options.get("driver")).connect(url, properties)
    if connection is None:
        raise OperatorError(
            f"The class {sink.options['driver']} is no driver for the URL of sink.",
            advice="Look at both settings.",
        )
    try:
        yield Database(connection, jvm.org.apache.spark.sql.jdbc.JdbcDialects.get(url))  # type: ignore[union-attr]  # there in classic mode
    finally:
        connection.close()


def _driver(jvm: Any, url: str, name: str | None) -> Any:
    from py4j.protocol import Py4JJavaError  # noqa: PLC0415  # only the driver pays for pyspark

    try:
        if name is None:
            return jvm.java.sql.DriverManager.getDriver(url)
        # As Spark does: jars of spark.jars are known to this loader only.
        loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
        return jvm.java.lang.Class.forName(name, True, loader).newInstance()
    except Py4JJavaError as error:
        what = "no driver for the URL of sink" if name is None else f"no class {name}"
        raise OperatorError(f"Java has {what}.", advice=_ADVICE) from error


def suffixed(table: str, suffix: str) -> str:
    """Return the name of a table beside ``table``, in its schema and in its quotes."""
    closing = re.search(r"[\"`\]]?$", table)
    assert closing is not None
    return f"{table[: closing.start()]}{suffix}{closing[0]}"
