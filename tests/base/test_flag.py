"""Flags."""

from __future__ import annotations

import asyncio

import pytest

from mldserver.base.clock import Flag

pytestmark = pytest.mark.quick


async def test_a_flag_wakes_all_who_wait_and_lets_later_ones_pass_until_it_is_cleared() -> None:
    flag = Flag()
    waiting = [asyncio.create_task(flag.wait()) for _ in range(3)]
    await asyncio.sleep(0)
    assert not flag.up
    flag.set()
    await asyncio.gather(*waiting)
    await flag.wait()
    assert flag.up
    flag.clear()
    late = asyncio.create_task(flag.wait())
    await asyncio.sleep(0)
    assert not late.done()
    flag.set()
    flag.clear()
    await late


async def test_who_gives_up_waiting_is_forgotten_and_harms_nobody() -> None:
    flag = Flag()
    first, second = asyncio.create_task(flag.wait()), asyncio.create_task(flag.wait())
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    third = asyncio.create_task(flag.wait())
    await asyncio.sleep(0)
    third.cancel()
    flag.set()
    await second
    with pytest.raises(asyncio.CancelledError):
        await third
