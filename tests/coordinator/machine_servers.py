"""Servers that live, hang, die and come back while a state machine looks on, and connections to them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from coordinator.machine_stream import Made, Stream
from coordinator.outcomes import dead_letter, outcome
from coordinator.pipeline import Crash, Faults, Pipeline
from support.shards import accept

from mldserver.coordinator.shards import ShardSession
from mldserver.errors import LedgerError, ServerBuried
from mldserver.records import Sequence
from mldserver.runtime.interface import BatchOutcome

STORE = frozenset({"write", "rename", "exchange", "delete"})
"""Calls that change the output folder; all others are transactions of the ledger."""


class Trouble(Faults):
    """Faults that a machine sets while the server runs."""

    def __init__(self) -> None:
        super().__init__(hook=self._fail)
        self.awake = asyncio.Event()
        self.awake.set()
        self.fail_in: int | None = None
        """How many calls still succeed before one fails."""
        self.fail_after = False
        """Whether it takes effect all the same."""
        self.lacking: str | None = None
        """The calls of this name all fail, before they take effect."""

    async def pause(self) -> None:
        """Take some turns of the loop, so that rules find calls under way; none while the server hangs."""
        for _ in range(3):
            await super().pause()
        await self.awake.wait()

    def die_in(self, calls: int, *, after: bool) -> None:
        self.at, self.after = len(self.calls) + calls, after

    def calm(self) -> None:
        self.at = self.fail_in = self.lacking = None
        self.awake.set()

    def _fail(self, name: str, after: bool) -> None:
        if name == self.lacking and not after:
            raise _failure(name, after)
        if self.fail_in is None or after != self.fail_after:
            return
        self.fail_in -= 1
        if self.fail_in < 0:
            self.fail_in = None
            raise _failure(name, after)


def _failure(name: str, after: bool) -> Exception:
    told = f"{name} failed {'after' if after else 'before'} it took effect"
    return OSError(28, told) if name in STORE else LedgerError(told)


@dataclass(eq=False)
class Host:
    """One server process, or the lack of one."""

    pipeline: Pipeline
    name: str
    lives: int = 0
    up: bool = False
    task: asyncio.Task[None] | None = None
    trouble: Trouble = field(default_factory=Trouble)
    watermark_ms: int | None = None
    """What this life has shown last."""
    largest: int = 0
    """Bytes of the largest batch that it was ever given."""
    connections: list[Connection] = field(default_factory=list)

    def start(self, *, renamed: bool) -> None:
        """Start a process, which is up some turns later, or dies on the way."""
        self.lives += 1
        if renamed:
            self.pipeline.server_id = f"{self.name}{self.lives}"
        self.trouble = self.pipeline.faults = Trouble()
        self.watermark_ms = None
        self.task = asyncio.get_running_loop().create_task(self._live())

    async def _live(self) -> None:
        """End quietly when the process died, was buried, or could not reach its ledger or its disk at its start."""
        try:
            async with self.pipeline.life():
                self.up = True
                await asyncio.Event().wait()
        except* (Crash, ServerBuried):
            pass
        except* (LedgerError, OSError):
            if self.up:
                raise
        finally:
            self.up = False
            self.trouble.dead = True
            for connection in self.connections:
                connection.close()
            self.connections.clear()

    async def kill(self) -> None:
        """Let the process die where it stands: nothing that it still does has an effect."""
        self.trouble.dead = True
        task, self.task = self.task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    def look(self) -> None:
        """Raise what has gone wrong in the process that may not."""
        if self.task is not None and self.task.done() and not self.task.cancelled():
            self.task.result()

    @property
    def idle(self) -> list[Connection]:
        """The connections that may carry a message now."""
        return [each for each in self.connections if each.is_idle]


@dataclass(eq=False)
class Connection:
    """One connection of a daemon, from its ``initialize`` on; one message at a time."""

    host: Host
    shard: str
    token: int
    session: ShardSession | None = None
    given: int = 0
    """How many of the shard's records it has delivered, or need not deliver."""
    closed: bool = False
    task: asyncio.Task[None] | None = None

    @property
    def is_idle(self) -> bool:
        return not self.closed and self.session is not None and (self.task is None or self.task.done())

    @property
    def alive(self) -> ShardSession:
        assert self.session is not None
        return self.session

    def has_lease(self, stream: Stream) -> bool:
        return stream.shards[self.shard].lease == self.token

    def send(self, message: Callable[..., Coroutine[None, None, None]], *args: Any) -> None:
        """Begin a message; its end comes when it comes."""
        self.task = asyncio.get_running_loop().create_task(self._guarded(message, *args))

    async def _guarded(self, message: Callable[..., Coroutine[None, None, None]], *args: Any) -> None:
        try:
            await message(*args)
        except (Crash, ServerBuried):
            self.close()
        except LedgerError:
            # As a source does: the connection is closed, and the daemon comes again.
            self.leave()

    def close(self) -> None:
        """Nothing comes over it any more: its server is dead."""
        self.closed = True
        if self.task is not None and self.task is not asyncio.current_task():
            self.task.cancel()

    def leave(self) -> None:
        """Break, which the server notices."""
        if self.session is not None:
            self.session.disconnected()
        self.closed = True
        if self in self.host.connections:
            self.host.connections.remove(self)

    # Messages.

    async def open(self, stream: Stream) -> None:
        shard = stream.shards[self.shard]
        self.given = sum(record.number <= shard.checkpoint for record in shard.records)
        start = Sequence(shard.checkpoint) if shard.checkpoint else "TRIM_HORIZON"
        self.session = await self.host.pipeline.open(self.shard, start, parents=shard.parents)

    async def give(self, batch: list[Made], turns: int, lag_ms: int) -> None:
        """Deliver a batch; the handler takes some turns of the loop."""
        session = self.alive
        session.began()
        made = outcome_of(session, batch, lag_ms)
        self.host.largest = max(self.host.largest, size_of(made))
        for _ in range(turns):
            await asyncio.sleep(0)
        await accept(session, made)

    async def end(self, stream: Stream) -> None:
        """The shard's end: its checkpoint is taken from the connection that has the lease."""
        shard, ended = stream.shards[self.shard], await self.alive.end()
        if ended and self.has_lease(stream):
            shard.ended = True
        self.leave()

    async def lost(self) -> None:
        await self.alive.lost()
        self.leave()


def outcome_of(session: ShardSession, batch: list[Made], lag_ms: int) -> BatchOutcome:
    """Return what a runtime makes of a batch: what was accepted before is dropped unseen."""
    after = session.after
    fresh = [each for each in batch if after is None or Sequence(each.number) > after]
    made = [each for each in fresh if each.kind == "row"]
    return outcome(
        session.shard_id,
        [(each.number, each.ms) for each in batch],
        after=after,
        rows=[each.number for each in made],
        columns={
            "value": pa.array([each.number for each in made], pa.int64()),
            "at": pa.array([each.at_ms for each in made], pa.timestamp("ms", tz="UTC")),
        },
        letters=[dead_letter(session.shard_id, each.number) for each in fresh if each.kind == "bad"],
        lag_ms=lag_ms,
    )


def size_of(made: BatchOutcome) -> int:
    """Return the bytes that a batch takes in memory: its rows, and what its dead letters hold."""
    letters = sum(len(each.data) + len(each.traceback) for each in made.effects.dead_letters)
    return letters + (0 if made.effects.rows is None else made.effects.rows.nbytes)
