"""Small windows on S3 and a local master, through a folder of this machine.

Spark's way to S3 costs a small window some fifty requests, one after another, and most of them are about folders that are
none. If the tasks run on this machine, there is a faster way: this process fetches the window's segments, Spark
computes it as it does on a local disk, and this process uploads the resulting files. Larger windows are read and
written by Spark's tasks themselves.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from pyarrow.fs import LocalFileSystem

from mldserver.base.uris import reach
from mldserver.engine_jobs import WindowJob
from mldserver.spark.driver_messages import Output

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

MOST_BYTES: Final = 64 * 1024 * 1024
"""Segments of one job that are fetched: what a disk and one connection are not hurt by."""

_SIDE_BY_SIDE: Final = 16
"""Requests under way; each is a wait."""

_OBJECT_SETTINGS: Final = (
    "acl.default",
    "create.storage.class",
    "encryption.algorithm",
    "server-side-encryption-algorithm",
)
"""Hadoop's settings for the objects that it writes to S3. This process does not apply them."""


def can_stage_locally(out: str, hadoop: Callable[[str], str | None]) -> bool:
    """Whether windows of this output may go through a folder of this machine. ``hadoop``: Spark's settings of Hadoop.

    False if paths without a scheme lead Spark to another file system, or if a setting of ``_OBJECT_SETTINGS`` is set.
    """
    if not out.startswith("s3:") or not (hadoop("fs.defaultFS") or "file:").startswith("file:"):
        return False
    scopes = "fs.s3a.", f"fs.s3a.bucket.{urlsplit(out).netloc.rpartition('@')[2]}."
    return not any(hadoop(f"{scope}{name}") for scope in scopes for name in _OBJECT_SETTINGS)


def compute_via_local_disk(
    jobs: Sequence[WindowJob], compute: Callable[[Sequence[WindowJob]], tuple[Output, ...]]
) -> tuple[Output, ...]:
    """Return what ``compute`` returns for ``jobs``, having moved small ones of an object store to this machine and back.

    Only for a session whose tasks run here, and an output that ``can_stage_locally``. Raises OSError where a segment cannot be
    fetched or a file not be sent, and what ``compute`` raises. A process that dies leaves its folder in its temporary
    directory.
    """
    if sum(job.bytes for job in jobs) > MOST_BYTES:
        return compute(jobs)
    (filesystem, _), local = reach(jobs[0].staging, jobs[0].out), LocalFileSystem()
    # If an abandoned task writes later, its files are deleted with the process's folder.
    with (
        tempfile.TemporaryDirectory(prefix="windows-", ignore_cleanup_errors=True) as folder,
        ThreadPoolExecutor(_SIDE_BY_SIDE, thread_name_prefix="store") as pool,
    ):
        local_jobs: list[WindowJob] = []
        downloads: list[tuple[str, str]] = []
        for number, job in enumerate(jobs):
            place = Path(folder, str(number))
            (place / "segments").mkdir(parents=True)
            paths = {uri: f"{place}/segments/{index}.parquet" for index, uri in enumerate(job.segments)}
            downloads += ((reach(uri, job.out)[1], path) for uri, path in paths.items())
            older = {ddl: tuple(paths[uri] for uri in uris) for ddl, uris in job.older.items()}
            segments = tuple(paths.values())
            local_jobs.append(replace(job, segments=segments, staging=f"{place}/output", out="", older=older))
        list(pool.map(lambda pair: _copy(filesystem, pair[0], local, pair[1]), downloads))
        outputs = compute(local_jobs)
        uploads = [
            (f"{local_job.staging}/{file}", f"{reach(job.staging, job.out)[1]}/{file}")
            for job, local_job, output in zip(jobs, local_jobs, outputs, strict=True)
            for file in output.files
        ]
        list(pool.map(lambda pair: _copy(local, pair[0], filesystem, pair[1]), uploads))
    return outputs


def _copy(of: FileSystem, path: str, to: FileSystem, place: str) -> None:
    with of.open_input_stream(path) as source, to.open_output_stream(place) as target:
        shutil.copyfileobj(source, target, 1 << 20)
