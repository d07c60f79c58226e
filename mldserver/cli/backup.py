"""``mldserver ledger backup | restore``: a ledger in SQLite, with the files that it names, out of a pipeline and back.

A backup is a folder: ``ledger.sqlite``, and below ``files`` what the ledger names, under the paths that it names it by:
segments, late rows that are not visible yet, and outputs that count and are not published yet. Published windows are not
in it: they are the output, and whoever backs that up has them.
"""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path  # noqa: TC003  # cyclopts reads the annotations
from typing import TYPE_CHECKING, Final

from mldserver.base.disk import make_folder, sync
from mldserver.cli.ledger_tool import HERE, AsJson, Where, answer, as_operator_errors, details, settings_at
from mldserver.config.locations import RemoteOut, SqlitePlace
from mldserver.config.resolve import home, ledger_file
from mldserver.errors import OperatorError
from mldserver.ledger.book import Book
from mldserver.ledger.sqlite import SqliteStore, go_on_from
from mldserver.ledger.sqlite_file import copy_whole, pipeline_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mldserver.config.settings import Settings
    from mldserver.ledger.contract import LedgerState
    from mldserver.output.store import OutputStore

_LEDGER: Final = "ledger.sqlite"
_FILES: Final = "files"
_TRIES: Final = 20
"""How often the ledger is copied again because a server deleted files that the last copy names; each time fewer."""


def backup_ledger(folder: Path, /, *, where: Where = HERE, as_json: AsJson = False) -> int:
    """Copy a ledger in SQLite and the files that it names into a new folder, beside servers that run.

    On one disk the files get a second name there and take no room. What has arrived since is not in the copy: after
    `restore` a daemon that has checkpointed it is refused, until its lease is deleted or the gap accepted.

    Parameters
    ----------
    folder
        A folder that is new, or empty.
    """
    with as_operator_errors():
        settings, ledger, store = _places(where)
        if folder.exists() and any(folder.iterdir()):
            raise OperatorError(f"{folder} is not empty.", advice="Name a folder that is new.")
        make_folder(folder)
        part = folder / f"{_LEDGER}.part"
        for _ in range(_TRIES):
            copy_whole(ledger, part)
            state = _read(part, settings.pipeline)
            # What is named and not there yet. Where some of it is gone, the ledger has gone on.
            whole = True
            for path in _named(state):
                try:
                    if not (folder / _FILES / path).exists():
                        store.save(path, folder / _FILES / path)
                except FileNotFoundError:
                    whole = False
            if whole:
                break
        else:
            raise OperatorError(
                f"Servers delete files faster than they can be copied to {folder}.",
                did="There is no backup.",
                advice="Name a folder on the output folder's own disk: there they get a second name at once.",
            )
        kept = set(_named(state))
        for file in [file for file in (folder / _FILES).rglob("*") if file.is_file()]:
            if str(file.relative_to(folder / _FILES)) in kept:
                sync(file)
            else:
                file.unlink()
        for entry in (part, *(entry for entry in folder.rglob("*") if entry.is_dir())):
            sync(entry)
        # Last: a folder without it is no backup.
        part.rename(folder / _LEDGER)
        sync(folder)
    return _tell({"backup": str(folder), "pipeline": settings.pipeline, "files": len(kept)}, as_json=as_json)


def restore_ledger(folder: Path, /, *, where: Where = HERE, as_json: AsJson = False) -> int:
    """Put a backup in the place of a pipeline's ledger, and bring back the files that it names. No server may run.

    The ledger that was there is kept beside it (`….replaced`). Files that were written since the backup are not
    deleted: the next start moves them to `_mldserver/quarantine`. A window that was published since is computed again,
    and halts until the published folder has been moved away.

    Parameters
    ----------
    folder
        What `mldserver ledger backup` has made.
    """
    from mldserver.assembly import claim_of  # noqa: PLC0415  # `--help` must not wait for it
    from mldserver.coordinator.membership import ServerLocks  # noqa: PLC0415  # see above
    from mldserver.output.layout import PRIVATE, SERVERS  # noqa: PLC0415  # see above

    with as_operator_errors():
        if not (folder / _LEDGER).is_file():
            raise OperatorError(
                f"{folder} is no backup of a ledger.",
                advice="Name a folder that `mldserver ledger backup` has made.",
            )
        settings, file, store = _places(where)
        pipeline = where.pipeline or pipeline_of(folder / _LEDGER) or settings.pipeline
        if held := ServerLocks(home(settings) / SERVERS).held():
            raise OperatorError(
                f"{len(held)} servers run on this ledger.",
                did="Nothing was touched.",
                advice=f"Stop them first. (If none runs, delete {held[0]}.)",
            )
        make_folder(file.parent)
        store.prepare(PRIVATE, durable=True)
        part = file.with_name(f"{file.name}.part")
        copy_whole(folder / _LEDGER, part)
        named = list(_named(_read(part, pipeline)))
        missing = [path for path in named if not store.exists(path)]
        for path in missing:
            store.bring_back(folder / _FILES / path, path)
        store.sync(*missing)
        claim = claim_of(settings, store)
        go_on_from(part, pipeline, claim.folder())
        state = _read(part, pipeline)
        sync(part)
        replaced = _set_aside(file)
        part.rename(file)
        sync(file.parent)
        claim.give(state)
    done = {
        "restored": str(file),
        "pipeline": pipeline,
        "files": len(named),
        "replaced": replaced and str(replaced),
    }
    return _tell(done, as_json=as_json)


def _places(where: Where) -> tuple[Settings, Path, OutputStore]:
    from mldserver.output.store import OutputStore  # noqa: PLC0415  # pyarrow: `--help` must not wait for it

    settings = settings_at(where)
    if not isinstance(settings.ledger, SqlitePlace):
        raise OperatorError(
            "A ledger in DynamoDB is backed up by AWS, not by mldserver.",
            advice="Turn on point-in-time recovery for the table, and versioning for the bucket of `out`. Start once "
            "with --new-ledger on the table that was restored.",
        )
    out = settings.out
    store = OutputStore(out.uri if isinstance(out, RemoteOut) else str(out), home=home(settings))
    return settings, ledger_file(settings), store


def _read(file: Path, pipeline: str) -> LedgerState:
    """Return what a copy holds. Raises LedgerError when it is damaged, of another format, or another pipeline's."""
    with contextlib.closing(SqliteStore(file, pipeline=pipeline)) as store:
        store.open()
        return store.look(Book.state)


def _named(state: LedgerState) -> Iterator[str]:
    """Yield the files that a ledger counts on."""
    yield from state.paths()
    for entry in state.windows.values():
        if entry.staging is not None:
            yield from (f"{entry.staging}/{file}" for file in entry.files)


def _set_aside(file: Path) -> Path | None:
    """Give the ledger that is there another name, with what SQLite keeps beside it; None when there is none."""
    if not file.exists():
        return None
    names = (file.with_name(f"{file.name}.replaced{number or ''}") for number in itertools.count())
    target = next(name for name in names if not name.exists())
    for suffix in ("", "-wal", "-shm"):
        with contextlib.suppress(FileNotFoundError):
            file.with_name(file.name + suffix).rename(target.with_name(target.name + suffix))
    return target


def _tell(done: dict[str, object], *, as_json: bool) -> int:
    answer(as_json, done, details((name, str(value)) for name, value in done.items() if value is not None))
    return 0
