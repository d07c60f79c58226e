"""Shards with keyed state that are opened again while the flush of an earlier session is under way."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from coordinator.keyed import Counter, opened
from coordinator.pipeline import Pipeline

from mldserver.ledger.contract import Flush
from mldserver.stores import StoreClaim

FAMILY = StoreClaim(None)


async def test_a_shard_that_is_opened_again_while_its_flush_is_under_way_goes_on(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path / "out", without_rows=True)
    async with pipeline.life():
        before = await opened(pipeline)
        await before.give((1, "x"))
        register, again = pipeline.ledger.register, list[Counter]()

        async def open_again(flush: Flush) -> Any:
            pipeline.ledger.register = register
            again.append(await opened(pipeline))
            return await register(flush)

        pipeline.ledger.register = open_again
        await pipeline.cycle()
        (counter,) = again
        assert counter.session.alive, "it has accepted nothing that was left out"
        await counter.give((1, "x"), (2, "x"))
        await pipeline.cycle()
        await counter.load()
        assert counter.entries == {"x": 2}
        assert pipeline.state().stores["a"].serial == 1


async def test_a_shard_that_opens_waits_for_a_flush_of_sessions_that_are_over(tmp_path: Path) -> None:
    """The flush counts, since the other shard of the store was not opened again; its batches have left the buffer."""
    pipeline = Pipeline(tmp_path / "out", without_rows=True)
    async with pipeline.life():
        root = await opened(pipeline, "root", claim=FAMILY)
        assert await root.session.end()
        one, other = [await opened(pipeline, name, claim=FAMILY, parents=("root",)) for name in ("b", "c")]
        await one.give((1, "x"))
        register, again = pipeline.ledger.register, list[asyncio.Task[Counter]]()

        async def open_other(flush: Flush) -> Any:
            pipeline.ledger.register = register
            one.session.disconnected()
            other.session.disconnected()
            opening = opened(pipeline, "c", claim=FAMILY, parents=("root",))
            again.append(asyncio.ensure_future(opening))
            for _ in range(100):
                await asyncio.sleep(0)
            return await register(flush)

        pipeline.ledger.register = open_other
        await pipeline.cycle()
        assert (await again[0]).entries == {"x": 1}
