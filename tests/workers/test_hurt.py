"""What handlers may do to their process, and what the server and all other shards notice of it: nothing."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import textwrap
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest
from support.processes import has_ended
from support.serving import quick, serving, until
from workers.kit import Book, children, named

from mldserver.server import EXIT_FORCED, Server
from mldserver.testing import FakeMLD, FakeStream, Habits, LocalEngine, VirtualClock

HANDLER = '''
"""A row for each record; {name} does harm."""
import asyncio, ctypes, os, signal, sys, threading, time
from mldserver import batches

schema = "id BIGINT NOT NULL"
windows = batches(max_rows=1000, max_age="1 hour")


def harm():
{harm}

def note(shard, what):
    with open({book!r}, "a") as book:
        book.write(f"{{os.getpid()}} {{shard}} {{what}}\\n")

def initialize(shard):
    note(shard.id, "open")

{define} process_record(record):
    event = record.json()
    note(record.shard_id, event["id"])
    if event["harm"] and not (event["harm"] == "once" and os.path.exists({flag!r})):
        open({flag!r}, "w").close()
        {call}
    return (event["id"],)
'''
RECORDS = 200


@pytest.fixture
def handler_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    monkeypatch.chdir(tmp_path)

    def write(harm: str, *, asynchronous: bool = False) -> str:
        text = HANDLER.format(
            name="one of them",
            harm=textwrap.indent(textwrap.dedent(harm).strip(), "    "),
            define="async def" if asynchronous else "def",
            flag=str(tmp_path / "done"),
            book=str(tmp_path / "book"),
            call="harm()",
        )
        (tmp_path / "harmful.py").write_text(text)
        return "harmful"

    return write


def stream(harm: str, *, shards: int = 2, records: int = RECORDS, at: int = 77) -> FakeStream:
    made = FakeStream(shards, seed=1, start_ms=1_800_000_000_000)
    for number in range(records):
        made.put(json.dumps({"id": number, "harm": harm if number == at else ""}).encode(), f"key-{number}")
    made.end()
    return made


async def play(server: Server, given: FakeStream, *, max_records: int = 20) -> None:
    """Play the stream to its end: one life of the daemon, no complaint of its."""
    daemon = FakeMLD(given, await server.listening(), habits=Habits(max_records=max_records))
    async with asyncio.timeout(800):
        await daemon.run()
        await server.finished()
    assert (daemon.violations, daemon.life, daemon.finished) == ([], 1, True)


def ids(out: Path) -> Counter[int]:
    files = [str(path) for path in out.glob("window=*/*.parquet")]
    return Counter(ds.dataset(files, format="parquet").to_table()["id"].to_pylist() if files else [])


def only_unanswered_batches_ran_twice(
    folder: Path, logged: list[dict[str, Any]], *, max_records: int = 20
) -> None:
    """Check what the handler noted; a process may also be replaced without having had anything in hand."""
    lost = Counter({event["pid"]: event["batches"] for event in named(logged, "worker.lost")})
    Book.read(folder / "book").only_unanswered_batches_ran_twice(lost, max_records=max_records)


HOURS_LATER = """
steady, steady_ns = time.monotonic, time.monotonic_ns
time.monotonic, time.monotonic_ns = lambda: steady() + 1e4, lambda: steady_ns() + 10**13
"""
"""What follows has taken hours by the worker's clock: no test need wait, and no slow machine is taken for one that hangs."""
HARMS = {
    "it exits": "os._exit(3)",
    "it kills itself": "os.kill(os.getpid(), signal.SIGKILL)",
    "it crashes in C": "ctypes.string_at(0)",
    "it closes every descriptor": "os.closerange(0, 4096)",
    "it stops": "os.kill(os.getpid(), signal.SIGSTOP)",
    "it loops for ever": HOURS_LATER + "while True: pass",
    "it blocks its event loop": HOURS_LATER + "while True: time.sleep(1)",
    "it eats memory": """
        eaten = []
        while True:
            eaten.append(bytearray(8 << 20))
            time.sleep(0.005)
    """,
}


KILL_AFTER = {"it stops": 5.0, "it loops for ever": 600.0, "it blocks its event loop": 600.0}
"""It is killed for them. Otherwise no worker is: on a slow machine all of them are silent now and then."""
IN_LONG = {"it exits", "it kills itself", "it crashes in C", "it loops for ever", "it stops"}
"""Ends that other tests bring about too, in another way."""


@pytest.mark.parametrize(
    "harm", [pytest.param(harm, marks=pytest.mark.long) if harm in IN_LONG else harm for harm in HARMS]
)
async def test_a_batch_whose_process_dies_once_is_done_by_the_next_and_nobody_notices(
    tmp_path: Path, handler_that: Callable[..., str], logged: list[dict[str, Any]], harm: str
) -> None:
    handler = handler_that(HARMS[harm], asynchronous="event loop" in harm)
    settings = quick(
        tmp_path / "out",
        handler,
        workers=1,
        worker_kill_after=KILL_AFTER.get(harm),
        worker_memory=400 << 20,
        handler_timeout=0.5,
    )
    async with serving(settings) as server:
        await play(server, stream("once"))
    assert ids(tmp_path / "out") == Counter(range(RECORDS))
    assert len(named(logged, "worker.lost", "worker.replaced")) >= 1
    assert named(logged, "connection.failed", "handler.dead_letter", "worker.failed") == []
    only_unanswered_batches_ran_twice(tmp_path, logged)


@pytest.mark.usefixtures("no_standby")
@pytest.mark.parametrize(
    "harm",
    [
        pytest.param("sys.exit(3)", id="of a record", marks=pytest.mark.long),
        pytest.param(
            "beside = threading.Thread(target=sys.exit, args=(3,)); beside.start(); beside.join()",
            id="of its own",
        ),
    ],
)
async def test_system_exit_in_a_thread_ends_no_process(
    tmp_path: Path, handler_that: Callable[..., str], logged: list[dict[str, Any]], harm: str
) -> None:
    async with serving(quick(tmp_path / "out", handler_that(harm), workers=1)) as server:
        await play(server, stream("once"))
    assert ids(tmp_path / "out") == Counter(range(RECORDS))
    assert named(logged, "worker.lost", "connection.failed", "handler.dead_letter") == []


async def test_while_a_call_of_one_shard_never_ends_the_shards_of_other_workers_go_on_to_their_ends(
    tmp_path: Path, handler_that: Callable[..., str], logged: list[dict[str, Any]]
) -> None:
    handler = handler_that(
        "os.write(os.open('pid', os.O_CREAT | os.O_WRONLY), b'%d' % os.getpid())\nwhile True: time.sleep(1)"
    )
    given, told = stream("once", at=0), tmp_path / "pid"

    def is_over(shard_id: str) -> bool:
        batches = [event for event in named(logged, "batch.done") if event["shard"] == shard_id]
        return sum(event["records"] for event in batches) == len(given.shards[shard_id].records)

    async with serving(quick(tmp_path / "out", handler, workers=2, worker_kill_after=None)) as server:
        playing = asyncio.create_task(play(server, given))
        async with asyncio.timeout(800):
            await until(lambda: told.exists() and any(map(is_over, given.shards)))
        assert not all(map(is_over, given.shards))
        assert named(logged, "worker.lost") == []
        os.kill(int(told.read_text()), signal.SIGKILL)
        await playing
    assert ids(tmp_path / "out") == Counter(range(RECORDS))
    assert len(named(logged, "worker.lost")) == 1


async def test_where_a_call_hangs_is_told_before_its_process_is_killed(
    tmp_path: Path, handler_that: Callable[..., str], logged: list[dict[str, Any]]
) -> None:
    handler = handler_that(HOURS_LATER + "while True: time.sleep(1)")
    async with serving(quick(tmp_path / "out", handler, workers=1, worker_kill_after=600.0)) as server:
        await play(server, stream("once"))
    (lost,) = named(logged, "worker.lost")
    assert lost["reason"] == "a call of the handler takes too long"
    assert "in harm" in lost["stacks"]
    assert ids(tmp_path / "out") == Counter(range(RECORDS))


async def test_a_record_that_always_ends_its_process_is_found_and_becomes_a_dead_letter(
    tmp_path: Path, handler_that: Callable[..., str], logged: list[dict[str, Any]]
) -> None:
    handler = handler_that("os._exit(3)")
    async with serving(quick(tmp_path / "out", handler, workers=1, attempts=2)) as server:
        await play(server, stream("always"), max_records=3)
        assert server.status().dead_letters == 1
    assert ids(tmp_path / "out") == Counter(number for number in range(RECORDS) if number != 77)
    (letter,) = named(logged, "handler.dead_letter")
    assert letter["what"] == "WorkerDied: the handler ended its process: exit code 3"
    assert named(logged, "connection.failed", "worker.failed") == []


@pytest.mark.long
async def test_under_halt_such_a_record_stops_its_shard(
    tmp_path: Path, handler_that: Callable[..., str], logged: list[dict[str, Any]]
) -> None:
    handler = handler_that("os._exit(3)")
    settings = quick(tmp_path / "out", handler, workers=1, attempts=1, on_failure="halt")
    async with serving(settings) as server:
        daemon = FakeMLD(stream("always", shards=1), await server.listening())
        async with asyncio.timeout(800):
            await daemon.run()
        assert not daemon.finished
    assert "WorkerDied" in named(logged, "handler.halted")[0]["what"]


@pytest.mark.usefixtures("no_standby")
async def test_a_flood_of_prints_is_cut_and_the_rest_counted(
    tmp_path: Path, handler_that: Callable[..., str], logged: list[dict[str, Any]]
) -> None:
    handler = handler_that("for number in range(50_000): print('line', number)")
    async with serving(quick(tmp_path / "out", handler, workers=1)) as server:
        await play(server, stream("once"))
        async with asyncio.timeout(800):
            await until(lambda: _lines(logged) == 50_000)
    assert ids(tmp_path / "out") == Counter(range(RECORDS))
    printed = named(logged, "handler.output")
    assert 0 < len(printed) < 5000


@pytest.mark.usefixtures("no_standby")
async def test_a_flood_past_python_is_slowed_and_does_not_keep_the_server_from_stopping(
    tmp_path: Path, handler_that: Callable[..., str], logged: list[dict[str, Any]]
) -> None:
    handler = handler_that(
        """
        def flood():
            while True:
                os.write(1, b"x\\n" * 5000)
        threading.Thread(target=flood, daemon=True).start()
        """
    )
    async with serving(quick(tmp_path / "out", handler, workers=1)) as server:
        await play(server, stream("once"))
        async with asyncio.timeout(800):
            await until(lambda: bool(named(logged, "log.lost")))
    assert ids(tmp_path / "out") == Counter(range(RECORDS))
    assert len(named(logged, "handler.output")) < 5000
    assert named(logged, "worker.lost") == []


async def test_a_process_that_gets_away_with_the_pipe_does_not_hide_the_workers_end(
    tmp_path: Path, handler_that: Callable[..., str], logged: list[dict[str, Any]]
) -> None:
    handler = handler_that(
        """
        import subprocess
        away = subprocess.Popen(["sleep", "60"], start_new_session=True)
        near = subprocess.Popen(["sleep", "60"])
        open("pids", "w").write(f"{away.pid} {near.pid}")
        os._exit(3)
        """
    )
    async with serving(quick(tmp_path / "out", handler, workers=1)) as server:
        await play(server, stream("once"))
    assert ids(tmp_path / "out") == Counter(range(RECORDS))
    assert [lost["reason"] for lost in named(logged, "worker.lost")] == ["exit code 3"]
    away, near = map(int, (tmp_path / "pids").read_text().split())
    os.kill(away, signal.SIGKILL)
    assert has_ended(near), "it was in the worker's group, and went with it"


def _lines(logged: list[dict[str, Any]]) -> int:
    """Return how many lines were printed, or counted as lost."""
    return sum(event["lines"] for event in named(logged, "log.lost")) + len(named(logged, "handler.output"))


@pytest.mark.long
async def test_a_worker_that_cannot_even_open_a_shard_turns_readiness_red(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[dict[str, Any]]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hopeless.py").write_text(
        "import os\ndef initialize(shard): os._exit(4)\ndef process_record(r): ...\n"
    )
    async with serving(quick(tmp_path / "out", "hopeless", workers=1), exit_code=EXIT_FORCED) as server:
        daemon = asyncio.create_task(FakeMLD(stream(""), await server.listening()).run())
        assert server.only.pipeline.parts is not None
        deaths = server.only.pipeline.parts.runtime._workers[0]._deaths  # type: ignore[attr-defined]  # see below
        deaths.base = deaths.cap = 0.05  # so that it takes no minutes
        async with asyncio.timeout(800):
            await until(lambda: bool(named(logged, "worker.failed")))
            await until(lambda: bool(named(logged, "server.unready")))
        assert not server.is_ready
        daemon.cancel()
        await asyncio.wait({daemon})
        server.force()
    assert "times in a row" in named(logged, "server.unready")[-1]["reason"]


async def test_workers_killed_again_and_again_under_load_lose_and_double_nothing(
    tmp_path: Path, handler_that: Callable[..., str], logged: list[dict[str, Any]], long: bool
) -> None:
    kills = 100 if long else 3
    handler = handler_that("pass")
    killed: list[int] = []
    dice = random.Random(7)

    def living(worker: int) -> int | None:
        pids = [event["pid"] for event in named(logged, "worker.started") if event["worker"] == worker]
        return pids[-1] if pids and pids[-1] not in killed else None

    def batches_of(server: Server, worker: int) -> int:
        plan = server.only.pipeline.parts.runtime._plan  # type: ignore[attr-defined]  # it is a runtime with workers
        return sum(plan.get(event["shard"]) == worker for event in named(logged, "batch.done"))

    async def kill(server: Server, worker: int, playing: asyncio.Task[None]) -> None:
        """Kill a worker that has completed some batches: one that dies before its first waits longer each time."""
        await until(lambda: playing.done() or living(worker) is not None)
        batches = batches_of(server, worker) + dice.randrange(1, 40)
        await until(lambda: playing.done() or batches_of(server, worker) >= batches)
        pid = living(worker)
        assert pid is not None
        killed.append(pid)
        os.kill(pid, signal.SIGKILL)

    records = 800 * kills
    async with serving(quick(tmp_path / "out", handler, workers=2)) as server:
        playing = asyncio.create_task(play(server, stream("", shards=4, records=records), max_records=10))
        for number in range(kills):
            await kill(server, number % 2, playing)
        await playing
        # The last may be killed when its work is done.
        await until(lambda: len(named(logged, "worker.lost")) == kills)
    assert named(logged, "connection.failed") == []
    # A record that is in hand alone whenever its process is killed, as often as it may be tried, is taken for the cause:
    # of a hundred kills, that may happen to one or two. It is a dead letter then, and nothing is lost.
    letters = named(logged, "handler.dead_letter")
    aside = Counter(int(event["partition_key"].removeprefix("key-")) for event in letters)
    assert ids(tmp_path / "out") + aside == Counter(range(records))
    assert len(letters) <= (3 if long else 0)
    assert all("killed by signal 9" in str(event) for event in letters)
    assert sorted(event["pid"] for event in named(logged, "worker.lost")) == sorted(killed)
    assert len(killed) == kills
    only_unanswered_batches_ran_twice(tmp_path, logged, max_records=10)
    assert named(logged, "worker.failed") == []


@pytest.mark.usefixtures("no_standby")
async def test_workers_live_in_the_machines_time_whatever_the_servers_clock_says(
    tmp_path: Path, handler_that: Callable[..., str], logged: list[dict[str, Any]]
) -> None:
    clock = VirtualClock()
    server = Server(
        quick(tmp_path / "out", handler_that("pass"), workers=1), engine=LocalEngine(), clock=clock
    )
    async with asyncio.TaskGroup() as group:
        life = group.create_task(server.run())
        await server.listening()
        async with asyncio.timeout(800):
            await until(lambda: bool(named(logged, "worker.started")))
        await clock.advance(121)
        server.force()
        while not life.done():
            await clock.advance(1)
            await asyncio.sleep(0.01)
    assert named(logged, "worker.lost") == []


async def test_no_process_is_left_behind(
    tmp_path: Path, handler_that: Callable[..., str], logged: list[dict[str, Any]]
) -> None:
    handler = handler_that("pass")
    async with serving(quick(tmp_path / "out", handler, workers=2)) as server:
        await play(server, stream(""))
        started = {event["pid"] for event in named(logged, "worker.started")}
        assert len(started) == 2
        assert started <= children(os.getpid())
    assert not started & children(os.getpid())
