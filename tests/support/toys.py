"""What the toy source of ``test_source_from_outside.py`` plays with: its records, its handler, and what that publishes."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pyarrow.dataset as ds
import pytest

from mldserver import cli
from mldserver.records import Record
from mldserver.runtime.interface import Records

__all__ = ["batches", "handler", "published", "redrive"]

HANDLER = """
from pathlib import Path
from mldserver import tumbling

schema = "id BIGINT NOT NULL"
windows = tumbling("10 seconds")

def process_record(record):
    if record.data != b'"broken"':
        return record.json(),
    if not Path(__file__).with_name("healed").exists():
        raise ValueError("broken")
    return 1000,
"""


def handler(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write a handler that fails with "broken" until a file ``healed`` is in its folder; return its name."""
    (folder / "toys.py").write_text(HANDLER)
    monkeypatch.syspath_prepend(str(folder))
    return "toys"


def batches(shard_id: str, items: list[object], size: int = 25) -> list[Records]:
    """Return the items as batches of records, whose sequence numbers begin with 1."""
    records = [
        Record(
            shard_id=shard_id,
            sequence_number=str(number),
            data=json.dumps(item).encode(),
            partition_key="key",
            arrival_ms=1_800_000_000_000 + 100 * number,
        )
        for number, item in enumerate(items, 1)
    ]
    return [Records(records[first : first + size], 0) for first in range(0, len(records), size)]


def published(out: Path) -> Counter[int]:
    """Return the published values, and how often each was published."""
    files = [str(path) for path in out.glob("window=*/*.parquet")]
    return Counter(ds.dataset(files, format="parquet").to_table(columns=["id"])["id"].to_pylist())


def redrive(out: Path) -> None:
    """Let all dead letters run again."""
    command = ["dead-letters", "redrive", "--all", "--out", str(out), "--pipeline", "toys"]
    assert cli.run(command) == 0
