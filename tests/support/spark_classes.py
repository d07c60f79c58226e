"""Spark's classes, archived once for a whole run: each of its dozen Sparks then starts in half the processor time.

As a program it makes the archive: ``python -m support.spark_classes FOLDER``. Nobody waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from mldserver.children import parent_death

__all__ = ["QUICK", "archive_options", "archiving", "spark_cache"]

QUICK: Final = "spark.driver.extraJavaOptions=-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""A server's setting ``spark_conf``, where there is no ``quick`` to ask for."""
_VARIABLE: Final = "SPARK_CLASSES"
_TESTS: Final = Path(__file__).parents[1]


@contextlib.contextmanager
def archiving() -> Iterator[None]:
    """Make an archive beside the block, for this process and those that it starts, and delete it after the block.

    If the environment names a folder, as ``.ci/run`` does for all its lanes, the block uses the archive there.
    """
    if _VARIABLE in os.environ:
        yield
        return
    folder = tempfile.mkdtemp(prefix="spark-classes-")
    os.environ[_VARIABLE] = folder
    path = os.pathsep.join(map(str, (_TESTS, _TESTS.parent)))
    tied = [sys.executable, "-ISE", parent_death.__file__, str(os.getpid())]
    making = subprocess.Popen(
        [*tied, sys.executable, "-m", "support.spark_classes", folder],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        if making.poll() is None:
            os.killpg(making.pid, signal.SIGKILL)
            making.wait()
        shutil.rmtree(folder, ignore_errors=True)


def archive_options() -> list[str]:
    """Return the options with which a JVM of Spark other than a driver's uses an archive; empty while there is none."""
    shared = [f"-XX:SharedArchiveFile={archive}" for archive in _archives()[:1]]
    return [*shared, "-Xlog:disable", "-Xlog:all=error:stderr"] if shared else []


def _archives() -> list[Path]:
    """Return the archive under each of its names; empty while there is none."""
    return list(Path(os.environ.get(_VARIABLE, os.devnull)).glob("*.jsa"))


def spark_cache(folder: Path) -> Path:
    """Return a setting ``cache_dir`` for a Spark that starts, of a test's own, in what may be an ``XDG_CACHE_HOME``.

    Where there is no archive (yet), nothing can be kept in it: a server would make one, with a driver of its own, after a
    minute. A driver that dies before its first job takes the archive with it, as far as it knows.
    """
    archives = _archives()
    if not archives:
        return Path(os.devnull, "cache", "mldserver")
    cache = folder / "cache" / "mldserver"
    cache.mkdir(parents=True)
    for file in archives:
        (cache / file.name).symlink_to(file)
    return cache


def main(folder: Path) -> None:
    """Start a session as the tests do, compute a window, and let its JVM write the archive when it exits."""
    from mldserver.spark.driver_messages import LoadFunction, StartSession
    from mldserver.spark.java import archive_path, keep, probe
    from mldserver.spark.session import environment, open_session
    from mldserver.spark.warm_up import warm_up

    os.nice(10)  # those that wait for nothing but the processor are the tests
    java = asyncio.run(probe(None, os.environ))
    name, _, value = QUICK.partition("=")
    variants: tuple[tuple[dict[str, str], bool], ...] = (({}, True), ({name: value}, False))
    archives = [archive_path(folder, java, conf, os.environ, quick=quick) for conf, quick in variants]
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        start = StartSession("local[1]", scratch, quick=True, archive=str(folder / "made"), train=True)
        os.environ.update(environment(start, os.environ, java_home=java.home))
        session = open_session(start)
        warm_up(session, LoadFunction(schema="a INT", place=f"{scratch}/warm-up"))
        session.stop()
        assert session.jvm is not None
        assert session.jvm.wait() == 0
    if keep(folder / "made"):
        for archive in archives:
            archive.symlink_to(folder / "made")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
