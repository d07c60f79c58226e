"""An output folder is one pipeline's, on one ledger, and each of the two knows the other."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from coordinator.pipeline import Pipeline, named

from mldserver.assembly import claim_of
from mldserver.config.resolve import resolve
from mldserver.errors import OperatorError, ServerExpired
from mldserver.ledger.contract import Flush, LedgerState, Segment, SegmentKind, ServerState
from mldserver.ledger.sqlite import SqliteLedger
from mldserver.output.layout import LEDGER, OWNER, PRIVATE, QUARANTINE, segment_path, writer_tag
from mldserver.output.owner import FolderClaim
from mldserver.output.store import OutputStore
from mldserver.testing import VirtualClock
from mldserver.windows import time_window_id

pytestmark = pytest.mark.quick

FIRST, SECOND = time_window_id(0), time_window_id(10_000)


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> OutputStore:
    made = OutputStore(str(tmp_path / "out") if request.param == "local" else "mock://bucket/out")
    made.prepare(PRIVATE, durable=True)
    return made


class Starts:
    """Starts' first steps, each on a ledger outside the folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ledgers: list[SqliteLedger] = []

    def prepare(
        self, store: OutputStore, ledger: str = "ledger", place: str | None = "x", *, new_ledger: bool = False
    ) -> tuple[FolderClaim, SqliteLedger]:
        """Read what the folder says, and open no ledger yet."""
        claim = FolderClaim(store, pipeline="a", ledger=place, new_ledger=new_ledger)
        claim.inspect()
        server_id = f"s{len(self.ledgers)}"
        self.ledgers.append(
            SqliteLedger(self.folder / ledger, pipeline="a", server_id=server_id, clock=VirtualClock(0))
        )
        return claim, self.ledgers[-1]

    async def __call__(
        self, store: OutputStore, *where: str | None, new_ledger: bool = False, **place: Any
    ) -> LedgerState:
        claim, ledger = self.prepare(store, *where, new_ledger=new_ledger, **place)
        return await claim.acquire(await ledger.open(), ledger)


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Starts]:
    starts = Starts(tmp_path)
    yield starts
    for each in starts.ledgers:
        await each.close()


async def test_folder_and_ledger_know_each_other_from_the_first_start_on(
    store: OutputStore, start: Starts
) -> None:
    state = await start(store)
    told = json.loads(store.get(OWNER))
    assert told == {
        "format": 2,
        "folder": state.folder,
        "pipeline": "a",
        "ledger": "x",
        "ledger_id": state.ledger_id,
        "claims": 1,
    }
    again = await start(store)
    assert (again.folder, again.ledger_id) == (state.folder, state.ledger_id)
    assert json.loads(store.get(OWNER)) == told | {"claims": 2}


async def test_another_place_of_the_ledger_is_refused_before_it_is_opened(
    store: OutputStore, start: Starts, tmp_path: Path
) -> None:
    await start(store)
    for place in ("y", None):
        with pytest.raises(OperatorError, match="belongs to pipeline a on the ledger x; this is pipeline a"):
            await start(store, "other", place)
    assert not (tmp_path / "other").exists()


async def test_a_ledger_that_was_moved_on_purpose_is_taken(store: OutputStore, start: Starts) -> None:
    before = await start(store)
    moved = await start(store, place="y", new_ledger=True)
    assert moved.ledger_id != before.ledger_id, "another copy of it is not the folder's any more"
    assert (await start(store, place="y")).ledger_id == moved.ledger_id


async def two_on_a_new_ledger(store: OutputStore, start: Starts) -> list[tuple[FolderClaim, SqliteLedger]]:
    """The ledger of a folder with a window in it is lost, and two servers start at once with --new-ledger."""
    await start(store)
    store.put(f"window={FIRST}/part.parquet", b"x")
    return [start.prepare(store, "new", new_ledger=True) for _ in range(2)]


async def test_of_two_starts_that_take_a_new_ledger_the_second_finds_the_folder_as_the_first_left_it(
    store: OutputStore, start: Starts
) -> None:
    (claim, ledger), (other_claim, other) = await two_on_a_new_ledger(store, start)
    first = await claim.acquire(await ledger.open(), ledger)
    second = await other_claim.acquire(await other.open(), other)
    assert second.ledger_id == first.ledger_id
    assert sorted((await ledger.sync(ServerState("s1", 1))).servers) == ["s1", "s2"]


async def test_of_two_starts_that_take_a_new_ledger_at_once_one_stops_with_a_sentence(
    store: OutputStore, start: Starts
) -> None:
    (claim, ledger), (other_claim, other) = await two_on_a_new_ledger(store, start)
    found, other_found = await ledger.open(), await other.open()
    first = await claim.acquire(found, ledger)
    with pytest.raises(ServerExpired, match="claimed the ledger again"):
        await other_claim.acquire(other_found, other)
    assert (await ledger.peek()).ledger_id == first.ledger_id == json.loads(store.get(OWNER))["ledger_id"]


async def test_a_start_that_is_overtaken_before_it_could_note_its_ledger_leaves_the_folder_right(
    store: OutputStore, start: Starts
) -> None:
    (claim, ledger), (other_claim, other) = await two_on_a_new_ledger(store, start)

    class Overtaken:
        """Another start comes between a claim and what is noted of it."""

        peek = ledger.peek
        server_id = ledger.server_id

        async def claim(self, folder: str, *, instead_of: str | None = None) -> LedgerState:
            claimed = await ledger.claim(folder, instead_of=instead_of)
            await other_claim.acquire(await other.open(), other)
            return claimed

    await claim.acquire(await ledger.open(), Overtaken())  # type: ignore[arg-type]  # all that a claim calls
    now = await other.peek()
    assert list(now.servers) == ["s2"]
    assert json.loads(store.get(OWNER))["ledger_id"] == now.ledger_id
    with pytest.raises(ServerExpired):
        await ledger.sync(ServerState("s1", 1))
    assert (await start(store, "new")).ledger_id == now.ledger_id


async def test_a_file_that_a_crash_cut_off_is_written_again(store: OutputStore, start: Starts) -> None:
    store.put(OWNER, b"")
    await start(store)
    assert json.loads(store.get(OWNER))["pipeline"] == "a"


@pytest.mark.parametrize("damage", [b"{", b"[]", b"{}", b'{"format": 1}', b'{"format": 2, "what": 1}'])
def test_what_nobody_understands_is_refused(store: OutputStore, damage: bytes) -> None:
    store.put(OWNER, damage)
    with pytest.raises(OperatorError, match="belongs to something unknown") as told:
        FolderClaim(store, pipeline="a", ledger="x").inspect()
    assert OWNER in told.value.what


@pytest.mark.parametrize(
    ("ledger", "named"),
    [
        ("sqlite:l.sqlite", f"sqlite:{Path.cwd() / 'l.sqlite'}"),
        ("dynamodb://table?region=here", "dynamodb://table/h"),
        ("sqlite", None),
    ],
)
def test_a_ledger_is_named_as_every_server_names_it(
    store: OutputStore, ledger: str, named: str | None
) -> None:
    values = {"handler": "h", "out": "/somewhere", "ledger": ledger}
    claim_of(resolve(values, environ={}, folder=Path("/nowhere")), store).inspect()
    assert json.loads(store.get(OWNER))["ledger"] == named


@pytest.mark.parametrize(
    ("left", "words"),
    [
        (f"window={FIRST}/part.parquet", "(windows: 1)"),
        (segment_path("w", 1, "u", kind=SegmentKind.WINDOW, tag="0" * 16, shape=""), "(segments: 1)"),
        ("_late/window=w/late.parquet", "(late files: 1)"),
        ("_mldserver/state/changes.parquet", "(state files: 1)"),
    ],
)
async def test_a_new_ledger_beside_what_an_earlier_one_left_is_refused_with_the_ways_out(
    store: OutputStore, start: Starts, left: str, words: str
) -> None:
    store.put(left, b"x")
    with pytest.raises(OperatorError) as told:
        await start(store)
    assert words in told.value.what
    assert "is missing" in told.value.what
    for way in ("mldserver ledger restore", "another `out`", "--new-ledger"):
        assert way in told.value.advice
    with pytest.raises(OperatorError):
        await start(store)
    assert store.exists(left)
    await start(store, new_ledger=True)
    await start(store)


async def test_a_new_ledger_in_a_folder_where_nothing_is_left_is_no_loss(
    store: OutputStore, start: Starts
) -> None:
    await start(store)
    assert (await start(store, "new")).folder == json.loads(store.get(OWNER))["folder"]


async def test_what_a_server_wrote_that_came_first_meanwhile_is_this_ledgers(
    store: OutputStore, start: Starts, tmp_path: Path
) -> None:
    claim = FolderClaim(store, pipeline="a", ledger="x")
    claim.inspect()
    slow = SqliteLedger(tmp_path / "ledger", pipeline="a", server_id="slow", clock=VirtualClock(0))
    found = await slow.open()
    quick = await start(store)
    store.put(f"window={FIRST}/part.parquet", b"x")
    settled = await claim.acquire(found, slow)
    await slow.close()
    assert (settled.ledger_id, settled.folder) == (quick.ledger_id, quick.folder)


async def test_an_exchanged_ledger_is_refused(store: OutputStore, start: Starts) -> None:
    await start(store)
    owner = json.loads(store.get(OWNER))
    store.put(OWNER, json.dumps(owner | {"ledger_id": "0" * 8}).encode())
    with pytest.raises(OperatorError, match=r"is not the one that .*/out had last"):
        await start(store)


async def test_a_ledger_that_was_rolled_back_is_refused(store: OutputStore, start: Starts) -> None:
    for _ in range(2):
        await start(store)
    owner = json.loads(store.get(OWNER))
    store.put(OWNER, json.dumps(owner | {"claims": 9}).encode())
    with pytest.raises(OperatorError, match="it was rolled back"):
        await start(store)
    accepted = await start(store, new_ledger=True)
    assert accepted.ledger_id != owner["ledger_id"], "what the lost days wrote is not this ledger's"


def segment_of(state: LedgerState) -> Segment:
    path = segment_path(
        FIRST, 1, "u", kind=SegmentKind.WINDOW, tag=writer_tag(state.ledger_id, "s0"), shape="0" * 12
    )
    return Segment(path, FIRST, 1, 1, 0, 10_000)


async def test_two_folders_on_one_ledger_are_refused_whatever_the_operator_says(
    start: Starts, tmp_path: Path
) -> None:
    """Two hosts, each with a local folder."""
    folders = [OutputStore(str(tmp_path / name)) for name in ("here", "there")]
    for each in folders:
        each.prepare(PRIVATE, durable=True)
    state = await start(folders[0])
    await start.ledgers[0].register(Flush((), (segment_of(state),)))
    with pytest.raises(OperatorError, match=r"belongs to another output folder than .*/there"):
        await start(folders[1])
    with pytest.raises(OperatorError, match=r"there, and names rows that are not here \(segments: 1\)"):
        await start(folders[1], new_ledger=True)
    await start(folders[0])
    await start.ledgers[0].sync(ServerState("s0", 1))


async def test_of_two_folders_that_claim_one_ledger_at_once_one_is_refused(
    start: Starts, tmp_path: Path
) -> None:
    folders = [OutputStore(str(tmp_path / name)) for name in ("here", "there")]
    for each in folders:
        each.prepare(PRIVATE, durable=True)
    (claim, ledger), (other_claim, other) = (start.prepare(each) for each in folders)
    found, other_found = await ledger.open(), await other.open()
    await claim.acquire(found, ledger)
    with pytest.raises(OperatorError, match=r"belongs to another output folder than .*/there"):
        await other_claim.acquire(other_found, other)


async def test_a_folder_that_has_lost_its_word_beside_a_ledger_elsewhere_is_given_it_again(
    start: Starts, tmp_path: Path
) -> None:
    store = OutputStore(str(tmp_path / "out"))
    store.prepare(PRIVATE, durable=True)
    before = await start(store)
    segment = segment_of(before)
    store.put(segment.path, b"x")
    await start.ledgers[0].register(Flush((), (segment,)))
    (tmp_path / "out" / OWNER).unlink()
    with pytest.raises(OperatorError, match="belongs to another output folder") as told:
        await start(store)
    assert (
        "If somebody has deleted _mldserver/owner.json here, start once with --new-ledger"
        in told.value.advice
    )
    healed = await start(store, new_ledger=True)
    assert list(healed.windows) == [FIRST]
    assert (await start(store)).folder == healed.folder != before.folder


async def test_a_folder_that_moves_takes_its_ledger_along(start: Starts, tmp_path: Path) -> None:
    folder = OutputStore(str(tmp_path / "here"))
    folder.prepare(PRIVATE, durable=True)
    before = await start(folder)
    (tmp_path / "here").rename(tmp_path / "there")
    assert (await start(OutputStore(str(tmp_path / "there")))).folder == before.folder


# Whole starts.


async def rows_in(pipeline: Pipeline) -> None:
    """One window is published, another open."""
    async with pipeline.life():
        session = await pipeline.open("a")
        await pipeline.give(session, [(1, 1000), (2, 2000), (3, 15_000)])
        for _ in range(3):
            await pipeline.cycle()
    assert pipeline.published() == {FIRST: [1, 2]}


def quarantined(out: Path) -> list[str]:
    return sorted(path.name for path in (out / QUARANTINE).rglob("*.parquet"))


def lose_ledger(out: Path) -> None:
    for path in out.glob(f"{LEDGER}*"):
        path.unlink()


async def test_a_lost_ledger_is_told_and_nothing_is_deleted_until_the_operator_says_so(
    tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    pipeline = Pipeline(tmp_path)
    await rows_in(pipeline)
    segments = pipeline.private_files()
    lose_ledger(tmp_path)
    with pytest.raises(OperatorError, match=r"is missing \(windows: 1, segments: 1\)"):
        async with pipeline.life():
            pass
    assert pipeline.private_files() == segments
    pipeline.new_ledger = True
    async with pipeline.life():
        pass
    (told,) = named(logged, "recovery.quarantined")
    assert told["count"] == 1
    assert told["path"].startswith(str(tmp_path / QUARANTINE))
    assert quarantined(tmp_path) == segments
    assert list((tmp_path / PRIVATE / "segments").iterdir()) == []
    assert pipeline.published() == {FIRST: [1, 2]}
    assert len(named(logged, "ledger.accepted")) == 1


async def test_a_ledger_that_lost_its_folders_word_gives_it_again(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path)
    await rows_in(pipeline)
    before = json.loads((tmp_path / OWNER).read_text())
    (tmp_path / OWNER).unlink()
    async with pipeline.life():
        pass
    after = json.loads((tmp_path / OWNER).read_text())
    assert after == before | {"claims": before["claims"] + 1}


@pytest.mark.parametrize("restarts", [0, 1])
async def test_a_ledger_from_before_the_last_rows_is_refused_and_their_segments_are_kept(
    tmp_path: Path, logged: list[dict[str, Any]], restarts: int
) -> None:
    """Also one from the midst of the last server's life: the segments' names tell more than the ledger knows."""
    pipeline = Pipeline(tmp_path)
    async with pipeline.life():
        session = await pipeline.open("a")
        await pipeline.give(session, [(1, 1000)])
        await pipeline.cycle()
        pipeline.ledger.store._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        old = (tmp_path / LEDGER).read_bytes()
        for number in (2, 3):
            await pipeline.give(session, [(number, 1000 * number)])
            await pipeline.cycle()
    for _ in range(restarts):
        async with pipeline.life():
            pass
    segments = pipeline.private_files()
    assert len(segments) == 3
    lose_ledger(tmp_path)
    (tmp_path / LEDGER).write_bytes(old)
    for _ in range(2):
        with pytest.raises(OperatorError, match="it was rolled back"):
            async with pipeline.life():
                pass
    assert pipeline.private_files() == segments
    pipeline.new_ledger = True
    async with pipeline.life():
        pass
    assert quarantined(tmp_path) == segments[1:]
    pipeline.new_ledger = False
    async with pipeline.life():
        pass


@pytest.mark.parametrize(
    ("ledger", "advice"),
    [
        ("dynamodb://t/new", "goes on under its new name with --rename-from old, once it is drained"),
        ("dynamodb://other/new", "If the ledger was moved on purpose, start once with --new-ledger"),
        (None, "If the ledger was moved on purpose, start once with --new-ledger"),
    ],
)
def test_a_renamed_pipeline_in_the_same_table_is_told_how_it_goes_on(
    store: OutputStore, ledger: str | None, advice: str
) -> None:
    FolderClaim(store, pipeline="old", ledger="dynamodb://t/old").inspect()
    with pytest.raises(
        OperatorError, match="belongs to pipeline old on the ledger dynamodb://t/old"
    ) as caught:
        FolderClaim(store, pipeline="new", ledger=ledger).inspect()
    assert advice in caught.value.advice


async def test_a_folder_is_found_under_the_former_name_until_the_ledger_has_the_new_one(
    store: OutputStore, tmp_path: Path
) -> None:
    async def start(ledger: str, former: str | None = None, *, renamed: bool = False) -> None:
        claim = FolderClaim(store, pipeline=ledger, ledger=f"dynamodb://t/{ledger}", former=former)
        claim.inspect()
        opened = SqliteLedger(tmp_path / "ledger", pipeline="a", server_id="s", clock=VirtualClock(0))
        await claim.acquire(await opened.open(), opened)
        if renamed:
            await claim.renamed()
        await opened.close()

    await start("old", renamed=True)
    await start("new", "dynamodb://t/old")
    await start("old")
    await start("new", "dynamodb://t/old", renamed=True)
    await start("new")
    with pytest.raises(OperatorError, match="belongs to pipeline new on the ledger dynamodb://t/new"):
        await start("old")
