"""A parent that one server has read and a child that another reads: the child's rows come after the parent's."""

from __future__ import annotations

from pathlib import Path

import pytest
from coordinator.pipeline import QUICK, Pipeline, two

pytestmark = pytest.mark.quick


async def read_to_its_end(server: Pipeline, shard: str, ms: int, **opening: tuple[str, ...]) -> None:
    session = await server.open(shard, **opening)
    await server.give(session, [(1, ms)])
    assert await session.end()


def times(server: Pipeline) -> dict[str, int]:
    return {row["_shard"]: row["_time"] for row in server.rows("_mldserver/segments/**/*.parquet")}


async def test_a_child_comes_after_what_a_server_has_read_that_nobody_has_heard_of(tmp_path: Path) -> None:
    one, other = two(tmp_path)
    async with one.life(), other.life():
        # No cycle has run: neither server knows of the other.
        await read_to_its_end(other, "p", 9000)
        child = await one.open("c", parents=("p",))
        await one.give(child, [(2, 1000)])
        await child.drain()
        assert times(one) == {"p": 9000, "c": 9000}


async def test_a_grandchild_comes_after_its_grandparent_when_its_parent_had_no_records(
    tmp_path: Path,
) -> None:
    one, other = two(tmp_path)
    async with one.life(), other.life():
        await read_to_its_end(other, "g", 9000)
        assert await (await other.open("p", parents=("g",))).end()
        child = await one.open("c", parents=("p",))
        await one.give(child, [(2, 1000)])
        await child.drain()
        assert times(one) == {"g": 9000, "c": 9000}


async def test_a_child_comes_after_what_was_read_of_its_parent_since_it_left_this_server(
    tmp_path: Path,
) -> None:
    one, other = two(tmp_path)
    async with one.life(), other.life():
        await one.give(await one.open("p"), [(1, 1000)])
        await one.clock.advance(QUICK.flush_interval_ms / 1000)
        taken = await other.open("p")
        await other.give(taken, [(1, 1000), (2, 9000)])
        assert await taken.end()
        child = await one.open("c", parents=("p",))
        await one.give(child, [(3, 2000)])
        await child.drain()
        assert times(one)["c"] == 9000
