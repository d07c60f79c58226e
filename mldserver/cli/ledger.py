"""``mldserver ledger``: shows positions and servers; changes shards' positions; backs up and restores.

A backup of a ledger in SQLite is a folder. It holds ``ledger.sqlite``, and below ``files`` the files that the ledger names,
under the same paths: segments, files of keyed state, late rows that are not visible yet, and outputs that are committed and not
published yet.
A backup does not hold published windows: they are part of the output folder, which is backed up separately.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import tempfile
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from cyclopts import App, Parameter
from rich.console import RenderableType

from mldserver.base.clock import SystemClock
from mldserver.base.disk import make_folder, make_private, sync
from mldserver.cli.ledger_tool import (
    FROM_SETTINGS,
    LedgerOptions,
    as_operator_errors,
    ledger_settings,
    open_ledger,
    read_ledger,
)
from mldserver.cli.render import AsJson, details, facts_and_tables, first_line, print_result, write_text
from mldserver.config.locations import SqlitePlace
from mldserver.config.resolve import home, ledger_file
from mldserver.config.settings import Settings
from mldserver.errors import ConfigError, OperatorError
from mldserver.ledger.book import Book
from mldserver.ledger.contract import LedgerState, Segment, ShardState, StateFile, WindowState
from mldserver.ledger.operations import Ledger
from mldserver.ledger.sqlite import SqliteStore, go_on_from
from mldserver.ledger.sqlite_file import check_tables, copy_whole, pipeline_of
from mldserver.ledger.state_rules import shards_with_state
from mldserver.output.layout import OUTPUTS, PRIVATE, SEGMENTS, STAGING, STATE

if TYPE_CHECKING:
    from mldserver.output.store import OutputStore

_LEDGER: Final = "ledger.sqlite"
_FILES: Final = "files"
_SERVER_FOLDERS: Final = (f"{SEGMENTS}/", f"{STATE}/", f"{STAGING}/", f"{OUTPUTS}/")
"""The prefixes of all files that a ledger may name. A server deletes such files when it no longer needs them."""

_MAX_COPIES: Final = 20
"""How often the ledger is copied again because a server deleted files that the last copy names; each time fewer."""

_HELP = """
Show shards' positions and servers, reset or forget shards, accept a gap, back up and restore. Running servers are not
disturbed.

```
mldserver ledger show --out out/departures
mldserver ledger show --ledger 'dynamodb://mldserver?region=eu-central-1' --pipeline departures --json
mldserver ledger accept-gap shardId-000000000003 --out out/departures
mldserver ledger reset shardId-000000000003 --out out/departures
mldserver ledger reset shardId-000000000003 --forget-state --out out/departures
mldserver ledger forget made-up-name --out out/departures
mldserver ledger backup /backups/departures-monday --out out/departures
mldserver ledger restore /backups/departures-monday --out out/departures
mldserver ledger create --ledger 'dynamodb://mldserver?region=eu-central-1'
```

In a folder the ledger is the SQLite file `_mldserver/ledger.sqlite`; `mldserver/ledger/sqlite_file.py` documents its format.

Exit codes: 0 done, 2 the shard or the ledger does not exist, or the ledger cannot be read.
"""

app = App(name="ledger", help=_HELP, help_format="markdown")


ShardId = Annotated[str, Parameter(help="The shard's id, as `ledger show` lists it.")]
ForgetState = Annotated[
    bool,
    Parameter(
        negative=(),
        help="Forget the keyed state of the shards too; on DynamoDB Streams that of all shards that descend from the same one.",
    ),
]


@app.command(name="show")
def show_ledger(*, where: LedgerOptions = FROM_SETTINGS, as_json: AsJson = False) -> None:
    """Show shards with their positions, servers, and counts of the rest."""
    document = ledger_document(read_ledger(where))
    print_result(as_json, document, *ledger_text(document))


@app.command(name="create")
def create_ledger(*, where: LedgerOptions = FROM_SETTINGS) -> None:
    """Create the DynamoDB table that `--ledger` names, unless it exists: with on-demand billing, for any number of pipelines.

    `mldserver/ledger/dynamodb.py` lists the permissions that this and the servers need.
    """
    from mldserver.assembly import ledger_of  # noqa: PLC0415  # the whole server: `--help` must not wait for it
    from mldserver.ledger.dynamodb import DynamoLedger  # noqa: PLC0415  # see above

    for place, settings in {settings.ledger: settings for settings in where.all_resolved()}.items():
        if isinstance(place, SqlitePlace):
            raise ConfigError(
                "A ledger in SQLite needs no table.",
                advice="Name one: --ledger 'dynamodb://TABLE?region=REGION'.",
            )
        with as_operator_errors(), asyncio.Runner() as runner:
            ledger = ledger_of(settings, server_id="tool", clock=SystemClock())
            assert isinstance(ledger, DynamoLedger)
            try:
                runner.run(ledger.create_table())
            finally:
                runner.run(ledger.close())
        write_text(f"The table {place.table} is there.")


@app.command(name="reset")
def reset_shards(
    *shards: ShardId,
    forget_state: ForgetState = False,
    where: LedgerOptions = FROM_SETTINGS,
    as_json: AsJson = False,
) -> None:
    """Forget shards' positions, so that the server accepts all their records again.

    Rows that were stored before stay in place: if read again, they count twice. Only shards that no server holds
    are reset. The daemon must start at the beginning (delete the shard's lease, or the application's lease table):
    a daemon that continues from its checkpoint is refused, unless the gap is accepted.

    Records that are read again would change keyed state (`ctx.state`) twice. A shard with keyed state is reset only with
    `--forget-state`. If the shard has split or merged since, name its descendants too: they keep their state otherwise.
    """
    with _open_ledger_of_free_shards(shards, where, forget_state=forget_state) as (ledger, _, runner):
        done = runner.run(ledger.reset(frozenset(shards), forget_state=forget_state))
    text = f"is reset: it has no position{' and no keyed state' if forget_state else ''} any more."
    _print_changed("reset", shards, done, dict.fromkeys(done, text), as_json=as_json)


@app.command(name="forget")
def forget_shards(
    *shards: ShardId,
    forget_state: ForgetState = False,
    where: LedgerOptions = FROM_SETTINGS,
    as_json: AsJson = False,
) -> None:
    """Remove names that do not belong to the stream, such as a name that a test or an unknown client has invented.

    Windows wait for every shard in the ledger until `missing_limit`, and readiness waits for a shard that is read. Rows
    that arrived under the name stay. Only shards that no server holds are forgotten. If the name does belong to a shard,
    its daemon is refused when it continues from its checkpoint, as after `reset`; rows that are read again count twice.
    A name with keyed state is forgotten only with `--forget-state`.
    """
    with _open_ledger_of_free_shards(shards, where, forget_state=forget_state) as (ledger, state, runner):
        done = runner.run(ledger.forget_shards(frozenset(shards), forget_state=forget_state))
    texts = {
        shard: f"is forgotten (its position was {state.shards[shard].position or 'none'})." for shard in done
    }
    _print_changed("forgotten", shards, done, texts, as_json=as_json)


@contextlib.contextmanager
def _open_ledger_of_free_shards(
    shards: tuple[str, ...], where: LedgerOptions, *, forget_state: bool
) -> Iterator[tuple[Ledger, LedgerState, asyncio.Runner]]:
    """Open the ledger for a command that changes these shards.

    Raises OperatorError if it lacks one, a server holds one, or one has keyed state that the command may not forget.
    """
    if not shards:
        raise OperatorError("No shard was named.", advice="`mldserver ledger show` shows them.")
    with open_ledger(ledger_settings(where)) as (ledger, state, runner):
        # Check all shards before the first is changed: a wrong second name must not leave the command half done.
        for shard_id in shards:
            if (owner := _find_shard(state, shard_id).owner) is not None:
                raise OperatorError(
                    f"Shard {shard_id} is held by the server {owner}.",
                    advice="Stop that server first; a dead one's shards are free when another server has noticed.",
                )
        for shard_id in sorted(shards_with_state(state).intersection(shards)):
            _check_state(state, shard_id, forget_state=forget_state)
        yield ledger, state, runner


def _check_state(state: LedgerState, shard_id: str, *, forget_state: bool) -> None:
    """Raise OperatorError unless the keyed state of a shard may be forgotten."""
    if not forget_state:
        raise OperatorError(
            f"Shard {shard_id} has keyed state.",
            did="Nothing was changed.",
            advice="Give --forget-state to forget its keys' state too. Without it, records that are read again would count twice.",
        )
    store = state.shards[shard_id].store
    for other in state.shards.values():
        if other.store == store and other.owner is not None:
            raise OperatorError(
                f"Shard {other.shard_id} shares the keyed state of shard {shard_id}, and is held by the server {other.owner}.",
                did="Nothing was changed.",
                advice="Stop that server first.",
            )


def _print_changed(
    word: str, shards: tuple[str, ...], done: frozenset[str], texts: Mapping[str, str], *, as_json: bool
) -> None:
    """Print which shards were changed. Raises OperatorError if some were not, since a server has opened them meanwhile.

    ``word`` names the change ("reset"); ``texts`` has a sentence for each changed shard.
    """
    print_result(as_json, {word: sorted(done)}, details(dict(sorted(texts.items()))))
    if unchanged := sorted(set(shards).difference(done)):
        raise OperatorError(
            f"Not {word}, because a server has opened them since: {', '.join(unchanged)}.",
            advice="Stop the server first.",
        )


@app.command(name="accept-gap")
def accept_gap(shard: ShardId, /, *, where: LedgerOptions = FROM_SETTINGS, as_json: AsJson = False) -> None:
    """Allow a daemon, once, to start a shard beyond the ledger's position; the records between the two positions are lost."""
    with open_ledger(ledger_settings(where)) as (ledger, state, runner):
        position = _find_shard(state, shard).position
        if not runner.run(ledger.accept_gap(shard)):
            # The shard was pruned after the ledger was read: raise the error for an unknown shard.
            del state.shards[shard]
            _find_shard(state, shard)
    text = f"may start beyond {position or 'nothing'}, the next time it is opened."
    document = {"accepted": shard, "position": None if position is None else str(position)}
    print_result(as_json, document, details({shard: text}))


def _find_shard(state: LedgerState, shard_id: str) -> ShardState:
    """Return a shard of the ledger. Raises OperatorError if the ledger does not have it."""
    if (shard := state.shards.get(shard_id)) is None:
        raise OperatorError(
            f"The ledger has no shard {shard_id}.", advice="`mldserver ledger show` shows those it has."
        )
    return shard


def ledger_document(state: LedgerState) -> dict[str, Any]:
    """Return a ledger's contents as the JSON document of `ledger show --json`: shards, servers, and counts."""
    counts = Counter(entry.state for entry in state.windows.values())
    shards = [dataclasses.asdict(shard) for _, shard in sorted(state.shards.items())]
    for shard in shards:
        position = shard["position"]
        shard |= {"position": position and str(position), "parents": list(shard["parents"])}
    return {
        "clock": state.clock,
        "cut_below_ms": state.cut_below_ms,
        "batch_progress": dataclasses.asdict(state.batch_progress),
        "dead_letters": state.dead_letters,
        "draining": state.draining,
        "late_files_waiting": len(state.late_segments),
        "windows": {str(state): counts[state] for state in WindowState},
        "segment_bytes": state.segment_bytes,
        "stores": len(state.stores),
        "state_files": len(state.state_files),
        "servers": [dataclasses.asdict(server) for _, server in sorted(state.servers.items())],
        "shards": shards,
    }


def ledger_text(document: dict[str, Any]) -> list[RenderableType]:
    """Return the document of `ledger show` as text."""
    return facts_and_tables(
        document,
        servers="server_id beat_ms watermark_ms idle held_by reason",
        shards="shard_id position event_ms epoch owner parents ended_ms gap_accepted",
    )


@app.command(name="backup")
def backup_ledger(folder: Path, /, *, where: LedgerOptions = FROM_SETTINGS, as_json: AsJson = False) -> None:
    """Copy a ledger in SQLite and the files that it names into a new folder. Servers may run.

    On the same disk the files become hard links and take no space. Later records are not in the copy: after `restore`, a
    daemon that has checkpointed them is refused until its lease is deleted or the gap accepted.

    Parameters
    ----------
    folder
        A new or empty folder.
    """
    with as_operator_errors():
        settings, ledger, store = _backup_places(where)
        if folder.exists() and any(folder.iterdir()):
            raise OperatorError(f"{folder} is not empty.", advice="Name a folder that is new.")
        make_private(folder)
        make_folder(folder)
        make_private(folder / _FILES)
        unfinished_copy = folder / f"{_LEDGER}.part"
        for _ in range(_MAX_COPIES):
            copy_whole(ledger, unfinished_copy)
            state = _read_copy(unfinished_copy, settings.pipeline)
            # Copy the files that the ledger names and the backup does not have yet. If a server has deleted one since, the
            # ledger has changed: copy it again.
            is_complete = True
            for path in _files_named(state):
                try:
                    if not (folder / _FILES / path).exists():
                        store.save(path, folder / _FILES / path)
                except FileNotFoundError:
                    is_complete = False
            if is_complete:
                break
        else:
            raise OperatorError(
                f"Servers delete files faster than they can be copied to {folder}.",
                did="There is no backup.",
                advice="Name a folder on the output folder's own disk: there they get a second name at once.",
            )
        needed = set(_files_named(state))
        for file in [file for file in (folder / _FILES).rglob("*") if file.is_file()]:
            if str(file.relative_to(folder / _FILES)) in needed:
                sync(file)
            else:
                file.unlink()  # an earlier copy of the ledger named it
        for entry in (unfinished_copy, *(entry for entry in folder.rglob("*") if entry.is_dir())):
            sync(entry)
        # This comes last: a folder without this file does not count as a backup.
        unfinished_copy.rename(folder / _LEDGER)
        sync(folder)
    print_result(as_json, {"backup": str(folder), "pipeline": settings.pipeline, "files": len(needed)})


@app.command(name="restore")
def restore_ledger(folder: Path, /, *, where: LedgerOptions = FROM_SETTINGS, as_json: AsJson = False) -> None:
    """Replace a pipeline's ledger by a backup, and restore the files that it names. No server may run.

    The former ledger is kept in the same folder (`….replaced`). Files that were written after the backup are not deleted:
    the next start moves them to `_mldserver/quarantine`. A window that was published since is computed again, and halts
    until the published folder has been moved away.

    The command verifies the backup before it writes anything: its ledger must have a ledger's tables, and every file that
    it names must be in a server's own folders, exist without links, and have the recorded size and number of rows.

    Parameters
    ----------
    folder
        A folder that `mldserver ledger backup` has written.
    """
    from mldserver.assembly import claim_of  # noqa: PLC0415  # `--help` must not wait for it
    from mldserver.coordinator.membership import ServerLocks  # noqa: PLC0415  # see above
    from mldserver.output.layout import SERVERS  # noqa: PLC0415  # see above

    with as_operator_errors(), tempfile.TemporaryDirectory(prefix="mldserver-") as scratch:
        if not _is_regular_file(folder, _LEDGER):
            raise OperatorError(
                f"{folder} is not a backup of a ledger.",
                advice="Name a folder that `mldserver ledger backup` has made.",
            )
        settings, file, store = _backup_places(where)
        # A backup is untrusted: verify a copy of its ledger first, and write nothing until the whole backup is verified.
        copy = Path(scratch) / _LEDGER
        copy_whole(folder / _LEDGER, copy)
        check_tables(copy)
        pipeline = where.pipeline or pipeline_of(copy) or settings.pipeline
        state = _read_copy(copy, pipeline)
        named = list(_files_named(state))
        _check_names(state, {*named, *state.paths()})
        _check_stores(state)
        missing = [path for path in named if not store.exists(path)]
        _check_files(folder, state, frozenset(missing))
        if locks := ServerLocks(home(settings) / SERVERS).held():
            raise OperatorError(
                f"{len(locks)} servers run on this ledger.",
                did="Nothing was touched.",
                advice=f"Stop them first. (If none runs, delete {locks[0]}.)",
            )
        make_folder(file.parent)
        store.prepare(PRIVATE, durable=True)
        new_ledger = file.with_name(f"{file.name}.part")
        copy_whole(copy, new_ledger)
        for path in missing:
            store.bring_back(folder / _FILES / path, path)
        store.sync(*missing)
        claim = claim_of(settings, store)
        go_on_from(new_ledger, pipeline, claim.read().folder)
        state = _read_copy(new_ledger, pipeline)
        sync(new_ledger)
        replaced = _rename_replaced(file)
        new_ledger.rename(file)
        sync(file.parent)
        claim.give(state)
    result = {
        "restored": str(file),
        "pipeline": pipeline,
        "files": len(named),
        "replaced": replaced and str(replaced),
    }
    print_result(as_json, result)


def _backup_places(where: LedgerOptions) -> tuple[Settings, Path, OutputStore]:
    """Return the settings, the SQLite file of the ledger, and the output folder. Raises OperatorError for another ledger."""
    from mldserver.assembly import store_of  # noqa: PLC0415  # the whole server: `--help` must not wait for it

    settings = ledger_settings(where)
    if not isinstance(settings.ledger, SqlitePlace):
        raise OperatorError(
            "A ledger in DynamoDB is backed up by AWS, not by mldserver.",
            advice="Turn on point-in-time recovery for the table, and versioning for the bucket of `out`. Start once "
            "with --new-ledger on the table that was restored.",
        )
    return settings, ledger_file(settings), store_of(settings)


def _read_copy(file: Path, pipeline: str) -> LedgerState:
    """Return the state in a copy of a ledger. Raises LedgerError if it is damaged, of another format, or another pipeline's."""
    with contextlib.closing(SqliteStore(file, pipeline=pipeline)) as store:
        store.open()
        return store.read(Book.state)


def _files_named(state: LedgerState) -> Iterator[str]:
    """Yield the files that a ledger needs: not the state files that wait for their deletion."""
    yield from state.paths() - {file.path for file in state.state_files.values() if not file.needed}
    for entry in state.windows.values():
        if entry.staging is not None:
            yield from (f"{entry.staging}/{file}" for file in entry.files)


def _is_regular_file(folder: Path, path: str) -> bool:
    """Whether ``path`` is a file inside ``folder``, reached without a symbolic link: a link could lead out of a backup."""
    file = folder / path
    return file.is_file() and file.resolve() == folder.resolve() / path


def _check_names(state: LedgerState, named: Iterable[str]) -> None:
    """Raise OperatorError unless all paths that a backup's ledger names stay in the folders that servers write into.

    ``named``: the paths of files. Window ids and staging folders become parts of paths too.
    """
    ids = {*state.windows, *(segment.window_id for segment in state.late_segments)}
    wrong = [name for name in sorted(ids) if "/" in name or not _is_name(name)]
    stagings = (entry.staging for entry in state.windows.values() if entry.staging is not None)
    wrong += [
        path
        for path in (*named, *stagings)
        if not (path.startswith(_SERVER_FOLDERS) and all(map(_is_name, path.split("/"))))
    ]
    if wrong:
        raise _untrusted_backup(f"its ledger names {wrong[0]!r}, which is not in a server's own folders")


def _is_name(part: str) -> bool:
    return part not in {"", ".", ".."} and "\0" not in part


def _check_stores(state: LedgerState) -> None:
    """Raise OperatorError if a backup's ledger names a store of keyed state that it does not have."""
    stores = {shard.store for shard in state.shards.values() if shard.store}
    stores |= {store_id for file in state.state_files.values() for store_id in file.needed}
    if unknown := sorted(stores - state.stores.keys()):
        raise _untrusted_backup(
            f"its ledger names the store {unknown[0]!r} of keyed state, which it does not have"
        )


def _check_files(folder: Path, state: LedgerState, wanted: Collection[str]) -> None:
    """Raise OperatorError unless the ``wanted`` files are in the backup ``folder`` and match what its ledger says of them.

    Segments and state files must have the recorded rows and bytes, state files also the columns of keyed state; the files of a
    window's committed output, the recorded rows together.
    """
    from pyarrow import ArrowException  # noqa: PLC0415  # `--help` must not wait for it
    from pyarrow.parquet import ParquetFile  # noqa: PLC0415  # see above

    from mldserver.coordinator.core.state_files import COLUMNS, WITHOUT_TIMERS  # noqa: PLC0415  # see above

    def rows(path: str) -> int:
        if not _is_regular_file(folder, f"{_FILES}/{path}"):
            raise _untrusted_backup(f"{_FILES}/{path} is missing, or a link leads there")
        try:
            with ParquetFile(folder / _FILES / path) as file:
                if path in state.state_files and file.schema_arrow not in {COLUMNS, WITHOUT_TIMERS}:
                    raise _untrusted_backup(f"{_FILES}/{path} does not have the columns of keyed state")
                return int(file.metadata.num_rows)
        except ArrowException as error:
            raise _untrusted_backup(
                f"{_FILES}/{path} is no Parquet file: {first_line(str(error))}"
            ) from error

    counts = {path: rows(path) for path in sorted(wanted)}
    entries = state.windows.values()
    window_segments = (segment for entry in entries for segment in (*entry.segments, *entry.pending))
    segments: list[Segment | StateFile] = [*state.late_segments, *window_segments]
    for named in [*segments, *state.state_files.values()]:
        if (count := counts.get(named.path)) is None:
            continue
        size = (folder / _FILES / named.path).stat().st_size
        if (count, size) != (named.rows, named.bytes):
            raise _untrusted_backup(
                f"{_FILES}/{named.path} has {count:,} rows and {size:,} bytes, and the ledger expects "
                f"{named.rows:,} and {named.bytes:,}"
            )
    for entry in state.windows.values():
        paths = [f"{entry.staging}/{file}" for file in entry.files] if entry.staging is not None else []
        all_wanted = bool(paths) and counts.keys() >= set(paths)
        if all_wanted and (count := sum(counts[path] for path in paths)) != entry.rows_out:
            raise _untrusted_backup(
                f"the output of window {entry.window_id} has {count:,} rows, and the ledger expects {entry.rows_out:,}"
            )


def _untrusted_backup(what: str) -> OperatorError:
    return OperatorError(
        f"The backup cannot be used: {what}.",
        did="Nothing was restored.",
        advice="Take another backup. This one is damaged, was not copied as a whole, or was changed.",
    )


def _rename_replaced(file: Path) -> Path | None:
    """Rename the existing ledger and SQLite's files next to it; return the new path, None if no ledger exists."""
    if not file.exists():
        return None
    names = (file.with_name(f"{file.name}.replaced{number or ''}") for number in itertools.count())
    target = next(name for name in names if not name.exists())
    for suffix in ("", "-wal", "-shm"):
        with contextlib.suppress(FileNotFoundError):
            file.with_name(file.name + suffix).rename(target.with_name(target.name + suffix))
    return target
