"""Which sessions of a store let go when a flush leaves out what one of them, or one before it, has accepted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from coordinator.keyed import Counter, opened
from coordinator.pipeline import Pipeline

from mldserver.ledger.contract import Flush


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
