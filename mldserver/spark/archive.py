"""The class-data archive: Spark's classes, parsed and laid out once, mapped into memory at every later start.

A JVM spends half of Spark's start on loading some 20,000 classes. Java can write them to a file when it exits
(``-XX:ArchiveClassesAtExit``) and map that file at later starts (``-XX:SharedArchiveFile``); the JVM checks class path,
jars and build of Java itself, and goes on without the file when anything is off. Writing costs a start that is 1.4
times as slow and an exit as long as the start, so it is never left to a driver that somebody waits for: a driver of
its own, at the lowest priority, makes the archive later and exits. The file gets its name when it is complete.

What it brings, with Java 17 and pyspark 4.3 (without archive = 1): from nothing to the first computed window 0.5 on a
quiet machine with two cores, from nothing to a driver that is warm 0.43 to 0.64 (processor time 0.56 to 0.61, three
rounds each) on a busy one. ``quick`` options (C1 compiler only, serial collector): 0.76, with an archive 0.37; but
nobody makes one for them: `sim` and `demo` end before. The file has about 170 MB.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mldserver.spark.java import Java

_KEPT = 3
"""Archives in the cache beyond which the oldest go: an upgrade leaves the file of the version before."""

_SHAPING = ("spark.driver.memory", "spark.driver.extraClassPath", "spark.driver.extraJavaOptions")
"""Settings that change the JVM so much that it may decline the archive of another."""


def default_cache(environment: Mapping[str, str]) -> Path:
    """Return the cache directory by the XDG rules: ``$XDG_CACHE_HOME/mldserver``, else ``~/.cache/mldserver``."""
    root = environment.get("XDG_CACHE_HOME", "")
    # The XDG specification has relative paths ignored.
    base = (
        Path(root) if root.startswith("/") else Path(environment.get("HOME") or "~").expanduser() / ".cache"
    )
    return base / "mldserver"


def archive_path(
    cache: Path, java: Java, conf: Mapping[str, str], environment: Mapping[str, str], *, quick: bool
) -> Path:
    """Return where the archive for this Java, this Spark and these JVM options lies, or would lie."""
    pyspark = importlib.util.find_spec("pyspark")
    place = environment.get("SPARK_HOME") or (pyspark.origin if pyspark and pyspark.origin else "")
    version = importlib.metadata.version("pyspark")
    parts = [java.version, os.path.realpath(java.command), version, place, str(quick)]
    parts += [f"{name}={conf[name]}" for name in _SHAPING if name in conf]
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
    readable = re.sub(r"[^\w.-]", "_", version)
    return cache / f"spark-{readable}-java-{java.major}-{key}.jsa"


def is_there(archive: Path) -> bool:
    """Whether there is an archive to start from; one in a place that cannot be looked into is none."""
    try:
        return archive.is_file()
    except OSError:  # a home that a service's unit file hides, for one
        return False


def unfinished(archive: Path) -> Path:
    """Return the name under which this process writes the archive until it is complete."""
    return archive.with_name(f"{archive.name}.{os.getpid()}.tmp")


def keep(archive: Path) -> bool:
    """Give the archive its name now that it is complete, and drop the oldest others. False when none was written.

    Raises OSError.
    """
    written = unfinished(archive)
    if not written.is_file() or written.stat().st_size == 0:
        return False
    written.replace(archive)
    others = sorted(archive.parent.glob("spark-*.jsa"), key=lambda path: path.stat().st_mtime, reverse=True)
    for old in others[_KEPT:]:
        old.unlink(missing_ok=True)
    return True


def discard(archive: Path) -> None:
    """Remove what an interrupted writing left behind, of this process or of dead ones. Raises OSError."""
    for left in archive.parent.glob(f"{archive.name}.*.tmp"):
        owner = left.name.removesuffix(".tmp").rpartition(".")[2]
        if left == unfinished(archive) or not (owner.isdigit() and Path(f"/proc/{owner}").exists()):
            left.unlink(missing_ok=True)
