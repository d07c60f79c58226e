"""Windows into Delta Lake: what the library's own reader and PyArrow find, after kills, races and revisions."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from sinks.staged import LEDGER, OURS, SESSION, Staged, window_of
from support.pages import examples
from support.s3 import bucket

from mldserver.engine_jobs import PublishJob, WindowJob, early_revision
from mldserver.errors import OperatorError
from mldserver.sinks import delta, lake
from mldserver.sinks.sink import Owner, SinkSpec
from mldserver.spark.session import DriverSession
from mldserver.spark.window_job import WindowHook, run_windows

THEIRS = Owner("trains", "2badcafe")


class Lake(Staged):
    """A Delta table, and what readers find in it."""

    @property
    def table(self) -> DeltaTable:
        found = delta._table(self.sink)
        assert found is not None
        return found

    def rows(self) -> list[tuple[str, str, int]]:
        """Return each row's window, name and revision, after a look at whether both readers find the same."""
        table = self.table
        columns = ["_window", "name", "_revision"]
        own = table.to_pyarrow_table(columns=columns).to_pylist() if table.schema().fields[3:] else []
        folder = lake.Folder.at(self.sink.target)
        paths = [f"{folder.base}/{delta.unquote(path)}" for path in delta._files(table)["path"].to_pylist()]
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
        folder = lake.Folder.at(self.sink.target)
        found = folder.filesystem.get_file_info(lake_selector(folder.base))
        names = (entry.path[len(folder.base) + 1 :] for entry in found if entry.is_file)
        return {name for name in names if not name.startswith("_delta_log")}

    def named(self) -> set[str]:
        return {delta.unquote(path) for path in delta._files(self.table)["path"].to_pylist()}


def lake_selector(base: str) -> Any:
    return pa.fs.FileSelector(base, recursive=True)


@pytest.fixture(params=["local", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Lake]:
    if request.param == "local":
        yield Lake(tmp_path, SinkSpec("delta", str(tmp_path / "events")))
        return
    with bucket("lake") as query:
        yield Lake(tmp_path, SinkSpec("delta", f"s3://key:secret@lake/{tmp_path.name}/events?{query}"))


@pytest.fixture
def local(tmp_path: Path) -> Lake:
    return Lake(tmp_path, SinkSpec("delta", str(tmp_path / "events")))


def expected(hour: int, names: list[str], revision: int = 1) -> list[tuple[str, str, int]]:
    return [(window_of(hour).id, name, revision) for name in names]


def test_windows_become_commits_and_a_repeated_one_changes_nothing(place: Lake) -> None:
    place.own()
    place.check()
    for _ in range(2):
        place.publish(place.output(0, ["a", "b", "c"]))
    place.publish(place.output(2, ["z"]))
    version = place.table.version()
    place.publish(place.output(0, ["a", "b", "c"]))
    assert place.rows() == expected(0, ["a", "b", "c"]) + expected(2, ["z"])
    assert (place.table.version(), place.files()) == (version, place.named())
    assert place.table.metadata().partition_columns == ["_day"]
    assert {str(path.split("/")[0]) for path in place.named()} == {"_day=2027-01-30", "_day=2027-01-31"}


def test_a_revision_replaces_the_one_before_in_one_commit_and_never_the_other_way_round(place: Lake) -> None:
    first = place.output(0, ["a", "b"])
    place.publish(first)
    place.publish(place.output(1, ["y"]))
    version = place.table.version()
    place.publish(place.output(0, ["a", "b", "late"], revision=2))
    assert place.table.version() == version + 1
    place.publish(first)
    assert place.rows() == expected(0, ["a", "b", "late"], 2) + expected(1, ["y"])
    place.publish(place.output(0, None, revision=3))
    place.publish(place.output(0, ["a"], revision=2))
    assert place.rows() == expected(1, ["y"])
    place.publish(place.output(0, [], revision=4))
    place.publish(place.output(5, None))
    assert place.rows() == expected(1, ["y"])
    last = place.table.version()
    if "://" not in place.sink.target:  # the library holds the interpreter's lock, which the emulator needs
        assert delta.versions(place.sink) == {
            window_of(0).id: f"{last - 1}",
            window_of(1).id: f"{version}",
            window_of(5).id: f"{last}",
        }


def test_a_late_write_changes_nothing_after_the_log_has_forgotten_the_transaction(
    local: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = local.output(0, ["a"])
    local.publish(local.output(0, ["a", "b"], revision=2))
    version = local.table.version()

    class Forgetful(DeltaTable):
        def transaction_version(self, _app_id: str) -> None:
            return None

    monkeypatch.setattr("deltalake.DeltaTable", Forgetful)
    local.publish(first)
    assert (local.table.version(), local.rows()) == (version, expected(0, ["a", "b"], 2))


def test_readers_skip_files_by_their_statistics(local: Lake) -> None:
    local.publish(
        local.output(0, ["b", "a", "d", "c"], columns={"text": "x" * 200, "real": float("nan"), "yes": True})
    )
    (one, other) = sorted(delta._files(local.table).to_pylist(), key=lambda each: str(each["min.name"]))
    assert [one["num_records"], one["min.name"], one["max.name"], other["max.name"]] == [2, "a", "c", "d"]
    assert (one["min.n"], one["max.n"], one["null_count.name"], one["min.text"]) == (0, 1, 0, None)
    assert one["min._window"] == window_of(0).id
    assert (one["min.window_start"], one["max.window_start"]) == (window_of(0).start, window_of(0).start)
    assert local.table.to_pyarrow_table(filters=[("name", "=", "d")]).num_rows == 1


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
    assert place.table.to_pyarrow_table(columns=["name", "n", "more"]).sort_by("name").to_pylist() == [
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
    before = (local.files(), local.table.version())
    with pytest.raises(OperatorError, match=told) as refused:
        local.publish(local.output(1, ["b"], columns=columns))
    assert "Nothing was written to the table." in str(refused.value)
    assert (local.files(), local.table.version()) == before


def test_a_table_of_somebody_else_with_the_columns_is_taken_and_grows(local: Lake) -> None:
    columns = {"_window": pa.string(), "_revision": pa.int64(), "name": pa.large_string()}
    DeltaTable.create(local.sink.target, pa.schema(list(columns.items())))
    local.check()
    local.own()
    local.publish(local.output(0, ["a"]))
    assert local.rows() == expected(0, ["a"])
    local.publish(local.output(2, ["c"], columns={"more": "text"}))
    with pytest.raises(OperatorError, match=r"wider numbers than the table .*: n"):
        local.publish(local.output(1, ["b"], columns={"n": 2**40}))


def test_a_table_without_our_columns_or_with_other_partitions_is_refused(local: Lake, tmp_path: Path) -> None:
    DeltaTable.create(local.sink.target, pa.schema({"name": pa.string()}))
    with pytest.raises(OperatorError, match="has no column _revision and _window"):
        local.check()
    other = Lake(tmp_path, SinkSpec("delta", str(tmp_path / "other")))
    columns = pa.schema({"_window": pa.string(), "_revision": pa.int32(), "name": pa.string()})
    DeltaTable.create(other.sink.target, columns, partition_by=["name"])
    with pytest.raises(OperatorError, match="is partitioned by name"):
        other.check()


def test_a_session_with_timestamps_of_hive_is_refused(local: Lake) -> None:
    session: Any = replace_conf({"spark.sql.parquet.outputTimestampType": "INT96"})
    with pytest.raises(OperatorError, match="outputTimestampType = INT96"):
        delta.check(session, local.sink)


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


@pytest.mark.parametrize(
    ("unit", "partition"), [("month", "_month=2027-01-01"), ("year", "_year=2027-01-01")]
)
def test_partitions_are_larger_if_told(local: Lake, unit: str, partition: str) -> None:
    local.sink = replace(local.sink, options={"partition_by": unit})
    local.publish(local.output(0, ["a"]))
    assert {path.split("/")[0] for path in local.named()} == {partition}
    with pytest.raises(ValueError, match="partition_by = week is none of day, month, year"):
        delta.check_settings(replace(local.sink, options={"partition_by": "week"}))


def test_a_revision_of_a_window_that_was_compacted_with_others_leaves_the_others(local: Lake) -> None:
    for hour, name in ((1, "a"), (2, "b"), (3, "c")):
        local.publish(local.output(hour, [name]))
    local.table.optimize.compact()
    assert len(local.named()) == 1
    local.publish(local.output(2, ["b", "late"], revision=2))
    assert local.rows() == [*expected(1, ["a"]), *expected(2, ["b", "late"], 2), *expected(3, ["c"])]
    local.table.vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False)
    assert local.rows() == [*expected(1, ["a"]), *expected(2, ["b", "late"], 2), *expected(3, ["c"])]
    assert local.files() == local.named()


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
    place.table.vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False)
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
    local.own()
    assert local.files() == local.named()


def test_a_sweep_leaves_what_may_be_committed_yet_what_is_another_s_and_what_older_versions_show(
    local: Lake,
) -> None:
    local.publish(local.output(0, ["a"]))
    replaced = local.named()
    local.publish(local.output(0, ["b"], revision=2))
    local.process(local.output(1, ["c"]), kill_at="table.filled").wait()
    (local.root / "events" / "notes.parquet").write_bytes(b"")
    before = local.files()
    local.own()
    assert local.files() == before
    assert replaced < before
    older = DeltaTable(local.sink.target, version=local.table.version() - 1)
    assert older.to_pyarrow_table()["name"].to_pylist() == ["a"]


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
    logs = sorted(local.root.glob("events/_delta_log/*.json"))
    entries = [json.loads(line) for log in logs for line in log.read_text().splitlines()]
    written = [entry["txn"]["appId"] for entry in entries if "txn" in entry]
    assert sorted(written) == sorted(f"{LEDGER}/{job.window.id}" for job in jobs)


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


def test_files_of_another_disk_are_copied_whole(local: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_link(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr("os.link", no_link)
    local.publish(local.output(0, ["a", "b"]))
    assert local.rows() == expected(0, ["a", "b"])
    assert local.files() == local.named()


def test_the_page_s_maintenance_leaves_every_row_and_the_next_windows_work(local: Lake) -> None:
    (text,) = (one.text for one in examples() if one.language == "python" and "DeltaTable" in one.text)
    for hour in range(5):
        local.publish(local.output(hour, [f"{hour}"]))
    assert "/srv/lake/departures" in text
    exec(text.replace("/srv/lake/departures", local.sink.target), {})
    local.publish(local.output(1, ["1", "late"], revision=2))
    local.publish(local.output(0, ["0"]))
    rest = [row for hour in (2, 3, 4) for row in expected(hour, [f"{hour}"])]
    assert local.rows() == [*expected(0, ["0"]), *expected(1, ["1", "late"], 2), *rest]


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
    delta.check(session.spark, local.sink)
    assert local.rows() == [*expected(1, ["1"]), *expected(2, ["2", "2"])]
    found = local.table.to_pyarrow_table().sort_by("_window").to_pylist()
    assert [row["window_start"] for row in found] == [window_of(hour).start for hour in (1, 2, 2)]
    files = delta._files(local.table).to_pylist()
    assert sorted(file["num_records"] for file in files) == [1, 2]
    assert {file["min._window"] for file in files} == {window_of(1).id, window_of(2).id}


def test_queries_read_the_present_files_the_latest_window_last(local: Lake) -> None:
    assert delta.files(local.sink) == ()
    local.own()
    for hour in (1, 0, 30):
        local.publish(local.output(hour, [f"{hour}"]))
    local.publish(local.output(1, ["again"], revision=2))
    paths = [path.removeprefix("file://") for path in delta.files(local.sink)]
    found = [pq.read_table(path, columns=["name"], partitioning=None)["name"].to_pylist() for path in paths]
    assert found == [["0"], ["again"], ["30"]]
