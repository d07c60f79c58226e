"""Handlers that do what each record says: one for each kind of hook, synchronous and asynchronous.

A record's payload is a word of JSON, perhaps with an argument: "fails 2". The row of "tell" holds, as JSON, which calls
the instance has had so far, so that it is seen from another process too.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import orjson
import pyarrow as pa

from mldserver import Batch, BatchResult, Discard, Fatal, Record, Retry, Shard, batches

TOGETHER = 3
"""How many records meet."""
RAISED: dict[str, type[BaseException]] = {
    cls.__name__: cls
    for cls in (
        ValueError,
        ConnectionError,
        LookupError,
        ZeroDivisionError,
        SystemExit,
        KeyboardInterrupt,
        GeneratorExit,
        StopIteration,
        asyncio.CancelledError,
        Discard,
        Fatal,
    )
}
opened: Counter[str] = Counter()
"""How often each shard's ``initialize`` was called."""


class Obedient:
    """What all of them have in common."""

    schema: str | None = "n BIGINT, told STRING"
    windows: Any = batches(max_rows=1000, max_age="1 hour")
    version = 7

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.tries: Counter[int] = Counter()

    def obey(self, number: int, payload: str) -> Any:
        """Return what a hook for one record returns, or raise."""
        word, _, argument = payload.partition(" ")
        self.tries[number] += 1
        match word:
            case "row":
                return (number, payload)
            case "rows":
                return [(number, "first"), {"n": number, "told": "second"}]
            case "nothing":
                return None
            case "tell":
                return (number, json.dumps(self.calls[:-1]))
            case "wrong":
                return ("x", payload)
            case "mumbles":
                raise ValueError("\udc80 is no text")
            case "raise":
                raise RAISED[argument]("no good")
            case "fails" if self.tries[number] <= int(argument):
                raise ConnectionError("away")
            case "retry" if self.tries[number] == 1:
                raise Retry("busy", after=float(argument))
        return (number, payload)

    def begin(self, shard: Shard) -> None:
        """Do what the shard's start says; the instance does not outlive a failure."""
        opened[shard.id] += 1
        self.calls.append(f"initialize {shard.start}")
        word, _, argument = (shard.start or "").partition(" ")
        if word == "fails" and opened[shard.id] <= int(argument):
            raise ConnectionError("away")

    def items(self, records: list[tuple[int, str]]) -> tuple[list[Any], dict[int, str]]:
        """Return one item a record, and which of them the handler says have failed."""
        items: list[Any] = []
        failed: dict[int, str] = {}
        for place, (number, payload) in enumerate(records):
            if payload.startswith("odd") and self.tries[number] < int(payload.split()[1]):
                self.tries[number] += 1
                failed[place] = "it is odd"
            items.append(None if place in failed else self.obey(number, payload))
        return items, failed

    def of_batch(self, batch: Batch) -> Any:
        """Return what a hook for a batch returns."""
        self.calls.append([record.sequence_number for record in batch])
        items, failed = self.items([(record.sequence_number, record.json()) for record in batch])
        return BatchResult(items, failed) if failed else items

    def of_table(self, table: pa.Table) -> Any:
        """Return what a hook for a table returns: any number of rows for each record, in any order."""
        numbers = [int(text) for text in table["sequence_number"].to_pylist()]
        self.calls.append(numbers)
        payloads = [orjson.loads(data) for data in table["data"].to_pylist()]
        items, failed = self.items(list(zip(numbers, payloads, strict=True)))
        flat = [(place, row) for place, item in enumerate(items) for row in rows_of(item)]
        flat.sort(key=lambda placed: -placed[0])
        ns = [row[0] for _, row in flat]
        columns = {
            "n": ns if all(isinstance(n, int) for n in ns) else [str(n) for n in ns],
            "told": [row[1] for _, row in flat],
            "record": pa.array([place for place, _ in flat], pa.int32()),
        }
        return BatchResult(pa.table(columns), failed) if failed else pa.table(columns)


def rows_of(item: Any) -> list[tuple[Any, Any]]:
    if item is None:
        return []
    rows = item if isinstance(item, list) else [item]
    return [tuple(row.values()) if isinstance(row, dict) else row for row in rows]


@contextmanager
def at_the_gate(payload: str) -> Iterator[socket.socket]:
    """Tell the test that the call has begun: it listens on the port that the payload says."""
    with socket.create_connection(("127.0.0.1", int(payload.split()[1]))) as gate:
        yield gate


class Life(Obedient):
    """Synchronous hooks of the shard's life."""

    def initialize(self, shard: Shard) -> None:
        self.begin(shard)

    def shard_ended(self, shard: Shard) -> None:
        self.calls.append("shard_ended")

    def lease_lost(self, shard: Shard) -> None:
        self.calls.append("lease_lost")

    def shutdown_requested(self, shard: Shard) -> None:
        self.calls.append("shutdown_requested")
        raise OSError("always away")


class LifeAsync(Obedient):
    """Asynchronous hooks of the shard's life."""

    async def initialize(self, shard: Shard) -> None:
        self.begin(shard)
        if shard.start == "hangs" and opened[shard.id] == 1:
            await asyncio.Event().wait()

    async def shard_ended(self, shard: Shard) -> None:
        await asyncio.sleep(0)
        self.calls.append("shard_ended")

    async def lease_lost(self, shard: Shard) -> None:
        await asyncio.sleep(0)
        self.calls.append("lease_lost")

    async def shutdown_requested(self, shard: Shard) -> None:
        await asyncio.sleep(0)
        self.calls.append("shutdown_requested")
        raise OSError("always away")


class ByRecord(Life):
    def __init__(self) -> None:
        super().__init__()
        self.meeting = threading.Barrier(TOGETHER, timeout=60)

    def process_record(self, record: Record) -> Any:
        self.calls.append(record.sequence_number)
        payload = record.json()
        if payload.startswith("waits"):
            with at_the_gate(payload) as gate:
                gate.recv(1)
        if payload == "meets":
            self.meeting.wait()
        return self.obey(record.sequence_number, payload)


class ByRecordAsync(LifeAsync):
    def __init__(self) -> None:
        super().__init__()
        self.meeting = asyncio.Barrier(TOGETHER)

    async def process_record(self, record: Record) -> Any:
        self.calls.append(record.sequence_number)
        payload = record.json()
        if payload.startswith("waits"):
            with at_the_gate(payload):
                await asyncio.Event().wait()
        if payload == "hangs":
            await asyncio.Event().wait()
        if payload == "meets":
            await self.meeting.wait()
        return self.obey(record.sequence_number, payload)


class ByBatch(Life):
    def process_records(self, batch: Batch) -> Any:
        return self.of_batch(batch)


class ByBatchAsync(LifeAsync):
    async def process_records(self, batch: Batch) -> Any:
        await asyncio.sleep(0)
        return self.of_batch(batch)


class ByTable(Life):
    def process_table(self, table: pa.Table) -> Any:
        return self.of_table(table)


class ByTableAsync(LifeAsync):
    async def process_table(self, table: pa.Table) -> Any:
        await asyncio.sleep(0)
        return self.of_table(table)


class Effects(ByRecord):
    """Without a schema: nothing that it returns can be taken."""

    schema = None
    windows = None
