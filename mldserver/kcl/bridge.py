"""Chooses the bridge that joins the daemon's child pipes to the server: the smallest that works on this machine.

``deploy/bridge.c``, compiled at start, costs 0.1 MiB of private memory a shard; ``deploy/bridge.py``, which needs no
compiler, 2.7 MiB. Their behaviour is the same.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Final

from mldserver.errors import ConfigError
from mldserver.kcl.launch import deploy_file

if TYPE_CHECKING:
    from mldserver.config import Address
    from mldserver.kcl.launch import Files

COMPILERS: Final = ("cc", "gcc", "clang")
COMPILE_SECONDS: Final = 30
COMPILE: Final = 'folder=$(mktemp -d) && TMPDIR=$folder "$0" -O2 -o "$folder/bridge" "$1" && cat "$folder/bridge"; rm -rf "$folder"'
"""A shell's, so that it removes what compilers leave lying though this process be killed meanwhile."""
USAGE_EXIT: Final = 2
"""What a bridge without an address exits with."""


def bridge_command(address: Address, files: Files) -> str:
    """Return the bridge's command line as ``executableName`` wants it; ``files`` must live as long as the daemon.

    Raises ConfigError when a path in it has a space: the daemon splits the line on spaces and knows no quotes.
    """
    target = str(address)
    if len(target.split()) != 1:
        raise ConfigError(f"The address {target!r} has a space in it.", advice="Use another path.")
    return " ".join([*(compiled(files) or scripted(files)), target])


def compiled(files: Files) -> tuple[str, ...] | None:
    """Return the compiled bridge's command; None without a compiler, or where its output does not run."""
    for compiler in filter(None, map(shutil.which, COMPILERS)):
        command = ["/bin/sh", "-c", COMPILE, compiler, str(deploy_file("bridge.c"))]
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
    """Run a command to its end."""
    return subprocess.run(  # noqa: S603  # a compiler from PATH over our own source
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        timeout=COMPILE_SECONDS,
        check=False,
    )
