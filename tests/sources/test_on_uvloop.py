"""The same listener on the event loop that production uses: what its transports might do differently."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import uvloop
from support.certificates import Certificates

from mldserver.config.kinds import TcpAddress, UnixAddress
from tests.sources.house import serving

if TYPE_CHECKING:
    from tests.sources.house import House


def named(logged: list[dict[str, Any]], event: str) -> list[dict[str, Any]]:
    return [entry for entry in logged if entry["event"] == event]


async def a_whole_life(house: House) -> None:
    daemon = await house.connect()
    await daemon.initialize()
    await daemon.process(*range(1, 20_001))
    await daemon.checkpointed()
    await daemon.answered("processRecords")
    await daemon.send({"action": "shardEnded"})
    await daemon.checkpointed()
    await daemon.answered("shardEnded")
    await daemon.sees_the_end()
    await daemon.close()
    await house.empty()
    assert house.intake.shards[0].calls == ["began", "accept", "end"]


async def an_oversize_line(house: House) -> None:
    daemon = await house.connect()
    with contextlib.suppress(ConnectionError):
        await daemon.send(b"x" * 3_000_000)
    await daemon.sees_the_end()
    await daemon.close()
    await house.empty()


async def a_death_in_the_middle_of_a_batch(house: House) -> None:
    house.runtime.gate.clear()
    daemon = await house.connect()
    await daemon.initialize()
    await daemon.process(1)
    await house.runtime.reached.wait()
    daemon.writer.transport.abort()
    await house.empty()
    assert house.runtime.cancelled == 1


async def a_drain(house: House) -> None:
    house.runtime.gate.clear()
    daemon = await house.connect()
    await daemon.initialize()
    await daemon.process(1)
    await house.runtime.reached.wait()
    draining = asyncio.create_task(house.listener.drain())
    await asyncio.sleep(0)
    house.runtime.gate.set()
    await daemon.checkpointed()
    await daemon.answered("processRecords")
    await daemon.sees_the_end()
    await draining
    await house.running


async def a_limit_of_one(house: House) -> None:
    first = await house.connect()
    await first.initialize("shardId-1")

    async def comes() -> None:
        second = await house.connect()  # with TLS it waits in the handshake
        await second.initialize("shardId-2")

    ready = asyncio.create_task(comes())
    for _ in range(20):
        await asyncio.sleep(0)
    assert not ready.done()
    await first.close()
    await ready


async def a_line_beyond_the_budget(house: House) -> None:
    first, second = await house.connect(), await house.connect()
    await first.initialize("shardId-1")
    await second.initialize("shardId-2")
    for daemon in (first, second):
        await daemon.send(b'{"action":"processRecords","records":[' + b" " * 30_000)
    await house.holds(60_000)
    for daemon in (second, first):
        await daemon.send(b" " * 30_000 + b'],"millisBehindLatest":0}\n')
    await first.answered("processRecords")
    await second.answered("processRecords")


SCENARIOS = {
    a_whole_life: {"line_limit": 2**25},
    an_oversize_line: {},
    a_death_in_the_middle_of_a_batch: {},
    a_drain: {},
    a_limit_of_one: {"connection_limit": 1},
    a_line_beyond_the_budget: {"read_bytes": 40_000, "line_limit": 2**20},
}


@pytest.mark.parametrize("kind", ["tcp", "unix", "tls"])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_on_uvloop(tmp_path: Path, scenario: Callable[[House], Awaitable[None]], kind: str) -> None:
    async def play() -> None:
        address = UnixAddress(tmp_path / "s") if kind == "unix" else TcpAddress("127.0.0.1", 0)
        tls = Certificates(tmp_path).both() if kind == "tls" else (None, None)
        async with asyncio.timeout(120), serving(address, tls=tls, **SCENARIOS[scenario]) as house:
            await scenario(house)

    uvloop.run(play())


def test_an_oversize_line_is_named_on_uvloop_too(logged: list[dict[str, Any]]) -> None:
    async def play() -> None:
        async with serving() as house:
            await an_oversize_line(house)

    uvloop.run(play())
    assert named(logged, "connection.failed")[0]["error"] == "FramingError"
