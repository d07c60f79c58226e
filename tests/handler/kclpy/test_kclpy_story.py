"""Whatever a processor does and whenever it is restarted: nothing is passed over that it was not done with."""

from __future__ import annotations

import asyncio
import sys
from random import Random
from typing import Any

from amazon_kclpy import kcl
from amazon_kclpy.v3 import processor
from handler.kclpy.wire import SHARD, delivery
from hypothesis import given, settings
from hypothesis import strategies as st
from support.clocks import RecordingClock

from mldserver.coordinator.core.sessions import SessionPosition
from mldserver.handler.inspection import inspect_handler
from mldserver.handler.loader import Loaded
from mldserver.records import Hook, Sequence
from mldserver.runtime.failure_policy import FailurePolicy
from mldserver.runtime.inline import InlineRuntime

RECORDS = 30


class Erratic(processor.RecordProcessorBase):
    """Fails now and then, checkpoints when it likes, and remembers the largest record it has laid eyes on."""

    dice: Random
    done: set[int]
    bad: frozenset[int]

    def initialize(self, initialize_input: Any) -> None:
        self.largest: int | None = None

    def process_records(self, process_records_input: Any) -> None:
        checkpointer = process_records_input.checkpointer
        for record in process_records_input.records:
            number = int(record.sequence_number)
            self.largest = max(number, self.largest or 0)
            if number in self.bad or self.dice.random() < 0.05:
                raise ValueError(f"{number} is bad")
            self.done.add(number)
            if self.dice.random() < 0.2:
                self.checkpoint(checkpointer, number)
        if self.dice.random() < 0.5:
            self.checkpoint(checkpointer, self.dice.choice([None, self.largest]))

    def checkpoint(self, checkpointer: Any, number: int | None) -> None:
        try:
            checkpointer.checkpoint(None if number is None else str(number))
        except kcl.CheckpointError as error:
            if error.value != "IllegalArgumentException":  # before the last one: the call was made again
                raise

    def shutdown_requested(self, shutdown_requested_input: Any) -> None:
        """Have no last word."""


class Story:
    """One shard, from connection to connection, with the coordinator's positions for a ledger."""

    def __init__(self, runtime: InlineRuntime, dice: Random) -> None:
        self.runtime = runtime
        self.dice = dice
        self.durable: Sequence | None = None
        self.dead: set[int] = set()

    async def connection(self) -> None:
        """Read from the durable position on, to the end or until it breaks off."""
        place = SessionPosition(self.durable)
        await self.runtime.open(SHARD)
        following = 1 + (0 if self.durable is None else self.durable.number)
        while following <= RECORDS and self.dice.random() > 0.1:
            batch = range(following, min(following + self.dice.randint(1, 12), RECORDS + 1))
            following = batch.stop
            outcome = await self.runtime.process(delivery(*batch))
            self.dead |= {letter.sequence.number for letter in outcome.effects.dead_letters}
            place.accept(outcome.outline.last)
            self.flush(place, outcome.position)
        if self.dice.random() < 0.5:
            self.flush(place, await self.runtime.notify(SHARD.id, Hook.SHUTDOWN_REQUESTED))

    def flush(self, place: SessionPosition, position: Sequence | None) -> None:
        if (claimed := place.claim(position)) is not None:
            place.register(claimed)
            self.durable = claimed
        passed = set(range(1, 1 + (0 if self.durable is None else self.durable.number)))
        assert passed <= Erratic.done | self.dead


async def tell(seed: int, bad: frozenset[int]) -> None:
    dice = Random(seed)
    Erratic.dice, Erratic.done, Erratic.bad = dice, set(), bad
    spec, findings = inspect_handler(Loaded("mine:It", sys.modules[__name__], Erratic, "It"))
    assert spec is not None, findings
    runtime = InlineRuntime(
        spec,
        policy=FailurePolicy(attempts=2),
        clock=RecordingClock(),
        random=lambda: 1.0,
        deadline_seconds=None,
    )
    await runtime.start()
    story = Story(runtime, dice)
    for _ in range(5):
        await story.connection()
    await runtime.close()


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.frozensets(st.integers(1, RECORDS), max_size=4))
def test_the_position_never_passes_a_record_that_is_neither_done_nor_a_dead_letter(
    seed: int, bad: frozenset[int]
) -> None:
    asyncio.run(tell(seed, bad))
