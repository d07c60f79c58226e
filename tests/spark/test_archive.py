from __future__ import annotations

import os
from pathlib import Path

import pytest

from mldserver.spark import java as archive
from mldserver.spark.java import Java

JAVA = Java("/usr/bin/java", None, 17, 'openjdk version "17.0.1"')


def path(
    java: Java = JAVA,
    conf: dict[str, str] | None = None,
    environment: dict[str, str] | None = None,
    *,
    quick: bool = False,
) -> Path:
    return archive.archive_path(Path("/cache"), java, conf or {}, environment or {}, quick=quick)


def test_each_java_spark_and_shape_of_the_jvm_has_an_archive_of_its_own() -> None:
    newer = Java("/usr/bin/java", None, 17, 'openjdk version "17.0.2"')
    paths = {
        path(),
        path(newer),
        path(conf={"spark.driver.memory": "4g"}),
        path(environment={"SPARK_HOME": "/opt/spark"}),
        path(quick=True),
    }
    assert len(paths) == 5
    assert path(conf={"spark.sql.shuffle.partitions": "4"}) == path()


@pytest.fixture
def wanted(tmp_path: Path) -> Path:
    return tmp_path / "spark-4-java-17-a.jsa"


def test_an_archive_gets_its_name_when_it_is_complete(wanted: Path) -> None:
    assert not archive.keep(wanted)
    archive.unfinished(wanted).write_bytes(b"")
    assert not archive.keep(wanted)
    archive.unfinished(wanted).write_bytes(b"classes")
    assert archive.keep(wanted)
    assert wanted.read_bytes() == b"classes"


def test_old_archives_go_when_there_are_too_many(wanted: Path) -> None:
    for age in range(4):
        old = wanted.with_name(f"spark-old-{age}.jsa")
        old.write_bytes(b"x")
        os.utime(old, (1000 - age, 1000 - age))
    archive.unfinished(wanted).write_bytes(b"classes")
    assert archive.keep(wanted)
    assert sorted(p.name for p in wanted.parent.iterdir()) == [
        wanted.name,
        "spark-old-0.jsa",
        "spark-old-1.jsa",
    ]


def test_what_dead_processes_left_unfinished_is_removed_and_what_live_ones_write_is_not(wanted: Path) -> None:
    mine = archive.unfinished(wanted)
    live = wanted.with_name(f"{wanted.name}.{os.getppid()}.tmp")
    dead = wanted.with_name(f"{wanted.name}.999999999.tmp")
    odd = wanted.with_name(f"{wanted.name}.x.tmp")
    for left in (mine, live, dead, odd):
        left.write_bytes(b"half")
    archive.discard(wanted)
    assert sorted(wanted.parent.iterdir()) == [live]
