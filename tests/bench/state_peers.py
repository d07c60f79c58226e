"""Other programs that count the records of each key, from the same lines: ``python -m bench.state_peers NAME LINES FOLDER``.

Each reads MultiLangDaemon lines from a file, decodes every record, adds one to the number that it keeps for the record's key, and
writes a row of the key and the number to a file, as a line of JSON. It prints its seconds and its CPU seconds as JSON. Imports, and opening what keeps the state, are not counted.

* ``dict``: a plain dict, which a crash loses. The floor.
* ``bytewax``: Bytewax's ``stateful_map`` with recovery, which it snapshots into SQLite every 10 s (its default).
* ``quix``: the RocksDB state of Quix Streams, in transactions of 5 s (its default commit interval). There is no Kafka broker here, so
  neither its consumer nor its changelog is in the figure.
"""

from __future__ import annotations

import base64
import json
import resource
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import orjson

__all__ = ["PEERS"]

_COMMIT_SECONDS: Final = 5.0
_EPOCH: Final = timedelta(seconds=10)


def _records(line: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the key and the data of each record of a batch."""
    for record in orjson.loads(line)["records"]:
        yield record["partitionKey"], base64.b64decode(record["data"])


def _row(key: str, n: int) -> bytes:
    return orjson.dumps([key, n], option=orjson.OPT_APPEND_NEWLINE)


def _dict(lines: Path, folder: Path) -> Callable[[], int]:
    def run() -> int:
        counts: dict[str, int] = {}
        with lines.open("rb") as file, (folder / "rows").open("wb") as rows:
            for line in file:
                for key, _ in _records(line):
                    n = counts[key] = counts.get(key, 0) + 1
                    rows.write(_row(key, n))
        return sum(counts.values())

    return run


def _quix(lines: Path, folder: Path) -> Callable[[], int]:
    from quixstreams.state.rocksdb import RocksDBStore  # only where it is installed

    store = RocksDBStore(name="default", stream_id="records", base_dir=str(folder))
    store.assign_partition(0)

    def run() -> int:
        total = 0
        transaction, began = store.start_partition_transaction(0), time.monotonic()
        with lines.open("rb") as file, (folder / "rows").open("wb") as rows:
            for line in file:
                for key, _ in _records(line):
                    state = transaction.as_state(prefix=key.encode())
                    n = state.get("n", 0) + 1
                    state.set("n", n)
                    rows.write(_row(key, n))
                    total += 1
                if time.monotonic() - began >= _COMMIT_SECONDS:
                    transaction.prepare()
                    transaction.flush()
                    transaction, began = store.start_partition_transaction(0), time.monotonic()
        transaction.prepare()
        transaction.flush()
        return total

    return run


def _bytewax(lines: Path, folder: Path) -> Callable[[], int]:
    from bytewax import operators as op  # only where it is installed
    from bytewax.dataflow import Dataflow  # see above
    from bytewax.inputs import FixedPartitionedSource, StatefulSourcePartition  # see above
    from bytewax.outputs import DynamicSink, StatelessSinkPartition  # see above
    from bytewax.recovery import RecoveryConfig, init_db_dir  # see above
    from bytewax.testing import run_main  # see above

    written = 0

    class Lines(StatefulSourcePartition[Any, int]):
        """Gives a batch's records at a time; what it stores is its place in the file."""

        def __init__(self, at: int) -> None:
            self._file = lines.open("rb")
            self._file.seek(at)

        def next_batch(self) -> list[tuple[str, bytes]]:
            line = self._file.readline()
            if not line:
                raise StopIteration
            return list(_records(line))

        def snapshot(self) -> int:
            return self._file.tell()

    class OneFile(FixedPartitionedSource[Any, int]):
        """The file is one partition, as a shard is."""

        def list_parts(self) -> list[str]:
            return ["lines"]

        def build_part(self, _step_id: str, _part: str, resume_state: int | None) -> Lines:
            return Lines(resume_state or 0)

    class Rows(StatelessSinkPartition[Any]):
        """Counts the rows that come out, and writes them."""

        def __init__(self) -> None:
            self._file = (folder / "rows").open("wb")

        def write_batch(self, items: list[Any]) -> None:
            nonlocal written
            written += len(items)
            self._file.writelines([_row(key, n) for key, n in items])

        def close(self) -> None:
            self._file.close()

    class OneSink(DynamicSink[Any]):
        """One partition of ``Rows`` for each worker."""

        def build(self, _step_id: str, _index: int, _count: int) -> Rows:
            return Rows()

    def counted(count: int | None, _data: bytes) -> tuple[int, int]:
        return (count or 0) + 1, (count or 0) + 1

    flow = Dataflow("counts")
    rows = op.stateful_map("count", op.input("lines", flow, OneFile()), counted)
    op.output("rows", rows, OneSink())
    init_db_dir(folder, 1)

    def run() -> int:
        run_main(flow, epoch_interval=_EPOCH, recovery_config=RecoveryConfig(str(folder)))
        return written

    return run


PEERS: Final[dict[str, Callable[[Path, Path], Callable[[], int]]]] = {
    "dict": _dict,
    "bytewax": _bytewax,
    "quix": _quix,
}


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main(name: str, lines: str, folder: str) -> int:
    """Print the figures of one peer; exit code 3 if it is not installed."""
    try:
        run = PEERS[name](Path(lines), Path(folder))
    except ModuleNotFoundError:
        return 3
    began, used = time.perf_counter(), _cpu_seconds()
    records = run()
    told = {"records": records, "seconds": time.perf_counter() - began, "cpu": _cpu_seconds() - used}
    sys.stdout.write(json.dumps(told) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
