"""Delta Lake: a window's revision is one commit of the table's log, through the library ``deltalake``.

The commit adds the revision's files, removes those of the revision before, and stores the revision as the version of the
application transaction ``LEDGER/WINDOW`` (Delta protocol, "Transaction Identifiers"). Of two commits from one version of
the table that have the same application transaction, or remove the same file, the library accepts one. The other is
decided anew on the table as it is then. So a repeated write, or a late one from a server that was presumed dead, changes
nothing. Where old transactions were dropped from the log (``delta.setTransactionRetentionDuration``), the revisions in
the names of the window's files remain.

The library starts threads that do not survive a fork: only the driver's process imports it, which never forks.
"""

from __future__ import annotations

import json
import math
import secrets
import time
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urlsplit

from mldserver.base.kill_points import kill_point
from mldserver.base.uris import SCHEMES, local_path, s3_options, spark_uri
from mldserver.engine_jobs import NO_REVISION, REVISION, WINDOW, PublishJob
from mldserver.errors import OperatorError
from mldserver.sinks import lake
from mldserver.sinks.sink import LEDGER, PIPELINE, Owner, SinkSpec, check_made_here, must_note, owner_of

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq
    from deltalake import DeltaTable
    from pyspark.sql import SparkSession

_INDEXED: Final = 32
"""Of how many columns a file has statistics in the log, as Delta's own writers do it."""

_LONGEST: Final = 128
"""Longer texts are no statistics."""

_CREATED_WITH: Final = {"delta.checkpointInterval": "10"}
"""A window opens the table anew: between two checkpoints, each commit is one more file to read. At 1,000 windows, 100
commits cost twice the time."""

_WINDOW: Final = "mldserver.window"
"""Names a window in the log's entry of its commit."""

_NO_DAY: Final = "1000-01-01"
"""A partition that no table has."""


def parse(target: str) -> str:
    """Return an absolute path, or the URI. Raises ValueError."""
    if not target.strip("/"):
        raise ValueError("after delta: comes a path or a URI")
    if "://" not in target:
        return str(local_path(target).absolute())  # Spark has a different working directory
    if (scheme := urlsplit(target).scheme) not in SCHEMES:
        raise ValueError(f"its URI begins with {scheme}://, not with one of {', '.join(sorted(SCHEMES))}")
    return target


check_settings = lake.check_settings


def check(spark: SparkSession, sink: SinkSpec) -> None:
    """Raise OperatorError without the library, for a session that writes other timestamps, and for a table without our columns."""
    lake.check_session(spark)
    table = _table(sink)
    if table is None:
        return
    check_made_here((field.name for field in table.schema().fields), str(sink))
    if not {*table.metadata().partition_columns} <= {f"_{unit}" for unit in lake.UNITS}:
        raise OperatorError(
            f"The table {sink} is partitioned by {', '.join(table.metadata().partition_columns)}.",
            did="Nothing is written to it: a window has one value of its start only.",
            advice="Name a table without partitions, or one that does not exist, and the server makes it.",
        )


def own(spark: SparkSession, sink: SinkSpec, owner: Owner, *, new_ledger: bool = False) -> None:  # noqa: ARG001  # for other sinks
    """Store whose the table is among its properties; create the table if needed; delete what failed attempts left.

    Raises OperatorError as ``must_note``.
    """
    table = _owned(sink, owner, new_ledger=new_ledger)

    def revision_of(window: str) -> int:
        return _revision(table, owner.ledger, window)

    # Readers of older versions may still read files that a later revision has replaced: vacuum deletes those.
    replaced = table.vacuum(retention_hours=0, dry_run=True, enforce_retention_duration=False)
    kept = {unquote(path) for path in (*_files(table)["path"].to_pylist(), *replaced)}
    lake.Folder.at(sink.target).sweep(owner.ledger, revision_of, kept)


def publish(spark: SparkSession, sink: SinkSpec, job: PublishJob) -> None:  # noqa: ARG001  # for other sinks
    """Replace the window's rows in the table by those of its revision, unless it has them, or later ones, already."""
    from deltalake.exceptions import CommitFailedError  # noqa: PLC0415  # an extra, which ``check`` has found

    for number in range(lake.TRIES):
        table = _owned(sink, owner_of(job))
        if _revision(table, job.ledger, job.window.id) >= job.window.revision:
            return
        try:
            _commit(table, sink, job)
        except CommitFailedError:
            if number == lake.TRIES - 1:
                raise
        else:
            return


def _revision(table: DeltaTable, ledger: str, window: str) -> int:
    """Return a window's revision in the table, NO_REVISION if it has none."""
    version = table.transaction_version(f"{ledger}/{window}")
    return NO_REVISION if version is None else version


def versions(sink: SinkSpec) -> dict[str, str]:
    """Return by window the version of the table that its latest revision made, as far as the log reaches."""
    table = _table(sink)
    entries = [] if table is None else table.history()  # the latest first
    return {entry[_WINDOW]: str(entry["version"]) for entry in reversed(entries) if _WINDOW in entry}


def files(sink: SinkSpec) -> tuple[str, ...]:
    """Return the table's present files as Spark takes them, the latest window's last."""
    table = _table(sink)
    found = [] if table is None else table.file_uris()
    return tuple(sorted(spark_uri(file) if "://" in file else file for file in found))


def _storage(sink: SinkSpec) -> dict[str, str]:
    """Return the library's options for the place: ``sink_options``, and for the rest what the URI says, as for ``out``."""
    if urlsplit(sink.target).scheme != "s3":
        return lake.unit_and_options(sink)[1]
    said = s3_options(sink.target)
    found = {
        "AWS_ACCESS_KEY_ID": said["key"],
        "AWS_SECRET_ACCESS_KEY": said["secret"],
        "AWS_ENDPOINT_URL": said["endpoint"] and f"{said['scheme'] or 'https'}://{said['endpoint']}",
        "AWS_REGION": said["region"] or lake.Folder.at(sink.target).filesystem.region,
        "AWS_ALLOW_HTTP": "true" if said["scheme"] == "http" else None,
    }
    return {key: value for key, value in found.items() if value} | lake.unit_and_options(sink)[1]


def _table(sink: SinkSpec) -> DeltaTable | None:
    """Return the table as it is now, None if there is none. Raises OperatorError without the library."""
    with lake.needs("delta"):
        from deltalake import DeltaTable  # noqa: PLC0415  # an extra
        from deltalake.exceptions import TableNotFoundError  # noqa: PLC0415  # an extra
    try:
        return DeltaTable(_uri(sink), storage_options=_storage(sink))
    except TableNotFoundError:
        return None


def _uri(sink: SinkSpec) -> str:
    return spark_uri(sink.target) if "://" in sink.target else sink.target


def _owned(sink: SinkSpec, owner: Owner, *, new_ledger: bool = False) -> DeltaTable:
    """Return the table as it is now, with its owner stored. Raises OperatorError as ``must_note``."""
    import pyarrow as pa  # noqa: PLC0415  # settings name places long before one is opened

    marks = {PIPELINE: owner.pipeline, LEDGER: owner.ledger}
    column = f"_{lake.unit_and_options(sink)[0]}"
    while True:
        table = _table(sink)
        found = {} if table is None else table.metadata().configuration
        stored = Owner(found.get(PIPELINE, ""), found[LEDGER]) if LEDGER in found else None
        if table is not None and not must_note(stored, owner, str(sink), new_ledger=new_ledger):
            return table
        from deltalake import DeltaTable  # noqa: PLC0415  # an extra, which ``_table`` has found
        from deltalake.exceptions import DeltaError  # noqa: PLC0415  # see above

        try:
            if table is not None:
                table.alter.set_table_properties(marks, raise_if_not_exists=False)
                continue
            # From the first start on, each other pipeline finds an owner; the first window brings the other columns.
            columns = [(WINDOW, pa.string()), (REVISION, pa.int32()), (column, pa.date32())]
            DeltaTable.create(
                _uri(sink),
                pa.schema(columns),
                partition_by=[column],
                configuration=marks | _CREATED_WITH,
                storage_options=_storage(sink),
                raise_if_key_not_exists=False,
            )
        except DeltaError:
            # Another server may have stored an owner at the same moment: compare again.
            latest = _table(sink)
            if latest is None or (table is not None and latest.version() == table.version()):
                raise


def _commit(table: DeltaTable, sink: SinkSpec, job: PublishJob) -> None:
    """Bring the output's files and commit them. Raises CommitFailedError if another commit was first, and OSError.

    Does nothing if files of a later revision are in the table.
    """
    import pyarrow as pa  # noqa: PLC0415  # see above
    from deltalake import CommitProperties, Transaction  # noqa: PLC0415  # see above
    from deltalake.transaction import AddAction, RemoveAction  # noqa: PLC0415  # see above

    window, partitions = job.window, table.metadata().partition_columns
    columns = pa.schema(table.schema().to_arrow())
    footers = lake.footers(job)
    found = next((footer.schema.to_arrow_schema() for _, footer in footers.values()), None)
    data = pa.schema(field for field in columns if field.name not in partitions)
    if found and (changed := lake.changes(data, found, str(sink))):
        _evolve(table, columns, changed, sink)
    folder, now_ms = lake.Folder.at(sink.target), time.time_ns() // 1_000_000
    actions: list[Any] = []
    for file in _with_rows_of(table, window.id):
        about = lake.written_by(file["path"])
        if about is not None and about.window != window.id:
            continue
        if about is not None and about.ledger == job.ledger and about.revision > window.revision:
            return
        if about is None:
            actions += _without(folder, file, window.id, now_ms)
        else:
            actions.append(RemoveAction(file["path"], True, now_ms))  # it has no names
    day = lake.day_of(job, partitions[0][1:]) if partitions else None
    value = {column: None if day is None else day.isoformat() for column in partitions}
    into = "/".join(f"{column}={text}" for column, text in value.items() if text)
    for path, (size, footer) in zip(folder.bring(job, footers, into), footers.values(), strict=True):
        actions.append(
            AddAction(path, size, value, now_ms, True, json.dumps(statistics(footer)))
        )  # see above
    kill_point("table.filled")
    table.create_write_transaction(
        actions,
        "append",
        table.schema(),
        partitions,
        commit_properties=CommitProperties(
            custom_metadata={_WINDOW: window.id, "mldserver.revision": str(window.revision)},
            app_transactions=[Transaction(f"{job.ledger}/{window.id}", window.revision)],
        ),
    )
    kill_point("table.committed")
    if folder.is_local:
        # The library gives the entry the version after the table's, or a later one if others were first.
        log, version = Path(folder.base, "_delta_log"), table.version() + 1
        while (entry := log / f"{version:020}.json").exists():
            folder.sync(str(entry))
            version += 1
        folder.sync(str(log))


def _evolve(table: DeltaTable, columns: pa.Schema, changed: dict[str, pa.Field], sink: SinkSpec) -> None:
    """Give the table new and wider columns, in a commit before that of the window.

    Raises OperatorError for wider columns of a table without partitions, and DeltaError if another commit was first.
    """
    import pyarrow as pa  # noqa: PLC0415  # see above
    from deltalake import Schema  # noqa: PLC0415  # see above

    wider, partitions = changed.keys() & {*columns.names}, table.metadata().partition_columns
    if not wider:
        table.alter.add_columns(Schema.from_arrow(pa.schema(changed.values())).fields)
    elif not partitions:
        raise OperatorError(
            f"A window has wider numbers than the table {sink}: {', '.join(sorted(wider))}.",
            did="Nothing was written to the table. The window's output is kept, and is tried again.",
            advice="The library widens columns only of tables with partitions: name another table, and compute the "
            "window again.",
        )
    else:
        present = (changed.pop(field.name, field) for field in columns)
        fields = Schema.from_arrow(pa.schema([*present, *changed.values()]))
        # The library widens columns in a commit that overwrites: here the rows of a partition that does not exist.
        table.create_write_transaction([], "overwrite", fields, partitions, [(partitions[0], "=", _NO_DAY)])
    table.update_incremental()


def _with_rows_of(table: DeltaTable, window: str) -> list[dict[str, Any]]:
    """Return the table's files that may hold rows of a window: their paths, and the values of their partitions."""
    import pyarrow.compute as pc  # noqa: PLC0415  # see above

    files = _files(table)
    lowest, highest = (f"{bound}.{WINDOW}" for bound in ("min", "max"))
    if not files.num_rows or lowest not in files.column_names:
        found = files
    else:
        low, high = files[lowest].cast("string"), files[highest].cast("string")
        within = pc.and_(pc.less_equal(low, window), pc.greater_equal(high, window))
        found = files.filter(pc.or_kleene(pc.is_null(low), within))
    kept = [name for name in found.column_names if name == "path" or name.startswith("partition.")]
    rows: list[dict[str, Any]] = found.select(kept).to_pylist()
    return [row | {"path": unquote(row["path"])} for row in rows]


def _files(table: DeltaTable) -> pa.Table:
    import pyarrow as pa  # noqa: PLC0415  # see above

    return pa.table(table.get_add_actions(flatten=True))


def _without(folder: lake.Folder, file: dict[str, Any], window: str, now_ms: int) -> list[Any]:
    """Return what replaces a file of several windows, which another program has written, by one without this window's rows."""
    import pyarrow.compute as pc  # noqa: PLC0415  # see above
    import pyarrow.parquet as pq  # noqa: PLC0415  # see above
    from deltalake.transaction import AddAction, RemoveAction  # noqa: PLC0415  # see above

    path = file.pop("path")
    rows = pq.ParquetFile(f"{folder.base}/{path}", filesystem=folder.filesystem).read()
    others = rows.filter(pc.not_equal(rows[WINDOW], window))
    if others.num_rows == rows.num_rows:
        return []
    actions: list[Any] = [RemoveAction(path, True, now_ms)]  # it has no names
    if others.num_rows:
        new = f"{path.rpartition('.')[0]}-{secrets.token_hex(6)}.parquet"
        pq.write_table(others, f"{folder.base}/{new}", filesystem=folder.filesystem)
        with folder.filesystem.open_input_file(f"{folder.base}/{new}") as source:
            stats, size = json.dumps(statistics(pq.read_metadata(source))), source.size()
        value = {name.partition(".")[2]: None if day is None else str(day) for name, day in file.items()}
        actions.append(AddAction(new, size, value, now_ms, True, stats))  # see above
    return actions


def statistics(footer: pq.FileMetaData) -> dict[str, Any]:
    """Return what a file's footer says of its columns, as the log of a table has it: readers skip files by it."""
    counts: dict[str, int] = {}
    bounds: dict[str, list[Any]] = {}
    names = [footer.schema.column(place).path for place in range(footer.num_columns)]
    for place in sorted(range(len(names)), key=lambda place: names[place] not in {WINDOW, REVISION})[
        :_INDEXED
    ]:
        name = names[place]
        found = [footer.row_group(number).column(place).statistics for number in range(footer.num_row_groups)]
        if "." in name or any(each is None for each in found):
            continue
        counts[name] = sum(each.null_count for each in found if each.has_null_count)
        values = [value for each in found if each.has_min_max for value in (each.min, each.max)]
        if (
            values
            and (low := _as_json(min(values))) is not None
            and (high := _as_json(max(values))) is not None
        ):
            bounds[name] = [low, high]
    return {
        "numRecords": footer.num_rows,
        "minValues": {name: low for name, (low, _) in bounds.items()},
        "maxValues": {name: high for name, (_, high) in bounds.items()},
        "nullCount": counts,
    }


def _as_json(value: Any) -> Any:
    """Return a statistic as JSON has it; None where it has none, or a text is too long for what each reader reads."""
    match value:
        case bool():
            return None
        case int():
            return value
        case str():
            return value if len(value) <= _LONGEST else None
        case float():
            return value if math.isfinite(value) else None
        case date():  # a moment too
            return value.isoformat()
    return None
