"""What the runtime with worker processes does where it cannot go on."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.serving import until
from workers.kit import delivery, running

from mldserver.errors import HandlerHalted, HandlerInvalid, HandlerLost, HandlerNotFound, InternalError
from mldserver.protocol.messages import Version
from mldserver.records import Shard
from mldserver.runtime.failure_policy import FailurePolicy, OnFailure
from mldserver.runtime.interface import BatchOutcome, BatchOutline, Delivery, MLDLine
from mldserver.workers.runtime import WorkerRuntime
from mldserver.workers.worker import Limits
from mldserver.workers.worker_process import Unopened, WorkerGone

HALT = FailurePolicy(attempts=2, retry_base_seconds=0, on_failure=OnFailure.HALT)
EMPTY = Delivery("s", MLDLine(b'{"action":"processRecords","records":[]}', Version.V2), 9_000, None)


@pytest.fixture
def runtime_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., WorkerRuntime]:
    monkeypatch.chdir(tmp_path)

    def make(
        text: str, kill_after_ms: int | None = None, *, workers: int = 1, handler: str = "mine"
    ) -> WorkerRuntime:
        (tmp_path / "mine.py").write_text(text)
        return WorkerRuntime(handler, workers=workers, policy=HALT, limits=Limits(kill_after_ms, None))

    return make


async def test_initialize_that_ends_its_process_stops_the_shard_under_halt(
    runtime_of: Callable[[str], WorkerRuntime], logged: list[dict[str, Any]]
) -> None:
    text = "import os\ndef initialize(shard): os._exit(7)\ndef process_record(record): ...\n"
    async with running(runtime_of(text)) as runtime:
        with pytest.raises(
            HandlerHalted, match=r"initialize failed for good: WorkerDied: .* exit code 7"
        ) as caught:
            await runtime.open(Shard("s"))
    assert caught.value.where["attempts"] == 2
    assert [event["level"] for event in logged if event["event"] == "handler.halted"] == ["critical"]


@pytest.mark.usefixtures("logged")
async def test_a_batch_that_no_process_survives_before_the_handler_is_called_costs_its_connection(
    runtime_of: Callable[[str], WorkerRuntime], monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = runtime_of("")

    async def killed(*_: Any, **_options: Any) -> None:
        raise WorkerGone("killed by signal 9 (SIGKILL)", alone=True)

    monkeypatch.setattr(runtime, "_with_process", killed)
    runtime._plan["s"] = 0
    with pytest.raises(HandlerLost, match="before the handler is called: killed by signal 9"):
        await runtime.process(EMPTY)
    assert runtime._workers[0].searches == 0


class Opened:
    """A process that does every batch."""

    ids = itertools.count(1)
    done = 0

    async def ask(self, *_: Any, **__: Any) -> BatchOutcome:
        return BatchOutcome(BatchOutline(0, 0, None, None, None, 0))


@pytest.mark.parametrize("suspected", [False, True], ids=["others may have been at work", "it was alone"])
async def test_initialize_that_ends_its_process_tells_nothing_of_the_batch_that_waits(
    runtime_of: Callable[[str], WorkerRuntime],
    monkeypatch: pytest.MonkeyPatch,
    logged: list[dict[str, Any]],
    *,
    suspected: bool,
) -> None:
    runtime = runtime_of("")
    (worker,) = runtime._workers
    runtime._plan["s"] = 0
    worker.suspects = {"s"} if suspected else set()
    deaths = itertools.count(1)

    async def process() -> Any:
        return Opened()

    async def ensure_open(*_: Any) -> None:
        if next(deaths) <= 50:
            raise Unopened("killed by signal 11 (SIGSEGV)", alone=False)

    monkeypatch.setattr(worker, "process", process)
    monkeypatch.setattr(runtime, "_ensure_open", ensure_open)
    if suspected:
        with pytest.raises(HandlerHalted, match="initialize failed for good: WorkerDied"):
            await runtime.process(EMPTY)
        assert [event["attempts"] for event in logged if event["event"] == "handler.halted"] == [2]
    else:
        assert (await runtime.process(EMPTY)).outline.records == 0
        assert next(deaths) == 52


@pytest.mark.usefixtures("logged")
async def test_a_handler_that_cannot_be_loaded_is_told_as_inline(
    runtime_of: Callable[[str], WorkerRuntime],
) -> None:
    with pytest.raises(HandlerInvalid, match="process_record"):
        await runtime_of("x = 1\n").load()
    with pytest.raises(HandlerNotFound):
        await WorkerRuntime("no.such.thing", workers=1, policy=HALT, limits=Limits(None, None)).load()


@pytest.mark.usefixtures("logged")
async def test_a_handler_whose_import_ends_the_process_is_told_with_its_last_words(
    runtime_of: Callable[[str], WorkerRuntime],
) -> None:
    text = "import os\nos.write(2, b'no licence\\n')\nos._exit(9)\n"
    with pytest.raises(HandlerInvalid, match="ended its process: exit code 9") as caught:
        await runtime_of(text).load()
    assert caught.value.where["traceback"] == "no licence"


async def test_a_first_process_that_is_killed_while_it_loads_is_started_again(
    runtime_of: Callable[[str], WorkerRuntime], logged: list[dict[str, Any]], tmp_path: Path
) -> None:
    runtime = runtime_of(killed_while_it_loads(times=2, counter=tmp_path / "starts"))
    assert list((await runtime.load()).hooks) == ["process_record"]
    await runtime.close()
    failed = [
        (each["what"], each["delay_seconds"]) for each in logged if each["event"] == "worker.not_started"
    ]
    assert failed == [("Loading the handler ended its process: killed by signal 9 (SIGKILL).", 0.2)] * 2


@pytest.mark.usefixtures("logged")
async def test_a_first_process_that_is_killed_again_and_again_ends_the_start(
    runtime_of: Callable[[str], WorkerRuntime], tmp_path: Path
) -> None:
    runtime = runtime_of(killed_while_it_loads(times=3, counter=tmp_path / "starts"))
    with pytest.raises(HandlerInvalid, match="ended its process: killed by signal 9"):
        await runtime.load()


def killed_while_it_loads(*, times: int, counter: Path) -> str:
    return f"""
import os, pathlib, signal
starts = pathlib.Path({str(counter)!r})
count = len(starts.read_text()) if starts.exists() else 0
starts.write_text("x" * (count + 1))
if count < {times}: os.kill(os.getpid(), signal.SIGKILL)
def process_record(record): ...
"""


@pytest.mark.usefixtures("logged")
async def test_a_shard_that_is_not_open_is_a_bug_of_the_caller(
    runtime_of: Callable[[str], WorkerRuntime],
) -> None:
    runtime = runtime_of("")
    with pytest.raises(InternalError, match="not open"):
        await runtime.process(EMPTY)
    await runtime.forget("s")


@pytest.mark.usefixtures("logged")
async def test_who_lets_a_shard_go_does_not_wait_until_its_worker_is_replaced(
    runtime_of: Callable[..., WorkerRuntime],
) -> None:
    """At the end of the server no process may come any more."""
    async with running(runtime_of("def process_record(record): ...\n")) as runtime, asyncio.timeout(800):
        await runtime.open(Shard("s"))
        runtime._workers[0]._retiring = True
        await runtime.forget("s")
        assert runtime._workers[0].opened == {}


@pytest.mark.usefixtures("logged")
async def test_a_shard_whose_opening_was_given_up_leaves_nothing_in_its_worker(
    runtime_of: Callable[..., WorkerRuntime], tmp_path: Path
) -> None:
    text = """
import pathlib, time
from amazon_kclpy.v3 import processor

class Processor(processor.RecordProcessorBase):
    def initialize(self, initialize_input):
        pathlib.Path("reached").touch()
        while not pathlib.Path("go").exists(): time.sleep(0.01)
    def process_records(self, process_records_input): ...
    def lease_lost(self, lease_lost_input): ...
    def shard_ended(self, shard_ended_input): ...
    def shutdown_requested(self, shutdown_requested_input): ...
"""

    def threads(pid: int) -> list[str]:
        return [each.read_text().strip() for each in Path(f"/proc/{pid}/task").glob("*/comm")]

    runtime = runtime_of(text, handler="mine:Processor")
    async with running(runtime), asyncio.timeout(800):
        opening = asyncio.create_task(runtime.open(Shard("s")))
        await until((tmp_path / "reached").exists)
        pid = (await runtime._workers[0].process()).pid
        before = len(threads(pid))
        opening.cancel()
        await asyncio.wait({opening})
        await runtime.forget("s")
        (tmp_path / "go").touch()
        await until(lambda: len(threads(pid)) < before)


async def test_a_call_that_hangs_when_its_batch_was_given_up_does_not_hold_up_other_shards_for_ever(
    runtime_of: Callable[..., WorkerRuntime], logged: list[dict[str, Any]], tmp_path: Path
) -> None:
    text = (
        "import time, pathlib\n"
        "def process_record(record):\n"
        "    if record.text() == 'hang':\n"
        "        pathlib.Path('hangs').touch()\n"
        "        now = time.monotonic_ns\n"
        "        time.monotonic_ns = lambda: now() + 10**13\n"  # for the worker it has hung for hours
        "        time.sleep(3600)\n"
    )
    async with running(runtime_of(text, 600_000)) as runtime, asyncio.timeout(800):
        for shard in "ab":
            await runtime.open(Shard(shard))
        hanging = asyncio.create_task(runtime.process(delivery("a", "hang")))
        await until((tmp_path / "hangs").exists)
        hanging.cancel()
        await asyncio.wait({hanging})
        outcome = await runtime.process(delivery("b", "fine"))
    assert outcome.outline.records == 1
    assert [event["reason"] for event in logged if event["event"] == "worker.lost"] == [
        "a call of the handler takes too long"
    ]


@pytest.mark.usefixtures("logged")
async def test_a_line_keeps_its_room_until_no_thread_reads_it_any_more_though_its_batch_was_given_up(
    runtime_of: Callable[..., WorkerRuntime], tmp_path: Path
) -> None:
    text = (
        "import time, pathlib\n"
        "blocking = True\n"
        "def process_record(record):\n"
        "    pathlib.Path('runs').touch()\n"
        "    while not pathlib.Path('go').exists(): time.sleep(0.01)\n"
    )
    async with running(runtime_of(text), standby=False) as runtime, asyncio.timeout(800):
        await runtime.open(Shard("a"))
        process = await runtime._workers[0].process()
        given_up = asyncio.create_task(runtime.process(delivery("a", "x", key="k" * 5000)))
        await until((tmp_path / "runs").exists)
        given_up.cancel()
        await asyncio.wait({given_up})
        # What is asked after the cancellation is answered after it was heard.
        await runtime.open(Shard("b"))
        assert len(process.arena.allocated) == 1
        (tmp_path / "go").touch()
        await until(lambda: not process.arena.allocated)


@pytest.mark.usefixtures("logged")
async def test_what_is_given_up_before_the_worker_has_heard_of_it_is_answered_all_the_same(
    runtime_of: Callable[..., WorkerRuntime],
) -> None:
    async with (
        running(runtime_of("async def process_record(record): ...\n"), standby=False) as runtime,
        asyncio.timeout(800),
    ):
        shards = [str(number) for number in range(20)]
        for shard in shards:
            await runtime.open(Shard(shard))
        process = await runtime._workers[0].process()
        os.kill(process.pid, signal.SIGSTOP)
        given_up = [asyncio.create_task(runtime.process(delivery(shard, "x"))) for shard in shards]
        await until(lambda: process.in_hand == len(shards))
        for task in given_up:
            task.cancel()
        await asyncio.wait(given_up)
        os.kill(process.pid, signal.SIGCONT)
        await until(lambda: process.in_hand == 0)
        assert (await runtime.process(delivery("0", "y"))).outline.records == 1


@pytest.mark.usefixtures("logged")
async def test_shards_are_spread_over_the_workers_and_stay_where_they_are(
    runtime_of: Callable[..., WorkerRuntime],
) -> None:
    text = "import os\nschema = 'pid BIGINT'\ndef process_record(record): return (os.getpid(),)\n"
    async with running(runtime_of(text, workers=2)) as runtime, asyncio.timeout(800):
        for shard in "abcd":
            await runtime.open(Shard(shard))
        homes: dict[str, set[int]] = {}
        for shard in "abcd" * 3:
            outcome = await runtime.process(delivery(shard, "x", "y"))
            assert outcome.effects.rows is not None
            homes.setdefault(shard, set()).update(outcome.effects.rows["pid"].to_pylist())
    assert all(len(pids) == 1 for pids in homes.values())
    assert sorted(Counter(pid for pids in homes.values() for pid in pids).values()) == [2, 2]


async def test_only_the_shards_of_a_worker_that_failed_go_elsewhere(
    runtime_of: Callable[..., WorkerRuntime],
) -> None:
    runtime = runtime_of("", workers=3)
    runtime._plan = {"a": 0, "b": 0, "c": 0, "d": 2, "e": 2, "guilty": 2}
    failed = runtime._workers[2]
    failed.opened |= {"d": 1, "e": 1, "guilty": 1}
    failed.suspects = {"guilty"}
    failed._deaths.failures = 8
    runtime._evade(failed)
    assert runtime._plan == {"a": 0, "b": 0, "c": 0, "d": 1, "e": 1, "guilty": 2}
    assert failed.opened == {"guilty": 1}, "what comes back there is opened anew"
