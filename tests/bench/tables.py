"""Windows a second into tables of Delta Lake and Iceberg and into plain folders, and what a commit costs as a table grows.

    PYTHONPATH=tests python -m bench.tables [WINDOWS]

Each window is one small file, staged before the clock runs. Folders are published as without a table: a rename and a sync.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from sinks.staged import LEDGER, Staged

from mldserver.engine_jobs import PublishJob
from mldserver.ledger.contract import Commit
from mldserver.output.layout import attempt_path, writer_tag
from mldserver.output.publish import Publisher
from mldserver.output.store import OutputStore
from mldserver.sinks.sink import SinkSpec

_STEP = 500


def main(windows: int) -> None:
    """Print a line for each 500 windows: windows a second, and the milliseconds that a window took."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        catalog = {"type": "sql", "uri": f"sqlite:///{root}/catalog.db", "warehouse": f"file://{root}/lake"}
        sinks = SinkSpec("delta", str(root / "table")), SinkSpec("iceberg", "lake.db.events", options=catalog)
        tables = [Staged(root, sink) for sink in sinks]
        for table in tables:
            table.own()
        store = OutputStore(str(root / "out"))
        publisher = Publisher(store)
        for first in range(0, windows, _STEP):
            jobs = [tables[0].output(hour, ["a"]) for hour in range(first, first + _STEP)]
            seconds = {"folders": _folders(publisher, store, jobs)}
            for table in tables:
                began = time.perf_counter()
                for job in jobs:
                    table.publish(job)
                seconds[table.sink.format] = time.perf_counter() - began
            shown = (
                f"{name} {_STEP / took:,.0f}/s ({took / _STEP * 1000:.1f} ms)"
                for name, took in seconds.items()
            )
            print(f"{first + _STEP:6,} windows: {', '.join(shown)}", flush=True)


def _folders(publisher: Publisher, store: OutputStore, jobs: list[PublishJob]) -> float:
    outputs = []
    for job in jobs:
        staging = attempt_path(publisher.root, job.window.id, 1, writer_tag(LEDGER, "s"))
        store.prepare(staging)
        for file in job.files:
            Path(store.uri(f"{staging}/{file}")).write_bytes(Path(job.staging, file).read_bytes())
        outputs.append(Commit(job.window.id, 1, staging, job.files, job.rows, 1))
    began = time.perf_counter()
    for output in outputs:
        publisher.publish([output])
    return time.perf_counter() - began


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else 1000)
