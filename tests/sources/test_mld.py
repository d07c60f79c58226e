"""The listener on real sockets: what hostile and unlucky peers do to it, and to nobody else."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
import tracemalloc
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from mldserver.base.clock import SystemClock
from mldserver.config.kinds import TcpAddress, UnixAddress
from mldserver.errors import OperatorError
from mldserver.protocol.events import ConnectionTimer
from mldserver.protocol.states import State
from mldserver.sources.mld import MLDListener
from tests.sources.house import QUICK

if TYPE_CHECKING:
    from tests.sources.house import Build, House

INITIALIZE = b'{"action":"initialize","shardId":"s","sequenceNumber":null,"subSequenceNumber":null}\n'


def named(logged: list[dict[str, Any]], event: str) -> list[dict[str, Any]]:
    return [entry for entry in logged if entry["event"] == event]


BAD = {
    "garbage": (b"GET / HTTP/1.1\r\n", "DecodeError"),
    "an_oversize_line": (b"x" * 70_000, "FramingError"),
    "an_oversize_line_with_its_end": (b"x" * 70_000 + b"\n", "FramingError"),
    "invalid_utf8": (b'{"action":"initialize","shardId":"\xff\xfe"}\n', "DecodeError"),
    "deeply_nested_json": (b"[" * 60_000 + b"\n", "DecodeError"),
    "a_wrong_order": (b'{"action":"leaseLost"}\n', "ProtocolViolation"),
    "two_requests_at_once": (INITIALIZE * 2, "ProtocolViolation"),
    "a_reply_nobody_asked_for": (b'{"action":"checkpoint","error":null}\n', "ProtocolViolation"),
    "a_null": (b"null\n", "DecodeError"),
}


@pytest.mark.parametrize("kind", BAD)
async def test_a_peer_that_sends_nonsense_loses_its_own_connection_and_no_other_notices(
    house: House, logged: list[dict[str, Any]], kind: str
) -> None:
    data, error = BAD[kind]
    other = await house.connect()
    await other.initialize("shardId-other")
    peer = await house.connect()
    with contextlib.suppress(ConnectionError):
        await peer.send(data)
    await peer.sees_the_end()
    (failed,) = named(logged, "connection.failed")
    assert (failed["error"], failed["connection"]) == (error, "c2")
    await other.process(1)
    await other.checkpointed()
    await other.answered("processRecords")


async def test_nonsense_inside_a_batch_is_found_by_the_runtime_and_ends_the_connection(
    house: House, logged: list[dict[str, Any]]
) -> None:
    peer = await house.connect()
    await peer.initialize()
    await peer.send(b'{"action":"processRecords","records":[{"sequenceNumber":1}]}\n')
    await peer.sees_the_end()
    assert "records[0].sequenceNumber" in named(logged, "connection.failed")[0]["what"]


async def test_a_peer_that_reads_no_answers_is_sent_away_before_they_fill_the_memory(
    build: Build, tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    house = await build(UnixAddress(tmp_path / "s"), close_timeout_seconds=0.01)
    peer = await house.connect()
    peer.writer.transport.pause_reading()
    await peer.send(INITIALIZE)
    while not house.runtime.calls:  # noqa: ASYNC110  # the runtime has no event for it: only tests ask
        await asyncio.sleep(0)
    (link,) = house.listener._serving
    asked = 0
    while not link.closed:
        await asyncio.sleep(0)
        if link.core.state is State.IDLE and len(house.runtime.calls) == 1 + asked:
            asked += 1
            assert asked < 5_000
            await peer.send(b'{"action":"processRecords","records":[],"millisBehindLatest":0}\n')
    (failed,) = named(logged, "connection.failed")
    assert failed["error"] == "ProtocolViolation"
    assert "does not read" in failed["what"]
    await house.empty()


async def test_a_peer_that_says_nothing_is_sent_away(build: Build, logged: list[dict[str, Any]]) -> None:
    house = await build(initialize_timeout_seconds=0.01)
    peer = await house.connect()
    await peer.sees_the_end()
    (failed,) = named(logged, "connection.failed")
    assert (failed["error"], failed["level"]) == ("PeerTimeout", "warning")


async def test_a_line_that_is_never_finished_is_not_waited_for(
    build: Build, logged: list[dict[str, Any]]
) -> None:
    house = await build(partial_line_timeout_seconds=0.01)
    peer = await house.connect()
    await peer.initialize()
    await peer.send(b'{"action":')
    await peer.sees_the_end()
    assert named(logged, "connection.failed")[0]["error"] == "PeerTimeout"


async def test_a_long_line_may_take_longer_than_the_pause_that_it_may_make(
    house: House, logged: list[dict[str, Any]]
) -> None:
    peer = await house.connect()
    await peer.initialize()
    (link,) = house.listener._serving
    line = b'{"action":"leaseLost"' + b" " * 20 + b"}"
    for place in range(0, len(line), 2):
        await peer.send(line[place : place + 2])
        await house.holds(place + 2)
        if place:
            link._fire(
                ConnectionTimer.PARTIAL_LINE
            )  # the time of a pause is over, and meanwhile something came
    await peer.send(b"\n")
    await peer.answered("leaseLost")
    assert named(logged, "connection.failed") == []


async def test_a_host_that_vanishes_is_noticed_within_a_minute(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    accepted: list[socket.socket] = []
    loop = asyncio.get_running_loop()
    connect = loop.connect_accepted_socket

    def note(factory: Any, sock: socket.socket) -> Any:
        accepted.append(sock)
        return connect(factory, sock)

    monkeypatch.setattr(loop, "connect_accepted_socket", note)
    peer = await house.connect()
    await peer.initialize()
    (found,) = accepted
    assert found.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    expected = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 60_000}
    for name, value in expected.items():
        if hasattr(socket, name):
            assert found.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) == value, name


async def test_a_peer_that_does_not_close_after_the_last_status_is_closed(
    build: Build, logged: list[dict[str, Any]]
) -> None:
    house = await build(close_timeout_seconds=0.01)
    peer = await house.connect()
    await peer.initialize()
    await peer.ask({"action": "leaseLost"})
    await house.empty()
    assert named(logged, "connection.closed")[0]["reason"] == "close_timeout"


async def test_a_peer_that_half_closes_still_gets_what_was_written_and_the_end(house: House) -> None:
    peer = await house.connect()
    await peer.send(INITIALIZE)
    peer.writer.write_eof()
    answer = await peer.reader.read()
    assert answer in {b"", b'{"action":"status","responseFor":"initialize"}\n'}
    await house.empty()


async def test_a_line_that_was_cut_off_is_reported_and_not_acted_upon(
    house: House, logged: list[dict[str, Any]]
) -> None:
    peer = await house.connect()
    await peer.initialize()
    await peer.send(b'{"action":"shardEnded"}')
    await peer.close()
    await house.empty()
    assert house.intake.shards[0].calls == ["disconnected"]
    assert "23 bytes" in named(logged, "connection.failed")[0]["what"]


async def test_at_the_limit_peers_wait_in_the_kernels_queue_until_a_place_is_free(
    build: Build, logged: list[dict[str, Any]]
) -> None:
    house = await build(connection_limit=1)
    first = await house.connect()
    await first.initialize("shardId-1")
    second = await house.connect()
    await second.send(
        {"action": "initialize", "shardId": "shardId-2", "sequenceNumber": None, "subSequenceNumber": 0}
    )
    waiting = asyncio.create_task(second.receive())
    for _ in range(20):
        await asyncio.sleep(0)
    assert not waiting.done()
    assert house.listener.connections == 1
    assert [entry["limit"] for entry in named(logged, "connection.refused")] == [1]
    await first.close()
    assert (await waiting)["responseFor"] == "initialize"


async def test_a_full_house_is_no_warning_while_nobody_waits(
    build: Build, logged: list[dict[str, Any]]
) -> None:
    house = await build(connection_limit=1)
    only = await house.connect()
    await only.initialize()
    for _ in range(20):
        await asyncio.sleep(0)
    assert not named(logged, "connection.refused")


async def test_port_zero_reports_the_real_port(house: House, logged: list[dict[str, Any]]) -> None:
    host, port = house.address.split(":")
    assert (host, int(port) > 0) == ("127.0.0.1", True)
    assert named(logged, "server.listening")[0]["address"] == house.address


async def test_ipv6_addresses_are_shown_in_brackets(build: Build) -> None:
    house = await build(TcpAddress("::1", 0))
    assert house.address.startswith("[::1]:")


async def test_an_address_in_use_is_the_operators_error(house: House) -> None:
    port = int(house.address.split(":")[1])
    second = MLDListener(TcpAddress("127.0.0.1", port), house.parts(SystemClock()), limits=QUICK)
    with pytest.raises(OperatorError, match=f"Cannot listen on 127.0.0.1:{port}"):
        await second.run()
    with pytest.raises(OperatorError, match="Nothing listens"):
        await second.listening()


@pytest.mark.parametrize("host", ["..", f"{'a' * 64}.example"])
async def test_a_host_that_can_be_no_name_is_the_operators_error(house: House, host: str) -> None:
    listener = MLDListener(TcpAddress(host, 0), house.parts(SystemClock()), limits=QUICK)
    with pytest.raises(OperatorError, match="Cannot listen on"):
        await listener.run()


async def test_an_accept_that_fails_is_tried_again_after_a_pause(
    house: House, logged: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    accept = loop.sock_accept
    pauses: list[float] = []
    failures = iter([OSError(24, "Too many open files")])

    class Clock(SystemClock):
        async def sleep(self, seconds: float) -> None:
            pauses.append(seconds)

    async def sock_accept(sock: socket.socket) -> Any:
        for failure in failures:
            raise failure
        return await accept(sock)

    monkeypatch.setattr(loop, "sock_accept", sock_accept)
    listener = MLDListener(TcpAddress("127.0.0.1", 0), house.parts(Clock()), limits=QUICK)
    running = asyncio.create_task(listener.run())
    house.address = await listener.listening()
    peer = await house.connect()
    await peer.initialize()
    assert pauses == [0.5]
    assert "Too many open files" in named(logged, "connection.refused")[0]["what"]
    await peer.close()
    listener.stop_accepting()
    await running


async def test_stopping_before_running_accepts_nothing(house: House) -> None:
    listener = MLDListener(TcpAddress("127.0.0.1", 0), house.parts(SystemClock()), limits=QUICK)
    listener.stop_accepting()
    await listener.run()
    assert listener.connections == 0


async def test_no_more_connections_are_accepted_once_stopped_while_the_old_ones_go_on(house: House) -> None:
    old = await house.connect()
    await old.initialize()
    house.listener.stop_accepting()
    for _ in range(20):
        await asyncio.sleep(0)
    with pytest.raises(OSError):  # noqa: PT011  # refused or reset, as the kernel likes
        await house.connect()
    await old.process(1)
    await old.checkpointed()
    await old.answered("processRecords")


async def test_a_connection_that_was_accepted_in_the_moment_of_the_stop_is_closed_at_once(
    house: House,
) -> None:
    house.listener._stopped = True
    peer = await house.connect()
    await peer.sees_the_end()
    assert house.listener.connections == 0


# Unix sockets.


async def test_a_unix_socket_serves_is_private_and_goes_with_the_server(build: Build, tmp_path: Path) -> None:
    path = tmp_path / "mld.sock"
    house = await build(UnixAddress(path))
    assert house.address == f"unix:{path}"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    peer = await house.connect()
    await peer.initialize()
    await peer.close()
    await house.listener.drain()
    await house.running
    assert not path.exists()


async def test_the_socket_of_a_dead_server_is_replaced(build: Build, tmp_path: Path) -> None:
    path = tmp_path / "mld.sock"
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(os.fspath(path))
    dead.close()
    house = await build(UnixAddress(path))
    peer = await house.connect()
    await peer.initialize()


async def test_the_socket_of_a_living_server_is_left_alone(
    build: Build, house: House, tmp_path: Path
) -> None:
    path = tmp_path / "mld.sock"
    first = await build(UnixAddress(path))
    second = MLDListener(UnixAddress(path), house.parts(SystemClock()), limits=QUICK)
    with pytest.raises(OperatorError, match="in use"):
        await second.run()
    peer = await first.connect()
    await peer.initialize()


async def test_the_socket_of_a_busy_server_is_left_alone_too(house: House, tmp_path: Path) -> None:
    path = tmp_path / "mld.sock"
    with socket.socket(socket.AF_UNIX) as busy, socket.socket(socket.AF_UNIX) as queued:
        busy.bind(os.fspath(path))
        busy.listen(0)
        queued.setblocking(False)
        queued.connect(os.fspath(path))
        second = MLDListener(UnixAddress(path), house.parts(SystemClock()), limits=QUICK)
        with pytest.raises(OperatorError, match="in use"):
            await second.run()


async def test_a_file_that_is_no_socket_is_never_removed(house: House, tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("data")
    listener = MLDListener(UnixAddress(path), house.parts(SystemClock()), limits=QUICK)
    with pytest.raises(OperatorError, match="Cannot listen on unix:"):
        await listener.run()
    assert path.read_text() == "data"


# Memory.


async def test_unread_lines_beyond_the_budget_wait_until_the_oldest_is_complete(build: Build) -> None:
    house = await build(read_bytes=40_000, line_limit=2**20)
    first, second = await house.connect(), await house.connect()
    await first.initialize("shardId-1")
    await second.initialize("shardId-2")
    head, filler = b'{"action":"processRecords","records":[', b" " * 30_000
    await first.send(head + filler)
    await second.send(head + filler)
    budget = house.listener._budget
    await house.holds(60_000)
    await second.send(filler)
    await first.send(b'],"millisBehindLatest":0}\n')
    await first.answered("processRecords")
    await second.send(b'],"millisBehindLatest":0}\n')
    await second.answered("processRecords")
    assert budget.held == 0


async def test_a_line_that_the_runtime_empties_is_counted_as_it_came(
    house: House, logged: list[dict[str, Any]]
) -> None:
    house.runtime.empties = True
    daemon = await house.connect()
    await daemon.initialize()
    head, tail = b'{"action":"processRecords","records":[', b'],"millisBehindLatest":0}'
    await daemon.send(head)
    await house.holds(len(head))
    await daemon.send(tail + b"\n")
    await daemon.answered("processRecords")
    assert house.listener._budget.held == 0
    assert [line["bytes"] for line in logged if line["event"] == "batch.done"] == [len(head) + len(tail)]


async def test_a_batch_of_many_megabytes_arrives_whole(build: Build) -> None:
    house = await build(line_limit=2**26, read_bytes=2**26)
    daemon = await house.connect()
    await daemon.initialize()
    await daemon.process(*range(1, 30_001))
    assert (await daemon.checkpointed())["sequenceNumber"] == "30000"
    await daemon.answered("processRecords")


async def test_a_long_line_leaves_no_memory_with_an_idle_connection(build: Build) -> None:
    house = await build(line_limit=2**26, read_bytes=2**26)
    daemon = await house.connect()
    await daemon.initialize()
    await daemon.process(1)
    await daemon.checkpointed()
    await daemon.answered("processRecords")
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        await daemon.send(b'{"action":"processRecords","records":[' + b" " * 2**23)
        await daemon.send(b'],"millisBehindLatest":0}\n')
        await daemon.answered("processRecords")
        after, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most - before > 2**23
    assert after - before < 2**20
