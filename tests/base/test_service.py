"""What systemd is told, in the words of sd_notify(3); and which memory a process keeps."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mldserver.base.service import TELL_SECONDS, Service, ServiceReport, handling
from mldserver.testing import VirtualClock

pytestmark = pytest.mark.quick

EXTEND = "EXTEND_TIMEOUT_USEC=15000000"


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[socket.socket]:
    """Systemd's end."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.bind(str(tmp_path / "notify"))
        end.setblocking(False)
        yield end


def service(address: str) -> Service:
    return Service({"NOTIFY_SOCKET": address}, clock=VirtualClock())


def heard(systemd: socket.socket) -> list[list[str]]:
    """Return the datagrams that have come, as lines."""
    found = []
    with contextlib.suppress(BlockingIOError):
        while True:
            found.append(systemd.recv(2**20).decode().splitlines())
    return found


def test_a_start_a_life_and_a_stop_are_told_each_once() -> None:
    told = service("/nowhere")
    assert told.new_lines(ServiceReport("starting: handler")) == ["STATUS=starting: handler", EXTEND]
    assert told.new_lines(ServiceReport("starting: handler")) == [EXTEND]
    assert told.new_lines(ServiceReport("ready", ready=True)) == ["STATUS=ready", "READY=1"]
    assert told.new_lines(ServiceReport("ready", ready=True)) == []
    # systemd knows no way back from readiness: what is red later is in the text.
    assert told.new_lines(ServiceReport("Spark is not running")) == ["STATUS=Spark is not running"]
    assert told.new_lines(ServiceReport("ready", ready=True)) == ["STATUS=ready"]
    stopping = ServiceReport("stopping: SIGTERM", ready=True, stopping=True)
    assert told.new_lines(stopping) == ["STATUS=stopping: SIGTERM", "STOPPING=1", EXTEND]
    assert told.new_lines(stopping) == [EXTEND]


@pytest.mark.parametrize(
    ("text", "arrives"),
    [
        ("a shard's\nWATCHDOG=trigger", "a shard's WATCHDOG=trigger"),
        ("a shard's\x00\r\u2028\x85name", "a shard's    name"),
        ("a shard's\udc80name", "a shard's name"),
        ("a" * 300_000, "a" * 500),
    ],
)
async def test_a_reason_is_one_short_line_whatever_is_in_it_and_the_watchdog_hears_of_the_loop(
    text: str, arrives: str, systemd: socket.socket
) -> None:
    clock = VirtualClock()
    told = Service({"NOTIFY_SOCKET": systemd.getsockname()}, clock=clock)
    running = asyncio.create_task(told.run(lambda: ServiceReport(text, ready=True)))
    await clock.advance(0)
    assert heard(systemd) == [["WATCHDOG=1"], [f"STATUS={arrives}", "READY=1"]]
    running.cancel()
    await asyncio.wait({running})
    assert running.cancelled()


@pytest.mark.parametrize("abstract", [False, True])
async def test_it_is_told_once_a_second_whatever_kind_of_address_systemd_gives(
    abstract: bool, tmp_path: Path
) -> None:
    name = f"\0mldserver-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
    clock = VirtualClock()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(name)
        systemd.setblocking(False)
        told = Service({"NOTIFY_SOCKET": name.replace("\0", "@")}, clock=clock)
        stops = False
        running = asyncio.create_task(told.run(lambda: ServiceReport("ready", ready=True, stopping=stops)))
        for seconds in (0, TELL_SECONDS, TELL_SECONDS):
            await clock.advance(seconds)
        assert heard(systemd) == [["WATCHDOG=1"], ["STATUS=ready", "READY=1"], *[["WATCHDOG=1"]] * 2]
        stops = True
        running.cancel()
        await asyncio.wait({running})
        assert heard(systemd) == [["WATCHDOG=1"], ["STOPPING=1", EXTEND]]


async def test_where_systemd_names_no_socket_nothing_is_told() -> None:
    await Service({}, clock=VirtualClock()).run(lambda: pytest.fail("nobody asks"))


def test_a_reload_is_told_when_it_begins_and_when_it_is_done(systemd: socket.socket) -> None:
    told = service(systemd.getsockname())
    told.new_lines(ServiceReport("ready", ready=True))
    with contextlib.suppress(OSError), told.reloading():
        begun = heard(systemd)
        raise OSError("the disk is full")
    ((reloading, when),) = begun
    assert reloading == "RELOADING=1"
    assert when.startswith("MONOTONIC_USEC=")
    assert heard(systemd) == [["READY=1"]]


@pytest.mark.parametrize(
    "report", [ServiceReport("starting"), ServiceReport("stopping", ready=True, stopping=True)]
)
def test_a_reload_does_not_disturb_a_start_or_a_stop(report: ServiceReport, systemd: socket.socket) -> None:
    told = service(systemd.getsockname())
    told.new_lines(report)
    with told.reloading():
        pass
    assert heard(systemd) == []


def test_a_reload_that_a_stop_cuts_short_takes_nothing_back(systemd: socket.socket) -> None:
    told = service(systemd.getsockname())
    told.new_lines(ServiceReport("ready", ready=True))
    with told.reloading():
        assert len(heard(systemd)) == 1
        told.new_lines(ServiceReport("stopping", ready=True, stopping=True))
    assert heard(systemd) == []


async def test_signals_are_taken_in_the_main_thread_alone_and_only_meanwhile() -> None:
    former, came = signal.getsignal(signal.SIGUSR1), asyncio.Event()

    async def elsewhere() -> None:
        with handling({signal.SIGUSR1: came.set}):
            assert signal.getsignal(signal.SIGUSR1) == former

    await asyncio.to_thread(asyncio.run, elsewhere())
    with handling({signal.SIGUSR1: came.set}):
        os.kill(os.getpid(), signal.SIGUSR1)
        await came.wait()
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


def test_a_systemd_that_is_gone_disturbs_nobody(systemd: socket.socket) -> None:
    told = service(systemd.getsockname())
    told.new_lines(ServiceReport("ready", ready=True))
    systemd.close()
    with told.reloading():
        pass


AGAIN = """
import resource, sys
from mldserver.base.service import keep_memory
keep_memory(int(sys.argv[1]))
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    records = [bytes(1000) for _ in range(20_000)]
    del records
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
"""Take 20 MB three times, and tell how many pages were touched for the first time by the last."""
ENOUGH = 31 << 20


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="it is about glibc")
@pytest.mark.parametrize(
    ("size", "variables", "kept"),
    [(ENOUGH, {}, True), (0, {}, False), (ENOUGH, {"MALLOC_TRIM_THRESHOLD_": "131072"}, False)],
    ids=["kept", "not kept", "told otherwise"],
)
def test_memory_that_was_freed_is_kept_unless_the_user_has_told_the_c_library_otherwise(
    size: int, variables: dict[str, str], kept: bool
) -> None:
    command = [sys.executable, "-c", AGAIN, str(size)]
    found = subprocess.run(command, env=os.environ | variables, stdout=subprocess.PIPE, check=True)
    assert (int(found.stdout) < 1000) is kept, "of 5,000 pages"
