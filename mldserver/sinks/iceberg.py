"""Apache Iceberg: a window's revision is one commit of the table's metadata, through the library ``pyiceberg``.

The commit deletes the files of the revision before and adds those of this one. Its snapshot's summary holds pipeline,
ledger, window and revision. The library's own retries are off, since they would add the files again after a lost race.
Instead the sink loads the table anew, looks for its window, and decides. So a repeated write, or a late one from a server
that was presumed dead, changes nothing.

Each window is a snapshot, and the library copies the list of all snapshots several times in each commit. So the sink
expires all but the latest. A window whose snapshot has expired is found by the names of its files, in a folder of its own.
"""

from __future__ import annotations

import contextlib
import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from mldserver.base.kill_points import kill_point
from mldserver.base.uris import spark_uri
from mldserver.engine_jobs import NO_REVISION, REVISION, WINDOW, PublishJob
from mldserver.sinks import lake
from mldserver.sinks.sink import LEDGER, PIPELINE, Owner, SinkSpec, check_made_here, must_note, owner_of

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.table import Table
    from pyspark.sql import SparkSession

_TABLE: Final = re.compile(r"(?:\w+|`[^`]+`)(?:\.(?:\w+|`[^`]+`)){2,}")
_PART: Final = re.compile(r"`([^`]+)`|(\w+)")
_WINDOW: Final = "mldserver.window"
_REVISION: Final = "mldserver.revision"

_START: Final = "window_start"
"""The column that a new table is partitioned by: ``WINDOW_COLUMNS`` in ``windows.py``."""

_KEPT: Final = 10
"""Snapshots that stay when the sink expires older ones, as soon as there are twice as many."""

_NEEDED: Final = {
    "commit.retry.num-retries": "0",
    # By default statistics keep 16 characters of a text, which are the same for windows of one minute.
    f"write.metadata.metrics.column.{WINDOW}": "full",
}
"""What a table must have."""
_CREATED_WITH: Final = {
    "commit.manifest-merge.enabled": "true",
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "10",
}
"""What keeps the metadata of a table small that gets a commit for each window."""


def parse(target: str) -> str:
    """Return the table's name. Raises ValueError."""
    if not _TABLE.fullmatch(target):
        raise ValueError("after iceberg: comes CATALOG.DATABASE.TABLE")
    return target


check_settings = lake.check_settings


def check(spark: SparkSession, sink: SinkSpec) -> None:
    """Raise OperatorError without the library, for a session that writes other timestamps, and for a table without our columns."""
    lake.check_session(spark)
    table = _table(_catalog(sink), sink)
    if table is not None:
        check_made_here((field.name for field in table.schema().fields), sink.target)


def own(spark: SparkSession, sink: SinkSpec, owner: Owner, *, new_ledger: bool = False) -> None:  # noqa: ARG001  # for other sinks
    """Store whose the table is among its properties; create the table if needed; delete what failed attempts left.

    Raises OperatorError as ``must_note``.
    """
    table = _owned(sink, owner, new_ledger=new_ledger)
    folder = _folder(table)
    named = {_inside(folder, path) for path in table.inspect.all_data_files()["file_path"].to_pylist()}
    revisions: dict[str, int] = {}
    current = (lake.written_by(task.file.file_path) for task in table.scan().plan_files())
    for about in current:
        if about is not None and about.ledger == owner.ledger:
            revisions[about.window] = max(revisions.get(about.window, NO_REVISION), about.revision)
    folder.sweep(
        owner.ledger,
        lambda window: max(revisions.get(window, NO_REVISION), _noted(table, owner.ledger, window)),
        named,
    )


def publish(spark: SparkSession, sink: SinkSpec, job: PublishJob) -> None:  # noqa: ARG001  # for other sinks
    """Replace the window's rows in the table by those of its revision, unless it has them, or later ones, already."""
    from pyiceberg.exceptions import CommitFailedException  # noqa: PLC0415  # an extra, which ``check`` has found

    for number in range(lake.TRIES):
        table = _owned(sink, owner_of(job))
        if _noted(table, job.ledger, job.window.id) >= job.window.revision:
            return
        try:
            _commit(table, sink, job)
        except CommitFailedException:
            if number == lake.TRIES - 1:
                raise
        else:
            return


def versions(sink: SinkSpec) -> dict[str, str]:
    """Return by window the snapshot that its latest revision made, of the snapshots that are kept."""
    table = _table(_catalog(sink), sink)
    snapshots = [] if table is None else sorted(table.snapshots(), key=lambda each: each.sequence_number or 0)
    summaries = ((each.summary, each.snapshot_id) for each in snapshots)
    return {window: str(number) for summary, number in summaries if summary and (window := summary[_WINDOW])}


def files(sink: SinkSpec) -> tuple[str, ...]:
    """Return the table's present files as Spark takes them, the latest window's last."""
    table = _table(_catalog(sink), sink)
    found = [] if table is None else [task.file.file_path for task in table.scan().plan_files()]
    return tuple(sorted(spark_uri(file) if "://" in file else file for file in found))


def _catalog(sink: SinkSpec) -> Catalog:
    """Return the catalog as the library's configuration and ``sink_options`` describe it. Raises OperatorError without the library."""
    with lake.needs("iceberg"):
        return _load_catalog(_names(sink)[0], tuple(lake.unit_and_options(sink)[1].items()))


@lru_cache(maxsize=8)
def _load_catalog(name: str, options: tuple[tuple[str, str], ...]) -> Catalog:
    """Return a catalog, once for all windows: it holds connections."""
    from pyiceberg.catalog import load_catalog  # noqa: PLC0415  # an extra

    return load_catalog(name, **{"py-io-impl": "pyiceberg.io.pyarrow.PyArrowFileIO", **dict(options)})


def _names(sink: SinkSpec) -> tuple[str, ...]:
    return tuple(quoted or plain for quoted, plain in _PART.findall(sink.target))


def _table(catalog: Catalog, sink: SinkSpec) -> Table | None:
    """Return the table as it is now, None if there is none."""
    from pyiceberg.exceptions import NoSuchTableError  # noqa: PLC0415  # an extra, which ``_catalog`` has found

    try:
        return catalog.load_table(_names(sink)[1:])
    except NoSuchTableError:
        return None


def _owned(sink: SinkSpec, owner: Owner, *, new_ledger: bool = False) -> Table:
    """Return the table as it is now, with its owner stored. Raises OperatorError as ``must_note``."""
    import pyarrow as pa  # noqa: PLC0415  # settings name places long before one is opened
    from pyiceberg.exceptions import CommitFailedException, TableAlreadyExistsError  # noqa: PLC0415  # see ``_table``

    marks = {PIPELINE: owner.pipeline, LEDGER: owner.ledger, **_NEEDED}
    catalog = _catalog(sink)
    while True:
        table = _table(catalog, sink)
        if table is None:
            catalog.create_namespace_if_not_exists(_names(sink)[1:-1])
            # From the first start on, each other pipeline finds an owner; the first window brings the other columns.
            columns = pa.schema([(WINDOW, pa.string()), (REVISION, pa.int32())])
            with contextlib.suppress(TableAlreadyExistsError):  # another server was first
                catalog.create_table(_names(sink)[1:], columns, properties=_CREATED_WITH | marks)
            continue
        found = table.properties
        stored = Owner(found.get(PIPELINE, ""), found[LEDGER]) if LEDGER in found else None
        if not must_note(stored, owner, sink.target, new_ledger=new_ledger):
            return table
        # Of two that store an owner at once, one fails; then it compares again.
        with contextlib.suppress(CommitFailedException), table.transaction() as change:
            change.set_properties(marks)


def _noted(table: Table, ledger: str, window: str) -> int:
    """Return a window's revision as the table's snapshots have it, NO_REVISION if none has."""
    summaries = (snapshot.summary for snapshot in table.snapshots())
    found = (each for each in summaries if each and (each[LEDGER], each[_WINDOW]) == (ledger, window))
    return max((int(each[_REVISION] or 0) for each in found), default=NO_REVISION)


def _folder(table: Table) -> lake.Folder:
    """Return the folder of the table's data files."""
    from pyiceberg.io.pyarrow import PyArrowFileIO  # noqa: PLC0415  # see ``_table``

    assert isinstance(table.io, PyArrowFileIO), "_catalog says so"
    scheme, host, path = table.io.parse_location(f"{table.location()}/data")
    return lake.Folder(table.io.fs_by_scheme(scheme, host), path)


def _inside(folder: lake.Folder, uri: str) -> str:
    return uri.rpartition(f"{folder.base}/")[2]


def _commit(table: Table, sink: SinkSpec, job: PublishJob) -> None:
    """Bring the output's files and commit them. Raises CommitFailedException if another commit was first, and OSError.

    Does nothing if files of this revision or a later one are in the table.
    """
    import pyarrow as pa  # noqa: PLC0415  # see ``_owned``

    window, folder = job.window, _folder(table)
    of_window = f"{WINDOW} = '{window.id}'"
    footers = lake.footers(job)
    found = next((footer.schema.to_arrow_schema() for _, footer in footers.values()), None)
    changed = {} if found is None else lake.changes(table.schema().as_arrow(), found, sink.target)
    into = f"{lake.day_of(job, 'day') or 'none'}/{window.id}"
    earlier: list[lake.LakeFile | None] = []
    # A first revision without any file in its folder was never tried: do not read the table's manifests.
    if window.revision > 1 or folder.has(into):
        plan = table.scan(row_filter=of_window).plan_files()
        found_files = (lake.written_by(task.file.file_path) for task in plan)
        # Statistics may be cut short, as in files of other programs: the plan may have files of similar windows.
        earlier = [about for about in found_files if about is None or about.window == window.id]
    ours = (about for about in earlier if about is not None and about.ledger == job.ledger)
    if any(about.revision >= window.revision for about in ours):
        return
    paths = folder.bring(job, footers, into)
    kill_point("table.filled")
    about = {
        PIPELINE: window.pipeline,
        LEDGER: job.ledger,
        _WINDOW: window.id,
        _REVISION: str(window.revision),
    }
    if not (paths or earlier):
        return
    root = f"{table.location()}/data"
    with table.transaction() as change:
        if changed:
            with change.update_schema() as schema:
                schema.union_by_name(pa.schema(list(changed.values())))
        if _START in changed and table.spec().is_unpartitioned():
            _partition(change, lake.unit_and_options(sink)[0])
        if earlier:
            change.delete(of_window, snapshot_properties=about)
        if paths:
            uris = [f"{root}/{path}" for path in paths]
            change.add_files(uris, snapshot_properties=about, check_duplicate_files=False)
    kill_point("table.committed")
    _expire(table)


def _partition(change: Any, unit: str) -> None:
    """Partition a new table by the day, month or year of its windows' starts."""
    from pyiceberg.transforms import DayTransform, MonthTransform, YearTransform  # noqa: PLC0415  # see ``_table``

    transforms = {"day": DayTransform, "month": MonthTransform, "year": YearTransform}
    with change.update_spec() as spec:
        spec.add_field(_START, transforms[unit](), f"window_{unit}")


def _expire(table: Table) -> None:
    """Expire the oldest snapshots that windows have made, once there are many. Branches and tags keep theirs."""
    from pyiceberg.exceptions import CommitFailedException  # noqa: PLC0415  # see ``_table``

    snapshots = sorted(table.snapshots(), key=lambda each: each.timestamp_ms)
    if len(snapshots) <= 2 * _KEPT:
        return
    kept = {ref.snapshot_id for ref in table.metadata.refs.values()}
    old = [each.snapshot_id for each in snapshots[:-_KEPT] if each.summary and each.summary[_WINDOW]]
    # Another server may commit first, or expire the same ones (ValueError): a later window expires what is left.
    with contextlib.suppress(CommitFailedException, ValueError):
        table.maintenance.expire_snapshots().by_ids([each for each in old if each not in kept]).commit()
