"""Who may pass when."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from mldserver.workers.gate import IDLE_CHECKS, Gate


async def turns(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


class Visitors:
    """Pass, note who is inside, and leave when they are told to."""

    def __init__(self) -> None:
        self.gate = Gate()
        self.inside: list[str] = []
        self.leave: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def come(self, *names: str) -> None:
        """Those whose names are in capitals go alone."""
        for name in names:
            self.leave[name] = asyncio.Event()
            self.tasks[name] = asyncio.create_task(self._visit(name))
            await turns()

    async def _visit(self, name: str) -> None:
        pass_ = await self.gate.enter(alone=name.isupper())
        self.inside.append(name)
        try:
            await self.leave[name].wait()
        finally:
            self.inside.remove(name)
            self.gate.leave(pass_)

    async def idle_for(self, checks: int = IDLE_CHECKS) -> None:
        for _ in range(checks):
            self.gate.check(idle=True)
        await turns()

    async def go(self, *names: str) -> None:
        for name in names:
            self.leave[name].set()
            await turns()

    async def cancel(self, name: str) -> None:
        self.tasks[name].cancel()
        await turns()


async def test_many_pass_together() -> None:
    visitors = Visitors()
    await visitors.come("a", "b", "c")
    assert visitors.inside == ["a", "b", "c"]
    await visitors.go("a", "b", "c")


async def test_one_that_goes_alone_waits_for_those_inside_and_later_ones_wait_for_it() -> None:
    visitors = Visitors()
    await visitors.come("a", "B", "c", "D", "e")
    assert visitors.inside == ["a"]
    await visitors.go("a")
    assert visitors.inside == ["B"]
    await visitors.go("B")
    assert visitors.inside == ["c"]
    await visitors.go("c")
    assert visitors.inside == ["D"]
    await visitors.go("D")
    assert visitors.inside == ["e"]
    await visitors.go("e")


async def test_who_gives_up_waiting_holds_up_nobody() -> None:
    visitors = Visitors()
    await visitors.come("a", "B", "c", "d")
    await visitors.cancel("d")
    await visitors.cancel("B")
    assert visitors.inside == ["a", "c"]
    await visitors.go("a", "c")


async def test_who_gives_up_in_the_moment_of_its_turn_hands_it_on() -> None:
    visitors = Visitors()
    await visitors.come("a", "B", "c")
    visitors.leave["a"].set()
    await asyncio.sleep(0)
    visitors.tasks["B"].cancel()
    await turns()
    assert visitors.inside == ["c"]
    await visitors.go("c")


async def test_who_gives_up_beside_one_that_leaves_or_is_alone_is_passed_over() -> None:
    visitors = Visitors()
    await visitors.come("a", "B", "c", "d", "e")
    visitors.leave["a"].set()
    visitors.tasks["B"].cancel()
    await turns()
    assert visitors.inside == ["c", "d", "e"]
    await visitors.go("c", "d", "e")
    await visitors.come("F", "g", "h", "i")
    await visitors.cancel("i")
    visitors.leave["F"].set()
    visitors.tasks["h"].cancel()
    await turns()
    assert visitors.inside == ["g"]
    await visitors.go("g")


async def test_requests_that_wait_themselves_hold_up_no_other_and_leave_unnoticed() -> None:
    visitors = Visitors()
    await visitors.come("a", "b", "C", "d")
    await visitors.idle_for()
    assert visitors.inside == ["a", "b", "C"]
    await visitors.go("a")
    assert visitors.inside == ["b", "C"], "it does not make room a second time"
    await visitors.idle_for()
    assert visitors.inside == ["b", "C", "d"]
    await visitors.come("E")
    await visitors.go("b", "C")
    assert visitors.inside == ["d"], "nor do they"
    await visitors.go("d")
    assert visitors.inside == ["E"]
    await visitors.go("E")


async def test_requests_that_the_handler_works_on_are_waited_for_however_long_it_takes() -> None:
    visitors = Visitors()
    await visitors.come("a")
    await visitors.idle_for()
    await visitors.come("B")
    for _ in range(3):
        await visitors.idle_for(IDLE_CHECKS - 1)
        visitors.gate.check(idle=False)
    assert visitors.inside == ["a"]
    await visitors.go("a", "B")


async def test_a_request_that_has_just_come_in_gets_the_time_to_be_worked_on() -> None:
    visitors = Visitors()
    await visitors.come("a", "B", "C")
    await visitors.idle_for(IDLE_CHECKS - 1)
    await visitors.go("a")
    await visitors.idle_for(IDLE_CHECKS - 1)
    assert visitors.inside == ["B"]
    await visitors.idle_for(1)
    assert visitors.inside == ["B", "C"]
    await visitors.go("B", "C")


@settings(max_examples=50)
@given(st.lists(st.tuples(st.sampled_from("abcABC"), st.sampled_from(["come", "go", "cancel"])), max_size=30))
def test_nobody_is_beside_one_that_goes_alone_and_everybody_gets_in(acts: Sequence[tuple[str, str]]) -> None:
    async def scene() -> None:
        visitors = Visitors()
        for place, (kind, act) in enumerate(acts):
            if act == "come":
                await visitors.come(f"{kind}{place}")
            elif visitors.tasks:
                name = sorted(visitors.tasks, key=lambda each: each[1:])[place % len(visitors.tasks)]
                await (visitors.go(name) if act == "go" else visitors.cancel(name))
            alone = [name for name in visitors.inside if name.isupper()]
            assert not alone or len(visitors.inside) == 1
        await visitors.go(*visitors.leave)
        await asyncio.gather(*visitors.tasks.values(), return_exceptions=True)
        assert visitors.inside == []

    asyncio.run(scene())
