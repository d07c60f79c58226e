"""A small shop on DynamoDB without AWS: orders are placed, changed and cancelled in a fake table while a server reads its stream.

``mldserver demo --source dynamodb`` runs this module.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any, Final, Literal

from mldserver.base.clock import Clock, SystemClock
from mldserver.config import locations
from mldserver.config.settings import Settings
from mldserver.jobs.engine import Engine
from mldserver.server import Server
from mldserver.testing.fake_streams import FakeStreams
from mldserver.testing.simulation import Report, ServerRun

TABLE: Final = "orders"
_PRODUCTS: Final = (
    ("espresso", "2.40"),
    ("filter coffee", "3.10"),
    ("croissant", "1.95"),
    ("cheesecake", "4.50"),
)
_HOURS: Final = 8
_CHANGED: Final = 0.3
_CANCELLED: Final = 0.1
_LATER_MS: Final = 40 * 60_000
"""The longest time until an order is changed or cancelled."""
_STEPS_PER_SECOND: Final = 20
DAY_SECONDS: Final = 8.0
"""How long the day takes."""


@dataclass(frozen=True, slots=True, order=True)
class ShopStep:
    """One thing that happens in the shop."""

    at_ms: int
    order: int
    deed: Literal["placed", "changed", "cancelled"]
    item: Any = None
    """The order's attributes, unless it is cancelled."""

    @property
    def rows(self) -> int:
        """How many rows ``handlers.shop`` makes of this step."""
        return 2 if self.deed == "changed" else 1


def script(orders: int, *, start_ms: int, seed: int = 1) -> list[ShopStep]:
    """Return a day from ``start_ms`` as steps in the order of time: orders are placed, some are changed or cancelled later."""
    rng = random.Random(seed)  # noqa: S311  # repeatable, not secret
    steps, closes_ms = [], start_ms + _HOURS * 3_600_000
    for number in range(orders):
        product, price = rng.choice(_PRODUCTS)
        at_ms = rng.randrange(start_ms, closes_ms)
        pieces = rng.randint(1, 4)
        total = pieces * Decimal(price)
        order = {"id": f"order-{number}", "product": product, "pieces": pieces, "total": total}
        steps.append(ShopStep(at_ms, number, "placed", order))
        chance, later_ms = rng.random(), min(at_ms + rng.randint(1000, _LATER_MS), closes_ms - 1)
        if chance < _CANCELLED:
            steps.append(ShopStep(later_ms, number, "cancelled"))
        elif chance < _CANCELLED + _CHANGED:
            one_piece_more = {"pieces": pieces + 1, "total": total + Decimal(price)}
            steps.append(ShopStep(later_ms, number, "changed", order | one_piece_more))
    return sorted(steps, key=lambda step: (step.at_ms, step.order))


class Shop(ServerRun):
    """One day of the shop, and one run of a server that reads the stream of its table."""

    def __init__(
        self,
        settings: Settings,
        steps: Sequence[ShopStep],
        *,
        engine: Engine | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Prepare a fake table on which ``run`` carries out ``steps``. ``engine``: in place of Spark."""
        super().__init__(clock or SystemClock())
        self.table = FakeStreams(TABLE, shards=2, clock=self.clock)
        self.steps = steps
        self.done = 0
        """How many steps have happened."""
        self._settings = settings
        self._engine = engine

    @property
    def delivered(self) -> bool:
        """Whether the day is over."""
        return self.done == len(self.steps)

    async def run(self, watch: Callable[[Shop], None] = lambda _self: None) -> Report:
        """Run a server on the fake table's stream, play the day, stop the server, and report. ``watch``: see ``Simulation.run``."""
        async with self.table.serving() as url:
            source = locations.source.parse(
                f"dynamodb://{TABLE}?region={self.table.region}&endpoint_url={url}"
            )
            self.server = Server(
                replace(self._settings, source=source), engine=self._engine, clock=self.clock
            )
            # The fake ignores credentials, but AWS's client needs some to sign requests.
            names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
            before = {name: os.environ.get(name) for name in names}
            os.environ.update(dict.fromkeys(names, "none"))
            try:
                server_exit = await self._serve_until_played(watch)
            finally:
                for name, value in before.items():
                    os.environ.pop(name)
                    if value is not None:
                        os.environ[name] = value
        return Report(server_exit, self.status, self.delivered, (), (), len(self.steps))

    async def _play_records(self) -> None:
        """Carry out the day's steps on the table within ``DAY_SECONDS``, and split a shard of its stream at half time.

        Then disable the stream, so that its shards end, and wait until every window is published.
        """
        await self.server.listening()
        (first_shard, *_) = self.table.open_shards
        steps_per_pause = max(1, round(len(self.steps) / DAY_SECONDS / _STEPS_PER_SECOND))
        for step in self.steps:
            if step.deed == "cancelled":
                self.table.delete({"id": f"order-{step.order}"}, at_ms=step.at_ms)
            else:
                self.table.put(step.item, at_ms=step.at_ms)
            self.done += 1
            if self.done == len(self.steps) // 2:
                self.table.split(first_shard)
            if self.done % steps_per_pause == 0:
                await self.clock.sleep(1 / _STEPS_PER_SECOND)
        self.table.disable()
        await self._wait_until_published()

    def left(self) -> tuple[int, Decimal]:
        """Return the number of orders in the table and their total, counted from its items, without the server."""
        totals = [Decimal(item["total"]["N"]) for item in self.table.items.values()]
        return len(totals), sum(totals, Decimal())
