"""Small windows of an object store are computed in a folder of this machine; S3 is moto's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.s3 import bucket

from mldserver.engine_jobs import WindowJob
from mldserver.output.store import OutputStore
from mldserver.spark.driver_messages import Output
from mldserver.spark.local_staging import MOST_BYTES, can_stage_locally, compute_via_local_disk
from mldserver.windows import Window

REQUESTS: list[str] = []


@pytest.fixture(scope="module")
def out() -> Iterator[str]:
    with bucket("lake", REQUESTS) as query:
        yield f"s3://key:secret@lake/my%20rows?{query}"


def jobs_on(out: str, number: int, size: int | None = None) -> list[WindowJob]:
    """As many windows, of two segments each: one row in the first, two in the second."""
    store, jobs = OutputStore(out), []
    for window in range(number):
        paths = [f"segments/{window}-{rows}.parquet" for rows in (1, 2)]
        written = sum(store.write(path, pa.table({"a": [window] * (n + 1)})) for n, path in enumerate(paths))
        uris = tuple(map(store.uri, paths))
        staging = store.uri(f"outputs/{window}/0001-x")
        older = {"a BIGINT": uris[:1]}
        jobs.append(
            WindowJob(
                Window(f"w{window}", None, None), 1, uris, staging, 3, size or written, store.place, older
            )
        )
    return jobs


def computed(jobs: Sequence[WindowJob]) -> tuple[Output, ...]:
    """Do Spark's part with what lies on this machine: the rows of each window in one file; none for the last window."""
    outputs = []
    for job in jobs:
        assert not job.out
        assert [older == job.segments[:1] for older in job.older.values()] == [True]
        rows = pa.concat_tables([pq.read_table(path) for path in job.segments])
        assert rows.num_rows == job.rows
        Path(job.staging).mkdir()
        pq.write_table(rows, f"{job.staging}/part-0.parquet")
        outputs.append(Output(("part-0.parquet",), 3) if job is not jobs[-1] else Output((), 0))
    return tuple(outputs)


def test_small_windows_cost_a_request_or_two_a_file_and_leave_nothing_here(
    out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    jobs = jobs_on(out, 3)
    REQUESTS.clear()
    assert [output.rows for output in compute_via_local_disk(jobs, computed)] == [3, 3, 0]
    assert len(REQUESTS) <= 2 * 6 + 2
    store = OutputStore(out)
    assert [path for path, _ in store.files("outputs")] == [
        f"outputs/{n}/0001-x/part-0.parquet" for n in (0, 1)
    ]
    assert (
        pq.read_table(pa.BufferReader(store.get("outputs/1/0001-x/part-0.parquet")))["a"].to_pylist()
        == [1] * 3
    )
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_fetched_fails_the_job_and_what_fails_leaves_nothing(
    out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    jobs = jobs_on(out, 1)
    with pytest.raises(ZeroDivisionError):
        compute_via_local_disk(jobs, lambda _: 1 // 0)
    OutputStore(out).delete("segments")
    with pytest.raises(FileNotFoundError):
        compute_via_local_disk(jobs, computed)
    assert not list(tmp_path.iterdir())


def test_large_windows_are_left_to_spark(out: str) -> None:
    jobs, given = jobs_on(out, 1, MOST_BYTES + 1), []

    def compute(jobs: Sequence[WindowJob]) -> tuple[Output, ...]:
        given.append(jobs)
        return (Output((), 0),)

    assert compute_via_local_disk(jobs, compute) == (Output((), 0),)
    assert given == [jobs]


@pytest.mark.parametrize(
    ("out", "hadoop", "does"),
    [
        ("s3://key:secret@lake/x?region=eu-west-1", {}, True),
        ("s3://lake/x", {"fs.defaultFS": "file:///", "fs.s3a.acl.default": ""}, True),
        ("s3://lake/x", {"fs.s3a.bucket.other.acl.default": "BucketOwnerFullControl"}, True),
        ("s3://lake/x", {"fs.defaultFS": "hdfs://here:8020"}, False),
        ("s3://lake/x", {"fs.s3a.acl.default": "BucketOwnerFullControl"}, False),
        ("s3://k:s@lake/x", {"fs.s3a.bucket.lake.encryption.algorithm": "SSE-KMS"}, False),
        ("gs://lake/x", {}, False),
        ("", {}, False),
    ],
)
def test_only_s3_without_wishes_for_its_files_and_a_spark_to_which_paths_are_local_suits(
    out: str, hadoop: dict[str, str], does: bool
) -> None:
    assert can_stage_locally(out, hadoop.get) is does
