"""Windows into Apache Iceberg: what the library's own reader and PyArrow find, after kills, races and revisions."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qs

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from pyarrow import fs
from pyiceberg.table import Table
from sinks.staged import LEDGER, OURS, SESSION, Staged, window_of
from support.pages import examples
from support.s3 import bucket

from mldserver.engine_jobs import PublishJob, WindowJob, early_revision
from mldserver.errors import OperatorError
from mldserver.sinks import iceberg, lake
from mldserver.sinks.sink import Owner, SinkSpec
from mldserver.spark.session import DriverSession
from mldserver.spark.window_job import WindowHook, run_windows

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
THEIRS = Owner("trains", "2badcafe")


class Lake(Staged):
    """An Iceberg table in a catalog of SQLite or Glue, and what readers find in it."""

    @property
    def table(self) -> Table:
        found = iceberg._table(iceberg._catalog(self.sink), self.sink)
        assert found is not None
        return found

    def rows(self) -> list[tuple[str, str, int]]:
        """Return each row's window, name and revision, after a look at whether both readers find the same."""
        table, columns = self.table, ["_window", "name", "_revision"]
        if "name" not in table.schema().column_names:
            return []
        own = table.scan(selected_fields=tuple(columns)).to_arrow().select(columns).to_pylist()
        folder = iceberg._folder(table)
        paths = [f"{folder.base}/{path}" for path in self.named()]
        plain = (
            ds.dataset(paths, filesystem=folder.filesystem).to_table(columns=columns).to_pylist()
            if paths
            else []
        )
        found, other = (sorted(tuple(row.values()) for row in rows) for rows in (own, plain))
        assert found == other
        return found

    def files(self) -> set[str]:
        """Return the paths of all data files in the table's folder."""
        folder = iceberg._folder(self.table)
        found = folder.filesystem.get_file_info(
            fs.FileSelector(folder.base, recursive=True, allow_not_found=True)
        )
        return {entry.path[len(folder.base) + 1 :] for entry in found if entry.is_file}

    def named(self) -> set[str]:
        folder = iceberg._folder(self.table)
        return {iceberg._inside(folder, task.file.file_path) for task in self.table.scan().plan_files()}

    def forget(self) -> None:
        """Expire every snapshot but the last."""
        table = self.table
        last = table.current_snapshot()
        assert last is not None
        old = [each.snapshot_id for each in table.snapshots() if each.snapshot_id != last.snapshot_id]
        table.maintenance.expire_snapshots().by_ids(old).commit()


def lake_in(root: Path, place: str, database: str = "air", **options: str) -> Lake:
    options = {"type": "sql", "uri": f"sqlite:///{root}/catalog.db", "warehouse": place, **options}
    return Lake(root, SinkSpec("iceberg", f"lake.{database}.flights", options=options))


@pytest.fixture
def local(tmp_path: Path) -> Lake:
    return lake_in(tmp_path, f"file://{tmp_path}/warehouse")


@pytest.fixture(params=["local", "s3", pytest.param("glue", marks=pytest.mark.long)])
def place(request: pytest.FixtureRequest, tmp_path: Path, local: Lake) -> Iterator[Lake]:
    if request.param == "local":
        yield local
        return
    with bucket("lake") as query:
        endpoint = f"http://{parse_qs(query)['endpoint_override'][0]}"
        keys = {"s3.access-key-id": "key", "s3.secret-access-key": "secret", "s3.region": "us-east-1"}
        options = {"s3.endpoint": endpoint, **keys}
        if request.param == "glue":
            glue = {f"glue.{name.partition('.')[2]}": value for name, value in options.items()}
            options |= {"type": "glue", **glue}
        # The emulator, and so its Glue, serves several tests.
        yield lake_in(tmp_path, f"s3://lake/{tmp_path.name}", tmp_path.name, **options)


def expected(hour: float, names: list[str], revision: int = 1) -> list[tuple[str, str, int]]:
    return [(window_of(hour).id, name, revision) for name in names]


def test_windows_become_commits_and_a_repeated_one_changes_nothing(place: Lake) -> None:
    place.own()
    place.check()
    for _ in range(2):
        place.publish(place.output(0, ["a", "b", "c"]))
    place.publish(place.output(2, ["z"]))
    last = place.table.current_snapshot()
    place.publish(place.output(0, ["a", "b", "c"]))
    assert place.rows() == expected(0, ["a", "b", "c"]) + expected(2, ["z"])
    assert (place.table.current_snapshot(), place.files()) == (last, place.named())
    assert [(field.name, str(field.transform)) for field in place.table.spec().fields] == [
        ("window_day", "day")
    ]
    days = {task.file.partition[0] for task in place.table.scan().plan_files()}
    assert days == {(window_of(hour).start - EPOCH).days for hour in (0, 2)}


def test_a_revision_replaces_the_one_before_in_one_commit_and_never_the_other_way_round(place: Lake) -> None:
    first = place.output(0, ["a", "b"])
    place.publish(first)
    place.publish(place.output(1, ["y"]))
    version = place.table.metadata_location
    place.publish(place.output(0, ["a", "b", "late"], revision=2))
    assert place.table.metadata.metadata_log[-1].metadata_file == version
    place.publish(first)
    place.forget()
    place.publish(first)
    assert place.rows() == expected(0, ["a", "b", "late"], 2) + expected(1, ["y"])
    place.publish(place.output(0, None, revision=3))
    place.publish(place.output(0, ["a"], revision=2))
    assert place.rows() == expected(1, ["y"])
    place.publish(place.output(0, [], revision=4))
    place.publish(place.output(5, None))
    assert place.rows() == expected(1, ["y"])
    found = {(each.summary["mldserver.window"], str(each.snapshot_id)) for each in place.table.snapshots()}
    assert iceberg.versions(place.sink).items() < found
    assert iceberg.versions(place.sink).keys() == {window_of(0).id}, "the other's snapshot has expired"


def test_an_early_result_gives_way_to_later_ones_and_to_the_final_one(place: Lake) -> None:
    first, second = early_revision(2), early_revision(5)
    place.publish(place.output(0, ["a"], revision=first))
    place.publish(place.output(1, ["y"]))
    place.publish(place.output(0, ["a", "b"], revision=second))
    place.publish(place.output(0, ["a"], revision=first))
    assert sorted(place.rows()) == sorted(expected(0, ["a", "b"], second) + expected(1, ["y"]))
    place.publish(place.output(0, ["a", "b", "c"]))
    place.publish(place.output(0, ["a", "b"], revision=second))
    assert place.rows() == expected(0, ["a", "b", "c"]) + expected(1, ["y"])


def test_an_early_result_on_its_way_into_the_table_is_not_swept(local: Lake) -> None:
    local.own()
    local.process(local.output(1, ["c"], revision=early_revision(4)), kill_at="table.filled").wait()
    before = local.files()
    local.own()
    assert local.files() == before != set()


def test_a_new_column_and_a_wider_number_evolve_the_table(place: Lake) -> None:
    place.publish(place.output(0, ["a"]))
    place.publish(place.output(1, ["b"], columns={"n": 2**40, "more": "text"}))
    place.publish(place.output(2, ["c"]))
    place.publish(place.output(0, ["a", "late"], revision=2, columns={"more": "revised"}))
    found = place.table.scan(selected_fields=("name", "n", "more")).to_arrow().sort_by("name")
    assert found.select(["name", "n", "more"]).to_pylist() == [
        {"name": "a", "n": 0, "more": "revised"},
        {"name": "b", "n": 2**40, "more": "text"},
        {"name": "c", "n": 0, "more": None},
        {"name": "late", "n": 0, "more": "revised"},
    ]


@pytest.mark.parametrize(
    ("columns", "told"),
    [
        ({"n": "one"}, "n is string in the window and int32 in the table"),
        ({"N": 1}, "N is called n in the table"),
        ({"at": pa.scalar(0, pa.timestamp("ns"))}, "at has nanoseconds"),
    ],
)
def test_a_window_that_does_not_fit_is_refused_before_anything_is_written(
    local: Lake, columns: dict[str, Any], told: str
) -> None:
    local.publish(local.output(0, ["a"]))
    before = (local.files(), local.table.metadata_location)
    with pytest.raises(OperatorError, match=told) as refused:
        local.publish(local.output(1, ["b"], columns=columns))
    assert "Nothing was written to the table." in str(refused.value)
    assert (local.files(), local.table.metadata_location) == before


def test_a_session_with_timestamps_of_hive_is_refused(local: Lake) -> None:
    session: Any = replace_conf({"spark.sql.parquet.outputTimestampType": "INT96"})
    with pytest.raises(OperatorError, match="outputTimestampType = INT96"):
        iceberg.check(session, local.sink)


def replace_conf(conf: dict[str, str]) -> Any:
    return type(SESSION)(conf=conf)


def test_a_table_belongs_to_one_ledger_until_another_takes_it_over(local: Lake) -> None:
    local.own()
    with pytest.raises(OperatorError, match="belongs to pipeline flights; this is pipeline trains"):
        local.own(THEIRS)
    local.publish(local.output(0, ["a"]))
    local.publish(local.output(0, ["b"], revision=2))
    restored = Owner(OURS.pipeline, "0a0b0c0d")
    local.own(restored, new_ledger=True)
    with pytest.raises(OperatorError, match="was written from another ledger of pipeline flights"):
        local.publish(local.output(1, ["late"]))
    local.publish(local.output(0, ["c"], ledger=restored.ledger))
    assert local.rows() == expected(0, ["c"])


STEPS = ["table.filled", "table.committed"]


@pytest.mark.parametrize("step", STEPS)
def test_after_a_kill_at_a_step_the_next_try_publishes_once_and_leaves_no_file(
    place: Lake, step: str
) -> None:
    place.own()
    early = (2, early_revision(3), ["e"]), (2, early_revision(5), ["e", "f"]), (2, 1, ["e", "f", "g"])
    for hour, revision, names in (
        *((0, 1, ["a", "b"]), (0, 2, ["a", "b", "late"]), (1, 1, ["x"])),
        *early,
    ):
        job = place.output(hour, names, revision=revision)
        assert place.process(job, kill_at=step).wait() == -signal.SIGKILL
        place.publish(job)
        place.publish(job)
        assert [row for row in place.rows() if row[0] == job.window.id] == expected(hour, names, revision)
    place.forget()
    place.own()
    assert place.files() == place.named()


def test_a_server_that_was_stopped_goes_on_after_another_has_published_the_next_revision(local: Lake) -> None:
    first, second = local.output(0, ["a"]), local.output(0, ["a", "b"], revision=2)
    local.own()
    stopped = local.process(first, kill_at="table.filled", stops=True)
    os.waitid(os.P_PID, stopped.pid, os.WSTOPPED)
    brought = local.files()
    local.publish(second)
    stopped.send_signal(signal.SIGCONT)
    assert stopped.wait() == 0
    assert local.rows() == expected(0, ["a", "b"], 2)
    assert local.files() == local.named() | brought
    local.forget()
    local.own()
    assert local.files() == local.named()


ROUNDS = 200


def test_of_two_servers_that_publish_the_same_windows_at_once_one_does(local: Lake, long: bool) -> None:
    rounds = ROUNDS if long else 40
    local.own()
    jobs = [local.output(hour, [f"{hour}", "x"]) for hour in range(rounds)]
    servers = [local.process(*jobs, go=local.root / "go-") for _ in range(2)]
    for job in jobs:
        (local.root / f"go-{job.window.id}").touch()
    assert [server.wait() for server in servers] == [0, 0]
    assert local.rows() == sorted(row for hour in range(rounds) for row in expected(hour, [f"{hour}", "x"]))
    assert local.files() == local.named()
    assert local.table.metadata.last_sequence_number == rounds


def test_two_servers_that_publish_two_revisions_at_once_end_with_the_later(local: Lake) -> None:
    local.own()
    for hour in range(10):
        local.publish(local.output(hour, ["a"]))
    later = [local.output(hour, ["a", "b"], revision=2) for hour in range(10)]
    last = [local.output(hour, ["c"], revision=3) for hour in range(10)]
    servers = [local.process(*jobs, go=local.root / "go-") for jobs in (later, last)]
    for job in later:
        (local.root / f"go-{job.window.id}").touch()
    assert [server.wait() for server in servers] == [0, 0]
    assert local.rows() == [row for hour in range(10) for row in expected(hour, ["c"], 3)]


def test_an_output_that_is_gone_is_reported_as_such(local: Lake) -> None:
    job = local.output(0, ["a"])
    gone = PublishJob(job.window, f"{job.staging}-gone", job.files, job.rows, ledger=LEDGER)
    with pytest.raises(FileNotFoundError):
        local.publish(gone)
    local.publish(job)


@pytest.mark.slow
def test_files_that_spark_wrote_alone_or_in_a_group_go_into_the_table_as_they_are(
    local: Lake, session: DriverSession
) -> None:
    hook, schema = WindowHook(None, stamped=True), "name STRING, number BIGINT"
    for hours in ((0,), (1, 2, 3)):
        jobs = []
        for hour in hours:
            segment = local.root / f"segment-{hour}.parquet"
            rows = hour % 3  # a window of a group may have none
            pq.write_table(pa.table({"name": [f"{hour}"] * rows, "number": list(range(rows))}), segment)
            staging = local.root / "staging" / f"{hour}" / "0001"
            jobs.append(WindowJob(window_of(hour), 1, (str(segment),), str(staging), rows, 100))
        for job, output in zip(jobs, run_windows(session.spark, schema, hook, jobs, 2), strict=True):
            local.publish(PublishJob(job.window, job.staging, output.files, output.rows, ledger=LEDGER))
    iceberg.check(session.spark, local.sink)
    assert local.rows() == [*expected(1, ["1"]), *expected(2, ["2", "2"])]
    found = local.table.scan().to_arrow().sort_by("_window").to_pylist()
    assert [row["window_start"] for row in found] == [window_of(hour).start for hour in (1, 2, 2)]


def test_a_hundred_windows_keep_few_snapshots_and_every_row(local: Lake) -> None:
    jobs = [local.output(hour, [f"{hour}"]) for hour in range(100)]
    for job in jobs:
        local.publish(job)
    assert 10 <= len(local.table.snapshots()) <= 20
    assert local.rows() == [row for hour in range(100) for row in expected(hour, [f"{hour}"])]
    last = local.table.current_snapshot()
    for job in jobs[:3]:
        local.publish(job)
    assert local.table.current_snapshot() == last
    scan = local.table.scan(row_filter=f"_window = '{window_of(7).id}'")
    assert (scan.to_arrow()["name"].to_pylist(), len(list(scan.plan_files()))) == (["7"], 1)


def test_a_table_of_somebody_else_with_the_columns_is_taken_and_grows(local: Lake) -> None:
    catalog = iceberg._catalog(local.sink)
    catalog.create_namespace("air")
    catalog.create_table("air.flights", pa.schema({"name": pa.string()}))
    with pytest.raises(OperatorError, match="has no column _revision and _window"):
        local.check()
    columns = {
        "_window": pa.string(),
        "_revision": pa.int64(),
        "name": pa.large_string(),
        "more": pa.string(),
    }
    catalog.drop_table("air.flights")
    catalog.create_table("air.flights", pa.schema(columns))
    local.check()
    local.own()
    local.publish(local.output(0, ["a"]))
    local.publish(local.output(1, ["b"], columns={"n": 2**40}))
    assert local.rows() == expected(0, ["a"]) + expected(1, ["b"])
    assert local.table.properties["commit.retry.num-retries"] == "0"


def test_the_page_s_example_reads_a_window(local: Lake) -> None:
    (text,) = (one.text for one in examples() if one.language == "python" and "pyiceberg" in one.text)
    local.publish(local.output(0, ["a", "b"]))
    text = text.replace("/srv/lake/catalog.db", f"{local.root}/catalog.db").replace(
        "air.departures", "air.flights"
    )
    names: dict[str, Any] = {}
    exec(text.replace("2013-01-01T10-00-00Z", window_of(0).id), names)
    assert sorted(names["rows"]["name"].to_pylist()) == ["a", "b"]
    assert names["kept"].num_rows == 1


def test_windows_that_differ_in_seconds_are_told_apart_also_in_a_table_with_short_statistics(
    local: Lake,
) -> None:
    second = 1 / 3600
    local.own()
    with local.table.transaction() as change:
        change.set_properties({"write.metadata.metrics.column._window": "truncate(16)"})
    for revision in (1, 2):
        for each in (1, 11, 21):
            local.publish(local.output(each * second, [f"{each}"], revision=revision))
            local.publish(local.output(each * second, [f"{each}"], revision=revision))
    assert local.rows() == [row for each in (1, 11, 21) for row in expected(each * second, [f"{each}"], 2)]
    assert len(local.named()) == 3


def test_a_folder_that_another_server_makes_while_it_is_listed_is_there(tmp_path: Path) -> None:
    class Listing:
        """Arrow lists a folder, finds none, and then finds that it is there."""

        def get_file_info(self, selector: Any) -> Any:
            raise FileNotFoundError(f"Cannot list directory '{selector.base_dir}'")

    assert lake.Folder(cast("Any", Listing()), str(tmp_path)).has("data/day/window")
    assert not lake.Folder.at(str(tmp_path)).has("data/day/window")


def test_queries_read_the_present_files_the_latest_window_last(local: Lake) -> None:
    assert iceberg.files(local.sink) == ()
    local.own()
    for hour in (1, 0, 30):
        local.publish(local.output(hour, [f"{hour}"]))
    local.publish(local.output(1, ["again"], revision=2))
    paths = [path.removeprefix("file://") for path in iceberg.files(local.sink)]
    found = [pq.read_table(path, columns=["name"], partitioning=None)["name"].to_pylist() for path in paths]
    assert found == [["0"], ["again"], ["30"]]
