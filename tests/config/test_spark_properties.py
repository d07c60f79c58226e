"""The file of Spark's properties, and what goes before it."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mldserver.config.resolve import resolve, with_spark_properties
from mldserver.config.settings import Settings
from mldserver.errors import ConfigError

pytestmark = pytest.mark.quick


def resolved(**given: object) -> Settings:
    return with_spark_properties(resolve({"handler": "h", **given}, environ={}, folder=Path("/nowhere")))


def properties(**given: object) -> Mapping[str, str]:
    return resolved(**given).spark_conf


def test_a_file_of_properties_is_read_as_spark_reads_it(tmp_path: Path, logged: list[dict[str, Any]]) -> None:
    file = tmp_path / "spark-defaults.conf"
    file.write_text(
        "# for the nightly cluster\n"
        "spark.executor.memory              4g  \n"
        "spark.eventLog.enabled=true\n"
        "spark.executor.extraJavaOptions    -XX:+PrintGCDetails -Dkey=value\n"
        "spark.jars.packages: a:b:1,\\\n    c:d:2\n"
        "spark.ends = \\n x \\u0020\n"
        "sparkle = 1\nHADOOP_USER=me\n"
    )
    assert properties(
        spark_properties_file=str(file), spark_conf={"spark.executor.memory": "8g", "spark.x": "ü"}
    ) == {
        "spark.executor.memory": "8g",
        "spark.eventLog.enabled": "true",
        "spark.executor.extraJavaOptions": "-XX:+PrintGCDetails -Dkey=value",
        "spark.jars.packages": "a:b:1,c:d:2",
        "spark.ends": "\n x",
        "spark.x": "ü",
    }
    (ignored,) = logged
    assert ignored == {
        "event": "spark.ignored",
        "level": "warning",
        "file": str(file),
        "names": ["sparkle", "HADOOP_USER"],
    }


def test_without_a_file_the_settings_are_all(logged: list[dict[str, Any]]) -> None:
    assert properties(spark_conf={"spark.x": "1"}) == {"spark.x": "1"}
    assert logged == []


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"spark.x=1\nspark.y.password=hush\xff\n", "is not UTF-8"),
        (b"spark.x=1\nspark.y.password=hush\\user\n", r"line 2 has a \\u that names no character"),
    ],
)
def test_a_file_that_cannot_be_read_is_a_wrong_setting(
    tmp_path: Path, content: bytes | None, told: str
) -> None:
    file = tmp_path / "spark.conf"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=told) as caught:
        properties(spark_properties_file=str(file))
    assert str(file) in str(caught.value)
    assert "hush" not in "".join(traceback.format_exception_only(caught.value))


@pytest.mark.parametrize(
    ("given", "master"),
    [
        ({}, "spark://file:7077"),
        ({"spark_conf": {"spark.master": "spark://conf:7077"}}, "spark://conf:7077"),
        ({"spark_master": "local[2]"}, "local[2]"),
    ],
    ids=["named by the file", "by spark_conf too", "by its own setting too"],
)
def test_a_master_that_properties_name_counts_where_the_setting_names_none(
    tmp_path: Path, given: dict[str, object], master: str
) -> None:
    file = tmp_path / "spark.conf"
    file.write_text("spark.master spark://file:7077\n")
    settings = resolved(spark_properties_file=str(file), **given)
    assert (settings.spark_master, settings.spark_conf) == (master, {})


def test_a_master_that_properties_name_is_checked_as_the_setting_is() -> None:
    with pytest.raises(
        ConfigError, match=r"spark_master = 'foo://h' \(the property spark\.master\) is not possible"
    ):
        properties(spark_conf={"spark.master": "foo://h"})


def test_a_connect_server_chooses_its_executors_python_itself() -> None:
    assert resolved(spark_master="spark://h:7077", spark_python="/py").spark_python == "/py"
    with pytest.raises(ConfigError, match="means nothing to a Spark Connect server") as refused:
        resolved(spark_master="sc://h", spark_python="/py")
    assert refused.value.advice == "Leave it out, and set PYSPARK_PYTHON where that server starts."


def test_yarn_needs_its_configuration_wherever_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("HADOOP_CONF_DIR", "YARN_CONF_DIR"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(ConfigError, match="neither HADOOP_CONF_DIR nor YARN_CONF_DIR"):
        resolved(spark_conf={"spark.master": "yarn"})
