"""Java for Spark: where it is, whether it is new enough, and the archive of classes that halves its start.

Spark 4 needs Java 17 or later on the driver's machine. What is found and how a version is read is plain code; only
``probe`` runs anything. Spark Connect (``sc://``) needs no Java here at all.

A JVM spends half of Spark's start on loading some 20,000 classes. Java can write them to a file when it exits
(``-XX:ArchiveClassesAtExit``) and map that file at later starts (``-XX:SharedArchiveFile``); the JVM checks class path,
jars and build of Java itself, and goes on without the file when anything is off. Writing makes the start 1.4
times as slow and the exit as long as the start. So a separate driver without jobs, at the lowest priority, makes the
archive later and exits. The file gets its name when it is complete.

What it brings, with Java 17 and pyspark 4.3 (without archive = 1): from nothing to the first computed window 0.5 on a
quiet machine with two cores, from nothing to a driver that is warm 0.43 to 0.64 (processor time 0.56 to 0.61, three
rounds each) on a busy one. ``quick`` options (C1 compiler only, serial collector): 0.76, with an archive 0.37; but
`sim` and `demo` end before an archive is made. The file has about 170 MB.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mldserver.errors import JavaError, NotThereYet

MINIMUM_JAVA = 17
"""The oldest Java that Spark 4 runs on."""

_VERSION = re.compile(r"""(?:version|^\w[\w.-]*)\s+"?(\d+)(?:\.(\d+))?[\w.+-]*"?""", re.MULTILINE)
_ADVICE = (
    f"Install Java {MINIMUM_JAVA} or later and put it on PATH, or name its folder with the setting java_home or"
    " the variable JAVA_HOME."
)


@dataclass(frozen=True, slots=True)
class Java:
    """A Java that Spark can run on."""

    command: str
    """The executable's path."""
    home: str | None
    """What JAVA_HOME must say so that Spark's scripts take this Java; None when PATH leads there already."""
    major: int
    version: str
    """The first line of ``java -version``, which names build and vendor's numbering."""


def java_command(
    java_home: str | None, environment: Mapping[str, str], which: Callable[[str], str | None] = shutil.which
) -> tuple[str, str | None]:
    """Return (executable, home): the setting comes before JAVA_HOME, JAVA_HOME before PATH, as in Spark's scripts.

    Raises JavaError when PATH is asked and has none.
    """
    home = java_home or environment.get("JAVA_HOME") or None
    if home is not None:
        return os.path.join(home, "bin", "java"), home  # noqa: PTH118  # a command line's text, not a path to walk
    command = which("java")
    if command is None:
        raise JavaError(
            "Spark needs Java, and none was found: JAVA_HOME is not set and PATH has no java.", advice=_ADVICE
        )
    return command, None


def judge(command: str, home: str | None, output: str) -> Java:
    """Return the Java that printed ``output`` at ``-version``. Raises JavaError when it is too old or says no version.

    Every vendor writes ``<name> version "<number>"``; up to Java 8 the number began with ``1.``.
    """
    match = _VERSION.search(output)
    if match is None:
        excerpt = " ".join(output.split())[:200] or "nothing"
        raise JavaError(f"{command} -version says no version: {excerpt}.", advice=_ADVICE)
    major = int(match[2] or match[1]) if int(match[1]) == 1 else int(match[1])
    if major < MINIMUM_JAVA:
        raise JavaError(
            f"Spark needs Java {MINIMUM_JAVA} or later, but {command} is Java {major}.", advice=_ADVICE
        )
    version = next(line for line in output.splitlines() if _VERSION.search(line))
    return Java(command, home, major, version.strip())


async def probe(java_home: str | None, environment: Mapping[str, str], *, limit_seconds: float = 60) -> Java:
    """Find Java and ask for its version.

    Raises JavaError when it is missing, too old, or does not run, NotThereYet when it does not answer: the machine is busy.
    """
    path = environment.get("PATH", os.defpath)
    command, home = java_command(java_home, environment, lambda name: shutil.which(name, path=path))
    try:
        process = await asyncio.create_subprocess_exec(
            command,
            "-version",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=dict(environment),
        )
    except OSError as error:
        named = " (from java_home)" if java_home else " (from JAVA_HOME)" if home else ""
        what = f"Spark needs Java, but {command}{named} cannot be run: {error.strerror}."
        raise JavaError(what, advice=_ADVICE) from error
    try:
        async with asyncio.timeout(limit_seconds):
            output, _ = await process.communicate()
    except TimeoutError as error:
        raise NotThereYet(
            f"{command} -version did not answer within {limit_seconds:g} seconds.",
            advice="The machine is very busy, or this Java hangs.",
        ) from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return judge(command, home, output.decode(errors="replace"))


_KEPT = 3
"""Archives in the cache beyond which the oldest go: an upgrade leaves the file of the version before."""

_SHAPING = ("spark.driver.memory", "spark.driver.extraClassPath", "spark.driver.extraJavaOptions")
"""Settings that change the JVM so much that it may decline the archive of another."""


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
    """Remove what an interrupted writing left behind, of this process or of dead ones. Makes the folder. Raises OSError."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    for left in archive.parent.glob(f"{archive.name}.*.tmp"):
        owner = left.name.removesuffix(".tmp").rpartition(".")[2]
        if left == unfinished(archive) or not (owner.isdigit() and Path(f"/proc/{owner}").exists()):
            left.unlink(missing_ok=True)
