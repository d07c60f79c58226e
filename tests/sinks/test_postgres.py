"""The JDBC sink on a real PostgreSQL: types, revisions, two servers, crashes at each step, and what it says in words."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.postgres import JAR, Postgres, serving

from mldserver.engine_jobs import PublishJob
from mldserver.errors import DriverLost, NotThereYet, OperatorError
from mldserver.sinks import jdbc
from mldserver.sinks.database import Database, DatabaseError, connected
from mldserver.sinks.sink import Owner, SinkSpec
from mldserver.spark.client import make_engine
from mldserver.spark.session import DriverSession
from mldserver.windows import Window

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.services, pytest.mark.slow]

DRIVER = {"driver": "org.postgresql.Driver"}


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    with serving() as server:
        yield server


class Place:
    """Outputs of windows, staged as attempts do, and a database without tables."""

    def __init__(self, spark: SparkSession, root: Path, server: Postgres) -> None:
        self.spark = spark
        self.root = root
        self.server = server
        self.sink = self.sink_of("postgres")

    def sink_of(self, user: str, table: str = "events", **options: str) -> SinkSpec:
        return SinkSpec(
            "jdbc", self.server.url.removeprefix("jdbc:"), table, DRIVER | {"user": user} | options
        )

    def output(self, count: int, revision: int = 1, window: str = "w1", **columns: str) -> PublishJob:
        """Stage so many rows, numbered; ``columns``: more of them, as SQL."""
        more = [f"{sql} AS {name}" for name, sql in columns.items()]
        return self.staged(
            self.spark.range(count, numPartitions=1).selectExpr("id AS n", *more), revision, window
        )

    def staged(self, rows: DataFrame, revision: int = 1, window: str = "w1") -> PublishJob:
        staging = self.root / window / f"{revision}"
        rows.write.mode("overwrite").parquet(str(staging))
        files = tuple(path.name for path in staging.glob("part-*.parquet"))
        about = Window(window, None, None, revision, "flights")
        return PublishJob(about, str(staging), files, rows.count(), ledger="1ed9e400")

    def publish(self, job: PublishJob) -> None:
        jdbc.publish(self.spark, self.sink, job)

    def ask(self, sql: str) -> list[str]:
        with self.server.session() as session:
            return session.ask(sql)

    def rows(self) -> dict[str, str]:
        """Each window's rows in the table: how many, and of which revisions."""
        found = self.ask(
            "SELECT _window, count(*), min(_revision), max(_revision) FROM events GROUP BY 1 ORDER BY 1"
        )
        return dict(line.split("|", 1) for line in found)

    def tables(self) -> list[str]:
        return self.ask("SELECT tablename FROM pg_tables WHERE schemaname = 'public' ORDER BY 1")


@pytest.fixture
def place(session: DriverSession, tmp_path: Path, server: Postgres) -> Place:
    place = Place(session.spark, tmp_path, server)
    place.ask("DROP SCHEMA public CASCADE; CREATE SCHEMA public; GRANT USAGE ON SCHEMA public TO PUBLIC")
    return place


def test_every_value_is_in_the_table_as_it_was_in_the_window(place: Place) -> None:
    at = datetime(1969, 12, 31, 23, 59, 59, 999999, tzinfo=UTC)
    text = "\u00e4\U0001f6eb 'quoted' \"twice\" \\ |\n" * 50_000
    values = {
        "name STRING": text,
        "Mixed STRING": "case",
        "big BIGINT": -(2**63),
        "amount DECIMAL(38,9)": Decimal("-12345678901234567890123456789.123456789"),
        "at TIMESTAMP": at,
        "clock TIMESTAMP_NTZ": datetime(2027, 3, 28, 2, 30),  # noqa: DTZ001  # a time of day that Berlin skips
        "day DATE": date(1, 1, 1),
        "ok BOOLEAN": True,
        "ratio DOUBLE": float("-inf"),
        "bytes BINARY": b"\x00\xff",
        "tags ARRAY<STRING>": ["a", None],
    }
    rows = place.spark.createDataFrame([tuple(values.values()), (None,) * len(values)], ", ".join(values))
    jdbc.check(place.spark, place.sink)
    place.publish(place.staged(rows))
    place.publish(place.staged(rows, revision=2))
    types = "SELECT column_name, data_type FROM information_schema.columns WHERE table_name = 'events'"
    assert {*place.ask(types)} >= {
        "at|timestamp with time zone",
        "clock|timestamp without time zone",
        "amount|numeric",
        "name|text",
        "Mixed|text",
        "tags|ARRAY",
        "_window|character varying",
        "_revision|integer",
    }
    told = (
        "SELECT md5(name), \"Mixed\", big, amount, at AT TIME ZONE 'UTC', clock, day, ok, ratio, bytes, tags,"
        " _window, _revision FROM events ORDER BY big"
    )
    whole = (
        f"{hashlib.md5(text.encode()).hexdigest()}|case|-9223372036854775808"
        "|-12345678901234567890123456789.123456789|1969-12-31 23:59:59.999999|2027-03-28 02:30:00|0001-01-01|t"
        "|-Infinity|\\x00ff|{a,NULL}|w1|2"
    )
    assert place.ask(told) == [whole, "|" * 11 + "w1|2"]


def test_readers_see_each_revision_whole_and_none_after_a_later_one(place: Place) -> None:
    place.publish(place.output(10))
    whole = ["10|1|1", "20|2|2", "40|4|4", "0||"]
    seen: list[str] = []
    over = threading.Event()

    def read() -> None:
        with place.server.session() as session:
            while not over.wait(0.01):
                seen.extend(session.ask("SELECT count(*), min(_revision), max(_revision) FROM events"))

    with ThreadPoolExecutor(1) as readers:
        reader = readers.submit(read)

        def until_seen(line: str) -> None:
            while seen[-1:] != [line]:
                assert not reader.done()
                over.wait(0.01)

        try:
            until_seen(whole[0])
            for revision in (2, 4):
                place.publish(place.output(10 * revision, revision))
                until_seen(f"{10 * revision}|{revision}|{revision}")
            place.publish(place.output(30, 3))
            place.publish(place.output(0, 5))
            until_seen(whole[-1])
            place.publish(place.output(10))
        finally:
            over.set()
        reader.result()
    assert [line for at, line in enumerate(seen) if line not in seen[:at]] == whole
    assert seen == sorted(seen, key=whole.index)
    assert place.ask("SELECT * FROM events__windows") == ["flights|w1|5|none"]
    assert place.tables() == ["events", "events__owner", "events__windows"]


def test_of_two_servers_that_publish_the_same_windows_neither_loses_nor_doubles_a_row(place: Place) -> None:
    jobs = [place.output(100, window=window) for window in ("w1", "w2")]
    refused: Counter[str] = Counter()

    def serve(jobs: list[PublishJob]) -> None:
        jdbc.check(place.spark, place.sink)
        for job in jobs:
            # The server, which backs off, needs few tries.
            for _ in range(200):
                try:
                    place.publish(job)
                    break
                except Exception as error:  # noqa: BLE001  # as the server does, whatever it is
                    refused[type(error).__name__] += 1
            else:
                raise AssertionError(f"{job.window.id} is refused again and again: {refused}")

    with ThreadPoolExecutor(2) as servers:
        for served in [servers.submit(serve, jobs), servers.submit(serve, jobs)]:
            served.result()
    assert place.rows() == dict.fromkeys(("w1", "w2"), "100|1|1")
    assert place.tables() == ["events", "events__owner", "events__windows"]


@pytest.mark.parametrize(
    ("where", "how"),
    [
        ("before the transaction", signal.SIGKILL),
        ("at its end", signal.SIGKILL),
        pytest.param("in its middle", signal.SIGKILL, marks=pytest.mark.long),
        pytest.param("after it", signal.SIGKILL, marks=pytest.mark.long),
        pytest.param("before the transaction", signal.SIGINT, marks=pytest.mark.long),
        pytest.param("at its end", signal.SIGINT, marks=pytest.mark.long),
        pytest.param("after it", signal.SIGINT, marks=pytest.mark.long),
    ],
)
def test_a_database_that_ends_at_any_step_comes_back_with_the_old_rows_or_the_new_ones(
    place: Place, monkeypatch: pytest.MonkeyPatch, where: str, how: signal.Signals
) -> None:
    place.publish(place.output(10))
    job = place.output(20, revision=2)

    def ends(step: Callable[..., None], *, before: bool) -> Callable[..., None]:
        def stepped(*given: Any) -> None:
            if not before:
                step(*given)
            place.server.stop(how)
            if before:
                step(*given)

        return stepped

    name, before = {
        "before the transaction": ("move", True),
        "in its middle": ("_copy_stage", True),
        "at its end": ("_copy_stage", False),
        "after it": ("clear", True),
    }[where]
    with monkeypatch.context() as patched:
        patched.setattr(jdbc, name, ends(getattr(jdbc, name), before=before))
        with pytest.raises(DatabaseError, match=r"backend|connection|terminating|I/O"):
            place.publish(job)
    place.server.start()
    assert place.rows() == {"w1": "20|2|2" if where == "after it" else "10|1|1"}
    place.publish(job)
    assert place.rows() == {"w1": "20|2|2"}
    assert place.tables() == ["events", "events__owner", "events__windows"]


def test_what_the_database_refuses_is_said_at_the_start_in_its_words(place: Place) -> None:
    place.ask(
        """
        DROP ROLE IF EXISTS guest; CREATE ROLE guest LOGIN PASSWORD 'right';
        CREATE TABLE theirs (name TEXT, _window TEXT, _revision INTEGER);
        CREATE TABLE number (_window INTEGER, _revision INTEGER)
        """
    )
    guest = {"password": "right"}

    def told(sink: SinkSpec) -> str:
        with pytest.raises(OperatorError) as caught:
            jdbc.check(place.spark, sink)
        assert type(caught.value) is OperatorError
        return f"{caught.value} {caught.value.advice}"

    assert 'password authentication failed for user "guest" (SQLSTATE 28P01)' in told(
        place.sink_of("guest", password="wrong")
    )
    nowhere = SinkSpec("jdbc", place.sink.target.replace("/postgres", "/nowhere"), "t", place.sink.options)
    assert 'database "nowhere" does not exist' in told(nowhere)
    assert "permission denied for schema public" in told(place.sink_of("guest", **guest))
    assert "one who may create tables beside sink_table" in told(place.sink_of("guest", **guest))
    assert 'schema "absent" does not exist' in told(place.sink_of("postgres", "absent.events"))
    assert "operator does not exist: integer = character varying" in told(place.sink_of("postgres", "number"))
    place.ask("GRANT CREATE ON SCHEMA public TO guest")
    for right in ("SELECT", "DELETE", "INSERT"):
        assert "permission denied for table theirs" in told(place.sink_of("guest", "theirs", **guest))
        place.ask(f"GRANT {right} ON theirs TO guest")
    jdbc.check(place.spark, place.sink_of("guest", "theirs", **guest))
    assert "has 44 bytes" in told(place.sink_of("postgres", "x" * 44))
    assert "at most 43 bytes" in told(place.sink_of("postgres", f'public."{"x" * 44}"'))
    jdbc.check(place.spark, place.sink_of("postgres", f"public.{'x' * 43}"))


def test_a_database_that_is_not_there_yet_is_told_from_one_that_refuses(place: Place) -> None:
    place.server.stop()
    try:
        with pytest.raises(NotThereYet, match=r"Connection to 127\.0\.0\.1:\d+ refused"):
            jdbc.check(place.spark, place.sink)
    finally:
        place.server.start()


def test_a_table_of_other_columns_is_named_and_the_window_comes_once_it_is_mended(place: Place) -> None:
    place.ask(
        "CREATE TABLE events (id BIGINT GENERATED ALWAYS AS IDENTITY, n INTEGER, seen TIMESTAMPTZ DEFAULT now(),"
        ' "_WINDOW" TEXT NOT NULL, _revision BIGINT)'
    )
    jdbc.check(place.spark, place.sink)
    place.publish(place.output(3))
    more = place.output(3, revision=2, carrier="'AA'")
    with pytest.raises(RuntimeError, match="the table events has no column carrier"):
        place.publish(more)
    place.ask("ALTER TABLE events ADD carrier INTEGER")
    with pytest.raises(
        DatabaseError, match='column "carrier" is of type integer but expression is of type text'
    ):
        place.publish(more)
    place.ask("ALTER TABLE events DROP carrier, ADD carrier TEXT")
    place.publish(more)
    assert place.ask('SELECT n, carrier, "_WINDOW", _revision, id IS NULL, seen IS NULL FROM events') == [
        f"{n}|AA|w1|2|f|f" for n in range(3)
    ]
    zero = place.output(1, window="w2", carrier="concat('A', chr(0))")
    with pytest.raises(Exception, match='invalid byte sequence for encoding "UTF8": 0x00'):
        place.publish(zero)
    with pytest.raises(DatabaseError, match="integer out of range"):
        place.publish(place.staged(place.spark.sql("SELECT 3000000000 AS n"), revision=3))
    place.publish(place.output(0, window="w2"))
    assert place.tables() == ["events", "events__owner", "events__windows"]


def test_a_server_that_froze_in_its_transaction_holds_others_up_no_longer_than_the_database_lets_it(
    place: Place,
) -> None:
    place.publish(place.output(10))
    job = place.output(20, revision=2)
    its = place.sink_of("postgres", options="-c idle_in_transaction_session_timeout=500")

    def freeze(database: Database) -> None:
        with database.transaction():
            database.change("UPDATE events__windows SET revision = 9")
            place.publish(job)
            assert place.rows() == {"w1": "20|2|2"}

    with (
        connected(place.spark, its) as database,
        pytest.raises(DatabaseError, match="idle-in-transaction timeout"),
    ):
        freeze(database)
    assert place.ask("SELECT * FROM events__windows") == ["flights|w1|2|none"]


GATE = """
CREATE OR REPLACE FUNCTION pass_gate() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN PERFORM pg_advisory_xact_lock_shared(1); RETURN NEW; END $$;
CREATE TRIGGER gate BEFORE {what} FOR EACH ROW EXECUTE FUNCTION pass_gate()
"""
"""Who changes a row like this waits for whoever holds the lock."""


async def test_a_driver_killed_between_stage_and_commit_or_in_the_transaction_loses_and_doubles_nothing(
    server: Postgres, tmp_path: Path, long: bool
) -> None:
    places = ["INSERT ON events", *(["UPDATE OF revision ON events__windows"] if long else [])]
    noon = datetime(2027, 3, 28, 12, tzinfo=UTC)
    conf = {
        "spark.jars": str(JAR),
        # Far from UTC, which nobody who reads the table should notice.
        "spark.driver.extraJavaOptions": "-Duser.timezone=Asia/Kolkata",
    }
    sink = SinkSpec("jdbc", server.url.removeprefix("jdbc:"), "events", DRIVER | {"user": "postgres"})
    work = {"work_dir": tmp_path / "work", "archive_after": None, "python_path": ()}
    engine = make_engine("", "n BIGINT", master="local[1]", conf=conf, quick=True, sink=sink, **work)

    def output(revision: int) -> PublishJob:
        rows = pa.table({"n": range(10 * revision), "at": [noon] * 10 * revision})
        pq.write_table(rows, tmp_path / f"{revision}.parquet")
        window = Window("w1", None, None, revision, "flights")
        return PublishJob(window, str(tmp_path), (f"{revision}.parquet",), rows.num_rows)

    async with asyncio.TaskGroup() as group:
        group.create_task(engine.run())
        with server.session() as session, server.session() as holder:
            session.ask("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
            await engine.publish(output(1))
            for revision, place in enumerate(places, 2):
                session.ask(GATE.format(what=place))
                holder.ask("SELECT pg_advisory_lock(1)")
                call = asyncio.ensure_future(engine.publish(output(revision)))
                async with asyncio.timeout(800):
                    while session.ask("SELECT count(*) FROM pg_locks WHERE NOT granted") != ["1"]:  # noqa: ASYNC110  # another process has no event to wait on
                        await asyncio.sleep(0.05)
                assert engine.driver.life is not None
                os.kill(engine.driver.life.child.pid, signal.SIGKILL)
                with pytest.raises(DriverLost):
                    await call
                seen = session.ask("SELECT count(*), min(_revision), max(_revision) FROM events")
                assert seen == [f"{10 * revision - 10}|{revision - 1}|{revision - 1}"]
                holder.ask("SELECT pg_advisory_unlock(1)")
                await engine.publish(output(revision))
                session.ask(f"DROP TRIGGER gate ON {place.rpartition(' ')[2]}")
                seen = session.ask(
                    "SELECT count(*), min(_revision), max(_revision), min(at), max(at) FROM events"
                )
                noons = "2027-03-28 12:00:00+00"
                assert seen == [f"{10 * revision}|{revision}|{revision}|{noons}|{noons}"]
            assert session.ask("SELECT stage FROM events__windows") == ["none"]
            assert session.ask("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'") == ["3"]
        await engine.close()


def test_a_window_s_own_rows_are_found_by_an_index_where_the_server_makes_the_table(place: Place) -> None:
    jdbc.publish(place.spark, place.sink_of("postgres", 'public."my events"'), place.output(3))
    assert place.ask("SELECT indexdef FROM pg_indexes WHERE tablename = 'my events'") == [
        'CREATE INDEX "my events__window" ON public."my events" USING btree (_window)'
    ]


def test_of_two_pipelines_that_start_with_one_table_one_gets_it_and_no_row_goes(place: Place) -> None:
    owners = [Owner("flights", "1ed9e400"), Owner("trains", "7ea15000")]
    together = threading.Barrier(4)

    def start(owner: Owner) -> str:
        together.wait()
        try:
            jdbc.own(place.spark, place.sink, owner)
        except OperatorError as error:
            return str(error)
        return owner.pipeline

    with ThreadPoolExecutor(4) as servers:
        told = list(servers.map(start, owners * 2))
    (winner,) = {text for text in told if text in {"flights", "trains"}}
    assert told.count(winner) == 2  # both servers of the pipeline may write
    assert sum(f"belongs to pipeline {winner}; this is pipeline" in text for text in told) == 2
    assert place.ask("SELECT pipeline, made FROM events__owner") == [f"{winner}|0"]
