"""Puts the daemon's command line together, and the files that it reads, in a folder of their own."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mldserver.kcl.logs import LOGBACK_XML
from mldserver.kcl.properties import as_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["Launch", "prepare", "private_folder"]

MAIN_CLASS: Final = "software.amazon.kinesis.multilang.MultiLangDaemon"
TETHER: Final = Path(__file__).with_name("tether.py")
JVM_OPTIONS: Final = (
    # Non-ASCII partition keys become "?" without it (JDK < 18).
    "-Dfile.encoding=UTF-8",
    # A daemon that is out of memory is better started afresh than kept half alive.
    "-XX:+ExitOnOutOfMemoryError",
)
EMULATOR_OPTIONS: Final = ("-Daws.cborEnabled=false",)
"""Emulators of Kinesis speak JSON only."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Everything that starting the daemon takes."""

    java: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]

    def tethered(self) -> tuple[str, ...]:
        """Return the command that ends with this process, even when this process is killed."""
        return (sys.executable, "-ISE", str(TETHER), str(os.getpid()), self.java, *self.arguments)


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """Give a folder that nobody else can read, without a space in its path, and delete it at the end."""
    place = tempfile.gettempdir()
    folder = Path(tempfile.mkdtemp(prefix="mldserver-kcl-", dir="/tmp" if len(place.split()) != 1 else place))  # noqa: S108  # mkdtemp is safe anywhere
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def prepare(
    folder: Path,
    *,
    java: str,
    jars: Sequence[Path],
    properties: Mapping[str, str],
    java_options: Sequence[str] = (),
    environment: Mapping[str, str],
) -> Launch:
    """Write the daemon's files into ``folder`` and return how to start it.

    ``environment`` is passed on; a region is added where the AWS SDK would look for one and find none.
    """
    written = folder / "mld.properties"
    logback = folder / "logback.xml"
    written.write_text(as_text(properties), "ascii")
    logback.write_text(LOGBACK_XML, "utf-8")
    emulated = properties.get("kinesisEndpoint", "").startswith("http://")
    arguments = (
        *JVM_OPTIONS,
        *(EMULATOR_OPTIONS if emulated else ()),
        # From the first line on, not only from the moment at which the daemon reads its arguments.
        f"-Dlogback.configurationFile={logback}",
        *java_options,
        "-cp",
        os.pathsep.join(map(str, jars)),
        MAIN_CLASS,
        "--properties-file",
        str(written),
        "--log-configuration",
        str(logback),
    )
    return Launch(java, arguments, {"AWS_REGION": properties["regionName"], **environment})
