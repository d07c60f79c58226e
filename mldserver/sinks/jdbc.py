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
revisions to 0. After that, no try of the former owner moves any rows.
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

from mldserver.engine_jobs import PublishJob
from mldserver.errors import NotThereYet, OperatorError
from mldserver.sinks.database import DatabaseError, connected, last_name, suffixed
from mldserver.sinks.sink import (
    REVISION,
    WINDOW,
    Owner,
    SinkSpec,
    check_made_here,
    must_note,
    owner_of,
    staged,
)

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
"""The same, of a try that makes the table."""
_THERE_ALREADY: Final = re.compile("already|exists|duplicate", re.IGNORECASE)
"""In the words of databases that have an index of a name: they share no SQLSTATE for it."""
_LONGEST_SUFFIX: Final = len(_STAGE) + 12

_THERE: Final = "23"
"""How SQLSTATEs begin of a key that is there already."""

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


def _is_first(stage: str) -> bool:
    """Whether a try of this stage makes the table, or goes on where one died that did."""
    # A table's own name may hold anything.
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
    """Raise OperatorError where a window's steps cannot work; they are rehearsed, without rows. NotThereYet: for now."""
    if type(spark).__module__.startswith("pyspark.sql.connect"):
        raise OperatorError(
            "Spark Connect gives no access to JDBC transactions.",
            advice="Set spark_master to a Spark of the server's own, such as local[*], or choose another sink.",
        )
    with _words_of_start(), connected(spark, sink) as database:
        has_transactions, longest = database.limits()
        if not has_transactions:
            raise OperatorError("The database of sink has no transactions.", advice="Choose another sink.")
        # Names that were cut short would fall together.
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
    """Note whose the table is. Raises OperatorError as ``must_note``, and where the table was dropped."""
    with _words_of_start(), connected(spark, sink) as database:
        _own(database, sink.table, owner, new_ledger=new_ledger)


@contextlib.contextmanager
def _words_of_start() -> Iterator[None]:
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
    """Do all that a window needs the right for, without rows: a database looks at rights and types all the same."""
    windows, stage = _windows(table), suffixed(table, f"{_STAGE}{secrets.token_hex(6)}")
    _make_windows(database, windows)
    with database.together():
        database.change(f"CREATE TABLE {stage} (stage INTEGER)")
        database.change(f"DROP TABLE {stage}")
    nothing = f"FROM {windows} WHERE 1 = 0"
    database.change(f"INSERT INTO {windows} SELECT * {nothing}")
    database.change(f"UPDATE {windows} SET revision = 0 WHERE 1 = 0")  # noqa: S608  # the operator's own name
    if columns is None:
        return
    window, revision = (database.quoted(columns[name]) for name in (WINDOW, REVISION))
    database.change(f"DELETE FROM {table} WHERE {window} = ? AND 1 = 0", "")  # noqa: S608  # see above
    try:
        database.change(f"INSERT INTO {table} ({window}, {revision}) SELECT stage, revision {nothing}")
    except DatabaseError as error:
        # Of the columns that are not named here a window gives values.
        if error.state.startswith("42"):
            raise


def _make_windows(database: Database, windows: str) -> None:
    _make(
        database,
        windows,
        "pipeline VARCHAR(255) NOT NULL, window_id VARCHAR(64) NOT NULL, revision INTEGER NOT NULL,"
        " stage VARCHAR(255) NOT NULL, PRIMARY KEY (pipeline, window_id)",
    )


def _make(database: Database, table: str, columns: str) -> None:
    if database.columns(table) is not None:
        return
    try:
        database.change(f"CREATE TABLE {table} ({columns})")
    except DatabaseError:
        # Another server may have made it in the same instant.
        if database.columns(table) is None:
            raise


def _own(database: Database, table: str, owner: Owner, *, new_ledger: bool = False) -> bool:
    """Note whose the table is, unless it is known; return whether the table is known to have been made.

    Raises OperatorError when the table is another's, or was dropped.
    """
    windows, name = _windows(table), _owner(table)
    _make_windows(database, windows)
    _make(
        database,
        name,
        "id INTEGER NOT NULL PRIMARY KEY, pipeline VARCHAR(255) NOT NULL, ledger VARCHAR(64) NOT NULL,"
        " made INTEGER NOT NULL",
    )
    while True:
        line = database.first(f"SELECT pipeline, ledger, made FROM {name}")  # noqa: S608  # the operator's own name
        found = Owner(line[0], line[1]) if line is not None else None
        note = must_note(found, owner, table, new_ledger=new_ledger)
        same = found is not None and found.ledger == owner.ledger
        # Of a table that an earlier version of the program made only its windows are noted.
        made = bool(int(line[2])) if line is not None else _count(database, windows) > 0
        if made and (same or found is None) and database.columns(table) is None:
            raise OperatorError(
                f"The table {table} was dropped or renamed, and with it the windows that were published into it "
                f"({_count(database, windows):,}).",
                did="Nothing was written.",
                advice=f"Bring the table back. Or drop {windows} and {name} too: the server then makes a new table, and "
                "`mldserver windows retry --published WINDOW …` fills it with windows whose segments are still there.",
            )
        if not note or _take(database, table, found, owner):
            return made and same


def _count(database: Database, windows: str) -> int:
    line = database.first(f"SELECT COUNT(*) FROM {windows} WHERE revision > 0")  # noqa: S608  # the operator's own name
    return 0 if line is None else int(line[0])


def _take(database: Database, table: str, found: Owner | None, owner: Owner) -> bool:
    """Make ``owner`` the table's owner in place of ``found``. Return False if the stored owner has changed.

    Revisions that another ledger counted are forgotten.
    """
    windows, name = _windows(table), _owner(table)
    if found is not None and found.ledger == owner.ledger:
        renamed = f"UPDATE {name} SET pipeline = ? WHERE ledger = ?"  # noqa: S608  # the operator's own name
        return bool(database.change(renamed, owner.pipeline, owner.ledger))
    stages = f"SELECT stage FROM {windows} WHERE stage <> ?"  # noqa: S608  # see above
    while (left := database.first(stages, _NONE)) is not None:
        # Before the line forgets it; its try is another owner's, or dead.
        database.drop(left[0])
        database.change(f"UPDATE {windows} SET stage = ? WHERE stage = ?", _NONE, left[0])  # noqa: S608  # see above
    try:
        with database.together():
            if found is None:
                database.change(f"INSERT INTO {name} VALUES (1, ?, ?, 0)", owner.pipeline, owner.ledger)  # noqa: S608  # see above
            elif not database.change(
                f"UPDATE {name} SET pipeline = ?, ledger = ?, made = 0 WHERE ledger = ?",  # noqa: S608  # see above
                owner.pipeline,
                owner.ledger,
                found.ledger,
            ):
                return False
            database.change(f"UPDATE {windows} SET revision = 0, stage = ?", _NONE)  # noqa: S608  # see above
    except DatabaseError as error:
        # Of two first claims the key lets one through.
        if found is None and error.state.startswith(_THERE):
            return False
        raise
    return True


def publish(spark: SparkSession, sink: SinkSpec, job: PublishJob) -> None:
    """Replace the window's rows in the table by those of its revision, unless it has them, or later ones, already."""
    with connected(spark, sink) as database:
        made = _own(database, sink.table, owner_of(job))
        kind = _FIRST if database.columns(sink.table) is None else _STAGE
        stage = suffixed(sink.table, f"{kind}{secrets.token_hex(6)}")
        attempt = claim(database, Try(job, sink.table, stage))
    if attempt is None:
        return
    if job.files:
        fill(staged(spark, job), sink, attempt, create=_is_first(attempt.stage))
    with connected(spark, sink) as database:
        try:
            if job.files and not made:
                # Before the first rows are in it: a table that is gone is then known to have held some.
                database.change(f"UPDATE {_owner(sink.table)} SET made = 1 WHERE ledger = ?", job.ledger)  # noqa: S608  # the operator's own name
            if _is_first(attempt.stage):
                try:
                    _make_index(database, sink.table)
                except DatabaseError as error:
                    # The try that made the table, and died, may have made it. What is not understood fails this one.
                    if kind == _FIRST or not _THERE_ALREADY.search(str(error)):
                        raise
            move(database, attempt)
        except BaseException:
            # The first error explains the failure; the next try drops the stage.
            with contextlib.suppress(DatabaseError):
                clear(database, attempt, attempt.stage)
            raise
        clear(database, attempt, attempt.stage)


def claim(database: Database, attempt: Try) -> Try | None:
    """Name this try's stage as the window's, and drop that of a try that died. None: the table has the revision.

    Where the one that died was making the table, so is the one that is returned.
    """
    windows, job = attempt.windows, attempt.job
    with database.together():
        # First, so that no other server claims this window, or the table, before this is done.
        locked = f"UPDATE {_owner(attempt.table)} SET ledger = ledger WHERE ledger = ?"  # noqa: S608  # the operator's own name
        if not database.change(locked, job.ledger):
            raise RuntimeError(f"another pipeline, or another ledger, has claimed the table {attempt.table}")
        line = database.first(
            f"SELECT revision, stage FROM {windows} WHERE pipeline = ? AND window_id = ?",  # noqa: S608  # see above
            *attempt.key,
        )
        if line is None:
            database.change(f"INSERT INTO {windows} VALUES (?, ?, 0, ?)", *attempt.key, attempt.stage)  # noqa: S608  # see above
            return attempt
        noted, left = int(line[0]), line[1]
        if _is_first(left) and not _is_first(attempt.stage):
            attempt = replace(attempt, stage=_FIRST.join(attempt.stage.rsplit(_STAGE, 1)))
        due = noted < job.window.revision
        changed = database.change(
            f"UPDATE {windows} SET stage = ? WHERE pipeline = ? AND window_id = ? AND revision = ? AND stage = ?",  # noqa: S608  # see above
            attempt.stage if due else left,
            *attempt.key,
            noted,
            left,
        )
        if not changed:
            raise RuntimeError(f"another server writes window {job.window.id} at the same time")
    if left != _NONE and due:
        database.drop(left)
    elif left != _NONE:
        clear(database, attempt, left)
    return attempt if due else None


def _make_index(database: Database, table: str) -> None:
    """Make an index for a table that Spark made, or each window would look through all others for its own rows."""
    columns, name = database.columns(table), suffixed(last_name(table), "__window")
    if columns is not None:
        database.change(f"CREATE INDEX {name} ON {table} ({database.quoted(columns[WINDOW])})")


def fill(rows: DataFrame, sink: SinkSpec, attempt: Try, *, create: bool) -> None:
    """Write the stage with Spark; if ``create``, create the table without rows first."""
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
        # First, so that other writers of this window wait here.
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


def clear(database: Database, attempt: Try, stage: str) -> None:
    """Drop a stage of the try's window, and name none. Repeatable."""
    database.drop(stage)
    database.change(
        f"UPDATE {attempt.windows} SET stage = ? WHERE pipeline = ? AND window_id = ? AND stage = ?",  # noqa: S608  # the operator's own name
        _NONE,
        *attempt.key,
        stage,
    )
