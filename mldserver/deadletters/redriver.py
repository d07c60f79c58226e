"""Redrives dead letters: runs them through the handler again when the ledger marks them as wanted.

If a connection of this server has the shard, its letters run between its batches, on its handler. They stop when the shard
ends or its lease moves, because no daemon waits for them. If no server has the shard, its letters run on a handler that is
opened for them, and stop at once when a connection opens the shard. One transaction registers the results and ends the
letters (``RedriveIntake``), so letters that run twice, after a crash or on two servers, count once.

If the handler keeps state, letters run only where the state of their key is now: on a live session of the store that has it.
Until they are registered, no batch of the store's shards runs. Letters without such a session wait.

Letters of timers run in the same way, as timers (``DueTimers.letters``).

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
import pyarrow as pa
import structlog

from mldserver.base.clock import Clock
from mldserver.base.kill_points import kill_point
from mldserver.consumer.claims import Claims, Superseded, visiting, visiting_all
from mldserver.coordinator.redriving import RedriveIntake, StoreVisit
from mldserver.deadletters.destinations import batches
from mldserver.errors import HandlerError, LedgerError, MldserverError, PeerError
from mldserver.ledger.contract import LETTERS_AT_ONCE, StoredLetter
from mldserver.ledger.operations import Ledger
from mldserver.records import DeadLetter, Record, Sequence
from mldserver.runtime.interface import Delivery, DueTimers, Payload, Records, Runtime, TimerLetter

log = structlog.get_logger("mldserver")

_SECONDS: Final = 0.5
"""Between two looks at what the ledger was last seen to hold; that costs nothing."""


def _record(letter: DeadLetter, shard_id: str) -> Record:
    return Record(
        shard_id=shard_id,
        sequence_number=str(letter.sequence.number),
        sub_sequence_number=letter.sequence.sub,
        data=letter.data,
        partition_key=letter.partition_key,
        arrival_ms=letter.arrival_ms,
    )


def _payload(letters: tuple[StoredLetter, ...], shard_id: str) -> Payload:
    """Return letters as a batch of records, or of timers if the first is of one."""
    plain = [stored.letter for stored in letters]
    if not plain[0].timer:
        return Records([_record(letter, shard_id) for letter in plain])
    due = [
        TimerLetter(letter.partition_key or "", letter.timer or "", letter.due_ms or 0, letter.data)
        for letter in plain
    ]
    return DueTimers(0, len(due), letters=tuple(due))


def _identity(letter: DeadLetter) -> object:
    """Return what tells a letter from the others that run with it."""
    return (letter.partition_key, letter.timer, letter.due_ms) if letter.timer else letter.sequence


def _of_shard(rows: pa.Table | None, shard_id: str) -> pa.Table | None:
    """Return rows as rows of this shard: a session of another may have made them."""
    if rows is None:
        return None
    at = rows.schema.get_field_index("_shard")
    return rows.set_column(at, rows.schema.field(at), pa.array([shard_id] * len(rows), pa.string()))


@dataclass(kw_only=True)
class Redriver:
    """Looks for dead letters that an operator wants to run again, and runs those that this server may run."""

    ledger: Ledger
    runtime: Runtime
    claims: Claims
    redriving: RedriveIntake
    clock: Clock
    parks: bool = False
    """Whether a partition key is parked while it has a dead letter: its later records become dead letters too, unrun."""
    keyed: bool = False
    """Whether the handler keeps state."""
    timed: bool = False
    """Whether the handler has timers."""
    why_not: str = ""
    """Why letters cannot run again with this handler, if so."""
    _waiting: dict[str, str] = field(default_factory=dict)
    """By shard, why letters that are wanted wait."""
    _keys_to_unpark: dict[str, set[str]] = field(default_factory=dict)
    """By shard, the keys whose letters have run: the handler gets a key's records again once the ledger has no letter of the key."""

    async def run(self) -> None:
        """Redrive letters for ever."""
        while True:
            await self.clock.sleep(_SECONDS)
            if not self.redriving.wanted and not self._keys_to_unpark:
                self._waiting, self.redriving.waits_for = {}, ""
                continue
            if (
                self._waiting
            ):  # for a lease or a child shard: that takes seconds, and each round reads all wanted letters
                await self.clock.sleep(10 * _SECONDS)
            try:
                await self.round()
            except LedgerError as error:
                log.error("redrive.failed", **error.told())
                await self.clock.sleep(10 * _SECONDS)

    async def round(self) -> None:
        """Run every wanted letter that may run on this server, once. Raises LedgerError."""
        # First unpark keys that remain because the ledger was unreachable. A shard that is not open here reads its parked
        # keys when it is opened.
        for shard_id in tuple(self._keys_to_unpark):
            with contextlib.suppress(Superseded):
                async with visiting(self.runtime, self.claims, shard_id, may_open=False) as shard_is_open:
                    if shard_is_open:
                        # Letters of the shard that were accepted a moment ago keep their keys parked: the ledger must have them.
                        await self.redriving.flush("redrive")
                        await self._unpark_finished_keys(shard_id, ())
                    else:
                        del self._keys_to_unpark[shard_id]
        before, self._waiting = self._waiting, {}
        async with contextlib.aclosing(wanted_portions(self.ledger)) as wanted:
            async for portion in wanted:
                await self._redrive_or_refuse(portion[0].letter.shard_id, portion)
        self.redriving.waits_for = "; ".join(sorted(self._waiting.values()))
        for shard_id, reason in self._waiting.items():
            if before.get(shard_id) != reason:
                log.warning("redrive.waiting", shard=shard_id, what=reason)

    async def _redrive_or_refuse(self, shard_id: str, letters: tuple[StoredLetter, ...]) -> None:
        """Run a portion of a shard's letters, unless another server has the shard. If that fails, the letters are not wanted any more."""
        self._look_at_descendants(shard_id, letters)
        try:
            if self.why_not:
                await self._mark_unwanted(letters, PeerError(self.why_not))
                return
            if not self.timed and (of_timers := tuple(each for each in letters if each.letter.timer)):
                await self._mark_unwanted(of_timers, PeerError("The handler has no timers."))
                letters = tuple(each for each in letters if not each.letter.timer)
                if not letters:
                    return
            if self.keyed:
                for store_id, of_store in self._by_store(shard_id, letters):
                    await self._run_in_store(store_id, shard_id, of_store)
                return
            unclaimed = shard_id not in self.redriving.elsewhere
            # If a connection of this server has the shard, the letters run between its batches. Else open the shard for them.
            async with visiting(self.runtime, self.claims, shard_id, may_open=unclaimed) as shard_is_open:
                if shard_is_open:
                    await self._run_letters(shard_id, letters)
        except Superseded:
            return  # a connection has opened or released the shard meanwhile: the next round tries again
        except LedgerError:
            raise  # the letters stay wanted: ``run`` tries again
        except MldserverError as error:
            await self._mark_unwanted(letters, error)

    def _by_store(
        self, shard_id: str, letters: tuple[StoredLetter, ...]
    ) -> Iterator[tuple[str, tuple[StoredLetter, ...]]]:
        """Yield the letters of a shard by the store that has their keys now, those of timers apart. The others wait."""
        found: dict[tuple[str | None, bool], list[StoredLetter]] = {}
        for stored in letters:
            home = self.redriving.home(shard_id, stored.letter.partition_key)
            found.setdefault((home, bool(stored.letter.timer)), []).append(stored)
        for (store_id, _), of_store in found.items():
            if store_id is None:
                self._waiting[shard_id] = (
                    f"keys of {shard_id} belong to a shard that is not open yet, or not known"
                )
            else:
                yield store_id, tuple(of_store)

    async def _run_in_store(self, store_id: str, shard_id: str, letters: tuple[StoredLetter, ...]) -> None:
        """Run letters on a live session of a store. If no server has one, they wait."""
        redriving = self.redriving
        sessions = redriving.live(store_id)
        if not sessions:
            if not redriving.is_elsewhere(store_id):
                self._waiting[shard_id] = f"keys of {shard_id} belong to a shard that no server reads now"
            return
        async with visiting_all(self.claims, [session.shard_id for session in sessions]) as are_open:
            if are_open and redriving.live(store_id) == sessions:
                await self._run_letters(shard_id, letters, store_id)

    async def _run_letters(
        self, shard_id: str, letters: tuple[StoredLetter, ...], store_id: str = ""
    ) -> None:
        """Run letters as one batch, on a session of the store if the handler keeps state."""
        letters = await self._refuse_overtaking(shard_id, letters)
        if letters and store_id:
            with self.redriving.visit(store_id, shard_id) as visit:
                await self._process(shard_id, letters, visit)
        elif letters:
            await self._process(shard_id, letters)

    async def _process(
        self, shard_id: str, letters: tuple[StoredLetter, ...], visit: StoreVisit | None = None
    ) -> None:
        """Store what letters produce, and new letters for those that fail again, in one transaction."""
        began_ms = self.clock.steady_ms()
        kill_point("redrive.taken")
        runs_on = shard_id if visit is None else visit.session.shard_id
        delivery = Delivery(
            runs_on,
            _payload(letters, runs_on),
            # Replaces missing arrival times: a record fails soon after it has arrived.
            received_ms=min(stored.letter.at_ms for stored in letters),
            after=None,
            redriven=True,
            number=None if visit is None else visit.number,
        )
        outcome = await self.runtime.process(delivery)
        earlier = {_identity(stored.letter): stored.letter for stored in letters}
        failed_again = tuple(
            replace(
                letter,
                shard_id=shard_id,
                sequence=(before := earlier[_identity(letter)]).sequence,
                attempts=letter.attempts + before.attempts,
            )
            for letter in outcome.effects.dead_letters
        )
        rows = _of_shard(outcome.effects.rows, shard_id)
        effects = msgspec.structs.replace(outcome.effects, rows=rows, dead_letters=failed_again)
        outcome = msgspec.structs.replace(outcome, effects=effects)
        kill_point("redrive.handled")
        await self.redriving.register(shard_id, outcome, tuple(stored.id for stored in letters), visit)
        if visit is not None and not visit.registered:
            return  # the next round tries again
        kill_point("redrive.done")
        if visit is None or shard_id in {session.shard_id for session in visit.sessions}:
            await self._unpark_finished_keys(shard_id, (stored.letter.partition_key for stored in letters))
        log.info(
            "redrive.done",
            shard=shard_id,
            letters=len(letters),
            rows=0 if outcome.effects.rows is None else outcome.effects.rows.num_rows,
            dead_letters=len(outcome.effects.dead_letters),
            seconds=(self.clock.steady_ms() - began_ms) / 1000,
        )

    async def _refuse_overtaking(
        self, shard_id: str, letters: tuple[StoredLetter, ...]
    ) -> tuple[StoredLetter, ...]:
        """Return the letters that may run. Refuse a letter if an older letter of its partition key does not run with it.

        That older letter has failed again, or is not wanted. Records of a parked key must run in their order.
        """
        if not self.parks:
            return letters
        oldest_of_keys = await self.ledger.parked_keys(shard_id)
        running = {(stored.letter.partition_key, stored.letter.sequence) for stored in letters}
        blocked = []
        for stored in letters:
            key, sequence = stored.letter.partition_key, stored.letter.sequence
            oldest = sequence if key is None else oldest_of_keys.get(key, sequence)
            if oldest < sequence and (key, oldest) not in running:
                blocked.append(stored)
        if blocked:
            overtaking = HandlerError(
                "An earlier letter of their partition key is not redriven, or failed again.",
                did="They stay behind it, and are not wanted any more.",
                advice="Redrive them together with it.",
            )
            await self._mark_unwanted(tuple(blocked), overtaking)
        return tuple(stored for stored in letters if stored not in blocked)

    async def _unpark_finished_keys(self, shard_id: str, keys: Iterable[str | None]) -> None:
        """Unpark ``keys``, and those of earlier calls, that have no letter left. No batch is in progress; all letters are stored."""
        if not self.parks:
            return
        candidates = self._keys_to_unpark.setdefault(shard_id, set())
        candidates.update(key for key in keys if key is not None)
        still_parked = await self.ledger.parked_keys(shard_id)
        for key in candidates.difference(still_parked):
            await self.runtime.unpark(shard_id, key)
        candidates &= still_parked.keys()
        if not (candidates and self.redriving.wanted):
            del self._keys_to_unpark[shard_id]

    def _look_at_descendants(self, shard_id: str, letters: tuple[StoredLetter, ...]) -> None:
        """Note that descendants of a shard which are open here may have to unpark its letters' keys, whichever server runs these.

        A server that never finds the letters wanted keeps such a key parked until it opens the shard again: its later records
        are dead letters, and wait.
        """
        keys = {key for stored in letters if (key := stored.letter.partition_key) is not None}
        if not self.parks or not keys:
            return
        for open_id in self.claims.current.keys() - {shard_id}:
            if shard_id in self.redriving.line(open_id):
                self._keys_to_unpark.setdefault(open_id, set()).update(keys)

    async def _mark_unwanted(self, letters: tuple[StoredLetter, ...], error: MldserverError) -> None:
        """Log why letters of a shard cannot run, and keep them in the ledger without the operator's wish to redrive them."""
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
    previous_id: str | None
    """The id of the wanted letter that was stored before it."""


def portions(letters: Iterable[StoredLetter]) -> Iterator[tuple[StoredLetter, ...]]:
    """Yield letters in portions that run as one batch: of one shard, in its order, with a limited number and size."""
    return _into_portions(
        letters,
        place=lambda stored: (stored.letter.shard_id, stored.letter.sequence),
        size=lambda stored: len(stored.letter.data),
    )


async def wanted_portions(ledger: Ledger) -> AsyncGenerator[tuple[StoredLetter, ...], None]:
    """Yield the letters that are wanted now, in portions that run as one batch (see the module's docstring)."""
    page = await ledger.letters(limit=PAGE, wanted=True)
    if len(page) < PAGE:
        for portion in portions(page):
            yield portion
        return
    seen: list[_WantedLetter] = []
    while page:
        for stored in page:
            letter, previous_id = stored.letter, seen[-1].id if seen else None
            place = (letter.shard_id, letter.sequence)
            seen.append(_WantedLetter(stored.id, place, len(letter.data), len(seen), previous_id))
        page = await ledger.letters(after=page[-1].id, limit=PAGE, wanted=True)
    for part in _into_portions(seen, place=lambda wanted: wanted.place, size=lambda wanted: wanted.bytes):
        ids = {wanted.id for wanted in part}
        letters: list[StoredLetter] = []
        # One request reads all letters that were stored one after the other: their number minus their index is the same.
        stored_order = sorted(part, key=lambda wanted: wanted.number)
        for _, run in groupby(enumerate(stored_order), key=lambda pair: pair[1].number - pair[0]):
            members = [wanted for _, wanted in run]
            page = await ledger.letters(after=members[0].previous_id, limit=len(members), wanted=True)
            letters += [stored for stored in page if stored.id in ids]
        for portion in portions(letters):
            yield portion


def _into_portions(
    items: Iterable[_T], *, place: Callable[[_T], tuple[str, Sequence]], size: Callable[[_T], int]
) -> Iterator[tuple[_T, ...]]:
    """Yield letters in portions. ``place`` returns a letter's shard and sequence, ``size`` its bytes."""
    for _, of_shard in groupby(sorted(items, key=place), key=lambda item: place(item)[0]):
        yield from map(tuple, batches(of_shard, size=size, count=LETTERS_AT_ONCE, most=_PORTION_BYTES))
