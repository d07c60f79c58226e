"""A task group's tasks are cancelled in an order that does not depend on where they lie in memory."""

from __future__ import annotations

import asyncio

from simulation.ordered import numbered


async def cancelled(tasks: int) -> list[int]:
    """Return the numbers of a group's tasks in the order in which they are cancelled."""
    order: list[int] = []

    async def wait(number: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            order.append(number)

    async def hold() -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(tasks):
                group.create_task(wait(number))

    holding = asyncio.create_task(hold())
    await asyncio.sleep(0.01)
    holding.cancel()
    await asyncio.wait({holding})
    return order


def play() -> list[int]:
    with asyncio.Runner() as runner:
        runner.get_loop().set_task_factory(numbered())
        return runner.run(cancelled(50))


def test_tasks_are_cancelled_in_the_same_order_every_time() -> None:
    orders, kept = [], []
    for _ in range(5):
        orders.append(play())
        kept.append([object() for _ in range(1017)])  # what comes next lies elsewhere
    assert all(order == orders[0] for order in orders)
    assert sorted(orders[0]) == list(range(50))
