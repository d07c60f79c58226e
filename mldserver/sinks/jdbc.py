"""JDBC: Spark writes a window into a stage table, one transaction moves it into the table.

Three kinds of tables accompany it. ``<table>__owner`` has one line: the table's owner, and whether the table was made.
``<table>__windows`` has the revision of each window in the table. Each try has a temporary
``<table>__stage_<random>``: Spark's tasks commit one by one, so no reader may see their rows. The stage
of a try that makes the table, too, is ``<table>__first_<random>``: where that try dies, the next one knows that an index may lack.
The steps, each of which may be the last of a process:

    claim     the window's line names this try's stage (and the stage of a try that died is dropped)
    fill      Spark writes the stage
    move      one transaction: the line takes the revision, if it still names this stage; the window's rows go, the
              stage's come
    clear     the stage is dropped, the line names none

Whoever claims later, on this server or another, wins: the transaction of the earlier one finds its stage named no more.
A claim locks the owner's line. A new owner locks it too, removes all stages from the lines of windows and resets their
revisions to NO_REVISION. After that, no try of the former owner moves any rows.
Classic Spark only: over Spark Connect a program has no connection to the database, and Spark's own writer commits each
task for itself, so no step could be made one.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from mldserver.engine_jobs import NO_REVISION, REVISION, WINDOW, PublishJob
from mldserver.errors import NotThereYet, OperatorError
from mldserver.sinks.database import DatabaseError, connected, last_name, suffixed
from mldserver.sinks.sink import Owner, SinkSpec, check_made_here, must_note, owner_of, staged

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from mldserver.sinks.database import Database

_URL = re.compile(r"[A-Za-z0-9]+:\S.*")
_NONE: Final = "none"
"""Stage of a window that has none. (Not an empty text: Oracle takes that for NULL.)"""

_COLUMN_TYPES: Final = f"`{WINDOW}` VARCHAR(64)"
"""Without a length, databases make strings large objects, which cannot be compared."""

_STAGE: Final = "__stage_"
_FIRST: Final = "__first_"
"""The same, for a try that creates the table."""
_INDEX_EXISTS: Final = re.compile("already|exists|duplicate", re.IGNORECASE)
"""In the words of databases that have an index of a name: they share no SQLSTATE for it."""
_LONGEST_SUFFIX: Final = len(_STAGE) + 12

_KEY_EXISTS: Final = "23"
"""How SQLSTATEs begin of a key that is there already."""

_UNKNOWN_OR_FORBIDDEN: Final = "42"
"""How SQLSTATEs begin of an unknown name, a wrong type, or a missing right."""

_NOT_THERE_YET: Final = ("08", "40", "53", "57")
"""How SQLSTATEs begin of what passes by itself: no connection, a deadlock, no room, a database that starts or stops."""


@dataclass(frozen=True, slots=True)
class Try:
    """One try to write one output."""

    job: PublishJob
    table: str
    stage: str

    @property
    def windows(self) -> str:
        """The table of windows and revisions."""
        return _windows(self.table)

    @property
    def key(self) -> tuple[str, str]:
        """What a line of it is found by."""
        return self.job.window.pipeline, self.job.window.id


def _windows(table: str) -> str:
    return suffixed(table, "__windows")


def _owner(table: str) -> str:
    return suffixed(table, "__owner")


def _creates_table(stage: str) -> bool:
    """Whether the try with this stage creates the table, or continues a try that died while it created the table."""
    # Look at the suffix only: a table's own name may contain anything.
    return f"__{stage.rpartition('__')[2]}".startswith(_FIRST)


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
    """At the server's start, run all statements of a publication without rows. Raises OperatorError if one cannot work.

    Raises NotThereYet if it may work later: the database is not up, for example.
    """
    if type(spark).__module__.startswith("pyspark.sql.connect"):
        raise OperatorError(
            "Spark Connect gives no access to JDBC transactions.",
            advice="Set spark_master to a Spark of the server's own, such as local[*], or choose another sink.",
        )
    with _start_errors(), connected(spark, sink) as database:
        has_transactions, longest = database.limits()
        if not has_transactions:
            raise OperatorError("The database of sink has no transactions.", advice="Choose another sink.")
        # A database that cuts long names short would give several tables one name.
        size = len(last_name(sink.table).strip('"`[]').encode())
        if longest and size > longest - _LONGEST_SUFFIX:
            raise OperatorError(
                f"The name of sink_table = {sink.table} is too long: it has {size} bytes. This database takes "
                f"{longest} for a name, and windows are staged under names that have {_LONGEST_SUFFIX} more.",
                advice=f"Choose a name of at most {longest - _LONGEST_SUFFIX} bytes.",
            )
        columns = database.columns(sink.table)
        if columns is not None:
            check_made_here(columns, sink.table)
        _rehearse(database, sink.table, columns)


def own(spark: SparkSession, sink: SinkSpec, owner: Owner, *, new_ledger: bool = False) -> None:
    """Store the table's owner. Raises OperatorError if the table is another's (``must_note``), or was dropped."""
    with _start_errors(), connected(spark, sink) as database:
        _ensure_owner(database, sink.table, owner, new_ledger=new_ledger)


@contextlib.contextmanager
def _start_errors() -> Iterator[None]:
    """Raise a DatabaseError of the block as OperatorError with advice, or as NotThereYet if it may pass by itself."""
    try:
        yield
    except DatabaseError as error:
        kind = NotThereYet if error.state.startswith(_NOT_THERE_YET) else OperatorError
        raise kind(
            f"The database of sink does not do what windows need. It says: {error}.",
            advice="sink_options name the user and the password of one who may create tables beside sink_table, and "
            "select, insert and delete in it.",
        ) from error


def _rehearse(database: Database, table: str, columns: dict[str, str] | None) -> None:
    """Run each kind of statement of a publication without rows. A database checks rights and types all the same.

    ``columns``: those of the table; None: no such table exists yet. Raises DatabaseError.
    """
    windows, stage = _windows(table), suffixed(table, f"{_STAGE}{secrets.token_hex(6)}")
    _create_windows_table(database, windows)
    with database.transaction():
        database.change(f"CREATE TABLE {stage} (stage INTEGER)")
        database.change(f"DROP TABLE {stage}")
    from_no_rows = f"FROM {windows} WHERE 1 = 0"
    database.change(f"INSERT INTO {windows} SELECT * {from_no_rows}")
    database.change(f"UPDATE {windows} SET revision = 0 WHERE 1 = 0")  # noqa: S608  # the operator's own name
    if columns is None:
        return
    window, revision = (database.quoted(columns[name]) for name in (WINDOW, REVISION))
    database.change(f"DELETE FROM {table} WHERE {window} = ? AND 1 = 0", "")  # noqa: S608  # see above
    try:
        database.change(f"INSERT INTO {table} ({window}, {revision}) SELECT stage, revision {from_no_rows}")
    except DatabaseError as error:
        # Other classes: a column that is not named here must not be NULL. A real window has a value for it.
        if error.state.startswith(_UNKNOWN_OR_FORBIDDEN):
            raise


def _create_windows_table(database: Database, windows: str) -> None:
    _create_if_missing(
        database,
        windows,
        "pipeline VARCHAR(255) NOT NULL, window_id VARCHAR(64) NOT NULL, revision INTEGER NOT NULL,"
        " stage VARCHAR(255) NOT NULL, PRIMARY KEY (pipeline, window_id)",
    )


def _create_if_missing(database: Database, table: str, columns: str) -> None:
    if database.columns(table) is not None:
        return
    try:
        database.change(f"CREATE TABLE {table} ({columns})")
    except DatabaseError:
        # Another server may have created it in the same instant.
        if database.columns(table) is None:
            raise


def _ensure_owner(database: Database, table: str, owner: Owner, *, new_ledger: bool = False) -> bool:
    """Store ``owner`` in ``<table>__owner`` unless it is there. Return whether ``owner`` is known to have created the table.

    Raises OperatorError if the table belongs to another owner (unless ``new_ledger``), or was created and then dropped.
    """
    windows, owner_table = _windows(table), _owner(table)
    _create_windows_table(database, windows)
    _create_if_missing(
        database,
        owner_table,
        "id INTEGER NOT NULL PRIMARY KEY, pipeline VARCHAR(255) NOT NULL, ledger VARCHAR(64) NOT NULL,"
        " made INTEGER NOT NULL",
    )
    while True:
        row = database.first(f"SELECT pipeline, ledger, made FROM {owner_table}")  # noqa: S608  # the operator's own name
        stored = Owner(row[0], row[1]) if row is not None else None
        must_store = must_note(stored, owner, table, new_ledger=new_ledger)
        is_same_ledger = stored is not None and stored.ledger == owner.ledger
        # A version of the program without owners stored only windows.
        was_created = bool(int(row[2])) if row is not None else _count_published(database, windows) > 0
        if was_created and (is_same_ledger or stored is None) and database.columns(table) is None:
            raise OperatorError(
                f"The table {table} was dropped or renamed, and with it the windows that were published into it "
                f"({_count_published(database, windows):,}).",
                did="Nothing was written.",
                advice=f"Bring the table back. Or drop {windows} and {owner_table} too: the server then makes a new table, and "
                "`mldserver windows retry --published WINDOW …` fills it with windows whose segments are still there.",
            )
        if not must_store or _replace_owner(database, table, stored, owner):
            return was_created and is_same_ledger
        # Another server has stored an owner meanwhile: compare again.


def _count_published(database: Database, windows: str) -> int:
    row = database.first(f"SELECT COUNT(*) FROM {windows} WHERE revision > 0")  # noqa: S608  # the operator's own name
    return 0 if row is None else int(row[0])


def _replace_owner(database: Database, table: str, former: Owner | None, owner: Owner) -> bool:
    """Make ``owner`` the table's owner in place of ``former`` (None: the table has none yet).

    An owner with another ledger counts revisions from 1 again: reset those of all windows to NO_REVISION, and drop all stages.
    Return False, without a change of the owner, if another server has stored an owner meanwhile.
    """
    windows, owner_table = _windows(table), _owner(table)
    if former is not None and former.ledger == owner.ledger:
        rename = f"UPDATE {owner_table} SET pipeline = ? WHERE ledger = ?"  # noqa: S608  # the operator's own name
        return bool(database.change(rename, owner.pipeline, owner.ledger))
    stages = f"SELECT stage FROM {windows} WHERE stage <> ?"  # noqa: S608  # see above
    while (row := database.first(stages, _NONE)) is not None:
        # Drop the stage while a row still names it. The try that filled it is dead, or belongs to the former owner.
        database.drop(row[0])
        database.change(f"UPDATE {windows} SET stage = ? WHERE stage = ?", _NONE, row[0])  # noqa: S608  # see above
    try:
        with database.transaction():
            if former is None:
                database.change(
                    f"INSERT INTO {owner_table} VALUES (1, ?, ?, 0)",  # noqa: S608  # see above
                    owner.pipeline,
                    owner.ledger,
                )
            elif not database.change(
                f"UPDATE {owner_table} SET pipeline = ?, ledger = ?, made = 0 WHERE ledger = ?",  # noqa: S608  # see above
                owner.pipeline,
                owner.ledger,
                former.ledger,
            ):
                return False
            database.change(f"UPDATE {windows} SET revision = ?, stage = ?", NO_REVISION, _NONE)  # noqa: S608  # see above
    except DatabaseError as error:
        # If two servers insert the first owner, the primary key rejects one of them.
        if former is None and error.state.startswith(_KEY_EXISTS):
            return False
        raise
    return True


def publish(spark: SparkSession, sink: SinkSpec, job: PublishJob) -> None:
    """Replace the window's rows in the table by those of its revision: the steps that the module's docstring lists.

    Does nothing if the table already has this revision of the window, or a later one. May be repeated.
    """
    with connected(spark, sink) as database:
        was_created = _ensure_owner(database, sink.table, owner_of(job))
        is_missing = database.columns(sink.table) is None
        stage = suffixed(sink.table, f"{_FIRST if is_missing else _STAGE}{secrets.token_hex(6)}")
        attempt = claim(database, Try(job, sink.table, stage))
    if attempt is None:
        return
    creates_table = _creates_table(attempt.stage)
    if job.files:
        fill(staged(spark, job), sink, attempt, create=creates_table)
    with connected(spark, sink) as database:
        try:
            if job.files and not was_created:
                # Before the first row: if the table is missing later, the next start knows that rows are lost.
                database.change(f"UPDATE {_owner(sink.table)} SET made = 1 WHERE ledger = ?", job.ledger)  # noqa: S608  # the operator's own name
            if creates_table:
                try:
                    _create_index(database, sink.table)
                except DatabaseError as error:
                    # A former try that created the table, and died, may have created the index too.
                    if is_missing or not _INDEX_EXISTS.search(str(error)):
                        raise
            move(database, attempt)
        except BaseException:
            # The first error explains the failure; the next try drops the stage.
            with contextlib.suppress(DatabaseError):
                clear(database, attempt, attempt.stage)
            raise
        clear(database, attempt, attempt.stage)


def claim(database: Database, attempt: Try) -> Try | None:
    """Store this try's stage in the window's row, so that only this try can move rows; drop the stage of a former try.

    Return the try to continue with; None if the table already has this revision or a later one. If the former try died
    while it created the table, the returned try creates it. Raises RuntimeError if another server writes the table or
    the window.
    """
    windows, job = attempt.windows, attempt.job
    with database.transaction():
        # This update changes nothing. It locks the owner's row, so that no other server claims the window or the table.
        lock_owner = f"UPDATE {_owner(attempt.table)} SET ledger = ledger WHERE ledger = ?"  # noqa: S608  # the operator's own name
        if not database.change(lock_owner, job.ledger):
            raise RuntimeError(f"another pipeline, or another ledger, has claimed the table {attempt.table}")
        row = database.first(
            f"SELECT revision, stage FROM {windows} WHERE pipeline = ? AND window_id = ?",  # noqa: S608  # see above
            *attempt.key,
        )
        if row is None:
            first = f"INSERT INTO {windows} VALUES (?, ?, ?, ?)"  # noqa: S608  # see above
            database.change(first, *attempt.key, NO_REVISION, attempt.stage)
            return attempt
        stored_revision, former_stage = int(row[0]), row[1]
        if _creates_table(former_stage) and not _creates_table(attempt.stage):
            attempt = replace(attempt, stage=_FIRST.join(attempt.stage.rsplit(_STAGE, 1)))
        must_write = stored_revision < job.window.revision
        changed = database.change(
            f"UPDATE {windows} SET stage = ? WHERE pipeline = ? AND window_id = ? AND revision = ? AND stage = ?",  # noqa: S608  # see above
            attempt.stage if must_write else former_stage,
            *attempt.key,
            stored_revision,
            former_stage,
        )
        if not changed:
            raise RuntimeError(f"another server writes window {job.window.id} at the same time")
    if former_stage != _NONE and must_write:
        database.drop(former_stage)
    elif former_stage != _NONE:
        clear(database, attempt, former_stage)
    return attempt if must_write else None


def _create_index(database: Database, table: str) -> None:
    """Create an index of window ids, for a table that Spark created. Without it, each ``move`` would scan the table."""
    columns, name = database.columns(table), suffixed(last_name(table), "__window")
    if columns is not None:
        database.change(f"CREATE INDEX {name} ON {table} ({database.quoted(columns[WINDOW])})")


def fill(rows: DataFrame, sink: SinkSpec, attempt: Try, *, create: bool) -> None:
    """Write the stage with Spark; if ``create``, create the table without rows first."""
    lower = {name.lower(): value for name, value in sink.options.items()}
    types = ", ".join(filter(None, [lower.get("createtablecolumntypes"), _COLUMN_TYPES]))
    options = sink.options | {"url": f"jdbc:{sink.target}", "createTableColumnTypes": types}
    if create:
        # Mode "append" does not fail if another server has created it meanwhile.
        table = rows.limit(0).write.format("jdbc").options(**options).option("dbtable", attempt.table)
        table.mode("append").save()
    # Spark's default mode fails if the stage exists: it would belong to another try.
    rows.write.format("jdbc").options(**options).option("dbtable", attempt.stage).save()


def move(database: Database, attempt: Try) -> None:
    """Replace the window's rows in the table by the stage's rows, and store the revision, in one transaction.

    Raises RuntimeError if another try has claimed the window, or if rows of a Spark task are missing or doubled.
    """
    job, table = attempt.job, attempt.table
    columns = database.columns(table)
    stage = database.columns(attempt.stage) if job.files else {}
    if stage is None or (columns is None and job.files):
        raise RuntimeError(f"the stage of window {job.window.id} is gone: another server writes the window")
    with database.transaction():
        # This statement comes first: other writers of this window wait at it for the transaction's end.
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
            _copy_stage(database, attempt, columns, stage)


def _copy_stage(
    database: Database, attempt: Try, table_columns: dict[str, str], stage_columns: dict[str, str]
) -> None:
    """Insert the stage's rows into the table, within the transaction of ``move``. Raises RuntimeError for a wrong row count.

    Columns are dicts of their exact names by their names in lower case: the two tables may differ in case and order.
    """
    unknown = sorted(stage_columns.keys() - table_columns.keys())
    if unknown:
        raise RuntimeError(f"the table {attempt.table} has no column {', '.join(unknown)}")
    targets = ", ".join(database.quoted(table_columns[name]) for name in stage_columns)
    sources = ", ".join(database.quoted(name) for name in stage_columns.values())
    inserted = database.change(
        f"INSERT INTO {attempt.table} ({targets}) SELECT {sources} FROM {attempt.stage}"  # noqa: S608  # the operator's own names
    )
    # Spark's JDBC writer commits each task by itself: a task that ran twice may have written its rows twice.
    if inserted != attempt.job.rows:
        raise RuntimeError(
            f"the stage of window {attempt.job.window.id} holds {inserted} rows, not {attempt.job.rows}"
        )


def clear(database: Database, attempt: Try, stage: str) -> None:
    """Drop a stage of the try's window and remove its name from the window's row. May be repeated."""
    database.drop(stage)
    database.change(
        f"UPDATE {attempt.windows} SET stage = ? WHERE pipeline = ? AND window_id = ? AND stage = ?",  # noqa: S608  # the operator's own name
        _NONE,
        *attempt.key,
        stage,
    )
