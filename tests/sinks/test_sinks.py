"""Table sinks on a real Spark: JDBC against Derby, which Spark brings."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from mldserver.engine_jobs import NO_REVISION, PublishJob, early_revision
from mldserver.errors import OperatorError
from mldserver.sinks import find, jdbc
from mldserver.sinks.database import connected
from mldserver.sinks.sink import (
    Owner,
    SinkSpec,
    must_note,
    staged,
)
from mldserver.spark.session import DriverSession
from mldserver.windows import Window

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.slow

NOW = datetime(2027, 1, 1, tzinfo=UTC)


def check(spark: SparkSession, sink: SinkSpec) -> None:
    find(sink.format).check(spark, sink)


def publish(spark: SparkSession, sink: SinkSpec, job: PublishJob) -> None:
    find(sink.format).publish(spark, sink, job)


def own(spark: SparkSession, sink: SinkSpec, owner: Owner, *, new_ledger: bool = False) -> None:
    find(sink.format).own(spark, sink, owner, new_ledger=new_ledger)


LEDGER = "1ed9e400"
OURS = Owner("flights", LEDGER)


@pytest.fixture
def spark(session: DriverSession) -> SparkSession:
    return session.spark


class Place:
    """Outputs of windows, staged as attempts do."""

    def __init__(self, spark: SparkSession, root: Path) -> None:
        self.spark = spark
        self.root = root
        self.sink = SinkSpec("jdbc", f"derby:{root}/db;create=true", "events")

    def output(
        self, names: list[str] | None, *, revision: int = 1, window: str = "w1", column: str = "name"
    ) -> PublishJob:
        """Stage rows with these names; None: an output that has nothing to show."""
        staging = self.root / f"out [{window}]" / f"{revision}"
        about = Window(window, None, None, revision, "flights")
        if names is None:
            return PublishJob(about, str(staging), (), 0, ledger=LEDGER)
        rows = [(name, number, NOW) for number, name in enumerate(names)]
        frame = self.spark.createDataFrame(rows, f"{column} STRING, n BIGINT, at TIMESTAMP")
        frame.coalesce(1).write.mode("overwrite").parquet(str(staging))
        files = tuple(path.name for path in staging.glob("part-*.parquet"))
        return PublishJob(about, str(staging), files, len(rows), ledger=LEDGER)

    def query(self, text: str) -> list[tuple[Any, ...]]:
        reader = self.spark.read.format("jdbc").options(url=f"jdbc:{self.sink.target}", query=text)
        return sorted(tuple(row) for row in reader.load().collect())

    def rows(self) -> list[tuple[Any, ...]]:
        """Each row's name, window and revision."""
        return self.query('SELECT "name", "_window", "_revision" FROM events')

    def windows(self) -> list[tuple[Any, ...]]:
        return self.query("SELECT * FROM events__windows")

    def stages(self) -> list[tuple[Any, ...]]:
        return self.query(
            "SELECT TABLENAME FROM SYS.SYSTABLES WHERE TABLENAME LIKE '%STAGE%' OR TABLENAME LIKE '%FIRST%'"
        )

    def attempt(self, job: PublishJob, name: str) -> jdbc.Try:
        own(self.spark, self.sink, OURS)
        return jdbc.Try(job, "events", f"events__stage_{name}")


@pytest.fixture
def place(spark: SparkSession, tmp_path: Path) -> Place:
    return Place(spark, tmp_path)


def test_jdbc_makes_its_tables_and_a_repeated_write_changes_nothing(place: Place) -> None:
    check(place.spark, place.sink)
    for _ in range(2):
        publish(place.spark, place.sink, place.output(["a", "b"]))
    publish(place.spark, place.sink, place.output(["z"], window="w2"))
    assert place.rows() == [("a", "w1", 1), ("b", "w1", 1), ("z", "w2", 1)]
    assert place.windows() == [("flights", "w1", 1, "none"), ("flights", "w2", 1, "none")]
    assert place.stages() == []
    check(place.spark, place.sink)


def test_jdbc_a_revision_replaces_the_one_before_and_never_the_other_way_round(place: Place) -> None:
    publish(place.spark, place.sink, place.output(["a", "b"]))
    publish(place.spark, place.sink, place.output(["a", "b", "late"], revision=2))
    publish(place.spark, place.sink, place.output(["a", "b"]))
    assert place.rows() == [("a", "w1", 2), ("b", "w1", 2), ("late", "w1", 2)]
    publish(place.spark, place.sink, place.output(None, revision=3))
    publish(place.spark, place.sink, place.output(["a"], revision=2))
    assert place.rows() == []
    publish(place.spark, place.sink, place.output([], revision=4))
    publish(place.spark, place.sink, place.output(None, window="w2"))
    assert (place.rows(), place.stages()) == ([], [])
    assert place.windows() == [("flights", "w1", 4, "none"), ("flights", "w2", 1, "none")]


def test_jdbc_an_early_result_gives_way_to_later_ones_and_to_the_final_one(place: Place) -> None:
    first, second = early_revision(2), early_revision(5)
    publish(place.spark, place.sink, place.output(["a"], revision=first))
    publish(place.spark, place.sink, place.output(["a", "b"], revision=second))
    publish(place.spark, place.sink, place.output(["a"], revision=first))
    assert place.rows() == [("a", "w1", 0), ("b", "w1", 0)]
    publish(place.spark, place.sink, place.output(["a", "b", "c"]))
    publish(place.spark, place.sink, place.output(["a", "b"], revision=second))
    assert place.rows() == [("a", "w1", 1), ("b", "w1", 1), ("c", "w1", 1)]
    assert (place.windows(), place.stages()) == ([("flights", "w1", 1, "none")], [])


@pytest.mark.parametrize("steps", range(5))
def test_jdbc_a_try_that_ends_after_any_step_is_made_again_from_the_start(place: Place, steps: int) -> None:
    publish(place.spark, place.sink, place.output(["old"]))
    job = place.output(["a", "b"], revision=2)
    died = place.attempt(job, "died")
    with connected(place.spark, place.sink) as database:
        if steps > 0:
            assert jdbc.claim(database, died)
        if steps > 1:
            jdbc.fill(staged(place.spark, job), place.sink, died, create=False)
        if steps > 2:
            jdbc.move(database, died)
        if steps > 3:
            database.drop(died.stage)
    whole = [("a", "w1", 2), ("b", "w1", 2)]
    assert place.rows() == (whole if steps > 2 else [("old", "w1", 1)])
    publish(place.spark, place.sink, job)
    assert (place.rows(), place.stages()) == (whole, [])
    assert place.windows() == [("flights", "w1", 2, "none")]


@pytest.mark.parametrize("index_made", [False, True], ids=["before", "after"])
def test_jdbc_a_table_whose_first_tries_died_about_when_its_index_was_made_has_it(
    place: Place, *, index_made: bool
) -> None:
    job = place.output(["a"])
    own(place.spark, place.sink, OURS)
    first, second = (jdbc.Try(job, "events", f"events__{name}") for name in ("first_died", "stage_died"))
    with connected(place.spark, place.sink) as database:
        assert jdbc.claim(database, first) is first
        jdbc.fill(staged(place.spark, job), place.sink, first, create=True)
        claimed = jdbc.claim(database, second)
        if index_made:
            jdbc._create_index(database, "events")
    assert claimed is not None
    assert jdbc._creates_table(claimed.stage)
    publish(place.spark, place.sink, job)
    assert (place.rows(), place.stages()) == ([("a", "w1", 1)], [])
    indexes = "SELECT CONGLOMERATENAME FROM SYS.SYSCONGLOMERATES WHERE CONGLOMERATENAME LIKE 'EVENTS__WINDOW'"
    assert place.query(indexes) == [("EVENTS__WINDOW",)]


def test_jdbc_readers_see_the_old_rows_when_the_transaction_fails_in_its_middle(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(place.spark, place.sink, place.output(["old"]))
    job = place.output(["a", "b"], revision=2)

    def breaks(*_: object) -> None:
        raise ConnectionError("the network")

    with monkeypatch.context() as patched:
        patched.setattr(jdbc, "_copy_stage", breaks)
        with pytest.raises(ConnectionError, match="the network"):
            publish(place.spark, place.sink, job)
    assert place.rows() == [("old", "w1", 1)]
    assert place.windows() == [("flights", "w1", 1, "none")]
    publish(place.spark, place.sink, job)
    assert (place.rows(), place.stages()) == ([("a", "w1", 2), ("b", "w1", 2)], [])


def test_jdbc_of_two_servers_that_write_a_window_the_one_that_claimed_last_wins(place: Place) -> None:
    job = place.output(["a", "b"])
    first, second = place.attempt(job, "first"), place.attempt(job, "second")
    with connected(place.spark, place.sink) as one, connected(place.spark, place.sink) as other:
        assert jdbc.claim(one, first)
        jdbc.fill(staged(place.spark, job), place.sink, first, create=True)
        assert jdbc.claim(other, second)
        with pytest.raises(RuntimeError, match="the stage of window w1 is gone"):
            jdbc.move(one, first)
        jdbc.fill(staged(place.spark, job), place.sink, first, create=True)
        with pytest.raises(RuntimeError, match="another server has claimed window w1"):
            jdbc.move(one, first)
        jdbc.clear(one, first, first.stage)
        jdbc.fill(staged(place.spark, job), place.sink, second, create=True)
        jdbc.move(other, second)
        jdbc.clear(other, second, second.stage)
        assert not jdbc.claim(one, first)
    assert place.rows() == [("a", "w1", 1), ("b", "w1", 1)]
    assert (place.windows(), place.stages()) == ([("flights", "w1", 1, "none")], [])


def test_jdbc_rows_that_a_task_wrote_twice_are_not_published(place: Place) -> None:
    job = place.output(["a", "b"])
    twice = place.attempt(job, "twice")
    with connected(place.spark, place.sink) as database:
        jdbc.claim(database, twice)
        jdbc.fill(staged(place.spark, job), place.sink, twice, create=True)
        database.change(f"INSERT INTO {twice.stage} SELECT * FROM {twice.stage}")
        with pytest.raises(RuntimeError, match="the stage of window w1 holds 4 rows, not 2"):
            jdbc.move(database, twice)
        jdbc.clear(database, twice, twice.stage)
    assert place.rows() == []


def test_jdbc_a_column_that_the_table_has_not_is_named(place: Place) -> None:
    publish(place.spark, place.sink, place.output(["a"]))
    with pytest.raises(RuntimeError, match="the table events has no column other"):
        publish(place.spark, place.sink, place.output(["b"], revision=2, column="other"))
    assert (place.rows(), place.stages()) == ([("a", "w1", 1)], [])


def test_jdbc_takes_a_schema_quotes_and_a_driver_by_name(place: Place) -> None:
    options = {"driver": "org.apache.derby.jdbc.EmbeddedDriver", "batchsize": "10", "user": "me"}
    sink = SinkSpec("jdbc", place.sink.target, 'ME."my events"', options)
    with connected(place.spark, sink) as database:
        database.change("CREATE SCHEMA ME")
    publish(place.spark, sink, place.output(["a"]))
    assert place.query('SELECT "name" FROM ME."my events"') == [("a",)]
    assert place.query('SELECT REVISION FROM ME."my events__windows"') == [(1,)]


@pytest.mark.parametrize(
    ("sink", "told"),
    [
        (SinkSpec("jdbc", "nothing:x", "t"), "no driver for the URL.*sink_options driver=CLASS"),
        (SinkSpec("jdbc", "derby:x", "t", {"driver": "no.Driver"}), "no class no.Driver.*spark.jars"),
        (
            SinkSpec("jdbc", "other:x", "t", {"driver": "org.apache.derby.jdbc.EmbeddedDriver"}),
            "is not a driver for the URL of sink",
        ),
    ],
)
def test_what_spark_lacks_is_said_at_the_start_with_the_setting(
    place: Place, sink: SinkSpec, told: str
) -> None:
    with pytest.raises(OperatorError, match=told):
        check(place.spark, sink)


def test_a_table_of_somebody_else_is_refused(place: Place) -> None:
    with connected(place.spark, place.sink) as database:
        database.change("CREATE TABLE events (name VARCHAR(10))")
    with pytest.raises(
        OperatorError, match=r"The table events exists and has no column _revision and _window"
    ):
        check(place.spark, place.sink)


THEIRS = Owner("trains", "7ea15000")
RESTORED = Owner("flights", "4e5704ed")


def told(owner: Owner, found: Owner | None) -> str:
    with pytest.raises(OperatorError) as caught:
        must_note(found, owner, "events", new_ledger=False)
    return str(caught.value)


def test_a_table_is_the_first_one_s_and_another_is_told_whose_it_is() -> None:
    assert must_note(None, OURS, "events", new_ledger=False)
    assert not must_note(OURS, OURS, "events", new_ledger=False)
    # The pipeline's name may change; the ledger says that it is the same.
    assert must_note(Owner("former", LEDGER), OURS, "events", new_ledger=False)
    assert "table events belongs to pipeline trains; this is pipeline flights" in told(OURS, THEIRS)
    assert "written from another ledger of pipeline flights (id 1ed9e400)" in told(RESTORED, OURS)
    assert "start once with --new-ledger" in told(RESTORED, OURS)
    assert must_note(THEIRS, OURS, "events", new_ledger=True)
    assert not must_note(OURS, OURS, "events", new_ledger=True)


def test_jdbc_another_pipeline_is_refused_at_the_start_and_with_each_window(place: Place) -> None:
    own(place.spark, place.sink, OURS)
    publish(place.spark, place.sink, place.output(["a"]))
    with pytest.raises(OperatorError, match="belongs to pipeline flights; this is pipeline trains"):
        own(place.spark, place.sink, THEIRS)
    job = place.output(["b"], revision=2)
    theirs = replace(job, window=replace(job.window, pipeline="trains"), ledger=THEIRS.ledger)
    with pytest.raises(OperatorError, match="belongs to pipeline flights; this is pipeline trains"):
        publish(place.spark, place.sink, theirs)
    with (
        connected(place.spark, place.sink) as database,
        pytest.raises(RuntimeError, match="has claimed the table events"),
    ):
        jdbc.claim(database, jdbc.Try(theirs, "events", "events__stage_theirs"))
    assert place.rows() == [("a", "w1", 1)]


def test_jdbc_a_new_ledger_is_refused_until_it_takes_the_table_and_then_its_windows_count(
    place: Place,
) -> None:
    for window in ("w1", "w2"):
        publish(place.spark, place.sink, place.output(["old"], revision=3, window=window))
    job = replace(place.output(["new"]), ledger=RESTORED.ledger)
    with pytest.raises(OperatorError, match="written from another ledger of pipeline flights"):
        publish(place.spark, place.sink, job)
    own(place.spark, place.sink, RESTORED, new_ledger=True)
    publish(place.spark, place.sink, job)
    assert place.rows() == [("new", "w1", 1), ("old", "w2", 3)]
    with pytest.raises(OperatorError, match="written from another ledger of pipeline flights"):
        publish(place.spark, place.sink, place.output(["late"], revision=4))


def test_jdbc_a_try_that_is_under_way_moves_nothing_once_another_ledger_has_the_table(place: Place) -> None:
    publish(place.spark, place.sink, place.output(["old"]))
    job = place.output(["late"], revision=2)
    slow = place.attempt(job, "slow")
    with connected(place.spark, place.sink) as database:
        assert jdbc.claim(database, slow)
        jdbc.fill(staged(place.spark, job), place.sink, slow, create=False)
        own(place.spark, place.sink, RESTORED, new_ledger=True)
        with pytest.raises(RuntimeError, match="the stage of window w1 is gone"):
            jdbc.move(database, slow)
        # A stage that was made after all is not moved either.
        jdbc.fill(staged(place.spark, job), place.sink, slow, create=False)
        with pytest.raises(RuntimeError, match="another server has claimed window w1"):
            jdbc.move(database, slow)
        jdbc.clear(database, slow, slow.stage)
    assert (place.rows(), place.stages()) == ([("old", "w1", 1)], [])
    assert place.windows() == [("flights", "w1", NO_REVISION, "none")]


def test_jdbc_a_table_of_an_earlier_version_is_the_first_claim_s(place: Place) -> None:
    publish(place.spark, place.sink, place.output(["old"]))
    with connected(place.spark, place.sink) as database:
        database.drop("events__owner")
    own(place.spark, place.sink, RESTORED)
    publish(place.spark, place.sink, replace(place.output(["new"]), ledger=RESTORED.ledger))
    assert place.rows() == [("new", "w1", 1)]


def test_jdbc_of_two_first_claims_one_wins_and_the_pipeline_s_own_is_shared(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = jdbc._replace_owner

    def slower(by: Owner) -> None:
        def late(*given: Any) -> bool:
            monkeypatch.setattr(jdbc, "_replace_owner", take)
            own(place.spark, place.sink, by)
            return take(*given)

        monkeypatch.setattr(jdbc, "_replace_owner", late)

    slower(OURS)
    own(place.spark, place.sink, OURS)
    with connected(place.spark, place.sink) as database:
        database.drop("events__owner")
    slower(OURS)
    with pytest.raises(OperatorError, match="belongs to pipeline flights"):
        own(place.spark, place.sink, THEIRS)


def test_jdbc_a_table_that_was_dropped_halts_until_its_notes_are_dropped_too(place: Place) -> None:
    publish(place.spark, place.sink, place.output(["a"]))
    publish(place.spark, place.sink, place.output(["b"], window="w2"))
    job = place.output(["c"], window="w3")
    with connected(place.spark, place.sink) as database:
        database.drop("events")
        gone = r"events was dropped or renamed, and with it the windows that were published into it \(2\)"
        with pytest.raises(OperatorError, match=gone):
            own(place.spark, place.sink, OURS)
        for _ in range(2):
            with pytest.raises(OperatorError, match=gone):
                publish(place.spark, place.sink, job)
        database.drop("events__owner")
        with pytest.raises(OperatorError, match=gone):  # as an earlier version left it
            publish(place.spark, place.sink, job)
        database.drop("events__windows")
    publish(place.spark, place.sink, job)
    publish(place.spark, place.sink, place.output(["a"], revision=2))
    assert place.rows() == [("a", "w1", 2), ("c", "w3", 1)]
    assert place.query("SELECT PIPELINE, LEDGER, MADE FROM events__owner") == [("flights", LEDGER, 1)]


def test_jdbc_a_window_without_rows_makes_no_table_that_could_be_missed(place: Place) -> None:
    publish(place.spark, place.sink, place.output(None))
    publish(place.spark, place.sink, place.output(["a"], revision=2))
    assert place.rows() == [("a", "w1", 2)]
