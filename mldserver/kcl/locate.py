"""Finds what the daemon is made of on this machine: Java, the KCL's jars, and the files of ``deploy/``."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

import mldserver
from mldserver.errors import InternalError, JavaError, OperatorError
from mldserver.spark.java import probe

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mldserver.spark.java import Java

__all__ = ["deploy_file", "find_jars", "find_java"]

JARS_PACKAGE = "amazon_kclpy"


def find_jars(package: str = JARS_PACKAGE) -> tuple[Path, ...]:
    """Return the KCL's jars. Raises OperatorError when the extra ``kcl`` is not installed."""
    spec = importlib.util.find_spec(package)
    places = spec.submodule_search_locations if spec else None
    jars = tuple(sorted(jar for place in places or () for jar in Path(place, "jars").glob("*.jar")))
    if not any(jar.name.startswith("amazon-kinesis-client-multilang") for jar in jars):
        raise OperatorError(
            "The Java MultiLangDaemon is not installed: no jars of the Kinesis Client Library were found.",
            advice="Install them with: pip install 'mldserver[kcl]'",
        )
    return jars


async def find_java(java_home: str | None, environment: Mapping[str, str]) -> Java:
    """Return a Java that is new enough (17, as for Spark). Raises JavaError."""
    try:
        return await probe(java_home, environment)
    except JavaError as error:
        what = error.what.replace("Spark needs", "The MultiLangDaemon needs")
        raise JavaError(what, advice=error.advice) from error


def deploy_file(name: str) -> Path:
    """Return the path of a file of ``deploy/``: installed under ``share/mldserver``, or in a source checkout."""
    for file in importlib.metadata.files("mldserver") or ():
        if file.parts[-3:] == ("share", "mldserver", name):
            path = Path(str(file.locate())).resolve()
            if path.exists():
                return path
    path = Path(mldserver.__file__).parents[1] / "deploy" / name
    if not path.exists():
        raise InternalError(
            f"The file {name} is missing from the installation.", advice="Install mldserver again."
        )
    return path
