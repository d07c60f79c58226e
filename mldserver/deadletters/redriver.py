"""Redrives dead letters: runs them through the handler again when the ledger marks them as wanted.

If a connection of this server has the shard, its letters run between its batches, on its handler. They stop when the shard
ends or its lease moves, because no daemon waits for them. If no server has the shard, its letters run on a handler that is
opened for them, and stop at once when a connection opens the shard. One transaction registers the results and ends the
letters (``RedriveIntake``), so letters that run twice, after a crash or on two servers, count once.

Letters run in portions: of one shard, in its order, with a limited size. The ledger returns letters in the order in which
they were stored. That is the order of their shard, except for letters that failed again (stored behind the waiting ones) and
letters from files. So if there is more than one page, all letters are read first without payloads, and then again in the
order of their shards.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Final, TypeVar

import msgspec
import structlog

from mldserver.base.clock import Clock
from mldserver.base.kill_points import kill_point
from mldserver.consumer.claims import Claims, Superseded, visiting
from mldserver.coordinator.shards import RedriveIntake
from mldserver.deadletters.destinations import batches
from mldserver.errors import HandlerError, LedgerError, MldserverError, PeerError
from mldserver.ledger.contract import LETTERS_AT_ONCE, StoredLetter
from mldserver.ledger.operations import Ledger
from mldserver.records import DeadLetter, Record, Sequence
from mldserver.runtime.interface import Delivery, Records, Runtime

log = structlog.get_logger("mldserver")

_SECONDS: Final = 0.5
"""Between two looks at what the ledger was last seen to hold; that costs nothing."""


def _record(letter: DeadLetter) -> Record:
    return Record(
        shard_id=letter.shard_id,
        sequence_number=str(letter.sequence.number),
        sub_sequence_number=letter.sequence.sub,
        data=letter.data,
        partition_key=letter.partition_key,
        arrival_ms=letter.arrival_ms,
    )


@dataclass(kw_only=True)
class Redriver:
    """Looks for wanted letters, and takes those that are this server's."""

    ledger: Ledger
    runtime: Runtime
    claims: Claims
    redriving: RedriveIntake
    clock: Clock
    parks: bool = False
    """Whether keys are parked."""
    why_not: str = ""
    """Why letters cannot run again with this handler, if so."""
    _asking: dict[str, set[str]] = field(default_factory=dict)
    """Keys of shards that go on once the ledger says that no letter of theirs is left: it may be out of reach."""

    async def run(self) -> None:
        """Redrive letters for ever."""
        while True:
            await self.clock.sleep(_SECONDS)
            if not self.redriving.wanted and not self._asking:
                continue
            try:
                await self.round()
            except LedgerError as error:
                log.error("redrive.failed", **error.told())
                await self.clock.sleep(10 * _SECONDS)

    async def round(self) -> None:
        """Take every wanted letter that may be taken here, once. Raises LedgerError."""
        # Finish work that an unreachable ledger had prevented. A shard that was opened meanwhile reads its keys again.
        for shard_id in tuple(self._asking):
            with contextlib.suppress(Superseded):
                async with visiting(self.runtime, self.claims, shard_id, may_open=False) as possible:
                    if possible:
                        await self._unpark(shard_id, ())
                    else:
                        del self._asking[shard_id]
        async with contextlib.aclosing(wanted_portions(self.ledger)) as wanted:
            async for portion in wanted:
                await self._take(portion[0].letter.shard_id, portion)

    async def _take(self, shard_id: str, letters: tuple[StoredLetter, ...]) -> None:
        try:
            if self.why_not:
                await self._refuse(letters, PeerError(self.why_not))
                return
            unclaimed = shard_id not in self.redriving.elsewhere
            async with visiting(self.runtime, self.claims, shard_id, may_open=unclaimed) as possible:
                if possible:
                    await self._run(shard_id, letters)
        except Superseded:
            return  # a connection has the shard now, or lets it go: the next round takes its letters there
        except LedgerError:
            raise  # they are tried again when it can be reached
        except MldserverError as error:
            await self._refuse(letters, error)

    async def _run(self, shard_id: str, letters: tuple[StoredLetter, ...]) -> None:
        began_ms = self.clock.steady_ms()
        letters = await self._in_turn(shard_id, letters)
        if not letters:
            return
        kill_point("redrive.taken")
        delivery = Delivery(
            shard_id,
            Records([_record(stored.letter) for stored in letters]),
            # Stands in for arrival times that were never told: when the record failed is near it.
            received_ms=min(stored.letter.at_ms for stored in letters),
            after=None,
            redriven=True,
        )
        outcome = await self.runtime.process(delivery)
        before = {stored.letter.sequence: stored.letter.attempts for stored in letters}
        failed = (
            replace(letter, attempts=letter.attempts + before[letter.sequence])
            for letter in outcome.effects.dead_letters
        )
        outcome = msgspec.structs.replace(
            outcome, effects=msgspec.structs.replace(outcome.effects, dead_letters=tuple(failed))
        )
        kill_point("redrive.handled")
        await self.redriving.register(shard_id, outcome, tuple(stored.id for stored in letters))
        kill_point("redrive.done")
        await self._unpark(shard_id, (stored.letter.partition_key for stored in letters))
        log.info(
            "redrive.done",
            shard=shard_id,
            letters=len(letters),
            rows=0 if outcome.effects.rows is None else outcome.effects.rows.num_rows,
            dead_letters=len(outcome.effects.dead_letters),
            seconds=(self.clock.steady_ms() - began_ms) / 1000,
        )

    async def _in_turn(self, shard_id: str, letters: tuple[StoredLetter, ...]) -> tuple[StoredLetter, ...]:
        """Return the letters that may run: not those behind a letter of their key that does not run with them.

        That letter has failed again, perhaps a moment ago, or was never wanted: the letters after it remain in place.
        """
        if not self.parks:
            return letters
        first = await self.ledger.parked_keys(shard_id)
        here = {(stored.letter.partition_key, stored.letter.sequence) for stored in letters}
        behind = []
        for stored in letters:
            key, sequence = stored.letter.partition_key, stored.letter.sequence
            oldest = sequence if key is None else first.get(key, sequence)
            if oldest < sequence and (key, oldest) not in here:
                behind.append(stored)
        if behind:
            overtaking = HandlerError(
                "An earlier letter of their partition key is not redriven, or failed again.",
                did="They stay behind it, and are not wanted any more.",
                advice="Redrive them together with it.",
            )
            await self._refuse(tuple(behind), overtaking)
        return tuple(stored for stored in letters if stored not in behind)

    async def _unpark(self, shard_id: str, keys: Iterable[str | None]) -> None:
        """Let those keys go on of which no letter is left. No batch of the shard is under way, and all letters are stored."""
        if not self.parks:
            return
        asking = self._asking.setdefault(shard_id, set())
        asking.update(key for key in keys if key is not None)
        parked = await self.ledger.parked_keys(shard_id)
        for key in asking.difference(parked):
            await self.runtime.unpark(shard_id, key)
        del self._asking[shard_id]

    async def _refuse(self, letters: tuple[StoredLetter, ...], error: MldserverError) -> None:
        log.error("redrive.failed", shard=letters[0].letter.shard_id, **error.told())
        await self.ledger.redrive(tuple(stored.id for stored in letters), wanted=False)


_T = TypeVar("_T")

PAGE: Final = 500
"""Letters that are asked for at a time."""
_PORTION_BYTES: Final = 8 * 1024 * 1024
"""Payloads that run together, unless one alone is larger."""


@dataclass(frozen=True, slots=True)
class _WantedLetter:
    """A wanted letter, without its payload."""

    id: str
    place: tuple[str, Sequence]
    """Shard and sequence."""
    bytes: int
    number: int
    """How many wanted letters were stored before it."""
    before: str | None
    """The id of the last letter."""


def portions(letters: Iterable[StoredLetter]) -> Iterator[tuple[StoredLetter, ...]]:
    """Yield letters as they run together."""
    return _cut(
        letters,
        place=lambda stored: (stored.letter.shard_id, stored.letter.sequence),
        size=lambda stored: len(stored.letter.data),
    )


async def wanted_portions(book: Ledger) -> AsyncGenerator[tuple[StoredLetter, ...], None]:
    """Yield the letters that are wanted now as they run together; those that are gone meanwhile are left out."""
    page = await book.letters(limit=PAGE, wanted=True)
    if len(page) < PAGE:
        for portion in portions(page):
            yield portion
        return
    seen: list[_WantedLetter] = []
    while page:
        for stored in page:
            letter, before = stored.letter, seen[-1].id if seen else None
            place = (letter.shard_id, letter.sequence)
            seen.append(_WantedLetter(stored.id, place, len(letter.data), len(seen), before))
        page = await book.letters(after=page[-1].id, limit=PAGE, wanted=True)
    for part in _cut(seen, place=lambda seen: seen.place, size=lambda seen: seen.bytes):
        ids = {seen.id for seen in part}
        letters: list[StoredLetter] = []
        # Those that were stored one after the other are read together.
        in_order = sorted(part, key=lambda seen: seen.number)
        for _, run in groupby(enumerate(in_order), key=lambda at: at[1].number - at[0]):
            members = [seen for _, seen in run]
            page = await book.letters(after=members[0].before, limit=len(members), wanted=True)
            letters += [stored for stored in page if stored.id in ids]
        for portion in portions(letters):
            yield portion


def _cut(
    items: Iterable[_T], *, place: Callable[[_T], tuple[str, Sequence]], size: Callable[[_T], int]
) -> Iterator[tuple[_T, ...]]:
    for _, of_shard in groupby(sorted(items, key=place), key=lambda item: place(item)[0]):
        yield from map(tuple, batches(of_shard, size=size, count=LETTERS_AT_ONCE, most=_PORTION_BYTES))
