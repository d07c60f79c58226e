"""The requests of every capture of the real daemon, played at the listener over a socket, its errors included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.sources.house import Build

pytestmark = pytest.mark.quick

CAPTURES = sorted((Path(__file__).parents[1] / "transcripts").glob("*.jsonl"))
KEYS = {"status": ["action", "responseFor"], "checkpoint": ["action", "sequenceNumber", "subSequenceNumber"]}
REPLY = b'{"action":"checkpoint"'


def spoken_by_the_daemon(capture: Path) -> list[bytes]:
    spoken = [json.loads(text) for text in capture.read_text(encoding="utf-8").splitlines()]
    return [each["line"].encode("utf-8", "surrogateescape") for each in spoken if each["dir"] == "in"]


@pytest.mark.parametrize("capture", CAPTURES, ids=lambda path: path.stem)
async def test_every_request_is_answered_with_lines_that_the_java_accepts(
    build: Build, capture: Path
) -> None:
    house = await build(line_limit=2**25)
    lines = spoken_by_the_daemon(capture)
    daemon = await house.connect()
    while lines:
        request = lines.pop(0)
        errors: list[str | None] = []
        while lines and lines[0].startswith(REPLY):
            errors.append(json.loads(lines.pop(0))["error"])
        await daemon.send(request + b"\n")
        while True:
            message: dict[str, Any] = await daemon.receive()
            assert list(message) == KEYS[message["action"]]
            if message["action"] == "status":
                break
            await daemon.send({**message, "error": errors.pop(0) if errors else None})
        assert message["responseFor"] == json.loads(request)["action"]
    await daemon.close()
    await house.empty()
    (shard,) = house.intake.shards
    assert shard.stored == sorted(shard.stored)
