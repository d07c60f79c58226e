"""A Spark session in the tests' own process, as one who reads the output has it. A plugin of pytest: folders share it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from support.postgres import JAR
from support.spark_classes import spark_cache

from mldserver.spark.driver_messages import StartSession
from mldserver.spark.session import DriverSession, environment, open_session


@pytest.fixture(scope="session")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DriverSession]:
    """One JVM for all tests of this process that need a session: a start costs ten seconds of a processor."""
    scratch = tmp_path_factory.mktemp("spark")
    conf = {"spark.driver.extraJavaOptions": f"-Dderby.system.home={scratch}"}
    if JAR.exists():
        conf["spark.jars"] = str(JAR)
    archive = next(map(str, spark_cache(scratch).glob("*.jsa")), None)
    start = StartSession("local[2]", str(scratch), conf=conf, quick=True, archive=archive)
    before = dict(os.environ)
    os.environ.update(environment(start, os.environ, java_home=os.environ.get("JAVA_HOME")))
    try:
        session = open_session(start)
    finally:
        os.environ.clear()
        os.environ.update(before)
    gateway = session.spark.sparkContext._gateway
    assert gateway is not None
    yield session
    session.spark.stop()
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait()
