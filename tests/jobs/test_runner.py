"""From a cut window to a published one, over a ledger, a folder and an engine that fail on purpose."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from coordinator.pipeline import Crash, Pipeline, named

from mldserver.config.settings import WindowSettings
from mldserver.engine_jobs import WindowJob, WindowResult
from mldserver.errors import WITHHELD, DriverLost, LedgerError, WindowFailed
from mldserver.ledger.contract import WindowState
from mldserver.output.layout import writer_tag
from mldserver.testing import LocalEngine
from mldserver.windows import TimeWindows, time_window_id

pytestmark = pytest.mark.quick

W = [time_window_id(start) for start in range(0, 40_000, 10_000)]


def make(
    tmp_path: Path,
    *,
    fail: Callable[[WindowJob], Exception | None] | None = None,
    engine: Callable[[], LocalEngine] | None = None,
    recompute: bool = False,
    longest_wait: float = 60.0,
    **policy: Any,
) -> Pipeline:
    values = {"attempts": 3, "concurrency": 1} | policy
    return Pipeline(
        tmp_path,
        spec=TimeWindows(10_000),
        policy=WindowSettings(**{f"window_{name}": value for name, value in values.items()}),
        retry_seconds=(1.0, longest_wait),
        engine=engine or (lambda: LocalEngine(fail=fail)),
        recompute=recompute,
    )


async def three_windows(pipeline: Pipeline) -> None:
    """Cut three windows, with two rows each."""
    session = await pipeline.open("a")
    records = [(n, 5000 * n) for n in range(6)]
    await pipeline.give(session, [*((n + 1, ms) for n, ms in records), (9, 30_000)])
    for _ in range(2):
        await pipeline.cycle()


async def test_windows_are_computed_and_published_oldest_first(
    tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    pipeline = make(tmp_path)
    async with pipeline.life():
        await three_windows(pipeline)
        assert pipeline.published() == {W[0]: [1, 2], W[1]: [3, 4], W[2]: [5, 6]}
        assert [job.window.id for job in pipeline.engine.jobs] == W[:3]
        assert (pipeline.runner.published, len(pipeline.runner.unfinished)) == (3, 0)
        await pipeline.runner.idle()
        assert len(pipeline.private_files()) == 1  # the window that is still open
    done = named(logged, "window.done")
    assert [event["window"] for event in done] == W[:3]
    assert (done[0]["rows_in"], done[0]["rows_out"], done[0]["attempt"], done[0]["files"]) == (2, 2, 1, 1)
    assert done[0]["path"] == str(tmp_path / f"window={W[0]}")


async def test_an_engine_gets_the_windows_files_bounds_and_sizes(tmp_path: Path) -> None:
    pipeline = make(tmp_path)
    async with pipeline.life():
        await three_windows(pipeline)
        job = pipeline.engine.jobs[1]
        assert (job.attempt, job.rows, job.window.revision, job.window.pipeline) == (1, 2, 1, "test")
        assert len(job.segments) == 1
        assert job.bytes > 0
        assert job.staging == str(
            tmp_path
            / "_mldserver"
            / "staging"
            / W[1]
            / f"0001-{writer_tag(pipeline.state().ledger_id, 'one')}"
        )


async def test_a_job_that_fails_is_tried_again_with_growing_delays_and_leaves_nothing(
    tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    failures = [WindowFailed("no memory"), DriverLost("gone")]
    pipeline = make(tmp_path, fail=lambda job: failures.pop() if failures else None, attempts=5)
    async with pipeline.life():
        await three_windows(pipeline)
        await pipeline.clock.advance(10)
        assert pipeline.published()[W[0]] == [1, 2]
        assert list((tmp_path / f"window={W[0]}").iterdir()) == [
            tmp_path / f"window={W[0]}" / "part-00000-0003.parquet"
        ]
        assert [job.attempt for job in pipeline.engine.jobs if job.window.id == W[0]] == [1, 2, 3]
    told = named(logged, "window.failed")
    assert [(event["error"], event["attempt"]) for event in told] == [("DriverLost", 1), ("WindowFailed", 2)]
    assert 0.5 <= told[0]["delay_seconds"] < 1 <= told[1]["delay_seconds"] < 2
    assert named(logged, "window.done")[0]["attempt"] == 3


async def test_no_delay_is_longer_than_the_cap(tmp_path: Path, logged: list[dict[str, Any]]) -> None:
    failing = [True]
    pipeline = make(
        tmp_path, fail=lambda job: WindowFailed("no") if failing else None, attempts=99, longest_wait=4
    )
    async with pipeline.life():
        await three_windows(pipeline)
        await pipeline.clock.advance(60)
        failing.clear()
        await pipeline.clock.advance(10)
        assert len(pipeline.published()) >= 3
    assert max(event["delay_seconds"] for event in named(logged, "window.failed")) <= 4


async def test_under_halt_the_others_wait_until_the_window_succeeds(
    tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    failing = {W[0]}
    pipeline = make(tmp_path, fail=lambda job: WindowFailed("no") if job.window.id in failing else None)
    async with pipeline.life():
        await three_windows(pipeline)
        await pipeline.clock.advance(120)
        assert pipeline.published() == {}
        assert pipeline.coordinator.status().windows_halted == (W[0],)
        assert len(pipeline.runner.unfinished) >= 3
        halted = named(logged, "window.halted")
        assert [(event["window"], event["attempts"]) for event in halted] == [(W[0], 3)]
        failing.clear()
        await pipeline.clock.advance(61)
        assert pipeline.coordinator.status().windows_halted == ()
        assert list(pipeline.published())[:3] == W[:3]


async def halted(pipeline: Pipeline) -> None:
    """Let the first window halt the others."""
    await three_windows(pipeline)
    await pipeline.clock.advance(30)
    assert set(pipeline.runner.halted) == {W[0]}
    assert pipeline.published() == {}


async def decided(pipeline: Pipeline, decision: Any) -> None:
    """Decide as a tool beside the server does, and let a cycle pass; no delay has run out by then."""
    assert pipeline.ledger.store.decide(W[0], decision, now_ms=pipeline.clock.now_ms())
    await pipeline.clock.advance(3)


async def test_a_halted_windows_error_is_in_the_ledger_and_the_event_names_the_command(
    tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    failing = [True]
    pipeline = make(tmp_path, fail=lambda job: WindowFailed("no memory") if failing else None)
    async with pipeline.life():
        await halted(pipeline)
        entry = pipeline.state().windows[W[0]]
        assert (entry.is_halted, entry.error) == (True, "no memory")
        failing.clear()
        await pipeline.clock.advance(61)
        (entry,) = pipeline.ledger.store.find((W[0],))
        assert (entry.state, entry.error) == (WindowState.PUBLISHED, None)
    (told,) = named(logged, "window.halted")
    assert f"`mldserver windows retry {W[0]}` tries it at once, `set-aside` or `skip`" in told["advice"]
    assert named(logged, "window.decided") == [], "nobody has"


async def test_a_halted_window_that_succeeds_by_itself_is_nobodys_decision(
    tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    failing, looked = [True], []

    def look(name: str, after: bool) -> None:
        """Let the server see what the ledger holds right after the window is published, before anything follows."""
        if name == "published" and after and W[0] in pipeline.runner.halted:
            looked.append(name)
            pipeline.runner.apply_decisions(pipeline.ledger.store.peek())

    pipeline = make(tmp_path, fail=lambda job: WindowFailed("no") if failing else None)
    pipeline.faults.hook = look
    async with pipeline.life():
        await halted(pipeline)
        failing.clear()
        await pipeline.clock.advance(61)
        assert list(pipeline.published())[:3] == W[:3]
    assert looked
    assert named(logged, "window.decided") == []


async def test_a_traceback_is_logged_once_however_often_the_window_fails_with_it(
    tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    stages = itertools.count()
    other: list[str] = []

    def fail(job: WindowJob) -> Exception:
        return WindowFailed("no", traceback=f"File my.py\nno memory in stage {next(stages)}{other}")

    pipeline = make(tmp_path, fail=fail)
    async with pipeline.life():
        await halted(pipeline)
        await pipeline.clock.advance(200)
        other.append("no disk")
        await pipeline.clock.advance(130)
    told = named(logged, "window.failed", "window.halted")
    assert [event["event"] for event in told[:3]] == ["window.failed", "window.failed", "window.halted"]
    tracebacks = [event["traceback"] for event in told if "traceback" in event]
    assert len(told) > 6
    assert len(tracebacks) == 2
    assert tracebacks[0].endswith("stage 0[]")
    assert tracebacks[1].endswith("['no disk']")


async def test_a_halted_window_that_is_retried_begins_at_once(
    tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    failing = [True]
    pipeline = make(tmp_path, fail=lambda job: WindowFailed("no") if failing else None)
    async with pipeline.life():
        await halted(pipeline)
        tries = len(pipeline.engine.jobs)
        await decided(pipeline, "retry")
        assert len(pipeline.engine.jobs) == tries + 1
        assert pipeline.state().windows[W[0]].is_halted, "it has failed again"
        failing.clear()
        await decided(pipeline, "retry")
        assert list(pipeline.published())[:3] == W[:3]
        assert pipeline.runner.halted == {}
    assert [event["decision"] for event in named(logged, "window.decided")] == ["retry", "retry"]
    assert len(named(logged, "window.halted")) == 1


async def test_a_retry_that_comes_while_a_try_runs_is_not_lost(tmp_path: Path) -> None:
    failing, slow = [True], LocalEngine(fail=lambda job: WindowFailed("no") if failing else None)
    pipeline = make(tmp_path, engine=lambda: slow)
    async with pipeline.life():
        await halted(pipeline)
        slow.clock, slow.delay_seconds, tries = pipeline.clock, 10, len(slow.jobs)
        while len(slow.jobs) == tries:
            await pipeline.clock.advance(1)
        assert pipeline.ledger.store.decide(W[0], "retry", now_ms=0)
        await pipeline.clock.advance(11)
        assert len(slow.jobs) == tries + 2, "it has failed, and the next has begun without a delay"
        failing.clear()
        await pipeline.clock.advance(31)
        assert W[0] in pipeline.published()


@pytest.mark.parametrize(
    ("decision", "state"), [("set_aside", WindowState.SET_ASIDE), ("skip", WindowState.PUBLISHED)]
)
async def test_a_halted_window_that_is_set_aside_or_skipped_lets_the_others_go_on(
    tmp_path: Path, logged: list[dict[str, Any]], decision: str, state: WindowState
) -> None:
    pipeline = make(tmp_path, fail=lambda job: WindowFailed("no") if job.window.id == W[0] else None)
    async with pipeline.life():
        await halted(pipeline)
        tries = sum(job.window.id == W[0] for job in pipeline.engine.jobs)
        await decided(pipeline, decision)
        assert list(pipeline.published())[:2] == W[1:3]
        assert pipeline.runner.halted == {}
        await pipeline.clock.advance(120)
        assert sum(job.window.id == W[0] for job in pipeline.engine.jobs) == tries
        assert pipeline.state().windows[W[0]].state is state
    assert [event["decision"] for event in named(logged, "window.decided")] == [decision]


async def test_a_window_that_is_skipped_stays_as_it_is_whatever_late_rows_it_had_or_gets(
    tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    failing = [True]
    pipeline = make(tmp_path, fail=lambda job: WindowFailed("no") if failing else None, recompute=True)
    async with pipeline.life():
        await halted(pipeline)
        session = await pipeline.open("b")
        await pipeline.give(session, [(10, 2_000)])
        await pipeline.cycle()
        assert len(pipeline.state().windows[W[0]].pending) == 1
        failing.clear()
        await decided(pipeline, "skip")
        await pipeline.give(session, [(11, 3_000)])
        await pipeline.clock.advance(60)  # much longer than late rows are gathered
        assert list(pipeline.published())[:2] == W[1:3]
        assert W[0] not in pipeline.published()
        assert pipeline.late() == [11]
        assert pipeline.state().windows[W[0]].is_skipped
    kinds = [event["kind"] for event in named(logged, "window.late")]
    assert kinds == ["recompute", "late"]


async def test_a_ledger_that_does_not_keep_the_error_is_told_with_the_next_failure(tmp_path: Path) -> None:
    outages = [LedgerError("busy")]

    def fail(name: str, after: bool) -> None:
        if name == "halt" and not after and outages:
            raise outages.pop()

    pipeline = make(tmp_path, fail=lambda job: WindowFailed("no"))
    pipeline.faults.hook = fail
    async with pipeline.life():
        await halted(pipeline)
        assert pipeline.state().windows[W[0]].error is None
        tries = len(pipeline.engine.jobs)
        await pipeline.clock.advance(61)
        assert len(pipeline.engine.jobs) == tries + 1
        assert pipeline.state().windows[W[0]].error == "no"


async def test_side_by_side_a_halted_window_stops_those_that_have_not_begun(tmp_path: Path) -> None:
    failing = set(W)
    pipeline = make(
        tmp_path, fail=lambda job: WindowFailed("no") if job.window.id in failing else None, concurrency=2
    )
    async with pipeline.life():
        await three_windows(pipeline)
        await pipeline.clock.advance(30)
        assert set(pipeline.runner.halted) == {W[0], W[1]}
        failing.discard(W[0])
        await pipeline.clock.advance(61)
        assert set(pipeline.runner.halted) == {W[1]}
        assert pipeline.published() == {W[0]: [1, 2]}
        failing.clear()
        await pipeline.clock.advance(61)
        assert pipeline.runner.halted == {}
        assert list(pipeline.published())[:3] == W[:3]


async def test_under_dead_letter_the_window_is_set_aside_with_its_segments_and_the_others_go_on(
    tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    pipeline = make(
        tmp_path,
        fail=lambda job: WindowFailed("never") if job.window.id == W[0] else None,
        on_failure="dead_letter",
    )
    async with pipeline.life():
        await three_windows(pipeline)
        await pipeline.clock.advance(30)
        assert list(pipeline.published())[:2] == W[1:3]
        assert (pipeline.runner.set_aside, pipeline.runner.halted) == (1, {})
    assert [event["attempts"] for event in named(logged, "window.set_aside")] == [3]
    entry = pipeline.state().windows[W[0]]
    assert (entry.state, entry.error) == (WindowState.SET_ASIDE, "never")
    assert (tmp_path / entry.segments[0].path).exists()
    async with pipeline.life():  # a start neither computes it nor deletes its rows
        await pipeline.cycle()
        assert W[0] not in [job.window.id for job in pipeline.engine.jobs]
        assert (tmp_path / entry.segments[0].path).exists()


async def test_a_ledger_that_refuses_to_set_aside_is_asked_again_and_nobody_waits_for_ever(
    tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    refused: list[str] = []

    def refuse(name: str, after: bool) -> None:
        if name == "set_aside" and not after and not refused:
            refused.append(name)
            raise LedgerError("disk full")

    pipeline = make(
        tmp_path,
        fail=lambda job: WindowFailed("never") if job.window.id == W[0] else None,
        on_failure="dead_letter",
    )
    pipeline.faults.hook = refuse
    async with pipeline.life():
        await three_windows(pipeline)
        await pipeline.clock.advance(30)
        assert set(pipeline.runner.halted) == {W[0]}
        await pipeline.clock.advance(61)
        assert (pipeline.runner.set_aside, pipeline.runner.halted) == (1, {})
        assert list(pipeline.published())[:2] == W[1:3]
    assert [event["error"] for event in named(logged, "window.halted")] == ["LedgerError"]


@pytest.mark.parametrize(
    ("step", "error"), [("begin_attempts", LedgerError("busy")), ("commit", LedgerError("busy"))]
)
@pytest.mark.parametrize("outages", [2, 5])
async def test_what_the_ledger_refuses_is_no_run_that_failed(
    tmp_path: Path, logged: list[dict[str, Any]], step: str, error: Exception, outages: int
) -> None:
    left = [error] * outages

    def fail(name: str, after: bool) -> None:
        if name == step and not after and left:
            raise left.pop()

    failing = [3]

    def flaky(job: WindowJob) -> Exception | None:
        """Three runs of the first window fail, once the ledger works."""
        if job.window.id != W[0] or left or not failing[0]:
            return None
        failing[0] -= 1
        return WindowFailed("flaky")

    pipeline = make(tmp_path, fail=flaky, attempts=4, on_failure="dead_letter", longest_wait=8)
    pipeline.faults.hook = fail
    async with pipeline.life():
        await three_windows(pipeline)
        await pipeline.clock.advance(120)
        assert pipeline.runner.set_aside == 0
        assert list(pipeline.published())[:3] == W[:3]
        assert pipeline.runner.halted == {}
    # As many outages as runs are allowed halt the others meanwhile.
    assert len(named(logged, "window.halted")) == (outages > 4)
    assert named(logged, "window.set_aside") == []


@pytest.mark.parametrize(
    ("step", "error"), [("rename", OSError(5, "I/O")), ("published", LedgerError("busy"))]
)
@pytest.mark.parametrize("on_failure", ["halt", "dead_letter"])
async def test_what_is_committed_is_published_however_often_that_fails_and_never_computed_again(
    tmp_path: Path, step: str, error: Exception, on_failure: str
) -> None:
    left = [error] * 5

    def fail(name: str, after: bool) -> None:
        if name == step and not after and left:
            raise left.pop()

    pipeline = make(tmp_path, on_failure=on_failure)
    pipeline.faults.hook = fail
    async with pipeline.life():
        await three_windows(pipeline)
        await pipeline.clock.advance(300)
        assert pipeline.published()[W[0]] == [1, 2]
        assert [job.window.id for job in pipeline.engine.jobs].count(W[0]) == 1
        assert pipeline.runner.set_aside == 0


@pytest.mark.parametrize("group", [1, 8])
async def test_a_published_folder_that_is_there_already_is_left_alone_and_told_in_a_sentence(
    tmp_path: Path, logged: list[dict[str, Any]], group: int
) -> None:
    stranger = tmp_path / f"window={W[0]}" / "part-of-another-ledger.parquet"
    pipeline = make(tmp_path, engine=lambda: LocalEngine(group_limit=group), longest_wait=4)
    async with pipeline.life():
        stranger.parent.mkdir()
        stranger.touch()
        await three_windows(pipeline)
        await pipeline.clock.advance(30)
        assert [path.name for path in stranger.parent.iterdir()] == [stranger.name]
        (halted,) = named(logged, "window.halted")
        assert halted["what"].endswith("is there already, and this ledger did not publish it.")
        assert str(stranger.parent) in halted["what"]
        assert "move the folder out" in halted["advice"]
        stranger.parent.rename(tmp_path / "elsewhere")
        await pipeline.clock.advance(10)
        published = pipeline.published()
        assert [published[window] for window in W[:3]] == [[1, 2], [3, 4], [5, 6]]
    assert not any("Errno" in str(event) for event in logged)


async def test_an_attempt_that_lost_its_claim_is_thrown_away_and_done_again(
    tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    claims: list[int] = []

    def steal(name: str, after: bool) -> None:
        if name == "commit" and not after and not claims:
            claims.extend(pipeline.ledger.store.begin_attempts((W[0],)).values())

    pipeline = make(tmp_path)
    pipeline.faults.hook = steal
    async with pipeline.life():
        await three_windows(pipeline)
        await pipeline.clock.advance(5)
        assert pipeline.published()[W[0]] == [1, 2]
    assert claims == [2]
    assert "lost its claim" in named(logged, "window.failed")[0]["what"]
    assert named(logged, "window.done")[0]["attempt"] == 3


async def test_a_pipeline_that_writes_for_itself_publishes_nothing(
    tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    class Elsewhere(LocalEngine):
        async def compute(self, job: WindowJob) -> WindowResult:
            return WindowResult((), job.rows, 0.0)

    pipeline = make(tmp_path, engine=Elsewhere)
    async with pipeline.life():
        await three_windows(pipeline)
        assert pipeline.published() == {}
        assert pipeline.runner.published == 3
    done = named(logged, "window.done")[0]
    assert (done["files"], done.get("path")) == (0, None)
    assert W[0] not in pipeline.state().windows, "published, and not retained"


async def test_what_an_earlier_life_left_under_the_same_attempt_is_gone_before_the_job_runs(
    tmp_path: Path,
) -> None:
    pipeline = make(tmp_path)
    async with pipeline.life():
        left = (
            tmp_path
            / "_mldserver"
            / "staging"
            / W[0]
            / f"0001-{writer_tag(pipeline.state().ledger_id, 'one')}"
        )
        left.mkdir(parents=True)
        (left / "part-x.parquet").write_bytes(b"half a file")
        await three_windows(pipeline)
        assert pipeline.published()[W[0]] == [1, 2]
        assert [job.attempt for job in pipeline.engine.jobs if job.window.id == W[0]] == [1]


async def test_a_bug_in_the_engine_is_not_swallowed(tmp_path: Path) -> None:
    pipeline = make(tmp_path, fail=lambda job: Crash("a bug"))
    with pytest.raises(ExceptionGroup) as found:
        async with pipeline.life():
            await three_windows(pipeline)
    assert found.value.subgroup(Crash) is not None


@pytest.mark.parametrize("policy", ["halt", "dead_letter"])
async def test_without_messages_log_and_status_quote_no_row_and_the_ledger_does(
    tmp_path: Path, logged: list[dict[str, Any]], policy: str
) -> None:
    def fail(job: WindowJob) -> Exception | None:
        failed = WindowFailed("PSQLException: Failing row contains (4711)", traceback="E: 4711\n")
        failed.quotes = True
        return failed if job.window.id == W[0] else None

    pipeline = make(tmp_path, fail=fail, attempts=2, on_failure=policy)
    pipeline.log_error_messages = False
    async with pipeline.life():
        await three_windows(pipeline)
        await pipeline.clock.advance(10)
        life = pipeline.runner.latest[0]
        assert life.error == f"PSQLException: {WITHHELD}"
        assert "(4711)" in str(pipeline.state().windows[W[0]].error)
    told = named(logged, "window.failed", "window.halted", "window.set_aside")
    assert len(told) >= 2
    assert "4711" not in str(told)
    assert told[0]["traceback"] == f"E: {WITHHELD}"
