"""What the server does in a scene is what it did before ``mldserver/consumer`` took the place of four classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.consumer.scenes import play

pytestmark = pytest.mark.quick

RECORDED = [json.loads(line) for line in Path(__file__).with_name("recorded.jsonl").read_text().splitlines()]


def comparable(trace: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a trace without the order in which a handler is told at one moment: cancelled futures tell a turn later."""
    return [
        {who: sorted(what, key=str) if who == "handler" else what for who, what in entry.items()}
        for entry in trace
    ]


@pytest.mark.parametrize("scene", RECORDED, ids=[scene["name"] for scene in RECORDED])
async def test_a_scene_goes_as_it_was_recorded(scene: dict[str, Any], logged: list[dict[str, Any]]) -> None:
    trace = comparable(await play(scene["script"], logged))
    for step, happened, before in zip(scene["script"], trace, comparable(scene["trace"]), strict=True):
        assert happened == before, step
