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

from mldserver.cli.ledger_tool import HERE, Where, at_ledger, settings_at
from mldserver.cli.logs import since_time
from mldserver.cli.render import AsJson, answer, parts, table, write
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

_PAGE: Final = 500
_LISTED: Final = 100
_SHOWN: Final = 2000
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
        while page := runner.run(ledger.letters(after=after, limit=_PAGE)):
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
    where: Where = HERE,
    as_json: AsJson = False,
) -> None:
    """List letters, in the order in which they were stored.

    Parameters
    ----------
    limit
        List at most this many; the others are counted. [default: 100; with --json all]
    """
    settings = settings_at(where)
    most = _LISTED if limit is None and not as_json else limit
    chosen: list[StoredLetter] = []
    more = 0
    with at_ledger(settings) as (ledger, held, runner):
        for stored in which.matching(ledger, runner):
            if most is None or len(chosen) < most:
                chosen.append(stored)
            else:
                more += 1
    rows = [_document(stored, settings.pipeline) for stored in chosen]
    if as_json and more:
        sys.stderr.write(f"mldserver: {more:,} more letters match; this list is cut by --limit.\n")
    counts = f"{held.dead_letters:,} dead letters, {held.redrives:,} of them to be redriven"
    columns = "letter wanted shard partition_key sequence attempts at_ms error"
    answer(as_json, rows, table(rows, columns), counts + (f" ({more:,} more match; --limit)" if more else ""))


@app.command(name="show")
def show_letter(
    letter: str,
    /,
    *,
    payload: Annotated[bool, Parameter(negative=())] = False,
    where: Where = HERE,
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
    settings = settings_at(where)
    with at_ledger(settings) as (ledger, _, runner):
        (stored,) = _letters_named(ledger, runner, (letter,), settings.pipeline)
    if payload:
        write(stored.letter.data)
        return
    document = _document(stored, settings.pipeline)
    answer(as_json, document, *parts(document | {"data": _shortened(stored.letter.data)}))


@app.command(name="redrive")
def redrive_letters(
    *letters: Letters,
    which: LetterFilter = _ALL,
    everything: Everything = False,
    files: Annotated[list[str] | None, Parameter(name="--from", negative=())] = None,
    cancel: Annotated[bool, Parameter(negative=())] = False,
    where: Where = HERE,
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
    settings = settings_at(where)
    if files:
        if letters or which != _ALL or everything or cancel:
            raise OperatorError(
                "--from takes all letters of the files.", advice="Leave the ids and conditions out."
            )
        added, coming = _import_letters(settings, files)
        text = f"{added:,} letters are in the ledger, to be redriven."
        if coming:
            text += f" {coming:,} are left out: their records are delivered again anyway."
        answer(as_json, {"redriving": added, "delivered_again": coming}, text)
        return
    with at_ledger(settings) as (ledger, _, runner):
        ids = _chosen_ids(ledger, runner, letters, which, settings.pipeline, everything=everything)
        there = runner.run(ledger.redrive(ids, wanted=not cancel)) if ids else frozenset()
    name = "cancelled" if cancel else "redriving"
    what = "are left as they are" if cancel else "are marked for redrive: a running server takes them"
    answer(as_json, {name: sorted(there, key=_id_order)}, f"{len(there):,} letters {what}.")


@app.command(name="purge")
def purge_letters(
    *letters: Letters,
    which: LetterFilter = _ALL,
    everything: Everything = False,
    yes: Annotated[bool, Parameter(negative=())] = False,
    where: Where = HERE,
    as_json: AsJson = False,
) -> None:
    """Delete letters from the ledger, for good. Without `--yes`, only show how many match.

    Parameters
    ----------
    yes
        Delete them.
    """
    settings = settings_at(where)
    gone: set[str] = set()
    with at_ledger(settings) as (ledger, _, runner):
        ids = _chosen_ids(ledger, runner, letters, which, settings.pipeline, everything=everything)
        if not yes:
            raise OperatorError(
                f"{len(ids):,} letters would be deleted, and their records with them.",
                did="Nothing was deleted.",
                advice="Add --yes.",
            )
        for at in range(0, len(ids), LETTERS_AT_ONCE):
            gone |= runner.run(ledger.purge(ids[at : at + LETTERS_AT_ONCE]))
    answer(as_json, {"purged": sorted(gone, key=_id_order)}, f"{len(gone):,} letters are deleted.")


def _letters_named(
    ledger: Ledger, runner: asyncio.Runner, names: tuple[str, ...], pipeline: str
) -> list[StoredLetter]:
    """Return letters by their ids, or their records' (``shard/sequence/sub``, with or without the pipeline before it).

    All must exist before one is used.
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
    everything: bool,
) -> tuple[str, ...]:
    if sum((bool(names), which != _ALL, everything)) != 1:
        raise OperatorError(
            "It is not clear which letters are meant.",
            advice="Name ids, or conditions (--shard, --key, --error, --since), or --all: one of the three.",
        )
    if names:
        return tuple(stored.id for stored in _letters_named(ledger, runner, names, pipeline))
    return tuple(stored.id for stored in which.matching(ledger, runner))


def _import_letters(settings: Settings, places: list[str]) -> tuple[int, int]:
    """Put the letters of files into the ledger, to be redriven; return how many, and how many are delivered again anyway.

    All files are read before the first letter is put in. One that lies behind its shard's position was written by a
    server that died before it could move the position: its record comes again from the daemon.
    """
    from mldserver.deadletters.destinations import read_letters  # noqa: PLC0415  # pyarrow, which the others do not need

    letters: dict[str, DeadLetter] = {}
    fresh = []
    with at_ledger(settings) as (ledger, held, runner):
        for place in places:
            # Written twice, it is the same letter twice.
            letters |= {letter.record: letter for letter in read_letters(place, settings.pipeline)}
        for stored in _ALL.matching(ledger, runner):
            letters.pop(stored.letter.record, None)
        for letter in sorted(letters.values(), key=lambda letter: (letter.shard_id, letter.sequence)):
            shard = held.shards.get(letter.shard_id)
            if shard is None or (shard.position is not None and letter.sequence <= shard.position):
                fresh.append(letter)
        for at in range(0, len(fresh), _PAGE):
            runner.run(ledger.add_letters(tuple(fresh[at : at + _PAGE]), wanted=True))
    return len(fresh), len(letters) - len(fresh)


def _id_order(letter_id: str) -> tuple[int, ...]:
    return tuple(int(part) for part in letter_id.split("."))


def _document(stored: StoredLetter, pipeline: str) -> dict[str, Any]:
    from mldserver.deadletters.destinations import document  # noqa: PLC0415  # `--help` must not wait for it

    return {"letter": stored.id, "wanted": stored.wanted, **document(stored.letter, pipeline)}


def _shortened(data: bytes) -> str:
    """Return the beginning of a record's data as text if it is UTF-8, else as hexadecimal digits."""
    try:
        text = data.decode()[:_SHOWN]
    except UnicodeDecodeError:
        text = data[:_SHOWN].hex(" ")
    return text if len(data) <= _SHOWN else f"{text} … ({len(data):,} bytes; --payload writes them)"
