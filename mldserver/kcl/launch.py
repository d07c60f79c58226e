"""What the daemon is made of on this machine (Java, the KCL's jars, our files, the bridge), and its command line.

The bridge joins the daemon's child pipes to the server. ``deploy/bridge.c``, compiled at start, costs 0.1 MiB of private
memory a shard; ``deploy/bridge.py``, which needs no compiler, 2.7 MiB. Over TLS they cost 1.1 and 6.7 MiB, and the first
needs OpenSSL's headers. Their behaviour is the same.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import mldserver
from mldserver.base.java_properties import as_text
from mldserver.children import parent_death
from mldserver.config.kinds import Address
from mldserver.errors import ConfigError, InternalError, JavaError, OperatorError
from mldserver.kcl.log_filter import LOGBACK_XML
from mldserver.spark.java import Java, probe

MAIN_CLASS: Final = "software.amazon.kinesis.multilang.MultiLangDaemon"
TETHER: Final = Path(parent_death.__file__)
JVM_OPTIONS: Final = (
    # Non-ASCII partition keys become "?" without it (JDK < 18).
    "-Dfile.encoding=UTF-8",
    # A daemon that is out of memory is better started afresh than kept half alive.
    "-XX:+ExitOnOutOfMemoryError",
    # Without it the JVM keeps counters in a file in /tmp, which stays there when it is killed.
    "-XX:+PerfDisableSharedMem",
)
EMULATOR_OPTIONS: Final = ("-Daws.cborEnabled=false",)
"""Emulators of Kinesis speak JSON only."""

MFD_NOEXEC_SEAL: Final = 0x08
MFD_EXEC: Final = 0x10
"""Linux 6.3's, which Python has no names for. Where ``vm.memfd_noexec`` is set, a file that does not say which it is
cannot be executed, or is not had at all."""


@dataclass(frozen=True, slots=True)
class Files:
    """Files for the daemon that no other user can read, under paths without a space.

    On Linux they are memory of this process: they are gone however it ends.
    """

    folder: Path | None
    """Where they are kept; None: in memory."""
    stack: contextlib.ExitStack
    """At whose end those in memory are gone."""

    def add(self, name: str, content: bytes, *, executable: bool = False) -> str:
        """Return the path of a new file. Raises PermissionError where this host lets nothing in memory be executed."""
        mode = 0o700 if executable else 0o600
        if self.folder is not None:
            path = self.folder / name
            path.write_bytes(content)
            path.chmod(mode)
            return str(path)
        try:
            kind = MFD_EXEC if executable else MFD_NOEXEC_SEAL
            writing = os.memfd_create(f"mldserver-{name}", os.MFD_CLOEXEC | kind)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            writing = os.memfd_create(f"mldserver-{name}", os.MFD_CLOEXEC)  # a kernel before 6.3
        with os.fdopen(writing, "wb") as file:
            file.write(content)
            os.fchmod(writing, mode)
            # What is open for writing cannot be executed.
            reading = os.open(f"/proc/self/fd/{writing}", os.O_RDONLY | os.O_CLOEXEC)
            self.stack.callback(os.close, reading)
        # The process id, not "self": the daemon's children close what they inherit.
        return f"/proc/{os.getpid()}/fd/{reading}"


@contextlib.contextmanager
def private_files() -> Iterator[Files]:
    """Give files that are gone at the end of the context."""
    with contextlib.ExitStack() as stack:
        folder = None
        if not hasattr(os, "memfd_create"):
            place = tempfile.gettempdir()
            where = "/tmp" if len(place.split()) != 1 else place  # noqa: S108  # mkdtemp is safe anywhere
            temporary = tempfile.TemporaryDirectory(prefix="mldserver-kcl-", dir=where)
            folder = Path(stack.enter_context(temporary))
        yield Files(folder, stack)


def prepare(
    files: Files,
    *,
    java: str,
    jars: Sequence[Path],
    properties: Mapping[str, str],
    java_options: Sequence[str] = (),
    environment: Mapping[str, str],
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Write the daemon's ``files`` and return how to start it: command and environment.

    The command ends with this process, even when this process is killed.
    ``environment`` is passed on; a region is added where the AWS SDK would look for one and find none.
    """
    written = files.add("mld.properties", as_text(properties).encode("ascii"))
    logback = files.add("logback.xml", LOGBACK_XML.encode())
    emulated = properties.get("kinesisEndpoint", "").startswith("http://")
    command = (
        *(sys.executable, "-ISE", str(TETHER), str(os.getpid()), java),
        *JVM_OPTIONS,
        *(EMULATOR_OPTIONS if emulated else ()),
        # From the first line on, not only from the moment at which the daemon reads its arguments. Logback wants a name
        # that ends with "xml"; as a URL it may have one, which the file system does not see.
        f"-Dlogback.configurationFile=file:{logback}#.xml",
        *java_options,
        "-cp",
        os.pathsep.join(map(str, jars)),
        MAIN_CLASS,
        "--properties-file",
        written,
        "--log-configuration",
        logback,
    )
    return command, {"AWS_REGION": properties["regionName"], **environment}


def find_jars(package: str = "amazon_kclpy") -> tuple[Path, ...]:
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


COMPILERS: Final = ("cc", "gcc", "clang")
COMPILE_SECONDS: Final = 30
COMPILE: Final = 'folder=$(mktemp -d) && TMPDIR=$folder "$0" -O2 -o "$folder/bridge" "$@" && cat "$folder/bridge"; rm -rf "$folder"'
"""A shell's, so that it removes what compilers leave lying though this process be killed meanwhile."""
USAGE_EXIT: Final = 2
"""What a bridge without an address exits with."""


def bridge_program(files: Files, *, tls: bool = False) -> tuple[str, ...]:
    """Return the command of the bridge, compiled if possible; ``files`` must live as long as the daemons.

    Raises ConfigError if only the script can be used, and this Python's path has a space.
    """
    return compiled(files, tls=tls) or scripted(files)


def bridge_command(
    program: Sequence[str], address: Address, tls: Sequence[Path] = (), secret: Path | None = None
) -> str:
    """Return the bridge's command line as ``executableName`` wants it. ``program``: from ``bridge_program``.

    ``tls``: the authority of the server's certificate, the bridge's own, and its key; none: clear text.
    ``secret``: the file of the secret that it shows the server.

    Raises ConfigError when a path in it has a space: the daemon splits the line on spaces and knows no quotes.
    """
    targets = [str(address), *(str(path.absolute()) for path in (*tls, *([secret] if secret else ())))]
    for target in targets:
        if len(target.split()) != 1:
            raise ConfigError(f"The path {target!r} has a space in it.", advice="Use another path.")
    return " ".join([*program, *targets])


def compiled(files: Files, *, tls: bool = False) -> tuple[str, ...] | None:
    """Return the compiled bridge's command; None without a compiler (for ``tls`` also OpenSSL's headers), or where its output does not run.

    One that was compiled before, ``mldserver-bridge`` on PATH, is taken as it is, but not for ``tls``.
    """
    built = None if tls else shutil.which("mldserver-bridge")
    if built is not None and len(built.split()) == 1 and _run([built]).returncode == USAGE_EXIT:
        return (built,)
    for compiler in filter(None, map(shutil.which, COMPILERS)):
        command = ["/bin/sh", "-c", COMPILE, compiler, str(deploy_file("bridge.c"))]
        command += ["-DTLS", "-lssl", "-lcrypto"] if tls else []
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            program = _run(command).stdout
            if not program:
                continue
            bridge = files.add("bridge", program, executable=True)
            # It says how it is used, if it runs at all here (what is in memory may not be executed everywhere).
            if _run([bridge]).returncode == USAGE_EXIT:
                return (bridge,)
    return None


def scripted(files: Files) -> tuple[str, ...]:
    """Return the Python bridge's command. Raises ConfigError where this Python's path has a space."""
    python = sys.executable
    if len(python.split()) != 1:
        python = f"/proc/{os.getpid()}/exe"
        if not os.path.exists(python):  # noqa: PTH110  # it is no path of the file system
            raise ConfigError(
                f"The path of Python, {sys.executable}, has a space in it.", advice="Install a C compiler."
            )
    return (python, "-ISE", files.add("bridge.py", deploy_file("bridge.py").read_bytes()))


def _run(command: list[str]) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(  # noqa: S603  # a compiler from PATH over our own source
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        timeout=COMPILE_SECONDS,
        check=False,
    )
