"""``mldserver dead-letters``: shows the records that failed for good, runs them again, or deletes them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, Final

from cyclopts import App, Group, Parameter
from cyclopts.validators import Number

from mldserver.cli.ledger_tool import FROM_SETTINGS, LedgerOptions, ledger_settings, open_ledger
from mldserver.cli.logs import since_time
from mldserver.cli.render import AsJson, facts_and_tables, print_result, table, write
from mldserver.config.settings import Settings
from mldserver.errors import OperatorError
from mldserver.ledger.contract import LETTERS_AT_ONCE, StoredLetter
from mldserver.ledger.operations import Ledger
from mldserver.records import DeadLetter

_HELP = """
Show the records that failed for good, redrive them through the current handler, or delete them.

```
mldserver dead-letters list --out out/trips --error ValueError
mldserver dead-letters show 17 --out out/trips
mldserver dead-letters redrive --out out/trips --shard shardId-000000000001
mldserver dead-letters redrive --out out/trips --from 's3://bucket/_dead_letters/*.jsonl'
mldserver dead-letters purge 17 18 --out out/trips --yes
```

After `redrive` a letter is *wanted*: the server that has its shard runs it again, or else any server. One transaction
registers the resulting rows and ends the letter, so that they count once, even after crashes. A record that fails again
becomes a new letter.

Exit codes: 0 done, 2 the letter or the ledger does not exist, or the ledger cannot be read.
"""

app = App(name="dead-letters", help=_HELP, help_format="markdown")

_PAGE_LETTERS: Final = 500
_DEFAULT_LIMIT: Final = 100
_SHOWN_BYTES: Final = 2000
"""Bytes of a payload that a person is shown: as text when it is UTF-8, else as hexadecimal digits."""


@Parameter(name="*", group=Group("Which letters"))
@dataclass(frozen=True, slots=True)
class LetterFilter:
    """Chooses letters; those that meet every condition."""

    shard: str | None = None
    """Only of this shard."""
    key: str | None = None
    """Only of this partition key."""
    error: str | None = None
    """Only those whose error contains this text, such as the name of its class."""
    since: str | None = None
    """Only those that failed since: an ISO 8601 time (UTC unless it says), or a duration such as `2 hours`."""

    def matching(self, ledger: Ledger, runner: asyncio.Runner) -> Iterator[StoredLetter]:
        """Yield a ledger's letters that meet every condition. Raises ConfigError if ``since`` is not a time."""
        since_ms, after = 0, None
        if self.since is not None:
            since_ms = round(since_time(self.since, datetime.now(UTC)).timestamp() * 1000)
        while page := runner.run(ledger.letters(after=after, limit=_PAGE_LETTERS)):
            for stored in page:
                letter = stored.letter
                if (
                    self.shard in {None, letter.shard_id}
                    and self.key in {None, letter.partition_key}
                    and (self.error is None or self.error in letter.error)
                    and letter.at_ms >= since_ms
                ):
                    yield stored
            after = page[-1].id


_ALL: Final = LetterFilter()

Letters = Annotated[
    str,
    Parameter(
        help="Letters' ids, as `dead-letters list` shows them. Instead of ids, give conditions or `--all`."
    ),
]
Everything = Annotated[bool, Parameter(name="--all", negative=(), help="All letters.")]


@app.command(name="list")
def list_letters(
    *,
    which: LetterFilter = _ALL,
    limit: Annotated[int | None, Parameter(validator=Number(gte=0))] = None,
    where: LedgerOptions = FROM_SETTINGS,
    as_json: AsJson = False,
) -> None:
    """List letters, in the order in which they were stored.

    Parameters
    ----------
    limit
        List at most this many; the others are counted. [default: 100; with --json all]
    """
    settings = ledger_settings(where)
    max_listed = _DEFAULT_LIMIT if limit is None and not as_json else limit
    chosen: list[StoredLetter] = []
    more = 0  # letters that match beyond the limit
    with open_ledger(settings) as (ledger, state, runner):
        for stored in which.matching(ledger, runner):
            if max_listed is None or len(chosen) < max_listed:
                chosen.append(stored)
            else:
                more += 1
    rows = [_letter_document(stored, settings.pipeline) for stored in chosen]
    if as_json and more:
        sys.stderr.write(f"mldserver: {more:,} more letters match; this list is cut by --limit.\n")
    counts = f"{state.dead_letters:,} dead letters, {state.redrives:,} of them to be redriven"
    columns = "letter wanted shard partition_key sequence attempts at_ms error"
    columns += " timer due_ms" if any(row.get("timer") for row in rows) else ""
    print_result(
        as_json, rows, table(rows, columns), counts + (f" ({more:,} more match; --limit)" if more else "")
    )


@app.command(name="show")
def show_letter(
    letter: str,
    /,
    *,
    payload: Annotated[bool, Parameter(negative=())] = False,
    where: LedgerOptions = FROM_SETTINGS,
    as_json: AsJson = False,
) -> None:
    """Show everything about a letter.

    Parameters
    ----------
    letter
        The letter's id, as `dead-letters list` shows it. In `list --json` it is `letter`; `id` is the record's.
    payload
        Write the record's payload, and nothing else, to standard output.
    """
    settings = ledger_settings(where)
    with open_ledger(settings) as (ledger, _, runner):
        (stored,) = _find_letters(ledger, runner, (letter,), settings.pipeline)
    if payload:
        write(stored.letter.data)
        return
    document = _letter_document(stored, settings.pipeline)
    print_result(as_json, document, *facts_and_tables(document | {"data": _shortened(stored.letter.data)}))


@app.command(name="redrive")
def redrive_letters(
    *letters: Letters,
    which: LetterFilter = _ALL,
    all_letters: Everything = False,
    files: Annotated[list[str] | None, Parameter(name="--from", negative=())] = None,
    cancel: Annotated[bool, Parameter(negative=())] = False,
    where: LedgerOptions = FROM_SETTINGS,
    as_json: AsJson = False,
) -> None:
    """Redrive letters through the current handler, on the running server or the next that starts.

    Parameters
    ----------
    files
        Letters in files (`dead_letters = jsonl` or `parquet`, or `s3://…`), as paths or URIs; `*` stands for any name in a
        folder. They are put into the ledger first; letters that the ledger already has are not added again.
    cancel
        Cancel the redrive of letters that no server has begun.
    """
    settings = ledger_settings(where)
    if files:
        if letters or which != _ALL or all_letters or cancel:
            raise OperatorError(
                "--from takes all letters of the files.", advice="Leave the ids and conditions out."
            )
        added, delivered_again = _import_letters(settings, files)
        text = f"{added:,} letters are in the ledger, to be redriven."
        if delivered_again:
            text += f" {delivered_again:,} are left out: their records are delivered again anyway."
        print_result(as_json, {"redriving": added, "delivered_again": delivered_again}, text)
        return
    with open_ledger(settings) as (ledger, _, runner):
        ids = _chosen_ids(ledger, runner, letters, which, settings.pipeline, all_letters=all_letters)
        changed = runner.run(ledger.redrive(ids, wanted=not cancel)) if ids else frozenset()
    name = "cancelled" if cancel else "redriving"
    what = "are left as they are" if cancel else "are marked for redrive: a running server takes them"
    print_result(as_json, {name: sorted(changed, key=_id_sort_key)}, f"{len(changed):,} letters {what}.")


@app.command(name="purge")
def purge_letters(
    *letters: Letters,
    which: LetterFilter = _ALL,
    all_letters: Everything = False,
    yes: Annotated[bool, Parameter(negative=())] = False,
    where: LedgerOptions = FROM_SETTINGS,
    as_json: AsJson = False,
) -> None:
    """Delete letters from the ledger, for good. Without `--yes`, only show how many match.

    Parameters
    ----------
    yes
        Delete them.
    """
    settings = ledger_settings(where)
    deleted: set[str] = set()
    with open_ledger(settings) as (ledger, _, runner):
        ids = _chosen_ids(ledger, runner, letters, which, settings.pipeline, all_letters=all_letters)
        if not yes:
            raise OperatorError(
                f"{len(ids):,} letters would be deleted, and their records with them.",
                did="Nothing was deleted.",
                advice="Add --yes.",
            )
        for start in range(0, len(ids), LETTERS_AT_ONCE):
            deleted |= runner.run(ledger.purge(ids[start : start + LETTERS_AT_ONCE]))
    print_result(
        as_json, {"purged": sorted(deleted, key=_id_sort_key)}, f"{len(deleted):,} letters are deleted."
    )


def _find_letters(
    ledger: Ledger, runner: asyncio.Runner, names: tuple[str, ...], pipeline: str
) -> list[StoredLetter]:
    """Return the dead letters that ``names`` mean: ids of letters, or of their records (``[pipeline/]shard/sequence/sub``).

    Raises OperatorError if one does not exist.
    """
    by_name: dict[str, StoredLetter] = {}
    for stored in _ALL.matching(ledger, runner):
        for name in (stored.id, stored.letter.record, f"{pipeline}/{stored.letter.record}"):
            if name in names:
                by_name[name] = stored
    for name in names:
        if name not in by_name:
            raise OperatorError(
                f"The ledger has no dead letter {name}.", advice="`mldserver dead-letters list` shows them."
            )
    return [by_name[name] for name in dict.fromkeys(names)]


def _chosen_ids(
    ledger: Ledger,
    runner: asyncio.Runner,
    names: tuple[str, ...],
    which: LetterFilter,
    pipeline: str,
    *,
    all_letters: bool,
) -> tuple[str, ...]:
    """Return the ids of the letters that a command means: by names, by conditions (``which``), or all.

    Raises OperatorError unless the command gives exactly one of the three.
    """
    if sum((bool(names), which != _ALL, all_letters)) != 1:
        raise OperatorError(
            "It is not clear which letters are meant.",
            advice="Name ids, or conditions (--shard, --key, --error, --since), or --all: one of the three.",
        )
    if names:
        return tuple(stored.id for stored in _find_letters(ledger, runner, names, pipeline))
    return tuple(stored.id for stored in which.matching(ledger, runner))


def _import_letters(settings: Settings, places: list[str]) -> tuple[int, int]:
    """Add the dead letters in files to the ledger, marked for redrive; return how many were added, and how many left out.

    A letter beyond its shard's position in the ledger is left out. The server that wrote it died before it could move the
    position, so the daemon will deliver the record again. All files are read before the first letter is added.
    """
    from mldserver.deadletters.destinations import read_letters  # noqa: PLC0415  # pyarrow, which the others do not need

    letters: dict[str, DeadLetter] = {}
    new = []
    with open_ledger(settings) as (ledger, state, runner):
        for place in places:
            # By record, so that a letter that was written twice counts once.
            letters |= {letter.record: letter for letter in read_letters(place, settings.pipeline)}
        for stored in _ALL.matching(ledger, runner):
            letters.pop(stored.letter.record, None)
        for letter in sorted(letters.values(), key=lambda letter: (letter.shard_id, letter.sequence)):
            shard = state.shards.get(letter.shard_id)
            if shard is None or (shard.position is not None and letter.sequence <= shard.position):
                new.append(letter)
        for start in range(0, len(new), _PAGE_LETTERS):
            runner.run(ledger.add_letters(tuple(new[start : start + _PAGE_LETTERS]), wanted=True))
    return len(new), len(letters) - len(new)


def _id_sort_key(letter_id: str) -> tuple[int, ...]:
    return tuple(int(part) for part in letter_id.split("."))


def _letter_document(stored: StoredLetter, pipeline: str) -> dict[str, Any]:
    from mldserver.deadletters.destinations import document  # noqa: PLC0415  # `--help` must not wait for it

    return {"letter": stored.id, "wanted": stored.wanted, **document(stored.letter, pipeline)}


def _shortened(data: bytes) -> str:
    """Return the beginning of a record's data as text if it is UTF-8, else as hexadecimal digits."""
    try:
        text = data.decode()[:_SHOWN_BYTES]
    except UnicodeDecodeError:
        text = data[:_SHOWN_BYTES].hex(" ")
    return text if len(data) <= _SHOWN_BYTES else f"{text} … ({len(data):,} bytes; --payload writes them)"
