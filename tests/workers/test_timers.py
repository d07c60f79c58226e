"""Timers in worker processes: whatever happens to a process, each timer fires once, and one that ends its process is found."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from msgspec.structs import replace
from support.serving import until
from workers.kit import delivery, named, running

from mldserver.records import Sequence, Shard
from mldserver.runtime.failure_policy import FailurePolicy
from mldserver.runtime.interface import (
    BatchOutcome,
    Delivery,
    DueTimers,
    TimerFilter,
    TimerLetter,
    outcome_of,
)
from mldserver.runtime.state_values import encode_payload
from mldserver.stores import ALL_KEYS, StateChange, StateSnapshot, unpack_changes
from mldserver.workers.runtime import WorkerRuntime
from mldserver.workers.worker import Limits

pytestmark = pytest.mark.usefixtures("logged")

HANDLER = """
import os
from mldserver import timer

schema = "text STRING, n BIGINT"

def process_record(record, ctx):
    ctx.timers.set(alarm, after=0, name=record.text(), payload=record.text())

@timer
def alarm(due, ctx):
    ctx.state["n"] = ctx.state.get("n", 0) + 1
    if due.payload.endswith("!"):
        os._exit(3)
    return due.payload, ctx.state["n"]
"""
"""Sets a timer for each record, named after its text. One with ``!`` ends its process."""
ATTEMPTS = 2
COLUMNS = pa.schema(
    [("key", pa.binary()), ("value", pa.binary()), ("expires_ms", pa.int64()), ("timer", pa.string())]
)


def write(code: str) -> None:
    """Write the handler's code."""
    Path("mine.py").write_text(code)


class Server:
    """Stands for the coordinator: what it has accepted of one shard."""

    def __init__(self, runtime: WorkerRuntime) -> None:
        self.runtime = runtime
        self.accepted = 0
        self.entries: dict[tuple[bytes, str], StateChange] = {}
        self.rows: list[str] = []
        self.counts: list[int] = []
        self.letters: list[str | None] = []
        self.last: BatchOutcome

    async def open(self) -> None:
        await self.runtime.open(Shard("a"), self.snapshot)

    async def snapshot(self) -> StateSnapshot:
        rows = [entry._asdict() | {"timer": entry.timer or None} for entry in self.entries.values()]
        return StateSnapshot("s", ALL_KEYS, self.accepted, None, pa.Table.from_pylist(rows, COLUMNS))

    async def send(self, made: Delivery) -> BatchOutcome:
        """Process a delivery and accept its outcome."""
        self.last = outcome = await outcome_of(self.runtime.begin(made))
        self.accepted += 1
        for blob in outcome.effects.state:
            for change in unpack_changes(blob):
                self.entries[change.key, change.timer] = change
        self.entries = {id_: entry for id_, entry in self.entries.items() if entry.value is not None}
        self.letters += [letter.timer for letter in outcome.effects.dead_letters]
        if (rows := outcome.effects.rows) is not None:
            self.rows += rows.column("text").to_pylist()
            self.counts += rows.column("n").to_pylist()
        return outcome

    async def set(self, *texts: str) -> None:
        """Set a timer for each text."""
        await self.send(replace(delivery("a", *texts), number=self.accepted + 1))

    def firing(self, limit: int = 100, **more: Any) -> Delivery:
        due = DueTimers(2**41, limit, **more)
        redriven = "letters" in more
        return Delivery("a", due, 2**41, Sequence(1), number=self.accepted + 1, redriven=redriven)

    async def fire_all(self, limit: int = 100) -> int:
        """Fire until nothing is due; return how many deliveries that took."""
        for times in range(1, 1000):
            outcome = await self.send(self.firing(limit))
            assert outcome.timers is not None
            if outcome.timers.next_call_ms is None:
                return times
        raise AssertionError("there is always another one")


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WorkerRuntime:
    monkeypatch.chdir(tmp_path)
    write(HANDLER)
    policy, limits = FailurePolicy(attempts=ATTEMPTS), Limits(None, None)
    return WorkerRuntime("mine", workers=1, policy=policy, limits=limits)


async def test_timers_fire_in_a_worker_and_are_known_to_the_next_process(
    runtime: WorkerRuntime, logged: list[dict[str, Any]]
) -> None:
    async with running(runtime), asyncio.timeout(300):
        server = Server(runtime)
        await server.open()
        await server.set("x", "y", "z")
        assert server.last.timers is not None
        assert (server.last.timers.set, server.last.timers.pending) == (3, 3)
        await server.send(server.firing(limit=1))
        os.kill(runtime.rows()[0].pid or 0, signal.SIGKILL)
        await until(lambda: bool(named(logged, "worker.lost")))
        await server.fire_all()
        assert (server.rows, server.counts, server.entries.keys()) == (
            ["x", "y", "z"],
            [1, 2, 3],
            {(b"k", "")},
        )


async def test_a_firing_whose_outcome_the_server_dropped_happens_again(runtime: WorkerRuntime) -> None:
    async with running(runtime), asyncio.timeout(300):
        server = Server(runtime)
        await server.open()
        await server.set("x", "y")
        await outcome_of(runtime.begin(server.firing()))
        await server.fire_all()
        assert (server.rows, server.counts) == (["x", "y"], [1, 2])


@pytest.mark.parametrize("at", [0, 2, 4])
async def test_a_timer_that_ends_its_process_becomes_a_dead_letter_and_no_other(
    runtime: WorkerRuntime, at: int, logged: list[dict[str, Any]]
) -> None:
    async with running(runtime), asyncio.timeout(300):
        server = Server(runtime)
        await server.open()
        texts = ["v", "w", "x", "y", "z"]
        texts[at] += "!"
        await server.set(*texts)
        deliveries = await server.fire_all()
        good = [text for text in texts if "!" not in text]
        assert (server.rows, server.counts) == (good, [1, 2, 3, 4])
        assert server.letters == [f"alarm/{texts[at]}"]
        assert server.entries.keys() == {(b"k", "")}
        # One by one up to that timer, all others at once.
        assert deliveries <= at + 2
        # Once among others, and as often alone as a record may be tried.
        assert len(named(logged, "worker.lost")) == 1 + ATTEMPTS


async def test_dead_letters_of_which_one_ends_the_process_run_without_it(runtime: WorkerRuntime) -> None:
    async with running(runtime), asyncio.timeout(300):
        server = Server(runtime)
        await server.open()
        await server.set("kept")
        letters = tuple(
            TimerLetter("k", f"alarm/{text}", 5, encode_payload(text)) for text in ("x", "y!", "z")
        )
        await server.send(server.firing(letters=letters))
        assert (server.rows, server.counts, server.letters) == (["x", "z"], [1, 2], ["alarm/y!"])
        await server.fire_all()
        assert (server.rows, server.counts) == (["x", "z", "kept"], [1, 2, 3])


async def test_timers_are_cancelled_in_a_worker(runtime: WorkerRuntime) -> None:
    async with running(runtime), asyncio.timeout(300):
        server = Server(runtime)
        await server.open()
        await server.set("x", "y", "z")
        outcome = await server.send(server.firing(cancel=TimerFilter(timer_id="alarm/y")))
        assert outcome.timers is not None
        assert (outcome.timers.cancelled, outcome.timers.pending) == (1, 2)
        await server.fire_all()
        assert server.rows == ["x", "z"]


async def test_timers_are_cancelled_together_while_one_that_ends_its_process_is_looked_for(
    runtime: WorkerRuntime,
) -> None:
    async with running(runtime), asyncio.timeout(300):
        server = Server(runtime)
        await server.open()
        await server.set("v", "w", "x!", "y", "z")
        await server.send(server.firing())
        assert server.rows == ["v"]
        outcome = await server.send(server.firing(cancel=TimerFilter()))
        assert outcome.timers is not None
        assert (outcome.timers.cancelled, outcome.timers.pending, server.letters) == (4, 0, [])


async def test_new_code_fires_timers_that_old_code_has_set(runtime: WorkerRuntime) -> None:
    async with running(runtime), asyncio.timeout(300):
        server = Server(runtime)
        await server.open()
        await server.set("x")
        assert set(runtime.spec.timers) == {"alarm"}
        write(HANDLER.replace("return due.payload", 'return "new " + due.payload'))
        await runtime.reload()
        await server.fire_all()
        assert (server.rows, server.counts) == (["new x"], [1])


async def test_timers_whose_callback_new_code_lacks_are_held(
    runtime: WorkerRuntime, logged: list[dict[str, Any]]
) -> None:
    async with running(runtime), asyncio.timeout(300):
        server = Server(runtime)
        await server.open()
        await server.set("x")
        write(HANDLER.replace("alarm", "another"))
        await runtime.reload()
        outcome = await server.send(server.firing())
        assert outcome.timers is not None
        assert (outcome.timers.fired, outcome.timers.unknown, outcome.timers.pending) == (0, 1, 1)
        assert outcome.timers.next_call_ms is None
        assert outcome.timers.next_due_ms is not None
        await until(lambda: bool(named(logged, "timer.unknown")))
