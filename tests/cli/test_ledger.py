"""``mldserver ledger`` beside a server that lives."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.store import SqliteStore

from mldserver import cli
from mldserver.ledger.contract import (
    BatchProgress,
    BatchStep,
    Commit,
    Flush,
    PositionUpdate,
    Segment,
    SegmentKind,
    ServerState,
    StateFile,
    StoreUpdate,
)
from mldserver.ledger.sqlite import SqliteLedger
from mldserver.output.layout import LEDGER
from mldserver.records import Sequence
from mldserver.stores import ALL_KEYS, StoreClaim

FAR = Sequence(49_590_338_271_490_256_608_559_692_538_361_571_095_921_575_989_136_588_898, 3)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SqliteStore]:
    """A server that holds shard ``a``, has let go of ``b``, and has read nothing of ``c``."""
    store = SqliteStore(tmp_path / "out" / LEDGER, pipeline="trips", server_id="one")
    store.open(now_ms=1000)
    store.open_shard("a")
    store.open_shard("b", ("p", "q"))
    moves = (PositionUpdate("a", 1, FAR, 5, 2500), PositionUpdate("b", 1, Sequence(8), 5, 5, ended=True))
    batch = Segment("_mldserver/segments/batch/x", "batch-000000000004", 10, 100)
    late = Segment("_mldserver/segments/late", "old", 1, 10, 0, 1000, SegmentKind.LATE)
    progress = BatchProgress(4, 10, 1000)
    step = BatchStep(BatchProgress(), progress, max_rows=100)
    store.register(Flush(moves, (batch, late), clock=1234, batches=step), now_ms=1)
    store.release_shard("b", 1)
    store.open_shard("c", ("a",))
    store.release_shard("c", 1)
    store.sync(ServerState("one", 61_000, watermark_ms=2500, held_by="a", reason="behind"))
    yield store
    store.close()


def told(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert cli.run(["ledger", *arguments, "--out", "out"]) == code
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return captured.err if code else captured.out


def documents(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    return json.loads(told(capsys, *arguments, "--json"))


def test_show_tells_where_shards_and_servers_stand(
    server: SqliteStore, capsys: pytest.CaptureFixture[str]
) -> None:
    text = told(capsys, "show")
    lines = [line.split() for line in text.splitlines()]
    assert ["clock", "1,234"] in lines
    assert "batch progress      number 4, rows 10, opened 1970-01-01T00:00:01Z" in text
    assert ["late", "files", "waiting", "1"] in lines
    assert ["one", "1970-01-01T00:01:01Z", "1970-01-01T00:00:02.500Z", "-", "a", "behind"] in lines
    assert ["a", str(FAR), "1970-01-01T00:00:02.500Z", "1", "one", "-", "-", "-"] in lines
    assert [
        "b",
        "8",
        "1970-01-01T00:00:00.005Z",
        "1",
        "-",
        "p,",
        "q",
        "1970-01-01T00:00:00.001Z",
        "-",
    ] in lines
    assert ["c", "-", "-", "1", "-", "a", "-", "-"] in lines


def test_a_drain_is_told_while_it_is_under_way_and_until_the_next_start(
    server: SqliteStore, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "drain" not in told(capsys, "show")
    server.drain()
    assert ["draining", "yes"] in [line.split() for line in told(capsys, "show").splitlines()]
    server.leave()
    assert documents(capsys, "show")["draining"] is True


def test_a_ledger_in_a_file_of_its_own_is_found_beside_an_output_elsewhere(
    server: SqliteStore, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = ["ledger", "show", "--out", "s3://bucket/x", "--ledger"]
    assert cli.run([*elsewhere, f"sqlite:out/{LEDGER}"]) == 0
    assert "clock               1,234" in capsys.readouterr().out
    assert cli.run([*elsewhere, "sqlite"]) == 2
    assert "ledger = sqlite:PATH" in capsys.readouterr().err


def test_show_as_json_keeps_every_digit(server: SqliteStore, capsys: pytest.CaptureFixture[str]) -> None:
    found = documents(capsys, "show")
    assert found["shards"][0]["position"] == str(FAR)
    assert found["shards"][1]["parents"] == ["p", "q"]
    assert found["servers"][0]["held_by"] == "a"
    assert found["windows"] == {"open": 1, "cut": 0, "committed": 0, "published": 0, "set_aside": 0}
    assert found["segment_bytes"] == 100
    assert found["late_files_waiting"] == 1
    assert found["batch_progress"] == {"number": 4, "rows": 10, "opened_ms": 1000}


def test_an_idle_server_and_what_was_forgotten_are_told(
    server: SqliteStore, capsys: pytest.CaptureFixture[str]
) -> None:
    segment = Segment("_mldserver/segments/s", "w", 1, 1, 0, 5000)
    server.register(Flush((), (segment,)), now_ms=1)
    server.cut(("w",))
    server.sync(ServerState("one", 1, idle=True))
    server.begin_attempts(("w",))
    server.commit((Commit("w", 1, "s", (), 0),))
    server.published({"w": 1}, retain=False, now_ms=1)
    server.prune(windows_before_ms=5000, shards_before_ms=0)
    text = told(capsys, "show")
    assert "cut below           1970-01-01T00:00:05Z" in text
    assert "idle" in text


def test_looking_changes_nothing(server: SqliteStore, capsys: pytest.CaptureFixture[str]) -> None:
    before = server.peek()
    told(capsys, "show")
    assert server.peek() == before


def test_a_reset_forgets_a_position_of_a_shard_that_nobody_holds(
    server: SqliteStore, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told(capsys, "reset", "b") == "b  is reset: it has no position any more.\n"
    shard = server.peek().shards["b"]
    assert (shard.position, shard.ended, shard.epoch) == (None, False, 2)


def test_a_made_up_name_is_forgotten_unless_a_server_holds_it(
    server: SqliteStore, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "Shard a is held by the server one" in told(capsys, "forget", "b", "a", code=2)
    assert "No shard was named" in told(capsys, "forget", code=2)
    assert told(capsys, "forget", "b") == "b  is forgotten (its position was 8).\n"
    assert "b" not in server.peek().shards
    assert documents(capsys, "forget", "c") == {"forgotten": ["c"]}
    assert "no shard b" in told(capsys, "forget", "b", code=2)


def test_a_shard_that_a_server_holds_is_not_reset_nor_are_those_named_with_it(
    server: SqliteStore, capsys: pytest.CaptureFixture[str]
) -> None:
    before = server.peek()
    message = told(capsys, "reset", "b", "a", code=2)
    assert message.startswith("mldserver: Shard a is held by the server one. Stop that server first")
    assert "no shard nope" in told(capsys, "reset", "b", "nope", code=2)
    assert "No shard was named" in told(capsys, "reset", code=2)
    assert server.peek() == before


def test_a_shard_that_is_opened_in_the_moment_of_the_reset_is_told(
    server: SqliteStore,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peek = SqliteLedger.peek

    async def look_then_lose(ledger: SqliteLedger) -> Any:
        seen = await peek(ledger)
        other = SqliteStore(tmp_path / "out" / LEDGER, pipeline="trips", server_id="other")
        other.open(now_ms=2000)
        other.open_shard("b")
        other.close()
        return seen

    monkeypatch.setattr(SqliteLedger, "peek", look_then_lose)
    assert "a server has opened them since: b" in told(capsys, "reset", "b", code=2)
    monkeypatch.undo()
    assert server.peek().shards["b"].position == Sequence(8)


def keep_state(server: SqliteStore) -> None:
    """Let the shards ``root`` and ``child``, which share a store, have state, and only ``root`` be free."""
    for shard, parents in (("root", ()), ("child", ("root",))):
        server.open_shard(shard, parents, store=StoreClaim(None))
    moved = PositionUpdate("root", 1, None, None, None)
    file = StateFile("_mldserver/state/1", {"root": (ALL_KEYS,)}, 1, 10)
    update = StoreUpdate("root", 0, ("root",))
    assert server.register(Flush((moved,), stores=(update,), state_file=file), now_ms=1).registered
    server.release_shard("root", 1)


def test_a_shard_with_keyed_state_is_reset_only_together_with_its_state(
    server: SqliteStore, capsys: pytest.CaptureFixture[str]
) -> None:
    keep_state(server)
    before = server.peek()
    refused = told(capsys, "reset", "b", "root", code=2)
    assert "Shard root has keyed state. Nothing was changed. Give --forget-state" in refused
    refused = told(capsys, "reset", "root", "--forget-state", code=2)
    assert "Shard child shares the keyed state of shard root, and is held by the server one" in refused
    assert server.peek() == before
    server.release_shard("child", 1)
    said = told(capsys, "reset", "root", "b", "--forget-state")
    assert said.count("is reset: it has no position and no keyed state any more.") == 2
    assert server.peek().stores == {}


def test_a_made_up_name_with_keyed_state_is_forgotten_only_together_with_its_state(
    server: SqliteStore, capsys: pytest.CaptureFixture[str]
) -> None:
    keep_state(server)
    server.release_shard("child", 1)
    assert documents(capsys, "show")["state_files"] == 1
    assert "Shard root has keyed state" in told(capsys, "forget", "root", code=2)
    assert documents(capsys, "forget", "root", "--forget-state") == {"forgotten": ["root"]}
    assert server.peek().state_files["_mldserver/state/1"].needed == {}


def test_a_gap_is_accepted_for_the_next_opening_only(
    server: SqliteStore, capsys: pytest.CaptureFixture[str]
) -> None:
    assert documents(capsys, "accept-gap", "a") == {"accepted": "a", "position": str(FAR)}
    assert told(capsys, "accept-gap", "c") == "c  may start beyond nothing, the next time it is opened.\n"
    assert "gap accepted" in told(capsys, "show")
    assert [server.open_shard("a").gap_accepted for _ in range(2)] == [True, False]
    assert "no shard nope" in told(capsys, "accept-gap", "nope", code=2)


def test_a_shard_that_was_pruned_in_the_moment_of_accepting_is_told(
    server: SqliteStore, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def too_late(*_: object) -> bool:
        return False

    monkeypatch.setattr(SqliteLedger, "accept_gap", too_late)
    assert "no shard a" in told(capsys, "accept-gap", "a", code=2)


def test_an_empty_ledger_is_told_without_what_it_does_not_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = SqliteStore(tmp_path / "out" / LEDGER, pipeline="trips", server_id="one")
    store.open(now_ms=0)
    store.close()
    text = told(capsys, "show")
    assert "windows             none" in text
    assert "cut below" not in text


def test_a_reset_is_told_as_json_too(server: SqliteStore, capsys: pytest.CaptureFixture[str]) -> None:
    assert documents(capsys, "reset", "b", "c") == {"reset": ["b", "c"]}
