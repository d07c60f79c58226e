"""New code for workers that run: it takes over as a whole, or nothing changes."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.serving import until
from support.virtual_loop import VirtualLoop
from workers.kit import START, children, delivery, named, running

from mldserver import tumbling
from mldserver.errors import HandlerError, OperatorError
from mldserver.handler.inspection import load_spec
from mldserver.handler.spec import HandlerKind, HookSpec, TimerHook, parse_schema
from mldserver.records import Shard
from mldserver.runtime.failure_policy import FailurePolicy
from mldserver.runtime.interface import BatchOutcome
from mldserver.testing import VirtualClock
from mldserver.workers import reload
from mldserver.workers.open_stores import OpenStores
from mldserver.workers.runtime import WorkerRuntime
from mldserver.workers.standby import StandbyWorkers
from mldserver.workers.worker import Limits, WorkerSlot
from mldserver.workers.worker_process import WorkerGone, WorkerProcess

HANDLER = '''
"""{note}"""
import asyncio, os, time
from mldserver import tumbling

class Handler:
    schema = "version BIGINT, pid BIGINT, calls BIGINT"
    windows = tumbling("1 hour")
    version = {version}
    calls = 0

    def initialize(self, shard):
        with open("opened", "a") as file:
            file.write(f"{version} {{shard.id}}\\n")

    {define} process_record(self, record):
        {harm}
        self.calls += 1
        return {version}, os.getpid(), self.calls
'''


def write(version: int, *, harm: str = "pass", define: str = "def", **changes: str) -> None:
    text = HANDLER.format(note="." * version, version=version, harm=harm, define=define)
    for old, new in changes.items():
        text = text.replace(
            {"initialize": "        with open", "schema": "calls BIGINT", "windows": "1 hour"}[old], new
        )
    Path("mine.py").write_text(text)


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WorkerRuntime:
    monkeypatch.chdir(tmp_path)
    write(1)
    return WorkerRuntime("mine:Handler", workers=2, policy=FailurePolicy(), limits=Limits(None, None))


@pytest.fixture
def one(runtime: WorkerRuntime) -> WorkerRuntime:
    """With a worker alone."""
    del runtime._workers[1:]
    return runtime


def row(outcome: BatchOutcome) -> dict[str, int]:
    assert outcome.effects.rows is not None, outcome.effects.dead_letters
    (found,) = outcome.effects.rows.select(["version", "pid", "calls"]).to_pylist()
    return dict(found)


def opened() -> list[str]:
    return Path("opened").read_text().splitlines()


async def test_new_processes_take_over_with_all_shards_open_and_the_old_ones_are_gone(
    runtime: WorkerRuntime, logged: list[dict[str, Any]]
) -> None:
    async with running(runtime):
        for shard in ("a", "b", "c"):
            await runtime.open(Shard(shard))
        before = {shard: row(await runtime.process(delivery(shard, "x"))) for shard in ("a", "b", "c")}
        assert runtime.spec.version == "1"
        write(2)
        await runtime.reload()
        assert runtime.spec.version == "2"
        assert sorted(opened()[3:]) == ["2 a", "2 b", "2 c"], "once each, before anything was to be done"
        after = {shard: row(await runtime.process(delivery(shard, "x"))) for shard in ("a", "b", "c")}
        assert {each["version"] for each in after.values()} == {2}
        old, new = ({each["pid"] for each in rows.values()} for rows in (before, after))
        assert len(old) == len(new) == 2
        assert not old & children(os.getpid())
        assert len(opened()) == 6
        await until(lambda: bool(runtime._standby._ready))
        os.kill(after["a"]["pid"], signal.SIGKILL)
        assert row(await runtime.process(delivery("a", "x")))["version"] == 2, (
            "the standby worker is new, too"
        )
    assert [event["generation"] for event in named(logged, "worker.started")] == [1, 1, 2, 2, 3]
    assert len(named(logged, "worker.lost")) == 1


REFUSED = {
    "it is no Python": ({"harm": "("}, HandlerError, r"mine\.py:\d+: SyntaxError"),
    "it ends its process while it loads": (
        {"define": "os._exit(3)\n    def"},
        HandlerError,
        "Loading the handler ended its process: exit code 3",
    ),
    "it has other columns": (
        {"schema": "calls DOUBLE"},
        OperatorError,
        "the schema was .*`calls` BIGINT, and is .*`calls` DOUBLE.* `mldserver drain`",
    ),
    "it has other windows": (
        {"windows": "2 hours"},
        OperatorError,
        "windows was tumbling, 1 h .*, and is tumbling, 2 h",
    ),
    "its initialize ends its process": (
        {"initialize": "        os._exit(4)\n        with open"},
        HandlerError,
        "`initialize` of the new version ended its process: exit code 4",
    ),
    "its initialize keeps failing": (
        {"initialize": "        raise OSError\n        with open"},
        HandlerError,
        "`initialize` of the new version has taken longer than 1 s",
    ),
}


@pytest.mark.usefixtures("logged")
async def test_a_version_that_cannot_take_over_is_refused_and_the_old_one_goes_on_as_it_was(
    one: WorkerRuntime, monkeypatch: pytest.MonkeyPatch, long: bool
) -> None:
    # By day one that it cannot load, one that differs, and one that opens no shard; what says no to the others is below.
    refused = list(REFUSED.values())[:: 1 if long else 2]
    async with running(one, standby=False):
        await one.open(Shard("a"))
        before = row(await one.process(delivery("a", "x")))
        for number, (changes, error, says) in enumerate(refused, 2):
            write(number, **changes)
            monkeypatch.setattr(reload, "WAIT_SECONDS", 1.0 if "longer" in says else 100.0)
            with pytest.raises(error, match=says):
                await one.reload()
            after = row(await one.process(delivery("a", "x")))
            assert after == before | {"calls": number}, "the same process, and the shard's state"
        assert one.spec.version == "1"
        monkeypatch.setattr(reload, "WAIT_SECONDS", 100.0)
        write(10)
        await one.reload()
        assert row(await one.process(delivery("a", "x")))["version"] == 10


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"schema": parse_schema("n INT")}, "the schema was `n` BIGINT, and is `n` INT"),
        ({"schema": None}, "the schema was `n` BIGINT, and is no schema"),
        (
            {"windows": tumbling("2 hours")},
            "windows was tumbling, 1 h of arrival time, and is tumbling, 2 h of arrival time",
        ),
        ({"kind": HandlerKind.CLASS}, "the kind of handler was module, and is class"),
        ({"keyed": True}, "keyed state was not used, and is used"),
        (
            {"timers": {"alarm": TimerHook("alarm", is_async=False)}},
            "a callback of timers was absent, and is present",
        ),
        ({"after": ("payments",)}, "after was none, and is payments"),
        (
            {"windows": tumbling("1 hour", early="5 minutes")},
            "windows was tumbling, 1 h of arrival time, and is tumbling, 1 h of arrival time, computed early every 5 min",
        ),
        (
            {"hooks": {"on_window": HookSpec("on_window", is_async=False, takes_previous=True)}},
            "the result of the window before was not taken, and is taken",
        ),
        (
            {"window_columns": None},
            "window_columns was ('window_start', 'window_end'), and is None",
        ),
    ],
)
def test_each_part_of_a_handlers_shape_that_differs_is_told(change: dict[str, Any], told: str) -> None:
    before = replace(load_spec("handlers.raw"), schema=parse_schema("n BIGINT"), windows=tumbling("1 hour"))
    assert reload.differences(before, replace(before, version="2", concurrency=2)) == []
    assert reload.differences(before, replace(before, **change)) == [told]


class New:
    """A process of the new version, which hangs over whatever it is asked, or ends while it loads."""

    is_open = True

    async def open(self, *_: object) -> None:
        await asyncio.Event().wait()

    async def ended(self) -> None:
        await asyncio.Event().wait()

    async def loaded(self) -> None:
        raise WorkerGone("exit code 3", alone=True)

    async def close(self) -> None:
        self.is_open = False


def new_reload(standby: Any = None) -> reload.Reload:
    worker = cast("WorkerSlot", SimpleNamespace(number=0, has_open="a".__eq__))
    return reload.Reload(standby, [worker], {"a": Shard("a"), "b": Shard("b")}, OpenStores(), {}, set())


def test_an_initialize_that_never_comes_to_an_end_is_not_waited_for() -> None:
    reloading = new_reload()
    opening = reloading._open(reloading.workers[0], cast("WorkerProcess", New()))
    with (
        asyncio.Runner(loop_factory=lambda: VirtualLoop(lambda: 0.0)) as runner,
        pytest.raises(HandlerError, match="`initialize` of the new version has taken longer than 30 s"),
    ):
        runner.run(opening)


async def test_a_version_that_ends_its_process_while_it_loads_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    new = New()

    async def start(*_: Any) -> New:
        return new

    monkeypatch.setattr(WorkerProcess, "start", start)
    with pytest.raises(HandlerError, match="Loading the handler ended its process: exit code 3"):
        await new_reload(StandbyWorkers(START, clock=VirtualClock())).run(load_spec("handlers.raw"))
    assert not new.is_open


@pytest.mark.usefixtures("logged")
async def test_what_is_in_hand_is_finished_by_the_old_version_and_what_comes_meanwhile_waits_for_the_new(
    one: WorkerRuntime,
) -> None:
    harm = "open('begun', 'w').close()\n        while not os.path.exists('go'): await asyncio.sleep(0.01)"
    write(1, harm=harm, define="async def")
    async with running(one, standby=False), asyncio.TaskGroup() as group:
        await one.open(Shard("a"))
        first = group.create_task(one.process(delivery("a", "x")))
        await until(Path("begun").exists)
        write(2)
        reloading = group.create_task(one.reload())
        await until(lambda: bool(one._workers[0].gate._waiting))
        second = group.create_task(one.process(delivery("a", "x")))
        with pytest.raises(OperatorError, match="Another reload is under way"):
            await one.reload()
        os.close(os.open("go", os.O_CREAT))
        await reloading
        assert (row(await first)["version"], row(await second)["version"]) == (1, 2)


@pytest.mark.long
@pytest.mark.usefixtures("logged")
async def test_a_call_that_takes_too_long_keeps_the_old_version(
    one: WorkerRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reload, "WAIT_SECONDS", 0.1)
    write(1, harm="open('begun', 'w').close()\n        while not os.path.exists('go'): time.sleep(0.01)")
    async with running(one, standby=False), asyncio.TaskGroup() as group:
        await one.open(Shard("a"))
        first = group.create_task(one.process(delivery("a", "x")))
        await until(Path("begun").exists)
        write(2)
        with pytest.raises(OperatorError, match=r"Worker 0 has not finished .* Nothing has changed"):
            await one.reload()
        os.close(os.open("go", os.O_CREAT))
        assert row(await first)["version"] == 1
        assert row(await one.process(delivery("a", "x")))["version"] == 1


@pytest.mark.long
@pytest.mark.usefixtures("logged")
async def test_a_shard_that_is_let_go_of_meanwhile_is_not_open_in_the_new_process(
    one: WorkerRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(one, standby=False):
        await one.open(Shard("a"))
        take = reload.Reload._open

        async def open_(self: reload.Reload, worker: Any, process: Any) -> set[str]:
            names = await take(self, worker, process)
            await one.forget("a")
            return names

        monkeypatch.setattr(reload.Reload, "_open", open_)
        write(2)
        await one.reload()
        assert one._workers[0].opened == {}
        await one.open(Shard("a"))
        assert opened() == ["1 a", "2 a", "2 a"]
        assert row(await one.process(delivery("a", "x"))) | {"pid": 0} == {
            "version": 2,
            "pid": 0,
            "calls": 1,
        }


@pytest.mark.long
@pytest.mark.usefixtures("logged")
async def test_a_worker_that_is_dead_at_that_moment_begins_again_with_the_new_version(
    one: WorkerRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(one, standby=False):
        await one.open(Shard("a"))
        await until(lambda: all(worker.present for worker in one._workers))
        take = reload.Reload._open

        async def open_(self: reload.Reload, worker: Any, process: Any) -> set[str]:
            names = await take(self, worker, process)
            worker._process.is_open = False  # as when it has hung up
            worker._process.kill()
            return names

        monkeypatch.setattr(reload.Reload, "_open", open_)
        write(2)
        await one.reload()
        assert row(await one.process(delivery("a", "x")))["version"] == 2


@pytest.mark.usefixtures("logged")
async def test_a_record_processor_that_has_not_checkpointed_keeps_the_old_version(
    one: WorkerRuntime,
) -> None:
    async with running(one, standby=False):
        await one.open(Shard("a"))
        one._owing.add("a")
        with pytest.raises(OperatorError, match=r"have not checkpointed all that they were given: a\."):
            await one.reload()


@pytest.mark.long
async def test_workers_that_die_of_the_old_version_again_and_again_are_mended_by_a_new_one(
    one: WorkerRuntime, logged: list[dict[str, Any]]
) -> None:
    write(1, harm="os._exit(3)")
    async with running(one):
        await one.open(Shard("a"))
        working = asyncio.create_task(one.process(delivery("a", "x")))
        await until(lambda: len(named(logged, "worker.lost")) > 1)
        write(2)
        await one.reload()
        await working
        assert row(await one.process(delivery("a", "x")))["version"] == 2


def code_of(version: int) -> dict[str, tuple[str, bytes]]:
    """Return the handler's module as it is in an archive of a version: its file is none."""
    text = HANDLER.format(note="", version=version, harm="pass", define="def")
    return {"mine": (str(Path("code.zip/mine.py").absolute()), text.encode())}


@pytest.mark.usefixtures("logged")
async def test_given_code_takes_over_whatever_is_on_the_path_and_later_processes_run_it_too(
    one: WorkerRuntime,
) -> None:
    async with running(one):
        await one.open(Shard("a"))
        write(3)
        await one.reload(code=code_of(2))
        found = row(await one.process(delivery("a", "x")))
        assert (one.spec.version, found["version"]) == ("2", 2)
        assert one.spec.code == code_of(2)
        os.kill(found["pid"], signal.SIGKILL)
        assert row(await one.process(delivery("a", "x")))["version"] == 2
        await one.reload()
        assert one.spec.version == "3", "without code: what is on the path"


@pytest.mark.usefixtures("logged")
async def test_a_runtime_that_starts_with_given_code_never_loads_what_is_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runtime = WorkerRuntime(
        "mine:Handler", workers=1, policy=FailurePolicy(), limits=Limits(None, None), code=code_of(2)
    )
    write(1, harm="(")
    async with running(runtime):
        await runtime.open(Shard("a"))
        assert runtime.spec.code == code_of(2)
        assert row(await runtime.process(delivery("a", "x")))["version"] == 2
