"""The sinks by name: ours, and what installed packages register.

The staged files that the ledger counts are the truth. A sink publishes them, in the driver's process, in one atomic step
that may be repeated any number of times, by any server. A revision replaces what lower ones of the window wrote, and is
never replaced by them.

A package registers a sink by an entry point of the group ``mldserver.sinks``: its name is the word before the colon in
the setting ``sink``, its value a module (or an object) that has what ``Sink`` lists. The server imports it too, to read
its settings: import pyspark inside ``check``, ``own`` and ``publish``.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Final, Protocol

from mldserver.sinks import delta, iceberg, jdbc

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from mldserver.engine_jobs import PublishJob
    from mldserver.sinks.sink import Owner, SinkSpec

GROUP: Final = "mldserver.sinks"
"""The group of entry points by which a package registers its sinks."""


class Sink(Protocol):
    """What a sink is: its module has these functions."""

    def parse(self, target: str, /) -> str:
        """Return the place that the text after ``NAME:`` means. Raises ValueError."""

    def check_settings(self, sink: SinkSpec, /) -> None:
        """Raise ValueError where the table and the options do not go with the place. Nothing is started yet."""

    def check(self, spark: SparkSession, sink: SinkSpec, /) -> None:
        """Find out at the start what a window would fail on. Raises OperatorError, and what Spark raises."""

    def own(self, spark: SparkSession, sink: SinkSpec, owner: Owner, /, *, new_ledger: bool) -> None:
        """Store the table's owner at the start, after ``check``, with the table or where the table will be.

        ``sink.must_note`` decides, and raises OperatorError when the table is another's, also before its first window.
        """

    def publish(self, spark: SparkSession, sink: SinkSpec, job: PublishJob, /) -> None:
        """Write a committed output; repeatable. Raises what Spark or the sink raises: it is then tried again.

        Writes nothing into a table that is another's than ``owner_of(job)``.
        """


class FileTable(Protocol):
    """What a sink has, too, whose tables are Parquet files."""

    def files(self, sink: SinkSpec, /) -> tuple[str, ...]:
        """Return the table's present files as Spark takes them, the latest window's last."""

    def versions(self, sink: SinkSpec, /) -> dict[str, str]:
        """Return by window the version of the table that its latest revision made, as far as the table remembers."""


SINKS: Final[Mapping[str, tuple[Sink, str]]] = {
    "delta": (delta, "delta:PATH or delta:URI"),
    "iceberg": (iceberg, "iceberg:CATALOG.DATABASE.TABLE"),
    "jdbc": (jdbc, "a JDBC URL (jdbc:…)"),
}
"""By name: the sink, and how the setting is written, as help and messages show it."""

_PARTS: Final = ("parse", "check_settings", "check", "own", "publish")


def find(name: str) -> Sink:
    """Return the sink of this name. Raises ValueError when there is none, or a package's is none."""
    if name in SINKS:
        return SINKS[name][0]
    for entry in entry_points(group=GROUP, name=name):
        where = f"{entry.value}, which an installed package registers as {name},"
        try:
            sink: Sink = entry.load()
        except Exception as error:  # the package's module may raise anything
            raise ValueError(f"{where} cannot be imported: {type(error).__name__}: {error}") from error
        if missing := [part for part in _PARTS if not hasattr(sink, part)]:
            raise ValueError(f"{where} lacks {', '.join(missing)}")
        return sink
    raise ValueError("it names no sink of ours or of an installed package")
