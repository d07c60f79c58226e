"""The batches that are being worked on, in order, and when the daemon is answered for them.

The daemon waits for an answer to each batch before it says anything else, be it that the lease is lost. So a batch that
takes longer than the answer deadline is answered while the work on it goes on; the next one waits its turn behind it,
and is answered after its own deadline. What is answered early is held in memory, within the reader's budget; nothing of
it is checkpointed before it is durable. A shard that is *held back* for want of room is not answered early: holding the
answer is what slows its daemon down.

When the work on a batch fails, no later one is worked on: what follows a record that was not taken would be accepted, and
the position move past it.

Batches that a runtime works on by itself are under way too (``add``). While all goes well nobody is woken for them; with
the first that is to be waited for, the task takes over (``go_on``), until none is under way any more.

``EarlyAnswers`` is one watch for all connections: a task for each would be most of what an idle connection costs.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from mldserver.base.clock import Clock, Flag
from mldserver.protocol.messages import Line
from mldserver.records import Sequence

if TYPE_CHECKING:
    from mldserver.runtime.interface import Begun

_AGAIN_SECONDS: Final = 1.0
"""How soon it is looked again at a batch that is due for an early answer but may not get one yet."""


class EarlyAnswers:
    """Looks after everyone who owes an answer."""

    def __init__(self, *, clock: Clock, deadline_seconds: float | None) -> None:
        """Ask for an early answer after so many seconds; None: never."""
        self._clock = clock
        self.deadline_seconds = deadline_seconds
        self._owing: set[UnderWay[Any]] = set()
        self._come = asyncio.Event()

    def owes(self, one: UnderWay[Any]) -> None:
        """Look after one from now on."""
        if self.deadline_seconds is not None:
            self._owing.add(one)
            self._come.set()

    def has_answered(self, one: UnderWay[Any]) -> None:
        """Look after it no more."""
        self._owing.discard(one)

    async def run(self) -> None:
        """Ask for early answers until cancelled; return at once when there are none to be given."""
        deadline = self.deadline_seconds
        if deadline is None:
            return
        while True:
            if not self._owing:
                self._come.clear()
                await self._come.wait()
                continue
            now_ms, pause = self._clock.steady_ms(), deadline
            for one in tuple(self._owing):
                if (since_ms := one.since_ms) is None:
                    continue
                left = deadline - (now_ms - since_ms) / 1000
                if left <= 0:
                    one.answer_early()
                    left = deadline if one.since_ms is None else _AGAIN_SECONDS
                pause = min(pause, left)
            # Sleeps through all that are done in time; what comes meanwhile is due later than what is there.
            await self._clock.sleep(pause)


_T = TypeVar("_T")


@dataclass(slots=True, eq=False)
class InflightBatch(Generic[_T]):
    """A batch from its receipt until its work is done."""

    line: Line
    size: int
    """Bytes of the line as it came; a runtime may empty a long one once it has passed it on."""
    received_ms: int
    """Steady time."""
    answer: asyncio.Future[_T | None] | None = None
    """Resolved when the daemon may be answered: with what the work came to, or with None when it goes on. None: it is
    answered already."""
    begun: Begun | None = None
    """What the runtime does with it already, or what became of it."""
    after: Sequence | None = None
    """The position behind which it was begun."""
    taken: bool = False
    """Whether the coordinator has what became of it."""
    late: bool = False
    """Whether it is answered because its deadline was over."""
    handled: bool = False
    """Whether the handler is done with it: what it still waits for is room."""
    held: bool = True
    """Whether its line is in memory still."""

    @property
    def answered(self) -> bool:
        """Whether the daemon was, or is being, answered."""
        return self.answer is None or self.answer.done()

    def close(self) -> None:
        """Let go of what was not done, if anything is left of it."""
        rest: Any = self.begun
        if isinstance(rest, asyncio.Future) and not rest.cancel():
            # It is done, and perhaps with more to be awaited.
            rest = None if rest.cancelled() or rest.exception() is not None else rest.result()
        if inspect.iscoroutine(rest):
            rest.close()


class UnderWay(Generic[_T]):
    """Works on batches one after the other; says when each may be answered."""

    def __init__(
        self,
        work: Callable[[InflightBatch[_T]], Awaitable[_T]],
        *,
        late: Callable[[InflightBatch[_T], _T], None],
        failed: Callable[[Exception], None],
        hold: Callable[[int], None],
        has_room: Callable[[], bool],
        goes_on: Callable[[], None],
        early: EarlyAnswers,
        clock: Clock,
    ) -> None:
        """``work`` does all that a batch needs and sets ``handled`` on the way.

        ``late`` is told what came of a batch that was answered early, ``failed`` why its work failed; of the others
        ``submit`` returns or raises it. ``hold`` is told once for each batch, however it leaves, that the bytes of its line are
        held no more: by their negative number. ``has_room``: whether more may come, to be held in memory. ``goes_on`` is told when
        the task takes over. ``early`` is told of each batch that is owed an answer.
        """
        self._work = work
        self._late = late
        self._failed = failed
        self._hold = hold
        self._has_room = has_room
        self._goes_on = goes_on
        self._early = early
        self._clock = clock
        self.batches: list[InflightBatch[_T]] = []
        """In order; read only."""
        self.bytes = 0
        """What their lines take; read only."""
        self.awaited = False
        """Whether the task works on them, or none may follow."""
        self._come = Flag()
        self.idle = Flag()
        """Set while no batch is under way; ``incomplete`` says whether all were taken."""
        self.idle.set()
        self._worker: asyncio.Task[None] | None = None
        self._over = False
        self.incomplete = False
        """Whether something of what was submitted was not taken, and will not be: none of what follows it may be."""

    def add(self, batch: InflightBatch[_T]) -> None:
        """Put a batch behind those that are under way."""
        self.batches.append(batch)
        self.bytes += batch.size
        self.idle.clear()
        if batch.answer is not None:
            self._early.owes(self)

    def take_out(self) -> None:
        """Let go of the first batch, which is done."""
        batch = self.batches.pop(0)
        self.bytes -= batch.size
        self.free(batch)
        if not self.batches:
            self.idle.set()

    def go_on(self) -> None:
        """Let the task work on what is under way, one batch after the other."""
        if not self.awaited:
            self.awaited = True
            self._come.set()
            self._goes_on()

    async def submit(self, line: Line, received_ms: int) -> _T | None:
        """Let the task work on a batch behind those before it; return as ``answer`` does.

        ``received_ms``: when it came, by steady time. Raises RuntimeError after ``drop`` and after a failure.
        """
        if self._over:
            self._hold(-len(line))
            raise RuntimeError("batches were given up, or have failed: none may follow them")
        batch: InflightBatch[_T] = InflightBatch(
            line, len(line), received_ms, asyncio.get_running_loop().create_future()
        )
        self.add(batch)
        self.go_on()
        return await self.answer(batch)

    async def answer(self, batch: InflightBatch[_T]) -> _T | None:
        """Return what the work on a batch came to, or None when the daemon is to be answered while it goes on.

        Raises what the work raises.
        """
        assert batch.answer is not None, "who is answered does not wait"
        try:
            return await batch.answer
        finally:
            self._early.has_answered(self)

    async def run(self) -> None:
        """Work until cancelled, which ``drop`` does too."""
        self._worker = asyncio.current_task()
        try:
            while not self._over:
                await self._come.wait()
                while self.batches:
                    await self._see_to(self.batches[0])
                self._come.clear()
                self.awaited = self._over
                self.idle.set()
        finally:
            self.idle.set()

    @property
    def since_ms(self) -> int | None:
        """When the batch came that is owed an answer; None: none is."""
        last = self.batches[-1] if self.batches else None
        return None if last is None or last.answered else last.received_ms

    def answer_early(self) -> None:
        """Answer the last batch while the work on it goes on; not while its shard is held back."""
        if self.since_ms is not None and not self.batches[0].handled and self._has_room():
            batch = self.batches[-1]
            assert batch.answer is not None, "it is not answered"
            batch.late = True
            batch.answer.set_result(None)
            self.go_on()

    async def drop(self) -> int:
        """Give up all that is under way, unaccepted; return how many batches that were. None may follow."""
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.wait({self._worker})
        return self.give_up()

    def free(self, batch: InflightBatch[_T]) -> None:
        """Note that a batch's line is not needed any more."""
        if batch.held:
            batch.held = False
            self._hold(-batch.size)

    def give_up(self, error: Exception | None = None) -> int:
        """Do as ``drop`` does, where the task does not work on any; ``error``: why, for who waits for an answer."""
        given_up, self.batches, self.bytes = self.batches, [], 0
        self._over = self.awaited = True
        self.incomplete |= bool(given_up)
        for batch in given_up:
            self.free(batch)
            batch.close()
            if batch.answer is not None and not batch.answered:
                batch.answer.cancel() if error is None else batch.answer.set_exception(error)
        self._early.has_answered(self)
        self.idle.set()
        return len(given_up)

    async def _see_to(self, batch: InflightBatch[_T]) -> None:
        try:
            result = await self._work(batch)
        except Exception as error:  # noqa: BLE001  # passed on to whoever can end the connection by it
            if batch.answered:
                self._failed(error)
            self.give_up(error)
        else:
            if batch.answer is None or batch.answered:
                self._late(batch, result)
            else:
                batch.answer.set_result(result)
            if self.batches:
                self.take_out()
