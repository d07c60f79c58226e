from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.sqlite_table import publish_into, read_table

from mldserver.engine_jobs import PublishJob
from mldserver.windows import Window


def output(root: Path, names: list[str] | None, revision: int, window: str = "w1") -> PublishJob:
    about = Window(window, None, None, revision)
    if names is None:
        return PublishJob(about, str(root), (), 0)
    file = f"{window}-{revision}.parquet"
    pq.write_table(pa.table({"name": names}), root / file)
    return PublishJob(about, str(root), (file,), len(names))


def held(table: Path) -> dict[str, tuple[int, list[str]]]:
    return {
        window: (revision, [name for each in tables for name in each.column("name").to_pylist()])
        for window, (revision, tables) in read_table(table).items()
    }


def test_a_revision_replaces_lower_ones_once_and_is_never_replaced_by_them(tmp_path: Path) -> None:
    table = tmp_path / "table"
    assert held(table) == {}
    for _ in range(2):
        publish_into(table, output(tmp_path, ["a", "b"], 1))
    publish_into(table, output(tmp_path, ["z"], 1, "w2"))
    assert held(table) == {"w1": (1, ["a", "b"]), "w2": (1, ["z"])}
    publish_into(table, output(tmp_path, ["a", "b", "late"], 2))
    publish_into(table, output(tmp_path, ["a", "b"], 1))
    assert held(table)["w1"] == (2, ["a", "b", "late"])
    publish_into(table, output(tmp_path, None, 3))
    assert held(table) == {"w1": (3, []), "w2": (1, ["z"])}


def test_a_staged_file_that_is_gone_changes_nothing(tmp_path: Path) -> None:
    job = output(tmp_path, ["a"], 1)
    (tmp_path / job.files[0]).unlink()
    with pytest.raises(FileNotFoundError):
        publish_into(tmp_path / "table", job)
    assert held(tmp_path / "table") == {}
