"""The writing side of the cycle, over the real ledger and folder."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from coordinator.outcomes import dead_letter
from coordinator.writing import W, Writing, publish, zero
from support.store import SqliteStore

from mldserver.coordinator.core.flush import BufferedBatch, WindowRows, plan
from mldserver.errors import LedgerError
from mldserver.ledger.contract import BatchProgress, BatchStep, Flush, Segment, batch_id
from mldserver.records import Sequence
from mldserver.windows import TimeWindows, batches

pytestmark = pytest.mark.quick


@pytest.fixture
async def writing(tmp_path: Path) -> AsyncIterator[Writing]:
    made = await Writing.begin(tmp_path, TimeWindows(10_000))
    yield made
    made.ledger.store.close()


async def test_a_flush_writes_one_file_a_window_and_moves_the_position(
    writing: Writing, logged: list[dict[str, Any]]
) -> None:
    shard = await writing.ledger.open_shard("a")
    letter = dead_letter("a", 3)
    batch = writing.batch(shard, (1, 1000), (2, 12_000), (3, 13_000), rows=[1, 2], letters=[letter])
    flushed = await writing.flush([batch], "interval")
    assert writing.files() == {f"{W[0]}/{zero(0)}": [1], f"{W[1]}/{zero(0)}": [2]}
    state = writing.registered()
    assert state.shards["a"].position == Sequence(3)
    assert (state.clock, state.dead_letters) == (2, 1)
    assert {segment.path for entry in state.windows.values() for segment in entry.segments} == {
        str(path.relative_to(writing.out)) for path in writing.out.glob("_mldserver/segments/*/*")
    }
    assert flushed.bytes == sum(s.bytes for entry in state.windows.values() for s in entry.segments) > 0
    assert [update.position for update in flushed.positions] == [Sequence(3)]
    assert flushed.lost_shards == frozenset()
    assert (writing.flusher.rows_durable, writing.flusher.dead_letters) == (2, 1)
    done = next(event for event in logged if event["event"] == "flush.done")
    assert (done["rows"], done["segments"], done["late_rows"], done["dead_letters"]) == (2, 2, 0, 1)
    assert done["reason"] == "interval"


async def test_the_clock_goes_on_with_each_flush(writing: Writing) -> None:
    shard = await writing.ledger.open_shard("a")
    await writing.flush([writing.batch(shard, (1, 1000), (2, 2000))], "interval")
    await writing.flush([writing.batch(shard, (3, 3000))], "interval")
    assert writing.files() == {f"{W[0]}/{zero(0)}": [1, 2], f"{W[0]}/{zero(2)}": [3]}


async def test_a_shard_that_is_owned_elsewhere_is_left_out_and_the_rest_is_written_again(
    writing: Writing, logged: list[dict[str, Any]]
) -> None:
    mine, lost = await writing.ledger.open_shard("a"), await writing.ledger.open_shard("b")
    await writing.ledger.open_shard("b")
    both = [writing.batch(lost, (7, 500)), writing.batch(mine, (1, 1000))]
    flushed = await writing.flush(both, "interval")
    assert flushed.lost_shards == {"b"}
    assert [update.shard_id for update in flushed.positions] == ["a"]
    assert writing.files() == {f"{W[0]}/{zero(0)}": [1]}
    state = writing.registered()
    assert (state.shards["a"].position, state.shards["b"].position) == (Sequence(1), None)
    assert state.clock == 1
    refused = next(event for event in logged if event["event"] == "flush.refused")
    assert (refused["lost_shards"], refused["cut_windows"]) == (["b"], [])


async def test_when_every_shard_is_owned_elsewhere_nothing_is_left(writing: Writing) -> None:
    lost = await writing.ledger.open_shard("b")
    await writing.ledger.open_shard("b")
    flushed = await writing.flush([writing.batch(lost, (7, 500))], "interval")
    assert (flushed.positions, flushed.bytes, writing.files()) == ((), 0, {})


async def test_rows_of_a_window_that_the_ledger_has_cut_become_late(
    writing: Writing, logged: list[dict[str, Any]]
) -> None:
    shard = await writing.ledger.open_shard("a")
    await writing.flush([writing.batch(shard, (1, 1000))], "interval")
    writing.ledger.store.cut((W[0],))  # by another server: this one does not know
    flushed = await writing.flush([writing.batch(shard, (2, 2000), (3, 15_000))], "interval")
    assert writing.files() == {
        f"{W[0]}/{zero(0)}": [1],
        f"{W[0]}/late-{zero(1)}": [2],
        f"{W[1]}/{zero(1)}": [3],
    }
    refused = next(event for event in logged if event["event"] == "flush.refused")
    assert refused["cut_windows"] == [W[0]]
    state = writing.registered()
    assert [(segment.window_id, segment.rows) for segment in state.late_segments] == [(W[0], 1)]
    assert flushed.bytes == state.windows[W[1]].segments[0].bytes
    assert writing.flusher.rows_late == 1


async def test_late_rows_are_published_once_and_told_by_window(
    writing: Writing, logged: list[dict[str, Any]]
) -> None:
    shard = await writing.ledger.open_shard("a")
    await writing.flush([writing.batch(shard, (1, 1000), (2, 15_000))], "interval")
    await writing.flusher.cut(20_000, close_all=False)
    await writing.flusher.publish_late()
    late = [writing.batch(shard, (3, 500), (4, 600), (5, 12_000), (6, 30_000))]
    await writing.flush(late, "interval")
    assert [(event["window"], event["rows"]) for event in logged if event["event"] == "window.late"] == [
        (W[0], 2),
        (W[1], 1),
    ]
    for _ in range(2):
        await writing.flusher.publish_late()
    assert [
        row
        for path in sorted(writing.out.glob("_late/*/*"))
        for row in pq.read_table(path)["value"].to_pylist()
    ] == [
        3,
        4,
        5,
    ]
    assert writing.faults.calls.count("late_published") == 1
    assert writing.registered().late_segments == ()


async def test_late_rows_that_could_not_be_published_are_published_by_the_next_cycle(
    writing: Writing,
) -> None:
    shard = await writing.ledger.open_shard("a")
    await writing.flush([writing.batch(shard, (1, 1000))], "interval")
    await writing.flusher.cut(10_000, close_all=False)
    await writing.flush([writing.batch(shard, (3, 500))], "interval")
    left = [LedgerError("busy"), OSError(5, "I/O")]

    def fail(name: str, after: bool) -> None:
        if left and name == ("rename" if len(left) == 2 else "late_published") and not after:
            raise left.pop()

    writing.faults.hook = fail
    with pytest.raises(OSError, match="I/O"):
        await writing.flusher.publish_late()
    with pytest.raises(LedgerError):
        await writing.flusher.publish_late()
    await writing.flusher.publish_late()
    assert len(list(writing.out.glob("_late/*/*.parquet"))) == 1
    assert writing.registered().late_segments == ()


async def test_a_full_disk_leaves_no_partial_file_and_changes_nothing(writing: Writing) -> None:
    shard = await writing.ledger.open_shard("a")
    batch = writing.batch(shard, (1, 1000), (2, 12_000), (3, 23_000))
    written: list[str] = []

    def full(name: str, after: bool) -> None:
        if name == "write" and after:
            written.append(name)
            if len(written) == 2:
                raise OSError(28, "No space left on device")

    writing.faults.hook = full
    with pytest.raises(OSError, match="No space left"):
        await writing.flush([batch], "interval")
    assert writing.files() == {}
    assert "register" not in writing.faults.calls
    assert (writing.flusher.rows_durable, len(writing.flusher.open_windows)) == (0, 0)
    writing.faults.hook = None
    await writing.flush([batch], "interval")
    assert writing.files() == {f"{W[i]}/{zero(0)}": [i + 1] for i in range(3)}


async def test_what_a_failed_flush_wrote_counts_until_it_can_be_deleted(writing: Writing) -> None:
    shard = await writing.ledger.open_shard("a")
    batch = writing.batch(shard, (1, 1000), (2, 12_000))

    def broken(name: str, after: bool) -> None:
        if name == "delete" or (name == "write" and after and writing.faults.calls.count("write") == 2):
            raise OSError(5, "I/O")

    writing.faults.hook = broken
    with pytest.raises(OSError, match="I/O"):
        await writing.flush([batch], "interval")
    first, _ = sorted(writing.out.glob("_mldserver/segments/*/*"))
    assert writing.flusher.garbage_bytes == first.stat().st_size > 0
    writing.faults.hook = None
    await writing.flush([batch], "interval")
    assert writing.flusher.garbage_bytes == 0
    assert writing.files() == {f"{W[i]}/{zero(0)}": [i + 1] for i in range(2)}


async def test_rows_are_sorted_gathered_and_written_in_threads(
    writing: Writing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large flush takes tens of milliseconds, in which the loop would answer nobody."""
    steps: list[tuple[str, str]] = []
    gather: Any = WindowRows.__dict__["rows"].fget

    def seen(step: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            steps.append((step, threading.current_thread().name))
            return function(*args, **named)

        return call

    async def to_thread(function: Callable[..., Any], *args: Any) -> Any:
        with ThreadPoolExecutor(1, thread_name_prefix="writes") as pool:
            return pool.submit(function, *args).result()

    monkeypatch.setattr("asyncio.to_thread", to_thread)
    monkeypatch.setattr("mldserver.coordinator.flusher.plan", seen("plan", plan))
    monkeypatch.setattr(WindowRows, "rows", property(seen("gather", gather)))
    shard = await writing.ledger.open_shard("a")
    await writing.flush([writing.batch(shard, (1, 1000))], "interval")
    await writing.flush([writing.batch(shard, (2, 2000), (3, 12_000))], "interval")
    in_order = ["plan", "gather", "plan", "gather", "gather"]
    assert steps == [(step, "writes_0") for step in in_order]


async def test_on_an_object_store_the_files_of_a_flush_are_written_side_by_side_and_deleted_where_one_fails(
    writing: Writing,
) -> None:
    writing.flusher.store.local = False
    shard = await writing.ledger.open_shard("a")
    batch = writing.batch(shard, (1, 1000), (2, 12_000), (3, 23_000))
    together, ways = threading.Barrier(3, timeout=20), iter(["on", "full", "on"])

    def meet(name: str, after: bool) -> None:
        if name == "write" and not after:
            together.wait()
        if name == "write" and after and next(ways, "on") == "full":
            raise OSError(28, "No space left on device")

    writing.faults.hook = meet
    with pytest.raises(OSError, match="No space left"):
        await writing.flush([batch], "interval")
    assert writing.files() == {}
    await writing.flush([batch], "interval")
    assert writing.files() == {f"{W[i]}/{zero(0)}": [i + 1] for i in range(3)}


async def test_what_was_written_since_the_last_cut_is_counted_whichever_server_cuts(writing: Writing) -> None:
    shard = await writing.ledger.open_shard("a")
    batches = [
        writing.batch(shard, (1, 1000)),
        writing.batch(shard, (2, 11_000)),
        writing.batch(shard, (3, 12_000)),
    ]
    await writing.flush(batches[:1], "interval")
    assert writing.flusher.uncut_bytes == batches[0].bytes > 0
    await writing.flusher.cut(10_000, close_all=False)
    assert writing.flusher.uncut_bytes == 0
    await writing.flush(batches[1:], "interval")
    writing.restore(writing.registered())
    assert writing.flusher.uncut_bytes == batches[1].bytes + batches[2].bytes
    writing.ledger.store.cut([W[1]])
    writing.restore(writing.registered())
    assert writing.flusher.uncut_bytes == 0


async def test_a_ledger_that_fails_changes_nothing_and_the_flush_can_be_repeated(writing: Writing) -> None:
    shard = await writing.ledger.open_shard("a")
    batch = writing.batch(shard, (1, 1000))
    left = [LedgerError("disk full")]

    def fail(name: str, after: bool) -> None:
        if name == "register" and not after and left:
            raise left.pop()

    writing.faults.hook = fail
    with pytest.raises(LedgerError):
        await writing.flush([batch], "interval")
    assert writing.flusher.rows_durable == 0
    await writing.flush([batch], "interval")
    assert writing.files() == {f"{W[0]}/{zero(0)}": [1]}
    assert len(list(writing.out.glob("_mldserver/segments/*/*.parquet"))) == 1
    state = writing.registered()
    assert [segment.rows for segment in state.windows[W[0]].segments] == [1]
    assert state.clock == 1


async def test_a_ledger_that_stays_away_does_not_fill_the_disk(writing: Writing) -> None:
    shard = await writing.ledger.open_shard("a")

    def fail(name: str, after: bool) -> None:
        if name in {"register", "peek"} and not after:
            raise LedgerError("busy")

    writing.faults.hook = fail
    for _ in range(5):
        with pytest.raises(LedgerError):
            await writing.flush([writing.batch(shard, (1, 1000))], "interval")
    assert writing.faults.calls.count("write") == 1
    assert len(list(writing.out.glob("_mldserver/segments/*/*.parquet"))) == 1


async def test_a_shards_end_is_registered_with_its_last_position(writing: Writing) -> None:
    shard = await writing.ledger.open_shard("a")
    await writing.flush([writing.batch(shard, (1, 1000))], "interval")
    await writing.flush([BufferedBatch("a", shard.epoch, last=Sequence(1), ends_shard=True)], "shard_ended")
    found = writing.registered().shards["a"]
    assert (found.ended, found.position) == (True, Sequence(1))


async def test_windows_are_cut_oldest_first_with_their_segments(
    writing: Writing, logged: list[dict[str, Any]]
) -> None:
    shard = await writing.ledger.open_shard("a")
    await writing.flush([writing.batch(shard, (1, 12_000), (2, 31_000))], "interval")
    await writing.flush([writing.batch(shard, (3, 1000), (4, 14_000))], "interval")
    assert await writing.flusher.cut(9999, close_all=False) == ()
    assert "cut" not in writing.faults.calls
    entries = await writing.flusher.cut(20_000, close_all=False)
    assert [(entry.window_id, len(entry.segments)) for entry in entries] == [(W[0], 1), (W[1], 2)]
    cut = [
        (event["window"], event["segments"], event["rows"])
        for event in logged
        if event["event"] == "window.cut"
    ]
    assert cut == [(W[0], 1, 1), (W[1], 2, 2)]
    assert [entry.window_id for entry in await writing.flusher.cut(None, close_all=True)] == [W[3]]


async def test_windows_that_were_forgotten_are_known_to_be_cut(writing: Writing) -> None:
    shard = await writing.ledger.open_shard("a")
    await writing.flush([writing.batch(shard, (1, 1000))], "interval")
    await writing.flusher.cut(10_000, close_all=False)
    await publish(writing, W[0])
    await writing.ledger.prune(windows_before_ms=writing.clock.now_ms() + 1, shards_before_ms=0)
    state = writing.registered()
    assert (state.windows, state.cut_below_ms) == ({}, 10_000)
    writing.ledger.store.close()
    again = await Writing.begin(writing.out, writing.spec)
    again.durable = writing.durable
    await again.flush([again.batch(shard, (2, 2000), (3, 12_000))], "interval")
    assert again.flusher.rows_late == 1
    assert again.faults.calls.count("register") == 1
    assert again.registered().windows.keys() == {W[1]}
    again.ledger.store.close()


async def test_a_batches_number_is_not_given_again_after_its_window_was_forgotten(tmp_path: Path) -> None:
    writing = await Writing.begin(tmp_path, batches(max_rows=10, max_age=0))
    shard = await writing.ledger.open_shard("a")
    await writing.flush([writing.batch(shard, (1, 1000))], "interval")
    (entry,) = await writing.flusher.cut(None, close_all=False)
    await publish(writing, entry.window_id)
    assert writing.registered().windows == {}
    # The next life begins with what the ledger tells: nothing of the window, whether it is forgotten or not.
    writing.restore(writing.registered())
    await writing.ledger.prune(windows_before_ms=writing.clock.now_ms() + 1, shards_before_ms=0)
    writing.restore(writing.registered())
    await writing.flush([writing.batch(shard, (2, 2000))], "interval")
    assert writing.registered().windows.keys() == {batch_id(1)}
    writing.ledger.store.close()


async def test_a_handler_without_rows_moves_positions_and_has_nothing_to_cut(tmp_path: Path) -> None:
    writing = await Writing.begin(tmp_path, None)
    shard = await writing.ledger.open_shard("a")
    flushed = await writing.flush([writing.batch(shard, (1, 1000), rows=[])], "interval")
    assert flushed.bytes == 0
    assert await writing.flusher.cut(10**9, close_all=True) == ()
    assert writing.registered().shards["a"].position == Sequence(1)
    writing.ledger.store.close()


async def test_a_shard_whose_position_is_another_one_in_the_ledger_is_left_out(writing: Writing) -> None:
    """An earlier flush took effect and its answer was lost: its rows must not be registered again."""
    shard = await writing.ledger.open_shard("a")
    batch = writing.batch(shard, (1, 1000))
    await writing.flusher.flush({1: batch}, "interval", {}, {})
    flushed = await writing.flusher.flush({1: batch}, "interval", {}, {})
    assert flushed.lost_shards == {"a"}
    assert writing.files() == {f"{W[0]}/{zero(0)}": [1]}


async def test_rows_that_another_server_puts_into_the_batch_meanwhile_hold_up_no_flush(
    tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    writing = await Writing.begin(tmp_path, batches(max_rows=3, max_age="1 hour"))
    other = SqliteStore(tmp_path / "ledger.sqlite", pipeline="test", server_id="two")
    other.open(now_ms=0)

    def crowd(name: str, after: bool) -> None:
        """Another server puts two rows in just before this one registers what it has written."""
        if name == "register" and not after:
            step = BatchStep(BatchProgress(), BatchProgress(0, 2, 1), 3)
            segment = Segment("theirs", batch_id(0), 2, 1)
            assert other.register(Flush((), (segment,), batches=step), now_ms=0).registered

    shard = await writing.ledger.open_shard("a")
    writing.faults.hook = crowd
    await writing.flush([writing.batch(shard, *((n, 1000 + n) for n in range(1, 6)))])
    writing.faults.hook = None
    state = writing.registered()
    rows = {name: [segment.rows for segment in entry.segments] for name, entry in state.windows.items()}
    assert rows == {batch_id(0): [2, 3], batch_id(1): [2]}
    assert (state.batch_progress.number, state.batch_progress.rows) == (1, 2)
    assert not [event for event in logged if event["event"] == "flush.refused"]
    writing.restore(state)
    (entry,) = await writing.flusher.cut(None, close_all=False)
    assert entry.window_id == batch_id(0)
    other.close()
    writing.ledger.store.close()
