"""Standby workers: processes that have loaded the handler before they are needed, and replace those that die."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from support.serving import until
from support.virtual_loop import VirtualLoop
from workers.kit import START, children, delivery, named, running

from mldserver.base.clock import SystemClock
from mldserver.records import Shard
from mldserver.runtime.failure_policy import FailurePolicy
from mldserver.testing import VirtualClock
from mldserver.workers.runtime import WorkerRuntime
from mldserver.workers.standby import StandbyWorkers
from mldserver.workers.worker import Limits
from mldserver.workers.worker_process import WorkerProcess

HANDLER = """
import os
with open("imported", "a") as file:
    file.write(f"{os.getpid()}\\n")
schema = "pid BIGINT"
def process_record(record): return (os.getpid(),)
"""


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WorkerRuntime:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(HANDLER)
    return WorkerRuntime("mine", workers=1, policy=FailurePolicy(), limits=Limits(None, None))


def imported() -> list[int]:
    return list(map(int, Path("imported").read_text().split()))


async def test_a_dead_worker_is_replaced_by_a_process_that_had_loaded_the_handler_before(
    runtime: WorkerRuntime, logged: list[dict[str, Any]]
) -> None:
    async def started(generation: int) -> int:
        await until(lambda: len(named(logged, "worker.started")) == generation)
        return int(named(logged, "worker.started")[-1]["pid"])

    async with running(runtime), asyncio.timeout(800):
        await runtime.open(Shard("s"))
        for generation in range(1, 4):
            present = await started(generation)
            await until(lambda: bool(runtime._standby._ready))
            (standby,) = [process.pid for process in runtime._standby._ready]
            assert standby in imported()
            assert {standby, present} <= children(os.getpid())
            os.kill(present, signal.SIGKILL)
            assert await started(generation + 1) == standby
            outcome = await runtime.process(delivery("s", "x"))
            assert outcome.effects.rows is not None
            assert outcome.effects.rows["pid"].to_pylist() == [standby]


PACKAGE = {
    "mine.py": """
import os
from parts import early
schema = "pid BIGINT, here STRING, early STRING, late STRING, beside STRING"
def process_record(record):
    from parts.late import TEXT
    with open(os.path.join(os.path.dirname(early.__file__), "beside.txt")) as beside:
        return os.getpid(), "VERSION", early.TEXT, TEXT, beside.read()
""",
    "parts/__init__.py": "",
    "parts/early.py": "TEXT = 'VERSION'",
    "parts/late.py": "TEXT = 'VERSION'",
    "parts/beside.txt": "read from the disk",
}


def deploy(version: str) -> None:
    """Write the files; two versions must differ in length, as a cached file of the same second counts else."""
    Path("parts").mkdir(exist_ok=True)
    for name, text in PACKAGE.items():
        Path(name).write_text(text.replace("VERSION", version))


def undeploy() -> None:
    for name in PACKAGE:
        if name.endswith(".py"):
            Path(name).unlink()


def fail_with(error: str) -> None:
    Path("mine.py").write_text(f"def process_record(record): raise {error}")


@pytest.mark.parametrize(
    "change", ["other code", pytest.param("no Python", marks=pytest.mark.long), "no file"]
)
async def test_a_worker_that_is_replaced_runs_the_code_that_the_first_one_has_loaded(
    runtime: WorkerRuntime, logged: list[dict[str, Any]], change: str
) -> None:
    async def row() -> dict[str, Any]:
        outcome = await runtime.process(delivery("s", "x"))
        assert outcome.effects.rows is not None, outcome.effects.dead_letters
        (found,) = outcome.effects.rows.select(["pid", "here", "early", "late", "beside"]).to_pylist()
        return dict(found)

    deploy("one")
    one = dict.fromkeys(("here", "early", "late"), "one") | {"beside": "read from the disk"}
    async with running(runtime), asyncio.timeout(800):
        version = runtime.spec.version
        await runtime.open(Shard("s"))
        await until(lambda: bool(runtime._standby._ready))
        if change == "no file":
            undeploy()
        else:
            deploy("second" if change == "other code" else "(('")
        seen = set()
        for _ in range(3):
            before = await row()
            pid = before.pop("pid")
            assert before == one
            seen.add(pid)
            await until(lambda: bool(runtime._standby._ready))
            os.kill(pid, signal.SIGKILL)
        assert len(seen) == 3, "the standby had loaded the code before it was changed, the others after"
        assert not named(logged, "worker.not_started")
        if change != "other code":
            return
        await runtime.reload()
        assert runtime.spec.version != version
        for _ in range(3):
            deploy("thirdly")
            after = await row()
            pid = after.pop("pid")
            assert after == {**one, **dict.fromkeys(("here", "early", "late"), "second")}
            await until(lambda: bool(runtime._standby._ready))
            os.kill(pid, signal.SIGKILL)


async def test_dead_letters_name_the_version_that_ran(runtime: WorkerRuntime) -> None:
    fail_with("KeyError")
    async with running(runtime), asyncio.timeout(800):
        await runtime.open(Shard("s"))
        await until(lambda: bool(runtime._standby._ready))
        fail_with("IndexError")
        for _ in range(3):
            (letter,) = (await runtime.process(delivery("s", "x"))).effects.dead_letters
            assert (letter.error, letter.handler_version) == ("KeyError", runtime.spec.version)
            await until(lambda: bool(runtime._standby._ready))
            os.kill((await runtime._workers[0].process()).pid, signal.SIGKILL)


async def test_a_spare_that_dies_is_replaced_at_once(
    runtime: WorkerRuntime, logged: list[dict[str, Any]]
) -> None:
    async with running(runtime), asyncio.timeout(800):
        await runtime.open(Shard("s"))
        ready = runtime._standby._ready
        await until(lambda: bool(ready))
        dead = ready[0].pid
        os.kill(dead, signal.SIGKILL)
        await until(lambda: bool(ready) and ready[0].pid != dead)
    assert named(logged, "worker.not_started")[0]["what"] == (
        "A standby worker ended before it was used: killed by signal 9 (SIGKILL)."
    )


async def test_while_no_process_can_be_had_readiness_is_red() -> None:
    clock = VirtualClock()
    standby = StandbyWorkers(START, clock=clock)
    assert standby.trouble is None
    waiting = asyncio.create_task(standby.acquire())
    await clock.advance(29)
    assert standby.trouble is None
    await clock.advance(2)
    assert standby.trouble == "no worker process has loaded the handler for 31 s: see worker.not_started"
    waiting.cancel()
    await asyncio.wait({waiting})
    assert standby.trouble is None


class Loading:
    """A process as StandbyWorkers sees it, that loads the handler or hangs over it."""

    def __init__(self, *, hangs: bool) -> None:
        self.hangs = hangs
        self.is_open = True

    async def loaded(self) -> None:
        await asyncio.sleep(3600 if self.hangs else 0)

    def send(self, message: object) -> None:
        """Take note of nothing."""

    async def close(self) -> None:
        self.is_open = False


def test_a_process_that_hangs_over_the_handler_is_given_up(
    monkeypatch: pytest.MonkeyPatch, logged: list[dict[str, Any]]
) -> None:
    made: list[Loading] = []

    async def start(*_: Any) -> Loading:
        made.append(Loading(hangs=len(made) < 2))
        return made[-1]

    async def taken() -> Any:
        kept = StandbyWorkers(START, clock=SystemClock())
        running = asyncio.create_task(kept.run())
        process = await kept.acquire()
        running.cancel()
        await asyncio.wait({running})
        return process

    monkeypatch.setattr(WorkerProcess, "start", start)
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(lambda: 0.0)) as runner:
        assert runner.run(taken()) is made[2]
    assert [each.is_open for each in made[:3]] == [False, False, True]
    told = {each["what"] for each in named(logged, "worker.not_started")}
    assert told == {"Loading the handler took longer than 600 s."}
