"""Local files and folders that outlive a power cut, and two folders that change places in one step. Blocking.

What is written is safe only once it was synced itself, and every entry that leads to it.

A rename cannot replace a folder that is not empty, and deleting it first would show readers nothing for a moment.
Linux swaps two with ``renameat2(RENAME_EXCHANGE)`` (Linux 3.15; glibc 2.28; ext4, xfs, btrfs, tmpfs, overlayfs and
others). Python has no wrapper for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
from pathlib import Path


def sync(path: Path) -> None:
    """Force a file, or what a folder names, to disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Make a folder, and sync it with every entry that leads to it. Raises OSError.

    Syncs an existing folder too: the process that made it may have died before the sync.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for each in (folder, *folder.absolute().parents):
        try:
            sync(each)
        except PermissionError:
            return  # where this user may not even look, nothing of it was made
        if each.is_mount():
            return


def make_private(folder: Path) -> None:
    """Make a folder that only its user may enter. One that is there keeps its mode: an operator may share it. Raises OSError."""
    with contextlib.suppress(FileExistsError):
        try:
            folder.mkdir(0o700)
        except FileNotFoundError:
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir(0o700)


def make_private_file(path: Path) -> None:
    """Make an empty file that only its user may read and write. One that is there stays as it is. Raises OSError."""
    # A file that is there is not opened: at the close, this process would lose all its locks on it (POSIX), and SQLite with
    # another connection to it would damage it.
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))


def umask() -> int:
    """Return this process's umask. A file that another thread makes meanwhile is for its user alone."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def others_can_read(path: Path) -> bool:
    """Return whether any user of the host can read a file, or list a folder, and come to it; False where it is not there."""
    try:
        whole = path.resolve(strict=True)
        above = (folder.stat().st_mode & stat.S_IXOTH for folder in whole.parents)
        return bool(whole.stat().st_mode & stat.S_IROTH) and all(above)
    except OSError:
        return False


_HERE = -100
"""AT_FDCWD: paths are absolute, or relative to the working directory."""
_EXCHANGE = 2
"""RENAME_EXCHANGE of linux/fs.h."""


def exchange(one: str, other: str) -> None:
    """Swap what two paths name, atomically. Both must exist, on one file system.

    Raises OSError; ENOSYS or EINVAL where the system or the file system cannot do it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), one, None, other)
    if libc.renameat2(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), one, None, other)
