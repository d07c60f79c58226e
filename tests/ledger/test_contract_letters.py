"""What any Ledger must do with the dead letters that it holds: pages, marks, ends, in one transaction with a flush."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from mldserver.effects import Effects
from mldserver.ledger.contract import Flush, FlushResult
from mldserver.ledger.operations import Ledger
from mldserver.records import Sequence
from tests.ledger.samples import W1, held, letter, opened, peeked, seg

if TYPE_CHECKING:
    from tests.ledger.samples import Factory

ALL = tuple(letter(number) for number in range(1, 6))


async def stored(ledger: Ledger) -> list[str]:
    """Store five letters with two flushes; return their ids."""
    await ledger.register(Flush((), effects=Effects(dead_letters=ALL[:3])))
    await ledger.register(Flush((), effects=Effects(dead_letters=ALL[3:])))
    return [each.id for each in await ledger.letters()]


async def numbers(ledger: Ledger, *, wanted: bool = False) -> list[int]:
    return [each.letter.sequence.sub for each in await ledger.letters(wanted=wanted)]


async def test_letters_are_read_page_by_page_in_order_of_storage(ledger_factory: Factory) -> None:
    async with opened(ledger_factory) as (ledger, _):
        ids = await stored(ledger)
        assert len(set(ids)) == len(ALL)
        pages, after = [], None
        while page := await ledger.letters(after=after, limit=2):
            pages.append([each.letter for each in page])
            after = page[-1].id
        assert pages == [list(ALL[:2]), list(ALL[2:4]), list(ALL[4:])]
        assert await ledger.letters(limit=0) == ()


async def test_a_tool_marks_letters_and_takes_the_mark_away(ledger_factory: Factory) -> None:
    async with opened(ledger_factory) as (ledger, _):
        ids = await stored(ledger)
    async with peeked(ledger_factory) as (tool, _):
        there = await tool.redrive((ids[1], ids[3], ids[4], "77.1", "none", ""))
        assert there == {ids[1], ids[3], ids[4]}
        assert await tool.redrive((ids[3],), wanted=False) == {ids[3]}
        assert [(each.id, each.wanted) for each in await tool.letters()] == [
            (each, each in {ids[1], ids[4]}) for each in ids
        ]
    async with opened(ledger_factory) as (ledger, state):
        assert (state.dead_letters, state.redrives) == (5, 2)
        assert await numbers(ledger, wanted=True) == [2, 5]


async def test_a_redriven_letter_ends_with_the_flush_that_has_its_rows(ledger_factory: Factory) -> None:
    async with opened(ledger_factory) as (ledger, _):
        ids = await stored(ledger)
        await ledger.redrive((ids[0], ids[1]))
        flush = Flush((), (seg("s1"),), redriven=(ids[0],))
        assert (await ledger.register(flush)).registered
        assert await numbers(ledger) == [2, 3, 4, 5]
    state = await held(ledger_factory)
    assert (state.dead_letters, state.redrives, len(state.windows[W1].segments)) == (4, 1, 1)


async def test_a_letter_that_is_gone_or_not_wanted_refuses_the_whole_flush(ledger_factory: Factory) -> None:
    async with opened(ledger_factory) as (ledger, _):
        ids = await stored(ledger)
        await ledger.redrive((ids[0], ids[1]))
        assert (await ledger.register(Flush((), redriven=(ids[0],)))).registered
        before = await held(ledger_factory)
        flush = Flush((), (seg("s1"),), Effects(dead_letters=(letter(9),)), redriven=(ids[0], ids[1], ids[2]))
        assert await ledger.register(flush) == FlushResult(gone_letters=frozenset({ids[0], ids[2]}))
        assert await numbers(ledger) == [2, 3, 4, 5]
    assert await held(ledger_factory) == before


async def test_what_fails_again_is_a_new_letter_that_nobody_wants_yet(ledger_factory: Factory) -> None:
    async with opened(ledger_factory) as (ledger, _):
        ids = await stored(ledger)
        await ledger.redrive((ids[0],))
        again = letter(1, attempts=8)
        assert (
            await ledger.register(Flush((), effects=Effects(dead_letters=(again,)), redriven=(ids[0],)))
        ).registered
        page = await ledger.letters()
        assert [each.letter for each in page] == [*ALL[1:], again]
        assert page[-1].id not in ids
        assert not page[-1].wanted
    assert (await held(ledger_factory)).dead_letters == len(ALL)


async def test_purged_letters_are_gone_and_unpark_their_keys(ledger_factory: Factory) -> None:
    async with opened(ledger_factory) as (ledger, _):
        ids = await stored(ledger)
        assert set(await ledger.parked_keys("a")) == {ALL[0].partition_key}
        assert await ledger.purge((*ids[:3], "99.0", "x")) == set(ids[:3])
        assert await ledger.purge(tuple(ids[:3])) == frozenset()
        assert await numbers(ledger) == [4, 5]
        assert await ledger.purge(tuple(ids[3:])) == set(ids[3:])
        assert (await ledger.parked_keys("a"), await ledger.letters()) == ({}, ())
    assert (await held(ledger_factory)).dead_letters == 0


async def test_a_key_is_parked_behind_its_first_letter_wherever_that_is_stored(
    ledger_factory: Factory,
) -> None:
    numbers = (Sequence(10**9), Sequence(99, 7), Sequence(99, 10), Sequence(10**8, 3))
    letters = tuple(replace(letter(1), sequence=number) for number in numbers)
    async with opened(ledger_factory) as (ledger, _):
        for each in letters:
            await ledger.register(Flush((), effects=Effects(dead_letters=(each,))))
        assert await ledger.parked_keys("a") == {letters[0].partition_key: Sequence(99, 7)}


async def test_ids_are_never_given_again(ledger_factory: Factory) -> None:
    async with opened(ledger_factory) as (ledger, _):
        ids = await stored(ledger)
        await ledger.purge(tuple(ids))
        assert not set(await stored(ledger)) & set(ids)


@pytest.mark.parametrize("wanted", [False, True])
async def test_letters_that_come_from_elsewhere_are_stored_like_others(
    ledger_factory: Factory, *, wanted: bool
) -> None:
    async with opened(ledger_factory):
        pass
    async with peeked(ledger_factory) as (tool, _):
        await tool.add_letters(ALL[:2], wanted=wanted)
        await tool.add_letters(())
        assert [(each.letter, each.wanted) for each in await tool.letters()] == [
            (ALL[0], wanted),
            (ALL[1], wanted),
        ]
    state = await held(ledger_factory)
    assert (state.dead_letters, state.redrives) == (2, 2 if wanted else 0)
