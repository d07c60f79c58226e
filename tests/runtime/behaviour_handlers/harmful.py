"""Handlers that do what each record says, and what no handler should do."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
from runtime.behaviour_handlers.obedient import ByBatch, ByBatchAsync, ByRecord, ByRecordAsync, ByTable

from mldserver import Batch, BatchResult, Fatal, Record, Retry


def own_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


class OldTimeout:
    """A time-out as libraries had it before ``Task.uncancel``: it cancels the task that it is in, and leaves it at that."""

    async def __aenter__(self) -> None:
        asyncio.get_running_loop().call_soon(own_task().cancel)

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is asyncio.CancelledError:
            raise TimeoutError("old")


class Cancelling(ByRecordAsync):
    """Records that have the task cancelled which they run in."""

    async def process_record(self, record: Record) -> Any:
        match record.json():
            case "cancels":
                own_task().cancel()
            case "cancels and waits":
                own_task().cancel()
                await asyncio.Event().wait()
            case "cancels and fails":
                own_task().cancel()
                raise RuntimeError("no good")
            case "cancels later":
                asyncio.get_running_loop().call_soon(own_task().cancel)
            case "times out":
                async with OldTimeout():
                    await asyncio.Event().wait()
            case "times out and knows":
                try:
                    async with OldTimeout():
                        await asyncio.Event().wait()
                except TimeoutError:
                    return (record.sequence_number, "in time")
            case "waits well":
                try:
                    async with asyncio.timeout(0):
                        await asyncio.Event().wait()
                except TimeoutError:
                    return (record.sequence_number, "in time")
        return await super().process_record(record)


class Row(Mapping[str, Any]):
    """A row with code of its own, which does what the record says."""

    def __init__(self, payload: str) -> None:
        self._payload = payload

    def __getitem__(self, name: str) -> Any:
        match self._payload:
            case "a row that exits":
                sys.exit("no")
            case "a row that kills":
                os._exit(3)
        return {"n": 0, "told": "row"}[name]

    def __iter__(self) -> Iterator[str]:
        return iter(("n", "told"))

    def __len__(self) -> int:
        return 2


class Busy(Retry):
    """Says nothing to its base."""

    def __init__(self, told: object) -> None:
        self.told = told


def of_record(record: Record, payload: str) -> Any:
    """Do what ``process_record`` should not."""
    match payload:
        case "busy":
            raise Busy(3)
        case "changes":
            record.sequence_text = 5
        case "shouts":
            raise ValueError("x" * 1_000_000)
    return Row(payload) if payload.startswith("a row that") else None


class Harmful(ByRecord):
    def process_record(self, record: Record) -> Any:
        return of_record(record, record.json()) or super().process_record(record)


class HarmfulAsync(ByRecordAsync):
    async def process_record(self, record: Record) -> Any:
        return of_record(record, record.json()) or await super().process_record(record)


def of_batch(batch: Batch) -> Any:
    """Do what ``process_records`` should not."""
    payloads = [record.json() for record in batch]
    if "names with code" in payloads:
        return BatchResult(None, failed=(sys.exit("no") for _ in batch))
    if "fatal with code" in payloads:
        raise Fatal("why", records=[object()])
    if any(payload.startswith("a row that") for payload in payloads):
        return [Row(payload) for payload in payloads]
    return None


class HarmfulBatch(ByBatch):
    def process_records(self, batch: Batch) -> Any:
        return of_batch(batch) or super().process_records(batch)


class HarmfulBatchAsync(ByBatchAsync):
    async def process_records(self, batch: Batch) -> Any:
        return of_batch(batch) or await super().process_records(batch)


class Reusing(ByRecord):
    """Returns one row again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.row: dict[str, Any] = {}

    def process_record(self, record: Record) -> Any:
        if record.json() == "tell":
            return super().process_record(record)
        self.row |= {"n": record.sequence_number, "told": record.json()}
        return [self.row, self.row] if record.json() == "twice" else self.row


class HarmfulTable(ByTable):
    """Returns texts that are none, in memory of its own."""

    def process_table(self, table: pa.Table) -> Any:
        made = super().process_table(table)
        texts = made["told"].combine_chunks()
        if "damaged" not in texts.to_pylist():
            return made
        _, offsets, data = texts.buffers()
        data = pa.py_buffer(data.to_pybytes().replace(b"damaged", b"damage\xff"))
        return made.set_column(1, "told", pa.StringArray.from_buffers(len(texts), offsets, data))
