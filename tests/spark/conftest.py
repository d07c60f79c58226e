"""A Spark session in the test's own process, as one who reads the output has it; and a Java that only says its version."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from support.spark_here import end

from mldserver.spark.driver_messages import Start
from mldserver.spark.session import environment, open_session

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from mldserver.spark.session import Session


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    scratch = tmp_path_factory.mktemp("spark")
    start = Start("", "", "local[2]", str(scratch), quick=True)
    before = dict(os.environ)
    os.environ.update(environment(start, os.environ, java_home=os.environ.get("JAVA_HOME")))
    session = open_session(start)
    yield session
    end(session.spark)
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def java(tmp_path: Path) -> Path:
    (tmp_path / "java" / "bin").mkdir(parents=True)
    file = tmp_path / "java" / "bin" / "java"
    file.write_text("#!/bin/sh\necho 'openjdk version \"17.0.1\"'\n")
    file.chmod(0o755)
    return tmp_path / "java"
