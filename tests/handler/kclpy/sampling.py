"""The sample applications, and what they wrote down."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mldserver.testing import FakeMLD, FakeStream

if TYPE_CHECKING:
    from mldserver.server import Server

APPLICATIONS = Path(__file__).parent / "applications"
START_MS = 1_800_000_000_000
VERSIONS = ["sample_v1", "sample_v2", "sample_v3"]


class Sample:
    """What the application wrote down."""

    def __init__(self, file: Path) -> None:
        self.file = file

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.file.read_text().splitlines()]

    @property
    def payloads(self) -> Counter[str]:
        """How often each record was processed."""
        return Counter(event["record"] for event in self.events if "record" in event)

    @property
    def records(self) -> Counter[int]:
        """The same, where records are numbers."""
        return Counter({int(record): times for record, times in self.payloads.items()})

    def hooks(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event.get("hook") == name]

    def uncheckpointed(self) -> set[str]:
        """Return the records that were processed and not covered by a checkpoint, as it wrote them down."""
        left: dict[str, list[str]] = {}
        for event in self.events:
            shard = left.setdefault(event["shard"], [])
            if "record" in event:
                shard.append(event["record"])
            elif "checkpoint" in event:
                shard.clear()
        return {record for shard in left.values() for record in shard}


def filled(shards: int, records: int, *, reshard: bool = False) -> FakeStream:
    stream = FakeStream(shards, start_ms=START_MS)
    for number in range(records):
        if reshard and number == records // 2:
            stream.split(stream.open_shards[0])
        stream.put(str(number).encode(), f"key-{number}")
    return stream


async def play(server: Server, daemon: FakeMLD) -> None:
    daemon.address = await server.listening()
    async with asyncio.timeout(800):
        await daemon.run()
