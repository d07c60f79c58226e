"""The asynchronous shell: a thread of its own, calls in order, cancellation, and an end that waits."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from mldserver.errors import InternalError, LedgerError, LedgerVersionError
from mldserver.ledger.contract import Flush, LedgerState
from mldserver.ledger.sqlite import SqliteLedger
from tests.ledger.samples import W1, seg

pytestmark = pytest.mark.quick


class Gate:
    """Holds the ledger's thread inside a transaction until it is opened."""

    def __init__(self, ledger: SqliteLedger, method: str, failure: Exception | None = None) -> None:
        self.entered = asyncio.Event()
        self._released = threading.Event()
        self._inner: Callable[..., Any] = getattr(ledger._store, method)
        self._loop = asyncio.get_running_loop()
        self._failure = failure
        setattr(ledger._store, method, self._wait)

    def _wait(self, *args: Any, **kwargs: Any) -> Any:
        self._loop.call_soon_threadsafe(self.entered.set)
        self._released.wait()
        if self._failure:
            raise self._failure
        return self._inner(*args, **kwargs)

    def open(self) -> None:
        self._released.set()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


@pytest.fixture
async def ledger(path: Path, clock: Any) -> AsyncIterator[SqliteLedger]:
    ledger = SqliteLedger(path, pipeline="p", server_id="one", clock=clock)
    await ledger.open()
    yield ledger
    await ledger.close()
    assert not ledger_threads()


def ledger_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("mldserver-ledger")]


def names(folder: Path) -> list[str]:
    return [each.name for each in folder.iterdir()]


async def held(path: Path, clock: Any) -> LedgerState:
    ledger = SqliteLedger(path, pipeline="p", server_id="tool", clock=clock)
    try:
        return await ledger.peek()
    finally:
        await ledger.close()


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_the_loop_goes_on_while_a_transaction_runs_and_calls_keep_their_order(
    ledger: SqliteLedger,
) -> None:
    gate = Gate(ledger, "transact")
    async with asyncio.TaskGroup() as group:
        first = group.create_task(ledger.register(Flush((), (seg("s1"),))))
        second = group.create_task(ledger.cut((W1,)))
        await gate.entered.wait()
        await turns()
        assert not first.done()
        assert not second.done()
        gate.open()
    assert first.result().registered
    assert second.result()[0].segments == (seg("s1", revision=1),)


async def test_a_call_that_is_cancelled_before_its_turn_never_happens(ledger: SqliteLedger) -> None:
    gate = Gate(ledger, "letters")
    async with asyncio.TaskGroup() as group:
        group.create_task(ledger.dead_letters())
        await gate.entered.wait()
        waiting = group.create_task(ledger.open_shard("a"))
        await turns()
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled()
        gate.open()
    assert (await ledger.open_shard("a")).epoch == 1


async def test_a_cancelled_call_ends_when_its_transaction_is_over(ledger: SqliteLedger) -> None:
    gate = Gate(ledger, "transact")
    call = asyncio.ensure_future(ledger.open_shard("a"))
    await gate.entered.wait()
    for _ in range(3):
        call.cancel()
        await turns()
        assert not call.done()
    gate.open()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert (await ledger.open_shard("a")).epoch == 2


async def test_a_time_out_over_a_call_stays_a_time_out(ledger: SqliteLedger) -> None:
    gate = Gate(ledger, "transact")

    limits: list[asyncio.Timeout] = []

    async def limited() -> None:
        async with asyncio.timeout(None) as limit:
            limits.append(limit)
            await ledger.open_shard("a")

    call = asyncio.ensure_future(limited())
    await gate.entered.wait()
    limits[0].reschedule(asyncio.get_running_loop().time())
    await turns()
    assert not call.done()
    gate.open()
    with pytest.raises(TimeoutError):
        await call


async def test_the_failure_of_a_cancelled_call_is_nobodys(ledger: SqliteLedger) -> None:
    complaints: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    gate = Gate(ledger, "transact", LedgerError("no"))
    call = asyncio.ensure_future(ledger.open_shard("a"))
    await gate.entered.wait()
    call.cancel()
    gate.open()
    with pytest.raises(asyncio.CancelledError):
        await call
    del call
    await turns()
    assert not complaints


async def test_closing_waits_for_what_runs_and_for_what_was_asked_before(
    ledger: SqliteLedger, path: Path, clock: Any
) -> None:
    gate = Gate(ledger, "transact")
    async with asyncio.TaskGroup() as group:
        running = group.create_task(ledger.open_shard("a"))
        await gate.entered.wait()
        queued = group.create_task(ledger.register(Flush((), (seg("s1"),))))
        await turns()
        closing = group.create_task(ledger.close())
        await turns()
        assert not closing.done()
        with pytest.raises(InternalError, match="closed"):
            await ledger.open_shard("b")
        gate.open()
    assert running.result().epoch == 1
    assert queued.result().registered
    state = await held(path, clock)
    assert (set(state.shards), set(state.windows)) == ({"a"}, {W1})


async def test_a_close_that_is_cancelled_closes_all_the_same(
    ledger: SqliteLedger, path: Path, clock: Any
) -> None:
    gate = Gate(ledger, "transact")
    async with asyncio.TaskGroup() as group:
        group.create_task(ledger.open_shard("a"))
        await gate.entered.wait()
        closing = group.create_task(ledger.close())
        await turns()
        closing.cancel()
        await turns()
        assert not closing.done()
        gate.open()
    assert closing.cancelled()
    assert not ledger_threads()
    assert set((await held(path, clock)).shards) == {"a"}


async def test_an_opening_that_fails_leaves_no_thread(ledger: SqliteLedger, path: Path, clock: Any) -> None:
    second = SqliteLedger(path, pipeline="q", server_id="two", clock=clock)
    with pytest.raises(LedgerVersionError, match="'p', not to 'q'"):
        await second.open()
    with pytest.raises(InternalError, match="closed"):
        await second.open()
    assert len(ledger_threads()) == 1


async def test_an_opening_that_is_cancelled_closes_the_ledger(path: Path, clock: Any) -> None:
    ledger = SqliteLedger(path, pipeline="p", server_id="one", clock=clock)
    gate = Gate(ledger, "open")
    opening = asyncio.ensure_future(ledger.open())
    await gate.entered.wait()
    opening.cancel()
    gate.open()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert not ledger_threads()
    state = await held(path, clock)
    assert dataclasses.replace(state, servers={}) == LedgerState()


async def test_a_call_before_the_opening_is_a_bug_and_touches_nothing(
    path: Path, tmp_path: Path, clock: Any
) -> None:
    ledger = SqliteLedger(path, pipeline="p", server_id="one", clock=clock)
    with pytest.raises(InternalError, match="not open"):
        await ledger.open_shard("a")
    await ledger.close()
    assert not names(tmp_path)
