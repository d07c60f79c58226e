"""An outcome that the server discards leaves nothing in a key's state, although the handler's process has applied it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from coordinator.keyed_house import House
from coordinator.pipeline import named

from mldserver.records import Sequence
from mldserver.runtime.interface import Delivery

pytestmark = pytest.mark.quick


def held_back(house: House) -> Callable[[], None]:
    """Let the runtime answer as a worker does, later: return what lets it answer. Its changes are applied at once."""
    gate, begin = asyncio.Event(), house.runtime.begin

    def begins(delivery: Delivery) -> Any:
        async def answered() -> Any:
            outcome = await house.runtime.process(delivery)
            await gate.wait()
            return outcome

        return asyncio.ensure_future(answered())

    house.runtime.begin = begins  # type: ignore[method-assign,assignment]  # in the place of a worker

    def answer() -> None:
        house.runtime.begin = begin  # type: ignore[method-assign]  # as it was
        gate.set()

    return answer


async def test_a_batch_that_is_processed_again_because_its_records_were_accepted_meanwhile_counts_no_record_twice(
    tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    """No path of today moves a keyed shard's position while a batch is at the handler. An overlooked one costs a reload."""
    house = House(tmp_path)
    async with house.life():
        consumer = await house.open("parent")
        await house.put("parent", ("a", b""))
        answer = held_back(house)
        put = asyncio.ensure_future(house.put("parent", ("a", b""), ("a", b"")))
        await asyncio.sleep(0.01)
        consumer.intake.position.accepted = Sequence(2)  # type: ignore[attr-defined]  # of the session
        answer()
        await put
        await house.put("parent", ("a", b""))
        assert await house.counts("parent") == {"a": 3}, "the second record is the other path's"
    assert len(named(logged, "state.moved")) == 1


@pytest.mark.parametrize("family", [False, True])
async def test_a_batch_that_is_given_up_when_a_new_connection_comes_is_counted_by_that_alone(
    tmp_path: Path, family: bool
) -> None:
    house = House(tmp_path, family=family)
    async with house.life():
        parents: tuple[str, ...] = ()
        if family:
            await house.open("root")
            await house.end("root")
            await house.open("sibling", "root")
            parents = ("root",)
        old = await house.open("parent", *parents)
        await house.put("parent", ("a", b""))
        await house.pipeline.cycle()
        answer = held_back(house)
        put = asyncio.ensure_future(house.put("parent", ("a", b"")))
        await asyncio.sleep(0.01)
        await house.open("parent", *parents)
        answer()
        await asyncio.wait([put])
        assert put.exception() is not None
        await old.forget()
        house.sequences -= 1
        await house.put("parent", ("a", b""))
        if family:
            await house.put("sibling", ("b", b""))
        assert await house.counts("parent") == {"a": 2} | ({"b": 1} if family else {})
