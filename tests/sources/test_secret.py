"""A listener with a secret: it serves the daemons whose bridge shows it, and no others."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from mldserver.base.secret import PREFIX
from mldserver.testing import VirtualClock
from tests.sources.house import serving

pytestmark = pytest.mark.quick

SECRET = b"correct-horse-battery"


async def test_a_daemon_behind_a_bridge_with_the_secret_is_served(logged: list[dict[str, Any]]) -> None:
    async with serving(secret=SECRET) as house:
        daemon = await house.connect()
        await daemon.send(PREFIX + SECRET + b"\n")
        await daemon.initialize()
        await daemon.process(1)
        await daemon.checkpointed()
        await daemon.answered("processRecords")
    assert SECRET.decode() not in str(logged)


async def test_a_peer_without_the_secret_names_no_shard_and_the_log_says_so_once_a_minute(
    logged: list[dict[str, Any]],
) -> None:
    clock = VirtualClock()
    async with serving(secret=SECRET, clock=clock) as house:
        for _ in range(3):
            for first in (b"", PREFIX + b"a-secret-of-another\n"):
                peer = await house.connect()
                await peer.send(first + b'{"action":"initialize","shardId":"s","sequenceNumber":null}\n')
                await peer.sees_the_end()
        await clock.advance(61)
        peer = await house.connect()
        await peer.send(b'{"action":"initialize","shardId":"s","sequenceNumber":null}\n')
        await peer.sees_the_end()
        await house.empty()
        assert house.runtime.calls == []
    told = [
        (event["event"], event["what"], event.get("times")) for event in logged if event["level"] == "warning"
    ]
    none, other = (
        "The peer did not show the secret of listen_secret.",
        "The peer showed another secret than that of listen_secret.",
    )
    assert told == [
        ("connection.failed", none, None),
        ("connection.failed", other, None),
        ("connection.failed", none, 3),
    ]
    assert "a-secret-of-another" not in str(logged)


async def test_what_comes_after_a_refusal_is_not_looked_at(logged: list[dict[str, Any]]) -> None:
    async with serving(secret=SECRET) as house:
        peer = await house.connect()
        (link,) = house.listener._serving
        while link._transport is None:  # noqa: ASYNC110  # the link has no event for it: only tests ask
            await asyncio.sleep(0)
        for data in (b"x", PREFIX + SECRET + b"\n"):
            link._buffer[: len(data)] = data
            link.buffer_updated(len(data))
        await peer.sees_the_end()
    assert len([event for event in logged if event["event"] == "connection.failed"]) == 1


async def test_one_who_only_looks_whether_a_server_is_there_is_not_reported(
    logged: list[dict[str, Any]],
) -> None:
    async with serving(secret=SECRET) as house:
        peer = await house.connect()
        await peer.close()
        await house.empty()
    assert [event["event"] for event in logged if event["level"] in {"warning", "error"}] == []


async def test_a_server_without_a_secret_takes_bridges_that_show_one(logged: list[dict[str, Any]]) -> None:
    async with serving() as house:
        daemon = await house.connect()
        await daemon.send(PREFIX + SECRET + b"\n")
        await daemon.initialize()
    assert SECRET.decode() not in str(logged)
