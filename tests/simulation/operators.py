"""Whoever looks after a pipeline, and the ledgers that they and the judge look into."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from simulation.outputs import Key, key_of
from simulation.plan import Plan

from mldserver.base.clock import Clock
from mldserver.errors import LedgerError
from mldserver.ledger.contract import LedgerState, StoredLetter, WindowState
from mldserver.ledger.operations import Ledger

if TYPE_CHECKING:
    from simulation.faults import Faults

_PAGE = 1000


@dataclass
class Operator:
    """Comes by now and then, and uses the ledger's tools while servers run, die and come back."""

    plan: Plan
    dice: random.Random
    ledger: Ledger
    faults: Faults
    clock: Clock
    purged: Counter[Key] = field(default_factory=Counter)
    """Records whose dead letters were deleted."""
    visiting: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a visit lasts: one that is cut off would not know what it has done."""

    async def run(self) -> None:
        """Come by until cancelled."""
        while True:
            await self.clock.sleep(self.dice.uniform(3, 15))
            async with self.visiting:
                try:
                    await self._visit()
                except LedgerError:
                    continue  # no server has made one yet

    async def finish(self) -> LedgerState:
        """Do what is left to do once no record comes any more; return what the ledger holds when all is done."""
        await self.ledger.peek()  # opens it, in a world that was over before the first visit
        if self.faults.hit(self.plan.redrives) and (letters := await self._letters()):
            await self._redrive(letters)
        while True:
            await self.clock.sleep(1)
            state = await self.ledger.peek()
            if _is_done(state):
                return state
            if self.plan.keyed and all(shard.ended for shard in state.shards.values()):
                # Letters of a handler that keeps state run on the sessions of their keys' shards: no session will come.
                wanted = await self.ledger.letters(limit=_PAGE, wanted=True)
                await self.ledger.redrive(tuple(each.id for each in wanted), wanted=False)
            await self._mend(state)

    async def _visit(self) -> None:
        await self._mend(await self.ledger.peek())
        for odds, act in ((self.plan.redrives, self._redrive), (self.plan.purges, self._purge)):
            if self.faults.hit(odds) and (letters := await self._letters()):
                await act(letters)

    async def _letters(self) -> tuple[StoredLetter, ...]:
        return await self.ledger.letters(limit=_PAGE)

    async def _mend(self, state: LedgerState) -> None:
        """Take away what makes windows fail, and have those computed again that are halted or were set aside."""
        if self.plan.window_on_failure == "halt":
            self.faults.mend(self.faults.cursed)
        for entry in state.windows.values():
            if entry.state is WindowState.SET_ASIDE or entry.is_halted:
                self.faults.mend((entry.window_id,))
                if await self.ledger.decide(entry.window_id, "retry"):
                    self.faults.tell("retried", entry.window_id)

    async def _redrive(self, letters: tuple[StoredLetter, ...]) -> None:
        """All of them, those of a shard, or those of a key."""
        shard, key = (self.dice.choice(letters).letter for _ in range(2))
        which = self.dice.choice(
            (
                letters,
                [each for each in letters if each.letter.shard_id == shard.shard_id],
                [each for each in letters if each.letter.partition_key == key.partition_key],
            )
        )
        told = await self.ledger.redrive(tuple(each.id for each in which))
        self.faults.tell("redriven", f"{len(told)} letters")

    async def _purge(self, letters: tuple[StoredLetter, ...]) -> None:
        names = {each.id: key_of(each.letter) for each in self.dice.sample(letters, min(2, len(letters)))}
        gone = await self.ledger.purge(tuple(names))
        self.purged.update(names[each] for each in gone)
        self.faults.tell("purged", f"{len(gone)} letters")


def _is_done(state: LedgerState) -> bool:
    windows = all(each.state is WindowState.PUBLISHED and not each.pending for each in state.windows.values())
    timers = any(store.next_due_ms is not None for store in state.stores.values() if not store.closed)
    return windows and not (timers or state.late_segments or state.redrives)
