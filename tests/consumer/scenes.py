"""Scenes of one connection: a script of what a daemon, a handler and a coordinator do, and the trace of what the server does.

A script is a list of steps, each a list of a verb and its arguments (the methods of ``Stage`` named ``step_…``). After each step
the loop settles, and what happened is one entry of the trace: what the daemon received, what was asked of the handler and of the
coordinator, and the names of log events. ``recorded.json`` has the traces of the code that ``mldserver/consumer`` replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from typing import Any

from mldserver.consumer.claims import Superseded
from mldserver.errors import HandlerHalted, PeerError
from mldserver.records import Sequence
from mldserver.runtime.interface import BatchOutcome, BatchOutline
from mldserver.testing import VirtualClock
from tests.sources.house import FakeShard, serving

SHARD = "shardId-0"
DEADLINE = 20.0
REPLIES = (None, None, None, "IllegalArgumentException", "ShutdownException")
END_REPLIES = (None, "ShutdownException")
"""Without those that are retried, in real time."""
ERRORS: dict[str, type[Exception]] = {"peer": PeerError, "bug": RuntimeError, "halt": HandlerHalted}

Step = list[Any]
Entry = dict[str, list[Any]]


class Shard(FakeShard):
    """A session whose calls are traced; what is durable is what the script says, or all after a drain."""

    stage: Stage

    def accept_batch(self, outcome: BatchOutcome, now_ms: int, received_ms: int | None = None) -> bool:
        self.stage.note("coordinator", "accept", outcome.outline.last and outcome.outline.last.number)
        if outcome.outline.last is not None:
            self.after = self.last = outcome.outline.last
        self.working = self.working and not self.gate.is_set()
        return self.gate.is_set()

    async def wait_for_room(self, *, answered: bool = False, checkpoint: Any = None) -> None:
        await self.gate.wait()
        self.working = False

    def checkpointed(self, position: Sequence) -> None:
        self.stage.note("coordinator", "stored", position.number)
        super().checkpointed(position)

    async def drain(self) -> None:
        self.stage.note("coordinator", "drain")
        self.durable = self.after

    async def end(self) -> bool:
        self.stage.note("coordinator", "end")
        return True

    async def lost(self) -> None:
        self.stage.note("coordinator", "lost")

    def disconnected(self) -> None:
        self.stage.note("coordinator", "disconnected")


class Stage:
    """One listener with one daemon; every step of a script is a method."""

    def __init__(self, house: Any, clock: VirtualClock, logged: list[dict[str, Any]]) -> None:
        self.house, self.clock, self.logged = house, clock, logged
        self.trace: list[Entry] = []
        self._entry: Entry = {}
        self._seen_events = 0
        self.daemon: Any = None
        self.owes: str | None = None
        """The action that the server has not answered yet; ``checkpoint``: the daemon has to reply."""
        self.asked: dict[str, Any] = {}
        self.over = False
        self.opened = False
        self.final = False
        self.modes: dict[int, str] = {}
        self.pending: dict[int, list[asyncio.Future[Any]]] = {}
        """Batches that the handler has and has not finished."""
        self.results: dict[int, Any] = {}
        self.next = 1
        self.background: list[asyncio.Task[Any]] = []
        self.leave = asyncio.Event()
        self.visiting = self.taken_over = self.stopping = False
        runtime = house.runtime
        runtime.begin, runtime.process, runtime.notify = self.begin, self.process, self.notify
        runtime.forget = self.forget
        house.intake.prepare = self.prepare

    def note(self, who: str, *what: Any) -> None:
        self._entry.setdefault(who, []).append(list(what) if len(what) > 1 else what[0])

    def prepare(self, shard: Any) -> None:
        shard.__class__ = Shard
        shard.stage, shard.eager = self, False

    @property
    def shard(self) -> Any:
        return self.house.intake.shards[0]

    # The handler.

    def begin(self, delivery: Any) -> Any:
        number = numbers_of(delivery)[0]
        mode = self.modes[number]
        self.note("handler", "given", number)
        if mode == "sync":
            return self._ended(number, delivery)
        if mode == "coroutine":
            return self._worked_on(number, delivery)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._wait(number, future, lambda: self._ended(number, delivery))

        def done(it: asyncio.Future[Any]) -> None:
            if it.cancelled():
                self.note("handler", "cancelled", number)

        future.add_done_callback(done)
        return future

    async def process(self, delivery: Any) -> BatchOutcome:
        number = numbers_of(delivery)[0]
        self.note("handler", "given", number)
        if self.modes[number] == "sync":
            return self._ended(number, delivery)
        return await self._worked_on(number, delivery)

    async def _worked_on(self, number: int, delivery: Any) -> BatchOutcome:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._wait(number, future, lambda: self._ended(number, delivery))
        try:
            return await future
        except (asyncio.CancelledError, GeneratorExit):
            self.note("handler", "cancelled", number)
            raise

    def _wait(self, number: int, future: asyncio.Future[Any], ended: Any) -> None:
        self.pending.setdefault(number, []).append(future)
        self.results[number] = ended

    def _ended(self, number: int, delivery: Any) -> BatchOutcome:
        first, *_, last = [*numbers_of(delivery), numbers_of(delivery)[-1]]
        return BatchOutcome(BatchOutline(1, 0, Sequence(first), Sequence(last), None, 0))

    async def notify(self, shard_id: str, hook: Any) -> None:
        self.note("handler", str(hook))

    async def forget(self, shard_id: str) -> None:
        self.note("handler", "forget")

    # The steps.

    async def step_initialize(self) -> None:
        await self._request("initialize", shardId=SHARD, sequenceNumber="TRIM_HORIZON", subSequenceNumber=0)
        self.opened = True

    async def step_batch(self, mode: str, first: int, last: int | None = None) -> None:
        self.modes[first] = mode
        self.next = (first if last is None else last) + 1
        self.owes = "processRecords"
        await self.daemon.process(*range(first, self.next))

    async def step_request(self, action: str) -> None:
        self.final = action != "shutdownRequested"
        self.opened = False
        await self._request(action)

    async def _request(self, action: str, **more: Any) -> None:
        self.owes = action
        await self.daemon.send({"action": action, **more})

    async def step_reply(self, error: str | None) -> None:
        self.owes = self.asked.pop("for")
        await self.daemon.send({**self.asked, "error": error})

    async def step_finish(self, number: int) -> None:
        for future in self.pending.pop(number):
            if not future.done():
                future.set_result(self.results[number]())

    async def step_fail(self, number: int, error: str) -> None:
        for future in self.pending.pop(number):
            if not future.done():
                future.set_exception(ERRORS[error]("it failed"))

    async def step_throttle(self) -> None:
        self.shard.gate.clear()

    async def step_release(self) -> None:
        self.shard.gate.set()

    async def step_durable(self, number: int) -> None:
        self.shard.durable = Sequence(number)

    async def step_time(self, seconds: float) -> None:
        await self.clock.advance(seconds)

    async def step_memory(self, limit: int) -> None:
        self.house.listener._budget.limit = limit

    async def step_visit(self) -> None:
        claim, self.visiting = self.house.listener.parts.claims.current[SHARD], True
        self.leave.clear()

        async def visit() -> None:
            try:
                async with claim.visit():
                    self.note("visitor", "in", self.shard.last and self.shard.last.number)
                    await self.leave.wait()
                self.note("visitor", "out")
            except Superseded:
                self.note("visitor", "evicted")
            self.visiting = False

        self.background.append(asyncio.create_task(visit()))

    async def step_leave(self) -> None:
        self.leave.set()

    async def step_take_over(self) -> None:
        self.taken_over = True
        self.house.listener.parts.claims.take(SHARD)

    async def step_give_back(self) -> None:
        self.house.listener.parts.claims.release(SHARD, self.house.listener.parts.claims.current[SHARD])

    async def step_stop(self) -> None:
        self.stopping = True
        self.background.append(asyncio.create_task(self.house.listener.drain()))

    async def step_close(self) -> None:
        self.over = True
        await self.daemon.close()

    # Playing.

    async def play(self, step: Step) -> Entry:
        """Take one step; return what happened by the time at which nothing happens any more."""
        self._entry = {}
        verb, *arguments = step
        if self.daemon is None:
            self.daemon = await self.house.connect()
        await getattr(self, f"step_{verb}")(*arguments)
        for _ in range(4):
            for _ in range(25):
                await asyncio.sleep(0)
            await self._receive()
        events = [each["event"] for each in self.logged[self._seen_events :]]
        self._seen_events = len(self.logged)
        events = [name for name in events if name in EVENTS]
        if events:
            self._entry["log"] = events
        self.trace.append(self._entry)
        return self._entry

    async def _receive(self) -> None:
        while not self.over:
            reader = self.daemon.reader
            if b"\n" not in reader._buffer and not reader.at_eof() and reader.exception() is None:
                return
            try:
                line = await reader.readline()
            except ConnectionError:
                line = b""
            if not line:
                self.over = True
                self.note("daemon", "eof")
                return
            message = json.loads(line)
            if message["action"] == "checkpoint":
                self.asked = {**message, "for": self.owes}
                self.owes = "checkpoint"
                self.note("daemon", "checkpoint", message["sequenceNumber"])
            else:
                assert message["responseFor"] == self.owes, (message, self.owes)
                self.owes = None
                self.note("daemon", "answer")

    async def end(self) -> None:
        self.leave.set()
        for task in self.background:
            task.cancel()
        await asyncio.gather(*self.background, return_exceptions=True)


EVENTS = frozenset(
    {"batch.answered_early", "batch.given_up", "connection.failed", "shard.lost", "shard.shutdown_requested"}
    | {
        "shard.disconnected",
        "checkpoint.failed",
        "checkpoint.stopped",
        "checkpoint.retried",
        "connection.closed",
    }
)


def numbers_of(delivery: Any) -> list[int]:
    """Return the sequence numbers of a delivery's records."""
    message = json.loads(bytes(delivery.payload.packed()[1]))
    return [int(record["sequenceNumber"]) for record in message["records"]]


@contextlib.asynccontextmanager
async def staged(logged: list[dict[str, Any]], deadline: float | None = DEADLINE) -> Any:
    clock = VirtualClock()
    async with serving(clock=clock, answer_deadline=deadline) as house:
        stage = Stage(house, clock, logged)
        try:
            yield stage
        finally:
            await stage.end()


async def play(
    script: list[Step], logged: list[dict[str, Any]], deadline: float | None = DEADLINE
) -> list[Entry]:
    """Play a script and return its trace."""
    async with staged(logged, deadline) as stage:
        for step in script:
            await stage.play(step)
        return stage.trace


def possible(stage: Stage, dice: random.Random) -> list[Step]:
    """Return steps that may follow; a daemon keeps to the protocol."""
    steps: list[Step] = []
    if stage.over:
        return []
    mode = dice.choice(["future", "future", "future", "coroutine", "sync"])
    if stage.owes is None and not stage.final:
        if stage.opened:
            steps += [["batch", mode, stage.next]] * 6
            steps += [["request", dice.choice(["shutdownRequested", "leaseLost", "shardEnded"])]] * (
                dice.random() < 0.15
            )
        elif stage.next > 1:
            steps += [["request", dice.choice(["leaseLost", "shardEnded"])]] * 2
    if stage.owes == "checkpoint":
        steps += [["reply", dice.choice(END_REPLIES if stage.asked["for"] == "shardEnded" else REPLIES)]] * 4
    running = [
        number for number, futures in stage.pending.items() if not all(each.done() for each in futures)
    ]
    for number in running:
        steps += [["finish", number]] * (4 if number == running[0] else 1)
        steps += [["fail", number, dice.choice([*ERRORS])]] * (dice.random() < 0.06)
    shard = stage.shard
    steps += [["throttle"]] * (shard.gate.is_set() and dice.random() < 0.3)
    steps += [["release"]] * (3 * (not shard.gate.is_set()))
    if shard.after is not None and shard.durable != shard.after and dice.random() < 0.5:
        steps += [["durable", shard.after.number]]
    steps += [["time", dice.choice([0.02, 0.06, 5, 21])]] * 2
    if dice.random() < 0.1:
        steps += [["memory", dice.choice([10, 1_000_000])]]
    if stage.visiting:
        steps += [["leave"]] * 2
    elif dice.random() < 0.15 and not stage.taken_over:
        steps += [["visit"]]
    if dice.random() < 0.08 and not stage.taken_over:
        steps += [["take_over"]]
    elif stage.taken_over and stage.owes is None and dice.random() < 0.1:
        steps += [["give_back"]]
    if dice.random() < 0.05 and not stage.stopping:
        steps += [["stop"]]
    if dice.random() < 0.03:
        steps += [["close"]]
    return steps


async def improvise(
    seed: int, logged: list[dict[str, Any]], length: int = 40
) -> tuple[list[Step], list[Entry]]:
    """Play steps drawn at random; return them and their trace."""
    dice = random.Random(seed)
    script: list[Step] = [["initialize"]]
    async with staged(logged) as stage:
        await stage.play(script[0])
        while len(script) < length and (steps := possible(stage, dice)):
            script.append(dice.choice(steps))
            await stage.play(script[-1])
        return script, stage.trace
