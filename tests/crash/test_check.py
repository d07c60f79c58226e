"""The comparison at a story's end finds what is lost, doubled, damaged, or in another's place."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from crash.held import Held
from crash.stories import TWICE, Letter, Story, check, told

COLUMNS = ("id", "at", "arrived", "_time", "_shard", "_sequence", "_sub_sequence", "_arrival")
Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def story() -> Story:
    return told(1, kind="recompute", records=120)


@pytest.fixture
def rows(story: Story) -> Rows:
    """What must come out, in its order."""
    expected = sorted(story.rows, key=lambda columns: (columns.time_ms, columns.id))
    made = [dict(zip(COLUMNS, columns, strict=True)) for columns in expected]
    return [row | {"_clock": clock} for clock, row in enumerate(made)]


def write(out: Path, rows: Rows) -> None:
    windows: dict[str, Rows] = {}
    for row in rows:
        start = datetime.fromtimestamp(row["at"] // 10_000 * 10, UTC)
        windows.setdefault(start.strftime("%Y-%m-%dT%H-%M-%SZ"), []).append(row)
    for window, members in windows.items():
        table = pa.Table.from_pylist(members)
        for name in ("at", "_arrival"):
            place = table.column_names.index(name)
            table = table.set_column(place, name, table[name].cast(pa.timestamp("ms", "UTC")))
        start = datetime.strptime(window, "%Y-%m-%dT%H-%M-%SZ").replace(tzinfo=UTC)
        for name, bound in (("window_start", start), ("window_end", start + timedelta(seconds=10))):
            table = table.append_column(name, pa.array([bound] * len(table), pa.timestamp("us", "UTC")))
        (out / f"window={window}").mkdir(parents=True)
        pq.write_table(table, out / f"window={window}" / "part.parquet")


def held(story: Story, letters: Counter[Letter] | None = None) -> Held:
    return Held(story.poisoned if letters is None else letters, frozenset(), frozenset())


def exchange(name: str) -> Callable[[Rows], None]:
    def change(rows: Rows) -> None:
        one, other = next(
            (one, other)
            for one in rows
            for other in rows
            if one[name] != other[name] and one["at"] // 10_000 == other["at"] // 10_000
        )
        one[name], other[name] = other[name], one[name]

    return change


def reverse_a_record(rows: Rows) -> None:
    second = next(row for row in rows if row["id"] >= TWICE)
    first = next(row for row in rows if row["id"] == second["id"] - TWICE)
    first["_clock"], second["_clock"] = second["_clock"], first["_clock"]


def test_what_must_come_out_passes(story: Story, rows: Rows, tmp_path: Path) -> None:
    write(tmp_path, rows)
    check(story, tmp_path, held(story))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        *((exchange(name), "lost") for name in COLUMNS if name not in {"id", "at", "_sub_sequence"}),
        (exchange("id"), "lost"),
        (exchange("at"), "lost"),
        (lambda rows: rows[7].update(_sub_sequence=1), "lost"),
        (lambda rows: rows.pop(), "lost"),
        (lambda rows: rows.append(rows[0] | {"_clock": len(rows)}), "doubled"),
        (lambda rows: rows[7].update(_clock=rows[8]["_clock"]), "clocks of"),
        (reverse_a_record, "out of order"),
        (lambda rows: [row.pop("_sub_sequence") for row in rows], "_arrival"),
    ],
)
def test_what_must_not_is_named(
    story: Story, rows: Rows, tmp_path: Path, change: Callable[[Rows], Any], said: str
) -> None:
    change(rows)
    write(tmp_path, rows)
    with pytest.raises(AssertionError, match=said):
        check(story, tmp_path, held(story))


def test_letters_of_another_shard_or_record_are_named(story: Story, rows: Rows, tmp_path: Path) -> None:
    write(tmp_path, rows)
    first = next(iter(story.poisoned))
    others = story.poisoned - Counter([first])
    assert others
    for wrong in (first._replace(shard="shardId-x"), first._replace(sequence="1"), first._replace(id=-1)):
        with pytest.raises(AssertionError, match="lost"):
            check(story, tmp_path, held(story, others + Counter([wrong])))
    check(story, tmp_path, dataclasses.replace(held(story), letters=others + Counter([first])))
