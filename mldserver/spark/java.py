"""Java for Spark: where it is, and whether it is new enough.

Spark 4 needs Java 17 or later on the driver's machine. What is found and how a version is read is plain code; only
``probe`` runs anything. Spark Connect (``sc://``) needs no Java here at all.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mldserver.errors import JavaError, NotThereYet

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

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


def parse_version(text: str) -> int | None:
    """Return the major version from the output of ``java -version``; None when there is none in it.

    Every vendor writes ``<name> version "<number>"``; up to Java 8 the number began with ``1.``.
    """
    match = _VERSION.search(text)
    if match is None:
        return None
    major, minor = int(match[1]), match[2]
    return int(minor) if major == 1 and minor is not None else major


def judge(command: str, home: str | None, output: str) -> Java:
    """Return the Java that printed ``output``. Raises JavaError when it is too old or says no version."""
    major = parse_version(output)
    if major is None:
        excerpt = " ".join(output.split())[:200] or "nothing"
        raise JavaError(f"{command} -version says no version: {excerpt}.", advice=_ADVICE)
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
