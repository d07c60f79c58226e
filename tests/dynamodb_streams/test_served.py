"""``source = dynamodb://…``: whole servers, over HTTP and aioboto3, read a stream into windows."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest
from support.serving import no_aws, quick, serving, until

from mldserver.config.resolve import resolve
from mldserver.dynamodb_streams import stream_listing
from mldserver.dynamodb_streams.positions import ReadPosition, Token
from mldserver.dynamodb_streams.shard_tree import After
from mldserver.errors import ConfigError
from mldserver.server import EXIT_FAULT, EXIT_OPERATOR, Server
from mldserver.testing import FakeStreams, LocalEngine

HANDLER = """
from mldserver import tumbling

schema = "id BIGINT NOT NULL"
windows = tumbling("10 seconds")


def process_record(record):
    return int(record.json()["dynamodb"]["Keys"]["id"]["N"]),
"""


@pytest.fixture
def handler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    no_aws(monkeypatch, tmp_path)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    (tmp_path / "changed_ids.py").write_text(HANDLER)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(stream_listing, "_CHILD_SECONDS", (0.01, 0.05))
    return "changed_ids"


def reading(out: Path, handler: str, url: str, **changes: Any) -> Any:
    source = f"dynamodb://orders?endpoint_url={url}&region=us-east-1"
    return quick(out, handler, source=source, poll_seconds=0.05, list_seconds=0.2, **changes)


def published(out: Path) -> Counter[int]:
    files = [str(path) for path in out.glob("window=*/*.parquet")]
    return Counter(ds.dataset(files, format="parquet").to_table(columns=["id"])["id"].to_pylist())


@pytest.mark.usefixtures("no_standby")
@pytest.mark.parametrize("workers", [None, 1], ids=["inline", "in a worker"])
async def test_a_server_reads_a_stream_by_its_settings_and_goes_on_after_a_restart(
    tmp_path: Path, handler: str, workers: int | None, logged: list[dict[str, Any]]
) -> None:
    fake, out = FakeStreams(shards=2), tmp_path / "out"
    async with fake.serving() as url:
        settings = reading(out, handler, url, workers=workers)
        for number in range(100):
            fake.put({"id": number})
        async with serving(settings) as server:
            assert await server.listening() == fake.arn
            await until(lambda: server.status().rows_durable == 100)
            told = server.document()
            assert (told.listening, told.totals.records, told.totals.rows) == (fake.arn, 100, 100)
            assert sum(shard.records for shard in told.shards) == 100
            assert {shard.state for shard in told.shards} == {"connected"}
            assert {shard.checkpoint_age_seconds for shard in told.shards} == {None}, (
                "nothing is checkpointed"
            )
        for number in range(100, 150):
            fake.put({"id": number})
        fake.split(fake.open_shards[0])
        for number in range(150, 200):
            fake.put({"id": number})
        for shard in fake.shards.values():
            shard.closed = True
        async with serving(settings) as server:
            await server.finished()
    assert published(out) == Counter(range(200))
    assert {entry["address"] for entry in logged if entry["event"] == "server.listening"} == {fake.arn}


async def test_changes_of_an_item_wait_behind_its_dead_letter_also_after_a_restart(
    tmp_path: Path, handler: str
) -> None:
    picky = HANDLER.replace("return int", "assert b'broken' not in record.data\n    return int")
    (tmp_path / f"{handler}.py").write_text(picky)
    fake, out = FakeStreams(), tmp_path / "out"
    async with fake.serving() as url:
        settings = reading(out, handler, url, on_key_failure="park", attempts="1")
        for item in ({"id": 3, "is": "broken"}, {"id": 4}, {"id": 3, "is": "mended"}):
            fake.put(item)
        async with serving(settings) as server:
            await until(lambda: (server.status().rows_durable, server.status().dead_letters) == (1, 2))
        async with serving(settings) as server:
            fake.put({"id": 3, "is": "well"})
            fake.put({"id": 5})
            await until(lambda: (server.status().rows_durable, server.status().dead_letters) == (1, 1))


async def test_a_table_without_a_stream_ends_the_start_with_what_to_do(
    tmp_path: Path, handler: str, logged: list[dict[str, Any]]
) -> None:
    fake = FakeStreams()
    fake.disable()
    async with fake.serving() as url:
        server = Server(reading(tmp_path / "out", handler, url), engine=LocalEngine())
        assert await server.run() == EXIT_FAULT
    failed = next(entry for entry in logged if entry["event"] == "server.failed")
    assert "has no enabled stream" in failed["what"]
    assert fake.arn in failed["advice"]


def settings(**given: str) -> Any:
    return resolve({"handler": "handlers.x", **given}, environ={"HOME": "/"}, folder=Path("/nowhere"))


ARN = "arn:aws:dynamodb:eu-west-3:123456789012:table/orders/stream/2026-11-22T18:00:00.000"


def test_a_source_is_daemons_a_table_or_a_streams_arn() -> None:
    assert settings().source == "mld"
    table = settings(source="dynamodb://Orders?region=eu-west-1&endpoint_url=http://localhost:8000").source
    assert (table.table, table.region, table.endpoint_url) == ("Orders", "eu-west-1", "http://localhost:8000")
    assert str(table) == "dynamodb://Orders?region=eu-west-1&endpoint_url=http://localhost:8000"
    stream = settings(source=f"dynamodb://{ARN}").source
    assert (stream.table, stream.region) == (ARN, "eu-west-3")


@pytest.mark.parametrize(
    "wrong", ["kinesis://x", "dynamodb://", "dynamodb://arn:aws:s3:::x", "dynamodb://orders?x=1"]
)
def test_any_other_source_is_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match="source"):
        settings(source=wrong)


def test_a_stream_that_daemons_read_is_no_source_of_ours() -> None:
    with pytest.raises(ConfigError, match="Leave one of the two out"):
        settings(source="dynamodb://orders", stream="kinesis-orders")


async def test_a_token_in_a_file_says_where_a_pipeline_begins(tmp_path: Path, handler: str) -> None:
    fake, out = FakeStreams(), tmp_path / "out"
    (shard,) = fake.shards
    numbers = [fake.put({"id": number}) for number in range(10)]
    after = After(int(numbers[6]["dynamodb"]["SequenceNumber"]))  # type: ignore[index]  # each changed something
    (tmp_path / "token.json").write_text(str(Token(fake.arn, (ReadPosition(shard, None, after),))))
    for closed in fake.shards.values():
        closed.closed = True
    async with fake.serving() as url:
        settings = reading(out, handler, url, **{"from": str(tmp_path / "token.json")})
        async with serving(settings) as server:
            await server.finished()
    assert published(out) == Counter([7, 8, 9])


@pytest.mark.parametrize("begin", ["2026-11-22T18:00:00", "yesterday", "{}", "foreign"])
async def test_trap_06_a_beginning_that_means_nothing_here_ends_the_start(
    tmp_path: Path, handler: str, begin: str, logged: list[dict[str, Any]]
) -> None:
    fake = FakeStreams()
    begin = str(Token(ARN, (ReadPosition("shardId-1", None, After(7)),))) if begin == "foreign" else begin
    async with fake.serving() as url:
        settings = reading(tmp_path / "out", handler, url, **{"from": begin})
        server = Server(settings, engine=LocalEngine())
        assert await server.run() == EXIT_OPERATOR
    assert [entry["error"] for entry in logged if entry["event"] == "server.failed"] == ["ConfigError"]


async def test_a_token_s_file_that_cannot_be_read_is_the_operators_error(
    tmp_path: Path, handler: str, logged: list[dict[str, Any]]
) -> None:
    (tmp_path / "token.json").write_bytes(b"\xff\xfe")
    settings = reading(
        tmp_path / "out", handler, "http://127.0.0.1:1", **{"from": str(tmp_path / "token.json")}
    )
    assert await Server(settings, engine=LocalEngine()).run() == EXIT_OPERATOR
    (failed,) = [entry for entry in logged if entry["event"] == "server.failed"]
    assert "token.json cannot be read" in failed["what"]


@pytest.mark.parametrize(
    "trouble", [pytest.param("disconnect", marks=pytest.mark.long), "ExpiredTokenException", "pause"]
)
async def test_the_lag_grows_while_nothing_can_be_read(tmp_path: Path, handler: str, trouble: str) -> None:
    fake = FakeStreams()
    fake.put({"id": 1})
    async with fake.serving() as url, serving(reading(tmp_path / "out", handler, url)) as server:

        def lag_ms() -> int | None:
            (shard,) = server.document().shards or (None,)
            return None if shard is None else shard.lag_ms

        await until(lambda: server.document().totals.records == 1 and (lag_ms() or 9999) < 500)
        if trouble == "pause":
            await server.carry_out("pause", "")
        else:
            fake.fail("GetRecords", trouble, times=10**9)  # type: ignore[arg-type]  # any of AWS
            fake.fail("GetShardIterator", trouble, times=10**9)
        seen: list[int | None] = []

        def grown() -> bool:
            seen.append(lag_ms())
            return (seen[-1] or 0) > 3500

        await until(grown)
        high = [lag for lag in seen if lag is not None and lag > 1500]  # less may be the machine
        assert high == sorted(high), "it does not begin again when the shard is opened again"
        fake.fail_no_more()
        if trouble == "pause":
            await server.carry_out("resume", "")
        await until(lambda: (lag_ms() or 9999) < 1500)
