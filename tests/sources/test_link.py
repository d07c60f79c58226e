"""The shell around one connection, on a transport that does what the test says."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from typing import Any

import pytest

from mldserver.base.folding import Folding
from mldserver.errors import HandlerHalted
from mldserver.protocol.events import CloseReason, ConnectionTimer
from mldserver.protocol.messages import Initialize
from mldserver.records import Sequence
from mldserver.sources.link import CheckpointOutcome, Link
from mldserver.sources.unread import ReadBudget
from tests.sources.house import QUICK

pytestmark = pytest.mark.quick

INITIALIZE = b'{"action":"initialize","shardId":"s","sequenceNumber":null,"subSequenceNumber":null}\n'
BATCH = b'{"action":"processRecords","records":[],"millisBehindLatest":0}'


class Transport(asyncio.Transport):
    """Notes what is done to it; closing takes effect only when ``lose`` is called."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[Any] = []
        self.link: Link | None = None
        self.closing = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.done.append(bytes(data))

    def write_eof(self) -> None:
        self.done.append("eof")

    def close(self) -> None:
        self.closing = True
        self.done.append("close")

    def abort(self) -> None:
        self.closing = True
        self.done.append("abort")
        assert self.link is not None
        self.link.connection_lost(None)

    def is_closing(self) -> bool:
        return self.closing

    def pause_reading(self) -> None:
        self.done.append("pause")

    def resume_reading(self) -> None:
        self.done.append("resume")


def heard(link: Link, data: bytes) -> None:
    buffer = link.get_buffer(-1)
    buffer[: len(data)] = data
    link.buffer_updated(len(data))


def made(budget: int = 1000, **limits: Any) -> tuple[Link, Transport]:
    transport = Transport()
    shown = Link(
        "c1",
        "peer",
        limits=QUICK,
        random=lambda: 0.5,
        budget=ReadBudget(budget),
        buffer=bytearray(1000),
        refusals=Folding(lambda: 0),
    )
    transport.link = shown
    shown._close_seconds = limits.get("close_seconds", 5)
    shown.connection_made(transport)
    return shown, transport


def initialized(budget: int = 1000) -> tuple[Link, Transport]:
    link, transport = made(budget)
    heard(link, INITIALIZE)
    link.acknowledge()
    transport.done.clear()
    return link, transport


async def test_a_peer_that_does_not_take_what_is_left_is_cut_off() -> None:
    link, transport = made(close_seconds=0)
    link.close()
    await link.wait_gone()
    assert transport.done == ["close", "abort"]


async def test_a_peer_that_takes_it_is_waited_for() -> None:
    link, transport = made()
    link.close()
    link.connection_lost(None)
    await link.wait_gone()
    assert transport.done == ["close"]
    assert link.close_reason is CloseReason.CLOSED


async def test_once_closed_every_command_does_nothing() -> None:
    link, transport = initialized()
    heard(link, BATCH + b"\n")
    link.eof_received()
    transport.done.clear()
    link.acknowledge()
    link.close()
    link.close(HandlerHalted("late"))
    assert await link.checkpoint(Sequence(5)) is CheckpointOutcome.CLOSED
    assert transport.done == []
    assert link.close_reason is CloseReason.EOF_IN_REQUEST


async def test_a_link_that_never_got_its_transport_can_be_cut() -> None:
    link = Link(
        "c1",
        "peer",
        limits=QUICK,
        random=lambda: 0.5,
        budget=ReadBudget(10),
        buffer=bytearray(10),
        refusals=Folding(lambda: 0),
    )
    link.cut()
    link.pause()
    link.resume()
    link.close()
    assert link.closed


async def test_a_checkpoint_that_is_outstanding_when_the_peer_goes_is_told_closed() -> None:
    link, _ = initialized()
    heard(link, BATCH + b"\n")
    asking = link.checkpoint(Sequence(5))
    await asyncio.sleep(0)
    link.connection_lost(ConnectionResetError())
    assert await asking is CheckpointOutcome.CLOSED


async def test_a_checkpoint_that_nobody_waits_for_any_more_may_still_be_answered() -> None:
    link, _ = initialized()
    heard(link, BATCH + b"\n")
    asking = link.checkpoint(Sequence(5))
    await asyncio.sleep(0)
    asking.cancel()
    await asyncio.sleep(0)
    heard(link, b'{"action":"checkpoint","sequenceNumber":"5","subSequenceNumber":0,"error":null}\n')
    link.acknowledge()
    assert not link.closed


async def test_the_deadline_of_a_line_waits_while_the_budget_makes_the_peer_wait() -> None:
    link, transport = initialized()
    heard(link, b'{"action"')
    assert set(link._timers) == {"partial_line"}
    link.pause()
    assert (transport.done, link._timers) == (["pause"], {})
    link.resume()
    assert set(link._timers) == {"partial_line"}
    link.close()
    assert link._timers == {}


async def test_a_line_that_goes_on_arriving_gets_its_time_again_but_not_while_others_wait(
    logged: Any,
) -> None:
    link, _ = initialized()
    heard(link, b"{")
    heard(link, b" ")
    link._fire(ConnectionTimer.PARTIAL_LINE)
    assert set(link._timers) == {"partial_line"}
    other, _ = made()
    link.budget = other.budget = ReadBudget(10)
    heard(link, b" " * 8)
    heard(other, b"{" * 2)
    heard(link, b" ")
    link._fire(ConnectionTimer.PARTIAL_LINE)
    assert link.close_reason is CloseReason.FAILED
    assert not other.closed
    link.connection_lost(None)
    assert not other.budget.paused


@pytest.mark.parametrize("ending", [Link.close, lambda link: link._fire(ConnectionTimer.PARTIAL_LINE)])
async def test_a_line_that_the_server_does_not_read_on_is_not_blamed_on_the_peer(
    logged: Any, ending: Callable[[Link], None]
) -> None:
    link, _ = initialized()
    heard(link, b'{"action"')
    ending(link)
    link.connection_lost(None)
    told = [event["what"] for event in logged if event["event"] == "connection.failed"]
    assert not [what for what in told if "The peer closed" in what]
    assert len(told) == (link.close_reason is CloseReason.FAILED)


async def test_batches_are_passed_on_at_once_and_other_requests_when_they_are_asked_for() -> None:
    link, _ = initialized()
    batches: list[bytes | bytearray] = []
    link.on_batch = batches.append
    heard(link, BATCH + b"\n")
    assert batches == [BATCH]
    assert isinstance(await link.request(), Initialize)
    waiting = asyncio.create_task(link.request())
    await asyncio.sleep(0)
    assert not waiting.done()
    link.close()
    assert await waiting is None


async def test_a_line_is_reported_from_its_first_bytes_to_its_last() -> None:
    link, _ = initialized()
    began: list[bool] = []
    link.on_partial = began.append
    for part in (BATCH[:5], BATCH[5:9], BATCH[9:] + b"\n"):
        heard(link, part)
    assert began == [True, False]


async def test_a_batchs_line_counts_no_more_once_its_connection_is_gone() -> None:
    link, _ = initialized()
    link.hold(len(BATCH))
    assert (link.budget.held, link.has_room) == (len(BATCH), True)
    link.connection_lost(None)
    assert link.budget.held == 0
    link.hold(-len(BATCH))
    link.hold(len(BATCH))
    assert link.budget.held == 0


async def test_nothing_is_written_to_a_transport_that_is_closing() -> None:
    link, transport = initialized()
    heard(link, b'{"action":"leaseLost"}\n')
    transport.closing = True
    link.acknowledge()
    link.pause()
    link.resume()
    assert transport.done == []


async def test_a_peer_that_resets_once_it_has_the_last_status_has_finished(
    monkeypatch: pytest.MonkeyPatch, logged: Any
) -> None:
    def write_eof(_: Transport) -> None:
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    monkeypatch.setattr(Transport, "write_eof", write_eof)
    link, _ = initialized()
    heard(link, b'{"action":"leaseLost"}\n')
    link.acknowledge()
    assert set(link._timers) == {"close"}
    link.connection_lost(ConnectionResetError())
    assert link.close_reason is CloseReason.FINISHED
    assert not [event for event in logged if event["level"] in {"warning", "error"}]


async def test_a_stranger_on_the_port_is_told_apart_from_a_daemon_that_breaks_the_protocol(
    logged: Any,
) -> None:
    stranger, _ = made()
    heard(stranger, b"GET / HTTP/1.1\r\n\r\n")
    daemon, _ = initialized()
    heard(daemon, b'{"action":"dance"}\n')
    first, second = (event for event in logged if event["event"] == "connection.failed")
    assert (first["level"], first["did"]) == ("warning", "The connection was closed.")
    assert "does not speak as a MultiLangDaemon" in first["advice"]
    assert (second["level"], second["did"]) == ("error", "The connection was closed.")
    assert "advice" not in second


async def test_a_connection_that_the_server_cuts_is_not_blamed_on_the_daemon(logged: Any) -> None:
    link, transport = initialized()
    heard(link, BATCH + b"\n")
    link.cut()
    assert link.close_reason is CloseReason.CLOSED
    assert transport.done == ["close", "abort"]
    told = [event["what"] for event in logged if event["event"] == "connection.failed"]
    assert len(told) == 1
    assert told[0].startswith("The server stops and cut the connection")
