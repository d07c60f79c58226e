"""Chooses the bridge that joins the daemon's child pipes to the server: the smallest that works on this machine.

``deploy/bridge.c``, compiled at start, costs 0.1 MiB of private memory a shard; ``deploy/bridge.py``, which needs no
compiler, 2.7 MiB. Their behaviour is the same.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mldserver.errors import ConfigError
from mldserver.kcl.parts import deploy_file

if TYPE_CHECKING:
    from mldserver.config import Address

__all__ = ["bridge_command", "compiled", "scripted"]

COMPILERS: Final = ("cc", "gcc", "clang")
COMPILE_SECONDS: Final = 30
USAGE_EXIT: Final = 2
"""What a bridge without an address exits with."""


def bridge_command(address: Address, folder: Path) -> str:
    """Return the bridge's command line as ``executableName`` wants it; ``folder`` must live as long as the daemon.

    Raises ConfigError when the address has a space in it: the daemon splits the line on spaces and knows no quotes.
    """
    target = str(address)
    if len(target.split()) != 1:
        raise ConfigError(f"The address {target!r} has a space in it.", advice="Use another path.")
    return " ".join([*(compiled(folder) or scripted(folder)), target])


def compiled(folder: Path) -> tuple[str, ...] | None:
    """Return the compiled bridge's command; None without a compiler, or where its output does not run."""
    bridge = folder / "bridge"
    for compiler in filter(None, map(shutil.which, COMPILERS)):
        command = [compiler, "-O2", "-o", str(bridge), str(deploy_file("bridge.c"))]
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            _quietly(command)
            # It says how it is used, if it runs at all here (the folder may forbid it).
            if _quietly([str(bridge)]) == USAGE_EXIT:
                return (str(bridge),)
    return None


def scripted(folder: Path) -> tuple[str, ...]:
    """Return the Python bridge's command, under paths without spaces."""
    python = _without_spaces(Path(sys.executable), folder / "python")
    script = _without_spaces(deploy_file("bridge.py"), folder / "bridge.py")
    return (str(python), "-ISE", str(script))


def _without_spaces(path: Path, link: Path) -> Path:
    if len(str(path).split()) == 1:
        return path
    link.symlink_to(path)
    return link


def _quietly(command: list[str]) -> int:
    """Run a command to its end and return its exit code."""
    done = subprocess.run(  # noqa: S603  # a compiler from PATH over our own source
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=COMPILE_SECONDS,
        check=False,
    )
    return done.returncode
