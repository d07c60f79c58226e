"""Committed outputs of windows, as Spark stages them, for the sinks that commit a table's metadata by themselves."""

from __future__ import annotations

import base64
import os
import pickle
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mldserver.base.kill_points import arm
from mldserver.engine_jobs import PublishJob
from mldserver.sinks import find
from mldserver.sinks.sink import Owner, SinkSpec
from mldserver.windows import Window

LEDGER = "1ed9e400"
OURS = Owner("flights", LEDGER)
BEGIN = datetime(2027, 1, 30, 23, tzinfo=UTC)
SESSION: Any = SimpleNamespace(conf={"spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS"})
"""Stands for Spark's, of which these sinks ask one setting."""


def window_of(hour: float, revision: int = 1) -> Window:
    start = BEGIN + timedelta(hours=hour)
    return Window(f"{start:%Y-%m-%dT%H-%M-%SZ}", start, start + timedelta(hours=1), revision, "flights")


@dataclass
class Staged:
    """A folder of staged outputs, and the sink that they go into."""

    root: Path
    sink: SinkSpec

    def output(
        self,
        hour: float,
        names: list[str] | None,
        *,
        revision: int = 1,
        ledger: str = LEDGER,
        attempt: int = 1,
        columns: dict[str, Any] | None = None,
    ) -> PublishJob:
        """Stage rows with these names, half of them in each of two files; None: an output that has nothing to show."""
        window = window_of(hour, revision)
        staging = self.root / "staging" / window.id / f"{revision:04d}{attempt}-{ledger}"
        if names is None:
            return PublishJob(window, str(staging), (), 0, ledger=ledger)
        staging.mkdir(parents=True, exist_ok=True)
        files = []
        for number, part in enumerate((names[::2], names[1::2])):
            size = len(part)
            rows = {"name": pa.array(part, pa.string()), "n": pa.array(range(size), pa.int32())}
            rows |= {name: pa.array([value] * size) for name, value in (columns or {}).items()}
            rows["window_start"] = pa.array([window.start] * size, pa.timestamp("us", "UTC"))
            rows["_window"] = pa.array([window.id] * size, pa.string())
            rows["_revision"] = pa.array([revision] * size, pa.int32())
            files.append(f"part-{number:05d}.parquet")
            pq.write_table(pa.table(rows), staging / files[-1], store_schema=False)
        return PublishJob(window, str(staging), tuple(files), len(names), ledger=ledger)

    def publish(self, job: PublishJob) -> None:
        find(self.sink.format).publish(SESSION, self.sink, job)

    def own(self, owner: Owner = OURS, *, new_ledger: bool = False) -> None:
        find(self.sink.format).own(SESSION, self.sink, owner, new_ledger=new_ledger)

    def check(self) -> None:
        find(self.sink.format).check(SESSION, self.sink)

    def process(
        self, *jobs: PublishJob, kill_at: str = "", stops: bool = False, go: Path | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a process that publishes each of ``jobs`` once the file ``go`` and its window's id is there, and may be killed at a step."""
        told = base64.b64encode(pickle.dumps((self.sink, jobs, go, kill_at, stops)))
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
        command = [sys.executable, "-m", "sinks.staged", told.decode()]
        return subprocess.Popen(command, env=environment)


def main() -> None:
    """Do what ``Staged.process`` describes."""
    sink, jobs, go, kill_at, stops = pickle.loads(base64.b64decode(sys.argv[1]))
    find(sink.format).check(SESSION, sink)
    arm(kill_at or None, signal.SIGSTOP if stops else signal.SIGKILL)
    for job in jobs:
        while go is not None and not go.with_name(f"{go.name}{job.window.id}").exists():
            time.sleep(0.0002)
        find(sink.format).publish(SESSION, sink, job)


if __name__ == "__main__":
    main()
