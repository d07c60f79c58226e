"""Room in the arena: whose turn it is, and who is woken."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from mldserver.workers.shared_memory import Arena, Room

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import Any


class Counted(Arena):
    """An arena that counts how often it is asked."""

    asked = 0

    def take(self, size: int) -> int | None:
        self.asked += 1
        return super().take(size)


async def turn() -> None:
    """Let every task go as far as it can."""
    for _ in range(5):
        await asyncio.sleep(0)


def waiting(call: Coroutine[Any, Any, int | None]) -> asyncio.Task[int | None]:
    return asyncio.create_task(call)


async def test_room_that_is_there_is_taken_at_once() -> None:
    room = Room(Arena(128))
    assert [room.at_once(64), room.at_once(64), room.at_once(64)] == [0, 64, None]


async def test_who_waits_comes_before_who_asks_later() -> None:
    room = Room(Arena(128))
    assert room.at_once(64) == 0
    long = waiting(room.wait(128))
    await turn()
    assert room.at_once(64) is None, "64 bytes are free, but they are the first one's"
    short = waiting(room.wait(64))
    await turn()
    assert not long.done()
    assert not short.done()
    room.give_back(0)
    assert await long == 0
    await turn()
    assert not short.done()
    room.give_back(0)
    assert await short == 0


async def test_room_that_is_given_back_wakes_all_for_whom_it_is_enough() -> None:
    room = Room(Arena(256))
    assert room.at_once(256) == 0
    tasks = [waiting(room.wait(64)) for _ in range(6)]
    await turn()
    room.give_back(0)
    await turn()
    assert [task.done() for task in tasks] == [True] * 4 + [False] * 2
    room.close()
    assert [await task for task in tasks] == [0, 64, 128, 192, None, None]


async def test_a_thousand_that_wait_cost_each_line_one_look() -> None:
    arena = Counted(64)
    room = Room(arena)
    offset = room.at_once(64)
    tasks = [waiting(room.wait(64)) for _ in range(1000)]
    await turn()
    before = arena.asked
    for task in tasks:
        assert offset is not None
        room.give_back(offset)
        offset = await task
    assert arena.asked - before <= 2 * len(tasks)


async def test_a_wait_that_is_cancelled_takes_nothing_and_lets_the_next_go() -> None:
    room = Room(Arena(128))
    assert room.at_once(64) == 0
    long, short = waiting(room.wait(128)), waiting(room.wait(64))
    await turn()
    long.cancel()
    assert await short == 64
    with pytest.raises(asyncio.CancelledError):
        await long
    assert room.at_once(64) is None
    room.give_back(0)
    assert room.at_once(64) == 0


async def test_room_given_to_a_wait_that_is_cancelled_in_the_same_moment_is_given_on() -> None:
    room = Room(Arena(64))
    assert room.at_once(64) == 0
    first, second = waiting(room.wait(64)), waiting(room.wait(64))
    await turn()
    room.give_back(0)
    first.cancel()
    assert await second == 0
    assert first.cancelled()


async def test_nobody_waits_for_what_is_closed() -> None:
    room = Room(Arena(64))
    assert room.at_once(64) == 0
    early, cancelled = waiting(room.wait(64)), waiting(room.wait(64))
    await turn()
    cancelled.cancel()
    room.close()
    assert await early is None
    assert await room.wait(64) is None
    with pytest.raises(asyncio.CancelledError):
        await cancelled
