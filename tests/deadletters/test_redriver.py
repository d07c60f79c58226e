"""Who takes wanted letters, how they run, and what becomes of those that cannot."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from coordinator.outcomes import outcome
from support.store import SqliteStore

from mldserver.consumer.claims import Claims
from mldserver.coordinator.core.flush import Buffer, BufferedBatch
from mldserver.coordinator.core.ledger_view import LedgerView
from mldserver.coordinator.core.lineage import Lineage
from mldserver.coordinator.core.open_windows import CoordinatorRules
from mldserver.coordinator.core.sessions import Sessions
from mldserver.coordinator.core.watermark import Watermark
from mldserver.coordinator.redriving import RedriveIntake
from mldserver.deadletters import redriver as wanted
from mldserver.deadletters.redriver import Redriver, portions, wanted_portions
from mldserver.effects import Effects
from mldserver.errors import HandlerHalted, InternalError, LedgerError
from mldserver.ledger.contract import LETTERS_AT_ONCE, LedgerState, ShardState, StoredLetter
from mldserver.protocol.batch_decoder import BatchDecoder
from mldserver.records import DeadLetter, Sequence, Shard
from mldserver.runtime.interface import BatchOutcome, Delivery
from mldserver.stores import SnapshotSource
from mldserver.testing import VirtualClock

pytestmark = pytest.mark.quick


def letter(number: int, shard: str = "a", key: str | None = "k", size: int = 1) -> DeadLetter:
    return DeadLetter(shard, Sequence(number), key, b"x" * size, number, 3, "E", "", "h", 7)


def stored(*letters: DeadLetter) -> list[StoredLetter]:
    return [StoredLetter(str(place), each, wanted=True) for place, each in enumerate(letters)]


def test_letters_run_in_the_order_of_their_shard_and_not_too_many_at_a_time() -> None:
    many = [letter(number) for number in range(LETTERS_AT_ONCE + 1, 0, -1)]
    large = [letter(number, "b", size=5 * 1024 * 1024) for number in (3, 1, 2)]
    found = [[each.letter.sequence.number for each in one] for one in portions(stored(*many, *large))]
    assert found == [list(range(1, LETTERS_AT_ONCE + 1)), [LETTERS_AT_ONCE + 1], [1], [2], [3]]
    assert list(portions(())) == []


@dataclass
class Ledger:
    """A ledger's letters without a thread."""

    store: SqliteStore
    failing: bool = False

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self.store, name)

        async def call(*args: Any, **named: Any) -> Any:
            if self.failing:
                raise LedgerError("away")
            return method(*args, **named)

        return call


@dataclass
class Handler:
    """A runtime that remembers."""

    calls: list[Any] = field(default_factory=list)
    bad: frozenset[int] = frozenset()
    refuses: Exception | None = None
    during: Callable[[], Any] = lambda: None
    given: list[Any] = field(default_factory=list)
    """The records of the last call."""

    async def open(self, shard: Shard, snapshot: SnapshotSource | None = None) -> None:
        self.calls.append(("open", shard.id))
        if self.refuses is not None:
            raise self.refuses

    async def forget(self, shard_id: str) -> None:
        self.calls.append(("forget", shard_id))

    async def unpark(self, shard_id: str, key: str) -> None:
        self.calls.append(("unpark", shard_id, key))

    async def process(self, delivery: Delivery) -> BatchOutcome:
        assert delivery.redriven
        assert delivery.after is None
        shard = delivery.shard_id
        records = delivery.payload.decode(BatchDecoder(shard)).records
        self.given = [(each.sequence, each.partition_key, each.arrival_ms, each.data) for each in records]
        numbers = [record.sequence.number for record in records]
        self.calls.append(("process", shard, numbers))
        self.during()
        await asyncio.sleep(0)
        again = [replace(letter(number, shard), attempts=2) for number in numbers if number in self.bad]
        return outcome(shard, [(number, number) for number in numbers], rows=[], letters=again)


@dataclass
class House:
    """A redriver over a real ledger, whose flushes are what a test makes of them."""

    store: SqliteStore
    clock: VirtualClock = field(default_factory=lambda: VirtualClock(1000))
    handler: Handler = field(default_factory=Handler)
    claims: Claims = field(default_factory=Claims)
    buffer: Buffer = field(default_factory=Buffer)

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.store)
        lineage = Lineage()
        watermark = Watermark(CoordinatorRules(), lineage, 0)
        sessions = Sessions(lineage=lineage, watermark=watermark, buffer=self.buffer)
        self.redriving = RedriveIntake(LedgerView("one"), None, self.buffer, self.flush, sessions)

    async def flush(self, reason: str) -> None:
        from mldserver.ledger.contract import Flush  # beside its only use

        assert reason == "redrive"
        for batch in self.buffer.snapshot().values():
            flush = Flush((), effects=batch.effects, redriven=batch.redriven)
            self.store.register(flush, now_ms=0)

    def redriver(self, **named: Any) -> Redriver:
        usual: dict[str, Any] = {
            "ledger": self.ledger,
            "runtime": self.handler,
            "claims": self.claims,
            "redriving": self.redriving,
            "clock": self.clock,
        }
        return Redriver(**usual, **named)

    def left(self) -> list[tuple[int, int, bool]]:
        """Sequence, attempts, and whether it is wanted, of each letter."""
        found = self.store.letters(limit=1000)
        return [(each.letter.sequence.number, each.letter.attempts, each.wanted) for each in found]


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    store = SqliteStore(tmp_path / "ledger", pipeline="p", server_id="one")
    store.open(now_ms=0)
    store.add_letters((letter(2), letter(1), letter(9, key="other")), wanted=True)
    yield House(store)
    store.close()


async def test_letters_of_a_shard_that_nobody_has_run_on_a_handler_of_their_own(house: House) -> None:
    house.handler.bad = frozenset({2})
    await house.redriver().round()
    assert house.handler.calls == [("open", "a"), ("process", "a", [1, 2, 9]), ("forget", "a")]
    assert house.left() == [(2, 5, False)], "the attempts of both runs"
    assert house.claims.current.get("a") is None
    assert not house.buffer


async def test_the_handler_is_given_the_records_that_there_were(house: House) -> None:
    odd = replace(letter(1, "z"), sequence=Sequence(1, 2), partition_key=None, arrival_ms=None)
    house.store.add_letters((odd,), wanted=True)
    await house.redriver().round()
    assert house.handler.given == [(Sequence(1, 2), None, None, b"x")]


async def test_letters_of_a_connections_shard_run_on_its_handler(house: House) -> None:
    claim = house.claims.take("a")
    await house.redriver().round()
    assert house.handler.calls == [], "it is not open yet"
    claim.opened = True
    await house.redriver(parks=True).round()
    assert house.handler.calls[0] == ("process", "a", [1, 2, 9])
    assert sorted(house.handler.calls[1:]) == [("unpark", "a", "k"), ("unpark", "a", "other")]
    assert house.claims.current.get("a") is claim


async def test_a_key_that_still_has_letters_stays_parked(house: House) -> None:
    house.claims.take("a").opened = True
    house.handler.bad = frozenset({2})
    await house.redriver(parks=True).round()
    assert house.handler.calls[1:] == [("unpark", "a", "other")]


async def test_a_letter_of_the_child_that_no_flush_has_stored_yet_keeps_its_key_parked(house: House) -> None:
    house.store.open_shard("child", ("a",))
    house.claims.take("child").opened = True
    shards = {"a": ShardState("a", 1), "child": ShardState("child", 1, parents=("a",))}
    house.redriving.view.state = LedgerState(redrives=3, shards=shards)
    redriver = house.redriver(parks=True)
    await redriver.round()
    house.buffer.add(BufferedBatch("child", 1, Effects(dead_letters=(letter(20, "child"),))))
    await redriver.round()
    assert [call for call in house.handler.calls if call[1] == "child"] == [("unpark", "child", "other")]


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_a_key_that_was_parked_by_its_parents_letters_is_unparked_in_the_child(
    house: House, elsewhere: bool
) -> None:
    """Also when another server runs the letters of the parent."""
    house.store.open_shard("child", ("a",))
    house.claims.take("child").opened = True
    house.claims.take("stranger").opened = True
    owner = "two" if elsewhere else None
    shards = {"a": ShardState("a", 1, owner=owner), "child": ShardState("child", 1, parents=("a",))}
    house.redriving.view.state = LedgerState(redrives=3, shards=shards)
    redriver = house.redriver(parks=True)
    await redriver.round()
    if elsewhere:
        await redriver.round()
        assert house.handler.calls == [], "the letters are still there"
        house.store.purge(tuple(each.id for each in house.store.letters(limit=9)))
    await redriver.round()
    unparked = sorted(call for call in house.handler.calls if call[1] == "child")
    assert unparked == [("unpark", "child", "k"), ("unpark", "child", "other")]
    before = len(house.handler.calls)
    await redriver.round()
    assert len(house.handler.calls) == before, "once"


@pytest.mark.parametrize("parks", [True, False])
async def test_what_waits_behind_a_letter_that_fails_again_does_not_overtake_it(
    house: House, parks: bool
) -> None:
    last = LETTERS_AT_ONCE + 15
    house.store.add_letters(tuple(letter(number) for number in range(10, last + 1)), wanted=True)
    house.store.add_letters((letter(last + 1, key="other"), letter(last + 2, "b")), wanted=True)
    house.handler.bad = frozenset({10})
    await house.redriver(parks=parks).round()
    numbers = [numbers for name, *_, numbers in house.handler.calls if name == "process"]
    first = [1, 2, 9, *range(10, LETTERS_AT_ONCE + 7)]
    behind = list(range(LETTERS_AT_ONCE + 7, last + 1))
    assert numbers == [first, [last + 1] if parks else [*behind, last + 1], [last + 2]]
    waiting = [(number, 3, False) for number in behind] if parks else []
    assert house.left() == [*waiting, (10, 5, False)]


@pytest.mark.parametrize("parks", [True, False])
async def test_a_letter_does_not_overtake_one_of_its_key_that_nobody_wants(house: House, parks: bool) -> None:
    """That one may have failed again just now, after somebody had wanted all of them."""
    first = next(each.id for each in house.store.letters() if each.letter.sequence == Sequence(1))
    house.store.redrive((first,), wanted=False)
    await house.redriver(parks=parks).round()
    numbers = [numbers for name, *_, numbers in house.handler.calls if name == "process"]
    assert numbers == ([[9]] if parks else [[2, 9]])
    assert [number for number, *_ in house.left()] == ([2, 1] if parks else [1])
    assert not any(wanted for *_, wanted in house.left())


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("page", [1, 7, 100, 101, 102])
async def test_letters_of_many_pages_run_in_the_order_of_their_shards_not_of_their_storage(
    house: House, monkeypatch: pytest.MonkeyPatch, page: int, seed: int
) -> None:
    monkeypatch.setattr(wanted, "PAGE", page)
    more = [letter(number, shard) for number in range(10, 59) for shard in "ab"]
    random.Random(seed).shuffle(more)
    house.store.add_letters(tuple(more), wanted=True)
    house.store.add_letters((letter(70), letter(71)))
    await house.redriver().round()
    runs = [(call[1], call[2]) for call in house.handler.calls if call[0] == "process"]
    run = {each: [number for shard, numbers in runs if shard == each for number in numbers] for each in "ab"}
    assert run == {"a": [1, 2, 9, *range(10, 59)], "b": list(range(10, 59))}
    assert max(len(numbers) for _, numbers in runs) == LETTERS_AT_ONCE
    assert [number for number, *_ in house.left()] == [70, 71]


async def test_letters_that_are_gone_before_their_turn_are_left_out(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wanted, "PAGE", 2)
    house.store.add_letters(tuple(letter(number) for number in range(10, 60)), wanted=True)
    found = wanted_portions(house.ledger)
    assert len(await anext(found)) == LETTERS_AT_ONCE
    last = house.store.letters(limit=1000)[-5:]
    house.store.purge((last[0].id, last[1].id))
    house.store.redrive((last[3].id,), wanted=False)
    (rest,) = [portion async for portion in found]
    assert [each.letter.sequence.number for each in rest] == [*range(47, 55), 57, 59]


async def test_another_servers_shard_is_left_to_it(house: House) -> None:
    shards = {"a": ShardState("a", 1, owner="two")}
    house.redriving.view.state = LedgerState(shards=shards, redrives=3)
    await house.redriver().round()
    assert (house.handler.calls, house.redriving.wanted) == ([], 3)
    house.redriving.view.state = LedgerState(shards={"a": replace(shards["a"], ended_ms=5)})
    await house.redriver().round()
    assert house.left() == []


async def test_a_connection_that_comes_takes_the_shard_and_its_letters_stay_wanted(house: House) -> None:
    house.handler.during = lambda: house.claims.take("a")
    await house.redriver().round()
    assert house.handler.calls[-1] == ("forget", "a")
    assert [wanted for _, _, wanted in house.left()] == [True, True, True]
    current = house.claims.current.get("a")
    assert current is not None
    assert current.current


@pytest.mark.parametrize("error", [HandlerHalted("initialize failed"), InternalError("A bug.")])
async def test_letters_that_the_handler_cannot_take_are_not_wanted_any_more(
    house: House, error: Exception
) -> None:
    house.handler.refuses = error
    await house.redriver().round()
    assert house.handler.calls == [("open", "a")]
    assert [wanted for _, _, wanted in house.left()] == [False, False, False]


async def test_a_processor_that_keeps_its_position_is_given_none(house: House) -> None:
    await house.redriver(why_not="It keeps its position.").round()
    assert house.handler.calls == []
    assert [wanted for _, _, wanted in house.left()] == [False, False, False]


@pytest.mark.parametrize("stays", [True, False])
async def test_a_key_goes_on_also_when_the_ledger_was_away_as_its_last_letter_went(
    house: House, stays: bool
) -> None:
    async def flush(reason: str) -> None:
        await House.flush(house, reason)
        house.ledger.failing = True

    claim = house.claims.take("a")
    claim.opened = True
    house.redriving.flush = flush
    house.redriving.view.state = LedgerState(redrives=3)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(house.redriver(parks=True).run())
        await house.clock.advance(2)
        assert (house.handler.calls, house.left()) == ([("process", "a", [1, 2, 9])], [])
        house.redriving.view.state = LedgerState()
        house.ledger.failing, house.redriving.flush = False, house.flush
        if not stays:
            house.claims.release("a", claim)
        await house.clock.advance(10)
        running.cancel()
    unparked = [("unpark", "a", "k"), ("unpark", "a", "other")] if stays else []
    assert sorted(house.handler.calls[1:]) == unparked


async def test_it_looks_only_when_something_is_wanted_and_again_when_the_ledger_was_away(
    house: House,
) -> None:
    house.ledger.failing = True
    async with asyncio.TaskGroup() as group:
        running = group.create_task(house.redriver().run())
        await house.clock.advance(2)
        house.redriving.view.state = LedgerState(redrives=3)
        await house.clock.advance(2)
        assert house.handler.calls == []
        house.ledger.failing = False
        await house.clock.advance(10)
        running.cancel()
    assert house.left() == []
