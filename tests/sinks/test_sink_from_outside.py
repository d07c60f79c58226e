"""A package that is no part of ours registers a sink, and the settings read it. The driver publishes into it in
``spark/test_with_spark.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mldserver.config.resolve import resolve, sink_of
from mldserver.errors import ConfigError, OperatorError
from mldserver.sinks.sink import SinkSpec
from mldserver.spark.client import make_engine


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder on sys.path with an installed package ``toy_sink``."""
    monkeypatch.syspath_prepend(Path(__file__).parent / "packages")


def sink(value: str, **given: Any) -> SinkSpec | None:
    return sink_of(resolve({"handler": "h", "sink": value, **given}, environ={}, folder=Path("/")))


@pytest.mark.usefixtures("packages")
def test_a_package_registers_a_sink_and_its_settings_are_read() -> None:
    assert sink("Toy:/toys", sink_options=["indent=1"]) == SinkSpec("toy", "/toys", "", {"indent": "1"})


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


@pytest.mark.long
@pytest.mark.slow
async def test_a_server_whose_spark_lacks_the_format_does_not_start(tmp_path: Path) -> None:
    it = make_engine(
        "",
        "name STRING",
        archive_after=None,
        quick=True,
        sink=SinkSpec("delta", str(tmp_path / "table")),
        work_dir=tmp_path / "work",
        cache_dir=tmp_path / "cache",
    )
    with pytest.raises(
        OperatorError, match=r"^This Spark session knows no format delta\..*spark\.jars\.pack"
    ):
        await it.run()
