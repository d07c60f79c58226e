"""What belongs to the start and the end of a driver's process: its folders, its start message, the memory for it, its report."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import structlog

from mldserver.children.process import available_bytes, resident_bytes
from mldserver.spark.driver_messages import StartSession
from mldserver.spark.driver_session import Life
from mldserver.spark.java import Java, archive_path

log = structlog.get_logger("mldserver")

_ROOM: Final = 1.25
"""A second driver starts while the present one runs if so many times the memory of the present one is free."""

_SCRATCH: Final = "spark-"
"""How the names of the drivers' scratch directories begin."""


def plan_start(
    setup: StartSession, work_dir: Path | None, cache_dir: Path | None, java: Java | None, train: Path | None
) -> tuple[StartSession, Path | None]:
    """Return the start message of a driver, and the path of the missing class archive. Blocking.

    The path is None if the archive exists, or if none is used (``cache_dir`` is None). With ``train``, the driver only makes
    the archive at that path and runs no job. Makes the driver's scratch directory; raises OSError if that fails.
    """
    archive, missing_archive = train, None
    if archive is None and java is not None and cache_dir is not None:
        path = archive_path(cache_dir, java, setup.conf, os.environ, quick=setup.quick)
        # `os.path.isfile` is also False if a systemd unit hides the home directory: `Path.is_file` would raise.
        archive, missing_archive = (path, None) if os.path.isfile(path) else (None, path)  # noqa: PTH113  # see above
    if work_dir is not None:
        work_dir.mkdir(parents=True, exist_ok=True)
    scratch = tempfile.mkdtemp(prefix=_SCRATCH, dir=work_dir)
    start = msgspec.structs.replace(setup, scratch=scratch, archive=None if archive is None else str(archive))
    if train is not None:
        start = msgspec.structs.replace(start, train=True, master="local[1]", own_umask=True)
    return start, missing_archive


def own_folder(parent: Path) -> Path:
    """Return this process's folder for its drivers' scratch directories. Other processes on this host have other folders."""
    return parent.absolute() / f"{socket.gethostname()}-{os.getpid()}"


def remove_old_folders(own: Path) -> None:
    """Remove what dead processes of this host left next to ``own_folder``, and what an earlier one left there. Blocking."""
    for folder in own.parent.glob("*"):
        host, _, pid = folder.name.rpartition("-")
        if folder == own or (host == socket.gethostname() and pid.isdecimal() and not _lives(int(pid))):
            shutil.rmtree(folder, ignore_errors=True)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it is another user's
        return True
    return True


def remove_old_scratch(work_dir: Path | None, living: list[Life]) -> None:
    """Remove scratch directories of drivers whose server was killed. The directory is this server's own. Blocking."""
    names = tuple(Path(life.start.scratch).name for life in living)
    for left in [] if work_dir is None else work_dir.glob(f"{_SCRATCH}*"):
        if not left.name.startswith(names):
            shutil.rmtree(left, ignore_errors=True)


def has_room_beside(life: Life) -> bool:
    """Whether this machine has the memory for another driver like one that runs; False if that is not known."""
    pids = [life.child.pid]
    if life.started is not None and life.started.jvm_pid is not None:
        pids.append(life.started.jvm_pid)
    available = available_bytes()
    return available is not None and available > _ROOM * sum(resident_bytes(pid) or 0 for pid in pids)


def report_of(life: Life) -> Callable[[float], None]:
    """Return what logs the end of a driver, given the seconds until the next start."""
    if life.jvm_exit_code is not None:
        return partial(log_lost, life.reason(), life.jvm_exit_code, "jvm")
    return partial(log_lost, life.reason(), life.child.exit_code, "driver")


def log_lost(reason: str, exit_code: int | None, who: str, delay_seconds: float) -> None:
    """Log that a driver has ended. ``who``: "jvm" if that died first, else "driver"."""
    log.error("spark.lost", delay_seconds=delay_seconds, who=who, reason=reason, exit_code=exit_code)
