"""Keyed state through the coordinator: snapshots, the flush's file, lost stores, lost answers, compaction and deletion."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from coordinator.keyed import Counter, counts, opened
from coordinator.outcomes import outcome
from coordinator.pipeline import RULES, Pipeline
from support.shards import accept

from mldserver.consumer.intake import AT_TIP
from mldserver.coordinator.store_files import all_expired_ms
from mldserver.errors import LedgerError
from mldserver.ledger.contract import LedgerState, ShardState, StateFile, StoreState
from mldserver.records import Sequence
from mldserver.stores import ALL_KEYS, KeyRange, StoreClaim

FAMILY = StoreClaim(None)
DAY_MS = 24 * 3600 * 1000
RETAINED = replace(RULES, retention_ms=5000)


def files(pipeline: Pipeline) -> list[str]:
    return sorted(path.name for path in pipeline.out.glob("_mldserver/state/*"))


def a_pipeline(tmp_path: Path, **named: Any) -> Pipeline:
    return Pipeline(tmp_path / "out", without_rows=True, **named)


async def test_without_a_store_a_session_has_no_snapshot_and_no_numbers(tmp_path: Path) -> None:
    pipeline = a_pipeline(tmp_path)
    async with pipeline.life():
        session = await pipeline.open("a")
        assert (session.snapshot, session.next_number) == (None, None)


async def test_a_flush_registers_its_changes_and_another_life_finds_them(tmp_path: Path) -> None:
    pipeline = a_pipeline(tmp_path)
    async with pipeline.life():
        counter = await opened(pipeline)
        await counter.give((1, "x"), (2, "x"), (3, "y"))
        await pipeline.cycle()
    (file,) = pipeline.state().state_files.values()
    assert (file.rows, dict(file.needed)) == (2, {"a": (ALL_KEYS,)})
    assert pipeline.state().stores["a"].serial == 1
    async with pipeline.life():
        counter = await opened(pipeline, start=Sequence(3))
        assert counter.entries == {"x": 2, "y": 1}


async def test_batches_that_are_not_durable_are_counted_in_a_snapshot_and_lost_with_the_process(
    tmp_path: Path,
) -> None:
    pipeline = a_pipeline(tmp_path)
    async with pipeline.life():
        counter = await opened(pipeline)
        await counter.give((1, "x"))
        await pipeline.cycle()
        await counter.give((2, "x"), (3, "y"))
        await counter.load()
        assert counter.entries == {"x": 2, "y": 1}
    async with pipeline.life():
        counter = await opened(pipeline, start=Sequence(1))
        assert counter.entries == {"x": 1}


async def test_a_shard_that_is_opened_again_starts_from_what_is_durable(tmp_path: Path) -> None:
    pipeline = a_pipeline(tmp_path)
    async with pipeline.life():
        counter = await opened(pipeline)
        numbers = [counter.session.next_number]
        await counter.give((1, "x"))
        numbers.append(counter.session.next_number)
        again = await opened(pipeline)
        assert again.entries == {}
        # A copy of the state that was read for the earlier session must not pass for one of the later.
        assert again.session.next_number not in numbers


async def test_outcomes_are_numbered_those_of_no_runtime_not(tmp_path: Path) -> None:
    pipeline = a_pipeline(tmp_path)
    async with pipeline.life():
        counter = await opened(pipeline)
        first = counter.session.next_number
        assert first is not None
        await counter.give((1, "x"))
        await accept(counter.session, AT_TIP)
        assert counter.session.next_number == first + 1
        await accept(counter.session, outcome("a", [(2, 2)], rows=[]))
        assert counter.session.next_number == first + 2


async def test_a_snapshot_reads_again_when_a_flush_ends_meanwhile(tmp_path: Path) -> None:
    """The ledger was read before the flush, and the buffer after it: neither has the batch."""
    pipeline = a_pipeline(tmp_path)
    async with pipeline.life():
        counter = await opened(pipeline)
        await counter.give((1, "x"))
        before = pipeline.ledger.store.peek()

        async def stale() -> Any:
            del pipeline.ledger.peek
            await pipeline.cycle()
            return before

        pipeline.ledger.peek = stale
        await counter.load()
        assert counter.entries == {"x": 1}


async def test_a_lost_answer_neither_doubles_nor_loses_a_change(tmp_path: Path) -> None:
    """The flush is registered, and the server does not hear of it. The next flush goes on from the serial that the ledger has."""
    pipeline = a_pipeline(tmp_path)
    async with pipeline.life() as coordinator:
        counter = await opened(pipeline)
        await counter.give((1, "x"))

        def lose(name: str, after: bool) -> None:
            if name == "register" and after:
                pipeline.faults.hook = None
                raise LedgerError("lost")

        pipeline.faults.hook = lose
        await pipeline.cycle()
        assert coordinator.status().flush_failing
        await counter.give((2, "x"))
        await pipeline.clock.advance(5)
        assert not coordinator.status().flush_failing
        assert counter.session.alive
        await counter.load()
        assert counter.entries == {"x": 2}
    assert pipeline.state().stores["a"].serial == 2
    assert len(files(pipeline)) == 2


async def test_files_of_a_flush_that_failed_are_deleted(tmp_path: Path) -> None:
    pipeline = a_pipeline(tmp_path)
    async with pipeline.life():
        counter = await opened(pipeline)
        await counter.give((1, "x"))

        def fail(name: str, after: bool) -> None:
            if name == "register" and not after:
                pipeline.faults.hook = None
                raise LedgerError("out of reach")

        pipeline.faults.hook = fail
        await pipeline.cycle()
        (failed,) = files(pipeline)
        await pipeline.clock.advance(5)
        (written,) = files(pipeline)
        assert written != failed
    assert [Path(path).name for path in pipeline.state().state_files] == [written]


async def test_a_full_disk_leaves_no_files_behind(tmp_path: Path) -> None:
    pipeline = a_pipeline(tmp_path)
    async with pipeline.life():
        counter = await opened(pipeline)
        await counter.give((1, "x"))

        def fail(name: str, after: bool) -> None:
            if name == "write" and after:
                raise OSError("full")

        pipeline.faults.hook = fail
        await pipeline.cycle()
        assert files(pipeline) == []
        pipeline.faults.hook = None
        await pipeline.clock.advance(5)
        assert len(files(pipeline)) == 1


# Families.


async def family(pipeline: Pipeline) -> tuple[Counter, Counter]:
    """Return two siblings, which share the store of their parent."""
    root = await opened(pipeline, "root", claim=FAMILY)
    await root.give((1, "x"), (2, "y"))
    assert await root.session.end()
    one, other = [await opened(pipeline, name, claim=FAMILY, parents=("root",)) for name in ("b", "c")]
    return one, other


async def test_siblings_share_the_store_and_their_numbers_stand_in_each_others_snapshots(
    tmp_path: Path,
) -> None:
    pipeline = a_pipeline(tmp_path)
    async with pipeline.life():
        one, other = await family(pipeline)
        await one.give((3, "x"))
        assert one.session.next_number is not None
        assert other.session.next_number is not None
        accepted = other.session.next_number - 1, {"b": one.session.next_number - 1}
        assert other.session.snapshot is not None
        snapshot = await other.session.snapshot()
        assert counts(snapshot) == {"x": 2, "y": 1}
        assert (snapshot.store_id, (snapshot.accepted, snapshot.siblings)) == ("root", accepted)


async def test_a_store_of_which_another_server_has_a_shard_is_left_out_whole(tmp_path: Path) -> None:
    pipeline = a_pipeline(tmp_path)
    async with pipeline.life():
        one, other = await family(pipeline)
        alone = await opened(pipeline, "z")
        await one.give((3, "x"))
        await other.give((3, "y"))
        await alone.give((1, "z"))
        pipeline.ledger.store.open_shard("b", ("root",), store=FAMILY)  # as another server does
        await pipeline.cycle()
        assert not one.session.alive
        assert not other.session.alive
        assert alone.session.alive
        again = await opened(pipeline, "c", claim=FAMILY, parents=("root",))
        assert again.entries == {"x": 1, "y": 1}
        await again.give((3, "y"))
        await pipeline.cycle()
        assert again.session.alive
    state = pipeline.state()
    assert files(pipeline) == sorted(Path(path).name for path in state.state_files)
    assert [state.shards[name].position for name in ("b", "c", "z")] == [None, Sequence(3), Sequence(1)]
    assert (state.stores["root"].serial, state.stores["z"].serial) == (2, 1)


async def test_what_is_accepted_while_a_store_is_lost_moves_no_position(tmp_path: Path) -> None:
    """The shard's own epoch and position are right: only its store was left out."""
    pipeline = a_pipeline(tmp_path)
    async with pipeline.life():
        one, other = await family(pipeline)
        await one.give((3, "x"))
        await other.give((3, "y"))
        pipeline.ledger.store.open_shard("b", ("root",), store=FAMILY)
        late = asyncio.Event()

        def accept_more(name: str, after: bool) -> None:
            if name == "register" and after and not late.is_set():
                late.set()
                other.session.accept_batch(other.run([(4, "y")]), 0)

        pipeline.faults.hook = accept_more
        await pipeline.cycle()
        assert late.is_set()
        await pipeline.clock.advance(3)
    assert pipeline.state().shards["c"].position is None


async def test_a_batch_without_changes_does_not_move_a_position_past_what_was_left_out(
    tmp_path: Path,
) -> None:
    pipeline = a_pipeline(tmp_path)
    async with pipeline.life():
        one, other = await family(pipeline)
        await one.give((3, "x"))
        await other.give((3, "y"))
        await accept(other.session, outcome("c", [(4, 4)], rows=[]))
        pipeline.ledger.store.open_shard("b", ("root",), store=FAMILY)
        await pipeline.clock.advance(3)
    assert pipeline.state().shards["c"].position is None


async def test_state_expires_once_all_shards_of_the_store_have_passed_its_time(tmp_path: Path) -> None:
    """A shard that lags reads its records at their own time, when the state was there. One that is not open yet lags by at most a day."""
    pipeline = a_pipeline(tmp_path)
    async with pipeline.life():
        one, other = await family(pipeline)
        one.ttl_ms = 10
        await one.give((3, "short"))
        one.ttl_ms = None
        await one.give((DAY_MS + 50, "x"))
        await pipeline.cycle()
        await other.load()
        assert "short" in other.entries, "the sibling has read nothing yet"
        await other.give((DAY_MS + 12, "y"))
        await pipeline.cycle()
        await other.load()
        assert "short" in other.entries, "it expires at 13, a day later"
        await other.give((DAY_MS + 13, "y"))
        await pipeline.cycle()
        await other.load()
        assert "short" not in other.entries


async def test_a_store_that_another_server_has_changed_is_lost(tmp_path: Path) -> None:
    """The serial shows it: no epoch and no position of this server's shard has changed."""
    pipeline = a_pipeline(tmp_path)
    async with pipeline.life() as coordinator:
        one, other = await family(pipeline)
        await one.give((3, "x"))
        sessions = coordinator._sessions
        sessions._stores["root"] = replace(sessions._stores["root"], serial=0)
        await pipeline.cycle()
        assert not one.session.alive
        assert not other.session.alive
        again = await opened(pipeline, "b", claim=FAMILY, parents=("root",))
        await again.give((3, "x"))
        await pipeline.cycle()
        assert again.session.alive
        await again.load()
        assert again.entries == {"x": 2, "y": 1}


@pytest.mark.parametrize(("key_range", "expired_ms"), [(KeyRange(0, 9), DAY_MS + 7), (ALL_KEYS, 7)])
def test_state_that_shards_may_need_that_are_not_open_yet_has_not_expired(
    key_range: KeyRange, expired_ms: int
) -> None:
    """A store for all keys may get a child that lags a day behind its siblings."""
    stores = {"s": StoreState("s", 1, *key_range)}
    shards = {
        "ended": ShardState("ended", 1, effective_ms=5, ended_ms=1, store="s"),
        "ahead": ShardState("ahead", 1, effective_ms=DAY_MS + 9, store="s"),
        "behind": ShardState("behind", 1, effective_ms=DAY_MS + 7, store="s"),
        "other": ShardState("other", 1, effective_ms=1),
    }
    assert all_expired_ms(LedgerState(shards=shards, stores=stores)) == {"s": expired_ms}
    shards["unread"] = ShardState("unread", 1, store="s")
    assert all_expired_ms(LedgerState(shards=shards, stores=stores)) == {}


# Resharding on Kinesis.


async def test_a_child_takes_over_the_keys_in_its_range(tmp_path: Path) -> None:
    middle = ALL_KEYS.last // 2
    pipeline = a_pipeline(tmp_path)
    async with pipeline.life():
        parent = await opened(pipeline)
        await parent.give(*((number, f"k{number}") for number in range(1, 30)))
        assert await parent.session.end()
        ranges = (KeyRange(0, middle), KeyRange(middle + 1, ALL_KEYS.last))
        found = [
            (await opened(pipeline, name, claim=StoreClaim(each), parents=("a",))).entries
            for name, each in zip(("b", "c"), ranges, strict=True)
        ]
        assert min(map(len, found)) > 0
        assert {key: 1 for each in found for key in each} == parent.entries
        assert sum(map(len, found)) == 29


# Compaction and deletion.


async def test_files_are_compacted_and_the_old_ones_deleted_after_their_retention(tmp_path: Path) -> None:
    pipeline = a_pipeline(tmp_path, rules=RETAINED)
    async with pipeline.life() as coordinator:
        counter = await opened(pipeline)
        for number in range(1, 9):
            await counter.give((number, "x"), (number, f"k{number}"))
            await pipeline.cycle()
        for _ in range(2):
            await pipeline.cycle()
        assert coordinator.state_files.compactions == 1
        state = await pipeline.ledger.peek()
        (needed,) = (file for file in state.state_files.values() if file.needed)
        assert (len(files(pipeline)), needed.rows) == (9, 9)
        await counter.load()
        assert counter.entries["x"] == 8
        await pipeline.clock.advance(RETAINED.retention_ms / 1000 + 2)
        assert files(pipeline) == [Path(needed.path).name]
        assert list((await pipeline.ledger.peek()).state_files) == [needed.path]
        await counter.load()
        assert counter.entries["x"] == 8


@pytest.mark.parametrize("registered", [True, False])
async def test_a_compaction_whose_answer_is_lost_leaves_no_file_that_the_ledger_does_not_name(
    tmp_path: Path, registered: bool
) -> None:
    pipeline = a_pipeline(tmp_path)

    def lose(name: str, after: bool) -> None:
        if name == "compact_state" and after == registered:
            pipeline.faults.hook = None
            raise LedgerError("lost")

    async with pipeline.life():
        counter = await opened(pipeline)
        pipeline.faults.hook = lose
        for number in range(1, 9):
            await counter.give((number, "x"))
            await pipeline.cycle()
        await pipeline.clock.advance(10)
        assert pipeline.faults.hook is None
        await counter.load()
        assert counter.entries == {"x": 8}
    assert files(pipeline) == sorted(Path(path).name for path in pipeline.state().state_files)


async def test_a_compaction_that_another_change_has_overtaken_is_dropped(tmp_path: Path) -> None:
    pipeline = a_pipeline(tmp_path)

    def overtake(name: str, after: bool) -> None:
        if name == "compact_state" and not after:
            pipeline.faults.hook = None
            state = pipeline.ledger.store.peek()
            path, file = next(iter(state.state_files.items()))
            pipeline.ledger.store.compact_state(StateFile("other", file.needed, 1, 1), {path: file.needed})

    async with pipeline.life() as coordinator:
        counter = await opened(pipeline)
        for number in range(1, 9):
            await counter.give((number, f"k{number}"))
            await pipeline.cycle()
        pipeline.faults.hook = overtake
        await pipeline.cycle()
        assert coordinator.state_files.compactions == 0
        assert len(files(pipeline)) == 8


async def test_the_sweep_deletes_state_files_that_no_ledger_entry_names(tmp_path: Path) -> None:
    pipeline = a_pipeline(tmp_path)
    async with pipeline.life():
        counter = await opened(pipeline)
        await counter.give((1, "x"))
        await pipeline.cycle()
    (named,) = pipeline.out.glob("_mldserver/state/*")
    for other in ("0000000000000007", "0000000000000008"):
        named.with_name(other + named.name[16:-8] + "x.parquet").write_bytes(b"unfinished")
    async with pipeline.life():
        assert files(pipeline) == [named.name]
        assert (await opened(pipeline, start=Sequence(1))).entries == {"x": 1}


async def test_a_snapshot_reads_the_files_that_took_the_place_of_those_deleted_meanwhile(
    tmp_path: Path,
) -> None:
    pipeline = a_pipeline(tmp_path, rules=replace(RULES, retention_ms=0))
    async with pipeline.life() as coordinator:
        counter = await opened(pipeline)
        for number in range(1, 9):
            await counter.give((number, "x"))
            await pipeline.cycle()
        before = pipeline.ledger.store.peek()

        async def stale() -> Any:
            del pipeline.ledger.peek
            for _ in range(3):
                await pipeline.cycle()
            return before

        pipeline.ledger.peek = stale
        await counter.load()
        assert counter.entries == {"x": 8}
        assert (coordinator.state_files.compactions, len(files(pipeline))) == (1, 1)


async def test_a_state_file_that_is_gone_or_damaged_fails_the_snapshot_with_its_name(tmp_path: Path) -> None:
    pipeline = a_pipeline(tmp_path)
    async with pipeline.life():
        counter = await opened(pipeline)
        await counter.give((1, "x"))
        await pipeline.cycle()
        (path,) = pipeline.out.glob("_mldserver/state/*")
        path.write_bytes(b"PAR1")
        with pytest.raises(LedgerError, match="The state of store a cannot be read"):
            await counter.load()
        path.unlink()
        with pytest.raises(LedgerError, match=path.name):
            await counter.load()
