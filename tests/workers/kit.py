"""A runtime with worker processes that runs, batches for it, and looks at processes from outside."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import errno
import json
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mldserver.protocol.messages import Version
from mldserver.runtime.failure_policy import FailurePolicy
from mldserver.runtime.interface import Delivery, MLDLine
from mldserver.workers import wire
from mldserver.workers.runtime import WorkerRuntime

__all__ = [
    "START",
    "Book",
    "children",
    "delivery",
    "descriptors",
    "named",
    "no_descriptor",
    "running",
    "without_standby",
]

START = wire.StartWorker(
    pipeline="mine",
    handler="mine",
    python_path=[],
    directory=".",
    policy=FailurePolicy(),
    concurrency=None,
    deadline_seconds=None,
    arena_bytes=1 << 16,
    state_bytes=1 << 20,
    settings={},
    log_level=20,
)
"""What a process is begun with, for tests in which it loads nothing."""


def without_standby(runtime: WorkerRuntime) -> None:
    """Let a runtime with one worker keep no standby worker: where no process dies, it only costs a second of the processor."""
    runtime._standby.run = asyncio.Event().wait  # type: ignore[method-assign,assignment]  # it never ends


@contextlib.asynccontextmanager
async def running(runtime: WorkerRuntime, *, standby: bool = True) -> AsyncIterator[WorkerRuntime]:
    """Load the handler, and keep the workers running while the block runs."""
    if not standby:
        without_standby(runtime)
    await runtime.load()
    task = asyncio.create_task(runtime.run())
    try:
        yield runtime
    finally:
        task.cancel()
        await asyncio.wait({task})
        await runtime.close()


def delivery(shard_id: str, *texts: str, key: str | None = "k") -> Delivery:
    """Return a batch with a record for each text. Without ``key`` each text begins with its key, of one letter."""
    records = [
        {
            "action": "record",
            "data": base64.b64encode(text.encode()).decode(),
            "partitionKey": text[0] if key is None else key,
            "sequenceNumber": str(number),
            "subSequenceNumber": 0,
            "approximateArrivalTimestamp": 1,
        }
        for number, text in enumerate(texts, 1)
    ]
    line = {"action": "processRecords", "records": records, "millisBehindLatest": 0}
    return Delivery(shard_id, MLDLine(json.dumps(line).encode(), Version.V2), 9_000, None)


def named(logged: list[dict[str, Any]], *names: str) -> list[dict[str, Any]]:
    """Return the events of these names."""
    return [event for event in logged if event["event"] in names]


def children(process: int) -> set[int]:
    """Return the ids of a process's children."""
    found: list[str] = []
    for task in Path(f"/proc/{process}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread that has ended meanwhile
            found += (task / "children").read_text().split()
    return set(map(int, found))


def descriptors() -> int:
    """Return how many descriptors this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


def no_descriptor(*_: object) -> int:
    """Do as ``os.dup`` does when all descriptors are in use."""
    raise OSError(errno.EMFILE, "Too many open files")


@dataclass(frozen=True, slots=True)
class Book:
    """What a handler noted of its calls, in order: the process, the shard, and ``open`` or the record's id."""

    calls: list[tuple[int, str, str]]

    @classmethod
    def read(cls, path: Path) -> Book:
        """Read lines of ``process shard what``."""
        lines = [line.split() for line in path.read_text().splitlines()]
        return cls([(int(process), shard, what) for process, shard, what in lines])

    def only_unanswered_batches_ran_twice(self, lost: Counter[int], *, max_records: int) -> None:
        """Check what was called again, and that each process opened a shard once, and first of all.

        ``lost``: how many batches each process had in hand when it died. What of these it had called already, which
        are the last calls of their shards there, was called again later; nothing else was.
        """
        final = {what: process for process, _, what in self.calls}
        pages: dict[tuple[int, str], list[str]] = defaultdict(list)
        for process, shard, what in self.calls:
            pages[process, shard].append(what)
        again: Counter[int] = Counter()
        for (process, _), (opened, *called) in pages.items():
            assert opened == "open"
            assert len(set(called)) == len(called), (
                "a process called a record twice, or opened its shard twice"
            )
            repeated = [what for what in called if final[what] != process]
            assert repeated == called[len(called) - len(repeated) :]
            again[process] += len(repeated)
        for process, repeats in again.items():
            assert repeats <= lost[process] * max_records
