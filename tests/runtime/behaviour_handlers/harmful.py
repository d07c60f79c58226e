"""Handlers that do what each record says, and what no handler should do."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from runtime.behaviour_handlers.obedient import ByRecordAsync

if TYPE_CHECKING:
    from mldserver import Record


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
                raise ValueError("no good")
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
