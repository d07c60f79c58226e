"""A package that is no part of ours registers a sink: the settings read it, the driver publishes into it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mldserver.config.resolve import resolve, sink_of
from mldserver.errors import ConfigError, OperatorError, WindowFailed
from mldserver.jobs.engine import PublishJob, WindowJob
from mldserver.spark.client import SparkEngine
from mldserver.spark.sinks.sink import SinkSpec
from mldserver.windows import Window

TOY = """
import json, pathlib
from mldserver.spark.sinks.sink import staged

def parse(target):
    if not target.startswith("/"):
        raise ValueError("after toy: comes an absolute path")
    return target

def check_settings(sink):
    if sink.options.keys() - {"indent"}:
        raise ValueError("of sink_options it takes indent only")

def check(spark, sink):
    pathlib.Path(sink.target).mkdir()

def publish(spark, sink, job):
    names = sorted(row["name"] for row in staged(spark, job).collect())
    file = pathlib.Path(sink.target, f"{job.window.id}.json")
    file.write_text(json.dumps(names, indent=int(sink.options["indent"])))
"""


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on sys.path with an installed package ``toy_sink``, as pip leaves one."""
    folder = tmp_path / "packages"
    metadata = folder / "toy_sink-1.0.dist-info"
    metadata.mkdir(parents=True)
    (folder / "toy_sink.py").write_text(TOY)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-sink\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[mldserver.sinks]\ntoy = toy_sink\nhalf = json\ngone = no_such_module_of_toys\n"
    )
    monkeypatch.syspath_prepend(folder)
    return folder


def sink(value: str, **given: Any) -> SinkSpec | None:
    return sink_of(resolve({"handler": "h", "sink": value, **given}, environ={}, folder=Path("/")))


def test_a_package_registers_a_sink_and_its_settings_are_read(packages: Path) -> None:
    toys = packages.parent
    assert sink(f"Toy:{toys}", sink_options=["indent=1"]) == SinkSpec("toy", str(toys), "", {"indent": "1"})


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("toy:here", "is not possible: after toy: comes an absolute path"),
        ("toy:/here", "does not go with the other settings: of sink_options it takes indent only"),
        ("half:/x", "json, which an installed package registers as half, lacks parse, check_settings, check"),
        (
            "gone:/x",
            "as gone, cannot be imported: ModuleNotFoundError: No module named 'no_such_module_of_toys'",
        ),
        ("none:/x", "it names no sink of ours or of an installed package"),
    ],
)
def test_what_is_wrong_with_a_package_s_sink_is_said_at_the_start(value: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        sink(value, sink_options=["color=red"])


def engine(root: Path, sink: SinkSpec | None, *packages: str) -> SparkEngine:
    folders: dict[str, Any] = {"work_dir": root / "work", "cache_dir": root / "cache"}
    return SparkEngine(
        "", "name STRING", archive_after=None, quick=True, sink=sink, python_path=packages, **folders
    )


def segment(root: Path) -> str:
    meta = {"_time": pa.int64(), "_clock": pa.int64(), "_shard": pa.string(), "_sequence": pa.string()}
    columns = {"name": pa.array(["b", "a"])} | {name: pa.nulls(2, kind) for name, kind in meta.items()}
    columns |= {"_sub_sequence": pa.nulls(2, pa.int64()), "_arrival": pa.nulls(2, pa.timestamp("ms", "UTC"))}
    pq.write_table(pa.table(columns), root / "segment.parquet")
    return str(root / "segment.parquet")


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_the_driver_publishes_what_it_computed_into_a_package_s_sink_and_says_why_it_cannot(
    packages: Path, tmp_path: Path
) -> None:
    it = engine(tmp_path, sink(f"toy:{tmp_path}/toys", sink_options=["indent=1"]), str(packages))
    window = Window("w1", None, None, 1, "flights")
    staging = str(tmp_path / "staging")
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(it.run())
        try:
            done = await it.compute(WindowJob(window, 1, (segment(tmp_path),), staging, 2, 100))
            await it.publish(PublishJob(window, staging, done.files, done.rows))
            gone = PublishJob(Window("w2", None, None, 1, "flights"), staging, ("gone.parquet",), 1)
            with pytest.raises(WindowFailed, match=r"PATH_NOT_FOUND.*gone\.parquet"):
                await it.publish(gone)
        finally:
            await it.close()
    assert done.rows == 2
    assert json.loads((tmp_path / "toys" / "w1.json").read_text()) == ["a", "b"]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_a_server_whose_spark_lacks_the_format_does_not_start(tmp_path: Path) -> None:
    it = engine(tmp_path, SinkSpec("delta", str(tmp_path / "table")))
    with pytest.raises(
        OperatorError, match=r"^This Spark session knows no format delta\..*spark\.jars\.pack"
    ):
        await it.run()
