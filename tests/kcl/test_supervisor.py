"""The supervisor over real processes: small shell scripts stand in for the JVM, and say through FIFOs where they are."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.certificates import Certificates

from mldserver.base.backoff import Backoff
from mldserver.base.service import ServiceReport
from mldserver.base.tls import ServerTLS
from mldserver.config.kinds import TcpAddress, UnixAddress
from mldserver.errors import ConfigError, NotThereYet, OperatorError
from mldserver.kcl.lease_worker import LeaseWorker
from mldserver.kcl.log_filter import ENDS_ITSELF
from mldserver.kcl.supervisor import Supervisor, answers
from mldserver.testing import VirtualClock

Logged = list[dict[str, Any]]


class HastyClock:
    """Never waits; remembers for how long it was asked to."""

    def __init__(self, on_sleep: Callable[[float], None] = lambda seconds: None) -> None:
        self.slept: list[float] = []
        self._on_sleep = on_sleep

    def now_ms(self) -> int:
        return 0

    steady_ms = now_ms

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self._on_sleep(seconds)


async def always() -> bool:
    return True


class QuietWorker(LeaseWorker):
    """A worker whose name is free or not, and whose lock is released or not: each look takes the next, and the last for ever."""

    def __init__(self, *, free: tuple[bool, ...] = (True,), releases: tuple[bool, ...] = (True,)) -> None:
        super().__init__(
            {"applicationName": "app", "regionName": "r", "workerIdentifier": "me"}, HastyClock()
        )
        self.free, self.releases = list(free), list(releases)
        self.released = 0

    def claim(self) -> bool:
        return self.free.pop(0) if len(self.free) > 1 else self.free[0]

    async def watch_leader(self) -> None:
        await asyncio.Event().wait()

    async def release_lead(self) -> bool:
        self.released += 1
        return self.releases.pop(0) if len(self.releases) > 1 else self.releases[0]


class Server:
    """Whether a server answers: each look takes the next of these, and the last for ever."""

    def __init__(self, *there: bool) -> None:
        self.there = list(there)

    async def __call__(self) -> bool:
        return self.there.pop(0) if len(self.there) > 1 else self.there[0]


def supervisor(script: str, clock: Any, **changed: Any) -> Supervisor:
    told = {
        "environment": {"PATH": os.environ["PATH"]},
        "backoff": Backoff(base=1, cap=4),
        "grace": 30.0,
        "chance": lambda: 1.0,
        "server": TcpAddress("127.0.0.1", 7070),
        "answers": always,
        "worker": QuietWorker(),
        "start_fields": {"java": "17"},
        **changed,
    }
    return Supervisor(command=("sh", "-c", script), clock=clock, **told)


def events(logged: Logged, name: str) -> Logged:
    return [event for event in logged if event["event"] == name]


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    return path


async def test_a_daemon_that_exits_is_started_again_after_growing_waits(logged: Logged) -> None:
    clock = HastyClock(lambda seconds: watched.stop() if len(clock.slept) == 4 else None)
    watched = supervisor("exit 7", clock)
    assert await watched.run() == 0
    assert clock.slept == [1, 2, 4, 4]
    assert [event["start"] for event in events(logged, "kcl.starting")] == [1, 2, 3, 4]
    exits = events(logged, "kcl.exited")
    assert [(event["level"], event["exit_code"], event["delay_seconds"]) for event in exits] == [
        ("warning", 7, delay) for delay in (1, 2, 4, 4)
    ]


async def test_its_lines_become_log_events(logged: Logged) -> None:
    script = r"""printf 'MLD\tWARN\ta.B\tbeware\nplain\n\tat more\nMLD\tINFO\tx\tlast'; exit 1"""
    clock = HastyClock(lambda seconds: watched.stop())
    watched = supervisor(script, clock)
    await watched.run()
    assert [(e["level"], e["logger"], e["text"]) for e in events(logged, "kcl.log")] == [
        ("warning", "a.B", "beware"),
        ("warning", "jvm", "plain\n\tat more"),
        ("debug", "x", "last"),
    ]


async def test_stopping_sends_sigterm_and_waits_for_the_daemons_own_end(logged: Logged, fifo: Path) -> None:
    watched = supervisor(f"trap 'echo bye; exit 143' TERM; echo > {fifo}; sleep 100 & wait", VirtualClock())
    async with asyncio.TaskGroup() as tasks:
        code = tasks.create_task(watched.run())
        await asyncio.to_thread(fifo.read_text)
        watched.stop()
    assert code.result() == 0
    (exited,) = events(logged, "kcl.exited")
    assert (exited["level"], exited["exit_code"]) == ("info", 143)
    assert [event["text"] for event in events(logged, "kcl.log")] == ["bye"]


GAINED = "MLD\\tINFO\\tx.Scheduler\\tCreated new shardConsumer for : ShardInfo(x, shardId=shardId-0, checkpoint={SequenceNumber: 7, x"


@pytest.mark.parametrize(
    ("leased", "code", "slept"), [(True, 3, [3.0, 9.0]), (False, 0, [3.0])], ids=["leased", "not leased"]
)
async def test_a_daemon_that_outstays_its_grace_is_killed_and_one_without_a_lease_sooner(
    logged: Logged, fifo: Path, leased: bool, code: int, slept: list[float]
) -> None:
    clock = HastyClock()
    script = (
        f"trap '' TERM; printf '{GAINED if leased else ''}\\n'; echo > {fifo}; while :; do sleep 100; done"
    )
    watched = supervisor(script, clock, grace=12.0)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(watched.run())
        await asyncio.to_thread(fifo.read_text)
        while leased and not events(logged, "kcl.lease_gained"):  # noqa: ASYNC110  # the log is a list
            await asyncio.sleep(0)
        watched.stop()
    assert running.result() == code
    assert clock.slept == slept
    assert [event["exit_code"] for event in events(logged, "kcl.exited")] == [-signal.SIGKILL]


BRIDGE_ENDED = "MLD\\tINFO\\tx\\tChild process exited with value: 0"
NO_BRIDGE = "MLD\\tINFO\\tx\\tRecord processor was not initialized and will not have a child process, so"


@pytest.mark.parametrize(
    ("before", "after", "is_killed"),
    [
        ([GAINED], [BRIDGE_ENDED], True),
        ([GAINED, GAINED], [BRIDGE_ENDED, NO_BRIDGE], True),
        ([GAINED, GAINED, BRIDGE_ENDED], [BRIDGE_ENDED], True),
        ([GAINED, GAINED], [BRIDGE_ENDED], False),
    ],
    ids=["one", "one never started", "one ended before", "one still works"],
)
async def test_a_stopped_daemon_is_killed_once_its_last_bridge_has_ended_and_not_before(
    logged: Logged, fifo: Path, before: list[str], after: list[str], is_killed: bool
) -> None:
    said, says = ("\\n".join(lines) + "\\n" for lines in (before, after))
    script = (
        f"""trap "printf '{says}'" TERM; printf '{said}'; echo > {fifo}; while :; do sleep 100 & wait; done"""
    )
    clock = VirtualClock()
    watched = supervisor(script, clock)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(watched.run())
        await asyncio.to_thread(fifo.read_text)
        while len(events(logged, "kcl.log")) < len(before):  # noqa: ASYNC110  # the log is a list
            await asyncio.sleep(0)
        watched.stop()
        while len(events(logged, "kcl.log")) < len(before + after):  # noqa: ASYNC110  # the log is a list
            await asyncio.sleep(0)
        if not is_killed:
            await clock.advance(29.9)
            assert events(logged, "kcl.exited") == []
            watched.stop()
    assert running.result() == (0 if is_killed else 3)
    assert [event["exit_code"] for event in events(logged, "kcl.exited")] == [-signal.SIGKILL]


async def test_a_second_stop_does_not_wait_for_the_grace(fifo: Path) -> None:
    watched = supervisor(f"trap '' TERM; echo > {fifo}; while :; do sleep 100; done", VirtualClock())
    async with asyncio.TaskGroup() as tasks:
        code = tasks.create_task(watched.run())
        await asyncio.to_thread(fifo.read_text)
        watched.stop()
        watched.stop()
    assert code.result() == 3


async def test_stopping_cuts_the_wait_between_two_starts_short(logged: Logged) -> None:
    clock = VirtualClock()
    watched = supervisor("exit 1", clock)
    async with asyncio.TaskGroup() as tasks:
        code = tasks.create_task(watched.run())
        while not clock.sleepers:  # noqa: ASYNC110  # the clock counts sleepers, it has no event for them
            await asyncio.sleep(0)
        watched.stop()
    assert code.result() == 0
    assert len(events(logged, "kcl.starting")) == 1


async def test_stopped_before_it_began_it_starts_nothing(logged: Logged) -> None:
    watched = supervisor("exit 1", VirtualClock())
    watched.stop()
    assert await watched.run() == 0
    assert not logged


async def test_a_line_of_the_jvms_own_does_not_wait_for_the_next(logged: Logged, fifo: Path) -> None:
    # The script goes on only when the line was logged: `wait` would hang otherwise.
    watched = supervisor(f"echo plain; cat {fifo}; exit 1", HastyClock(lambda seconds: watched.stop()))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(watched.run())
        while not events(logged, "kcl.log"):  # noqa: ASYNC110  # the log is a list
            await asyncio.sleep(0)
        await asyncio.to_thread(fifo.write_text, "")
    assert [event["text"] for event in events(logged, "kcl.log")] == ["plain"]


async def test_children_that_outlive_the_daemon_are_killed(fifo: Path) -> None:
    watched = supervisor(f"exec 3> {fifo}; sleep 100 & exit 1", HastyClock(lambda seconds: watched.stop()))
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        await watched.run()
        # Not EAGAIN, which would mean that the child still has it open for writing.
        assert os.read(reader, 1) == b""
    finally:
        os.close(reader)


async def test_cancelling_leaves_no_daemon_behind(fifo: Path) -> None:
    watched = supervisor(f"exec sleep 100 > {fifo}", VirtualClock())
    task = asyncio.ensure_future(watched.run())
    reader = asyncio.ensure_future(asyncio.to_thread(fifo.open))
    with await reader as opened:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(opened.read) == ""


async def test_a_program_that_is_not_there_is_the_operators_error() -> None:
    watched = supervisor("", VirtualClock())
    watched.command = ("no-such-program",)
    with pytest.raises(OperatorError, match="no-such-program cannot be started"):
        await watched.run()


async def test_a_process_that_cannot_be_had_now_may_be_had_later(monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr("asyncio.create_subprocess_exec", full)
    with pytest.raises(NotThereYet, match="sh cannot be started: Cannot allocate memory"):
        await supervisor("", VirtualClock()).run()


async def test_nothing_is_started_before_the_server_answers_and_that_is_told_every_minute(
    logged: Logged,
) -> None:
    clock = VirtualClock()
    answering = Server(False)
    watched = supervisor("exit 1", clock, answers=answering)
    async with asyncio.TaskGroup() as tasks:
        code = tasks.create_task(watched.run())
        await clock.advance(61)
        waiting = events(logged, "kcl.waiting")
        assert [(event["level"], event["seconds"]) for event in waiting] == [("warning", 0), ("warning", 60)]
        assert waiting[0]["address"] == "127.0.0.1:7070"
        assert events(logged, "kcl.starting") == []
        answering.there = [True]
        # So soon after the server is there.
        await clock.advance(0.25)
        while not events(logged, "kcl.exited"):  # noqa: ASYNC110  # the log is a list
            await asyncio.sleep(0)
        watched.stop()
    assert code.result() == 0
    assert len(events(logged, "kcl.starting")) == 1


async def test_stopping_ends_the_wait_for_the_server(logged: Logged) -> None:
    clock = VirtualClock()
    watched = supervisor("exit 1", clock, answers=Server(False))
    async with asyncio.TaskGroup() as tasks:
        code = tasks.create_task(watched.run())
        await clock.advance(0.5)
        watched.stop()
    assert code.result() == 0
    assert events(logged, "kcl.starting") == []


async def test_systemd_is_told_what_it_does_and_that_it_is_ready_to_wait(logged: Logged, fifo: Path) -> None:
    clock = VirtualClock()
    answering = Server(False)
    watched = supervisor(f"echo > {fifo}; read line < {fifo}; exit 9", clock, answers=answering)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(watched.run())
        await clock.advance(1)
        assert watched.report() == ServiceReport("waiting for the server at 127.0.0.1:7070", ready=True)
        answering.there = [True]
        await clock.advance(0.25)
        await asyncio.to_thread(fifo.read_text)
        assert watched.report().text == "the daemon runs (start 1)"
        await asyncio.to_thread(fifo.write_text, "go\n")
        while not events(logged, "kcl.exited"):  # noqa: ASYNC110  # the log is a list
            await asyncio.sleep(0)
        assert watched.report().text == "the daemon ended with exit code 9; it starts again in 1.0 s"
        watched.stop()
        assert watched.report().stopping


FALLS = f"""trap '' TERM
printf 'MLD\\tERROR\\ta.B\\tbecause\\nMLD\\tINFO\\ta.MultiLangDaemon\\t{ENDS_ITSELF}\\nMLD\\tERROR\\ta.C\\tand so on\\n'
while :; do sleep 100; done"""
"""A daemon that ends itself, and waits for its grace."""


async def test_a_daemon_that_ends_itself_is_killed_at_once_when_its_server_is_gone(logged: Logged) -> None:
    clock = HastyClock(lambda seconds: watched.stop())
    watched = supervisor(FALLS, clock, answers=Server(True, False))
    assert await watched.run() == 0
    assert clock.slept == [1]  # until the next start, for nothing else
    (cut,) = events(logged, "kcl.cut_short")
    assert "was killed" in cut["did"]
    assert events(logged, "kcl.exited")[0]["exit_code"] == -signal.SIGKILL
    # What it says while it falls is no news.
    assert [event["text"] for event in events(logged, "kcl.log") if event["level"] != "debug"] == ["because"]


async def test_a_daemon_that_ends_itself_beside_a_server_that_answers_has_seconds_for_its_other_shards(
    logged: Logged,
) -> None:
    clock = HastyClock(lambda seconds: watched.stop() if len(clock.slept) == 2 else None)
    watched = supervisor(FALLS, clock)
    assert await watched.run() == 0
    assert clock.slept == [3, 1]
    assert "3 s" in events(logged, "kcl.cut_short")[0]["did"]


async def test_a_daemon_that_was_told_to_stop_has_its_grace_though_it_says_the_same(
    logged: Logged, fifo: Path
) -> None:
    ends = f"printf 'MLD\\tINFO\\ta\\t{ENDS_ITSELF}\\n'; exit 143"
    watched = supervisor(f'trap "{ends}" TERM; echo > {fifo}; sleep 100 & wait', VirtualClock())
    async with asyncio.TaskGroup() as tasks:
        code = tasks.create_task(watched.run())
        await asyncio.to_thread(fifo.read_text)
        watched.stop()
    assert code.result() == 0
    assert events(logged, "kcl.cut_short") == []


async def test_a_fault_that_comes_again_in_the_next_daemon_is_counted(logged: Logged) -> None:
    clock = HastyClock(lambda seconds: watched.stop() if len(clock.slept) == 3 else None)
    watched = supervisor(r"printf 'MLD\tERROR\ta.B\tattempt %s\n' $$; exit 1", clock)
    await watched.run()
    shown = [event for event in events(logged, "kcl.log") if event["level"] == "error"]
    assert len(shown) == 1


async def test_the_leaders_lock_is_released_before_the_first_start_and_after_each_death(
    logged: Logged,
) -> None:
    worker = QuietWorker()
    released: list[int] = []
    clock = HastyClock(
        lambda seconds: released.append(worker.released) or (len(released) == 2 and watched.stop())
    )
    watched = supervisor("exit 1", clock, worker=worker)
    assert await watched.run() == 0
    assert released == [2, 3]
    assert len(events(logged, "kcl.starting")) == 2


async def test_a_lock_that_could_not_be_released_is_tried_again_before_the_next_start() -> None:
    worker = QuietWorker(releases=(False, False, True))
    clock = HastyClock(lambda seconds: watched.stop())
    watched = supervisor("exit 1", clock, worker=worker)
    assert await watched.run() == 0
    assert worker.released == 3


async def test_a_stop_releases_the_lock_and_a_second_stop_does_not_wait_for_it(fifo: Path) -> None:
    began = asyncio.Event()

    class Slow(QuietWorker):
        async def release_lead(self) -> bool:
            if await super().release_lead() and self.released > 1:
                began.set()
                await asyncio.Event().wait()
            return True

    watched = supervisor(
        f"trap 'exit 143' TERM; echo > {fifo}; sleep 100 & wait", VirtualClock(), worker=Slow()
    )
    async with asyncio.TaskGroup() as tasks:
        code = tasks.create_task(watched.run())
        await asyncio.to_thread(fifo.read_text)
        watched.stop()
        await began.wait()
        watched.stop()
    assert code.result() == 3


async def test_nothing_is_started_while_another_process_is_the_same_worker(logged: Logged) -> None:
    clock = VirtualClock()
    worker = QuietWorker(free=(False,))
    watched = supervisor("exit 1", clock, worker=worker)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(watched.run())
        await clock.advance(61)
        waiting = events(logged, "kcl.waiting")
        assert [(event["worker"], event["seconds"]) for event in waiting] == [("me", 0), ("me", 60)]
        assert "workerIdentifier" in waiting[0]["advice"]
        assert watched.report().text.endswith("is the worker me too")
        assert events(logged, "kcl.starting") == []
        assert worker.released == 0
        worker.free = [True]
        await clock.advance(0.25)
        while not events(logged, "kcl.exited"):  # noqa: ASYNC110  # the log is a list
            await asyncio.sleep(0)
        watched.stop()


@pytest.mark.parametrize(
    ("end", "exit_code", "says"),
    [
        ("kill -KILL $$", -signal.SIGKILL, "killed by signal 9"),
        ("exit 3", 3, "exit code 3"),  # a JVM's that is out of memory
    ],
)
async def test_a_daemon_that_did_not_come_to_the_end_of_its_shutdown_is_a_fault(
    end: str, exit_code: int, says: str, logged: Logged, fifo: Path
) -> None:
    watched = supervisor(f"trap '{end}' TERM; echo > {fifo}; sleep 100 & wait", VirtualClock())
    async with asyncio.TaskGroup() as tasks:
        code = tasks.create_task(watched.run())
        await asyncio.to_thread(fifo.read_text)
        watched.stop()
    assert code.result() == 1
    (exited,) = events(logged, "kcl.exited")
    assert (exited["level"], exited["exit_code"]) == ("warning", exit_code)
    assert says in exited["what"]


async def test_a_daemon_that_is_stopped_while_it_is_cut_short_is_no_fault(logged: Logged) -> None:
    clock = HastyClock(lambda seconds: watched.stop())
    watched = supervisor(FALLS, clock)
    assert await watched.run() == 0
    assert clock.slept == [3]
    assert events(logged, "kcl.exited")[0]["exit_code"] == -signal.SIGKILL


async def test_a_server_whose_certificate_is_not_the_right_one_is_told_of_and_not_waited_for(
    tmp_path: Path,
) -> None:
    files = Certificates(tmp_path)
    shown = (files.ca, files.client, files.client)
    for certificate, right in ((files.server, True), (files.stranger, False)):
        server = await asyncio.start_server(
            lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=ServerTLS(certificate).context
        )
        async with server:
            address = TcpAddress(*server.sockets[0].getsockname())
            if right:
                assert await answers(address, shown)
            else:
                with pytest.raises(ConfigError, match="is not trusted: unable to get local issuer"):
                    await answers(address, shown)
    assert not await answers(address, shown), "nobody is there any more"
    files.ca.unlink()
    assert not await answers(address, shown), "its files are being exchanged"


async def test_whether_the_server_answers_is_asked_where_it_listens(tmp_path: Path) -> None:
    unix = UnixAddress(tmp_path / "socket")
    assert not await answers(unix)
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as listener:
        address = TcpAddress(*tcp.getsockname())
        listener.bind(str(unix.path))
        listener.listen()
        assert await answers(address)
        assert await answers(unix)
    assert not await answers(address)
    assert not await answers(unix)
