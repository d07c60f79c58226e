"""What every table sink has in common: whose a table is, the staged rows, the columns that name their window, errors.

Revisions count within one ledger, and windows of two pipelines may have the same id. So a table belongs to one pipeline
on one ledger: the first claim is stored in or next to the table, and every start and every write compares the two.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from mldserver.base.uris import redacted
from mldserver.engine_jobs import REVISION, WINDOW, PublishJob
from mldserver.errors import OperatorError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PIPELINE: Final = "mldserver.pipeline"
"""Property of a table, or of a snapshot, that holds the pipeline's name."""

LEDGER: Final = "mldserver.ledger"
"""The same of the ledger's id."""

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
        {WINDOW: F.lit(job.window.id), REVISION: F.lit(max(0, job.window.revision))}
    )


def check_result(columns: Iterable[str], added: Iterable[str] = (WINDOW, REVISION)) -> None:
    """Raise ValueError when ``on_window`` returns columns that a table sink adds itself."""
    taken = sorted({*added} & {name.lower() for name in columns})
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
